"""Run a plan: check everything, then its cells, skipping what is done, losing at most those in flight."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from come.bench import models
from come.bench.cell import Cell
from come.bench.cluster import Cluster
from come.bench.data import OnBadImage, Source, Stream
from come.bench.engines import local, processes
from come.bench.engines import ray as ray_engine
from come.bench.engines.cell_runner import CellRunner, usable_device
from come.bench.engines.progress import Progress
from come.bench.engines.schedule import Schedule
from come.bench.engines.workload import automatic_jobs, automatic_streams, shard_of
from come.bench.folder import RunFolder, check_space
from come.bench.inputs import Inputs
from come.bench.plan import Plan
from come.bench.protocols import Outcome, Protocol
from come.bench.record import Failure, Record
from come.errors import ConfigError, InputError, require, require_int

__all__ = ["Bench", "Progress", "run"]

MOST_WORKERS = 256  # threads that decode images


class Bench:
    """A plan with its model and data at hand, checked and ready to run.

    Args:
        plan: what to run.
        device: where.
        workers: threads that decode images; by default none for the embedded data and your own, else up to 4.
        on_bad_image: "raise" or "skip".
        source: a source to use in place of opening `plan.data` (any torch Dataset, through `come.bench.data.DatasetSource`).
        model: a model to use in place of loading `plan.model`.
        streams: manifests to replay in place of the setting's own streams.
        jobs: processes that run cells at once, see `automatic_jobs` for None. More than one need a main module that can be
            imported, as always in Python where processes are started.
        together: cells that run at once as streams of one fleet, where they differ in corruptions, seeds, rates or thresholds
            only; None for as many as keep a GPU busy. The same numbers within rounding. More than one run in this process.
        shard: (i, n) runs the i-th of n parts of the plan, counted from 0, about as much work each. Processes that run the
            other parts may use the same folder at the same time, on this machine or on others.
        cluster: run cells with Ray, see `come.bench.cluster.Cluster`; `jobs` is then the number of workers, None for as many
            as there is room for, and the device is theirs.
        protocol: check weights and images by it, and run No Adapt first: if that misses its number, nothing is adapted. The
            plan is that of `Protocol.plan_for`.

    Raises:
        ComeError: the device, the model, its checkpoint, the data, the outliers or the source images cannot be used, they do
            not belong together, or no method of the plan can be run on this model.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        device: str = "cpu",
        workers: int | None = None,
        on_bad_image: OnBadImage = "raise",
        source: Source | None = None,
        model: models.Model | None = None,
        streams: Sequence[Stream] = (),
        jobs: int | None = 1,
        together: int | None = 1,
        shard: tuple[int, int] = (0, 1),
        cluster: Cluster | None = None,
        protocol: Protocol | None = None,
    ) -> None:
        self.plan, self.protocol = plan, protocol
        self._cluster, self._cluster_device = cluster, device

        # Options that need neither model nor data
        require(0 <= shard[0] < shard[1], "shard", shard, "(i, n) with 0 <= i < n")
        loaders = _decoding_threads(
            workers, source is not None or plan.data.partition(":")[0] in ("fashion", "scenes"), cluster
        )
        if cluster is not None:
            jobs = cluster.connect(device, jobs)
            device = device if device != "cuda" or torch.cuda.is_available() else "cpu"  # for the checks
        here = usable_device(device)

        # Model and data
        self.inputs = Inputs(
            plan, here, on_bad_image=on_bad_image, source=source, model=model, streams=streams, protocol=protocol
        )
        self.inputs.check()
        self._runner = CellRunner(self.inputs, here, loaders)

        # Cells
        self.planned = self.inputs.cells()
        self.inputs.check_domains(self.planned)
        self.refused = self._runner.check_methods(self.planned)
        """Methods that cannot be run on this model or these streams, and why."""
        others = [cell for cell in self.planned if not self._is_first(cell)]
        self.cells = [*filter(self._is_first, self.planned), *shard_of(others, *shard)]
        """Those of `planned`, all cells of the plan, that are in this shard."""
        self.failed: list[Failure] = []  # cells that failed in the last run, and why

        # Who runs them
        self._choose_engine(jobs, together, here)
        if cluster is None:
            self.inputs.keep_images(here, for_others=self.jobs > 1)
        else:
            self.inputs.model.module.to("cpu")

    def _choose_engine(self, jobs: int | None, together: int | None, device: torch.device) -> None:
        if self._cluster is not None and together != 1:
            raise ConfigError(f"together ({together or 'auto'}) cannot be used with a Ray cluster; leave one out")
        self.together = automatic_streams(device, self.plan.batch_size) if together is None else together
        require_int("together", self.together, 1)
        if self.together > 1:
            if (jobs or 1) > 1:
                raise ConfigError(
                    f"together ({self.together}) and jobs ({jobs}) are two ways to run cells at once; choose one"
                )
            jobs = 1
        self.jobs = automatic_jobs(self.inputs.model.module, device, self.cells) if jobs is None else jobs
        require_int("jobs", self.jobs, 1)

    def doubt(self) -> str:
        """Why the model may not fit the data: without adaptation it is near chance on a few images; else empty.

        Nobody looks at the embedded data, nor where a protocol checks No Adapt by its number.
        """
        if self.inputs.is_embedded or self.protocol is not None:
            return ""
        device = self._runner.device if self._cluster is None else torch.device("cpu")
        return self.inputs.doubt(self.cells[0], device)

    def run(self, folder: RunFolder, progress: Progress | None = None, *, fresh: bool = False) -> list[Record]:
        """Run what is not done, and return the records of all cells in the plan's order.

        Cells that another process is working on are left to it and waited for at the end. A cell that fails is noted in
        `failed` and in the folder, stops no other, and is tried again in the next run. Errors that concern all cells are
        raised: a folder that cannot be written, data that cannot be read.
        """
        progress, waiting = progress or Progress(), list[Cell]()
        for cell in self.cells:
            if cell.method in self.refused:
                progress.refuse(cell, self.refused[cell.method])
            else:
                waiting.append(cell)
        check_space(folder.path, waiting)
        old = [folder.failure_file(cell.key) for cell in waiting]
        old += [folder.file(cell.key) for cell in waiting if fresh or folder.is_damaged(cell)]
        ignored = {path: stamp for path in old if (stamp := folder.stamp(path)) is not None}
        schedule = Schedule(folder, progress, ignored, self.refused)
        if any(schedule.record(cell) is None for cell in waiting) and (doubt := self.doubt()):
            progress.doubt(doubt)
        if self.protocol is not None:
            firsts = [cell for cell in waiting if self._is_first(cell)]
            self._run_all(firsts, schedule)
            self._require_met(self.protocol, firsts, schedule)
        self._run_all([cell for cell in waiting if not self._is_first(cell)], schedule)
        self.failed = schedule.failed
        if self.cells and not schedule.done and not self.failed and self.refused:
            raise InputError(next(iter(self.refused.values())))
        return [schedule.done[cell.key] for cell in self.cells if cell.key in schedule.done]

    def _run_all(self, cells: Sequence[Cell], schedule: Schedule) -> None:
        left, runner = schedule.open(cells), self._runner
        count = min(self.jobs, len(left))
        if self._cluster is not None:
            if left:
                ray_engine.run(runner, schedule, left, self._cluster, count, self._cluster_device)
            return
        try:
            if count > 1:
                processes.run(runner, schedule, left, count)
            else:
                local.run(runner, schedule, left, self.together)
        finally:
            runner.release()

    def _is_first(self, cell: Cell) -> bool:
        """Whether a cell comes before all others, in every shard: No Adapt of a protocol."""
        return self.protocol is not None and cell.base == "source"

    def _require_met(self, protocol: Protocol, firsts: Sequence[Cell], schedule: Schedule) -> None:
        """Keep what No Adapt reached; raise `InputError` if that is not the protocol's number."""
        found = [schedule.done[cell.key] for cell in firsts if cell.key in schedule.done]
        if not found or len(found) < len(firsts):
            why = (*schedule.failed, *self.refused.values(), "it is not among the methods")[0]
            raise InputError(f"No Adapt could not be run, so nothing was adapted: {why}")
        outcome = Outcome.of(protocol, self.inputs.weights_sha256, found, self.inputs.images_sha256)
        schedule.folder.write_outcome(outcome)
        outcome.require(self.plan.data)
        schedule.progress.meet(outcome)


