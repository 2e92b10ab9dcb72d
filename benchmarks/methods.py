"""Time and memory of one step of every method, next to the paper's (an RTX 4090, batches of 64): parts of `speed.py`.

    python benchmarks/speed.py --only methods [--methods tent,sar] [--steps 100] [--model resnet50] [--tf32]
    python benchmarks/speed.py --only memory [--methods tent,sar]

methods, on a GPU: ViT-B/16 (or --model) with random weights at 224 x 224, batches of 64. Runs with and without the guard take
turns in blocks of ten steps, for `--steps` steps; the slowest methods make fewer. The guard's time has two parts: its checks,
and the batches on which it asks the source model, counted in the last column: six in the first eighty, later one in a hundred.

memory, on a CPU: the bytes of all tensors of a ViT-B/16 that are alive at the same time, weights included, seen at every
operation. This is exact and the same on every machine, without what a device adds (kernel workspaces, a caching allocator). A
step of 64 images is too slow for a CPU: two small batches are measured and extrapolated linearly. `chunk` grows with the batch,
so that four views or candidates go through at once as they do at 64.
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
import weakref
from collections.abc import Iterable

import timm
import torch
from timm.models.vision_transformer import VisionTransformer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

import come
from come.bench import paper

BATCH = 64
BLOCK = 10
SLOW = {"memo": 2, "foa": 6, "tea": 4, "cotta": 10}  # steps in all
SIZES = (2, 4)
FORWARD_ONLY = (16, 32)  # T3A's supports weigh as much as a few images: a straight line begins behind them
BUFFER = 10_000 * 3 * 224 * 224 * 4  # of TEA; measured with a small one, since it is the same for every batch


def in_order(names: Iterable[str]) -> list[str]:
    """No Adapt first: the others are compared with it."""
    return sorted(names, key=lambda name: name != "source")


def arguments(method: str, source: list[torch.Tensor]) -> dict[str, object]:
    """Source batches where the method takes them, and all views of CoTTA, its most expensive case."""
    found: dict[str, object] = {"confident": 1.0} if method == "cotta" else {}
    return found | ({"source": source} if "source" in come.methods.get(method).hyperparameters() else {})


def published(method: str, key: str) -> tuple[float, float] | None:
    """The paper's number for a method with EM, and its ratio to No Adapt; None if the paper has none."""
    cost = paper.get("cost")
    if method not in {row.method for row in cost.rows if row.objective == "em"}:
        return None
    value = cost.value(method, "em", "stream", key)
    return value, value / cost.value("source", "em", "stream", key)


# ---- on a GPU ----


def block(adapter: come.Adapter, batches: list[torch.Tensor], steps: int) -> float:
    """Seconds for a step."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    for i in range(steps):
        adapter(batches[i % len(batches)])
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / steps


def measure(
    name: str, model: torch.nn.Module, batches: list[torch.Tensor], steps: int
) -> tuple[float, float, float, float]:
    """Seconds for a step and megabytes, both without the guard; the ratio of times with it, and batches that it asked about."""

    def adapter(guard: come.Guard | bool) -> come.Adapter:
        source = [torch.rand(BATCH, 3, 224, 224, device="cuda") for _ in range(2)]
        return come.adapt(model, name, guard=guard, **arguments(name, source))

    counted = batches[0].nbytes + sum(p.nbytes for p in model.parameters())
    others = torch.cuda.memory_allocated() - counted
    bare = adapter(guard=False)
    block(bare, batches, 2)
    torch.cuda.reset_peak_memory_stats()
    block(bare, batches, 1)
    memory = (torch.cuda.max_memory_allocated() - others) / 2**20
    asked: list[float] = []
    guard = come.Guard(on_event=lambda e: asked.append(e.details["samples"]) if "agreement" in e.details else None)
    guarded = adapter(guard)
    block(guarded, batches, 2)
    size = min(BLOCK, max(1, steps // 2))
    times: list[tuple[float, float]] = []
    for i in range(max(1, steps // size)):
        pair = (bare, guarded) if i % 2 else (guarded, bare)
        seconds = {id(a): block(a, batches, size) for a in pair}
        times.append((seconds[id(bare)], seconds[id(guarded)]))
    without, with_guard = (sum(column) for column in zip(*times, strict=True))
    return statistics.median(t for t, _ in times), memory, with_guard / without, sum(asked) / BATCH


def on_device(names: Iterable[str], steps: int, name: str, tf32: bool) -> None:
    """Print one line per method."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = tf32
    torch.manual_seed(0)
    model = timm.create_model(name).cuda().eval()
    batches = [torch.rand(BATCH, 3, 224, 224, device="cuda") for _ in range(4)]
    print(f"TF32 {'on' if tf32 else 'off'}")
    print(
        "| method | steps | ms for a step | of No Adapt | paper | MB | of No Adapt | paper | with guard | batches asked |"
    )
    print("|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|")
    first: tuple[float, float] | None = None
    for method in in_order(names):
        taken = SLOW.get(method, steps)
        seconds, memory, ratio, asked = measure(method, model, batches, taken)
        torch.cuda.empty_cache()
        first = first or (seconds, memory)
        theirs = [f"{found[1]:.1f}" if (found := published(method, key)) else "" for key in ("seconds", "memory_mb")]
        print(
            f"| {method} | {taken} | {1000 * seconds:,.1f} | {seconds / first[0]:.1f} | {theirs[0]} | {memory:,.0f} | "
            f"{memory / first[1]:.1f} | {theirs[1]} | {ratio:.3f} | {asked:.1f} |",
            flush=True,
        )


# ---- counted ----


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
    images = torch.rand(size, 3, 224, 224)
    extra = arguments(method, [torch.rand(2, 3, 224, 224)])
    if method in ("cotta", "foa"):
        extra["chunk"] = 4 * size
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


def counted(names: Iterable[str]) -> None:
    """Print one line per method."""
    print("| method | MB at batch 64 | of No Adapt | paper, MB | of No Adapt |\n|---|---:|---:|---:|---:|")
    base: float | None = None
    for method in in_order(names):
        began = time.perf_counter()
        a, b = FORWARD_ONLY if method in ("source", "norm", "t3a", "lame") else SIZES
        small, large = peak(method, a), peak(method, b)
        whole = small + (large - small) / (b - a) * (BATCH - a)
        gc.collect()
        base = base or whole
        found = published(method, "memory_mb")
        theirs = f" {found[0]:,.0f} | {found[1]:.1f} |" if found else "  |  |"
        print(f"| {method} | {whole:,.0f} | {whole / base:.1f} |{theirs}", flush=True)
        print(f"{method}: {time.perf_counter() - began:.0f} s", file=sys.stderr)
