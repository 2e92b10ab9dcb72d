"""A model that many streams share: each sample under the norm parameters and BatchNorm statistics of its own stream.

Norm layers of a copy of the model's structure (`come.model.copies.ModelCopy`) are exchanged for ones that know of streams.
Plain LayerNorm, GroupNorm and BatchNorm become a `Norm`. Others run their own code, inside of which torch's norm functions, and
products and sums with a parameter, are those of this file: an `OtherNorm`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from come.errors import ConfigError
from come.model.batchnorm import BatchStatistics, Statistics, normalize
from come.state.trees import replace


@dataclass(frozen=True)
class GroupRows:
    """The rows of a group of streams in a call of the model: b of each stream, one stream after the other."""

    streams: int = 1
    """n."""
    statistics: Statistics = None
    """What BatchNorm normalizes by, with tensors (n, ...)."""
    rows: int = 0
    """n x b."""


@dataclass
class CurrentCall:
    """What all norm layers of a model know of the call that runs. For several groups a parameter is a list of tensors."""

    groups: tuple[GroupRows, ...] = (GroupRows(),)

    def by_group(self, x: Tensor, run: Callable[[GroupRows, int, Tensor], Tensor]) -> Tensor:
        """`run(group, number, rows)` of each group, one after the other in x."""
        if len(self.groups) == 1:
            return run(self.groups[0], 0, x)
        each = rows_of_each(x, sum(group.rows for group in self.groups))
        parts = torch.split(x, [group.rows * each for group in self.groups])
        return torch.cat([run(group, i, part) for i, (group, part) in enumerate(zip(self.groups, parts, strict=True))])


def rows_of_each(x: Tensor, count: int) -> int:
    """How many rows of x belong to each of so many streams or samples."""
    if len(x) % count:
        raise ConfigError(
            f"a norm layer of the model gets {len(x)} rows for {count} streams: it does not keep samples in the first "
            "dimension, so a fleet cannot tell which rows belong to which stream; use one adapter for each stream"
        )
    return len(x) // count


def for_group(value: Any, number: int) -> Any:
    """A parameter as a group has it."""
    return value[number] if isinstance(value, list) else value


# ---- functions ----


def affine(
    group: GroupRows, y: Tensor, weight: Tensor | None, bias: Tensor | None, shape: Sequence[int] = ()
) -> Tensor:
    """weight * y + bias, for weights (n, *shape) of streams or (*shape) of all; without a shape (n, C) or (C,), by channel."""
    rows_of_each(y, group.streams)
    inner, tail = len(shape) or 1, () if shape else (1,)
    if weight is None and bias is None:
        return y

    def fit(value: Tensor) -> Tensor:
        return value.reshape(len(value) if value.ndim > inner else 1, 1, *value.shape[-inner:], *tail)

    parts = y.reshape(group.streams, -1, *(shape or (y.shape[1], math.prod(y.shape[2:]))))
    if weight is None:
        assert bias is not None
        found = parts + fit(bias)
    elif bias is None:
        found = parts * fit(weight)
    elif y.dtype == weight.dtype:
        found = torch.addcmul(fit(bias), parts, fit(weight))
    else:
        found = (parts * fit(weight) + fit(bias)).to(y.dtype)
    return found.reshape(y.shape)


_STATISTICS = ("input", "running_mean", "running_var", "weight", "bias")
_NORMS: dict[Any, tuple[str, ...]] = {
    **dict.fromkeys([F.layer_norm, torch.layer_norm], ("input", "normalized_shape", "weight", "bias", "eps")),
    **dict.fromkeys([F.group_norm, torch.group_norm], ("input", "num_groups", "weight", "bias", "eps")),
    **dict.fromkeys([F.rms_norm, torch.rms_norm], ("input", "normalized_shape", "weight", "eps")),
    F.instance_norm: (*_STATISTICS, "use_input_stats", "momentum", "eps"),
    F.batch_norm: (*_STATISTICS, "training", "momentum", "eps"),
}
"""Torch's norm functions, and their arguments."""


def normalized(function: Any, group: GroupRows, *args: Any, **kwargs: Any) -> Tensor:
    """What one of torch's norm functions returns, with weight and bias (n, ...)."""
    given = dict(zip(_NORMS[function], args, strict=False)) | kwargs
    weight, bias = given.pop("weight", None), given.pop("bias", None)
    if function is F.batch_norm:
        source = given["running_mean"], given["running_var"]
        return batch_norm(group, given["input"], *source, weight, bias, given.get("eps", 1e-5))
    return affine(group, function(**given), weight, bias, given.get("normalized_shape", ()))


def batch_norm(
    group: GroupRows,
    x: Tensor,
    mean: Tensor | None,
    var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float = 1e-5,
) -> Tensor:
    """Of (n x b, C, ...) with running statistics (C,), or with those of each stream, see `come.model.batchnorm.normalize`."""
    rule, each = group.statistics, rows_of_each(x, group.streams)
    source = None if mean is None or var is None else (mean, var)
    if rule is None and (source is not None or each * math.prod(x.shape[2:]) == 1):
        return affine(group, F.batch_norm(x, mean, var, None, None, False, 0.0, eps), weight, bias)
    if not isinstance(rule, BatchStatistics | None):
        raise ConfigError(f"a fleet cannot use the BatchNorm statistics {rule!r}; use one adapter for each stream")
    return normalize(x, source, replace(rule or BatchStatistics(), groups=group.streams), eps, weight, bias)


# ---- layers ----


