"""A model that many streams share: each sample under the norm parameters and BatchNorm statistics of its own stream.

The model's own code runs as it is. While it runs, torch's norm functions are exchanged for ones that know of streams, and any
other use of a parameter that differs by stream is refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from come.batchnorm import Statistics, by_selection, mixed
from come.errors import ConfigError
from come.inputs import exact


class ByStream(TorchFunctionMode):
    """While it is active, norm functions use the parameters and statistics of each sample's stream.

    Args:
        streams: n; the batch holds b samples of each, one stream after the other.
        names: names of parameters by the identity of the tensor (n, ...) that stands in their place.
        statistics: what BatchNorm normalizes by, with tensors (n, ...).
    """

    def __init__(self, streams: int, names: Mapping[int, str], statistics: Statistics) -> None:
        super().__init__()
        self.streams, self.statistics = streams, statistics
        self._names, self._kept = dict(names), list[Tensor]()

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """One call of a torch function."""
        kwargs = kwargs or {}
        if (own := _NORMS.get(func)) is not None:
            return own(self, *args, **kwargs)
        if not any(id(value) in self._names for value in args):
            return func(*args, **kwargs)
        if func in _CASTS:
            found = func(*args, **kwargs)
            self._names[id(found)] = self._names[id(args[0])]
            self._kept.append(found)  # so that no other tensor gets its identity
            return found
        if func in _ELEMENTWISE and len(args) == 2:
            return func(*self._aligned(args[0], args[1]), **kwargs)
        name = next(self._names[id(value)] for value in args if id(value) in self._names)
        raise ConfigError(
            f"{name!r} cannot differ by stream: the model uses it in {getattr(func, '__name__', func)}, and a fleet knows "
            "weights and biases of normalization layers only; choose these with select=, or use one adapter for each stream"
        )

    def differs(self, value: Tensor | None) -> bool:
        """Whether it has an entry for each stream."""
        return value is not None and id(value) in self._names

    def per_stream(self, x: Tensor) -> int:
        """How many of the first dimension belong to a stream."""
        if len(x) % self.streams:
            raise ConfigError(
                f"a norm layer of the model gets {len(x)} rows for {self.streams} streams: it does not keep samples in the "
                "first dimension, so a fleet cannot tell which rows belong to which stream; use one adapter for each stream"
            )
        return len(x) // self.streams

    def _aligned(self, a: Tensor, b: Tensor) -> list[Tensor]:
        """Two operands, the one with an entry for each stream in a shape that broadcasts to the other."""

        def like(value: Tensor, other: Tensor) -> Tensor:
            if not self.differs(value):
                return value
            gaps = other.ndim - value.ndim
            rows = value.repeat_interleave(self.per_stream(other), dim=0)
            return rows.view(len(rows), *[1] * gaps, *value.shape[1:])

        return [like(a, b), like(b, a)]

    def affine(self, y: Tensor, weight: Tensor | None, bias: Tensor | None, shape: tuple[int, ...]) -> Tensor:
        """weight * y + bias; `shape` is that of y as (n, samples and places, *parameter, places)."""
        if weight is None and bias is None:
            return y
        tail = [1] * (len(shape) - 2 - (0 if weight is None and bias is None else self._width(weight, bias)))

        def fit(value: Tensor) -> Tensor:
            lead = (self.streams, 1) if self.differs(value) else (1, 1)
            inner = value.shape[1:] if self.differs(value) else value.shape
            return value.reshape(*lead, *inner, *tail)

        parts = y.reshape(shape)
        if weight is not None and bias is not None:
            found = (
                torch.addcmul(fit(bias), parts, fit(weight)) if _plain(y, weight) else parts * fit(weight) + fit(bias)
            )
        elif weight is not None:
            found = parts * fit(weight)
        else:
            assert bias is not None
            found = parts + fit(bias)
        return found.to(y.dtype).reshape(y.shape)

    def _width(self, weight: Tensor | None, bias: Tensor | None) -> int:
        """Dimensions of the parameter itself."""
        value = weight if weight is not None else bias
        assert value is not None
        return value.ndim - self.differs(value)


def _plain(y: Tensor, weight: Tensor) -> bool:
    return y.dtype == weight.dtype


def _layer_norm(
    mode: ByStream,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *_: Any,
) -> Tensor:
    if not (mode.differs(weight) or mode.differs(bias)):
        return F.layer_norm(input, list(normalized_shape), weight, bias, eps)
    mode.per_stream(input)
    y = F.layer_norm(input, list(normalized_shape), None, None, eps)
    return mode.affine(y, weight, bias, (mode.streams, -1, *normalized_shape))


def _rms_norm(
    mode: ByStream,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    mode.per_stream(input)
    y = F.rms_norm(input, list(normalized_shape), None, eps)
    return mode.affine(y, weight, None, (mode.streams, -1, *normalized_shape))


def _by_channel(mode: ByStream, y: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    return mode.affine(y, weight, bias, (mode.streams, mode.per_stream(y), y.shape[1], math.prod(y.shape[2:])))


def _group_norm(
    mode: ByStream,
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *_: Any,
) -> Tensor:
    if not (mode.differs(weight) or mode.differs(bias)):
        return F.group_norm(input, num_groups, weight, bias, eps)
    return _by_channel(mode, F.group_norm(input, num_groups, None, None, eps), weight, bias)


def _instance_norm(
    mode: ByStream,
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    y = F.instance_norm(input, running_mean, running_var, None, None, use_input_stats, momentum, eps)
    return _by_channel(mode, y, weight, bias)


def _batch_norm(
    mode: ByStream,
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """BatchNorm with statistics per stream, see `come.batchnorm`."""
    rule, b, c = mode.statistics, mode.per_stream(input), input.shape[1]
    x = input.reshape(mode.streams, b, c, -1)
    known = running_mean is not None and running_var is not None
    one = b * x.shape[3] == 1
    if rule is None or one:
        if known or one:
            y = F.batch_norm(input, running_mean, running_var, None, None, False, 0.0, eps)
            return _by_channel(mode, y, weight, bias)
        rule = "batch"
    if isinstance(rule, by_selection):
        with torch.no_grad():
            mean, var = rule.by_stream(x)
            mean, var = _toward_source(mean, var, running_mean, running_var, rule.share)
        y = ((exact(x) - _channels(mean)) * _channels((var + eps).rsqrt())).to(input.dtype).reshape(input.shape)
        return _by_channel(mode, y, weight, bias)
    if rule != "batch" and not isinstance(rule, mixed):
        raise ConfigError(f"a fleet cannot use the BatchNorm statistics {rule!r}; use one adapter for each stream")
    flat = x.transpose(0, 1).reshape(b, mode.streams * c, -1)
    z = F.batch_norm(flat, None, None, None, None, True, 0.0, eps)
    z = z.view(b, mode.streams, c, -1).transpose(0, 1)
    if isinstance(rule, mixed) and running_mean is not None and running_var is not None:
        with torch.no_grad():
            own_var, own_mean = torch.var_mean(exact(x), dim=(1, 3), correction=0)
            mean, var = _toward_source(own_mean, own_var, running_mean, running_var, rule.share)
            width = (var + eps).rsqrt()
            scale, shift = (own_var + eps).sqrt() * width, (own_mean - mean) * width
        weight, bias = _composed(mode, weight, bias, scale, shift)
        return (z * _channels(weight) + _channels(bias)).to(input.dtype).reshape(input.shape)
    return _by_channel(mode, z.reshape(input.shape), weight, bias)


def _toward_source(
    mean: Tensor, var: Tensor, source_mean: Tensor | None, source_var: Tensor | None, share: Tensor | float
) -> tuple[Tensor, Tensor]:
    """(n, C): `share` (n,) of these and the rest of the source's."""
    if source_mean is None or source_var is None or (isinstance(share, float) and share == 1):
        return mean, var
    part = torch.as_tensor(share, dtype=mean.dtype, device=mean.device).reshape(-1, 1)
    return torch.lerp(source_mean.to(mean), mean, part), torch.lerp(source_var.to(var), var, part)


