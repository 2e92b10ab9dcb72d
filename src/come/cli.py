"""The command line: `come bench`, `come list`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar
from rich.table import Table as RichTable

import come
from come import corruptions, methods, models, objectives, settings
from come.bench import Bench, Cell, Plan, Record, RunFolder
from come.bench.plan import PRESETS, parse_hyper, preset
from come.bench.runner import Progress
from come.data.sources import DESCRIPTIONS as DATA
from come.data.sources import OPENERS
from come.data.streams import Stream
from come.errors import ComeError, ConfigError, InputError, unknown
from come.method import Method
from come.report import results_table, to_rich, write_report

app = typer.Typer(
    name="come",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="""Test-time adaptation that knows what it does not know.

Start with [bold]come bench[/]: in about two minutes, on two cores and without a network, it shows how Tent, EATA and SAR fare
under corruption with entropy minimisation (em) and with COME.""",
)


def _version(show: bool) -> None:
    if show:
        typer.echo(f"come {come.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


WHAT, HOW, WHERE = "What to run", "How to run it", "Where to run it"


@app.command(no_args_is_help=False)
def bench(
    preset_name: Annotated[
        str,
        typer.Option(
            "--preset", rich_help_panel=WHAT, help="; ".join(f"[bold]{k}[/]: {v[0]}" for k, v in PRESETS.items()) + "."
        ),
    ] = "quick",
    model: Annotated[
        str | None, typer.Option(rich_help_panel=WHAT, help="See [bold]come list models[/]. \\[glyphs-vit]")
    ] = None,
    data: Annotated[
        str | None, typer.Option(rich_help_panel=WHAT, help="See [bold]come list data[/]. \\[glyphs]")
    ] = None,
    setting: Annotated[str | None, typer.Option(rich_help_panel=WHAT, help="See [bold]come list settings[/].")] = None,
    methods_: Annotated[
        str | None,
        typer.Option(
            "--methods", rich_help_panel=WHAT, help="Comma-separated, or [bold]all[/]. See [bold]come list methods[/]."
        ),
    ] = None,
    objectives_: Annotated[
        str | None, typer.Option("--objectives", rich_help_panel=WHAT, help="Comma-separated. \\[em,come]")
    ] = None,
    corruptions_: Annotated[
        str | None,
        typer.Option(
            "--corruptions",
            rich_help_panel=WHAT,
            help="Comma-separated names or groups (noise, blur, weather, digital, extra).",
        ),
    ] = None,
    severity: Annotated[int | None, typer.Option(rich_help_panel=WHAT, help="1 to 5. \\[5]")] = None,
    seeds: Annotated[
        str | None, typer.Option(rich_help_panel=WHAT, help="Comma-separated; several give mean and deviation. \\[0]")
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set", rich_help_panel=HOW, metavar="METHOD.NAME=VALUE", help="A hyper-parameter, e.g. tent.lr=5e-4."
        ),
    ] = None,
    batch_size: Annotated[int | None, typer.Option(rich_help_panel=HOW, help="\\[64]")] = None,
    limit: Annotated[int | None, typer.Option(rich_help_panel=HOW, help="Use the first N samples only.")] = None,
    checkpoint: Annotated[
        str | None, typer.Option(rich_help_panel=HOW, help="Weights to use in place of the pretrained ones.")
    ] = None,
    normalisation: Annotated[
        str | None, typer.Option(rich_help_panel=HOW, help=f"{', '.join(models.NORMALISATIONS)}. \\[model]")
    ] = None,
    source_data: Annotated[
        str | None,
        typer.Option(rich_help_panel=HOW, help="Clean images for EATA's Fisher matrix, if the data has none."),
    ] = None,
    source_size: Annotated[int | None, typer.Option(rich_help_panel=HOW, help="How many of them. \\[2000]")] = None,
    config: Annotated[
        Path | None,
        typer.Option(rich_help_panel=HOW, help="A TOML file with any of these options; the command line wins."),
    ] = None,
    stream: Annotated[
        list[Path] | None, typer.Option(rich_help_panel=HOW, help="Replay a manifest of an earlier run. Repeatable.")
    ] = None,
    on_bad_image: Annotated[
        str, typer.Option(rich_help_panel=HOW, help="[bold]raise[/] names the file; [bold]skip[/] counts it.")
    ] = "raise",
    device: Annotated[str, typer.Option(rich_help_panel=WHERE, help="cpu, cuda, cuda:1, ...")] = "cpu",
    workers: Annotated[
        int | None, typer.Option(rich_help_panel=WHERE, help="Processes that decode images. \\[0 for glyphs, else 4]")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(rich_help_panel=WHERE, help="Run folder. \\[runs/<name of the plan>]")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume/--fresh", rich_help_panel=WHERE, help="Keep finished cells, or run all again.")
    ] = True,
    dry_run: Annotated[bool, typer.Option("--dry-run", rich_help_panel=WHERE, help="Show the grid and stop.")] = False,
    debug: Annotated[bool, typer.Option("--debug", rich_help_panel=WHERE, help="Show tracebacks.")] = False,
) -> None:
    """Measure methods and objectives under corruption; resumable, with a table and a report.

    Run the same command again to go on where it stopped: finished cells are kept.
    """
    given = {
        "model": model,
        "data": data,
        "setting": setting,
        "methods": _names(methods_, methods.names()),
        "objectives": _names(objectives_, objectives.names()),
        "corruptions": _corruptions(corruptions_),
        "severity": severity,
        "seeds": None if seeds is None else tuple(_whole("seeds", s) for s in seeds.split(",")),
        "batch_size": batch_size,
        "limit": limit,
        "checkpoint": checkpoint,
        "normalisation": normalisation,
        "source_data": source_data,
        "source_size": source_size,
    }
    options = preset(preset_name) | (_toml(config) if config else {})
    options |= {key: value for key, value in given.items() if value is not None}
    hyper = {method: dict(values) for method, values in options.pop("hyper", {}).items()}
    for text in set_ or []:
        method, key, value = parse_hyper(text)
        hyper.setdefault(method, {})[key] = value
    plan = Plan(**options, hyper=hyper)
    if on_bad_image not in ("raise", "skip"):
        raise unknown("value of --on-bad-image", on_bad_image, ("raise", "skip"))
    if workers is None:
        workers = 0 if plan.data.startswith("glyphs") else 4

    console = Console(highlight=False)
    watched = Bench(
        plan,
        device=device,
        workers=workers,
        on_bad_image=on_bad_image,  # type: ignore[arg-type]
        streams=[Stream.load(path) for path in stream] if stream else None,
    )
    folder_path = out or Path("runs") / plan.slug
    if dry_run:
        _show_grid(console, plan, watched.cells, folder_path)
        return
    folder = RunFolder(folder_path)
    with Watch(console, watched.cells) as watch:
        records = watched.run(folder, watch, fresh=not resume)
    for part in to_rich(results_table(records, _title(plan)), console.width):
        console.print(part)
    write_report(records, folder.path / "report.md", ["come", *sys.argv[1:]])
    console.print(f"[dim]report[/] {escape(str(folder.path / 'report.md'))}", soft_wrap=True)


def _title(plan: Plan) -> str:
    return f"{plan.model} on {plan.data}, severity {plan.severity}, accuracy (%)"


class Watch(Progress):
    """Shows the table as it fills and a bar; where the output is no terminal, a line per finished cell."""

    def __init__(self, console: Console, cells: list[Cell]) -> None:
        self.console, self.cells = console, cells
        self.records: list[Record] = []
        self.bar = Bar(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console
        )
        self.all = self.bar.add_task("cells", total=len(cells))
        self.one = self.bar.add_task("", total=None, visible=False)
        self.live = Live(console=console, refresh_per_second=4, transient=True, get_renderable=self._view)

    def __enter__(self) -> Watch:
        if self.console.is_terminal:
            self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.console.is_terminal:
            self.live.stop()

    def _view(self) -> Group:
        pieces = to_rich(results_table(self.records), self.console.width) if self.records else []
        return Group(*pieces[-1:], self.bar)  # the averages, with as many corruptions as fit beside them

    def start(self, cell: Cell, samples: int) -> None:
        """Show what runs now."""
        name = f"{cell.method} + {cell.objective}, {', '.join(cell.corruptions)}, seed {cell.seed}"
        self.bar.reset(self.one, description=name[:44], total=samples, visible=True)

    def advance(self, samples: int) -> None:
        """Move the bar."""
        self.bar.advance(self.one, samples)

    def finish(self, cell: Cell, record: Record, resumed: bool) -> None:
        """Add the result to the table."""
        self.records.append(record)
        self.bar.advance(self.all)
        if not self.console.is_terminal:
            found = ", ".join(f"{d} {100 * m['accuracy']:.1f}" for d, m in record.result["metrics"].items())
            note = " (done before)" if resumed else ""
            count = f"[{len(self.records)}/{len(self.cells)}]"
            self.console.print(
                f"{count} {cell.method} + {cell.objective}, seed {cell.seed}: {found}{note}", markup=False
            )


def _show_grid(console: Console, plan: Plan, cells: list[Cell], folder: Path) -> None:
    table = RichTable(box=None, padding=(0, 2, 0, 0))
    for name in ("cell", "method", "objective", "corruptions", "seed", "hyper-parameters"):
        table.add_column(name)
    for cell in cells:
        hyper = " ".join(f"{k}={v}" for k, v in cell.hyper.items())
        table.add_row(cell.key, cell.method, cell.objective, " ".join(cell.corruptions), str(cell.seed), hyper)
    console.print(table)
    console.print(
        f"{len(cells)} cells of {cells[0].size} images, {plan.model} on {plan.data}, severity {plan.severity}, batch "
        f"{plan.batch_size}; would be written to {folder}",
        markup=False,
    )


def _names(text: str | None, every: list[str]) -> tuple[str, ...] | None:
    if text is None:
        return None
    return tuple(every) if text == "all" else tuple(name.strip() for name in text.split(","))


def _corruptions(text: str | None) -> tuple[str, ...] | None:
    if text is None:
        return None
    found: list[str] = []
    for name in (part.strip() for part in text.split(",")):
        group = name in (*corruptions.GROUPS, "standard")
        found += corruptions.names(name) if group else corruptions.names() if name == "all" else (name,)
    return tuple(found)


def _whole(name: str, text: str) -> int:
    if not text.strip().lstrip("-").isdigit():
        raise ConfigError(f"{name} is {text!r}; it must be whole numbers with commas between, e.g. 0,1,2")
    return int(text)


def _toml(path: Path) -> dict[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        found = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InputError(f"cannot read the configuration {path}: {error}") from error
    if "set" in found:
        found["hyper"] = found.pop("set")
    known = {field.name for field in fields(Plan)}
    options: dict[str, Any] = {}
    for key, value in found.items():
        name = key.replace("-", "_")
        if name not in known:
            raise unknown(f"option in {path}", key, known - {"hyper"} | {"set"})
        options[name] = tuple(value) if isinstance(value, list) else value
    return options


LISTS: dict[str, Callable[[], list[tuple[str, ...]]]] = {
    "methods": lambda: [
        ("method", "what it does", "COME", "needs", "cost"),
        *((n, _summary(m), "yes" if m.minimises else "-", m.needs, m.cost) for n, m in _methods()),
    ],
    "objectives": lambda: [
        ("objective", "what it is"),
        *((n, _summary(objectives.get(n))) for n in objectives.names()),
    ],
    "corruptions": lambda: [("corruption", "group"), *((n, g) for g, ns in corruptions.GROUPS.items() for n in ns)],
    "settings": lambda: [("setting", "what it is"), *((n, settings.get(n).summary) for n in settings.names())],
    "models": lambda: [("model", "what it is"), *models.DESCRIPTIONS.items()],
    "data": lambda: [("data", "what it is"), *((usage, DATA[kind]) for kind, (usage, _) in OPENERS.items())],
}


NOTES = {"methods": "COME: takes an objective; cost: forwards (f) and backwards (b) of each batch"}


def _methods() -> list[tuple[str, type[Method]]]:
    return [(name, methods.get(name)) for name in methods.names()]


def _summary(thing: object) -> str:
    """The first line of the docstring; for a method, that of its file, which says what it does."""
    holder = sys.modules[thing.__module__] if isinstance(thing, type) else thing
    first = (holder.__doc__ or "").strip().splitlines()[0]
    return (first.partition(": ")[2] or first).rstrip(".")


@app.command(name="list")
def list_(
    kind: Annotated[str, typer.Argument(help=", ".join(LISTS), metavar="KIND")],
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
) -> None:
    """List methods, objectives, corruptions, settings, models or data."""
    if kind not in LISTS:
        raise unknown("list", kind, LISTS)
    heads, *rows = LISTS[kind]()
    table = RichTable(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for i, head in enumerate(heads):
        table.add_column(head, no_wrap=i == 0, style="bold" if i == 0 else "")
    for row in rows:
        table.add_row(*(escape(text) for text in row))
    console = Console(highlight=False)
    console.print(table)
    if kind in NOTES:
        console.print(f"[dim]{NOTES[kind]}[/]")


def main() -> None:
    """Run the command line: one line and exit code 2 for what a user can mend, 130 for Ctrl-C."""
    debug = "--debug" in sys.argv
    try:
        code = app(standalone_mode=False)
    except typer.Abort:
        code = 130
    except ComeError as error:
        if debug:
            raise
        _fail(str(error), 2)
    except Exception as error:
        if debug:
            raise
        say = getattr(error, "format_message", None)  # typer's word on wrong options
        if say is not None:
            _fail(say(), 2)
        _fail(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}; --debug shows more", 1)
    if code == 130:
        _fail("interrupted; finished cells are kept: run the same command to go on", 130)


def _fail(message: str, code: int) -> None:
    print(f"error: {message}", file=sys.stderr)
    sys.exit(code)
