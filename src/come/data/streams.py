"""A stream, written down: which images, in which order, corrupted how. Two people with one manifest run the same numbers."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch

from come.corruptions import check_choice
from come.errors import InputError, require

FORMAT = "come-stream-1"


@dataclass(frozen=True)
class Stream:
    """The order of the samples and what happens to them.

    Args:
        data: specification of the source, e.g. "glyphs".
        order: indices into the source, first to last.
        corruption: a name of `come.corruptions.names()`, or None for clean images.
        severity: 1 to 5.
        seed: of the corruption; image i is corrupted by (seed, i), wherever it stands in the order.

    Example:
        >>> stream = Stream.shuffled("glyphs", 5, corruption="fog", severity=5, seed=1)
        >>> stream.order, stream.domain
        ((0, 4, 2, 3, 1), 'fog')
    """

    data: str
    order: tuple[int, ...]
    corruption: str | None = None
    severity: int = 5
    seed: int = 0

    def __post_init__(self) -> None:
        if self.corruption is not None:
            check_choice(self.corruption, self.severity, self.seed, None)
        require(all(isinstance(i, int) and i >= 0 for i in self.order), "order", self.order, "a list of indices >= 0")

    @classmethod
    def shuffled(cls, data: str, size: int, *, corruption: str | None, severity: int, seed: int) -> Stream:
        """All `size` samples of a source once, in an order that follows from the seed."""
        order = torch.randperm(size, generator=torch.Generator().manual_seed(seed)).tolist()
        return cls(data, tuple(order), corruption, severity, seed)

    @property
    def domain(self) -> str:
        """What the samples of the stream have in common: the corruption, or "clean"."""
        return self.corruption or "clean"

    def __len__(self) -> int:
        """Number of samples."""
        return len(self.order)

    def save(self, path: str | Path) -> None:
        """Write the manifest as JSON."""
        Path(path).write_text(json.dumps({"format": FORMAT, **asdict(self)}) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Stream:
        """Read a manifest that `save` wrote."""
        try:
            found = json.loads(Path(path).read_text())
        except (OSError, ValueError) as error:
            raise InputError(f"cannot read the stream {path}: {error}; give a manifest that come wrote") from error
        known = {field.name for field in fields(cls)}
        if not isinstance(found, dict) or found.pop("format", None) != FORMAT or set(found) != known:
            raise InputError(f"{path} is not a stream of format {FORMAT!r}; give a manifest that come wrote")
        if not isinstance(found["order"], list):
            raise InputError(f"the order in {path} is not a list of indices")
        return cls(**{**found, "order": tuple(found["order"])})
