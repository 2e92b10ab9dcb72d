"""Reads the rows of each cell once, and reduces them to the few hundred numbers that figures show."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt
import torch

from come.bench.cell import Cell
from come.bench.folder import RunFolder
from come.bench.record import COLUMNS, Record, Rows
from come.bench.statistics import by_domain
from come.metrics import PROBABILITIES, SCORES, accuracy, dominant_share, miou, risk_by_coverage, trajectory
from come.metrics.segmentation import binned_accuracy

Numbers = npt.NDArray[np.float64]

KINDS = ("right", "wrong", "outlier")  # predicted right, predicted wrong, without a label
BINS = 30  # of the confidence, from 0 to 1; two of them are one bin of the calibration error
COVERAGES = np.linspace(0.025, 1, 40)  # at which the risk is read
PARTS = 24  # a domain is cut into at most so many, to show how it went
MOST = 20  # segments that are drawn; a page has up to 100 kB for each


@dataclass(frozen=True)
class Piece:
    """One domain of one finished cell."""

    pair: tuple[str, str]  # method and objective
    seed: int
    domain: str
    fresh: bool  # whether the method was reset before it
    counts: Mapping[str, Numbers]  # how many samples of each of KINDS have their confidence in each bin
    risk: Numbers  # error among the most confident samples, at each of COVERAGES
    along: Mapping[str, Numbers]  # accuracy and share of the top class in each of up to PARTS equal parts
    metric: str = "accuracy"  # or "miou", which then stands in the place of the accuracy


@dataclass(frozen=True)
class Segment:
    """The domains of one cell from one reset of the method to the next; in the standard setting, one domain."""

    pair: tuple[str, str]
    seed: int
    name: str
    path: Mapping[str, Numbers]  # `come.metrics.trajectory`, with means over a tenth of the segment
    borders: tuple[int, ...]  # samples after which the next domain begins


@dataclass(frozen=True)
class Reading:
    """What the rows of a run hold, in the order of its records."""

    pieces: Sequence[Piece]
    segments: Sequence[Segment]  # of the first MOST names
    names: Sequence[str]  # of all segments


def read(folder: RunFolder, records: Iterable[Record]) -> Reading:
    """Read the rows of all records; domains without samples are left out."""
    pieces: list[Piece] = []
    segments: list[Segment] = []
    names: dict[str, int] = {}
    for record in records:
        cell, domains, score = record.cell, record.result.domains, record.result.score
        parts = by_domain(folder.rows(record.key), len(domains))
        if cell.dense:
            pieces += [
                _dense_piece(cell, domain, part, fresh)
                for domain, part, fresh in zip(domains, parts, record.result.fresh, strict=True)
                if part
            ]
            continue
        resets = [i for i, fresh in enumerate(record.result.fresh) if fresh or not i]
        for begin, end in pairwise([*resets, len(domains)]):
            chosen = {domains[i]: parts[i] for i in range(begin, end) if parts[i]}
            if not chosen:
                continue
            name = domains[begin]
            if end - begin > 1:
                name += f" to {domains[end - 1]}, {end - begin} domains without a reset"
            if names.setdefault(name, len(names)) < MOST:
                whole = {column: torch.cat([part[column] for part in chosen.values()]) for column in COLUMNS}
                window = max(cell.batch_size, len(whole["label"]) // 10)
                found = trajectory(whole, batch_size=cell.batch_size, window=window, score=score)
                path = {column: values.double().numpy() for column, values in found.items()}
                borders = tuple(accumulate(len(part["label"]) for part in chosen.values()))[:-1]
                segments.append(Segment(cell.pair, cell.seed, name, path, borders))
            for place, (domain, part) in enumerate(chosen.items()):
                numbers = _counts(part, score), _risk(part, score), _along(part, cell.batch_size)
                pieces.append(Piece(cell.pair, cell.seed, domain, not place, *numbers))
    return Reading(pieces, segments, list(names))


def _dense_piece(cell: Cell, domain: str, rows: Rows, fresh: bool) -> Piece:
    """Of pixels: mIoU in the place of the accuracy, confidence by softmax, in bins twice as wide."""
    bins, size = rows["softmax"].double().sum(dim=0), len(rows["index"])
    wide = torch.cat([bins[:14], bins[14:].sum(dim=0, keepdim=True)]).numpy()
    counts = {kind: np.zeros(BINS) for kind in KINDS}
    counts["right"][::2], counts["wrong"][::2] = wide[:, 1], wide[:, 0] - wide[:, 1]
    parts = min(PARTS, -(-size // cell.batch_size))
    cuts = [
        rows["confusion"][begin:end].sum(dim=0) for begin, end in pairwise(size * i // parts for i in range(parts + 1))
    ]
    shares = [(one.sum(dim=0).max() / one.sum().clamp_min(1)).item() for one in cuts]
    along = {"accuracy": np.array([miou(one).item() for one in cuts]), "dominant_share": np.array(shares)}
    risk = np.array([1 - binned_accuracy(bins, float(coverage)) for coverage in COVERAGES])
    return Piece(cell.pair, cell.seed, domain, fresh, counts, risk, along, "miou")


def _counts(rows: Rows, score: str) -> dict[str, Numbers]:
    outlier, right = rows["label"] < 0, rows["prediction"] == rows["label"]
    masks = dict(zip(KINDS, (right & ~outlier, ~right & ~outlier, outlier), strict=True))
    # energy and entropy have no bins from 0 to 1
    confidence = SCORES[score if score in PROBABILITIES else "confidence"](rows).clamp(0, 1)
    return {kind: np.histogram(confidence[m].numpy(), BINS, (0, 1))[0].astype(float) for kind, m in masks.items()}


def _risk(rows: Rows, score: str) -> Numbers:
    right = (rows["label"] >= 0) & (rows["prediction"] == rows["label"])
    risk = risk_by_coverage(SCORES[score](rows), right)
    return np.array([risk[max(1, math.ceil(coverage * len(risk) - 1e-9)) - 1].item() for coverage in COVERAGES])


def _along(rows: Rows, batch_size: int) -> dict[str, Numbers]:
    size = len(rows["label"])
    parts = min(PARTS, -(-size // batch_size))
    found = []
    for begin, end in pairwise(size * i // parts for i in range(parts + 1)):
        prediction = rows["prediction"][begin:end]
        found.append((accuracy(prediction, rows["label"][begin:end]), dominant_share(prediction)))
    return dict(zip(("accuracy", "dominant_share"), np.array(found).T, strict=True))


def over_seeds(segments: Sequence[Segment], name: str) -> tuple[Numbers, Numbers, Numbers | None]:
    """Samples seen, the mean over seeds of a column of the paths there, and its deviation with several seeds."""
    samples = segments[0].path["samples"]
    # unreadable images make one stream a little shorter than the others
    values = np.stack([np.interp(samples, one.path["samples"], one.path[name]) for one in segments])
    values[~np.isfinite(values)] = np.nan
    return samples, values.mean(axis=0), values.std(axis=0, ddof=1) if len(values) > 1 else None
