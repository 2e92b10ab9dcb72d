"""Models by name, each with the preprocessing that its weights expect."""

from __future__ import annotations

import json
import warnings
import zipfile
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_safetensors
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from come.errors import ConfigError, ModelError, unknown

NORMALIZATIONS: dict[str, tuple[tuple[float, ...], tuple[float, ...]] | None] = {
    "model": None,
    "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "half": ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
}
"""Named normalizations. "model" is what the weights expect; the paper's ViT numbers were taken with "imagenet" although
those weights expect "half"."""


@dataclass(frozen=True)
class Preprocess:
    """From uint8 images (B, 3, H, W) to what a model takes.

    Example:
        >>> Preprocess(size=4)(torch.full((1, 3, 8, 8), 255, dtype=torch.uint8)).shape
        torch.Size([1, 3, 4, 4])
    """

    size: int = 224
    resize: int = 256
    interpolation: str = "bilinear"
    mean: tuple[float, ...] = (0.485, 0.456, 0.406)
    std: tuple[float, ...] = (0.229, 0.224, 0.225)

    def __call__(self, images: Tensor) -> Tensor:
        """Scale to [0, 1], bring to the model's size if needed, normalize."""
        x = images.float() / 255
        if x.shape[-2:] != (self.size, self.size):
            x = F.interpolate(x, (self.size, self.size), mode="bilinear", antialias=True, align_corners=False)
        mean = torch.tensor(self.mean, device=x.device).view(1, -1, 1, 1)
        std = torch.tensor(self.std, device=x.device).view(1, -1, 1, 1)
        return (x - mean) / std


@dataclass(frozen=True)
class Model:
    """A classifier, its name and its preprocessing."""

    name: str
    module: nn.Module
    preprocess: Preprocess
    num_classes: int


GLYPHS = {
    "glyphs-vit": "embedded ViT (LayerNorm), 32x32, 100 classes, for the glyphs data",
    "glyphs-resnet": "embedded ResNet (BatchNorm), 32x32, 100 classes, for the glyphs data",
}
DESCRIPTIONS = {
    **GLYPHS,
    "timm:NAME": "any model of timm with its pretrained weights and data configuration",
    "torchvision:NAME": "any classifier of torchvision with its default weights and transforms",
}


def load(name: str, *, checkpoint: str | Path | None = None, normalization: str = "model") -> Model:
    """A model by name, in evaluation mode.

    Args:
        name: "glyphs-vit", "glyphs-resnet", "timm:NAME" or "torchvision:NAME".
        checkpoint: a file with the weights (safetensors, or a torch file of plain tensors) in place of the pretrained ones.
        normalization: a name of `NORMALIZATIONS`.

    Example:
        >>> load("glyphs-vit").num_classes
        100
    """
    if normalization not in NORMALIZATIONS:
        raise unknown("normalization", normalization, NORMALIZATIONS)
    kind, _, rest = name.partition(":")
    if name in GLYPHS:
        if checkpoint is not None:
            raise ConfigError(f"{name} comes with its weights; give --checkpoint with timm:NAME or torchvision:NAME")
        model = _glyphs(name)
    elif kind == "timm" and rest:
        model = _timm(name, rest, checkpoint)
    elif kind == "torchvision" and rest:
        model = _torchvision(name, rest, checkpoint)
    else:
        raise unknown("model", name, DESCRIPTIONS)
    chosen = NORMALIZATIONS[normalization]
    if chosen is not None:
        model = replace(model, preprocess=replace(model.preprocess, mean=chosen[0], std=chosen[1]))
    model.module.eval()
    return model


def build_glyphs(kind: str, arguments: dict[str, Any]) -> nn.Module:
    """An untrained source model of the glyphs data, (B, 3, 32, 32) normalized -> (B, 100).

    Args:
        kind: "vit" or "resnet".
        arguments: of timm's constructor.
    """
    from timm.models.resnet import BasicBlock, ResNet
    from timm.models.vision_transformer import VisionTransformer

    module: Any
    if kind == "vit":
        module = VisionTransformer(**arguments)
    else:
        module = ResNet(**{**arguments, "block": BasicBlock})
        module.conv1[0].stride = (1, 1)  # 32 x 32 pixels: the stem keeps the resolution
        module.maxpool = nn.Identity()
    built: nn.Module = module
    return built


def _glyphs(name: str) -> Model:
    folder = files("come.bench") / "weights"
    about = json.loads((folder / f"{name.replace('-', '_')}.json").read_text())
    module = build_glyphs(about["model"], about["arguments"])
    state = load_safetensors((folder / f"{name.replace('-', '_')}.safetensors").read_bytes())
    module.load_state_dict({key: v.float() if v.is_floating_point() else v for key, v in state.items()})
    preprocess = Preprocess(size=32, resize=32, mean=tuple(about["mean"]), std=tuple(about["std"]))
    return Model(name, module, preprocess, about["arguments"]["num_classes"])


