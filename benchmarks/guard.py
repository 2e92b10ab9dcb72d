"""What the guard does on `glyphs`, and what it costs.

    python benchmarks/guard.py collapse     learning rates 10 to 100 times the paper's: streams on which methods collapse
    python benchmarks/guard.py alarms       the paper's rates: healthy streams, every collapse that is reported is a false alarm
    python benchmarks/guard.py batchnorm    small batches and class-sorted streams on a BatchNorm model
    python benchmarks/guard.py cost         time of a step with the guard over the time without, taking turns

Each stream is run with the guard and without it. Results of the first three are averages in percent.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import come
from come import corruptions
from come.bench import models
from come.bench.data import Stream, batches, open_source

RATES = (("tent", 10), ("tent", 30), ("eata", 30), ("sar", 100), ("deyo", 10), ("roid", 40))
"""Methods and how many times the paper's rate, so that a collapse comes within 75 batches."""
SMALL = {"cotta": {"views": 4}, "foa": {"population": 6}, "memo": {"views": 4}, "tea": {"dreams": 3, "buffer": 1000}}
"""What keeps the slow methods short here."""


class Data(NamedTuple):
    """One stream of images."""

    model: str
    corruption: str
    severity: int
    order: str
    size: int
    seed: int = 0

    def load(self) -> tuple[torch.nn.Module, Any, Tensor, Tensor]:
        """Model, preprocessing, images and labels."""
        model = models.load(self.model)
        p, name = model.preprocess, f"glyphs:{self.size}"
        source = open_source(name, p)
        clean = self.corruption == "clean"
        stream = Stream.shuffled(
            name,
            self.size,
            corruption=None if clean else self.corruption,
            severity=max(1, self.severity),
            seed=self.seed,
        )
        parts = list(batches(source, stream, p, batch_size=256))
        x, y = torch.cat([part.images for part in parts]), torch.cat([part.labels for part in parts])
        if self.order == "sorted":
            chosen = y.argsort(stable=True)
            x, y = x[chosen], y[chosen]
        return model.module, p, x, y


class Job(NamedTuple):
    """One adapter on one stream."""

    method: str
    objective: str = "come"
    times: float = 1.0
    batch: int = 64


def adapter(module: torch.nn.Module, preprocess: Any, job: Job, guard: bool, source: list[Tensor]) -> come.Adapter:
    """As a user would make it."""
    chosen = come.methods.get(job.method)
    known, more = chosen.hyperparameters(), dict(SMALL.get(job.method, {}))
    if "source" in known and "ViT" in chosen.needs:
        more["source"] = source
    elif "beta" in known:
        more["beta"] = 0.0
    if "normalization" in known:
        more["normalization"] = (preprocess.mean, preprocess.std)
    if job.times != 1:
        paper = come.adapt(module, job.method, guard=False, **more)
        more["lr"] = paper.learning_rate(job.batch) * job.times
    return come.adapt(module, job.method, objective=job.objective, guard=guard, **more)


def run(task: tuple[Data, list[Job], str]) -> list[dict[str, Any]]:
    """All jobs on one stream, each with and without the guard."""
    data, jobs, device = task
    torch.set_num_threads(1)
    logging.disable()
    module, preprocess, x, y = data.load()
    module, x, y = module.eval().to(device), x.to(device), y.to(device)
    found = []
    with torch.no_grad():
        known = torch.cat([module(part).argmax(dim=1) for part in x.split(256)])
    right = (known == y).double().cpu()
    clean = Data(data.model, "clean", 1, "shuffled", 64).load()[2].to(device) if jobs else None
    for job, guard in product(jobs, (False, True)):
        try:
            made = adapter(module, preprocess, job, guard, [clean] if clean is not None else [])
        except come.ModelError:  # FOA on a ResNet
            continue
        events: list[come.Event] = []
        if guard:
            made.guard = come.Guard(on_event=events.append)
        try:
            mine = torch.cat([made(part).argmax(dim=1) for part in x.split(job.batch)])
        except come.InputError:  # LAME on a batch of one
            continue
        hits = (mine == y).double().cpu()
        later = slice(640, None)
        found.append(
            {
                **{"data": data._asdict(), "job": job._asdict(), "guard": guard},
                "source": 100 * right.mean().item(),
                "accuracy": 100 * hits.mean().item(),
                "source_later": 100 * right[later].mean().item(),
                "accuracy_later": 100 * hits[later].mean().item(),
                "onset": onset(hits, right, job.batch),
                "same": None,
                "prediction": mine.cpu().tolist(),
                "collapse": [event.step for event in events if event.kind == "collapse"],
                "statistics": [event.step for event in events if event.kind == "statistics"],
                "raised": sum(event.kind == "raised" for event in events),
                "checks": sum(event.kind in ("healthy", "collapse", "statistics") for event in events),
            }
        )
        if guard and len(found) > 1:
            found[-1]["same"] = found[-1]["prediction"] == found[-2]["prediction"]
    for one in found:
        del one["prediction"]
    return found


