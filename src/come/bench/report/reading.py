"""What is drawn of a run: the rows of each cell, read once and boiled down to a few hundred numbers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from come.bench.store import Record, RunFolder
from come.metrics import accuracy, dominant_share, trajectory

Numbers = npt.NDArray[np.float64]

KINDS = ("right", "wrong", "outlier")
"""Samples with their label predicted, with another, and with none."""

BINS = 25
"""Of the confidence, from 0 to 1."""

STRETCHES = 24
"""Pieces of a stream in the timeline, at most."""


@dataclass(frozen=True)
class Piece:
    """One domain of one finished cell."""

    method: str
    objective: str
    seed: int
    domain: str
    counts: Mapping[str, Numbers]
    """For each of KINDS, how many samples have their confidence in each bin."""
    stretches: Mapping[str, Numbers]
    """Accuracy and share of the top class in each of up to STRETCHES equal pieces of the stream."""

    @property
    def pair(self) -> tuple[str, str]:
        """Method and objective."""
        return self.method, self.objective


@dataclass(frozen=True)
class Way:
    """All domains of one cell between two resets of the method; in the standard setting, each is a way of its own."""

    method: str
    objective: str
    seed: int
    name: str
    path: Mapping[str, Numbers]
    """`come.metrics.trajectory`, with means over a tenth of the stream."""
    borders: tuple[int, ...]
    """Samples after which the next domain begins."""

    @property
    def pair(self) -> tuple[str, str]:
        """Method and objective."""
        return self.method, self.objective


@dataclass(frozen=True)
class Reading:
    """What was found in the rows of a run, in the order of its records."""

    pieces: Sequence[Piece]
    ways: Sequence[Way]


def read(folder: RunFolder, records: Iterable[Record]) -> Reading:
    """Read the rows of all records; a domain without samples has nothing to show and is left out."""
    pieces: list[Piece] = []
    ways: list[Way] = []
    for record in records:
        rows = folder.rows(record.key)
        if not rows:
            continue
        cell = record.cell
        about = cell["method"], cell["objective"], cell["seed"]
        for numbers, name in _legs(record):
            chosen = [_select(rows, number) for number in numbers]
            sizes = [len(part["label"]) for part in chosen]
            if not sum(sizes):
                continue
            whole = {column: torch.cat([part[column] for part in chosen]) for column in rows}
            path = _path(whole, cell["batch_size"], record.score)
            ways.append(Way(*about, name, path, tuple(accumulate(sizes))[:-1]))
            for number, part in zip(numbers, chosen, strict=True):
                if len(part["label"]):
                    domain = record.result["domains"][number]
                    pieces.append(Piece(*about, domain, _counts(part), _stretches(part, cell["batch_size"])))
    return Reading(pieces, ways)


def _select(rows: Mapping[str, Tensor], number: int) -> dict[str, Tensor]:
    here = rows["domain"] == number
    return {column: values[here] for column, values in rows.items()}


def _legs(record: Record) -> Iterator[tuple[list[int], str]]:
    """The numbers of the domains from each reset to the next, and a name for them."""
    domains: list[str] = record.result["domains"]
    fresh: list[bool] = record.result.get("fresh", [True] * len(domains))
    begins = [i for i, is_fresh in enumerate(fresh) if is_fresh or not i]
    for begin, end in zip(begins, [*begins[1:], len(domains)], strict=True):
        one = end - begin == 1
        yield (
            list(range(begin, end)),
            domains[begin] if one else f"{domains[begin]} to {domains[end - 1]}, {end - begin} in a row",
        )


def _path(rows: Mapping[str, Tensor], batch_size: int, score: str) -> dict[str, Numbers]:
    window = max(batch_size, len(rows["label"]) // 10)
    found = trajectory(rows, batch_size=batch_size, window=window, score=score)
    return {name: _numbers(column) for name, column in found.items()}


def _numbers(column: Tensor) -> Numbers:
    return column.double().numpy()


def _counts(rows: Mapping[str, Tensor]) -> dict[str, Numbers]:
    outlier = rows["label"] < 0
    right = rows["prediction"] == rows["label"]
    masks = dict(zip(KINDS, (right & ~outlier, ~right & ~outlier, outlier), strict=True))
    confidence = rows["confidence"].clamp(0, 1)
    return {kind: np.histogram(_numbers(confidence[m]), BINS, (0, 1))[0].astype(float) for kind, m in masks.items()}


def _stretches(rows: Mapping[str, Tensor], batch_size: int) -> dict[str, Numbers]:
    size = len(rows["label"])
    pieces = min(STRETCHES, -(-size // batch_size))
    found: dict[str, list[float]] = {"accuracy": [], "dominant_share": []}
    for begin, end in pairwise(size * i // pieces for i in range(pieces + 1)):
        prediction, label = rows["prediction"][begin:end], rows["label"][begin:end]
        found["accuracy"].append(accuracy(prediction, label))
        found["dominant_share"].append(dominant_share(prediction))
    return {name: np.array(values) for name, values in found.items()}


def along(ways: Sequence[Way], name: str) -> tuple[Numbers, Numbers, Numbers | None]:
    """Samples seen, the mean over seeds of a column of the paths there, and its deviation with several seeds."""
    samples = ways[0].path["samples"]
    # a stream with unreadable images is a little shorter than its sisters
    values = np.stack([np.interp(samples, way.path["samples"], way.path[name]) for way in ways])
    values[~np.isfinite(values)] = np.nan
    return samples, values.mean(axis=0), values.std(axis=0, ddof=1) if len(values) > 1 else None
