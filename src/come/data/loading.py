"""From a stream to batches on a device: decoded by workers ahead of time, corrupted and normalised on the device."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from come.corruptions import corrupt
from come.data.sources import Loaded, Source
from come.data.streams import Stream


@dataclass(frozen=True)
class Batch:
    """What a method gets, and what it is scored against."""

    images: Tensor
    """(B, 3, H, W), normalised, on the device"""
    labels: Tensor
    """(B,) int64 on the device; -1 marks an outlier"""
    indices: Tensor
    """(B,) int64: which samples of the source these are"""
    domain: str


@dataclass
class Account:
    """What loading cost: samples that could not be read, and seconds that the consumer had to wait."""

    bad: int = 0
    waited: float = 0.0


class _Chunks(Dataset[Loaded]):
    """The stream cut into batches; a worker loads a whole one."""

    def __init__(self, source: Source, stream: Stream, batch_size: int) -> None:
        self.source, self.stream, self.batch_size = source, stream, batch_size

    def __len__(self) -> int:
        return -(-len(self.stream) // self.batch_size)

    def __getitem__(self, i: int) -> Loaded:
        chunk = self.stream.order[i * self.batch_size : (i + 1) * self.batch_size]
        return self.source.load(chunk, self.stream.corruption, self.stream.severity)


def batches(
    source: Source,
    stream: Stream,
    preprocess: Callable[[Tensor], Tensor],
    *,
    batch_size: int = 64,
    device: str | torch.device = "cpu",
    workers: int = 0,
    account: Account | None = None,
) -> Iterator[Batch]:
    """The stream in batches, in its order.

    Workers decode ahead of the consumer; corruption and normalisation run on the device. `account` adds up the time that
    the consumer waited for data: on a GPU it must stay a small share, and every record says how large it was.

    Example:
        >>> from come.data import GlyphSource
        >>> from come.models import Preprocess
        >>> source = GlyphSource(size=100)
        >>> stream = Stream.shuffled("glyphs", 100, corruption="fog", severity=5, seed=0)
        >>> [len(b.labels) for b in batches(source, stream, Preprocess(32), batch_size=64)]
        [64, 36]
    """
    account = account or Account()
    device = torch.device(device)
    loader = DataLoader(
        _Chunks(source, stream, batch_size),
        batch_size=None,
        num_workers=workers,
        prefetch_factor=4 if workers else None,
        pin_memory=device.type == "cuda",
    )
    since = time.perf_counter()
    for loaded in loader:
        account.waited += time.perf_counter() - since
        account.bad += loaded.bad
        if len(loaded.labels):
            images = loaded.images.to(device, non_blocking=True)
            if stream.corruption is not None and source.holds is None:
                images = corrupt(images, stream.corruption, stream.severity, seed=stream.seed, index=loaded.indices)
            labels = loaded.labels.to(device, non_blocking=True)
            yield Batch(preprocess(images), labels, loaded.indices, stream.domain)
        since = time.perf_counter()
