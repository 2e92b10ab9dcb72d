"""The harm matrix: where does adaptation make a model worse than doing nothing?

    python training/zoo.py pack zoo.npz --fashion FOLDER --cifar FOLDER && python training/zoo.py train zoo.npz weights
    python benchmarks/harm.py run zoo.npz weights results/harm --device cuda     # one process for each network fills a GPU
    python benchmarks/harm.py show results/harm
    python benchmarks/harm.py draw results/harm results
    python benchmarks/harm.py cases zoo.npz weights        # streams by name: alarms, a change of stream, rates too high
    python benchmarks/harm.py cost --device cuda                                 # a step of steady relative to one of Tent

Networks (`training/zoo.py`) x streams (`streams`) x methods (`METHODS`), as `come.adapt` gives them and bare. A cell is the
accuracy of the method minus that of the source model on the same samples, with a 95% interval that counts each image once.
All streams of a network with the same size of batch run at once, in a `come.Fleet`; what no fleet can run is run stream by
stream. A network has one file, written after each method; what is in it is not run again.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import come
from come.corruptions import corrupt
from come.state.files import replacing

sys.path.insert(0, str(Path(__file__).parents[1] / "training"))
import zoo

CORRUPTIONS = ("gaussian_noise", "motion_blur", "snow", "brightness", "contrast", "jpeg_compression")
CLEAN = 0
NOISE, CONTRAST, JPEG = (1 + CORRUPTIONS.index(name) for name in ("gaussian_noise", "contrast", "jpeg_compression"))
IMAGES, KEPT_BACK = 2000, 500
"""Images that streams are made of, and others for EATA's source data."""
OBJECTIVES = ("em", "come", "invariant")
METHODS = {
    "steady": {"method": "steady"},
    "steady, corrected": {"method": "steady", "prior_correction": True},
    **{f"{m} + {o}": {"method": m, "objective": o} for m in ("tent", "eata", "sar") for o in OBJECTIVES},
    "zerosiam": {"method": "zerosiam", "objective": "em"},
    "norm": {"method": "norm"},
    "neo": {"method": "neo"},
    "neo, no prior": {"method": "neo", "prior": 0},
    **{f"{m} + {o}": {"method": m, "objective": o} for m in ("adadem", "asr") for o in ("em", "come")},
}


# ---- streams ----


@dataclass(frozen=True)
class Stream:
    """Samples in order: which corruption and which image of each; an outlier has the label -1."""

    cell: str
    """The column of the matrix; several streams may share one."""
    batch: int
    domain: Tensor
    image: Tensor
    outlier: Tensor | None = None


