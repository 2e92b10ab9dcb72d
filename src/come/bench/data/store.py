"""Images decoded once for a run: kept in a file that all of its processes read, and on the device where there is room."""

from __future__ import annotations

import contextlib
import mmap
import os
import shutil
import tempfile
import threading
import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import psutil
import torch
from torch import Tensor

from come.bench.data.source import Loaded, Source
from come.errors import ComeError

MEMORY = Path("/dev/shm")
"""A folder whose files are in memory, on Linux."""
SHARE_OF_MEMORY = 0.25
"""Of the memory that is free, for decoded images; more are kept on the disk."""
SHARE_OF_DISK = 0.5
SHARE_OF_DEVICE = 0.125

SEEKING = threading.Lock()
"""A file has one position for all threads, where it cannot be read from a given one."""

UNKNOWN, THERE, BAD = 0, 1, 2
"""What is known of a sample."""


class _Around(Source):
    """What keeps the images of another source: all else is that source's.

    Args:
        source: where the images come from.
        used: which samples are kept, by default all; others are asked of the source each time.
    """

    def __init__(self, source: Source, used: Iterable[int] | None = None) -> None:
        self.source, self.name, self.num_classes = source, source.name, source.num_classes
        self.holds, self.severities, self.classes = source.holds, source.severities, source.classes
        places = sorted(set(range(len(source)) if used is None else used).intersection(range(len(source))))
        self._size = len(places)
        self._row: npt.NDArray[np.int64] = np.full(len(source), -1, dtype=np.int64)
        """Where each sample is kept; -1 if it is not."""
        self._row[places] = np.arange(len(places))

    def _rows(self, indices: Sequence[int] | Tensor) -> npt.NDArray[np.int64]:
        """Where these samples are kept; -1 for those that are not, or are not there."""
        chosen = np.asarray(indices, dtype=np.int64)
        there = (chosen >= 0) & (chosen < len(self._row))
        return np.where(there, self._row[np.where(there, chosen, 0)], -1)

    def __len__(self) -> int:
        """Number of samples of the source."""
        return len(self.source)

    def labels(self) -> Tensor:
        """The source's."""
        return self.source.labels()

    def require(self, corruptions: Sequence[str | None], severity: int) -> None:
        """As the source does."""
        self.source.require(corruptions, severity)

    def source_images(self, count: int) -> Tensor:
        """The source's."""
        return self.source.source_images(count)


