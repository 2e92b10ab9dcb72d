"""Images are decoded once for a run: kept in a file that all its processes read, and on the GPU if they fit."""

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

MEMORY = Path("/dev/shm")  # files in it are in memory, on Linux
SHARE_OF_MEMORY = 0.25  # of the free memory, for decoded images; if they need more they are kept on the disk
SHARE_OF_DISK = 0.5
SHARE_OF_DEVICE = 0.125

SEEKING = threading.Lock()  # where there is no `preadv`, threads share the position in a file

UNKNOWN, THERE, BAD = 0, 1, 2  # states of a sample

Shift = tuple[str | None, int]  # corruption and severity


class _Wrapper(Source):
    """Keeps the `used` samples of another source, by default all, and passes everything else on to it."""

    def __init__(self, source: Source, used: Iterable[int] | None = None) -> None:
        self.source, self.name, self.num_classes = source, source.name, source.num_classes
        self.holds, self.severities, self.classes = source.holds, source.severities, source.classes
        places = sorted(set(range(len(source)) if used is None else used).intersection(range(len(source))))
        self._size = len(places)
        self._row: npt.NDArray[np.int64] = np.full(len(source), -1, dtype=np.int64)
        self._row[places] = np.arange(len(places))

    def _rows(self, indices: Sequence[int] | Tensor) -> npt.NDArray[np.int64]:
        """Where these samples are kept; -1 for those that are not kept or do not exist."""
        chosen = np.asarray(indices, dtype=np.int64)
        exist = (chosen >= 0) & (chosen < len(self._row))
        return np.where(exist, self._row[np.where(exist, chosen, 0)], -1)

    def _shift(self, corruption: str | None, severity: int) -> Shift:
        """What images are kept by: a source of clean images has one version of each."""
        return (corruption, severity) if self.holds is not None else (None, 0)

    def __len__(self) -> int:
        return len(self.source)

    def labels(self) -> Tensor:
        """As the source."""
        return self.source.labels()

    def require(self, corruptions: Sequence[str | None], severity: int) -> None:
        """As the source."""
        self.source.require(corruptions, severity)

    def source_images(self, count: int) -> Tensor:
        """As the source."""
        return self.source.source_images(count)


