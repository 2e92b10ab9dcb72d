"""Settings: how streams follow each other. Each is a short generator of episodes, not a branch in the runner."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from come.bench.cell import Cell
from come.bench.data import Source, Stream
from come.bench.data.streams import OUTLIER, generator, shuffle, spread
from come.errors import ConfigError, InputError, shown
from come.registry import Registry


@dataclass(frozen=True)
class Episode:
    """One stream, and whether the method starts afresh before it."""

    stream: Stream
    reset: bool
    batch_size: int | None = None
    """None is the batch size of the run."""


Episodes = Callable[[Cell, Source, "Source | None"], Iterator[Episode]]
"""From the cell, its data and its outliers, if it has any, to the episodes, in order."""


@dataclass(frozen=True)
class Setting:
    """A generator of episodes and what a grid must know of it.

    Example:
        >>> from come.bench.data import FashionSource
        >>> cell = Cell(method="tent", objective="come", corruptions=("fog", "snow"), size=10)
        >>> [e.stream.domain for e in get("standard").episodes(cell, FashionSource(size=10), None)]
        ['fog', 'snow']
    """

    name: str
    summary: str
    episodes: Episodes
    pieces: str = "corruptions"
    """What can be run by itself, because the method is reset before it: each of the corruptions, each of the outliers, or
    nothing ("")."""
    hyper: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Hyperparameters that the paper changes for this setting, by method."""
    severity: int = 5
    """The paper's."""
    corruptions: tuple[str, ...] | None = None
    """The paper's, where it does not use all; () where nothing is corrupted."""
    reads: frozenset[str] = frozenset()
    """Fields of a plan that mean nothing in settings which do not name them."""
    ignores: frozenset[str] = frozenset()
    """Fields of a plan that mean nothing here."""
    labels: bool = False
    """Whether it needs a label for each image: it sorts by them, or mixes in images without one."""
    alone: bool = False
    """Whether each sample is answered by itself, from views of it: see `come.episodic`."""
    edition: int = 1
    """Raise it when the streams change: results of the old ones are then not taken for results of the new ones."""


def _check(name: str, thing: object) -> str:
    return "" if isinstance(thing, Setting) else f"must be a come.bench.settings.Setting, got {shown(thing)}"


_registry: Registry[Setting] = Registry("setting", entry_points="come.settings", check=_check)


def names() -> list[str]:
    """Names of all settings, the paper's first: "standard", "lifelong", ..."""
    return _registry.names()


def get(name: str) -> Setting:
    """The setting of that name."""
    return _registry.get(name)


def register(setting: Setting) -> Setting:
    """Make a setting available under its name, here and on the command line."""
    _registry.add(getattr(setting, "name", ""), setting)
    return setting


def samples(cell: Cell, source: Source) -> Sequence[int]:
    """Which samples of the data a cell uses, in ascending order: all, or `cell.size` of them, spread over the classes.

    They follow from the seed: every method, objective and corruption has the same.

    Example:
        >>> from come.bench.data import FashionSource
        >>> cell = Cell(method="tent", objective="come", corruptions=("fog",), size=3)
        >>> samples(cell, FashionSource(size=100))
        [38, 42, 98]
    """
    if cell.size >= len(source):
        return range(len(source))
    return spread(source.labels(), cell.size, cell.seed)


# ---- the paper's ----


def _stream(
    cell: Cell, domain: str, pairs: Iterable[tuple[int, int]], shifts: Iterable[tuple[str | None, int]], **more: Any
) -> Stream:
    """A stream of samples with different corruptions: indices, each with its place in `shifts`."""
    pairs = tuple(pairs)
    order, kinds = tuple(index for index, _ in pairs), tuple(kind for _, kind in pairs)
    given = {"order": order, "kinds": kinds, "shifts": tuple(shifts), "domain": domain}
    return Stream(data=cell.data, seed=cell.seed, **(given | more))


def _shuffled(cell: Cell, source: Source, corruption: str | None, domain: str | None = None) -> Stream:
    """All samples once, in the order of the seed."""
    order = shuffle(samples(cell, source), cell.seed)
    return Stream.of(cell.data, order, corruption, cell.level, cell.seed, domain)


def _standard(cell: Cell, source: Source, outliers: Source | None) -> Iterator[Episode]:
    for corruption in cell.corruptions:
        yield Episode(_shuffled(cell, source, corruption), reset=True)


def _lifelong(cell: Cell, source: Source, outliers: Source | None) -> Iterator[Episode]:
    for number in range(cell.rounds):
        for i, corruption in enumerate(cell.corruptions):
            domain = corruption if cell.rounds == 1 else f"{corruption} ({number + 1})"
            yield Episode(_shuffled(cell, source, corruption, domain), reset=number == i == 0)


