"""`come reproduce`: the paper's tables and figures, next to what is measured here."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable

from come.bench import Bench, RunFolder, paper
from come.bench.cli.watch import run_watched
from come.bench.paper.experiments import EXPERIMENTS, Comparison, Experiment, comparable, get
from come.bench.paper.experiments import compare as lay_beside
from come.bench.plan import Plan
from come.bench.report import results_table, to_rich, write_figures, write_html, write_report
from come.errors import ConfigError, StateError
from come.files import replacing


def reproduce(
    name: Annotated[str | None, typer.Argument(help="A table or figure; --list shows all.", show_default=False)] = None,
    list_: Annotated[bool, typer.Option("--list", help="List the tables and figures.")] = False,
    model: Annotated[str | None, typer.Option(help="\\[the paper's; the embedded one on glyphs]")] = None,
    data: Annotated[str, typer.Option(help="E.g. imagenet-c:PATH; see [bold]come list data[/].")] = "glyphs",
    outliers: Annotated[str | None, typer.Option(help="Sources of outliers, comma-separated.")] = None,
    source_data: Annotated[str | None, typer.Option(help="Clean images for methods that need some.")] = None,
    methods: Annotated[str | None, typer.Option(help="Only these, comma-separated. \\[the table's]")] = None,
    limit: Annotated[
        int | None, typer.Option(help="Use the first N samples. \\[1000 on glyphs with MEMO or TEA]")
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="On glyphs: all 15 corruptions and all images.")] = False,
    seeds: Annotated[str, typer.Option(help="Comma-separated.")] = "0",
    device: Annotated[str, typer.Option(help="cpu, cuda, ...")] = "cpu",
    workers: Annotated[int, typer.Option(help="Processes that decode images.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Run folder. \\[runs/reproduce-NAME-...]")] = None,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
) -> None:
    """Regenerate a table or figure of the paper and lay it beside the printed one; resumable like [bold]come bench[/].

    On ImageNet-C with the paper's model numbers are compared one by one; on other data only signs and ranks can be.
    """
    console = Console(highlight=False)
    if list_ or name is None:
        console.print(_listing())
        return
    experiment = get(name)
    if not all(seed.strip().isdigit() for seed in seeds.split(",")):
        raise ConfigError(f"seeds must be integers with commas between, e.g. 0,1,2, got {seeds!r}")
    plan = experiment.plan(
        model=model,
        data=data,
        full=full,
        outliers=None if outliers is None else tuple(part.strip() for part in outliers.split(",")),
        source_data=source_data,
        methods=None if methods is None else tuple(part.strip() for part in methods.split(",")),
        limit=limit,
        seeds=tuple(int(seed) for seed in seeds.split(",")),
    )
    folder = RunFolder(out or Path("runs") / f"reproduce-{name}-{plan.slug}")
    bench = Bench(plan, device=device, workers=workers)
    records = run_watched(console, bench, folder)
    for part in to_rich(results_table(records, f"{experiment.title}: {plan.model} on {plan.data}"), console.width):
        console.print(part)
    comparisons = [c for table in experiment.tables for c in lay_beside(paper.get(table), records)]
    _show(console, comparisons, plan, experiment)
    command = ["come", *sys.argv[1:]]
    write_report(records, folder.path / "report.md", command)
    write_html(folder, records, folder.path / "report.html", command)
    if comparisons:
        _write(folder.path / "paper.md", _markdown(comparisons, plan, experiment))
        console.print(f"[dim]paper and measured[/] {escape(str(folder.path / 'paper.md'))}", soft_wrap=True)
    if not experiment.tables:
        for path in write_figures(folder, records, folder.path / "figures", "pdf"):
            console.print(f"[dim]figure[/] {escape(str(path))}", soft_wrap=True)
    console.print(f"[dim]report[/] {escape(str(folder.path / 'report.html'))}", soft_wrap=True)


def _write(path: Path, text: str) -> None:
    try:
        with replacing(path) as beside:
            beside.write_text(text, encoding="utf-8")
    except OSError as error:
        raise StateError(
            f"cannot write {path}: {error.strerror}; make room, or choose another folder with --out"
        ) from error


def _listing() -> RichTable:
    table = RichTable(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for head in ("name", "what it shows", "model"):
        table.add_column(head, no_wrap=head == "name", style="bold" if head == "name" else "")
    for experiment in EXPERIMENTS.values():
        table.add_row(experiment.name, experiment.title, experiment.model)
    return table


UNITS = {"accuracy": "accuracy, %", "fpr": "FPR, %", "memory_mb": "memory, of No Adapt", "seconds": "time, of No Adapt"}


def _shown(comparisons: list[Comparison]) -> list[Comparison]:
    """On the terminal: the averages, or all columns where there is no average."""
    averages = [c for c in comparisons if c.domain in ("average", "worst")]
    return averages or comparisons


def _show(console: Console, comparisons: list[Comparison], plan: Plan, experiment: Experiment) -> None:
    exact = comparable(plan, experiment)
    for comparison in _shown(comparisons):
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
            if line.measured is None:
                continue
            cells = [f"{line.method} + {line.objective}", _number(line.paper), _number(line.measured)]
            if exact:
                both = line.paper is not None
                cells.append(f"{line.measured - line.paper:+.1f}" if both and line.paper is not None else "")
            table.add_row(*(escape(cell) for cell in cells))
        console.print(table)
        if words := comparison.agreement():
            console.print(f"[dim]{words}[/]\n")
    if comparisons and not exact:
        console.print(
            f"[dim]{plan.model} on {plan.data} is not the paper's model and data: signs and ranks compare, numbers do not[/]"
        )


def _markdown(comparisons: list[Comparison], plan: Plan, experiment: Experiment) -> str:
    lines = [
        f"# {experiment.title}",
        "",
        f"{plan.model} on {plan.data}, next to the paper's {experiment.model} on ImageNet.",
        "",
    ]
    if not comparable(plan, experiment):
        lines += ["Not the paper's model and data: signs and ranks compare, numbers do not.", ""]
    for comparison in comparisons:
        lines += [f"## {comparison.table}: {comparison.domain}, {UNITS[comparison.metric]}", ""]
        lines += ["| |paper|measured|", "|---|---:|---:|"]
        lines += [
            f"|{line.method} + {line.objective}|{_number(line.paper)}|{_number(line.measured)}|"
            for line in comparison.lines
        ]
        lines += ["", comparison.agreement(), ""]
    for table in dict.fromkeys(comparison.table for comparison in comparisons):
        if found := paper.inconsistencies(paper.get(table)):
            lines += [
                f"The paper's own numbers do not agree everywhere ({table}):",
                "",
                *(f"- {text}" for text in found),
                "",
            ]
    return "\n".join(lines)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def add(app: typer.Typer) -> None:
    """Add the command."""
    app.command(name="reproduce")(reproduce)
