"""`come list`: what there is to choose from."""

from __future__ import annotations

import json
from collections.abc import Callable
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
from come.method import Method
from come.registry import summary


class Listing(NamedTuple):
    """One of the lists."""

    about: str
    """What it lists, in a line."""
    rows: Callable[[], list[tuple[str, ...]]]
    """The heads of its columns, and what stands below them."""
    note: str = ""
    """Said below the table."""


LISTS = {
    "methods": Listing(
        "how a model adapts, for --methods",
        lambda: [
            ("method", "what it does", "COME", "needs", "cost"),
            *((n, summary(m), "yes" if m.minimizes else "-", m.needs, m.cost) for n, m in _methods()),
        ],
        "COME: takes an objective; cost: forwards (f) and backwards (b) of each batch",
    ),
    "objectives": Listing(
        "what methods minimize, for --objectives",
        lambda: [
            ("objective", "what it is"),
            *((n, summary(objectives.get(n))) for n in objectives.names()),
        ],
    ),
    "corruptions": Listing(
        "corruptions of images, for --corruptions",
        lambda: [("corruption", "group"), *((n, g) for g, ns in corruptions.GROUPS.items() for n in ns)],
    ),
    "settings": Listing(
        "how streams are made, for --setting",
        lambda: [("setting", "what it is"), *((n, settings.get(n).summary) for n in settings.names())],
    ),
    "protocols": Listing(
        "fixed benchmarks, for --protocol",
        lambda: [
            ("protocol", "what it is", "No Adapt"),
            *((n, p.summary, p.expected) for n in protocols.names() for p in (protocols.get(n),)),
        ],
    ),
    "models": Listing("kinds of models, for --model", lambda: [("model", "what it is"), *models.DESCRIPTIONS.items()]),
    "data": Listing(
        "kinds of data, for --data and --outliers",
        lambda: [("data", "what it is"), *((k.usage, k.about) for n in opening.names() for k in (opening.get(n),))],
    ),
}


def _methods() -> list[tuple[str, type[Method]]]:
    return [(name, methods.get(name)) for name in methods.names()]


OVERVIEW = Listing(
    "the lists",
    lambda: [("list", "what it lists", "example"), *((n, one.about, f"come list {n}") for n, one in LISTS.items())],
)


def list_(
    kind: Annotated[
        str | None,
        typer.Argument(
            help=f"{', '.join(LISTS)}; without one, what these are.",
            metavar="KIND",
            show_default=False,
            autocompletion=lambda: list(LISTS),
        ),
    ] = None,
    json_: Json = False,
    debug: Debug = False,
) -> None:
    """List methods, objectives, corruptions, settings, protocols, models or data."""
    if kind is not None and kind not in LISTS:
        raise unknown("list", kind, LISTS)
    listing = OVERVIEW if kind is None else LISTS[kind]
    heads, *rows = listing.rows()
    if json_:
        keys = [head.lower().replace(" ", "_") for head in heads]
        typer.echo(json.dumps([dict(zip(keys, row, strict=True)) for row in rows], indent=1))
        return
    table = RichTable(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for i, head in enumerate(heads):
        table.add_column(head, no_wrap=i == 0, style="bold" if i == 0 else "")
    for row in rows:
        table.add_row(*(escape(text) for text in row))
    console = Console(highlight=False)
    console.print(table)
    if listing.note:
        console.print(f"[dim]{listing.note}[/]")


def add(app: typer.Typer) -> None:
    """Add the command."""
    app.command(name="list")(list_)
