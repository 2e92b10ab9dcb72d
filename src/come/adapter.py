"""`come.adapt`, and the `Adapter` that it returns: the public entry point, with locking, roll-back and lifecycle.

A step never changes a `StreamState`: it computes a new one, which replaces the old one when everything has succeeded. So an
error or an interrupt anywhere leaves the adapter as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from come import export as exporting
from come import methods
from come.abstain import DEFAULT_SCORE, Abstention, Promise, Wanted, abstains, confidences
from come.errors import ConfigError, require
from come.guard.config import Event, Guard
from come.method import Frozen, Method, Step, Written, undo
from come.model.copies import Precision
from come.model.inputs import Input, Inputs
from come.model.interface import LikeModel
from come.model.locks import exclusive, untracked
from come.model.ranks import Ranks
from come.objectives import Objective
from come.state import saving
from come.step.engine import Engine, own_rows
from come.step.lifecycle import Lifecycle

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Callback = Callable[["Adapter", Step], None]
"""Called with the adapter and what a step returned, after each step."""


class Adapter(Lifecycle, LikeModel):
    """A classifier that adapts while it predicts. `come.adapt` makes one; it is called in place of the model.

    The model is not changed: adapted weights live in the adapter, in float32 or better, and replace the model's own only while
    a step runs. Dropout and drop-path are off. Threads take turns. A step that fails or is interrupted has not happened.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.callbacks: list[Callback] = []
        """Called after each step, e.g. `come.callbacks.Snapshots`. What they raise is logged and counted, and stops nothing."""
        self._to_undo: list[Written] = []
        with untracked():
            self._state = engine.first()
            if engine.ranks is not None:
                saving.agree(engine, engine.ranks)
                engine.model.ranks = engine.ranks

    @property
    def model(self) -> nn.Module:
        """The classifier, as it was handed in."""
        return self._engine.user_model

    @property
    def method(self) -> Method:
        """The method and its hyperparameters."""
        return self._engine.method

    @property
    def guard(self) -> Guard | None:
        """The guard's configuration, or None."""
        return self._engine.guard

    # ---- calling it ----

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """Adapt to a batch and return its logits (B, K) or (B, K, ...); the arguments are those of the model."""
        return self.step(*args, **kwargs).logits

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """The same: of a `torch.nn.Module` people call this, too."""
        return self(*args, **kwargs)

    @exclusive
    def step(self, *args: Any, **kwargs: Any) -> Step:
        """Adapt to a batch and return logits and, of each sample, its loss, whether it was used, valid, and is answered.

        The arguments are those of the model, and `ignore`, a bool tensor of the answer's shape without its classes, (B, ...):
        where it is true (a border, padding, no data) the answer drives nothing, no update, no guard and no threshold.
        A model whose forward has an argument of that name gets it instead.
        """
        x, rows = self._batch(args, kwargs)
        with self._engine.together():
            before, written = self._state, list[Written]()
            try:
                self._check_open()
                self._follow()
                self._state, out, events = self._engine.step(self._state, x, written)
                if events:
                    self._count(self._engine.report(events))
                if rows is not None:
                    out = own_rows(out, rows)
                if self.callbacks:
                    self._count(self._call_back(out))
                return out
            except BaseException:
                self._to_undo = written  # for `_follow`, should an interrupt stop it here
                self._state = before
                undo(written)
                raise

    @exclusive
    def check(self, *args: Any, **kwargs: Any) -> None:
        """Raise an `InputError` if the method cannot use this batch. The model is not called, and nothing changes."""
        x, _ = self._batch(args, kwargs)
        with self._engine.together():
            self._check_open()
            self.method.check(self._engine.context(self._state, x.size), x.for_model(), True)

    def predict(self, *args: Any, **kwargs: Any) -> Tensor:
        """Logits (B, K) of a batch without adapting to it: nothing changes.

        The guard judges samples as in a step: an invalid one does not touch the others, and its own logits are all -1e4.
        """
        return self.answer(*args, **kwargs).logits

    @exclusive
    @untracked()
    def answer(self, *args: Any, **kwargs: Any) -> Step:
        """What `step` returns, without adapting: logits, and of each sample whether it is valid, and whether to abstain."""
        x, rows = self._batch(args, kwargs)
        with self._engine.together():
            self._check_open()
            self._follow()
            out = self._engine.answer(self._state, x)
            return out if rows is None else own_rows(out, rows)

    def confidence(self, logits: Tensor, valid: Tensor | None = None) -> Tensor:
        """How sure each answer is, (B, K, ...) -> (B, ...), by the score of the threshold; see `come.abstain.confidences`.

        Before `calibrate` it is the objective's confidence: the largest probability of a class.
        """
        promise = self.promise
        score = DEFAULT_SCORE if promise is None else promise.score
        return confidences(score, self._engine.objective, self._engine.classes_last(logits), valid)

    # ---- abstaining ----

    @exclusive
    @untracked()
    def calibrate(
        self,
        data: Iterable[Any],
        *,
        risk: float | None = None,
        coverage: float | None = None,
        delta: float = 0.1,
        score: str = DEFAULT_SCORE,
        follow: bool = False,
        ignore_index: int | None = None,
    ) -> Promise:
        r"""Choose when not to answer, with a promise for samples like these; then `Step.abstain` and `abstains` say so.

        The source model predicts the samples, without adapting, on the BatchNorm statistics that `predict` uses; give batches
        of the size to come. Both promises are for samples that are drawn as these were, and for the source model: see
        docs/abstain.md for what is left of them under a shift and after adaptation.

        Args:
            data: batches of source data that the model was not trained on: (x, y) for a risk, with y = -1 for an outlier;
                x or (x, y) for a coverage. x is what the adapter is called with, or a tuple or mapping of the model's
                arguments. On several ranks the same on each. Where the answer has positions (pixels), y has a label for
                each, (B, ...), and images are what is drawn: both promises are of the share of the positions of an image, see
                `come.abstain_by_image`.
            risk: with probability 1 - delta over these samples, at most this share of the answered samples is wrong.
            coverage: at least this share of samples is answered, on average. No labels are needed.
            delta: the probability with which these samples may mislead about the risk. Where no threshold has it, all but
                this share of calibrations raise an error, and the promises of the others are wrong.
            score: what the threshold is on, a name in `come.metrics.SCORES`. The promise holds with each; a score that ranks
                better answers more. The default is low for two reasons to abstain, a sample between classes and one that is
                like none.
            ignore_index: a label that says nothing: such positions are neither right nor wrong.
            follow: keep the coverage up along any stream by moving the threshold, see `come.abstain.Abstention`. Not for a
                risk, which cannot be seen without labels.

        Returns:
            the promise, with the threshold; `print` says it in words.

        Raises:
            ConfigError: arguments out of range, or a risk that is to be followed.
            InputError: no or too few samples, wrong labels, or a risk that no threshold has.

        Example:
            >>> import torch
            >>> model = nn.Sequential(nn.Linear(4, 16), nn.LayerNorm(16), nn.Linear(16, 3))
            >>> classifier = adapt(model, "tent")
            >>> promise = classifier.calibrate([torch.randn(8, 4) for _ in range(5)], coverage=0.9)
            >>> step = classifier.step(torch.randn(8, 4))
            >>> step.abstain.shape, torch.equal(classifier.abstains(step.logits), step.abstain)
            (torch.Size([8]), True)
        """
        wanted = Wanted(risk, coverage, delta, score, follow, ignore_index)
        with self._engine.together():
            self._check_open()
            self._follow()
            promise = self._engine.calibrated(data, wanted)
            self._engine.promise = promise
            self._state = self._state._replace(abstention=Abstention.begin(promise, self._engine.device))
            return promise

    @property
    def promise(self) -> Promise | None:
        """What `calibrate` promised, or the state that was loaded; None before."""
        return None if self._state.abstention is None else self._state.abstention.promise

    def abstains(self, logits: Tensor) -> Tensor:
        """Which of the answers not to rely on, (B, K, ...) -> (B, ...) bool, by the threshold that is in force now."""
        known = self._state.abstention
        if known is None:
            raise ConfigError("no threshold was chosen; calibrate() first")
        return abstains(known.promise, self._engine.objective, self._engine.classes_last(logits), known.threshold)

    # ---- around a step ----

    def _batch(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Inputs, slice | None]:
        """The batch, checked, and which rows of it are this rank's."""
        if self._engine.ranks is None:
            return self._engine.model.read(args, kwargs), None
        with untracked(), self._engine.together():
            self._follow()
            return self._engine.batch(args, kwargs, self._state, self._check_open)

    def _follow(self) -> None:
        """Bring everything to where the user has moved the model; first undo what an interrupted step has written."""
        if self._to_undo:
            undo(self._to_undo)
        self._engine.follow()
        self._state = self._engine.brought(self._state)

    def _call_back(self, out: Step) -> list[Event]:
        failed, step = [], 0 if self._state.watch is None else self._state.watch.steps
        for callback in tuple(self.callbacks):
            name = getattr(callback, "__name__", type(callback).__name__)
            failed += self._engine.safely(f"callback {name}", step, callback, self, out)
        return failed

    def _count(self, events: list[Event]) -> None:
        if events and self._state.watch is not None:
            self._state = self._state._replace(watch=self._state.watch.counted(events))

    # ---- what can be seen ----

    @property
    def count(self) -> int:
        """Batches since construction or reset."""
        return self._state.count

    @property
    def state(self) -> dict[str, Tensor]:
        """What the method remembers, by name: copies; empty before the first batch."""
        return {name: value.clone() for name, value in (self._state.state or {}).items()}

    @property
    def adapted_parameters(self) -> dict[str, Tensor]:
        """The adapted parameters now, by name: copies, in float32 or better."""
        return {name: value.clone() for name, value in self._engine.model.named(self._state.weights).items()}

    @property
    def source_parameters(self) -> dict[str, Tensor]:
        """The same parameters of the source model: copies."""
        return {name: value.clone() for name, value in self._engine.model.named(self._engine.transition.source).items()}

    @property
    def writes(self) -> bool:
        """Whether `save` writes here: on several ranks only on the first, until one of them is lost."""
        return self._engine.writes

    def health(self) -> dict[str, float]:
        """Counters and gauges of the guard as flat numbers; without a guard, the steps only. Looking changes nothing."""
        return self._state.health()

    def learning_rate(self, batch: int) -> float:
        """The learning rate for a batch of that size, before the guard's factor."""
        return self.method.learning_rate(batch, self._engine.model.has_batch_norm)

    # ---- its life ----

    @exclusive
    def reset(self) -> None:
        """Back to the state after construction: weights, moments, memory, and what the guard has learned.

        What `calibrate` promised stays; a threshold that follows the stream is where it was at the beginning.
        """
        with untracked():
            self._check_open()
            self._follow()
            self._state = self._engine.reset(self._state)

    @exclusive
    def close(self, *, keep: bool = False) -> None:
        """End the adaptation. The model is as it was handed in; may be called again.

        Args:
            keep: write the adapted weights into the model.
        """
        model = self._engine.model
        model.give_back()
        if self._closed:
            return
        if keep:
            model.check_unchanged()
            with untracked():
                model.overwrite(self._state.weights)
        self._end()

    @exclusive
    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles."""
        return vars(self) | {"_state": self._state.settled()}

    # ---- state ----

    @exclusive
    def state_dict(self) -> dict[str, Tensor]:
        """All that the next step depends on, as a flat dictionary of copied tensors."""
        with untracked():
            return saving.collect(self._engine, self._state)

    @exclusive
    def load_state_dict(self, saved: Mapping[str, Tensor]) -> None:
        """Continue from `state_dict()` of an adapter of the same configuration on the same source model, bit for bit."""
        with untracked():
            self._check_open()
            self._follow()
            self._state = saving.restored(self._engine, saved)

    def save(self, path: str | PathLike[str]) -> None:
        """Write the state to a safetensors file, whole or not at all; on several ranks the first one writes it.

        hf://OWNER/REPOSITORY[@REVISION]/FILE is a file of a repository on the Hugging Face Hub, which must be there.
        """
        if self.writes:
            saving.save(self._engine, lambda: self._state, path)

    def load(self, path: str | PathLike[str]) -> None:
        """Continue from a file that `save` wrote, here or on the Hub; a file that does not fit changes nothing."""
        self.load_state_dict(saving.read(path, self.method.name))

    @untracked()
    def export(self, path: str | PathLike[str] | None = None, example: Input | None = None) -> nn.Module:
        """The adapted model by itself: a copy of the model that computes what `predict` does, and adapts no more.

        It is in evaluation mode and needs no gradients. It holds the current weights: a teacher's where that answers (CoTTA,
        RoTTA), T3A's prototypes as its head, the source's where the guard lets the source answer. BatchNorm normalizes as
        in `predict`: "source" and RoTTA leave the layer as it is; "mixed" and "batch" put a `come.export.OnBatch` around it, so
        that an answer depends on the other samples of its batch. `precision`, `compile`, `channels_last` are not in it, nor is
        the guard: an invalid sample, which `predict` masks, is answered, and spoils the statistics of its batch.

        Args:
            path: write it to a file, too: NAME.pt2 for `torch.export.load`, NAME.onnx for ONNX Runtime and others (needs the
                extra `export` and torch 2.6). Its output is the logits (B, K), for any B >= 1.
            example: for a file: 2 or more samples, as a tensor, or a tuple or mapping of the model's arguments.

        Returns:
            the copy, which returns what the model returns.

        Raises:
            ModelError: the method does not answer by weights alone, or torch cannot trace the model.
            ConfigError: a file of another kind, or no example.

        Example:
            >>> import torch
            >>> model = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.Linear(16, 3))
            >>> classifier, x = adapt(model, "tent", statistics="batch"), torch.randn(8, 4)
            >>> _ = classifier(x)
            >>> alone = classifier.export()
            >>> torch.allclose(alone(x), classifier.predict(x), atol=1e-5), type(alone[1]).__name__
            (True, 'OnBatch')
        """
        file, given = (
            None if path is None else Path(path),
            None if example is None else self._engine.model.read((example,)),
        )
        if file is not None:
            exporting.check(file, given)
        require(file is not None or given is None, "path", path, "a file, where there is an example")
        model = self._standalone()
        if file is not None and given is not None:
            exporting.write(model, file, given)
        return model

    @exclusive
    def _standalone(self) -> nn.Module:
        """See `export`."""
        self._check_open()
        self._follow()
        engine, state = self._engine, self._state
        engine.model.check_unchanged()
        resting = state.watch is not None and engine.resting(state.watch)
        frozen = Frozen(engine.transition.source) if resting else self.method.frozen(engine.context(state, 1))
        own = engine.flags(state).trusted and not resting
        rule = engine.transition.rule_of_statistics if own else "source"
        return exporting.standalone(engine.model, frozen, rule, engine.transition.prior)

    def __repr__(self) -> str:
        """Method, objective, what adapts and at which learning rate."""
        return repr(self._engine)


def adapt(
    model: nn.Module,
    method: str | type[Method] | Method = methods.DEFAULT,
    *,
    objective: str | Objective | None = None,
    guard: bool | Guard = True,
    precision: Precision = "float32",
    compile: bool = False,
    channels_last: bool = False,
    ranks: bool | ProcessGroup = False,
    per_sample: Collection[str | int] | None = None,
    class_dim: int = 1,
    **hyperparameters: Any,
) -> Adapter:
    r"""Put test-time adaptation around a classifier.

    The result is called in place of the model and returns logits; each call also adapts to its batch:

    .. math:: \theta \leftarrow \theta - \eta \, \partial_\theta \, \frac{1}{|R|} \sum_{i \in R} H(m(f_\theta(x_i)))

    with the samples R and the step that the method chooses, and the mass m that the objective gives.

    Args:
        model: any classifier that maps a batch (B, ...) to logits (B, K), with positions such as pixels to (B, K, ...), or to
            an object or mapping with `logits` or `out`. It is not changed.
        method: a name (`come.methods.names()`), also with hyperparameters as in "tent:lr=5e-4", a subclass of `come.Method`,
            or a method that was made, such as `come.methods.Tent(lr=5e-4, objective="em")`.
        objective: a name (`come.objectives.names()`) or a `come.Objective`; None is the one that the method was made for:
            "come", and "invariant" for Steady. A `Method` instance has its own.
        guard: filter invalid inputs, reject bad updates, detect and undo collapse; False for the bare method, a `come.Guard`
            for a policy of your own.
        precision: "float32" (as the model and torch are set), "tf32", or "bf16"; the objective and the adapted weights are in
            float32 always.
        compile: the model by `torch.compile`, and on a GPU the whole step as one CUDA graph: for the first shape of batch, and
            for others that come again within 16 batches. The first steps then take seconds to a minute. What cannot be compiled
            or captured says so once, and runs as it can.
        channels_last: on a GPU, images and convolutions with the channels innermost: faster for convolutions in bf16.
        ranks: True: the processes that torchrun has started, or those of a given process group, adapt to one stream. Each calls
            the adapter with samples of its own at the same time, and together they adapt as one process does that is called
            with all of these, in the order of the ranks. False: each process for itself.
        class_dim: where logits with positions have their classes: 1 for (B, K, H, W), -1 for (B, T, K), as token classifiers
            of transformers have them. Without positions there is no choice.
        per_sample: for a model that is called with several tensors: names or positions of the arguments with one entry per
            sample, e.g. ("tokens", "mask"); all samples share the others. What a tokenizer of transformers returns is known.
        **hyperparameters: what the method takes, e.g. lr=1e-3. Without lr the method's default is used, and the repr of the
            result says which.

    Returns:
        the adapter.

    Raises:
        ConfigError: an unknown method, objective or hyperparameter, or one out of range.
        ModelError: a model with nothing to adapt.

    Example:
        >>> import torch
        >>> model = nn.Sequential(nn.Linear(4, 16), nn.LayerNorm(16), nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 3))
        >>> classifier = adapt(model, "sar", objective="come", lr=1e-3)
        >>> classifier(torch.randn(8, 4)).shape
        torch.Size([8, 3])
    """
    engine = Engine(
        model,
        method,
        objective=objective,
        guard=guard,
        precision=precision,
        compile=compile,
        channels_last=channels_last,
        ranks=Ranks.of(ranks),
        per_sample=per_sample,
        class_dim=class_dim,
        **hyperparameters,
    )
    return Adapter(engine)
