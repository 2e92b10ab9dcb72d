"""Cells in this process, one after the other."""

from __future__ import annotations

from collections.abc import Sequence

from come.bench.cell import Cell
from come.bench.engines.cell_runner import CellRunner
from come.bench.engines.schedule import PAUSE, Schedule


def run(runner: CellRunner, schedule: Schedule, cells: Sequence[Cell]) -> None:
    """Run cells until all are settled. Those that another process is running are left to it and waited for at the end."""
    while cells:
        run_claimed(runner, schedule, cells)
        left = schedule.open(cells)
        if len(left) == len(cells):
            schedule.listen(PAUSE)
        cells = left


def run_claimed(runner: CellRunner, schedule: Schedule, cells: Sequence[Cell]) -> None:
    """Run those that nobody has run or is running."""
    for cell in cells:
        schedule.listen(0)
        with schedule.claim(cell) as mine:
            if mine:
                schedule.end(cell, runner.attempt(cell, schedule.start, schedule.advance))
