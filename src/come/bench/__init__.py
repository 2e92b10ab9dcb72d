"""Measure adaptation: a plan expands into cells, each cell becomes a record with its rows, all of it resumable."""

from come.bench.cell import Cell, run_cell
from come.bench.plan import PRESETS, Plan
from come.bench.runner import Bench, run
from come.bench.store import Record, RunFolder

__all__ = ["PRESETS", "Bench", "Cell", "Plan", "Record", "RunFolder", "run", "run_cell"]
