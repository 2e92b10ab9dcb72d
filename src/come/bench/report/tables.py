"""Tables in the paper's form: a row per method and objective, and an "Improve" row under each pair."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from rich import box
from rich.table import Table as RichTable
from rich.text import Text

from come.bench.store import Record
from come.errors import InputError

SUBSTANTIAL = 0.5
"""Points from which a difference is marked, as in the paper."""

AVERAGE = "average"
"""Stands in the place of a domain where a number is the mean over all of them."""

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

    @property
    def column(self) -> str:
        """The head of its column, with an arrow towards the better values."""
        return self.head + {True: "↓", False: "↑", None: ""}[self.lower_is_better]


METRICS: Mapping[str, Metric] = {
    "accuracy": Metric("Acc", "labelled samples that are predicted right"),
    "fpr": Metric("FPR", "wrong samples that pass the threshold which accepts 95% of the right ones", True),
    "fpr_so_far": Metric("FPR so far", "FPR over all domains since the method was last reset", True),
    "auroc_correct": Metric("AUROC", "chance that a right sample is more confident than a wrong one"),
    "aurc": Metric("AURC", "error among the most confident samples, averaged over how many of them are taken", True),
    "accuracy_at_80": Metric("Acc@80", "accuracy on the most confident 80% of the samples"),
    "ece": Metric("ECE", "gap between confidence and accuracy, averaged over 15 bins", True),
    "nll": Metric("NLL", "negative log-likelihood of the label, in nats", True, percent=False),
    "brier": Metric("Brier", "squared error of the probabilities, summed over the classes", True, percent=False),
    "auroc_outlier": Metric("AUROC out", "chance that a sample of a known class is more confident than an outlier"),
    "aupr_in": Metric("AUPR in", "area under precision and recall of finding the known classes"),
    "aupr_out": Metric("AUPR out", "area under precision and recall of finding the outliers"),
    "fpr95": Metric("FPR95", "outliers that pass the threshold which accepts 95% of the known classes", True),
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
    """"", or for a difference: "better", "worse", "same"."""
    digits: int = 1
    seeds: int = 1

    def __str__(self) -> str:
        """As it is printed: 52.1, 52.1±0.3, △1.2, ▽0.6, 0.1."""
        if self.change:
            mark = "" if self.change == "same" else "△" if self.mean > 0 else "▽"
            return f"{mark}{abs(self.mean):.{self.digits}f}" if mark else f"{self.mean + 0.0:+.{self.digits}f}"
        mean = f"{self.mean:.{self.digits}f}"
        return mean if self.spread is None else f"{mean}±{self.spread:.{self.digits}f}"


@dataclass(frozen=True)
class Row:
    """One line of a table; None where there is no number yet."""

    method: str
    objective: str
    """As it is shown: empty if the method ran with one only, and "improve" for a difference."""
    entries: tuple[Entry | None, ...]
    ran_with: str = ""
    """The objective of the run; empty for a difference."""

    @property
    def name(self) -> str:
        """What stands at the left of the line."""
        if self.objective == "improve":
            return "  Improve"
        return f"{self.method} + {self.objective}" if self.objective else self.method


@dataclass(frozen=True)
class Table:
    """A title, column heads, and rows."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    keys: tuple[tuple[str, str], ...]
    """For each column its domain, or "average", and its metric."""


def results_table(records: Iterable[Record], title: str = "", metric: str = "accuracy") -> Table:
    """A metric for each domain, then its average; mean and deviation over seeds.

    Beside the average accuracy stands the average FPR. The "Improve" row under two objectives of one method is the second
    minus the first, of the means, marked from 0.5 points on: a triangle up where the number rose, down where it fell.

    Args:
        records: of one configuration; see `configurations`.
        metric: a name in `METRICS` that the records have.

    Raises:
        InputError: there are no records, they must not be mixed, or none of them has the metric.
    """
    records = one_configuration(records)
    domains = domains_of(records)
    averages = ("accuracy", "fpr") if metric == "accuracy" else (metric,)
    keys = [*((d, metric) for d in domains), *((AVERAGE, m) for m in averages)]
    heads = [*(SHORT.get(d, d) for d in domains), *(METRICS[m].column for m in averages if _known(m, records))]
    return Table(title, tuple(heads), _rows(records, keys), tuple(keys))


