"""Figures of a run, drawn with matplotlib: the way along the stream, confidence, cost, and where something collapsed.

Each figure is made of panels. A panel is a function that draws on axes; files hold many panels in one figure, the page
holds each as a drawing of its own, so that it can flow on a phone. matplotlib is imported when something is drawn.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from come.bench.store import Record, RunFolder
from come.errors import StateError, unknown
from come.files import replacing
from come.report.reading import BINS, KINDS, STRETCHES, Numbers, Piece, Reading, Way, along, read
from come.report.tables import AVERAGE, SHORT, entries, objectives_of, one_configuration, pair_of

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
        with drawing():
            for name, make in _whole_figures(records, found):
                path = out / f"{name}.{format}"
                with replacing(path) as beside:
                    make().savefig(beside, format=format, metadata=NO_DATE[format])
                written.append(path)
    except OSError as error:
        raise StateError(f"cannot write figures to {out}: {error.strerror}; choose another place for them") from error
    return written


NO_DATE: dict[str, dict[str, Any]] = {"pdf": {"CreationDate": None}, "svg": {"Date": None}, "png": {}}
"""What keeps the time of writing out of a file."""


def _whole_figures(records: Sequence[Record], found: Reading) -> Iterator[tuple[str, Callable[[], Figure]]]:
    shown = looks(records)
    names: set[str] = set()
    for way in dict.fromkeys(way.name for way in found.ways):
        chosen = [w for w in found.ways if w.name == way]
        yield f"trajectories-{_file_name(way, names)}", partial(_all_trajectories, chosen, shown)
    if found.pieces:
        yield "confidence", partial(_all_confidences, found.pieces, shown)
    if comparable(records):
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


def new_figure(width: float, height: float, **more: Any) -> Figure:
    """A figure of that many points, with nothing behind it."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width / 72, height / 72), **more)


def _all_trajectories(ways: Sequence[Way], looks: Looks) -> Figure:
    figure = new_figure(820, 390)
    figure.subplots_adjust(0.045, 0.09, 0.985, 0.88, wspace=0.24, hspace=0.5)
    axes = figure.subplots(2, 4).ravel()
    for ax, measure in zip(axes, MEASURES, strict=False):
        draw_trajectory(ax, ways, looks, measure)
    axes[-1].axis("off")
    lines = legend_lines(looks)
    axes[-1].legend(
        handles=lines, loc="upper left", handlelength=3.2, ncols=1 + (len(lines) - 1) // 12, borderaxespad=0
    )
    figure.suptitle(ways[0].name, x=0.01, ha="left", fontweight="bold")
    return figure


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


def _all_confidences(pieces: Sequence[Piece], looks: Looks) -> Figure:
    from matplotlib.lines import Line2D

    shown = stacks(looks)
    high = max(map(len, shown))
    bands = -(-len(shown) // 4)
    columns = -(-len(shown) // bands)
    figure = new_figure(210 * columns, 110 * high * bands + 40, layout="constrained")
    grid = figure.subplots(bands * high, columns, squeeze=False)
    for ax in grid.ravel():
        ax.axis("off")
    for i, pairs in enumerate(shown):
        band, column = divmod(i, columns)
        axes = [grid[band * high + k, column] for k in range(len(pairs))]
        for ax in axes:
            ax.axis("on")
        draw_confidences(axes, pieces, looks, pairs)
    kinds = [k for k in KINDS if any(piece.counts[k].sum() for piece in pieces)]
    handles = [Line2D([], [], color=KIND_STYLES[k][0], linestyle=KIND_STYLES[k][1], label=k) for k in kinds]
    figure.legend(handles=handles, loc="outside upper left", ncols=3)
    return figure


def _all_costs(records: Sequence[Record], looks: Looks) -> Figure:
    figure = new_figure(760, 300)
    figure.subplots_adjust(0.07, 0.14, 0.98, 0.96, wspace=0.2)
    left, right = figure.subplots(1, 2)
    draw_cost(left, records, looks, "time")
    draw_cost(right, records, looks, "memory")
    return figure


def _all_timelines(pieces: Sequence[Piece], looks: Looks) -> Figure:
    shown = timelines(pieces)
    part = 15 * len(looks) + 58
    figure = new_figure(760, part * len(shown))
    for i, strips in enumerate(shown):
        fill_timeline(figure, pieces, looks, strips, bottom=part * (len(shown) - 1 - i), height=part)
    return figure


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
