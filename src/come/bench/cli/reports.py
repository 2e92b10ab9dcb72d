"""`come report` and `come compare`: what finished runs say."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from come.bench import report as reporting
from come.bench.board.page import shown, write_board
from come.bench.board.ranking import json_files, read_board
from come.bench.cli.options import Debug, Json, Score, check_score, option
from come.bench.cli.watch import say_file, say_unfinished, show_tables
from come.bench.compare import changes_as_json, compare_runs, shown_changes
from come.bench.folder import RunFolder
from come.bench.record import Record
from come.bench.report.configurations import configurations, several_plans
from come.bench.report.findings import failed, helped, missing
from come.bench.statistics import verdicts
from come.errors import ConfigError, InputError, printable, unknown

FIGURE_FORMATS = ("pdf", "png", "svg")
FORMATS = {"md": reporting.to_markdown, "latex": reporting.to_latex, "csv": reporting.to_csv, "json": reporting.to_json}


def report(
    run: Annotated[
        Path,
        typer.Argument(
            help="A run folder of [bold]come bench[/], or a folder of files of [bold]come protocol submit[/]: a leaderboard."
        ),
    ],
    out: Annotated[Path | None, option("The HTML file. \\[RUN/report.html]")] = None,
    format_: Annotated[str | None, option(f"Print the table instead: {', '.join(FORMATS)}.", "--format")] = None,
    figures: Annotated[
        str | None, option(f"Also write the figures, as {', '.join(FIGURE_FORMATS)}, to RUN/figures.")
    ] = None,
    metric: Annotated[
        str | None, option("What the table shows for each domain: accuracy, fpr, ... \\[accuracy, or miou]")
    ] = None,
    score: Score = "confidence",
    plan: Annotated[int | None, option("Which plan, where the folder holds several.")] = None,
    debug: Debug = False,
) -> None:
    """Make the report of a run, or a leaderboard: one HTML file, or a run's table in another format. Nothing is run again."""
    for name, value, known in (("format", format_, FORMATS), ("figure format", figures, FIGURE_FORMATS)):
        if value not in (None, *known):
            raise unknown(name, value, known)
    check_score(score)
    page = out or run / "report.html"
    if not (run / "run.json").exists() and json_files(run):
        given = {"format": format_, "figures": figures, "plan": plan, "metric": metric, "score": score}
        for name, chosen in given.items():
            if chosen not in (None, "confidence"):
                raise ConfigError(f"{name} has no effect on a leaderboard; leave it out, or give a run folder")
        leaderboard(run, page)
        return
    folder = RunFolder.existing(run)
    records = folder.rescored(_chosen(folder, plan), score)
    judged = verdicts(folder, records)
    if format_ is not None:
        typer.echo(FORMATS[format_](reporting.results_table(records, metric=metric, verdicts=judged)).rstrip())
        return
    console = Console(highlight=False)
    if said := helped(records, judged):
        console.print(f"[bold]{escape(said)}[/]\n")
    main = reporting.results_table(reporting.without_sweeps(records), metric=metric, verdicts=judged)
    show_tables(console, records, main, reporting.rates_table(records, judged))
    say_unfinished(console, list(missing(records)), failed(folder.failures(), records))
    reporting.write_html(folder, records, page, ["come", *sys.argv[1:]], judged)
    say_file(console, "report", page)
    if figures is not None:
        for path in reporting.write_figures(folder, records, folder.path / "figures", figures):
            say_file(console, "figure", path)


def leaderboard(folder: Path, page: Path) -> None:
    """Rank the submissions in a folder: in the terminal, and as a page."""
    found = read_board(folder)
    console = Console(highlight=False)
    for part in shown(found):
        console.print(part)
    for problem in found.wrong:
        console.print(f"[bold]left out:[/] {escape(printable(problem))}", soft_wrap=True)
    if found.others:
        console.print(f"[dim]{found.others} JSON files here are no submissions[/]")
    write_board(found, page)
    say_file(console, "report", page)


def _chosen(folder: RunFolder, plan: int | None) -> list[Record]:
    """The records of the only plan, or of that number."""
    groups = configurations(folder.records())
    if not groups:
        raise InputError(f"{folder.path} holds no finished cell yet; run the same 'come bench' command again to go on")
    if plan is None and len(groups) == 1:
        return groups[0]
    if plan is None or not 1 <= plan <= len(groups):
        raise several_plans(str(folder.path), groups)
    return groups[plan - 1]


def compare(
    first: Annotated[Path, typer.Argument(help="The run folder to compare with.", show_default=False)],
    second: Annotated[Path, typer.Argument(help="The run folder that may be better or worse.", show_default=False)],
    all_: Annotated[bool, option("Also show where no difference was found.", "--all")] = False,
    score: Score = "confidence",
    json_: Json = False,
    debug: Debug = False,
) -> None:
    """Show what differs between two runs beyond chance, by intervals from their samples."""
    check_score(score)
    found = compare_runs(RunFolder.existing(first), RunFolder.existing(second), score)
    if json_:
        typer.echo(changes_as_json(found))
        return
    console = Console(highlight=False)
    for part in shown_changes(found, everything=all_):
        console.print(part)
