"""Names for things: register, look up with a suggestion, and let other packages add theirs by entry point."""

from __future__ import annotations

import json
import warnings
from importlib.metadata import entry_points as installed_entry_points
from typing import Any, Generic, TypeVar

from come.errors import ConfigError, unknown

T = TypeVar("T")


class Registry(Generic[T]):
    """A dictionary of named things that answers a wrong name with the most similar right one.

    Args:
        kind: what the things are, for messages: "method", "objective".
        entry_points: group under which installed packages offer more of them; read on the first miss or listing.

    Example:
        >>> colours = Registry[int]("colour")
        >>> colours.add("red", 1)
        >>> colours.get("red")
        1
        >>> colours.get("rad")
        Traceback (most recent call last):
        ...
        come.errors.ConfigError: no colour 'rad'; did you mean 'red'? Known: red
    """

    def __init__(self, kind: str, entry_points: str | None = None) -> None:
        self.kind = kind
        self._things: dict[str, T] = {}
        self._group = entry_points

    def add(self, name: str, thing: T) -> None:
        """Register `thing`; a name is given once."""
        if name in self._things and self._things[name] is not thing:
            raise ConfigError(f"{self.kind} {name!r} is taken by {self._things[name]!r}; choose another name")
        self._things[name] = thing

    def remove(self, name: str) -> None:
        """Forget `name`."""
        if name not in self._things:
            raise unknown(self.kind, name, self._things)
        del self._things[name]

    def get(self, name: str) -> T:
        """Look `name` up; a miss raises a `ConfigError` that suggests a repair."""
        if name not in self._things:
            self._discover()
        if name not in self._things:
            raise unknown(self.kind, name, self._things)
        return self._things[name]

    def names(self) -> list[str]:
        """All names, in the order in which they were added."""
        self._discover()
        return list(self._things)

    def loaded(self) -> dict[str, T]:
        """What is registered so far, without looking for installed packages."""
        return dict(self._things)

    def _discover(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            for point in installed_entry_points(group=group):
                try:
                    self.add(point.name, point.load())
                except Exception as error:  # somebody else's package must not take ours down
                    warnings.warn(f"{self.kind} {point.name!r} of {point.value} is left out: {error}", stacklevel=3)


def parse(spec: str) -> tuple[str, dict[str, Any]]:
    """`name:key=value:...` -> the name and the values, each read as JSON, else as a number, else as text.

    Example:
        >>> parse("come:tau=2:freeze_norm=false")
        ('come', {'tau': 2, 'freeze_norm': False})
    """
    name, *parts = spec.split(":")
    values: dict[str, Any] = {}
    for part in parts:
        key, equals, text = part.partition("=")
        if not (key and equals and text):
            raise ConfigError(f"{part!r} in {spec!r} is not KEY=VALUE; write e.g. {name}:{key or 'key'}=1")
        values[key] = literal(text)
    return name, values


def literal(text: str) -> Any:
    """A value as people type it: JSON, a number, or text.

    Example:
        >>> literal("true"), literal("5e-4"), literal("inf"), literal("sgd")
        (True, 0.0005, inf, 'sgd')
    """
    for read in (json.loads, float):
        try:
            return read(text)
        except ValueError:
            continue
    return text
