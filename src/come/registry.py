"""Registries: look names up with a suggestion for typos, and let other packages register theirs by entry point."""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import warnings
from collections.abc import Callable
from importlib.metadata import EntryPoint
from importlib.metadata import entry_points as installed_entry_points
from typing import Any, Generic, TypeVar

from come.errors import ConfigError, shown, unknown

T = TypeVar("T")

Check = Callable[[str, object], str]
"""(name, thing) -> what is wrong with it, as in "must be a subclass of come.Method, got 3"; "" if nothing is."""


class Registry(Generic[T]):
    """A dictionary of named things that suggests the most similar name for one it does not know.

    Args:
        kind: what the things are, for messages: "method", "objective".
        entry_points: group of the entry points of installed packages, read on the first miss or listing. One that cannot be
            loaded or is of the wrong kind is left out with a warning.
        check: says what is wrong with a thing that is to be added.

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

    def __init__(self, kind: str, entry_points: str | None = None, check: Check | None = None) -> None:
        self.kind, self.check = kind, check
        self._things: dict[str, T] = {}
        self._group = entry_points
        self._lock = threading.RLock()  # a plugin may ask for names while it is imported

    def add(self, name: str, thing: T) -> None:
        """Register `thing`; a second thing under the same name is an error."""
        if not isinstance(name, str) or not name or any(c in ":,=" or c.isspace() for c in name):
            raise ConfigError(f"the name of a {self.kind} must be a word without : , = and spaces, got {shown(name)}")
        if wrong := self.check(name, thing) if self.check else "":
            raise ConfigError(f"{self.kind} {name!r} {wrong}")
        if name in self._things and self._things[name] is not thing:
            raise ConfigError(f"{self.kind} {name!r} is taken by {shown(self._things[name])}; choose another name")
        self._things[name] = thing

    def remove(self, name: str) -> None:
        """Unregister `name`."""
        if name not in self._things:
            raise unknown(self.kind, name, self._things)
        del self._things[name]

    def get(self, name: str) -> T:
        """The thing called `name`, or a `ConfigError` that suggests a repair."""
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
        """The things registered so far, without looking for installed packages."""
        return dict(self._things)

    def _discover(self) -> None:
        """Add the entry points of installed packages; warn about all broken ones at the end."""
        complaints = []
        with self._lock:
            group, self._group = self._group, None
            if group is None:
                return
            for point in installed_entry_points(group=group):
                before = dict(self._things)
                where = f"{self.kind} {shown(point.name)} of the package {_package(point)} ({shown(point.value)})"
                try:
                    self.add(point.name, point.load())
                except (Exception, SystemExit) as error:  # somebody else's package must not take ours down
                    self._things = before
                    repair = "" if isinstance(error, ConfigError) else "; repair or uninstall that package"
                    complaints.append(f"{where} is left out: {_reason(error)}{repair}")
                else:
                    if not summary(self._things[point.name]):
                        complaints.append(f"{where} has no docstring; write one, its first line is what is listed")
        for complaint in complaints:
            warnings.warn(complaint, stacklevel=3)


def _package(point: EntryPoint) -> str:
    """The package of an entry point; its module, if the package has lost its metadata."""
    name: object = None
    with contextlib.suppress(Exception):
        name = point.dist.name if point.dist else None
    return str(name or point.value.partition(":")[0])


def _reason(error: BaseException) -> str:
    text = shown(str(error))[1:-1]
    if isinstance(error, ConfigError):
        return str(error)
    return f"importing it ends with {type(error).__name__}{f': {text}' if text else ''}"


def summary(thing: object) -> str:
    """One line about a thing: its `summary`, or the first line of its docstring; "" if it has none.

    A method of `come` has its own file, whose first line says what it does.

    Example:
        >>> from come.methods import LAME
        >>> summary(LAME)
        'neighbours should have the same label'
    """
    said = getattr(thing, "summary", None)
    if not isinstance(said, str):
        kind = thing if isinstance(thing, type) else type(thing)
        said = _docstring(kind)
        if kind.__module__.startswith("come.methods."):
            said = sys.modules[kind.__module__].__doc__ or said
    first = (said.strip().splitlines() or [""])[0]
    return (first.partition(": ")[2] or first).rstrip(".")


def _docstring(kind: type) -> str:
    """The docstring that somebody wrote: not the signature that `dataclass` generates."""
    text = kind.__doc__ or ""
    return "" if text.startswith(f"{kind.__name__}(") else text


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
            raise ConfigError(
                f"{shown(part)} in {shown(spec)} is not KEY=VALUE; write e.g. {shown(name)[1:-1]}:{shown(key or 'key')[1:-1]}=1"
            )
        values[key] = literal(text)
    return name, values


def literal(text: str) -> Any:
    """A value as typed on a command line: JSON, a number, or text.

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


Given = TypeVar("Given")
Kept = TypeVar("Kept")


class converted(Generic[Given, Kept]):  # noqa: N801 - reads as the value it is
    """A dataclass field that converts its values, and its default: `objective="em"` becomes a `Softmax()`."""

    def __init__(self, convert: Callable[[Given], Kept], default: Given) -> None:
        self.convert, self.default = convert, default

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = f"_{name}"

    def __get__(self, method: object | None, owner: type | None = None) -> Kept:
        """The converted value; of the class, the default."""
        found: Kept = self.default if method is None else getattr(method, self.name)  # type: ignore[assignment]
        return found

    def __set__(self, method: object, value: Given) -> None:
        """Convert and store."""
        setattr(method, self.name, self.convert(value))
