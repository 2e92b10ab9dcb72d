"""Panels of figures, drawn with matplotlib: the way along the stream, confidence, cost, and where something collapsed.

A panel is a function that draws on axes. Files hold many panels in one figure (`figures.py`), the page holds each as a drawing
of its own, so that it can flow on a phone (`html.py`). matplotlib is imported when something is drawn.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from come.bench.report.labels import place_labels
from come.bench.report.reading import BINS, KINDS, STRETCHES, Numbers, Piece, Way, along
from come.bench.report.tables import AVERAGE, SHORT, entries, objectives_of, pair_of
from come.bench.store import Record

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

INK, SOFT, FAINT = "#1d2126", "#6a7078", "#d5d9de"
"""Text, axes and grid."""

PALETTE = ("#0067a5", "#c94f00", "#00805e", "#a0479b", "#9a7200", "#1791b5", "#882255", "#5a5f9e")
"""Of methods; told apart with the usual colour-vision deficiencies, and by the markers without colour."""

BETTER, WORSE = "#0067a6", "#c95000"
RIGHT, WRONG, OUTLIER = "#0067a7", "#c95100", "#6a7079"
"""Colours of their own, if only by a digit, so that the page can name them."""

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
            label = method if len(objectives) == 1 else f"{method} + {objective}"
            dash = DOTS if alone else dashes[objective]
            found[method, objective] = Look(label, colour, dash, marker, objective == "em" and not alone)
    return found


@dataclass(frozen=True)
class Measure:
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


def draw_trajectory(ax: Axes, ways: Sequence[Way], looks: Looks, measure: Measure, points: int = 100) -> None:
    """One measure along one way: a line per method and objective, with a band of one deviation over seeds.

    Where several domains follow each other, thin lines stand between them.
    """
    shown: list[float] = []
    length = 1.0
    alpha = min(0.14, 0.35 / len(looks))  # many bands on each other would be a wall
    for pair, look in looks.items():
        chosen = [way for way in ways if way.pair == pair]
        if not chosen:
            continue
        samples, mean, spread = along(chosen, measure.name)
        keep = np.unique(np.linspace(0, len(samples) - 1, min(points, len(samples))).round().astype(int))
        samples, mean = samples[keep], measure.scale * mean[keep]
        length = max(length, samples[-1])
        low = high = mean
        if spread is not None:
            low, high = mean - measure.scale * spread[keep], mean + measure.scale * spread[keep]
            ax.fill_between(samples, low, high, color=look.colour, alpha=alpha, linewidth=0)
        every = max(1, len(samples) // 3)
        _line(ax, samples, mean, look, markevery=(len(shown) // 2 % every, every))
        settled = samples >= samples[-1] / 10
        shown += [float(np.nanmin(low[settled], initial=np.inf)), float(np.nanmax(high[settled], initial=-np.inf))]
    for border in ways[0].borders:
        ax.axvline(border, color=FAINT, linewidth=0.6, zorder=0)
    _limits(ax, shown)
    ax.set_xlim(0, length)
    ax.set_xlabel("samples seen")
    ax.set_title(measure.title)
    ax.locator_params(axis="both", nbins=4)
    ax.grid(axis="y")


def _line(ax: Axes, x: Numbers, y: Numbers, look: Look, **more: Any) -> None:
    ax.plot(
        x, y, color=look.colour, linestyle=look.dash, marker=look.marker, markersize=3.2,
        markerfacecolor="none" if look.hollow else look.colour, markeredgewidth=0.8, linewidth=1.3, **more,
    )  # fmt: skip


def _limits(ax: Axes, shown: Sequence[float]) -> None:
    """The axis follows what is shown behind the first tenth: before it, all numbers are of a handful of samples."""
    finite = [value for value in shown if np.isfinite(value)]
    if finite:
        low, high = min(finite), max(finite)
        margin = 0.06 * (high - low) or 0.05 * abs(high) or 0.05
        ax.set_ylim(low - margin, high + margin)


KIND_STYLES: dict[str, tuple[str, Dash, float]] = {
    "right": (RIGHT, (0.0, ()), 0.22),
    "wrong": (WRONG, DASHES["em"], 0.22),
    "outlier": (OUTLIER, DOTS, 0.0),
}
"""Colour, dashes and strength of the area of each kind of sample."""


def draw_confidence(ax: Axes, pieces: Sequence[Piece]) -> None:
    """How confident right, wrong and outlying samples are: the share of each kind in each bin of the confidence."""
    edges = np.linspace(0, 1, BINS + 1)
    for kind in KINDS:
        counts = sum((piece.counts[kind] for piece in pieces), np.zeros(BINS))
        if not counts.sum():
            continue
        colour, dash, alpha = KIND_STYLES[kind]
        share = 100 * counts / counts.sum()
        ax.stairs(share, edges, fill=True, color=colour, alpha=alpha, linewidth=0)
        ax.stairs(share, edges, color=colour, linestyle=dash, linewidth=1.2)
    ax.set_xlim(0, 1)
    ax.set_ylim(bottom=0)


@dataclass(frozen=True)
class Cost:
    """What a method with an objective takes, over all of its cells."""

    seconds_per_image: float
    """Without waiting for data."""
    memory_mb: float
    accuracy: float | None
    """Averaged over domains and seeds, in percent."""


def costs(records: Sequence[Record]) -> dict[tuple[str, str], Cost]:
    """The cost of each method and objective."""
    groups: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        groups.setdefault(pair_of(record), []).append(record)
    found = {}
    for pair, group in groups.items():
        busy = sum(r.result["seconds"] - r.result["seconds_waiting_for_data"] for r in group)
        (entry,) = entries(records, *pair, [(AVERAGE, "accuracy")])
        images = max(1, sum(r.result["samples"] for r in group))
        memory = max(r.result["peak_memory_mb"] for r in group)
        found[pair] = Cost(max(busy, 0.0) / images, memory, None if entry is None else entry.mean)
    return found


def comparable(records: Sequence[Record]) -> bool:
    """Whether anything ran on all domains, so that its cost can be set against its accuracy."""
    return any(cost.accuracy is not None for cost in costs(records).values())


def unit_of_time(found: Mapping[tuple[str, str], Cost]) -> tuple[float, str]:
    """Seconds per image that count as one, and what to call it: the source's where it ran, else a millisecond."""
    source = next((cost.seconds_per_image for (method, _), cost in found.items() if method == "source"), 0.0)
    return (source, "time per image (source = 1)") if source else (1e-3, "time per image (ms)")