def _timm(name: str, rest: str, checkpoint: str | Path | None) -> Model:
    import timm
    from timm.data.config import resolve_model_data_config

    if rest.split(".")[0] not in timm.list_models():
        raise unknown("model of timm", rest.split(".")[0], timm.list_models())
    try:
        head = timm.get_pretrained_cfg(rest, allow_unregistered=False)
    except RuntimeError as error:
        raise ModelError(
            f"timm has no such weights: {_first_line(error)}; leave the tag after the point out"
        ) from error
    state = None if checkpoint is None else _weights(checkpoint)
    arguments: dict[str, Any] = {}
    if state is not None:
        key = f"{head.classifier}.weight" if head is not None else ""
        arguments = {"num_classes": len(state[key])} if key in state and state[key].ndim else {}
    try:
        module = timm.create_model(rest, pretrained=state is None, **arguments)
    except (OSError, RuntimeError, ValueError) as error:
        raise ModelError(
            f"cannot get the pretrained weights of {name}: {_first_line(error)}; with no network, give --checkpoint FILE"
        ) from error
    if state is not None:
        _put(module, state, name, checkpoint)
    cfg = resolve_model_data_config(module)  # type: ignore[no-untyped-call]
    size = cfg["input_size"][-1]
    preprocess = Preprocess(size, round(size / cfg["crop_pct"]), cfg["interpolation"], cfg["mean"], cfg["std"])
    return Model(name, module, preprocess, int(module.num_classes))  # type: ignore[arg-type]


def _torchvision(name: str, rest: str, checkpoint: str | Path | None) -> Model:
    import torchvision.models as zoo

    if rest not in zoo.list_models(module=zoo):
        raise unknown("model of torchvision", rest, zoo.list_models(module=zoo))
    weights = zoo.get_model_weights(rest).DEFAULT
    transforms = weights.transforms()
    state = None if checkpoint is None else _weights(checkpoint)
    try:
        module = zoo.get_model(rest, weights=weights if state is None else None)
    except (OSError, RuntimeError) as error:
        raise ModelError(
            f"cannot get the pretrained weights of {name}: {_first_line(error)}; with no network, give --checkpoint FILE"
        ) from error
    if state is not None:
        _put(module, state, name, checkpoint)
    preprocess = Preprocess(
        transforms.crop_size[0], transforms.resize_size[0], "bilinear", tuple(transforms.mean), tuple(transforms.std)
    )
    return Model(name, module, preprocess, len(weights.meta["categories"]))


def _weights(path: str | Path) -> dict[str, Tensor]:
    """Tensors of a checkpoint; nothing in it is executed, and none is larger than what the file holds of it."""
    path = Path(path)
    try:
        _check_archive(path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about pickle protocols: a file is read, or it is not
            if path.suffix == ".safetensors":
                state: Any = load_file(path)
            else:
                state = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, SafetensorError, RuntimeError, ValueError, EOFError) as error:
        raise ModelError(f"cannot read the checkpoint {path}: {_first_line(error)}") from error
    except Exception as error:  # torch.load raises whatever its unpickler met
        raise ModelError(f"{path} is not a checkpoint of plain tensors: {_first_line(error)}") from error
    for key in ("state_dict", "model"):
        if isinstance(state, dict) and isinstance(state.get(key), dict):
            state = state[key]
    if not isinstance(state, dict) or not all(isinstance(v, Tensor) for v in state.values()):
        raise ModelError(f"{path} holds no state dict; save model.state_dict() as safetensors")
    for key, v in state.items():
        if not isinstance(key, str) or v.layout != torch.strided or v.device.type != "cpu" or v.is_quantized:
            raise ModelError(
                f"{path}: {key!r} is not the name of a plain tensor; save model.state_dict() as safetensors"
            )
        if v.untyped_storage().nbytes() < v.numel() * v.element_size():
            raise ModelError(f"{path}: {key!r} of shape {tuple(v.shape)} is larger than what the file holds of it")
    try:
        return {key: v.float() if v.is_floating_point() else v for key, v in state.items()}
    except (RuntimeError, MemoryError) as error:  # NotImplementedError is a RuntimeError: numbers of four bits
        raise ModelError(f"{path} holds numbers that cannot be made float32: {_first_line(error)}") from error


def _check_archive(path: Path) -> None:
    """Refuse what would block, and a torch file with compressed parts: torch writes none, and a few bytes can be gigabytes."""
    if path.exists() and not path.is_file():
        raise OSError("it is not a file")
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            declared = sum(part.file_size for part in archive.infolist())
        if declared > path.stat().st_size:
            raise ValueError(
                f"it unpacks to {declared} bytes, more than it has; save it with torch.save or as safetensors"
            )


def _put(module: nn.Module, state: dict[str, Tensor], name: str, path: str | Path | None) -> None:
    try:
        module.load_state_dict(state)
    except RuntimeError as error:
        raise ModelError(f"the checkpoint {path} does not fit {name}: {_first_line(error, 1)}") from error


def _first_line(error: BaseException, line: int = 0) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[min(line, len(lines) - 1)].strip()
