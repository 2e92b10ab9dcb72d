"""Measure adaptation: a plan expands into cells, each cell becomes a record with its rows, all of it resumable.

Everything in this package needs the extra: `pip install -e ".[bench]"`, in a clone of the repository.
"""

from come.bench.cell import Cell
from come.bench.folder import RunFolder
from come.bench.plan import PRESETS, Plan
from come.bench.record import Record
from come.bench.runner import Bench, run

__all__ = ["PRESETS", "Bench", "Cell", "Plan", "Record", "RunFolder", "run"]
