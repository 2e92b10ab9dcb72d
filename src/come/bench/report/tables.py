"""Tables in the paper's form: a row per method and objective, and an "Improve" row under each pair."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev

from rich import box
from rich.table import Table as RichTable
from rich.text import Text

from come.bench.record import Record
from come.bench.report.configurations import one_configuration
from come.bench.statistics import AVERAGE, Judged, Verdict
from come.errors import InputError

RATES = "Average accuracy (%) against the learning rate"

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
    lower_is_better: bool | None = False  # None for a number that describes, and is not judged
    percent: bool = True
    score: str | None = None
    """What it ranks samples by: None if it ranks none, "" for the score of the record, else always that one."""

    def column(self, score: str = "confidence") -> str:
        """The head of its column: with the score of the record if that is not the published one, and an arrow to the better."""
        head = f"{self.head} {score}" if self.score == "" and score != "confidence" else self.head
        return head + {True: "↓", False: "↑", None: ""}[self.lower_is_better]


METRICS: Mapping[str, Metric] = {
    "miou": Metric("mIoU", "overlap of prediction and label over their union, averaged over the classes that occur"),
    "accuracy": Metric("Acc", "labelled samples that are predicted right"),
    "gain": Metric("Gain", "accuracy, or mIoU, above that of the model that does not adapt"),
    "fpr": Metric("FPR", "wrong samples that pass the threshold which accepts 95% of the right ones", True, score=""),
    "fpr_softmax": Metric("FPR softmax", "FPR of every row by the largest softmax probability", True, score="softmax"),
    "fpr_belief": Metric("FPR belief", "FPR of every row by the largest belief", True, score="belief"),
    "fpr_so_far": Metric("FPR so far", "FPR over all domains since the method was last reset", True, score=""),
    "auroc_correct": Metric("AUROC", "chance that a right sample is more confident than a wrong one", score=""),
    "aurc": Metric(
        "AURC", "error among the most confident samples, averaged over how many of them are taken", True, score=""
    ),
    "aurc_belief": Metric("AURC belief", "AURC of every row by the largest belief", True, score="belief"),
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
    change: str = ""  # for a gain: "better", "worse", or "same" where no difference was found
    digits: int = 1
    seeds: int = 1
    signed: bool = False  # a difference that nobody has judged

    @classmethod
    def over(cls, values: Sequence[float], digits: int = 1, signed: bool = False) -> Entry:
        """The mean of one value for each seed, and their standard deviation."""
        spread = stdev(values) if len(values) > 1 else None
        return cls(fmean(values), spread, "", digits, len(values), signed)

    @property
    def printed(self) -> float:
        """The mean, rounded as it is shown."""
        return round(self.mean, self.digits)

    def __str__(self) -> str:
        """As it is printed: 52.1, 52.1±0.3, and for a gain △1.2, ▽0.6, +0.1; signed +1.2±0.3."""
        if self.change == "same":
            return f"{self.mean + 0.0:+.{self.digits}f}"
        if self.change:
            mean = f"{'△' if self.change == 'better' else '▽'}{abs(self.mean):.{self.digits}f}"
        elif self.signed:
            mean = f"{self.printed + 0.0:+.{self.digits}f}"
        else:
            mean = f"{self.mean:.{self.digits}f}"
        return mean if self.spread is None else f"{mean}±{self.spread:.{self.digits}f}"


Line = tuple[Entry | None, ...]
Key = tuple[str, str]  # a domain, or "average", and a metric


@dataclass(frozen=True)
class Row:
    """One line of a table; None where there is no number."""

    method: str
    objective: str  # as it is shown: empty if the method ran with one only, and "improve" for a difference
    entries: Line
    ran_with: str = ""  # the objective of the run; empty for a difference
    score: str = ""  # of a line that repeats the one above it under another score

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
    """A title, column heads with what each is about, and rows."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    keys: tuple[Key, ...]
    score: str = "confidence"  # what "fpr" and other rates rank samples by, a name in `come.metrics.SCORES`


