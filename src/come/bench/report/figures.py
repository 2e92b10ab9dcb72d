"""Makes the figures of a run: files of many panels each, and single panels for the page, where they fit on a phone."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from come.bench.folder import RunFolder
from come.bench.record import Record
from come.bench.report import panels as draw
from come.bench.report.configurations import one_configuration
from come.bench.report.rates import TITLE, draw_rates, sweeps
from come.bench.report.reading import KINDS, Reading, Segment, read
from come.bench.report.svg import inline
from come.bench.report.tables import cut
from come.errors import StateError, unknown
from come.state.files import replacing

if TYPE_CHECKING:
    from markupsafe import Markup
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

HEAD = 22  # points above the panels of a figure, for its title
MARKED = (320, 225), 38, 32  # size, left and bottom of a panel that has labels at both axes


@dataclass(frozen=True)
class Panel:
    """What is drawn, how large, and the room around the axes; in points."""

    title: str
    draw: Callable[[Axes], None]
    size: tuple[float, float] = (236, 166)
    left: float = 34
    bottom: float = 31
    top: float = 19
    right: float = 14
    names: Sequence[str] = ()  # what the places 0, 1, ... of the horizontal axis are, if they are no numbers

    def put(self, figure: Figure, x: float = 0, y: float = 0) -> None:
        """Draw it with its lower left corner there."""
        width, height = (72 * side for side in figure.get_size_inches())
        inner = self.size[0] - self.left - self.right, self.size[1] - self.bottom - self.top
        axes = ((x + self.left) / width, (y + self.bottom) / height, inner[0] / width, inner[1] / height)
        self.draw(figure.add_axes(axes))

    def inline(self, number: int, of: str = "") -> Markup:
        """The panel as a part of a page, the number-th of its figures."""
        figure = new_figure(*self.size)
        self.put(figure)
        return inline(figure, number, self.title + of, self.names)


@dataclass(frozen=True)
class Group:
    """Panels that stand together: a file, or a part of the page."""

    name: str
    title: str
    panels: Sequence[Panel]
    legend: Sequence[Line2D] = ()

    def figure(self) -> Figure:
        """All panels in one figure, with a legend at the right."""
        width, height = self.panels[0].size
        columns = 1 if width > 500 else min(4, len(self.panels))
        rows = -(-len(self.panels) // columns)
        figure = new_figure(columns * width + 120 * bool(self.legend), rows * height + HEAD)
        for i, panel in enumerate(self.panels):
            panel.put(figure, i % columns * width, (rows - 1 - i // columns) * height)
        if self.legend:
            figure.legend(handles=list(self.legend), loc="upper right", handlelength=3.2)
        figure.suptitle(cut(self.title, 120), x=0.01, ha="left", fontweight="bold")
        return figure


def new_figure(width: float, height: float) -> Figure:
    """A figure of that many points, with nothing behind it."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width / 72, height / 72))


