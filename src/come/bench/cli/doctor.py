"""`come doctor`: what is installed here, what works, and how to repair what does not."""

from __future__ import annotations

import getpass
import importlib
import json
import math
import os
import platform
import re
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import psutil
import torch
import typer
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text
from torch import nn

import come
from come.bench import models
from come.bench.cli.options import Debug, Json
from come.bench.data.embedded import FashionSource
from come.bench.data.source import Loaded
from come.bench.data.store import room
from come.bench.downloads import no_answer
from come.errors import one_line, pip_install
from come.model.copies import Precision

EXTRAS = {
    "bench": "come bench, report, compare, reproduce",
    "clip": "come bench --model open_clip:NAME",
    "data": "come bench --data hf:NAME and webdataset:SHARDS",
    "demo": "come demo: methods side by side, in a browser",
    "export": "classifier.export to ONNX",
    "lightning": "come.integrations.lightning and torchmetrics",
    "log": "come bench --log: TensorBoard, Weights & Biases",
    "serve": "come serve: one model for many tenants over HTTP",
    "serve-ray": "come serve --replicas: several GPUs or machines",
    "ray": "come bench --engine ray: cells on a cluster",
}
IMAGES = 256  # that each embedded model classifies
MARGIN = 0.1  # by which its accuracy on them may be below the one on all test images
CLOSE = 0.02  # relative difference allowed between the loss of a step and that on a CPU in float32
PATIENCE = 2.0  # seconds that a host has to answer, and that the files of a cache are counted
STYLES = {"ok": "green", "note": "yellow", "failed": "bold red"}

Status = Literal["ok", "note", "failed"]


@dataclass(frozen=True)
class Check:
    """What was found out about one part.

    Example:
        >>> Check("cuda", "note", "no GPU").facts
        {}
    """

    part: str
    status: Status  # a note is no fault: something is missing or limited here
    says: str
    repair: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)  # the numbers of it, for scripts


Checks = Iterator[Check]


def _versions() -> Checks:
    found = {"come": come.__version__, "python": platform.python_version(), "torch": torch.__version__}
    system = f"{platform.system()} {platform.release()} {platform.machine()}"
    yield Check("versions", "ok", f"come {found['come']}, Python {found['python']}, {system}", facts=found)
    missing = []
    with suppress(PackageNotFoundError):  # run from a source tree
        missing = _missing("come-tta", "")
    if missing:
        yield Check("torch", "failed", f"come needs {', '.join(missing)}", pip_install(""))
    else:
        yield Check("torch", "ok", torch.__version__)


def _vision() -> Checks:
    """Torchvision has parts that are compiled for one torch, and timm imports it."""
    public, _, build = torch.__version__.partition("+")
    index = f" --index-url https://download.pytorch.org/whl/{build}" if build else ""
    matching = f'pip install --force-reinstall "torch=={public}" torchvision{index}'
    failed = ""
    for name in ("torchvision", "timm"):
        try:
            module = importlib.import_module(name)
            if name == "torchvision":
                module.ops.nms(torch.zeros(1, 4), torch.zeros(1), 0.5)
        except ModuleNotFoundError as error:
            yield Check(name, "failed", f"{error.name} is missing", pip_install("bench"))
        except Exception as error:
            if one_line(error, first=True) == failed:
                yield Check(name, "failed", "needs torchvision")
                continue
            failed = one_line(error, first=True)
            yield Check(name, "failed", f"does not fit torch {torch.__version__}: {failed}", matching)
        else:
            yield Check(name, "ok", f"{module.__version__}, imports", facts={"version": module.__version__})


def _extras() -> Checks:
    missing = dict[str, list[str]]()
    with suppress(PackageNotFoundError):
        known = distribution("come-tta").metadata.get_all("Provides-Extra") or []
        missing = {extra: _missing("come-tta", extra) for extra in EXTRAS if extra in known}
    if fine := [extra for extra, packages in missing.items() if not packages]:
        yield Check("extras", "ok", ", ".join(fine))
    for extra in (extra for extra in EXTRAS if extra not in fine):
        says, facts = f"unknown until come is installed again: {EXTRAS[extra]}", dict[str, Any]()
        if extra in missing:
            says, facts = f"needs {', '.join(missing[extra])} for {EXTRAS[extra]}", {"missing": missing[extra]}
        yield Check(f"extra {extra}", "note", says, pip_install(extra), facts)