def draw_cost(ax: Axes, records: Sequence[Record], looks: Looks, of: Literal["time", "memory"]) -> None:
    """Accuracy against time or memory; a thin line joins the objectives of one method."""
    found = {pair: cost for pair, cost in costs(records).items() if cost.accuracy is not None}
    unit, label = unit_of_time(found) if of == "time" else (1.0, "peak memory (MB)")
    at = {
        p: ((c.seconds_per_image if of == "time" else c.memory_mb) / unit, c.accuracy or 0.0) for p, c in found.items()
    }
    for method in {pair[0]: None for pair in at}:
        ends = [point for pair, point in at.items() if pair[0] == method]
        ax.plot(*zip(*ends, strict=True), color=looks_of(method, looks).colour, linewidth=0.8, alpha=0.6, zorder=1)
    for pair, (x, y) in at.items():
        look = looks[pair]
        face = "none" if look.hollow else look.colour
        ax.plot([x], [y], marker=look.marker, color=look.colour, markerfacecolor=face, markersize=6, linestyle="none")
    _frame(ax, list(at.values()))
    ax.set_xlabel(label)
    ax.set_ylabel("accuracy (%)")
    ax.locator_params(axis="both", nbins=5)
    ax.grid()
    place_labels(ax, [(look.label, look.colour, at[pair]) for pair, look in looks.items() if pair in at])


def _frame(ax: Axes, points: Sequence[tuple[float, float]]) -> None:
    """Limits with room for labels; a difference that says nothing is not blown up to fill the axis."""
    for values, least, limit in (
        ([x for x, _ in points], 0.05 * max(x for x, _ in points), ax.set_xlim),
        ([y for _, y in points], 2.0, ax.set_ylim),
    ):
        middle, half = (max(values) + min(values)) / 2, max(max(values) - min(values), least) * 0.68
        limit(middle - half, middle + half)


def looks_of(method: str, looks: Looks) -> Look:
    """The first look of a method."""
    return next(look for (name, _), look in looks.items() if name == method)


@dataclass(frozen=True)
class Strips:
    """What the strips of the timeline show."""

    name: str
    title: str
    ends: tuple[str, str]


STRIPS = (
    Strips("relative", "Accuracy against the source's at the same place", ("50 points below", "50 points above")),
    Strips("share", "Share of the class that is predicted most", ("0%", "100%")),
)


def timelines(pieces: Sequence[Piece]) -> list[Strips]:
    """The strips that can be drawn: those against the source need it, and something else."""
    methods = {piece.method for piece in pieces}
    return [strips for strips in STRIPS if strips.name != "relative" or ("source" in methods and len(methods) > 1)]


