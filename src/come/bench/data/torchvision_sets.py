"""Data sets that torchvision reads from disk."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from come.bench.data.preprocess import Preprocess, quiet
from come.bench.data.reading import as_input_error
from come.bench.data.source import DatasetSource, Loaded
from come.errors import InputError, one_line, unknown

_PICKLE = "torchvision unpickles a file beside it, which could run anything; give its images as folder:PATH"
NOT_OPENED = {
    **dict.fromkeys(("ImageFolder", "DatasetFolder"), "write folder:PATH"),
    **dict.fromkeys(("LSUN", "LSUNClass"), _PICKLE),
}


class TorchvisionSource(DatasetSource):
    """`torchvision:NAME[:FOLDER]`: a data set of torchvision in FOLDER, by default "data"; its test split, where it has one."""

    def __init__(self, name: str, rest: str, preprocess: Preprocess) -> None:
        kind, _, root = rest.partition(":")
        data = _open(kind, root or "data")
        classes = getattr(data, "classes", None)
        count = getattr(data, "num_classes", None) if classes is None else len(classes)
        if not isinstance(count, int):
            raise InputError(
                f"torchvision's {kind} does not say how many classes it has; wrap it in come.bench.data.DatasetSource"
            )
        super().__init__(data, num_classes=count, name=name, preprocess=preprocess)

    def load(self, indices: Sequence[int], corruption: str | None = None, severity: int = 5) -> Loaded:
        """Read with torchvision."""
        with quiet(), self._as_input_error():
            return super().load(self._known(indices), corruption, severity)

    def labels(self) -> Tensor:
        """The labels of all samples, (N,) int64; no image is read where torchvision has a list of labels."""
        listed = getattr(self._data, "targets", None)
        with quiet(), self._as_input_error():
            found = super().labels() if listed is None else torch.as_tensor(listed, dtype=torch.int64)
            if found.shape != (len(self),):
                raise ValueError(f"it has {len(self)} samples and labels of shape {tuple(found.shape)}")
            return found

    def _as_input_error(self) -> AbstractContextManager[None]:
        repair = "download it again, or give its images as folder:PATH"
        return as_input_error(f"torchvision cannot read {self.name}", repair)


def _open(kind: str, root: str) -> Any:
    import torchvision.datasets

    if kind in NOT_OPENED:
        raise InputError(f"torchvision's {kind} is not opened by come: {NOT_OPENED[kind]}")
    known = [n for n in torchvision.datasets.__all__ if n[0].isupper()]
    if kind not in known:
        raise unknown("torchvision data set", kind, known)
    place: dict[str, Any] = {"size": 64} if kind == "FakeData" else {"root": root}
    splits: list[dict[str, Any]] = [{"train": False}, {"split": "test"}, {"split": "val"}, {}]
    for split in splits:
        try:
            return getattr(torchvision.datasets, kind)(**place, **split)
        except TypeError:  # it has no such argument
            continue
        except Exception as error:  # of damaged files, or of a missing package
            raise InputError(
                f"torchvision's {kind} is not in {root} ({one_line(error)}); download it there first, "
                f"or name the folder: torchvision:{kind}:PATH"
            ) from error
    raise InputError(f"torchvision's {kind} cannot be opened as a classification data set")
