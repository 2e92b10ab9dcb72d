"""How a model is run: in which precision, in which memory format, compiled or not.

Anything but the default is run on a `ModelCopy`: a copy of the model's structure that is ours to change. It shares the memory
of the user's weights, except where precision or memory format ask for other ones. A copy is not always possible: a function
that the model calls may lead back to the model's own layers, which know nothing of the adapted weights. So while a stand-in
runs the user's tensors are out of reach, and a model whose copy asks for one of them is run itself.
"""

from __future__ import annotations

import contextlib
import copy
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, cast, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from come.errors import require
from come.model.batchnorm import (
    BatchStatistics,
    Layer,
    StatisticsRule,
    normalize,
    normalizing,
    source_of,
    unit_statistics,
)
from come.model.inputs import Inputs
from come.streams.norms import CurrentCall, GroupRows, OtherNorm
from come.streams.norms import layer as layer_by_stream

Precision = Literal["float32", "tf32", "bf16"]

Function = TypeVar("Function", bound=Callable[..., Any])

Place = tuple[dict[str, Any], str, Any]
"""The parameters or buffers of a module, a name among them, and what is to stand there."""
Converted = dict[tuple[Any, ...], nn.Parameter]
"""Weights by their address, shape and what was made of them."""

PLAIN_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
MATRICES = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
"""Layers whose weights autocast rounds at each call: they are rounded once instead."""


@dataclass(frozen=True)
class Mode:
    """How a model is run.

    Args:
        precision: "float32": as the model and torch are set. "tf32": matrix products and convolutions of a GPU in TF32.
            "bf16": the same in bfloat16 (autocast). Objective, adapted weights, moments and signals are in float32 always.
        compile: forward, objective and backward by `torch.compile`, and on a GPU the whole step as one CUDA graph.
        channels_last: on a GPU, images and the weights of convolutions with the channels innermost: faster for convolutions in
            bf16.
    """

    precision: Precision = "float32"
    compile: bool = False
    channels_last: bool = False

    def __post_init__(self) -> None:
        words = get_args(Precision)
        require(self.precision in words, "precision", self.precision, f"one of {', '.join(words)}")
        for name in ("compile", "channels_last"):
            require(isinstance(getattr(self, name), bool), name, getattr(self, name), "True or False")

    @property
    def plain(self) -> bool:
        """Whether the user's own model can be called as it is."""
        return self.precision != "bf16" and not self.compile and not self.channels_last

    def __str__(self) -> str:
        """What differs from the default, for a repr; empty if nothing does."""
        named = [] if self.precision == "float32" else [f", precision={self.precision}"]
        return "".join([*named, *(f", {name}=True" for name in ("compile", "channels_last") if getattr(self, name))])

    def rounding(self, device: torch.device) -> contextlib.AbstractContextManager[Any]:
        """For a call of the model."""
        if self.precision != "bf16":
            return contextlib.nullcontext()
        return torch.autocast(device.type, torch.bfloat16, cache_enabled=False)

    def active(self) -> contextlib.AbstractContextManager[None]:
        """For a step: TF32, if asked for."""
        return _tf32.on() if self.precision == "tf32" else contextlib.nullcontext()

    def images(self, x: Inputs) -> Inputs:
        """The batch in the memory format that is asked for."""
        if not self.channels_last:
            return x
        return x.map(lambda value: self.laid_out(value) if isinstance(value, Tensor) else value)

    def laid_out(self, value: Tensor) -> Tensor:
        """Images or weights of a convolution in the memory format that is asked for.

        On a GPU only: on a CPU it hardly pays, and GroupNorm's backward crashes there in older releases of torch.
        """
        if not (self.channels_last and value.ndim == 4 and value.is_cuda):
            return value
        return value.contiguous(memory_format=torch.channels_last)


class _Tf32:
    """TF32 while any step wants it.

    torch has these settings for the whole process: other threads compute in TF32 meanwhile. The last step that ends puts them
    back to what the first one found.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._steps: set[object] = set()
        self._before: list[tuple[Any, bool]] = []

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        """For a step."""
        step = object()
        try:
            try:
                with self._lock:
                    if not self._steps:
                        owners = (torch.backends.cuda.matmul, torch.backends.cudnn)
                        self._before = [(owner, owner.allow_tf32) for owner in owners]
                    self._steps.add(step)
                    for owner, _ in self._before:
                        owner.allow_tf32 = True
                yield
            finally:
                self._end(step)
        finally:  # again, in case an interrupt struck in the line above
            self._end(step)

    def _end(self, step: object) -> None:
        """May be called again."""
        with self._lock:
            if self._steps <= {step}:
                for owner, value in self._before:
                    owner.allow_tf32 = value
                self._before = []
            self._steps.discard(step)


_tf32 = _Tf32()


class MixedNorm(nn.Module):
    """A BatchNorm layer on a share of the batch's statistics, in one pass: see `come.model.batchnorm.normalize`."""

    def __init__(self, norm: nn.BatchNorm2d, layer: Layer, statistics: BatchStatistics) -> None:
        super().__init__()
        self.weight, self.bias, self.eps = norm.weight, norm.bias, norm.eps
        self._source, self._statistics = source_of(layer), statistics

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, ...) -> the same."""
        return normalize(x, self._source, self._statistics, self.eps, self.weight, self.bias)


class Patches(nn.Module):
    """A convolution that cuts an image into patches, as one matrix product: cuDNN takes several times as long for it."""

    def __init__(self, conv: nn.Conv2d) -> None:
        super().__init__()
        self.weight, self.bias = conv.weight, conv.bias

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, D, H / patch, W / patch)."""
        b, c = x.shape[:2]
        tall, wide = self.weight.shape[-2:]
        rows, columns = x.shape[-2] // tall, x.shape[-1] // wide
        x = x[..., : rows * tall, : columns * wide].reshape(b, c, rows, tall, columns, wide)
        flat = x.permute(0, 2, 4, 1, 3, 5).reshape(b, rows, columns, c * tall * wide)
        return F.linear(flat, self.weight.flatten(1), self.bias).permute(0, 3, 1, 2)