class Norm(nn.Module):
    """A plain norm layer, see `plain`.

    Args:
        norm: whose parameters it has.
        current: of all layers of the model.
        normalize: (group, input, weight, bias) -> output.
    """

    def __init__(self, norm: Any, current: CurrentCall, normalize: Callable[..., Tensor]) -> None:
        super().__init__()
        self.weight, self.bias = norm.weight, norm.bias
        self._current, self._normalize = current, normalize

    def forward(self, x: Tensor) -> Tensor:
        """(rows, ...) -> the same."""
        weight, bias = self.weight, self.bias

        def run(group: GroupRows, i: int, part: Tensor) -> Tensor:
            return self._normalize(group, part, for_group(weight, i), for_group(bias, i))

        return self._current.by_group(x, run)


class OtherNorm(nn.Module):
    """A norm layer that does what we do not know, by its own code.

    Args:
        norm: the layer.
        current: of all layers of the model.
    """

    def __init__(self, norm: nn.Module, current: CurrentCall) -> None:
        super().__init__()
        self.inner, self._current = norm, current
        self._dims = {name: p.ndim for name, p in norm.named_parameters(recurse=False)}

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """As the layer, on its first argument."""
        inner, given = self.inner, dict(self.inner._parameters)

        def run(group: GroupRows, i: int, part: Tensor) -> Any:
            own = {name: for_group(value, i) for name, value in given.items()}
            inner._parameters.update(own)
            names = {id(p): name for name, p in own.items() if p is not None and p.ndim > self._dims[name]}
            with _Within(group, names, type(inner).__name__):
                return inner(part, *args, **kwargs)

        try:
            return self._current.by_group(x, run)
        finally:
            inner._parameters.update(given)


def layer(norm: nn.Module, current: CurrentCall) -> nn.Module:
    """What takes the place of a norm layer."""
    found = plain(norm)
    return OtherNorm(norm, current) if found is None else Norm(norm, current, found)


@torch.no_grad()
def plain(norm: nn.Module) -> Callable[..., Tensor] | None:
    """How a layer normalizes, if it does what torch's layer of that kind does and nothing else; subclasses are tried."""
    if type(norm) in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d):
        known: Any = norm
        return lambda group, x, weight, bias: batch_norm(
            group, x, known.running_mean, known.running_var, weight, bias, known.eps
        )
    function: Any
    how: Any
    shape: tuple[int, ...]
    if isinstance(norm, nn.LayerNorm):
        function, how, shape = F.layer_norm, norm.normalized_shape, (3, *norm.normalized_shape)
    elif isinstance(norm, nn.GroupNorm):
        function, how, shape = F.group_norm, norm.num_groups, (norm.num_channels, 2, 2)
    else:
        return None
    eps = norm.eps
    if type(norm) not in (nn.LayerNorm, nn.GroupNorm):
        x = torch.linspace(-1, 2, 2 * math.prod(shape)).view(2, *shape).to(next(norm.parameters(), torch.empty(0)))
        try:
            if not torch.equal(norm(x), function(x, how, norm.weight, norm.bias, eps)):
                return None
        except (RuntimeError, TypeError, ValueError):  # it takes other shapes
            return None
    return lambda group, x, weight, bias: normalized(function, group, x, how, weight, bias, eps)


class _Within(TorchFunctionMode):
    """Inside a layer: norm functions, and products and sums with a parameter, use that of each sample's stream.

    Args:
        group: of the rows.
        names: names of parameters by the identity of the tensor (n, ...) that stands in their place.
        layer: the name of the layer.
    """

    def __init__(self, group: GroupRows, names: Mapping[int, str], layer: str) -> None:
        super().__init__()
        self._group, self._names, self._layer, self._kept = group, dict(names), layer, list[Tensor]()

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """One call of a torch function."""
        kwargs = kwargs or {}
        if func in _NORMS:
            return normalized(func, self._group, *args, **kwargs)
        name = next((self._names[id(value)] for value in args if id(value) in self._names), None)
        if name is None:
            return func(*args, **kwargs)
        if func in _CASTS:
            found = func(*args, **kwargs)
            self._names[id(found)] = name
            self._kept.append(found)  # so that no other tensor gets its identity
            return found
        if func in _ELEMENTWISE and len(args) == 2:
            return func(*self._aligned(args[0], args[1]), **kwargs)
        if func in _SAME_FOR_ALL:
            return func(*args, **kwargs)
        raise ConfigError(
            f"{name!r} of {self._layer} cannot differ by stream: the layer uses it in {getattr(func, '__name__', func)}; leave "
            "it out with select=, or use one adapter for each stream"
        )

    def _aligned(self, a: Tensor, b: Tensor) -> list[Tensor]:
        """Two operands, the one with an entry for each stream in a shape that broadcasts to the other."""

        def like(value: Tensor, other: Tensor) -> Tensor:
            if id(value) not in self._names:
                return value
            rows = value.repeat_interleave(rows_of_each(other, self._group.streams), dim=0)
            return rows.view(len(rows), *[1] * (other.ndim - value.ndim), *value.shape[1:])

        return [like(a, b), like(b, a)]


_CASTS = {Tensor.to, Tensor.float, Tensor.type_as, Tensor.contiguous}
_SAME_FOR_ALL = {getattr(Tensor, name).__get__ for name in ("dtype", "device", "requires_grad", "is_leaf")}
"""What a layer, or a compiler that looks at it, may ask of a parameter."""
_ELEMENTWISE = {
    *(torch.mul, torch.add, torch.sub, Tensor.mul, Tensor.add, Tensor.sub),
    *(Tensor.__mul__, Tensor.__rmul__, Tensor.__add__, Tensor.__radd__, Tensor.__sub__),
}
