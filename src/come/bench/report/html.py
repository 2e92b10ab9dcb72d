"""The report of a run as one page that needs nothing else: no network, no fonts, no server.

The page is a template (`page.html.jinja`); here is what it is filled with, section by section.
"""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import quote

from come.bench import statistics
from come.bench.folder import RunFolder
from come.bench.record import Failure, Record
from come.bench.report import panels as draw
from come.bench.report.configurations import one_configuration, shared
from come.bench.report.costs import by_pair, cost, threads, unit_of_time, unlike
from come.bench.report.figures import Panel, groups
from come.bench.report.findings import (
    by_effect,
    changes,
    collapses,
    effect,
    extremes,
    failed,
    headline,
    helped,
    missing,
    outliers,
    ranked,
    recoveries,
)
from come.bench.report.rates import rates_table, without_sweeps
from come.bench.report.reading import Piece, Reading, read
from come.bench.report.tables import (
    METRICS,
    SHORT,
    Entry,
    Table,
    cut,
    domains_of,
    metrics_table,
    names_of,
    objectives_of,
    outliers_table,
    results_table,
    scores_note,
)
from come.bench.report.template import rendered
from come.bench.report.writing import about, images, write_text
from come.bench.statistics import AVERAGE, Judged
from come.methods import DEFAULT

POINTS = 36
"""Of each line along the stream; a panel is less than 300 points wide."""

LISTED = 8
"""Items of a list in a sentence."""

FULL = (10.0, 30.0)
"""Points from the source at which a cell has its full colour: those of the farthest one, but no less and no more than these."""

Context = dict[str, Any]


def write_html(
    folder: RunFolder,
    records: Iterable[Record],
    path: str | Path,
    command: Sequence[str] = (),
    verdicts: Judged | None = None,
) -> None:
    """Write the report of a run: whole or not at all, and the same bytes for the same records.

    Args:
        folder: where the rows of the records are; the page links to them, relative to where it stands.
        records: of one plan.
        path: the page.
        command: what made the run, to be shown.
        verdicts: of `come.bench.statistics.verdicts(folder, records)`, if they are at hand.

    Raises:
        InputError: there are no records, or they are of several plans.
        StateError: the rows of a cell cannot be read, or the page cannot be written.
    """
    records = one_configuration(records)
    outcome = folder.outcome(records)
    judged = statistics.verdicts(folder, records) if verdicts is None else verdicts
    found = read(folder, records)
    with draw.drawing():
        text = rendered(
            "page.html.jinja",
            title=f"{records[0].cell.model} on {records[0].cell.data}",
            about=f"{about(records)}, {images(records[0].cell)}, batches of {records[0].cell.batch_size}",
            seeds=sorted({r.cell.seed for r in records}),
            scores=scores_note(records),
            finding=_finding(records, judged, found.pieces, folder.failures()),
            accuracy=_table(results_table(records, verdicts=judged), heat=True),
            fprs=[_table(results_table(records, metric=name, verdicts=judged), heat=True) for name in _fprs(records)],
            outliers=None if (outside := outliers_table(records)) is None else _table(outside, heat=True),
            metrics=_metrics(records),
            rates=None if (rates := rates_table(records, judged)) is None else _table(rates),
            figures=_figures(records, found, judged),
            cost=_cost(records),
            protocol="" if outcome is None else str(outcome),
            setup=_setup(records, command) | {"protocol": "" if outcome is None else outcome.protocol.paragraph()},
            cells=_cells(folder, records, Path(path)),
        )
    write_text(path, text)


def _fprs(records: Sequence[Record]) -> list[str]:
    """The FPRs that verdicts are about and the records have; one if they are under one score."""
    found = [name for name in statistics.METRICS if METRICS[name].score is not None and domains_of(records, name)]
    return found if records[0].result.score == "confidence" else found[:1]


def _finding(
    records: Sequence[Record], judged: Judged, pieces: Sequence[Piece], failures: Sequence[Failure]
) -> Context:
    cards = [
        (f"{method}: {before} → {after}", [(statistics.called(v.metric, records[0].result.score), v) for v in found])
        for (method, before, after), found in changes(records, judged).items()
    ]
    main = without_sweeps(records)
    return {
        "helped": helped(records, judged),
        "gains": _gains(records, judged),
        "headline": headline(main, judged),
        "effect": effect(main, judged),
        "outliers": outliers(records, judged),
        "extremes": extremes(records),
        "cards": cards,
        "has_source": any(piece.pair[0] == "source" for piece in pieces),
        "collapsed": _listed(collapses(pieces)),
        "undone": _listed(recoveries(records)),
        "missing": _listed(missing(records)),
        "failed": _listed(failed(failures, records)),
    }


