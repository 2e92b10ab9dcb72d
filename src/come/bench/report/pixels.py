"""What a report shows where each pixel gets a class: the classes one by one, and pictures of a few images."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from come.bench.cell import Cell
from come.bench.data import scenes, street
from come.bench.folder import RunFolder
from come.bench.record import Record, Rows
from come.bench.report.findings import ranked
from come.bench.report.tables import Entry, Row, Table, names_of, objectives_of
from come.bench.statistics import Judged
from come.methods import DEFAULT
from come.metrics import iou

NAMES = {"scenes": scenes.CLASSES, "cityscapes": street.CLASSES, "acdc": street.CLASSES}
"""Of the classes of data that we know."""

MOST = 12
"""Images of a page, at most."""

PALETTE = np.array(
    [
        *[(90, 90, 90), (0, 114, 178), (230, 159, 0), (0, 158, 115), (204, 121, 167), (86, 180, 233), (213, 94, 0)],
        *[(240, 228, 66), (128, 64, 160), (250, 190, 190), (60, 90, 30), (150, 75, 20), (170, 255, 195), (128, 128, 0)],
        *[(0, 0, 128), (255, 215, 180), (0, 128, 128), (220, 20, 60), (180, 180, 180), (255, 255, 255)],
    ],
    dtype=np.uint8,
)
"""Of the classes in turn, told apart by most colour-blind readers up to the eighth."""
UNLABELLED = (0, 0, 0)


def class_names(cell: Cell, count: int) -> Sequence[str]:
    """What the classes of a cell's data are called; their numbers, where nobody knows.

    Example:
        >>> cell = Cell(method="tent", objective="em", size=1, task="segmentation", data="scenes")
        >>> class_names(cell, 9)[:2]
        ('ground', 'T-shirt')
    """
    names = NAMES.get(cell.data.partition(":")[0], ())
    return names if len(names) == count else tuple(f"class {number}" for number in range(count))


def classes_table(folder: RunFolder, records: Sequence[Record]) -> Table:
    """The IoU of each class, of all pixels of all domains together; mean and deviation over seeds."""
    rows, classes = [], 0
    for method, objectives in objectives_of(records).items():
        for objective in objectives:
            by_seed: dict[int, Tensor] = {}
            for record in (one for one in records if one.cell.pair == (method, objective)):
                counts = folder.rows(record.key)["confusion"].sum(dim=0)
                by_seed[record.cell.seed] = by_seed.get(record.cell.seed, 0) + counts
            found = torch.stack([iou(counts) for counts in by_seed.values()])
            classes = found.shape[1]
            line = tuple(Entry.over((100 * v[~v.isnan()]).tolist()) if not v.isnan().all() else None for v in found.T)
            rows.append(Row(method, objective if len(objectives) > 1 else "", line, objective))
    names = class_names(records[0].cell, classes)
    return Table("IoU of each class", tuple(names), tuple(rows), tuple((name, "miou") for name in names))


def pictures(folder: RunFolder, records: Sequence[Record], judged: Judged) -> dict[str, Any]:
    """The last images of each cell with the first seed: image, label, and what the chosen methods answer.

    Chosen are the source, the default method, the method with the largest gain and the one with the smallest.
    """
    order, names = list(ranked(records, judged)), names_of(records)
    default = [pair for pair in order if pair[0].partition(":")[0] == DEFAULT]
    source = [pair for pair in names if pair[0] == "source"]
    chosen = list(dict.fromkeys([*source, *default, *order[:1], *order[-1:]])) or list(names)[:4]
    seed = min(record.cell.seed for record in records)
    by_piece: dict[tuple[str, ...], dict[tuple[str, str], Record]] = {}
    for record in records:
        if record.cell.seed == seed and record.cell.pair in chosen:
            by_piece.setdefault(record.result.domains, {})[record.cell.pair] = record
    rows, classes = [], set[int]()
    for domains, found in by_piece.items():
        read = {pair: folder.rows(record.key) for pair, record in found.items()}
        first = next(iter(read.values()))
        for i in range(len(first["shown_image"])):
            same = {pair: rows for pair, rows in read.items() if _same(first, rows, i)}
            for shown in (first["shown_label"][i], *(one["shown_prediction"][i] for one in same.values())):
                classes |= set(shown.flatten().tolist()) - {-1}
            answers = [
                (same[pair]["shown_prediction"][i], same[pair]["shown_doubt"][i]) if pair in same else None
                for pair in chosen
            ]
            images = [_png(first["shown_image"][i].movedim(0, -1).numpy()), _coloured(first["shown_label"][i])]
            drawn = [None if one is None else (_coloured(one[0]), _png(one[1].numpy())) for one in answers]
            rows.append((domains[-1], *images, drawn))
    known = max(classes, default=0) + 1
    legend = class_names(records[0].cell, next((len(rows) for rows in NAMES.values() if len(rows) >= known), known))
    return {
        "methods": [names[pair] for pair in chosen],
        "rows": rows[:MOST],
        "of": len(rows),
        "legend": [(legend[k] if k < len(legend) else f"class {k}", _hex(k)) for k in sorted(classes)],
    }


def _same(first: Rows, other: Rows, i: int) -> bool:
    """Whether two cells show the same image at a place."""
    return all(
        i < len(other[name]) and torch.equal(first[name][i], other[name][i]) for name in ("shown_image", "shown_label")
    )


def _hex(number: int) -> str:
    return "#" + "".join(f"{value:02x}" for value in PALETTE[number % len(PALETTE)])


def _coloured(classes: Tensor) -> str:
    """A map of classes (H, W) as a picture; black where there is no label."""
    found = classes.numpy()
    colours = PALETTE[found.clip(0) % len(PALETTE)]
    return _png(np.where(found[..., None] < 0, np.array(UNLABELLED, np.uint8), colours))


def _png(pixels: np.ndarray[Any, Any]) -> str:
    """A picture as an address that holds all of it."""
    file = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(pixels)).save(file, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
