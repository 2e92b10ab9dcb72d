"""Time and memory of one adaptation step on a GPU for every method, next to the paper's, and what the guard adds.

    python benchmarks/device.py [METHOD ...] [--steps 100] [--model resnet50] [--tf32]

ViT-B/16 (or --model) with random weights at 224 x 224, batches of 64, as in the paper's table (an RTX 4090). Runs with and
without the guard take turns in blocks of ten steps and go on for `--steps` of them; methods that take a second or more for a
step make fewer, and say how many. The guard's time has two parts: its checks, and the batches that it asks the source model
about. How many these were is in the last column; a long stream has one in a hundred batches, but here there are six in the
first eighty.
"""

from __future__ import annotations

import argparse
import statistics
import time

import timm
import torch

import come
from come.bench import paper

BATCH = 64
BLOCK = 10
SLOW = {"memo": 2, "foa": 6, "tea": 4, "cotta": 10}  # steps in all


def adapter(model: torch.nn.Module, method: str, guard: come.Guard | bool) -> come.Adapter:
    """As a user would make it, with source batches where the method takes them."""
    extra: dict[str, object] = {}
    if "source" in come.methods.get(method).hyperparameters():
        extra["source"] = [torch.rand(BATCH, 3, 224, 224, device="cuda") for _ in range(2)]
    if method == "cotta":
        extra["confident"] = 1.0  # the dear case: all views
    return come.adapt(model, method, guard=guard, **extra)


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
    counted = batches[0].nbytes + sum(p.nbytes for p in model.parameters())
    others = torch.cuda.memory_allocated() - counted
    bare = adapter(model, name, guard=False)
    block(bare, batches, 2)
    torch.cuda.reset_peak_memory_stats()
    block(bare, batches, 1)
    memory = (torch.cuda.max_memory_allocated() - others) / 2**20
    asked: list[float] = []
    verdicts = come.Guard(on_event=lambda e: asked.append(e.details["samples"]) if "agreement" in e.details else None)
    guarded = adapter(model, name, guard=verdicts)
    block(guarded, batches, 2)
    size = min(BLOCK, max(1, steps // 2))
    times: list[tuple[float, float]] = []
    for i in range(max(1, steps // size)):
        pair = (bare, guarded) if i % 2 else (guarded, bare)
        seconds = {id(a): block(a, batches, size) for a in pair}
        times.append((seconds[id(bare)], seconds[id(guarded)]))
    without, with_guard = (sum(column) for column in zip(*times, strict=True))
    return statistics.median(t for t, _ in times), memory, with_guard / without, sum(asked) / BATCH


def main() -> None:
    """Print one line per method."""
    parser = argparse.ArgumentParser()
    parser.add_argument("methods", nargs="*", default=come.methods.names())
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--model", default="vit_base_patch16_224", help="of timm, with random weights")
    parser.add_argument(
        "--tf32", action="store_true", help="matrix products in TF32: the same waits, less to do in between"
    )
    options = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = options.tf32
    published = paper.get("cost")
    rows = {row.method for row in published.rows if row.objective == "em"}
    torch.manual_seed(0)
    model = timm.create_model(options.model).cuda().eval()
    batches = [torch.rand(BATCH, 3, 224, 224, device="cuda") for _ in range(4)]
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, TF32 {'on' if options.tf32 else 'off'}")
    print(
        "| method | steps | ms for a step | of No Adapt | paper | MB | of No Adapt | paper | with guard | batches asked |"
    )
    print("|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|")
    first: tuple[float, float] | None = None
    for name in sorted(options.methods, key=lambda name: name != "source"):  # the others are compared with it
        steps = SLOW.get(name, options.steps)
        seconds, memory, ratio, asked = measure(name, model, batches, steps)
        torch.cuda.empty_cache()
        first = first or (seconds, memory)
        theirs = ["", ""]
        if name in rows:
            theirs = [
                f"{published.value(name, 'em', 'stream', key) / published.value('source', 'em', 'stream', key):.1f}"
                for key in ("seconds", "memory_mb")
            ]
        print(
            f"| {name} | {steps} | {1000 * seconds:,.1f} | {seconds / first[0]:.1f} | {theirs[0]} | {memory:,.0f} | "
            f"{memory / first[1]:.1f} | {theirs[1]} | {ratio:.3f} | {asked:.1f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
