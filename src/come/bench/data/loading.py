"""From a stream to batches on a device: decoded by workers ahead of time, corrupted and normalized on the device."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from come.bench.data.source import Loaded, Source
from come.bench.data.streams import OUTLIER, Stream
from come.corruptions import corrupt
from come.errors import ComeError, InputError


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


class _Chunks(Dataset["tuple[Loaded, Tensor] | ComeError"]):
    """The stream cut into batches; a worker loads a whole one, in the order of the stream, and says of what kind each is."""

    def __init__(self, source: Source, stream: Stream, batch_size: int, outliers: Source | None) -> None:
        self.source, self.stream, self.batch_size, self.outliers = source, stream, batch_size, outliers

    def __len__(self) -> int:
        return -(-len(self.stream) // self.batch_size)

    def __getitem__(self, i: int) -> tuple[Loaded, Tensor] | ComeError:
        try:
            return self._chunk(i)
        except ComeError as error:  # raised by whoever gets it: a worker would put its whole traceback into the message
            return error

    def _chunk(self, i: int) -> tuple[Loaded, Tensor]:
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
        back = torch.tensor(where, dtype=torch.int64).argsort()
        loaded = Loaded(
            torch.cat([part.images for part in parts])[back],
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

    Workers decode ahead of the consumer; corruption and normalization run on the device. `account` adds up the time that
    the consumer waited for data: on a GPU it must stay a small share, and every record says how large it was.

    Example:
        >>> from come.bench.data import GlyphSource
        >>> from come.bench.data.preprocess import Preprocess
        >>> source = GlyphSource(size=100)
        >>> stream = Stream.shuffled("glyphs", 100, corruption="fog", severity=5, seed=0)
        >>> [len(b.labels) for b in batches(source, stream, Preprocess(32), batch_size=64)]
        [64, 36]
    """
    if outliers is None and OUTLIER in stream.kinds:
        raise InputError(f"the stream has outliers of {stream.outliers!r}; pass their source as `outliers`")
    return _batches(
        _Chunks(source, stream, batch_size, outliers), preprocess, torch.device(device), workers, account or Account()
    )


def _batches(
    chunks: _Chunks, preprocess: Callable[[Tensor], Tensor], device: torch.device, workers: int, account: Account
) -> Iterator[Batch]:
    loader = DataLoader(
        chunks,
        batch_size=None,
        num_workers=workers,
        prefetch_factor=4 if workers else None,
        pin_memory=device.type == "cuda",
    )
    since = time.perf_counter()
    for chunk in loader:
        if isinstance(chunk, ComeError):
            raise chunk
        loaded, kinds = chunk
        account.waited += time.perf_counter() - since
        account.bad += loaded.bad
        if len(loaded.labels):
            images = loaded.images.to(device, non_blocking=True)
            if chunks.source.holds is None:
                images = _corrupted(images, chunks.stream, loaded.indices, kinds)
            labels = loaded.labels.to(device, non_blocking=True)
            yield Batch(preprocess(images), labels, loaded.indices, kinds)
        since = time.perf_counter()


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
    for kind, (corruption, severity) in enumerate(stream.shifts):
        chosen = (kinds == kind).nonzero()[:, 0]
        if corruption is None or not len(chosen):
            continue
        if len(chosen) == len(images):
            return corrupt(images, corruption, severity, seed=stream.seed, index=indices)
        there = chosen.to(images.device)
        part = corrupt(images[there], corruption, severity, seed=stream.seed, index=indices[chosen])
        images = images.index_copy(0, there, part)
    return images
