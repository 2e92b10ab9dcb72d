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
class Block:
    """Streams with the same number of samples: b of each, one stream after the other."""

    streams: int = 1
    """n."""
    statistics: Statistics = None
    """What BatchNorm normalizes by, with tensors (n, ...)."""
    rows: int = 0
    """n x b."""

    def each(self, x: Tensor) -> int:
        """How many rows of x belong to a stream."""
        if len(x) % self.streams:
            raise ConfigError(
                f"a norm layer of the model gets {len(x)} rows for {self.streams} streams: it does not keep samples in the "
                "first dimension, so a fleet cannot tell which rows belong to which stream; use one adapter for each stream"
            )
        return len(x) // self.streams


@dataclass
class Sharing:
    """What all norm layers of a model need to know; other values at each call.

    With several blocks, one after the other in the batch, a parameter is a list with a tensor for each.
    """

    blocks: tuple[Block, ...] = (Block(),)

    def apart(self, x: Tensor) -> tuple[Tensor, ...]:
        """The rows of each block."""
        total = sum(block.rows for block in self.blocks)
        if len(x) % total:
            Block(total).each(x)
        return torch.split(x, [block.rows * (len(x) // total) for block in self.blocks])


def of(value: Any, number: int) -> Any:
    """A parameter as a block has it."""
    return value[number] if isinstance(value, list) else value


def affine(y: Tensor, weight: Tensor | None, bias: Tensor | None, shape: tuple[int, ...], inner: int) -> Tensor:
    """weight * y + bias, for weights (n, ...) of streams or (...) of all.

    Args:
        y: what was normalized.
        weight: or None.
        bias: or None.
        shape: of y as (n, rows, *parameter, places).
        inner: dimensions of the parameter.
    """
    if weight is None and bias is None:
        return y
    tail = [1] * (len(shape) - 2 - inner)

    def fit(value: Tensor) -> Tensor:
        return value.reshape(len(value) if value.ndim > inner else 1, 1, *value.shape[-inner:], *tail)

    parts = y.reshape(shape)
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


def layer_norm(
    block: Block,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *_: Any,
) -> Tensor:
    """As `torch.nn.functional.layer_norm`, with weights (n, ...)."""
    block.each(input)
    y = F.layer_norm(input, list(normalized_shape), None, None, eps)
    return affine(y, weight, bias, (block.streams, -1, *normalized_shape), len(normalized_shape))


def rms_norm(
    block: Block,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    """As `torch.nn.functional.rms_norm`."""
    block.each(input)
    y = F.rms_norm(input, list(normalized_shape), None, eps)
    return affine(y, weight, None, (block.streams, -1, *normalized_shape), len(normalized_shape))


def _by_channel(block: Block, y: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    return affine(y, weight, bias, (block.streams, block.each(y), y.shape[1], math.prod(y.shape[2:])), 1)


def group_norm(
    block: Block,
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *_: Any,
) -> Tensor:
    """As `torch.nn.functional.group_norm`."""
    return _by_channel(block, F.group_norm(input, num_groups, None, None, eps), weight, bias)


def instance_norm(
    block: Block,
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """As `torch.nn.functional.instance_norm`."""
    y = F.instance_norm(input, running_mean, running_var, None, None, use_input_stats, momentum, eps)
    return _by_channel(block, y, weight, bias)


def batch_norm(
    block: Block,
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """As `torch.nn.functional.batch_norm`, with statistics of each stream, see `come.model.batchnorm.normalize`."""
    rule, each = block.statistics, block.each(input)
    known = running_mean is not None and running_var is not None
    if rule is None and (known or each * math.prod(input.shape[2:]) == 1):
        y = F.batch_norm(input, running_mean, running_var, None, None, False, 0.0, eps)
        return _by_channel(block, y, weight, bias)
    rule = BatchStatistics() if rule is None else rule
    if not isinstance(rule, BatchStatistics):
        raise ConfigError(f"a fleet cannot use the BatchNorm statistics {rule!r}; use one adapter for each stream")
    source = (running_mean, running_var) if running_mean is not None and running_var is not None else None
    return normalize(input, source, replace(rule, groups=block.streams), eps, weight, bias)


# ---- layers ----


class Norm(nn.Module):
    """A plain norm layer, see `plain`.

    Args:
        norm: whose parameters it has.
        sharing: of all layers of the model.
        normalize: (block, input, weight, bias) -> output.
    """

    def __init__(self, norm: Any, sharing: Sharing, normalize: Callable[..., Tensor]) -> None:
        super().__init__()
        self.weight, self.bias = norm.weight, norm.bias
        self._sharing, self._normalize = sharing, normalize

    def forward(self, x: Tensor) -> Tensor:
        """(rows, ...) -> the same."""
        blocks, weight, bias = self._sharing.blocks, self.weight, self.bias
        if len(blocks) == 1:
            return self._normalize(blocks[0], x, weight, bias)
        parts = enumerate(zip(blocks, self._sharing.apart(x), strict=True))
        return torch.cat([self._normalize(block, part, of(weight, i), of(bias, i)) for i, (block, part) in parts])


class OtherNorm(nn.Module):
    """A norm layer that does what we do not know, by its own code.

    Args:
        norm: the layer.
        sharing: of all layers of the model.
    """

    def __init__(self, norm: nn.Module, sharing: Sharing) -> None:
        super().__init__()
        self.inner, self._sharing = norm, sharing
        self._dims = {name: p.ndim for name, p in norm.named_parameters(recurse=False)}

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """As the layer, on its first argument."""
        blocks, given = self._sharing.blocks, dict(self.inner._parameters)
        if len(blocks) == 1:
            return self._block(blocks[0], x, *args, **kwargs)
        found = []
        try:
            for i, (block, part) in enumerate(zip(blocks, self._sharing.apart(x), strict=True)):
                self.inner._parameters.update({name: of(value, i) for name, value in given.items()})
                found.append(self._block(block, part, *args, **kwargs))
        finally:
            self.inner._parameters.update(given)
        return torch.cat(found)

    def _block(self, block: Block, *args: Any, **kwargs: Any) -> Any:
        own = self.inner._parameters
        names = {id(p): name for name, p in own.items() if p is not None and p.ndim > self._dims[name]}
        with _Within(block, names, type(self.inner).__name__):
            return self.inner(*args, **kwargs)


def layer(norm: nn.Module, sharing: Sharing) -> nn.Module:
    """What takes the place of a norm layer."""
    found = plain(norm)
    return OtherNorm(norm, sharing) if found is None else Norm(norm, sharing, found)


@torch.no_grad()
def plain(norm: nn.Module) -> Callable[..., Tensor] | None:
    """How a layer normalizes, if it does what torch's layer of that kind does and nothing else; subclasses are tried."""
    if isinstance(norm, nn.LayerNorm):
        shape, eps = tuple(norm.normalized_shape), norm.eps
        if type(norm) is nn.LayerNorm or _same(norm, torch.linspace(-1, 2, 6 * math.prod(shape)).view(2, 3, *shape)):
            return lambda block, x, weight, bias: layer_norm(block, x, shape, weight, bias, eps)
    if isinstance(norm, nn.GroupNorm):
        groups, eps = norm.num_groups, norm.eps
        if type(norm) is nn.GroupNorm or _same(norm, torch.linspace(-1, 2, 8 * norm.num_channels).view(2, -1, 2, 2)):
            return lambda block, x, weight, bias: group_norm(block, x, groups, weight, bias, eps)
    if type(norm) in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d):
        known: Any = norm
        return lambda block, x, weight, bias: batch_norm(
            block, x, known.running_mean, known.running_var, weight, bias, eps=known.eps
        )
    return None


def _same(norm: nn.LayerNorm | nn.GroupNorm, x: Tensor) -> bool:
    """Whether a subclass answers as torch's own class."""
    like = next(norm.parameters(), x)
    x = x.to(like.device, like.dtype)
    try:
        if isinstance(norm, nn.LayerNorm):
            return torch.equal(norm(x), F.layer_norm(x, norm.normalized_shape, norm.weight, norm.bias, norm.eps))
        return torch.equal(norm(x), F.group_norm(x, norm.num_groups, norm.weight, norm.bias, norm.eps))
    except (RuntimeError, TypeError, ValueError):  # it takes other shapes
        return False


class _Within(TorchFunctionMode):
    """Inside a layer: norm functions, and products and sums with a parameter, use that of each sample's stream.

    Args:
        block: which streams.
        names: names of parameters by the identity of the tensor (n, ...) that stands in their place.
        layer: the name of the layer.
    """

    def __init__(self, block: Block, names: Mapping[int, str], layer: str) -> None:
        super().__init__()
        self._block, self._names, self._layer, self._kept = block, dict(names), layer, list[Tensor]()

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """One call of a torch function."""
        kwargs = kwargs or {}
        if (own := _NORMS.get(func)) is not None:
            return own(self._block, *args, **kwargs)
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
            rows = value.repeat_interleave(self._block.each(other), dim=0)
            return rows.view(len(rows), *[1] * (other.ndim - value.ndim), *value.shape[1:])

        return [like(a, b), like(b, a)]


_NORMS: dict[Any, Callable[..., Tensor]] = {
    F.layer_norm: layer_norm,
    torch.layer_norm: layer_norm,
    F.group_norm: group_norm,
    torch.group_norm: group_norm,
    F.rms_norm: rms_norm,
    torch.rms_norm: rms_norm,
    F.instance_norm: instance_norm,
    F.batch_norm: batch_norm,
}
_CASTS = {Tensor.to, Tensor.float, Tensor.type_as, Tensor.contiguous}
_SAME_FOR_ALL = {getattr(Tensor, name).__get__ for name in ("dtype", "device", "requires_grad", "is_leaf")}
"""What a layer, or a compiler that looks at it, may ask of a parameter."""
_ELEMENTWISE = {
    *(torch.mul, torch.add, torch.sub, Tensor.mul, Tensor.add, Tensor.sub),
    *(Tensor.__mul__, Tensor.__rmul__, Tensor.__add__, Tensor.__radd__, Tensor.__sub__),
}
