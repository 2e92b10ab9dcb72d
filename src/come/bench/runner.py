"""Run a plan: one cell after the other, skipping what is done, losing at most the cell in flight."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch

from come.adapter import Adapter, adapt
from come.bench import models
from come.bench.cell import Cell, UnfitError, run_cell, surroundings
from come.bench.data import Geometry, Source, open_source
from come.bench.data.sources import OnBadImage
from come.bench.data.streams import OUTLIER, Stream
from come.bench.plan import Plan
from come.bench.settings import Episode
from come.bench.store import Record, RunFolder
from come.errors import InputError, ModelError
from come.guard import Event, Guard
from come.methods import get as get_method


class Progress:
    """What a runner tells whoever watches; this one watches nothing. Subclass it to show something."""

    def start(self, cell: Cell, samples: int) -> None:
        """A cell begins."""

    def advance(self, samples: int) -> None:
        """Some samples of it are done."""

    def finish(self, cell: Cell, record: Record, resumed: bool) -> None:
        """It is done, now or in an earlier run."""

    def refuse(self, cell: Cell, reason: str) -> None:
        """The method cannot be run on this model or stream; the others can."""


class _Made(NamedTuple):
    """An adapter that several cells use, one after the other."""

    key: tuple[str, str, str, int | None]
    """`Cell.adapter`."""
    adapter: Adapter
    first: dict[str, torch.Tensor]
    """Its state when it was made."""
    events: list[Event]
    """What its guard reports."""


@dataclass
class Bench:
    """A plan with its model and data at hand, ready to run.

    Args:
        plan: what to run.
        device: where.
        workers: processes that decode images.
        on_bad_image: "raise" or "skip".
        source: a source to use in place of opening `plan.data` (any torch Dataset, through `come.bench.data.DatasetSource`).
        model: a model to use in place of loading `plan.model`.
        streams: manifests to replay in place of the setting's own streams.
    """

    plan: Plan
    device: str = "cpu"
    workers: int = 0
    on_bad_image: OnBadImage = "raise"
    source: Source | None = None
    model: models.Model | None = None
    streams: list[Stream] | None = None

    def __post_init__(self) -> None:
        try:
            self._device = torch.device(self.device)
            torch.empty(0, device=self._device)
        except (RuntimeError, AssertionError) as error:
            raise InputError(
                f"device {self.device!r} cannot be used here ({str(error).splitlines()[0]}); use cpu, or cuda on a GPU machine"
            ) from error
        plan = self.plan
        self._model = self.model or models.load(
            plan.model, checkpoint=plan.checkpoint, normalization=plan.normalization
        )
        self._model.module.to(self._device)
        preprocess = self._model.preprocess
        self._geometry = Geometry(preprocess.size, preprocess.resize, preprocess.interpolation)
        self._source = self.source or open_source(plan.data, self._geometry, self.on_bad_image)
        if self._source.num_classes != self._model.num_classes:
            raise InputError(
                f"{self._source.name} has {self._source.num_classes} classes, {self._model.name} has "
                f"{self._model.num_classes}; choose a model and data that belong together"
            )
        held = self._source.holds
        shifts = plan.corruptions or ()
        if held is not None and not shifts:
            raise InputError(
                f"{self._source.name} holds corrupted images only; the {plan.setting} setting needs clean ones: folder:PATH"
            )
        missing = [] if held is None else [name for name in shifts if name not in held]
        if missing:
            raise InputError(
                f"{self._source.name} does not hold {', '.join(missing)}; it holds {', '.join(held or ())}"
            )
        replay = None
        if self.streams:
            replay = hashlib.sha256(repr(sorted(self.streams, key=repr)).encode()).hexdigest()[:16]
        self.cells: list[Cell] = [replace(cell, replay=replay) for cell in plan.cells(len(self._source))]
        for stream in self.streams or []:
            last = max((i for p, i in enumerate(stream.order) if stream.kind(p) != OUTLIER), default=0)
            if stream.data != plan.data or last >= len(self._source):
                raise InputError(
                    f"the stream is of {stream.data!r} up to index {last}, the data is {plan.data!r} "
                    f"with {len(self._source)} samples; replay it on the data it was made from"
                )
        self._outliers: dict[str, Source] = {}
        self.refused: dict[str, tuple[Cell, str]] = {}
        """Cells that could not be run, by key, and why."""
        self._made: _Made | None = None

    def run(self, folder: RunFolder, progress: Progress | None = None, *, fresh: bool = False) -> list[Record]:
        """Run what is not done, and return the records of all cells in the plan's order.

        Cells that another process is working on are left to it and waited for at the end.
        """
        progress = progress or Progress()
        done: dict[str, Record] = {}
        waiting = self.cells
        try:
            while waiting:
                later = [cell for cell in waiting if not self._try(cell, folder, progress, done, fresh)]
                if len(later) == len(waiting):
                    time.sleep(0.5)
                waiting = later
        finally:
            self.release()
        if not done and self.refused:
            raise InputError(next(iter(self.refused.values()))[1])
        return [done[cell.key] for cell in self.cells if cell.key in done]

    def release(self) -> None:
        """Close the adapter."""
        if self._made is not None:
            self._made.adapter.close()
            self._made = None

    def _try(self, cell: Cell, folder: RunFolder, progress: Progress, done: dict[str, Record], fresh: bool) -> bool:
        record = None if fresh else folder.record(cell)
        resumed = record is not None
        if record is None:
            with folder.claim(cell) as mine:
                if not mine:
                    return False
                record = None if fresh else folder.record(cell)  # another process may have finished it just now
                resumed = record is not None
                try:
                    record = record or self._run(cell, folder, progress)
                except UnfitError as error:
                    self.refused[cell.key] = (cell, str(error))
                    progress.refuse(cell, str(error))
                    return True
        done[cell.key] = record
        progress.finish(cell, record, resumed)
        return True

    def _run(self, cell: Cell, folder: RunFolder, progress: Progress) -> Record:
        outliers = self._outlier_source(cell.outliers)
        episodes = self._replayed(cell) if self.streams else cell.episodes(self._source, outliers)
        outliers = outliers or self._outlier_source(next((e.stream.outliers for e in episodes), None))
        for episode in episodes:
            folder.write_stream(episode.stream)
        progress.start(cell, sum(len(episode.stream) for episode in episodes))
        made = self._make(cell)
        rows, result = run_cell(
            cell,
            made.adapter,
            self._model,
            self._source,
            device=self._device,
            workers=self.workers,
            episodes=episodes,
            outliers=outliers,
            events=made.events,
            on_batch=progress.advance,
        )
        return folder.write(cell, rows, result, surroundings(self._device))

    def _replayed(self, cell: Cell) -> list[Episode]:
        chosen = [
            Episode(s, reset=True)
            for s in self.streams or []
            if {name for name, _ in s.shifts} & set(cell.corruptions) and s.seed == cell.seed
        ]
        if not chosen:
            raise InputError(f"no stream was given for {', '.join(cell.corruptions)} with seed {cell.seed}")
        return chosen

    def _make(self, cell: Cell) -> _Made:
        """The adapter for a cell: the last one, as it was when it was made, if it fits; EATA's Fisher matrix costs."""
        if self._made is not None and self._made.key != cell.adapter:
            self.release()
        if self._made is None:
            arguments, known = dict(cell.hyper), get_method(cell.base).hyperparameters()
            if "source" in known:
                arguments["source"] = list(self._source_batches(cell))
            if "normalization" in known:
                arguments["normalization"] = (self._model.preprocess.mean, self._model.preprocess.std)
            if "seed" in known:
                arguments["seed"] = cell.seed
            events: list[Event] = []
            guard = cell.guard and Guard(on_event=events.append)
            try:
                adapter = adapt(self._model.module, cell.base, objective=cell.objective, guard=guard, **arguments)
            except ModelError as error:
                raise UnfitError(str(error)) from error
            self._made = _Made(cell.adapter, adapter, adapter.state_dict(), events)
        else:
            # A reset would keep the guard's counters, and report what happened in the last batches of the cell before.
            self._made.adapter.load_state_dict(self._made.first)
            self._made.events.clear()
        return self._made

    def _outlier_source(self, spec: str | None) -> Source | None:
        if spec is None:
            return None
        if spec not in self._outliers:
            self._outliers[spec] = open_source(spec, self._geometry, self.on_bad_image)
        return self._outliers[spec]

    def _source_batches(self, cell: Cell) -> Iterable[torch.Tensor]:
        clean = open_source(cell.source_data, self._geometry, self.on_bad_image) if cell.source_data else self._source
        for images in torch.split(clean.source_images(cell.source_size), 64):
            yield self._model.preprocess(images.to(self._device))


def run(
    plan: Plan,
    out: str | Path,
    *,
    device: str = "cpu",
    workers: int = 0,
    source: Source | None = None,
    model: models.Model | None = None,
    progress: Progress | None = None,
) -> list[Record]:
    """Run a plan from Python and return its records.

    Args:
        plan: what to run.
        out: the run folder; what is done there is not run again.
        device: where to run.
        workers: processes that decode images.
        source: your own data, e.g. `come.bench.data.DatasetSource(dataset, num_classes=10, name="mine")`.
        model: your own model, `come.bench.models.Model(name, module, preprocess, num_classes)`.
        progress: who watches.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     records = run(Plan(methods=("source",), corruptions=("fog",), limit=64), folder)
        >>> records[0].result["samples"]
        64
    """
    return Bench(plan, device=device, workers=workers, source=source, model=model).run(RunFolder(out), progress)
