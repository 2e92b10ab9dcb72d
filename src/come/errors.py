"""The exceptions of `come`. Every message names the limit, the value that was given and the repair.

All are `ComeError`s, so `except come.ComeError` catches every error that this library raises on purpose; each is also the
built-in type that a Python programmer would expect.
"""

from __future__ import annotations

import reprlib
import sys
import warnings
from collections.abc import Iterable
from difflib import SequenceMatcher, get_close_matches
from itertools import takewhile
from typing import Any

LONGEST = 100
"""Characters of a value that a message shows."""
FEW = 20
"""As many names a message lists; of more it says how many there are."""


def warn(message: str) -> None:
    """Warn at the line of the user's code that called this library."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "come":
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


class ComeError(Exception):
    """Base of all errors that this library raises on purpose."""


class ConfigError(ComeError, ValueError):
    """A name or a hyperparameter that does not exist or is out of its range."""


class ModelError(ComeError, ValueError):
    """A model that cannot be adapted as asked."""


class InputError(ComeError, ValueError):
    """A batch that cannot be classified, or a model output that is not a (B, K) matrix of logits."""


class StateError(ComeError, ValueError):
    """A saved state that does not belong to this adapter, or cannot be read."""


class ClosedError(ComeError, RuntimeError):
    """A call of a closed adapter."""


class RankError(ComeError, RuntimeError):
    """Another rank has ended or does not answer, so the processes cannot continue their stream."""


class CollapseError(ComeError, RuntimeError):
    """The adapted model has collapsed, and the guard was told to raise."""


class MissingError(ComeError, ModuleNotFoundError):
    """A package that is not installed."""


class _Shown(reprlib.Repr):
    """A repr that reads only the beginning of large values."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxstring, self.maxother = 2, LONGEST - 10, LONGEST

    def repr1(self, x: Any, level: int) -> str:
        """By type, subclasses included; never the whole of a model, a tensor or a number of a million digits."""
        if isinstance(x, (str, bytes, bytearray)):
            return repr(x) if len(x) <= self.maxstring else f"{x[: self.maxstring]!r}..."
        for kind in (dict, list, tuple, set, frozenset):
            if isinstance(x, kind):
                found: str = getattr(self, f"repr_{kind.__name__}")(x, level)
                return found
        if isinstance(x, int) and x.bit_length() > 4 * LONGEST:
            return f"an integer of {x.bit_length()} bits"
        if isinstance(x, type):
            return f"the class {x.__name__}"
        if hasattr(x, "named_parameters"):
            return f"a model ({type(x).__name__})"
        if getattr(x, "shape", ()) and hasattr(x, "dtype"):
            return f"{type(x).__name__} of shape {tuple(x.shape)}"
        try:
            return repr(x)
        except Exception:
            return f"an object of type {type(x).__name__}"


def shown(value: object) -> str:
    """`value` for a message: on one line, at most about 100 characters, all of them printable.

    >>> shown("a" * 1_000_000)[-8:], shown([0.5] * 1000)
    ("aaaa'...", '[0.5, 0.5, 0.5, 0.5, 0.5, 0.5, ...]')
    >>> print(shown("two\\nlines"), shown({"lr": 0.1}))
    'two\\nlines' {'lr': 0.1}
    """
    text = _Shown().repr(value)
    text = printable(text[: LONGEST + 1])
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."


def printable(text: str) -> str:
    """Escape all characters that could move the cursor or cannot be displayed.

    >>> print(printable("two\\nlines"))
    two\\nlines
    """
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def one_line(error: BaseException, *, kind: bool = False, first: bool = False) -> str:
    """What went wrong, on one printable line of at most 300 characters.

    Args:
        error: what was raised. Of an error with a `strerror`, that; it leaves out the path, which a message names itself.
        kind: put the type of the error in front.
        first: only the first line of the message, where the others say less.

    >>> one_line(FileNotFoundError(2, "No such file or directory", "a.json")), one_line(ValueError("no\\nway"), kind=True)
    ('No such file or directory', 'ValueError: no way')
    >>> one_line(RuntimeError("out of memory\\nTraceback: ..."), first=True)
    'out of memory'
    """
    lines, name = str(error).strip().splitlines(), type(error).__name__
    message = " ".join(" ".join(lines[:1] if first else lines).split())[:300]
    text = "".join(c if c.isprintable() else "?" for c in getattr(error, "strerror", None) or message)
    return ": ".join(part for part in (name, text) if part) if kind else text or name


def unknown(kind: str, name: object, known: Iterable[str], hint: str = "") -> ConfigError:
    """Build the error for an unknown name: suggest similar ones, and list all known names if they are few.

    `kind` is what it should have named; `hint` is a clause, such as where all names are listed.

    >>> print(unknown("method", "tnet", ["sar", "tent"]))
    no method 'tnet'; did you mean 'tent'? Known: sar, tent
    >>> print(unknown("model", "resnet5O", [f"resnet{i}" for i in range(10, 1310)], hint="'come list models' shows some"))
    no model 'resnet5O'; did you mean 'resnet50', 'resnet51' or 'resnet52'? There are 1,300; 'come list models' shows some
    """
    return ConfigError(f"no {kind} {shown(name)}{_guess(name, known, hint)}")


