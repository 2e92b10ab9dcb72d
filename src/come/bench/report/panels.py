"""Panels of figures, drawn with matplotlib: along the stream, confidence, cost, and where something collapsed.

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
from come.bench.report.reading import BINS, KINDS, PARTS, Numbers, Piece, Segment, over_seeds
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

MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
Dash = tuple[float, tuple[float, ...]]
DASHES: dict[str, Dash] = {"em": (0.0, (3.5, 1.6)), "come": (0.0, ())}
OTHER_DASHES: tuple[Dash, ...] = ((0.0, (6.0, 1.5, 1.0, 1.5)), (0.0, (6.0, 1.5, 1.0, 1.5, 1.0, 1.5)))
DOTS: Dash = (0.0, (1.0, 1.5))


@dataclass(frozen=True)
class Look:
    """How a method with an objective is drawn, everywhere."""

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
        return {**style, "markersize": 3.2, "markeredgewidth": 0.8, "linewidth": 1.3, "label": self.label}


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
            found[method, objective] = Look(label, colour, dash, marker, objective == "em" and not alone)
    return found


class Measure(NamedTuple):
    """A column of the trajectories as a panel."""

    name: str
    title: str
    scale: float = 1.0


MEASURES = (
    Measure("accuracy", "Accuracy so far (%)", 100),
    Measure("fpr", "FPR so far (%)", 100),
    Measure("confidence", "Mean confidence"),
    Measure("entropy", "Mean entropy of softmax (nats)"),
    Measure("uncertainty", "Mean uncertainty u"),
    Measure("norm", "Mean norm of the logits"),
    Measure("dominant_share", "Share of the top class (%)", 100),
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
            ax.fill_between(samples, low, high, color=look.colour, alpha=alpha, linewidth=0)
        every = max(1, len(samples) // 3)
        ax.plot(samples, mean, **look.line, markevery=(len(shown) // 2 % every, every))
        settled = samples >= samples[-1] / 10
        shown += [float(np.nanmin(low[settled], initial=np.inf)), float(np.nanmax(high[settled], initial=-np.inf))]
    for border in segments[0].borders[:DOMAINS]:
        ax.axvline(border, color=FAINT, linewidth=0.6, zorder=0)
    _limits(ax, shown)
    ax.set(xlim=(0, length), xlabel="samples seen", title=measure.title)
    ax.locator_params(axis="both", nbins=4)
    ax.grid(axis="y")


def _limits(ax: Axes, shown: Sequence[float]) -> None:
    """The axis follows what is shown behind the first tenth: before it, all numbers are of a handful of samples."""
    finite = [value for value in shown if np.isfinite(value)]
    if finite:
        low, high = min(finite), max(finite)
        margin = 0.06 * (high - low) or 0.05 * abs(high) or 0.05
        ax.set_ylim(low - margin, high + margin)


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
        ax.stairs(share, np.linspace(0, 1, BINS + 1), fill=True, color=colour, alpha=alpha, linewidth=0)
        ax.stairs(share, np.linspace(0, 1, BINS + 1), color=colour, linestyle=dash, linewidth=1.2)
    # square roots, for most of a kind is often in one bin
    ax.set_yscale("function", functions=(lambda y: np.sqrt(np.maximum(y, 0)), np.square))
    ax.set(xlim=(0, 1), ylim=(0, top), xlabel="confidence", ylabel="% of kind", title=label)
    ax.set_yticks([tick for tick in (0, 1, 5, 20, 50, 100) if tick <= top], minor=False)


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
        ax.plot([x], [y], **look.line | {"markersize": 6})
    xs, ys = zip(*at.values(), strict=True)
    ax.set(xlim=_around(xs, 0), ylim=_around(ys, 2))
    ax.set(xlabel=label, ylabel="accuracy (%)")
    ax.locator_params(axis="both", nbins=5)
    ax.grid()


def _around(values: Sequence[float], least: float) -> tuple[float, float]:
    """Limits of an axis; a difference that says nothing is not blown up to fill it."""
    low, high = min(values), max(values)
    reach = 0.68 * max(high - low, least, 0.05 * max(-low, high)) or 1.0
    return (low + high) / 2 - reach, (low + high) / 2 + reach


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
        "relative", "Accuracy against the source's at the same place", ("50 points below", "50 points above"), (-0.5, 0.5),
        ((0, WORSE, 1), (0.5, WORSE, 0), (0.5, BETTER, 0), (1, BETTER, 1)),
    ),
    Strips("share", "Share of the class that is predicted most", ("0%", "100%"), (0, 1), ((0, WORSE, 0), (1, WORSE, 1))),
)  # fmt: skip


def timelines(pieces: Sequence[Piece]) -> list[Strips]:
    """The strips that can be drawn: those against the source need it, and something else."""
    methods = {piece.pair[0] for piece in pieces}
    return [strips for strips in STRIPS if strips.name != "relative" or ("source" in methods and len(methods) > 1)]


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
    """A sample of one line, for a legend of its own."""
    ax.axis("off")
    ax.set(xlim=(0, 1), ylim=(0, 1))
    ax.plot([0.03, 0.5, 0.97], [0.5] * 3, **look.line, markevery=[1])


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
