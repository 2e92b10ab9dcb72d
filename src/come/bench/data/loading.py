"""From a stream to batches on a device: decoded by threads ahead of time, corrupted and normalized on the device."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from come.bench.data.source import Loaded, Source
from come.bench.data.store import DecodedStore, DeviceCache
from come.bench.data.streams import OUTLIER, Stream
from come.corruptions import corrupt
from come.errors import InputError

AHEAD = 4  # batches that are loaded or being loaded for each thread
CHUNK = 1024  # samples that are corrupted at once, at most: small images keep a GPU busy only if they are many
CHUNK_VALUES = {"cpu": 2**19, "cuda": 2**24}
"""Of a chunk, unless a batch has more: what stays in a CPU's cache, or takes little of a GPU's memory."""


@dataclass(frozen=True)
class Batch:
    """What a method gets, and what it is scored against."""

    images: Tensor  # (B, 3, H, W), normalized, on the device
    labels: Tensor  # (B,) int64 on the device, or (B, H, W) of a dense source; -1 marks an outlier, or a pixel without label
    indices: Tensor  # (B,) int64: the samples' numbers in the source
    kinds: Tensor  # (B,) int64: places in `Stream.shifts`; -1 marks an outlier
    bad: int = 0  # samples that could not be read, and are left out


@dataclass
class Account:
    """What loading cost: samples that could not be read, and seconds that the consumer waited for data."""

    bad: int = 0
    waited: float = 0.0


_Chunk = tuple[list[Batch], "torch.cuda.Event | None"]
"""Batches with corrupted images and labels on the device, and on a GPU the event after which they are there."""


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
    """The batches of a stream, in its order, from the sources given here; the data that the stream names is not opened.

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
    loading = _Loading(stream, batch_size, source, outliers)
    return _batches(loading, preprocess, torch.device(device), workers, account or Account())


