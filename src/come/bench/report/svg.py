"""Turns a figure of matplotlib into SVG for a page: colours of its theme, named series, and axes that its script can read.

What a page has no use for is taken out, which is most of the bytes. Texts are escaped anew.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

import numpy as np
from markupsafe import Markup

from come.bench.report.panels import FAINT, INK, NO_DATE, PALETTE, SOFT

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

COLOURS = {INK: "ink", SOFT: "soft", FAINT: "faint", **{colour: f"c{i}" for i, colour in enumerate(PALETTE)}}
"""The variables of `page.css` that replace the colours."""

NEEDLESS = re.compile(r"font-family: 'DejaVu Sans'; |stroke-dashoffset: 0; |stroke-linecap: square; |(?<=\d\.\d\d)\d+")
"""In attributes: what the style of the page says, what is the default, and digits that nobody sees."""


def inline(figure: Figure, number: int, label: str, names: Sequence[str] = ()) -> Markup:
    """The figure as an element of a page.

    What was drawn with a `gid` is in groups with that as `data-series`, and its label as the title that a pointer shows.
    `data-x` and `data-y` turn a place into a value: the ends of the axis in points, its limits there, and its scale.

    Args:
        number: of the figure in the page; it keeps ids apart.
        label: what a screen reader says of it.
        names: what the places 0, 1, ... of the horizontal axis are, if they are no numbers.
    """
    text = io.BytesIO()
    figure.savefig(text, format="svg", transparent=True, metadata=NO_DATE["svg"])
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
