"""`EncodedSource`, the base class of sources of JPEG, PNG, ... images: decoded when asked for, bad ones named or skipped."""

from __future__ import annotations

import contextlib
import hashlib
from abc import abstractmethod
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from come.bench.data.preprocess import MAX_BYTES, Preprocess, decode
from come.bench.data.reading import read_regular, stay_inside
from come.bench.data.source import Loaded, Source
from come.errors import InputError, one_line, require_int, unknown
from come.registry import parse

OnBadImage = Literal["raise", "skip"]
IN_DIGEST = 64  # images that the digest of a source includes, about: all of a large one would take minutes to read


class EncodedSource(Source):
    """A source that knows all labels and where each encoded image is. A new kind writes `_open` and `_encoded`.

    `rest` is what follows "kind:" in the specification `name`. With "raise" an error names an image that cannot be read;
    "skip" leaves it out and counts it.
    """

    targets: Tensor  # (N,) int64: the labels; -1 where there is none
    roots: tuple[Path, ...] = ()  # folders that its files are in; none is read elsewhere

    def __init__(self, name: str, rest: str, preprocess: Preprocess, on_bad_image: OnBadImage = "raise") -> None:
        self.name, self.preprocess, self.on_bad_image = name, preprocess, on_bad_image
        self.kind = name.partition(":")[0]
        self._open(rest)

    @abstractmethod
    def _open(self, rest: str) -> None:
        """Find the samples; set `targets`, `num_classes` and, if images are files, `roots`."""

    @abstractmethod
    def _encoded(self, index: int, corruption: str | None, severity: int) -> Path | bytes:
        """The image of a sample: a file, or the bytes of one. Any exception marks it as bad."""

    def _called(self, index: int, corruption: str | None, severity: int) -> str:
        """How errors name a sample."""
        return f"sample {index} of {self.name}"

    def _set_labels(self, labels: Sequence[int], classes: int | None = None) -> None:
        """Set `targets` and `num_classes`, by default one more than the largest label; 0 for outliers, with negative labels."""
        self.targets = torch.tensor(labels, dtype=torch.int64)
        found = max(labels) + 1 if min(labels) >= 0 else 0
        self.num_classes = found and (classes or found)
        if self.num_classes < found:
            raise InputError(f"classes must be at least {found} for {self.name}, got {classes}")

    def _read(self, index: int, corruption: str | None, severity: int) -> bytes:
        """The bytes of an image; a file must be a regular one in `roots`, since data of others can name any."""
        found = self._encoded(index, corruption, severity)
        if isinstance(found, bytes):
            return found
        stay_inside(found, self.roots)
        return read_regular(found, MAX_BYTES)

    def __len__(self) -> int:
        return len(self.targets)

    def labels(self) -> Tensor:
        """The labels of all samples, (N,) int64; no image is read for them."""
        return self.targets

    def digest(self) -> str:
        """Of all labels, and of about `IN_DIGEST` images from the first to the last."""
        found = hashlib.sha256(self.targets.numpy().tobytes())
        shift = ((self.holds or (None,))[0], 5)
        for index in range(0, len(self), max(1, len(self) // IN_DIGEST)):
            with contextlib.suppress(Exception):  # `load` names or skips a bad image
                found.update(self._read(index, *shift))
        return found.hexdigest()[:16]

    def load(self, indices: Sequence[int], corruption: str | None = None, severity: int = 5) -> Loaded:
        """Decode; an image that cannot be read is named in an error, or skipped and counted."""
        images, kept = [], []
        chosen = self._known(indices)
        for index in chosen:
            try:
                images.append(decode(self._read(index, corruption, severity), self.preprocess))
                kept.append(index)
            except Exception as error:  # decoders raise anything
                if self.on_bad_image == "raise":
                    raise InputError(
                        f"cannot read {self._called(index, corruption, severity)}: {one_line(error)}; fix or remove it, or "
                        "pass --on-bad-image skip"
                    ) from error
        side = self.preprocess.size
        stacked = torch.stack(images) if images else torch.empty(0, 3, side, side, dtype=torch.uint8)
        places = torch.tensor(kept, dtype=torch.int64)
        return Loaded(stacked, self.targets[places], places, len(chosen) - len(kept))


def place_and_options(kind: str, rest: str, known: Collection[str]) -> tuple[str, dict[str, Any]]:
    """`PLACE:KEY=VALUE:...` -> the place and its options; `classes` and `streaming` are positive integers.

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