class _Loading:
    """The batches of a stream by number, on the host or, of a `DeviceCache`, on the device."""

    def __init__(self, stream: Stream, batch_size: int, source: Source, outliers: Source | None) -> None:
        self.stream, self.batch_size, self.source, self.outliers = stream, batch_size, source, outliers

    def of(self, kind: int) -> tuple[Source, tuple[str | None, int]]:
        """Where samples of a kind come from: a source, corruption and severity."""
        if kind != OUTLIER:
            return self.source, self.stream.shifts[kind]
        assert self.outliers is not None  # `batches` has looked
        return self.outliers, (None, 5)

    def is_cached(self) -> bool:
        """Whether no image of the stream is left to decode, or none to bring to the device."""
        wanted: dict[int, set[int]] = {}
        for place, index in enumerate(self.stream.order):
            wanted.setdefault(self.stream.kind(place), set()).add(index)
        for kind, indices in wanted.items():
            source, shift = self.of(kind)
            if not isinstance(source, (DecodedStore, DeviceCache)) or not source.holds_all(list(indices), *shift):
                return False
        return True

    def on_host(self) -> _Loading:
        """The same without caches on a device, which may be read only in the order of the consumer's work there."""
        source, outliers = (s.source if isinstance(s, DeviceCache) else s for s in (self.source, self.outliers))
        assert source is not None
        return _Loading(self.stream, self.batch_size, source, outliers)

    def __len__(self) -> int:
        return -(-len(self.stream) // self.batch_size)

    def __getitem__(self, number: int) -> Batch:
        stream, begin = self.stream, number * self.batch_size
        by_kind: dict[int, list[int]] = {}
        for place in range(begin, min(begin + self.batch_size, len(stream))):
            by_kind.setdefault(stream.kind(place), []).append(place)
        parts, kinds, where = list[Loaded](), list[int](), list[int]()
        for kind, places in sorted(by_kind.items()):
            source, shift = self.of(kind)
            part = source.load([stream.order[place] for place in places], *shift)
            parts.append(part._replace(labels=torch.full_like(part.labels, -1)) if kind == OUTLIER else part)
            kinds += [kind] * len(part.labels)
            left = iter(places)  # without those that could not be read
            where += [next((p for p in left if stream.order[p] == index), -1) for index in part.indices.tolist()]
        if len(parts) == 1:
            return Batch(*parts[0][:3], torch.tensor(kinds, dtype=torch.int64), parts[0].bad)
        back = torch.tensor(where, dtype=torch.int64).argsort()
        images, labels, indices = (torch.cat(values) for values in list(zip(*parts, strict=True))[:3])
        in_order = torch.tensor(kinds, dtype=torch.int64)[back]
        bad = sum(part.bad for part in parts)
        return Batch(images[back.to(images.device)], labels[back], indices[back], in_order, bad)


def _batches(
    loading: _Loading, preprocess: Callable[[Tensor], Tensor], device: torch.device, workers: int, account: Account
) -> Iterator[Batch]:
    """Chunk by chunk; the next is made once the first batch of the last is taken, on a GPU beside the consumer's work."""
    chunks = _loaded_chunks(loading, device, workers, account)
    side = _side(device) if device.type == "cuda" else None
    following = _chunk(loading, chunks, device, side)
    while following is not None:
        made, ready = following
        following = None
        if ready is not None:
            torch.cuda.current_stream(device).wait_event(ready)
        for number, batch in enumerate(made):
            if ready is not None:
                batch.images.record_stream(torch.cuda.current_stream(device))
                batch.labels.record_stream(torch.cuda.current_stream(device))
            yield replace(batch, images=preprocess(batch.images))
            if number == 0:
                following = _chunk(loading, chunks, device, side)


@lru_cache
def _side(device: torch.device) -> torch.cuda.Stream:
    """The CUDA stream for data; one, because each takes memory of its own for matrix products."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _loaded_chunks(loading: _Loading, device: torch.device, workers: int, account: Account) -> Iterator[list[Batch]]:
    """Several batches at a time, first one, then two, four, ...: the first must not wait for many."""
    if device.type == "cuda" and not loading.is_cached():
        loading = loading.on_host()
    batches: Iterable[Batch] = map(loading.__getitem__, range(len(loading)))
    if workers and not loading.is_cached():
        batches = _ahead(loading, workers)
    chunk: list[Batch] = []
    size = most = 1
    since = time.perf_counter()
    for batch in batches:
        account.waited += time.perf_counter() - since
        account.bad += batch.bad
        if len(batch.labels):
            chunk.append(batch)
            values = CHUNK_VALUES.get(device.type, CHUNK_VALUES["cpu"]) // batch.images[0].numel()
            most = max(1, min(CHUNK, values) // loading.batch_size)
        if len(chunk) >= min(size, most):
            yield chunk
            chunk, size = [], 2 * size
        since = time.perf_counter()
    if chunk:
        yield chunk


def _ahead(loading: _Loading, workers: int) -> Iterator[Batch]:
    """Batches in order, loaded ahead by threads.

    Threads, since decoding an image lets other threads run, and since a process forked from one that uses a GPU dies when it
    touches, or only frees, what is there.
    """
    waiting: deque[Future[Batch]] = deque()
    with ThreadPoolExecutor(workers, "loading") as pool:
        try:
            for number in range(len(loading)):
                waiting.append(pool.submit(loading.__getitem__, number))
                if len(waiting) > AHEAD * workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for batch in waiting:
                batch.cancel()


def _chunk(
    loading: _Loading, chunks: Iterator[list[Batch]], device: torch.device, side: torch.cuda.Stream | None
) -> _Chunk | None:
    """The next chunk on the device, made on the CUDA stream `side`."""
    with nullcontext() if side is None else torch.cuda.stream(side):
        chunk = next(chunks, None)
        if chunk is None:
            return None
        made = []
        alike = len({batch.images.shape[1:] for batch in chunk}) == 1
        for part in [chunk] if alike else [[batch] for batch in chunk]:
            images = torch.cat([_on_device(loading, batch, device) for batch in part])
            labels = _moved(torch.cat([batch.labels for batch in part]), device)
            if loading.source.holds is None:
                indices = torch.cat([batch.indices for batch in part])
                images = _corrupted(images, loading.stream, indices, torch.cat([batch.kinds for batch in part]))
            sizes = [len(batch.labels) for batch in part]
            split = zip(part, torch.split(images, sizes), torch.split(labels, sizes), strict=True)
            made += [replace(batch, images=x, labels=y) for batch, x, y in split]
        return made, None if side is None else side.record_event()


def _on_device(loading: _Loading, batch: Batch, device: torch.device) -> Tensor:
    """The images of a batch on the device; a `DeviceCache` keeps them."""
    if batch.images.device.type == device.type:
        return batch.images
    images = _moved(batch.images, device)
    for kind in sorted(set(batch.kinds.tolist())):
        source, shift = loading.of(kind)
        if isinstance(source, DeviceCache):
            chosen = (batch.kinds == kind).nonzero()[:, 0]
            part = images if len(chosen) == len(images) else images[_moved(chosen, device)]
            source.keep(part, batch.labels[chosen], batch.indices[chosen], *shift)
    return images


def _moved(values: Tensor, device: torch.device) -> Tensor:
    """A host tensor on the device, without synchronizing."""
    return (values.pin_memory() if device.type == "cuda" else values).to(device, non_blocking=True)


def _corrupted(images: Tensor, stream: Stream, indices: Tensor, kinds: Tensor) -> Tensor:
    """Each image with the corruptions of its kind."""
    for kind, (corruption, severity) in [*enumerate(stream.shifts), *enumerate(stream.then)]:
        chosen = (kinds == kind).nonzero()[:, 0]
        if corruption is None or not len(chosen):
            continue
        if len(chosen) == len(images):
            images = corrupt(images, corruption, severity, seed=stream.seed, index=_moved(indices, images.device))
        else:
            there, index = _moved(chosen, images.device), _moved(indices[chosen], images.device)
            part = corrupt(images[there], corruption, severity, seed=stream.seed, index=index)
            images = images.index_copy(0, there, part)
    return images
