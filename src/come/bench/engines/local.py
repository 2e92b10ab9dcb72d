"""Cells in this process: one after the other, or several at once as streams of one `come.Fleet`.

Cells that differ in corruptions, seeds, learning rates or thresholds only can be streams of one fleet. Their records are those
of one cell after the other, within rounding. All cells of a bundle take their batches in step; one that has no more left is
done.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from come.bench.cell import Cell
from come.bench.data import Batch
from come.bench.engines.cell_runner import CellRunner
from come.bench.engines.schedule import PAUSE, Finished, Schedule
from come.bench.machine import Meter
from come.bench.measure import CellRun, UnfitError
from come.bench.settings import get as get_setting
from come.errors import ComeError, ConfigError, InputError
from come.method import Step
from come.methods import get as get_method


def run(runner: CellRunner, schedule: Schedule, cells: Sequence[Cell], streams: int = 1) -> None:
    """Run cells until all are settled, at most `streams` at once.

    Those that another process is running are left to it and waited for at the end.
    """
    alone = set[str]()  # methods, and keys of cells, that were found not to run as streams of a fleet

    def is_alone(cell: Cell) -> bool:
        return cell.base in alone or cell.key in alone

    while cells:
        fitting = streams
        for bundle in bundles(cells, streams, is_alone):
            if len(bundle) == 1:
                run_claimed(runner, schedule, bundle)
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


def run_claimed(runner: CellRunner, schedule: Schedule, cells: Sequence[Cell]) -> None:
    """Run those that nobody has run or is running, one after the other."""
    for cell in cells:
        schedule.listen(0)
        with schedule.claim(cell) as mine:
            if mine:
                schedule.end(cell, runner.attempt(cell, schedule.start, schedule.advance))


def bundles(cells: Sequence[Cell], streams: int, is_alone: Callable[[Cell], bool]) -> Iterator[list[Cell]]:
    """The cells in parts of at most `streams` that can run together, each where its first one stands.

    Cells of which `is_alone` is true are not put together with others.
    """
    left = {cell.key: cell for cell in cells}
    for first in cells:
        if first.key not in left:
            continue
        found, key = [first], None if streams == 1 or is_alone(first) else _bundle_key(first)
        if key is not None:
            found = [cell for cell in left.values() if not is_alone(cell) and _bundle_key(cell) == key][:streams]
        for cell in found:
            del left[cell.key]
        yield found


def _bundle_key(cell: Cell) -> tuple[object, ...] | None:
    """The same for cells that can be streams of one fleet; None for one that cannot."""
    if get_method(cell.base).waits or get_setting(cell.setting).alone:
        return None
    return cell.base, cell.objective, cell.guarded, repr(sorted(_shares(cell)[0].items()))


def _shares(cell: Cell) -> tuple[dict[str, Any], dict[str, Any]]:
    """Hyperparameters that all streams of a fleet have in common, and a stream's own: learning rate, thresholds, seed."""
    method = get_method(cell.base)
    own = {name: value for name, value in cell.hyper.items() if name in ("lr", *method.by_stream)}
    common = {name: value for name, value in cell.hyper.items() if name not in own}
    return common, own | ({"seed": cell.seed} if "seed" in method.hyperparameters() else {})


def _run_bundle(runner: CellRunner, schedule: Schedule, cells: Sequence[Cell]) -> None:
    """Run claimed cells as streams of one fleet."""
    meter = Meter(runner.device, runner.jobs)
    fleet, events = runner.fleet_for(_bundle_key(cells[0]), cells[0], _shares(cells[0])[0])
    runs = {cell.key: runner.open(cell) for cell in cells}
    for key, run in runs.items():
        schedule.write_streams(run.streams)
        fleet.open(key, **_shares(run.cell)[1])
    schedule.progress.start_together(cells, sum(run.samples for run in runs.values()))
    for names, now in _in_step(runs):
        for name in names:
            fleet.reset(name)
        sizes = [len(batch.labels) for batch in now.values()]
        streams = [name for name, size in zip(now, sizes, strict=True) for _ in range(size)]
        try:
            step = fleet.step(torch.cat([batch.images for batch in now.values()]), streams)
        except InputError as error:
            raise UnfitError(str(error)) from error
        columns = [[None] * len(sizes) if value is None else torch.split(value, sizes) for value in step]
        for (name, batch), part in zip(now.items(), zip(*columns, strict=True), strict=True):
            runs[name].add(Step(*part), batch)
            schedule.advance(len(batch.labels))
    for key, run in runs.items():
        mine = [event for event in events if event.details.get("stream") == key]
        lr = fleet.learning_rate(key, run.cell.batch_size)
        schedule.end(run.cell, Finished(*run.record(meter, fleet.health(key), mine, lr, len(runs)), run.streams))


def _in_step(runs: dict[str, CellRun]) -> Iterator[tuple[list[str], dict[str, Batch]]]:
    """The next batch of each cell that has one left, and which of the cells are to be reset before it."""
    left = {name: iter(run) for name, run in runs.items()}
    while now := {name: found for name, batches in left.items() if (found := next(batches, None)) is not None}:
        left = {name: left[name] for name in now}
        yield [name for name, (_, fresh) in now.items() if fresh], {name: batch for name, (batch, _) in now.items()}
