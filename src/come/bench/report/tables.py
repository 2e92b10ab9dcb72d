"""Tables in the paper's form: a row per method and objective, and an "Improve" row under each pair."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev

from rich import box
from rich.table import Table as RichTable
from rich.text import Text

from come.bench.record import Record
from come.bench.report.configurations import one_configuration
from come.bench.statistics import AVERAGE, Judged, Verdict, Verdicts
from come.errors import InputError

SHORT = {
    "gaussian_noise": "Gauss.", "shot_noise": "Shot", "impulse_noise": "Impul.", "defocus_blur": "Defoc",
    "glass_blur": "Glass", "motion_blur": "Motion", "zoom_blur": "Zoom", "snow": "Snow", "frost": "Frost", "fog": "Fog",
    "brightness": "Brit.", "contrast": "Contr.", "elastic_transform": "Elast.", "pixelate": "Pixel",
    "jpeg_compression": "JPEG", "speckle_noise": "Speck.", "gaussian_blur": "G.blur", "spatter": "Spat.",
    "saturate": "Satur.", "clean": "Clean",
}  # fmt: skip


@dataclass(frozen=True)
class Metric:
    """How a metric is shown."""

    head: str
    meaning: str
    lower_is_better: bool | None = False
    """None where neither is: the number describes, and is not judged."""
    percent: bool = True
    score: str | None = None
    """What it ranks samples by: None if it ranks none, "" for the score of the record, else that one whatever the record's."""

    @property
    def column(self) -> str:
        """The head of its column, with an arrow towards the better values."""
        return self.under("confidence")

    def under(self, score: str) -> str:
        """The same, with the score of the record if that is not the published convention."""
        named = f"{self.head} {score}" if self.score == "" and score != "confidence" else self.head
        return named + {True: "↓", False: "↑", None: ""}[self.lower_is_better]


METRICS: Mapping[str, Metric] = {
    "accuracy": Metric("Acc", "labelled samples that are predicted right"),
    "gain": Metric("Gain", "accuracy above that of the model that does not adapt"),
    "fpr": Metric("FPR", "wrong samples that pass the threshold which accepts 95% of the right ones", True, score=""),
    "fpr_softmax": Metric("FPR softmax", "FPR of every row by the largest softmax probability", True, score="softmax"),
    "fpr_belief": Metric("FPR belief", "FPR of every row by the largest belief", True, score="belief"),
    "fpr_so_far": Metric("FPR so far", "FPR over all domains since the method was last reset", True, score=""),
    "auroc_correct": Metric("AUROC", "chance that a right sample is more confident than a wrong one", score=""),
    "aurc": Metric(
        "AURC", "error among the most confident samples, averaged over how many of them are taken", True, score=""
    ),
    "accuracy_at_80": Metric("Acc@80", "accuracy on the most confident 80% of the samples", score=""),
    "ece": Metric("ECE", "gap between confidence and accuracy, averaged over 15 bins", True, score=""),
    "nll": Metric("NLL", "negative log-likelihood of the label, in nats", True, percent=False),
    "brier": Metric("Brier", "squared error of the probabilities, summed over the classes", True, percent=False),
    "auroc_outlier": Metric(
        "AUROC out", "chance that a sample of a known class is more confident than an outlier", score=""
    ),
    "aupr_in": Metric("AUPR in", "area under precision and recall of finding the known classes", score=""),
    "aupr_out": Metric("AUPR out", "area under precision and recall of finding the outliers", score=""),
    "fpr95": Metric("FPR95", "outliers that pass the threshold which accepts 95% of the known classes", True, score=""),
    "dominant_share": Metric("Top class", "predictions that fall on the class predicted most", None),
    "used": Metric("Used", "samples that drove an update", None),
    "diverged": Metric("Diverged", "samples for which the model gave no finite numbers", True),
}
"""What tables know of the metrics in a record, in the order of their columns."""


@dataclass(frozen=True)
class Entry:
    """A number with its spread over seeds, and what it means; in points (percent) unless its metric is none."""

    mean: float
    spread: float | None = None
    change: str = ""
    """"", or for a gain: "better", "worse", or "same" where no difference was found."""
    digits: int = 1
    seeds: int = 1
    signed: bool = False
    """A difference that nobody has judged."""

    def __str__(self) -> str:
        """As it is printed: 52.1, 52.1±0.3, and for a gain △1.2, ▽0.6, +0.1; signed +1.2±0.3."""
        if self.change == "same":
            return f"{self.mean + 0.0:+.{self.digits}f}"
        mark = {"": "", "better": "△", "worse": "▽"}[self.change]
        if self.signed:
            mean = f"{round(self.mean, self.digits) + 0.0:+.{self.digits}f}"
        else:
            mean = f"{mark}{abs(self.mean) if mark else self.mean:.{self.digits}f}"
        return mean if self.spread is None else f"{mean}±{self.spread:.{self.digits}f}"


