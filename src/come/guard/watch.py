"""What the guard of one adapter has learned, and what follows from new signals.

A `Watch` is never changed: reading signals gives a new one. Signals of a step are read `LAG` steps later, on every device:
by then a GPU has computed them, and runs repeat. Looking (`health`, `state_dict`) reads nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import torch
from torch import Tensor

from come.errors import StateError, saved_number
from come.guard.config import Event, Guard
from come.guard.samples import REMEMBERED, no_history
from come.guard.signals import SIGNALS, Bands
from come.guard.verdict import CLOSE, LIMIT, LOSS, SURE, TRIAL, Verdict, collapsed, narrow, renewed, surer
from come.state.trees import replace

LAG = 2
"""After so many steps the signals of a step are read."""
WINDOW = 64
"""Samples that make a row of signals."""
MOST_APART, CHOOSING_APART = 100, 16
"""Windows between two questions to the source at most; where it is also about statistics."""
APART = 0.5
"""The next question comes after so many times as many windows as have passed since the beginning, at most."""
MOVED = 0.03
"""It comes before the answers have moved so much further, if they go on moving as they have."""
CHANGED, FOLLOWED = 0.1, 0.2
"""By so much the confidence of the answers differs from what is usual before the source is asked about statistics at once; and
the share of each window in what is usual."""
HORIZON = 10_000
"""Windows that a lowered learning rate should last for, if answers move in proportion to it."""

COUNTED = (
    *("invalid_samples", "update_refused", "unanswered", "suspicious", "healthy", "collapse", "recovered", "raised"),
    *("statistics", "frozen", "probabilities", "callback_failed"),
)
"""Kinds of events."""


class Sent(NamedTuple):
    """Signals of a step on their way to the host."""

    step: int
    batch: int
    values: Tensor
    """ok, invalid samples, unanswered samples, probabilities, the six signals, and the verdict if the source was asked."""
    arrived: Any = None
    asked: bool = False
    """Whether these end a question to the source."""
    past: bool = False
    """Whether the adapter was reset since: they are reported, and say nothing about what it is now."""


def send(step: int, batch: int, values: Tensor) -> Sent:
    """Start the way to the host, without waiting."""
    return Sent(step, batch, *to_host(values))


def to_host(values: Tensor) -> tuple[Tensor, Any]:
    """Values on their way to the host, without waiting, and what tells that they are there; None if they are."""
    if values.device.type != "cuda":
        return values, None
    there = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    there.copy_(values, non_blocking=True)
    arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
    arrived.record()
    return there, arrived


@dataclass(frozen=True)
class Watch:
    """See the head of this file."""

    bands: Bands
    history: Tensor
    """(9,): typical magnitudes of the last batches, see `come.guard.samples`."""
    steps: int = 0
    """Steps over the life of the adapter."""
    counters: Mapping[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTED, 0))
    """How often each kind of event happened, over the life of the adapter; a reset does not clear it."""
    pending: tuple[Sent, ...] = ()
    latest: tuple[float, ...] = ()
    """The signals that were read last."""
    row: tuple[float, ...] = (0.0,) * len(SIGNALS)
    row_size: int = 0
    row_valid: float = 0.0
    age: int = 0
    """Samples since the start, the last recovery, or the last change of statistics or of the stream."""
    due: int = 0
    """The age at which the source is asked next."""
    outside: int = 0
    """Windows outside the bands in a row."""
    asking: bool = False
    asked: int = 0
    """Samples of the current question."""
    sums: Tensor | None = None
    """What questions have found so far, see `come.guard.verdict`."""
    level: float = -1.0
    """Usual confidence of the answers; -1: not yet known."""
    agreement: float = 1.0
    """With the source model, when it was last asked."""
    scale: float = 1.0
    """Factor on the learning rate."""
    trusted: bool = True
    """Whether statistics of the batch (or the answers of a method without weights) are in use."""
    frozen: bool = False

    @classmethod
    def new(cls, guard: Guard, device: torch.device, chooses: bool) -> Watch:
        """Before the first batch; `chooses`: between statistics of the batch and the source's, which come first."""
        return cls(Bands(guard.warmup), no_history(device), trusted=not chooses)

    def anew(self, guard: Guard, chooses: bool) -> Watch:
        """After a reset by the user: everything learned anew. Counters stay, and what is under way is still reported."""
        new = Watch.new(guard, self.history.device, chooses)
        return replace(new, steps=self.steps, counters=self.counters, pending=self._past())

    def forgotten(self, guard: Guard) -> Watch:
        """After a reset by the method itself: what is usual is learned anew; what is known of the stream stays."""
        return replace(self, bands=Bands(guard.warmup), outside=0)

    def _past(self) -> tuple[Sent, ...]:
        """What is under way, as of a time before a reset."""
        return tuple(sent._replace(past=True) for sent in self.pending)

    @property
    def decisions(self) -> tuple[Any, ...]:
        """What the host has decided so far."""
        return (self.asking, self.trusted, self.frozen, self.scale, self.age, self.due, self.outside)

    @property
    def waiting(self) -> bool:
        """Whether the answer to a question is on its way."""
        return any(sent.asked and not sent.past for sent in self.pending)

    def counted(self, events: list[Event]) -> Watch:
        """With these events counted."""
        if not events:
            return self
        counters = dict(self.counters)
        for event in events:
            many = event.details.get("samples", 1) if event.kind in _MANY else 1
            counters[event.kind] = counters.get(event.kind, 0) + int(many)
        return replace(self, counters=counters)

    # ---- when the source is asked ----

    def asks(self) -> Watch:
        """As a step begins: with a question to the source, if it is due."""
        if self.asking or self.frozen or self.age < self.due:
            return self
        return replace(self, asking=True, asked=0, sums=None if self.sums is None else renewed(self.sums))

    def stepped(self, guard: Guard, sent: Sent, history: Tensor, sums: Tensor | None, chooses: bool) -> Watch:
        """After a step whose signals are on their way; `sums` are those of the question that it was a part of, if any."""
        watch = replace(self, history=history, steps=self.steps + 1, age=self.age + sent.batch)
        if sums is None:
            return replace(watch, pending=(*self.pending, sent))
        asked = self.asked + sent.batch
        ended = asked >= guard.samples
        watch = replace(watch, pending=(*self.pending, sent._replace(asked=ended)), sums=sums, asked=asked)
        return replace(watch, asking=False, due=watch._next(0.0, chooses)) if ended else watch

    def _next(self, moved: float, chooses: bool) -> int:
        """The age for the next question, if the answers have moved so much until now."""
        age = self.age / WINDOW
        gap = min(APART * age, CHOOSING_APART if chooses else MOST_APART)
        if moved > 0:
            gap = min(gap, age * MOVED / moved)
        return self.age + WINDOW * int(max(1, gap))

    # ---- what signals say ----

    def read(self, guard: Guard, chooses: bool) -> tuple[Watch, list[Event], Event | None]:
        """Take up the signals that are due.

        Args:
            guard: the configuration.
            chooses: whether there is a choice between statistics of the batch and the source's.

        Returns:
            the new watch, what happened, and the event that calls for `recovered`: a collapse, or other statistics.
        """
        watch, events, fallen = self, [], None
        while watch.pending and watch.pending[0].step <= watch.steps - LAG:
            sent, *left = watch.pending
            if sent.arrived is not None:
                sent.arrived.synchronize()
            ok, invalid, unanswered, probabilities, *rest = sent.values.tolist()
            events += _reports(sent, ok, invalid, unanswered, probabilities, self.counters)
            watch = replace(watch, pending=tuple(left))
            if sent.past or fallen is not None:
                continue
            signals, valid = tuple(rest[: len(SIGNALS)]), sent.batch - invalid - unanswered
            watch, seen = watch._judged(guard, sent, signals, valid, chooses)
            events += seen
            if unanswered and not (watch.asking or watch.waiting or watch.frozen):
                watch = replace(watch, due=watch.age)
            if sent.asked:
                watch, seen, fallen = watch._answered(guard, sent, Verdict(*rest[len(SIGNALS) :]), chooses)
                events += seen
        return watch.counted(events), events, fallen

    def _judged(
        self, guard: Guard, sent: Sent, signals: tuple[float, ...], valid: float, chooses: bool
    ) -> tuple[Watch, list[Event]]:
        """Gather signals until they make a window, and compare it with what is usual."""
        if not (valid > 0 and math.isfinite(sum(signals))):
            return replace(self, latest=signals), []
        row = tuple([a + valid * b for a, b in zip(self.row, signals, strict=True)])
        size, total = self.row_size + sent.batch, self.row_valid + valid
        if size < WINDOW:
            return replace(self, latest=signals, row=row, row_size=size, row_valid=total), []
        row = tuple(value / total for value in row)
        watch = replace(self, latest=signals, row=(0.0,) * len(SIGNALS), row_size=0, row_valid=0.0)
        if watch.asking or watch.waiting or watch.frozen:
            return watch, []
        confidence = row[SIGNALS.index("confidence")]
        if chooses and watch.level >= 0 and abs(confidence - watch.level) > CHANGED:
            watch = replace(watch, age=0, due=0, sums=None, level=-1.0)  # the evidence so far is of another stream
        else:
            level = confidence if watch.level < 0 else watch.level + FOLLOWED * (confidence - watch.level)
            watch = replace(watch, level=level)
        outside = watch.bands.outside(row) if watch.bands.ready else {}
        watch = replace(watch, bands=watch.bands.learned(row), outside=watch.outside + 1 if outside else 0)
        if watch.outside != guard.patience:
            return watch, []
        found = dict(zip(SIGNALS, row, strict=True))
        words = ", ".join(f"{_NAMES[name]} {found[name]:.3g} (limit {limit:.3g})" for name, limit in outside.items())
        message = f"unusual for {guard.patience} windows: {words}; the source model is asked"
        event = Event("suspicious", sent.step, message, {name: found[name] for name in outside})
        return replace(watch, due=watch.age), [event]

    def _answered(
        self, guard: Guard, sent: Sent, found: Verdict, chooses: bool
    ) -> tuple[Watch, list[Event], Event | None]:
        """A question has been answered."""
        suspicious, watch = self.outside > 0, replace(self, outside=0)
        if not found.samples:
            message = (
                "neither the adapted nor the source model has a finite answer: the weights of the model are damaged"
            )
            return watch, [Event("unanswered", sent.step, message, {"samples": 0.0})], None
        watch = replace(watch, agreement=found.agreement)
        details: dict[str, float | str] = dict(found._asdict())
        checked = f"{found.samples:.0f} samples checked"
        if chooses and bool(surer(found, watch.trusted)) != watch.trusted:
            before = found.confidence - (found.gain if watch.trusted else 0)
            words = "the source's statistics" if watch.trusted else "statistics of the batch"
            message = (
                f"BatchNorm on {words}, source weights restored: their confidence is {before + found.gain:.2f} with "
                f"statistics of the batch, {before:.2f} with the source's, {checked}"
            )
            event = Event("statistics", sent.step, message, details)
            return watch, [event], event
        if not (watch.trusted or chooses):
            return watch._tried(sent, found)
        if bool(collapsed(found)):
            event = Event("collapse", sent.step, f"collapse: {_why(found)}, {checked}", details)
            return replace(watch, bands=Bands(guard.warmup)) if guard.policy == "warn" else watch, [event], event
        if suspicious:
            watch = replace(watch, bands=Bands(guard.warmup))  # it is the data that changed: learn anew what is usual
        watch = replace(watch, due=min(watch.due, watch._next(1 - found.agreement, chooses)))
        message = f"healthy: agreement with the source model {found.agreement:.2f}, {checked}"
        return watch, [Event("healthy", sent.step, message, details)], None

    def _tried(self, sent: Sent, found: Verdict) -> tuple[Watch, list[Event], Event | None]:
        """A method without weights was tried while the source answers."""
        if found.agreement < TRIAL:
            return self, [], None
        message = f"tried on {found.samples:.0f} samples: agreement {found.agreement:.2f}; the method answers again"
        event = Event("raised", sent.step, message, {"agreement": found.agreement})
        return replace(self, trusted=True), [event], None

    # ---- what is done ----

    def recovered(self, guard: Guard, cause: Event, weightless: bool = False) -> tuple[Watch, list[Event]]:
        """After a collapse, or with other statistics: the new watch, and what is to be said."""
        base = replace(self, age=0, due=0, outside=0, asking=False, asked=0, level=-1.0, pending=self._past())
        if cause.kind == "statistics":
            return replace(base, trusted=not self.trusted), []
        if guard.policy == "freeze":
            event = Event("frozen", cause.step, "the source model answers from now on; reset() ends it", {})
            return replace(base, frozen=True), [event]
        if weightless:
            message = "the source model answers until a trial finds the method well"
            return replace(base, trusted=False), [Event("recovered", cause.step, message, {})]
        scale = self.scale * min(guard.backoff, max(1, self.age / WINDOW) / HORIZON)
        message = f"source weights restored, learning rate x {scale:g} until reset()"
        return replace(base, scale=scale), [Event("recovered", cause.step, message, {"lr_scale": scale})]

    # ---- what it says ----

    def health(self) -> dict[str, float]:
        """Counters and gauges as flat numbers, as an exporter for Prometheus wants them."""
        return {
            "steps": float(self.steps),
            **{kind: float(self.counters.get(kind, 0)) for kind in COUNTED},
            "lr_scale": self.scale,
            "batch_statistics": float(self.trusted),
            "agreement": self.agreement,
            **dict(zip(SIGNALS, self.latest, strict=False)),
        } | {"frozen": float(self.frozen)}

    # ---- as tensors ----

    def tensors(self) -> dict[str, Tensor]:
        """All of it as a flat dictionary of tensors; waits for the device."""
        kept = {name: torch.tensor(float(getattr(self, name)), dtype=torch.float64) for name in _NUMBERS}
        kept["counters"] = torch.tensor([float(self.counters.get(kind, 0)) for kind in COUNTED], dtype=torch.float64)
        kept["rows"] = torch.tensor(self.bands.rows, dtype=torch.float64).reshape(-1, len(SIGNALS))
        kept["seen"] = torch.tensor(self.bands.seen)
        kept["row"] = torch.tensor(self.row, dtype=torch.float64)
        kept["latest"] = torch.tensor(self.latest, dtype=torch.float64)
        kept["history"] = self.history
        if self.sums is not None:
            kept["sums"] = self.sums
        for i, sent in enumerate(self.settled().pending):
            head = torch.tensor([sent.step, sent.batch, sent.asked, sent.past], dtype=torch.float64)
            kept[f"pending.{i}"] = torch.cat([head, sent.values])
        return kept

    @classmethod
    def of(cls, saved: Mapping[str, Tensor], guard: Guard, weights: Tensor) -> Watch:
        """From `tensors()`; raises `StateError` if something is missing or does not fit."""
        needed = {*_NUMBERS, "counters", "rows", "seen", "row", "latest", "history"}
        known = needed | {"sums"}
        if missing := (needed - set(saved)) | {
            name for name in saved.keys() - known if not name.startswith("pending.")
        }:
            raise StateError(f"the guard's part of the state is damaged at {', '.join(sorted(missing))}")
        rows, history, width = saved["rows"], saved["history"], len(SIGNALS)
        known_history = history[~history.isnan()]  # NaN: no batch yet
        sound = {
            "counters": saved["counters"].shape == (len(COUNTED),) and _in_range(saved["counters"], 0),
            "rows": rows.ndim == 2 and rows.shape[1] == width and len(rows) <= guard.warmup and _in_range(rows),
            "row": saved["row"].shape == (width,) and _in_range(saved["row"]),
            "latest": saved["latest"].shape in ((0,), (width,)),
            "history": history.shape == (REMEMBERED,) and _in_range(known_history, 0),
            "sums": "sums" not in saved or (saved["sums"].ndim == 1 and _in_range(saved["sums"])),
        }
        if bad := [name for name, good in sound.items() if not good]:
            raise StateError(
                f"guard.{bad[0]} of the state has a wrong shape or values out of range; use an older snapshot"
            )
        numbers = {}
        for spec in fields(cls):
            if spec.name in _NUMBERS:
                kind = {"bool": bool, "int": int}.get(str(spec.type), float)
                value = saved_number(
                    f"guard.{spec.name}", saved[spec.name], *_NUMBERS[spec.name], whole=kind is not float
                )
                numbers[spec.name] = kind(value)
        seen = int(saved_number("guard.seen", saved["seen"], len(rows), MOST, whole=True))
        pending = [
            _sent(f"pending.{i}", saved.get(f"pending.{i}"), numbers["steps"]) for i in range(len(saved.keys() - known))
        ]
        return cls(
            bands=Bands(guard.warmup, tuple(tuple(row) for row in rows.tolist()), seen),
            history=history.to(weights.device).clone(),
            counters=dict(zip(COUNTED, map(int, saved["counters"].tolist()), strict=True)),
            pending=tuple(pending),
            latest=tuple(saved["latest"].tolist()),
            row=tuple(saved["row"].tolist()),
            sums=saved["sums"].to(weights.device).clone() if "sums" in saved else None,
            **numbers,
        )

    def settled(self) -> Watch:
        """With the signals that are under way on the host; waits for the device."""
        for sent in self.pending:
            if sent.arrived is not None:
                sent.arrived.synchronize()
        return replace(self, pending=tuple(sent._replace(arrived=None) for sent in self.pending))

    def to(self, device: torch.device) -> Watch:
        """With all tensors on that device."""
        sums = None if self.sums is None else self.sums.to(device)
        return replace(self, history=self.history.to(device), sums=sums)