def results_table(
    records: Iterable[Record], title: str = "", metric: str | None = None, verdicts: Judged | None = None
) -> Table:
    """A metric for each domain, then its average; mean and deviation over seeds. By default accuracy, or mIoU of pixels.

    Beside the average accuracy stands the average FPR: as published, each objective by its own confidence, and by softmax for
    all of them; under the source, its FPR by belief shows what the score alone changes. Records under one score
    (`RunFolder.rescored`) have one FPR. The "Improve" row is what the second objective of a method gains over the first:
    positive is better in every column. With verdicts (`come.bench.statistics.verdicts`), "Gain" is that of the accuracy over
    the source, △ marks what is better beyond chance, and ▽ what is worse.

    Raises:
        InputError: there are no records, they are of several plans, or none of them has the metric.
    """
    records = one_configuration(records)
    main = records[0].cell.metric
    metric = metric or main
    there = {name for r in records for metrics in r.result.metrics.values() for name in metrics}
    if metric not in METRICS or metric not in there | {main}:
        known = ", ".join(name for name in METRICS if name in there) or "no metric"
        raise InputError(f"no table of {metric!r}: the records have {known}")
    averages = [metric]
    if metric == "miou":
        averages += ["gain"] if verdicts and verdicts.gains else []
        averages += ["accuracy", "ece", "aurc"]
    elif metric in ("accuracy", "fpr") and main == "accuracy":
        averages += ["gain"] if metric == "accuracy" and verdicts and verdicts.gains else []
        averages += ["fpr"] if metric == "accuracy" else []
        averages += ["fpr_softmax"] if _as_published(records) and "fpr_softmax" in there else []
    keys = [*((d, metric) for d in domains_of(records)), *((AVERAGE, m) for m in averages)]
    table = _table(records, title, keys, verdicts or Judged(), records[0].result.score)
    return replace(table, rows=_with_rescored_source(records, keys, table.rows))


def metrics_table(records: Iterable[Record], title: str = "") -> Table:
    """All metrics that the records have, each averaged over the domains; without Improve rows."""
    records = one_configuration(records)
    found = [metrics for r in records for metrics in r.result.metrics.values()]
    # "diverged" is news only where it happened
    there = [n for n in METRICS if any(m.get(n) if n == "diverged" else n in m for m in found)]
    table = _table(records, title, [(AVERAGE, name) for name in there])
    return replace(table, rows=tuple(row for row in table.rows if row.ran_with))


def outliers_table(records: Iterable[Record], title: str = "") -> Table | None:
    """How well outliers are told from the known classes: averages, AUROC and FPR95 first, then the AUROC of each domain.

    None if no domain has outliers. No verdict is about these numbers, so nothing is marked.
    """
    records = one_configuration(records)
    domains = domains_of(records, "auroc_outlier")
    averages = [(AVERAGE, name) for name in ("auroc_outlier", "fpr95", "aupr_in", "aupr_out")]
    return _table(records, title, [*averages, *((domain, "auroc_outlier") for domain in domains)]) if domains else None


def scores_note(records: Sequence[Record]) -> str:
    """By which score the FPR of a table of these records is, in a sentence; of pixels, how their confidence is judged."""
    if records[0].cell.dense:
        return "mIoU over the classes that occur; ECE and AURC over pixels, by softmax for all."
    if not _as_published(records):
        return f"FPR is by {records[0].result.score} for all."
    return "FPR is as published, by softmax for em and by belief for come; FPR softmax is by softmax for all."


def _as_published(records: Sequence[Record]) -> bool:
    return records[0].result.score == "confidence"


def rescored_source(records: Sequence[Record]) -> bool:
    """Whether the source stands in a table a second time, by belief: it ran by softmax, and something else by belief."""
    pairs = {record.cell.pair for record in records}
    return _as_published(records) and ("source", "em") in pairs and any(o.partition(":")[0] == "come" for _, o in pairs)


def _with_rescored_source(records: Sequence[Record], keys: Sequence[Key], rows: tuple[Row, ...]) -> tuple[Row, ...]:
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


def short(domain: str, most: int = 24) -> str:
    """How a domain is called at the head of a column, or along an axis."""
    return cut(SHORT.get(domain, domain), most)


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


