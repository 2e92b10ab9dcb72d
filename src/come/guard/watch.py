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
from come.guard.verdict import HEALTHY, LIMIT, LOSS, LOSS_BY_STATISTICS, SURE, TRIAL, WELL, Verdict, misled
from come.trees import changed

LAG = 2
"""After so many steps the signals of a step are read."""
WINDOW = 64
"""Samples that make a row of signals."""
CHECKS = (1, 5, 10, 20, 40, 80)
"""Windows after the start or a recovery at which the source is asked anyway; then every 100."""
OFTEN = 200
"""Recoveries within so many windows of each other are one fault: the learning rate falls faster each time."""
REGROW = 100
"""Healthy windows after which a lowered learning rate is raised again; twice as many after each further recovery."""

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
    """ok, invalid samples, unanswered samples, probabilities, the five signals, and the verdict if the source was asked."""
    arrived: Any = None
    asked: bool = False
    """Whether these end a question to the source."""
    past: bool = False
    """Whether the adapter was reset since: they are reported, and say nothing about what it is now."""


def send(step: int, batch: int, values: Tensor, asked: bool) -> Sent:
    """Start the way to the host, without waiting."""
    return Sent(step, batch, *to_host(values), asked)


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
    """The five signals that were read last."""
    row: tuple[float, ...] = (0.0,) * len(SIGNALS)
    row_size: int = 0
    row_valid: float = 0.0
    windows: int = 0
    """Since the start or the last recovery."""
    outside: int = 0
    """Windows outside the bands in a row."""
    asking: bool = False
    waiting: bool = False
    """Whether a question has been put to the source and not yet been answered."""
    asked: int = 0
    sums: Tensor | None = None
    """What the question in hand has found so far, on the device."""
    candidate: Tensor | None = None
    """(P,): the weights that the question in hand is about."""
    healthy: Tensor | None = None
    """(P,): the last weights that were found well."""
    agreement: float = 1.0
    """With the source model, when it was last asked."""
    scale: float = 1.0
    """Factor on the learning rate."""
    trusted: bool = True
    """Whether batch statistics (or the answers of a method without weights) are in use."""
    frozen: bool = False
    falls: int = 0

    @classmethod
    def new(cls, guard: Guard, device: torch.device) -> Watch:
        """Before the first batch."""
        return cls(Bands(guard.warmup), no_history(device))

    def forgotten(self, guard: Guard) -> Watch:
        """After a reset: everything learned anew. Counters stay, and what is under way is still reported."""
        past = tuple(sent._replace(past=True) for sent in self.pending)
        new = Watch.new(guard, self.history.device)
        return changed(new, steps=self.steps, counters=self.counters, pending=past)

    @property
    def decisions(self) -> tuple[Any, ...]:
        """What the host has decided so far."""
        return (
            self.asking,
            self.waiting,
            self.trusted,
            self.frozen,
            self.scale,
            self.falls,
            self.windows,
            self.outside,
        )

    def counted(self, events: list[Event]) -> Watch:
        """With these events counted."""
        if not events:
            return self
        counters = dict(self.counters)
        for event in events:
            many = event.details.get("samples", 1) if event.kind in _MANY else 1
            counters[event.kind] = counters.get(event.kind, 0) + int(many)
        return changed(self, counters=counters)

    # ---- what signals say ----

    def read(self, guard: Guard, statistics: bool) -> tuple[Watch, list[Event], Event | None]:
        """Take up the signals that are due.

        Args:
            guard: the configuration.
            statistics: whether BatchNorm may use statistics of the batch.

        Returns:
            the new watch, what happened, and the event of a collapse that calls for a recovery.
        """
        watch, events, collapse = self, [], None
        while watch.pending and watch.pending[0].step <= watch.steps - LAG:
            sent, *left = watch.pending
            if sent.arrived is not None:
                sent.arrived.synchronize()
            ok, invalid, unanswered, probabilities, *rest = sent.values.tolist()
            events += _reports(sent, ok, invalid, unanswered, probabilities, self.counters)
            if sent.past:
                watch = changed(watch, pending=tuple(left))
                continue
            signals, valid = tuple(rest[: len(SIGNALS)]), sent.batch - invalid - unanswered
            watch, seen = watch._judged(guard, sent, signals, valid, tuple(left))
            events += seen
            if unanswered and not (watch.asking or watch.waiting or watch.frozen):
                watch = watch.asking_again()
            if sent.asked:
                watch, seen, found = watch._answered(guard, sent, Verdict(*rest[len(SIGNALS) :]), statistics)
                events += seen
                collapse = collapse or found
        return watch.counted(events), events, collapse

    def _judged(
        self, guard: Guard, sent: Sent, signals: tuple[float, ...], valid: float, left: tuple[Sent, ...]
    ) -> tuple[Watch, list[Event]]:
        """Gather signals until they make a window, and compare it with the bands; `left` are still on their way."""
        if not (valid > 0 and math.isfinite(sum(signals))):
            return changed(self, pending=left, latest=signals), []
        row = tuple([a + valid * b for a, b in zip(self.row, signals, strict=True)])
        size, total = self.row_size + sent.batch, self.row_valid + valid
        if size < WINDOW:
            return changed(self, pending=left, latest=signals, row=row, row_size=size, row_valid=total), []
        row = tuple(value / total for value in row)
        empty = {"row": (0.0,) * len(SIGNALS), "row_size": 0, "row_valid": 0.0}
        watch = changed(self, pending=left, latest=signals, windows=self.windows + 1, **empty)
        if watch.asking or watch.waiting or watch.frozen:
            return watch, []
        events, due = [], watch.windows in CHECKS or watch.windows % 100 == 0
        outside = watch.bands.outside(row) if watch.bands.ready else {}
        watch = changed(watch, bands=watch.bands.learned(row), outside=watch.outside + 1 if outside else 0)
        if watch.outside == guard.patience:
            found = dict(zip(SIGNALS, row, strict=True))
            words = ", ".join(
                f"{_NAMES[name]} {found[name]:.3g} (limit {limit:.3g})" for name, limit in outside.items()
            )
            message = f"unusual for {guard.patience} windows: {words}; the source model is asked"
            events.append(Event("suspicious", sent.step, message, {name: found[name] for name in outside}))
            due = True
        return (watch.asking_again() if due else watch), events

    def asking_again(self) -> Watch:
        """With a new question to the source."""
        return changed(self, asking=True, asked=0, sums=None)

    def _answered(
        self, guard: Guard, sent: Sent, found: Verdict, statistics: bool
    ) -> tuple[Watch, list[Event], Event | None]:
        """A question has been answered."""
        suspicious, watch = self.outside > 0, changed(self, waiting=False, outside=0)
        if not found.samples:
            message = (
                "neither the adapted nor the source model has a finite answer: the weights of the model are damaged"
            )
            return watch, [Event("unanswered", sent.step, message, {"samples": 0.0})], None
        watch = changed(watch, agreement=found.agreement)
        details: dict[str, float | str] = dict(found._asdict())
        by_source = bool(misled(found, statistics and watch.trusted))
        by_weights = statistics and watch.trusted and found.other < LIMIT
        checked = f"{found.samples:.0f} samples checked"
        if by_source and statistics and watch.trusted and not by_weights:
            loss = LOSS_BY_STATISTICS / max(found.confidence, SURE)
            limit = LIMIT if found.confidence < SURE else 1 - loss
            message = (
                f"statistics of the batch mislead the model: agreement with the source model {found.agreement:.2f} (limit "
                f"{limit:.2f}), {checked}; BatchNorm on the source's statistics, source weights restored"
            )
            collapse = Event("statistics", sent.step, message, details)
            return watch, [collapse], collapse
        if by_source or by_weights:
            limit = LIMIT if found.agreement < LIMIT or by_weights else 1 - LOSS / max(found.confidence, SURE)
            seen = found.agreement if by_source else found.other
            what = "source model" if by_source else "source weights"
            message = f"collapse: agreement with the {what} {seen:.2f} (limit {limit:.2f}), {checked}"
            collapse = Event("collapse", sent.step, message, details)
            return (
                (changed(watch, bands=Bands(guard.warmup)) if guard.policy == "warn" else watch),
                [collapse],
                collapse,
            )
        if suspicious:
            watch = changed(watch, bands=Bands(guard.warmup))  # it is the data that changed: learn anew what is usual
        message = f"healthy: agreement with the source model {found.agreement:.2f}, {checked}"
        events = [Event("healthy", sent.step, message, details)]
        if found.agreement >= WELL:
            watch = changed(watch, healthy=watch.candidate)
        watch, raised = watch._raised(guard, sent, found)
        return watch, events + raised, None

    def _raised(self, guard: Guard, sent: Sent, found: Verdict) -> tuple[Watch, list[Event]]:
        """Give back what a recovery has taken, if the model has been healthy since."""
        watch, events = self, []
        tried = found._replace(agreement=found.other)
        if not watch.trusted and found.other >= TRIAL and not misled(tried, True):
            watch = changed(watch, trusted=True)
            message = (
                f"tried on {found.samples:.0f} samples: agreement {found.other:.2f}; batch statistics (or the answers of the "
                "method) are in use again"
            )
            events.append(Event("raised", sent.step, message, {"agreement": found.other}))
        if watch.scale < 1 and found.agreement >= HEALTHY and watch.windows >= REGROW * 2 ** (watch.falls - 1):
            scale = min(1.0, watch.scale / guard.backoff)
            message = f"healthy for {watch.windows} windows after a recovery: learning rate x {scale:g}"
            events.append(Event("raised", sent.step, message, {"lr_scale": scale}))
            watch = changed(watch, scale=scale, windows=0)
        return watch, events

    # ---- what is done ----

    def recovered(
        self, guard: Guard, collapse: Event, weightless: bool = False
    ) -> tuple[Watch, Tensor | None, list[Event]]:
        """After a collapse: the new watch, the weights to go back to (None: the source's), and what is to be said."""
        often = self.falls > 0 and self.windows <= OFTEN
        base = changed(
            self, windows=0, outside=0, asking=False, waiting=False, asked=0, sums=None, candidate=None, healthy=None
        )
        base = changed(base, pending=tuple(sent._replace(past=True) for sent in base.pending))
        if collapse.kind == "statistics":
            return changed(base, trusted=False), None, []
        if guard.policy == "freeze":
            event = Event("frozen", collapse.step, "the source model answers from now on; reset() ends it", {})
            return changed(base, frozen=True), None, [event]
        if weightless:
            message = "the source model answers until a trial finds the method well"
            return changed(base, trusted=False), None, [Event("recovered", collapse.step, message, {})]
        healthy = None if often else self.healthy
        where = "the last healthy weights" if healthy is not None else "the source weights"
        falls = self.falls + 1 if often else 1
        scale = self.scale * guard.backoff**falls
        message = f"{where} restored, learning rate x {scale:g}"
        event = Event("recovered", collapse.step, message, {"to": where, "lr_scale": scale})
        return changed(base, falls=falls, scale=scale), healthy, [event]

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
        kept |= {name: value for name in _TENSORS if (value := getattr(self, name)) is not None}
        for i, sent in enumerate(self.settled().pending):
            head = torch.tensor([sent.step, sent.batch, sent.asked, sent.past], dtype=torch.float64)
            kept[f"pending.{i}"] = torch.cat([head, sent.values])
        return kept

    @classmethod
    def of(cls, saved: Mapping[str, Tensor], guard: Guard, weights: Tensor) -> Watch:
        """From `tensors()`; raises `StateError` if something is missing or does not fit."""
        needed = {*_NUMBERS, "counters", "rows", "seen", "row", "latest", "history"}
        known = needed | set(_TENSORS)
        if missing := (needed - set(saved)) | {
            name for name in saved.keys() - known if not name.startswith("pending.")
        }:
            raise StateError(f"the guard's part of the state is damaged at {', '.join(sorted(missing))}")
        for name in ("candidate", "healthy"):
            if name in saved and (saved[name].shape != weights.shape or not saved[name].isfinite().all()):
                raise StateError(f"guard.{name} must be {tuple(weights.shape)} finite numbers; the state is damaged")
        rows, history, width = saved["rows"], saved["history"], len(SIGNALS)
        known_history = history[~history.isnan()]  # NaN: no batch yet
        sound = {
            "counters": saved["counters"].shape == (len(COUNTED),) and _in_range(saved["counters"], 0),
            "rows": rows.ndim == 2 and rows.shape[1] == width and len(rows) <= guard.warmup and _in_range(rows),
            "row": saved["row"].shape == (width,) and _in_range(saved["row"]),
            "latest": saved["latest"].shape in ((0,), (width,)),
            "history": history.shape == (REMEMBERED,) and _in_range(known_history, 0),
            "sums": "sums" not in saved or (saved["sums"].ndim == 1 and _in_range(saved["sums"], 0)),
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
            **{name: saved[name].to(weights.device).clone() for name in _TENSORS if name in saved},  # type: ignore[arg-type]
            **numbers,
        )

    def settled(self) -> Watch:
        """With the signals that are under way on the host; waits for the device."""
        for sent in self.pending:
            if sent.arrived is not None:
                sent.arrived.synchronize()
        return changed(self, pending=tuple(sent._replace(arrived=None) for sent in self.pending))

    def to(self, device: torch.device) -> Watch:
        """With all tensors on that device."""
        moved = {name: value.to(device) for name in _TENSORS if (value := getattr(self, name)) is not None}
        return changed(self, history=self.history.to(device), **moved)


_MANY = {"invalid_samples", "unanswered"}
"""Events that count samples."""
_TENSORS = ("sums", "candidate", "healthy")
MOST = 2.0**53
"""More than anything is counted to, and a float64 up to here is exact."""
_NUMBERS = {
    **dict.fromkeys(("steps", "windows", "outside", "asked"), (0, MOST)),
    **dict.fromkeys(("asking", "waiting", "trusted", "frozen", "scale"), (0, 1)),
    **{"row_size": (0, WINDOW - 1), "row_valid": (0, WINDOW), "agreement": (0, 1 + 1e-6), "falls": (0, 1e6)},
}
"""Where they may lie."""
_NAMES = {
    "share": "share of the most predicted class",
    "entropy": "entropy",
    "uncertainty": "uncertainty",
    "norm": "norm of the logits",
    "distance": "distance from the source weights",
}


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
