"""Trains the source models of the embedded benchmark on clean glyphs and writes their weights.

    python training/train_glyphs.py --model resnet --epochs 12 --batch 1024 --start old/glyphs_resnet.safetensors --out weights
    python training/train_glyphs.py --model vit --device cpu --epochs 1 --train-size 2000 --out smoke

The commands that made the embedded weights are in docs/glyphs.md, the criterion that they had to meet too.

Writes ``OUT/glyphs_<model>.safetensors`` (half precision; one-dimensional tensors stay in single precision)
and ``OUT/glyphs_<model>.json`` (how to build the model, how to normalize, what it reaches). The images
are drawn once, by several processes, and live on the device; the augmentation is a shift and a mild change of
colour, none of the benchmark's corruptions. Needs torch, timm, Pillow and matplotlib's fonts (``--fonts``).
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import multiprocessing
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

from come import corruptions
from come.bench.data.glyphs import MEAN, STD, Glyphs
from come.bench.models import build_glyphs, fingerprint
from come.corruptions import corrupt
from come.seeds import derived_seed

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "vit": {
        "class": "timm.models.vision_transformer.VisionTransformer",
        "arguments": {
            "img_size": 32,
            "patch_size": 8,
            "embed_dim": 128,
            "depth": 6,
            "num_heads": 4,
            "num_classes": 100,
        },
    },
    "resnet": {
        "class": "timm.models.resnet.ResNet",
        "arguments": {
            "block": "BasicBlock",
            "layers": [2, 2, 2, 2],
            "channels": [16, 32, 64, 128],
            "stem_type": "deep",
            "stem_width": 8,
            "num_classes": 100,
        },
    },
}
"""How each model is built, by `build_glyphs`; written to the JSON file."""

RATES = {"vit": 1e-3, "resnet": 3e-3}
DECAY = {"vit": 0.05, "resnet": 0.02}


def _render(task: tuple[Glyphs, int, int]) -> tuple[np.ndarray, np.ndarray]:
    data, start, stop = task
    torch.set_num_threads(1)
    images, labels = data.batch(range(start, stop))
    return images.numpy(), labels.numpy()


def render(data: Glyphs, workers: int) -> tuple[Tensor, Tensor]:
    """A whole data set in memory: images (N, 3, 32, 32) uint8 and labels (N,) int64."""
    step = 1000
    tasks = [(data, start, min(start + step, len(data))) for start in range(0, len(data), step)]
    if workers <= 1:
        parts = [_render(task) for task in tasks]
    else:
        method = "fork" if "fork" in multiprocessing.get_all_start_methods() else "spawn"
        with multiprocessing.get_context(method).Pool(workers) as pool:
            parts = pool.map(_render, tasks, chunksize=1)
    images = np.concatenate([part[0] for part in parts])
    return torch.from_numpy(images), torch.from_numpy(np.concatenate([part[1] for part in parts]))


def normalize(images: Tensor) -> Tensor:
    """uint8 or [0, 1] images (B, 3, 32, 32) as the models want them."""
    mean = torch.tensor(MEAN, device=images.device).view(1, 3, 1, 1)
    std = torch.tensor(STD, device=images.device).view(1, 3, 1, 1)
    unit = images.float() / 255 if images.dtype == torch.uint8 else images
    return (unit - mean) / std


def augment(images: Tensor, shift: int = 2) -> Tensor:
    """uint8 images (B, 3, 32, 32), shifted by up to ``shift`` pixels, with channel gains of 0.9 to 1.1."""
    batch, _, side, _ = images.shape
    unit = images.float() / 255
    padded = functional.pad(unit, [shift] * 4, mode="replicate")
    corner = torch.randint(0, 2 * shift + 1, (2, batch, 1), device=images.device)
    axis = torch.arange(side, device=images.device)
    row, column = (corner[0] + axis)[:, None, :, None], (corner[1] + axis)[:, None, None, :]
    item = torch.arange(batch, device=images.device).view(-1, 1, 1, 1)
    channel = torch.arange(3, device=images.device).view(1, 3, 1, 1)
    gain = 0.9 + 0.2 * torch.rand(batch, 3, 1, 1, device=images.device)
    return (padded[item, channel, row, column] * gain).clamp(0, 1)


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor, batch: int = 2000) -> float:
    """Share of uint8 images (N, 3, 32, 32) that the model labels right, in single precision."""
    model.eval()
    right = 0
    for start in range(0, len(images), batch):
        logits = model(normalize(images[start : start + batch]))
        right += int((logits.argmax(1) == labels[start : start + batch]).sum())
    return right / len(images)


CRITERION = {"clean": (0.80, 1.0), "severity 5": (0.35, 0.45)}
"""What a source model must reach for the data to be as hard as the paper's: ImageNet-C leaves its ViT 39.8%."""


