"""What methods cost. Costs are compared only where the machine was the same and about as busy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from come.bench.record import Machine, Record

LOAD = 0.5  # largest difference in cores that other programs kept busy, between measurements that are compared


@dataclass(frozen=True)
class Cost:
    """What a method with an objective took, over all of its cells."""

    seconds_per_image: float  # without waiting for data
    seconds: float
    waiting: float  # seconds for data
    memory_mb: float
    used: float | None  # share of the samples that drove an update


def cost(records: Sequence[Record]) -> Cost:
    """The cost of these cells together."""
    results = [record.result for record in records]
    used = [metrics["used"] for r in results for metrics in r.metrics.values() if "used" in metrics]
    return Cost(
        sum(r.busy for r in results) / max(1, sum(r.samples for r in results)),
        sum(r.seconds for r in results),
        sum(r.seconds_waiting_for_data for r in results),
        max(r.peak_memory_mb for r in results),
        sum(used) / len(used) if used else None,
    )


def by_pair(records: Iterable[Record]) -> dict[tuple[str, str], list[Record]]:
    """The records of each method and objective."""
    groups: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        groups.setdefault(record.cell.pair, []).append(record)
    return groups


def unlike(groups: Iterable[Sequence[Record]]) -> str:
    """Why the costs of these groups of cells are not compared; empty if they can be."""
    groups = list(groups)
    machines = [record.machine for group in groups for record in group]
    for name, field in (
        ("devices", "device"),
        ("numbers of threads", "threads"),
        ("numbers of processes", "jobs"),
        ("numbers of cells at once", "streams"),
    ):
        if len(values := {str(getattr(machine, field)) for machine in machines}) > 1:
            return f"they ran on different {name}: {', '.join(sorted(values))}"
    loads = [_load(group) for group in groups]
    if loads and max(loads) - min(loads) > LOAD:
        return f"other programs kept {min(loads):.2f} cores busy during some of them and {max(loads):.2f} during others"
    return ""


def _load(group: Sequence[Record]) -> float:
    """Cores that others kept busy, on average over the time that the cells took."""
    seconds = sum(record.result.seconds for record in group)
    if not seconds:
        return max(record.machine.load for record in group)
    return sum(record.machine.load * record.result.seconds for record in group) / seconds


def threads(machine: Machine) -> str:
    """How much of the machine a cell was given, in words."""
    processes = f", {machine.jobs} processes at once" if machine.jobs > 1 else ""
    cells = f", {machine.streams} cells at once" if machine.streams > 1 else ""
    return f"{machine.threads} threads{processes}{cells}"


def unit_of_time(found: Mapping[tuple[str, str], Cost]) -> tuple[float, str]:
    """Seconds per image that count as one, and what to call it: the source's where it ran, else a millisecond."""
    source = next((cost.seconds_per_image for (method, _), cost in found.items() if method == "source"), 0.0)
    return (source, "time per image (source = 1)") if source else (1e-3, "time per image (ms)")
