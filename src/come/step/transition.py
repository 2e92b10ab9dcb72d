"""One step as a pure function of flags, input tensors and a batch.

It reads and changes nothing outside, except rows of a method's memory that the method overwrites in place (`Context.put`),
which are noted in `Run.written`. So a step can be compiled, captured as a CUDA graph, repeated, or dropped.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from come.abstain import Abstention
from come.guard.config import Guard
from come.guard.signals import judge, observe
from come.guard.verdict import Verdict, collapsed, compare, judged, surer
from come.guard.watch import Watch
from come.method import Context, Method, Step, Written
from come.model.batchnorm import BatchStatistics, StatisticsRule
from come.model.functional import FunctionalModel
from come.model.inputs import UNKNOWN, Inputs, answered
from come.model.positions import by_position, by_sample, everywhere
from come.optim import Moments, Rule, chosen
from come.seeds import derived_seed

PRIOR, DENSE_PRIOR = 16, 1
"""How many samples the source's BatchNorm statistics count for in `statistics="mixed"` (Schneider et al., 2020), and how many
images where the answer has positions: one has many objects, and batches of one are common."""


T = TypeVar("T")


class StreamState(NamedTuple):
    """All that a step changes. A step never writes into it; it returns a new one."""

    weights: Tensor
    """(P,): the adapted parameters, in float32 or better."""
    moments: Moments
    state: dict[str, Tensor] | None = None
    """What the method remembers; None before the first batch."""
    count: int = 0  # type: ignore[assignment]  # tuples have a method of that name
    """Batches since construction or reset."""
    watch: Watch | None = None
    """What the guard has learned; None without one."""
    selected: float = 1.0
    """The share of the samples that drove the last update, if the method reports it."""
    abstention: Abstention | None = None
    """When to abstain; None before `Adapter.calibrate`."""

    def health(self) -> dict[str, float]:
        """Counters and gauges of the guard as flat numbers; without a guard, the steps only."""
        return {"steps": float(self.count)} if self.watch is None else self.watch.health()

    def to(self, device: torch.device, on_host: tuple[str, ...]) -> StreamState:
        """Move all tensors to a device, except method memory whose name begins with one of `on_host`."""
        state = self.state
        if state is not None:
            state = {k: v if on_host and k.startswith(on_host) else v.to(device) for k, v in state.items()}
        # Torch optimizers keep some numbers on the CPU on purpose.
        moments = {k: v.to(device) if v.ndim or v.device.type != "cpu" else v for k, v in self.moments.items()}
        watch = None if self.watch is None else self.watch.to(device)
        abstention = None if self.abstention is None else self.abstention.to(device)
        weights = self.weights.to(device)
        return self._replace(weights=weights, moments=moments, state=state, watch=watch, abstention=abstention)

    def settled(self) -> StreamState:
        """With pending guard signals copied to the host, so that it can be pickled."""
        return self if self.watch is None else self._replace(watch=self.watch.settled())


class StepFlags(NamedTuple):
    """What the host decides before a step. Each combination is compiled and captured by itself."""

    asking: bool = False
    """The source model checks the adapted one."""
    resting: bool = False
    """The source model answers."""
    frozen: bool = False
    """The source model answers until `reset()`."""
    trusted: bool = True
    """BatchNorm uses statistics of the batch."""
    new: bool = False
    """The first batch in the life of the adapter."""
    few: bool = False
    """Few samples drove the last update, see `Context.again`."""


class StepInput(NamedTuple):
    """The tensors that a step begins with; for many streams each is (n, ...)."""

    weights: Tensor
    moments: Moments
    state: dict[str, Tensor] | None
    lr: Tensor
    """0-d."""
    history: Tensor | None = None
    """Of the guard, see `come.guard.signals`."""
    sums: Tensor | None = None
    """What the current source check has found so far."""
    needed: Tensor | None = None
    """0-d: after how many samples the source check may be acted on."""
    own: dict[str, Tensor] | None = None
    """0-d: hyperparameters in which this stream differs from the others, of those in `Method.by_stream`."""


class StepOutput(NamedTuple):
    """The tensors that a step ends with."""

    weights: Tensor
    moments: Moments
    state: dict[str, Tensor]
    out: Step
    history: Tensor | None = None
    sums: Tensor | None = None
    signals: Tensor | None = None
    """Read by the guard two steps later, see `come.guard.watch.Sent`."""
    selected: float | None = None
    """The share of the samples that drove the update, if the method reports it."""


@dataclass(frozen=True)
class Run:
    """What one execution of a step brings beside its tensors."""

    count: int | None
    """The number of the batch; None in a graph or for many streams, where a method must not ask for it."""
    generator: Any
    """Seeded for the batch when the method first asks for it."""
    written: list[Written]
    """Receives the rows that the method overwrites in place."""


@dataclass(frozen=True, eq=False)
class Transition:
    """A method on a model under a guard: all that stays the same from step to step.

    Args:
        method: what adapts.
        guard: or None.
        model: what it adapts.
        rule: the optimizer, or None if nothing descends.
        source: (P,), the adapted parameters of the source model.
        fixed: what `Method.setup` has found.
    """

    method: Method
    guard: Guard | None
    model: FunctionalModel
    rule: Rule | None
    source: Tensor
    fixed: dict[str, Any] = field(default_factory=dict)

    def __call__(self, flags: StepFlags, given: StepInput, x: Inputs, run: Run) -> StepOutput:
        """One step."""
        ctx, x, history = self._judged(flags, given, x, run)
        if run.count is not None:
            self.method.check(ctx, x, given.state is None and not run.count)  # not again after a recovery: it waits
        given = self._remembering(given, ctx, x)
        if self.guard is None:
            out, sums, signals = self._adapted(ctx, x), None, None
            weights, moments, state = ctx.weights.detach(), ctx.moments, ctx.state
        else:
            out, sums, signals = self._guarded(self.guard, flags, given, ctx, x)
            keep, weights, moments = self.model.fused(kept)(
                ctx.ok, ctx.valid, ctx.weights.detach(), given.weights, ctx.moments, given.moments
            )
            state = chosen(keep, ctx.state, given.state or {})
            if ctx.written:
                ctx.keep_where(keep)
        return StepOutput(weights, moments, state, self._folded(ctx, out), history, sums, signals, ctx.selected)

    @torch.no_grad()
    def answer(self, flags: StepFlags, given: StepInput, x: Inputs, run: Run) -> Step:
        """Logits and which samples could be answered, without adapting."""
        ctx, x, _ = self._judged(flags, given, x, run)
        self._remembering(given, ctx, x)
        logits = ctx.forward(x, self.source, statistics=None) if flags.resting else self.method.predict(ctx, x)
        if self.guard is None:
            return self._folded(ctx, Step(logits))
        positions = ctx.positions
        valid = ctx.samples & everywhere(answered(logits), positions)
        return self._folded(ctx, Step(self._cleaned(logits, valid, positions, None, None, ctx.ok)[0], valid=valid))

    def _judged(self, flags: StepFlags, given: StepInput, x: Inputs, run: Run) -> tuple[Context, Inputs, Tensor | None]:
        """What every call of a method begins with: the context, the batch without invalid samples, and the new history."""
        history, ignore = given.history, x.ignore
        x = x.for_model()
        if self.guard is not None and history is not None:
            x, valid, history = self.model.fused(judge)(x, history, self.guard.largest_input, self.model.may_branch)
            valid = valid.to(given.weights.device)
        else:
            valid = torch.ones(x.size, dtype=torch.bool, device=self.model.device)
        return self.context(flags, given, valid, run, ignore), x, history

    def _remembering(self, given: StepInput, ctx: Context, x: Inputs) -> StepInput:
        """With a memory, also in the context; the first batch makes one."""
        if given.state is None:
            given = given._replace(state=self.method.initial_state(ctx, x))
            ctx.state = dict(given.state or {})
        return given

    def context(
        self, flags: StepFlags, given: StepInput, valid: Tensor, run: Run, ignore: Tensor | None = None
    ) -> Context:
        """What the method works with; `valid` are the samples, `ignore` the positions that drive nothing."""
        return Context(
            self.model,
            self.rule,
            self.source,
            self.fixed,
            weights=given.weights,
            moments=given.moments,
            state=given.state or {},
            lr=given.lr,
            valid=valid,
            count=run.count,
            seeded=partial(self.seed, run),
            share=self._share(valid, flags.trusted),
            dense_share=None if "dense" in self.fixed else self._share(valid, flags.trusted, DENSE_PRIOR),
            guarded=self.guard is not None,
            few=flags.few,
            written=run.written,
            ignore=ignore,
            refuses=self._refuses,
        )

    def seed(self, run: Run) -> Any:
        """Begin the random numbers of the batch; in a graph or for many streams somebody else does."""
        if run.count is not None:
            run.generator.manual_seed(self.seed_of(run.count, self.method))
        return run.generator

    def borrow(self, call: Callable[[], T]) -> T:
        """Call something that runs the model, which is restored when this returns or raises."""
        return self.model.borrow(call)

    @staticmethod
    def seed_of(count: int, method: Method) -> int:
        """The seed of a method's batch number `count`."""
        return derived_seed(getattr(method, "seed", 0), count)

    # ---- parts ----

    def _adapted(self, ctx: Context, x: Inputs) -> Step:
        for _ in range(self.method.steps):
            out = self.method.adapt(ctx, x)
        return out

    def _guarded(
        self, guard: Guard, flags: StepFlags, given: StepInput, ctx: Context, x: Inputs
    ) -> tuple[Step, Tensor | None, Tensor]:
        """A step with its signals; where the source is asked and finds a collapse, it answers."""
        source: Tensor | None = None
        if flags.resting or flags.asking:
            with torch.no_grad(), self.model.as_it_is():
                source = ctx.forward(x, self.source, statistics=None)
        if flags.resting and (flags.frozen or not flags.asking):
            assert source is not None
            out = Step(source, used=torch.zeros_like(ctx.valid))
        else:
            out = self._adapted(ctx, x)
        answers = out.logits.detach()
        with torch.no_grad():
            objective, weights, closely = self.method.objective, ctx.weights.detach(), flags.new or flags.asking
            positions = ctx.positions
            usable, ctx.ok, seen = self.model.fused(observe)(
                objective, answers, ctx.samples, ctx.valid, positions, ctx.ok, weights, self.source, closely
            )
            values, sums = [seen], given.sums
            if flags.asking and source is not None:
                sums, answers = self._ask(guard, flags, given, ctx, x, answers, source)
                values.append(judged(sums, ctx.dense))
                usable = ctx.samples & everywhere(answered(answers), positions)
            logits, loss, used = self._cleaned(answers, usable, positions, out.loss, out.used, ctx.ok)
            return Step(logits, loss, used, usable), sums, torch.cat(values) if len(values) > 1 else seen

    def _ask(
        self, guard: Guard, flags: StepFlags, given: StepInput, ctx: Context, x: Inputs, answers: Tensor, source: Tensor
    ) -> tuple[Tensor, Tensor]:
        """What the source check has found so far, and the logits to return: those of the model to be trusted."""
        same, batch = source, None
        share = self._share(ctx.samples, trusted=True)
        if share is not None:
            with self.model.as_it_is():
                batch = ctx.forward(x, self.source, statistics=BatchStatistics(share))
            same = batch if flags.trusted else source
        positions = ctx.positions
        found = compare(answers, same, ctx.valid, batch, source, positions=positions, corrected=self.method.corrects)
        found = found if given.sums is None else given.sums + found
        if flags.resting:
            return found, source
        now = Verdict(*judged(found, ctx.dense).unbind())  # type: ignore[arg-type]
        if guard.policy in ("recover", "freeze"):
            assert given.needed is not None
            fallen = torch.as_tensor(collapsed(now)) & (now.samples >= given.needed)
            answers = torch.where(fallen, same.to(answers), answers)
        if self.chooses and batch is not None:
            better, other = torch.as_tensor(surer(now, flags.trusted)), source if flags.trusted else batch
            answers = torch.where(better == flags.trusted, answers, other.to(answers))
        return found, answers

    def _cleaned(
        self,
        answers: Tensor,
        usable: Tensor,
        positions: tuple[int, ...],
        loss: Tensor | None,
        used: Tensor | None,
        ok: Tensor,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """See `cleaned`; `usable` are samples (B,)."""
        whole = bool(positions) and self.model.may_branch and bool(usable.all())
        return self.model.fused(cleaned)(answers, by_position(usable, positions), loss, used, ok, whole)

    def _folded(self, ctx: Context, out: Step) -> Step:
        """Rows as the user has them: (B, ...), or (B, K, ...) and (B, ...)."""
        found = [None if value is None else value.detach() for value in out]
        if ctx.positions:
            samples, positions = len(ctx.samples), ctx.positions
            found[:3] = [None if value is None else by_sample(value, samples, positions) for value in found[:3]]
            assert found[0] is not None
            found[0] = found[0].movedim(-1, self.model.class_dim)
        return Step(*found)  # type: ignore[arg-type]

    @cached_property
    def _refuses(self) -> str:
        """Why logits with positions cannot be taken, if so."""
        why = self.method.vectors_only
        if not why and self.method.corrects:
            why = (
                "it corrects answers by the classes of the batch, which the positions of an image do not have in common"
            )
            why += "; pass prior_correction=False"
        return f"{self.method.name} takes logits (B, K) only, since {why}" if why else ""

    # ---- statistics of BatchNorm ----

    @cached_property
    def rule_of_statistics(self) -> StatisticsRule:
        """What BatchNorm normalizes by: "batch", "mixed" or "source"."""
        if not (self.method.batch_statistics and self.model.has_batch_norm):
            return "source"
        return self.method.statistics or (self.method.unguarded if self.guard is None else "mixed")

    @cached_property
    def on_batch(self) -> bool:
        """Whether BatchNorm may use statistics of the batch."""
        return self.rule_of_statistics != "source"

    @cached_property
    def chooses(self) -> bool:
        """Whether the guard chooses between mixed statistics and the source's."""
        return self.guard is not None and self.rule_of_statistics == "mixed"

    def _share(self, valid: Tensor, trusted: bool, prior: int | None = None) -> Tensor | float | None:
        """Of the batch's statistics: n/(n + 16) for n valid samples, n/(n + 1) for n images with positions."""
        rule = self.rule_of_statistics
        if rule == "source" or not trusted:
            return None
        if rule == "batch":
            return 1.0
        count = valid.sum()
        return count / (count + (self.prior if prior is None else prior))

    @property
    def prior(self) -> int:
        """How many samples the source's statistics count for in "mixed"."""
        return DENSE_PRIOR if self.fixed.get("dense") else PRIOR


def kept(
    ok: Tensor, valid: Tensor, weights: Tensor, before: Tensor, moments: Moments, moments_before: Moments
) -> tuple[Tensor, Tensor, Moments]:
    """Whether an update is kept (0-d bool), and the weights and moments that follow."""
    keep = ok & valid.any()  # what was learned without a valid sample was learned from nothing
    return keep, torch.where(keep, weights, before), chosen(keep, moments, moments_before)


def cleaned(
    answers: Tensor, usable: Tensor, loss: Tensor | None, used: Tensor | None, ok: Tensor, whole: bool = False
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Logits, losses and the used rows as they are returned: without an answer, the least certain by every score.

    `whole`: all rows have an answer, so that the logits need no copy.
    """
    logits = answers if whole else torch.where(usable[:, None], answers, UNKNOWN)
    if loss is not None:
        most = math.log(logits.shape[1] + 1)  # no entropy is larger
        loss = torch.where(usable & loss.isfinite(), loss, most)
    return logits, loss, None if used is None else used & usable & ok