def shifted(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Accuracy on uint8 images (N, 3, 32, 32) under severity 5, mean over the paper's 15 corruptions."""
    index = torch.arange(len(images), device=images.device)
    shifts = corruptions.names("standard")
    return sum(accuracy(model, corrupt(images, name, 5, index=index), labels) for name in shifts) / len(shifts)


def met(clean: float, shifted: float) -> bool:
    """Whether a source model is as the data asks for."""
    found = {"clean": clean, "severity 5": shifted}
    return all(low <= found[name] <= high for name, (low, high) in CRITERION.items())


class Follower:
    """A moving average of a model's weights and statistics; integer buffers are copied."""

    def __init__(self, model: nn.Module) -> None:
        self.average = copy.deepcopy(model)
        # both states share memory with their models, which change in place: collected once
        pairs = list(zip(self.average.state_dict().values(), model.state_dict().values(), strict=True))
        self._moving = [pair for pair in pairs if pair[0].is_floating_point()]
        self._copied = [pair for pair in pairs if not pair[0].is_floating_point()]

    @torch.no_grad()
    def step(self, decay: float) -> None:
        ours, theirs = zip(*self._moving, strict=True)
        torch._foreach_lerp_(ours, theirs, 1 - decay)
        for our, their in self._copied:
            our.copy_(their)


def stored(model: nn.Module) -> dict[str, Tensor]:
    """The state as it is stored: half precision, but one-dimensional tensors in single precision."""
    state = {}
    for key, value in model.state_dict().items():
        value = value.detach().cpu()
        if value.is_floating_point():
            value = value.to(torch.float16 if value.ndim > 1 else torch.float32)
        state[key] = value.contiguous()
    return state


def schedule(step: int, warm: int, steps: int) -> float:
    """Factor of the learning rate: a linear warm-up, then half a cosine down to a hundredth."""
    if step < warm:
        return (step + 1) / warm
    return 0.01 + 0.495 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm)))


