"""The unit that is run and resumed: one method with one objective on one piece of a setting, with one seed."""

from __future__ import annotations

import hashlib
import json
import platform
import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor

from come import settings
from come.data import Account, Source, batches
from come.method import Method
from come.methods import get as get_method
from come.metrics import accuracy, fpr
from come.models import Model

Rows = dict[str, Tensor]
"""One entry per sample: index, label, prediction, confidence, msp, uncertainty, entropy, energy, norm, used, domain."""


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
    normalisation: str = "model"
    source_data: str | None = None
    source_size: int = 2000
    replay: str | None = None
    """Digest of the manifests that are replayed, if any."""

    @property
    def key(self) -> str:
        """Sixteen hexadecimal digits that name this configuration and no other.

        Example:
            >>> Cell("m", "d", 10, "standard", ("fog",), 5, "tent", "em").key
            '912fd7623d8a89b0'
        """
        canonical = json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()[:16]

    @property
    def adapter(self) -> tuple[str, str, str, int | None]:
        """What two cells must share to use one adapter, one after the other."""
        seed = self.seed if "seed" in get_method(self.method).hyperparameters() else None
        return self.method, self.objective, json.dumps(self.hyper, sort_keys=True), seed

    def episodes(self) -> list[settings.Episode]:
        """The streams of this cell, in order."""
        setting = settings.get(self.setting)
        return list(setting.episodes(self.data, self.size, self.corruptions, self.severity, self.seed))


def run_cell(
    cell: Cell,
    method: Method,
    model: Model,
    source: Source,
    *,
    device: torch.device,
    workers: int = 0,
    episodes: Sequence[settings.Episode] | None = None,
    on_batch: Callable[[int], None] = lambda samples: None,
) -> tuple[Rows, dict[str, Any]]:
    """Run a cell with an adapter that is at hand.

    Args:
        episodes: run these in place of the setting's own (a replayed manifest).
        on_batch: called with the number of samples done since the last call.

    Returns:
        rows, and what is known only after running: metrics, counts, time, memory.
    """
    account, parts, domains = Account(), [], []
    began = time.perf_counter()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    for number, episode in enumerate(cell.episodes() if episodes is None else episodes):
        if episode.reset:
            method.reset()
        domains.append(episode.stream.domain)
        for batch in batches(
            source,
            episode.stream,
            model.preprocess,
            batch_size=cell.batch_size,
            device=device,
            workers=workers,
            account=account,
        ):
            step = method.step(batch.images)
            parts.append(_rows(method, step.logits, step.used, batch.labels, batch.indices, number))
            on_batch(len(batch.labels))
    rows = {name: torch.cat([part[name] for part in parts]).cpu() for name in parts[0]} if parts else {}
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        memory = torch.cuda.max_memory_allocated(device) / 2**20
    else:
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    return rows, {
        "domains": domains,
        "metrics": {domain: _metrics(rows, rows["domain"] == i) for i, domain in enumerate(domains)} if rows else {},
        "samples": len(rows["label"]) if rows else 0,
        "bad_images": account.bad,
        "lr": method.learning_rate(cell.batch_size) if method.descends else None,
        "seconds": time.perf_counter() - began,
        "seconds_waiting_for_data": account.waited,
        "peak_memory_mb": round(memory, 1),
    }


def _rows(
    method: Method, logits: Tensor, used: Tensor | None, labels: Tensor, indices: Tensor, domain: int
) -> dict[str, Tensor]:
    """What is kept of each sample; all tensors stay on the device."""
    z = logits.float()
    log_p = z.log_softmax(dim=1)
    probability, prediction = log_p.exp().max(dim=1)
    return {
        "index": indices.to(torch.int32),
        "label": labels.to(torch.int32),
        "prediction": prediction.to(torch.int32),
        "confidence": method.objective.confidence(z).float(),
        "msp": probability,
        "uncertainty": method.objective.uncertainty(z).float(),
        "entropy": -(log_p.exp() * log_p).sum(dim=1),
        "energy": z.logsumexp(dim=1),
        "norm": z.norm(dim=1),
        "used": torch.zeros_like(prediction, dtype=torch.bool) if used is None else used,
        "domain": torch.full_like(labels, domain, dtype=torch.int16),
    }


def _metrics(rows: Rows, chosen: Tensor) -> dict[str, float]:
    label, prediction = rows["label"][chosen], rows["prediction"][chosen]
    return {
        "accuracy": accuracy(prediction, label),
        "fpr": fpr(rows["confidence"][chosen], prediction == label),
        "samples": int(chosen.sum()),
        "used": rows["used"][chosen].double().mean().item(),
    }


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
