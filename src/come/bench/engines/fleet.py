"""Cells that differ in corruptions, seeds, learning rates or thresholds only, run as streams of one `come.Fleet`.

The records are those of one cell after the other, within rounding. All cells of a bundle take their batches in step; one that
has no more left is done.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from come.bench.cell import Cell
from come.bench.data import Batch
from come.bench.engines import local
from come.bench.engines.cell_runner import CellRunner
from come.bench.engines.schedule import PAUSE, Finished, Schedule
from come.bench.machine import Meter
from come.bench.measure import CellRun, UnfitError
from come.bench.settings import get as get_setting
from come.errors import ComeError, ConfigError, InputError
from come.fleet import Fleet
from come.method import Step
from come.methods import get as get_method


def run(runner: CellRunner, schedule: Schedule, cells: Sequence[Cell], streams: int) -> None:
    """Run cells until all are settled, at most `streams` at once."""
    alone = set[str]()  # methods, and keys of cells, that were found not to run as streams of a fleet

    def is_alone(cell: Cell) -> bool:
        return cell.base in alone or cell.key in alone

    while cells:
        fitting = streams
        for bundle in bundles(cells, streams, is_alone):
            if len(bundle) == 1:
                local.run_claimed(runner, schedule, bundle)
                continue
            with ExitStack() as claims:
                mine = [cell for cell in bundle if claims.enter_context(schedule.claim(cell))]
                try:
                    if mine:
                        _run_bundle(runner, schedule, mine)
                except UnfitError as error:
                    for cell in mine:
                        schedule.refuse(cell, str(error))
                except (torch.cuda.OutOfMemoryError, MemoryError):
                    runner.release()
                    fitting = max(1, len(mine) // 2)
                except ConfigError as error:  # this method cannot
                    runner.release()
                    warnings.warn(f"one cell after the other: {error}", stacklevel=2)
                    alone.add(mine[0].base)
                except ComeError:
                    raise
                except Exception:  # of one of them: alone each says for itself
                    runner.release()
                    alone.update(cell.key for cell in mine)
        streams, left = fitting, schedule.open(cells)
        if len(left) == len(cells):
            schedule.listen(PAUSE)
        cells = left


def bundles(cells: Sequence[Cell], streams: int, is_alone: Callable[[Cell], bool]) -> Iterator[list[Cell]]:
    """The cells in parts of at most `streams` that can run together, each where its first one stands.

    Args:
        cells: in their order.
        streams: at most so many at once.
        is_alone: which cells are not to be put together.
    """
    left = list(cells)
    while left:
        first = left[0]
        key = None if streams == 1 or is_alone(first) else bundle_key(first)
        found = [first]
        if key is not None:
            found = [cell for cell in left if not is_alone(cell) and bundle_key(cell) == key][:streams]
        keys = {cell.key for cell in found}
        left = [cell for cell in left if cell.key not in keys]
        yield found


def bundle_key(cell: Cell) -> tuple[object, ...] | None:
    """The same for cells that can be streams of one fleet; None for one that cannot."""
    if get_method(cell.base).waits or get_setting(cell.setting).alone:
        return None
    return cell.base, cell.objective, cell.guarded, repr(sorted(_of_fleet(cell).items()))


def _of_stream(cell: Cell) -> dict[str, Any]:
    """What a stream can have of its own: learning rate, thresholds, seed."""
    method = get_method(cell.base)
    found = {name: value for name, value in cell.hyper.items() if name in ("lr", *method.by_stream)}
    return found | ({"seed": cell.seed} if "seed" in method.hyperparameters() else {})


def _of_fleet(cell: Cell) -> dict[str, Any]:
    """The other hyperparameters, which all streams have in common."""
    mine = _of_stream(cell)
    return {name: value for name, value in cell.hyper.items() if name not in mine}


def _run_bundle(runner: CellRunner, schedule: Schedule, cells: Sequence[Cell]) -> None:
    """Run claimed cells as streams of one fleet."""
    meter = Meter(runner.device, runner.jobs)
    fleet, events = runner.fleet_for(bundle_key(cells[0]), cells[0], _of_fleet(cells[0]))
    runs = dict[str, CellRun]()
    for cell in cells:
        runs[cell.key] = runner.open(cell)
        schedule.write_streams(runs[cell.key].streams)
        fleet.open(cell.key, **_of_stream(cell))
    schedule.progress.start_together(cells, sum(run.samples for run in runs.values()))
    _take_steps(runs, fleet, schedule.advance)
    for key, run in runs.items():
        mine = [event for event in events if event.details.get("stream") == key]
        lr = fleet.learning_rate(key, run.cell.batch_size)
        schedule.end(run.cell, Finished(*run.record(meter, fleet.health(key), mine, lr, len(runs)), run.streams))


def _take_steps(runs: Mapping[str, CellRun], fleet: Fleet, advance: Callable[[int], None]) -> None:
    """Take all batches of all cells; their streams are open and have not seen a batch."""
    left = {name: iter(run) for name, run in runs.items()}
    while left:
        now = dict[str, Batch]()
        for name, batches in list(left.items()):
            found = next(batches, None)
            if found is None:
                del left[name]
                continue
            now[name], fresh = found
            if fresh:
                fleet.reset(name)
        if not now:
            break
        sizes = [len(batch.labels) for batch in now.values()]
        names = [name for name, size in zip(now, sizes, strict=True) for _ in range(size)]
        try:
            step = fleet.step(torch.cat([batch.images for batch in now.values()]), names)
        except InputError as error:
            raise UnfitError(str(error)) from error
        columns = [[None] * len(sizes) if value is None else torch.split(value, sizes) for value in step]
        for (name, batch), part in zip(now.items(), zip(*columns, strict=True), strict=True):
            runs[name].add(Step(*part), batch)
            advance(len(batch.labels))
