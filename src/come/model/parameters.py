"""Which parameters of a model adapt, and every place in it that holds one of them, or a buffer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from come.errors import ConfigError, ModelError, shown
from come.select import BATCH_NORMS, Selector

ALIGNED = 64
"""Each parameter begins at a multiple of this many entries of the vector: matrix kernels want aligned addresses."""


class Slot(NamedTuple):
    """A place in the model that holds a parameter or buffer."""

    name: str
    owner: nn.Module
    attribute: str
    value: Any


class AdaptedParameters:
    """The parameters of a model that adapt, as one vector (P,) and as the places in the model that hold them.

    Args:
        model: the user's classifier.
        select: chooses the parameters.
        method: name of the method, for messages.
        descends: whether there must be any.
    """

    def __init__(self, model: nn.Module, select: Selector, method: str, descends: bool) -> None:
        self.model = model
        self.parameters = selected(model, select, method, descends)
        """The adapted parameters by name, the user's own."""
        self.shapes = {name: p.shape for name, p in self.parameters.items()}
        self._room = [-(-p.numel() // ALIGNED) * ALIGNED for p in self.parameters.values()]
        self._number = {id(p): i for i, p in enumerate(self.parameters.values())}
        self._params = list(model.parameters())
        self._slots, self._links = slots_of(model, self._number)
        self._versions = self._read_versions()

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return self._params[0].device if self._params else torch.device("cpu")

    @property
    def dtype(self) -> torch.dtype:
        """Of the vector: float64 for models in double precision, else float32."""
        double = any(p.dtype == torch.float64 for p in self.parameters.values())
        return torch.float64 if double else torch.float32

    def join(self, values: Sequence[Tensor]) -> Tensor:
        """One tensor for each adapted parameter -> the vector (P,)."""
        parts = [
            nn.functional.pad(value.detach().to(self.dtype).flatten(), (0, room - value.numel()))
            for value, room in zip(values, self._room, strict=True)
        ]
        return torch.cat(parts) if parts else torch.zeros(0, device=self.device)

    def split(self, weights: Tensor) -> list[Tensor]:
        """The vector (P,) -> a view for each adapted parameter."""
        if not self._room:
            return []
        parts = torch.split(weights, self._room)
        return [_cut(part, shape) for part, shape in zip(parts, self.shapes.values(), strict=True)]

    def named(self, weights: Tensor) -> dict[str, Tensor]:
        """The vector (P,) as tensors by parameter name."""
        return dict(zip(self.shapes, self.split(weights), strict=True))

    def source(self) -> Tensor:
        """The model's own values as a vector."""
        return self.join(list(self.parameters.values()))

    def largest(self) -> float:
        """How large a weight may be, with room to spare: in half precision an overflow is near."""
        return min((torch.finfo(p.dtype).max / 1e3 for p in self.parameters.values()), default=torch.inf)

    def split_streams(self, weights: Tensor) -> list[Tensor]:
        """The vectors (n, P) -> (n, ...) for each adapted parameter."""
        parts = torch.split(weights, self._room, dim=-1) if self._room else ()
        return [
            part[..., : p.numel()].reshape(*weights.shape[:-1], *p.shape).to(p.dtype)
            for part, p in zip(parts, self.parameters.values(), strict=True)
        ]

    @torch.no_grad()
    def overwrite(self, weights: Tensor) -> None:
        """Write the vector (P,) into the model's own parameters, all or none."""
        before = [p.clone() for p in self.parameters.values()]
        try:
            for p, value in zip(self.parameters.values(), self.split(weights), strict=True):
                p.copy_(value)
        except BaseException:
            for p, value in zip(self.parameters.values(), before, strict=True):
                p.copy_(value)
            self._versions = self._read_versions()
            raise

    # ---- has the user changed the model? ----

    def _read_versions(self) -> list[int]:
        # torch counts in-place changes in `_version`, which has no public name; moving and casting do not count.
        return [p._version for p in self.parameters.values()]

    def check_unchanged(self) -> None:
        """Raise `ModelError` if an adapted parameter was replaced or overwritten since the model was borrowed."""
        for path, (parent, name, child) in self._links.items():
            if parent._modules.get(name) is not child:
                raise self._changed(path, "was replaced")
        for slot in self._slots:
            if slot.owner._parameters.get(slot.attribute) is not slot.value:
                raise self._changed(slot.name, "was replaced")
        for name, before, after in zip(self.shapes, self._versions, self._read_versions(), strict=True):
            if before != after:
                raise self._changed(name, "was overwritten")

    def _changed(self, name: str, what: str) -> ModelError:
        return ModelError(
            f"{name!r} of {type(self.model).__name__} {what} after adapt(): the adapter would go on with the old values. "
            "Load weights and exchange layers first, then call adapt() again"
        )


def _cut(part: Tensor, shape: torch.Size) -> Tensor:
    """The parameter of that shape at the beginning of a part of the vector, in as few operations as possible."""
    part = part if len(part) == shape.numel() else part[: shape.numel()]
    return part if part.shape == shape else part.view(shape)


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