def _decoding_threads(workers: int | None, in_memory: bool, cluster: Cluster | None) -> int:
    """How many threads decode images."""
    cores = os.cpu_count() or 1 if cluster is None else int(cluster.cpus) - 1
    found = workers if workers is not None else 0 if in_memory else max(0, min(4, cores))
    require_int("workers", found, 0)
    if found > MOST_WORKERS:
        raise ConfigError(f"workers must be an integer from 0 to {MOST_WORKERS}, got {workers}")
    return found


def run(plan: Plan, out: str | Path, *, progress: Progress | None = None, **options: Any) -> list[Record]:
    """Run a plan from Python and return its records.

    Args:
        plan: what to run.
        out: the run folder; what is done there is not run again.
        progress: who watches.
        options: arguments of `Bench`, such as your own data: `source=DatasetSource(dataset, num_classes=10, name="mine")`,
            or model: `model=Model(name, module, preprocess, num_classes)`.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     records = run(Plan(methods=("source",), corruptions=("fog",), limit=64), folder)
        >>> records[0].result.samples
        64
    """
    bench = Bench(plan, **options)
    records = bench.run(RunFolder(out), progress)
    if bench.failed:
        more = f" ({len(bench.failed)} cells failed; this is the first)" if len(bench.failed) > 1 else ""
        warnings.warn(f"failed: {bench.failed[0]}{more}; run again to try again", stacklevel=2)
    return records
