"""Peak memory of one adaptation step of every method, next to the paper's.

    python benchmarks/memory.py [METHOD ...]

What is counted are the bytes of all tensors that are alive at the same time, weights included, seen at every operation:
exact, the same on every machine, and without what a device adds (kernel workspaces, a caching allocator). The model is a
ViT-B/16 with random weights at 224 x 224, as in the paper's table. A step of 64 images is too slow for a CPU, so two small
batches are measured and continued to 64 in a straight line; `chunk` grows with the batch, so that four views or candidates go
at once as they do at 64. Paper: RTX 4090, batch 64, its table of time and memory.
"""

from __future__ import annotations

import gc
import sys
import time
import weakref

import torch
from timm.models.vision_transformer import VisionTransformer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

import come
from come.bench import paper

SIZES = (2, 4)
FORWARD_ONLY = (16, 32)  # T3A's supports weigh as much as a few images: a straight line begins behind them
BUFFER = 10_000 * 3 * 224 * 224 * 4  # of TEA; measured with a small one, since it is the same for every batch


class Live(TorchDispatchMode):
    """Counts the bytes of all storages that are alive."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.now = self.peak = 0

    def see(self, tensor: torch.Tensor) -> torch.Tensor:
        """Count the storage of `tensor`, until it is gone."""
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key not in self.alive:
            self.alive[key] = weakref.ref(storage, lambda _: self._gone(key, size))
            self.now += size
            self.peak = max(self.peak, self.now)
        return tensor

    def _gone(self, key: int, size: int) -> None:
        del self.alive[key]
        self.now -= size

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        tree_map_only(torch.Tensor, self.see, out)
        return out


def peak(method: str, size: int) -> float:
    """Megabytes."""
    torch.manual_seed(0)
    model = VisionTransformer()
    extra: dict[str, object] = {}
    known = come.methods.get(method).hyperparameters()
    images = torch.rand(size, 3, 224, 224)
    if "source" in known:
        extra["source"] = [torch.rand(2, 3, 224, 224)]
    if method in ("cotta", "foa"):
        extra["chunk"] = 4 * size
    if method == "cotta":
        extra["confident"] = 1.0  # the dear case: all views
    if method == "rotta":  # its memory is balanced over classes, but random weights predict one class: it may take half
        model = VisionTransformer(num_classes=2)
        extra |= {"capacity": 2 * size, "every": size}
    if method == "tea":
        extra["buffer"] = 4
    if method == "lame":
        extra["k"] = 1
    if method == "memo":
        images = images[:1]
    live = Live()
    live.see(images)
    with live:
        for parameter in model.parameters():
            live.see(parameter.detach())
        adapter = come.adapt(model, method, **extra)
        live.peak = live.now  # what it takes to make one does not count
        adapter(images)
        adapter(images)  # moments and buffers are there from the second step on
    found = live.peak
    adapter.close()
    return (found + (BUFFER if method == "tea" else 0)) / 2**20


def main() -> None:
    """Print one line per method."""
    published = {row.method: row for row in paper.get("cost").rows if row.objective == "em"}
    cost = paper.get("cost")
    print("| method | MB at batch 64 | of No Adapt | paper, MB | of No Adapt |\n|---|---:|---:|---:|---:|")
    base: float | None = None
    # No Adapt first: the others are compared with it.
    for method in sorted(sys.argv[1:] or come.methods.names(), key=lambda name: name != "source"):
        began = time.perf_counter()
        a, b = FORWARD_ONLY if method in ("source", "norm", "t3a", "lame") else SIZES
        small, large = peak(method, a), peak(method, b)
        whole = small + (large - small) / (b - a) * (64 - a)
        gc.collect()
        base = base or whole
        line = f"| {method} | {whole:,.0f} | {whole / base:.1f} |"
        if method in published:
            theirs = cost.value(method, "em", "stream", "memory_mb")
            line += f" {theirs:,.0f} | {theirs / cost.value('source', 'em', 'stream', 'memory_mb'):.1f} |"
        else:
            line += "  |  |"
        print(line, flush=True)
        print(f"{method}: {time.perf_counter() - began:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
