"""Names of streams: which are valid, what their files are called, and the index of a saved fleet."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from torch import Tensor

from come.errors import ConfigError, InputError, StateError, shown
from come.state.files import write

Name = str | int
NAME = re.compile(r"[A-Za-z0-9_@+:=-][A-Za-z0-9_.@+:=-]{0,127}", re.ASCII)
VALID = "1 to 128 letters, digits and _ . @ + : = -, no dot first"
INDEX, FORMAT = "fleet.json", "come-fleet-1"


def read_index(folder: Path) -> dict[str, dict[str, float]]:
    """Streams of a folder that `save` wrote, and what each has of its own."""
    try:
        found = json.loads((folder / INDEX).read_text())
        if found["format"] != FORMAT:
            raise StateError(f"{folder / INDEX} must have format {FORMAT!r}, got {shown(found['format'])}")
        return {
            checked_name(name): {k: _number(k, v) for k, v in own.items()} for name, own in found["streams"].items()
        }
    except OSError as error:
        raise StateError(f"cannot read {folder / INDEX}: {error.strerror}; give a folder that save() wrote") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise StateError(f"{folder / INDEX} is damaged: {error}; use an older copy") from error


def write_index(folder: Path, own: Mapping[str, dict[str, float]]) -> None:
    """Say which streams a folder has, and what each has of its own; after their files, so that they are there."""
    write(folder / INDEX, json.dumps({"format": FORMAT, "streams": own}, indent=1).encode())


def _number(name: str, value: Any) -> float:
    """As it was written: a seed is an integer."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{name} must be a number, got {shown(value)}")
    return value


def checked_names(streams: int | Sequence[Name]) -> list[str]:
    """The names that were given, or as many as asked for."""
    if isinstance(streams, int):
        if isinstance(streams, bool) or streams < 0:
            raise ConfigError(f"streams must be names, or how many, at least 0; got {shown(streams)}")
        return [str(i) for i in range(streams)]
    if isinstance(streams, (str, Mapping)) or not isinstance(streams, Iterable):
        raise ConfigError(f"streams must be a list of names, or how many, got {shown(streams)}")
    return [checked_name(name) for name in streams]


def checked_name(name: Any) -> str:
    """A valid name; it may become the name of a file, a label of a metric and a line of a log."""
    if isinstance(name, int) and not isinstance(name, bool) and name >= 0:
        return str(name)
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise ConfigError(f"the name of a stream must be {VALID}, got {shown(name)}")
    return name


def file_name(name: str) -> str:
    """The file of a stream in a folder: readable, and unlike all others where case does not count and names must be short."""
    plain = quote(name, safe="")
    if len(plain) > 200 or name != name.lower():
        plain = f"{plain[:100]}~{hashlib.sha256(name.encode()).hexdigest()}"
    return f"{plain}.safetensors"


def rows_by_stream(streams: Any, size: int) -> dict[str, list[int]]:
    """The rows of a batch by stream, in the order in which streams occur.

    >>> rows_by_stream(["north", "south", "north"], 3)
    {'north': [0, 2], 'south': [1]}
    """
    if isinstance(streams, (str, int)):
        return {checked_name(streams): list(range(size))}
    names = streams.tolist() if isinstance(streams, Tensor) else streams
    if isinstance(names, Mapping) or not isinstance(names, Iterable):
        raise InputError(f"streams must be the name of a stream for each of the {size} samples, got {shown(streams)}")
    names = list(names)
    if len(names) != size:
        raise InputError(f"streams must name the stream of each of the {size} samples, got {len(names)} names")
    rows: dict[str, list[int]] = {}
    for i, name in enumerate(names):
        rows.setdefault(checked_name(name), []).append(i)
    return rows
