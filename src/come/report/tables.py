"""Tables in the paper's form: a row per method and objective, and an "Improve" row under each pair."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from rich import box
from rich.table import Table as RichTable
from rich.text import Text

from come.bench.store import Record

SUBSTANTIAL = 0.5
"""Points from which a difference is marked, as in the paper."""

SHORT = {
    "gaussian_noise": "Gauss.", "shot_noise": "Shot", "impulse_noise": "Impul.", "defocus_blur": "Defoc",
    "glass_blur": "Glass", "motion_blur": "Motion", "zoom_blur": "Zoom", "snow": "Snow", "frost": "Frost", "fog": "Fog",
    "brightness": "Brit.", "contrast": "Contr.", "elastic_transform": "Elast.", "pixelate": "Pixel",
    "jpeg_compression": "JPEG", "speckle_noise": "Speck.", "gaussian_blur": "G.blur", "spatter": "Spat.",
    "saturate": "Satur.", "clean": "Clean",
}  # fmt: skip


@dataclass(frozen=True)
class Entry:
    """A number in points (percent) with its spread over seeds, and what it means."""

    mean: float
    spread: float | None = None
    change: str = ""
    """"", or for a difference: "better", "worse", "same"."""

    def __str__(self) -> str:
        """As it is printed: 52.1, 52.1±0.3, △1.2, ▽0.6, 0.1."""
        if self.change:
            mark = "" if self.change == "same" else "△" if self.mean > 0 else "▽"
            return f"{mark}{abs(self.mean):.1f}" if mark else f"{self.mean + 0.0:+.1f}"
        return f"{self.mean:.1f}" if self.spread is None else f"{self.mean:.1f}±{self.spread:.1f}"


@dataclass(frozen=True)
class Row:
    """One line of a table; None where there is no number yet."""

    method: str
    objective: str
    entries: tuple[Entry | None, ...]


@dataclass(frozen=True)
class Table:
    """A title, column heads, and rows."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[Row, ...]


def results_table(records: Iterable[Record], title: str = "") -> Table:
    """Accuracy for each domain, then the average accuracy and the average FPR; mean and deviation over seeds.

    The "Improve" row under two objectives of one method is the second minus the first, of the means, marked from
    0.5 points on: a triangle up where the number rose, down where it fell.
    """
    records = list(records)
    domains = list(dict.fromkeys(domain for r in records for domain in r.result["metrics"]))
    pairs = list(dict.fromkeys((r.cell["method"], r.cell["objective"]) for r in records))
    by_method: dict[str, list[str]] = {}
    for method, objective in pairs:
        by_method.setdefault(method, []).append(objective)
    rows: list[Row] = []
    for method, objectives in by_method.items():
        entries = [_entries([r for r in records if _is(r, method, o)], domains) for o in objectives]
        for objective, line in zip(objectives, entries, strict=True):
            rows.append(Row(method, objective if len(objectives) > 1 else "", line))
        if len(entries) == 2:
            lower_is_better = [False] * (len(domains) + 1) + [True]
            differences = (_difference(a, b, low) for a, b, low in zip(*entries, lower_is_better, strict=True))
            rows.append(Row(method, "improve", tuple(differences)))
    return Table(title, (*(SHORT.get(d, d) for d in domains), "Acc↑", "FPR↓"), tuple(rows))


def _is(record: Record, method: str, objective: str) -> bool:
    return bool(record.cell["method"] == method and record.cell["objective"] == objective)


def _entries(records: Sequence[Record], domains: Sequence[str]) -> tuple[Entry | None, ...]:
    seeds: dict[int, dict[str, dict[str, float]]] = {}
    for record in records:
        seeds.setdefault(record.cell["seed"], {}).update(record.result["metrics"])
    line = [_over_seeds([100 * s[d]["accuracy"] for s in seeds.values() if d in s]) for d in domains]
    whole = [s for s in seeds.values() if all(d in s for d in domains)]
    for metric in ("accuracy", "fpr"):
        line.append(_over_seeds([100 * fmean(s[d][metric] for d in domains) for s in whole]))
    return tuple(line)


def _over_seeds(values: Sequence[float]) -> Entry | None:
    if not values:
        return None
    return Entry(fmean(values), stdev(values) if len(values) > 1 else None)


def _difference(before: Entry | None, after: Entry | None, lower_is_better: bool) -> Entry | None:
    if before is None or after is None:
        return None
    # of the numbers as they are printed, so that a reader can check it
    change = round(after.mean, 1) - round(before.mean, 1)
    if abs(change) < SUBSTANTIAL - 1e-9:
        return Entry(change, change="same")
    return Entry(change, change="better" if (change > 0) != lower_is_better else "worse")


STYLES = {"better": "bold blue", "worse": "bold yellow", "same": "dim", "": ""}


def to_rich(table: Table, width: int) -> list[RichTable]:
    """The table for a terminal of that many columns: as many pieces as it takes, the method at the left of each."""
    names = [_name(row) for row in table.rows]
    first = max((len(n) for n in names), default=6) + 2
    sizes = [
        max([len(head), *(len(str(row.entries[i] or "")) for row in table.rows)]) + 2
        for i, head in enumerate(table.columns)
    ]
    units = [[i] for i in range(len(sizes) - 2)] + [[len(sizes) - 2, len(sizes) - 1]]  # the two averages stay together
    pieces: list[list[int]] = [[]]
    for unit in units:
        if pieces[-1] and first + 4 + sum(sizes[j] + 1 for j in [*pieces[-1], *unit]) > width:
            pieces.append([])
        pieces[-1] += unit
    drawn = []
    for number, piece in enumerate(pieces):
        part = RichTable(title=table.title if not number else None, box=box.SIMPLE_HEAD, title_justify="left")
        part.add_column("", no_wrap=True)
        for i in piece:
            part.add_column(table.columns[i], justify="right", no_wrap=True)
        for k, (name, row) in enumerate(zip(names, table.rows, strict=True)):
            last = k + 1 == len(table.rows) or table.rows[k + 1].method != row.method
            cells = [Text(str(e), STYLES[e.change]) if e else Text("·", "dim") for e in (row.entries[i] for i in piece)]
            part.add_row(Text(name, "dim" if row.objective == "improve" else ""), *cells, end_section=last)
        drawn.append(part)
    return drawn


def to_markdown(table: Table) -> str:
    """The table as GitHub-flavoured Markdown."""
    lines = [f"### {table.title}\n"] if table.title else []
    lines.append("| |" + "|".join(table.columns) + "|")
    lines.append("|---|" + "---:|" * len(table.columns))
    for row in table.rows:
        cells = [f"**{e}**" if e and e.change in ("better", "worse") else str(e or "") for e in row.entries]
        lines.append("|".join(["", _name(row).strip(), *cells, ""]))
    return "\n".join(lines) + "\n"


def _name(row: Row) -> str:
    if row.objective == "improve":
        return "  Improve"
    return f"{row.method} + {row.objective}" if row.objective else row.method
