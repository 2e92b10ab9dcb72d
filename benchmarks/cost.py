"""What a grid costs on many workers: a cost model fed with measured rates, and its check on one and two workers.

    python benchmarks/cost.py             # the tables of docs/scale.md
    python benchmarks/cost.py --check     # runs a small grid with one and with two processes, and compares

A cell takes its number of images divided by the method's rate, and a worker takes `START` seconds before its first. Cells go to
the worker that is free first, the longest first, as `come bench` hands them out. Nothing else is in the model: no network, no
waiting for data, no failures.
"""

from __future__ import annotations

import argparse
import heapq
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

RATES = {
    **{"source": 10_076, "norm": 10_076, "t3a": 9_000, "lame": 9_000},
    **{
        "tent": 4_402,
        "pl": 4_402,
        "eata": 4_629,
        "rdumb": 4_629,
        "deyo": 3_000,
        "roid": 2_500,
        "sar": 2_308,
        "rotta": 1_500,
    },
    **{"foa": 202, "cotta": 198, "tea": 154, "memo": 22},
}
"""Images per second of ViT-B/16 on one H200, bf16, compiled where that is possible: docs/performance.md. Those of t3a, lame,
pl, rdumb, deyo, roid and rotta follow from the number of their passes and were not measured."""
START = 60.0
"""Seconds until a worker is ready: import, weights, compilation."""


def makespan(seconds: Iterable[float], workers: int, start: float = START) -> float:
    """Seconds until the last cell is done.

    >>> makespan([3.0, 2.0, 2.0], 2, start=1.0)
    5.0
    """
    free = [start] * workers
    heapq.heapify(free)
    last = 0.0
    for one in sorted(seconds, reverse=True):
        done = heapq.heappop(free) + one
        last = max(last, done)
        heapq.heappush(free, done)
    return last


def words(seconds: float) -> str:
    """A time for people."""
    return f"{seconds / 3600:.1f} h" if seconds < 72 * 3600 else f"{seconds / 86400:.1f} days"


def imagenet_c() -> None:
    """ImageNet-C in full: 75 corruptions and severities, 50,000 images, 16 methods, 3 seeds."""
    print("ImageNet-C in full, ViT-B/16, 16 methods, 3 seeds (3,600 cells)")
    for name, chosen in (("all", RATES), ("without MEMO", {k: v for k, v in RATES.items() if k != "memo"})):
        cells = [50_000 / rate for rate in chosen.values() for _ in range(75 * 3)]
        print(f"  {name}: {words(sum(cells))} of one GPU, longest cell {max(cells) / 60:.0f} min")
        for workers in (1, 8, 32, 64, 256):
            took = makespan(cells, workers)
            print(f"    {workers:>4} GPUs  {words(took):>10}   busy {100 * sum(cells) / workers / took:.0f}%")


def tenants(images: float = 1e9, many: int = 100_000) -> None:
    """A billion images a day for 100,000 tenants, Tent+COME."""
    rate, share = images / 86_400, 4 * 38_400 * 4
    print(f"{images:,.0f} images a day for {many:,} tenants: {rate:,.0f} images/s on average")
    for name, speed in (("ViT-B/16, one stream's rate", 4_402), ("ViT-B/16, at 0.5 of it in a fleet", 2_201)):
        for load in (1.0, 0.4):
            print(f"  {name}, {100 * load:.0f}% busy: {rate / speed / load:.0f} GPUs")
    print(f"  state: {share / 2**20:.2f} MB a tenant, {many * share / 2**30:.0f} GB in all")


def check() -> None:
    """A small grid with one process, and with two: predicted from the cells of the first, and measured."""
    from come.bench import Bench, Plan, RunFolder

    plan = Plan(
        methods=("source", "tent", "sar"),
        objectives=("em",),
        corruptions=("fog", "snow", "contrast", "frost"),
        limit=1024,
    )
    took, found = {}, {}
    with tempfile.TemporaryDirectory() as folder:
        for jobs in (1, 2):
            bench = Bench(plan, jobs=jobs)
            began = time.perf_counter()
            records = bench.run(RunFolder(Path(folder) / str(jobs)))
            took[jobs], found[jobs] = time.perf_counter() - began, [record.result.seconds for record in records]
    print(f"one worker: cells {sum(found[1]):.1f} s, run {took[1]:.1f} s")
    print(
        f"two workers: predicted {makespan(found[1], 2, start=0):.1f} s from the cells of one, measured {took[2]:.1f} s"
    )
    print(f"their cells took {sum(found[2]) / sum(found[1]):.2f} times as long as those of one worker")


def main() -> None:
    """Print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="run a small grid on this machine")
    if parser.parse_args().check:
        check()
    else:
        imagenet_c()
        tenants()


if __name__ == "__main__":
    main()