def unknown_hyperparameter(method: str, name: str, known: Iterable[str]) -> ConfigError:
    """Build the error for a hyperparameter that a method does not have.

    >>> print(unknown_hyperparameter("tent", "rl", ["keep", "lr"]))
    tent has no hyperparameter 'rl'; did you mean 'lr'? Known: keep, lr
    """
    return ConfigError(f"{method} has no hyperparameter {shown(name)}{_guess(name, known)}")


def _guess(name: object, known: Iterable[str], hint: str = "") -> str:
    known = sorted(set(known))
    close = [repr(one) for one in _similar(name, known)] if isinstance(name, str) else []
    first, last = ", ".join(close[:-1]), close[-1] if close else ""
    asked = f"; did you mean {f'{first} or {last}' if first else last}?" if close else "."
    listed = f"Known: {', '.join(known)}" if known else "There are none"
    hint = hint.lstrip("; .")
    return f"{asked} {listed if len(known) <= FEW else f'There are {len(known):,}'}{f'; {hint}' if hint else ''}"


def _similar(name: str, known: list[str]) -> list[str]:
    """Up to three names, the most similar one first, others only if they are about as similar; case does not matter."""
    given = name[:LONGEST].lower()
    spelled: dict[str, str] = {}
    for one in known:
        spelled.setdefault(one.lower(), one)
    close = get_close_matches(given, spelled, n=50, cutoff=0.5)
    alike = {one: SequenceMatcher(None, one, given).ratio() for one in close}

    def begins_alike(one: str) -> int:
        return len(list(takewhile(lambda pair: pair[0] == pair[1], zip(one, given, strict=False))))

    best = sorted(close, key=lambda one: (-alike[one], -begins_alike(one), one))[:3]
    return [spelled[one] for one in best if alike[one] > alike[best[0]] - 0.1]


def missing(what: str, error: ModuleNotFoundError, extra: str) -> MissingError:
    """Build the error for a package that is not installed, and name the extra that installs it.

    >>> print(missing("come.serve", ModuleNotFoundError(name="fastapi"), "serve"))
    come.serve needs fastapi, which is missing; install it with: pip install -e ".[serve]" (in your clone of come)
    """
    return MissingError(
        f"{what} needs {error.name}, which is missing; install it with: {pip_install(extra)}", name=error.name
    )


def pip_install(extra: str) -> str:
    """The command that installs an extra, run in a clone, as there is no package to download yet.

    >>> print(pip_install("bench,ray"))
    pip install -e ".[bench,ray]" (in your clone of come)
    """
    return f'pip install -e "{f".[{extra}]" if extra else "."}" (in your clone of come)'


def require(ok: bool, name: str, value: object, limit: str) -> None:
    """Raise a `ConfigError` for hyperparameter `name` unless `ok`.

    >>> require(False, "lr", -1.0, "a positive number")
    Traceback (most recent call last):
    ...
    come.errors.ConfigError: lr must be a positive number, got -1.0
    """
    if not ok:
        raise ConfigError(f"{name} must be {limit}, got {shown(value)}")


def require_int(name: str, value: Any, least: int, extra: str = "") -> None:
    """Raise a `ConfigError` unless `value` is an integer >= `least`; booleans are not.

    >>> require_int("steps", True, 1)
    Traceback (most recent call last):
    ...
    come.errors.ConfigError: steps must be an integer >= 1, got True
    """
    good = isinstance(value, int) and not isinstance(value, bool) and value >= least
    require(good, name, value, f"an integer >= {least}{extra}")


def require_number(name: str, value: Any, limit: str) -> bool:
    """Raise a `ConfigError` unless `value` is a real number; returns True, so that a range can be checked after it.

    >>> require_number("lr", "1e-3", "a positive number")
    Traceback (most recent call last):
    ...
    come.errors.ConfigError: lr must be a positive number, got '1e-3'
    """
    require(isinstance(value, (int, float)) and not isinstance(value, bool), name, value, limit)
    return True


def saved_number(name: str, value: Any, low: float, high: float, *, whole: bool = False) -> float:
    """The number in [low, high] in a tensor of a saved state, or a `StateError`.

    >>> import torch
    >>> saved_number("count", torch.tensor(3), 0, 10, whole=True)
    3
    >>> saved_number("count", torch.tensor(torch.nan), 0, 10, whole=True)
    Traceback (most recent call last):
    come.errors.StateError: 'count' of the state must be an integer in [0, 10], got nan; use an older snapshot
    """
    found: float = value.item() if value.numel() == 1 and not value.is_complex() else float("nan")
    if not low <= found <= high or (whole and found != int(found)):
        limit = f">= {low:g}" if found < low else f"in [{low:g}, {high:g}]"
        given = found if value.numel() == 1 else shown(value)
        raise StateError(
            f"{name!r} of the state must be {'an integer ' if whole else ''}{limit}, got {given}; use an older snapshot"
        )
    return int(found) if whole else float(found)
