"""`come serve`: one model for many tenants, over HTTP."""

from __future__ import annotations

import importlib
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
import typer
from torch import Tensor

from come.bench import models
from come.bench.cell import Knobs, spelled
from come.bench.cli.options import Debug, Device, option, with_preprocessing
from come.bench.data import open_source
from come.bench.data.streams import shuffle
from come.bench.plan import typed
from come.errors import ConfigError, missing, one_line
from come.methods import DEFAULT

if TYPE_CHECKING:
    from come.serve import Service

LINGER = 30  # seconds that open connections have when the server ends


def build(
    part: int,
    parts: int,
    *,
    model: str,
    checkpoint: Path | None,
    device: str,
    preprocessing: Mapping[str, Any] | None = None,
    wanted: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Service:
    """The service of a model by name; `wanted` are data to calibrate on, and what to promise."""
    from come.serve import Service

    found = models.load(model, checkpoint=checkpoint, **(preprocessing or {}))
    side = found.preprocess.size
    if settings["dtype"] == "uint8":
        settings["preprocess"] = found.preprocess
    service = Service(found.module.to(device), shape=(3, side, side), part=part, parts=parts, **settings)
    if wanted:
        try:
            _calibrate(service, found, **wanted)
        except BaseException:
            service.close()
            raise
    return service


def _calibrate(service: Service, model: models.Model, calibrate: str, **promised: float | None) -> None:
    source = open_source(calibrate, model.preprocess)
    source.require([None], 5)
    if source.num_classes != model.num_classes:
        raise ConfigError(
            f"--calibrate {calibrate} has {source.num_classes} classes and {model.name} {model.num_classes}; give data of "
            "the model's own classes"
        )
    order = shuffle(range(len(source)), 0)

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        for begin in range(0, len(order), service.max_samples):
            loaded = source.load(order[begin : begin + service.max_samples])
            yield loaded.images if service.dtype == "uint8" else model.preprocess(loaded.images), loaded.labels

    typer.echo(f"abstains: {service.calibrate(batches(), **promised)}")


limit = partial(option, panel="Limits")


@with_preprocessing
def serve(
    given: dict[str, Any],
    model: Annotated[str, option("What to serve; [bold]come list models[/].")] = "fashion-resnet-bn",
    checkpoint: Annotated[Path | None, option("A file with its weights.")] = None,
    method: Annotated[str, option("Also with hyperparameters: tent:lr=1e-3.")] = DEFAULT,
    objective: Annotated[str | None, option("See [bold]come list objectives[/]. \\[the method's own]")] = None,
    adapt: Annotated[str, option("inline, after, every:N, shift, shift:MEAN,STD or never.")] = "inline",
    dtype: Annotated[str, option("[bold]uint8[/]: images; [bold]float32[/]: images already normalized.")] = "uint8",
    calibrate: Annotated[str | None, option("Source data to choose the threshold for abstaining on.")] = None,
    risk: Annotated[float | None, option("Abstain so that at most this share of the answers is wrong.")] = None,
    coverage: Annotated[float | None, option("Or so that this share of samples is answered.")] = None,
    state: Annotated[Path | None, option("A folder for tenants' states. \\[memory only]")] = None,
    write_every: Annotated[float, option("Seconds until a change is on disk; 0: before the answer.", min=0)] = 10.0,
    host: Annotated[str, option("Where to listen. There is no authentication: put that in front.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535)] = 8000,
    replicas: Annotated[int | None, option("Replicas on Ray Serve. \\[one process, without Ray]", min=1)] = None,
    device: Device = "cpu",
    tenants: Annotated[int, limit("Tenants of each replica, on disk included.", min=1)] = 1000,
    resident: Annotated[int | None, limit("Tenants in memory, of each replica. \\[all]", min=1)] = None,
    max_batch: Annotated[int, limit("Samples that are run together.", min=1)] = 64,
    max_wait: Annotated[float, limit("Milliseconds that a request waits for others.", min=0)] = 2.0,
    max_samples: Annotated[int, limit("Samples of one request.", min=1)] = 64,
    max_queue: Annotated[int, limit("Samples that wait.", min=1)] = 1024,
    labels: Annotated[int, limit("Tenants with metrics of their own.", min=0)] = 100,
    debug: Debug = False,
) -> None:
    """Serve one model to many tenants over HTTP; each tenant adapts by itself.

    Needs [bold]pip install -e ".\\[serve]"[/], with --replicas ".\\[serve-ray]". Ctrl-C or SIGTERM ends it; all
    states are written first.
    """
    check_installed("serve", "serve", ("fastapi", "uvicorn", "prometheus_client", "filelock"))
    if replicas is not None:
        check_installed("serve", "serve-ray", ("ray.serve",))
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"no device {device!r}: {one_line(error, first=True)}") from error
    settings: dict[str, Any] = {
        **{"method": method, "objective": objective, "adapt": adapt, "dtype": dtype},
        **{"state": state, "write_every": write_every, "tenants": tenants, "resident": resident, "labels": labels},
        **{"max_batch": max_batch, "max_wait": max_wait / 1000, "max_samples": max_samples, "max_queue": max_queue},
    }
    wanted = {} if calibrate is None else {"calibrate": calibrate, "risk": risk, "coverage": coverage}
    if calibrate is None and (risk is not None or coverage is not None):
        raise ConfigError("--risk and --coverage need --calibrate DATA, source data to choose the threshold on")
    values = typed(given)
    knobs = Knobs(**values)  # types and ranges
    preprocessing = {name: getattr(knobs, name) for name in values}
    for_pictures = {"resize", "interpolation"} | ({"normalization", "mean", "std"} if dtype == "float32" else set())
    unused = ", ".join(f"--{spelled(name)}" for name in values if name in for_pictures)
    if calibrate is None and unused:  # clients send squares of the model's size, perhaps normalized
        said = f"no effect without --calibrate: {unused}; clients send images of the model's size, as {dtype}"
        typer.echo(said, err=True)
    settings |= {"model": model, "checkpoint": checkpoint, "device": device, "preprocessing": preprocessing}
    make: Callable[[int, int], Service] = partial(build, wanted=wanted, **settings)
    if state is None:
        typer.echo("states are in memory only; --state FOLDER keeps them", err=True)
    said = f"{model} with {method}, adapts {adapt}, on http://{host}:{port}"
    if replicas is None:
        _run_here(make(0, 1), host, port, said)
    else:
        _run_on_ray(make, replicas, host, port, said, "GPU" if device.startswith("cuda") else "CPU")


def _run_here(service: Service, host: str, port: int, said: str) -> None:
    import uvicorn

    from come.serve.http import create

    quiet: dict[str, Any] = {"log_level": "warning", "timeout_graceful_shutdown": LINGER}
    with service:
        server = uvicorn.Server(uvicorn.Config(create(service), host=host, port=port, **quiet))
        typer.echo(said)
        try:
            server.run()
        except KeyboardInterrupt:
            pass
        except SystemExit as error:
            raise ConfigError(f"cannot listen on {host}:{port}; is another server there?") from error


def _run_on_ray(
    make: Callable[[int, int], Service], replicas: int, host: str, port: int, said: str, kind: Literal["GPU", "CPU"]
) -> None:
    from come.serve.ray_serve import application, check_room, serve

    ended = threading.Event()
    for one in (signal.SIGINT, signal.SIGTERM):
        signal.signal(one, lambda *_: ended.set())
    options = {"ray_actor_options": {"num_gpus": 1}} if kind == "GPU" else {}
    serve.start(http_options={"host": host, "port": port})
    try:
        check_room(replicas, kind)
        serve.run(application(make, replicas, **options), name="come")
        typer.echo(f"{said}, {replicas} replicas")
        ended.wait()
    finally:
        serve.shutdown()  # replicas write their states


def check_installed(command: str, extra: str, packages: tuple[str, ...]) -> None:
    """Say what to install if a command's packages are missing."""
    for package in packages:
        try:
            importlib.import_module(package)
        except ModuleNotFoundError as error:
            raise missing(f"come {command}", error, extra) from error
