"""Models by name, each with the preprocessing that its weights expect."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load as load_safetensors
from torch import nn

from come.bench.checkpoints import head_size, put_weights, read_weights
from come.bench.clip import load_open_clip
from come.bench.data.embedded import KNOWN
from come.bench.data.preprocess import Preprocess
from come.bench.downloads import require_download, timm_weights
from come.bench.factories import call_factory, is_factory
from come.bench.hub import load_transformers
from come.bench.record import digest
from come.errors import ConfigError, ModelError, one_line, require, unknown
from come.model.inputs import logits_of
from come.registry import parse

__all__ = ["DESCRIPTIONS", "EMBEDDED", "NORMALIZATIONS", "Model", "Preprocess", "build_embedded", "fingerprint", "load"]

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


EMBEDDED = {
    "fashion-resnet-bn": "embedded ResNet (BatchNorm), 32x32, for the fashion data",
    "fashion-resnet-gn": "embedded ResNet (GroupNorm), the same",
    "fashion-vit": "embedded ViT (LayerNorm), the same",
}
DESCRIPTIONS = {
    **EMBEDDED,
    "keras-resnet50": "ResNet-50 as Keras has it, stride 2 on the first 1x1 convolution; needs --checkpoint",
    "timm:NAME": "any model of timm with its pretrained weights and data configuration",
    "torchvision:NAME": "any classifier of torchvision with its default weights and transforms",
    "hf:NAME": "any image classifier of transformers with its image processor, of the Hub or in a folder",
    "open_clip:NAME": "a model of open_clip as zero-shot classifier; add :classes=FILE, with a name in each line",
    "MODULE:FACTORY": "the torch.nn.Module that your function returns; see --image-size, --mean, --std",
}
PREPROCESSING = ("normalization", "mean", "std", "image_size", "resize", "interpolation")
OPTIONS = ("checkpoint", *PREPROCESSING)
"""What `load` takes beside a name, and what `come.bench.cell.Knobs` calls it."""


def load(
    name: str,
    *,
    checkpoint: str | Path | None = None,
    normalization: str = "model",
    image_size: int | None = None,
    resize: int | None = None,
    interpolation: str | None = None,
    mean: tuple[float, ...] | None = None,
    std: tuple[float, ...] | None = None,
) -> Model:
    """A model by name, in evaluation mode.

    Args:
        name: one of `EMBEDDED`, "keras-resnet50", "timm:NAME", "torchvision:NAME", "hf:NAME", "open_clip:NAME" or
            "MODULE:FACTORY"; the last five also with arguments, as in "timm:NAME:img_size=64:num_classes=200".
        checkpoint: a file with the weights (safetensors, or a torch file of plain tensors) in place of the pretrained ones.
        normalization: a name of `NORMALIZATIONS`.
        image_size: side of the images in place of the model's own; the share that is cropped stays the same.
        resize: shorter side of a picture before the crop, at least `image_size`.
        interpolation: of that resizing.
        mean: per channel, of images in [0, 1], in place of the normalization; with `std`.
        std: the same, positive.

    Example:
        >>> model = load("fashion-vit", mean=(0.5, 0.5, 0.5), std=(0.25, 0.25, 0.25))
        >>> model.num_classes, model.preprocess.size, model.preprocess.std
        (8, 32, (0.25, 0.25, 0.25))
    """
    if normalization not in NORMALIZATIONS:
        raise unknown("normalization", normalization, NORMALIZATIONS)
    chosen = NORMALIZATIONS[normalization]
    if (mean is None) != (std is None):
        raise ConfigError(f"mean and std must be given together, got mean {mean} and std {std}")
    if mean is not None and std is not None:
        if chosen is not None:
            raise ConfigError(
                f"normalization {normalization} has a mean and a std; leave it out, or leave out --mean and --std"
            )
        chosen = mean, std
    module, preprocess = _load(name, checkpoint)
    size = image_size or preprocess.size
    preprocess = replace(
        preprocess,
        size=size,
        resize=resize or round(size * preprocess.resize / preprocess.size),
        interpolation=interpolation or preprocess.interpolation,
        mean=chosen[0] if chosen else preprocess.mean,
        std=chosen[1] if chosen else preprocess.std,
    )
    require(resize is None or resize >= size, "resize", resize, f"at least the image size, {size}")
    try:
        with torch.no_grad():
            out = module.eval()(torch.zeros(2, 3, size, size))
    except Exception as error:  # it may be anybody's code
        raise ModelError(
            f"{name} cannot be called with images of shape (2, 3, {size}, {size}): {one_line(error, first=True)}; give "
            "--image-size N, the side of the images that it takes"
        ) from error
    return Model(name, module, preprocess, logits_of(out, 2).shape[1])


def _load(name: str, checkpoint: str | Path | None) -> tuple[nn.Module, Preprocess]:
    kind, _, rest = name.partition(":")
    if name in EMBEDDED:
        if checkpoint is not None:
            raise ConfigError(f"{name} comes with its weights; give --checkpoint with timm:NAME or torchvision:NAME")
        return _embedded(name)
    if name == "keras-resnet50":
        return _keras_resnet50(name, checkpoint)
    zoos = {"timm": _timm, "torchvision": _torchvision, "hf": load_transformers, "open_clip": load_open_clip}
    if kind in zoos and rest:
        return zoos[kind](name, rest, checkpoint)
    if is_factory(name):
        return call_factory(name, checkpoint)
    raise unknown("model", name, DESCRIPTIONS)


def fingerprint(module: nn.Module) -> str:
    """SHA-256 of a model's weights: names, shapes and float32 values, whatever file they came from.

    Example:
        >>> fingerprint(nn.Linear(2, 1)) == fingerprint(nn.Linear(2, 1))  # random weights
        False
    """
    state = {name: value.detach().float().cpu() for name, value in module.state_dict().items() if value.ndim}
    return digest("", state)


def build_embedded(kind: str, norm: str, arguments: dict[str, Any]) -> nn.Module:
    """An untrained source model of the embedded data, (B, 3, 32, 32) normalized -> (B, 8).

    Args:
        kind: "vit" or "resnet".
        norm: "layer", "batch" or "group".
        arguments: of timm's constructor.
    """
    from timm.layers.norm import GroupNorm
    from timm.models.resnet import BasicBlock, ResNet
    from timm.models.vision_transformer import VisionTransformer

    module: Any
    if kind == "vit":
        module = VisionTransformer(num_classes=len(KNOWN), **arguments)
    else:
        layer: Any = nn.BatchNorm2d if norm == "batch" else partial(GroupNorm, num_groups=8)
        module = ResNet(BasicBlock, num_classes=len(KNOWN), norm_layer=layer, **arguments)  # type: ignore[arg-type]
        # 32 x 32 pixels: the stem does not halve them
        module.conv1, module.maxpool = nn.Conv2d(3, module.conv1[-1].out_channels, 3, 1, 1, bias=False), nn.Identity()
    built: nn.Module = module
    return built


def _embedded(name: str) -> tuple[nn.Module, Preprocess]:
    folder = files("come.bench") / "embedded"
    about = json.loads((folder / f"{name.replace('-', '_')}.json").read_text())
    module = build_embedded(about["kind"], about["norm"], about["arguments"])
    state = load_safetensors((folder / f"{name.replace('-', '_')}.safetensors").read_bytes())
    module.load_state_dict({key: v.float() if v.is_floating_point() else v for key, v in state.items()})
    return module, Preprocess(size=32, resize=32, mean=tuple(about["mean"]), std=tuple(about["std"]))


def _keras_resnet50(name: str, checkpoint: str | Path | None) -> tuple[nn.Module, Preprocess]:
    """Timm's ResNet-50, by its names, but for where a stage strides and for the eps of its BatchNorm."""
    from timm.models.resnet import Bottleneck, ResNet

    if checkpoint is None:
        raise ConfigError(f"{name} has no weights of its own; give --checkpoint FILE")
    module: Any = ResNet(Bottleneck, (3, 4, 6, 3), norm_layer=partial(nn.BatchNorm2d, eps=1e-3))  # type: ignore[arg-type]
    for stage in (module.layer2, module.layer3, module.layer4):
        stage[0].conv1.stride, stage[0].conv2.stride = (2, 2), (1, 1)
    put_weights(module, read_weights(checkpoint), name, checkpoint)
    mean, std = NORMALIZATIONS["caffe"] or ((), ())
    return module, Preprocess(mean=mean, std=std)