_MANY = {"invalid_samples", "unanswered"}
"""Events that count samples."""
MOST = 2.0**53
"""More than anything is counted to, and a float64 up to here is exact."""
_NUMBERS = {
    **dict.fromkeys(("steps", "age", "due", "outside", "asked"), (0, MOST)),
    **dict.fromkeys(("asking", "trusted", "frozen", "scale"), (0, 1)),
    **{"row_size": (0, WINDOW - 1), "row_valid": (0, WINDOW), "agreement": (0, 1 + 1e-6), "level": (-1, 1 + 1e-6)},
}
"""Where they may lie."""
_NAMES = {
    "share": "share of the most predicted class",
    "entropy": "entropy",
    "uncertainty": "uncertainty",
    "norm": "norm of the logits",
    "distance": "distance from the source weights",
}


def _why(found: Verdict) -> str:
    """Which limit was crossed, for an operator."""
    if found.agreement < LIMIT:
        return f"agreement with the source model {found.agreement:.2f} (limit {LIMIT:.2f})"
    if narrow(found):
        return (
            f"agreement with the source model {found.agreement:.2f} (limit {CLOSE:.2f} where fewer classes are named), "
            f"{found.spread:.2f} times as many classes"
        )
    return f"agreement with the source model {found.agreement:.2f} (limit {1 - LOSS / max(found.confidence, SURE):.2f})"


