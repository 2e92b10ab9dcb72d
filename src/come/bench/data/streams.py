"""A stream, written down: which images, in which order, corrupted how. Two people with one manifest run the same numbers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

from come.corruptions import check_choice
from come.errors import ConfigError, InputError, require

FORMAT = "come-stream-2"
OUTLIER = -1
"""In `Stream.kinds`: a sample of the outlier source."""
MAX_BYTES = 64 * 2**20
"""Of a manifest: enough for five million samples."""
SEEDS = range(-(2**63), 2**64)
"""What torch takes for one."""


@dataclass(frozen=True)
class Stream:
    """The order of the samples and what happens to them.

    Args:
        data: specification of the source, e.g. "glyphs".
        order: indices into the source, first to last; of an outlier, into the outlier source.
        shifts: (corruption, severity) of each kind of sample in the stream; a corruption of None is a clean image.
        kinds: for each sample its place in `shifts`, or -1 for an outlier, which is never corrupted; empty if all are 0.
        seed: of the corruption; image i is corrupted by (seed, i), wherever it stands in the order.
        domain: what the samples have in common, for tables.
        outliers: specification of the outlier source, if there are outliers.

    Example:
        >>> stream = Stream.shuffled("glyphs", 5, corruption="fog", severity=5, seed=1)
        >>> stream.order, stream.domain
        ((0, 4, 2, 3, 1), 'fog')
    """

    data: str
    order: tuple[int, ...]
    shifts: tuple[tuple[str | None, int], ...] = ((None, 5),)
    kinds: tuple[int, ...] = ()
    seed: int = 0
    domain: str = "clean"
    outliers: str | None = None

    def __post_init__(self) -> None:
        require(bool(self.shifts), "shifts", self.shifts, "a list of at least one (corruption, severity)")
        require(_whole(self.seed) and self.seed in SEEDS, "seed", self.seed, "a 64-bit integer")
        for corruption, severity in self.shifts:
            require(_whole(severity), "severity", severity, "from 1 to 5")
            if corruption is not None:
                require(isinstance(corruption, str), "a corruption", corruption, "a name, or None for a clean image")
                check_choice(corruption, severity, self.seed, None)
        if wrong := [i for i in self.order if not (_whole(i) and 0 <= i < 2**63)]:
            require(False, "an entry of order", wrong[0], "an integer >= 0")
        require(len(self.kinds) in (0, len(self.order)), "kinds", len(self.kinds), f"one for each of {len(self.order)}")
        low = OUTLIER if self.outliers is not None else 0
        if not all(_whole(k) and low <= k < len(self.shifts) for k in self.kinds):
            raise ConfigError(f"kinds holds a value outside {low} to {len(self.shifts) - 1}: a place in shifts, or -1")

    @classmethod
    def shuffled(
        cls, data: str, size: int, *, corruption: str | None, severity: int, seed: int, domain: str | None = None
    ) -> Stream:
        """All `size` samples of a source once, in an order that follows from the seed."""
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
        """Samples in the order that is given, all of one kind."""
        return cls(data, tuple(order), ((corruption, severity),), (), seed, domain or corruption or "clean")

    def kind(self, i: int) -> int:
        """What kind the sample at place `i` is."""
        return self.kinds[i] if self.kinds else 0

    def __len__(self) -> int:
        """Number of samples."""
        return len(self.order)

    def save(self, path: str | Path) -> None:
        """Write the manifest as JSON."""
        Path(path).write_text(json.dumps({"format": FORMAT, **asdict(self)}) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Stream:
        """Read a manifest that `save` wrote; it may have been changed since, or be something else."""
        try:
            with open(path, encoding="utf-8") as file:
                text = file.read(MAX_BYTES + 1)
            if len(text) > MAX_BYTES:
                raise ValueError(f"it is longer than {MAX_BYTES} characters")
            found = json.loads(text)
        except (OSError, ValueError, RecursionError) as error:
            raise InputError(f"cannot read the stream {path}: {error}; give a manifest that come wrote") from error
        known = {field.name for field in fields(cls)}
        if not isinstance(found, dict) or found.pop("format", None) != FORMAT or set(found) != known:
            raise InputError(f"{path} is not a stream of format {FORMAT!r}; give a manifest that come wrote")
        if not all(isinstance(found[key], list) for key in ("order", "kinds", "shifts")):
            raise InputError(f"the order, kinds or shifts in {path} are not lists")
        texts: tuple[Any, ...] = (
            found["data"],
            found["domain"],
            "" if found["outliers"] is None else found["outliers"],
        )
        shaped = all(isinstance(s, list) and len(s) == 2 for s in found["shifts"])
        if not shaped or not all(isinstance(text, str) for text in texts):
            raise InputError(f"{path} holds values of the wrong kind; give a manifest that come wrote")
        shifts = tuple((name, severity) for name, severity in found["shifts"])
        return cls(**{**found, "order": tuple(found["order"]), "kinds": tuple(found["kinds"]), "shifts": shifts})


def _whole(value: object) -> bool:
    """Whether it is an int; True is one in Python, and none in a manifest."""
    return isinstance(value, int) and not isinstance(value, bool)


def shuffle(values: Sequence[int], seed: int) -> list[int]:
    """`values` in an order that follows from the seed.

    Example:
        >>> shuffle([10, 20, 30], 0)
        [30, 10, 20]
    """
    order = torch.randperm(len(values), generator=torch.Generator().manual_seed(seed)).tolist()
    return [values[i] for i in order]
