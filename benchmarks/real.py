"""Real images: grids of `come bench` on one GPU, many cells at once, and tables of what was found.

    python benchmarks/real.py run --model timm:vit_small_patch16_224:img_size=64:patch_size=8:num_classes=200 \\
        --checkpoint vit.safetensors --data val5k --few val2k --outliers textures --device cuda --out results/mine.json
    python benchmarks/real.py show results/tiny-imagenet-vit-s8.json

The grids of `GRIDS` run one after the other, or those that `--only` names; several processes with a grid each fill a GPU
better than one. `--few` has fewer of the same images, for streams that cannot be divided. A result file has an entry for each
cell; a grid that is run again takes the place of its older entries.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

from come.bench import Plan, RunFolder
from come.bench.runner import Bench
from come.corruptions import names
from come.files import replacing

ALL = tuple(names("standard"))
FIVE = ALL[::3]
"""Noise, two blurs, fog, and elastic: for what is compared often."""
MAIN = ("tent", "eata", "sar")
KEPT = ("accuracy", "fpr", "fpr_softmax", "fpr_belief", "aurc", "ece")
RATES = tuple(f"{method}:lr={lr}" for method in MAIN for lr in ("2.5e-4", "4e-3"))
PARTS = ("lr=4e-3", "pull=0.05", "pull=0.0", "diversity=1.0", "diversity=0.0")

GRIDS: dict[str, dict[str, Any]] = {
    "standard": {"methods": ("source", *MAIN, "steady"), "corruptions": ALL, "seeds": (0, 1, 2)},
    "standard-3": {"methods": ("source", *MAIN, "steady"), "corruptions": ALL, "severity": 3},
    "rates": {"methods": RATES, "corruptions": FIVE},
    "in-distribution": {"setting": "in-distribution", "methods": ("source", *MAIN, "steady")},
    "imbalanced": {"setting": "imbalanced", "methods": ("source", *MAIN, "zerosiam", "steady"), "corruptions": FIVE},
    "mixed": {"few": True, "setting": "mixed", "methods": ("source", *MAIN, "zerosiam", "steady")},
    "lifelong": {
        "few": True,
        "setting": "lifelong",
        "methods": ("source", *MAIN, "tent:lr=2.5e-4", "tent:lr=4e-3", "zerosiam", "steady"),
        "seeds": (0, 1, 2),
    },
    "open-world": {"few": True, "setting": "open-world", "methods": ("source", *MAIN, "steady"), "seeds": (0, 1, 2)},
    "parts": {"methods": tuple(f"steady:{part}" for part in PARTS), "objectives": ("come",), "corruptions": FIVE},
    "plain": {"methods": ("zerosiam", "steady:prior_correction=false"), "corruptions": FIVE},
}


def run(options: argparse.Namespace) -> None:
    """Run the grids that were asked for."""
    for name in options.only or GRIDS:
        grid = dict(GRIDS[name])
        data = options.few if grid.pop("few", False) else options.data
        if grid.get("setting") == "open-world":
            grid["outliers"] = (f"folder:{options.outliers}",)
        plan = Plan(
            model=options.model,
            checkpoint=options.checkpoint,
            data=f"folder:{data}",
            precision="bf16" if options.device.startswith("cuda") else "float32",
            **grid,
        )
        with tempfile.TemporaryDirectory() as folder:
            bench = Bench(plan, device=options.device, together=None)
            records = bench.run(RunFolder(folder))
        for failure in bench.failed:
            print(f"{name}: {failure}", file=sys.stderr)
        found = [
            {
                "grid": name,
                "setting": r.cell.setting,
                "severity": r.cell.severity,
                "method": r.cell.method,
                "objective": r.cell.objective,
                "seed": r.cell.seed,
                "images": r.cell.size,
                "outliers": r.cell.outliers is not None,
                "seconds": round(r.result.seconds, 1),
                "domains": {d: {k: round(m[k], 4) for k in KEPT if k in m} for d, m in r.result.metrics.items()},
            }
            for r in records
        ]
        before = json.loads(options.out.read_text()) if options.out.exists() else []
        kept = [entry for entry in before if entry["grid"] != name]
        with replacing(options.out) as beside:
            beside.write_text("[\n" + ",\n".join(map(json.dumps, kept + found)) + "\n]\n")
        print(f"{name}: {len(found)} cells", flush=True)


def show(options: argparse.Namespace) -> None:
    """Print a Markdown table for each grid: mean over domains, and the deviation over seeds."""
    entries = json.loads(options.out.read_text())
    for name in dict.fromkeys(entry["grid"] for entry in entries):
        mine = [entry for entry in entries if entry["grid"] == name]
        rows: dict[Any, dict[int, list[dict[str, float]]]] = defaultdict(lambda: defaultdict(list))
        for entry in mine:
            method = entry["method"] if entry["method"] == "source" else f"{entry['method']} + {entry['objective']}"
            rows[method, entry["outliers"]][entry["seed"]] += entry["domains"].values()
        first = mine[0]
        domains = len(next(iter(next(iter(rows.values())).values())))
        print(f"\n**{name}**: severity {first['severity']}, {domains} domain(s) of up to {first['images']} images\n")
        print("| | Acc | FPR | FPR softmax | FPR belief |\n|---|---:|---:|---:|---:|")
        for (method, outliers), seeds in rows.items():
            cells = [_percent(seeds, key) for key in ("accuracy", "fpr", "fpr_softmax", "fpr_belief")]
            print(f"| {method}{', with outliers' if outliers else ''} | {' | '.join(cells)} |")


def _percent(seeds: dict[int, list[dict[str, float]]], key: str) -> str:
    values = [100 * statistics.fmean(d[key] for d in domains if key in d) for domains in seeds.values()]
    spread = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.1f}{spread}"


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    runs = commands.add_parser("run", help="run grids, and keep what was found")
    runs.set_defaults(do=run)
    runs.add_argument("--model", required=True, help="as in come bench")
    runs.add_argument("--checkpoint", help="as in come bench")
    runs.add_argument("--data", required=True, help="a folder with one folder of images per class")
    runs.add_argument("--few", help="fewer of the same, for lifelong, mixed and open-world; default: all")
    runs.add_argument("--outliers", help="a folder of images of other things")
    runs.add_argument("--device", default="cpu")
    runs.add_argument("--only", nargs="+", choices=list(GRIDS), help="these grids")
    runs.add_argument("--out", type=Path, required=True, help="a JSON file; grids are added to it")
    shows = commands.add_parser("show", help="print tables")
    shows.set_defaults(do=show)
    shows.add_argument("out", type=Path, metavar="FILE")
    options = parser.parse_args()
    if options.do is run:
        options.few = options.few or options.data
        if options.outliers is None and "open-world" in (options.only or GRIDS):
            parser.error("the grid open-world needs --outliers; give it, or leave the grid out with --only")
    options.do(options)


if __name__ == "__main__":
    main()