def draw_timeline(ax: Axes, pieces: Sequence[Piece], looks: Looks, strips: Strips) -> None:
    """A strip per method and objective, along all domains one after the other; strong colour is where it went wrong."""
    domains = list(dict.fromkeys(piece.domain for piece in pieces))
    pairs = [pair for pair in looks if pair[0] != "source" or strips.name != "relative"]
    picture = np.zeros((len(pairs), STRETCHES * len(domains), 4))
    for i, pair in enumerate(pairs):
        for j, domain in enumerate(domains):
            values = _strip(pieces, pair, domain, strips.name)
            picture[i, j * STRETCHES : (j + 1) * STRETCHES] = _colours(values, strips.name)
    ax.imshow(picture, aspect="auto", interpolation="none", extent=(0, len(domains), len(pairs), 0))
    for row, pair in enumerate(pairs):
        for column, domain in enumerate(domains):
            if not any(p.pair == pair and p.domain == domain for p in pieces):
                ax.text(column + 0.5, row + 0.5, "·", ha="center", va="center", color=SOFT)
    ax.set_yticks([i + 0.5 for i in range(len(pairs))], [looks[pair].label for pair in pairs])
    every = -(-len(domains) // 16)  # more names would run into each other
    ax.set_xticks([j + 0.5 for j in range(0, len(domains), every)], [SHORT.get(d, d) for d in domains[::every]])
    ax.xaxis.tick_top()
    ax.tick_params(length=0, labelsize=8)
    ax.hlines(range(1, len(pairs)), 0, len(domains), colors=FAINT, linewidth=0.5)
    ax.vlines(range(len(domains) + 1), 0, len(pairs), colors=SOFT, linewidth=min(0.8, 16 / len(domains)))
    ax.spines[:].set_visible(False)


def _strip(pieces: Iterable[Piece], pair: tuple[str, str], domain: str, name: str) -> Numbers:
    """One value per stretch, the mean over seeds; NaN where there is none."""
    here = {(p.method, p.objective, p.seed): p.stretches for p in pieces if p.domain == domain}
    source = {seed: stretches for (method, _, seed), stretches in here.items() if method == "source"}
    values = []
    for (method, objective, seed), stretches in here.items():
        if (method, objective) != pair or (name == "relative" and seed not in source):
            continue
        value = stretches["accuracy"] if name == "relative" else stretches["dominant_share"]
        values.append(_stretched(value) - (_stretched(source[seed]["accuracy"]) if name == "relative" else 0))
    return np.mean(values, axis=0) if values else np.full(STRETCHES, np.nan)


def _stretched(values: Numbers) -> Numbers:
    """STRETCHES values, each repeated as needed."""
    return values[np.arange(STRETCHES) * len(values) // STRETCHES]


def _colours(values: Numbers, name: str) -> Numbers:
    """RGBA for each value: nothing at 0, ever stronger away from it, so that it works on light and on dark."""
    strength = np.clip(np.abs(np.nan_to_num(values)) * (2 if name == "relative" else 1), 0, 1)
    picture = np.empty((len(values), 4))
    picture[:, :3] = np.where(np.nan_to_num(values)[:, None] > 0, _rgb(BETTER), _rgb(WORSE))
    if name == "share":
        picture[:, :3] = _rgb(WORSE)
    picture[:, 3] = strength**0.8
    return picture


def _rgb(colour: str) -> list[float]:
    return [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]


def draw_scale(ax: Axes, strips: Strips) -> None:
    """The key to the colours of a timeline."""
    values = np.linspace(-0.5 if strips.name == "relative" else 0, 0.5 if strips.name == "relative" else 1, 60)
    ax.imshow(_colours(values, strips.name)[None], aspect="auto", interpolation="none", extent=(0, 1, 0, 1))
    ax.set_yticks([])
    ax.set_xticks([0, 1], list(strips.ends))
    ax.tick_params(length=0, labelsize=7.5)
    ax.spines[:].set_linewidth(0.5)


def legend_lines(looks: Looks) -> list[Line2D]:
    """A sample of each line, for a legend."""
    from matplotlib.lines import Line2D

    return [
        Line2D(
            [], [], color=k.colour, linestyle=k.dash, marker=k.marker, markersize=3.6, linewidth=1.3, label=k.label,
            markerfacecolor="none" if k.hollow else k.colour, markeredgewidth=0.8,
        )
        for k in looks.values()
    ]  # fmt: skip


def swatch(look: Look) -> Figure:
    """A sample of one line, for a legend outside of the figures."""
    from matplotlib.lines import Line2D

    figure = new_figure(34, 10)
    figure.add_artist(
        Line2D(
            [0.03, 0.5, 0.97], [0.5] * 3, color=look.colour, linestyle=look.dash, marker=look.marker, markevery=[1],
            markersize=4, linewidth=1.5, markerfacecolor="none" if look.hollow else look.colour, markeredgewidth=0.9,
        )
    )  # fmt: skip
    return figure


@contextmanager
def drawing() -> Iterator[None]:
    """The style of all figures, for the length of a block; what matplotlib had set before comes back behind it."""
    import matplotlib

    with matplotlib.rc_context(STYLE), warnings.catch_warnings():
        # a name in an alphabet that the font lacks is drawn as boxes; the page uses the reader's fonts
        warnings.filterwarnings("ignore", message=r"Glyph \d+ .* missing from font", category=UserWarning)
        yield


STYLE: Any = {
    "font.family": "DejaVu Sans", "font.size": 8, "axes.titlesize": 8.5, "axes.labelsize": 8, "axes.titlelocation": "left",
    "axes.titleweight": "bold", "text.color": INK, "axes.labelcolor": SOFT, "axes.titlecolor": INK, "axes.edgecolor": SOFT,
    "xtick.color": SOFT, "ytick.color": SOFT, "xtick.labelsize": 7.5, "ytick.labelsize": 7.5, "axes.linewidth": 0.7,
    "axes.spines.top": False, "axes.spines.right": False, "grid.color": FAINT, "grid.linewidth": 0.6, "axes.axisbelow": True,
    "figure.dpi": 72, "savefig.dpi": 200, "legend.frameon": False, "text.parse_math": False, "axes.formatter.useoffset": False,
    "axes.unicode_minus": True, "svg.fonttype": "none", "svg.hashsalt": "come", "pdf.fonttype": 42, "path.simplify": True,
}  # fmt: skip


NO_DATE: dict[str, dict[str, Any]] = {"pdf": {"CreationDate": None}, "svg": {"Date": None}, "png": {}}
"""What keeps the time of writing out of a file."""


def new_figure(width: float, height: float, **more: Any) -> Figure:
    """A figure of that many points, with nothing behind it."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width / 72, height / 72), **more)


def stacks(looks: Looks) -> list[list[tuple[str, str]]]:
    """The pairs of each method, to stand under each other; methods with one objective share a stack."""
    by_method: dict[str, list[tuple[str, str]]] = {}
    for pair in looks:
        by_method.setdefault(pair[0], []).append(pair)
    high = max(map(len, by_method.values()))
    alone = [pairs[0] for pairs in by_method.values() if len(pairs) == 1]
    shared = [alone[i : i + high] for i in range(0, len(alone), high)]
    return [*shared, *(pairs for pairs in by_method.values() if len(pairs) > 1)]


def draw_confidences(
    axes: Sequence[Axes], pieces: Sequence[Piece], looks: Looks, pairs: Sequence[tuple[str, str]]
) -> None:
    """The pairs under each other, on one scale: of square roots, for most of a kind is often in one bin."""
    for ax, pair in zip(axes, pairs, strict=True):
        draw_confidence(ax, [piece for piece in pieces if piece.pair == pair])
        ax.set_title(looks[pair].label)
    top = max(5.0, *(ax.get_ylim()[1] for ax in axes))
    for ax in axes:
        ax.set_yscale("function", functions=(lambda y: np.sqrt(np.maximum(y, 0)), np.square))
        ax.set_ylim(0, top)
        ax.set_yticks([tick for tick in (0, 1, 5, 20, 50, 100) if tick <= top], minor=False)
        ax.set_ylabel("% of kind")
    axes[-1].set_xlabel("confidence")


def fill_timeline(
    figure: Figure, pieces: Sequence[Piece], looks: Looks, strips: Strips, *, bottom: float, height: float
) -> None:
    """A timeline with its title and its key, in a band of the figure that begins `bottom` points above its foot."""
    width, total = (72 * side for side in figure.get_size_inches())
    left = 8 + 5.2 * max(len(look.label) for look in looks.values())

    def place(x: float, y: float, w: float, h: float) -> Axes:
        return figure.add_axes((x / width, (bottom + y) / total, w / width, h / total))

    draw_timeline(place(left, 8, width - left - 8, height - 54), pieces, looks, strips)
    draw_scale(place(width - 190, height - 18, 100, 8), strips)
    figure.text(left / width, (bottom + height - 18) / total, strips.title, fontweight="bold", fontsize=8.5)
