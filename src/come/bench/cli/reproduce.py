"""`come reproduce`: the paper's tables and figures, next to what is measured here."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable

from come.bench import Bench, Plan, RunFolder, paper
from come.bench.cli.bench import show_grid
from come.bench.cli.options import Debug, Device, DryRun, Jobs, OnBadImage, Out, Workers, with_plan
from come.bench.cli.watch import run_watched, say_unfinished, show_results
from come.bench.paper.agreement import Comparison, compare
from come.bench.paper.experiments import EXPERIMENTS, Experiment, comparable, get
from come.bench.plan import typed
from come.bench.report import write_figures, write_text


@with_plan
def reproduce(
    given: dict[str, Any],
    name: Annotated[str | None, typer.Argument(help="A table or figure; --list shows all.", show_default=False)] = None,
    list_: Annotated[bool, typer.Option("--list", help="List the tables and figures.")] = False,
    full: Annotated[
        bool, typer.Option("--full", help="On the embedded data: all 15 corruptions and all images.")
    ] = False,
    on_bad_image: OnBadImage = "raise",
    device: Device = "cpu",
    workers: Workers = None,
    jobs: Jobs = None,
    out: Out = None,
    dry_run: DryRun = False,
    debug: Debug = False,
) -> None:
    """Regenerate a table or figure of the paper and lay it beside the printed one; resumable like [bold]come bench[/].

    By default methods, objectives and setting are the table's, on the embedded data. On ImageNet-C with the paper's model
    numbers are compared one by one; on other data only the direction of changes and the order of methods can be.
    """
    console = Console(highlight=False)
    if list_ or name is None:
        console.print(_listing())
        return
    experiment = get(name)
    plan = experiment.plan(full=full, **typed(given))
    bench = Bench(plan, device=device, workers=workers, jobs=jobs, on_bad_image=on_bad_image)  # type: ignore[arg-type]
    path = out or Path("runs") / f"reproduce-{name}-{plan.slug}"
    if dry_run:
        show_grid(console, bench, path)
        return
    folder = RunFolder(path)
    records = run_watched(console, bench, folder)
    say_unfinished(console, [], [str(failure) for failure in bench.failed])
    if not records:
        raise typer.Exit(1)
    title = f"{experiment.title}: {plan.model} on {plan.data}"
    found = show_results(console, folder, records, title, ["come", *sys.argv[1:]])
    comparisons = [c for table in experiment.tables for c in compare(paper.get(table), records, found)]
    _show(console, comparisons, plan, experiment)
    if comparisons:
        write_text(folder.path / "paper.md", _markdown(comparisons, plan, experiment))
        console.print(f"[dim]paper and measured[/] {escape(str(folder.path / 'paper.md'))}", soft_wrap=True)
    if not experiment.tables:
        for figure in write_figures(folder, records, folder.path / "figures", "pdf"):
            console.print(f"[dim]figure[/] {escape(str(figure))}", soft_wrap=True)
    if bench.failed:
        raise typer.Exit(1)


def _listing() -> RichTable:
    table = RichTable(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for head in ("name", "what it shows", "model"):
        table.add_column(head, no_wrap=head == "name", style="bold" if head == "name" else "")
    for experiment in EXPERIMENTS.values():
        table.add_row(experiment.name, experiment.title, experiment.model)
    return table


UNITS = {"accuracy": "accuracy, %", "fpr": "FPR, %", "memory_mb": "memory, of No Adapt", "seconds": "time, of No Adapt"}


def _show(console: Console, comparisons: list[Comparison], plan: Plan, experiment: Experiment) -> None:
    """On the terminal: the averages, or all columns where there is no average."""
    exact = comparable(plan, experiment)
    for comparison in [c for c in comparisons if c.domain in ("average", "worst")] or comparisons:
        table = RichTable(
            title=f"{comparison.table}: {comparison.domain} {UNITS[comparison.metric]}",
            title_justify="left",
            box=None,
            padding=(0, 2, 0, 0),
            header_style="dim",
        )
        for head in ("method", "paper", "measured", *(["difference"] if exact else [])):
            table.add_column(head, justify="left" if head == "method" else "right")
        for line in comparison.lines:
            if line.measured is not None:
                cells = [f"{line.method} + {line.objective}", _number(line.paper), _number(line.measured)]
                if exact:
                    cells.append("" if line.paper is None else f"{line.measured - line.paper:+.1f}")
                table.add_row(*(escape(cell) for cell in cells))
        console.print(table)
        for sentence in comparison.agreement():
            console.print(f"[dim]{escape(sentence)}[/]")
        console.print()
    if comparisons and not exact:
        console.print(f"[dim]{escape(_caution(plan))}[/]")


def _caution(plan: Plan) -> str:
    return (
        f"{plan.model} on {plan.data} is not the paper's model and data: compare the direction of changes and the order of "
        "methods, not the numbers."
    )


def _markdown(comparisons: list[Comparison], plan: Plan, experiment: Experiment) -> str:
    lines = [
        f"# {experiment.title}",
        "",
        f"{plan.model} on {plan.data}, next to the paper's {experiment.model} on ImageNet.",
        "",
    ]
    if not comparable(plan, experiment):
        lines += [_caution(plan), ""]
    for comparison in comparisons:
        lines += [f"## {comparison.table}: {comparison.domain}, {UNITS[comparison.metric]}", ""]
        lines += ["| |paper|measured|", "|---|---:|---:|"]
        lines += [
            f"|{line.method} + {line.objective}|{_number(line.paper)}|{_number(line.measured)}|"
            for line in comparison.lines
        ]
        lines += ["", *(f"- {sentence}" for sentence in comparison.agreement()), ""]
    for table in dict.fromkeys(comparison.table for comparison in comparisons):
        if found := paper.inconsistencies(paper.get(table)):
            lines += [
                f"The paper's own numbers do not agree everywhere ({table}):",
                "",
                *(f"- {text}" for text in found),
                "",
            ]
    return "\n".join(lines) + "\n"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def add(app: typer.Typer) -> None:
    """Add the command."""
    app.command(name="reproduce")(reproduce)
