"""CIFAR-10-C and CIFAR-100-C as they are published: arrays in .npy files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from come.bench.data.preprocess import quiet
from come.bench.data.reading import as_input_error, data_folder
from come.bench.data.source import Loaded, Source
from come.corruptions import names as corruption_names
from come.errors import InputError


class CifarCSource(Source):
    """`PATH/<corruption>.npy` and `PATH/labels.npy`: the five severities one after the other."""

    at_hand = True

    def __init__(self, name: str, path: str, num_classes: int) -> None:
        self.name, self.num_classes = name, num_classes
        self.root = data_folder(path)
        self.holds = tuple(n for n in corruption_names() if (self.root / f"{n}.npy").is_file())
        self.severities = dict.fromkeys(self.holds, (1, 2, 3, 4, 5))
        if not self.holds or not (self.root / "labels.npy").is_file():
            raise InputError(f"{self.root} has no labels.npy or no <corruption>.npy; give the unpacked CIFAR-C folder")
        labels, where = _mapped(self.root / "labels.npy"), f"labels.npy in {self.root}"
        if labels.ndim != 1 or len(labels) % 5 or not len(labels):
            raise InputError(f"{where} must hold five severities of labels, got shape {labels.shape}")
        if labels.dtype.kind not in "iu":
            raise InputError(f"{where} must hold integers, got {labels.dtype}")
        self._each = len(labels) // 5
        self._labels = torch.from_numpy(labels.astype(np.int64))
        if int(self._labels.max()) >= num_classes or int(self._labels.min()) < 0:
            found = int(self._labels.max()) + 1
            raise InputError(f"{where} has {found} classes; {name.partition(':')[0]} has {num_classes}")
        self._arrays: dict[str, npt.NDArray[Any]] = {}

    def __len__(self) -> int:
        return self._each

    def labels(self) -> Tensor:
        """The labels of all samples, (N,) int64."""
        return self._labels[: self._each]

    def require(self, corruptions: Sequence[str | None], severity: int) -> None:
        """Raise `InputError` unless the arrays of all corruptions are there, of the right type and shape."""
        super().require(corruptions, severity)
        for name in corruptions:
            self._array(str(name))

    def load(self, indices: Sequence[int], corruption: str | None = None, severity: int = 5) -> Loaded:
        """Read from the memory-mapped arrays."""
        array = self._array(str(corruption))
        chosen = np.array(self._known(indices), dtype=np.int64)
        rows = chosen + (severity - 1) * self._each
        images = torch.from_numpy(np.ascontiguousarray(array[rows])).movedim(-1, 1).contiguous()
        return Loaded(images, self._labels[torch.from_numpy(rows)], torch.from_numpy(chosen))

    def _array(self, name: str) -> npt.NDArray[Any]:
        """The images of a corruption, (5 N, H, W, 3) uint8."""
        if name not in self._arrays:
            array = _mapped(self.root / f"{name}.npy")
            shaped = array.ndim == 4 and array.shape[0] == 5 * self._each and array.shape[3] == 3 and array.size
            if not shaped or array.dtype != np.uint8:
                raise InputError(
                    f"{name}.npy must be uint8 of shape ({5 * self._each}, H, W, 3), got {array.dtype} of shape {array.shape}"
                )
            self._arrays[name] = array
        return self._arrays[name]


def _mapped(path: Path) -> npt.NDArray[Any]:
    """A memory-mapped .npy file: what it declares is not allocated, and nothing in it is executed."""
    with as_input_error(f"cannot read {path}", "give the unpacked CIFAR-C folder"), quiet():
        return np.lib.format.open_memmap(path, mode="r")