class DecodedStore(_Wrapper):
    """Decodes each sample of a source when it is first loaded, and reads it from a file from then on.

    The file has no name: it disappears with the last process that holds it, however that ends. Processes that are started
    while it is open read and write it too. A sample is marked when all of it is written; two threads or processes may decode
    the same one at the same time and write the same bytes. Images that find no room are decoded each time.

    `shifts` are the (corruption, severity) that are kept, for a source that holds some.
    """

    def __init__(self, source: Source, used: Iterable[int] | None = None, shifts: Sequence[Shift] = ()) -> None:
        super().__init__(source, used)
        chosen = [(None, 0)] if source.holds is None else list(dict.fromkeys(shifts))
        self._shape = _shape(source, *chosen[0]) if chosen else ()
        self._bytes = int(np.prod(self._shape))
        place, fitting = room(self._size * self._bytes, len(chosen)) if self._shape else (None, 0)
        self._slots = {shift: i for i, shift in enumerate(chosen[:fitting])}
        self._file: int | None = None
        if place is not None:
            with tempfile.TemporaryFile(dir=place) as file:
                self._attach(os.dup(file.fileno()))

    def _attach(self, file: int) -> None:
        """Use the descriptor of a file, new or another process's: labels, then states, then images."""
        weakref.finalize(self, os.close, file)
        count = len(self._slots) * self._size
        if os.fstat(file).st_size < 9 * count:
            os.write(file, bytes(9 * count))
        self._file, self._head = file, mmap.mmap(file, 9 * count)
        shape = (len(self._slots), self._size)
        self._labels: npt.NDArray[np.int64] = np.frombuffer(self._head, np.int64, count).reshape(shape)
        self._states: npt.NDArray[np.uint8] = np.frombuffer(self._head, np.uint8, count, 8 * count).reshape(shape)

    def source_images(self, count: int) -> Tensor:
        """As the source; through the store where they are some of its samples."""
        if type(self.source).source_images is Source.source_images:
            return Source.source_images(self, count)
        return super().source_images(count)

    def states(self, indices: Sequence[int], corruption: str | None, severity: int) -> npt.NDArray[np.uint8]:
        """`UNKNOWN`, `THERE` or `BAD` (cannot be decoded) for each of these; UNKNOWN for those that are never kept."""
        slot, rows = self._slots.get(self._shift(corruption, severity)), self._rows(indices)
        found = np.full(len(rows), UNKNOWN, dtype=np.uint8)
        if slot is not None:
            found[rows >= 0] = self._states[slot][rows[rows >= 0]]
        return found

    def holds_all(self, indices: Sequence[int], corruption: str | None = None, severity: int = 5) -> bool:
        """Whether none of these is left to decode."""
        return bool((self.states(indices, corruption, severity) != UNKNOWN).all())

    def load(self, indices: Sequence[int], corruption: str | None = None, severity: int = 5) -> Loaded:
        """From the file, or from the source and into the file."""
        asked = [int(i) for i in indices]
        slot = self._slots.get(self._shift(corruption, severity))
        if slot is None:
            return self.source.load(asked, corruption, severity)
        states = self.states(asked, corruption, severity)
        if (states != UNKNOWN).all():
            return self._stored(slot, asked, states)
        rest = list(dict.fromkeys(i for i, state in zip(asked, states, strict=True) if state == UNKNOWN))
        new = self.source.load(rest, corruption, severity)
        self._write_all(slot, rest, new)
        if len(rest) == len(asked):
            return new
        old = [i for i, state in zip(asked, states, strict=True) if state != UNKNOWN]
        parts = self._stored(slot, old, states[states != UNKNOWN]), new
        where = {int(i): (part, row) for part in parts for row, i in enumerate(part.indices.tolist())}
        found = [where[i] for i in asked if i in where]
        return Loaded(
            torch.stack([part.images[row] for part, row in found]) if found else new.images,
            torch.tensor([int(part.labels[row]) for part, row in found], dtype=torch.int64),
            torch.tensor([i for i in asked if i in where], dtype=torch.int64),
            len(asked) - len(found),
        )

    def _stored(self, slot: int, asked: list[int], states: npt.NDArray[np.uint8]) -> Loaded:
        """Samples of the file; none is `UNKNOWN`."""
        good = states == THERE
        rows = self._rows(asked)[good]
        images = np.empty((len(rows), *self._shape), dtype=np.uint8)
        for image, row in zip(images, rows.tolist(), strict=True):
            self._read(image, self._offset(slot, row))
        labels, indices = torch.from_numpy(self._labels[slot][rows]), torch.tensor(asked, dtype=torch.int64)[good]
        return Loaded(torch.from_numpy(images), labels, indices, len(asked) - len(rows))

    def _write_all(self, slot: int, asked: list[int], loaded: Loaded) -> None:
        """Keep what was decoded, unless it has another size than the first image."""
        if tuple(loaded.images.shape[1:]) != self._shape or loaded.images.dtype != torch.uint8:
            return
        got = loaded.indices.tolist()
        images = loaded.images.contiguous().numpy()
        try:
            for image, label, row in zip(images, loaded.labels.tolist(), self._rows(got).tolist(), strict=True):
                if row >= 0:
                    self._write(image, self._offset(slot, row))
                    self._labels[slot, row] = label
                    self._states[slot, row] = THERE
        except OSError:  # no room after all
            return
        bad = self._rows(list(set(asked) - set(got)))
        self._states[slot, bad[bad >= 0]] = BAD

    def _offset(self, slot: int, row: int) -> int:
        return len(self._head) + (slot * self._size + row) * self._bytes

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


