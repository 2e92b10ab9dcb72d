"""Models that a function of the user returns."""

from __future__ import annotations

import importlib
import os
import sys
from functools import partial
from pathlib import Path

import torch
from torch import nn

from come.bench.checkpoints import put_weights, read_weights
from come.bench.data.preprocess import Preprocess
from come.errors import ModelError, one_line, shown, unknown
from come.registry import parse

named_line = partial(one_line, kind=True, first=True)


def is_factory(name: str) -> bool:
    """Whether a name looks like MODULE:FACTORY.

    Example:
        >>> is_factory("acme.nets:small:width=64"), is_factory("fashion-vit"), is_factory("a-b:c")
        (True, False, False)
    """
    module, _, rest = name.partition(":")
    return all(part.isidentifier() for part in (*module.split("."), rest.partition(":")[0]))


def call_factory(name: str, checkpoint: str | Path | None = None) -> tuple[nn.Module, Preprocess]:
    """Import a module, from the current folder too, and call one of its functions, which returns a model.

    The preprocessing is ImageNet's, at the size of an argument `img_size` if there is one. Random numbers have the seed 0.

    Args:
        name: "MODULE:FACTORY:KEY=VALUE:...", e.g. "acme.nets:small:width=64".
        checkpoint: a file with weights to load into it.

    Raises:
        ModelError: the module cannot be imported, the function fails, or what it returns is no model.
        ConfigError: the module has no such function.

    Example:
        >>> call_factory("torch.nn:Linear:in_features=4:out_features=3")[0]
        Linear(in_features=4, out_features=3, bias=True)
    """
    place, _, spec = name.partition(":")
    attribute, given = parse(spec)
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
    if checkpoint is not None:
        put_weights(made, read_weights(checkpoint), name, checkpoint)
    size = given.get("img_size", Preprocess.size)
    return made.to("cpu"), Preprocess(size, round(size / 0.875) if isinstance(size, int) else size)
