"""Settings: how streams follow each other. Each is a short generator of episodes, not a branch in the runner."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from come.bench.data.streams import OUTLIER, Stream, shuffle
from come.errors import ConfigError, InputError
from come.registry import Registry


@dataclass(frozen=True)
class World:
    """What a setting makes its streams of.

    Args:
        data: specification of the source.
        size: how many of its samples to use, the first ones.
        corruptions: in the order in which they come.
        severity: 1 to 5.
        seed: of every order.
        labels: gives the labels of these samples, for settings that sort by them.
        outliers: specification of the outlier source; None where there are none.
        outliers_size: how many samples that has.
        outlier_ratio: share of outliers in the stream, in (0, 1).
        imbalance: how many times likelier a class is in its own part of the stream; None is infinitely.
        rounds: how often lifelong streams go through the corruptions.
    """

    data: str
    size: int
    corruptions: tuple[str, ...]
    severity: int = 5
    seed: int = 0
    labels: Callable[[], list[int]] = list
    outliers: str | None = None
    outliers_size: int = 0
    outlier_ratio: float = 0.5
    imbalance: float | None = None
    rounds: int = 1

    def shuffled(self, corruption: str | None, severity: int | None = None, **more: Any) -> Stream:
        """All samples once, in the order of the seed."""
        severity = self.severity if severity is None else severity
        return Stream.shuffled(self.data, self.size, corruption=corruption, severity=severity, seed=self.seed, **more)


@dataclass(frozen=True)
class Episode:
    """One stream, and whether the method starts afresh before it."""

    stream: Stream
    reset: bool
    batch_size: int | None = None
    """None is the batch size of the run."""


Episodes = Callable[[World], Iterator[Episode]]


@dataclass(frozen=True)
class Setting:
    """A generator of episodes and what a grid must know of it.

    Example:
        >>> world = World("glyphs", 10, ("fog", "snow"))
        >>> [e.stream.domain for e in get("standard").episodes(world)]
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


_registry: Registry[Setting] = Registry("setting")


def names() -> list[str]:
    """Names of all settings, the paper's first.

    Example:
        >>> names()[:3]
        ['standard', 'lifelong', 'open-world']
    """
    return _registry.names()


def get(name: str) -> Setting:
    """The setting of that name.

    Example:
        >>> get("lifelong").hyper
        {'sar': {'recover_below': 0.0}}
    """
    return _registry.get(name)


def register(setting: Setting) -> Setting:
    """Make a setting available under its name, here and on the command line."""
    if not isinstance(setting, Setting):
        raise ConfigError(f"{setting!r} is not a come.bench.settings.Setting")
    _registry.add(setting.name, setting)
    return setting


# ---- the paper's ----


def _standard(world: World) -> Iterator[Episode]:
    for corruption in world.corruptions:
        yield Episode(world.shuffled(corruption), reset=True)


def _lifelong(world: World) -> Iterator[Episode]:
    for number in range(world.rounds):
        for i, corruption in enumerate(world.corruptions):
            domain = corruption if world.rounds == 1 else f"{corruption} ({number + 1})"
            yield Episode(world.shuffled(corruption, domain=domain), reset=number == i == 0)


def _open_world(world: World) -> Iterator[Episode]:
    for corruption in world.corruptions:
        if world.outliers is None:
            yield Episode(world.shuffled(corruption, domain="none"), reset=True)
            continue
        inside, outside = _mixture(world.size, world.outliers_size, world.outlier_ratio)
        known = [(i, 0) for i in shuffle(range(world.size), world.seed)[:inside]]
        unknown = [(i, OUTLIER) for i in shuffle(range(world.outliers_size), world.seed + 1)[:outside]]
        pool = known + unknown
        pairs = [pool[i] for i in shuffle(range(len(pool)), world.seed + 2)]
        stream = Stream(
            world.data,
            tuple(i for i, _ in pairs),
            ((corruption, world.severity),),
            tuple(kind for _, kind in pairs),
            world.seed,
            world.outliers.rpartition(":")[2].rstrip("/").rpartition("/")[2],
            world.outliers,
        )
        yield Episode(stream, reset=True)


def _mixture(inside: int, outside: int, ratio: float) -> tuple[int, int]:
    """How many of each: the given share of outliers, the larger side cut down.

    >>> _mixture(1000, 300, 0.5), _mixture(1000, 5000, 0.3)
    ((300, 300), (1000, 429))
    """
    if not outside:
        raise InputError("the outlier source is empty; give one that holds images with --outliers")
    known = min(inside, round(outside * (1 - ratio) / ratio))
    return max(1, known), max(1, min(outside, round(known * ratio / (1 - ratio))))


