"""The unit that is run and resumed: one method with one objective on one piece of a setting, with one seed."""

from __future__ import annotations

import contextlib
import hashlib
import json
import platform
import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from come import objectives
from come.adapter import UNKNOWN, Adapter
from come.bench import settings
from come.bench.data import Account, Batch, Source, batches
from come.bench.models import Model
from come.errors import ComeError, InputError
from come.guard import Event
from come.inputs import answered
from come.method import Step
from come.methods import get as get_method
from come.metrics import SCORES, brier, fpr, nll, summary
from come.objectives import Objective

Rows = dict[str, Tensor]
"""One entry per sample: index, label (-1: outlier), prediction, confidence, msp, uncertainty, entropy, energy, norm, nll,
brier, finite, used, domain (number of the episode), kind (place in the stream's shifts)."""


@dataclass(frozen=True)
class Cell:
    """The full configuration of one result; its key is a hash of it."""

    model: str
    data: str
    size: int
    setting: str
    corruptions: tuple[str, ...]
    severity: int
    method: str
    objective: str
    hyper: dict[str, Any] = field(default_factory=dict)
    batch_size: int = 64
    seed: int = 0
    checkpoint: str | None = None
    normalization: str = "model"
    source_data: str | None = None
    source_size: int = 2000
    outliers: str | None = None
    outlier_ratio: float = 0.5
    imbalance: float | None = None
    rounds: int = 1
    guard: bool = False
    replay: str | None = None
    """Digest of the manifests that are replayed, if any."""

    @property
    def key(self) -> str:
        """Sixteen hexadecimal digits that name this configuration and no other.

        Example:
            >>> Cell("m", "d", 10, "standard", ("fog",), 5, "tent", "em").key
            'fad2c29f8d6cfbb6'
        """
        canonical = json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()[:16]

    @property
    def base(self) -> str:
        """The registered name of the method; `method` may carry arguments, as in "tent:keep=0.5"."""
        return self.method.partition(":")[0]

    @property
    def adapter(self) -> tuple[str, str, str, int | None]:
        """What two cells must share to use one adapter, one after the other."""
        seed = self.seed if "seed" in get_method(self.base).hyperparameters() else None
        return self.method, self.objective, json.dumps(self.hyper, sort_keys=True), seed

    def episodes(self, source: Source, outliers: Source | None = None) -> list[settings.Episode]:
        """The streams of this cell, in order, made of the sources that it names."""
        world = settings.World(
            self.data,
            self.size,
            self.corruptions,
            self.severity,
            self.seed,
            labels=lambda: source.labels().tolist(),
            outliers=self.outliers,
            outliers_size=0 if outliers is None else len(outliers),
            outlier_ratio=self.outlier_ratio,
            imbalance=self.imbalance,
            rounds=self.rounds,
        )
        return list(settings.get(self.setting).episodes(world))


class UnfitError(ComeError):
    """A method that cannot be run on this model or these batches; the rest of a grid can be run all the same."""


def run_cell(
    cell: Cell,
    adapter: Adapter,
    model: Model,
    source: Source,
    *,
    device: torch.device,
    workers: int = 0,
    episodes: Sequence[settings.Episode] | None = None,
    outliers: Source | None = None,
    events: Sequence[Event] = (),
    on_batch: Callable[[int], None] = lambda samples: None,
) -> tuple[Rows, dict[str, Any]]:
    """Run a cell with an adapter that has not seen a batch.

    Args:
        episodes: run these in place of the setting's own (a replayed manifest).
        outliers: the outlier source, if the streams have outliers.
        events: where the adapter's guard reports to, see `Guard.on_event`.
        on_batch: called with the number of samples done since the last call.

    Returns:
        rows, and what is known only after running: metrics, counts, time, memory.
    """
    account, parts, domains, fresh = Account(), [], [], []
    objective = objectives.get(cell.objective)
    began = time.perf_counter()
    _forget_peak(device)
    for number, episode in enumerate(cell.episodes(source, outliers) if episodes is None else episodes):
        if episode.reset:
            adapter.reset()
        domains.append(episode.stream.domain)
        fresh.append(episode.reset)
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
            parts.append(_rows(objective, step, batch, number))
            on_batch(len(batch.labels))
    if not parts:
        raise InputError(f"not one image of {source.name} could be read; {account.bad} were skipped: fix the data")
    rows = {name: torch.cat([part[name] for part in parts]).cpu() for name in parts[0]} if parts else {}
    memory = _peak_megabytes(device)
    return rows, {
        "domains": domains,
        "metrics": domain_metrics(rows, domains, fresh),
        "fresh": fresh,
        "samples": len(rows["label"]) if rows else 0,
        "bad_images": account.bad,
        "health": adapter.health() if cell.guard else {},
        "events": [[event.kind, event.step] for event in events if event.kind in ("collapse", "recovered")],
        "lr": adapter.learning_rate(cell.batch_size) if adapter.method.descends else None,
        "seconds": time.perf_counter() - began,
        "seconds_waiting_for_data": account.waited,
        "peak_memory_mb": round(memory, 1),
    }


def _forget_peak(device: torch.device) -> None:
    """Begin to measure the peak memory anew, as far as the system lets us."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with contextlib.suppress(OSError):  # Linux; elsewhere the peak is that of the whole process so far
        Path("/proc/self/clear_refs").write_text("5")


def _peak_megabytes(device: torch.device) -> float:
    """On a GPU what tensors took at most since then, on a CPU the largest size of the process."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) / 2**20
    with contextlib.suppress(OSError, StopIteration, ValueError):
        status = Path("/proc/self/status").read_text().splitlines()
        return int(next(line for line in status if line.startswith("VmHWM")).split()[1]) / 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def _rows(objective: Objective, step: Step, batch: Batch, domain: int) -> dict[str, Tensor]:
    """What is kept of each sample; all tensors stay on the device. A diverged model has values too: the least confident."""
    z, labels = step.logits.float(), batch.labels
    finite = answered(z) if step.valid is None else step.valid
    z = torch.where(finite[:, None], z, UNKNOWN)
    log_p = z.log_softmax(dim=1)
    probability, prediction = log_p.exp().max(dim=1)
    return {
        "index": batch.indices.to(torch.int32),
        "label": labels.to(torch.int32),
        "prediction": prediction.to(torch.int32),
        "confidence": torch.where(finite, objective.confidence(z).float(), 0),
        "msp": torch.where(finite, probability, 0),
        "uncertainty": torch.where(finite, objective.uncertainty(z).float(), 1),
        "entropy": torch.special.entr(log_p.exp()).sum(dim=1),
        "energy": z.logsumexp(dim=1),
        "norm": torch.where(finite[:, None] & ~z.isneginf(), z, 0).norm(dim=1),  # a masked class is -inf
        "nll": nll(log_p, labels),
        "brier": brier(log_p, labels),
        "finite": finite,
        "used": torch.zeros_like(finite) if step.used is None else step.used,
        "domain": torch.full_like(labels, domain, dtype=torch.int16),
        "kind": batch.kinds.to(torch.int16),
    }


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


def surroundings(device: torch.device) -> dict[str, Any]:
    """Where a result was made: versions, device, threads."""
    found = {}
    for package in ("come-tta", "torch", "timm", "numpy"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "from source"
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return {
        "versions": {"python": platform.python_version(), **found},
        "device": f"{device.type}: {name}",
        "threads": torch.get_num_threads(),
    }
