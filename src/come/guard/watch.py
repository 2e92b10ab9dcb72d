"""The guard's state of one adapter: what it has learned, when the source model is checked, and how it reacts.

A `Watch` is immutable: reading signals returns a new one. The signals of a step are read `LAG` steps later on every device: a
GPU has computed them by then, and runs are reproducible. `health` and `state_dict` read no signals.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from come.errors import StateError, saved_number
from come.guard.config import Event, Guard
from come.guard.signals import REMEMBERED, SIGNALS, UNUSUAL, Bands, no_history
from come.guard.verdict import CLOSE, LIMIT, LOSS, SURE, TRIAL, Verdict, collapsed, narrow, renewed, surer

LAG = 2  # steps after which the signals of a step are read
WINDOW = 64  # samples; signals are averaged over windows
# The next source check comes after at most so many windows (the second where the guard chooses BatchNorm statistics), after at
# most this fraction of the windows so far, and before the answers have moved this much further at their rate so far.
MOST_APART, CHOOSING_APART, APART, MOVED = 100, 16, 0.5, 0.03
CHANGED = 0.1  # change of the confidence that triggers a check of the statistics
FOLLOWED = 0.2  # weight of each window in the usual confidence
HORIZON = 10_000  # windows that a lowered learning rate should last, if answers move in proportion to it
MOST = 2.0**53  # limit on any count: float64 is exact up to here

COUNTED = (  # kinds of events
    *("invalid_samples", "update_refused", "unanswered", "suspicious", "healthy", "collapse", "recovered", "raised"),
    *("statistics", "frozen", "probabilities", "callback_failed"),
)
_OF_SAMPLES = {"invalid_samples", "unanswered"}  # counted by samples
_NAMES = {
    "share": "share of the most predicted class",
    "norm": "norm of the logits",
    "distance": "distance from the source weights",
}
_EMPTY = (0.0,) * len(SIGNALS)
_NOTHING: Mapping[str, int] = {}


class Sent(NamedTuple):
    """Signals of a step on their way to the host."""

    step: int
    batch: int
    values: Tensor
    """ok, invalid samples, unanswered samples, probabilities, the six signals, and the `Verdict` if a check was made."""
    arrived: Any = None  # a CUDA event; None if the values are on the host
    asked: bool = False  # whether these end a source check
    past: bool = False  # from before a reset: reported, but they do not describe the model of now


def send(step: int, batch: int, values: Tensor) -> Sent:
    """Start the copy of a step's signals to the host, without waiting."""
    return Sent(step, batch, *to_host(values))


def to_host(values: Tensor) -> tuple[Tensor, Any]:
    """Start a copy to the host; returns it, and the CUDA event of its completion, None on a CPU."""
    if values.device.type != "cuda":
        return values, None
    there = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    there.copy_(values, non_blocking=True)
    arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
    arrived.record()
    return there, arrived


