"""Real images: grids of `come bench` on one GPU, many cells at once, and tables of what was found.

    python benchmarks/real.py run --model timm:vit_small_patch16_224:img_size=64:patch_size=8:num_classes=200 \\
        --checkpoint vit.safetensors --data val5k --few val2k --outliers textures --device cuda --out results/mine.json
    python benchmarks/real.py show results/tiny-imagenet-vit-s8.json
    python benchmarks/real.py draw results/tiny-imagenet-vit-s8.json results

The grids of `GRIDS` run one after the other, or those that `--only` names; several processes with a grid and a file each fill
a GPU better than one, and `join` makes one file of theirs. `--few` and `--fewest` have fewer of the same images, for streams
that cannot be divided and for methods that need many passes. A result file has an entry for each cell; a grid that is run again
takes the place of its older entries. `tent*4` is Tent at four times the rate that it has by default on this model.
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

from torch.nn.modules.batchnorm import _BatchNorm

import come.methods
from come.bench import Plan, RunFolder, models
from come.bench.runner import Bench
from come.corruptions import names
from come.state.files import replacing

ALL = tuple(names("standard"))
FIVE = ALL[::3]
"""Noise, two blurs, fog, and elastic: for what is compared often."""
SEEDS = (0, 1, 2)
MAIN = ("tent", "eata", "sar")
KEPT = ("accuracy", "fpr", "fpr_softmax", "fpr_belief", "auroc", "aurc", "ece")
PARTS = ("lr=4e-3", "pull=0.05", "pull=0.0", "diversity=1.0", "diversity=0.0")
RIVALS = (
    {"methods": ("steady", "steady:prior_correction=false"), "objectives": ("come",)},
    {"methods": ("tent/4", "tent", "tent*4", "eata", "eata*4"), "objectives": ("come",)},
    {"methods": ("source", "tent/4", "tent", "tent*4", "zerosiam/4", "zerosiam", "zerosiam*4"), "objectives": ("em",)},
)
"""Steady, and baselines at three rates each."""

GRIDS: dict[str, tuple[dict[str, Any], ...]] = {
    "standard": (
        {"methods": ("source", *MAIN), "corruptions": ALL},
        {"methods": ("steady",), "objectives": ("come",), "corruptions": ALL},
    ),
    "standard-3": (
        {"methods": ("source", *MAIN), "corruptions": ALL, "severity": 3},
        {"methods": ("steady",), "objectives": ("come",), "corruptions": ALL, "severity": 3},
    ),
    "seeds": (
        {"methods": ("source", *MAIN), "corruptions": FIVE, "seeds": SEEDS},
        {"methods": ("steady",), "objectives": ("come",), "corruptions": FIVE, "seeds": SEEDS},
    ),
    "rates": ({"methods": tuple(f"{m}{by}" for m in MAIN for by in ("/4", "*4")), "corruptions": FIVE},),
    "others": (
        {"methods": ("pl", "deyo", "roid", "rdumb", "rotta"), "data": "few", "corruptions": FIVE},
        {"methods": ("source", "t3a", "lame", "zerosiam"), "data": "few", "corruptions": FIVE, "objectives": ("em",)},
    ),
    "cotta": ({"methods": ("cotta",), "corruptions": FIVE, "data": "fewest", "seeds": SEEDS},),
    "cotta-lifelong": (
        {"methods": ("cotta",), "setting": "lifelong", "corruptions": FIVE, "data": "fewest", "seeds": SEEDS},
    ),
    "cotta-open-world": ({"methods": ("cotta",), "setting": "open-world", "data": "few", "seeds": SEEDS},),
    "tea": ({"methods": ("tea",), "corruptions": FIVE, "data": "fewest"},),
    "foa": ({"methods": ("foa",), "data": "few", "corruptions": FIVE},),
    "memo": ({"methods": ("memo",), "corruptions": FIVE[:2], "data": "fewest"},),
    "in-distribution": ({"setting": "in-distribution", "methods": ("source", *MAIN, "steady")},),
    "imbalanced": ({"setting": "imbalanced", "methods": ("source", *MAIN, "zerosiam", "steady"), "corruptions": FIVE},),
    "mixed": ({"data": "few", "setting": "mixed", "methods": ("source", *MAIN, "zerosiam", "steady")},),
    "lifelong": (
        {
            "data": "few",
            "setting": "lifelong",
            "methods": ("source", *MAIN, "tent/4", "tent*4", "zerosiam", "steady"),
            "seeds": SEEDS,
        },
    ),
    "lifelong-15": tuple(
        {"data": "few", "setting": "lifelong", "corruptions": ALL, "seeds": SEEDS, **rest}
        for rest in (
            {"methods": ("source", *MAIN)},
            {"methods": ("zerosiam",), "objectives": ("em",)},
            {"methods": ("steady", "steady:prior_correction=false"), "objectives": ("come",)},
        )
    ),
    "open-world": ({"data": "few", "setting": "open-world", "methods": ("source", *MAIN, "steady"), "seeds": SEEDS},),
    "parts": ({"methods": tuple(f"steady:{part}" for part in PARTS), "objectives": ("come",), "corruptions": FIVE},),
    "plain": ({"methods": ("zerosiam", "steady:prior_correction=false"), "corruptions": FIVE},),
} | {
    f"rivals-{setting}": tuple(
        {"data": "few", "setting": setting, "corruptions": FIVE, "seeds": SEEDS, **rest} for rest in RIVALS
    )
    for setting in ("standard", "imbalanced", "mixed", "lifelong")
}


def at_rate(method: str, batch_norm: bool) -> str:
    """`tent*4` as a specification with a learning rate."""
    for sign in "*/":
        name, found, factor = method.partition(sign)
        if found:
            rate = come.methods.get(name).paper_lr[batch_norm]
            return f"{name}:lr={rate * float(factor) if sign == '*' else rate / float(factor):g}"
    return method


def run(options: argparse.Namespace) -> None:
    """Run the grids that were asked for."""
    module = models.load(options.model, checkpoint=options.checkpoint).module
    batch_norm = any(isinstance(layer, _BatchNorm) for layer in module.modules())
    for name in options.only or GRIDS:
        found = []
        for grid in map(dict, GRIDS[name]):
            data = getattr(options, grid.pop("data", "data"))
            if grid.get("setting") == "open-world":
                grid["outliers"] = (f"folder:{options.outliers}",)
            grid["seeds"] = grid.get("seeds", (0,))[: options.seeds]
            methods = tuple(at_rate(method, batch_norm) for method in grid.pop("methods"))
            plan = Plan(
                model=options.model,
                checkpoint=options.checkpoint,
                normalization=options.normalization,
                data=f"folder:{data}",
                precision="bf16" if options.device.startswith("cuda") else "float32",
                methods=methods,
                **grid,
            )
            found += entries(name, plan, options.device)
            keep(options.out, name, found)
        print(f"{name}: {len(found)} cells", flush=True)


def entries(name: str, plan: Plan, device: str) -> list[dict[str, Any]]:
    """What the cells of a plan found; one that failed is named and left out."""
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(plan, device=device, together=None)
        records = bench.run(RunFolder(folder))
    for failure in bench.failed:
        print(f"{name}: {failure}", file=sys.stderr)
    return [
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


def keep(out: Path, name: str, found: list[dict[str, Any]]) -> None:
    """Put what a grid found into a file, in the place of what it found before."""
    before = json.loads(out.read_text()) if out.exists() else []
    kept = [entry for entry in before if entry["grid"] != name]
    with replacing(out) as beside:
        beside.write_text("[\n" + ",\n".join(map(json.dumps, kept + found)) + "\n]\n")


def join(options: argparse.Namespace) -> None:
    """Put the grids of several files into the first."""
    for file in options.files:
        entries = json.loads(file.read_text())
        for name in dict.fromkeys(entry["grid"] for entry in entries):
            keep(options.out, name, [entry for entry in entries if entry["grid"] == name])


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


LINES = {  # method and objective: name, colour, width
    ("steady", "come"): ("Steady", "#2a78d6", 3.0),
    ("tent", "come"): ("Tent + COME", "#1f9d6b", 2.2),
    ("tent", "em"): ("Tent + EM", "#d1495b", 2.2),
}
RATED = {"tent": "#1f9d6b", "eata": "#2a78d6", "sar": "#b8860b"}
GREY = "#888888"
"""Of text and axes: legible on white and on black."""


def draw(options: argparse.Namespace) -> None:
    """Draw what the tables say: the long stream, and accuracy against the learning rate."""
    import matplotlib as mpl

    mpl.use("svg")
    style = {
        "svg.fonttype": "none",
        "svg.hashsalt": "come",
        "font.size": 11,
        "text.color": GREY,
        "axes.labelcolor": GREY,
    }
    style |= {"axes.edgecolor": GREY, "xtick.color": GREY, "ytick.color": GREY, "axes.spines.top": False}
    style |= {"axes.spines.right": False, "savefig.transparent": True}
    entries = json.loads(options.file.read_text())
    with mpl.rc_context(style):
        for name, drawn in (("stream", stream(entries)), ("rates", rates(entries))):
            with replacing(options.folder / f"{name}.svg") as beside:
                drawn.savefig(beside, format="svg", metadata={"Date": None})


def stream(entries: list[dict[str, Any]]) -> Any:
    """The lifelong stream of 15 corruptions: mean of the seeds, and what lies between the lowest and the highest."""
    from matplotlib.figure import Figure

    found: dict[Any, list[list[float]]] = defaultdict(list)
    for entry in entries:
        if entry["grid"] == "lifelong-15":
            accuracies = [100 * domain["accuracy"] for domain in entry["domains"].values()]
            found[entry["method"], entry["objective"]].append(accuracies)
            domains = list(entry["domains"])
    source = [statistics.fmean(values) for values in zip(*found["source", "em"], strict=True)]
    figure = Figure(figsize=(9, 3.8), layout="constrained")
    axes = figure.subplots()
    places = range(len(domains))
    axes.axhline(0, color=GREY, linewidth=1.2)
    axes.annotate("source", (-0.65, 0), xytext=(0, 3), textcoords="offset points", color=GREY)
    for pair, (label, colour, width) in LINES.items():
        gains = [[a - b for a, b in zip(one, source, strict=True)] for one in found[pair]]
        mean = [statistics.fmean(values) for values in zip(*gains, strict=True)]
        axes.fill_between(
            places, *(list(map(f, zip(*gains, strict=True))) for f in (min, max)), color=colour, alpha=0.2
        )
        axes.plot(places, mean, color=colour, linewidth=width)
        axes.annotate(label, (places[-1], mean[-1]), xytext=(8, -4), textcoords="offset points", color=colour)
    axes.set_xticks(places, [domain.replace("_", " ") for domain in domains], rotation=35, ha="right")
    axes.set_ylabel("accuracy, points\nabove the source")
    return figure


def rates(entries: list[dict[str, Any]]) -> Any:
    """Accuracy with EM and COME at a quarter, one and four times each method's rate."""
    from matplotlib.figure import Figure

    found: dict[Any, list[float]] = defaultdict(list)
    for entry in entries:
        if entry["grid"] == "rates" or (entry["grid"] == "seeds" and entry["seed"] == 0):
            method, _, given = entry["method"].partition(":lr=")
            factor = float(given) / come.methods.get(method).paper_lr[0] if given else 1.0
            found[method, entry["objective"], factor] += [100 * d["accuracy"] for d in entry["domains"].values()]
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    panels = figure.subplots(1, len(RATED), sharey=True)
    source = statistics.fmean(found["source", "em", 1.0])
    for axes, (method, colour) in zip(panels, RATED.items(), strict=True):
        axes.axhline(source, color=GREY, linewidth=1.2)
        axes.set_title(come.methods.get(method).__name__, color=colour)
        for objective, line in (("come", "-"), ("em", "--")):
            factors = sorted(factor for m, o, factor in found if (m, o) == (method, objective))
            values = [statistics.fmean(found[method, objective, factor]) for factor in factors]
            axes.plot(factors, values, line, color=colour, linewidth=2.2, marker="o", label=objective.upper())
        axes.set_xscale("log", base=4)
        axes.set_xticks([0.25, 1, 4], ["/ 4", "1", "x 4"])
        axes.minorticks_off()
        axes.set_xlabel("learning rate")
    panels[0].set_ylabel("accuracy, %")
    panels[0].annotate("source", (0.25, source), xytext=(0, 4), textcoords="offset points", color=GREY)
    panels[0].legend(frameon=False, handlelength=3.5)
    return figure


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
    runs.add_argument("--normalization", default=Plan().normalization, help="as in come bench")
    runs.add_argument("--data", required=True, help="a folder with one folder of images per class")
    runs.add_argument("--few", help="fewer of the same; default: all")
    runs.add_argument("--fewest", help="still fewer; default: those of --few")
    runs.add_argument("--outliers", help="a folder of images of other things")
    runs.add_argument("--seeds", type=int, default=len(SEEDS), help="at most so many of a grid's")
    runs.add_argument("--device", default="cpu")
    runs.add_argument("--only", nargs="+", choices=list(GRIDS), help="these grids")
    runs.add_argument("--out", type=Path, required=True, help="a JSON file; grids are added to it")
    shows = commands.add_parser("show", help="print tables")
    shows.set_defaults(do=show)
    shows.add_argument("out", type=Path, metavar="FILE")
    draws = commands.add_parser("draw", help="draw stream.svg and rates.svg")
    draws.set_defaults(do=draw)
    draws.add_argument("file", type=Path, metavar="FILE")
    draws.add_argument("folder", type=Path, metavar="FOLDER")
    joins = commands.add_parser("join", help="put the grids of several files into the first")
    joins.set_defaults(do=join)
    joins.add_argument("out", type=Path, metavar="FILE")
    joins.add_argument("files", type=Path, metavar="FILE", nargs="+")
    options = parser.parse_args()
    if options.do is run:
        options.few = options.few or options.data
        options.fewest = options.fewest or options.few
        if options.outliers is None and any("open-world" in name for name in options.only or GRIDS):
            parser.error("grids of the open world need --outliers; give it, or leave them out with --only")
    options.do(options)


if __name__ == "__main__":
    main()