@dataclass(frozen=True)
class Row:
    """One line of a table; None where there is no number."""

    method: str
    objective: str
    """As it is shown: empty if the method ran with one only, and "improve" for a difference."""
    entries: tuple[Entry | None, ...]
    ran_with: str = ""
    """The objective of the run; empty for a difference."""
    score: str = ""
    """For a line that repeats the one above it under another score: which."""

    @property
    def name(self) -> str:
        """What stands at the left of the line."""
        if not self.ran_with:
            return "  Improve"
        if self.score:
            return f"  by {self.score}"
        return f"{self.method} + {self.objective}" if self.objective else self.method


@dataclass(frozen=True)
class Table:
    """A title, column heads, and rows."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    keys: tuple[tuple[str, str], ...]
    """For each column its domain, or "average", and its metric."""
    score: str = "confidence"
    """What "fpr" and other rates rank samples by, a name in `come.metrics.SCORES`."""


def results_table(
    records: Iterable[Record], title: str = "", metric: str = "accuracy", verdicts: Judged | None = None
) -> Table:
    """A metric for each domain, then its average; mean and deviation over seeds.

    Beside the average accuracy stands the average FPR: as published, each objective by its own confidence, and by softmax for
    all of them; under the source, its FPR by belief shows what the change of the score alone does. Records under one score
    (`RunFolder.rescored`) have one FPR. The "Improve" row under two objectives of one method is what the second one gains, of
    the means: positive is better in every column. With verdicts, "Gain" is that of the accuracy over the source, and △ marks
    what is better beyond chance, ▽ what is worse.

    Args:
        records: of one plan; see `configurations`.
        metric: a name in `METRICS` that the records have.
        verdicts: of `come.bench.statistics.verdicts(folder, records)`.

    Raises:
        InputError: there are no records, they are of several plans, or none of them has the metric.
    """
    records = one_configuration(records)
    there = {name for r in records for metrics in r.result.metrics.values() for name in metrics}
    if metric not in METRICS or metric not in there | {"accuracy"}:
        known = ", ".join(name for name in METRICS if name in there) or "no metric"
        raise InputError(f"no table of {metric!r}: the records have {known}")
    domains = domains_of(records)
    averages = [metric]
    if metric in ("accuracy", "fpr"):
        beside = ("fpr", "fpr_softmax") if _as_published(records) and "fpr_softmax" in there else ("fpr",)
        gain = ("gain",) if metric == "accuracy" and verdicts and verdicts.gains else ()
        averages = list(dict.fromkeys((metric, *gain, *beside)))
    keys = [*((d, metric) for d in domains), *((AVERAGE, m) for m in averages)]
    heads = [*(cut(SHORT.get(d, d)) for d in domains), *(METRICS[m].under(records[0].result.score) for m in averages)]
    rows = _with_rescored_source(records, keys, _rows(records, keys, verdicts or Judged()))
    return Table(title, tuple(heads), rows, tuple(keys), records[0].result.score)


def metrics_table(records: Iterable[Record], title: str = "") -> Table:
    """All metrics that the records have, each averaged over the domains; without Improve rows."""
    records = one_configuration(records)
    found = [metrics for r in records for metrics in r.result.metrics.values()]
    keys = [
        (AVERAGE, name)
        for name in METRICS
        if any(m.get(name) if name == "diverged" else name in m for m in found)  # it is news only where it happened
    ]
    rows = tuple(row for row in _rows(records, keys, Judged()) if row.ran_with)
    return Table(title, tuple(METRICS[m].column for _, m in keys), rows, tuple(keys), records[0].result.score)


def outliers_table(records: Iterable[Record], title: str = "") -> Table | None:
    """How well outliers are told from the known classes: averages, AUROC and FPR95 first, then the AUROC of each domain.

    None if no domain has outliers. No verdict is about these numbers, so nothing is marked.
    """
    records = one_configuration(records)
    domains = domains_of(records, "auroc_outlier")
    if not domains:
        return None
    averages = ("auroc_outlier", "fpr95", "aupr_in", "aupr_out")
    keys = [*((AVERAGE, name) for name in averages), *((domain, "auroc_outlier") for domain in domains)]
    heads = [*(METRICS[name].column for name in averages), *(cut(SHORT.get(d, d)) for d in domains)]
    return Table(title, tuple(heads), _rows(records, keys, Judged()), tuple(keys), records[0].result.score)


def scores_note(records: Sequence[Record]) -> str:
    """By which score the FPR of a table of these records is, in a sentence."""
    score = records[0].result.score
    if score != "confidence":
        return f"FPR is by {score} for all."
    return "FPR is as published, by softmax for em and by belief for come; FPR softmax is by softmax for all."


def _as_published(records: Sequence[Record]) -> bool:
    return records[0].result.score == "confidence"


def rescored_source(records: Sequence[Record]) -> bool:
    """Whether the source stands in a table a second time, by belief: it ran by softmax, and something else by belief."""
    pairs = {record.cell.pair for record in records}
    return _as_published(records) and ("source", "em") in pairs and any(o.partition(":")[0] == "come" for _, o in pairs)


def _with_rescored_source(
    records: Sequence[Record], keys: Sequence[tuple[str, str]], rows: tuple[Row, ...]
) -> tuple[Row, ...]:
    """The rows, and under the source's its FPR by belief."""
    found = entries(records, "source", "em", [(domain, "fpr_belief") for domain, _ in keys])
    line = tuple(entry if metric == "fpr" else None for (_, metric), entry in zip(keys, found, strict=True))
    if not rescored_source(records) or not any(line):
        return rows
    after = next(i for i, row in enumerate(rows, 1) if (row.method, row.ran_with) == ("source", "em"))
    return (*rows[:after], Row("source", "em", line, "em", "belief"), *rows[after:])


