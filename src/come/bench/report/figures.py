"""Makes the figures of a run: files of many panels each, and single panels for the page, where they fit on a phone."""

from __future__ import annotations

import io
import json
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

import numpy as np
from markupsafe import Markup

from come.bench.folder import RunFolder
from come.bench.record import Record
from come.bench.report import panels as draw
from come.bench.report.configurations import one_configuration
from come.bench.report.reading import KINDS, Reading, Segment, read
from come.bench.report.tables import RATES, cut, sweeps
from come.errors import StateError, unknown
from come.state.files import replacing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

COLOURS = {draw.INK: "ink", draw.SOFT: "soft", draw.FAINT: "faint"}
COLOURS |= {colour: f"c{i}" for i, colour in enumerate(draw.PALETTE)}
"""The variables of `page.css` that replace the colours."""

NEEDLESS = re.compile(r"font-family: 'DejaVu Sans'; |stroke-dashoffset: 0; |stroke-linecap: square; |(?<=\d\.\d\d)\d+")
"""In attributes: what the style of the page says, what is the default, and digits that nobody sees."""

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
        return _inlined(figure, number, self.title + of, self.names)


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
    swept = [panel(name, draw.draw_rates, *MARKED, records=records, name=name) for name in sweeps(records)]
    of_kinds = draw.legend({"color": c, "linestyle": d, "label": k} for k in kinds for c, d, _ in [draw.KIND_STYLES[k]])
    return {
        "overview": [Group("overview", "The whole stream", [overview], lines)],
        "rates": [Group("rates", RATES, swept)] if swept else [],
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


def _inlined(figure: Figure, number: int, label: str, names: Sequence[str]) -> Markup:
    """The figure as SVG for a page, without what a page has no use for, which is most of the bytes; texts are escaped anew.

    What was drawn with a `gid` is in groups with that as `data-series`, and its label as the title that a pointer shows.
    `data-x` and `data-y` turn a place into a value: the ends of the axis in points, its limits there, and its scale. The
    number of the figure keeps ids apart; a screen reader says the label.
    """
    text = io.BytesIO()
    figure.savefig(text, format="svg", transparent=True, metadata=draw.NO_DATE["svg"])
    titles = {gid: str(artist.get_label()) for artist in figure.findobj() if (gid := artist.get_gid())}
    drawn = ElementTree.fromstring(text.getvalue())
    found = dict.fromkeys(re.findall(r"(?:href=\"|url\()#([^\")]+)", text.getvalue().decode()))
    ids = {name: f"f{number}-{i}" for i, name in enumerate(found)}
    svg = Element("svg", {"class": "plot", "viewBox": drawn.attrib["viewBox"], "role": "img", "aria-label": label})
    if figure.axes:
        svg.attrib |= _scales(figure.axes[0], names)
    svg.extend(part for child in drawn for part in _cleaned(child, titles, ids))
    return Markup(ElementTree.tostring(svg, encoding="unicode"))


def _cleaned(node: Element, titles: Mapping[str, str], ids: Mapping[str, str]) -> list[Element]:
    """The element without what is not needed: none, itself, or what is in it; `ids` are those that others refer to."""
    tag = node.tag.rpartition("}")[2]
    if tag in ("metadata", "style") or node.get("style") == "fill: none":
        return []
    name = node.attrib.pop("id", "")
    attributes = {key.rpartition("}")[2]: _short(value, ids) for key, value in node.attrib.items()}
    if attributes.get("transform", "").startswith("rotate(-0 "):
        del attributes["transform"]
    parts = [part for child in node for part in _cleaned(child, titles, ids)]
    if name in titles:
        attributes["data-series"] = name
        title = Element("title")
        title.text = titles[name]
        parts.insert(0, title)
    elif name in ids:
        attributes["id"] = ids[name]
    if tag in ("g", "defs") and (not parts or (tag == "g" and not attributes)):
        return parts
    found = Element(tag, attributes)
    found.text = node.text if tag == "text" else None
    found.extend(parts)
    return [found]


def _short(value: str, ids: Mapping[str, str]) -> str:
    def renamed(match: re.Match[str]) -> str:
        colour, name = match[0], match[1]
        return f"var(--{COLOURS[colour]})" if colour in COLOURS else f"#{ids.get(name, name)}"

    if value.startswith("data:"):
        return value
    return re.sub(r"#([\w-]+)", renamed, " ".join(NEEDLESS.sub("", value).split()))


def _scales(ax: Axes, names: Sequence[str]) -> dict[str, str]:
    """What turns places into values; nothing without lines to read them from."""
    lines = (line for line in ax.lines if np.size(line.get_xdata()) > 1)
    if not any(artist.get_gid() for artist in (*lines, *ax.patches)):
        return {}
    box, height = ax.get_window_extent(), ax.figure.bbox.height

    def scale(axis: Axis, ends: tuple[float, float]) -> str:
        limits = axis.get_transform().transform(axis.get_view_interval())
        return " ".join(f"{number:.6g}" for number in (*ends, *limits)) + f" {axis.get_scale()}"

    found = {"data-x": scale(ax.xaxis, (box.x0, box.x1)), "data-y": scale(ax.yaxis, (height - box.y0, height - box.y1))}
    return found | (
        {"data-names": json.dumps(list(names), ensure_ascii=False)} if names else {"data-of": ax.get_xlabel()}
    )