PAPERS = ("gaussian_noise",)
"""Corruptions of the paper's open world."""


def _open_world(cell: Cell, source: Source, outliers: Source | None) -> Iterator[Episode]:
    for corruption in cell.corruptions:
        prefix = "" if cell.corruptions == PAPERS else f"{corruption}, "  # several must not share a column
        if cell.outliers is None or outliers is None:
            yield Episode(_shuffled(cell, source, corruption, f"{prefix}none"), reset=True)
            continue
        inside, outside = _mixture(cell.size, len(outliers), cell.outlier_ratio)
        known = [(i, 0) for i in shuffle(samples(cell, source), cell.seed)[:inside]]
        unknown = [(i, OUTLIER) for i in shuffle(range(len(outliers)), cell.seed, "outliers")[:outside]]
        pool = known + unknown
        pairs = [pool[i] for i in shuffle(range(len(pool)), cell.seed, "mixture")]
        domain, shifts = prefix + short(cell.outliers), [(corruption, cell.level)]
        yield Episode(_stream(cell, domain, pairs, shifts, outliers=cell.outliers), reset=True)


def short(spec: str) -> str:
    """What data is called in a table: by its list of images, else by its folder or name.

    >>> short("folder:/data/textures/"), short("openood:/data:list=lists/test_ninco.txt"), short("hf:acme/cats:split=test")
    ('textures', 'test_ninco', 'cats')
    """
    parts = spec.split(":")
    lists = [part.removeprefix("list=").removesuffix(".txt") for part in parts if part.startswith("list=")]
    named = lists or [part for part in parts if "=" not in part]
    return named[-1].rstrip("/").rpartition("/")[2] or spec


def _mixture(inside: int, outside: int, ratio: float) -> tuple[int, int]:
    """How many of each: the given share of outliers, the larger side cut down.

    >>> _mixture(1000, 300, 0.5), _mixture(1000, 5000, 0.3)
    ((300, 300), (1000, 429))
    """
    if not outside:
        raise InputError("the outlier source is empty; give one that holds images with --outliers")
    known = min(inside, round(outside * (1 - ratio) / ratio))
    return max(1, known), max(1, min(outside, round(known * ratio / (1 - ratio))))


def _imbalanced(cell: Cell, source: Source, outliers: Source | None) -> Iterator[Episode]:
    chosen = samples(cell, source)
    labels = source.labels()[list(chosen)].tolist()
    classes = shuffle(sorted(set(labels)), cell.seed)
    part = {label: i for i, label in enumerate(classes)}
    draw = generator(cell.seed, "parts")
    ratio, others = cell.imbalance, len(classes) - 1
    stay = 1.0 if ratio is None else ratio / (ratio + others)
    keys = []
    for label in labels:
        home = part[label]
        if others and float(torch.rand((), generator=draw)) >= stay:
            home = (home + 1 + int(torch.randint(others, (), generator=draw))) % len(classes)  # any part but its own
        keys.append(home)
    order = [chosen[i] for i in sorted(shuffle(range(len(labels)), cell.seed), key=lambda i: keys[i])]
    for corruption in cell.corruptions:
        yield Episode(Stream.of(cell.data, order, corruption, cell.level, cell.seed), reset=True)


def _mixed(cell: Cell, source: Source, outliers: Source | None) -> Iterator[Episode]:
    pairs = [(i, kind) for kind in range(len(cell.corruptions)) for i in samples(cell, source)]
    pairs = [pairs[i] for i in shuffle(range(len(pairs)), cell.seed)]
    shifts = [(corruption, cell.level) for corruption in cell.corruptions]
    yield Episode(_stream(cell, "mixed", pairs, shifts), reset=True)


def _in_distribution(cell: Cell, source: Source, outliers: Source | None) -> Iterator[Episode]:
    yield Episode(_shuffled(cell, source, None), reset=True)


# ---- beyond the paper ----


def _natural(cell: Cell, source: Source, outliers: Source | None) -> Iterator[Episode]:
    yield Episode(_shuffled(cell, source, None, short(cell.data)), reset=True)