class Watch(NamedTuple):
    """The guard's state of one adapter."""

    bands: Bands
    history: Tensor  # (9,): typical magnitudes of the last batches, see `come.guard.signals`
    steps: int = 0  # over the life of the adapter, as the counters of events
    counters: Mapping[str, int] = _NOTHING
    pending: tuple[Sent, ...] = ()
    latest: tuple[float, ...] = ()  # the last signals that were read
    row: tuple[float, ...] = _EMPTY  # the current window: sums of signals, samples, valid samples
    row_size: int = 0
    row_valid: float = 0.0
    age: int = 0  # samples since the start, the last recovery, or the last change of statistics or of the stream
    due: int = 0  # age of the next source check
    outside: int = 0  # windows in a row outside the bands
    asking: bool = False  # whether a source check is running, and its samples
    asked: int = 0
    sums: Tensor | None = None  # of the checks so far, see `come.guard.verdict.compare`
    level: float = -1.0  # usual confidence of the answers; -1: not yet known
    agreement: float = 1.0  # with the source model, in the last check
    scale: float = 1.0  # factor on the learning rate
    trusted: bool = True  # batch statistics (or the answers of a method without weights) are in use
    frozen: bool = False  # the source model answers until reset()

    @classmethod
    def new(cls, guard: Guard, device: torch.device, chooses: bool) -> Watch:
        """Before the first batch; `chooses`: between the source's BatchNorm statistics, used first, and the batch's."""
        return cls(Bands(guard.warmup), no_history(device), trusted=not chooses)

    def anew(self, guard: Guard, chooses: bool) -> Watch:
        """After a reset by the user: new but for the counters, and signals on their way are still reported."""
        new = Watch.new(guard, self.history.device, chooses)
        return new._replace(steps=self.steps, counters=self.counters, pending=self._past())

    def forgotten(self, guard: Guard) -> Watch:
        """After a reset by the method itself: the usual signals are learned anew, all else stays."""
        return self._replace(bands=Bands(guard.warmup), outside=0)

    def _past(self) -> tuple[Sent, ...]:
        return tuple(sent._replace(past=True) for sent in self.pending)

    @property
    def decisions(self) -> tuple[Any, ...]:
        """What must be equal on all ranks."""
        return (self.asking, self.trusted, self.frozen, self.scale, self.age, self.due, self.outside)

    @property
    def _checks(self) -> bool:
        """Whether a source check is running, its result is on its way, or none is needed because the source answers."""
        return self.asking or self.frozen or any(sent.asked and not sent.past for sent in self.pending)

    def counted(self, events: list[Event]) -> Watch:
        """Add these events to the counters."""
        if not events:
            return self
        counters = dict(self.counters)
        for event in events:
            many = event.details.get("samples", 1) if event.kind in _OF_SAMPLES else 1
            counters[event.kind] = counters.get(event.kind, 0) + int(many)
        return self._replace(counters=counters)

    # ---- when the source is checked ----

    def _asks(self, checks: bool) -> Watch:
        """Start a source check if one is due."""
        if not checks or self.asking or self.frozen or self.age < self.due:
            return self
        return self._replace(asking=True, asked=0, sums=None if self.sums is None else renewed(self.sums))

    def stepped(self, guard: Guard, sent: Sent, history: Tensor, sums: Tensor | None, chooses: bool) -> Watch:
        """After a step; `sums` are those of the source check that it took part in, if any."""
        watch = self._replace(history=history, steps=self.steps + 1, age=self.age + sent.batch)
        if sums is None:
            return watch._replace(pending=(*self.pending, sent))
        asked = self.asked + sent.batch
        ended = asked >= guard.samples
        watch = watch._replace(pending=(*self.pending, sent._replace(asked=ended)), sums=sums, asked=asked)
        return watch._replace(asking=False, due=watch._next(0.0, chooses)) if ended else watch

    def _next(self, moved: float, chooses: bool) -> int:
        """Age of the next check, if the answers have moved this much so far."""
        age = self.age / WINDOW
        gap = min(APART * age, CHOOSING_APART if chooses else MOST_APART)
        if moved > 0:
            gap = min(gap, age * MOVED / moved)
        return self.age + WINDOW * int(max(1, gap))

    # ---- reading signals ----

    def read(self, guard: Guard, chooses: bool, checks: bool) -> tuple[Watch, list[Event], Event | None]:
        """Read the signals that are due, and begin a source check if one is.

        Args:
            guard: its settings.
            chooses: whether it chooses BatchNorm statistics.
            checks: whether a source check can find anything.

        Returns:
            the new watch, the events, and the one that `recovered` must follow: a collapse, or a change of statistics.
        """
        watch, events, fallen = self, [], None
        while watch.pending and watch.pending[0].step <= watch.steps - LAG:
            sent, *left = watch.pending
            if sent.arrived is not None:
                sent.arrived.synchronize()
            ok, invalid, unanswered, probabilities, *rest = sent.values.tolist()
            events += self._reported(guard, sent, ok, invalid, unanswered, probabilities)
            watch = watch._replace(pending=tuple(left))
            if sent.past or fallen is not None:
                continue
            signals, valid = tuple(rest[: len(SIGNALS)]), sent.batch - invalid - unanswered
            watch, seen = watch._windowed(guard, sent, signals, valid, chooses)
            events += seen
            if unanswered and not watch._checks:
                watch = watch._replace(due=watch.age)
            if sent.asked:
                watch, event = watch._checked(guard, sent.step, Verdict(*rest[len(SIGNALS) :]), chooses)
                events += [] if event is None else [event]
                fallen = event if event is not None and event.kind in ("collapse", "statistics") else None
        watch = watch.counted(events)
        if fallen is None or (fallen.kind == "collapse" and guard.policy == "warn"):
            return watch._asks(checks), events, None
        return watch, events, fallen

    def _reported(
        self, guard: Guard, sent: Sent, ok: float, invalid: float, unanswered: float, probabilities: float
    ) -> list[Event]:
        """The events of one step alone."""
        events = []
        if invalid:
            limits = f"limits {guard.largest_input:g} and {UNUSUAL:g} x the usual magnitude"
            message = f"{invalid:.0f} of {sent.batch} samples are not finite or too large ({limits}): excluded from the update"
            events.append(Event("invalid_samples", sent.step, message, {"samples": invalid}))
        if unanswered:
            message = f"no finite logits for {unanswered:.0f} of {sent.batch} samples: source check due"
            events.append(Event("unanswered", sent.step, message, {"samples": unanswered}))
        if not ok:
            message = "an update was not finite: rejected, weights, moments and method state unchanged"
            events.append(Event("update_refused", sent.step, message, {}))
        if probabilities and not self.counters.get("probabilities"):
            message = "the model seems to return probabilities, not logits: adapt the model without its softmax"
            events.append(Event("probabilities", sent.step, message, {}))
        return events

    def _windowed(
        self, guard: Guard, sent: Sent, signals: tuple[float, ...], valid: float, chooses: bool
    ) -> tuple[Watch, list[Event]]:
        """Add a step's signals to the window; compare a full one with the bands."""
        watch = self._replace(latest=signals)
        if not (valid > 0 and math.isfinite(sum(signals))):
            return watch, []
        row = tuple([a + valid * b for a, b in zip(self.row, signals, strict=True)])
        size, total = self.row_size + sent.batch, self.row_valid + valid
        if size < WINDOW:
            return watch._replace(row=row, row_size=size, row_valid=total), []
        row = tuple(value / total for value in row)
        watch = watch._replace(row=_EMPTY, row_size=0, row_valid=0.0)
        if watch._checks:
            return watch, []
        confidence, level = row[SIGNALS.index("confidence")], watch.level
        if chooses and level >= 0 and abs(confidence - level) > CHANGED:
            watch = watch._replace(age=0, due=0, sums=None, level=-1.0)  # the sums are of another stream
        else:
            watch = watch._replace(level=confidence if level < 0 else level + FOLLOWED * (confidence - level))
        outside = watch.bands.outside(row) if watch.bands.ready else {}
        watch = watch._replace(bands=watch.bands.learned(row), outside=watch.outside + 1 if outside else 0)
        if watch.outside != guard.patience:
            return watch, []
        found = dict(zip(SIGNALS, row, strict=True))
        words = ", ".join(f"{_NAMES.get(name, name)} {found[name]:.3g} (limit {outside[name]:.3g})" for name in outside)
        message = f"{words} for {guard.patience} windows: source check due"
        event = Event("suspicious", sent.step, message, {name: found[name] for name in outside})
        return watch._replace(due=watch.age), [event]

    def _checked(self, guard: Guard, step: int, found: Verdict, chooses: bool) -> tuple[Watch, Event | None]:
        """React to the result of a source check."""
        suspicious, watch = self.outside > 0, self._replace(outside=0)
        if not found.samples:
            message = "no finite logits from adapted and source model: the weights of the model are damaged"
            return watch, Event("unanswered", step, message, {"samples": 0.0})
        watch, checked = watch._replace(agreement=found.agreement), f"{found.samples:.0f} samples checked"
        agreement = f"agreement with the source model {found.agreement:.2f}"
        if not (watch.trusted or chooses):  # the source answers in place of a method without weights
            if found.agreement < TRIAL:
                return watch, None
            message = f"{agreement} (limit {TRIAL:.2f}), {checked}: the method answers again"
            return watch._replace(trusted=True), Event("raised", step, message, {"agreement": found.agreement})
        details: dict[str, float | str] = dict(found._asdict())
        if chooses and bool(surer(found, watch.trusted)) != watch.trusted:
            source = found.confidence - (found.gain if watch.trusted else 0)
            message = (
                f"BatchNorm on {'the source' if watch.trusted else 'batch'} statistics, source weights restored: confidence "
                f"{source + found.gain:.2f} with batch statistics, {source:.2f} with the source's, {checked}"
            )
            return watch, Event("statistics", step, message, details)
        renewed_bands = watch._replace(bands=Bands(guard.warmup))
        if bool(collapsed(found)):
            event = Event("collapse", step, f"collapse: {agreement} (limit {_limit(found)}), {checked}", details)
            return renewed_bands if guard.policy == "warn" else watch, event
        if suspicious:
            watch = renewed_bands  # the data has changed, not the model
        watch = watch._replace(due=min(watch.due, watch._next(1 - found.agreement, chooses)))
        message = f"healthy: {agreement}, {checked}"
        return watch, Event("healthy", step, message, details)

    def recovered(self, guard: Guard, cause: Event, weightless: bool, checks: bool) -> tuple[Watch, list[Event]]:
        """After a collapse or a change of statistics: the new watch, and what to report.

        `weightless`: putting weights or statistics back to the source's changes nothing; `checks` as in `read`.
        """
        base = self._replace(age=0, due=0, outside=0, asking=False, asked=0, level=-1.0, pending=self._past())
        events = []
        if cause.kind == "statistics":
            base = base._replace(trusted=not self.trusted)
        elif guard.policy == "freeze":
            base = base._replace(frozen=True)
            events = [Event("frozen", cause.step, "the source model answers until reset()", {})]
        elif weightless:
            base = base._replace(trusted=False)
            message = "the source model answers until the method agrees with it again"
            events = [Event("recovered", cause.step, message, {})]
        else:
            scale = self.scale * min(guard.backoff, max(1, self.age / WINDOW) / HORIZON)
            base = base._replace(scale=scale)
            message = f"source weights restored, learning rate x {scale:g} until reset()"
            events = [Event("recovered", cause.step, message, {"lr_scale": scale})]
        return base.counted(events)._asks(checks), events

    # ---- what is reported and saved ----

    def health(self) -> dict[str, float]:
        """Counters and gauges as flat numbers, for Prometheus and the like."""
        return {
            "steps": float(self.steps),
            **{kind: float(self.counters.get(kind, 0)) for kind in COUNTED},
            "lr_scale": self.scale,
            "batch_statistics": float(self.trusted),
            "agreement": self.agreement,
            **dict(zip(SIGNALS, self.latest, strict=False)),
            "frozen": float(self.frozen),  # the gauge, not the counter
        }

    def tensors(self) -> dict[str, Tensor]:
        """The state as a flat dictionary of tensors; synchronizes with the device."""
        lists = {name: list(getattr(self, name)) for name in ("row", "latest")}
        lists["counters"] = [float(self.counters.get(kind, 0)) for kind in COUNTED]
        numbers = {name: float(getattr(self, name)) for name in _NUMBERS}
        kept = {name: torch.tensor(value, dtype=torch.float64) for name, value in (numbers | lists).items()}
        kept["rows"] = torch.tensor(self.bands.rows, dtype=torch.float64).reshape(-1, len(SIGNALS))
        kept |= {"seen": torch.tensor(self.bands.seen), "history": self.history}
        if self.sums is not None:
            kept["sums"] = self.sums
        for i, sent in enumerate(self.settled().pending):
            head = torch.tensor([sent.step, sent.batch, sent.asked, sent.past], dtype=torch.float64)
            kept[f"pending.{i}"] = torch.cat([head, sent.values])
        return kept

    @classmethod
    def of(cls, saved: Mapping[str, Tensor], guard: Guard, weights: Tensor) -> Watch:
        """Read `tensors()` back; raises `StateError` if something is missing or does not fit."""
        needed = {*_NUMBERS, "counters", "rows", "seen", "row", "latest", "history"}
        more = saved.keys() - needed - {"sums"}
        if bad := (needed - saved.keys()) | {name for name in more if not name.startswith("pending.")}:
            raise StateError(f"the guard's part of the state is damaged at {', '.join(sorted(bad))}")
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
        if wrong := [name for name, good in sound.items() if not good]:
            raise StateError(
                f"guard.{wrong[0]} of the state has a wrong shape, or values out of range; use an older snapshot"
            )
        numbers: dict[str, Any] = {}
        for name, (kind, low, high) in _NUMBERS.items():
            numbers[name] = kind(saved_number(f"guard.{name}", saved[name], low, high, whole=kind is not float))
        seen = int(saved_number("guard.seen", saved["seen"], len(rows), MOST, whole=True))
        pending = [_sent(f"pending.{i}", saved.get(f"pending.{i}"), numbers["steps"]) for i in range(len(more))]
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
        """Wait until pending signals are on the host."""
        for sent in self.pending:
            if sent.arrived is not None:
                sent.arrived.synchronize()
        return self._replace(pending=tuple(sent._replace(arrived=None) for sent in self.pending))

    def to(self, device: torch.device) -> Watch:
        """Move all tensors to a device."""
        sums = None if self.sums is None else self.sums.to(device)
        return self._replace(history=self.history.to(device), sums=sums)