def replaced(model: nn.Module, old: nn.Module, new: nn.Module) -> nn.Module:
    """The model with a layer in the place of another, wherever that is; `new` if the model is that layer.

    Example:
        >>> old, new = nn.ReLU(), nn.Tanh()
        >>> replaced(nn.Sequential(old, old), old, new)
        Sequential(
          (0): Tanh()
          (1): Tanh()
        )
    """
    for module in [module for module in model.modules() if module is not new]:
        for name, child in module._modules.items():  # named_children leaves out the second name of a layer
            if child is old:
                setattr(module, name, new)
    return new if model is old else model


def _cuts_patches(module: nn.Module) -> bool:
    return (
        type(module) is nn.Conv2d
        and module.kernel_size == module.stride
        and module.padding in ((0, 0), "valid")
        and (module.dilation, module.groups) == ((1, 1), 1)
        and module.in_channels <= 4
        and min(module.kernel_size) > 1
    )


def fused(function: Function) -> Function:
    """The function by `torch.compile`, for fixed shapes, made when it is first asked for."""
    if function not in _fused:
        _fused[function] = torch.compile(function, dynamic=False)
    compiled = _fused[function]

    def call(*args: Any, **kwargs: Any) -> Any:
        with room():
            return compiled(*args, **kwargs)

    return cast(Function, call)


@contextlib.contextmanager
def room() -> Iterator[None]:
    """For a call of something compiled.

    torch gives up on a function that was compiled for eight models, and a benchmark has more; and it warns of a gradient that
    it looks for itself, and of TF32 where float32 was asked for.
    """
    config: Any = torch._dynamo.config
    if hasattr(config, "recompile_limit"):
        wanted = {"recompile_limit": 1024, "accumulated_recompile_limit": 1024}
    else:  # before torch 2.6; before 2.5 parameters were constants, unless asked for
        wanted = {"cache_size_limit": 1024, "accumulated_cache_size_limit": 1024, "inline_inbuilt_nn_modules": True}
    with config.patch(wanted), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
        warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores")
        yield


_fused: dict[Callable[..., Any], Callable[..., Any]] = {}


class UncopiedError(Exception):
    """A model whose copy does not compute what the model does, and why."""


class _OutOfReach(Tensor):
    """Stands in the place of the user's tensors while a stand-in runs."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Whoever uses it has come to the user's model."""
        raise UncopiedError(
            "it reaches layers of its own through a function, a global name or a weak reference, which no copy of it follows"
        )


OUT_OF_REACH: Tensor = torch.empty(0).as_subclass(_OutOfReach)


class ModelCopies:
    """The stand-ins of one model. All adapters of it share them: what one has compiled the next one need not.

    They live as long as one of those adapters does, and nobody else holds them: a stand-in may lead to the user's model, which
    must not live for ever by that.
    """

    def __init__(self) -> None:
        self.built_from: tuple[Any, ...] = ()
        """The model's weights and buffers when they were made."""
        self.made: dict[Any, ModelCopy] = {}
        self.converted: Converted = {}
        self.uncopied = ""
        """Why there can be none, as far as is known."""

    @classmethod
    def of(cls, model: nn.Module) -> ModelCopies:
        """Those of that model."""
        known = _of.get(model)
        found = None if known is None else known()
        if found is None:
            found = cls()
            _of[model] = weakref.ref(found)
        return found

    def follow(self, now: tuple[Any, ...]) -> None:
        """Drop what was made of other weights."""
        if now != self.built_from:
            self.built_from = now
            self._drop()

    def give_up(self, reason: str) -> None:
        """No stand-ins, until the model is another."""
        self._drop()
        self.uncopied = reason

    def _drop(self) -> None:
        self.made.clear()
        self.converted.clear()
        self.uncopied = ""


_of: weakref.WeakKeyDictionary[nn.Module, weakref.ref[ModelCopies]] = weakref.WeakKeyDictionary()


