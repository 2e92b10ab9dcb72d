"""Zero-shot classifiers of open_clip."""

from __future__ import annotations

from importlib import import_module
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

MAX_CLASSES = 2**20
"""Bytes of a file with the names of classes."""


def load_open_clip(name: str, spec: str, checkpoint: str | Path | None) -> tuple[nn.Module, Preprocess]:
    """A zero-shot classifier of open_clip, and the preprocessing of its weights.

    Args:
        name: of the model, for errors.
        spec: "NAME:classes=FILE:pretrained=TAG", and arguments of `open_clip.create_model`. The file has the name of a class in
            each line, in the order of the labels.
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
    file, tag = given.pop("classes", None), given.pop("pretrained", None)
    if file is None:
        raise ConfigError(
            f"{name} needs the names of the classes: open_clip:{place}:classes=FILE, a text file with a name in each line, "
            "in the order of the labels"
        )
    tags = zoo.list_pretrained_tags_by_model(place)
    if checkpoint is None and tag not in tags:
        raise ModelError(
            f"{name} needs weights: add :pretrained=TAG, one of {', '.join(tags) or '(there are none)'}, or give "
            "--checkpoint FILE"
        )
    try:
        text = read_regular(Path(str(file)).expanduser(), MAX_CLASSES).decode()
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the classes of {name}: {one_line(error, first=True)}") from error
    try:
        with torch.random.fork_rng(devices=[]):
            model = zoo.create_model(place, pretrained=None if checkpoint is not None else tag, **given)
    except Exception as error:  # of open_clip, of the Hub, or of code that both call
        raise ModelError(
            f"open_clip cannot make {name}: {one_line(error, first=True)}; with no network, give --checkpoint FILE"
        ) from error
    if checkpoint is not None:
        put_weights(model, read_weights(checkpoint), name, checkpoint)
    made = zero_shot(
        model.eval(), zoo.get_tokenizer(place), [line.strip() for line in text.splitlines() if line.strip()]
    )
    about = zoo.get_model_preprocess_cfg(model)
    size = about["size"] if isinstance(about["size"], int) else about["size"][0]
    return made, Preprocess(size, size, about["interpolation"], tuple(about["mean"]), tuple(about["std"]))