def _imbalanced(world: World) -> Iterator[Episode]:
    labels = world.labels()[: world.size]
    classes = shuffle(sorted(set(labels)), world.seed)
    part = {label: i for i, label in enumerate(classes)}
    draw = torch.Generator().manual_seed(world.seed)
    ratio, others = world.imbalance, len(classes) - 1
    stay = 1.0 if ratio is None else ratio / (ratio + others)
    keys = []
    for label in labels:
        home = part[label]
        if others and float(torch.rand((), generator=draw)) >= stay:
            home = (home + 1 + int(torch.randint(others, (), generator=draw))) % len(classes)  # any part but its own
        keys.append(home)
    order = sorted(shuffle(range(len(labels)), world.seed), key=lambda i: keys[i])
    for corruption in world.corruptions:
        yield Episode(Stream.of(world.data, order, corruption, world.severity, world.seed), reset=True)


def _mixed(world: World) -> Iterator[Episode]:
    pairs = [(i, kind) for kind in range(len(world.corruptions)) for i in range(world.size)]
    pairs = [pairs[i] for i in shuffle(range(len(pairs)), world.seed)]
    shifts = tuple((corruption, world.severity) for corruption in world.corruptions)
    order, kinds = tuple(i for i, _ in pairs), tuple(kind for _, kind in pairs)
    yield Episode(Stream(world.data, order, shifts, kinds, world.seed, "mixed"), reset=True)


def _in_distribution(world: World) -> Iterator[Episode]:
    yield Episode(world.shuffled(None), reset=True)


# ---- beyond the paper ----


def _gradual(world: World) -> Iterator[Episode]:
    """Every corruption swells from severity 1 to 5 and fades again; one ninth of the samples at each level."""
    levels = (1, 2, 3, 4, 5, 4, 3, 2, 1)
    order = shuffle(range(world.size), world.seed)
    parts = [order[i * len(order) // 9 : (i + 1) * len(order) // 9] for i in range(9)]
    kinds = [level - 1 for level, part in zip(levels, parts, strict=True) for _ in part]
    for i, corruption in enumerate(world.corruptions):
        shifts = tuple((corruption, level) for level in range(1, 6))
        stream = Stream(world.data, tuple(order), shifts, tuple(kinds), world.seed, corruption)
        yield Episode(stream, reset=i == 0)


def _recurring(world: World) -> Iterator[Episode]:
    """The corruptions come back again and again, a tenth of the samples at a time."""
    order = shuffle(range(world.size), world.seed)
    for number in range(10):
        part = order[number * len(order) // 10 : (number + 1) * len(order) // 10]
        for i, corruption in enumerate(world.corruptions):
            domain = f"{corruption} ({number + 1})"
            stream = Stream.of(world.data, part, corruption, world.severity, world.seed, domain)
            yield Episode(stream, reset=number == i == 0)


def _small_batches(world: World) -> Iterator[Episode]:
    for size in (64, 16, 4, 2, 1):
        for corruption in world.corruptions:
            yield Episode(world.shuffled(corruption, domain=f"{corruption}, batch {size}"), True, size)


NO_RECOVERY = {"sar": {"recover_below": 0.0}}
"""The paper switches SAR's recovery off where the model is never reset."""

for _setting in (
    Setting("standard", "each corruption by itself, from the source model", _standard),
    Setting("lifelong", "one after the other, never reset; --rounds repeats them", _lifelong, "", NO_RECOVERY),
    Setting("open-world", "mixed with outliers: --outliers, --outlier-ratio", _open_world, "outliers",
            severity=3, corruptions=("gaussian_noise",)),
    Setting("imbalanced", "sorted by class; --imbalance for a finite ratio", _imbalanced),
    Setting("mixed", "all corruptions in one shuffled stream", _mixed, ""),
    Setting("in-distribution", "clean images", _in_distribution, "", corruptions=()),
    Setting("gradual", "severity 1 to 5 and back within each, never reset", _gradual, "", NO_RECOVERY),
    Setting("recurring", "a tenth of each at a time, ten times, never reset", _recurring, "", NO_RECOVERY),
    Setting("small-batches", "standard with batches of 64, 16, 4, 2 and 1", _small_batches),
):  # fmt: skip
    register(_setting)
