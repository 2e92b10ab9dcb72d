"""`come report` and `come compare`: what finished runs say."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable
from rich.text import Text

from come.bench import RunFolder
from come.bench.compare import LEVEL, compare_runs
from come.bench.report import (
    results_table,
    to_csv,
    to_json,
    to_latex,
    to_markdown,
    to_rich,
    write_figures,
    write_html,
)
from come.errors import InputError, unknown
from come.metrics import SCORES

FIGURE_FORMATS = ("pdf", "png", "svg")
FORMATS = {"md": to_markdown, "latex": to_latex, "csv": to_csv, "json": to_json}
STYLES = {"better": "bold blue", "worse": "bold yellow", "same": "dim"}


def report(
    run: Annotated[Path, typer.Argument(help="A run folder of [bold]come bench[/].", show_default=False)],
    out: Annotated[Path | None, typer.Option(help="The HTML file. \\[RUN/report.html]")] = None,
    format_: Annotated[
        str | None, typer.Option("--format", help="Print the table instead: " + ", ".join(FORMATS) + ".")
    ] = None,
    figures: Annotated[
        str | None, typer.Option(help="Also write the figures, as " + ", ".join(FIGURE_FORMATS) + ", to RUN/figures.")
    ] = None,
    metric: Annotated[str, typer.Option(help="What the table shows for each domain: accuracy, fpr, ...")] = "accuracy",
    score: Annotated[str, typer.Option(help="What FPR ranks samples by: " + ", ".join(SCORES) + ".")] = "confidence",
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
) -> None:
    """Make the report of a run: one HTML file, or its table in another format. Nothing is run again."""
    for name, value, known in (("format", format_, FORMATS), ("figure format", figures, FIGURE_FORMATS)):
        if value is not None and value not in known:
            raise unknown(name, value, known)
    if score not in SCORES:
        raise unknown("score", score, SCORES)
    folder = RunFolder.existing(run)
    records = folder.records()
    if not records:
        raise InputError(f"{run} holds no finished cell yet; run the same 'come bench' command again to go on")
    if score != "confidence":
        records = folder.rescored(records, score)
    if format_ is not None:
        typer.echo(FORMATS[format_](results_table(records, metric=metric)).rstrip())
        return
    console = Console(highlight=False)
    for part in to_rich(results_table(records, metric=metric), console.width):
        console.print(part)
    page = out or folder.path / "report.html"
    write_html(folder, records, page, ["come", *sys.argv[1:]])
    console.print(f"[dim]report[/] {escape(str(page))}", soft_wrap=True)
    if figures is not None:
        for path in write_figures(folder, records, folder.path / "figures", figures):
            console.print(f"[dim]figure[/] {escape(str(path))}", soft_wrap=True)


def compare(
    first: Annotated[Path, typer.Argument(help="The run folder to compare with.", show_default=False)],
    second: Annotated[Path, typer.Argument(help="The run folder that may be better or worse.", show_default=False)],
    all_: Annotated[bool, typer.Option("--all", help="Also show what did not change.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
) -> None:
    """Show what changed between two runs beyond chance and seeds, by a paired test over their samples."""
    changes = compare_runs(RunFolder.existing(first), RunFolder.existing(second))
    shown = [change for change in changes if all_ or change.verdict != "same"]
    console = Console(highlight=False)
    if shown:
        table = RichTable(box=None, padding=(0, 1, 0, 0), header_style="dim")
        for head in ("method", "domain", "before", "after", "change", "seeds", "p", "FPR", ""):
            table.add_column(head, justify="left" if head in ("method", "domain", "") else "right", no_wrap=True)
        for c in shown:
            table.add_row(
                escape(f"{c.method} + {c.objective}"),
                escape(c.domain),
                f"{c.before:.1f}",
                f"{c.after:.1f}",
                f"{c.after - c.before:+.1f}",
                "" if c.spread is None else f"±{c.spread:.1f}",
                f"{c.p:.3f}" if c.p >= 0.001 else f"{c.p:.0e}",
                f"{c.fpr:+.1f}",
                Text(c.verdict, STYLES[c.verdict]),
            )
        console.print(table)
    count = {verdict: sum(c.verdict == verdict for c in changes) for verdict in STYLES}
    console.print(
        f"{count['better']} better, {count['worse']} worse, {count['same']} the same, of {len(changes)} rows over "
        f"{sum(c.samples for c in changes)} pairs of samples"
    )
    console.print(
        f"[dim]p: McNemar's exact test on accuracy, corrected for {len(changes)} rows; a change needs p < {LEVEL}[/]"
    )


def add(app: typer.Typer) -> None:
    """Add the commands."""
    app.command(name="report")(report)
    app.command(name="compare")(compare)