def _in_range(values: Tensor, low: float = -math.inf, high: float = math.inf) -> bool:
    """Whether all of them are finite, and in [low, high]."""
    return bool((values.isfinite() & (values >= low) & (values <= high)).all())


def _sent(name: str, saved: Tensor | None, steps: int) -> Sent:
    """Signals that were on their way when the state was saved."""
    if saved is not None and saved.ndim == 1 and len(saved) > 4 and _in_range(saved[:4], 0, MOST):
        step, batch, asked, past = (int(value) for value in saved[:4].tolist())
        counts, verdict = saved[4:8], saved[8 + len(SIGNALS) :]
        whole = (len(verdict) == len(Verdict._fields) and _in_range(verdict)) or not (asked or len(verdict))
        if whole and step < steps and _in_range(counts, 0, batch) and asked <= 1 and past <= 1:
            return Sent(step, batch, saved[4:].clone(), None, bool(asked), bool(past))
    raise StateError(f"guard.{name} of the state is missing, or not the signals of a step; use an older snapshot")


def _reports(
    sent: Sent, ok: float, invalid: float, unanswered: float, probabilities: float, counters: Mapping[str, int]
) -> list[Event]:
    """What the signals of one step say by themselves."""
    events = []
    if invalid:
        message = f"{invalid:.0f} of {sent.batch} samples are not finite or absurdly large; they drive no update"
        events.append(Event("invalid_samples", sent.step, message, {"samples": invalid}))
    if unanswered:
        message = f"no finite answer for {unanswered:.0f} of {sent.batch} samples; the source model is asked"
        events.append(Event("unanswered", sent.step, message, {"samples": unanswered}))
    if not ok:
        message = "an update was not finite and was rejected; weights, moments and memory are as before"
        events.append(Event("update_refused", sent.step, message, {}))
    if probabilities and not counters.get("probabilities"):
        message = "the model seems to return probabilities, not logits: adapt the model without its softmax"
        events.append(Event("probabilities", sent.step, message, {}))
    return events
