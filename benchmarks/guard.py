"""What the guard does on `glyphs`, and what it costs.

    python benchmarks/guard.py collapse     streams on which methods collapse, guard off and on
    python benchmarks/guard.py alarms       healthy streams: every corruption, severity and seed; any recovery is a false alarm
    python benchmarks/guard.py cost         time of a step with the guard over the time without, alternating

Learning rates above the paper's make a collapse come within 75 batches; at the paper's own it takes far longer on this data.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import time
from collections.abc import Iterator

import torch

import come
from come import corruptions, models
from come.data import Batch, Geometry, Stream, batches, open_source

SIZE = 4800


class World:
    """The embedded data and the ViT."""

    def __init__(self, size: int) -> None:
        self.model = models.load("glyphs-vit")
        p = self.model.preprocess
        self.name = f"glyphs:{size}"
        self.source = open_source(self.name, Geometry(p.size, p.resize, p.interpolation))

    def stream(self, corruption: str, severity: int = 5, seed: int = 0) -> Iterator[Batch]:
        """All images, in batches of 64."""
        order = Stream.shuffled(self.name, len(self.source), corruption=corruption, severity=severity, seed=seed)
        return batches(self.source, order, self.model.preprocess, batch_size=64)

    def run(self, data: list[Batch], method: str, objective: str, guard: come.Guard | bool, **more: float) -> float:
        """Accuracy in percent."""
        arguments = {"beta": 0.0} | more if method == "eata" else more
        with come.adapt(self.model.module, method, objective, guard=guard, **arguments) as adapter:
            right = [(adapter(b.images).argmax(dim=1) == b.labels).float().mean().item() for b in data]
        return 100 * sum(right) / len(right)


def collapse() -> None:
    """A table: method, objective, guard off and on."""
    world = World(SIZE)
    print("| stream | method | lr | objective | source | guard off | guard on | collapses found | at batch |")
    print("|---|---|---:|---|---:|---:|---:|---:|---:|")
    for corruption in ("contrast", "fog"):
        data = list(world.stream(corruption))
        source = world.run(data, "source", "em", False)
        for method, lr in (("tent", 0.01), ("tent", 0.03), ("eata", 0.03), ("sar", 0.1)):
            for objective in ("em", "come"):
                found: list[int] = []
                guard = come.Guard(
                    on_event=lambda e, found=found: found.append(e.step) if e.kind == "collapse" else None
                )
                off = world.run(data, method, objective, False, lr=lr)
                on = world.run(data, method, objective, guard, lr=lr)
                where = ", ".join(map(str, found)) or "-"
                row = (corruption, method, lr, objective, f"{source:.1f}", f"{off:.1f}", f"{on:.1f}", len(found), where)
                print("| " + " | ".join(map(str, row)) + " |", flush=True)


def alarms(size: int, seeds: int, pairs: str) -> None:
    """Count what the guard does on healthy streams at the paper's learning rate."""
    world = World(size)
    print("| method | objective | streams | asked the source | recovered | same numbers as without |")
    print("|---|---|---:|---:|---:|---:|")
    for method, objective in (pair.split("+") for pair in pairs.split(",")):
        counts = {"streams": 0, "suspicious": 0, "recovered": 0, "same": 0}
        for corruption in corruptions.names("standard"):
            for severity in range(1, 6):
                for seed in range(seeds):
                    data = list(world.stream(corruption, severity, seed))
                    guard = come.Guard()
                    with_guard = world.run(data, method, objective, guard)
                    counts["streams"] += 1
                    counts["suspicious"] += guard.counters.get("suspicious", 0)
                    counts["recovered"] += guard.counters.get("recovered", 0)
                    if severity == 5 and seed == 0:
                        counts["same"] += with_guard == world.run(data, method, objective, False)
        print(
            f"| {method} | {objective} | "
            + " | ".join(map(str, counts.values()))
            + f" of {len(corruptions.names('standard'))} |",
            flush=True,
        )


def cost(rounds: int) -> None:
    """Ratio of times, median over rounds, with and without taking turns."""
    world = World(640)
    data = list(world.stream("fog"))
    for method in ("tent", "eata", "sar"):
        times: dict[bool, list[float]] = {True: [], False: []}
        for _ in range(rounds):
            for guard in (True, False):
                began = time.perf_counter()
                world.run(data, method, "come", guard)
                times[guard].append(time.perf_counter() - began)
        ratios = [a / b for a, b in zip(times[True], times[False], strict=True)]
        print(
            f"{method}: {statistics.median(ratios):.3f} of the time without the guard ({rounds} rounds of 10 batches of 64)",
            flush=True,
        )


def main() -> None:
    """Run one of the three."""
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("collapse", "alarms", "cost"))
    parser.add_argument("--size", type=int, default=1920)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--pairs", default="tent+come,tent+em,sar+come", help="of alarms")
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable()
    if options.what == "collapse":
        collapse()
    elif options.what == "alarms":
        alarms(options.size, options.seeds, options.pairs)
    else:
        cost(options.rounds)


if __name__ == "__main__":
    main()
