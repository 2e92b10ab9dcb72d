"""Runs cells in this process, and keeps the adapter of one for the next."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from come.adapter import Adapter, adapt
from come.bench.cell import Cell
from come.bench.engines.schedule import Ending, Finished, Refused
from come.bench.engines.workload import adapter_key
from come.bench.inputs import Inputs
from come.bench.machine import ALONE, Jobs, Meter
from come.bench.measure import CellRun, UnfitError
from come.bench.record import Failure
from come.bench.settings import get as get_setting
from come.episodic import Episodic
from come.errors import ComeError, InputError, ModelError, one_line
from come.fleet import Fleet
from come.guard import Event, Guard
from come.methods import get as get_method
from come.model.copies import ModelCopies

FEW = 2**26  # bytes of source images that are kept for the next method that asks for them


class _Kept(NamedTuple):
    """An adapter or a fleet that several cells use, one after the other."""

    key: object
    made: Any
    events: list[Event]  # what its guards report
    first: dict[str, Tensor]  # the state of the adapter when it was made


class CellRunner:
    """Runs cells with the model and data of a plan, which `workers` threads decode. A copy runs cells in another process."""

    def __init__(self, inputs: Inputs, device: torch.device, workers: int) -> None:
        self.inputs, self.device, self.workers = inputs, device, workers
        self.jobs = ALONE
        self.is_helper = False  # whether other processes run the cells that this one cannot for want of memory
        self._kept: _Kept | None = None
        self._copies: ModelCopies | None = None
        self._source_images: Tensor | None = None

    def __getstate__(self) -> dict[str, Any]:
        """For another process, which makes adapters of its own."""
        return vars(self) | {"_kept": None, "_copies": None, "_source_images": None}

    def move_to(self, device: str, jobs: Jobs) -> None:
        """Get ready in a worker of a cluster: the model on its device, and the data looked at."""
        self.device, self.jobs = usable_device(device), jobs
        self.inputs.model.module.to(self.device)
        self.inputs.check_readable()
        self.inputs.keep_images(self.device)

    def check_methods(self, cells: Sequence[Cell]) -> dict[str, str]:
        """Which methods cannot be run, and why, found by making each once and showing it a batch; not all of them may."""
        preprocess, plan = self.inputs.model.preprocess, self.inputs.plan
        sizes = ((len(e.stream), e.batch_size or plan.batch_size) for e in self.inputs.episodes(cells[-1]))
        smallest = min(min(size, length % size or size, length) for length, size in sizes)
        side, pixels = preprocess.size, torch.Generator().manual_seed(0)
        images = torch.randint(256, (max(smallest, 2), 3, side, side), generator=pixels, dtype=torch.uint8)
        batch = preprocess(images.to(self.device))
        refused: dict[str, str] = {}
        for cell in {cell.method: cell for cell in cells}.values():
            try:
                self._make(adapt, cell, cell.hyper, False, [batch[:2]]).check(batch[:smallest])
            except (ModelError, InputError) as error:
                refused[cell.method] = str(error)
        if len(refused) == len(plan.methods):
            raise InputError(next(iter(refused.values())))
        return refused

    def open(self, cell: Cell) -> CellRun:
        """A cell that is about to run, with its streams."""
        return CellRun(cell, self.inputs, self.device, self.workers)

    def measure(self, cell: Cell, start: Callable[[CellRun], None], advance: Callable[[int], None]) -> Finished:
        """Run a cell and write nothing; `start` is told when it begins, `advance` how many more samples are done."""
        run = self.open(cell)
        start(run)
        adapter, events = self._adapter_for(cell)
        meter, stepper = Meter(self.device, self.jobs), self._stepper(cell, adapter)
        for batch, fresh in run:
            if fresh:
                adapter.reset()
            try:
                step = stepper.step(batch.images)
            except InputError as error:
                raise UnfitError(str(error)) from error
            run.add(step, batch)
            advance(len(batch.labels))
        size = stepper.views if isinstance(stepper, Episodic) else cell.batch_size
        lr = adapter.learning_rate(size) if adapter.method.descends else None
        return Finished(*run.record(meter, adapter.health(), events, lr), run.streams)

    def _stepper(self, cell: Cell, adapter: Adapter) -> Adapter | Episodic:
        """The adapter, or what shows it views of one image at a time."""
        if not get_setting(cell.setting).alone:
            return adapter
        normalization = self.inputs.model.preprocess.normalization
        return Episodic(adapter, cell.views or Episodic.views, normalization, seed=cell.seed)

    def attempt(self, cell: Cell, start: Callable[[CellRun], None], advance: Callable[[int], None]) -> Ending:
        """Run a cell and say how that ended; errors that concern all cells are raised: of the data, or the folder."""
        try:
            return self.measure(cell, start, advance)
        except UnfitError as error:
            return Refused(str(error))
        except ComeError:
            raise
        except Exception as error:
            self.release()
            if self.is_helper and isinstance(error, (MemoryError, torch.cuda.OutOfMemoryError)):
                raise  # with one process less, the others may have room for the cell
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)  # after some errors a GPU answers no more
            return Failure.of(cell, error)

    def release(self) -> None:
        """Close the adapter or the fleet."""
        self._copies = ModelCopies.of(self.inputs.model.module)  # what was compiled is for the next one, too
        if self._kept is not None:
            self._kept.made.close()
            self._kept = None

    def fleet_for(self, key: object, cell: Cell, shared: dict[str, Any]) -> tuple[Fleet, list[Event]]:
        """A fleet without streams for cells with that key and these hyperparameters, and what its guards report."""
        kept = self._keep(("fleet", key), cell, Fleet, shared)
        for name in kept.made.streams:
            kept.made.close(name)
        kept.events.clear()
        return kept.made, kept.events

    def _adapter_for(self, cell: Cell) -> tuple[Adapter, list[Event]]:
        """The adapter of a cell: the last one in its first state, if it fits; EATA's Fisher matrix costs."""
        last = self._kept
        kept = self._keep(("adapter", adapter_key(cell)), cell, adapt, cell.hyper)
        if kept is last:
            # A reset would keep the guard's counters, and report what happened in the last batches of the cell before.
            kept.made.load_state_dict(kept.first)
            kept.events.clear()
        return kept.made, kept.events

    def _keep(self, key: object, cell: Cell, kind: Callable[..., Any], hyper: Mapping[str, Any]) -> _Kept:
        """What was made last if it has that key, else an adapter or a fleet with these hyperparameters."""
        if self._kept is not None and self._kept.key != key:
            self.release()
        if self._kept is None:
            events: list[Event] = []
            try:
                guard = cell.guarded and Guard(on_event=events.append)
                made = self._make(kind, cell, hyper, guard, self._source_batches())
            except ModelError as error:
                raise UnfitError(str(error)) from error
            self._kept = _Kept(key, made, events, made.state_dict() if isinstance(made, Adapter) else {})
        return self._kept

    def _make(
        self,
        kind: Callable[..., Any],
        cell: Cell,
        hyper: Mapping[str, Any],
        guard: bool | Guard,
        source: Iterable[Tensor],
    ) -> Any:
        offered = {
            "source": source,
            "normalization": self.inputs.model.preprocess.normalization,
            "seed": cell.seed,
            "statistics": cell.statistics,
        }
        known = get_method(cell.base).hyperparameters()
        found = {name: value for name, value in offered.items() if name in known and value is not None}
        for name in ("precision", "compile", "channels_last"):
            if (value := getattr(cell, name)) != Cell.model_fields[name].default:
                found[name] = value
        model = self.inputs.model.module
        return kind(model, cell.base, objective=cell.objective, guard=guard, **(found | dict(hyper)))

    def _source_batches(self) -> Iterator[Tensor]:
        found = self._source_images
        if found is None:
            assert self.inputs.clean is not None
            found = self.inputs.clean.source_images(self.inputs.plan.source_size)
            self._source_images = found if found.numel() <= FEW else None
        for images in torch.split(found, 64):
            yield self.inputs.model.preprocess(images.to(self.device))


def usable_device(name: str) -> torch.device:
    """The device of that name, or an `InputError` if there is none."""
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise InputError(
            f"device {name!r} cannot be used here ({one_line(error, first=True)}); use cpu, or cuda on a GPU machine"
        ) from error
    return device
