"""From a stream to batches on a device: decoded by threads ahead of time, corrupted and normalized on the device."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from come.bench.data.source import Loaded, Source
from come.bench.data.store import Kept, Resident
from come.bench.data.streams import OUTLIER, Stream
from come.corruptions import corrupt
from come.errors import InputError

AHEAD = 4
"""Batches that are loaded or being loaded for each thread."""
CHUNK = 1024
"""Samples that are corrupted at once, at most: small images keep a GPU busy only if they are many."""
CHUNK_VALUES = {"cpu": 2**19, "cuda": 2**24}
"""Of a chunk, unless a batch has more: what stays in a cache, or takes little of a GPU's memory."""


@dataclass(frozen=True)
class Batch:
    """What a method gets, and what it is scored against."""

    images: Tensor
    """(B, 3, H, W), normalized, on the device"""
    labels: Tensor
    """(B,) int64 on the device; -1 marks an outlier"""
    indices: Tensor
    """(B,) int64: which samples of the source these are"""
    kinds: Tensor
    """(B,) int64: places in `Stream.shifts`; -1 marks an outlier"""


@dataclass
class Account:
    """What loading cost: samples that could not be read, and seconds that the consumer had to wait."""

    bad: int = 0
    waited: float = 0.0


def _host(source: Source) -> Source:
    return source.source if isinstance(source, Resident) else source


