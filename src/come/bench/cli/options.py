"""Options that come from the description of a plan, and those that several commands share."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from come.bench.cell import BARE, HOW, PREPROCESSING, WHAT, shape, spelled
from come.bench.cluster import Cluster
from come.bench.data.reading import read_regular
from come.bench.models import PREPROCESSING as PREPROCESSING_OPTIONS
from come.bench.plan import Plan, named
from come.errors import ConfigError, InputError, unknown

WHERE = "Where to run it"
PANELS = (WHAT, HOW, PREPROCESSING, WHERE)
"""The groups of `--help`, in their order; others come first."""
OFF = {"guard": BARE}
"""How a flag is switched off, where that is not no-NAME."""

MAX_CONFIG = 2**20
"""Bytes of a configuration file."""

Device = Annotated[str, typer.Option(rich_help_panel=WHERE, help="cpu, cuda, cuda:1, ...")]
Workers = Annotated[
    int | None,
    typer.Option(
        rich_help_panel=WHERE,
        help="Threads that decode images. \\[0 for the embedded data, else up to 4]",
        show_default=False,
    ),
]
Jobs = Annotated[
    int | None,
    typer.Option(
        rich_help_panel=WHERE,
        help="Processes that run cells at once. \\[for small models one per core, else 1]",
        show_default=False,
    ),
]
Engine = Annotated[
    str,
    typer.Option(
        rich_help_panel=WHERE,
        help="[bold]local[/]: processes of this machine; [bold]ray[/]: workers of a Ray cluster, --jobs of them (as many as "
        "there is room for, if not given).",
    ),
]
Address = Annotated[
    str | None,
    typer.Option(
        rich_help_panel=WHERE,
        metavar="HOST:PORT",
        help="With ray: the cluster; [bold]auto[/] for the one started here. \\[RAY_ADDRESS, else this machine alone]",
        show_default=False,
    ),
]
Cpus = Annotated[
    float | None,
    typer.Option(rich_help_panel=WHERE, metavar="N", help="With ray: CPUs of each worker. \\[1]", show_default=False),
]
Gpus = Annotated[
    float | None,
    typer.Option(
        rich_help_panel=WHERE,
        metavar="N",
        help="With ray: GPUs of each worker, such as 0.5. \\[1 with --device cuda]",
        show_default=False,
    ),
]
Shard = Annotated[
    str | None,
    typer.Option(
        rich_help_panel=WHERE,
        metavar="I/N",
        help="Run part I of N of the cells, counted from 0; the N parts may run at once on one shared folder.",
        show_default=False,
    ),
]
Together = Annotated[
    str,
    typer.Option(
        rich_help_panel=WHERE,
        metavar="N|auto",
        help="Cells that run at once as one batch on one device, for a GPU: a number, or [bold]auto[/].",
    ),
]
OnBadImage = Annotated[
    str, typer.Option(rich_help_panel=WHERE, help="[bold]raise[/] names the file; [bold]skip[/] counts it.")
]
Out = Annotated[Path | None, typer.Option(rich_help_panel=WHERE, help="Run folder. \\[runs/<name of the plan>]")]
Config = Annotated[
    Path | None,
    typer.Option(rich_help_panel=WHERE, help="A TOML file with any of these options; the command line wins."),
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", rich_help_panel=WHERE, help="Check everything, show the grid, and stop.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]
Debug = Annotated[bool, typer.Option("--debug", rich_help_panel=WHERE, help="Show tracebacks.")]


def cluster_of(engine: str, address: str | None, cpus: float | None, gpus: float | None) -> Cluster | None:
    """What these options ask for; None is this machine without Ray.

    >>> cluster_of("local", None, None, None)
    >>> cluster_of("ray", None, 2, None)
    Cluster(address=None, cpus=2, gpus=None)
    """
    if engine not in (known := ("local", "ray")):
        raise unknown("engine", engine, known)
    if engine == "ray":
        return Cluster(address, 1 if cpus is None else cpus, gpus)
    for name, value in (("address", address), ("cpus", cpus), ("gpus", gpus)):
        if value is not None:
            raise ConfigError(f"{name} has no effect without --engine ray; leave it out, or give --engine ray")
    return None


def with_plan(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command an option for each field of a plan; it gets those that were typed as `given`, a dictionary of texts."""
    return _with(Plan.model_fields, command)


def with_preprocessing(command: Callable[..., None]) -> Callable[..., None]:
    """As `with_plan`, for the fields that say how images are prepared for a model."""
    return _with(PREPROCESSING_OPTIONS, command)


def _with(names: Collection[str], command: Callable[..., None]) -> Callable[..., None]:
    own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.name != "given"]
    fields = list(_plan_options(names))

    def run(**values: Any) -> None:
        given = {name: values.pop(name) for name in list(values) if name in names}
        command(given={name: value for name, value in given.items() if value is not None}, **values)

    parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in (*own, *fields)]
    parameters.sort(key=_panel)
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    run.__doc__, run.__name__ = command.__doc__, command.__name__
    return run


def _panel(parameter: inspect.Parameter) -> int:
    """Where the group of an option is in `--help`."""
    panel = parameter.annotation.__metadata__[0].rich_help_panel
    return PANELS.index(panel) if panel in PANELS else -1


def _plan_options(names: Collection[str]) -> Iterator[inspect.Parameter]:
    for name, field in ((name, Plan.model_fields[name]) for name in names):
        kind, flag, default, said = shape(field), f"--{spelled(name)}", field.default, field.description or ""
        typed: Any = str | None
        more: dict[str, Any] = {"metavar": "N" if kind == "number" else "TEXT"}
        if kind == "flag":
            typed, flag, more = bool | None, f"{flag}/--{OFF.get(name) or f'no-{spelled(name)}'}", {}
        elif kind == "table":
            typed, more, default = list[str] | None, {"metavar": "METHOD.NAME=VALUE"}, None
        elif kind == "list":
            said += " Comma-separated."
            default = ",".join(map(str, default or ())) or None
        if default not in (None, False):
            said += f" {escape(f'[{default}]')}"
        group = (field.json_schema_extra or {})["group"]  # type: ignore[index]
        option = typer.Option(flag, rich_help_panel=str(group), help=said, show_default=False, **more)
        yield inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[typed, option])


def from_toml(path: Path) -> Mapping[str, Any]:
    """The options in a configuration file."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        found = tomllib.loads(read_regular(path, MAX_CONFIG).decode())
    except (OSError, ValueError, RecursionError) as error:  # a TOMLDecodeError is a ValueError
        raise InputError(f"cannot read the configuration {path}: {getattr(error, 'strerror', '') or error}") from error
    return named(found, str(path))
