"""Run one cell: stream by stream, batch by batch, a row for every sample, metrics from the rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from come import objectives
from come.adapter import Adapter
from come.bench.cell import Cell
from come.bench.data import Account, Batch, Source, batches
from come.bench.data.store import Resident
from come.bench.machine import ALONE, Jobs, Meter
from come.bench.models import Model
from come.bench.record import COLUMNS, Record, Result, Rows
from come.bench.settings import Episode
from come.errors import ComeError, InputError
from come.guard import Event
from come.inputs import answered
from come.method import Step
from come.metrics import SCORES, brier, fpr, nll, summary
from come.objectives import Objective
from come.transition import UNKNOWN

BLOCK = 2**21
"""Logits that rows are made from at once."""


class UnfitError(ComeError):
    """A method that cannot be run on this model or these batches; the rest of a grid can be run all the same."""


def run_cell(
    cell: Cell,
    adapter: Adapter,
    model: Model,
    source: Source,
    episodes: Sequence[Episode],
    *,
    device: torch.device,
    workers: int = 0,
    outliers: Source | None = None,
    events: Sequence[Event] = (),
    jobs: Jobs = ALONE,
    on_batch: Callable[[int], None] = lambda samples: None,
) -> tuple[Record, Rows]:
    """Run a cell with an adapter that has not seen a batch.

    Args:
        episodes: the streams, in order.
        outliers: the outlier source, if the streams have outliers.
        events: where the adapter's guard reports to, see `Guard.on_event`.
        jobs: the processes that work on the run.
        on_batch: called with the number of samples done since the last call.

    Returns:
        the record and its rows.
    """
    account, table, meter = Account(), Table(objectives.get(cell.objective)), Meter(device, jobs)
    for number, episode in enumerate(episodes):
        if episode.reset:
            adapter.reset()
        for batch in batches(
            source,
            episode.stream,
            model.preprocess,
            batch_size=episode.batch_size or cell.batch_size,
            device=device,
            workers=workers,
            account=account,
            outliers=outliers,
        ):
            try:
                step = adapter.step(batch.images)
            except InputError as error:
                raise UnfitError(str(error)) from error
            table.add(step, batch, number)
            on_batch(len(batch.labels))
    rows = table.rows()
    if not rows:
        raise InputError(f"not one image of {source.name} could be read; {account.bad} were skipped: fix the data")
    kept = sum(held.bytes for held in (source, outliers) if isinstance(held, Resident))  # images are not the method's
    domains = tuple(episode.stream.domain for episode in episodes)
    fresh = tuple(episode.reset for episode in episodes)
    result = Result(
        domains=domains,
        fresh=fresh,
        metrics=domain_metrics(rows, domains, fresh),
        samples=len(rows["label"]),
        bad_images=account.bad,
        health=adapter.health() if cell.guard else {},
        events=tuple((event.kind, event.step) for event in events if event.kind in ("collapse", "recovered")),
        lr=adapter.learning_rate(cell.batch_size) if adapter.method.descends else None,
        seconds=meter.seconds(),
        seconds_waiting_for_data=account.waited,
        peak_memory_mb=round(meter.peak_megabytes() - kept / 2**20, 1),
    )
    return Record(cell=cell, result=result, machine=meter.machine()), rows


class Table:
    """The rows of a cell, made from many batches at a time: the same numbers in far fewer operations."""

    def __init__(self, objective: Objective) -> None:
        self._objective, self._parts = objective, list[Rows]()
        self._seen, self._values = list[_Seen](), 0

    def add(self, step: Step, batch: Batch, domain: int) -> None:
        """Note what a step said of a batch; all tensors stay on the device."""
        marks = torch.full_like(batch.kinds, domain)
        self._seen.append(_Seen(step.logits, step.valid, step.used, batch.labels, batch.indices, batch.kinds, marks))
        self._values += step.logits.numel()
        if self._values >= BLOCK:
            self._flush()

    def rows(self) -> Rows:
        """All of them, on the host; empty if there were no batches."""
        self._flush()
        return {name: torch.cat([part[name] for part in self._parts]).cpu() for name in COLUMNS if self._parts}

    def _flush(self) -> None:
        if self._seen:
            self._parts.append(_rows(self._objective, self._seen))
            self._seen, self._values = [], 0


class _Seen(NamedTuple):
    """Of a batch."""

    logits: Tensor
    valid: Tensor | None
    used: Tensor | None
    labels: Tensor
    indices: Tensor
    kinds: Tensor
    domains: Tensor


def _rows(objective: Objective, seen: Sequence[_Seen]) -> Rows:
    """What is kept of each sample. A diverged model has values too: the least confident."""
    z, labels = torch.cat([s.logits for s in seen]).float(), torch.cat([s.labels for s in seen])
    judged = [s.valid for s in seen if s.valid is not None]  # by the guard, if there is one
    finite = torch.cat(judged) if len(judged) == len(seen) else answered(z)
    z = torch.where(finite[:, None], z, UNKNOWN)
    log_p = z.log_softmax(dim=1)
    probability, prediction = log_p.exp().max(dim=1)
    found = {
        "index": torch.cat([s.indices for s in seen]),
        "label": labels,
        "prediction": prediction,
        "confidence": torch.where(finite, objective.confidence(z).float(), 0),
        "msp": torch.where(finite, probability, 0),
        "uncertainty": torch.where(finite, objective.uncertainty(z).float(), 1),
        "entropy": torch.special.entr(log_p.exp()).sum(dim=1),
        "energy": z.logsumexp(dim=1),
        "norm": torch.where(finite[:, None] & ~z.isneginf(), z, 0).norm(dim=1),  # a masked class is -inf
        "nll": nll(log_p, labels),
        "brier": brier(log_p, labels),
        "finite": finite,
        "used": torch.cat([s.logits.new_zeros(len(s.logits)).bool() if s.used is None else s.used for s in seen]),
        "domain": torch.cat([s.domains for s in seen]),
        "kind": torch.cat([s.kinds for s in seen]),
    }
    return {name: found[name].to(kind) for name, kind in COLUMNS.items()}


def domain_metrics(
    rows: Rows, domains: Sequence[str], fresh: Sequence[bool], score: str = "confidence"
) -> dict[str, dict[str, float]]:
    """All metrics of each domain; where the method was not reset before it, also the FPR over everything since."""
    found: dict[str, dict[str, float]] = {}
    since = 0
    for i, domain in enumerate(domains):
        since = i if fresh[i] else since
        here = {name: value[rows["domain"] == i] for name, value in rows.items()}
        found[domain] = summary(here, score=score)
        found[domain]["diverged"] = 1 - here["finite"].double().mean().item() if len(here["finite"]) else 0.0
        if since < i:
            so_far = (rows["domain"] >= since) & (rows["domain"] <= i)
            right = rows["prediction"][so_far] == rows["label"][so_far]
            found[domain]["fpr_so_far"] = fpr(SCORES[score]({n: v[so_far] for n, v in rows.items()}), right)
        elif len(domains) > 1 and not all(fresh):
            found[domain]["fpr_so_far"] = found[domain]["fpr"]
    return found
