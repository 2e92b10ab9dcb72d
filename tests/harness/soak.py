"""Does anything grow? Every method for many steps on a tiny model: resident memory and live Python objects.

    python tests/harness/soak.py [--steps 20000] [METHOD ...]

Each method runs in a process of its own, guard on, with a damaged sample now and then. Memory and objects are read after a
warm-up of a tenth of the steps and at the end.
"""

from __future__ import annotations

import argparse
import gc
import logging
import multiprocessing
import time
from pathlib import Path

import torch

import come
from come.testing import NORMS, TinyClassifier, TinyTransformer, batches

SMALL = {
    "cotta": {"views": 2, "confident": 0.6},
    "foa": {"prompts": 1, "population": 3},
    "memo": {"views": 2},
    "rotta": {"capacity": 8, "every": 8},
    "tea": {"dreams": 1, "buffer": 20},
    "lame": {"k": 2},
}


def resident() -> float:
    """Megabytes."""
    status = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in status if line.startswith("VmRSS")).split()[1]) / 1024


def soak(method: str, steps: int, results: multiprocessing.Queue) -> None:
    """Run, and report memory and objects after the warm-up and at the end."""
    torch.set_num_threads(1)
    logging.disable()
    chosen = come.methods.get(method)
    model = (TinyTransformer if "ViT" in chosen.needs else TinyClassifier)(NORMS["batch"])
    arguments = dict(SMALL.get(method, {}))
    if "source" in chosen.hyperparameters():
        arguments["source"] = batches(2, seed=9)
    if "normalization" in chosen.hyperparameters():
        arguments["normalization"] = ((0.45,), (0.07,))
    adapter = come.adapt(model, method, lr=1e-4, **arguments)
    data = batches(50, size=4)
    for i in range(0, 50, 10):
        data[i][0] = torch.nan
    seen = []
    began = time.perf_counter()
    for number in range(steps):
        adapter(data[number % 50])
        if number + 1 in (steps // 10, steps):
            gc.collect()
            seen.append((resident(), len(gc.get_objects())))
    finite = all(bool(p.isfinite().all()) for p in adapter.adapted_parameters.values())
    results.put((method, seen, adapter.health()["invalid_samples"], finite, time.perf_counter() - began))


def main() -> None:
    """Print a line for each method."""
    parser = argparse.ArgumentParser()
    parser.add_argument("methods", nargs="*", default=come.methods.names())
    parser.add_argument("--steps", type=int, default=20_000)
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    print(
        "| method | steps | MB after a tenth | MB at the end | objects after a tenth | at the end | bad samples | finite |"
    )
    print("|---|---:|---:|---:|---:|---:|---:|---|")
    for method in options.methods:
        results = context.Queue()
        process = context.Process(target=soak, args=(method, options.steps, results))
        process.start()
        name, ((mb_0, objects_0), (mb_1, objects_1)), bad, finite, _ = results.get()
        process.join()
        print(
            f"| {name} | {options.steps} | {mb_0:.1f} | {mb_1:.1f} | {objects_0} | {objects_1} | {bad:.0f} | "
            f"{'yes' if finite else 'NO'} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
