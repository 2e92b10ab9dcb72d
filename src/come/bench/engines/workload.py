"""How much work a cell is, who takes which first, and how many processes or streams pay."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

import psutil
import torch
from torch import nn

from come.bench.cell import Cell
from come.methods import get as get_method

SMALL = 5_000_000  # parameters of a model that leaves a core or a GPU idle now and then
WORTH = {"cpu": 20_000, "cuda": 1_000_000}
"""Forward passes of a sample that are worth a process of their own, which takes seconds to start."""
SAMPLES = 1024  # samples of all streams together that keep a GPU busy, whatever the model


def effort(cell: Cell) -> int:
    """How much work a sample is, roughly: a backward pass takes as long as two forward passes.

    >>> effort(Cell(method="sar", objective="em", size=1))
    6
    """
    parts = re.findall(r"(\d+)(?:-\d+)?([fb])", get_method(cell.base).cost)
    return sum(int(count) * {"f": 1, "b": 2}[kind] for count, kind in parts) or 1


def work(cells: Sequence[Cell]) -> int:
    """Of several cells, in forward passes of a sample."""
    return sum(cell.samples * effort(cell) for cell in cells)


def shard_of(cells: Sequence[Cell], number: int, count: int) -> list[Cell]:
    """Part `number` of `count`: all cells, the longest first, are dealt out in turn. It follows from the plan alone."""
    longest = sorted(cells, key=lambda cell: -work([cell]))
    mine = {cell.key for cell in longest[number::count]}
    return [cell for cell in cells if cell.key in mine]


def order_for(cells: Sequence[Cell], number: int, count: int) -> list[Cell]:
    """The cells in the order of process `number`: those of its own adapters, the longest first, then what others leave."""
    groups: dict[object, list[Cell]] = {}
    for cell in cells:
        groups.setdefault(adapter_key(cell), []).append(cell)
    longest = sorted(groups.values(), key=lambda group: -work(group))
    own = [cell for group in longest[number::count] for cell in group]
    others = [cell for i, group in enumerate(longest) if i % count != number for cell in group]
    return own + others[::-1]


def adapter_key(cell: Cell) -> tuple[object, ...]:
    """The same for cells that can share an adapter."""
    seed = cell.seed if "seed" in get_method(cell.base).hyperparameters() else None
    return (*cell.pair, repr(sorted(cell.hyper.items())), seed)


def automatic_jobs(model: nn.Module, device: torch.device, cells: Sequence[Cell]) -> int:
    """How many processes run cells at once by default: several for a small model that has enough to do.

    On the CPU as many as torch would use threads, since a small model gains little from a second thread; on a GPU, which one
    process keeps waiting, up to four, with 4 GB of its memory and two cores for each.
    """
    if device.type not in WORTH or sum(p.numel() for p in model.parameters()) > SMALL:
        return 1
    most = min(work(cells) // WORTH[device.type], psutil.virtual_memory().available // 2**31)
    if device.type == "cpu":
        most = min(most, torch.get_num_threads())
    else:
        most = min(most, 4, (os.cpu_count() or 1) // 2, torch.cuda.mem_get_info(device)[0] // 2**32)
    return max(1, int(most))


def automatic_streams(device: torch.device, batch_size: int) -> int:
    """How many cells run at once as streams by default: on a GPU as many as make batches of 1,024; on a CPU one, as it does
    not pay.

    >>> automatic_streams(torch.device("cuda"), 64), automatic_streams(torch.device("cpu"), 64)
    (16, 1)
    """
    return max(1, SAMPLES // batch_size) if device.type == "cuda" else 1