class _Loading:
    """The stream cut into batches; a thread loads a whole one, in the order of the stream, and says of what kind each is."""

    def __init__(self, source: Source, stream: Stream, batch_size: int, outliers: Source | None) -> None:
        self.source, self.stream, self.batch_size, self.outliers = source, stream, batch_size, outliers

    def at_hand(self) -> bool:
        """Whether no image of the stream is left to decode, or none to bring to the device."""
        stream = self.stream
        wanted: dict[int, set[int]] = {}
        for place, index in enumerate(stream.order):
            wanted.setdefault(stream.kind(place), set()).add(index)
        for kind, indices in wanted.items():
            source = self.outliers if kind == OUTLIER else self.source
            shift = (None, 5) if kind == OUTLIER else stream.shifts[kind]
            if not isinstance(source, (Kept, Resident)) or not source.holds_all(list(indices), *shift):
                return False
        return True

    def on_host(self) -> _Loading:
        """The same without what is on a device, which is read in the order of the consumer's work there."""
        outliers = None if self.outliers is None else _host(self.outliers)
        return _Loading(_host(self.source), self.stream, self.batch_size, outliers)

    def __len__(self) -> int:
        return -(-len(self.stream) // self.batch_size)

    def __getitem__(self, i: int) -> tuple[Loaded, Tensor]:
        stream = self.stream
        places = range(i * self.batch_size, min((i + 1) * self.batch_size, len(stream)))
        parts: list[Loaded] = []
        kinds: list[int] = []
        where: list[int] = []
        for kind in sorted({stream.kind(p) for p in places}):
            chosen = [p for p in places if stream.kind(p) == kind]
            loaded = self._load([stream.order[p] for p in chosen], kind)
            parts.append(loaded)
            kinds += [kind] * len(loaded.labels)
            where += _places(chosen, [stream.order[p] for p in chosen], loaded.indices.tolist())
        if len(parts) == 1:
            return parts[0], torch.tensor(kinds, dtype=torch.int64)
        back = torch.tensor(where, dtype=torch.int64).argsort()
        images = torch.cat([part.images for part in parts])
        loaded = Loaded(
            images[back.to(images.device)],
            torch.cat([part.labels for part in parts])[back],
            torch.cat([part.indices for part in parts])[back],
            sum(part.bad for part in parts),
        )
        return loaded, torch.tensor(kinds, dtype=torch.int64)[back]

    def _load(self, indices: list[int], kind: int) -> Loaded:
        if kind != OUTLIER:
            return self.source.load(indices, *self.stream.shifts[kind])
        assert self.outliers is not None  # `batches` has looked
        loaded = self.outliers.load(indices)
        return loaded._replace(labels=torch.full_like(loaded.labels, -1))


def batches(
    source: Source,
    stream: Stream,
    preprocess: Callable[[Tensor], Tensor],
    *,
    batch_size: int = 64,
    device: str | torch.device = "cpu",
    workers: int = 0,
    account: Account | None = None,
    outliers: Source | None = None,
) -> Iterator[Batch]:
    """The stream in batches, in its order, from the sources that are given here; what the stream names is not opened.

    As many threads as `workers` decode ahead of the consumer; corruption and normalization run on the device. `account` adds
    up the time that the consumer waited for data: on a GPU it must stay a small share, and every record says how large it was.

    Example:
        >>> from come.bench.data import FashionSource
        >>> from come.bench.data.preprocess import Preprocess
        >>> source = FashionSource(size=100)
        >>> stream = Stream.shuffled("fashion", 100, corruption="fog", severity=5, seed=0)
        >>> [len(b.labels) for b in batches(source, stream, Preprocess(32), batch_size=64)]
        [64, 36]
    """
    if outliers is None and OUTLIER in stream.kinds:
        raise InputError(f"the stream has outliers of {stream.outliers!r}; pass their source as `outliers`")
    return _batches(
        _Loading(source, stream, batch_size, outliers), preprocess, torch.device(device), workers, account or Account()
    )


def _batches(
    loading: _Loading, preprocess: Callable[[Tensor], Tensor], device: torch.device, workers: int, account: Account
) -> Iterator[Batch]:
    """Chunk by chunk; the next one is made when the first batch of the last has been taken, beside what follows on a GPU."""
    chunks = _chunks(loading, device, workers, account)
    side = _side(device) if device.type == "cuda" else None
    following = _made(loading, chunks, device, side)
    while following is not None:
        made, ready = following
        following = None
        if side is not None and ready is not None:
            torch.cuda.current_stream(device).wait_event(ready)
        for number, (images, labels, loaded, kinds) in enumerate(made):
            if side is not None:
                images.record_stream(torch.cuda.current_stream(device))
                labels.record_stream(torch.cuda.current_stream(device))
            yield Batch(preprocess(images), labels, loaded.indices, kinds)
            if number == 0:
                following = _made(loading, chunks, device, side)


@lru_cache
def _side(device: torch.device) -> torch.cuda.Stream:
    """The one stream for data: each takes memory of its own for matrix products."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


_Chunk = list[tuple[Loaded, Tensor]]
"""Batches, and of what kinds their samples are."""
_Made = tuple[list[tuple[Tensor, Tensor, Loaded, Tensor]], "torch.cuda.Event | None"]
"""Batches with their images, corrupted, and labels on the device; and when they are there."""


def _chunks(loading: _Loading, device: torch.device, workers: int, account: Account) -> Iterator[_Chunk]:
    """The batches of a stream, several at a time; the first ones come sooner than many would."""
    if device.type == "cuda" and not loading.at_hand():
        loading = loading.on_host()
    batches: Iterable[tuple[Loaded, Tensor]] = map(loading.__getitem__, range(len(loading)))
    if workers and not loading.at_hand():
        batches = _ahead(loading, workers)
    chunk: _Chunk = []
    size = most = 1
    since = time.perf_counter()
    for loaded, kinds in batches:
        account.waited += time.perf_counter() - since
        account.bad += loaded.bad
        if len(loaded.labels):
            chunk.append((loaded, kinds))
            values = CHUNK_VALUES.get(device.type, CHUNK_VALUES["cpu"]) // loaded.images[0].numel()
            most = max(1, min(CHUNK, values) // loading.batch_size)
        if len(chunk) >= min(size, most):
            yield chunk
            chunk, size = [], 2 * size
        since = time.perf_counter()
    if chunk:
        yield chunk


def _ahead(loading: _Loading, workers: int) -> Iterator[tuple[Loaded, Tensor]]:
    """Batches in their order, by threads that work ahead.

    Decoding a picture lets other threads run. A process that was forked from one that uses a GPU may not touch what is there,
    not even to forget it; threads may.
    """
    waiting: deque[Future[tuple[Loaded, Tensor]]] = deque()
    with ThreadPoolExecutor(workers, "loading") as pool:
        try:
            for i in range(len(loading)):
                waiting.append(pool.submit(loading.__getitem__, i))
                if len(waiting) > AHEAD * workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for batch in waiting:
                batch.cancel()


def _made(
    loading: _Loading, chunks: Iterator[_Chunk], device: torch.device, side: torch.cuda.Stream | None
) -> _Made | None:
    """The next chunk, on the device; on a GPU by a stream of its own."""
    with nullcontext() if side is None else torch.cuda.stream(side):
        chunk = next(chunks, None)
        if chunk is None:
            return None
        made = []
        alike = len({loaded.images.shape[1:] for loaded, _ in chunk}) == 1
        for part in [chunk] if alike else [[batch] for batch in chunk]:
            images = torch.cat([_there(loading, loaded, kinds, device) for loaded, kinds in part])
            labels = torch.cat([loaded.labels for loaded, _ in part])
            sizes = [len(loaded.labels) for loaded, _ in part]
            if loading.source.holds is None:
                indices = torch.cat([loaded.indices for loaded, _ in part])
                images = _corrupted(images, loading.stream, indices, torch.cat([kinds for _, kinds in part]))
            found = zip(torch.split(images, sizes), torch.split(_moved(labels, device), sizes), part, strict=True)
            made += [(image, label, loaded, kinds) for image, label, (loaded, kinds) in found]
        return made, None if side is None else side.record_event()


def _there(loading: _Loading, loaded: Loaded, kinds: Tensor, device: torch.device) -> Tensor:
    """The images of a batch on the device, where they stay if there is room."""
    if loaded.images.device.type == device.type:
        return loaded.images
    images = _moved(loaded.images, device)
    for kind in sorted(set(kinds.tolist())):
        source = loading.outliers if kind == OUTLIER else loading.source
        if isinstance(source, Resident):
            chosen = (kinds == kind).nonzero()[:, 0]
            shift = (None, 5) if kind == OUTLIER else loading.stream.shifts[kind]
            part = images if len(chosen) == len(images) else images[_moved(chosen, device)]
            source.keep(part, loaded.labels[chosen], loaded.indices[chosen], *shift)
    return images


def _moved(values: Tensor, device: torch.device) -> Tensor:
    """A host tensor on the device, without a wait."""
    return (values.pin_memory() if device.type == "cuda" else values).to(device, non_blocking=True)


def _places(chosen: list[int], asked: list[int], got: list[int]) -> list[int]:
    """Places in the stream of the samples that could be read: `got` is `asked` without some."""
    places, left = [], iter(got)
    expected = next(left, None)
    for place, index in zip(chosen, asked, strict=True):
        if index == expected:
            places.append(place)
            expected = next(left, None)
    return places


def _corrupted(images: Tensor, stream: Stream, indices: Tensor, kinds: Tensor) -> Tensor:
    """Each image of a batch corrupted as its kind is."""
    shifts = [*enumerate(stream.shifts), *enumerate(stream.then)]
    for kind, (corruption, severity) in shifts:
        chosen = (kinds == kind).nonzero()[:, 0]
        if corruption is None or not len(chosen):
            continue
        if len(chosen) == len(images):
            images = corrupt(images, corruption, severity, seed=stream.seed, index=_moved(indices, images.device))
            continue
        there = _moved(chosen, images.device)
        part = corrupt(
            images[there], corruption, severity, seed=stream.seed, index=_moved(indices[chosen], images.device)
        )
        images = images.index_copy(0, there, part)
    return images
