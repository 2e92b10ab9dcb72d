"""The tables of the paper as printed, and where they contradict themselves.

The numbers are in `tables.json`, transcribed cell by cell and not corrected. A cross in the paper's column "COME" is the
objective "em" here, also for methods that minimize nothing, as in our grids. Domains are corruptions, sets of outliers ("none"
for a stream without) and "clean"; "mixed" is a stream of all corruptions, "average" and "worst" are over the other columns of
that metric, and "stream" is the 50,000 images whose time and memory were measured. The method "average" is the mean over the
methods of its table.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from itertools import takewhile
from typing import Literal

from pydantic import TypeAdapter

from come.errors import unknown

Metric = Literal["accuracy", "fpr", "memory_mb", "seconds"]  # accuracy and FPR are in percent

SUBSTANTIAL = 5  # tenths of a point below which the paper may print "-" for a difference

UNMIXED = ("standard", "lifelong", "imbalanced")
"""Settings that differ only in order and resets, which do not change the numbers of a model that is not adapted."""

SUMMARIES = ("average", "worst")  # domains computed from others


@dataclass(frozen=True)
class Column:
    """What the numbers of a column are: a metric on a domain."""

    domain: str
    metric: Metric

    def __str__(self) -> str:
        return f"{self.domain} {self.metric}"


@dataclass(frozen=True)
class PaperRow:
    """One line of a table: a method with an objective."""

    method: str
    objective: str
    """"em" or "come"; in the ablation also "come:freeze_norm=false", Opinion(freeze_norm=False), and "em:freeze_norm=true",
    Softmax(freeze_norm=True)."""
    values: tuple[float | None, ...]  # in the order of the columns; None where the paper has no number
    sl: bool | None = None  # ablation only: whether the mass is a subjective opinion
    uc: bool | None = None  # ablation only: whether the norm of the logits is held


@dataclass(frozen=True)
class PaperImprove:
    """An "Improve" line as printed: a triangle up is +, down is -, and "-" is None."""

    method: str
    values: tuple[float | None, ...]


@dataclass(frozen=True)
class PaperTable:
    """One table of the paper."""

    name: str
    label: str  # its label in the LaTeX source
    caption: str
    model: str  # "ViT-B/16" or "ResNet-50-BN"
    setting: str
    severity: int | None  # of the corruption; None for clean images
    outliers: float | None  # share of outliers in the stream, where there are any
    columns: tuple[Column, ...]
    rows: tuple[PaperRow, ...]
    improve: tuple[PaperImprove, ...]

    def value(self, method: str, objective: str, domain: str, metric: str) -> float | None:
        """The number printed for that method, objective, domain and metric; None where the paper printed none.

        Example:
            >>> get("standard").value("tent", "come", "average", "accuracy")
            61.2
            >>> get("standard").value("tent", "come", "fogg", "accuracy")  # doctest: +ELLIPSIS
            Traceback (most recent call last):
            ...
            come.errors.ConfigError: no column of standard 'fogg accuracy'; did you mean 'fog accuracy'? Known: ...
        """
        rows = {f"{row.method} {row.objective}": row for row in self.rows}
        places = {str(column): i for i, column in enumerate(self.columns)}
        row, column = f"{method} {objective}", f"{domain} {metric}"
        if row not in rows:
            raise unknown(f"row of {self.name}", row, rows)
        if column not in places:
            raise unknown(f"column of {self.name}", column, places)
        return rows[row].values[places[column]]


def names() -> list[str]:
    """Names of all tables, in the order of the paper."""
    return list(_tables())


def get(name: str) -> PaperTable:
    """The table of that name."""
    tables = _tables()
    if name not in tables:
        raise unknown("table of the paper", name, tables)
    return tables[name]


def rank(method: str) -> tuple[int, str]:
    """A sort key: the paper's order of methods, then all others by name.

    Example:
        >>> sorted(["rotta", "tent", "source", "tent:keep=0.5"], key=rank)
        ['source', 'tent', 'tent:keep=0.5', 'rotta']
    """
    order = list(dict.fromkeys(("source", "norm", *(row.method for row in get("standard").rows))))
    base = method.partition(":")[0]
    return order.index(base) if base in order else len(order), method


def inconsistencies(table: PaperTable) -> list[str]:
    """Printed numbers of `table` that contradict each other beyond rounding.

    Every number is rounded to 0.1, so it stands for an interval of +-0.05. A finding is

    - an average that is more than 0.05 + 0.05 from the mean of its cells;
    - an Improve that is more than 0.1 from COME minus EM (three roundings make 0.15, and all are multiples of 0.1), or
      a "-" although they differ by 0.6 or more, when only less than 0.5 is left out;
    - an average or a worst case that is not what the first table with that quantity has. "source" is not adapted, so its
      numbers must be the same in every setting that only changes the order of the images.

    Example:
        >>> inconsistencies(get("mixed"))
        []
        >>> inconsistencies(get("ablation"))[0]
        'ablation: tent em worst accuracy is 10.6, but 10.5 by the cells of standard'
    """
    return [*_wrong_averages(table), *_wrong_improves(table), *_contradictions(table)]


# All arithmetic below is in whole tenths of a point, so that no comparison depends on how 0.1 is stored.


def _tenths(value: float) -> int:
    return round(10 * value)


def _wrong_averages(table: PaperTable) -> Iterator[str]:
    for row in table.rows:
        for place, (column, printed) in enumerate(zip(table.columns, row.values, strict=True)):
            cells: list[int] = []
            if column.domain == "average":
                cells = _cells(table, row, column.metric)
            elif row.method == "average":
                others = [r for r in table.rows if r.objective == row.objective and r.method != row.method]
                cells = [_tenths(value) for r in others if (value := r.values[place]) is not None]
            if printed is not None and cells and abs(len(cells) * _tenths(printed) - sum(cells)) > len(cells):
                where = f"{table.name}: {row.method} {row.objective} {column}"
                yield f"{where} is {printed}, but the mean of its {len(cells)} cells is {sum(cells) / len(cells) / 10:.2f}"


def _cells(table: PaperTable, row: PaperRow, metric: str) -> list[int]:
    """What the average and the worst of `metric` in `row` are computed from."""
    return [
        _tenths(value)
        for column, value in zip(table.columns, row.values, strict=True)
        if column.metric == metric and column.domain not in SUMMARIES and value is not None
    ]


def _wrong_improves(table: PaperTable) -> Iterator[str]:
    for line in table.improve:
        for column, printed in zip(table.columns, line.values, strict=True):
            em, come = (table.value(line.method, name, column.domain, column.metric) for name in ("em", "come"))
            if em is None or come is None or column.metric not in ("accuracy", "fpr"):
                continue
            change = _tenths(come) - _tenths(em)
            wrong = abs(change) > SUBSTANTIAL if printed is None else abs(_tenths(printed) - change) > 1
            if wrong:
                said = "'-'" if printed is None else f"{printed:+.1f}"
                yield f"{table.name}: {line.method} improves {column} by {said}, but {em} to {come} is {change / 10:+.1f}"


def _contradictions(table: PaperTable) -> Iterator[str]:
    first: dict[tuple[object, ...], tuple[str, int, bool]] = {}
    for name in takewhile(lambda name: name != table.name, names()):
        for key, (tenths, derived) in _summaries(get(name)).items():
            first.setdefault(key, (name, tenths, derived))
    for key, (tenths, derived) in _summaries(table).items():
        other, expected, derived_there = first.get(key, (table.name, tenths, derived))
        if tenths != expected and not (derived and derived_there):
            row = " ".join(str(part) for part in key[-4:])
            here = " by its cells" if derived else ""
            there = f"by the cells of {other}" if derived_there else f"in {other}"
            yield f"{table.name}: {row} is {tenths / 10:.1f}{here}, but {expected / 10:.1f} {there}"


def _summaries(table: PaperTable) -> dict[tuple[object, ...], tuple[int, bool]]:
    """Averages and worst cases in tenths, by what they are of; the flag marks a worst case computed here from the cells."""
    found: dict[tuple[object, ...], tuple[int, bool]] = {}
    for row in table.rows:
        setting = "any order" if row.method == "source" and table.setting in UNMIXED else table.setting
        same = (table.model, setting, table.severity, table.outliers, row.method, row.objective)
        for metric, worst in (("accuracy", min), ("fpr", max)):
            if cells := _cells(table, row, metric):
                found[(*same, "worst", metric)] = worst(cells), True
        for column, value in zip(table.columns, row.values, strict=True):
            if column.domain in SUMMARIES and value is not None:
                found[(*same, column.domain, column.metric)] = _tenths(value), False
    return found


@cache
def _tables() -> dict[str, PaperTable]:
    text = (files("come.bench") / "paper" / "tables.json").read_text(encoding="utf-8")
    return {table.name: table for table in TypeAdapter(list[PaperTable]).validate_json(text)}