def _table(
    records: Sequence[Record], title: str, keys: Sequence[Key], judged: Judged | None = None, score: str = "confidence"
) -> Table:
    """A row for each method and objective, and one for the improvement where a method ran with two."""
    judged, rows, metrics = judged or Judged(), list[Row](), [metric for _, metric in keys]
    main = records[0].cell.metric
    for method, objectives in objectives_of(records).items():
        lines = {}
        for objective in objectives:
            gain = judged.gains.get((method, objective, AVERAGE, main))  # no record has it
            found = zip(metrics, entries(records, method, objective, keys), strict=True)
            lines[objective] = tuple(_gain(float(gain.points), gain) if m == "gain" and gain else e for m, e in found)
        rows += rows_of(method, lines, [judged.changes.get((method, objectives[-1], *key)) for key in keys], metrics)
    heads = (METRICS[metric].column(score) if domain == AVERAGE else short(domain) for domain, metric in keys)
    return Table(title, tuple(heads), tuple(rows), tuple(keys), records[0].result.score)


def rows_of(
    method: str, lines: Mapping[str, Line], verdicts: Iterable[Verdict | None], metrics: Iterable[str]
) -> list[Row]:
    """The lines of a method, by objective, as rows; with two objectives, the improvement by the second below them."""
    rows = [Row(method, o if len(lines) > 1 else "", line, o) for o, line in lines.items()]
    if len(lines) == 2:
        rows.append(Row(method, "improve", tuple(map(improvement, *lines.values(), verdicts, metrics))))
    return rows


def by_seed(records: Iterable[Record]) -> dict[int, dict[str, dict[str, float]]]:
    """The metrics by domain, of all records of a seed together."""
    found: dict[int, dict[str, dict[str, float]]] = {}
    for record in records:
        found.setdefault(record.cell.seed, {}).update(record.result.metrics)
    return found


def entries(records: Sequence[Record], method: str, objective: str, keys: Sequence[Key]) -> Line:
    """The number of a method with an objective for each (domain, metric), over seeds; None where there is none.

    An average needs the metric in all domains that define it: means over different domains do not compare.
    """
    seeds = by_seed(record for record in records if record.cell.pair == (method, objective))
    line = []
    for domain, metric in keys:
        wanted = domains_of(records, metric) if domain == AVERAGE else [domain]
        values = []
        for found in seeds.values():
            numbers = [found.get(one, {}).get(metric, math.nan) for one in wanted]
            if numbers and all(map(math.isfinite, numbers)):
                values.append(fmean(numbers))
        if METRICS[metric].percent:
            line.append(Entry.over([100 * value for value in values]) if values else None)
        else:
            line.append(Entry.over(values, digits=3) if values else None)
    return tuple(line)


def improvement(before: Entry | None, after: Entry | None, verdict: Verdict | None, metric: str) -> Entry | None:
    """What stands in an Improve row: by how much the second is better, marked where the verdict found a difference."""
    if before is None or after is None or metric == "gain":
        return None
    rise = round(after.printed - before.printed, after.digits)  # of the printed numbers, so that a reader can check it
    return _gain(-rise if METRICS[metric].lower_is_better else rise, verdict, after.digits)


def _gain(size: float, verdict: Verdict | None, digits: int = 1) -> Entry:
    if verdict is None or not verdict.found:
        return Entry(size, change="same", digits=digits)
    return Entry(size or verdict.gain, change=verdict.change, digits=digits)


def averages(table: Table) -> Table:
    """The table without its single domains."""
    kept = [i for i, (domain, _) in enumerate(table.keys) if domain == AVERAGE]
    rows = tuple(replace(row, entries=tuple(row.entries[i] for i in kept)) for row in table.rows)
    columns = tuple(table.columns[i] for i in kept)
    return replace(table, columns=columns, rows=rows, keys=tuple(table.keys[i] for i in kept))


