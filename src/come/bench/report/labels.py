"""Labels beside their points: none on another, none outside the axes, as near as that allows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def place_labels(ax: Axes, labels: Sequence[tuple[str, str, tuple[float, float]]]) -> None:
    """Write each label beside its point where it covers no other label and no point, with a thin line if it is far.

    Args:
        labels: text, colour and (x, y) in the units of the data.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = ax.figure
    assert isinstance(figure, Figure)
    renderer = FigureCanvasAgg(figure).get_renderer()  # type: ignore[no-untyped-call]
    figure.draw_without_rendering()  # so that the limits and the size of the axes are known
    frame, pixel = ax.get_window_extent(renderer).extents, figure.dpi / 72
    centres = [tuple(ax.transData.transform(point)) for *_, point in labels]
    taken = [_around(x, y, 8 * pixel, 8 * pixel) for x, y in centres]
    for (text, colour, point), (x, y) in zip(labels, centres, strict=True):
        note = ax.annotate(text, point, fontsize=7.5, color=colour)
        size = note.get_window_extent(renderer)
        note.remove()
        options = list(_options(x, y, size.width, size.height, pixel))
        scores = [sum(_overlap(part, taken) for part in (box, *lead)) + _outside(box, frame) for box, lead in options]
        box, lead = options[scores.index(min(scores))]
        line = {"arrowstyle": "-", "color": colour, "linewidth": 0.6, "shrinkA": 1, "shrinkB": 3} if lead else None
        offset = ((box[0] + box[2]) / 2 - x) / pixel, ((box[1] + box[3]) / 2 - y) / pixel
        ax.annotate(
            text, point, xytext=offset, textcoords="offset points", ha="center", va="center", fontsize=7.5, color=colour,
            arrowprops=line,
        )  # fmt: skip
        taken += [box, *lead]


Box = tuple[float, float, float, float]


def _around(x: float, y: float, width: float, height: float) -> Box:
    return x - width / 2, y - height / 2, x + width / 2, y + height / 2


def _options(x: float, y: float, width: float, height: float, pixel: float) -> Iterator[tuple[Box, list[Box]]]:
    """Boxes around a point, the nearest first, and what a line that leads there covers; nothing if it needs none."""
    for distance in (6, 12, 20, 30, 42, 56, 72):
        for angle in np.arange(0, 360, 30) * np.pi / 180:
            right, up = np.cos(angle), np.sin(angle)
            # the edge of the box, not its middle, is that far from the point
            middle_x = x + right * (distance * pixel + width / 2)
            middle_y = y + up * (distance * pixel + height / 2)
            steps = np.arange(8, distance if distance > 12 else 0, 3) * pixel
            length = np.hypot(middle_x - x, middle_y - y)
            lead = [_around(x + (middle_x - x) * s / length, y + (middle_y - y) * s / length, 3, 3) for s in steps]
            yield _around(middle_x, middle_y, width + 2 * pixel, height), lead


def _overlap(box: Box, taken: Iterable[Box]) -> float:
    areas = (
        max(0.0, min(box[2], b[2]) - max(box[0], b[0])) * max(0.0, min(box[3], b[3]) - max(box[1], b[1])) for b in taken
    )
    return sum(areas)


def _outside(box: Box, frame: Sequence[float]) -> float:
    over = frame[0] - box[0], frame[1] - box[1], box[2] - frame[2], box[3] - frame[3]
    return 100 * sum(max(0.0, value) for value in over)