def onset(mine: Tensor, source: Tensor, size: int) -> int | None:
    """The first batch from which on, over five batches, accuracy is five points below the source's; None if there is none."""
    lead = (mine - source)[: len(mine) // size * size].view(-1, size).mean(dim=1)
    if len(lead) < 5:
        return None
    below = (lead.unfold(0, 5, 1).mean(dim=1) < -0.05).nonzero()
    return int(below[0]) if len(below) else None


def everything(tasks: list[tuple[Data, list[Job], str]], jobs: int) -> Iterator[dict[str, Any]]:
    """Results of all tasks, as they come."""
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        for part in pool.imap_unordered(run, tasks):
            yield from part


def split(tasks: list[tuple[Data, list[Job], str]], most: int) -> list[tuple[Data, list[Job], str]]:
    """Tasks of at most so many jobs."""
    return [(data, jobs[i : i + most], device) for data, jobs, device in tasks for i in range(0, len(jobs), most)]


def pairs(results: list[dict[str, Any]]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """(without, with) the guard."""
    off = {json.dumps([r["data"], r["job"]]): r for r in results if not r["guard"]}
    return [(off[json.dumps([r["data"], r["job"]])], r) for r in results if r["guard"]]


def collapse(results: list[dict[str, Any]]) -> None:
    """One row for each stream."""
    print(
        "| model | stream | order | method | rate | source | guard off | guard on | below from batch | found at batch |"
    )
    print("|---|---|---|---|---:|---:|---:|---:|---:|---|")
    counts: Counter[str] = Counter()
    for off, on in sorted(pairs(results), key=lambda pair: json.dumps([pair[0]["data"], pair[0]["job"]])):
        data, job = off["data"], off["job"]
        lost = off["onset"] is not None
        counts["streams"] += 1
        counts["fall without"] += lost
        counts["fall without, and are found"] += lost and bool(on["collapse"] or on["statistics"])
        counts["at or above the source with"] += on["accuracy"] >= on["source"] - 0.5
        counts["at or above the source without"] += off["accuracy"] >= off["source"] - 0.5
        counts["worse by the guard by a point or more"] += on["accuracy"] < off["accuracy"] - 1
        where = ", ".join(map(str, on["collapse"] + on["statistics"])) or "-"
        below = "-" if off["onset"] is None else off["onset"]
        print(
            f"| {data['model'].removeprefix('glyphs-')} | {data['corruption']} | {data['order']} | {job['method']} + "
            f"{job['objective']} | x{job['times']:g} | {off['source']:.1f} | {off['accuracy']:.1f} | {on['accuracy']:.1f} | "
            f"{below} | {where} |"
        )
    print(dict(counts))


def alarms(results: list[dict[str, Any]]) -> None:
    """One row for each model, order and method."""
    rows: dict[tuple[str, ...], Counter[str]] = {}
    gains: dict[tuple[str, ...], list[float]] = {}
    for off, on in pairs(results):
        data, job = off["data"], off["job"]
        key = (data["model"].removeprefix("glyphs-"), data["order"], job["method"])
        count = rows.setdefault(key, Counter())
        count["streams"] += 1
        count["batches"] += data["size"] // job["batch"]
        count["checks"] += on["checks"]
        count["false"] += bool(on["collapse"]) and off["onset"] is None
        count["right"] += bool(on["collapse"]) and off["onset"] is not None
        count["statistics"] += bool(on["statistics"])
        count["same"] += on["same"]
        gains.setdefault(key, []).append(on["accuracy"] - off["accuracy"])
    names = ("streams", "batches", "checks", "false", "right", "statistics", "same")
    heads = ("streams", "batches", "checks", "false alarms", "alarms, fell", "statistics given up", "same predictions")
    print("| model | order | method | " + " | ".join(heads) + " | guard - bare, worst | mean |")
    print("|---|---|---|" + "---:|" * (len(heads) + 2))
    for key, count in sorted(rows.items()):
        values = " | ".join(str(count[name]) for name in names)
        print(f"| {' | '.join(key)} | {values} | {min(gains[key]):+.1f} | {statistics.fmean(gains[key]):+.1f} |")


def batchnorm(results: list[dict[str, Any]]) -> None:
    """One row for each method."""
    streams = [("shuffled", 1), ("shuffled", 2), ("shuffled", 4), ("shuffled", 64), ("sorted", 64)]
    cells: dict[tuple[str, str], dict[tuple[str, int], str]] = {}
    for off, on in pairs(results):
        data, job = off["data"], off["job"]
        row = cells.setdefault((data["corruption"], job["method"]), {})
        row[data["order"], job["batch"]] = (
            f"{on['source_later']:.1f} / {off['accuracy_later']:.1f} / {on['accuracy_later']:.1f}"
        )
    print("| data | method | " + " | ".join(f"{order}, {size}" for order, size in streams) + " |")
    print("|---|---|" + "---|" * len(streams))
    for (corruption, method), row in sorted(cells.items()):
        print(f"| {corruption} | {method} | " + " | ".join(row.get(stream, "-") for stream in streams) + " |")


def cost(rounds: int, steps: int) -> None:
    """Ratio of times, with and without taking turns; the checks at which the source is asked are among the steps."""
    torch.set_num_threads(1)
    module, _, x, _ = Data("glyphs-vit", "fog", 5, "shuffled", 1280).load()
    data = x.split(64)
    for method in ("tent", "eata", "sar"):
        more = {"beta": 0.0} if method == "eata" else {}
        times: dict[bool, list[float]] = {True: [], False: []}
        for _ in range(rounds):
            for guard in (True, False):
                made = come.adapt(module, method, guard=guard, **more)
                began = time.perf_counter()
                for i in range(steps):
                    made(data[i % len(data)])
                times[guard].append(time.perf_counter() - began)
        ratios = [a / b for a, b in zip(times[True], times[False], strict=True)]
        print(
            f"{method}: {statistics.median(ratios):.3f} of the time without the guard "
            f"(median of {rounds} rounds of {steps} batches of 64, {min(ratios):.3f} to {max(ratios):.3f})",
            flush=True,
        )


def plan(what: str, options: argparse.Namespace) -> list[tuple[Data, list[Job], str]]:
    """What to run."""
    both, device, size = ("glyphs-vit", "glyphs-resnet"), options.device, options.size
    if what == "collapse":
        jobs = [Job(method, objective, times) for method, times in RATES for objective in ("em", "come")]
        streams = [
            Data(model, corruption, 5, order, size)
            for model in both
            for corruption in ("contrast", "fog", "glass_blur")
            for order in ("shuffled", "sorted")
        ]
        return [(data, jobs, device) for data in streams]
    if what == "batchnorm":
        jobs = [Job(method, batch=batch) for method in options.methods for batch in (1, 2, 4, 64)]
        tasks = [(Data("glyphs-resnet", c, s, "shuffled", size), jobs, device) for c, s in (("clean", 1), ("fog", 2))]
        one = [Job(method) for method in options.methods]
        return tasks + [
            (Data("glyphs-resnet", c, s, "sorted", size), one, device) for c, s in (("clean", 1), ("fog", 2))
        ]
    chosen = [
        Job(m, o) for m in options.methods for o in (("em", "come") if come.methods.get(m).minimizes else ("come",))
    ]
    names = corruptions.names("standard") if options.corruptions == "all" else options.corruptions.split(",")
    streams = [
        Data(model, corruption, severity, order, size)
        for model in both
        for corruption in names
        for severity in map(int, options.severities.split(","))
        for order in ("shuffled", "sorted")
    ]
    return [(data, chosen, device) for data in streams]


def main() -> None:
    """Run one of them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("collapse", "alarms", "batchnorm", "cost"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--size", type=int, default=4800, help="images in a stream")
    parser.add_argument("--severities", default="3,5", help="of alarms")
    parser.add_argument("--corruptions", default="all", help="of alarms")
    parser.add_argument("--methods", type=lambda text: text.split(","), default=["tent", "eata", "sar", "deyo", "roid"])
    parser.add_argument("--rounds", type=int, default=7, help="of cost")
    parser.add_argument("--steps", type=int, default=100, help="of cost")
    parser.add_argument("--out", type=Path, help="also write the results here, as JSON")
    options = parser.parse_args()
    if options.what == "cost":
        cost(options.rounds, options.steps)
        return
    began = time.perf_counter()
    results = list(
        everything(split(plan(options.what, options), 1 if options.what == "batchnorm" else 6), options.jobs)
    )
    if options.out is not None:
        options.out.write_text(json.dumps(results))
    {"collapse": collapse, "alarms": alarms, "batchnorm": batchnorm}[options.what](results)
    print(f"{len(results)} runs in {time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
