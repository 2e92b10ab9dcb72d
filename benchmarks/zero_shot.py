"""What adaptation does to a zero-shot classifier: a small CLIP pair on corrupted photographs of clothes.

    python training/clip_pair.py /usr/share/datasets/fashion-mnist clip-pair.safetensors
    python benchmarks/zero_shot.py angles clip-pair.safetensors
    python benchmarks/zero_shot.py run clip-pair.safetensors results/zero-shot.json --seeds 0 1 2
    python benchmarks/zero_shot.py scales clip-pair.safetensors results/zero-shot-scales.json
    python benchmarks/zero_shot.py table results/zero-shot.json

`angles`: the cosine between the gradients of EM and of another objective, on the logits as they are and with the constant and
the scale of CLIP and of SigLIP. `run`: accuracy on clean images, on the 15 corruptions of severity 5, each from the source
model ("standard") and one after the other without a reset ("lifelong"), and what calibrated abstention keeps of its promise.
`scales`: the same at other logit scales than the learned one. The guard is on.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import come
from come.bench.data.embedded import FashionSource, clean_source
from come.corruptions import corrupt, names
from come.seeds import derived_seed
from come.state.files import replacing
from come.zero_shot import ZeroShot

sys.path.insert(0, str(Path(__file__).parents[1] / "training"))
import clip_pair

BATCH, IMAGES = 64, 512
RISK = 0.1
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "source": {"method": "source"},
    **{f"Tent, {o}": {"method": "tent", "objective": o} for o in ("em", "come", "invariant")},
    **{f"Tent, {o}, 4e-3": {"method": "tent", "objective": o, "lr": 4e-3} for o in ("em", "come", "invariant")},
    **{f"Tent, {o}, 1.6e-2": {"method": "tent", "objective": o, "lr": 1.6e-2} for o in ("em", "come", "invariant")},
    "Tent, invariant, prototypes": {"method": "tent", "objective": "invariant", "select": "head"},
    "default (steady)": {"method": "steady"},
    "steady, 4e-4": {"method": "steady", "lr": 4e-4},
    "steady, prototypes": {"method": "steady", "select": "head"},
    "TDA": {"method": "tda"},
}
SCALES = (0.25, 0.5, 2.0, 4.0)


class Images:
    """The embedded test images, corrupted when they are asked for, and kept."""

    def __init__(self) -> None:
        source = FashionSource()
        loaded = source.load(range(len(source)))
        self.clean, self.labels = loaded.images, loaded.labels
        self._kept: dict[str, Tensor] = {"clean": self.clean}

    def __call__(self, corruption: str, rows: Tensor) -> Tensor:
        """Normalized images."""
        if corruption not in self._kept:
            self._kept[corruption] = corrupt(self.clean, corruption, 5, index=torch.arange(len(self.clean)))
        return normalized(self._kept[corruption][rows])


def normalized(images: Tensor) -> Tensor:
    """[0, 255] -> [-1, 1]."""
    return images.float() / 127.5 - 1


def run(model: ZeroShot, how: dict[str, Any], images: Images, seed: int) -> dict[str, dict[str, float]]:
    """Accuracy, and of calibrated abstention the share answered and the error in it, by stream, in percent."""
    classifier = come.adapt(model, **how)
    x, y = clean_source()
    classifier.calibrate(zip(normalized(x).split(BATCH), y.split(BATCH), strict=True), risk=RISK)
    order = torch.randperm(len(images.labels), generator=torch.Generator().manual_seed(derived_seed(seed, "order")))
    rows = order[:IMAGES]
    found: dict[str, dict[str, float]] = {}
    for stream in ("clean", "standard", "lifelong"):
        right, answered = [], []
        classifier.reset()
        for corruption in ["clean"] if stream == "clean" else names("standard"):
            if stream == "standard":
                classifier.reset()
            for part in rows.split(BATCH):
                step = classifier.step(images(corruption, part))
                right.append(step.logits.argmax(dim=1) == images.labels[part])
                answered.append(~step.abstain)
        good, told = torch.cat(right), torch.cat(answered)
        wrong = (~good[told]).double().mean().item() if told.any() else 0.0
        found[stream] = {
            "accuracy": 100 * good.double().mean().item(),
            "answered": 100 * told.double().mean().item(),
            "error": 100 * wrong,
        }
    return found


def angles(model: ZeroShot, images: Images) -> None:
    """Print a table of cosines between gradients with respect to the norm layers, mean over eight batches."""
    print("| logits | images | u of COME | COME | u of invariant | invariant |\n|---|---|---:|---:|---:|---:|")
    parameters = list(come.select.norm_affine()(model).values())
    for title, scale, bias in (
        ("the pair's own", 1.0, 0.0),
        ("with CLIP's constant, +20", 1.0, 20.0),
        ("with SigLIP's constant, -16", 1.0, -16.0),
        ("at scale 100", 100 / model.scale, 0.0),
        ("at scale 100, +20", 100 / model.scale, 20.0),
    ):
        for corruption in ("clean", "contrast"):
            cosines: dict[str, list[float]] = {"come": [], "invariant": []}
            open_shares: dict[str, list[Tensor]] = {"come": [], "invariant": []}
            for part in torch.arange(8 * BATCH).split(BATCH):
                logits = scale * model(images(corruption, part)) + bias
                grads = {
                    name: torch.cat(
                        [
                            g.flatten()
                            for g in torch.autograd.grad(
                                come.objectives.get(name).entropy(logits).mean(), parameters, retain_graph=True
                            )
                        ]
                    ).double()
                    for name in ("em", *cosines)
                }
                for name, values in cosines.items():
                    values.append(torch.cosine_similarity(grads["em"], grads[name], dim=0).item())
                    open_shares[name].append(come.objectives.get(name).uncertainty(logits.detach()))
            told = [f"{torch.cat(open_shares[o]).median():.2g} | {sum(cosines[o]) / 8:.4f}" for o in cosines]
            print(f"| {title} | {corruption} | {' | '.join(told)} |", flush=True)


def table(file: Path) -> None:
    """Over the seeds: mean and standard deviation of the gain over the source in points, and means of what abstention does."""
    streams, kept = ("clean", "standard", "lifelong"), json.loads(file.read_text())
    print("| | clean | standard | lifelong | answered, error: clean | standard | lifelong |\n|---|" + "---:|" * 6)
    for name, seeds in kept.items():

        def values(stream: str, metric: str, seeds: list[Any] = seeds) -> Tensor:
            return torch.tensor([seed[stream][metric] for seed in seeds], dtype=torch.float64)

        cells = []
        for stream in streams:
            accuracy, source = values(stream, "accuracy"), values(stream, "accuracy", kept["source"])
            gain = accuracy - source
            cells.append(f"{accuracy.mean():.1f}" + (f" ({gain.mean():+.1f} ± {gain.std():.1f})" if gain.any() else ""))
        cells += [f"{values(s, 'answered').mean():.1f}, {values(s, 'error').mean():.1f}" for s in streams]
        print(f"| {name} | {' | '.join(cells)} |")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["angles", "run", "scales", "table"])
    parser.add_argument("weights", type=Path, help="those of training/clip_pair.py; of `table` the results")
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--only", nargs="+", choices=list(CONFIGURATIONS), default=list(CONFIGURATIONS))
    args = parser.parse_args()
    if args.command == "table":
        return table(args.weights)
    images, model = Images(), clip_pair.classifier(str(args.weights))
    if args.command == "angles":
        return angles(model, images)
    learned, found = model.scale, dict[str, list[Any]]()
    chosen = ["Tent, invariant, 4e-3", "steady, 4e-4", "TDA"] if args.command == "scales" else args.only
    for name in chosen:
        for factor in SCALES if args.command == "scales" else (1.0,):
            model.scale = learned * factor
            title = name if args.command == "run" else f"{name}, scale x {factor:g}"
            found[title] = [run(model, CONFIGURATIONS[name], images, seed) for seed in args.seeds]
            told = {stream: round(values["accuracy"], 1) for stream, values in found[title][0].items()}
            print(title, told, flush=True)
            with replacing(args.out) as writing:
                writing.write_text(json.dumps(found, indent=1))
    return None


if __name__ == "__main__":
    main()
