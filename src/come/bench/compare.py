"""Two runs side by side: what changed beyond chance, sample by sample.

Cells of the two runs are paired by method, objective, domain and seed, and their rows by the identity of each sample. McNemar's
exact test looks at the samples that only one of the two got right; its p-values are corrected for the number of rows (Holm).
With several seeds the spread of the difference over seeds stands beside it: a change within that spread is noise of the
order of the stream, however small its p-value.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean, stdev

import torch
from torch import Tensor

from come.bench import Record, RunFolder
from come.errors import InputError
from come.metrics import paired_difference

LEVEL = 0.01
"""Corrected p-value below which a change is called one."""


@dataclass(frozen=True)
class Change:
    """One method with one objective on one domain, in both runs.

    Args:
        samples: how many samples both runs saw, over all seeds.
        before: accuracy in the first run, in percent.
        after: in the second.
        p: McNemar's p-value, corrected for the number of rows.
        spread: standard deviation of the difference over seeds, in points; None for one seed.
        fpr: change of the FPR, in points.
    """

    method: str
    objective: str
    domain: str
    samples: int
    before: float
    after: float
    p: float
    spread: float | None
    fpr: float

    @property
    def verdict(self) -> str:
        """ "better", "worse", or "same" for what chance and seeds explain."""
        difference = self.after - self.before
        if self.p >= LEVEL or (self.spread is not None and abs(difference) <= self.spread):
            return "same"
        return "better" if difference > 0 else "worse"


def compare_runs(first: RunFolder, second: RunFolder) -> list[Change]:
    """What changed from the first run to the second.

    Raises:
        InputError: the runs have nothing in common.
    """
    ours, theirs = _by_identity(first.records()), _by_identity(second.records())
    pairs: dict[tuple[str, str, str], list[tuple[Tensor, Tensor, float]]] = {}
    for key in (key for key in ours if key in theirs):
        a, b = ours[key], theirs[key]
        rows_a, rows_b = first.rows(a.key), second.rows(b.key)
        for domain in (d for d in a.result["domains"] if d in b.result["domains"]):
            right_a, right_b = _paired(
                rows_a, a.result["domains"].index(domain), rows_b, b.result["domains"].index(domain)
            )
            if len(right_a):
                change = 100 * (b.result["metrics"][domain]["fpr"] - a.result["metrics"][domain]["fpr"])
                row = (a.cell["method"], a.cell["objective"], domain)
                pairs.setdefault(row, []).append((right_a, right_b, change))
    if not pairs:
        raise InputError(
            f"{first.path} and {second.path} have no method, objective, domain, seed and samples in common; compare runs of "
            "the same data"
        )
    tests = {key: paired_difference(*_joined(found)) for key, found in pairs.items()}
    corrected = _holm({key: test.p for key, test in tests.items()})
    changes = []
    for (method, objective, domain), found in pairs.items():
        before, after = _joined(found)
        by_seed = [100 * (b.double().mean() - a.double().mean()).item() for a, b, _ in found]
        changes.append(
            Change(
                method,
                objective,
                domain,
                len(before),
                100 * before.double().mean().item(),
                100 * after.double().mean().item(),
                corrected[method, objective, domain],
                stdev(by_seed) if len(by_seed) > 1 else None,
                fmean(change for _, _, change in found),
            )
        )
    return changes


def _by_identity(records: Iterable[Record]) -> dict[tuple[object, ...], Record]:
    """Cells by what they are a measurement of; the model, hyperparameters and versions may differ."""
    return {
        (c["method"], c["objective"], c["setting"], c["data"], tuple(c["corruptions"]), c["severity"], c["seed"],
         c["outliers"], c["outlier_ratio"], c["imbalance"], c["rounds"]): r
        for r in records
        for c in (r.cell,)
    }  # fmt: skip


def _paired(a: dict[str, Tensor], domain_a: int, b: dict[str, Tensor], domain_b: int) -> tuple[Tensor, Tensor]:
    """Which of the labelled samples that both saw in that domain each run got right."""
    right_a, right_b = _right(a, domain_a), _right(b, domain_b)
    common = [sample for sample in right_a if sample in right_b]
    return torch.tensor([right_a[s] for s in common]), torch.tensor([right_b[s] for s in common])


def _right(rows: dict[str, Tensor], domain: int) -> dict[tuple[int, int], bool]:
    chosen = (rows["domain"] == domain) & (rows["label"] >= 0)
    right = (rows["prediction"] == rows["label"])[chosen].tolist()
    identity = zip(rows["index"][chosen].tolist(), rows["kind"][chosen].tolist(), strict=True)
    return dict(zip(identity, right, strict=True))


def _joined(found: list[tuple[Tensor, Tensor, float]]) -> tuple[Tensor, Tensor]:
    return torch.cat([a for a, _, _ in found]), torch.cat([b for _, b, _ in found])


def _holm(p: dict[tuple[str, str, str], float]) -> dict[tuple[str, str, str], float]:
    """Holm's correction: the smallest p-value times n, the next times n - 1, ..., never decreasing.

    >>> _holm({("a", "", ""): 0.01, ("b", "", ""): 0.04})
    {('a', '', ''): 0.02, ('b', '', ''): 0.04}
    """
    found, largest = {}, 0.0
    for rank, (key, value) in enumerate(sorted(p.items(), key=lambda item: item[1])):
        largest = max(largest, min(1.0, value * (len(p) - rank)))
        found[key] = largest
    return found
