"""Adaptation that can be left alone: what arrives is checked, what is not finite never becomes a weight, a collapse is undone.

Around each step, on the device and without waiting for it:

    samples   that are not finite, or absurdly large, are answered with zero logits, flagged in `Step.valid`, and drive nothing
    updates   whose loss or gradient is not finite are called off, moments and averages included: the last good weights stay
    signals   share of the most predicted class, entropy, u, logit norm, distance from the source weights

The signals of the first batches give a band for each. A step outside of its band is suspicious; after `patience` of them in a
row, and now and then anyway, the source model is asked about the same samples. The adapted model has collapsed if it spreads
its predictions over less than 0.6 times as many classes as the source (by the perplexity of the mean prediction), and it is
lost if it contradicts the source on too many of the samples that the source is surer of. So the judge is the source model on
the same data: a stream that really holds one class, or a domain that really is harder, is no collapse.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from come.errors import CollapseError, require
from come.inputs import Input, exact

if TYPE_CHECKING:
    from come.method import Method, Step

log = logging.getLogger("come.guard")

Policy = Literal["recover", "freeze", "raise", "warn"]
SIGNALS = ("share", "entropy", "uncertainty", "norm", "distance")
LOW, HIGH = {"entropy", "uncertainty"}, {"share", "norm", "distance"}  # on which side of the band a collapse lies
ABSURD = 100.0
"""A sample is absurd if its largest entry is this many times the largest that was usual so far."""
FEWER = 0.6
"""Collapsed: less than this share of the source's perplexity."""
LOST = 0.65
"""Lost: agrees with the source on less than this share of the samples that the source is surer of."""
CHECKS = (10, 25, 50)
"""Steps after the start or a recovery at which the source is asked anyway; then every 50."""
QUIET = 15
"""Batches after a healthy answer before the source is asked again."""


class Event(NamedTuple):
    """Something that happened: its kind, the number of the step, and details."""

    kind: str
    """invalid_samples, update_refused, suspicious, healthy, collapse, recovered, frozen, snapshot"""
    step: int
    details: dict[str, float | str]


