"""Models by name, each with the preprocessing that its weights expect."""

from __future__ import annotations

import copy
import importlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load as load_safetensors
from torch import Tensor, nn

from come.bench.checkpoints import head_size, put_weights, read_weights
from come.bench.clip import load_open_clip
from come.bench.data.embedded import KNOWN
from come.bench.data.preprocess import Preprocess as Preprocess
from come.bench.data.preprocess import WholeImage
from come.bench.downloads import require_download, timm_weights
from come.bench.hub import load_transformers
from come.bench.record import digest
from come.bench.segmenters import SEGMENTERS, build_segmenter
from come.errors import ConfigError, ModelError, one_line, require, shown, unknown
from come.model.heads import Head
from come.model.inputs import logits_of
from come.registry import parse
from come.zero_shot import Prototypes

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
    """A classifier of images or of pixels, its name and its preprocessing."""

    name: str
    module: nn.Module
    preprocess: Preprocess
    num_classes: int
    dense: bool = False
    """Whether its logits are of pixels, (B, K, H, W)."""


EMBEDDED = {
    "fashion-resnet-bn": "embedded ResNet (BatchNorm), 32x32, for the fashion data",
    "fashion-resnet-gn": "embedded ResNet (GroupNorm), the same",
    "fashion-vit": "embedded ViT (LayerNorm), the same",
}
EMBEDDED_SEGMENTERS = {
    "scenes-unet-bn": "embedded U-Net (BatchNorm), 64x64, for segmentation of the scenes data",
    "scenes-segformer": "embedded SegFormer (LayerNorm), the same",
}
FOLDER = files("come.bench") / "embedded"
DESCRIPTIONS = {
    **EMBEDDED,
    **EMBEDDED_SEGMENTERS,
    "keras-resnet50": "ResNet-50 as Keras has it, stride 2 on the first 1x1 convolution; needs --checkpoint",
    "timm:NAME": "any model of timm with its pretrained weights and data configuration",
    "torchvision:NAME": "any classifier of torchvision with its default weights and transforms",
    "hf:NAME": "any image classifier or segmenter of transformers with its image processor, of the Hub or in a folder",
    "open_clip:NAME": "a model of open_clip as zero-shot classifier; add :classes=FILE, with a name in each line",
    "MODULE:FACTORY": "the torch.nn.Module that your function returns; see --image-size, --mean, --std",
}
PREPROCESSING = ("normalization", "mean", "std", "image_size", "resize", "interpolation")
OPTIONS = ("checkpoint", *PREPROCESSING)  # what `load` takes beside a name, and what `come.bench.cell.Knobs` calls it

State = dict[str, Tensor] | None  # the weights of a checkpoint, if one is given

named_line = partial(one_line, kind=True, first=True)


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
        name: one of `EMBEDDED` or `EMBEDDED_SEGMENTERS`, "keras-resnet50", "timm:NAME", "torchvision:NAME", "hf:NAME",
            "open_clip:NAME" or "MODULE:FACTORY"; the last five also with arguments, as in "timm:NAME:num_classes=200".
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
            raise ConfigError(f"normalization {normalization} has a mean and a std; leave it out, or --mean and --std")
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
    logits = logits_of(out, 2)
    if dense := logits.ndim > 2:
        preprocess = WholeImage(**vars(preprocess) | {"resize": resize or size})
    return Model(name, module, preprocess, logits.shape[1], dense)


def _load(name: str, checkpoint: str | Path | None) -> tuple[nn.Module, Preprocess]:
    kind, _, rest = name.partition(":")
    if name in (*EMBEDDED, *EMBEDDED_SEGMENTERS):
        if checkpoint is not None:
            raise ConfigError(f"{name} comes with its weights; give --checkpoint with timm:NAME or torchvision:NAME")
        return _embedded(name)
    if kind == "open_clip" and rest:  # its weights decide what its text tower says of the classes
        return load_open_clip(name, rest, checkpoint)
    zoos = {"timm": _timm, "torchvision": _torchvision, "hf": load_transformers}
    if name == "keras-resnet50":
        make = _keras_resnet50
    elif kind in zoos and rest:
        make = zoos[kind]
    elif _is_factory(name):
        make, rest = _call_factory, name
    else:
        raise unknown("model", name, DESCRIPTIONS)
    state = None if checkpoint is None else read_weights(checkpoint)
    module, preprocess = make(name, rest, state)
    if state is not None:
        put_weights(module, state, name, checkpoint)
    return module, preprocess


