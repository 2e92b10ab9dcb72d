"""Writes the report of a run as one page that loads nothing: fills the template `page.html.jinja`, section by section."""

from __future__ import annotations

import base64
import hashlib
import math
import os
import shlex
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from importlib.resources import files
from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import quote

from come.bench import statistics
from come.bench.folder import RunFolder
from come.bench.record import Failure, Record
from come.bench.report import findings, tables
from come.bench.report import panels as draw
from come.bench.report.configurations import one_configuration, shared
from come.bench.report.costs import Cost, by_pair, cost, threads, unit_of_time, unlike
from come.bench.report.figures import Panel, groups
from come.bench.report.pixels import classes_table, pictures
from come.bench.report.reading import Piece, Reading, read
from come.bench.report.tables import METRICS, Entry, Table, cut, domains_of, names_of, rates_table, without_sweeps
from come.bench.report.writing import about, filled, images, write_text
from come.bench.statistics import AVERAGE, Judged
from come.methods import DEFAULT

POINTS = 36  # of each line along the stream; a panel is less than 300 points wide
LISTED = 8  # items of a list in a sentence
FULL = (10.0, 30.0)
"""Points from the source at which a cell has its full colour: those of the farthest one, within these limits."""

Context = dict[str, Any]


def rendered(template: str, **values: Any) -> str:
    """A page from a template of this folder, with the style and the script of reports; all text in `values` is escaped."""
    style, script = (files("come.bench.report").joinpath(name).read_text("utf-8") for name in ("page.css", "page.js"))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return filled(template, style=style, script=script, digest=digest, **values)


def write_html(
    folder: RunFolder,
    records: Iterable[Record],
    path: str | Path,
    command: Sequence[str] = (),
    verdicts: Judged | None = None,
) -> None:
    """Write the report of a run as one page, the whole file or none; the same records give the same bytes.

    The page links to the files of `folder`, which has the rows of the records. It shows `command`, what made the run, and
    `come.bench.statistics.verdicts(folder, records)`, which are computed if not given.

    Raises:
        InputError: there are no records, or they are of several plans.
        StateError: the rows of a cell cannot be read, or the page cannot be written.
    """
    records = one_configuration(records)
    outcome, cell = folder.outcome(records), records[0].cell
    judged = statistics.verdicts(folder, records) if verdicts is None else verdicts
    found = read(folder, records)
    # the FPRs that verdicts are about and the records have; one if they are under one score
    fprs = [name for name in statistics.METRICS if METRICS[name].score is not None and domains_of(records, name)]
    fprs = fprs if records[0].result.score == "confidence" else fprs[:1]
    by_fpr = [tables.results_table(records, metric=name, verdicts=judged) for name in fprs]
    outside, rates = tables.outliers_table(records), rates_table(records, judged)
    metrics = tables.metrics_table(records)
    meanings = [(METRICS[name].column(), METRICS[name].meaning) for _, name in metrics.keys]
    with draw.drawing():
        text = rendered(
            "page.html.jinja",
            title=f"{cell.model} on {cell.data}",
            about=f"{about(records)}, {images(cell)}, batches of {cell.batch_size}",
            seeds=sorted({r.cell.seed for r in records}),
            scores=tables.scores_note(records),
            finding=_finding(records, judged, found.pieces, folder.failures()),
            accuracy=_table(tables.results_table(records, verdicts=judged), heat=True),
            fprs=[_table(table, heat=True) for table in by_fpr],
            pixels={
                "classes": _table(classes_table(folder, records), heat=True),
                "pictures": pictures(folder, records, judged),
            }
            if cell.dense
            else None,
            outliers=outside and _table(outside, heat=True),
            metrics=_table(metrics) | {"meanings": meanings},
            rates=rates and _table(rates),
            figures=_figures(records, found, judged),
            cost=_cost(records),
            protocol=str(outcome or ""),
            setup=_setup(records, command) | {"protocol": outcome.protocol.paragraph() if outcome else ""},
            records=records,
            folder=folder,
            listed=_listed,
            link=lambda target: quote(Path(os.path.relpath(target, Path(path).parent)).as_posix()),
        )
    write_text(path, text)


def _finding(
    records: Sequence[Record], judged: Judged, pieces: Sequence[Piece], failures: Sequence[Failure]
) -> Context:
    main, score = without_sweeps(records), records[0].result.score
    cards = [
        (f"{method}: {before} → {after}", [(statistics.called(v.metric, score), v) for v in found])
        for (method, before, after), found in findings.changes(records, judged).items()
    ]
    return {
        "helped": findings.helped(records, judged),
        "gains": _gains(records, judged),
        "headline": findings.headline(main, judged),
        "effect": findings.effect(main, judged),
        "outliers": findings.outliers(records, judged),
        "extremes": findings.extremes(records),
        "cards": cards,
        "has_source": any(piece.pair[0] == "source" for piece in pieces),
        "collapsed": _listed(findings.collapses(pieces)),
        "undone": _listed(findings.recoveries(records)),
        "missing": _listed(findings.missing(records)),
        "failed": _listed(findings.failed(failures, records)),
    }