def cut(name: str, most: int = 24) -> str:
    """The name, no longer than that."""
    return name if len(name) <= most else f"{name[: most - 1]}…"


def domains_of(records: Iterable[Record], metric: str | None = None) -> list[str]:
    """All domains of the records, in the order of their first; or those that define a metric: some have no outliers."""
    found = ((domain, record.result.metrics[domain]) for record in records for domain in record.result.domains)
    return list(dict.fromkeys(domain for domain, metrics in found if metric is None or metric in metrics))


def objectives_of(records: Iterable[Record]) -> dict[str, list[str]]:
    """The objectives that each method ran with, in the order of the records."""
    found: dict[str, list[str]] = {}
    for method, objective in dict.fromkeys(record.cell.pair for record in records):
        found.setdefault(method, []).append(objective)
    return found


def names_of(records: Iterable[Record]) -> dict[tuple[str, str], str]:
    """How each method and objective is called: by the method alone where it ran with one objective."""
    by_method = objectives_of(records)
    return {(m, o): m if len(several) == 1 else f"{m} + {o}" for m, several in by_method.items() for o in several}


def _rows(records: Sequence[Record], keys: Sequence[tuple[str, str]], judged: Judged) -> tuple[Row, ...]:
    rows: list[Row] = []
    for method, objectives in objectives_of(records).items():
        lines = [_with_gain(entries(records, method, o, keys), keys, judged.gains, method, o) for o in objectives]
        for objective, line in zip(objectives, lines, strict=True):
            rows.append(Row(method, objective if len(objectives) > 1 else "", line, objective))
        if len(lines) == 2:
            found = (judged.changes.get((method, objectives[1], *key)) for key in keys)
            of = (metric for _, metric in keys)
            rows.append(Row(method, "improve", tuple(map(improvement, *lines, found, of))))
    return tuple(rows)


def _with_gain(
    line: Sequence[Entry | None], keys: Sequence[tuple[str, str]], gains: Verdicts, method: str, objective: str
) -> tuple[Entry | None, ...]:
    """The line, with the gain over the source where that is a column: no record has it."""
    verdict = gains.get((method, objective, AVERAGE, "accuracy"))
    gain = None if verdict is None else _gain(float(verdict.points), verdict)
    return tuple(gain if metric == "gain" else entry for entry, (_, metric) in zip(line, keys, strict=True))


