"""One step as a function: what there was before, a batch, and what the host has decided give what there is after.

Nothing outside is read or changed but the entries of a method's memory that it overwrites itself (`Context.put`). So a step
can be compiled, captured as a CUDA graph, repeated, or dropped.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from come.guard.config import Guard
from come.guard.samples import judge
from come.guard.signals import observe
from come.guard.verdict import Verdict, collapsed, compare, judged, surer
from come.method import Context, Method, Step, Written, chosen
from come.model.batchnorm import StatisticsRule, mixed
from come.model.functional import FunctionalModel
from come.model.inputs import UNKNOWN, Inputs, answered
from come.optim import Moments, Rule
from come.seeds import derived_seed

PRIOR = 16
"""As many samples the source's BatchNorm statistics count for in `statistics="mixed"` (Schneider et al., 2020)."""


class StepFlags(NamedTuple):
    """What the host has decided before a step."""

    asking: bool = False
    """Whether the source model is asked about the adapted one."""
    resting: bool = False
    """Whether the source model answers."""
    frozen: bool = False
    """Whether it answers for good."""
    trusted: bool = True
    """Whether statistics of the batch are in use."""
    new: bool = False
    """Whether this is the first batch in the life of the adapter."""
    few: bool = False
    """Whether few samples drove the last update, see `Context.again`."""


class StepInput(NamedTuple):
    """What a step begins with."""

    weights: Tensor
    moments: Moments
    state: dict[str, Tensor] | None
    lr: Tensor
    """0-d."""
    history: Tensor | None = None
    """Of the guard, see `come.guard.samples`."""
    sums: Tensor | None = None
    """What the question in hand has found so far."""
    needed: Tensor | None = None
    """0-d: after how many samples it may be acted on."""
    own: dict[str, Tensor] | None = None
    """0-d: hyperparameters of this stream, of those in `Method.by_stream`."""


class StepOutput(NamedTuple):
    """What a step ends with."""

    weights: Tensor
    moments: Moments
    state: dict[str, Tensor]
    out: Step
    history: Tensor | None = None
    sums: Tensor | None = None
    values: Tensor | None = None
    """Signals, see `come.guard.watch.Sent`."""
    selected: float | None = None
    """The share of the samples that drove the update, if the method tells."""


