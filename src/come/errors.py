"""What `come` raises. Every message names the limit, the value that was given and the repair.

All errors are `ComeError`s, so one `except come.ComeError` catches whatever this library refuses; each one is also the
built-in type that a Python programmer would expect.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any


class ComeError(Exception):
    """Base of everything that this library raises on purpose."""


class ConfigError(ComeError, ValueError):
    """A name or a hyperparameter that does not exist or is out of its range."""


class ModelError(ComeError, ValueError):
    """A model that cannot be adapted as asked."""


class InputError(ComeError, ValueError):
    """A batch that cannot be classified, or a model output that is not a (B, K) matrix of logits."""


class StateError(ComeError, ValueError):
    """A saved state that does not belong to this adapter, or cannot be read."""


class ClosedError(ComeError, RuntimeError):
    """A call of an adapter that was closed."""


class CollapseError(ComeError, RuntimeError):
    """The adapted model has collapsed, and the guard was told to raise."""


def unknown(kind: str, name: str, known: Iterable[str], hint: str = "") -> ConfigError:
    """Build the error for an unknown name, with the most similar known name in it.

    >>> print(unknown("method", "tnet", ["sar", "tent"]))
    no method 'tnet'; did you mean 'tent'? Known: sar, tent
    """
    return ConfigError(f"no {kind} {name!r}{_guess(name, known)}{hint}")


def unknown_hyperparameter(method: str, name: str, known: Iterable[str]) -> ConfigError:
    """Build the error for a hyperparameter that a method does not have.

    >>> print(unknown_hyperparameter("tent", "rl", ["keep", "lr"]))
    tent has no hyperparameter 'rl'; did you mean 'lr'? Known: keep, lr
    """
    return ConfigError(f"{method} has no hyperparameter {name!r}{_guess(name, known)}")


def _guess(name: str, known: Iterable[str]) -> str:
    known = sorted(known)
    close = get_close_matches(name, known, n=1, cutoff=0.5)
    return (f"; did you mean {close[0]!r}?" if close else ".") + f" Known: {', '.join(known)}"


def require(ok: bool, name: str, value: object, limit: str) -> None:
    """Raise a `ConfigError` for hyperparameter `name` unless `ok`.

    >>> require(False, "lr", -1.0, "a positive number")
    Traceback (most recent call last):
    ...
    come.errors.ConfigError: lr must be a positive number, got -1.0
    """
    if not ok:
        raise ConfigError(f"{name} must be {limit}, got {value!r}")


def require_int(name: str, value: Any, least: int, extra: str = "") -> None:
    """Raise a `ConfigError` unless `value` is an integer >= `least`; True and False are none.

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
