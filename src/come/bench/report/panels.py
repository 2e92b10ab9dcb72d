"""Draws single panels with matplotlib: functions that draw on axes, which `figures.py` puts into files and pages.

matplotlib is imported when something is drawn.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from come.bench.record import Record
from come.bench.report.costs import Cost, by_pair, cost, unit_of_time, unlike
from come.bench.report.reading import BINS, COVERAGES, KINDS, PARTS, Numbers, Piece, Segment, over_seeds
from come.bench.report.tables import average_accuracy, cut, objectives_of, short, sweeps

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.lines import Line2D

INK, SOFT, FAINT = "#1d2126", "#6a7078", "#d5d9de"  # text, axes and grid
PALETTE = ("#0067a5", "#c94f00", "#00805e", "#a0479b", "#9a7200", "#1791b5", "#882255", "#5a5f9e")
"""Of methods; told apart with the usual colour-vision deficiencies, and by the markers without colour."""
BETTER, WORSE = PALETTE[:2]

DOMAINS = 200  # that are told apart along a stream; more would be thinner than a line
POINTS = 10.0  # of accuracy or another percentage that an axis spans at least
IMAGES = 60  # of which an accuracy is drawn, at least
PIECES = 128  # points of a line of the overview, at most; a domain has one at least
LEAST = 20  # samples in a bin of the reliability diagram, at least

MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
Dash = tuple[float, tuple[float, ...]]
DASHES: dict[str, Dash] = {"em": (0.0, (3.5, 1.6)), "come": (0.0, ())}
OTHER_DASHES: tuple[Dash, ...] = ((0.0, (6.0, 1.5, 1.0, 1.5)), (0.0, (6.0, 1.5, 1.0, 1.5, 1.0, 1.5)))
STROKE = {"markersize": 3.2, "markeredgewidth": 0.8, "linewidth": 1.3}
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
    def series(self) -> str:
        """What all that is drawn of it is called in an SVG."""
        return f"s{self.number}"

    @property
    def face(self) -> str:
        """The colour inside its marker."""
        return "none" if self.hollow else self.colour

    @property
    def line(self) -> dict[str, Any]:
        """Arguments of a line of matplotlib."""
        look = {"color": self.colour, "linestyle": self.dash, "marker": self.marker, "markerfacecolor": self.face}
        return look | STROKE | {"label": self.label, "gid": self.series}


Looks = Mapping[tuple[str, str], Look]


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
        colour, marker = SOFT, "o"
        if method != "source":
            number = coloured.index(method)
            colour = PALETTE[number % len(PALETTE)]
            marker = MARKERS[(number + number // len(PALETTE)) % len(MARKERS)]
        alone = len(objectives) == 1 and (several or method == "source")
        for objective in objectives:
            label = cut(method) + (f" + {cut(objective)}" if len(objectives) > 1 else "")
            dash = DOTS if alone else dashes[objective]
            found[method, objective] = Look(len(found), label, colour, dash, marker, objective == "em" and not alone)
    return found


class Measure(NamedTuple):
    """A column of the trajectories as a panel."""

    name: str
    title: str
    least: float  # what the axis spans at least, so that noise does not fill it
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


def draw_trajectory(ax: Axes, segments: Sequence[Segment], looks: Looks, measure: Measure, points: int = 100) -> None:
    """One measure along one segment: a line per method and objective, with a band of one standard deviation over seeds."""
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
            low, high = (mean + sign * measure.scale * spread[keep] for sign in (-1, 1))
            ax.fill_between(samples, low, high, color=look.colour, alpha=alpha, linewidth=0, gid=look.series)
        every = max(1, len(samples) // 3)
        ax.plot(samples, mean, **look.line, markevery=(len(shown) // 2 % every, every))
        settled = samples >= samples[-1] / 10  # before, all numbers are of a handful of samples
        shown += [float(np.nanmin(low[settled], initial=np.inf)), float(np.nanmax(high[settled], initial=-np.inf))]
    for border in segments[0].borders[:DOMAINS]:
        ax.axvline(border, color=FAINT, linewidth=0.6, zorder=0)
    ax.set(xlim=(0, length), ylim=around(shown, measure.least), xlabel="samples seen", title=measure.title)
    _mark(ax, grid="y", bins=4)


def _mark(ax: Axes, grid: Literal["both", "y"] = "both", bins: int = 5) -> None:
    ax.locator_params(axis="both", nbins=bins)
    ax.grid(axis=grid)


def around(values: Iterable[float], least: float) -> tuple[float, float]:
    """Limits of an axis around the values, at least so far apart: small differences must not fill it.

    >>> around([34.0, 36.0], 10.0)
    (30.0, 40.0)
    >>> around([], 10.0)
    (-5.0, 5.0)
    """
    finite = [float(value) for value in values if np.isfinite(value)] or [0.0]
    middle, reach = (min(finite) + max(finite)) / 2, max(0.56 * (max(finite) - min(finite)), least / 2)
    return middle - reach, middle + reach


def draw_overview(ax: Axes, pieces: Sequence[Piece], looks: Looks) -> None:
    """Accuracy along the whole stream, minus the source's at the same place where that ran; all domains have one width.

    A line has a point for each eighth of a domain, or for a larger part if that has less than IMAGES images. It breaks where
    the method was reset.
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
    _name_domains(ax, domains)
    many = len(domains) > 6
    ax.tick_params(axis="x", length=0, rotation=40 if many else 0)
    for text in ax.get_xticklabels():
        text.set(ha="right" if many else "center", rotation_mode="anchor")
    ax.set(xlim=(0, len(domains)), ylim=around(shown, POINTS), title=overview_title(pieces))
    ax.locator_params(axis="y", nbins=5)
    ax.grid(axis="y")


