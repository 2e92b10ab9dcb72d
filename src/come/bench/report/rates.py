"""Accuracy against the learning rate, of methods that ran with several, as in `--methods tent,tent:lr=4e-3`."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from come.bench.record import Record
from come.bench.report.panels import POINTS, Looks, around
from come.bench.report.tables import Line, Row, Table, entries, objectives_of, rows_of
from come.bench.statistics import AVERAGE, Judged

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ACCURACY = (AVERAGE, "accuracy")
TITLE = "Average accuracy (%) against the learning rate"


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
    rows = [Row("source", "", _accuracy(records, ["source"] * len(rates), o), o) for o in objectives.get("source", ())]
    for name, by_rate in found.items():
        methods = [by_rate.get(rate, "") for rate in rates]
        both = dict.fromkeys(o for method in by_rate.values() for o in objectives[method])
        changes = [judged.changes.get((method, [*both][-1], *ACCURACY)) for method in methods]
        rows += rows_of(name, {o: _accuracy(records, methods, o) for o in both}, changes, ["accuracy"] * len(rates))
    heads = tuple(f"lr {rate:g}" for rate in rates)
    return Table(TITLE, heads, tuple(rows), tuple((head, "accuracy") for head in heads))


def _accuracy(records: Sequence[Record], methods: Iterable[str], objective: str) -> Line:
    return tuple(entries(records, method, objective, [ACCURACY])[0] for method in methods)


def draw_rates(ax: Axes, records: Sequence[Record], looks: Looks, name: str) -> None:
    """Average accuracy of a method against its learning rate, a line per objective; the source model is level."""
    rates = sweeps(records)[name]
    first = name if name in rates.values() else next(iter(rates.values()))  # the others take its look
    shown: list[float] = []
    for (method, objective), look in looks.items():
        if method not in (first, "source"):
            continue
        line = _accuracy(records, ["source"] if method == "source" else rates.values(), objective)
        values = [math.nan if entry is None else entry.mean for entry in line]
        shown += values
        if method == "source":
            ax.axhline(values[0], **look.line | {"marker": ""})
        else:
            ax.plot(list(rates), values, **look.line | {"markersize": 5, "label": f"{name} + {objective}"})
    ax.set(xscale="log", ylim=around(shown, POINTS), xlabel="learning rate", ylabel="accuracy (%)", title=name)
    ax.set_xticks(list(rates), [f"{rate:g}" for rate in rates])
    ax.minorticks_off()
    ax.locator_params(axis="y", nbins=5)
    ax.grid(axis="y")
    ax.legend(handlelength=3.2)
