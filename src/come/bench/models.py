"""Models by name, each with the preprocessing that its weights expect."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

from safetensors.torch import load as load_safetensors
from torch import nn

from come.bench.checkpoints import first_line, put_weights, read_weights
from come.bench.data.preprocess import Preprocess
from come.bench.downloads import require_download, timm_weights
from come.bench.record import digest
from come.errors import ConfigError, ModelError, unknown
from come.registry import parse

__all__ = ["DESCRIPTIONS", "GLYPHS", "NORMALIZATIONS", "Model", "Preprocess", "build_glyphs", "fingerprint", "load"]

NORMALIZATIONS: dict[str, tuple[tuple[float, ...], tuple[float, ...]] | None] = {
    "model": None,
    "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "half": ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
    "caffe": ((123.68 / 255, 116.779 / 255, 103.939 / 255), (1 / 255, 1 / 255, 1 / 255)),
    "lite": ((127 / 255, 127 / 255, 127 / 255), (128 / 255, 128 / 255, 128 / 255)),
}
"""Named normalizations. "model" is what the weights expect; the paper's ViT numbers were taken with "imagenet" although
those weights expect "half". "caffe" is of Keras' ResNet-50, "lite" of EfficientNet-Lite."""


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
    "keras-resnet50": "ResNet-50 as Keras has it, stride 2 on the first 1x1 convolution; needs --checkpoint",
    "timm:NAME": "any model of timm with its pretrained weights and data configuration; also timm:NAME:img_size=64",
    "torchvision:NAME": "any classifier of torchvision with its default weights and transforms",
}


def load(name: str, *, checkpoint: str | Path | None = None, normalization: str = "model") -> Model:
    """A model by name, in evaluation mode.

    Args:
        name: "glyphs-vit", "glyphs-resnet", "keras-resnet50", "timm:NAME" or "torchvision:NAME";
            "timm:NAME:img_size=64:num_classes=200" has arguments of timm's constructor.
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
    elif name == "keras-resnet50":
        model = _keras_resnet50(name, checkpoint)
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


def fingerprint(module: nn.Module) -> str:
    """SHA-256 of a model's weights: names, shapes and float32 values, whatever file they came from.

    Example:
        >>> fingerprint(nn.Linear(2, 1)) == fingerprint(nn.Linear(2, 1))  # random weights
        False
    """
    state = {name: value.detach().float().cpu() for name, value in module.state_dict().items() if value.ndim}
    return digest("", state)


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
        module.maxpool = nn.Identity()  # 32 x 32 pixels: the stem halves them once, not twice
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


def _keras_resnet50(name: str, checkpoint: str | Path | None) -> Model:
    """Timm's ResNet-50, by its names, but for where a stage strides and for the eps of its BatchNorm."""
    from timm.models.resnet import Bottleneck, ResNet

    if checkpoint is None:
        raise ConfigError(f"{name} has no weights of its own; give --checkpoint FILE")
    module: Any = ResNet(Bottleneck, (3, 4, 6, 3), norm_layer=partial(nn.BatchNorm2d, eps=1e-3))  # type: ignore[arg-type]
    for stage in (module.layer2, module.layer3, module.layer4):
        stage[0].conv1.stride, stage[0].conv2.stride = (2, 2), (1, 1)
    put_weights(module, read_weights(checkpoint), name, checkpoint)
    mean, std = NORMALIZATIONS["caffe"] or ((), ())
    return Model(name, module, Preprocess(mean=mean, std=std), 1000)


def _timm(name: str, spec: str, checkpoint: str | Path | None) -> Model:
    import timm
    from timm.data.config import resolve_model_data_config

    rest, given = parse(spec)
    if rest.split(".")[0] not in timm.list_models():
        raise unknown("model of timm", rest.split(".")[0], timm.list_models(), hint=". 'timm.list_models()' shows all")
    try:
        head = timm.get_pretrained_cfg(rest, allow_unregistered=False)
    except RuntimeError as error:
        raise ModelError(f"timm has no such weights: {first_line(error)}; leave the tag after the point out") from error
    state = None if checkpoint is None else read_weights(checkpoint)
    arguments: dict[str, Any] = {}
    if state is None:
        arguments["pretrained_cfg_overlay"] = timm_weights(name, head) if head is not None else {}
    elif head is not None and (layer := state.get(f"{head.classifier}.weight")) is not None and layer.ndim:
        arguments["num_classes"] = len(layer)
    try:
        module = timm.create_model(rest, pretrained=state is None, **(arguments | given))
    except (TypeError, AssertionError) as error:
        raise ModelError(f"timm cannot make {name}: {first_line(error)}; change its arguments") from error
    except (OSError, RuntimeError, ValueError) as error:
        raise ModelError(
            f"cannot get the pretrained weights of {name}: {first_line(error)}; with no network, give --checkpoint FILE"
        ) from error
    if state is not None:
        put_weights(module, state, name, checkpoint)
    cfg = resolve_model_data_config(module)  # type: ignore[no-untyped-call]
    size = int(given.get("img_size", cfg["input_size"][-1]))
    preprocess = Preprocess(size, round(size / cfg["crop_pct"]), cfg["interpolation"], cfg["mean"], cfg["std"])
    return Model(name, module, preprocess, int(module.num_classes))  # type: ignore[arg-type]


def _torchvision(name: str, rest: str, checkpoint: str | Path | None) -> Model:
    import torchvision.models as zoo

    if rest not in zoo.list_models(module=zoo):
        raise unknown(
            "model of torchvision",
            rest,
            zoo.list_models(module=zoo),
            hint=". 'torchvision.models.list_models()' shows all",
        )
    weights = zoo.get_model_weights(rest).DEFAULT
    transforms = weights.transforms()
    state = None if checkpoint is None else read_weights(checkpoint)
    if state is None:
        require_download(name, weights.url)
    try:
        module = zoo.get_model(rest, weights=weights if state is None else None)
    except (OSError, RuntimeError) as error:
        raise ModelError(
            f"cannot get the pretrained weights of {name}: {first_line(error)}; with no network, give --checkpoint FILE"
        ) from error
    if state is not None:
        put_weights(module, state, name, checkpoint)
    preprocess = Preprocess(
        transforms.crop_size[0], transforms.resize_size[0], "bilinear", tuple(transforms.mean), tuple(transforms.std)
    )
    return Model(name, module, preprocess, len(weights.meta["categories"]))