class ModelCopy:
    """A copy of a model's structure, in evaluation mode, that is ours to change.

    Args:
        model: the user's classifier; it is not changed.
        adapted: names of the parameters that are given at each call.
        layers: its BatchNorm layers by path.
        rule: what these normalize by; "streams": as each of many streams does, see `come.streams.norms`.
        mode: precision and memory format.
        compiled: whether `torch.compile` is used.
        converted: weights that were rounded or put in another memory format before; new ones are added.

    Raises:
        UncopiedError: the model cannot be copied; when it is called, also if the copy reaches the model itself.
    """

    def __init__(
        self,
        model: nn.Module,
        adapted: frozenset[str],
        layers: Mapping[str, Layer],
        rule: StatisticsRule | Literal["streams"],
        mode: Mode,
        compiled: bool,
        converted: Converted,
    ) -> None:
        aliases = {id(p): nn.Parameter(p.detach(), requires_grad=False) for p in model.parameters()}
        try:
            self.module: nn.Module = copy.deepcopy(model, aliases)
        except Exception as error:
            raise UncopiedError(f"it cannot be copied ({error})") from error
        own = {id(module) for module in model.modules()}
        if any(id(module) in own for module in self.module.modules()):
            raise UncopiedError("its copy shares layers with it")
        self._mixing = BatchStatistics(torch.ones(()))
        """For the rule "mixed"; the share is another one at each call."""
        for module in self.module.modules():
            module.training = False
        for path, module in self.module.named_modules():
            self._convert(path, module, adapted, mode, converted)
        for path, layer in layers.items():
            norm: Any = self.module.get_submodule(path)
            if rule == "batch":  # then torch's BatchNorm neither reads nor writes its running statistics
                norm.track_running_stats, norm.training = False, True
            elif rule == "mixed":
                self._mix(norm, layer)
        self._current = CurrentCall()
        if rule == "streams":
            for path in dict.fromkeys([*layers, *(name.rpartition(".")[0] for name in adapted)]):
                norm = self.module.get_submodule(path)
                self.module = replaced(self.module, norm, layer_by_stream(norm, self._current))
        for module in list(self.module.modules()):
            if _cuts_patches(module):
                self.module = replaced(self.module, module, Patches(module))  # type: ignore[arg-type]
        self._places = {name: self._place(name) for name in adapted}
        self._buffers = [(b, b.detach().clone()) for b in self.module.buffers() if b is not None]
        self._versions = [b._version for b, _ in self._buffers]
        self._compiled = compiled
        if compiled:
            self.module.compile(dynamic=False)

    def _mix(self, norm: Any, layer: Layer) -> None:
        """Put a BatchNorm layer on mixed statistics."""
        if type(norm) in PLAIN_NORMS and norm.affine and norm is not self.module:
            self.module = replaced(self.module, norm, MixedNorm(norm, layer, self._mixing))
            return
        norm.running_mean, norm.running_var = unit_statistics(layer)
        norm.register_forward_pre_hook(normalizing(layer, self._mixing))

    @staticmethod
    def _convert(path: str, module: nn.Module, adapted: frozenset[str], mode: Mode, converted: Converted) -> None:
        """Round weights and put their channels last, once and not at each call."""
        if type(module) not in MATRICES:
            return
        for name, p in module.named_parameters(recurse=False):
            if (f"{path}.{name}" if path else name) in adapted:
                continue
            key = (p.data_ptr(), p.shape, mode.precision, mode.channels_last)
            if key not in converted:
                value = p.detach()
                if mode.precision == "bf16" and value.dtype == torch.float32:
                    value = value.bfloat16()
                converted[key] = nn.Parameter(mode.laid_out(value), requires_grad=False)
            setattr(module, name, converted[key])

    def _place(self, name: str) -> tuple[dict[str, Any], str]:
        """Where a parameter is."""
        path, _, own = name.rpartition(".")
        owner = self.module.get_submodule(path)
        return (owner.inner if isinstance(owner, OtherNorm) else owner)._parameters, own

    def __call__(
        self,
        given: dict[str, Any],
        x: Inputs,
        share: Tensor | float | None = None,
        groups: tuple[GroupRows, ...] = (GroupRows(),),
    ) -> Any:
        """What the model returns for `x`.

        Args:
            given: parameters by name; lists of them, if there are several groups.
            x: the batch.
            share: of the batch's statistics, for the rule "mixed".
            groups: of streams, for the rule "streams".
        """
        places: list[Place] = [(*self._places[name], value) for name, value in given.items()]
        if share is not None:
            places.append((vars(self._mixing), "share", torch.as_tensor(share)))
        places.append((vars(self._current), "groups", groups))
        self._refresh()
        before = [(table, name, table[name]) for table, name, _ in places]
        try:  # as `torch.func.functional_call`, which looks every name up at each call
            for table, name, value in places:
                table[name] = value
            with room() if self._compiled else contextlib.nullcontext():
                return self.module(*x.args, **x.kwargs)
        finally:
            for table, name, value in reversed(before):
                table[name] = value

    def _refresh(self) -> None:
        """Discard what the forward before has written into buffers."""
        for i, (buffer, value) in enumerate(self._buffers):
            if buffer._version != self._versions[i]:
                with torch.no_grad():
                    buffer.copy_(value)
                self._versions[i] = buffer._version
