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
from come.bench.cli.lists import listed
from come.bench.cli.options import Debug, Device, DryRun, Jobs, OnBadImage, Out, Workers, option, with_plan
from come.bench.cli.watch import run_watched, say_file, say_unfinished, show_results
from come.bench.paper.agreement import Comparison, compare
from come.bench.paper.experiments import EXPERIMENTS, Experiment, comparable, get
from come.bench.plan import typed
from come.bench.report import write_figures, write_text


@with_plan
def reproduce(
    given: dict[str, Any],
    name: Annotated[str | None, typer.Argument(help="A table or figure; --list shows all.")] = None,
    list_: Annotated[bool, option("List the tables and figures.", "--list")] = False,
    full: Annotated[bool, option("All 15 corruptions and all images of the embedded data.", "--full")] = False,
    on_bad_image: OnBadImage = "raise",
    device: Device = "cpu",
    workers: Workers = None,
    jobs: Jobs = None,
    out: Out = None,
    dry_run: DryRun = False,
    debug: Debug = False,
) -> None:
    """Reproduce a table or figure of the paper and compare it with the printed one; resumable like [bold]come bench[/].

    By default methods, objectives and setting are the table's, on the embedded data. On ImageNet-C with the paper's model
    numbers are compared one by one; on other data only the direction of changes and the order of methods can be.
    """
    console = Console(highlight=False)
    if list_ or name is None:
        rows = ((one.name, one.title, one.model) for one in EXPERIMENTS.values())
        console.print(listed([("name", "what it shows", "model"), *rows]))
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
        say_file(console, "paper and measured", folder.path / "paper.md")
    if not experiment.tables:
        for figure in write_figures(folder, records, folder.path / "figures", "pdf"):
            say_file(console, "figure", figure)
    if bench.failed:
        raise typer.Exit(1)


UNITS = {"accuracy": "accuracy, %", "fpr": "FPR, %", "memory_mb": "memory, of No Adapt", "seconds": "time, of No Adapt"}


def _show(console: Console, comparisons: list[Comparison], plan: Plan, experiment: Experiment) -> None:
    """On the terminal: the averages, or all columns where there is no average."""
    exact = comparable(plan, experiment)
    for comparison in [c for c in comparisons if c.domain in ("average", "worst")] or comparisons:
        title = f"{comparison.table}: {comparison.domain} {UNITS[comparison.metric]}"
        table = RichTable(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0), header_style="dim")
        for head in ("method", "paper", "measured", "difference")[: 4 if exact else 3]:
            table.add_column(head, justify="left" if head == "method" else "right")
        for line in comparison.lines:
            if line.measured is not None:
                off = "" if line.paper is None else f"{line.measured - line.paper:+.1f}"
                cells = (escape(f"{line.method} + {line.objective}"), _number(line.paper), _number(line.measured), off)
                table.add_row(*cells[: 4 if exact else 3])
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
    beside = f"{plan.model} on {plan.data}, next to the paper's {experiment.model} on ImageNet."
    lines = [f"# {experiment.title}", "", beside, ""]
    if not comparable(plan, experiment):
        lines += [_caution(plan), ""]
    for comparison in comparisons:
        lines += [f"## {comparison.table}: {comparison.domain}, {UNITS[comparison.metric]}", ""]
        lines += ["| |paper|measured|", "|---|---:|---:|"]
        for line in comparison.lines:
            lines.append(f"|{line.method} + {line.objective}|{_number(line.paper)}|{_number(line.measured)}|")
        lines += ["", *(f"- {sentence}" for sentence in comparison.agreement()), ""]
    for table in dict.fromkeys(comparison.table for comparison in comparisons):
        if found := paper.inconsistencies(paper.get(table)):
            said = f"The paper's own numbers do not agree everywhere ({table}):"
            lines += [said, "", *(f"- {text}" for text in found), ""]
    return "\n".join(lines) + "\n"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"
