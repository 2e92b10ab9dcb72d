"""What the guard does on `glyphs`, and what it costs.

    python benchmarks/guard.py collapse     streams on which methods collapse, guard off and on
    python benchmarks/guard.py alarms       healthy streams, at the paper's learning rates: any recovery is a false alarm
    python benchmarks/guard.py cost         time of a step with the guard over the time without, taking turns

The first two are grids of `come bench`, run by several processes on one folder. Learning rates above the paper's make a
collapse come within 75 batches; at the paper's own it takes far longer on this data.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import statistics
import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import torch

import come
from come import corruptions, models
from come.bench import Bench, Plan, RunFolder
from come.bench.store import Record
from come.data import Geometry, Stream, batches, open_source

RATES = ("tent:lr=0.01", "tent:lr=0.03", "eata:lr=0.03", "sar:lr=0.1", "deyo:lr=0.01", "roid:lr=0.01")
COLLAPSING = ("contrast", "fog", "glass_blur")
ALL = ("tent", "eata", "sar", "deyo", "roid", "rdumb", "cotta", "rotta", "pl", "tea", "t3a", "foa", "memo")


def runner(plans: list[Plan], out: str, device: str) -> None:
    """Work on the plans, together with whoever else does."""
    torch.set_num_threads(1)
    logging.disable()
    for plan in plans:
        Bench(plan, device=device).run(RunFolder(out))


def records(plans: list[Plan], out: str, device: str, jobs: int) -> list[list[Record]]:
    """The records of each plan, in its order."""
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        pool.starmap(runner, [(plans, out, device)] * jobs, chunksize=1)
    return [Bench(plan).run(RunFolder(out)) for plan in plans]


def accuracy(record: Record) -> float:
    """In percent, mean over domains, which are of one size."""
    return statistics.fmean(100 * metrics["accuracy"] for metrics in record.result["metrics"].values())


def onset(folder: RunFolder, record: Record, source: Record) -> int | None:
    """The first batch from which on, over five batches, accuracy is five points below the source's; None if there is none."""
    size = record.cell["batch_size"]
    right = [rows["prediction"] == rows["label"] for rows in (folder.rows(record.key), folder.rows(source.key))]
    lead = (right[0].double() - right[1].double())[: len(right[0]) // size * size].view(-1, size).mean(dim=1)
    means = lead.unfold(0, 5, 1).mean(dim=1)
    below = (means < -0.05).nonzero()
    return int(below[0]) if len(below) else None


def collapse(out: str, device: str, jobs: int) -> None:
    """A table: method, objective, guard off and on."""
    off = Plan(methods=("source", *RATES), objectives=("em", "come"), corruptions=COLLAPSING, data="glyphs:4800")
    plans = [off, replace(off, guard=True)]
    found = {
        (r.cell["method"], r.cell["objective"], r.cell["corruptions"][0], r.cell["guard"]): r
        for part in records(plans, out, device, jobs)
        for r in part
    }
    folder = RunFolder(out)
    print(
        "| stream | method | objective | source | guard off | guard on | below from batch | collapse found at batch |"
    )
    print("|---|---|---|---:|---:|---:|---:|---|")
    for corruption in COLLAPSING:
        nothing = found["source", "em", corruption, False]
        for method in RATES:
            for objective in ("em", "come"):
                bare, guarded = (found[method, objective, corruption, guard] for guard in (False, True))
                where = [step for kind, step in guarded.result["events"] if kind == "collapse"]
                row = (corruption, method, objective, *(f"{accuracy(r):.1f}" for r in (nothing, bare, guarded)))
                below = onset(folder, bare, nothing)
                print(
                    "| "
                    + " | ".join((*row, "-" if below is None else str(below), ", ".join(map(str, where)) or "-"))
                    + " |"
                )


def alarms(out: str, options: argparse.Namespace) -> None:
    """Count what the guard does on healthy streams."""
    every = Plan(
        model=options.model,
        data=f"glyphs:{options.size}",
        methods=tuple(options.methods.split(",")),
        objectives=tuple(options.objectives.split(",")),
        seeds=tuple(map(int, options.seeds.split(","))),
        corruptions=tuple(corruptions.names("standard")),
    )
    streams = [replace(every, severity=int(severity)) for severity in options.severities.split(",")]
    streams += [replace(every, setting=setting) for setting in options.settings.split(",") if setting]
    plans = [replace(plan, guard=guard) for plan in streams for guard in (False, True)]
    counts: dict[tuple[str, str], Counter[str]] = {}
    done = records(plans, out, options.device, options.jobs)
    for without, with_guard in zip(done[::2], done[1::2], strict=True):
        for bare, guarded in zip(without, with_guard, strict=True):
            cell = guarded.cell
            setting = cell["setting"] if cell["setting"] in ("standard", "imbalanced") else "lifelong, mixed"
            count = counts.setdefault((cell["method"], cell["objective"]), Counter())
            health = guarded.result["health"]
            count["streams"] += 1
            count["batches"] += guarded.result["samples"] // cell["batch_size"]
            count["suspicious"] += int(health["suspicious"])
            count[f"recovered {setting}"] += int(health["recovered"])
            count["same"] += bare.result["metrics"] == guarded.result["metrics"]
            count["worse"] += accuracy(guarded) < accuracy(bare) - 0.05
            count["better"] += accuracy(guarded) > accuracy(bare) + 0.05
    columns = (
        "streams",
        "batches",
        "suspicious",
        "recovered standard",
        "recovered lifelong, mixed",
        "recovered imbalanced",
    )
    print("| method | objective | " + " | ".join((*columns, "same numbers", "better", "worse")) + " |")
    print("|---|---|" + "---:|" * (len(columns) + 3))
    for (method, objective), count in counts.items():
        values = [count[name] for name in (*columns, "same", "better", "worse")]
        print(f"| {method} | {objective} | " + " | ".join(map(str, values)) + " |")


def cost(rounds: int, steps: int) -> None:
    """Ratio of times, with and without taking turns; the checks at which the source is asked are among the steps."""
    torch.set_num_threads(1)
    model = models.load("glyphs-vit")
    p = model.preprocess
    source = open_source("glyphs:1280", Geometry(p.size, p.resize, p.interpolation))
    stream = Stream.shuffled("glyphs:1280", len(source), corruption="fog", severity=5, seed=0)
    data = [batch.images for batch in batches(source, stream, p, batch_size=64)]
    for method in ("tent", "eata", "sar"):
        arguments = {"beta": 0.0} if method == "eata" else {}
        times: dict[bool, list[float]] = {True: [], False: []}
        for _ in range(rounds):
            for guard in (True, False):
                with come.adapt(model.module, method, guard=guard, **arguments) as adapter:
                    began = time.perf_counter()
                    for i in range(steps):
                        adapter(data[i % len(data)])
                    times[guard].append(time.perf_counter() - began)
        ratios = [a / b for a, b in zip(times[True], times[False], strict=True)]
        print(
            f"{method}: {statistics.median(ratios):.3f} of the time without the guard "
            f"(median of {rounds} rounds of {steps} batches of 64, {min(ratios):.3f} to {max(ratios):.3f})",
            flush=True,
        )


def main() -> None:
    """Run one of the three."""
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("collapse", "alarms", "cost"))
    parser.add_argument("--out", type=Path, help="run folder; what is done there is not run again [a temporary one]")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--size", type=int, default=3200, help="of alarms: images in a stream")
    parser.add_argument("--seeds", default="0", help="of alarms")
    parser.add_argument("--severities", default="1,2,3,4,5", help="of alarms")
    parser.add_argument("--settings", default="lifelong,mixed,imbalanced", help="of alarms, beside the standard one")
    parser.add_argument("--methods", default=",".join(ALL), help="of alarms")
    parser.add_argument("--objectives", default="em,come", help="of alarms")
    parser.add_argument("--model", default="glyphs-vit", help="of alarms")
    parser.add_argument("--rounds", type=int, default=7, help="of cost")
    parser.add_argument("--steps", type=int, default=100, help="of cost")
    options = parser.parse_args()
    logging.disable()
    with tempfile.TemporaryDirectory() as scratch:
        out = str(options.out or scratch)
        if options.what == "collapse":
            collapse(out, options.device, options.jobs)
        elif options.what == "alarms":
            alarms(out, options)
        else:
            cost(options.rounds, options.steps)


if __name__ == "__main__":
    main()