def _gains(records: Sequence[Record], judged: Judged) -> list[tuple[str, Entry, str, str, str]]:
    """By method, the largest first: its name, the gain over the source, the interval, the worst domain, and the words."""
    names, rows = names_of(records), []
    for pair, verdict in findings.ranked(records, judged).items():
        by_domain = {
            d: v for d in domains_of(records) if (v := judged.gains.get((*pair, d, records[0].cell.metric))) is not None
        }
        worst = min(by_domain, key=lambda d: by_domain[d].gain, default="")
        at = f"{tables.SHORT.get(worst, worst)} {by_domain[worst].points}" if len(by_domain) > 1 else ""
        name = names[pair] + ", the default" * (pair[0].partition(":")[0] == DEFAULT)
        rows.append((name, Entry(float(verdict.points), change=verdict.change), verdict.interval, at, verdict.words))
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
    heads, best = [], {}
    for i in order:
        domain, name = table.keys[i]
        lower = METRICS[name].lower_is_better
        text, tip = (table.columns[i], METRICS[name].meaning)
        if domain != AVERAGE:
            text, tip = cut(text, 14), domain
        heads.append((text, "ascending" if lower else "descending", tip))
        values = {e.printed for row in table.rows if row.ran_with and (e := row.entries[i]) is not None}
        if lower is not None and len(values) > 1:  # none is the best of equal numbers
            best[i] = min(values) if lower else max(values)
    shades = _shades(table) if heat else {}
    least, most = FULL
    full = max(least, min(most, 5.0 * math.ceil(max(map(abs, shades.values()), default=0.0) / 5)))
    rows, before = [], None
    for k, row in enumerate(table.rows):
        kind = "first" if row.method != before else ""
        if row.score or not row.ran_with:
            kind = "improve again" if row.score else "improve"
        cells = []
        for i in order:
            entry, shade = row.entries[i], round(100 * shades.get((k, i), 0.0) / full)
            is_best = bool(row.ran_with and entry and entry.printed == best.get(i))
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


def _figures(records: Sequence[Record], found: Reading, judged: Judged) -> Context:
    parts, number, looks = groups(records, found, POINTS), count(), draw.looks(records)
    domains = len({piece.domain for piece in found.pieces})
    best = [method for method, _ in findings.ranked(records, judged)]
    by_change = [method for method, *_ in findings.by_effect(without_sweeps(records), judged)]
    default = [method for method in best if method.partition(":")[0] == DEFAULT]
    first = dict.fromkeys(("source", *default, *best[:1], *by_change[:1]))
    place = {method: i for i, method in enumerate(dict.fromkeys((*first, *by_change)))}
    methods = {method for method, _ in looks}
    lead = set(first) if by_change or best else methods
    legend = []
    for (method, _), look in sorted(looks.items(), key=lambda item: place.get(item[0][0], len(place))):
        sample = Panel("", partial(draw.draw_sample, look=look), (34, 10), 0, 0, 0, 0)
        legend.append((sample.inline(next(number)), look.label, look.series, method in lead))
    return {
        "legend": legend,
        "few": len(lead) < len(methods),
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
    groups, names = by_pair(records), names_of(records)
    found = {pair: cost(group) for pair, group in groups.items()}
    reason = unlike(groups.values())
    unit, name = unit_of_time(found)
    columns: list[tuple[str, str, Callable[[Cost], float | None], int]] = [
        ("ms", "per image, without waiting for data", lambda one: 1000 * one.seconds_per_image, 2),
        ("x source", "time per image, relative to the source's", lambda one: one.seconds_per_image / unit, 2),
        ("peak MB", "memory", lambda one: one.memory_mb, 0),
        ("used %", "samples that drove an update", lambda one: None if one.used is None else 100 * one.used, 0),
        ("total s", "in all, over all cells", lambda one: one.seconds, 1),
        ("wait s", "for data", lambda one: one.waiting, 1),
    ]
    if reason or "source" not in name:
        del columns[1]
    rows = []
    for pair, one in found.items():
        numbers = [(of(one), digits) for _, _, of, digits in columns]
        cells = [(None if value is None else Entry(value, digits=digits), False, 0) for value, digits in numbers]
        rows.append(("first", names[pair], cells))
    return {
        "heads": [(text, "ascending", tip) for text, tip, *_ in columns],
        "rows": rows,
        "full": None,
        "unlike": reason,
        "on_cpu": any(r.machine.device.startswith("cpu") for r in records),
    }


def _setup(records: Sequence[Record], command: Sequence[str]) -> Context:
    machines = [r.machine for r in records]
    loads = sorted({machine.load for machine in machines})
    hyper = [f"{r.cell.method} {k}={v}" for r in records for k, v in r.cell.hyper.items()]
    items: dict[str, Iterable[object]] = {
        **{name.replace("_", " "): [value] for name, value in shared(records[0]).items() if value is not None},
        "seeds": [", ".join(map(str, sorted({r.cell.seed for r in records})))],
        "methods": [f"{m} ({', '.join(o)})" for m, o in tables.objectives_of(records).items()],
        "learning rates": [f"{' + '.join(r.cell.pair)} {r.result.lr:g}" for r in records if r.result.lr is not None],
        "hyperparameters": hyper or ["defaults"],
        "device": [f"{m.device}, {threads(m)}" for m in machines],
        "cores that other programs kept busy": [f"{min(loads):g} to {max(loads):g}" if len(loads) > 1 else loads[0]],
        "versions": [", ".join(f"{k} {v}" for k, v in m.versions.items()) for m in machines],
        "images that could not be read": [sum(r.result.bad_images for r in records)],
    }
    found = [(name, "; ".join(dict.fromkeys(map(str, values))) or "none") for name, values in items.items()]
    return {"command": shlex.join(command), "items": found}