def sweeps(records: Iterable[Record]) -> dict[str, dict[float, str]]:
    """By method, without its rate: what ran at each learning rate, from the lowest. Methods with one rate are left out."""
    found: dict[str, dict[float, str]] = {}
    for record in records:
        if record.result.lr is not None:
            name = re.sub(r":lr=[^:]*", "", record.cell.method)
            found.setdefault(name, {}).setdefault(record.result.lr, record.cell.method)
    return {name: dict(sorted(rates.items())) for name, rates in found.items() if len(rates) > 1}


def without_sweeps(records: Iterable[Record]) -> list[Record]:
    """The records except those of other learning rates than the method's own, where it ran with that too."""
    records = list(records)
    ran, found = {record.cell.method for record in records}, sweeps(records)
    further = {m for name, rates in found.items() if name in ran for m in rates.values()} - found.keys()
    return [record for record in records if record.cell.method not in further]


def rates_table(records: Sequence[Record], verdicts: Judged | None = None) -> Table | None:
    """A column for each learning rate, a row for each method and objective, the source model above; None without a sweep."""
    found, objectives, judged = sweeps(records), objectives_of(records), verdicts or Judged()
    if not found:
        return None
    rates = sorted({rate for by_rate in found.values() for rate in by_rate})
    rows = [
        Row("source", "", average_accuracy(records, ["source"] * len(rates), o), o)
        for o in objectives.get("source", ())
    ]
    for name, by_rate in found.items():
        methods = [by_rate.get(rate, "") for rate in rates]
        both = dict.fromkeys(o for method in by_rate.values() for o in objectives[method])
        changes = [judged.changes.get((method, [*both][-1], AVERAGE, records[0].cell.metric)) for method in methods]
        rows += rows_of(
            name,
            {o: average_accuracy(records, methods, o) for o in both},
            changes,
            [records[0].cell.metric] * len(rates),
        )
    heads = tuple(f"lr {rate:g}" for rate in rates)
    return Table(RATES, heads, tuple(rows), tuple((head, records[0].cell.metric) for head in heads))


def average_accuracy(records: Sequence[Record], methods: Iterable[str], objective: str) -> Line:
    """Accuracy, or mIoU of pixels, of each method with the objective, over all domains."""
    key = AVERAGE, records[0].cell.metric
    return tuple(entries(records, method, objective, [key])[0] for method in methods)


STYLES = {"better": "bold blue", "worse": "bold yellow", "same": "dim", "": ""}


def to_rich(table: Table, width: int) -> list[RichTable]:
    """The table for a terminal of that many columns: as many pieces as it takes, the method at the left of each."""
    first = max((len(row.name) for row in table.rows), default=6) + 2
    alone = [[i] for i, (domain, _) in enumerate(table.keys) if domain != AVERAGE]
    averages = [i for i, (domain, _) in enumerate(table.keys) if domain == AVERAGE]
    units = [*alone, averages] if alone else [[i] for i in averages]  # columns that stay together
    # the head of an average is broken between words
    heads = [h.split() if key[0] == AVERAGE else [h] for h, key in zip(table.columns, table.keys, strict=True)]
    cells = [[str(row.entries[i] or "") for row in table.rows] for i in range(len(heads))]
    sizes = [max(map(len, [*head, *texts, ""])) + 3 for head, texts in zip(heads, cells, strict=True)]
    pieces: list[list[int]] = [[]]
    for unit in units:
        if pieces[-1] and first + 4 + sum(sizes[j] for j in [*pieces[-1], *unit]) > width:
            pieces.append([])
        pieces[-1] += unit
    drawn = []
    for number, piece in enumerate(pieces):
        part = RichTable(title=None if number else table.title, box=box.SIMPLE_HEAD, title_justify="left")
        part.add_column("", no_wrap=True)
        for i in piece:
            part.add_column("\n".join(heads[i]), justify="right", no_wrap=True)
        for row, following in zip(table.rows, [*table.rows[1:], None], strict=True):
            texts = [
                Text(str(e), STYLES[e.change]) if e else Text("" if row.score else "·", "dim")
                for e in (row.entries[i] for i in piece)
            ]
            name = Text(row.name, "" if row.ran_with and not row.score else "dim")
            part.add_row(name, *texts, end_section=following is None or following.method != row.method)
        drawn.append(part)
    return drawn
