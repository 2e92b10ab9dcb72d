"""What is drawn of a run: the rows of each cell, read once and reduced to a few hundred numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt
import torch

from come.bench.folder import RunFolder
from come.bench.record import COLUMNS, Record, Rows
from come.bench.statistics import by_domain
from come.metrics import PROBABILITIES, SCORES, accuracy, dominant_share, risk_by_coverage, trajectory

Numbers = npt.NDArray[np.float64]

KINDS = ("right", "wrong", "outlier")
"""Samples with their label predicted, with another, and with none."""

BINS = 30
"""Of the confidence, from 0 to 1; two of them are one of the calibration error."""

COVERAGES = np.linspace(0.025, 1, 40)
"""At which the risk is read."""

PARTS = 24
"""Into which a domain is cut to show how it went, at most."""

MOST = 20
"""Segments that are drawn; a page has up to 100 kB for each."""


@dataclass(frozen=True)
class Piece:
    """One domain of one finished cell."""

    pair: tuple[str, str]
    """Method and objective."""
    seed: int
    domain: str
    fresh: bool
    """Whether the method was reset before it."""
    counts: Mapping[str, Numbers]
    """For each of KINDS, how many samples have their confidence in each bin."""
    risk: Numbers
    """The error among the most confident samples, at each of COVERAGES."""
    along: Mapping[str, Numbers]
    """Accuracy and share of the top class in each of up to PARTS equal parts."""


@dataclass(frozen=True)
class Segment:
    """The domains of one cell from one reset of the method to the next; in the standard setting, one domain."""

    pair: tuple[str, str]
    seed: int
    name: str
    path: Mapping[str, Numbers]
    """`come.metrics.trajectory`, with means over a tenth of the segment."""
    borders: tuple[int, ...]
    """Samples after which the next domain begins."""


@dataclass(frozen=True)
class Reading:
    """What was found in the rows of a run, in the order of its records."""

    pieces: Sequence[Piece]
    segments: Sequence[Segment]
    """Of MOST names."""
    names: Sequence[str]
    """Of all segments."""


def read(folder: RunFolder, records: Iterable[Record]) -> Reading:
    """Read the rows of all records; a domain without samples has nothing to show and is left out."""
    pieces: list[Piece] = []
    segments: list[Segment] = []
    names: dict[str, int] = {}
    for record in records:
        cell, domains = record.cell, record.result.domains
        parts = by_domain(folder.rows(record.key), len(domains))
        for numbers, name in _between_resets(record):
            chosen = {domains[i]: parts[i] for i in numbers if parts[i]}
            if not chosen:
                continue
            if names.setdefault(name, len(names)) < MOST:
                whole = {column: torch.cat([part[column] for part in chosen.values()]) for column in COLUMNS}
                window = max(cell.batch_size, len(whole["label"]) // 10)
                path = trajectory(whole, batch_size=cell.batch_size, window=window, score=record.result.score)
                borders = tuple(accumulate(len(part["label"]) for part in chosen.values()))[:-1]
                numpy = {column: values.double().numpy() for column, values in path.items()}
                segments.append(Segment(cell.pair, cell.seed, name, numpy, borders))
            score = record.result.score
            for place, (domain, part) in enumerate(chosen.items()):
                counts, along = _counts(part, score), _along(part, cell.batch_size)
                pieces.append(Piece(cell.pair, cell.seed, domain, not place, counts, _risk(part, score), along))
    return Reading(pieces, segments, list(names))


def _between_resets(record: Record) -> Iterator[tuple[list[int], str]]:
    """The numbers of the domains from each reset to the next, and a name for them."""
    domains, fresh = record.result.domains, record.result.fresh
    begins = [i for i, is_fresh in enumerate(fresh) if is_fresh or not i]
    for begin, end in zip(begins, [*begins[1:], len(domains)], strict=True):
        one = end - begin == 1
        name = (
            domains[begin] if one else f"{domains[begin]} to {domains[end - 1]}, {end - begin} domains without a reset"
        )
        yield list(range(begin, end)), name


def _counts(rows: Rows, score: str) -> dict[str, Numbers]:
    outlier = rows["label"] < 0
    right = rows["prediction"] == rows["label"]
    masks = dict(zip(KINDS, (right & ~outlier, ~right & ~outlier, outlier), strict=True))
    # an energy or an entropy has no bins from 0 to 1
    confidence = SCORES[score if score in PROBABILITIES else "confidence"](rows).clamp(0, 1)
    return {kind: np.histogram(confidence[m].numpy(), BINS, (0, 1))[0].astype(float) for kind, m in masks.items()}


def _risk(rows: Rows, score: str) -> Numbers:
    right = (rows["label"] >= 0) & (rows["prediction"] == rows["label"])
    risk = risk_by_coverage(SCORES[score](rows), right)
    return np.array([risk[max(1, math.ceil(coverage * len(risk) - 1e-9)) - 1].item() for coverage in COVERAGES])


def _along(rows: Rows, batch_size: int) -> dict[str, Numbers]:
    size = len(rows["label"])
    parts = min(PARTS, -(-size // batch_size))
    found: dict[str, list[float]] = {"accuracy": [], "dominant_share": []}
    for begin, end in pairwise(size * i // parts for i in range(parts + 1)):
        prediction, label = rows["prediction"][begin:end], rows["label"][begin:end]
        found["accuracy"].append(accuracy(prediction, label))
        found["dominant_share"].append(dominant_share(prediction))
    return {name: np.array(values) for name, values in found.items()}


def over_seeds(segments: Sequence[Segment], name: str) -> tuple[Numbers, Numbers, Numbers | None]:
    """Samples seen, the mean over seeds of a column of the paths there, and its deviation with several seeds."""
    samples = segments[0].path["samples"]
    # a stream with unreadable images is a little shorter than the others
    values = np.stack([np.interp(samples, one.path["samples"], one.path[name]) for one in segments])
    values[~np.isfinite(values)] = np.nan
    return samples, values.mean(axis=0), values.std(axis=0, ddof=1) if len(values) > 1 else None
