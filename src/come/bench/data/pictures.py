"""Sources of encoded pictures: decoded when they are asked for; one that cannot be is named in an error, or skipped."""

from __future__ import annotations

import contextlib
import hashlib
from abc import abstractmethod
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from come.bench.data.decoding import MAX_BYTES, decode
from come.bench.data.listing import stay_inside
from come.bench.data.preprocess import Preprocess
from come.bench.data.reading import read_regular, reason
from come.bench.data.source import Loaded, Source
from come.errors import InputError, require_int, unknown
from come.registry import parse

OnBadImage = Literal["raise", "skip"]
LOOKED_AT = 64
"""Pictures that the identity of a source follows from, about: all of a large one would take minutes to read."""


class Pictures(Source):
    """A source that knows all labels, and where each picture is.

    Args:
        name: the specification.
        preprocess: makes squares of the pictures.
        on_bad_image: "raise" names what cannot be read; "skip" leaves it out and counts it.
    """

    targets: Tensor
    """(N,) int64: the labels; -1 where there is none."""
    roots: tuple[Path, ...] = ()
    """Folders that its files are in; none is read elsewhere."""

    def __init__(self, name: str, preprocess: Preprocess, on_bad_image: OnBadImage = "raise") -> None:
        self.name, self.preprocess, self.on_bad_image = name, preprocess, on_bad_image

    def _keep_labels(self, labels: Sequence[int], classes: int | None = None) -> None:
        """Keep the labels, and how many classes there are; none if a label is negative, as those of outliers are.

        Raises:
            InputError: `classes`, which the user gave, are too few.
        """
        self.targets = torch.tensor(labels, dtype=torch.int64)
        found = max(labels) + 1 if min(labels) >= 0 else 0
        self.num_classes = found and (classes or found)
        if self.num_classes < found:
            raise InputError(f"classes must be at least {found} for {self.name}, got {classes}")

    @abstractmethod
    def _called(self, index: int, corruption: str | None, severity: int) -> str:
        """What a sample is called in an error."""

    @abstractmethod
    def _encoded(self, index: int, corruption: str | None, severity: int) -> Path | bytes:
        """Its picture: a file, or the bytes of one; raises whatever is in the way."""

    def _read(self, index: int, corruption: str | None, severity: int) -> bytes:
        """The bytes of its picture. What names a file is not trusted: it is read if it is a regular one in `roots`."""
        found = self._encoded(index, corruption, severity)
        if isinstance(found, bytes):
            return found
        stay_inside(found, self.roots)
        return read_regular(found, MAX_BYTES)

    def __len__(self) -> int:
        """Number of samples; of one corruption, where the files hold some."""
        return len(self.targets)

    def labels(self) -> Tensor:
        """The labels of all samples, (N,) int64; no picture is read for them."""
        return self.targets

    def digest(self) -> str:
        """Of all labels, and of `LOOKED_AT` pictures from the first to the last."""
        found = hashlib.sha256(self.targets.numpy().tobytes())
        shift = ((self.holds or (None,))[0], 5)
        for index in range(0, len(self), max(1, len(self) // LOOKED_AT)):
            with contextlib.suppress(Exception):  # a bad picture is met, or skipped, when it is loaded
                found.update(self._read(index, *shift))
        return found.hexdigest()[:16]

    def load(self, indices: Sequence[int], corruption: str | None = None, severity: int = 5) -> Loaded:
        """Decode; a picture that cannot be read is named in an error, or skipped and counted."""
        images, kept = [], []
        chosen = self._known(indices)
        for index in chosen:
            try:
                images.append(decode(self._read(index, corruption, severity), self.preprocess))
            except Exception as error:  # decoders raise whatever they met in the file
                if self.on_bad_image == "raise":
                    raise InputError(
                        f"cannot read {self._called(index, corruption, severity)}: {reason(error)}; fix or remove it, or pass "
                        "--on-bad-image skip"
                    ) from error
                continue
            kept.append(index)
        side = self.preprocess.size
        stacked = torch.stack(images) if images else torch.empty(0, 3, side, side, dtype=torch.uint8)
        places = torch.tensor(kept, dtype=torch.int64)
        return Loaded(stacked, self.targets[places], places, len(chosen) - len(kept))


def place_and_options(kind: str, rest: str, known: Collection[str]) -> tuple[str, dict[str, Any]]:
    """`PLACE:KEY=VALUE:...` -> the place and its options; `classes` and `streaming` are numbers.

    Example:
        >>> place_and_options("hf", "acme/photos:split=test:classes=10", ("split", "classes"))
        ('acme/photos', {'split': 'test', 'classes': 10})
    """
    place, given = parse(rest)
    for key, value in given.items():
        if key not in known:
            raise unknown(f"option of {kind} data", key, known)
        if key in ("classes", "streaming"):
            require_int(key, value, 1)
    return place, given
