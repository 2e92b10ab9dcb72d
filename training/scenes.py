"""Trains the embedded networks for segmentation, on scenes of garments from Fashion-MNIST's training images.

apt-get install dataset-fashion-mnist
python training/scenes.py /usr/share/datasets/fashion-mnist src/come/bench/embedded

Every scene of the training is composed once, from a training photograph that `fashion.py` has not set apart as source images.
`CRITERION` is about the source model alone, and was fixed before any network was trained and any method ran: one length of
training, no choice among several, and a miss is reported in docs/segmentation.md.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zoo
from fashion import KNOWN, SOURCE, chosen
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from come.bench.data.scenes import CLASSES, ScenesSource, compose
from come.bench.models import fingerprint
from come.bench.segmenters import build_segmenter
from come.corruptions import corrupt, names
from come.seeds import derived_seed

CRITERION = {"clean": (0.70, 1.0), "severity 5": (0.20, 0.55)}
"""mIoU that a source model must reach; severity 5 is the mean over the paper's 15 corruptions."""
TESTED_ON = 200
BATCH = 16
MODELS: dict[str, dict[str, Any]] = {
    "scenes-unet-bn": {"kind": "unet", "norm": "batch", "arguments": {"classes": 9, "widths": [16, 32, 64, 96]}},
    "scenes-segformer": {"kind": "segformer", "norm": "layer", "arguments": {"classes": 9, "widths": [32, 48, 80]}},
}
PEAK = {"unet": 4e-3, "segformer": 1.5e-3}
"""Largest learning rates of AdamW."""


def batches(folder: Path, steps: int) -> Any:
    """Images (16, 3, 64, 64) uint8 and labels (16, 64, 64)."""
    images, labels = zoo.fashion(folder, "train")
    places = np.setdiff1d(np.flatnonzero(np.isin(labels, KNOWN)), chosen(labels, KNOWN, SOURCE, last=True))
    photographs = torch.from_numpy(images[places]).squeeze(-1)
    known = torch.from_numpy(np.searchsorted(KNOWN, labels[places]))
    for step in range(steps):
        seeds = (derived_seed(0, "training", step * BATCH + i) for i in range(BATCH))
        made = [compose(photographs, known, seed) for seed in seeds]
        yield tuple(torch.stack(parts) for parts in zip(*made, strict=True))


def answered(model: nn.Module, images: Tensor, size: tuple[int, ...]) -> Tensor:
    """Logits at the size of the labels."""
    return F.interpolate(model(zoo.normalized(images)), size, mode="bilinear")


def train(about: dict[str, Any], folder: Path, steps: int) -> nn.Module:
    """AdamW, warm-up and cosine."""
    torch.manual_seed(0)
    model, peak = build_segmenter(about["kind"], about["arguments"]), PEAK[about["kind"]]
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak, weight_decay=0.05)
    began = time.monotonic()
    for step, (images, labels) in enumerate(batches(folder, steps)):
        for group in optimizer.param_groups:
            group["lr"] = peak * min(1, (step + 1) / 100) * 0.5 * (1 + math.cos(math.pi * step / steps))
        loss = F.cross_entropy(answered(model, images, labels.shape[1:]), labels.long())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 100 == 0:
            print(f"step {step}, loss {loss.item():.3f}, {time.monotonic() - began:.0f} s", flush=True)
    return model.eval()


@torch.no_grad()
def tested(model: nn.Module, images: Tensor, labels: Tensor) -> dict[str, float]:
    """mIoU, and accuracy of the pixels."""
    parts = [answered(model, part, labels.shape[1:]).argmax(dim=1) for part in images.split(50)]
    counts = torch.bincount((labels * len(CLASSES) + torch.cat(parts)).flatten(), minlength=len(CLASSES) ** 2)
    counts = counts.view(len(CLASSES), -1).double()
    right = counts.diag()
    iou = right / (counts.sum(dim=0) + counts.sum(dim=1) - right)
    return {"miou": iou.mean().item(), "accuracy": (right.sum() / counts.sum()).item()}


def make(name: str, folder: Path, out: Path, steps: int) -> None:
    """Train a network, and write its weights and a record of them."""
    about, began = MODELS[name], time.monotonic()
    model = train(about, folder, steps)
    zoo.put(zoo.saved(model), model)
    images, labels, *_ = ScenesSource(size=TESTED_ON).load(range(TESTED_ON))
    clean = tested(model, images, labels)
    index = torch.arange(TESTED_ON)
    each = {shift: tested(model, corrupt(images, shift, 5, index=index), labels) for shift in names("standard")}
    hard = {key: sum(found[key] for found in each.values()) / len(each) for key in clean}
    found = {"clean": clean["miou"], "severity 5": hard["miou"]}
    met = all(low <= found[key] <= high for key, (low, high) in CRITERION.items())
    print(f"{name}: clean {clean}, severity 5 {hard}, criterion {'met' if met else 'MISSED'}")
    print("  " + ", ".join(f"{key} {100 * value['miou']:.0f}" for key, value in each.items()), flush=True)
    out.mkdir(parents=True, exist_ok=True)
    file = out / f"{name.replace('-', '_')}.safetensors"
    save_file(zoo.saved(model), file, metadata={"format": "pt"})
    record = about | {
        "mean": [0.5] * 3,
        "std": [0.5] * 3,
        "parameters": sum(p.numel() for p in model.parameters()),
        "optimizer": "adamw",
        "steps": steps,
        "train_images": steps * BATCH,
        "test_images": TESTED_ON,
        "clean": clean,
        "severity_5": hard,
        "sha256": fingerprint(model),
        "torch": torch.__version__,
        "seconds": round(time.monotonic() - began),
    }
    file.with_suffix(".json").write_text(json.dumps(record, indent=2) + "\n")


def main() -> None:
    """Train the networks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="with train-images-idx3-ubyte.gz and train-labels-idx1-ubyte.gz")
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", nargs="*", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--steps", type=int, default=3000)
    args = parser.parse_args()
    for name in args.only:
        make(name, args.folder, args.out, args.steps)


if __name__ == "__main__":
    main()