def fingerprint(module: nn.Module) -> str:
    """SHA-256 of a model's weights: names, shapes and float32 values, whatever file they came from.

    Example:
        >>> fingerprint(nn.Linear(2, 1)) == fingerprint(nn.Linear(2, 1))  # random weights
        False
    """
    state = {name: value.detach().float().cpu() for name, value in module.state_dict().items() if value.ndim}
    return digest("", state)


def build_embedded(kind: str, norm: str, arguments: dict[str, Any]) -> nn.Module:
    """An untrained "vit" or "resnet" for the embedded data, (B, 3, 32, 32) normalized -> (B, 8), by timm's constructor.

    Its norm is "layer", "batch" or "group".
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
    return cast(nn.Module, module)


def embedded_facts(name: str) -> dict[str, Any]:
    """What is written down beside the weights of an embedded model: how it is built, and what it reaches."""
    facts: dict[str, Any] = json.loads((FOLDER / f"{name.replace('-', '_')}.json").read_text(encoding="utf-8"))
    return facts


def _embedded(name: str) -> tuple[nn.Module, Preprocess]:
    about = embedded_facts(name)
    dense = about["kind"] in SEGMENTERS
    if dense:
        module = build_segmenter(about["kind"], about["arguments"])
    else:
        module = build_embedded(about["kind"], about["norm"], about["arguments"])
    state = load_safetensors((FOLDER / f"{name.replace('-', '_')}.safetensors").read_bytes())
    module.load_state_dict({key: v.float() if v.is_floating_point() else v for key, v in state.items()})
    side = 64 if dense else 32
    return module, Preprocess(size=side, resize=side, mean=tuple(about["mean"]), std=tuple(about["std"]))


def _keras_resnet50(name: str, spec: str, state: State) -> tuple[nn.Module, Preprocess]:
    """Timm's ResNet-50, by its names, but for where a stage strides and for the eps of its BatchNorm."""
    from timm.models.resnet import Bottleneck, ResNet

    if state is None:
        raise ConfigError(f"{name} has no weights of its own; give --checkpoint FILE")
    module: Any = ResNet(Bottleneck, (3, 4, 6, 3), norm_layer=partial(nn.BatchNorm2d, eps=1e-3))  # type: ignore[arg-type]
    for stage in (module.layer2, module.layer3, module.layer4):
        stage[0].conv1.stride, stage[0].conv2.stride = (2, 2), (1, 1)
    mean, std = NORMALIZATIONS["caffe"] or ((), ())
    return module, Preprocess(mean=mean, std=std)


def _timm(name: str, spec: str, state: State) -> tuple[nn.Module, Preprocess]:
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
    arguments: dict[str, Any] = {}
    if state is None:
        arguments["pretrained_cfg_overlay"] = timm_weights(name, head) if head is not None else {}
    elif head is not None and (layer := state.get(f"{head.classifier}.weight")) is not None and layer.ndim:
        arguments["num_classes"] = len(layer)
    with _making(name, "timm", (TypeError, AssertionError)):
        module = timm.create_model(rest, pretrained=state is None, **(arguments | given))
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


def _torchvision(name: str, spec: str, state: State) -> tuple[nn.Module, Preprocess]:
    import torchvision.models as zoo

    rest, given = parse(spec)
    names = zoo.list_models(module=zoo)
    if rest not in names:
        raise unknown("model of torchvision", rest, names, hint=". 'torchvision.models.list_models()' shows all")
    weights = zoo.get_model_weights(rest).DEFAULT
    transforms = weights.transforms()
    if state is None:
        require_download(name, weights.url)
    with _making(name, "torchvision", (TypeError, ValueError)):
        module = zoo.get_model(rest, weights=weights if state is None else None, **given)
        if state is not None and (classes := head_size(module, state, len(weights.meta["categories"]))) is not None:
            module = zoo.get_model(rest, weights=None, **({"num_classes": classes} | given))
    return module, Preprocess(
        transforms.crop_size[0], transforms.resize_size[0], "bilinear", tuple(transforms.mean), tuple(transforms.std)
    )


def _is_factory(name: str) -> bool:
    """Whether a name looks like MODULE:FACTORY.

    >>> _is_factory("acme.nets:small:width=64"), _is_factory("fashion-vit"), _is_factory("a-b:c")
    (True, False, False)
    """
    module, _, rest = name.partition(":")
    return all(part.isidentifier() for part in (*module.split("."), rest.partition(":")[0]))


