"""`come list`: what there is to choose from."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Annotated, NamedTuple

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable

from come import corruptions, methods, objectives
from come.bench import models, protocols, settings
from come.bench.cli.options import Debug, Json
from come.bench.data import opening
from come.errors import unknown
from come.registry import summary

Cells = tuple[str, ...]


class Listing(NamedTuple):
    """One of the lists."""

    about: str  # what it lists, in a line
    heads: Cells
    lines: Callable[[], Iterable[Cells]]
    note: str = ""  # said below the table

    def rows(self) -> list[Cells]:
        """The heads of its columns, and what stands below them."""
        return [self.heads, *self.lines()]


LISTS = {
    "methods": Listing(
        "how a model adapts, for --methods",
        ("method", "what it does", "COME", "needs", "cost"),
        lambda: (
            (n, summary(m), "yes" if m.minimizes else "-", m.needs, m.cost)
            for n, m in ((name, methods.get(name)) for name in methods.names())
        ),
        "COME: takes an objective; cost: forward (f) and backward (b) passes of each batch",
    ),
    "objectives": Listing(
        "what methods minimize, for --objectives",
        ("objective", "what it is"),
        lambda: ((n, summary(objectives.get(n))) for n in objectives.names()),
    ),
    "corruptions": Listing(
        "corruptions of images, for --corruptions",
        ("corruption", "group"),
        lambda: ((n, g) for g, ns in corruptions.GROUPS.items() for n in ns),
    ),
    "settings": Listing(
        "how streams are made, for --setting",
        ("setting", "what it is"),
        lambda: ((n, settings.get(n).summary) for n in settings.names()),
    ),
    "protocols": Listing(
        "fixed benchmarks, for --protocol",
        ("protocol", "what it is", "No Adapt"),
        lambda: ((n, p.summary, p.expected) for n, p in ((n, protocols.get(n)) for n in protocols.names())),
    ),
    "models": Listing("kinds of models, for --model", ("model", "what it is"), models.DESCRIPTIONS.items),
    "data": Listing(
        "kinds of data, for --data and --outliers",
        ("data", "what it is"),
        lambda: ((k.usage, k.about) for k in map(opening.get, opening.names())),
    ),
}
OVERVIEW = Listing(
    "the lists",
    ("list", "what it lists", "example"),
    lambda: ((n, one.about, f"come list {n}") for n, one in LISTS.items()),
)


def list_(
    kind: Annotated[
        str | None,
        typer.Argument(
            help=f"{', '.join(LISTS)}; without one, what these are.", metavar="KIND", autocompletion=lambda: list(LISTS)
        ),
    ] = None,
    json_: Json = False,
    debug: Debug = False,
) -> None:
    """List methods, objectives, corruptions, settings, protocols, models or data."""
    if kind is not None and kind not in LISTS:
        raise unknown("list", kind, LISTS)
    listing = OVERVIEW if kind is None else LISTS[kind]
    if json_:
        keys = [head.lower().replace(" ", "_") for head in listing.heads]
        typer.echo(json.dumps([dict(zip(keys, row, strict=True)) for row in listing.lines()], indent=1))
        return
    console = Console(highlight=False)
    console.print(listed(listing.rows()))
    if listing.note:
        console.print(f"[dim]{listing.note}[/]")


def listed(rows: Iterable[Cells]) -> RichTable:
    """A table for the terminal: the first row has the heads, the first column the names."""
    table = RichTable(box=None, padding=(0, 2, 0, 0), header_style="dim")
    heads, *lines = rows
    for i, head in enumerate(heads):
        table.add_column(head, no_wrap=i == 0, style="bold" if i == 0 else "")
    for line in lines:
        table.add_row(*map(escape, line))
    return table
