"""What a constant that training leaves free does to COME: one network, the bias of its head shifted from -10 to +10.

    python benchmarks/constant.py run zoo.npz weights results/constant.json --network fashion-gn --device cuda
    python benchmarks/constant.py draw results/constant.json results

Softmax, and so every unadapted answer, is the same for all shifts. Tent runs at four times its usual rate over the `standard`
and `lifelong` streams of the harm matrix, bare, with each objective.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import harm
import torch

import come
from come.state.files import replacing

SHIFTS = (-10.0, -5.0, -2.0, 0.0, 2.0, 5.0, 10.0)
RATE = 4e-3


def accuracies(streams: list[harm.Stream], answers: list[torch.Tensor], truth: torch.Tensor) -> dict[str, float]:
    """Accuracy in per cent over the streams of each column."""
    right: dict[str, list[torch.Tensor]] = {}
    for stream, answer in zip(streams, answers, strict=True):
        right.setdefault(stream.cell, []).append((answer == truth[stream.image]).double())
    return {cell: 100 * torch.cat(values).mean().item() for cell, values in right.items()}


def run(args: argparse.Namespace) -> None:
    """Accuracy for every shift and objective, and the mean uncertainty on clean images."""
    device = torch.device(args.device)
    model, images, labels, outliers = harm.network(args.network, args.data, args.weights, device)
    bank = harm.Bank(images[: harm.IMAGES], outliers, harm.zoo.normalized)
    truth = labels[: harm.IMAGES].cpu()
    streams = [s for s in harm.streams(truth, args.long) if s.cell in ("standard", "lifelong")]
    start, rows = model.head.bias.detach().clone(), []
    lr = RATE / 4 if any(isinstance(m, torch.nn.BatchNorm2d) for m in model.modules()) else RATE
    for shift in SHIFTS:
        with torch.no_grad():
            model.head.bias.copy_(start + shift)
            logits = model(harm.zoo.normalized(images[:500]))
        for objective in harm.OBJECTIVES:
            how = {"objective": objective, "guard": False, "lr": lr}

            def fleet(count: int, how: dict = how) -> come.Fleet:
                return come.Fleet(model, "tent", streams=count, **how)

            found = harm.answers(lambda how=how: come.adapt(model, "tent", **how), fleet, streams, bank)
            row = {
                "shift": shift,
                "objective": objective,
                "u": come.objectives.get(objective).uncertainty(logits).mean().item(),
            }
            row |= accuracies(streams, found, truth)
            rows.append(row)
            print(
                {key: round(value, 3) if isinstance(value, float) else value for key, value in row.items()}, flush=True
            )
    with torch.no_grad():
        model.head.bias.copy_(start)
    source = accuracies(streams, harm.answers(lambda: come.adapt(model, "source"), None, streams, bank), truth)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with replacing(args.out) as writing:
        writing.write_text(json.dumps({"network": args.network, "lr": lr, "source": source, "rows": rows}, indent=1))


def draw(file: Path, out: Path) -> None:
    """Accuracy against the shift, a panel for each stream."""
    import matplotlib as mpl
    from matplotlib import pyplot as plt

    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "constant"
    kept = json.loads(file.read_text())
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    colours = {"em": "#b3541e", "come": "#3b6fb6", "invariant": "#2a8a57"}
    for axis, cell, title in zip(
        axes, ("standard", "lifelong"), ("restored before each corruption", "never restored"), strict=True
    ):
        axis.axhline(kept["source"][cell], color="#888", linestyle="--", linewidth=1, label="source")
        for objective, colour in colours.items():
            rows = [row for row in kept["rows"] if row["objective"] == objective]
            axis.plot(
                [r["shift"] for r in rows],
                [r[cell] for r in rows],
                color=colour,
                marker="o",
                markersize=4,
                label=f"Tent, {objective}",
            )
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("constant added to all logits")
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("accuracy, %")
    axes[0].legend(frameon=False, fontsize=8)
    figure.savefig(out / "constant.svg", metadata={"Date": None})
    plt.close(figure)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run")
    for name in ("data", "weights", "out"):
        running.add_argument(name, type=Path)
    running.add_argument("--network", choices=list(harm.zoo.NETWORKS), default="fashion-gn")
    running.add_argument("--long", type=int, default=100)
    running.add_argument("--device", default="cpu")
    drawing = commands.add_parser("draw")
    drawing.add_argument("file", type=Path)
    drawing.add_argument("out", type=Path)
    args = parser.parse_args()
    if args.command == "run":
        run(args)
    else:
        draw(args.file, args.out)


if __name__ == "__main__":
    main()