def train(options: argparse.Namespace) -> None:
    began = time.time()
    device = torch.device(options.device)
    torch.manual_seed(options.seed)
    size, seed, fonts, workers = options.train_size, options.seed, options.fonts, options.workers
    # everything is drawn now: no processes are forked once CUDA runs
    images, labels = render(Glyphs("train", size, seed, fonts=fonts), workers)
    tests, answers = render(Glyphs("test", options.test_size, seed, fonts=fonts), workers)
    # the reported accuracy is that on another seed than the one watched during training
    fresh = render(Glyphs("test", options.test_size, derived_seed(seed, "reported"), fonts=fonts), workers)
    easy = render(Glyphs("train", size, seed, plain=True, fonts=fonts), workers)[0] if options.plain else None
    print(f"drew {len(images) + len(tests) + len(fresh[0])} images in {time.time() - began:.1f} s", flush=True)
    images, labels, tests, answers = (t.to(device) for t in (images, labels, tests, answers))
    easy = easy if easy is None else easy.to(device)

    recipe = copy.deepcopy(ARCHITECTURES[options.model])
    recipe["arguments"].update(options.override)
    model = build_glyphs(options.model, recipe["arguments"]).to(device)
    if options.start:
        model.load_state_dict(
            {k: v.float() if v.is_floating_point() else v for k, v in load_file(options.start).items()}
        )
    follower = Follower(model)
    average = follower.average
    count = sum(p.numel() for p in model.parameters())
    wide = [p for p in model.parameters() if p.ndim > 1]
    narrow = [p for p in model.parameters() if p.ndim <= 1]
    rate = options.rate or RATES[options.model]
    optimizer = torch.optim.AdamW(
        [{"params": wide, "weight_decay": DECAY[options.model]}, {"params": narrow, "weight_decay": 0.0}],
        lr=rate,
        betas=(0.9, 0.98),
        fused=device.type == "cuda",
    )
    steps_each = max(1, len(images) // options.batch)
    steps = steps_each * options.epochs
    warm = max(1, min(steps // 10, 2 * steps_each))
    step = 0
    print(f"{options.model}: {count:,} parameters, {steps} steps of {options.batch} images", flush=True)
    for epoch in range(options.epochs):
        model.train()
        started = time.time()
        drawn = easy if easy is not None and epoch < options.plain else images
        order = torch.randperm(len(images), device=device)
        right, losses = torch.zeros((), device=device), torch.zeros((), device=device)
        for chosen in torch.split(order[: steps_each * options.batch], options.batch):
            for group in optimizer.param_groups:
                group["lr"] = rate * schedule(step, warm, steps)
            inputs, targets = normalize(augment(drawn[chosen])), labels[chosen]
            with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
                logits = model(inputs)
            loss = functional.cross_entropy(logits.float(), targets, label_smoothing=options.smoothing)
            optimizer.zero_grad(set_to_none=True)
            torch.autograd.backward(loss)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            step += 1
            follower.step(min(options.ema, step / (step + 10)))
            right += (logits.argmax(1) == targets).sum()
            losses += loss.detach()
        seen = steps_each * options.batch
        print(
            f"epoch {epoch + 1}/{options.epochs}: loss {float(losses) / steps_each:.3f}, "
            f"train {float(right) / seen:.4f}, test {accuracy(average, tests, answers):.4f}, "
            f"severity 5 {shifted(average, tests[:1000], answers[:1000]):.4f}, "
            f"{time.time() - started:.1f} s",
            flush=True,
        )

    state = stored(average)
    average.load_state_dict(state)  # from here on the rounded weights are measured
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    file = out / f"glyphs_{options.model}.safetensors"
    save_file(state, file, metadata={"format": "pt"})
    fresh = (fresh[0].to(device), fresh[1].to(device))
    reached, hard = accuracy(average, *fresh), shifted(average, *fresh)
    record = {
        "model": options.model,
        **recipe,
        "mean": MEAN,
        "std": STD,
        "parameters": count,
        "clean_test_accuracy": reached,
        "severity_5_accuracy": hard,
        "test_images": len(fresh[0]),
        "test_seed": derived_seed(options.seed, "reported"),
        "train_images": len(images),
        "train_seed": options.seed,
        "epochs": options.epochs,
        "plain_epochs": options.plain,
        "bytes": file.stat().st_size,
        "sha256": fingerprint(average),
        "command": " ".join(["python", *sys.argv]),
        "torch": torch.__version__,
        "seconds": round(time.time() - began, 1),
    }
    file.with_suffix(".json").write_text(json.dumps(record, indent=2) + "\n")
    print(
        f"{file}: {file.stat().st_size:,} bytes, {len(fresh[0])} fresh test images: clean {reached:.4f}, severity 5 "
        f"{hard:.4f}, criterion {'met' if met(reached, hard) else 'NOT met'}, {time.time() - began:.0f} s",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=sorted(ARCHITECTURES), required=True)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--start", help="weights to start from, a file that this script wrote; default: random ones")
    parser.add_argument("--out", required=True, help="folder for the weights and their description")
    parser.add_argument("--fonts", help="folder of matplotlib's fonts; default: the installed one")
    parser.add_argument("--train-size", type=int, default=200_000)
    parser.add_argument("--plain", type=int, default=0, help="first epochs, on images without clutter")
    parser.add_argument("--test-size", type=int, default=10_000)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--workers", type=int, default=16, help="processes that draw")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rate", type=float, help="peak learning rate")
    parser.add_argument("--smoothing", type=float, default=0.0, help="label smoothing")
    parser.add_argument("--ema", type=float, default=0.999, help="decay of the averaged weights")
    parser.add_argument(
        "--override", type=json.loads, default={}, metavar="JSON", help="constructor arguments to change"
    )
    options = parser.parse_args()
    if options.train_size < options.batch:
        parser.error(f"--batch is {options.batch}; give at most --train-size, which is {options.train_size}")
    train(options)


if __name__ == "__main__":
    main()