def metrics_table(records: Iterable[Record], title: str = "") -> Table:
    """All metrics that the records have, each averaged over the domains; without Improve rows."""
    records = one_configuration(records)
    found = _metrics_of(records)
    if not any(metrics.get("diverged") for r in records for metrics in r.result["metrics"].values()):
        found -= {"diverged"}  # it is news only where it happened
    keys = [(AVERAGE, metric) for metric in METRICS if metric in found]
    rows = tuple(row for row in _rows(records, keys) if row.ran_with)
    return Table(title, tuple(METRICS[m].column for _, m in keys), rows, tuple(keys))


def configurations(records: Iterable[Record]) -> list[list[Record]]:
    """The records in groups that may stand in one table: of one model, one data, one setting and so on."""
    groups: dict[str, list[Record]] = {}
    for record in records:
        groups.setdefault(json.dumps(_shared(record), sort_keys=True), []).append(record)
    return list(groups.values())


def one_configuration(records: Iterable[Record]) -> list[Record]:
    """The records as a list, if they may stand in one table.

    Raises:
        InputError: there are none, or they differ in more than method, objective, seed and corruption.
    """
    records = list(records)
    if not records:
        raise InputError(
            "there are no records: no cell is finished; run 'come bench' first, or give another run folder"
        )
    groups = [_shared(group[0]) for group in configurations(records)]
    for name in groups[0]:
        values = list(dict.fromkeys(str(group[name]) for group in groups))
        if len(values) > 1:
            raise InputError(
                f"the records are of {len(groups)} configurations: {name} is {' and '.join(values)}; one table cannot hold "
                "them: report each one alone, and give each its own --out"
            )
    hyper: dict[tuple[str, str], dict[str, Any]] = {}
    for record in records:
        found = record.cell.get("hyper", {})
        if hyper.setdefault(pair_of(record), found) != found:
            raise InputError(
                f"{' + '.join(pair_of(record))} ran with hyperparameters {hyper[pair_of(record)]} and with {found}; one "
                "table cannot hold both: give each its own --out"
            )
    return records


SHARED = (
    "model", "data", "size", "setting", "severity", "batch_size", "checkpoint", "normalization", "source_data",
    "source_size", "outlier_ratio", "imbalance", "rounds", "replay",
)  # fmt: skip
"""What cells must have in common to be compared."""


def _shared(record: Record) -> dict[str, Any]:
    return {name: record.cell.get(name) for name in SHARED}


def pair_of(record: Record) -> tuple[str, str]:
    """Method and objective of a record."""
    return record.cell["method"], record.cell["objective"]


def domains_of(records: Iterable[Record], metric: str | None = None) -> list[str]:
    """All domains of the records, in the order of their first; or those that define a metric: some have no outliers."""
    found = (item for record in records for item in record.result["metrics"].items())
    return list(dict.fromkeys(domain for domain, metrics in found if metric is None or metric in metrics))


def objectives_of(records: Iterable[Record]) -> dict[str, list[str]]:
    """The objectives that each method ran with, in the order of the records."""
    found: dict[str, list[str]] = {}
    for method, objective in dict.fromkeys(map(pair_of, records)):
        found.setdefault(method, []).append(objective)
    return found


def _metrics_of(records: Iterable[Record]) -> set[str]:
    return {name for r in records for metrics in r.result["metrics"].values() for name in metrics}


def _known(metric: str, records: Sequence[Record]) -> bool:
    found = _metrics_of(records)
    if metric not in METRICS or metric not in found:
        raise InputError(
            f"no table of {metric!r}: the records have {', '.join(name for name in METRICS if name in found) or 'no metric'}"
        )
    return True


def _rows(records: Sequence[Record], keys: Sequence[tuple[str, str]]) -> tuple[Row, ...]:
    rows: list[Row] = []
    for method, objectives in objectives_of(records).items():
        lines = [entries(records, method, objective, keys) for objective in objectives]
        for objective, line in zip(objectives, lines, strict=True):
            rows.append(Row(method, objective if len(objectives) > 1 else "", line, objective))
        if len(lines) == 2:
            differences = (_difference(a, b, METRICS[m]) for a, b, (_, m) in zip(lines[0], lines[1], keys, strict=True))
            rows.append(Row(method, "improve", tuple(differences)))
    return tuple(rows)