def _gains(records: Sequence[Record], judged: Judged) -> list[tuple[str, Entry, str, str, str]]:
    """By method, the largest first: its name, the gain over the source, the interval, the worst domain, and the words."""
    names, rows = names_of(records), []
    for pair, verdict in ranked(records, judged).items():
        by_domain = {d: v for d in domains_of(records) if (v := judged.gains.get((*pair, d, "accuracy"))) is not None}
        worst = min(by_domain, key=lambda d: by_domain[d].gain, default="")
        at = f"{SHORT.get(worst, worst)} {by_domain[worst].points}" if len(by_domain) > 1 else ""
        default = ", the default" * (pair[0].partition(":")[0] == DEFAULT)
        gain = Entry(float(verdict.points), change=verdict.change)
        rows.append((f"{names[pair]}{default}", gain, verdict.interval, at, verdict.words))
    return rows


def _listed(items: Iterable[str]) -> str:
    """The items; of many, the first and how many more."""
    items = list(items)
    more = f" and {len(items) - LISTED} more" if len(items) > LISTED else ""
    return "; ".join(items[:LISTED]) + more


def _table(table: Table, heat: bool = False) -> Context:
    """Heads with how their first click sorts and what they mean; rows of numbers, the best of a column marked.

    The averages come first: a phone shows a few columns.

    Args:
        heat: give each number a colour by how much better or worse than the source's it is.
    """
    order = sorted(range(len(table.keys)), key=lambda i: table.keys[i][0] != AVERAGE)
    heads = []
    for i in order:
        domain, name = table.keys[i]
        first = "ascending" if METRICS[name].lower_is_better else "descending"
        text, tip = (
            (table.columns[i], METRICS[name].meaning) if domain == AVERAGE else (cut(table.columns[i], 14), domain)
        )
        heads.append((text, first, tip))
    best = [_best(table, i) for i in range(len(order))]
    shades = _shades(table) if heat else {}
    least, most = FULL
    full = max(least, min(most, 5.0 * math.ceil(max(map(abs, shades.values()), default=0.0) / 5)))
    rows, before = [], None
    for k, row in enumerate(table.rows):
        kind = (
            "improve again" if row.score else "improve" if not row.ran_with else "first" if row.method != before else ""
        )
        cells = []
        for i in order:
            entry, shade = row.entries[i], round(100 * shades.get((k, i), 0.0) / full)
            is_best = bool(row.ran_with and entry and _printed(entry) == best[i])
            cells.append((entry, is_best, max(-100, min(100, shade))))
        rows.append((kind, row.name.strip(), cells))
        before = row.method
    return {"heads": heads, "rows": rows, "full": full if shades else None}


def _shades(table: Table) -> dict[tuple[int, int], float]:
    """By row and column: points by which a number is better than the source's, and a difference that was found than none.

    Empty without a source.
    """
    source = next((row.entries for row in table.rows if row.method == "source"), None)
    if source is None:
        return {}
    found = {}
    for k, row in enumerate(table.rows):
        for i, (_, name) in enumerate(table.keys):
            entry, than = row.entries[i], source[i]
            sign = -1 if METRICS[name].lower_is_better else 1
            if entry and entry.change in ("better", "worse"):
                found[k, i] = entry.mean
            elif entry and than and not entry.change and row.method != "source":
                found[k, i] = sign * (entry.mean - than.mean)
    return found


def _best(table: Table, column: int) -> float | None:
    """The best number of a column as it is printed; None if there is no better and worse, or all are equal."""
    lower = METRICS[table.keys[column][1]].lower_is_better
    values = {_printed(e) for row in table.rows if row.ran_with and (e := row.entries[column]) is not None}
    return None if lower is None or len(values) < 2 else min(values) if lower else max(values)


def _printed(entry: Entry) -> float:
    return round(entry.mean, entry.digits)


def _metrics(records: Sequence[Record]) -> Context:
    table = metrics_table(records)
    return _table(table) | {"meanings": [(METRICS[m].column, METRICS[m].meaning) for _, m in table.keys]}


