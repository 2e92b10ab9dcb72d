"""The report of a run as one page that needs nothing else: no network, no fonts, no server."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Literal
from urllib.parse import quote

from come.bench.report import panels as draw
from come.bench.report.findings import changes, collapses, extremes, headline, missing, recoveries
from come.bench.report.reading import KINDS, Piece, Reading, Way, read
from come.bench.report.svg import inline
from come.bench.report.tables import (
    METRICS,
    SHARED,
    Entry,
    Table,
    metrics_table,
    objectives_of,
    one_configuration,
    pair_of,
    results_table,
)
from come.bench.store import Record, RunFolder
from come.errors import StateError
from come.files import replacing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

POINTS = 36
"""Of each line along the stream; a panel is less than 300 points wide."""

MOST = 20
"""Streams whose trajectories are on the page; each takes up to 200 kB."""


def write_html(folder: RunFolder, records: Iterable[Record], path: str | Path, command: Sequence[str] = ()) -> None:
    """Write the report of a run: whole or not at all, and the same bytes for the same records.

    Args:
        folder: where the rows of the records are; the page links to them, relative to where it stands.
        records: of one configuration.
        path: the page.
        command: what made the run, to be shown.

    Raises:
        InputError: there are no records, or they must not be mixed.
        StateError: the rows of a cell cannot be read, or the page cannot be written.
    """
    text = page(folder, one_configuration(records), Path(path), command)
    try:
        with replacing(Path(path)) as beside:
            beside.write_text(text, encoding="utf-8", newline="\n")
    except OSError as error:
        raise StateError(f"cannot write the report {path}: {error.strerror}; choose another place for it") from error


def page(folder: RunFolder, records: Sequence[Record], path: Path, command: Sequence[str]) -> str:
    """The text of the page."""
    found = read(folder, records)
    cell = records[0].cell
    title = f"{cell['model']} on {cell['data']}"
    style, script = (files("come.bench.report").joinpath(name).read_text("utf-8") for name in ("page.css", "page.js"))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    sections = [
        ("finding", "Finding", _finding(records, found.pieces)),
        ("accuracy", "Accuracy", _accuracy(records)),
        ("fpr", "FPR", _fpr(records)),
        ("metrics", "All metrics", _metrics(records)),
        *_figures(records, found),
        ("setup", "How it was made", _setup(records, command)),
        ("cells", "Cells", _cells(folder, records, path)),
    ]
    links = "".join(f'<a href="#{name}">{escape(head)}</a>' for name, head, _ in sections)
    body = "\n".join(f'<section id="{n}">\n<h2>{escape(head)}</h2>\n{text}\n</section>' for n, head, text in sections)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; \
script-src 'sha256-{digest}'; img-src data:; base-uri 'none'; form-action 'none'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}: test-time adaptation</title>
<style>
{style}</style>
</head>
<body>
<header>
<h1>{escape(title)}</h1>
<button id="theme" type="button" hidden>Dark</button>
<p class="about">{escape(_about(records))}</p>
{GUIDE.format(score=SCORE_NAMES[records[0].score])}
<nav aria-label="Sections">{links}</nav>
</header>
<main>
{body}
</main>
<script>{script}</script>
</body>
</html>
"""


GUIDE = """<p>A model that was trained on clean images classifies corrupted ones and adapts to them without labels. Each
method minimizes an objective on what it sees: <b>em</b> is the entropy of the softmax, <b>come</b> that of an opinion which
may also say “I do not know”. <b>Accuracy</b> is better when higher. <b>FPR</b> is better when lower: of the wrong
predictions, the share that passes a threshold on {score} which accepts 95% of the right ones. Numbers are in percent;
differences count from half a point on.</p>"""


SCORE_NAMES = {
    "confidence": "the confidence",
    "msp": "the largest softmax probability",
    "uncertainty": "the certainty (1 - u)",
    "energy": "the logsumexp of the logits",
    "entropy": "the negative entropy",
}


def _about(records: Sequence[Record]) -> str:
    cell = records[0].cell
    seeds = sorted({r.cell["seed"] for r in records})
    return (
        f"{cell['setting']} setting, severity {cell['severity']}, {cell['size']} images, batches of "
        f"{cell['batch_size']}, {'seed' if len(seeds) == 1 else 'seeds'} {', '.join(map(str, seeds))}"
    )