def _timm(name: str, spec: str, checkpoint: str | Path | None) -> tuple[nn.Module, Preprocess]:
    import timm
    from timm.data.config import resolve_model_data_config

    rest, given = parse(spec)
    if rest.split(".")[0] not in timm.list_models():
        raise unknown("model of timm", rest.split(".")[0], timm.list_models(), hint=". 'timm.list_models()' shows all")
    try:
        head = timm.get_pretrained_cfg(rest, allow_unregistered=False)
    except RuntimeError as error:
        raise ModelError(
            f"timm has no such weights: {one_line(error, first=True)}; leave the tag after the point out"
        ) from error
    state = None if checkpoint is None else read_weights(checkpoint)
    arguments: dict[str, Any] = {}
    if state is None:
        arguments["pretrained_cfg_overlay"] = timm_weights(name, head) if head is not None else {}
    elif head is not None and (layer := state.get(f"{head.classifier}.weight")) is not None and layer.ndim:
        arguments["num_classes"] = len(layer)
    with _making(name, "timm", (TypeError, AssertionError)):
        module = timm.create_model(rest, pretrained=state is None, **(arguments | given))
    if state is not None:
        put_weights(module, state, name, checkpoint)
    cfg = resolve_model_data_config(module)  # type: ignore[no-untyped-call]
    size = int(given.get("img_size", cfg["input_size"][-1]))
    return module, Preprocess(size, round(size / cfg["crop_pct"]), cfg["interpolation"], cfg["mean"], cfg["std"])