def _missing(package: str, extra: str) -> list[str]:
    """What an extra of an installed package needs ("": the package itself) that is not here, or is too old."""
    from packaging.requirements import Requirement

    found: list[str] = []
    for text in distribution(package).requires or ():
        needed = Requirement(text)
        always, asked = (needed.marker is None or needed.marker.evaluate({"extra": e}) for e in ("", extra))
        if not asked or (extra and always):
            continue
        try:
            if not needed.specifier.contains(version(needed.name), prereleases=True):
                found.append(f"{needed.name}{needed.specifier} (not {version(needed.name)})")
            for more in needed.extras:
                found += _missing(needed.name, more)
        except PackageNotFoundError:
            found.append(needed.name)
    return list(dict.fromkeys(found))


def _devices() -> Checks:
    cores, threads, memory = os.cpu_count() or 1, torch.get_num_threads(), psutil.virtual_memory().total
    says = f"{cores} cores, {_size(memory)} of memory, torch.get_num_threads() is {threads}"
    yield Check("cpu", "ok", says, facts={"cores": cores, "threads": threads, "bytes": memory})
    with warnings.catch_warnings(record=True) as said:  # such as that of a driver that is too old
        warnings.simplefilter("always")
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for i in range(count):
        about = torch.cuda.get_device_properties(i)
        free, total = torch.cuda.mem_get_info(i)
        facts = {"name": about.name, "bytes": total, "free_bytes": free, "capability": f"{about.major}.{about.minor}"}
        says = f"{about.name}, {_size(total)} ({_size(free)} free), capability {facts['capability']}"
        yield Check(f"cuda:{i}", "ok", says, facts=facts)
    if not count:
        why = f": {one_line(said[0].message, first=True)}" if said else ""  # type: ignore[arg-type]
        built = f"torch is built for CUDA {torch.version.cuda}" if torch.version.cuda else "torch is built without CUDA"
        yield Check("cuda", "note", f"no GPU{why}; {built}")
    if torch.backends.mps.is_available():
        yield Check("mps", "ok", "Apple GPU")


def _steps() -> Checks:
    gpus = [f"cuda:{i}" for i in range(torch.cuda.device_count() if torch.cuda.is_available() else 0)]
    expected = _loss("cpu", "float32")
    for device in ("cpu", *gpus, *(["mps"] if torch.backends.mps.is_available() else [])):
        words, failures, facts = [], [], {}
        for precision in ("float32", "bf16"):
            try:
                began = time.perf_counter()
                loss = _loss(device, precision)
                seconds = time.perf_counter() - began
                if not abs(loss - expected) <= CLOSE * abs(expected):
                    raise ArithmeticError(f"loss {loss:.4f}, on a CPU in float32 {expected:.4f}")
                words.append(f"{precision} {1000 * seconds:.0f} ms")
                facts[precision] = {"loss": loss, "seconds": seconds}
            except Exception as error:
                words.append(f"{precision} fails: {one_line(error, first=True)}")
                failures.append(precision)
        status: Status = "failed" if "float32" in failures else "note" if failures else "ok"
        yield Check(f"{device} step", status, f"tent + come, {', '.join(words)}", facts=facts)