def _finding(records: Sequence[Record], pieces: Sequence[Piece]) -> str:
    parts = [f'<p class="lead">{escape(headline(records))}</p>', f"<p>{escape(extremes(records))}</p>"]
    by_method: dict[tuple[str, str, str], list[str]] = {}
    for metric in ("accuracy", "fpr"):
        for change in changes(records, metric):
            size = f"{change.difference + 0.0:+.1f}"
            name = {"accuracy": "Accuracy", "fpr": "FPR"}[metric]
            text = f'<p><span class="change {change.claim}">{size}</span> {name} {escape(change.words)}.</p>'
            by_method.setdefault((change.method, change.before, change.after), []).append(text)
    if by_method:
        cards = (
            f'<div class="card"><h3>{escape(m)}: {escape(b)} → {escape(a)}</h3>{"".join(texts)}</div>'
            for (m, b, a), texts in by_method.items()
        )
        parts.append(f'<div class="cards">{"".join(cards)}</div>')
        if len({r.cell["seed"] for r in records}) == 1:
            parts.append('<p class="note">One seed: how much the numbers vary between runs is not known.</p>')
    parts.append(_fallen(pieces))
    if undone := recoveries(records):
        parts.append(f'<p class="note">The guard undid a collapse: {_listed(undone)}.</p>')
    absent = list(missing(records))
    if absent:
        parts.append(f'<p class="note">Not run yet, and shown as “·”: {_listed(absent)}.</p>')
    return "\n".join(parts)


def _fallen(pieces: Sequence[Piece]) -> str:
    if not any(piece.method == "source" for piece in pieces):
        return ""
    found = collapses(pieces)
    rule = "less than half the source's accuracy in the last quarter of a stream"
    if found:
        return f"<p><b>Collapsed</b>, with {rule}: {_listed(found)}.</p>"
    return f"<p>Nothing collapsed: no method has {rule}.</p>"


def _listed(items: Sequence[str], most: int = 8) -> str:
    """The items, escaped; of many, the first and how many more."""
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return escape("; ".join(items[:most])) + more


def _accuracy(records: Sequence[Record]) -> str:
    return (
        "<p>In percent for each domain, the average over them, and the average FPR. <i>Improve</i> is the second "
        "objective minus the first: △ the number rose, ▽ it fell, by half a point or more; blue is better, orange worse. "
        f"Bold is the best of a column.{_seeds_note(records)} Click on a head to sort, twice for the other way round, three "
        f"times for this order.</p>\n{_table(results_table(records))}"
    )


def _seeds_note(records: Sequence[Record]) -> str:
    several = len({r.cell["seed"] for r in records}) > 1
    return " Mean and standard deviation over seeds." if several else ""


def _fpr(records: Sequence[Record]) -> str:
    return (
        "<p>The paper's false positive rate for each domain: wrong samples that pass the threshold which accepts 95% of "
        f"the right ones. Lower is better.</p>\n{_table(results_table(records, metric='fpr'))}"
    )


def _metrics(records: Sequence[Record]) -> str:
    table = metrics_table(records)
    items = "".join(f"<dt>{escape(METRICS[m].column)}</dt><dd>{escape(METRICS[m].meaning)}</dd>" for _, m in table.keys)
    return (
        "<p>Averaged over the domains; in percent, but NLL in nats and Brier as it is. Confidence is the objective's own: "
        "the largest probability (em) or belief (come).</p>\n"
        f"{_table(table)}\n<details><summary>What they mean</summary><dl>{items}</dl></details>"
    )


def _table(table: Table) -> str:
    """A sortable table; a missing number is a dot."""
    heads = []
    for head, (domain, metric) in zip(table.columns, table.keys, strict=True):
        first = "ascending" if METRICS[metric].lower_is_better else "descending"
        tip = METRICS[metric].meaning if domain == "average" else domain
        heads.append(_head(head, first, tip))
    best = [_best(table, i) for i in range(len(table.columns))]
    rows, before = [], None
    for row in table.rows:
        kind = "improve" if row.objective == "improve" else "first" if row.method != before else ""
        shown = bool(row.ran_with)
        cells = (_cell(e, shown and e is not None and _printed(e) == b) for e, b in zip(row.entries, best, strict=True))
        rows.append(f'<tr class="{kind}"><th scope="row">{escape(row.name.strip())}</th>{"".join(cells)}</tr>')
        before = row.method
    return _sortable("".join(heads), rows, dense=len(heads) > 9)