def _gradual(cell: Cell, source: Source, outliers: Source | None) -> Iterator[Episode]:
    """Every corruption grows from severity 1 to 5 and fades again; one ninth of the samples at each level."""
    levels = (1, 2, 3, 4, 5, 4, 3, 2, 1)
    order = shuffle(samples(cell, source), cell.seed)
    parts = [order[i * len(order) // 9 : (i + 1) * len(order) // 9] for i in range(9)]
    kinds = tuple(level - 1 for level, part in zip(levels, parts, strict=True) for _ in part)
    for i, corruption in enumerate(cell.corruptions):
        shifts = tuple((corruption, level) for level in range(1, 6))
        yield Episode(_stream(cell, corruption, zip(order, kinds, strict=True), shifts), reset=i == 0)


def _changing(cell: Cell, source: Source, outliers: Source | None) -> Iterator[Episode]:
    """From each corruption to the next and from the last to the first, after CCC (Press et al., NeurIPS 2023), never reset.

    On the way from a to b, with severity L, an image is corrupted by a at severity L - k and then by b at severity k. The
    sample at place i of n has k = floor(L i / n), or one more with the probability frac(L i / n): no step is sharp.
    """
    if source.holds is not None:
        raise InputError(
            f"{source.name} holds corrupted images only; the changing setting needs clean ones: folder:PATH"
        )
    if len(cell.corruptions) < 2:
        raise ConfigError(
            f"corruptions must be at least two in the changing setting, got {', '.join(cell.corruptions)}"
        )
    last, chosen = cell.level, samples(cell, source)
    draw = generator(cell.seed, "fading")
    way = torch.arange(cell.size, dtype=torch.float64) * last / cell.size
    for i, (first, second) in enumerate(
        zip(cell.corruptions, (*cell.corruptions[1:], cell.corruptions[0]), strict=True)
    ):
        kinds = way.floor() + (torch.rand(cell.size, generator=draw, dtype=torch.float64) < way.frac())
        pairs = zip(shuffle(chosen, cell.seed, "pass", i), kinds.long().tolist(), strict=True)
        shifts = (*((first, last - k) for k in range(last)), (second, last))
        then = ((None, last), *((second, k) for k in range(1, last)), (None, last))
        yield Episode(_stream(cell, f"{first} to {second}", pairs, shifts, then=then), reset=i == 0)


def _recurring(cell: Cell, source: Source, outliers: Source | None) -> Iterator[Episode]:
    """The corruptions come back again and again, a tenth of the samples at a time."""
    order = shuffle(samples(cell, source), cell.seed)
    for number in range(10):
        part = order[number * len(order) // 10 : (number + 1) * len(order) // 10]
        for i, corruption in enumerate(cell.corruptions):
            domain = f"{corruption} ({number + 1})"
            stream = Stream.of(cell.data, part, corruption, cell.level, cell.seed, domain)
            yield Episode(stream, reset=number == i == 0)


def _small_batches(cell: Cell, source: Source, outliers: Source | None) -> Iterator[Episode]:
    for size in (64, 16, 4, 2, 1):
        for corruption in cell.corruptions:
            yield Episode(_shuffled(cell, source, corruption, f"{corruption}, batch {size}"), True, size)


NO_RECOVERY = {"sar": {"recover_below": 0.0}}
"""The paper switches SAR's recovery off where the model is never reset."""

OPEN_WORLD = frozenset({"outliers", "outlier_ratio"})
VIEWS = frozenset({"views"})

for _setting in (
    Setting("standard", "each corruption by itself, from the source model", _standard),
    Setting("lifelong", "one after the other, never reset; --rounds repeats them", _lifelong, "", NO_RECOVERY,
            reads=frozenset({"rounds"})),
    Setting("open-world", "mixed with outliers: --outliers, --outlier-ratio", _open_world, "outliers", severity=3,
            corruptions=PAPERS, reads=OPEN_WORLD, labels=True, edition=2),
    Setting("imbalanced", "sorted by class; --imbalance for a finite ratio", _imbalanced, reads=frozenset({"imbalance"}),
            labels=True, edition=2),
    Setting("mixed", "all corruptions in one shuffled stream", _mixed, ""),
    Setting("in-distribution", "clean images", _in_distribution, "", corruptions=(),
            ignores=frozenset({"corruptions", "severity"})),
    Setting("natural", "images that are shifted already, as they are: ImageNet-R, photos of your own", _natural, "",
            corruptions=(), ignores=frozenset({"corruptions", "severity"})),
    Setting("gradual", "severity 1 to 5 and back within each, never reset", _gradual, "", NO_RECOVERY,
            ignores=frozenset({"severity"})),
    Setting("changing", "each corruption fades into the next, never reset", _changing, "", NO_RECOVERY, edition=2),
    Setting("recurring", "a tenth of each at a time, ten times, never reset", _recurring, "", NO_RECOVERY),
    Setting("small-batches", "standard with batches of 64, 16, 4, 2 and 1", _small_batches,
            ignores=frozenset({"batch_size"})),
    Setting("episodic", "each image by itself: adapt to --views views of it, answer, forget", _standard,
            reads=VIEWS, ignores=frozenset({"batch_size"}), alone=True),
    Setting("episodic-natural", "the same for images that are shifted already", _natural, "", corruptions=(), reads=VIEWS,
            ignores=frozenset({"batch_size", "corruptions", "severity"}), alone=True),
):  # fmt: skip
    register(_setting)