def _composed(
    mode: ByStream, weight: Tensor | None, bias: Tensor | None, scale: Tensor, shift: Tensor
) -> tuple[Tensor, Tensor]:
    """(n, C): the layer's own weight and bias behind another scale and shift."""
    if weight is None:
        return scale, shift
    return weight * scale, weight * shift + (0 if bias is None else bias)


def _channels(value: Tensor) -> Tensor:
    """(n, C) -> (n, 1, C, 1)."""
    return value[:, None, :, None]


_NORMS: dict[Any, Callable[..., Tensor]] = {
    F.layer_norm: _layer_norm,
    torch.layer_norm: _layer_norm,
    F.group_norm: _group_norm,
    torch.group_norm: _group_norm,
    F.rms_norm: _rms_norm,
    torch.rms_norm: _rms_norm,
    F.instance_norm: _instance_norm,
    F.batch_norm: _batch_norm,
}
_CASTS = {Tensor.to, Tensor.float, Tensor.type_as, Tensor.contiguous}
_ELEMENTWISE = {
    *(torch.mul, torch.add, torch.sub, Tensor.mul, Tensor.add, Tensor.sub),
    *(Tensor.__mul__, Tensor.__rmul__, Tensor.__add__, Tensor.__radd__, Tensor.__sub__),
}