def _head(text: str, first: str, tip: str) -> str:
    return (
        f'<th scope="col" aria-sort="none" data-first="{first}" title="{escape(tip)}">'
        f'<button type="button">{escape(text)}</button></th>'
    )


def _sortable(heads: str, rows: Sequence[str], dense: bool = False) -> str:
    kind = "sortable dense" if dense else "sortable"
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="Table"><table class="{kind}">'
        f'<thead><tr><th scope="col">Method</th>{heads}</tr></thead><tbody>\n'
        + "\n".join(rows)
        + "\n</tbody></table></div>"
    )


def _best(table: Table, column: int) -> float | None:
    """The best number of a column as it is printed; None if there is no better and worse, or all are equal."""
    lower = METRICS[table.keys[column][1]].lower_is_better
    values = {_printed(e) for row in table.rows if row.ran_with and (e := row.entries[column]) is not None}
    return None if lower is None or len(values) < 2 else min(values) if lower else max(values)


def _printed(entry: Entry) -> float:
    return round(entry.mean, entry.digits)


def _cell(entry: Entry | None, best: bool) -> str:
    if entry is None:
        return '<td class="same">·</td>'
    text = str(entry)
    if entry.spread is not None:
        mean, spread = text.split("±")
        text = f'{mean} <span class="spread">±{spread}</span>'
    return f'<td class="{"best" if best else entry.change}" data-value="{entry.mean:.6g}">{text}</td>'


def _figures(records: Sequence[Record], found: Reading) -> Iterator[tuple[str, str, str]]:
    """The sections with drawings; those for which there is something to draw."""
    looks = draw.looks(records)
    with draw.drawing():
        if found.pieces:
            yield "stream", "Along the stream", _stream(found.ways, looks)
            yield "confidence", "Confidence", _confidence(found.pieces, looks)
            yield "collapse", "Collapse", _collapse(found.pieces, looks)
        yield "cost", "Cost", _cost(records, looks)


def _plot(figure: Figure, label: str, prefix: str) -> str:
    return inline(figure, label, prefix).replace("<svg ", '<svg class="plot" ', 1)


def _legend(looks: draw.Looks) -> str:
    items = []
    for i, look in enumerate(looks.values()):
        line = inline(draw.swatch(look), "", f"k{i}").replace("<svg ", '<svg class="swatch" aria-hidden="true" ', 1)
        items.append(f"<li>{line}{escape(look.label)}</li>")
    return f'<ul class="legend">{"".join(items)}</ul>'


def _stream(ways: Sequence[Way], looks: draw.Looks) -> str:
    names = list(dict.fromkeys(way.name for way in ways))
    shown, more = names[:MOST], len(names) - MOST
    several = len({way.seed for way in ways}) > 1
    parts = [
        "<p>Accuracy and FPR are of all samples so far; the others are means over the last tenth of the stream. em is dashed, "
        "come solid. Confidence and u are the objective's own, so their levels do not compare between em and come, but their "
        "trends do. "
        + "Bands are one standard deviation over seeds. " * several
        + "The axes are scaled to what follows the first tenth, which is of few samples."
        + f" Of {len(names)} streams, the first {MOST} are drawn here." * (more > 0)
        + "</p>",
        _chooser(shown),
        _legend(looks),
    ]
    for i, name in enumerate(shown):
        chosen = [way for way in ways if way.name == name]
        panels = (
            _plot(_trajectory(chosen, looks, measure), f"{measure.title}, {name}", f"t{i}-{j}")
            for j, measure in enumerate(draw.MEASURES)
        )
        parts.append(
            f'<div class="way" data-way="{i}"><h3>{escape(name)}</h3><div class="panels">{"".join(panels)}</div></div>'
        )
    return "\n".join(parts)