def _loss(device: str, precision: Precision) -> float:
    """Of a step on a model of a few layers."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 16, 3, 2), nn.GroupNorm(4, 16), nn.ReLU(), nn.Flatten(), nn.Linear(784, 10))
        x = torch.randn(16, 3, 16, 16)
    step = come.adapt(model.to(device), "tent", objective="come", precision=precision).step(x.to(device))
    loss = math.nan if step.loss is None else float(step.loss.mean())
    if not (math.isfinite(loss) and bool(step.logits.isfinite().all())):
        raise ArithmeticError("the result is not finite")
    return loss


def _models() -> Checks:
    loaded = FashionSource(size=IMAGES).load(range(IMAGES))
    for name in models.EMBEDDED:
        yield from _checked(name, partial(_model, name, loaded))


def _model(name: str, loaded: Loaded) -> Checks:
    expected = float(models.embedded_facts(name)["clean"])
    model = models.load(name)
    with torch.inference_mode():
        right = int((model.module(model.preprocess(loaded.images)).argmax(dim=1) == loaded.labels).sum())
    fine = right / IMAGES >= expected - MARGIN
    says = f"{right} of {IMAGES} images right; of all test images {expected:.1%}"
    repair = "" if fine else "git checkout src (in your clone of come), or clone it again"
    yield Check(name, "ok" if fine else "failed", says, repair, {"right": right, "images": IMAGES})


def _caches() -> Checks:
    places: dict[str, Callable[[], Any]] = {
        "torch hub": torch.hub.get_dir,
        "hugging face": lambda: importlib.import_module("huggingface_hub.constants").HF_HUB_CACHE,
        "compiled": _compiled,
    }
    for name, place in places.items():
        yield from _checked(name, partial(_cache, name, place))
    kept, _ = room(1, 1)
    if kept is None:
        yield Check("decoded", "note", "no room for decoded images; they are decoded for each cell")
        return
    free = psutil.disk_usage(str(kept)).free
    says, facts = f"{kept}, {_size(free)} free; emptied after each run", {"path": str(kept), "free_bytes": free}
    yield Check("decoded", "ok", says, facts=facts)


def _compiled() -> str:
    """Where torch.compile keeps what it has compiled; torch has no public name for it."""
    user = re.sub(r'[\\/:*?"<>|]', "_", getpass.getuser())
    return os.environ.get("TORCHINDUCTOR_CACHE_DIR") or os.path.join(tempfile.gettempdir(), f"torchinductor_{user}")


def _cache(name: str, place: Callable[[], Any]) -> Checks:
    there = path = Path(place())
    while not there.exists() and there != there.parent:
        there = there.parent
    taken, counted = _taken(path)
    facts = {"path": str(path), "bytes": taken, "writable": there.is_dir() and os.access(there, os.W_OK)}
    shown = str(path).replace(str(Path.home()), "~", 1) if path.is_relative_to(Path.home()) else str(path)
    says = f"{shown}, {('' if counted else 'over ') + _size(taken) if path.exists() else 'empty'}"
    status, can = ("ok", "writable") if facts["writable"] else ("note", "not writable: nothing new can be added to it")
    yield Check(name, status, f"{says}, {can}", facts=facts)  # type: ignore[arg-type]


def _taken(path: Path) -> tuple[int, bool]:
    """Bytes of the files below a folder, and whether there was time to count all."""
    end, total = time.monotonic() + PATIENCE, 0
    for folder, _, names in os.walk(path):
        for name in names:
            with suppress(OSError):
                total += os.lstat(os.path.join(folder, name)).st_size
        if time.monotonic() > end:
            return total, False
    return total, True


def _size(count: float) -> str:
    """
    >>> _size(300), _size(5 * 2**20), _size(139.5 * 2**30)
    ('0 MB', '5 MB', '139.5 GB')
    """
    return f"{count / 2**30:.1f} GB" if count >= 2**30 else f"{count / 2**20:.0f} MB"


def _network() -> Checks:
    constants = importlib.import_module("huggingface_hub.constants")
    urls = [constants.ENDPOINT, "https://download.pytorch.org"]
    with ThreadPoolExecutor() as pool:
        silences = list(pool.map(lambda url: no_answer(url, PATIENCE), urls))
    if constants.HF_HUB_OFFLINE:
        silences[0] = "HF_HUB_OFFLINE is set"
    hosts = {urlsplit(url).netloc: silence for url, silence in zip(urls, silences, strict=True)}
    silent = [f"{host} ({silence})" for host, silence in hosts.items() if silence]
    if not silent:
        yield Check("network", "ok", f"{' and '.join(hosts)} answer", facts=hosts)
        return
    says = f"{'offline' if all(silences) else 'partly offline'}: no answer from {', '.join(silent)}"
    yield Check("network", "note", says, "embedded models need none; for others give --checkpoint FILE", hosts)


PARTS: dict[str, Callable[[], Checks]] = {
    "versions": _versions,
    "torchvision": _vision,
    "extras": _extras,
    "devices": _devices,
    "step": _steps,
    "models": _models,
    "caches": _caches,
    "network": _network,
}


def checks() -> Checks:
    """Look at this machine, part by part; a part that fails is a `Check` that says why.

    Example:
        >>> next(checks()).part
        'versions'
    """
    for name, part in PARTS.items():
        yield from _checked(name, part)


def _checked(name: str, part: Callable[[], Checks]) -> Checks:
    try:
        yield from part()
    except Exception as error:
        yield Check(name, "failed", f"{type(error).__name__}: {one_line(error, first=True)}")


def doctor(json_: Json = False, debug: Debug = False) -> None:
    """Check this machine: versions, extras, devices, caches, embedded models, an adaptation step."""
    console = Console(highlight=False)
    found = []
    for check in checks():
        found.append(check)
        if json_:
            continue
        row = RichTable.grid(padding=(0, 1, 0, 0))
        for width in (6, 17, None):
            row.add_column(width=width, overflow="fold")
        row.add_row(Text(check.status, STYLES[check.status]), Text(check.part), Text(check.says))
        console.print(row)
        if check.repair:  # not wrapped, to be copied
            console.print(Text(f"       {check.repair}", "bold"), soft_wrap=True)
    broken = [check.part for check in found if check.status == "failed"]
    if json_:
        said = {"come": come.__version__, "ok": not broken, "checks": [asdict(check) for check in found]}
        typer.echo(json.dumps(said, indent=1))
    elif broken:
        console.print(Text(f"broken: {', '.join(broken)}", "bold red"))
    else:
        console.print(Text("nothing is broken", "green"))
    if broken:
        raise typer.Exit(1)
