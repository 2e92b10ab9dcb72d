"""Where a result was made, and what it took there: device, versions, threads, time, memory, and what else was running."""

from __future__ import annotations

import contextlib
import platform
import time
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil
import torch

from come.bench.record import Machine
from come.bench.revision import commit

PACKAGES = ("come-tta", "torch", "timm", "numpy")


@dataclass(frozen=True)
class Jobs:
    """The processes that work on a run at once."""

    count: int = 1
    first: int | None = None
    """Process id of the one that started the others; None is this one."""


ALONE = Jobs()


class Meter:
    """Measures what a cell takes, from its making to `machine` and `peak_megabytes`.

    Args:
        device: where the model is.
        jobs: the processes that work on the run.
    """

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
        """Versions, device and threads, and how many cores other programs kept busy meanwhile.

        Args:
            streams: how many cells ran at once, as streams of one fleet.
        """
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
