"""`Stream`, the order of samples written down: which images, in which order, corrupted how. The same file, the same run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import BeforeValidator, Field, Strict, model_validator
from torch import Tensor

from come.bench.cell import Description, Seed, Severity, Text, digest
from come.bench.data.reading import as_input_error, read_regular
from come.corruptions import check_choice
from come.errors import ConfigError, require
from come.seeds import derived_seed

FORMAT = "come-stream-2"
CONDITIONS = ("fog", "night", "rain", "snow")  # weather of ACDC, in its order; only its files hold night and rain
OUTLIER = -1  # in `Stream.kinds`: a sample of the outlier source, which is never corrupted
MAX_BYTES = 64 * 2**20  # of a stream file: enough for five million samples
MAX_SHIFTS = 1000


def _few(shifts: Any) -> Any:
    if isinstance(shifts, (list, tuple)) and not 0 < len(shifts) <= MAX_SHIFTS:
        raise ValueError(f"must be a list of 1 to {MAX_SHIFTS} (corruption, severity)")
    return shifts


Shift = Annotated[tuple[Text | None, Severity], Strict(False)]
Indices = Annotated[tuple[Annotated[int, Field(ge=0, lt=2**63)], ...], Strict(False)]


class Stream(Description):
    """The order of the samples of a run and their corruptions, written down; can be saved as JSON (not a CUDA stream).

    `shifts` has the (corruption, severity) of each kind of sample; a corruption of None is a clean image. `then` has a second
    one for each kind, or is empty.

    Example:
        >>> stream = Stream.shuffled("fashion", 5, corruption="fog", severity=5, seed=1)
        >>> stream.order, stream.domain
        ((0, 4, 2, 3, 1), 'fog')
        >>> len(stream.digest)
        16
    """

    data: Text  # specification of the source, e.g. "fashion"
    order: Indices  # into the source, first to last; of an outlier, into the outlier source
    shifts: Annotated[tuple[Shift, ...], Strict(False), BeforeValidator(_few)] = ((None, 5),)
    then: Annotated[tuple[Shift, ...], Strict(False), BeforeValidator(lambda then: then and _few(then))] = ()
    kinds: Annotated[tuple[int, ...], Strict(False)] = ()  # places in `shifts`, or OUTLIER; empty if all are 0
    seed: Seed = 0  # of the corruption: image i is corrupted by (seed, i), wherever it is in the order
    domain: Text = "clean"  # what the samples have in common, for tables
    outliers: Text | None = None  # specification of the outlier source, if there are outliers
    format: Literal["come-stream-2"] = "come-stream-2"

    @model_validator(mode="after")
    def _check(self) -> Stream:
        for corruption, severity in (*self.shifts, *self.then):
            if corruption is not None and corruption not in CONDITIONS:
                check_choice(corruption, severity, self.seed, None)
        require(len(self.then) in (0, len(self.shifts)), "then", len(self.then), f"one for each of {len(self.shifts)}")
        require(len(self.kinds) in (0, len(self.order)), "kinds", len(self.kinds), f"one for each of {len(self.order)}")
        low, high = OUTLIER if self.outliers is not None else 0, len(self.shifts) - 1
        if self.kinds and not low <= min(self.kinds) <= max(self.kinds) <= high:
            raise ConfigError(f"kinds holds a value outside {low} to {high}: a place in shifts, or -1")
        return self

    @classmethod
    def shuffled(
        cls, data: str, size: int, *, corruption: str | None, severity: int, seed: int, domain: str | None = None
    ) -> Stream:
        """All `size` samples of a source once, in an order drawn from the seed."""
        return cls.of(data, shuffle(range(size), seed), corruption, severity, seed, domain)

    @classmethod
    def of(
        cls,
        data: str,
        order: Sequence[int],
        corruption: str | None,
        severity: int,
        seed: int,
        domain: str | None = None,
    ) -> Stream:
        """Samples in the given order, all of one kind."""
        shifts = ((corruption, severity),)
        return cls(data=data, order=tuple(order), shifts=shifts, seed=seed, domain=domain or corruption or "clean")

    def kind(self, i: int) -> int:
        """The kind of the sample at place `i`."""
        return self.kinds[i] if self.kinds else 0

    def __len__(self) -> int:
        return len(self.order)

    @property
    def digest(self) -> str:
        """16 hex digits that differ between different streams."""
        return digest(self)[:16]

    def save(self, path: str | Path) -> None:
        """Write it as JSON."""
        Path(path).write_text(self.model_dump_json() + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Stream:
        """Read a file that `save` wrote; it is checked, since it may be anything. The data that it names is not opened."""
        with as_input_error(f"cannot read the stream {path}", "give a manifest that come wrote"):
            found = json.loads(read_regular(path, MAX_BYTES))
            if not isinstance(found, dict) or set(found) != set(cls.model_fields):
                raise ValueError(f"it does not have the fields of format {FORMAT!r}")
            return cls(**found)


def shuffle(values: Sequence[int], seed: int, *purpose: object) -> list[int]:
    """`values` in an order drawn from the seed and a purpose, where one seed draws several orders.

    Example:
        >>> shuffle([10, 20, 30], 0), shuffle([10, 20, 30], 0, "outliers")
        ([30, 10, 20], [20, 30, 10])
    """
    order = torch.randperm(len(values), generator=generator(seed, *purpose)).tolist()
    return [values[i] for i in order]


def generator(seed: int, *purpose: object) -> torch.Generator:
    """A generator of the seed; those of different purposes are independent."""
    return torch.Generator().manual_seed(derived_seed(seed, *purpose) if purpose else seed)


def spread(labels: Tensor, count: int, seed: int) -> list[int]:
    """Places of `count` of the labels (N,), ascending: of each class its share, rounded up or down; drawn from the seed.

    Example:
        >>> spread(torch.tensor([7, 7, 7, 7, 5, 5]), 3, seed=0)
        [1, 3, 4]
    """
    draw = generator(seed, "samples")
    order = torch.randperm(len(labels), generator=draw)
    classes, number = torch.unique(labels[order], return_inverse=True)
    order = order[torch.randperm(len(classes), generator=draw)[number].argsort(stable=True)]  # class by class
    first = torch.rand((), generator=draw, dtype=torch.float64)
    places = ((torch.arange(count) + first) * (len(labels) / count)).long()  # every N/count-th
    return sorted(order[places.clamp(max=len(labels) - 1)].tolist())