def _chooser(names: Sequence[str]) -> str:
    options = "".join(f'<option value="{i}">{escape(name)}</option>' for i, name in enumerate(names))
    return f'<p class="chooser" hidden><label>Stream <select id="way">{options}</select></label></p>'


def _trajectory(ways: Sequence[Way], looks: draw.Looks, measure: draw.Measure) -> Figure:
    figure = draw.new_figure(260, 175)
    figure.subplots_adjust(left=34 / 260, right=1 - 14 / 260, bottom=31 / 175, top=1 - 19 / 175)
    draw.draw_trajectory(figure.subplots(), ways, looks, measure, POINTS)
    return figure


def _confidence(pieces: Sequence[Piece], looks: draw.Looks) -> str:
    names = {"right": "predicted right", "wrong": "predicted wrong", "outlier": "outliers"}
    kinds = [kind for kind in KINDS if any(piece.counts[kind].sum() for piece in pieces)]
    legend = "".join(f'<li><span class="box {kind}"></span>{names[kind]}</li>' for kind in kinds)
    panels = []
    for i, pairs in enumerate(draw.stacks(looks)):
        height = 112 * len(pairs) + 16
        figure = draw.new_figure(260, height)
        figure.subplots_adjust(34 / 260, 32 / height, 1 - 12 / 260, 1 - 18 / height, hspace=0.62)
        axes = list(figure.subplots(len(pairs), squeeze=False)[:, 0])
        draw.draw_confidences(axes, pieces, looks, pairs)
        panels.append(_plot(figure, f"Confidence of {', '.join(looks[p].label for p in pairs)}", f"c{i}"))
    return (
        "<p>How confident the samples are, over all domains and seeds, as shares of each kind; the axis is of square "
        "roots, so that small shares show. A method that knows what it does not know keeps the wrong ones at the left.</p>\n"
        f'<ul class="legend">{legend}</ul>\n<div class="panels">{"".join(panels)}</div>'
    )


def _collapse(pieces: Sequence[Piece], looks: draw.Looks) -> str:
    parts = [
        "<p>Each strip is a method, along all domains from left to right, mean over seeds. A collapse is a strip that turns "
        "orange and stays so: accuracy falls below the source's, and one class "
        "takes all predictions.</p>"
    ]
    for i, strips in enumerate(draw.timelines(pieces)):
        height = 15 * len(looks) + 58
        figure = draw.new_figure(640, height)
        draw.fill_timeline(figure, pieces, looks, strips, bottom=0, height=height)
        svg = _plot(figure, strips.title, f"s{i}")
        parts.append(
            f'<div class="scroll wide" tabindex="0" role="region" aria-label="{escape(strips.title)}">{svg}</div>'
        )
    return "\n".join(parts)


def _cost(records: Sequence[Record], looks: draw.Looks) -> str:
    kinds: tuple[Literal["time", "memory"], ...] = ("time", "memory") if draw.comparable(records) else ()
    panels = "".join(_plot(_scatter(records, looks, of), f"Accuracy against {of}", f"x{of}") for of in kinds)
    on_cpu = any(str(r.surroundings.get("device", "")).startswith("cpu") for r in records)
    note = (
        " On a CPU the peak is that of the whole process so far, which only grows from one method to the next." * on_cpu
    )
    return (
        f"<p>Time is per image, without waiting for data. Hollow marks are em, filled ones come.{note}</p>\n"
        f'<div class="panels large">{panels}</div>\n{_cost_table(records, looks)}'
    )


def _cost_table(records: Sequence[Record], looks: draw.Looks) -> str:
    heads = {
        "ms per image": "without waiting for data", "times source": "time per image, relative to the source's",
        "seconds": "in all, over all cells", "waiting, s": "for data", "peak MB": "memory",
        "used, %": "samples that drove an update",
    }  # fmt: skip
    found = draw.costs(records)
    unit, _ = draw.unit_of_time(found)
    rows = []
    for pair, cost in found.items():
        group = [r for r in records if pair_of(r) == pair]
        used = [m["used"] for r in group for m in r.result["metrics"].values()]
        relative = cost.seconds_per_image / unit if any(method == "source" for method, _ in found) else None
        cells = [
            _number(1000 * cost.seconds_per_image, ".2f"),
            _number(relative, ".2f"),
            _number(sum(r.result["seconds"] for r in group), ".1f"),
            _number(sum(r.result["seconds_waiting_for_data"] for r in group), ".1f"),
            _number(cost.memory_mb, ".0f"),
            _number(100 * sum(used) / len(used) if used else None, ".0f"),
        ]
        rows.append(f'<tr class="first"><th scope="row">{escape(looks[pair].label)}</th>{"".join(cells)}</tr>')
    return _sortable("".join(_head(text, "ascending", tip) for text, tip in heads.items()), rows)


