"""Run one cell: stream by stream, batch by batch, a row for every sample, metrics from the rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from come import objectives
from come.bench.cell import Cell
from come.bench.data import Account, Batch, batches
from come.bench.data.store import DeviceCache
from come.bench.dense import DenseTable, dense_metrics
from come.bench.machine import Meter
from come.bench.record import COLUMNS, Record, Result, Rows
from come.errors import ComeError, InputError
from come.guard import Event
from come.method import Step
from come.metrics import SCORES, brier, fpr, nll, summary
from come.model.inputs import UNKNOWN, answered
from come.objectives import Objective, Opinion, Softmax

if TYPE_CHECKING:
    from come.bench.inputs import Inputs

BLOCK = 2**21  # logits that rows are made from at once

SOFTMAX, OPINION = Softmax(), Opinion()

ALIKE = ("softmax", "belief")  # scores that every record has the FPR by, whatever its own: those of EM and of COME


class UnfitError(ComeError):
    """A method that cannot be run on this model or these batches; the rest of a grid can be run all the same."""


class CellRun:
    """A cell that is being run: its streams, its batches in order, the rows so far, and at the end its record.

    The batches are decoded by `workers` threads and moved to `device`.
    """

    def __init__(self, cell: Cell, inputs: Inputs, device: torch.device, workers: int) -> None:
        self.cell, self._inputs, self._device, self._workers = cell, inputs, device, workers
        self._episodes, self._number = inputs.episodes(cell), 0
        self.streams = [episode.stream for episode in self._episodes]
        named = next((stream.outliers for stream in self.streams if stream.outliers), None)
        self._outliers = None if named is None else inputs.outliers[named]
        self._account = Account()
        self._table: Table | DenseTable = Table(objectives.get(cell.objective))
        if cell.dense:
            self._table = DenseTable(inputs.model.preprocess)

    @property
    def samples(self) -> int:
        """Of all streams."""
        return sum(map(len, self.streams))

    def __iter__(self) -> Iterator[tuple[Batch, bool]]:
        """The batches, and whether the method is to be reset before each."""
        for number, episode in enumerate(self._episodes):
            self._number, fresh = number, episode.reset
            for batch in batches(
                self._inputs.source,
                episode.stream,
                self._inputs.model.preprocess,
                batch_size=episode.batch_size or self.cell.batch_size,
                device=self._device,
                workers=self._workers,
                account=self._account,
                outliers=self._outliers,
            ):
                yield batch, fresh
                fresh = False

    def add(self, step: Step, batch: Batch) -> None:
        """Note what a step said of the last batch."""
        self._table.add(step, batch, self._number)

    def record(
        self, meter: Meter, health: dict[str, float], events: Sequence[Event], lr: float | None, together: int = 1
    ) -> tuple[Record, Rows]:
        """The record and its rows, when all batches are done.

        Health and events are of the guard. Each of `together` cells that shared the meter is charged its share of the time.
        """
        rows, source = self._table.rows(), self._inputs.source
        if not rows:
            bad = self._account.bad
            raise InputError(f"not one image of {source.name} could be read; {bad} were skipped: fix the data")
        kept = sum(held.bytes for held in (source, self._outliers) if isinstance(held, DeviceCache))  # not the method's
        domains = tuple(stream.domain for stream in self.streams)
        fresh = tuple(episode.reset for episode in self._episodes)
        result = Result(
            domains=domains,
            fresh=fresh,
            metrics=dense_metrics(rows, domains) if self.cell.dense else domain_metrics(rows, domains, fresh),
            samples=len(rows["index"]),
            bad_images=self._account.bad,
            health=health if self.cell.guarded else {},
            events=tuple((event.kind, event.step) for event in events if event.kind in ("collapse", "recovered")),
            lr=lr,
            seconds=meter.seconds() / together,
            seconds_waiting_for_data=self._account.waited,
            peak_memory_mb=round(meter.peak_megabytes() - kept / 2**20, 1),
        )
        return Record(cell=self.cell, result=result, machine=meter.machine(together)), rows


class Table:
    """The rows of a cell, made from many batches at once: the same numbers in far fewer operations."""

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
    """What the rows of a batch are made from."""

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
    opinion = OPINION.log_mass(z).float().exp()
    found = {
        "index": torch.cat([s.indices for s in seen]),
        "label": labels,
        "prediction": log_p.exp().max(dim=1).indices,
        "confidence": torch.where(finite, objective.confidence(z).float(), 0),
        "softmax": torch.where(finite, SOFTMAX.confidence(z).float(), 0),
        "belief": torch.where(finite, opinion[:, :-1].amax(dim=1), 0),
        "uncertainty": torch.where(finite, opinion[:, -1], 1),
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
    """All metrics of each domain by a score, and the FPR by each of `ALIKE` as "fpr_softmax" and "fpr_belief".

    Where the method was not reset before it, also the FPR over everything since.
    """
    found: dict[str, dict[str, float]] = {}
    since = 0
    for i, domain in enumerate(domains):
        since = i if fresh[i] else since
        here = {name: value[rows["domain"] == i] for name, value in rows.items()}
        found[domain] = summary(here, score=score)
        if "fpr" in found[domain]:
            right = here["prediction"] == here["label"]
            found[domain] |= {f"fpr_{name}": fpr(SCORES[name](here), right) for name in ALIKE}
        found[domain]["diverged"] = 1 - here["finite"].double().mean().item() if len(here["finite"]) else 0.0
        if since < i:
            so_far = (rows["domain"] >= since) & (rows["domain"] <= i)
            right = rows["prediction"][so_far] == rows["label"][so_far]
            found[domain]["fpr_so_far"] = fpr(SCORES[score]({n: v[so_far] for n, v in rows.items()}), right)
        elif len(domains) > 1 and not all(fresh):
            found[domain]["fpr_so_far"] = found[domain]["fpr"]
    return found
