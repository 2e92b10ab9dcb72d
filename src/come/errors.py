"""What `come` raises. Every message names the value that was given, the limit it broke and the repair.

All errors are `ComeError`s, so one `except come.ComeError` catches whatever this library refuses; each one is also the
built-in type that a Python programmer would expect.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class ComeError(Exception):
    """Base of everything that this library raises on purpose."""


class ConfigError(ComeError, ValueError):
    """A name or a hyper-parameter that does not exist or is out of its range."""


class ModelError(ComeError, ValueError):
    """A model that cannot be adapted as asked."""


class InputError(ComeError, ValueError):
    """A batch that cannot be classified, or a model output that is not a (B, K) matrix of logits."""


class StateError(ComeError, ValueError):
    """A saved state that does not belong to this adapter, or cannot be read."""


class ClosedError(ComeError, RuntimeError):
    """A step on an adapter that has given its model back."""


class CollapseError(ComeError, RuntimeError):
    """An adapted model that predicts almost nothing but one class, where the guard was told to raise."""


def unknown(kind: str, name: str, known: Iterable[str], hint: str = "") -> ConfigError:
    """Build the error for an unknown name, with the most similar known name in it.

    >>> print(unknown("method", "tnet", ["sar", "tent"]))
    no method 'tnet'; did you mean 'tent'? Known: sar, tent
    """
    known = sorted(known)
    close = get_close_matches(name, known, n=1, cutoff=0.5)
    guess = f"; did you mean {close[0]!r}?" if close else "."
    return ConfigError(f"no {kind} {name!r}{guess} Known: {', '.join(known)}{hint}")


def require(ok: bool, name: str, value: object, limit: str) -> None:
    """Raise a `ConfigError` for hyper-parameter `name` unless `ok`.

    >>> require(False, "lr", -1.0, "a positive number")
    Traceback (most recent call last):
    ...
    come.errors.ConfigError: lr is -1.0; it must be a positive number
    """
    if not ok:
        raise ConfigError(f"{name} is {value!r}; it must be {limit}")