def entries(
    records: Sequence[Record], method: str, objective: str, keys: Sequence[tuple[str, str]]
) -> tuple[Entry | None, ...]:
    """The number of a method with an objective for each (domain, metric); None where there is none."""
    seeds = by_seed(records, method, objective)
    line = []
    for domain, metric in keys:
        wanted = domains_of(records, metric) if domain == AVERAGE else [domain]
        values = [mean for s in seeds.values() if (mean := mean_over(s, wanted, metric)) is not None]
        line.append(_over_seeds(values, METRICS[metric]))
    return tuple(line)


def by_seed(records: Iterable[Record], method: str, objective: str) -> dict[int, dict[str, dict[str, float]]]:
    """The metrics of each domain, for each seed of a method with an objective."""
    seeds: dict[int, dict[str, dict[str, float]]] = {}
    for record in records:
        if pair_of(record) == (method, objective):
            seeds.setdefault(record.cell["seed"], {}).update(record.result["metrics"])
    return seeds


def mean_over(metrics: Mapping[str, Mapping[str, float]], domains: Sequence[str], metric: str) -> float | None:
    """The mean over the domains; None unless all of them have it, for means over different domains do not compare."""
    values = [metrics.get(domain, {}).get(metric, math.nan) for domain in domains]
    return fmean(values) if values and all(map(math.isfinite, values)) else None


def _over_seeds(values: Sequence[float], metric: Metric) -> Entry | None:
    if not values:
        return None
    values = [100 * value for value in values] if metric.percent else values
    spread = stdev(values) if len(values) > 1 else None
    return Entry(fmean(values), spread, digits=1 if metric.percent else 3, seeds=len(values))


def _difference(before: Entry | None, after: Entry | None, metric: Metric) -> Entry | None:
    if before is None or after is None:
        return None
    # of the numbers as they are printed, so that a reader can check it
    change = round(after.mean, after.digits) - round(before.mean, before.digits)
    threshold = SUBSTANTIAL if metric.percent else SUBSTANTIAL / 100
    if abs(change) < threshold - 1e-9 or metric.lower_is_better is None:
        return Entry(change, change="same", digits=after.digits)
    better = (change > 0) != metric.lower_is_better
    return Entry(change, change="better" if better else "worse", digits=after.digits)


STYLES = {"better": "bold blue", "worse": "bold yellow", "same": "dim", "": ""}


def to_rich(table: Table, width: int) -> list[RichTable]:
    """The table for a terminal of that many columns: as many pieces as it takes, the method at the left of each."""
    first = max((len(row.name) for row in table.rows), default=6) + 2
    sizes = [
        max([len(head), *(len(str(row.entries[i] or "")) for row in table.rows)]) + 2
        for i, head in enumerate(table.columns)
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
            part.add_column(table.columns[i], justify="right", no_wrap=True)
        for k, row in enumerate(table.rows):
            last = k + 1 == len(table.rows) or table.rows[k + 1].method != row.method
            cells = [Text(str(e), STYLES[e.change]) if e else Text("·", "dim") for e in (row.entries[i] for i in piece)]
            part.add_row(Text(row.name, "dim" if row.objective == "improve" else ""), *cells, end_section=last)
        drawn.append(part)
    return drawn


def _units(table: Table) -> list[list[int]]:
    """Columns that are not cut apart: the averages behind domains stay together."""
    alone = [[i] for i, (domain, _) in enumerate(table.keys) if domain != AVERAGE]
    averages = [i for i, (domain, _) in enumerate(table.keys) if domain == AVERAGE]
    return [*alone, averages] if alone else [[i] for i in averages]


def to_markdown(table: Table) -> str:
    """The table as GitHub-flavoured Markdown."""
    lines = [f"### {table.title}\n"] if table.title else []
    lines.append("| |" + "|".join(table.columns) + "|")
    lines.append("|---|" + "---:|" * len(table.columns))
    for row in table.rows:
        cells = [f"**{e}**" if e and e.change in ("better", "worse") else str(e or "") for e in row.entries]
        name = row.name.strip().replace("|", "\\|")
        lines.append("|".join(["", name, *cells, ""]))
    return "\n".join(lines) + "\n"
