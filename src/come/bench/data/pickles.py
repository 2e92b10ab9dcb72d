"""Reads pickles without running them: lists, tuples, dicts, numbers, text and bytes; calls are noted, not made."""

from __future__ import annotations

import pickletools
from dataclasses import dataclass, field
from typing import Any

CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
VALUES = ("BININT", "BININT1", "BININT2", "BINUNICODE", "SHORT_BINUNICODE", "BINBYTES", "SHORT_BINBYTES")
OLD_TEXTS = ("BINSTRING", "SHORT_BINSTRING")  # of Python 2, where text is bytes
EMPTY = {"EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple}
TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
IGNORED = ("PROTO", "FRAME")


@dataclass
class Call:
    """A call that the pickle asks for; it is never made."""

    function: str  # module and name, with a space between
    arguments: tuple[Any, ...] = field(repr=False)  # their text can be endless
    state: Any = field(default=None, repr=False)  # what the result would be filled with


def read_pickle(file: bytes) -> Any:
    """The content of a pickle of protocol 2 to 4, with a `Call` in place of each object that it would make.

    Raises:
        Exception: of any kind, if the pickle is damaged or holds something else.

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
    below: list[list[Any]] = []  # for each mark, the stack under it
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
        elif name in EMPTY:
            stack.append(EMPTY[name]())
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
        elif name == "MARK":
            below.append(stack)
            stack = []
        elif name == "TUPLE":
            items, stack = stack, below.pop()
            stack.append(tuple(items))
        elif name in ("APPENDS", "SETITEMS"):
            items, stack = stack, below.pop()
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
    """Append items to a list, or keys and values in turn to a dict."""
    if isinstance(to, list):
        to += items
        return
    for key, value in zip(items[::2], items[1::2], strict=True):
        if not isinstance(key, (str, bytes)):
            raise ValueError(f"it has a key of type {type(key).__name__}")
        to[key] = value
