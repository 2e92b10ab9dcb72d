"""Settings: how streams follow each other. Each is a short generator of episodes, not a branch in the runner."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from come.data.streams import Stream
from come.registry import Registry


@dataclass(frozen=True)
class Episode:
    """One stream, and whether the method starts afresh before it."""

    stream: Stream
    reset: bool


Episodes = Callable[[str, int, Sequence[str], int, int], Iterator[Episode]]
"""(data, size, corruptions, severity, seed) -> episodes"""


@dataclass(frozen=True)
class Setting:
    """A generator of episodes and what a grid must know of it."""

    name: str
    summary: str
    episodes: Episodes
    independent: bool
    """Whether each corruption can be run by itself, because the method is reset before it."""


def _standard(data: str, size: int, corruptions: Sequence[str], severity: int, seed: int) -> Iterator[Episode]:
    for corruption in corruptions:
        yield Episode(Stream.shuffled(data, size, corruption=corruption, severity=severity, seed=seed), reset=True)


_registry: Registry[Setting] = Registry("setting")
_registry.add("standard", Setting("standard", "each corruption by itself, from the source model", _standard, True))


def names() -> list[str]:
    """Names of all settings.

    Example:
        >>> names()
        ['standard']
    """
    return _registry.names()


def get(name: str) -> Setting:
    """The setting of that name.

    Example:
        >>> [e.stream.domain for e in get("standard").episodes("glyphs", 10, ["fog", "snow"], 5, 0)]
        ['fog', 'snow']
    """
    return _registry.get(name)
