"""Reads the names of a model's classes, in the order of its outputs, from a file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from come.bench.data.reading import as_input_error, read_regular
from come.errors import InputError, one_line, printable, shown

LONGEST = 2**24  # bytes of a file with the names of classes
FIRST = 3  # classes that `in_order` names before the last one


def read_classes(path: str | Path) -> list[str]:
    """The names of a model's classes, in the order of its outputs.

    The file is a text with a name in each line, or JSON: a list of names, an object from index to name, or a `config.json` of
    transformers, whose `id2label` is used.

    Raises:
        InputError: the file cannot be read, is empty, leaves an output without a name, or names a class twice.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     file = Path(folder) / "classes.json"
        ...     _ = file.write_text('{"1": "boot", "0": "coat"}')
        ...     read_classes(file)
        ['coat', 'boot']
    """
    repair = "give a text file with the name of a class in each line, or JSON"
    with as_input_error(f"cannot read the classes {path}", repair):
        text = read_regular(Path(path).expanduser(), LONGEST).decode("utf-8-sig").strip()
    names = _from_json(text, path) if text[:1] in ("[", "{") else [line.strip() for line in text.splitlines()]
    if not names:
        raise InputError(f"{path} is empty; it must name a class in each line, in the order of the model's outputs")
    places: dict[str, int] = {}
    for number, name in enumerate(names):
        if not name:
            raise InputError(f"{path} has no name for class {number}; it must have one for each output of the model")
        if (first := places.setdefault(name, number)) != number:
            raise InputError(
                f"{path} has the name {shown(name)} for class {first} and for class {number}; each class must have its own"
            )
    return names


def _from_json(text: str, path: str | Path) -> list[str]:
    """Of a list, or of an object whose keys are the indices 0, 1, ... in any order."""
    try:
        found: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"cannot read the classes {path}: not JSON ({one_line(error)}); fix it, or write text"
        ) from error
    if isinstance(found, dict):
        found = found.get("id2label", found)
        indices = [str(i) for i in range(len(found))] if isinstance(found, dict) else []
        if not isinstance(found, dict) or set(indices) != set(found):
            strange = sorted(set(found) - set(indices))[0] if isinstance(found, dict) else found
            raise InputError(
                f"{path} must be a list of names, or an object from the indices 0, 1, ... to names, got {shown(strange)}"
            )
        found = [found[index] for index in indices]
    if wrong := [name for name in found if not isinstance(name, str)]:
        raise InputError(f"{path} must hold names of classes, got {shown(wrong[0])}")
    return [name.strip() for name in found]


def in_order(classes: Sequence[str]) -> str:
    """The first few classes and the last one, with their numbers.

    Example:
        >>> in_order(["boot", "coat", "dress"])
        '0 boot, 1 coat, 2 dress'
        >>> in_order([f"n{i}" for i in range(1000)])
        '0 n0, 1 n1, 2 n2, ... 999 n999'
    """
    named = [f"{number} {printable(name)}" for number, name in enumerate(classes)]
    return ", ".join(named if len(named) <= FIRST + 1 else [*named[:FIRST], f"... {named[-1]}"])
