"""Two small CIFAR-10 models on which nothing was chosen: a GroupNorm ResNet and a ViT.

python training/cifar10.py resnet train test weights.safetensors --seconds 90
python benchmarks/real.py run --model training.cifar10:resnet:img_size=32 --checkpoint weights.safetensors --data test ...

`train` and `test` have a folder of pictures for each class. Both models take 32 x 32 pixels in ImageNet's normalization.
"""

from __future__ import annotations

import argparse
import math
import time
from functools import partial

import torch
from safetensors.torch import save_file
from timm.layers import GroupNorm
from timm.models.resnet import BasicBlock, ResNet
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.datasets import ImageFolder
from torchvision.transforms.functional import pil_to_tensor

from come.bench.data.preprocess import Preprocess

BATCH = 256


def resnet(img_size: int = 32) -> nn.Module:
    """ResNet-18 with 16 groups in each norm, and a first layer that keeps small pictures whole; any size will do."""
    model = ResNet(BasicBlock, (2, 2, 2, 2), num_classes=10, norm_layer=partial(GroupNorm, num_groups=16))
    model.conv1, model.maxpool = nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.Identity()
    return model


def vit(img_size: int = 32) -> nn.Module:
    """Six blocks of width 192 on patches of 4 x 4."""
    return VisionTransformer(img_size=img_size, patch_size=4, embed_dim=192, depth=6, num_heads=3, num_classes=10)


def read(folder: str, device: torch.device) -> tuple[Tensor, Tensor]:
    """All pictures (N, 3, 32, 32) uint8 of a folder, and their labels."""
    pictures, labels = zip(*ImageFolder(folder), strict=True)
    return torch.stack([pil_to_tensor(picture) for picture in pictures]).to(device), torch.tensor(labels).to(device)


def augmented(x: Tensor) -> Tensor:
    """Moved by up to four pixels, and mirrored half of the time."""
    n, device = len(x), x.device
    x = F.pad(x, (4, 4, 4, 4), mode="reflect")
    down, right = torch.randint(0, 9, (2, n, 1), device=device) + torch.arange(32, device=device)
    rows, channels = torch.arange(n, device=device)[:, None, None, None], torch.arange(3, device=device)[:, None, None]
    x = x[rows, channels, down[:, None, :, None], right[:, None, None, :]]
    return torch.where(torch.rand(n, 1, 1, 1, device=device) < 0.5, x.flip(3), x)


def main() -> None:
    """Train for a time with AdamW, mixup and a cosine schedule; prints the accuracy on `test`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=["resnet", "vit"])
    for name in ("train", "test", "out"):
        parser.add_argument(name)
    parser.add_argument("--seconds", type=float, default=90)
    args = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    half = partial(torch.autocast, device.type, torch.bfloat16)
    normalize = Preprocess(size=32, resize=32)
    (x, y), (x_test, y_test) = read(args.train, device), read(args.test, device)
    model = (resnet() if args.kind == "resnet" else vit()).to(device, memory_format=torch.channels_last)
    peak = 2e-3 if args.kind == "resnet" else 1e-3
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.05)
    started, step, done = time.monotonic(), 0, 0.0
    while done < 1:
        for batch in torch.randperm(len(x), device=device).split(BATCH):
            done = (time.monotonic() - started) / args.seconds
            for group in optimizer.param_groups:
                group["lr"] = peak * min(1, (step + 1) / 100) * 0.5 * (1 + math.cos(math.pi * min(1, done)))
            inputs, targets = normalize(augmented(x[batch])), F.one_hot(y[batch], 10).float()
            if args.kind == "vit" or step % 2:
                share = torch.distributions.Beta(0.8, 0.8).sample().item()
                inputs, targets = (share * t + (1 - share) * t.flip(0) for t in (inputs, targets))
            with half():
                loss = F.cross_entropy(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if done >= 1:
                break
    model.eval()
    with torch.no_grad(), half():
        answers = torch.cat([model(normalize(part)).argmax(dim=1) for part in x_test.split(500)])
    print(f"{args.kind}: {step} steps, {100 * (answers == y_test).float().mean():.1f}% on {args.test}", flush=True)
    save_file({name: t.detach().cpu().contiguous() for name, t in model.state_dict().items()}, args.out)


if __name__ == "__main__":
    main()