def _scatter(records: Sequence[Record], looks: draw.Looks, of: Literal["time", "memory"]) -> Figure:
    figure = draw.new_figure(320, 225)
    figure.subplots_adjust(38 / 320, 32 / 225, 1 - 12 / 320, 1 - 8 / 225)
    draw.draw_cost(figure.subplots(), records, looks, of)
    return figure


def _number(value: float | None, form: str) -> str:
    return '<td class="same">·</td>' if value is None else f'<td data-value="{value:.6g}">{value:{form}}</td>'


def _setup(records: Sequence[Record], command: Sequence[str]) -> str:
    cell = records[0].cell
    bad = sum(r.result["bad_images"] for r in records)
    around = [r.surroundings for r in records]
    versions = _distinct(json.dumps(a["versions"]) for a in around)
    rates = _distinct(f"{' + '.join(pair_of(r))} {r.result['lr']:g}" for r in records if r.result.get("lr") is not None)
    hyper = _distinct(f"{r.cell['method']} {json.dumps(r.cell['hyper'])}" for r in records if r.cell["hyper"])
    items = [(name.replace("_", " "), str(cell[name])) for name in SHARED if cell.get(name) is not None]
    items += [
        ("seeds", ", ".join(map(str, sorted({r.cell["seed"] for r in records})))),
        ("methods", "; ".join(f"{m} ({', '.join(o)})" for m, o in objectives_of(records).items())),
        ("learning rates", "; ".join(rates) or "none"),
        ("hyperparameters", "; ".join(hyper) or "the defaults"),
        ("device", "; ".join(_distinct(f"{a['device']}, {a['threads']} threads" for a in around))),
        ("versions", "; ".join(", ".join(f"{k} {v}" for k, v in json.loads(text).items()) for text in versions)),
        ("images that could not be read", str(bad)),
    ]
    rows = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in items)
    made = f"<pre>{escape(shlex.join(command))}</pre>\n" if command else ""
    return f"{made}<dl>{rows}</dl>"


def _distinct(texts: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(texts))


def _cells(folder: RunFolder, records: Sequence[Record], path: Path) -> str:
    link = _linker(path)
    rows = []
    for record in records:
        metrics, cell = record.result["metrics"], record.cell
        names = [f"{record.key}.json", f"{record.key}.safetensors"]
        links = " ".join(
            f'<a href="{link(folder.cells / n)}">{w}</a>' for n, w in zip(names, ("record", "rows"), strict=True)
        )
        texts = [
            " + ".join(pair_of(record)),
            ", ".join(metrics) or "·",
            str(cell["seed"]),
            str(record.result["samples"]),
        ]
        cells = "".join(f'<td class="text">{escape(text)}</td>' for text in texts)
        rows.append(
            f'<tr><th scope="row"><code>{escape(record.key)}</code></th>{cells}<td class="text">{links}</td></tr>'
        )
    heads = "".join(
        f'<th class="text" scope="col">{h}</th>' for h in ("cell", "method", "domains", "seed", "samples", "files")
    )
    return (
        f"<details><summary>{len(records)} finished cells</summary>\n"
        '<div class="scroll" tabindex="0" role="region" aria-label="Cells"><table>'
        f"<thead><tr>{heads}</tr></thead><tbody>\n" + "\n".join(rows) + "\n</tbody></table></div></details>\n"
        f'<p class="note">The rows of every sample are safetensors files; the order of the samples is in '
        f'<a href="{link(folder.streams)}/">streams</a>.</p>'
    )


def _linker(page: Path) -> Callable[[Path], str]:
    """Addresses of files, relative to the page, ready to stand in an attribute."""
    return lambda target: escape(quote(Path(os.path.relpath(target, page.parent)).as_posix()))