def entries(
    records: Sequence[Record], method: str, objective: str, keys: Sequence[tuple[str, str]]
) -> tuple[Entry | None, ...]:
    """The number of a method with an objective for each (domain, metric), over seeds; None where there is none."""
    seeds: dict[int, dict[str, dict[str, float]]] = {}
    for record in records:
        if record.cell.pair == (method, objective):
            seeds.setdefault(record.cell.seed, {}).update(record.result.metrics)
    line = []
    for domain, metric in keys:
        wanted = domains_of(records, metric) if domain == AVERAGE else [domain]
        values = [mean for s in seeds.values() if (mean := _mean_over(s, wanted, metric)) is not None]
        line.append(_over_seeds(values, METRICS[metric]))
    return tuple(line)


def _mean_over(metrics: Mapping[str, Mapping[str, float]], domains: Sequence[str], metric: str) -> float | None:
    """The mean over the domains; None unless all of them have it, for means over different domains do not compare."""
    values = [metrics.get(domain, {}).get(metric, math.nan) for domain in domains]
    return fmean(values) if values and all(map(math.isfinite, values)) else None


def _over_seeds(values: Sequence[float], metric: Metric) -> Entry | None:
    if not values:
        return None
    values = [100 * value for value in values] if metric.percent else values
    spread = stdev(values) if len(values) > 1 else None
    return Entry(fmean(values), spread, digits=1 if metric.percent else 3, seeds=len(values))


def improvement(before: Entry | None, after: Entry | None, verdict: Verdict | None, metric: str) -> Entry | None:
    """What stands in an Improve row: by how much the second is better, marked where the verdict found a difference."""
    if before is None or after is None or metric == "gain":
        return None
    # of the numbers as they are printed, so that a reader can check it
    rise = round(round(after.mean, after.digits) - round(before.mean, before.digits), after.digits)
    return _gain(-rise if METRICS[metric].lower_is_better else rise, verdict, after.digits)


def _gain(size: float, verdict: Verdict | None, digits: int = 1) -> Entry:
    if verdict is None or not verdict.found:
        return Entry(size, change="same", digits=digits)
    return Entry(size or verdict.gain, change=verdict.change, digits=digits)


def averages(table: Table) -> Table:
    """The table without its single domains."""
    kept = [i for i, (domain, _) in enumerate(table.keys) if domain == AVERAGE]
    rows = tuple(replace(row, entries=tuple(row.entries[i] for i in kept)) for row in table.rows)
    return replace(
        table, columns=tuple(table.columns[i] for i in kept), keys=tuple(table.keys[i] for i in kept), rows=rows
    )


STYLES = {"better": "bold blue", "worse": "bold yellow", "same": "dim", "": ""}


def to_rich(table: Table, width: int) -> list[RichTable]:
    """The table for a terminal of that many columns: as many pieces as it takes, the method at the left of each."""
    first = max((len(row.name) for row in table.rows), default=6) + 2
    # the head of an average is broken between words
    heads = [h.split() if key[0] == AVERAGE else [h] for h, key in zip(table.columns, table.keys, strict=True)]
    sizes = [
        max(*map(len, head), *(len(str(row.entries[i] or "")) for row in table.rows), 0) + 2
        for i, head in enumerate(heads)
    ]
    pieces: list[list[int]] = [[]]
    for unit in _units(table):
        if pieces[-1] and first + 4 + sum(sizes[j] + 1 for j in [*pieces[-1], *unit]) > width:
            pieces.append([])
        pieces[-1] += unit
    drawn = []
    for number, piece in enumerate(pieces):
        part = RichTable(title=table.title if not number else None, box=box.SIMPLE_HEAD, title_justify="left")
        part.add_column("", no_wrap=True)
        for i in piece:
            part.add_column("\n".join(heads[i]), justify="right", no_wrap=True)
        for k, row in enumerate(table.rows):
            last = k + 1 == len(table.rows) or table.rows[k + 1].method != row.method
            none = Text("" if row.score else "·", "dim")
            cells = [Text(str(e), STYLES[e.change]) if e else none for e in (row.entries[i] for i in piece)]
            part.add_row(Text(row.name, "" if row.ran_with and not row.score else "dim"), *cells, end_section=last)
        drawn.append(part)
    return drawn


def _units(table: Table) -> list[list[int]]:
    """Columns that are not cut apart: the averages behind domains stay together."""
    alone = [[i] for i, (domain, _) in enumerate(table.keys) if domain != AVERAGE]
    averages = [i for i, (domain, _) in enumerate(table.keys) if domain == AVERAGE]
    return [*alone, averages] if alone else [[i] for i in averages]