def _name_domains(ax: Axes, domains: Sequence[str]) -> None:
    every = -(-len(domains) // 16)  # more names would run into each other
    places = range(0, len(domains), every)
    ax.set_xticks([j + 0.5 for j in places], [short(domains[j], 14) for j in places])


def overview_domains(pieces: Iterable[Piece]) -> list[str]:
    """Those that are drawn, in their order."""
    return list(dict.fromkeys(piece.domain for piece in pieces))[:DOMAINS]


def overview_title(pieces: Iterable[Piece]) -> str:
    """What the overview shows."""
    pieces = list(pieces)
    what = "mIoU" if any(piece.metric == "miou" for piece in pieces) else "Accuracy"
    return f"{what} along the stream" + (", minus the source's (points)" if has_source(pieces) else " (%)")


def has_source(pieces: Iterable[Piece]) -> bool:
    """Whether there is a source, and something else to compare with it."""
    methods = {piece.pair[0] for piece in pieces}
    return "source" in methods and len(methods) > 1


KIND_STYLES: Mapping[str, tuple[str, Dash, float]] = {  # colour, dashes, and opacity of the area
    "right": (BETTER, (0.0, ()), 0.22),
    "wrong": (WORSE, DASHES["em"], 0.22),
    "outlier": (SOFT, DOTS, 0.0),
}


def _counts(pieces: Sequence[Piece], pair: tuple[str, str], kind: str) -> Numbers:
    """How many samples of a kind have their confidence in each bin, over all domains and seeds."""
    return sum((p.counts[kind] for p in pieces if p.pair == pair), np.zeros(BINS))


def shares(pieces: Sequence[Piece], pair: tuple[str, str]) -> dict[str, Numbers]:
    """Of each kind of sample that there is, how many percent are in each bin of the confidence."""
    counts = {kind: _counts(pieces, pair, kind) for kind in KINDS}
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
    _mark(ax)


def draw_reliability(ax: Axes, pieces: Sequence[Piece], looks: Looks) -> None:
    """Accuracy against confidence, over all domains and seeds, in the 15 bins of the calibration error."""
    ax.plot([0, 100], [0, 100], color=SOFT, linewidth=0.8, zorder=1)
    centres = 100 * (np.arange(BINS // 2) + 0.5) / (BINS // 2)
    for pair, look in looks.items():
        right, wrong = (_counts(pieces, pair, kind).reshape(-1, 2).sum(axis=1) for kind in ("right", "wrong"))
        enough = right + wrong >= LEAST
        if enough.any():
            accuracy = 100 * right[enough] / (right + wrong)[enough]
            ax.plot(centres[enough], accuracy, **look.line, markevery=(look.number % 3, 3))
    ax.set(xlim=(0, 100), ylim=(0, 100), title="Reliability", xlabel="confidence (%)", ylabel="accuracy (%)")
    _mark(ax)


def _costs(records: Sequence[Record]) -> dict[tuple[str, str], tuple[Cost, float]]:
    """Cost and average accuracy of what ran on all domains."""
    found = {
        pair: (cost(group), average_accuracy(records, pair[:1], pair[1])[0]) for pair, group in by_pair(records).items()
    }
    return {pair: (one, accuracy.mean) for pair, (one, accuracy) in found.items() if accuracy is not None}


def can_draw_cost(records: Sequence[Record]) -> bool:
    """Whether costs can be compared, and something ran on all domains, so that it has an accuracy to set them against."""
    return not unlike(by_pair(records).values()) and bool(_costs(records))


def draw_cost(ax: Axes, records: Sequence[Record], looks: Looks, of: Literal["time", "memory"]) -> None:
    """Accuracy against time or memory; a thin line joins the objectives of one method."""
    unit, label, at = 1.0, "peak memory (MB)", _costs(records)
    if of == "time":
        unit, label = unit_of_time({pair: cost(group) for pair, group in by_pair(records).items()})
    points = {p: ((c.seconds_per_image if of == "time" else c.memory_mb) / unit, y) for p, (c, y) in at.items()}
    for pair, (x, y) in points.items():
        look = looks[pair]
        ends = [point for other, point in points.items() if other[0] == pair[0]]
        ax.plot(*zip(*ends, strict=True), color=look.colour, linewidth=0.8, alpha=0.3, zorder=1)
        ax.plot([x], [y], **look.line | {"markersize": 6, "label": f"{look.label}: {y:.1f}%, {label} {x:.3g}"})
    xs, ys = zip(*points.values(), strict=True)
    ax.set(xlim=around(xs, 0.4 * max(xs) or 1.0), ylim=around(ys, POINTS), xlabel=label)
    ax.set_ylabel("mIoU (%)" if records[0].cell.dense else "accuracy (%)")
    _mark(ax)


def draw_rates(ax: Axes, records: Sequence[Record], looks: Looks, name: str) -> None:
    """Average accuracy of a method against its learning rate, a line per objective; the source model is level."""
    rates = sweeps(records)[name]
    first = name if name in rates.values() else next(iter(rates.values()))  # the others take its look
    shown: list[float] = []
    for (method, objective), look in looks.items():
        if method not in (first, "source"):
            continue
        line = average_accuracy(records, ["source"] if method == "source" else rates.values(), objective)
        values = [math.nan if entry is None else entry.mean for entry in line]
        shown += values
        if method == "source":
            ax.axhline(values[0], **look.line | {"marker": ""})
        else:
            ax.plot(list(rates), values, **look.line | {"markersize": 5, "label": f"{name} + {objective}"})
    ax.set(xscale="log", ylim=around(shown, POINTS), xlabel="learning rate", title=name)
    ax.set_ylabel("mIoU (%)" if records[0].cell.dense else "accuracy (%)")
    ax.set_xticks(list(rates), [f"{rate:g}" for rate in rates])
    ax.minorticks_off()
    ax.locator_params(axis="y", nbins=5)
    ax.grid(axis="y")
    ax.legend(handlelength=3.2)


class Strips(NamedTuple):
    """What the strips of the timeline show, from the lowest to the highest value: in words, as numbers, as colours."""

    name: str
    title: str
    ends: tuple[str, str]
    limits: tuple[float, float]
    colours: tuple[tuple[float, str, float], ...]  # place from 0 to 1, colour, opacity: 0 where nothing went wrong


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
    domains = overview_domains(pieces)
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
    _name_domains(ax, domains)
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
    column = "dominant_share" if name == "share" else "accuracy"
    values = [piece.along[column][np.arange(PARTS) * len(piece.along[column]) // PARTS] for piece in pieces]
    source = {(p.domain, p.seed): v for p, v in zip(pieces, values, strict=True) if p.pair[0] == "source"}
    found: dict[tuple[tuple[str, str], str], list[Numbers]] = {}
    for piece, value in zip(pieces, values, strict=True):
        place = piece.domain, piece.seed
        if name != "relative" or place in source:
            value = value - source[place] if name == "relative" else value
            found.setdefault((piece.pair, piece.domain), []).append(value)
    return found


def legend(styles: Iterable[Mapping[str, Any]]) -> list[Line2D]:
    """A sample of each line, for a legend."""
    from matplotlib.lines import Line2D

    return [Line2D([], [], **style) for style in styles]


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
    ax.add_patch(PathPatch(path, facecolor=look.face, edgecolor=look.colour, linewidth=0.8, clip_on=False))


@contextmanager
def drawing() -> Iterator[None]:
    """A block with the style of all figures; matplotlib's settings are restored after it."""
    import matplotlib

    with matplotlib.rc_context(STYLE), warnings.catch_warnings():
        # PDF and PNG show boxes for alphabets that the font lacks; SVG uses the reader's fonts
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
"""Metadata that keep the time of writing out of a file."""