@dataclass
class Guard:
    """What stands between a stream and the weights.

    Args:
        policy: what to do on a collapse. "recover": back to the last healthy snapshot, or to the source if that collapsed too,
            and half the learning rate. "freeze": back to the source, and no more updates. "raise": `CollapseError`. "warn":
            an event only.
        warmup: batches that the bands are learned from, at least 2.
        patience: suspicious batches in a row before the source model is asked, at least 1.
        samples: how many samples the comparison with the source takes, at least 1.
        healthy_every: a snapshot of the weights in memory after so many batches without suspicion.
        backoff: factor on the learning rate at each recovery, in (0, 1].
        on_event: called with each `Event`, after it was logged.
        snapshots: a folder for snapshots on disk; None writes none.
        snapshot_every: batches between two of them.
        snapshots_kept: how many are kept, the newest ones.
        scalars: a TensorBoard `SummaryWriter`, or anything with `add_scalar(name, value, step)`.

    Example:
        >>> import come
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 3))
        >>> classifier = come.adapt(model, "tent", guard=Guard(policy="freeze"))
        >>> x = torch.randn(6, 4)
        >>> x[2] = torch.nan
        >>> step = classifier.step(x)
        >>> step.valid.tolist(), step.logits.isfinite().all().item()
        ([True, True, False, True, True, True], True)
        >>> classifier.health()["invalid_samples"]
        1
    """

    policy: Policy = "recover"
    warmup: int = 10
    patience: int = 3
    samples: int = 128
    healthy_every: int = 50
    backoff: float = 0.5
    on_event: Callable[[Event], None] | None = None
    snapshots: str | Path | None = None
    snapshot_every: int = 1000
    snapshots_kept: int = 3
    scalars: Any = None
    counters: dict[str, int] = field(default_factory=dict, init=False)
    """How often each kind of event happened, over the guard's life; a reset of the method does not clear it."""

    def __post_init__(self) -> None:
        require(self.policy in get_args(Policy), "policy", self.policy, f"one of {', '.join(get_args(Policy))}")
        for name in ("patience", "samples", "healthy_every", "snapshot_every", "snapshots_kept"):
            value = getattr(self, name)
            require(isinstance(value, int) and value >= 1, name, value, "a whole number, at least 1")
        require(isinstance(self.warmup, int) and self.warmup >= 2, "warmup", self.warmup, "a whole number, at least 2")
        require(0 < self.backoff <= 1, "backoff", self.backoff, "in (0, 1]")
        require(self.on_event is None or callable(self.on_event), "on_event", self.on_event, "a function, or None")
        self.steps = 0
        """Steps seen over the guard's life."""
        self.forget()

    def forget(self) -> None:
        """Learn anew: bands, snapshots, learning rate, as after construction. Counters stay."""
        self.scale = 1.0
        """Factor on the learning rate."""
        self.frozen = False
        self.latest: dict[str, float] = {}
        """The signals of the last step that was read."""
        self._usual: Tensor | None = None
        self._next_usual: Tensor | None = None
        self._pool: list[tuple[float, ...]] = []
        self._pending: deque[tuple[int, Tensor, Any]] = deque()
        self._suspicious = 0
        self._asking: _Asking | None = None
        self._healthy: list[Tensor] | None = None
        self._healthy_since = 0
        self._last_recovery = -1_000_000
        self._quiet_until = 0

    # ---- before a step ----

    def admit(self, x: Input) -> tuple[Input, Tensor | None]:
        """The batch with its unusable samples replaced by a usable one, and the mask (B,) of the usable ones."""
        tensors = _floating(x)
        if not tensors:
            return x, None
        sizes = torch.stack([_largest(t.detach()) for t in tensors]).amax(dim=0)
        finite = sizes.isfinite()
        # The median of the batch is not moved by a few absurd samples; all of the first batch may be usual.
        median = torch.where(finite, sizes, 0).sort().values[len(sizes) // 2]
        usual = median if self._usual is None else torch.maximum(self._usual.to(sizes), torch.zeros_like(median))
        usual = torch.where(usual > 0, usual, median)
        valid = finite & ((sizes <= ABSURD * usual) | (usual == 0))
        self._next_usual = torch.maximum(usual, torch.where(valid, sizes, 0).max()).detach()  # if the step succeeds
        return _replaced(x, valid), valid

    # ---- after a step ----

    @torch.no_grad()
    def watch(self, method: Method, x: Input, step: Step, ok: Tensor) -> Step:
        """Read the signals of a step, act on those that are known, and clean what is returned."""
        valid = step.valid
        assert valid is not None
        self._usual = self._next_usual
        rows = step.logits.isfinite().all(dim=1)
        usable = valid & rows
        logits = torch.where(usable[:, None], step.logits, 0)
        loss = None if step.loss is None else torch.where(usable & step.loss.isfinite(), step.loss, 0)
        used = None if step.used is None else step.used & usable & ok
        signals = _signals(method, logits, usable)
        values = torch.cat([torch.stack([ok.double(), (~usable).sum().double()]), signals])
        self._send(values)
        if self._asking is not None:
            self._ask(method, x, logits, usable)
        self.settle(method)
        self.steps += 1
        return step._replace(logits=logits, loss=loss, used=used, valid=usable)

    def _send(self, values: Tensor) -> None:
        """Towards the host, without waiting: `settle` takes it up when it has arrived."""
        if values.device.type == "cuda":
            there = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            there.copy_(values, non_blocking=True)
            arrived: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
            arrived.record()
            self._pending.append((self.steps, there, arrived))
        else:
            self._pending.append((self.steps, values, None))

    def settle(self, method: Method, *, wait: bool = False) -> None:
        """Judge the steps whose signals have arrived."""
        while self._pending:
            number, values, arrived = self._pending[0]
            if arrived is not None and not arrived.query():
                if not wait:
                    return
                arrived.synchronize()
            self._pending.popleft()
            self._judge(method, number, values.tolist())

    def _judge(self, method: Method, number: int, values: list[float]) -> None:
        ok, invalid, *signals = values
        self.latest = dict(zip(SIGNALS, signals, strict=True))
        if self.scalars is not None:
            for name, value in self.latest.items():
                self.scalars.add_scalar(f"come/{name}", value, number)
        if invalid:
            self._count("invalid_samples", int(invalid))
            self._emit("invalid_samples", number, {"samples": invalid}, count=False)
        if not ok:
            self._emit("update_refused", number, {})
        if not all(map(math.isfinite, signals)):
            return
        if len(self._pool) < self.warmup:
            self._pool.append(tuple(signals))
            return
        outside = self._outside(signals)
        self._suspicious = self._suspicious + 1 if outside else 0
        if self._suspicious >= self.patience and self._asking is None and self.steps >= self._quiet_until:
            self._emit("suspicious", number, {name: self.latest[name] for name in outside})
            self._asking = _Asking()
        since = self.steps - max(0, self._last_recovery)
        if self._asking is None and (since in CHECKS or since % CHECKS[-1] == 0):
            self._asking = _Asking()
        if not outside and self._asking is None and self.steps - self._healthy_since >= self.healthy_every:
            self._healthy = [p.detach().clone() for p in method.parameters.values()]
            self._healthy_since = self.steps

    def _outside(self, signals: list[float]) -> list[str]:
        """Names of the signals that lie beyond their band, on the side of a collapse."""
        found = []
        for i, name in enumerate(SIGNALS):
            seen = sorted(row[i] for row in self._pool)
            middle = seen[len(seen) // 2]
            spread = max(6 * sorted(abs(v - middle) for v in seen)[len(seen) // 2], 0.25 * abs(middle), 1e-6)
            if name == "distance":  # it grows by itself: as far again as in the warm-up, for each such stretch of steps
                spread = max(spread, seen[-1] * (1 + self.steps / self.warmup))
            if (name in LOW and signals[i] < middle - spread) or (name in HIGH and signals[i] > middle + spread):
                found.append(name)
        return found

    # ---- the source model is asked ----

    def _ask(self, method: Method, x: Input, logits: Tensor, usable: Tensor) -> None:
        asking = self._asking
        assert asking is not None
        source = method.forward(x, method.source_values) if method.parameters else method.forward(x)
        asking.add(exact(logits).softmax(dim=1), exact(source).softmax(dim=1), usable)
        if asking.samples < self.samples:
            return
        mine, theirs = asking.perplexities()
        agreement = asking.agreement()
        self._asking, self._suspicious = None, 0
        details: dict[str, float | str] = {"perplexity": mine, "of_source": theirs, "agreement": agreement}
        if mine >= FEWER * theirs and agreement >= LOST:  # if suspicious, it is the data that changed
            self._emit("healthy", self.steps, details)
            self._quiet_until = self.steps + QUIET
            return
        self._emit("collapse", self.steps, details)
        self._act(method)

    def _act(self, method: Method) -> None:
        if self.policy == "raise":
            raise CollapseError(
                f"{method.name} has collapsed at step {self.steps}: it predicts far fewer classes than its source "
                "model; reset() it, lower lr, or use objective='come' or Guard(policy='recover')"
            )
        if self.policy == "warn":
            return
        everywhere = torch.ones((), dtype=torch.bool, device=next(method.model.parameters()).device)
        recent = self.steps - self._last_recovery < 2 * self.healthy_every
        method.recover(everywhere)
        to = "source"
        if self.policy == "recover" and self._healthy is not None and not recent:
            for p, value in zip(method.parameters.values(), self._healthy, strict=True):
                p.copy_(value.to(p))
            to = "snapshot"
        method.state = method.initial_state()
        self._healthy, self._last_recovery = (None if to == "source" else self._healthy), self.steps
        if self.policy == "freeze":
            self.frozen = True
            self._emit("frozen", self.steps, {})
        else:
            self.scale *= self.backoff
            self._emit("recovered", self.steps, {"to": to, "lr_scale": self.scale})

    # ---- what it says ----

    def _emit(self, kind: str, step: int, details: Mapping[str, float | str], *, count: bool = True) -> None:
        if count:
            self._count(kind, 1)
        event = Event(kind, step, dict(details))
        level = logging.INFO if kind in ("healthy", "snapshot") else logging.WARNING
        log.log(level, "%s at step %d %s", kind, step, event.details, extra={"come": event._asdict()})
        if self.on_event is not None:
            try:
                self.on_event(event)
            except Exception:
                log.exception("the callback on_event failed; adaptation goes on")

    def _count(self, kind: str, by: int) -> None:
        self.counters[kind] = self.counters.get(kind, 0) + by

    def health(self, method: Method) -> dict[str, float]:
        """Counters and gauges as flat numbers, as an exporter for Prometheus wants them."""
        self.settle(method, wait=True)
        kinds = ("invalid_samples", "update_refused", "suspicious", "collapse", "recovered", "snapshot")
        return {
            "steps": float(self.steps),
            **{kind: self.counters.get(kind, 0) for kind in kinds},
            "lr_scale": self.scale,
            "frozen": float(self.frozen),
            **self.latest,
        }

    # ---- on disk ----

    def keep(self, method: Method) -> None:
        """After a step: write a snapshot if one is due, and remove the oldest."""
        if self.snapshots is None or self.steps % self.snapshot_every:
            return
        folder = Path(str(self.snapshots))
        try:
            folder.mkdir(parents=True, exist_ok=True)
            method.save(folder / f"{method.name}-{self.steps:010d}.safetensors")
            for old in sorted(folder.glob(f"{method.name}-*.safetensors"))[: -self.snapshots_kept]:
                old.unlink(missing_ok=True)
            self._emit("snapshot", self.steps, {})
        except Exception as error:  # a full disk must not stop the answers
            self._emit("snapshot_failed", self.steps, {"reason": str(error)})

    def state(self) -> dict[str, Tensor]:
        """What a resumed stream must know: the factor on the learning rate, the bands, whether it is frozen."""
        pool = torch.tensor(self._pool, dtype=torch.float64).reshape(-1, len(SIGNALS))
        usual = torch.zeros(()) if self._usual is None else self._usual.detach().float().cpu()
        return {
            "scale": torch.tensor(self.scale, dtype=torch.float64),
            "frozen": torch.tensor(self.frozen),
            "steps": torch.tensor(self.steps),
            "pool": pool,
            "usual": usual,
        }

    def restore(self, saved: Mapping[str, Tensor]) -> None:
        """Go on from `state()`."""
        self.forget()
        self.scale, self.frozen = float(saved["scale"]), bool(saved["frozen"])
        self.steps = int(saved["steps"])
        self._pool = [tuple(row) for row in saved["pool"].tolist()]
        self._usual = saved["usual"] if float(saved["usual"]) > 0 else None


class _Asking:
    """Mean predictions of the adapted model and of the source on the same samples."""

    def __init__(self) -> None:
        self.samples = 0
        self.sums: list[Tensor] = []
        self.sure: list[Tensor] = []
        self.agree: list[Tensor] = []

    def add(self, mine: Tensor, theirs: Tensor, usable: Tensor) -> None:
        new = [torch.where(usable[:, None], p, 0).double().sum(dim=0) for p in (mine, theirs)]
        self.sums = [a + b for a, b in zip(self.sums, new, strict=True)] if self.sums else new
        self.samples += int(usable.sum())
        sure, label = theirs[usable].max(dim=1)
        self.sure.append(sure)
        self.agree.append(mine[usable].argmax(dim=1) == label)

    def agreement(self) -> float:
        """On the half of the samples that the source is surer of."""
        order = torch.cat(self.sure).argsort(descending=True)
        return float(torch.cat(self.agree)[order[: max(1, len(order) // 2)]].double().mean())

    def perplexities(self) -> tuple[float, float]:
        """exp of the entropy of the mean prediction: over how many classes it is spread."""
        found = []
        for total in self.sums:
            p = total / total.sum().clamp_min(1e-12)
            found.append(float((-(p * p.clamp_min(1e-12).log()).sum()).exp()))
        return found[0], found[1]


def _signals(method: Method, logits: Tensor, usable: Tensor) -> Tensor:
    """share, entropy, uncertainty, norm, distance: (5,) float64, on the device."""
    z = exact(logits)
    count = usable.sum().clamp_min(1)
    votes = torch.zeros(z.shape[1], device=z.device).index_add_(0, z.argmax(dim=1), usable.float())
    mass = method.objective.log_mass(z)  # once for entropy and u
    entropy = -(mass.exp() * mass).sum(dim=1)
    doubt = mass[:, -1].exp() if mass.shape[1] > z.shape[1] else 1 - mass.amax(dim=1).exp()
    means = [torch.where(usable, v, 0).sum() / count for v in (entropy, doubt, torch.linalg.vector_norm(z, dim=1))]
    if method.parameters:
        params = [p.detach() for p in method.parameters.values()]
        moved = torch._foreach_norm(
            torch._foreach_sub(params, [method.source_values[name] for name in method.parameters])
        )
        distance = torch.linalg.vector_norm(torch.stack([m.double() for m in moved]))
    else:
        distance = torch.zeros((), device=z.device)
    return torch.stack([v.double() for v in (votes.max() / count, *means, distance)])


def _largest(x: Tensor) -> Tensor:
    """Largest entry of each sample by size, (B,); NaN where there is one."""
    flat = exact(x).flatten(1)
    return torch.maximum(flat.amax(dim=1), -flat.amin(dim=1))  # ten times as fast as aminmax or a norm


def _floating(x: Input) -> list[Tensor]:
    values = [x] if isinstance(x, Tensor) else list(x.values() if isinstance(x, Mapping) else x)
    return [v for v in values if isinstance(v, Tensor) and v.is_floating_point() and v.ndim >= 2]


def _replaced(x: Input, valid: Tensor) -> Input:
    """The batch with a usable sample in the place of each unusable one: BatchNorm and finite sums stay what they are."""
    if valid.device.type == "cpu" and bool(valid.all()):  # asking it costs nothing
        return x
    good, some = valid.to(torch.uint8).argmax().view(1), valid.any()  # the first usable one; zeros if there is none

    def mended(value: Any) -> Any:
        if not (isinstance(value, Tensor) and value.is_floating_point() and value.ndim >= 2):
            return value
        filler = torch.where(some, value.index_select(0, good), 0)
        return torch.where(valid.view(-1, *[1] * (value.ndim - 1)), value, filler)

    if isinstance(x, Tensor):
        return mended(x)  # type: ignore[no-any-return]
    if isinstance(x, Mapping):
        return {key: mended(value) for key, value in x.items()}
    return tuple(mended(value) for value in x)
