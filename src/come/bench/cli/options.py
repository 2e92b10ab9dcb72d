"""Options that several commands share, and those that are made from the fields of a plan."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
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
from come.metrics import SCORES

WHERE = "Where to run it"
PANELS = (WHAT, HOW, PREPROCESSING, WHERE)  # the groups of --help, in their order; others come first
OFF = {"guard": BARE}  # how a flag is switched off, where that is not no-NAME
MAX_CONFIG = 2**20  # bytes of a configuration file


def option(text: str, *flags: str, panel: str | None = None, **more: Any) -> Any:
    """An option with this text in `--help`, in a group of it."""
    return typer.Option(*flags, help=text, rich_help_panel=panel, **more)


where = partial(option, panel=WHERE)

Device = Annotated[str, where("cpu, cuda, cuda:1, ...")]
Workers = Annotated[int | None, where("Threads that decode images. \\[0 for the embedded data, else up to 4]")]
Jobs = Annotated[int | None, where("Processes that run cells at once. \\[for small models one per core, else 1]")]
Together = Annotated[
    str, where("Cells that run as one batch on one device, for a GPU: a number, or [bold]auto[/].", metavar="N|auto")
]
Engine = Annotated[
    str,
    where(
        "[bold]local[/]: processes of this machine; [bold]ray[/]: workers of a Ray cluster, --jobs of them, or as many as "
        "there is room for."
    ),
]
Address = Annotated[
    str | None,
    where(
        "With ray: the cluster; [bold]auto[/] for the one started here. \\[RAY_ADDRESS, else this machine alone]",
        metavar="HOST:PORT",
    ),
]
Cpus = Annotated[float | None, where("With ray: CPUs of each worker. \\[1]", metavar="N")]
Gpus = Annotated[
    float | None, where("With ray: GPUs of each worker, such as 0.5. \\[1 with --device cuda]", metavar="N")
]
Shard = Annotated[
    str | None,
    where(
        "Run part I of N of the cells, counted from 0; the N parts may run at once on one shared folder.", metavar="I/N"
    ),
]
OnBadImage = Annotated[str, where("[bold]raise[/] stops and names the file; [bold]skip[/] counts it.")]
Out = Annotated[Path | None, where("Run folder. \\[runs/<name of the plan>]")]
Config = Annotated[Path | None, where("A TOML file with any of these options; the command line wins.")]
DryRun = Annotated[bool, where("Check everything, show the grid, and stop.", "--dry-run")]
Debug = Annotated[bool, where("Show tracebacks.", "--debug")]
Json = Annotated[bool, option("Print JSON, for scripts.", "--json")]
Score = Annotated[
    str,
    option(
        f"What FPR ranks samples by: {', '.join(SCORES)}. By default as published, each objective by its own confidence, "
        "and beside it by softmax for all.",
        show_default=False,
    ),
]


def check_score(score: str) -> None:
    """Refuse a score that there is not, before any work."""
    if score not in SCORES:
        raise unknown("score", score, SCORES)


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


def with_plan(command: Callable[..., None], names: Collection[str] = Plan.model_fields) -> Callable[..., None]:
    """Give a command an option for each field of a plan; it gets those that were typed as `given`, a dictionary of texts."""
    own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.name != "given"]

    def run(**values: Any) -> None:
        given = {name: values.pop(name) for name in list(values) if name in names}
        command(given={name: value for name, value in given.items() if value is not None}, **values)

    parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in (*own, *_plan_options(names))]
    parameters.sort(key=_panel)
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    run.__doc__, run.__name__ = command.__doc__, command.__name__
    return run


with_preprocessing = partial(with_plan, names=PREPROCESSING_OPTIONS)
"""As `with_plan`, for the fields that say how images are prepared for a model."""


def _panel(parameter: inspect.Parameter) -> int:
    """Where the group of an option is in `--help`."""
    panel = parameter.annotation.__metadata__[0].rich_help_panel
    return PANELS.index(panel) if panel in PANELS else -1


def _plan_options(names: Collection[str]) -> Iterator[inspect.Parameter]:
    for name in names:
        field = Plan.model_fields[name]
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