class Kept(_Around):
    """A source whose samples are decoded when they are first asked for, and read from a file from then on.

    The file has no name: it is gone when the last process that holds it ends, however it ends. Processes that are started
    while it is open read and write it too. A sample is marked when all of it is written; two threads or processes may decode
    the same one at the same time and write the same bytes. What finds no room is decoded each time.

    Args:
        source: where the images come from.
        used: which samples are kept, by default all; others are asked of the source each time.
        shifts: which (corruption, severity) are, for a source that holds some.

    Example:
        >>> from come.bench.data import FashionSource
        >>> kept = Kept(FashionSource(size=8))
        >>> kept.holds_all([3, 4]), len(kept.load([3, 4]).labels), kept.holds_all([3, 4])
        (False, 2, True)
    """

    def __init__(
        self, source: Source, used: Iterable[int] | None = None, shifts: Sequence[tuple[str | None, int]] = ()
    ) -> None:
        super().__init__(source, used)
        chosen = [(None, 0)] if source.holds is None else list(dict.fromkeys(shifts))
        self._shape = _shape(source, *chosen[0]) if chosen else ()
        place, fitting = room(self._size * int(np.prod(self._shape)), len(chosen)) if self._shape else (None, 0)
        self._slots = {shift: i for i, shift in enumerate(chosen[:fitting])}
        self._file: int | None = None
        if place is not None:
            with tempfile.TemporaryFile(dir=place) as file:
                self._attach(os.dup(file.fileno()))

    def _attach(self, file: int) -> None:
        """Use a file, new or another process's, by its descriptor."""
        weakref.finalize(self, os.close, file)
        each = len(self._slots) * self._size
        if os.fstat(file).st_size < 9 * each:
            os.write(file, bytes(9 * each))
        self._file, self._head = file, mmap.mmap(file, 9 * each)
        shape = (len(self._slots), self._size)
        self._labels: npt.NDArray[np.int64] = np.frombuffer(self._head, np.int64, each).reshape(shape)
        self._states: npt.NDArray[np.uint8] = np.frombuffer(self._head, np.uint8, each, 8 * each).reshape(shape)

    def source_images(self, count: int) -> Tensor:
        """The source's; those that are among its samples are read like these."""
        if type(self.source).source_images is Source.source_images:
            return Source.source_images(self, count)
        return super().source_images(count)

    def holds_all(self, indices: Sequence[int], corruption: str | None = None, severity: int = 5) -> bool:
        """Whether nothing is left to decode of these."""
        slot = self._slot(corruption, severity)
        rows = self._rows(indices)
        return slot is not None and bool((rows >= 0).all() and (self._states[slot][rows] != UNKNOWN).all())

    def all_bad(self, indices: Sequence[int], corruption: str | None = None, severity: int = 5) -> bool:
        """Whether none of these can be read, as is known already."""
        slot = self._slot(corruption, severity)
        return slot is not None and bool((self._states[slot][self._rows(indices)] == BAD).all())

    def load(self, indices: Sequence[int], corruption: str | None = None, severity: int = 5) -> Loaded:
        """From the file, or from the source and into the file."""
        asked = [int(i) for i in indices]
        slot = self._slot(corruption, severity)
        if slot is None:
            return self.source.load(asked, corruption, severity)
        if not self.holds_all(asked, corruption, severity):
            return self._decode(slot, asked, corruption, severity)
        rows = self._rows(asked)
        there = self._states[slot][rows] == THERE
        good = rows[there]
        pixels = np.empty((len(good), *self._shape), dtype=np.uint8)
        for image, row in zip(pixels, good.tolist(), strict=True):
            self._read(image, self._offset(slot, row))
        labels, got = torch.from_numpy(self._labels[slot][good]), torch.tensor(asked, dtype=torch.int64)[there]
        return Loaded(torch.from_numpy(pixels), labels, got, len(asked) - len(good))

    def _decode(self, slot: int, asked: list[int], corruption: str | None, severity: int) -> Loaded:
        """What is known is read, the rest decoded and kept; an image of another size than the first is not."""
        known = [row >= 0 and self._states[slot][row] != UNKNOWN for row in self._rows(asked).tolist()]
        rest = list(dict.fromkeys(i for i, there in zip(asked, known, strict=True) if not there))
        new = self.source.load(rest, corruption, severity)
        if tuple(new.images.shape[1:]) == self._shape and new.images.dtype == torch.uint8:
            self._keep(slot, rest, new)
        if not any(known) and len(rest) == len(asked):
            return new
        old = self.load([i for i, there in zip(asked, known, strict=True) if there], corruption, severity)
        where = {int(i): (part, row) for part in (old, new) for row, i in enumerate(part.indices.tolist())}
        found = [where[i] for i in asked if i in where]
        images = [part.images[row] for part, row in found]
        return Loaded(
            torch.stack(images) if images else new.images,
            torch.tensor([int(part.labels[row]) for part, row in found], dtype=torch.int64),
            torch.tensor([i for i in asked if i in where], dtype=torch.int64),
            len(asked) - len(found),
        )

    def _keep(self, slot: int, asked: list[int], loaded: Loaded) -> None:
        got = loaded.indices.tolist()
        pixels = loaded.images.contiguous().numpy()
        try:
            for image, label, row in zip(pixels, loaded.labels.tolist(), self._rows(got).tolist(), strict=True):
                if row >= 0:
                    self._write(image, self._offset(slot, row))
                    self._labels[slot, row] = label
                    self._states[slot, row] = THERE
        except OSError:  # no room after all
            return
        for row in self._rows(list(set(asked) - set(got))).tolist():
            if row >= 0:
                self._states[slot, row] = BAD

    def _slot(self, corruption: str | None, severity: int) -> int | None:
        return self._slots.get((corruption, severity) if self.holds is not None else (None, 0))

    def _offset(self, slot: int, row: int) -> int:
        place = slot * self._size + row
        return len(self._head) + place * int(np.prod(self._shape))

    def _read(self, image: npt.NDArray[np.uint8], offset: int) -> None:
        assert self._file is not None
        if hasattr(os, "preadv"):  # several processes share the file, and its position
            os.preadv(self._file, [image.data], offset)
        else:
            with SEEKING:
                os.lseek(self._file, offset, os.SEEK_SET)
                found = os.read(self._file, image.size)
            image[...] = np.frombuffer(found, np.uint8).reshape(image.shape)

    def _write(self, image: npt.NDArray[np.uint8], offset: int) -> None:
        assert self._file is not None
        if hasattr(os, "pwritev"):
            written = os.pwritev(self._file, [image.data], offset)
        else:
            with SEEKING:
                os.lseek(self._file, offset, os.SEEK_SET)
                written = os.write(self._file, image.data)
        if written < image.size:
            raise OSError("no room")

    def __getstate__(self) -> dict[str, Any]:
        state = {name: value for name, value in vars(self).items() if name not in ("_head", "_labels", "_states")}
        return state | {"_file": None if self._file is None else _descriptor(self._file)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        if self._file is None:
            self._slots = {}
        else:
            self._attach(state["_file"].detach())


class Resident(_Around):
    """A source whose images stay on the device once they were there, if all of them take a small share of its memory.

    Args:
        source: where the images come from.
        used: which samples are kept, by default all; others are asked of the source each time.
    """

    def __init__(self, source: Source, used: Iterable[int] | None = None) -> None:
        super().__init__(source, used)
        self._sets: dict[tuple[str | None, int], tuple[Tensor, Tensor, Tensor] | None] = {}

    @property
    def bytes(self) -> int:
        """What the images take there."""
        return sum(found[0].numel() for found in self._sets.values() if found is not None)

    def holds_all(self, indices: Sequence[int], corruption: str | None = None, severity: int = 5) -> bool:
        """Whether all of these that can be read are on the device."""
        found = self._sets.get(self._set(corruption, severity))
        chosen, rows = torch.as_tensor(indices, dtype=torch.int64), torch.from_numpy(self._rows(indices))
        if found is None or not len(chosen) or int(rows.min()) < 0:
            return False
        rest = chosen[~found[2][rows]].tolist()
        return not rest or (isinstance(self.source, Kept) and self.source.all_bad(rest, corruption, severity))

    def load(self, indices: Sequence[int], corruption: str | None = None, severity: int = 5) -> Loaded:
        """From the device, or else from the source, to the host."""
        if not self.holds_all(indices, corruption, severity):
            return self.source.load(indices, corruption, severity)
        found = self._sets[self._set(corruption, severity)]
        assert found is not None
        images, labels, there = found
        chosen, rows = torch.as_tensor(indices, dtype=torch.int64), torch.from_numpy(self._rows(indices))
        good = rows[there[rows]]
        picked = images.index_select(0, good.pin_memory().to(images.device, non_blocking=True))
        return Loaded(picked, labels[good], chosen[there[rows]], len(chosen) - len(good))

    def keep(self, images: Tensor, labels: Tensor, indices: Tensor, corruption: str | None, severity: int) -> None:
        """Keep images that are on the device now."""
        key = self._set(corruption, severity)
        if key not in self._sets:
            free, _ = torch.cuda.mem_get_info(images.device)
            fits = self._size * images[0].numel() <= SHARE_OF_DEVICE * free
            self._sets[key] = self._new(images) if fits else None
        found = self._sets[key]
        rows = torch.from_numpy(self._rows(indices))
        if found is None or images.shape[1:] != found[0].shape[1:] or int(rows.min()) < 0:
            return
        found[0].index_copy_(0, rows.pin_memory().to(images.device, non_blocking=True), images)
        found[1][rows], found[2][rows] = labels, True

    def _new(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Room for images like these; their labels, and which of them are there."""
        labels, there = torch.zeros(self._size, dtype=torch.int64), torch.zeros(self._size, dtype=torch.bool)
        return images.new_empty((self._size, *images.shape[1:])), labels, there

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_sets": {}}  # another process has its own

    def _set(self, corruption: str | None, severity: int) -> tuple[str | None, int]:
        return (corruption, severity) if self.holds is not None else (None, 0)


def _shape(source: Source, corruption: str | None, severity: int) -> tuple[int, ...]:
    """Of the first image that can be read, if it is among the first few."""
    for index in range(min(8, len(source))):
        with contextlib.suppress(ComeError):
            images = source.load([index], corruption, severity).images
            if len(images):
                return tuple(images.shape[1:])
    return ()


def room(each: int, sets: int) -> tuple[Path | None, int]:
    """Where `sets` of `each` bytes can be kept, and how many of them."""
    if MEMORY.is_dir() and os.access(MEMORY, os.W_OK):
        free = min(psutil.virtual_memory().available, shutil.disk_usage(MEMORY).free)
        if each * sets <= SHARE_OF_MEMORY * free:
            return MEMORY, sets
    disk = Path(tempfile.gettempdir())
    fitting = min(sets, int(SHARE_OF_DISK * shutil.disk_usage(disk).free) // max(1, each))
    return (disk, fitting) if fitting else (None, 0)


def _descriptor(file: int) -> Any:
    """An open file on its way to a process that is being started; None where that cannot be, and it decodes for itself."""
    from multiprocessing import context, reduction

    if not hasattr(reduction, "DupFd") or context.get_spawning_popen() is None:
        return None
    return reduction.DupFd(file)
