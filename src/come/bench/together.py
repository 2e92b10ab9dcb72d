"""Cells that differ in corruptions, seeds, learning rates or thresholds only, run as streams of one `come.Fleet`.

The records are those of one cell after the other, within rounding. All cells of a bundle take their batches in step; one that
has no more left is done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from come.bench.cell import Cell, parse_method
from come.bench.data import Batch
from come.bench.machine import Meter
from come.bench.measure import Course, UnfitError
from come.bench.record import Record, Rows
from come.errors import InputError
from come.fleet import Fleet
from come.guard import Event
from come.method import Step
from come.methods import get as get_method

SAMPLES = 1024
"""Samples of all streams together that keep a GPU busy, whatever the model."""


def automatic_streams(device: torch.device, batch_size: int) -> int:
    """How many cells run at once where nobody says: on a GPU as many as make batches of 1,024; on a CPU it does not pay.

    >>> automatic_streams(torch.device("cuda"), 64), automatic_streams(torch.device("cpu"), 64)
    (16, 1)
    """
    return max(1, SAMPLES // batch_size) if device.type == "cuda" else 1


def given(cell: Cell) -> dict[str, Any]:
    """The hyperparameters of a cell, also those in the name of its method.

    >>> given(Cell(method="tent:lr=0.5", objective="em", hyper={"keep": 0.5}, size=1))
    {'lr': 0.5, 'keep': 0.5}
    """
    return parse_method(cell.method)[1] | cell.hyper


def own(cell: Cell) -> dict[str, Any]:
    """What a stream can have of its own: learning rate, thresholds, seed."""
    method = get_method(cell.base)
    found = {name: value for name, value in given(cell).items() if name in ("lr", *method.by_stream)}
    return found | ({"seed": cell.seed} if "seed" in method.hyperparameters() else {})


def bundle_key(cell: Cell) -> tuple[object, ...] | None:
    """The same for cells that can be streams of one fleet; None for a method that cannot."""
    if get_method(cell.base).waits:
        return None
    mine = own(cell)
    return (
        cell.base,
        cell.objective,
        cell.guarded,
        repr(sorted((k, v) for k, v in given(cell).items() if k not in mine)),
    )


def bundles(cells: Sequence[Cell], streams: int, alone: Callable[[Cell], bool]) -> Iterator[list[Cell]]:
    """The cells in parts of at most `streams` that can run together, each where its first one stands.

    Args:
        cells: in their order.
        streams: at most so many at once.
        alone: which cells are not to be put together.
    """
    left = list(cells)
    while left:
        first = left[0]
        key = None if streams == 1 or alone(first) else bundle_key(first)
        found = [first]
        if key is not None:
            found = [cell for cell in left if not alone(cell) and bundle_key(cell) == key][:streams]
        keys = {cell.key for cell in found}
        left = [cell for cell in left if cell.key not in keys]
        yield found


def run_together(
    courses: Mapping[str, Course],
    fleet: Fleet,
    meter: Meter,
    events: Sequence[Event],
    on_batch: Callable[[str, int], None],
) -> Iterator[tuple[str, Record, Rows]]:
    """Run cells as the streams of a fleet, which are open and have not seen a batch.

    Args:
        courses: the cells by the names of their streams.
        fleet: of all of them.
        meter: made when they began.
        events: where the guards report to.
        on_batch: called with the name of a stream and the number of samples done since the last call.

    Yields:
        the name, record and rows of each, at the end.
    """
    left = {name: iter(course) for name, course in courses.items()}
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
            courses[name].add(Step(*part), batch)
            on_batch(name, len(batch.labels))
    for name, course in courses.items():
        mine = [event for event in events if event.details.get("stream") == name]
        lr = fleet.learning_rate(name, course.cell.batch_size)
        yield name, *course.record(meter, fleet.health(name), mine, lr, together=len(courses))