def _figures(records: Sequence[Record], found: Reading, judged: Judged) -> Context:
    parts, number = groups(records, found, POINTS), count()
    domains = len({piece.domain for piece in found.pieces})
    looks, best = draw.looks(records), [method for method, _ in ranked(records, judged)]
    by_change = [method for method, *_ in by_effect(without_sweeps(records), judged)]
    default = [method for method in best if method.partition(":")[0] == DEFAULT]
    first = dict.fromkeys(("source", *default, *best[:1], *by_change[:1]))
    place = {method: i for i, method in enumerate(dict.fromkeys((*first, *by_change)))}
    lead = set(first) if by_change or best else {method for method, _ in looks}
    return {
        "legend": [
            (
                Panel("", partial(draw.draw_sample, look=look), (34, 10), 0, 0, 0, 0).inline(next(number)),
                look.label,
                look.series,
                method in lead,
            )
            for (method, _), look in sorted(looks.items(), key=lambda item: place.get(item[0][0], len(place)))
        ],
        "few": len(lead) < len({method for method, _ in looks}),
        "streams": [
            (g.title, [panel.inline(next(number), f", {g.title}") for panel in g.panels]) for g in parts["streams"]
        ],
        "of": len(found.names),
        "kinds": [line.get_label() for line in parts["confidence"][0].legend],
        "domains": (min(domains, draw.DOMAINS), domains),
        **{
            n: [panel.inline(next(number)) for group in parts[n] for panel in group.panels]
            for n in ("overview", "rates", "confidence", "reliability", "collapse", "cost")
        },
    }


def _cost(records: Sequence[Record]) -> Context:
    groups = by_pair(records)
    found = {pair: cost(group) for pair, group in groups.items()}
    reason = unlike(groups.values())
    unit, name = unit_of_time(found)
    ratios = not reason and "source" in name
    heads = {
        "ms": "per image, without waiting for data",
        **({"x source": "time per image, relative to the source's"} if ratios else {}),
        "peak MB": "memory",
        "used %": "samples that drove an update",
        "total s": "in all, over all cells",
        "wait s": "for data",
    }
    rows = []
    for pair, one in found.items():
        numbers: list[tuple[float | None, int]] = [
            (1000 * one.seconds_per_image, 2),
            *([(one.seconds_per_image / unit, 2)] if ratios else []),
            (one.memory_mb, 0),
            (None if one.used is None else 100 * one.used, 0),
            (one.seconds, 1),
            (one.waiting, 1),
        ]
        cells = [(None if value is None else Entry(value, digits=digits), False, 0) for value, digits in numbers]
        rows.append(("first", names_of(records)[pair], cells))
    return {
        "heads": [(text, "ascending", tip) for text, tip in heads.items()],
        "rows": rows,
        "full": None,
        "unlike": reason,
        "on_cpu": any(r.machine.device.startswith("cpu") for r in records),
    }


def _setup(records: Sequence[Record], command: Sequence[str]) -> Context:
    machines = [r.machine for r in records]
    loads = sorted({machine.load for machine in machines})
    items: Mapping[str, Iterable[object]] = {
        **{name.replace("_", " "): [value] for name, value in shared(records[0]).items() if value is not None},
        "seeds": [", ".join(map(str, sorted({r.cell.seed for r in records})))],
        "methods": [f"{m} ({', '.join(o)})" for m, o in objectives_of(records).items()],
        "learning rates": [f"{' + '.join(r.cell.pair)} {r.result.lr:g}" for r in records if r.result.lr is not None],
        "hyperparameters": [f"{r.cell.method} {k}={v}" for r in records for k, v in r.cell.hyper.items()]
        or ["defaults"],
        "device": [f"{m.device}, {threads(m)}" for m in machines],
        "cores that other programs kept busy": [f"{min(loads):g} to {max(loads):g}" if len(loads) > 1 else loads[0]],
        "versions": [", ".join(f"{k} {v}" for k, v in m.versions.items()) for m in machines],
        "images that could not be read": [sum(r.result.bad_images for r in records)],
    }
    found = [(name, "; ".join(dict.fromkeys(map(str, values))) or "none") for name, values in items.items()]
    return {"command": shlex.join(command), "items": found}


def _cells(folder: RunFolder, records: Sequence[Record], path: Path) -> Context:
    def link(target: Path) -> str:
        """Relative to the page."""
        return quote(Path(os.path.relpath(target, path.parent)).as_posix())

    rows = [
        (
            r.key,
            " + ".join(r.cell.pair),
            _listed(r.result.domains),
            r.cell.seed,
            r.result.samples,
            link(folder.file(r.key)),
        )
        for r in records
    ]
    return {"rows": rows, "streams": link(folder.streams)}
