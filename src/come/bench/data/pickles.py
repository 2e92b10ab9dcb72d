"""Pickles read without running them: lists, tuples, dicts, numbers, texts and bytes; calls are written down, not made."""

from __future__ import annotations

import pickletools
from dataclasses import dataclass, field
from typing import Any

CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
VALUES = ("BININT", "BININT1", "BININT2", "BINUNICODE", "SHORT_BINUNICODE", "BINBYTES", "SHORT_BINBYTES")
OLD_TEXTS = ("BINSTRING", "SHORT_BINSTRING")
"""Of Python 2, where texts are bytes."""
TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
IGNORED = ("PROTO", "FRAME")


@dataclass
class Call:
    """A call that the pickle asks for, and that nobody makes."""

    function: str
    """Module and name, with a space between."""
    arguments: tuple[Any, ...] = field(repr=False)  # their text can be endless
    state: Any = field(default=None, repr=False)
    """What the result would be filled with."""


def read_pickle(file: bytes) -> Any:
    """What a pickle describes; in place of each object that it would make there is a `Call`.

    Args:
        file: a pickle, of protocol 2 to 4.

    Raises:
        Exception: of any kind, where the pickle is damaged, or holds what is not read.

    Example:
        >>> import os, pickle
        >>> class Harmful:
        ...     def __reduce__(self):
        ...         return os.system, ("rm -rf /",)
        >>> read_pickle(pickle.dumps({"labels": [1, 2]}, protocol=2))
        {'labels': [1, 2]}
        >>> read_pickle(pickle.dumps([Harmful()], protocol=2))
        [Call(function='posix system')]
    """
    stack: list[Any] = []
    below: list[list[Any]] = []  # of each mark, the stack under it
    memo: dict[int, Any] = {}
    value: Any
    for code, value, _ in pickletools.genops(file):
        name = code.name
        if name in VALUES:
            stack.append(value)
        elif name in OLD_TEXTS:
            stack.append(value.encode("latin-1"))
        elif name in CONSTANTS:
            stack.append(CONSTANTS[name])
        elif name == "GLOBAL":
            stack.append(Call(value, ()))
        elif name == "STACK_GLOBAL":
            attribute, module = stack.pop(), stack.pop()
            stack.append(Call(f"{module} {attribute}", ()))
        elif name == "REDUCE":
            arguments, function = stack.pop(), stack.pop()
            if not isinstance(function, Call) or not isinstance(arguments, tuple):
                raise ValueError("it calls what is no function")
            stack.append(Call(function.function, arguments))
        elif name == "BUILD":
            state = stack.pop()
            stack[-1].state = state
        elif name in TUPLES:
            size = TUPLES[name]
            stack[-size:] = [tuple(stack[-size:])]
        elif name in ("EMPTY_DICT", "EMPTY_LIST", "EMPTY_TUPLE"):
            stack.append({"EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple}[name]())
        elif name == "MARK":
            below.append(stack)
            stack = []
        elif name in ("TUPLE", "APPENDS", "SETITEMS"):
            items, stack = stack, below.pop()
            if name == "TUPLE":
                stack.append(tuple(items))
            else:
                _add(stack[-1], items)
        elif name in ("APPEND", "SETITEM"):
            size = 1 if name == "APPEND" else 2
            items = stack[-size:]
            del stack[-size:]
            _add(stack[-1], items)
        elif name in ("BINPUT", "LONG_BINPUT", "MEMOIZE"):
            memo[len(memo) if name == "MEMOIZE" else value] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(memo[value])
        elif name == "STOP":
            return stack.pop()
        elif name not in IGNORED:
            raise ValueError(f"it holds {name}, which is not read")
    raise ValueError("it is cut off")


def _add(to: Any, items: list[Any]) -> None:
    """Items of a list, or keys and values of a dict in turn."""
    if isinstance(to, list):
        to += items
        return
    for key, value in zip(items[::2], items[1::2], strict=True):
        if not isinstance(key, (str, bytes)):
            raise ValueError(f"it has a key of type {type(key).__name__}")
        to[key] = value
