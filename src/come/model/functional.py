"""`FunctionalModel`: runs the user's model with substituted weights and statistics, and restores it.

The parameters and buffers of the model are never written. Adapted weights live in one float32 vector (P,), whatever the
precision of the model; for the length of a call tensors cut from it stand in the place of the model's own.

Before anything in the model is changed (parameters, buffers, flags, hooks), a line that undoes it is put on a list. Undoing a
line twice does no harm, and a line leaves the list only after it is undone. So an interrupt can strike anywhere, in torch and
in `give_back` itself: the next `give_back` does the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from operator import setitem
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

import torch
from torch import Tensor, nn

from come.errors import InputError, ModelError, warn
from come.model.batchnorm import (
    BatchStatistics,
    Layer,
    Statistics,
    StatisticsRule,
    normalizing,
    rescaling,
    unit_statistics,
)
from come.model.copies import OUT_OF_REACH, Function, Mode, ModelCopies, ModelCopy, Place, UncopiedError, fused
from come.model.inputs import Arguments, Inputs, Key, explained, logits_of
from come.model.parameters import Slot, buffers_of, selected, slots_of
from come.select import BATCH_NORMS, Selector, is_norm
from come.streams.norms import GroupRows

if TYPE_CHECKING:
    from come.model.ranks import RankRows, Ranks

T = TypeVar("T")
LOSS_SCALE = 256.0
ALIGNED = 64  # a parameter begins at a multiple of so many entries of the vector: matrix kernels want aligned addresses
HOOKS = (  # where a module keeps the hooks that run with it
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_backward_pre_hooks",
    "_backward_hooks",
)


class FunctionalModel:
    """A model and its adapted parameters: as one vector (P,), and as the places in the model that hold them.

    Args:
        model: the user's classifier.
        select: chooses the parameters.
        method: name of the method, for messages.
        descends: whether there must be any.
        mode: how the model is run.
        per_sample: its arguments with one entry per sample, see `come.model.inputs.Arguments`.
        class_dim: the dimension of its logits that holds the classes.
    """

    def __init__(
        self,
        model: nn.Module,
        select: Selector,
        method: str,
        descends: bool,
        mode: Mode | None = None,
        per_sample: Collection[Key] | None = None,
        class_dim: int = 1,
    ) -> None:
        self.model, self.mode, self.class_dim = model, mode or Mode(), class_dim
        self.read = Arguments(model, per_sample).read
        """Reads and checks the arguments of a call."""
        self.parameters = selected(model, select, method, descends)
        """The adapted parameters by name, the user's own."""
        self.shapes = {name: p.shape for name, p in self.parameters.items()}
        self._room = [-(-p.numel() // ALIGNED) * ALIGNED for p in self.parameters.values()]
        self._number = {id(p): i for i, p in enumerate(self.parameters.values())}
        self._params = list(model.parameters())
        self._slots, self._links = slots_of(model, self._number)
        self._versions = self._read_versions()
        self.plain = self.mode.plain
        """Whether the user's own model is called, and no copy of it."""
        self._modules = list(model.modules())
        self._names = frozenset(slot.name for slot in self._slots)
        self.norms = {path: m for path, m in model.named_modules() if isinstance(m, BATCH_NORMS)}
        """The BatchNorm layers by path."""
        self.has_batch_norm = bool(self.norms)
        self._synchronized = any(isinstance(layer, nn.SyncBatchNorm) for layer in self.norms.values())
        self._affine = [
            Slot(f"{path}.{name}", norm, name, p)
            for path, norm in self.norms.items()
            for name, p in norm.named_parameters(recurse=False)
        ]
        """Weights and biases of BatchNorm layers, adapted or not."""
        self._buffers = buffers_of(model)
        self._watched = self._written_by_forward()
        self._copies: dict[int, tuple[Tensor, int, Tensor, int]] = {}
        """By identity: a buffer of the model, its version, the copy that the forward sees, and its version."""
        self._loan: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []
        """What undoes each change in the model."""
        self.compiled = False
        """Whether calls use `torch.compile`; set for the length of a step."""
        self.ranks: Ranks | None = None
        """The processes that calls of the model are divided over."""
        self.rank_rows: RankRows | None = None
        """What this one computes of the call under way, if it is divided."""
        self._built_from: tuple[Any, ...] = ()
        """The model's weights and buffers at the last step."""
        self._stand_ins = ModelCopies.of(model)

    @property
    def loss_scale(self) -> float:
        """Factor on the loss, divided out of the gradient: in float16 small gradients would underflow."""
        kind = self.device.type
        autocast = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) == torch.float16
        return LOSS_SCALE if autocast or any(p.dtype == torch.float16 for p in self._params) else 1.0

    # ---- the vector of adapted parameters ----

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
        """The vector (P,), or those of streams (n, P) -> a view for each adapted parameter."""
        found = []
        for part, shape in zip(
            torch.split(weights, self._room, dim=-1) if self._room else (), self.shapes.values(), strict=True
        ):
            part = part if part.shape[-1] == shape.numel() else part[..., : shape.numel()]
            found.append(part if part.shape == shape else part.view(*weights.shape[:-1], *shape))
        return found

    def _given(self, weights: Tensor) -> list[Tensor]:
        """The same in the types of the parameters."""
        return [
            part if part.dtype == p.dtype else part.to(p.dtype)
            for part, p in zip(self.split(weights), self.parameters.values(), strict=True)
        ]

    def named(self, weights: Tensor) -> dict[str, Tensor]:
        """The vector (P,) as tensors by parameter name."""
        return dict(zip(self.shapes, self.split(weights), strict=True))

    def source(self) -> Tensor:
        """The model's own values as a vector."""
        return self.join(list(self.parameters.values()))

    def largest(self) -> float:
        """How large a weight may be, with room to spare: in half precision an overflow is near."""
        return min((torch.finfo(p.dtype).max / 1e3 for p in self.parameters.values()), default=torch.inf)

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

    # ---- gradients and random numbers of one stream; `come.streams.transition.StackedModel` has those of many ----

    def leaf(self, values: Tensor) -> Tensor:
        """`values` as a tensor of its own that gradients can be taken with respect to."""
        return values.detach().requires_grad_()

    def gradient(self, loss: Tensor, weights: Tensor) -> Tensor | None:
        """Gradient (P,) of the scalar `loss`; None if it does not depend on `weights`."""
        return torch.autograd.grad(loss, weights, allow_unused=True)[0] if loss.requires_grad else None

    def drawn(self, draw: Callable[[Tensor, Any], Tensor], values: Tensor, generator: Any) -> Tensor:
        """What `draw(values, generator)` returns."""
        return draw(values, generator)

    @property
    def may_branch(self) -> bool:
        """Whether Python may look at values within a step: on a CPU that costs nothing."""
        return self.device.type == "cpu"

    # ---- calling it ----

    def layers(self) -> list[Layer]:
        """The BatchNorm layers with the source's statistics."""
        found = cast("Iterable[nn.BatchNorm2d]", self.norms.values())
        return [Layer(m, i, m.running_mean, m.running_var, self.rank_rows) for i, m in enumerate(found)]

    def logits(self, out: Any, batch: int) -> Tensor:
        """The logits (B, K, ...) in what the model returned for a batch of that size, checked."""
        logits = logits_of(out, batch, self.class_dim)
        if logits.ndim == 3 and self.class_dim == 1:
            classes = getattr(getattr(self.model, "config", None), "num_labels", None)
            if isinstance(classes, int) and logits.shape[2] == classes != logits.shape[1]:
                raise InputError(
                    f"logits of shape {tuple(logits.shape)} have the {classes} classes of this model last; say so: "
                    "come.adapt(model, ..., class_dim=-1)"
                )
        return logits

    def borrow(self, call: Callable[..., T], *args: Any) -> T:
        """Call something that runs the model: with gradients on, in evaluation mode; the model is restored afterwards."""
        self.check_unchanged()
        try:
            try:
                with torch.enable_grad(), self.mode.active() if self.mode.precision == "tf32" else nullcontext():
                    self._prepare()
                    return call(*args)
            finally:
                self.give_back()
        finally:  # again, in case an interrupt struck in the line above
            self.give_back()

    def _prepare(self) -> None:
        """For the length of a step: evaluation mode, and no gradients for what does not adapt. `give_back` ends it."""
        for module in self._modules:
            if module.training:
                self._set(module, "training", False)
        for p in self._params:
            if p.requires_grad:
                self._set(p, "requires_grad", False)
        # Moving or casting a model gives it new buffers.
        self._buffers = [slot._replace(value=getattr(slot.owner, slot.attribute)) for slot in self._buffers]
        self._watched = self._written_by_forward()
        here = {id(slot.value) for slot in self._watched}
        self._copies = {key: kept for key, kept in self._copies.items() if key in here}

    def give_back(self) -> None:
        """Put back whatever a step or a call has changed in the model; may be called at any time, any number of times."""
        self._undo(0)

    def call(
        self, x: Inputs, weights: Tensor, statistics: Statistics = None, hooks: Sequence[Callable[[], Any]] = ()
    ) -> Any:
        """What the model returns for `x` under these weights; the model is as before when this returns or raises.

        Args:
            x: the batch.
            weights: (P,) of the adapted parameters.
            statistics: what BatchNorm normalizes by, see `come.model.batchnorm`.
            hooks: functions that register a hook and return its handle; they last for this call.
        """
        values = self._given(weights)
        given = {slot.name: values[self._number[id(slot.value)]] for slot in self._slots}
        rule = None if hooks or self.plain or self._stand_ins.uncopied else self._rule_of(statistics, x.size)
        share = statistics.share if isinstance(statistics, BatchStatistics) else None
        with self._explaining(x), nullcontext() if self.plain else self.mode.rounding(self.device):
            if rule is not None:
                try:
                    return self._call_stand_in(rule, given, x, share=share)
                except UncopiedError as reason:
                    self._stand_ins.give_up(str(reason))
                    warn(f"{type(self.model).__name__} is run itself and not compiled, since {reason}")
            return self._call_own(given, x if self.plain else self.mode.images(x), statistics, hooks)

    def call_streams(self, x: Inputs, weights: Sequence[Tensor], groups: Sequence[GroupRows]) -> Any:
        """The same for many streams.

        Args:
            x: the samples of all groups, one after the other, and in a group of its streams.
            weights: for each group (n, P), or (P,) if they are the same for all of its streams.
            groups: of streams.
        """
        parts = [self._given(values) for values in weights]
        values: list[Any] = parts[0] if len(parts) == 1 else [list(column) for column in zip(*parts, strict=True)]
        given = {slot.name: values[self._number[id(slot.value)]] for slot in self._slots}
        try:
            with self._explaining(x), self.mode.rounding(self.device):
                return self._call_stand_in("streams", given, x, groups=tuple(groups))
        except UncopiedError as reason:
            raise ModelError(
                f"{type(self.model).__name__} cannot be shared by streams, since {reason}; use one adapter for each stream"
            ) from reason

    @contextmanager
    def _explaining(self, x: Inputs) -> Iterator[None]:
        """Around a call of the model: an error of it is raised with an explanation, where there is one."""
        try:
            yield
        except (RuntimeError, ValueError, IndexError) as error:
            if (found := explained(error, self.model, x, self.norms.values())) is error:
                raise
            raise found from error

    def _call_own(
        self, given: dict[str, Tensor], x: Inputs, statistics: Statistics, hooks: Sequence[Callable[[], Any]]
    ) -> Any:
        """Call the user's own model."""
        places: list[Place] = [(slot.owner._parameters, slot.attribute, given[slot.name]) for slot in self._slots]
        places += [(slot.owner._buffers, slot.attribute, self._copy(slot.value)) for slot in self._watched]
        mark = len(self._loan)
        try:
            if hooks:
                self._note_hooks(self._modules, HOOKS)
            for register in hooks:
                register()
            places += self._install(statistics, x, given)
            self._replace(places)
            return self.model(*x.args, **x.kwargs)
        finally:
            self._undo(mark)

    def _call_stand_in(
        self, rule: StatisticsRule | Literal["streams"], given: dict[str, Any], x: Inputs, **more: Any
    ) -> Any:
        """Call a stand-in, with the user's own tensors out of its reach."""
        away: list[Place] = [
            (slot.owner._parameters, slot.attribute, OUT_OF_REACH) for slot in (*self._slots, *self._affine)
        ]
        away += [
            (slot.owner._buffers, slot.attribute, OUT_OF_REACH)
            for slot in self._buffers
            if slot.owner._buffers.get(slot.attribute) is not None
        ]
        stand_in, mark = self._stand_in(rule), len(self._loan)
        try:
            self._replace(away)
            return stand_in(given, self.mode.images(x), **more)
        finally:
            self._undo(mark)

    def _rule_of(self, statistics: Statistics, batch: int) -> StatisticsRule | None:
        """What a stand-in can normalize by in place of `statistics`; None if it cannot."""
        if statistics is None or not self.norms:
            return "source"
        if self.rank_rows is not None or not (isinstance(statistics, BatchStatistics) and statistics.plain):
            return None
        return "batch" if statistics.of_batch_alone and self._by_torch(batch) else "mixed"

    def _by_torch(self, batch: int) -> bool:
        """Whether torch's BatchNorm in training mode can normalize such a batch by itself."""
        return batch > 1 and not self._synchronized and self.rank_rows is None

    def _stand_in(self, rule: StatisticsRule | Literal["streams"]) -> ModelCopy:
        """The model as it is run, made when it is first needed."""
        key = (rule, self.compiled, self.mode, self._names)
        known = self._stand_ins
        if key not in known.made:
            with torch.no_grad():
                layers = dict(zip(self.norms, self.layers(), strict=True))
                known.made[key] = ModelCopy(
                    self.model, self._names, layers, rule, self.mode, self.compiled, known.converted
                )
        return known.made[key]

    @contextmanager
    def as_it_is(self) -> Iterator[None]:
        """For calls that are too rare to be compiled."""
        before, self.compiled = self.compiled, False
        try:
            yield
        finally:
            self.compiled = before

    def fused(self, function: Function) -> Function:
        """The function, as few kernels of a GPU where steps are compiled."""
        return fused(function) if self.compiled and self.device.type == "cuda" else function

    def not_of_norms(self) -> str | None:
        """The name of an adapted parameter that does not belong to a normalization layer, if there is one."""
        return next((slot.name for slot in self._slots if not is_norm(slot.owner)), None)

    def drop_stale_copies(self) -> bool:
        """Drop the copies of a model that was moved, cast or loaded since the last call; returns whether it was."""
        layers = tuple(id(child) for module in self._modules for child in module._modules.values())
        values = tuple(
            (t.data_ptr(), t._version)
            for module in self._modules
            for t in (*module._parameters.values(), *module._buffers.values())
            if t is not None
        )
        now = (layers, values)
        self._stand_ins.follow(now)
        stale, self._built_from = now != self._built_from, now
        return stale

    def _written_by_forward(self) -> list[Slot]:
        """Buffers that a forward in evaluation mode might write to; those of BatchNorm it does not."""
        return [slot for slot in self._buffers if not isinstance(slot.owner, BATCH_NORMS)]

    def _copy(self, buffer: Tensor) -> Tensor:
        """What the forward sees, and may write to, in place of a buffer."""
        buffer_and_copy = self._copies.get(id(buffer))
        if buffer_and_copy is not None:
            known, version, copy, copied = buffer_and_copy
            if known is buffer and version == buffer._version and copied == copy._version:  # nobody has written to them
                return copy
        copy = buffer.detach().clone()
        self._copies[id(buffer)] = (buffer, buffer._version, copy, copy._version)
        return copy

    def _install(self, statistics: Statistics, x: Inputs, given: dict[str, Tensor]) -> list[Place]:
        """Prepare the BatchNorm layers; returns the parameters and buffers that they get for this call."""
        if statistics is None or not self.norms:
            return []
        of_batch = isinstance(statistics, BatchStatistics) and statistics.plain and self._by_torch(x.size)
        if of_batch and statistics.of_batch_alone:  # type: ignore[union-attr]
            for layer in self.norms.values():
                self._batch_flags(layer)
            return []
        found: list[Place] = []
        self._note_hooks(self.norms.values(), HOOKS[:1])
        for path, known in zip(self.norms, self.layers(), strict=True):
            prefix, layer = f"{path}." if path else "", known.module
            if of_batch and layer.affine:
                self._batch_flags(layer)
                weight, bias = (given.get(f"{prefix}{name}", getattr(layer, name)) for name in ("weight", "bias"))
                # So that they are put back: the hook replaces them.
                found += [(layer._parameters, "weight", weight), (layer._parameters, "bias", bias)]
                layer.register_forward_pre_hook(rescaling(known, cast(BatchStatistics, statistics), weight, bias))
                continue
            layer.register_forward_pre_hook(normalizing(known, statistics))
            mean, var = (value.to(self.device) for value in unit_statistics(known))
            found += [(layer._buffers, "running_mean", mean), (layer._buffers, "running_var", var)]
        return found

    def _batch_flags(self, layer: nn.Module) -> None:
        """With these two flags torch's BatchNorm neither reads nor writes its running statistics."""
        self._set(layer, "track_running_stats", False)
        self._set(layer, "training", True)

    def _set(self, owner: Any, attribute: str, value: Any) -> None:
        before = getattr(owner, attribute)
        if before is not value:
            self._loan.append((object.__setattr__, (owner, attribute, before)))
            object.__setattr__(owner, attribute, value)  # `nn.Module` looks for tensors first

    def _replace(self, places: Iterable[Place]) -> None:
        """Put other tensors into the model."""
        for table, name, value in places:
            self._loan.append((setitem, (table, name, table[name])))
            table[name] = value

    def _note_hooks(self, modules: Iterable[nn.Module], kinds: Sequence[str]) -> None:
        """Whatever hooks of these kinds the modules get from now on are taken out again."""
        tables = [getattr(module, kind) for module in modules for kind in kinds]
        self._loan.append((_drop_new, ([(table, frozenset(table)) for table in tables],)))

    def _undo(self, mark: int) -> None:
        """Take back the changes behind `mark`, latest first."""
        while len(self._loan) > mark:
            undo, arguments = self._loan[-1]
            undo(*arguments)
            self._loan.pop()


def _drop_new(known: list[tuple[dict[int, Any], frozenset[int]]]) -> None:
    """Take out of each table what is not known there."""
    for table, keys in known:
        for key in [key for key in table if key not in keys]:
            del table[key]
