"""What is kept of a finished cell: a record, typed, and a row for every sample.

A record may have been changed by anyone since it was written, so all of it is checked when it is read: types and limits by
pydantic, the rest here. Reports and comparisons rely on it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Annotated, Any

import torch
from pydantic import Field, Strict, model_validator
from torch import Tensor

from come.bench.cell import Cell, Description, Text, Texts
from come.errors import one_line
from come.metrics.segmentation import BINS

Rows = dict[str, Tensor]  # one entry per sample in each of `COLUMNS`

COLUMNS: Mapping[str, torch.dtype] = {
    "index": torch.int32,
    "label": torch.int32,  # -1: outlier
    "prediction": torch.int32,
    "confidence": torch.float32,  # the objective's own; what follows is of the logits alone
    "softmax": torch.float32,
    "belief": torch.float32,
    "uncertainty": torch.float32,
    "entropy": torch.float32,
    "energy": torch.float32,
    "norm": torch.float32,
    "nll": torch.float32,
    "brier": torch.float32,
    "finite": torch.bool,
    "used": torch.bool,
    "domain": torch.int16,  # number of the episode
    "kind": torch.int16,  # place in the stream's shifts
}
DENSE_COLUMNS: Mapping[str, torch.dtype] = {
    "index": torch.int32,
    "confusion": torch.int32,  # (K, K) of an image: pixels by label and prediction, see `come.metrics.confusion`
    "softmax": torch.float32,  # (55, 3): its pixels by this confidence, see `come.metrics.binned`
    "belief": torch.float32,
    "finite": torch.bool,
    "used": torch.float32,  # share of its positions
    "domain": torch.int16,
    "kind": torch.int16,
}
"""Where each pixel gets a class."""

PICTURES: Mapping[str, torch.dtype] = {
    "shown_image": torch.uint8,  # (3, H, W)
    "shown_label": torch.int16,  # (H, W), as what follows
    "shown_prediction": torch.int16,
    "shown_doubt": torch.uint8,  # 255 times what the largest probability leaves
}
"""Of a few of these images, the last ones; not one for each sample."""

BYTES = {
    "classification": sum(kind.itemsize for kind in COLUMNS.values()),
    "segmentation": 4 * (19 * 19 + 2 * 3 * BINS),  # with 19 classes
}
"""Of a row, about."""

Amount = Annotated[float, Field(ge=0, le=1e15)]
Number = Annotated[float, Field(ge=-1e15, le=1e15)]
Whole = Annotated[int, Field(ge=0, le=10**12)]


Event = Annotated[tuple[Text, Whole], Strict(False)]


class Machine(Description):
    """Where a result was made."""

    versions: dict[Text, Text]
    device: Text
    threads: Whole
    jobs: Whole = 1  # processes that worked on the run at once
    streams: Whole = 1
    """Cells that ran at once as streams of one fleet: each took its part of the time, and memory is that of all."""
    load: Amount  # cores that other programs kept busy meanwhile


class Result(Description):
    """What was found, and what it took."""

    domains: Texts
    fresh: Annotated[tuple[bool, ...], Strict(False)]  # for each domain, whether the method was reset before it
    metrics: dict[Text, dict[Text, Number]]  # by domain and name, see `come.metrics.summary`
    samples: Whole
    bad_images: Whole = 0
    health: dict[Text, Any] = Field({})
    events: Annotated[tuple[Event, ...], Strict(False)] = ()  # kind and step of what the guard did
    lr: Amount | None = None
    seconds: Amount
    seconds_waiting_for_data: Amount = 0.0
    peak_memory_mb: Amount
    score: Text = "confidence"  # what the FPR ranks samples by, a name in `come.metrics.SCORES`

    @model_validator(mode="after")
    def _check(self) -> Result:
        if len(self.fresh) != len(self.domains) or set(self.metrics) != set(self.domains):
            raise ValueError("domains, fresh and metrics must name the same domains")
        return self

    @property
    def busy(self) -> float:
        """Seconds without those spent waiting for data."""
        return max(0.0, self.seconds - self.seconds_waiting_for_data)


class Record(Description):
    """A finished cell: its configuration and all that was found."""

    cell: Cell
    result: Result
    machine: Machine

    @property
    def key(self) -> str:
        """Names the cell."""
        return self.cell.key

    def encoded(self) -> str:
        """As JSON, the same text for the same record."""
        return json.dumps(self.model_dump(), sort_keys=True)


class Failure(Description):
    """A cell that could not be finished, and why.

    Example:
        >>> cell = Cell(method="tent", objective="em", corruptions=("fog",), size=100)
        >>> str(Failure(cell=cell, reason="RuntimeError: out of memory"))
        'tent + em, fog, seed 0: RuntimeError: out of memory'
    """

    cell: Cell
    reason: Text

    @classmethod
    def of(cls, cell: Cell, error: Exception) -> Failure:
        """What an error says, on one line."""
        return cls(cell=cell, reason=one_line(error, kind=True))

    def __str__(self) -> str:
        """On one line."""
        return f"{self.cell.title}: {self.reason}"


def digest(text: str, rows: Rows) -> str:
    """Checksum of a record and its rows."""
    found = hashlib.sha256(text.encode())
    for name in sorted(rows):
        column = rows[name].contiguous()
        found.update(f"{name} {column.dtype} {tuple(column.shape)}".encode())
        found.update(column.view(torch.uint8).numpy().data)
    return found.hexdigest()


def check_rows(record: Record, rows: Rows) -> None:
    """Raise a ValueError unless the rows of a record are what a report can rely on."""
    found, dense = {name: column.dtype for name, column in rows.items()}, record.cell.dense
    columns = {**DENSE_COLUMNS, **PICTURES} if dense else COLUMNS
    if found != columns:
        wrong = next(name for name in (*columns, *found) if found.get(name) != columns.get(name))
        raise ValueError(f"column {wrong} of the rows must be {columns.get(wrong)}, got {found.get(wrong)}")
    n = record.result.samples
    shapes = {tuple(column.shape) for column in rows.values()}
    if dense:
        _check_dense_shapes(n, {name: tuple(column.shape) for name, column in rows.items()})
    elif shapes != {(n,)} or not n:
        raise ValueError(f"the rows must have the shape ({n or 'at least 1'},), got {sorted(shapes)}")
    for name, column in rows.items():
        # logits that reach infinity have an infinite energy and norm
        if column.is_floating_point() and (
            column.isnan().any() if name in ("energy", "norm") else not column.isfinite().all()
        ):
            raise ValueError(f"column {name} of the rows must be finite")
    low, high = int(rows["domain"].min()), int(rows["domain"].max())
    if low < 0 or high >= len(record.result.domains):
        raise ValueError(
            f"column domain of the rows must be from 0 to {len(record.result.domains) - 1}, got {low} to {high}"
        )


def _check_dense_shapes(n: int, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Of `DENSE_COLUMNS` for n samples, and of `PICTURES` for some of them."""
    classes, shown = shapes["confusion"][-1:], shapes["shown_image"]
    inner = {"confusion": classes * 2, "softmax": (BINS, 3), "belief": (BINS, 3)}
    wanted = {name: (n, *inner.get(name, ())) for name in DENSE_COLUMNS}
    wanted |= dict.fromkeys(PICTURES, (*shown[:1], *shown[2:])) | {"shown_image": (*shown[:1], 3, *shown[-2:])}
    wrong = next((name for name, shape in wanted.items() if shapes[name] != shape), None)
    if wrong is not None or not n or not classes:
        name = wrong or "index"
        raise ValueError(f"column {name} of the rows must have the shape {wanted[name]}, got {shapes[name]}")