def streams(labels: Tensor, long: int = 100, seed: int = 0) -> Iterator[Stream]:
    """All streams of a network.

    Args:
        labels: of the images, (N,) on the CPU.
        long: batches of 64 in a stream of few classes; the others are shorter in proportion.
        seed: of all orders.
    """
    random = torch.Generator().manual_seed(seed)
    everything = torch.arange(len(labels))

    def some(batches: int, of: Tensor = everything, batch: int = 64) -> Tensor:
        rounds = [of[torch.randperm(len(of), generator=random)] for _ in range(math.ceil(batches * batch / len(of)))]
        return torch.cat(rounds)[: batches * batch]

    def same(domain: int, images: Tensor) -> Tensor:
        return torch.full_like(images, domain)

    def stream(cell: str, domain: int, images: Tensor, batch: int = 64) -> Stream:
        return Stream(cell, batch, same(domain, images), images)

    short = max(2, long // 4)
    yield stream("clean", CLEAN, some(short))
    for domain in range(1, 1 + len(CORRUPTIONS)):
        yield stream("standard", domain, some(short))
    for cell, domain in (("sorted, clean", CLEAN), ("sorted", NOISE), ("sorted", JPEG)):
        images = some(short)
        order = torch.randperm(int(labels.max()) + 1, generator=random)[labels[images]]
        yield stream(cell, domain, images[order.argsort(stable=True)])
    images = some(2 * short)
    yield Stream("mixed", 64, torch.randint(0, 1 + len(CORRUPTIONS), images.shape, generator=random), images)
    images = some(18 * max(1, long // 20))  # three rounds
    yield Stream("lifelong", 64, 1 + torch.arange(len(images)) * 18 // len(images) % 6, images)
    counts = torch.bincount(labels)
    frequent = counts.argsort(descending=True)[:10]
    picked = frequent[torch.randperm(len(frequent), generator=random)]
    for count, name in ((1, "one class"), (2, "two classes"), (5, "five classes")):
        yield stream(name, CLEAN, some(long, everything[torch.isin(labels, picked[:count])]))
    yield stream("two classes, noise", NOISE, some(long, everything[torch.isin(labels, picked[:2])]))
    images = some(2 * short)
    outlier = torch.rand(images.shape, generator=random) < 0.5
    yield Stream("outliers", 64, same(NOISE, images), images, outlier)
    for batch, batches, of in (
        (16, 40, (CLEAN, NOISE, JPEG)),
        (4, 48, (CLEAN, NOISE, JPEG)),
        (1, 96, (CLEAN, NOISE, JPEG, 2)),
    ):
        for domain in of:
            images = some(max(2, batches * long // 100), batch=batch)
            yield stream(f"batches of {batch}", domain, images, batch)


class Bank:
    """Every image under every corruption, on the device."""

    def __init__(self, images: Tensor, outliers: Tensor, normalize: Callable[[Tensor], Tensor]) -> None:
        self.normalize = normalize
        self.images = torch.stack([images, *(corrupt(images, name, 5, seed=3) for name in CORRUPTIONS)])
        self.outliers = corrupt(outliers, "gaussian_noise", 5, seed=4)

    def __call__(self, stream: Stream, at: slice) -> Tensor:
        """Samples of a stream, as the network takes them."""
        device = self.images.device
        images = self.images[stream.domain[at].to(device), stream.image[at].to(device)]
        if stream.outlier is not None:
            others = self.outliers[stream.image[at].to(device) % len(self.outliers)]
            images = torch.where(stream.outlier[at].to(device)[:, None, None, None], others, images)
        return self.normalize(images)


# ---- one method on all streams ----


def answers(
    make: Callable[[], come.Adapter], fleet: Callable[[int], come.Fleet] | None, all_streams: list[Stream], bank: Bank
) -> list[Tensor]:
    """The predicted class of every sample of every stream, each from the source model on."""
    found: list[list[Tensor]] = [[] for _ in all_streams]
    for batch in sorted({stream.batch for stream in all_streams}):
        mine = [i for i, stream in enumerate(all_streams) if stream.batch == batch]
        if fleet is None:
            for i in mine:
                with make() as adapter:
                    for start in range(0, len(all_streams[i].image), batch):
                        found[i].append(adapter(bank(all_streams[i], slice(start, start + batch))).argmax(dim=1))
            continue
        running, start = fleet(len(mine)), 0
        while going := [i for i in mine if start < len(all_streams[i].image)]:
            x = torch.cat([bank(all_streams[i], slice(start, start + batch)) for i in going])
            logits = running(x, [str(mine.index(i)) for i in going for _ in range(batch)])
            for i, part in zip(going, logits.argmax(dim=1).split(batch), strict=True):
                found[i].append(part)
            start += batch
        running.close()
    return [torch.cat(parts).cpu() for parts in found]


def made(name: str, model: nn.Module, guard: bool, source: list[Tensor]) -> tuple[Callable[[], come.Adapter], Any]:
    """What puts a method around the model, for one stream and for many; None where no fleet can run it."""
    how = {**METHODS[name], "guard": guard}
    if how["method"] == "eata":
        how["source"] = source
    with come.adapt(model, **how) as trial:
        fixed = trial.method.waits
    many = None if fixed or how["method"] == "zerosiam" else (lambda count: come.Fleet(model, streams=count, **how))
    return (lambda: come.adapt(model, **how)), many


def cells(
    all_streams: list[Stream], found: list[Tensor], source: list[Tensor], labels: Tensor
) -> dict[str, dict[str, float]]:
    """Accuracy, the source's, their difference and its interval, in points, for each column of the matrix."""
    kept: dict[str, list[tuple[Tensor, Tensor, Tensor]]] = {}
    for stream, mine, theirs in zip(all_streams, found, source, strict=True):
        counted = torch.ones(len(mine), dtype=torch.bool) if stream.outlier is None else ~stream.outlier
        truth = labels[stream.image]
        right, before = ((p == truth)[counted].double() for p in (mine, theirs))
        kept.setdefault(stream.cell, []).append((right, before, stream.image[counted]))
    table = {}
    for cell, parts in kept.items():
        right, before, image = (torch.cat(values) for values in zip(*parts, strict=True))
        gain = right - before
        by_image = torch.zeros(len(labels), dtype=torch.float64).index_add(0, image, gain - gain.mean())
        half = 1.96 * float(by_image.square().sum().sqrt()) / len(gain)
        points = [100 * v for v in (right.mean().item(), before.mean().item(), gain.mean().item(), half)]
        table[cell] = dict(
            zip(("accuracy", "source", "gain", "half_width"), (round(v, 3) for v in points), strict=True)
        )
        table[cell]["samples"] = len(gain)
    return table


def network(name: str, data: Path, weights: Path, device: torch.device) -> tuple[nn.Module, Tensor, Tensor, Tensor]:
    """A network of the zoo, its test images and labels, and images of another task."""
    recipe = zoo.NETWORKS[name]
    sets = {task: zoo.load(data, task, "test", device) for task in zoo.TRAINED_ON if zoo.has(data, task)}
    images, labels = zoo.combine(recipe.task, sets, zoo.TESTED_ON, 2)
    others = [task for task in sets if task not in recipe.task.split("+")]
    outliers = sets[others[0] if others and recipe.task != "either" else next(iter(sets))][0][:1000]
    if not others:
        outliers = outliers.flip(2)  # upside down
    if images.shape[3] > outliers.shape[3]:
        outliers = torch.cat([outliers, outliers.flip(0)], dim=3)
    return zoo.restored(name, weights, device), images, labels, outliers


def run(name: str, model: nn.Module, images: Tensor, labels: Tensor, outliers: Tensor, file: Path, args: Any) -> None:
    """All methods on one network, with and without a guard."""
    normalize = zoo.normalized
    bank = Bank(images[:IMAGES], outliers, normalize)
    source = [normalize(part) for part in images[-KEPT_BACK:].split(50)]
    truth = labels[:IMAGES].cpu()
    all_streams = list(streams(truth, args.long))
    kept = (
        json.loads(file.read_text())
        if file.exists()
        else {"network": name, "chosen_on": zoo.NETWORKS[name].chosen_on, "cells": {}}
    )
    with torch.no_grad():
        before = [
            torch.cat([model(bank(s, slice(i, i + 256))).argmax(dim=1) for i in range(0, len(s.image), 256)]).cpu()
            for s in all_streams
        ]
    for guard in {"on": (True,), "off": (False,), "both": (True, False)}[args.guard]:
        for method in args.methods or METHODS:
            key = f"{method}{'' if guard else ', bare'}"
            if key in kept["cells"]:
                continue
            started = time.monotonic()
            try:
                found = answers(*made(method, model, guard, source), all_streams, bank)
            except come.ComeError as error:
                print(f"{name}: {key}: {error}", flush=True)
                continue
            kept["cells"][key] = cells(all_streams, found, before, truth)
            with replacing(file) as writing:
                writing.write_text(json.dumps(kept, indent=1))
            gains = {cell: entry["gain"] for cell, entry in kept["cells"][key].items()}
            worst = min(gains, key=gains.__getitem__)
            print(
                f"{name:18s} {key:24s} mean {sum(gains.values()) / len(gains):+6.2f}, worst {gains[worst]:+7.2f} ({worst}), "
                f"clean {gains['clean']:+5.2f}, {time.monotonic() - started:.1f} s",
                flush=True,
            )


# ---- what was found ----


def read(folder: Path) -> list[dict[str, Any]]:
    """All networks of a folder, those chosen on first."""
    found = [json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))]
    return sorted(found, key=lambda kept: not kept["chosen_on"])


def show(folder: Path) -> None:
    """Shares of cells below the limits, and means, for each method on either half; then the worst cells of steady."""
    networks = read(folder)
    for words, chosen in (("Networks that were chosen on", True), ("Networks that nothing was chosen on", False)):
        half = [kept for kept in networks if kept["chosen_on"] is chosen]
        if not half:
            continue
        print(f"\n{words}: {', '.join(kept['network'] for kept in half)}\n")
        print("| | cells | mean gain | below -1 | below -3 | below -10 | worst | worst clean |\n|---|" + "---:|" * 7)
        for method in half[0]["cells"]:
            gains = [(entry["gain"], cell) for kept in half for cell, entry in kept["cells"].get(method, {}).items()]
            values = [gain for gain, _ in gains]
            share = [f"{100 * sum(v < limit for v in values) / len(values):.0f}%" for limit in (-1, -3, -10)]
            clean = min(gain for gain, cell in gains if cell == "clean")
            mean = sum(values) / len(values)
            print(
                f"| {method} | {len(values)} | {mean:+.1f} | {' | '.join(share)} | {min(values):+.1f} | {clean:+.1f} |"
            )
    print("\nThe worst cells of steady:")
    worst = sorted(
        (entry["gain"], entry["half_width"], kept["network"], cell)
        for kept in networks
        for cell, entry in kept["cells"].get("steady", {}).items()
    )
    for gain, half, name, cell in worst[:8]:
        print(f"  {gain:+5.1f} ± {half:.1f}  {name}, {cell}")


def draw(folder: Path, out: Path) -> None:
    """The matrix as one picture: a row for each network, a column for each stream, a panel for each method."""
    import matplotlib as mpl
    from matplotlib import pyplot as plt

    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "harm"
    networks = read(folder)
    shown = [
        name
        for name in ("steady", "tent + come", "eata + come", "norm, bare", "tent + em, bare", "eata + em, bare")
        if name in networks[0]["cells"]
    ]
    columns = list(networks[0]["cells"][shown[0]])
    figure, axes = plt.subplots(2, 3, figsize=(15, 10), sharex=True, sharey=True, layout="constrained")
    for axis, method in zip(axes.flat, shown, strict=False):
        values = [
            [kept["cells"].get(method, {}).get(cell, {}).get("gain", math.nan) for cell in columns] for kept in networks
        ]
        picture = axis.imshow(values, cmap="RdBu", vmin=-20, vmax=20, aspect="auto")
        flat = [v for row in values for v in row if v == v]
        below = 100 * sum(v < -1 for v in flat) / len(flat)
        words = f"{method.removesuffix(', bare')}, as published" if "bare" in method else f"{method}, with the guard"
        axis.set_title(
            f"{'come.adapt(model)' if method == 'steady' else words}\n"
            f"mean {sum(flat) / len(flat):+.1f}, {below:.0f}% of cells below -1",
            fontsize=11,
        )
        for y, row in enumerate(values):
            for x, value in enumerate(row):
                if round(value):
                    colour = "white" if abs(value) > 11 else "black"
                    axis.text(x, y, f"{value:.0f}", ha="center", va="center", fontsize=6.5, color=colour)
        axis.set_xticks(range(len(columns)), columns, rotation=60, ha="right", fontsize=8)
        names = [f"{kept['network']}{' *' if kept['chosen_on'] else ''}" for kept in networks]
        axis.set_yticks(range(len(networks)), names, fontsize=8)
    figure.colorbar(picture, ax=axes, label="accuracy minus the source model's, points", shrink=0.6)
    figure.savefig(out / "harm.svg", metadata={"Date": None})
    plt.close(figure)


# ---- by name ----


MANY = ("gaussian_noise", "motion_blur", "snow", "fog", "brightness", "contrast", "pixelate", "jpeg_compression")
CALLS = {
    "default": {"method": "steady"},
    "tent": {"method": "tent", "objective": "em"},
    "norm, bare": {"method": "norm", "guard": False},
    "tent, bare": {"method": "tent", "objective": "em", "guard": False},
}
NAMED = ("fashion-bn", "fashion-bn-mixup", "cifar-bn-sgd")
RATES = ("fashion-gn", "pairs-gn-smooth", "cifar-gn-sure", "fashion-ln", "cifar-rms", "fashion-bn")
EVERYTHING = torch.arange(IMAGES)
Networks = dict[str, tuple[nn.Module, Tensor, Tensor]]
"""By name: a network, its test images and labels."""


def right(model: nn.Module, x: Tensor, y: Tensor, **how: Any) -> tuple[Tensor, list[Any], dict[str, float]]:
    """Which of the samples a call answers rightly, in batches of 64, what its guard saw, and its health at the end."""
    events: list[Any] = []
    guard = how.pop("guard", True) and come.Guard(on_event=events.append)
    with come.adapt(model, **how, guard=guard) as adapter:
        found = torch.cat([adapter(part).argmax(dim=1) for part in x.split(64)])
        return (found == y).double(), events, adapter.health()


def shuffled(draw: torch.Generator, count: int, of: Tensor) -> Tensor:
    """So many of these, in random order."""
    return of[torch.randperm(len(of), generator=draw)][:count]


def named_streams(networks: Networks, draw: torch.Generator, device: torch.device) -> None:
    """Shuffled, class-sorted and of two classes, clean and corrupted: each call beside the source."""
    print(
        "| network, severity 4, 1,600 samples | source | "
        + " | ".join(CALLS)
        + " |\n|---|"
        + "---:|" * (len(CALLS) + 1)
    )
    for name in NAMED:
        model, images, labels = networks[name]
        mixed = shuffled(draw, 1600, EVERYTHING)
        orders = {
            "shuffled": mixed,
            "class-sorted": mixed[labels[mixed.to(device)].cpu().argsort(stable=True)],
            "two classes": EVERYTHING[labels[:IMAGES].cpu() < 2],
        }
        for domain in (None, "contrast", "gaussian_noise"):
            for words, order in orders.items():
                x, y = images[order.to(device)], labels[order.to(device)]
                x = zoo.normalized(x if domain is None else corrupt(x, domain, 4, seed=5))
                calls = ({"method": "source"}, *CALLS.values())
                values = [f"{100 * right(model, x, y, **how)[0].mean():.1f}" for how in calls]
                print(f"| {name}, {domain or 'clean'}, {words} | {' | '.join(values)} |", flush=True)


def many_orders(networks: Networks, draw: torch.Generator, device: torch.device) -> None:
    """Are good statistics of the batch given up on shuffled streams?"""
    print(
        "\n40 shuffled streams of 1,280 samples (8 corruptions of severity 4, 5 orders): accuracy of the source, the default,"
    )
    print(
        "of the statistics of the batch; how often these are better by a point and not in use at the end; default below source:"
    )
    for name in NAMED:
        model, images, labels = networks[name]
        accuracies, given_up, harmed = [], 0, 0
        for kind in MANY:
            corrupted = zoo.normalized(corrupt(images[:IMAGES], kind, 4, seed=5))
            for _ in range(5):
                order = shuffled(draw, 1280, EVERYTHING).to(device)
                x, y = corrupted[order], labels[order]
                (before, _, _), (mine, _, health), (batch, _, _) = (
                    right(model, x, y, **how) for how in ({"method": "source"}, CALLS["default"], CALLS["norm, bare"])
                )
                accuracies.append(100 * torch.stack([before.mean(), mine.mean(), batch.mean()]))
                given_up += int(batch.mean() > before.mean() + 0.01 and not health["batch_statistics"])
                harmed += int(mine.mean() < before.mean() - 0.01)
        words = " / ".join(f"{v:.1f}" for v in torch.stack(accuracies).mean(dim=0).tolist())
        print(f"  {name}: {words}; {given_up} of 40; {harmed} of 40", flush=True)


def change_of_stream(networks: Networks, draw: torch.Generator, device: torch.device) -> None:
    """A shuffled stream that turns class-sorted."""
    print(
        "\n20 shuffled batches with noise, then 20 class-sorted ones: accuracy by quarter, source/default, and when the"
    )
    print("statistics changed:")
    for name in NAMED:
        model, images, labels = networks[name]
        first, second = (shuffled(draw, 1280, EVERYTHING) for _ in range(2))
        second = second[labels[second.to(device)].cpu().argsort(stable=True)]
        order = torch.cat([first, second]).to(device)
        x, y = zoo.normalized(corrupt(images[order], "gaussian_noise", 5, seed=5)), labels[order]
        before, (after, events, _) = right(model, x, y, method="source")[0], right(model, x, y, method="steady")
        quarters = zip(before.split(640), after.split(640), strict=True)
        words = ", ".join(f"{100 * a.mean():.1f}/{100 * b.mean():.1f}" for a, b in quarters)
        print(f"  {name}: {words}; at steps {[e.step for e in events if e.kind == 'statistics']}", flush=True)


def high_rates(networks: Networks, draw: torch.Generator, device: torch.device) -> None:
    """After how many batches a rate that is too high is found."""
    print(
        "\nRates that are too high, 60 shuffled clean batches: batches until it is found, accuracy of the source, the default"
    )
    print("guard over all of them, and over the last 20 (of the source, without a guard):")
    for name in RATES:
        model, images, labels = networks[name]
        order = torch.cat([shuffled(draw, 1920, EVERYTHING) for _ in range(2)]).to(device)
        x, y = zoo.normalized(images[order]), labels[order]
        before = 100 * right(model, x, y, method="source")[0]
        for method, rate in (("tent", 0.1), ("tent", 1.0), ("steady", 0.03)):
            how = {"method": method, "lr": rate, **({"objective": "em"} if method == "tent" else {})}
            (after, events, _), bare = right(model, x, y, **how), right(model, x, y, **how, guard=False)[0]
            falls = [event.step + 1 for event in events if event.kind == "collapse"]
            asked = sum(event.kind in ("healthy", "collapse", "statistics") for event in events)
            print(
                f"  {name}, {method} lr {rate:g}: found after {falls[:4] or 'never'} of 60 ({asked} questions); source "
                f"{before.mean():.1f}, guarded {100 * after.mean():.1f}, at the end {100 * after[-1280:].mean():.1f} (source "
                f"{before[-1280:].mean():.1f}, bare {100 * bare[-1280:].mean():.1f})",
                flush=True,
            )


def cases(data: Path, weights: Path, device: torch.device) -> None:
    """Streams that older guards failed on, by name."""
    draw = torch.Generator().manual_seed(1)
    networks = {name: network(name, data, weights, device)[:3] for name in dict.fromkeys((*NAMED, *RATES))}
    for part in (named_streams, many_orders, change_of_stream, high_rates):
        part(networks, draw, device)


def cost(device: torch.device, models: list[str], compiled: bool, tiny: bool) -> None:
    """Seconds of Steady relative to Tent on the same model, taken in turn: without questions, and over the first 100 steps."""
    import torchvision

    size, batch = (64, 4) if tiny else (224, 64)
    mode: dict[str, Any] = {"precision": "bf16", "compile": True} if compiled else {}
    for name in models:
        model = torchvision.models.get_model(name, weights=None).to(device).eval()
        x = torch.randn(batch, 3, size, size, device=device)
        calls = {
            "tent, no guard": come.adapt(model, "tent", guard=False, **mode),
            "tent": come.adapt(model, "tent", **mode),
            "steady": come.adapt(model, "steady", **mode),
        }
        seconds: dict[str, list[float]] = {call: [] for call in calls}
        for adapter in calls.values():  # compiles, with and without a question
            for _ in range(10 if mode else 3):
                adapter(x)
            adapter.reset()
        for _ in range(8 if tiny else 100):
            for call, adapter in calls.items():
                _wait(device)
                started = time.perf_counter()
                adapter(x)
                _wait(device)
                seconds[call].append(time.perf_counter() - started)
        middle = {call: sorted(values)[len(values) // 2] for call, values in seconds.items()}
        total = {call: sum(values) for call, values in seconds.items()}
        words = "bf16, compiled" if mode else "float32"
        print(
            f"{name}, {words}: {1e3 * middle['tent, no guard']:.1f} ms; median step, first 100 steps of "
            + "; ".join(
                f"{a} / {b} {middle[a] / middle[b]:.3f}, {total[a] / total[b]:.3f}"
                for a, b in (("steady", "tent"), ("steady", "tent, no guard"), ("tent", "tent, no guard"))
            ),
            flush=True,
        )


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run")
    for name in ("data", "weights", "out"):
        running.add_argument(name, type=Path)
    running.add_argument("--networks", nargs="*", choices=list(zoo.NETWORKS), default=list(zoo.NETWORKS))
    running.add_argument("--methods", nargs="*", choices=list(METHODS))
    running.add_argument("--guard", choices=("both", "on", "off"), default="both")
    running.add_argument("--long", type=int, default=100, help="batches in a stream of few classes")
    running.add_argument("--device", default="cpu")
    for name in ("show", "draw"):
        command = commands.add_parser(name)
        command.add_argument("folder", type=Path)
        if name == "draw":
            command.add_argument("out", type=Path)
    naming = commands.add_parser("cases")
    for name in ("data", "weights"):
        naming.add_argument(name, type=Path)
    naming.add_argument("--device", default="cpu")
    costing = commands.add_parser("cost")
    costing.add_argument("--device", default="cpu")
    costing.add_argument("--models", nargs="*", default=["resnet50", "vit_b_16"], help="of torchvision")
    costing.add_argument("--compiled", action="store_true", help="bf16 and compiled, in place of float32")
    costing.add_argument("--tiny", action="store_true", help="a small model, for a trial")
    args = parser.parse_args()
    if args.command == "cost":
        return cost(torch.device(args.device), args.models, args.compiled, args.tiny)
    if args.command == "show":
        return show(args.folder)
    if args.command == "draw":
        return draw(args.folder, args.out)
    logging.getLogger("come").setLevel(logging.ERROR)  # what guards see is part of the result
    if args.command == "cases":
        return cases(args.data, args.weights, torch.device(args.device))
    args.out.mkdir(parents=True, exist_ok=True)
    for name in args.networks:
        loaded = network(name, args.data, args.weights, torch.device(args.device))
        run(name, *loaded, args.out / f"{name}.json", args)


if __name__ == "__main__":
    main()
