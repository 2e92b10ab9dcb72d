"""What the demo shows, without a browser: four methods adapt to the same batches of one stream."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal

import torch
from pydantic import model_validator
from torch import Tensor, nn

import come
from come import corruptions, methods
from come.bench import models
from come.bench.cell import Description, Severity
from come.bench.data import Batch, FashionSource, Stream, batches
from come.bench.data.embedded import KNOWN, clean_source
from come.bench.measure import Table
from come.bench.record import Rows
from come.errors import require, unknown
from come.images.normalization import Normalization
from come.metrics import accuracy

CLEAN = "none"  # the corruption that leaves images as they are
METHODS = ("tent", "eata", "sar", "deyo")  # methods that take an objective and one or two forwards
RATES = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
BATCH = 64
RISK = 0.05  # share of wrong answers that abstaining guarantees on clean images
EXAMPLES = 6  # images of each batch that are shown
RECENT = 5  # batches that a point of a curve averages


class Choice(Description):
    """What a visitor chooses."""

    corruption: str = "snow"
    severity: Severity = 3
    rate: float = 1.0  # factor on the learning rate of every method that has one
    method: Literal["tent", "eata", "sar", "deyo"] = "tent"  # what EM and COME are the objective of
    model: Literal["fashion-resnet-bn", "fashion-resnet-gn", "fashion-vit"] = "fashion-resnet-bn"
    guard: bool = True  # whether the guard undoes a collapse; otherwise it reports it

    @model_validator(mode="after")
    def _check(self) -> Choice:
        if self.corruption not in (known := (CLEAN, *corruptions.names())):
            raise unknown("corruption", self.corruption, known)
        require(self.rate in RATES, "rate", self.rate, f"one of {', '.join(f'{rate:g}' for rate in RATES)}")
        return self


@dataclass
class Lane:
    """One method on the stream, and its answers so far."""

    title: str
    adapter: come.Adapter
    events: list[come.Event] = field(default_factory=list)
    rows: Rows = field(default_factory=dict)
    """Of all samples so far: label, prediction, softmax (the largest probability), abstain; (N,)."""

    def take(self, batch: Batch) -> None:
        """Adapt to a batch and keep what was answered."""
        step = self.adapter.step(batch.images)
        table = Table(self.adapter.method.objective)
        table.add(step, batch, 0)
        assert step.abstain is not None  # it was calibrated
        found = table.rows() | {"abstain": step.abstain}
        kept = ("label", "prediction", "softmax", "abstain")
        self.rows = {name: torch.cat([*([self.rows[name]] if self.rows else []), found[name]]) for name in kept}

    @property
    def accuracy(self) -> float:
        """Share of right answers."""
        return accuracy(self.rows["prediction"], self.rows["label"])

    @property
    def confidence(self) -> float:
        """Mean of the largest softmax probability, whatever the objective."""
        return self.rows["softmax"].mean().item()

    @property
    def answered(self) -> float:
        """Share of the samples that it does not abstain from."""
        return 1 - self.rows["abstain"].float().mean().item()

    @property
    def wrong(self) -> float | None:
        """Share of wrong answers among those; None if there are none."""
        relied = ~self.rows["abstain"]
        if not relied.any():
            return None
        return 1 - accuracy(self.rows["prediction"][relied], self.rows["label"][relied])

    def curve(self, name: str) -> list[float]:
        """Mean "accuracy" or "confidence" of the last `RECENT` batches, after each batch."""
        right = (self.rows["prediction"] == self.rows["label"]).float()
        values = {"accuracy": right, "confidence": self.rows["softmax"]}[name]
        ends = range(BATCH, len(values) + BATCH, BATCH)
        return [values[max(0, end - RECENT * BATCH) : end].mean().item() for end in ends]

    @property
    def rate(self) -> float | None:
        """The learning rate with the guard's factor; None if the method has none."""
        if not self.adapter.method.descends:
            return None
        return self.adapter.learning_rate(BATCH) * self.adapter.health()["lr_scale"]

    @property
    def collapses(self) -> int:
        """Collapses that the guard has found."""
        return sum(event.kind == "collapse" for event in self.events)

    @property
    def state(self) -> str:
        """What the guard found last, in one or two words."""
        if not self.adapter.method.changes:
            return "does not adapt"
        return STATES.get(self.events[-1].kind, self.events[-1].kind) if self.events else "not checked yet"

    @property
    def alarm(self) -> bool:
        """Whether `state` is an alarm."""
        return bool(self.events) and self.events[-1].kind not in FINE

    @property
    def said(self) -> str:
        """The guard's last message with its batch; "" if there is none."""
        if not self.events:
            return ""
        last = self.events[-1].step
        words = [event.message.removeprefix(f"{event.kind}: ") for event in self.events if event.step == last]
        return f"Batch {last + 1}: {'; '.join(words)}."


