"""Panels of figures, drawn with matplotlib: along the stream, confidence, risk, cost, and where something collapsed.

A panel is a function that draws on axes; `figures.py` puts panels into files and images. matplotlib is imported when something
is drawn.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from come.bench.record import Record
from come.bench.report.costs import by_pair, cost, unit_of_time, unlike
from come.bench.report.reading import BINS, COVERAGES, KINDS, PARTS, Numbers, Piece, Segment, over_seeds
from come.bench.report.tables import SHORT, cut, entries, objectives_of
from come.bench.statistics import AVERAGE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.lines import Line2D

INK, SOFT, FAINT = "#1d2126", "#6a7078", "#d5d9de"
"""Text, axes and grid."""

PALETTE = ("#0067a5", "#c94f00", "#00805e", "#a0479b", "#9a7200", "#1791b5", "#882255", "#5a5f9e")
"""Of methods; told apart with the usual colour-vision deficiencies, and by the markers without colour."""

BETTER, WORSE = PALETTE[:2]

DOMAINS = 200
"""That are told apart along a stream; more would be thinner than a line."""

POINTS = 10.0
"""Of accuracy or another percentage that an axis spans at least."""

MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
Dash = tuple[float, tuple[float, ...]]
DASHES: dict[str, Dash] = {"em": (0.0, (3.5, 1.6)), "come": (0.0, ())}
OTHER_DASHES: tuple[Dash, ...] = ((0.0, (6.0, 1.5, 1.0, 1.5)), (0.0, (6.0, 1.5, 1.0, 1.5, 1.0, 1.5)))
DOTS: Dash = (0.0, (1.0, 1.5))


@dataclass(frozen=True)
class Look:
    """How a method with an objective is drawn, everywhere."""

    number: int
    label: str
    colour: str
    dash: Dash
    marker: str
    hollow: bool

    @property
    def line(self) -> dict[str, Any]:
        """Arguments of a line of matplotlib."""
        face = "none" if self.hollow else self.colour
        style = {"color": self.colour, "linestyle": self.dash, "marker": self.marker, "markerfacecolor": face}
        style["gid"] = self.series
        return {**style, "markersize": 3.2, "markeredgewidth": 0.8, "linewidth": 1.3, "label": self.label}

    @property
    def series(self) -> str:
        """What all that is drawn of it is called in an SVG."""
        return f"s{self.number}"


def looks(records: Iterable[Record]) -> dict[tuple[str, str], Look]:
    """The look of each method and objective: colour and marker by method, em dashed and hollow, come solid and filled.

    A method with one objective, where others have several, does not depend on it: it is dotted, and the source grey.
    """
    found: dict[tuple[str, str], Look] = {}
    by_method = objectives_of(records)
    several = any(len(objectives) > 1 for objectives in by_method.values())
    others = [o for o in dict.fromkeys(o for all_ in by_method.values() for o in all_) if o not in DASHES]
    dashes = {**DASHES, **{o: OTHER_DASHES[i % len(OTHER_DASHES)] for i, o in enumerate(others)}}
    coloured = [method for method in by_method if method != "source"]
    for method, objectives in by_method.items():
        number = coloured.index(method) if method in coloured else 0
        colour = SOFT if method == "source" else PALETTE[number % len(PALETTE)]
        marker = "o" if method == "source" else MARKERS[(number + number // len(PALETTE)) % len(MARKERS)]
        for objective in objectives:
            alone = len(objectives) == 1 and (several or method == "source")
            label = cut(method) + (f" + {cut(objective)}" if len(objectives) > 1 else "")
            dash = DOTS if alone else dashes[objective]
            hollow = objective == "em" and not alone
            found[method, objective] = Look(len(found), label, colour, dash, marker, hollow)
    return found


class Measure(NamedTuple):
    """A column of the trajectories as a panel."""

    name: str
    title: str
    least: float
    """What the axis spans at least, so that noise does not fill it."""
    scale: float = 1.0


MEASURES = (
    Measure("accuracy", "Accuracy so far (%)", POINTS, 100),
    Measure("fpr", "FPR so far (%)", POINTS, 100),
    Measure("confidence", "Mean confidence", 0.1),
    Measure("entropy", "Mean entropy of softmax (nats)", 0.2),
    Measure("uncertainty", "Mean uncertainty u", 0.1),
    Measure("norm", "Mean norm of the logits", 1),
    Measure("dominant_share", "Share of the top class (%)", POINTS, 100),
)

Looks = Mapping[tuple[str, str], Look]


def draw_trajectory(ax: Axes, segments: Sequence[Segment], looks: Looks, measure: Measure, points: int = 100) -> None:
    """One measure along one segment: a line per method and objective, with a band of one deviation over seeds.

    Where several domains follow each other, thin lines stand between them.
    """
    shown: list[float] = []
    length = 1.0
    alpha = min(0.14, 0.35 / len(looks))  # many bands on each other would be a wall
    for pair, look in looks.items():
        chosen = [segment for segment in segments if segment.pair == pair]
        if not chosen:
            continue
        samples, mean, spread = over_seeds(chosen, measure.name)
        keep = np.unique(np.linspace(0, len(samples) - 1, min(points, len(samples))).round().astype(int))
        samples, mean = samples[keep], measure.scale * mean[keep]
        length = max(length, samples[-1])
        low = high = mean
        if spread is not None:
            low, high = mean - measure.scale * spread[keep], mean + measure.scale * spread[keep]
            ax.fill_between(samples, low, high, color=look.colour, alpha=alpha, linewidth=0, gid=look.series)
        every = max(1, len(samples) // 3)
        ax.plot(samples, mean, **look.line, markevery=(len(shown) // 2 % every, every))
        settled = samples >= samples[-1] / 10
        shown += [float(np.nanmin(low[settled], initial=np.inf)), float(np.nanmax(high[settled], initial=-np.inf))]
    for border in segments[0].borders[:DOMAINS]:
        ax.axvline(border, color=FAINT, linewidth=0.6, zorder=0)
    # before the first tenth, all numbers are of a handful of samples
    ax.set(xlim=(0, length), ylim=around(shown, measure.least), xlabel="samples seen", title=measure.title)
    ax.locator_params(axis="both", nbins=4)
    ax.grid(axis="y")


def around(values: Iterable[float], least: float) -> tuple[float, float]:
    """Limits of an axis with some room around the values; a difference that says nothing is not blown up to fill it.

    >>> around([34.0, 36.0], 10.0)
    (30.0, 40.0)
    >>> around([], 10.0)
    (-5.0, 5.0)
    """
    finite = [float(value) for value in values if np.isfinite(value)] or [0.0]
    middle, reach = (min(finite) + max(finite)) / 2, max(0.56 * (max(finite) - min(finite)), least / 2)
    return middle - reach, middle + reach


def draw_overview(ax: Axes, pieces: Sequence[Piece], looks: Looks) -> None:
    """Accuracy along the whole stream, minus the source's at the same place where that ran.

    One domain has the same width as another. A line has a point for each eighth of a domain, or for a larger part if
    that has less than IMAGES images; it breaks where the method was reset.
    """
    domains, fresh = overview_domains(pieces), {piece.domain for piece in pieces if piece.fresh}
    against = has_source(pieces)
    values = _strips(pieces, "relative" if against else "accuracy")
    images = min((sum(float(c.sum()) for c in piece.counts.values()) for piece in pieces), default=0.0)
    parts = next((n for n in (8, 6, 4, 3, 2) if images >= n * IMAGES and n * len(domains) <= PIECES), 1)
    shown: list[float] = [0.0] if against else []
    for pair, look in looks.items():
        x, y = list[float](), list[float]()
        for place, domain in enumerate(domains):
            if place and domain in fresh:  # break the line
                x, y = [*x, float(place)], [*y, np.nan]
            here = np.array(values.get((pair, domain), [[np.nan] * PARTS]))
            y += [float(part.mean()) * 100 for part in np.split(here, parts, axis=1)]
            x += [place + (i + 0.5) / parts for i in range(parts)]
        if np.isfinite(y).any():
            ax.plot(x, y, **look.line | {"linewidth": 1.6, "markevery": max(1, len(x) // 6)})
            shown += y
    borders = range(1, min(len(domains), DOMAINS))
    ax.vlines(borders, 0, 1, colors=FAINT, linewidth=0.6, zorder=0, transform=ax.get_xaxis_transform())
    every = -(-len(domains) // 16)
    ax.set_xticks(
        [j + 0.5 for j in range(0, len(domains), every)], [cut(SHORT.get(d, d), 14) for d in domains[::every]]
    )
    many = len(domains) > 6
    ax.tick_params(axis="x", length=0, rotation=40 if many else 0)
    for text in ax.get_xticklabels():
        text.set(ha="right" if many else "center", rotation_mode="anchor")
    ax.set(xlim=(0, len(domains)), ylim=around(shown, POINTS), title=overview_title(pieces))
    ax.locator_params(axis="y", nbins=5)
    ax.grid(axis="y")


IMAGES = 60
"""Of which an accuracy is drawn, at least."""

PIECES = 128
"""Points of a line of the overview, at most; a domain has one at least."""


def overview_domains(pieces: Iterable[Piece]) -> list[str]:
    """Those that are drawn, in their order."""
    return list(dict.fromkeys(piece.domain for piece in pieces))[:DOMAINS]


def overview_title(pieces: Iterable[Piece]) -> str:
    """What the overview shows."""
    return "Accuracy along the stream" + (", minus the source's (points)" if has_source(pieces) else " (%)")


def has_source(pieces: Iterable[Piece]) -> bool:
    """Whether there is a source, and something else to compare with it."""
    methods = {piece.pair[0] for piece in pieces}
    return "source" in methods and len(methods) > 1


KIND_STYLES: Mapping[str, tuple[str, Dash, float]] = {
    "right": (BETTER, (0.0, ()), 0.22),
    "wrong": (WORSE, DASHES["em"], 0.22),
    "outlier": (SOFT, DOTS, 0.0),
}
"""Colour, dashes and strength of the area of each kind of sample."""


def shares(pieces: Sequence[Piece], pair: tuple[str, str]) -> dict[str, Numbers]:
    """Of each kind of sample that there is, how many percent are in each bin of the confidence."""
    counts = {k: sum((p.counts[k] for p in pieces if p.pair == pair), np.zeros(BINS)) for k in KINDS}
    return {kind: 100 * found / found.sum() for kind, found in counts.items() if found.sum()}


def draw_confidence(ax: Axes, found: Mapping[str, Numbers], label: str, top: float) -> None:
    """How confident right, wrong and outlying samples are: their `shares`."""
    for kind, share in found.items():
        colour, dash, alpha = KIND_STYLES[kind]
        edges = np.linspace(0, 1, BINS + 1)
        named: dict[str, Any] = {"gid": kind, "label": kind}
        ax.stairs(share, edges, fill=True, color=colour, alpha=alpha, linewidth=0, **named)
        ax.stairs(share, edges, color=colour, linestyle=dash, linewidth=1.2, **named)
    # square roots, for most of a kind is often in one bin
    ax.set_yscale("function", functions=(lambda y: np.sqrt(np.maximum(y, 0)), np.square))
    ax.set(xlim=(0, 1), ylim=(0, top), xlabel="confidence", ylabel="% of kind", title=label)
    ax.set_yticks([tick for tick in (0, 1, 5, 20, 50, 100) if tick <= top], minor=False)


def draw_risk(ax: Axes, pieces: Sequence[Piece], looks: Looks) -> None:
    """The error among the most confident samples against how many are answered; means over domains and seeds."""
    shown = [0.0]
    for pair, look in looks.items():
        curves = [piece.risk for piece in pieces if piece.pair == pair]
        if curves:
            risk = 100 * np.mean(curves, axis=0)
            ax.plot(100 * COVERAGES, risk, **look.line, markevery=(look.number % 5, 10))
            shown += [float(risk.max())]
    ax.set(xlim=(0, 100), ylim=(0, max(*shown, POINTS) * 1.06), title="Risk against coverage")
    ax.set(xlabel="answered, the most confident first (%)", ylabel="wrong of these (%)")
    ax.locator_params(axis="both", nbins=5)
    ax.grid()


def draw_reliability(ax: Axes, pieces: Sequence[Piece], looks: Looks) -> None:
    """Accuracy against confidence, over all domains and seeds, in the 15 bins of the calibration error."""
    ax.plot([0, 100], [0, 100], color=SOFT, linewidth=0.8, zorder=1)
    centres = 100 * (np.arange(BINS // 2) + 0.5) / (BINS // 2)
    for pair, look in looks.items():
        right, wrong = (
            sum((p.counts[kind] for p in pieces if p.pair == pair), np.zeros(BINS)).reshape(-1, 2).sum(axis=1)
            for kind in ("right", "wrong")
        )
        enough = right + wrong >= LEAST
        if enough.any():
            shares = 100 * right[enough] / (right + wrong)[enough]
            ax.plot(centres[enough], shares, **look.line, markevery=(look.number % 3, 3))
    ax.set(xlim=(0, 100), ylim=(0, 100), title="Reliability", xlabel="confidence (%)", ylabel="accuracy (%)")
    ax.locator_params(axis="both", nbins=5)
    ax.grid()


LEAST = 20
"""Samples in a bin of which an accuracy is drawn."""


def can_draw_cost(records: Sequence[Record]) -> bool:
    """Whether costs can be compared, and something ran on all domains, so that it has an accuracy to set them against."""
    groups = by_pair(records)
    return not unlike(groups.values()) and any(_accuracy(records, pair) is not None for pair in groups)


def _accuracy(records: Sequence[Record], pair: tuple[str, str]) -> float | None:
    (entry,) = entries(records, *pair, [(AVERAGE, "accuracy")])
    return None if entry is None else entry.mean


def draw_cost(ax: Axes, records: Sequence[Record], looks: Looks, of: Literal["time", "memory"]) -> None:
    """Accuracy against time or memory; a thin line joins the objectives of one method."""
    found = {pair: cost(group) for pair, group in by_pair(records).items()}
    unit, label = unit_of_time(found) if of == "time" else (1.0, "peak memory (MB)")
    at = {}
    for pair, one in found.items():
        accuracy = _accuracy(records, pair)
        if accuracy is not None:
            at[pair] = (one.seconds_per_image if of == "time" else one.memory_mb) / unit, accuracy
    for pair, (x, y) in at.items():
        look = looks[pair]
        ends = [point for other, point in at.items() if other[0] == pair[0]]
        ax.plot(*zip(*ends, strict=True), color=look.colour, linewidth=0.8, alpha=0.3, zorder=1)
        said = f"{look.label}: {y:.1f}%, {label} {x:.3g}"
        ax.plot([x], [y], **look.line | {"markersize": 6, "label": said})
    xs, ys = zip(*at.values(), strict=True)
    ax.set(xlim=around(xs, 0.4 * max(xs) or 1.0), ylim=around(ys, POINTS))
    ax.set(xlabel=label, ylabel="accuracy (%)")
    ax.locator_params(axis="both", nbins=5)
    ax.grid()


class Strips(NamedTuple):
    """What the strips of the timeline show, from the lowest to the highest value: in words, as numbers, as colours."""

    name: str
    title: str
    ends: tuple[str, str]
    limits: tuple[float, float]
    colours: tuple[tuple[float, str, float], ...]
    """Place from 0 to 1, colour, and how strong: nothing where nothing went wrong, which fits light and dark."""


STRIPS = (
    Strips(
        "relative", "Accuracy against the source's at the same place", ("30 points below", "30 points above"), (-0.3, 0.3),
        ((0, WORSE, 1), (0.5, WORSE, 0), (0.5, BETTER, 0), (1, BETTER, 1)),
    ),
    Strips("share", "Share of the class that is predicted most", ("0%", "100%"), (0, 1), ((0, WORSE, 0), (1, WORSE, 1))),
)  # fmt: skip


def timelines(pieces: Sequence[Piece]) -> list[Strips]:
    """The strips that can be drawn: those against the source need it, and something else."""
    return [strips for strips in STRIPS if strips.name != "relative" or has_source(pieces)]


def draw_timeline(ax: Axes, pieces: Sequence[Piece], looks: Looks, strips: Strips) -> None:
    """A strip per method and objective, along the first domains one after the other; strong colour is where it went wrong."""
    domains = list(dict.fromkeys(piece.domain for piece in pieces))[:DOMAINS]
    pairs = [pair for pair in looks if pair[0] != "source" or strips.name != "relative"]
    values = _strips(pieces, strips.name)
    picture = np.full((len(pairs), PARTS * len(domains)), np.nan)
    for row, pair in enumerate(pairs):
        for column, domain in enumerate(domains):
            here = values.get((pair, domain))
            if here is None:
                ax.text(column + 0.5, row + 0.5, "·", ha="center", va="center", color=SOFT)
            else:
                picture[row, column * PARTS : (column + 1) * PARTS] = np.mean(here, axis=0)
    _draw_colours(ax, picture, strips, (0, len(domains), len(pairs), 0))
    ax.set_yticks([i + 0.5 for i in range(len(pairs))], [looks[pair].label for pair in pairs])
    every = -(-len(domains) // 16)  # more names would run into each other
    ax.set_xticks(
        [j + 0.5 for j in range(0, len(domains), every)], [cut(SHORT.get(d, d), 14) for d in domains[::every]]
    )
    ax.xaxis.tick_top()
    ax.tick_params(length=0, labelsize=8)
    ax.hlines(range(1, len(pairs)), 0, len(domains), colors=FAINT, linewidth=0.5)
    ax.vlines(range(len(domains) + 1), 0, len(pairs), colors=SOFT, linewidth=min(0.8, 16 / len(domains)))
    ax.spines[:].set_visible(False)
    ax.set_title(strips.title, pad=24)
    # the key to the colours, above at the right
    width, height = ax.get_window_extent().width, ax.get_window_extent().height
    key = ax.inset_axes((1 - 170 / width, 1 + 24 / height, 100 / width, 8 / height))
    _draw_colours(key, np.linspace(*strips.limits, 60)[None], strips, (0, 1, 0, 1))
    key.set_yticks([])
    key.set_xticks([0, 1], list(strips.ends))
    key.tick_params(length=0, labelsize=7.5)
    key.spines[:].set_linewidth(0.5)


def _draw_colours(ax: Axes, values: Numbers, strips: Strips, extent: tuple[float, float, float, float]) -> None:
    from matplotlib.colors import LinearSegmentedColormap, to_rgba

    colours = [(place, to_rgba(colour, alpha)) for place, colour, alpha in strips.colours]
    low, high = strips.limits
    shade = LinearSegmentedColormap.from_list(strips.name, colours)
    ax.imshow(values, shade, aspect="auto", interpolation="none", extent=extent, vmin=low, vmax=high)


def _strips(pieces: Sequence[Piece], name: str) -> dict[tuple[tuple[str, str], str], list[Numbers]]:
    """By method and objective and domain: PARTS values for each seed."""
    source = {(p.domain, p.seed): p.along["accuracy"] for p in pieces if p.pair[0] == "source"}
    found: dict[tuple[tuple[str, str], str], list[Numbers]] = {}
    for piece in pieces:
        value = _repeated(piece.along["dominant_share" if name == "share" else "accuracy"])
        if name == "relative":
            if (piece.domain, piece.seed) not in source:
                continue
            value = value - _repeated(source[piece.domain, piece.seed])
        found.setdefault((piece.pair, piece.domain), []).append(value)
    return found


def _repeated(values: Numbers) -> Numbers:
    """PARTS values, each repeated as needed."""
    return values[np.arange(PARTS) * len(values) // PARTS]


def legend_lines(looks: Looks) -> list[Line2D]:
    """A sample of each line, for a legend."""
    from matplotlib.lines import Line2D

    return [Line2D([], [], **look.line) for look in looks.values()]


def legend_kinds(kinds: Iterable[str]) -> list[Line2D]:
    """The same of kinds of samples."""
    from matplotlib.lines import Line2D

    return [Line2D([], [], color=KIND_STYLES[k][0], linestyle=KIND_STYLES[k][1], label=k) for k in kinds]


def draw_sample(ax: Axes, look: Look) -> None:
    """A sample of one line, for a legend of its own: 34 by 10 points, without a name that others refer to."""
    from matplotlib.markers import MarkerStyle
    from matplotlib.patches import PathPatch
    from matplotlib.transforms import Affine2D

    ax.axis("off")
    ax.set(xlim=(0, 34), ylim=(0, 10))
    ax.plot([1, 33], [5, 5], color=look.colour, linestyle=look.dash, linewidth=1.3, clip_on=False)
    marker = MarkerStyle(look.marker)
    path = marker.get_path().transformed(marker.get_transform() + Affine2D().scale(3.6).translate(17, 5))
    face = "none" if look.hollow else look.colour
    ax.add_patch(PathPatch(path, facecolor=face, edgecolor=look.colour, linewidth=0.8, clip_on=False))


@contextmanager
def drawing() -> Iterator[None]:
    """The style of all figures, for the length of a block; what matplotlib had set before comes back behind it."""
    import matplotlib

    with matplotlib.rc_context(STYLE), warnings.catch_warnings():
        # a name in an alphabet that the font lacks is drawn as boxes in PDF and PNG; SVG uses the reader's fonts
        warnings.filterwarnings("ignore", message=r"Glyph \d+ .* missing from font", category=UserWarning)
        yield


STYLE: Any = {
    "font.family": "DejaVu Sans", "font.size": 8, "axes.titlesize": 8.5, "axes.labelsize": 8, "axes.titlelocation": "left",
    "axes.titleweight": "bold", "axes.titley": 1.0, "text.color": INK, "axes.labelcolor": SOFT, "axes.titlecolor": INK,
    "axes.edgecolor": SOFT,
    "xtick.color": SOFT, "ytick.color": SOFT, "xtick.labelsize": 7.5, "ytick.labelsize": 7.5, "axes.linewidth": 0.7,
    "axes.spines.top": False, "axes.spines.right": False, "grid.color": FAINT, "grid.linewidth": 0.6, "axes.axisbelow": True,
    "figure.dpi": 72, "savefig.dpi": 200, "legend.frameon": False, "text.parse_math": False, "axes.formatter.useoffset": False,
    "axes.unicode_minus": True, "svg.fonttype": "none", "svg.hashsalt": "come", "pdf.fonttype": 42, "path.simplify": True,
}  # fmt: skip


NO_DATE: dict[str, dict[str, Any]] = {"pdf": {"CreationDate": None}, "svg": {"Date": None}, "png": {}}
"""What keeps the time of writing out of a file."""
