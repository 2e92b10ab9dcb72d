"""Finished cells that nobody ran: a classifier of ten classes that is right as often as a test says."""

from __future__ import annotations

import torch

from come.bench.cell import Cell
from come.bench.folder import RunFolder
from come.bench.measure import domain_metrics
from come.bench.record import COLUMNS, Machine, Record, Result

PAIRS = (("source", "em"), ("tent", "em"), ("tent", "come"), ("sar", "em"), ("sar", "come"))
RIGHT = {"source": 0.5, "tent": 0.6, "sar": 0.7}


def rows_of(right, *, size=200, seed=0, outliers=0, domains=1):
    """Rows of `domains` domains of `size` samples; `right` is a share, or a function of the place in the domain."""
    draw = torch.Generator().manual_seed(seed)
    n = size * domains
    label = torch.randint(0, 10, (n,), generator=torch.Generator().manual_seed(0))
    chance = torch.tensor([right(i / size % 1) if callable(right) else right for i in range(n)])
    correct = torch.rand(n, generator=draw) < chance
    confidence = (0.3 * correct + 0.7 * torch.rand(n, generator=draw)).clamp(0, 1)
    outlier = torch.arange(n) % size < outliers
    found = {
        "index": torch.arange(size).repeat(domains),
        "label": label.masked_fill(outlier, -1),
        "prediction": torch.where(correct, label, (label + 1) % 10),
        "entropy": 2 * (1 - confidence),
        "uncertainty": 1 - confidence,
        "norm": 10 + confidence,
        "finite": torch.ones(n),
        "used": torch.rand(n, generator=draw) < 0.5,
        "domain": torch.arange(domains).repeat_interleave(size),
        "kind": -outlier.int(),
        "belief": confidence,
        **{name: k + confidence for k, name in enumerate(("confidence", "softmax", "energy", "nll", "brier"))},
    }
    return {name: found[name].to(kind) for name, kind in COLUMNS.items()}


def add(folder, method, objective, domains=("fog",), *, right=None, rows=None, metrics=None, fresh=None, **more):
    """Write a finished cell and return its record; `more` are fields of the cell, of the machine, or of `rows_of`."""
    about = {name: more.pop(name) for name in ("device", "threads", "load") if name in more}
    found = {
        name: more.pop(name)
        for name in ("seconds", "peak_memory_mb", "bad_images", "events", "score", "lr")
        if name in more
    }
    outliers = more.pop("samples_outside", 0)
    right = RIGHT.get(method, 0.5) + 0.05 * (objective == "come") if right is None else right
    more = {"size": 200, "severity": 5, "seed": 0, **more}
    cell = Cell(corruptions=tuple(domains), method=method, objective=objective, **more)
    if rows is None:
        rows = rows_of(right, size=cell.size, seed=cell.seed, outliers=outliers, domains=len(domains))
    fresh = (True,) * len(domains) if fresh is None else tuple(fresh)
    result = Result(
        domains=tuple(domains), fresh=fresh, metrics=metrics or domain_metrics(rows, domains, fresh),
        samples=len(rows["label"]), seconds_waiting_for_data=0.5,
        **{"seconds": 2.0 + (method != "source"), "peak_memory_mb": 900.0, "lr": None if method == "source" else 0.001} | found,
    )  # fmt: skip
    machine = Machine(
        versions={"python": "3.11", "torch": "2"}, **{"device": "cpu: test", "threads": 1, "load": 0.0, **about}
    )
    record = Record(cell=cell, result=result, machine=machine)
    folder.write(record, rows)
    return record


def grid(path, pairs=PAIRS, domains=("fog", "contrast"), seeds=(0,), **more):
    """A run: each pair on each domain with each seed."""
    folder = RunFolder(path)
    for method, objective in pairs:
        for seed in seeds:
            for domain in domains:
                add(folder, method, objective, (domain,), seed=seed, **more)
    return folder
