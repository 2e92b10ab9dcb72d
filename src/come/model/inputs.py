"""A model's inputs and logits, checked before anything changes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from come.errors import InputError, require, shown, unknown
from come.state.trees import leaves

Input = Tensor | tuple[Any, ...] | list[Any] | Mapping[str, Any]
"""A batch: a tensor, or the arguments of the model as a tuple or a mapping."""
Key = int | str
"""An argument of a call: its position, or its name."""
UNKNOWN = -1e4
"""All logits of a sample without an answer: no class is preferred, and none has evidence."""
IGNORE = "come.ignore"
"""Where `Inputs.kwargs` holds the mask of positions that drive nothing."""

WITHOUT_STATISTICS = (
    "got one value per channel and has no running statistics; use a larger batch or a BatchNorm with "
    "track_running_stats=True"
)
TOKENS = frozenset({"input_ids", "input_values", "input_features", "attention_mask", "token_type_ids"})
"""What tokenizers and feature extractors of transformers return: each has one entry per sample."""


class Inputs(NamedTuple):
    """The arguments of one call of a model, `model(*args, **kwargs)`.

    >>> Inputs.of({"pixel_values": torch.zeros(4, 3)}).size
    4
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    samples: frozenset[Key] = frozenset()
    """The arguments with one entry per sample; all samples share the others."""

    @classmethod
    def of(cls, *args: Any, **kwargs: Any) -> Inputs:
        """Read a call with one tensor; `Arguments` reads others."""
        return Arguments().of(args, kwargs)

    @property
    def size(self) -> int:
        """Number of samples."""
        for key, value in self.items():
            if key in self.samples:
                return len(value)
        given = ", ".join(type(value).__name__ for value in self.values()) or "nothing"
        raise InputError(f"the batch holds no tensor with a batch dimension, got {given}; pass a tensor (B, ...)")

    def items(self) -> list[tuple[Key, Any]]:
        """All arguments by position or name, positional ones first."""
        return [*enumerate(self.args), *self.kwargs.items()]

    def values(self) -> list[Any]:
        """All arguments, positional ones first."""
        return [*self.args, *self.kwargs.values()]

    @property
    def ignore(self) -> Tensor | None:
        """(B, ...) bool: the positions of the answer that drive nothing, see `Adapter.step`."""
        return self.kwargs.get(IGNORE)

    def for_model(self) -> Inputs:
        """Without what the model does not get."""
        if IGNORE not in self.kwargs:
            return self
        kwargs = {name: value for name, value in self.kwargs.items() if name != IGNORE}
        return Inputs(self.args, kwargs, self.samples - {IGNORE})

    def map(self, change: Callable[[Any], Any]) -> Inputs:
        """Apply `change` to every argument."""
        return self.map_samples(change, change)

    def map_samples(self, change: Callable[[Tensor], Any], other: Callable[[Any], Any] = lambda value: value) -> Inputs:
        """Apply `change` to the tensors with one entry per sample, and `other` to the rest."""
        new = {key: (change if key in self.samples else other)(value) for key, value in self.items()}
        kwargs = {name: new[name] for name in self.kwargs}
        return Inputs(tuple(new[i] for i in range(len(self.args))), kwargs, self.samples)

    def per_sample(self) -> list[Tensor]:
        """The tensors with one entry per sample."""
        return [value for key, value in self.items() if key in self.samples]

    def take(self, chosen: slice | Tensor) -> Inputs:
        """Some of the samples; shared arguments stay as they are.

        >>> x = Arguments(per_sample=(0,)).of((torch.zeros(4, 3),), {"heads": torch.ones(4)})
        >>> some = x.take(slice(0, 1))
        >>> some.args[0].shape, some.kwargs["heads"].shape
        (torch.Size([1, 3]), torch.Size([4]))
        """
        return self.map_samples(lambda value: value[chosen])

    def image(self, who: str) -> Tensor:
        """The images (B, C, H, W); `who` needs them, and is named in the error if there are none."""
        found: list[Tensor] = [v for v in self.per_sample() if _is_image(v)]
        if len(found) == 1:
            return found[0]
        shapes = ", ".join(str(tuple(value.shape)) for value in self.values() if isinstance(value, Tensor))
        raise InputError(
            f"{who} needs images, one floating-point tensor (B, C, H, W), got {shapes or 'no tensor'}; for other data "
            "choose a method that needs no images ('come list methods' shows what each needs)"
        )

    def with_image(self, images: Tensor) -> Inputs:
        """Replace the images by (V * B, C, H, W) for any V; other per-sample tensors are repeated V times."""
        times = images.shape[0] // self.size
        return self.map_samples(
            lambda value: images if _is_image(value) else value.repeat(times, *[1] * (value.ndim - 1))
        )