class DeviceCache(_Wrapper):
    """Keeps the images of a source on the GPU once they were there, if all of them take a small share of its memory."""

    def __init__(self, source: Source, used: Iterable[int] | None = None) -> None:
        super().__init__(source, used)
        self._sets: dict[Shift, tuple[Tensor, Tensor, Tensor] | None] = {}
        """Images on the device, labels, and which of them are there; None where they do not fit."""

    @property
    def bytes(self) -> int:
        """Memory that the images take there."""
        return sum(found[0].numel() for found in self._sets.values() if found is not None)

    def holds_all(self, indices: Sequence[int], corruption: str | None = None, severity: int = 5) -> bool:
        """Whether all of these that can be decoded are on the device."""
        found = self._sets.get(self._shift(corruption, severity))
        chosen, rows = torch.as_tensor(indices, dtype=torch.int64), torch.from_numpy(self._rows(indices))
        if found is None or not len(chosen) or int(rows.min()) < 0:
            return False
        rest = chosen[~found[2][rows]].tolist()
        store = self.source
        return not rest or (isinstance(store, DecodedStore) and set(store.states(rest, corruption, severity)) == {BAD})

    def load(self, indices: Sequence[int], corruption: str | None = None, severity: int = 5) -> Loaded:
        """From the device, or else from the source, to the host."""
        if not self.holds_all(indices, corruption, severity):
            return self.source.load(indices, corruption, severity)
        found = self._sets[self._shift(corruption, severity)]
        assert found is not None
        images, labels, there = found
        chosen, rows = torch.as_tensor(indices, dtype=torch.int64), torch.from_numpy(self._rows(indices))
        good = rows[there[rows]]
        picked = images.index_select(0, good.pin_memory().to(images.device, non_blocking=True))
        return Loaded(picked, labels[good], chosen[there[rows]], len(chosen) - len(good))

    def keep(self, images: Tensor, labels: Tensor, indices: Tensor, corruption: str | None, severity: int) -> None:
        """Keep images that are on the device now."""
        shift = self._shift(corruption, severity)
        if shift not in self._sets:
            free, _ = torch.cuda.mem_get_info(images.device)
            self._sets[shift] = None
            if self._size * images[0].numel() <= SHARE_OF_DEVICE * free:
                labels_there = torch.zeros(self._size, dtype=torch.int64), torch.zeros(self._size, dtype=torch.bool)
                self._sets[shift] = images.new_empty((self._size, *images.shape[1:])), *labels_there
        found = self._sets[shift]
        rows = torch.from_numpy(self._rows(indices))
        if found is None or images.shape[1:] != found[0].shape[1:] or int(rows.min()) < 0:
            return
        found[0].index_copy_(0, rows.pin_memory().to(images.device, non_blocking=True), images)
        found[1][rows], found[2][rows] = labels, True

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_sets": {}}  # another process has its own


def _shape(source: Source, corruption: str | None, severity: int) -> tuple[int, ...]:
    """Of the first image that can be read, if it is among the first few."""
    for index in range(min(8, len(source))):
        with contextlib.suppress(ComeError):
            images = source.load([index], corruption, severity).images
            if len(images):
                return tuple(images.shape[1:])
    return ()


def room(each: int, sets: int) -> tuple[Path | None, int]:
    """Where to keep `sets` of `each` bytes, and how many of them fit."""
    if MEMORY.is_dir() and os.access(MEMORY, os.W_OK):
        free = min(psutil.virtual_memory().available, shutil.disk_usage(MEMORY).free)
        if each * sets <= SHARE_OF_MEMORY * free:
            return MEMORY, sets
    disk = Path(tempfile.gettempdir())
    fitting = min(sets, int(SHARE_OF_DISK * shutil.disk_usage(disk).free) // max(1, each))
    return (disk, fitting) if fitting else (None, 0)


def _descriptor(file: int) -> Any:
    """An open file for a process that is being started; None where that is impossible, and it decodes for itself."""
    from multiprocessing import context, reduction

    if not hasattr(reduction, "DupFd") or context.get_spawning_popen() is None:
        return None
    return reduction.DupFd(file)
