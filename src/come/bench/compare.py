"""Two runs side by side: what changed beyond chance, in accuracy and FPR, and what it costs.

Cells are paired by what they are a measurement of: the data, the stream, the method, the objective, the seed. What a user
changes between two runs (the model, hyperparameters, the guard, ...) may differ, and is said. Streams of different samples are
not compared.

The p-values of all rows are corrected together (Benjamini and Hochberg): of the rows that are called better or worse, at most
5% are expected to be false.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import RenderableType
from rich.table import Table as RichTable
from rich.text import Text

from come.bench import models
from come.bench.cell import Cell
from come.bench.folder import RunFolder
from come.bench.record import Record
from come.bench.report.costs import Cost, by_pair, cost, unlike
from come.bench.report.tables import STYLES
from come.bench.statistics import (
    AVERAGE,
    METRICS,
    ONE_SEED,
    Verdict,
    Verdicts,
    called,
    compared,
    corrected,
    gathered,
    metrics_of,
)
from come.errors import InputError

VARIED = frozenset(
    {"model", *models.OPTIONS, "classes", "guard", "hyper", "source_data", "source_size", "size", "replay", "weights"}
)
"""Fields of a cell that may differ between two runs that are compared."""

Identity = tuple[Any, ...]


@dataclass(frozen=True)
class Change:
    """One method with one objective on one domain, or on average, in both runs."""

    method: str
    objective: str
    domain: str
    verdicts: Mapping[str, Verdict]  # by metric, those that are defined


@dataclass(frozen=True)
class Comparison:
    """What changed from the first run to the second."""

    changes: Sequence[Change]
    differing: Sequence[str]  # what was not the same in the two runs: fields of the cells, versions
    costs: Mapping[tuple[str, str], tuple[Cost, Cost]]  # by method and objective, before and after
    unlike: str  # why the costs are not compared, if they are not
    alone: tuple[int, int]  # cells that only the first run has, and only the second
    score: str  # what FPR ranks samples by


def compare_runs(first: RunFolder, second: RunFolder, score: str = "confidence") -> Comparison:
    """What changed from the first run to the second; `InputError` if they have nothing in common, or cells are ambiguous.

    FPR ranks samples by a score of `come.metrics.SCORES`: by default as published, each objective by its own confidence, and a
    second FPR is by softmax for all.
    """
    ours, theirs = _by_identity(first, score), _by_identity(second, score)
    both = [(ours[key], theirs[key]) for key in ours if key in theirs]
    if not both:
        raise InputError(
            f"{first.path} and {second.path} have no cell in common: compare runs of the same data, setting, method, "
            "objective, corruption and seed"
        )
    before, after = ([pair[i] for pair in both] for i in (0, 1))
    groups_before, groups_after = by_pair(before), by_pair(after)
    judged: Verdicts = {}
    for pair, group in groups_before.items():
        domains, others = (
            list(dict.fromkeys(d for r in records for d in r.result.domains)) for records in (group, groups_after[pair])
        )
        found = compared(gathered(first, group), gathered(second, groups_after[pair]), domains)
        judged |= {(*pair, *key): v for key, v in found.items() if key[0] != AVERAGE or len(domains) > 1}
        for domain in (d for d in (*domains, *others) if (d in domains) != (d in others)):
            judged |= {
                (*pair, domain, m): Verdict(m, reason="only one run has this domain")
                for m in metrics_of(before[0].cell)
            }
    for metric in METRICS:
        judged |= corrected({key: verdict for key, verdict in judged.items() if key[-1] == metric})
    rows: dict[tuple[str, str, str], dict[str, Verdict]] = {}
    for (method, objective, domain, metric), verdict in judged.items():
        rows.setdefault((method, objective, domain), {})[metric] = verdict
    return Comparison(
        [Change(*row, verdicts) for row, verdicts in rows.items()],
        _differing(before, after),
        {pair: (cost(group), cost(groups_after[pair])) for pair, group in groups_before.items()},
        unlike([*groups_before.values(), *groups_after.values()]),
        (len(ours) - len(both), len(theirs) - len(both)),
        score,
    )


def _by_identity(folder: RunFolder, score: str) -> dict[Identity, Record]:
    names = [name for name in Cell.model_fields if name not in VARIED]
    found: dict[Identity, Record] = {}
    for record in folder.rescored(folder.records(), score):
        other = found.setdefault(tuple(getattr(record.cell, name) for name in names), record)
        if other is not record:
            differ = "; ".join(_differing([other], [record]))
            raise InputError(
                f"{folder.path} holds two cells of {' + '.join(record.cell.pair)} on the same stream ({differ}), so it is not "
                "clear which one to compare; give each plan its own --out"
            )
    return found


def _differing(before: Iterable[Record], after: Iterable[Record]) -> list[str]:
    """The fields and versions that differ between paired cells, with their values in both."""

    def varied(record: Record) -> dict[str, Any]:
        values = {name: value for name, value in record.cell if name in VARIED}
        named = {f"{name} of {record.cell.method}" if name == "hyper" else name: v for name, v in values.items()}
        return named | dict(record.machine.versions)

    found: dict[str, None] = {}
    for a, b in zip(map(varied, before), map(varied, after), strict=True):
        for name in dict.fromkeys((*a, *b)):
            first, second = a.get(name, "none"), b.get(name, "none")
            if first != second:
                found[f"{name}: {first} and {second}"] = None
    return list(found)


def shown_changes(comparison: Comparison, *, everything: bool = False) -> list[RenderableType]:
    """The comparison for a terminal: a table, also of rows without a difference if asked, its summary, what differed, costs."""
    changes = comparison.changes
    shown = [c for c in changes if everything or any(v.found or v.reason for v in c.verdicts.values())]
    parts: list[RenderableType] = [_table(shown, comparison.score)] if shown else []
    for metric in METRICS:
        counts = Counter[str](c.verdicts[metric].claim for c in changes if metric in c.verdicts)
        if counts:
            claims = ("better", "worse", "no difference found", "not comparable")
            text = ", ".join(f"{counts[claim]} {claim}" for claim in claims)
            text = text.replace("no difference found", "without a difference")
            parts.append(Text(f"{called(metric, comparison.score)}: {text}, of {counts.total()} rows"))
    if any(v.found and len(v.by_seed) == 1 for c in changes for v in c.verdicts.values()):
        parts.append(Text(ONE_SEED))
    parts += [Text(f"differs: {text}") for text in comparison.differing]
    first, second = comparison.alone
    if first or second:
        parts.append(Text(f"left out: {first} cells of the first run only, {second} of the second"))
    note = (
        "Intervals are 95%, of one row alone, from resampled images; verdicts are corrected for the number of rows: of those "
        "that are called better or worse, at most 5% are expected to be false."
    )
    return [*parts, _costs(comparison), Text(note, "dim")]


def changes_as_json(comparison: Comparison) -> str:
    """The comparison for scripts: all rows, with numbers in percent that are null where the runs are not comparable.

    Example:
        >>> found = Change("tent", "come", "fog", {"accuracy": Verdict("accuracy", 50.0, 52.0, 0.5, 0.01, (2.0, 2.0))})
        >>> json.loads(changes_as_json(Comparison([found], [], {}, "", (0, 0), "confidence")))["rows"][0]["change"]
        'better'
    """
    numbers = ("before", "after", "gain", "low", "high", "p", "change")
    rows = [
        {"method": c.method, "objective": c.objective, "domain": c.domain, "metric": metric}
        | {name: None if v.reason else getattr(v, name) for name in numbers}
        | {"reason": v.reason}
        for c in comparison.changes
        for metric, v in c.verdicts.items()
    ]
    said = {"score": comparison.score, "rows": rows, "differing": comparison.differing, "alone": comparison.alone}
    return json.dumps(said, indent=1, allow_nan=False)


def _table(changes: Sequence[Change], score: str) -> RichTable:
    table = RichTable(box=None, padding=(0, 1, 0, 0), header_style="dim")
    for head in ("method", "domain", "metric", "before", "after", "gain", "95% interval", "verdict"):
        left = head in ("method", "domain", "metric", "verdict")
        table.add_column(head, justify="left" if left else "right", no_wrap=head not in ("method", "domain", "verdict"))
    for change in changes:
        for metric, v in change.verdicts.items():
            numbers = [f"{v.before:.1f}", f"{v.after:.1f}", v.points, v.interval]
            verdict = v.change + " (one seed)" * (len(v.by_seed) == 1) if v.found else v.words
            texts = [
                f"{change.method} + {change.objective}",
                change.domain,
                called(metric, score).replace(" by ", " "),
                *(numbers if not v.reason else [""] * 4),
            ]
            table.add_row(*map(Text, texts), Text(verdict, STYLES[v.change]))
    return table


def _costs(comparison: Comparison) -> RenderableType:
    if comparison.unlike:
        return Text(f"Costs are not compared: {comparison.unlike}.")
    table = RichTable(box=None, padding=(0, 1, 0, 0), header_style="dim")
    for head in ("method", "ms per image", "times", "peak MB", "times"):
        table.add_column(head, justify="left" if head == "method" else "right", no_wrap=head != "method")
    for (method, objective), (a, b) in comparison.costs.items():
        cells = []
        times = 1000 * a.seconds_per_image, 1000 * b.seconds_per_image, ".2f"
        for before, after, form in (times, (a.memory_mb, b.memory_mb, ".0f")):
            cells += [f"{before:{form}} → {after:{form}}", f"{after / before:.2f}" if before else "·"]
        table.add_row(Text(f"{method} + {objective}"), *cells)
    return table