class Arguments:
    """Reads calls of a model, and finds the arguments with one entry per sample.

    A single tensor has. Several cannot be told apart by length (a table of 8 classes beside 8 samples), so they must be named
    in `per_sample`; models of transformers name theirs by convention.

    Args:
        model: the model that is called; None if it is not known.
        per_sample: names or positions of the arguments with one entry per sample; None: not given.

    Example:
        >>> Arguments(nn.Bilinear(3, 3, 2), ["input1"]).of((torch.zeros(4, 3), torch.zeros(4, 3)), {}).samples
        frozenset({0})
    """

    def __init__(self, model: nn.Module | None = None, per_sample: Collection[Key] | None = None) -> None:
        try:
            parameters = [] if model is None else list(inspect.signature(model.forward).parameters.values())
        except (TypeError, ValueError):  # a forward that Python knows nothing about
            parameters = []
        places = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        self._names = [p.name for p in parameters if p.kind in places]
        self._said = None if per_sample is None else frozenset(map(self._key, _keys(per_sample)))
        known = self._known = {p.name for p in parameters}
        if parameters and not any(p.kind is p.VAR_KEYWORD for p in parameters):
            for name in self._said or ():
                if isinstance(name, str) and name not in known:
                    raise unknown("argument", name, known, f"per_sample takes those of {type(model).__name__}.forward")
        self._tokens = any(kind.__module__.partition(".")[0] == "transformers" for kind in type(model).__mro__)

    def of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs:
        """Read a call; a single mapping holds keyword arguments, a single tuple or list positional ones."""
        args, kwargs, ignore = self._ignored(args, kwargs)
        only = args[0] if len(args) == 1 and not kwargs else None
        if isinstance(only, Mapping):
            args, kwargs, ignore = self._ignored((), dict(only), ignore)
        elif isinstance(only, (tuple, list)):
            args = tuple(only)
        x = Inputs(args, kwargs)
        names = {
            key: self._key(key)
            for key, value in x.items()
            if (value.ndim if isinstance(value, Tensor) else any(t.ndim for t in leaves(value)))
        }
        if self._said is None and len(names) > 1 and not (self._tokens and TOKENS.issuperset(names.values())):
            counts = {names[key]: len(value) for key, value in x.items() if isinstance(value, Tensor) and value.ndim}
            likely = tuple(name for name, count in counts.items() if count == next(iter(counts.values())))
            raise InputError(
                f"{_listed(names.values())} are tensors; which of them have one entry per sample? Name those, e.g. "
                f"come.adapt(model, ..., per_sample={likely})"
            )
        samples = frozenset(key for key, name in names.items() if self._said is None or name in self._said)
        if names and not samples:
            raise InputError(
                f"no tensor of this call ({_listed(names.values())}) is in per_sample; name the arguments with one entry per "
                "sample there"
            )
        x = Inputs(args, kwargs, samples)
        if ignore is not None:
            if not (isinstance(ignore, Tensor) and ignore.dtype == torch.bool):
                raise InputError(f"ignore must be a bool tensor (B, *positions), got {shown(ignore)}")
            x, names = Inputs(args, kwargs | {IGNORE: ignore}, samples | {IGNORE}), names | {IGNORE: "ignore"}
        for key, value in x.items():
            if key in samples and not isinstance(value, Tensor):
                raise InputError(f"{_listed([names[key]])} must be a tensor (B, ...), got a {type(value).__name__}")
        if len({len(value) for value in x.per_sample()}) > 1:
            lengths = ", ".join(f"{names[key]}: {len(value)}" for key, value in x.items() if key in x.samples)
            raise InputError(
                f"arguments with one entry per sample must have the same length, got {lengths}; name only those in per_sample"
            )
        return x

    def _ignored(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], ignore: Any = None
    ) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
        """The arguments of the model, and `ignore`, unless the model has an argument of that name."""
        if "ignore" in kwargs and "ignore" not in self._known:
            kwargs = dict(kwargs)
            ignore = kwargs.pop("ignore")
        return args, kwargs, ignore

    def read(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None, empty: bool = False) -> Inputs:
        """Read a call and check that a model can be called so; `empty`: the batch may hold no sample."""
        x = self.of(args, kwargs or {})
        inference = False
        for value in (*x.args, *x.kwargs.values()):
            if not isinstance(value, Tensor):
                continue
            if value.layout != torch.strided:
                raise InputError(f"the input has layout {value.layout}; pass a dense tensor: x.to_dense()")
            if value.is_meta:
                raise InputError("the input is on the meta device and has no values; pass a tensor with data")
            inference = inference or value.is_inference()
        if len(x.args) == 1 and not x.for_model().kwargs:
            (only,) = x.args
            if not isinstance(only, Tensor):
                raise InputError(
                    f"the input is a {type(only).__name__}; pass a tensor, or a tuple or mapping of tensors"
                )
            if not only.is_floating_point():
                raise InputError(
                    f"the input must be floating point, got {only.dtype}: scale and normalize images first; pass token ids "
                    "by name, e.g. input_ids=x"
                )
            if only.ndim < 2:
                raise InputError(
                    f"the input must be (B, ...) with at least 2 dimensions, got shape {tuple(only.shape)}"
                )
        if x.size < 1 and not empty:
            raise InputError("the batch is empty; skip it")
        if inference:  # autograd cannot use such tensors
            with torch.inference_mode(False):
                x = x.map(lambda value: value.clone() if isinstance(value, Tensor) and value.is_inference() else value)
        return x

    def _key(self, key: Key) -> Key:
        """The name of an argument given by name or position; its position if the model does not name it."""
        return self._names[key] if isinstance(key, int) and key < len(self._names) else key


