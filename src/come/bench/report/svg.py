"""matplotlib's figures as drawings inside a page: small, without names that clash, in the colours of the theme."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING
from xml.etree import ElementTree

from come.bench.report.panels import BETTER, FAINT, INK, NO_DATE, OUTLIER, PALETTE, RIGHT, SOFT, WORSE, WRONG

if TYPE_CHECKING:
    from matplotlib.figure import Figure

VARIABLES: Mapping[str, str] = {
    INK: "--ink", SOFT: "--soft", FAINT: "--faint", BETTER: "--better", WORSE: "--worse",
    RIGHT: "--better", WRONG: "--worse", OUTLIER: "--soft",
    **{colour: f"--m{i}" for i, colour in enumerate(PALETTE)},
}  # fmt: skip
"""The CSS variable that stands for each colour of the figures."""

NUMBER = re.compile(r"-?\d+\.\d+(?:e-?\d+)?")
DEFAULTS = re.compile(
    r"(?:stroke-linejoin: (?:miter|round)|stroke-linecap: (?:butt|square|round)|fill-rule: \w+)(?:; |$)"
)

FONT = re.compile(r"font: (?:(\w+) )?([\d.]+)px [^;]+|font-family: [^;]+(?:; |$)")


def inline(figure: Figure, label: str, prefix: str) -> str:
    """The figure as an `<svg>` element for a page.

    Args:
        label: what a screen reader says of it.
        prefix: begins all ids in it; unique in the page.
    """
    text = io.BytesIO()
    figure.savefig(text, format="svg", transparent=True, metadata=NO_DATE["svg"])
    root = ElementTree.fromstring(text.getvalue())
    _tidy(root)
    names = {found: f"{prefix}-{i}" for i, found in enumerate(_targets(root))}
    for element in root.iter():
        _rewrite(element, names)
    _unwrap(root)
    box = root.attrib["viewBox"]
    root.attrib = {"viewBox": box, "role": "img", "aria-label": label}
    return re.sub(r">\s+<", "><", ElementTree.tostring(root, encoding="unicode")).strip()


def _tidy(element: ElementTree.Element) -> None:
    """Drop what a page does not need: namespaces, metadata, styles for everything, empty groups."""
    element.tag = element.tag.partition("}")[2] or element.tag
    for child in list(element):
        _tidy(child)
        empty = child.tag in ("g", "defs") and not len(child)
        unseen = child.tag == "path" and child.get("style") == "fill: none"
        if child.tag in ("metadata", "style") or empty or unseen:
            element.remove(child)


def _unwrap(element: ElementTree.Element) -> None:
    """Replace groups that say nothing by what is in them."""
    for child in list(element):
        _unwrap(child)
        if child.tag == "g" and not child.attrib:
            at = list(element).index(child)
            element[at : at + 1] = list(child)


def _targets(root: ElementTree.Element) -> list[str]:
    """The ids that something in the drawing points to."""
    values = [value for element in root.iter() for value in element.attrib.values()]
    return list(dict.fromkeys(name for value in values for name in re.findall(r"(?:^#|url\(#)([^)]+)", value)))


def _rewrite(element: ElementTree.Element, names: Mapping[str, str]) -> None:
    attributes = {name.partition("}")[2] or name: value for name, value in element.attrib.items()}
    if attributes.get("id") not in names:
        attributes.pop("id", None)
    for name, value in attributes.items():
        if name == "id":
            attributes[name] = names[value]
        elif name == "href" and value.startswith("#"):
            attributes[name] = f"#{names[value[1:]]}"
        elif name == "clip-path":
            attributes[name] = f"url(#{names[value[5:-1]]})"
        elif name == "style":
            attributes[name] = _themed(value, element.tag)
        elif name == "d":
            attributes[name] = _relative(value)
        elif name == "transform" and value.startswith("rotate(-0 "):
            attributes[name] = ""
        elif name in ("x", "y", "width", "height", "transform") and element.tag != "image":
            attributes[name] = NUMBER.sub(_shorter, value)
    element.attrib = {name: value for name, value in attributes.items() if value}


def _shorter(match: re.Match[str]) -> str:
    """A tenth of a point is less than a pixel."""
    short = f"{float(match.group()):.1f}".removesuffix(".0")
    return "0" if short == "-0" else short


def _relative(path: str) -> str:
    """The path in steps, in tenths of a point: `M33.8 160l4.5-2.1 4.5 3z`; curves stay as they are, rounded."""
    words = path.split()
    if set(re.findall("[A-Za-z]", path)) - set("MLz"):
        return " ".join(NUMBER.sub(_shorter, path).split())
    steps, at, i = [], (0, 0), 0
    while i < len(words):
        if words[i] == "z":
            steps.append("z")
            i += 1
            continue
        # positions are rounded, not steps, so that errors do not add up
        to = round(10 * float(words[i + 1])), round(10 * float(words[i + 2]))
        if words[i] == "M":
            steps.append(f"M{_tenths(to[0])} {_tenths(to[1])}")
        elif to != at:
            steps.append(f"l{_tenths(to[0] - at[0])} {_tenths(to[1] - at[1])}")
        at, i = to, i + 3
    return re.sub(r"(?<=l)([^Mz]*)", lambda m: m.group().replace("l", " "), "".join(steps)).replace(" -", "-")


def _tenths(value: int) -> str:
    """A number of tenths, as short as it can be written: -4 is -.4."""
    return f"{value / 10:g}".replace("0.", ".", 1) if abs(value) < 10 else f"{value / 10:g}"


def _themed(style: str, tag: str) -> str:
    """Colours by variable; the font is the page's; what is the default is left out."""
    for colour, variable in VARIABLES.items():
        style = style.replace(colour, f"var({variable})")
    if tag == "text":
        style = FONT.sub(_font, style)
    return DEFAULTS.sub("", style).strip("; ")


def _font(match: re.Match[str]) -> str:
    if match.group(2) is None:
        return ""
    weight = f"; font-weight: {match.group(1)}" if match.group(1) else ""
    return f"font-size: {float(match.group(2)):g}px{weight}"