_NUMBERS: dict[str, tuple[type, float, float]] = {
    **dict.fromkeys(("steps", "age", "due", "outside", "asked"), (int, 0, MOST)),
    **dict.fromkeys(("asking", "trusted", "frozen"), (bool, 0, 1)),
    **{"scale": (float, 0, 1), "row_size": (int, 0, WINDOW - 1), "row_valid": (float, 0, WINDOW)},
    **{"agreement": (float, 0, 1 + 1e-6), "level": (float, -1, 1 + 1e-6)},
}
"""Type and range of the numbers that are saved."""


def _limit(found: Verdict) -> str:
    """The limit on the agreement that a collapse has crossed."""
    if found.agreement < LIMIT:
        return f"{LIMIT:.2f}"
    if narrow(found):
        return f"{CLOSE:.2f} where fewer classes are predicted: {found.spread:.2f} times as many"
    return f"{1 - LOSS / max(found.confidence, SURE):.2f}"


def _in_range(values: Tensor, low: float = -math.inf, high: float = math.inf) -> bool:
    """Whether all of them are finite, and in [low, high]."""
    return bool((values.isfinite() & (values >= low) & (values <= high)).all())


def _sent(name: str, saved: Tensor | None, steps: int) -> Sent:
    """Read saved pending signals."""
    if saved is not None and saved.ndim == 1 and len(saved) > 4 and _in_range(saved[:4], 0, MOST):
        step, batch, asked, past = (int(value) for value in saved[:4].tolist())
        counts, verdict = saved[4:8], saved[8 + len(SIGNALS) :]
        whole = (len(verdict) == len(Verdict._fields) and _in_range(verdict)) or not (asked or len(verdict))
        if whole and step < steps and _in_range(counts, 0, batch) and asked <= 1 and past <= 1:
            return Sent(step, batch, saved[4:].clone(), None, bool(asked), bool(past))
    raise StateError(f"guard.{name} of the state is missing or damaged; use an older snapshot")