FINE = ("healthy", "raised", "statistics")  # kinds of events that are not alarms
STATES = {**dict.fromkeys(FINE, "healthy"), "suspicious": "unusual", "collapse": "collapsed"}
"""Kinds of events in the words of the page; others are shown by their kind."""


@dataclass(frozen=True)
class Scene:
    """What the page shows after a batch."""

    choice: Choice
    number: int  # batches so far
    total: int
    images: Tensor  # (E, 3, 32, 32) uint8: the first ones of the batch, as the model saw them
    lanes: Sequence[Lane]

    def example(self, lane: Lane, place: int) -> tuple[str, str, float, bool]:
        """Of an image shown: its class, the predicted class, the confidence, and whether the method abstains."""
        row = {name: values[BATCH * (self.number - 1) + place] for name, values in lane.rows.items()}
        label, prediction = (KNOWN[int(row[name])] for name in ("label", "prediction"))
        return label, prediction, row["softmax"].item(), bool(row["abstain"])


_model = lru_cache(models.load)
_data = lru_cache(FashionSource)


def lanes(choice: Choice) -> list[Lane]:
    """No Adapt, the chosen method with EM and with COME, and the recommended method; calibrated on clean images."""
    model = _model(choice.model)
    images, labels = (torch.split(part, BATCH) for part in clean_source())
    source = [(model.preprocess(x), y) for x, y in zip(images, labels, strict=True)]
    name = methods.get(choice.method).__name__
    wanted = {
        "No Adapt": ("source", "em"),
        f"{name} + EM": (choice.method, "em"),
        f"{name} + COME": (choice.method, "come"),
        "Steady": ("steady", "invariant"),
    }
    found = []
    for title, (method, objective) in wanted.items():
        events: list[come.Event] = []
        guard = come.Guard(policy="recover" if choice.guard else "warn", on_event=events.append)
        known = methods.get(method)
        more: dict[str, Any] = {"source": [x for x, _ in source]} if "source" in known.hyperparameters() else {}
        if not choice.guard:
            more["statistics"] = known.unguarded  # with "warn" the guard would still choose them
        if known.descends:
            batch_norm = any(isinstance(layer, nn.BatchNorm2d) for layer in model.module.modules())
            more["lr"] = choice.rate * methods.make(method, **more).learning_rate(BATCH, batch_norm)
        adapter = come.adapt(model.module, method, objective=objective, guard=guard, **more)
        adapter.calibrate(source, risk=RISK)
        found.append(Lane(title, adapter, events))
    return found


def watch(choice: Choice) -> Iterator[Scene]:
    """Run the stream batch by batch; runs share the source model and the images, and nothing that changes."""
    running, data, preprocess = lanes(choice), _data(), _model(choice.model).preprocess
    corruption = None if choice.corruption == CLEAN else choice.corruption
    stream = Stream.shuffled("fashion", len(data), corruption=corruption, severity=choice.severity, seed=0)
    total = -(-len(data) // BATCH)
    for number, batch in enumerate(batches(data, stream, preprocess, batch_size=BATCH), start=1):
        for lane in running:
            lane.take(batch)
        seen = Normalization.of(preprocess.normalization).images(batch.images[:EXAMPLES])
        images = (seen * 255).round().clamp(0, 255).byte()
        yield Scene(choice, number, total, images, running)
