"""Many streams on one model, against an adapter for each, one after the other, in the same run and the same mode.

    python benchmarks/fleet.py --out fleet.json     # one GPU
    python benchmarks/fleet.py --tiny               # small models on a CPU: does everything run?

Random weights, guards on, Tent+COME at a tiny learning rate, bf16. A row: the time of a step of all streams after
the warm-up, images per second, and how many times as fast it is as its baseline. "memory" is what one stream takes on the
device, in multiples of its adapted parameters.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from speed import LR, build, machine, write_pictures
from torch import Tensor, nn

import come
from come.corruptions import names as corruptions
from come.state.files import replacing


class Lab:
    """Measures, prints and keeps."""

    def __init__(self, tiny: bool, out: Path | None) -> None:
        self.tiny, self.out, self.rows = tiny, out, list[dict[str, Any]]()
        self.device = torch.device("cpu" if tiny or not torch.cuda.is_available() else "cuda")
        self.mode: dict[str, Any] = {} if tiny else {"precision": "bf16"}

    def sync(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def steady(self, step: Callable[[], Any], warm: int, repeats: int) -> float:
        """The mean of steps without a wait between them, as in a stream."""
        for _ in range(warm):
            step()
        self.sync()
        began = time.perf_counter()
        for _ in range(repeats):
            step()
        self.sync()
        return (time.perf_counter() - began) / repeats

    def add(self, name: str, seconds: float, images: int, **more: Any) -> None:
        row = {"name": name, "ms": 1000 * seconds, "images_per_second": images / seconds, **more}
        self.rows.append(row)
        rest = ", ".join(
            f"{key} {value:.2f}" if isinstance(value, float) else f"{key} {value}" for key, value in more.items()
        )
        print(f"{name:<46} {row['ms']:>9.2f} {row['images_per_second']:>10,.0f}  {rest}", flush=True)
        if self.out is not None:
            with replacing(self.out) as new:
                new.write_text(json.dumps({"machine": machine(self.device), "rows": self.rows}, indent=1))

    def free(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def model(self, name: str) -> tuple[nn.Module, int]:
        """With random weights, and the side of its images."""
        return build(name, self.tiny).to(self.device), 32 if self.tiny else 64 if name == "vit_s" else 224

    def images(self, count: int, side: int) -> Tensor:
        draw = torch.Generator(self.device).manual_seed(0)
        return torch.rand(count, 3, side, side, generator=draw, device=self.device)


def names(streams: int, each: int) -> list[str]:
    """The stream of each sample."""
    return [str(i) for i in range(streams) for _ in range(each)]


def fleet(lab: Lab, model: nn.Module, side: int, streams: int, each: int, compile: bool = False, **more: Any) -> float:
    """Seconds for a step of all streams, with a row."""
    lab.free()
    x, ids = lab.images(streams * each, side), names(streams, each)
    before = torch.cuda.memory_allocated() if lab.device.type == "cuda" else 0
    made = come.Fleet(model, "tent", streams=streams, lr=LR, compile=compile and not lab.tiny, **lab.mode)
    warm = 40 if compile else 20  # with the first question to the source
    found = lab.steady(lambda: made(x, ids), warm=4 if lab.tiny else warm, repeats=3 if lab.tiny else 20)
    if lab.device.type == "cuda":
        size = 4 * sum(p.numel() for p in made.adapted_parameters("0").values())
        more["memory"] = (torch.cuda.memory_allocated() - before) / streams / size
        more["peak MB"] = round(torch.cuda.max_memory_allocated() / 2**20)
        torch.cuda.reset_peak_memory_stats()
    baseline = more.pop("baseline", None)
    if baseline is not None:
        more["times as fast"] = baseline / found
    lab.add(f"fleet, {streams} streams of {each}{', compiled' if compile else ''}", found, streams * each, **more)
    return found


def alone(lab: Lab, model: nn.Module, side: int, streams: int, each: int) -> float:
    """Seconds for a step of as many adapters, one after the other, with a row."""
    lab.free()
    x = lab.images(streams * each, side).split(each)
    made = [come.adapt(model, "tent", lr=LR, **lab.mode) for _ in range(streams)]

    def step() -> None:
        for adapter, mine in zip(made, x, strict=True):
            adapter(mine)

    found = lab.steady(step, warm=1, repeats=2)
    lab.add(f"{streams} adapters of {each}, one after the other", found, streams * each)
    return found


def one(lab: Lab, model: nn.Module, side: int, samples: int, compile: bool) -> float:
    """Seconds for a step of one adapter on as many samples, with a row."""
    lab.free()
    x = lab.images(samples, side)
    with come.adapt(model, "tent", lr=LR, compile=compile and not lab.tiny, **lab.mode) as adapter:
        found = lab.steady(lambda: adapter(x), warm=4 if lab.tiny else 20, repeats=3 if lab.tiny else 20)
    lab.add(f"adapter, one stream of {samples}{', compiled' if compile else ''}", found, samples)
    return found


def grid(lab: Lab, model: nn.Module) -> None:
    """`come bench` in the standard setting, one cell after the other and all corruptions at once, with what differs."""
    from come.bench import Plan
    from come.bench.data.folders import FolderSource
    from come.bench.folder import RunFolder
    from come.bench.models import Model, Preprocess
    from come.bench.runner import Bench

    count, classes, side = (32, 10, 32) if lab.tiny else (2000, 200, 64)
    with tempfile.TemporaryDirectory() as folder:
        write_pictures(Path(folder) / "data", count, classes, side)
        preprocess = Preprocess(side, side)
        plan = Plan(
            methods=("tent", "sar:margin=10"),
            objectives=("come",),
            corruptions=("fog", "contrast") if lab.tiny else tuple(corruptions("standard")),
            batch_size=16 if lab.tiny else 64,
            data=f"folder:{folder}/data",
            **lab.mode,
        )
        source = FolderSource(plan.data, f"{folder}/data", preprocess)
        first, baseline = dict[Any, Any](), 0.0
        for together, compile in (
            ((1, False), (2, False), (2, True)) if lab.tiny else ((1, False), (16, False), (16, True))
        ):
            bench = Bench(
                plan.model_copy(update={"compile": compile and not lab.tiny}),
                device=str(lab.device),
                source=source,
                workers=0 if lab.tiny else 8,
                model=Model("m", model, preprocess, classes),
                together=together,
            )
            if not first:
                bench.cells, cells = bench.cells[:1], bench.cells
                bench.run(RunFolder(Path(folder) / "first"))  # decodes
                bench.cells = cells
            lab.sync()
            began = time.perf_counter()
            found = bench.run(RunFolder(Path(folder) / f"run{together}{compile}"))
            took = time.perf_counter() - began
            accuracies = {(r.cell.method, d): m["accuracy"] for r in found for d, m in r.result.metrics.items()}
            first, baseline = first or accuracies, baseline or took
            off = max(abs(value - first[key]) for key, value in accuracies.items())
            lab.add(
                f"come bench, {len(found)} cells, {together} at once{', compiled' if compile else ''}",
                took,
                sum(record.result.samples for record in found),
                **{"times as fast": baseline / took, "points off": 100 * off},
            )


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    """Print the table, row by row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="small models on the CPU")
    parser.add_argument("--out", type=Path, help="a JSON file, written anew after every row")
    options = parser.parse_args(arguments)
    lab = Lab(options.tiny, options.out)
    print(", ".join(f"{key} {value}" for key, value in machine(lab.device).items()))
    print(f"{'':<46} {'ms':>9} {'images/s':>10}")
    many, each = (6, 2) if lab.tiny else (256, 4)
    model, side = lab.model("vit_s")
    print("ViT-S/8 at 64 x 64")
    baseline = alone(lab, model, side, many, each)
    for compile in (False, True):
        fleet(lab, model, side, many, each, compile, baseline=baseline)
    for streams in (4, 8) if lab.tiny else (1, 64, 1024):
        fleet(lab, model, side, streams, 1)
    grid(lab, model)
    del model
    lab.free()
    print("ViT-B/16")
    model, side = lab.model("vit_b")
    streams = 4 if lab.tiny else 64
    for compile in (False, True):
        single = one(lab, model, side, streams, compile)
        fleet(lab, model, side, streams, 1, compile, baseline=single)
    return lab.rows


if __name__ == "__main__":
    main()
    sys.exit(0)
