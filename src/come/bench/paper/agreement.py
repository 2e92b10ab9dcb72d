"""Compares what was measured with what the paper printed.

On ImageNet-C with the paper's model numbers can be compared one by one; on other data, such as the embedded `fashion`, only
whether COME changes the same methods in the same direction, and whether the methods have the same order. The interval of a
measured change (`come.bench.statistics`) decides whether it is one, not its size.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from come.bench.paper import PaperTable
from come.bench.record import Record
from come.bench.report.costs import by_pair
from come.bench.report.tables import by_seed
from come.bench.statistics import METRICS, Judged, Verdict

SUBSTANTIAL = 0.5  # points from which the paper calls a difference substantial


@dataclass(frozen=True)
class Line:
    """A row of a table: the paper's number and ours; None if there is none."""

    method: str
    objective: str
    paper: float | None
    measured: float | None


@dataclass(frozen=True)
class Comparison:
    """A column of a table with the paper's numbers and ours."""

    table: str  # name of the paper's table
    domain: str  # the column, or "average" or "worst"
    metric: str  # "accuracy", "fpr", "memory_mb" or "seconds"; percent, or relative to No Adapt
    lines: tuple[Line, ...]  # one for each method and objective
    verdicts: Mapping[str, Verdict]  # for each method, whether COME changes our number
    alike: Mapping[str, Verdict] = field(default_factory=dict)  # with both by softmax, which the paper does not print

    def changes(self) -> list[tuple[str, float, float]]:
        """(method, gain of COME over EM in the paper, measured) where all numbers are known; of time and memory, COME - EM."""
        found = {(line.method, line.objective): (line.paper, line.measured) for line in self.lines}
        sign = -1 if self.metric == "fpr" else 1
        rows = []
        for method in dict.fromkeys(line.method for line in self.lines):
            (a, b), (c, d) = (found.get((method, objective), (None, None)) for objective in ("em", "come"))
            if a is not None and b is not None and c is not None and d is not None:
                rows.append((method, sign * (c - a), sign * (d - b)))
        return rows

    def agreement(self) -> list[str]:
        """Sentences: what agrees with the paper, what contradicts it, what is unclear, and the order of the rows."""
        agree, contradict, unclear = "Agrees with the paper", "Contradicts the paper", "Cannot be told from this run"
        found: dict[str, list[str]] = {agree: [], contradict: [], unclear: []}
        for method, theirs, ours in self.changes() if self.metric in METRICS else ():
            verdict, numbers = self.verdicts.get(method), f"{method} (paper {theirs:+.1f}, here {ours:+.1f}"
            if abs(theirs) < SUBSTANTIAL:
                found[unclear].append(f"{numbers}: the paper calls less than {SUBSTANTIAL} no change)")
            elif verdict is None:
                found[unclear].append(f"{numbers})")
            elif not verdict.found:
                found[unclear].append(f"{numbers}, 95% interval {verdict.interval})")
            else:
                found[agree if (theirs > 0) == (ours > 0) else contradict].append(f"{numbers})")
        said = [
            f"{words}, gain in {METRICS[self.metric]} of COME over EM: {', '.join(methods)}."
            for words, methods in found.items()
            if methods
        ]
        alike = [f"{method} {v.points} ({v.words})" for method, v in self.alike.items() if not v.reason]
        if alike:
            said.append(f"With EM and COME both by softmax, the gain in FPR is: {', '.join(alike)}.")
        pairs = [(line.paper, line.measured) for line in self.lines if None not in (line.paper, line.measured)]
        if len(pairs) >= 3 and all(len(set(column)) > 1 for column in zip(*pairs, strict=True)):
            from scipy import stats  # takes a second to import

            rank = stats.spearmanr(*zip(*pairs, strict=True))
            chance = "more than chance" if rank.pvalue < 0.05 else "chance may explain it"
            said.append(f"Order of the {len(pairs)} rows: rank correlation {rank.statistic:+.2f} ({chance}).")
        return said


def compare(table: PaperTable, records: Iterable[Record], verdicts: Judged) -> list[Comparison]:
    """Compare the records with a table: column by column where the columns are the same, and the averages."""
    ours, found = by_pair(records), []
    for column in table.columns:
        lines = []
        for row in table.rows:
            theirs = table.value(row.method, row.objective, column.domain, column.metric)
            mine = _measured(ours.get((row.method, row.objective), []), column.domain, column.metric)
            if column.metric in ("memory_mb", "seconds"):
                base = table.value("source", "em", column.domain, column.metric)
                ours_base = _measured(ours.get(("source", "em"), []), column.domain, column.metric)
                theirs = theirs / base if theirs is not None and base else None
                mine = mine / ours_base if mine is not None and ours_base else None
            lines.append(Line(row.method, row.objective, theirs, mine))
        if any(line.measured is not None for line in lines):
            by_metric: dict[str, dict[str, Verdict]] = {column.metric: {}, f"{column.metric}_softmax": {}}
            for (method, *what), verdict in verdicts.changes.items():
                for metric, of in by_metric.items():
                    if what == ["come", column.domain, metric]:
                        of[method] = verdict
            found.append(Comparison(table.name, column.domain, column.metric, tuple(lines), *by_metric.values()))
    return found


def _measured(records: Sequence[Record], domain: str, metric: str) -> float | None:
    """Our number in the paper's unit, mean over seeds; None if it was not measured."""
    if not records:
        return None
    if metric == "memory_mb":
        return max(r.result.peak_memory_mb for r in records)
    if metric == "seconds":
        return sum(r.result.seconds for r in records)
    # The paper's lifelong FPR is over everything seen so far.
    key = "fpr_so_far" if metric == "fpr" and records[0].cell.setting == "lifelong" else metric
    values = []
    for domains in by_seed(records).values():
        column = [100 * m[key] for m in domains.values() if key in m]
        if domain == "average" and column:
            values.append(fmean(column))
        elif domain == "worst" and column:
            values.append(max(column) if metric == "fpr" else min(column))
        elif domain in domains and key in domains[domain]:
            values.append(100 * domains[domain][key])
    return fmean(values) if values else None