def groups(records: Sequence[Record], found: Reading, points: int = 100) -> dict[str, list[Group]]:
    """What there is to draw of a run: the whole stream, learning rates, along the streams, confidence, cost and collapse.

    A line along a stream has at most `points` points.
    """
    looks, pieces, domains = draw.looks(records), found.pieces, draw.overview_domains(found.pieces)
    lines = draw.legend(look.line for look in looks.values())
    shares = {pair: draw.shares(pieces, pair) for pair in looks}
    kinds = [kind for kind in KINDS if any(kind in share for share in shares.values())]
    top = max((float(share.max()) for kinds in shares.values() for share in kinds.values()), default=100.0)
    left = 8 + 5.2 * max(len(look.label) for look in looks.values())  # room for the names of the strips

    def panel(title: str, part: Callable[..., None], *room: Any, **values: Any) -> Panel:
        return Panel(title, partial(part, looks=looks, **values), *room)

    names = set[str]()
    streams: dict[str, list[Segment]] = {}
    for segment in found.segments:
        streams.setdefault(segment.name, []).append(segment)
    along = {
        name: [panel(m.title, draw.draw_trajectory, segments=s, measure=m, points=points) for m in draw.MEASURES]
        for name, s in streams.items()
    }
    room = (380, 230), 30, 20 if len(domains) <= 6 else 56, 19, 14, domains
    overview = panel(draw.overview_title(pieces), draw.draw_overview, *room, pieces=pieces)
    reliability = [
        panel("Risk against coverage", draw.draw_risk, *MARKED, pieces=pieces),
        panel("Reliability", draw.draw_reliability, *MARKED, pieces=pieces),
    ]
    confidence = [
        Panel(look.label, partial(draw.draw_confidence, found=shares[pair], label=look.label, top=1.05 * top))
        for pair, look in looks.items()
    ]
    size = 640, 15 * len(looks) + 70
    strips = [
        panel(one.title, draw.draw_timeline, size, left, 8, 50, pieces=pieces, strips=one)
        for one in draw.timelines(pieces)
    ]
    costs = [
        panel(f"Accuracy against {of}", draw.draw_cost, *MARKED, 8, records=records, of=of) for of in ("time", "memory")
    ]
    swept = [panel(name, draw_rates, *MARKED, records=records, name=name) for name in sweeps(records)]
    of_kinds = draw.legend({"color": c, "linestyle": d, "label": k} for k in kinds for c, d, _ in [draw.KIND_STYLES[k]])
    return {
        "overview": [Group("overview", "The whole stream", [overview], lines)],
        "rates": [Group("rates", TITLE, swept)] if swept else [],
        "streams": [Group(f"trajectories-{_file_name(name, names)}", name, p, lines) for name, p in along.items()],
        "confidence": [Group("confidence", "Confidence", confidence, of_kinds)],
        "reliability": [Group("reliability", "Risk and reliability", reliability, lines)],
        "cost": [Group("cost", "Cost", costs, lines)] if draw.can_draw_cost(records) else [],
        "collapse": [Group("collapse", "Collapse", strips)],
    }


def _file_name(text: str, taken: set[str]) -> str:
    """The text as a file name of sane length that no other has."""
    base = name = re.sub(r"[^A-Za-z0-9_-]+", "-", text)[:80].strip("-") or "domain"
    numbers = count(2)
    while name.lower() in taken:
        name = f"{base}-{next(numbers)}"
    taken.add(name.lower())
    return name


def write_figures(folder: RunFolder, records: Iterable[Record], out_dir: str | Path, format: str = "pdf") -> list[Path]:
    """Write all figures of a run into a folder, as pdf, svg or png (200 dots per inch); the same records give the same bytes.

    Returns the files: the whole stream; learning rates, where there are several; the first 20 segments from one reset to the
    next; confidence, reliability, cost where costs can be compared, and collapse.

    Raises:
        InputError: there are no records, or they are of several plans.
        ConfigError: no such format.
        StateError: the rows of a cell cannot be read, or a figure cannot be written.
    """
    if format not in draw.NO_DATE:
        raise unknown("format of figures", format, draw.NO_DATE)
    records = one_configuration(records)
    found = read(folder, records)
    out = Path(out_dir)
    if out.is_symlink():
        raise StateError(f"{out} is a symbolic link, and figures are not written through one; choose another folder")
    parts = groups(records, found)
    if len(parts["streams"]) < len(found.names):
        warnings.warn(f"of {len(found.names)} streams, the first {len(parts['streams'])} are drawn", stacklevel=2)
    written = []
    try:
        out.mkdir(parents=True, exist_ok=True)
        with draw.drawing():
            for group in (group for part in parts.values() for group in part):
                path = out / f"{group.name}.{format}"
                with replacing(path) as beside:
                    group.figure().savefig(beside, format=format, metadata=draw.NO_DATE[format])
                written.append(path)
    except OSError as error:
        raise StateError(f"cannot write figures to {out}: {error.strerror}; choose another place for them") from error
    return written
