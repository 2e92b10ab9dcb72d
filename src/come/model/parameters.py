"""Which parameters of a model adapt, and every place in it that holds one of them, or a buffer."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from come.errors import ConfigError, ModelError, shown
from come.select import BATCH_NORMS, Selector


class Slot(NamedTuple):
    """A place in the model that holds a parameter or buffer."""

    name: str
    owner: nn.Module
    attribute: str
    value: Any


def selected(model: nn.Module, select: Selector, method: str, descends: bool) -> dict[str, nn.Parameter]:
    """The parameters that `select` names in `model`, after checking that the model can be adapted at all."""
    kind = type(model).__name__
    if isinstance(model, (nn.DataParallel, torch.jit.ScriptModule)):
        raise ModelError(
            f"{kind} cannot be called with other weights; adapt the plain module in it (for DataParallel: model.module)"
        )
    for name, p in (*model.named_parameters(), *model.named_buffers()):
        if isinstance(p, (nn.UninitializedParameter, nn.UninitializedBuffer)):
            raise ModelError(f"{name!r} of {kind} is not initialized (a lazy module); call the model on a batch first")
        if p.is_meta:
            raise ModelError(f"{name!r} of {kind} is on the meta device and has no values; load the weights first")
        if p.is_inference():
            raise ModelError(
                f"{name!r} of {kind} was made under torch.inference_mode and can never have a gradient; build or load the "
                "model outside of it"
            )
        if p.is_floating_point() and not p.detach().isfinite().all():
            raise ModelError(f"{name!r} of {kind} is not finite; load sound weights before adapt()")
    if not callable(select):
        raise ConfigError(
            f"select must be a function from a model to a dict of its parameters by name, got {shown(select)}"
        )
    chosen = select(model)
    if not isinstance(chosen, dict):
        raise ConfigError(f"select must return a dict of parameters by name, got {type(chosen).__name__}")
    known = dict(model.named_parameters(remove_duplicate=False))
    for name, p in chosen.items():
        if known.get(name) is not p:
            raise ConfigError(f"select chose {name!r}, which is not a parameter of {kind}")
        if not p.is_floating_point():
            raise ConfigError(f"select must choose floating-point parameters, got {name!r} of type {p.dtype}")
    if descends and not chosen:
        raise ModelError(
            f"{method} has nothing to adapt: {select!r} finds no parameter in {kind}. It needs normalization layers with "
            "weights; or choose what adapts yourself, e.g. select=come.select.everything()"
        )
    first: dict[int, str] = {}
    for name, p in chosen.items():
        first.setdefault(id(p), name)  # a parameter under two names is one parameter
    return {name: chosen[name] for name in first.values()}


Links = dict[str, tuple[nn.Module, str, nn.Module]]
"""(parent, name, child) by path."""


def slots_of(model: nn.Module, adapted: dict[int, int]) -> tuple[list[Slot], Links]:
    """Every place of an adapted parameter, each module once, and the chain of modules that leads to it."""
    paths = {module: path for path, module in model.named_modules()}
    slots = [
        Slot(f"{path}.{name}" if path else name, module, name, p)
        for module, path in paths.items()
        for name, p in module.named_parameters(recurse=False, remove_duplicate=False)
        if id(p) in adapted
    ]
    by_path = {path: module for module, path in paths.items()}
    links: Links = {}
    for slot in slots:
        path = slot.name.rpartition(".")[0]
        while path and path not in links:
            parent, _, name = path.rpartition(".")
            links[path] = (by_path[parent], name, by_path[path])
            path = parent
    return slots, links


def buffers_of(model: nn.Module) -> list[Slot]:
    """Every place of a buffer, each module once."""
    return [
        Slot(f"{path}.{name}" if path else name, module, name, value)
        for path, module in model.named_modules()
        for name, value in _own_buffers(module)
    ]


def _own_buffers(module: nn.Module) -> list[tuple[str, Tensor | None]]:
    found: dict[str, Tensor | None] = dict(module.named_buffers(recurse=False, remove_duplicate=False))
    if isinstance(module, BATCH_NORMS):  # these may be None, and take part all the same
        found |= {name: getattr(module, name) for name in ("running_mean", "running_var")}
    return list(found.items())
