"""Where and how to run cells on a Ray cluster; `come.bench.engines.ray` runs them.

`ray` is imported only when a `Cluster` is used.
"""

from __future__ import annotations

import logging
import os
import re
import socket
import warnings
from dataclasses import dataclass
from typing import Any

from come.errors import ConfigError, InputError, one_line, pip_install, require, require_number

REACH = 10.0  # seconds in which a cluster must answer
INSTALL = f"install it with: {pip_install('bench,ray')}"


@dataclass(frozen=True)
class Cluster:
    """Where and how to run workers with Ray. `Bench(plan, cluster=Cluster())` uses it; `jobs` is the number of workers.

    Args:
        address: HOST:PORT of a cluster that this machine belongs to, "auto" for the one that was started here with
            `ray start`, or ray://HOST:PORT. None: the environment's RAY_ADDRESS, else Ray is started on this machine alone. If
            this process is connected to Ray already, that connection is used.
        cpus: of each worker, also the number of threads it uses.
        gpus: of each worker; a fraction lets several share one. None: 1 if they run on a GPU, else 0.

    Example:
        >>> Cluster("head:6379", gpus=0.5).gpus
        0.5
    """

    address: str | None = None
    cpus: float = 1
    gpus: float | None = None

    def __post_init__(self) -> None:
        known = self.address in (None, "auto") or _host_and_port(str(self.address)) is not None
        require(known, "address", self.address, "HOST:PORT, ray://HOST:PORT or auto")
        limit = "a number > 0"
        require(require_number("cpus", self.cpus, limit) and 0 < self.cpus <= 10**6, "cpus", self.cpus, limit)
        if self.gpus is not None:
            limit = "a number from 0 to 1, or an integer"  # as Ray has it
            require_number("gpus", self.gpus, limit)
            require(0 <= self.gpus <= 1 or (self.gpus <= 10**6 and self.gpus % 1 == 0), "gpus", self.gpus, limit)

    def connect(self, device: str, workers: int | None) -> int:
        """Connect to Ray, and return how many workers to use: `workers`, or as many as there is room for.

        Raises:
            ConfigError: Ray is not installed, or the device is not one that each worker can have.
            InputError: the cluster cannot be reached, or has no room for that many workers.
        """
        require(device in ("cpu", "cuda"), "device", device, "cpu or cuda with Ray, which chooses the GPU")
        gpus = self.gpus_on(device)
        ray = import_ray()
        if not ray.is_initialized():
            self._join(ray)
        machines = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        has = {kind: sum(machine.get(kind, 0.0) for machine in machines) for kind in ("CPU", "GPU")}
        room = sum(_room(machine, self.cpus, gpus) for machine in machines)
        if room < (workers or 1):
            raise InputError(
                f"the cluster has room for {room} workers with {self.cpus:g} CPUs and {gpus:g} GPUs each, {workers or 1} are "
                f"needed; it has {has['CPU']:g} CPUs and {has['GPU']:g} GPUs on {len(machines)} machines: lower --jobs, "
                "--cpus or --gpus, or add machines"
            )
        return workers or room

    def gpus_on(self, device: str) -> float:
        """GPUs of each worker that runs on this device."""
        if device == "cpu" and self.gpus:
            raise ConfigError("gpus has no effect on the CPU; leave it out, or choose --device cuda")
        if device == "cuda" and self.gpus == 0:
            raise ConfigError("gpus must be > 0 with --device cuda, got 0")
        return (1 if device == "cuda" else 0) if self.gpus is None else self.gpus

    def _join(self, ray: Any) -> None:
        address = self.address or os.environ.get("RAY_ADDRESS") or "local"
        place = _host_and_port(address)
        more: dict[str, Any] = {"include_dashboard": False} if address == "local" else {}
        if address == "local":
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is sent to Ray's developers
        try:
            if place is not None:  # Ray itself would try for many minutes
                socket.create_connection(place, REACH).close()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Ray's own, about its future versions
                ray.init(address, log_to_driver=False, logging_level=logging.ERROR, **more)
        except (OSError, RuntimeError, ValueError, ImportError) as error:  # a ConnectionError is an OSError
            why = one_line(error, first=True)
            if address == "local":
                raise InputError(f"Ray cannot be started on this machine: {why}") from error
            raise InputError(
                f"no Ray cluster can be used at {address} ({why}); start one there with 'ray start --head', or leave --address "
                "out to run on this machine alone"
            ) from error


def import_ray() -> Any:
    """Ray itself, or a `ConfigError` that says how to install it."""
    try:
        import ray
    except ImportError as error:
        raise ConfigError(f"Ray is missing; {INSTALL}") from error
    return ray


def _host_and_port(address: str) -> tuple[str, int] | None:
    found = re.fullmatch(r"(?:ray://)?(\[[0-9a-fA-F:]+\]|[^\s:/]+):(\d{1,5})", address, re.ASCII)
    return (found[1].strip("[]"), int(found[2])) if found and 0 < int(found[2]) < 2**16 else None


def _room(machine: dict[str, float], cpus: float, gpus: float) -> int:
    """How many workers fit on a machine."""
    by_gpu = machine.get("GPU", 0.0) / gpus if gpus else float("inf")
    return int(min(machine.get("CPU", 0.0) / cpus, by_gpu) + 1e-9)