@contextmanager
def _making(name: str, library: str, wrong_arguments: tuple[type[Exception], ...]) -> Iterator[None]:
    """Within the block, what a library raises when it makes a model is a `ModelError`."""
    try:
        yield
    except wrong_arguments as error:
        raise ModelError(
            f"{library} cannot make {name}: {one_line(error, first=True)}; change its arguments"
        ) from error
    except (OSError, RuntimeError, ValueError) as error:
        raise ModelError(
            f"cannot get the pretrained weights of {name}: {one_line(error, first=True)}; with no network, give "
            "--checkpoint FILE"
        ) from error


def _torchvision(name: str, spec: str, checkpoint: str | Path | None) -> tuple[nn.Module, Preprocess]:
    import torchvision.models as zoo

    rest, given = parse(spec)
    names = zoo.list_models(module=zoo)
    if rest not in names:
        raise unknown("model of torchvision", rest, names, hint=". 'torchvision.models.list_models()' shows all")
    weights = zoo.get_model_weights(rest).DEFAULT
    transforms = weights.transforms()
    state = None if checkpoint is None else read_weights(checkpoint)
    if state is None:
        require_download(name, weights.url)
    with _making(name, "torchvision", (TypeError, ValueError)):
        module = zoo.get_model(rest, weights=weights if state is None else None, **given)
        if state is not None and (classes := head_size(module, state, len(weights.meta["categories"]))) is not None:
            module = zoo.get_model(rest, weights=None, **({"num_classes": classes} | given))
    if state is not None:
        put_weights(module, state, name, checkpoint)
    return module, Preprocess(
        transforms.crop_size[0], transforms.resize_size[0], "bilinear", tuple(transforms.mean), tuple(transforms.std)
    )
