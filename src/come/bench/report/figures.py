"""The figures of a run as files: many panels in one figure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from come.bench.report import panels as draw
from come.bench.report.reading import KINDS, Piece, Reading, Way, read
from come.bench.report.tables import one_configuration
from come.bench.store import Record, RunFolder
from come.errors import StateError, unknown
from come.files import replacing

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def write_figures(folder: RunFolder, records: Iterable[Record], out_dir: str | Path, format: str = "pdf") -> list[Path]:
    """Write all figures of a run into a folder: the same records give the same bytes.

    Args:
        folder: where the rows of the records are.
        records: of one configuration.
        out_dir: is made if it is not there.
        format: pdf, svg, or png (200 dots per inch).

    Returns:
        the files: one of trajectories for each way from a reset to the next, then confidence, cost and collapse.

    Raises:
        InputError: there are no records, or they must not be mixed.
        ConfigError: no such format.
        StateError: the rows of a cell cannot be read, or a figure cannot be written.
    """
    if format not in ("pdf", "png", "svg"):
        raise unknown("format of figures", format, ("pdf", "png", "svg"))
    records = one_configuration(records)
    found = read(folder, records)
    out = Path(out_dir)
    written = []
    try:
        out.mkdir(parents=True, exist_ok=True)
        with draw.drawing():
            for name, make in _whole_figures(records, found):
                path = out / f"{name}.{format}"
                with replacing(path) as beside:
                    make().savefig(beside, format=format, metadata=draw.NO_DATE[format])
                written.append(path)
    except OSError as error:
        raise StateError(f"cannot write figures to {out}: {error.strerror}; choose another place for them") from error
    return written


def _whole_figures(records: Sequence[Record], found: Reading) -> Iterator[tuple[str, Callable[[], Figure]]]:
    shown = draw.looks(records)
    names: set[str] = set()
    for way in dict.fromkeys(way.name for way in found.ways):
        chosen = [w for w in found.ways if w.name == way]
        yield f"trajectories-{_file_name(way, names)}", partial(_all_trajectories, chosen, shown)
    if found.pieces:
        yield "confidence", partial(_all_confidences, found.pieces, shown)
    if draw.comparable(records):
        yield "cost", partial(_all_costs, records, shown)
    if found.pieces:
        yield "collapse", partial(_all_timelines, found.pieces, shown)


def _file_name(text: str, taken: set[str]) -> str:
    """The text as a file name that no other has."""
    base = name = re.sub(r"[^A-Za-z0-9_-]+", "-", text).strip("-") or "domain"
    number = 1
    while name in taken:
        number += 1
        name = f"{base}-{number}"
    taken.add(name)
    return name


def _all_trajectories(ways: Sequence[Way], looks: draw.Looks) -> Figure:
    figure = draw.new_figure(820, 390)
    figure.subplots_adjust(0.045, 0.09, 0.985, 0.88, wspace=0.24, hspace=0.5)
    axes = figure.subplots(2, 4).ravel()
    for ax, measure in zip(axes, draw.MEASURES, strict=False):
        draw.draw_trajectory(ax, ways, looks, measure)
    axes[-1].axis("off")
    lines = draw.legend_lines(looks)
    axes[-1].legend(
        handles=lines, loc="upper left", handlelength=3.2, ncols=1 + (len(lines) - 1) // 12, borderaxespad=0
    )
    figure.suptitle(ways[0].name, x=0.01, ha="left", fontweight="bold")
    return figure


def _all_confidences(pieces: Sequence[Piece], looks: draw.Looks) -> Figure:
    from matplotlib.lines import Line2D

    shown = draw.stacks(looks)
    high = max(map(len, shown))
    bands = -(-len(shown) // 4)
    columns = -(-len(shown) // bands)
    figure = draw.new_figure(210 * columns, 110 * high * bands + 40, layout="constrained")
    grid = figure.subplots(bands * high, columns, squeeze=False)
    for ax in grid.ravel():
        ax.axis("off")
    for i, pairs in enumerate(shown):
        band, column = divmod(i, columns)
        axes = [grid[band * high + k, column] for k in range(len(pairs))]
        for ax in axes:
            ax.axis("on")
        draw.draw_confidences(axes, pieces, looks, pairs)
    kinds = [k for k in KINDS if any(piece.counts[k].sum() for piece in pieces)]
    handles = [Line2D([], [], color=draw.KIND_STYLES[k][0], linestyle=draw.KIND_STYLES[k][1], label=k) for k in kinds]
    figure.legend(handles=handles, loc="outside upper left", ncols=3)
    return figure


def _all_costs(records: Sequence[Record], looks: draw.Looks) -> Figure:
    figure = draw.new_figure(760, 300)
    figure.subplots_adjust(0.07, 0.14, 0.98, 0.96, wspace=0.2)
    left, right = figure.subplots(1, 2)
    draw.draw_cost(left, records, looks, "time")
    draw.draw_cost(right, records, looks, "memory")
    return figure


def _all_timelines(pieces: Sequence[Piece], looks: draw.Looks) -> Figure:
    shown = draw.timelines(pieces)
    part = 15 * len(looks) + 58
    figure = draw.new_figure(760, part * len(shown))
    for i, strips in enumerate(shown):
        draw.fill_timeline(figure, pieces, looks, strips, bottom=part * (len(shown) - 1 - i), height=part)
    return figure
