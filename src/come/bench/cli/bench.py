"""`come bench`: measure methods and objectives under shift."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable

from come import corruptions, methods, objectives
from come.bench import Bench, Cell, Plan, RunFolder, models
from come.bench.cli.watch import run_watched
from come.bench.data.streams import SEEDS, Stream
from come.bench.plan import PRESETS, parse_hyper, preset
from come.bench.report import results_table, to_rich, write_html, write_report
from come.bench.store import method_rank
from come.errors import ConfigError, InputError, require, unknown
from come.metrics import SCORES

MAX_CONFIG = 2**20
"""Characters of a configuration file."""

WHAT, HOW, WHERE = "What to run", "How to run it", "Where to run it"


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
    severity: Annotated[
        int | None, typer.Option(rich_help_panel=WHAT, help="1 to 5. \\[5; 3 in an open world]")
    ] = None,
    outliers: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=WHAT, help="Open world: sources of outliers, comma-separated. \\[those of glyphs]"
        ),
    ] = None,
    outlier_ratio: Annotated[
        float | None, typer.Option(rich_help_panel=WHAT, help="Open world: share of outliers. \\[0.5]")
    ] = None,
    imbalance: Annotated[
        float | None,
        typer.Option(rich_help_panel=WHAT, help="Imbalanced: how much likelier a class is in its part. \\[infinite]"),
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(rich_help_panel=WHAT, help="Lifelong: how often through all corruptions. \\[1]")
    ] = None,
    seeds: Annotated[
        str | None, typer.Option(rich_help_panel=WHAT, help="Comma-separated; several give mean and deviation. \\[0]")
    ] = None,
    guard: Annotated[
        bool | None, typer.Option("--guard/--no-guard", rich_help_panel=HOW, help="Recover from collapse. \\[no]")
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set", rich_help_panel=HOW, metavar="METHOD.NAME=VALUE", help="A hyperparameter, e.g. tent.lr=5e-4."
        ),
    ] = None,
    batch_size: Annotated[int | None, typer.Option(rich_help_panel=HOW, help="\\[64]")] = None,
    limit: Annotated[int | None, typer.Option(rich_help_panel=HOW, help="Use the first N samples only.")] = None,
    checkpoint: Annotated[
        str | None, typer.Option(rich_help_panel=HOW, help="Weights to use in place of the pretrained ones.")
    ] = None,
    normalization: Annotated[
        str | None, typer.Option(rich_help_panel=HOW, help=f"{', '.join(models.NORMALIZATIONS)}. \\[model]")
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
    score: Annotated[
        str, typer.Option(rich_help_panel=HOW, help=f"What FPR ranks samples by: {', '.join(SCORES)}.")
    ] = "confidence",
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
        "methods": _names(methods_, sorted(methods.names(), key=method_rank)),
        "objectives": _names(objectives_, objectives.names()),
        "corruptions": _corruptions(corruptions_),
        "severity": severity,
        "outliers": None if outliers is None else tuple(part.strip() for part in outliers.split(",")),
        "outlier_ratio": outlier_ratio,
        "imbalance": imbalance,
        "rounds": rounds,
        "guard": guard,
        "seeds": None if seeds is None else tuple(_whole("seeds", s) for s in seeds.split(",")),
        "batch_size": batch_size,
        "limit": limit,
        "checkpoint": checkpoint,
        "normalization": normalization,
        "source_data": source_data,
        "source_size": source_size,
    }
    plan = read_plan(preset_name, config, given, set_ or ())
    if on_bad_image not in ("raise", "skip"):
        raise unknown("value of --on-bad-image", on_bad_image, ("raise", "skip"))
    if workers is None:
        workers = 0 if plan.data.startswith("glyphs") else 4

    if score not in SCORES:
        raise unknown("score", score, SCORES)
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
    records = run_watched(console, watched, folder, fresh=not resume)
    if score != "confidence":
        records = folder.rescored(records, score)
    for part in to_rich(results_table(records, _title(plan)), console.width):
        console.print(part)
    command = ["come", *sys.argv[1:]]
    write_report(records, folder.path / "report.md", command)
    write_html(folder, records, folder.path / "report.html", command)
    console.print(f"[dim]report[/] {escape(str(folder.path / 'report.html'))}", soft_wrap=True)


def read_plan(
    preset_name: str = "quick",
    config: Path | None = None,
    given: Mapping[str, Any] | None = None,
    set_: Iterable[str] = (),
) -> Plan:
    """The plan of a preset, over it the configuration file, over both the options that are given (None: is not)."""
    options = preset(preset_name) | (_toml(config) if config else {})
    options |= {key: value for key, value in (given or {}).items() if value is not None}
    for seed in options.get("seeds", ()):
        require(seed in SEEDS, "a seed", seed, "a 64-bit integer")
    hyper = {method: dict(values) for method, values in options.pop("hyper", {}).items()}
    for text in set_:
        method, key, value = parse_hyper(text)
        hyper.setdefault(method, {})[key] = value
    return Plan(**options, hyper=hyper)


def _title(plan: Plan) -> str:
    return f"{plan.model} on {plan.data}, {plan.setting}, severity {plan.severity}, accuracy (%)"


def _show_grid(console: Console, plan: Plan, cells: list[Cell], folder: Path) -> None:
    table = RichTable(box=None, padding=(0, 2, 0, 0))
    for name in ("cell", "method", "objective", "corruptions", "seed", "hyperparameters"):
        table.add_column(name)
    for cell in cells:
        hyper = " ".join(f"{k}={v}" for k, v in cell.hyper.items())
        row = (cell.key, cell.method, cell.objective, " ".join(cell.corruptions), str(cell.seed), hyper)
        table.add_row(*map(escape, row))
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
    if not re.fullmatch(r"\s*-?[0-9]{1,20}\s*", text):
        raise ConfigError(f"{name} must be integers with commas between, e.g. 0,1,2, got {text!r}")
    return int(text)


def _toml(path: Path) -> dict[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read(MAX_CONFIG + 1)
        if len(text) > MAX_CONFIG:
            raise ValueError(f"it is longer than {MAX_CONFIG} characters")
        found = tomllib.loads(text)
    except (OSError, ValueError, RecursionError) as error:  # a TOMLDecodeError is a ValueError
        raise InputError(f"cannot read the configuration {path}: {error}") from error
    if "set" in found:
        found["hyper"] = found.pop("set")
    known = {field.name: str(field.type) for field in fields(Plan)}
    options: dict[str, Any] = {}
    for key, value in found.items():
        name = key.replace("-", "_")
        if name not in known:
            raise unknown(f"option in {path}", key, set(known) - {"hyper"} | {"set"})
        meaning, fits = KINDS[known[name].removesuffix(" | None")]
        if not fits(value):
            raise ConfigError(f"{key if name != 'hyper' else 'set'} in {path} must be {meaning}, got {_shown(value)}")
        options[name] = tuple(value) if isinstance(value, list) else value
    return options


def _shown(value: Any) -> str:
    """A value in a message, cut to a length that fits one."""
    try:
        text = repr(value)
    except ValueError:  # Python does not write out thousands of digits
        return "too large a number"
    return text if len(text) < 100 else f"{text[:100]}..."


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**64


def _is_plain(value: Any) -> bool:
    """What a record can hold: no dates."""
    if isinstance(value, list):
        return all(map(_is_plain, value))
    return isinstance(value, (str, bool, float)) or _is_whole(value)


def _is_hyper(value: Any) -> bool:
    return isinstance(value, dict) and all(
        isinstance(chosen, dict) and all(map(_is_plain, chosen.values())) for chosen in value.values()
    )


KINDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "str": ("a text", _is_text),
    "int": ("a 64-bit integer", _is_whole),
    "bool": ("true or false", lambda value: isinstance(value, bool)),
    "float": ("a number", lambda value: _is_whole(value) or isinstance(value, float)),
    "tuple[str, ...]": ("a list of texts", lambda value: isinstance(value, list) and all(map(_is_text, value))),
    "tuple[int, ...]": (
        "a list of integers",
        lambda value: isinstance(value, list) and all(map(_is_whole, value)),
    ),
    "dict[str, dict[str, Any]]": ("tables of numbers, texts and lists, e.g. [set.tent] lr = 1e-3", _is_hyper),
}
"""By the type of a plan's field: what a configuration file may hold for it, in words and as a test."""


def add(app: typer.Typer) -> None:
    """Add the command."""
    app.command(name="bench")(bench)
