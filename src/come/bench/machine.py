"""Where a result was made, and what it took there: device, versions, threads, time, memory, and what else was running."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import subprocess
import time
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path

import psutil
import torch

from come.bench.record import Machine

PACKAGES = ("come-tta", "torch", "timm", "numpy")
CHANGED = "-changed"  # behind a commit whose files were changed since
PACKAGE = Path(__file__).parents[1]


@dataclass(frozen=True)
class Jobs:
    """The processes that work on a run at once."""

    count: int = 1
    first: int | None = None  # process id of the one that started the others; None is this one


ALONE = Jobs()


class Meter:
    """Measures what a cell takes on a device, from its making to `machine` and `peak_megabytes`."""

    def __init__(self, device: torch.device, jobs: Jobs = ALONE) -> None:
        self.device, self.jobs = device, jobs
        self._began, self._ours, self._all = time.perf_counter(), _our_seconds(jobs.first), _busy_seconds()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        with contextlib.suppress(OSError):  # Linux; elsewhere the peak is that of the whole process so far
            Path("/proc/self/clear_refs").write_text("5")

    def seconds(self) -> float:
        """Since it was made."""
        return time.perf_counter() - self._began

    def machine(self, streams: int = 1) -> Machine:
        """Versions, device, threads, cells that ran at once, and how many cores other programs kept busy meanwhile."""
        versions = {"python": platform.python_version()}
        for package in PACKAGES:
            try:
                versions[package] = version(package)
            except PackageNotFoundError:
                versions[package] = "from source"
        if (revision := commit()) is not None:
            versions["commit"] = revision
        if self.device.type == "cuda":
            name = torch.cuda.get_device_name(self.device)
        else:
            name = platform.processor() or platform.machine()
        others = (_busy_seconds() - self._all) - (_our_seconds(self.jobs.first) - self._ours)
        load = max(0.0, others / max(self.seconds(), 1e-9))
        return Machine(
            versions=versions,
            device=f"{self.device.type}: {name}",
            threads=torch.get_num_threads(),
            jobs=self.jobs.count,
            streams=streams,
            load=round(load, 2),
        )

    def peak_megabytes(self) -> float:
        """On a GPU what tensors took at most since this was made, on a CPU the largest size of the process."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            return torch.cuda.max_memory_allocated(self.device) / 2**20
        # psutil knows no peak on Linux
        with contextlib.suppress(OSError, StopIteration, ValueError):
            status = Path("/proc/self/status").read_text().splitlines()
            return int(next(line for line in status if line.startswith("VmHWM")).split()[1]) / 2**10
        memory = psutil.Process().memory_info()
        return float(getattr(memory, "peak_wset", memory.rss)) / 2**20


def _our_seconds(first: int | None) -> float:
    """CPU time of the first process of the run and of all that it started, also of those that have ended."""
    root = psutil.Process(first)
    total = 0.0
    for process in (root, *root.children(recursive=True)):
        with contextlib.suppress(psutil.Error):  # it has just ended
            times = process.cpu_times()
            total += times.user + times.system
            total += getattr(times, "children_user", 0.0) + getattr(times, "children_system", 0.0)
    return total


def _busy_seconds() -> float:
    """CPU time that all processes of the machine took together."""
    times = psutil.cpu_times()
    return float(times.user + times.system + getattr(times, "nice", 0.0))


@cache
def commit() -> str | None:
    """40 hexadecimal digits, with `CHANGED` behind them where the library's files differ; None where nobody knows.

    A checkout is asked first, then what pip noted of an installation from a repository.
    """
    return _of_checkout() or _of_installation()


def _of_checkout() -> str | None:
    try:
        # a virtual environment may be in the repository of something else
        _git("ls-files", "--error-unmatch", "version.py")
        return _git("rev-parse", "HEAD").strip() + CHANGED * bool(_git("status", "--porcelain", "--", "."))
    except (OSError, subprocess.SubprocessError):
        return None


def _git(*arguments: str) -> str:
    # a hook names its own repository
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    command = ["git", "-C", str(PACKAGE), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, check=True, text=True, timeout=10).stdout


def _of_installation() -> str | None:
    try:
        noted = json.loads(distribution("come-tta").read_text("direct_url.json") or "{}")
    except (PackageNotFoundError, OSError, ValueError):
        return None
    found = noted.get("vcs_info", {}).get("commit_id")
    return found if isinstance(found, str) else None
