"""Zero-shot classifiers of open_clip."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from torch import nn

from come.bench.checkpoints import put_weights, read_weights
from come.bench.data.preprocess import Preprocess
from come.bench.data.reading import read_regular
from come.errors import ConfigError, ModelError, missing, one_line, unknown
from come.integrations.open_clip import zero_shot
from come.registry import parse
from come.zero_shot import TEMPLATES, Template

LONGEST = 2**20
"""Bytes of a file with the names of classes, or with templates."""


def load_open_clip(name: str, spec: str, checkpoint: str | Path | None) -> tuple[nn.Module, Preprocess]:
    """A zero-shot classifier of open_clip, and the preprocessing of its weights.

    Args:
        name: of the model, for errors.
        spec: "NAME:classes=CLASSES:pretrained=TAG", and arguments of `open_clip.create_model`. CLASSES is a file with the name
            of a class in each line, in the order of the labels, or a list of `class_lists`. ":templates=TEMPLATES" is a file
            with a sentence in each line, {} in place of the name, or "openai": the 80 of open_clip for ImageNet.
        checkpoint: a file with the weights of both towers in place of the pretrained ones.

    Raises:
        MissingError: open_clip is missing.
        ConfigError: there is no such model, or no classes are given.
        ModelError: there are no weights, or they cannot be read.
    """
    try:
        zoo: Any = import_module("open_clip")
    except ModuleNotFoundError as error:
        raise missing(name, error, "clip") from error
    place, given = parse(spec)
    if place not in zoo.list_models():
        raise unknown("model of open_clip", place, zoo.list_models(), hint=". 'open_clip.list_models()' shows all")
    said, tag = {key: given.pop(key, None) for key in ("classes", "templates")}, given.pop("pretrained", None)
    if said["classes"] is None:
        raise ConfigError(
            f"{name} needs the names of the classes: open_clip:{place}:classes=FILE, a text file with a name in each line, "
            f"in the order of the labels, or one of {', '.join(class_lists())}"
        )
    tags = zoo.list_pretrained_tags_by_model(place)
    if checkpoint is None and tag not in tags:
        raise ModelError(
            f"{name} needs weights: add :pretrained=TAG, one of {', '.join(tags) or '(there are none)'}, or give "
            "--checkpoint FILE"
        )
    classes, templates = _classes(name, str(said["classes"]), zoo), _templates(name, said["templates"], zoo)
    try:
        with torch.random.fork_rng(devices=[]):
            model = zoo.create_model(place, pretrained=None if checkpoint is not None else tag, **given)
    except Exception as error:  # of open_clip, of the Hub, or of code that both call
        raise ModelError(
            f"open_clip cannot make {name}: {one_line(error, first=True)}; with no network, give --checkpoint FILE"
        ) from error
    if checkpoint is not None:
        put_weights(model, read_weights(checkpoint), name, checkpoint)
    made = zero_shot(model.eval(), zoo.get_tokenizer(place), classes, templates)
    about = zoo.get_model_preprocess_cfg(model)
    size = about["size"] if isinstance(about["size"], int) else about["size"][0]
    return made, Preprocess(size, size, about["interpolation"], tuple(about["mean"]), tuple(about["std"]))


def class_lists() -> list[str]:
    """The lists of class names that have a name themselves.

    Example:
        >>> class_lists()
        ['imagenet', 'cifar10', 'dtd', 'eurosat', 'food101', 'pets']
    """
    return ["imagenet", *_lists()]


def _lists() -> dict[str, list[str]]:
    found: dict[str, list[str]] = json.loads((files("come.bench") / "class_names.json").read_text(encoding="utf-8"))
    return found


def _classes(name: str, wanted: str, zoo: Any) -> Sequence[str]:
    if wanted == "imagenet":
        names: Sequence[str] = zoo.IMAGENET_CLASSNAMES
        return names
    return _lists().get(wanted) or _lines(f"the classes of {name}", wanted)


def _templates(name: str, wanted: object, zoo: Any) -> Sequence[Template]:
    if wanted is None:
        return TEMPLATES
    if wanted == "openai":
        ensemble: Sequence[Template] = zoo.OPENAI_IMAGENET_TEMPLATES
        return ensemble
    return _lines(f"the templates of {name}", str(wanted))


def _lines(what: str, file: str) -> list[str]:
    try:
        text = read_regular(Path(file).expanduser(), LONGEST).decode()
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {what}: {one_line(error, first=True)}") from error
    return [line.strip() for line in text.splitlines() if line.strip()]