def _call_factory(name: str, spec: str, state: State) -> tuple[nn.Module, Preprocess]:
    """What a function of the user returns, imported from the current folder too; its random numbers have the seed 0.

    The preprocessing is ImageNet's, at the size of an argument `img_size` if there is one.

    >>> _call_factory("", "torch.nn:Linear:in_features=4:out_features=3", None)[0]
    Linear(in_features=4, out_features=3, bias=True)
    """
    place, _, rest = spec.partition(":")
    attribute, given = parse(rest)
    if (here := os.getcwd()) not in sys.path:
        sys.path.insert(0, here)  # as python -m does; other processes of a run get it, too
    try:
        module = importlib.import_module(place)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{place}.".startswith(f"{error.name}."):
            raise ModelError(f"importing {place} for {name} raised {named_line(error)}; install it") from error
        raise ModelError(
            f"no module {error.name!r} for the model {name}; run come where it is, or install it ('come list models' shows "
            "other models)"
        ) from error
    except (Exception, SystemExit) as error:
        raise ModelError(f"importing {place} for {name} raised {named_line(error)}; fix the module") from error
    if not hasattr(module, attribute):
        public = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise unknown(f"function in {place}", attribute, public)
    factory = getattr(module, attribute)
    if isinstance(factory, nn.Module) or not callable(factory):
        raise ModelError(f"{place}:{attribute} must be a function that returns a torch.nn.Module, got {shown(factory)}")
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)  # the same model in the run that goes on with this one
            made = factory(**given)
    except (Exception, SystemExit) as error:
        raise ModelError(f"{name} raised {named_line(error)}; change its arguments, or the function") from error
    if not isinstance(made, nn.Module):
        raise ModelError(f"{place}:{attribute} must return a torch.nn.Module, got {shown(made)}")
    size = given.get("img_size", Preprocess.size)
    return made.to("cpu"), Preprocess(size, round(size / 0.875) if isinstance(size, int) else size)


class Chosen(nn.Module):
    """A classifier whose logits (B, K) are those of `classes` (C,) only.

    Example:
        >>> Chosen(nn.Identity(), (2, 0))(torch.tensor([[5.0, 6.0, 7.0]]))
        tensor([[7., 5.]])
    """

    def __init__(self, module: nn.Module, classes: Sequence[int]) -> None:
        super().__init__()
        self.module = module
        self.classes: Tensor
        self.register_buffer("classes", torch.tensor(classes), persistent=False)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The model's logits, (B, K) -> (B, C)."""
        return logits_of(self.module(x, *args, **kwargs), len(x))[:, self.classes]


def restricted(model: Model, classes: Sequence[int]) -> Model:
    """A model with the logits of some of its classes, so that objectives, methods and metrics know of no others.

    It is a copy with a smaller last layer, where one linear layer gives the logits: methods that look for that layer, such as
    T3A, find it. Any other model is wrapped in `Chosen`.

    Args:
        model: not changed.
        classes: places of the C classes among its K logits.

    Example:
        >>> from come.bench import models
        >>> small = restricted(models.load("fashion-resnet-bn"), (3, 5, 7))
        >>> small.num_classes, small.module(torch.zeros(2, 3, 32, 32)).shape
        (3, torch.Size([2, 3]))
    """
    narrowed = _narrowed(model, torch.tensor(classes))
    module = Chosen(model.module, classes).to(next(model.module.parameters()).device) if narrowed is None else narrowed
    return replace(model, module=module.eval(), num_classes=len(classes))


def _narrowed(model: Model, classes: Tensor) -> nn.Module | None:
    """A copy with a smaller last layer; None if that does not give the logits."""
    module = copy.deepcopy(model.module)
    try:
        head = Head(module)
    except ModelError:
        return None
    layer = head.linear
    if type(layer) not in (nn.Linear, Prototypes) or layer.out_features != model.num_classes:
        return None
    places = classes.to(layer.weight.device)
    layer.out_features = len(classes)
    for name, own in list(layer.named_parameters()):
        setattr(layer, name, nn.Parameter(own.detach()[places], own.requires_grad))
    weight = next(module.parameters())
    x = torch.rand(2, 3, *[model.preprocess.size] * 2, generator=torch.Generator().manual_seed(0)).to(weight)
    with torch.no_grad():
        found, wanted = (logits_of(m(x), 2) for m in (module, model.module))
    wanted = wanted[:, places]
    return module if found.shape == wanted.shape and torch.allclose(found, wanted, 1e-3, 1e-3) else None