class Transition:
    """A method on a model under a guard: all that stays the same from step to step.

    Args:
        method: what adapts.
        guard: or None.
        model: what it adapts.
        rule: the optimizer, or None if nothing descends.
    """

    def __init__(self, method: Method, guard: Guard | None, model: FunctionalModel, rule: Rule | None) -> None:
        self.method, self.guard, self.model, self.rule = method, guard, model, rule
        self.source = model.source()
        """(P,): the adapted parameters of the source model."""
        self.fixed: dict[str, Any] = {}
        """What `Method.setup` has found."""
        self.generator = torch.Generator(model.device)
        self.written: list[Written] = []
        """What the step under way has overwritten in place."""

    def __call__(self, how: StepFlags, before: StepInput, x: Inputs, count: int | None) -> StepOutput:
        """The step; `count` is None where it must not matter."""
        ctx, x, history = self._judged(how, before, x, count)
        if count is not None:
            self.method.check(ctx, x, before.state is None and not count)  # not again after a recovery: it waits
        before = self._remembering(before, ctx, x)
        if self.guard is None:
            out, sums, values = self._adapted(ctx, x), None, None
            weights, moments, state = ctx.weights.detach(), ctx.moments, ctx.state
        else:
            out, sums, values = self._guarded(self.guard, how, before, ctx, x)
            keep, weights, moments = self.model.fused(kept)(
                ctx.ok, ctx.valid, ctx.weights.detach(), before.weights, ctx.moments, before.moments
            )
            ctx.keep_where(keep)
            state = chosen(keep, ctx.state, before.state or {})
        detached = Step(*(None if value is None else value.detach() for value in out))  # type: ignore[arg-type]
        return StepOutput(weights, moments, state, detached, history, sums, values, ctx.selected)

    @torch.no_grad()
    def answered(self, how: StepFlags, before: StepInput, x: Inputs, count: int | None) -> Step:
        """Logits and which samples could be answered, without adapting; `count` is None where it must not matter."""
        ctx, x, _ = self._judged(how, before, x, count)
        self._remembering(before, ctx, x)
        logits = ctx.forward(x, self.source, statistics=None) if how.resting else self.method.predict(ctx, x)
        if self.guard is None:
            return Step(logits)
        valid = ctx.valid & answered(logits)
        return Step(cleaned(logits, valid, None, None, ctx.ok)[0], valid=valid)

    def _judged(
        self, how: StepFlags, before: StepInput, x: Inputs, count: int | None
    ) -> tuple[Context, Inputs, Tensor | None]:
        """What every call of a method begins with: the context, the batch without invalid samples, and the new history."""
        history = before.history
        if self.guard is not None and history is not None:
            x, valid, history = self.model.fused(judge)(x, history, self.guard.largest_input)
            valid = valid.to(self.model.device)
        else:
            valid = torch.ones(x.size, dtype=torch.bool, device=self.model.device)
        return self.context(how, before, valid, count), x, history

    def _remembering(self, before: StepInput, ctx: Context, x: Inputs) -> StepInput:
        """With a memory, also in the context; the first batch makes one."""
        if before.state is None:
            before = before._replace(state=self.method.initial_state(ctx, x))
            ctx.state = dict(before.state or {})
        return before

    def context(self, how: StepFlags, before: StepInput, valid: Tensor, count: int | None) -> Context:
        """What the method works with."""
        return Context(
            self.model,
            self.rule,
            self.source,
            self.fixed,
            weights=before.weights,
            moments=before.moments,
            state=before.state or {},
            lr=before.lr,
            valid=valid,
            count=count,
            generator=self.generator,
            share=self._share(valid, how.trusted),
            guarded=self.guard is not None,
            few=how.few,
            written=self.written,
        )

    def seed(self, count: int) -> None:
        """Begin the random numbers of batch number `count`."""
        self.generator.manual_seed(self.seed_of(count, self.method))

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
        self, guard: Guard, how: StepFlags, before: StepInput, ctx: Context, x: Inputs
    ) -> tuple[Step, Tensor | None, Tensor]:
        """A step with its signals; where the source is asked and finds a collapse, it answers."""
        source: Tensor | None = None
        if how.resting or how.asking:
            with torch.no_grad(), self.model.as_it_is():
                source = ctx.forward(x, self.source, statistics=None)
        if how.resting and (how.frozen or not how.asking):
            assert source is not None
            out = Step(source, used=torch.zeros_like(ctx.valid))
        else:
            out = self._adapted(ctx, x)
        answers = out.logits.detach()
        with torch.no_grad():
            objective, weights, closely = self.method.objective, ctx.weights.detach(), how.new or how.asking
            usable, ctx.ok, seen = self.model.fused(observe)(
                objective, answers, ctx.valid, ctx.ok, weights, self.source, closely
            )
            values, sums = [seen], before.sums
            if how.asking and source is not None:
                sums, answers = self._ask(guard, how, before, ctx, x, answers, source)
                values.append(judged(sums))
                usable = ctx.valid & answered(answers)
            logits, loss, used = self.model.fused(cleaned)(answers, usable, out.loss, out.used, ctx.ok)
            return Step(logits, loss, used, usable), sums, torch.cat(values) if len(values) > 1 else seen

    def _ask(
        self, guard: Guard, how: StepFlags, before: StepInput, ctx: Context, x: Inputs, answers: Tensor, source: Tensor
    ) -> tuple[Tensor, Tensor]:
        """What the question has found so far, and the logits to return: of whichever is to be trusted."""
        same, batch = source, None
        share = self._share(ctx.valid, trusted=True)
        if share is not None:
            with self.model.as_it_is():
                batch = ctx.forward(x, self.source, statistics=mixed(share))
            same = batch if how.trusted else source
        found = compare(answers, same, ctx.valid, batch, source, corrected=self.method.corrects)
        found = found if before.sums is None else before.sums + found
        if how.resting:
            return found, source
        now = Verdict(*judged(found).unbind())  # type: ignore[arg-type]
        if guard.policy in ("recover", "freeze"):
            assert before.needed is not None
            fallen = torch.as_tensor(collapsed(now)) & (now.samples >= before.needed)
            answers = torch.where(fallen, same.to(answers), answers)
        if self.chooses and batch is not None:
            better, other = torch.as_tensor(surer(now, how.trusted)), source if how.trusted else batch
            answers = torch.where(better == how.trusted, answers, other.to(answers))
        return found, answers

    # ---- statistics of BatchNorm ----

    @property
    def rule_of_statistics(self) -> StatisticsRule:
        """What BatchNorm normalizes by: "batch", "mixed" or "source"."""
        if not (self.method.batch_statistics and self.model.has_batch_norm):
            return "source"
        return self.method.statistics or (self.method.unguarded if self.guard is None else "mixed")

    @property
    def on_batch(self) -> bool:
        """Whether BatchNorm may use statistics of the batch."""
        return self.rule_of_statistics != "source"

    @property
    def chooses(self) -> bool:
        """Whether the guard chooses between mixed statistics and the source's."""
        return self.guard is not None and self.rule_of_statistics == "mixed"

    def _share(self, valid: Tensor, trusted: bool) -> Tensor | float | None:
        """Of the batch's statistics: n/(n + 16) for n valid samples."""
        rule = self.rule_of_statistics
        if rule == "source" or not trusted:
            return None
        if rule == "batch":
            return 1.0
        count = valid.sum()
        return count / (count + PRIOR)


def kept(
    ok: Tensor, valid: Tensor, weights: Tensor, before: Tensor, moments: Moments, moments_before: Moments
) -> tuple[Tensor, Tensor, Moments]:
    """Whether an update is kept (0-d bool), and the weights and moments that follow."""
    keep = ok & valid.any()  # what was learned without a valid sample was learned from nothing
    return keep, torch.where(keep, weights, before), chosen(keep, moments, moments_before)


def cleaned(
    answers: Tensor, usable: Tensor, loss: Tensor | None, used: Tensor | None, ok: Tensor
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Logits, losses and the used samples as they are returned: without an answer, the least certain by every score."""
    logits = torch.where(usable[:, None], answers, UNKNOWN)
    if loss is not None:
        most = math.log(logits.shape[1] + 1)  # no entropy is larger
        loss = torch.where(usable & loss.isfinite(), loss, most)
    return logits, loss, None if used is None else used & usable & ok