def _keys(per_sample: Any) -> Collection[Key]:
    """`per_sample`, checked."""
    good = isinstance(per_sample, Collection) and not isinstance(per_sample, (str, bytes, Tensor))
    for key in per_sample if good else ():
        good = good and (isinstance(key, str) or (isinstance(key, int) and not isinstance(key, bool) and key >= 0))
    require(good, "per_sample", per_sample, "a tuple of names or positions of arguments, or None")
    keys: Collection[Key] = per_sample
    return keys


def _listed(names: Iterable[Key]) -> str:
    """For a message: "x, mask and argument 2"."""
    words = [name if isinstance(name, str) else f"argument {name}" for name in names]
    return " and ".join([", ".join(words[:-1])] * (len(words) > 1) + words[-1:])


def _is_image(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.ndim == 4


def at_least_float32(x: Tensor) -> Tensor:
    """`x` in float32 if it has half precision.

    >>> at_least_float32(torch.zeros(1, dtype=torch.bfloat16)).dtype
    torch.float32
    """
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def answered(logits: Tensor) -> Tensor:
    """Which of logits (..., K) are usable, (...,): no NaN, no +inf, not all -inf. A class masked by -inf is fine.

    >>> answered(torch.tensor([[0.0, -torch.inf], [torch.nan, 0.0], [-torch.inf, -torch.inf]]))
    tensor([ True, False, False])
    """
    most = logits.amax(dim=-1)  # propagates NaN, and is -inf only if all are
    return (most - most) == 0  # finite, in fewer operations


def unchecked_logits(out: Any) -> Any:
    """What stands for the logits in what a model returned; None if nothing does."""
    if isinstance(out, Mapping):
        return out.get("logits", out.get("out"))
    return out if isinstance(out, Tensor) else getattr(out, "logits", None)


def logits_of(out: Any, batch: int, class_dim: int = 1) -> Tensor:
    """The logits (B, K, ...) in what a model returned, checked; `class_dim` is where the model has the classes.

    >>> logits_of({"out": torch.zeros(1, 21, 8, 8)}, 1).shape, logits_of(torch.zeros(1, 8, 21), 1, class_dim=-1).shape
    (torch.Size([1, 21, 8, 8]), torch.Size([1, 21, 8]))
    """
    logits = unchecked_logits(out)
    if not isinstance(logits, Tensor):
        raise InputError(
            f"the model must return a tensor (B, K) or (B, K, ...), or an object with `logits` or `out`, got "
            f"{type(out).__name__}; wrap the model in a module that returns logits"
        )
    known = logits.ndim > 1 and -logits.ndim <= class_dim < logits.ndim and class_dim % logits.ndim
    if not known or logits.shape[0] != batch or not logits.is_floating_point() or logits.shape[class_dim] < 2:
        where = "" if class_dim == 1 else f" in dimension {class_dim} (class_dim)"
        raise InputError(
            f"the model must return floating-point logits of shape ({batch}, K) with K >= 2{where} for a batch of {batch}, got "
            f"{logits.dtype} of shape {tuple(logits.shape)}; axes of positions, such as pixels, come behind these"
        )
    if not logits.numel():
        raise InputError(f"the logits of the model have no position, got shape {tuple(logits.shape)}")
    return logits if class_dim == 1 else logits.movedim(class_dim, 1)


def explained(error: Exception, model: nn.Module, x: Inputs, batch_norms: Iterable[Any]) -> Exception:
    """What to raise for an error of the model: itself, or an `InputError` where a layer of torch refuses a shape."""
    convolutions = {nn.Conv1d: 3, nn.Conv2d: 4, nn.Conv3d: 5}  # dimensions of their inputs
    expected = next((n for m in model.modules() for kind, n in convolutions.items() if isinstance(m, kind)), None)
    shapes = ", ".join(str(tuple(value.shape)) for value in x.per_sample())
    hint = "; if this is a single image, pass x[None]" if expected == x.per_sample()[0].ndim + 1 else ""
    said = f"{type(model).__name__} was called with a batch of shape {shapes}{hint}"
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    by_layer = trace is not None and str(trace.tb_frame.f_globals.get("__name__")).startswith("torch.nn.")
    if isinstance(error, ValueError) and by_layer:  # such as a norm layer with one value per channel
        if "value per channel" in str(error) and any(layer.running_mean is None for layer in batch_norms):
            return InputError(f"a BatchNorm layer {WITHOUT_STATISTICS}; {said}")
        return InputError(f"{error}; {said}")
    if hint and hasattr(error, "add_note"):  # from Python 3.11 on
        error.add_note(said)
    return error
