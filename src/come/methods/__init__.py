"""The methods, one file per paper. Each file in this folder registers its method; `names()` lists them, `get` finds one."""

from __future__ import annotations

import pkgutil
from importlib import import_module
from typing import Any

from torch import nn

from come.errors import ConfigError, shown, unknown_hyperparameter
from come.method import Method, _registry, register
from come.registry import parse

for _module in sorted(module.name for module in pkgutil.iter_modules(__path__)):
    import_module(f"{__name__}.{_module}")


def _check(name: str, thing: object) -> str:
    """What is wrong with a method that is registered as `name`; "" if nothing is."""
    if not (isinstance(thing, type) and issubclass(thing, Method)):
        return f"must be a subclass of come.Method, got {shown(thing)}"
    if missing := sorted(getattr(thing, "__abstractmethods__", ())):
        return f"must be a method that can be used: {thing.__name__} does not write {', '.join(missing)}"
    own = getattr(thing, "name", None)
    return "" if own == name else f"must be registered under its own name, {thing.__name__}.name, which is {shown(own)}"


_registry.check = _check

DEFAULT = "steady"
"""What `come.adapt(model)` uses: chosen by the harm matrix, see docs/harm.md."""

globals().update({_class.__name__: _class for _class in _registry.loaded().values()})

__all__ = ["get", "make", "names", "register"]


def __getattr__(name: str) -> Any:
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}; methods: {', '.join(names())}")


def names() -> list[str]:
    """Names of all registered methods, sorted.

    Example:
        >>> "tent" in names()
        True
    """
    return sorted(_registry.names())


def get(method: str | type[Method]) -> type[Method]:
    """The method of that name, or the class itself.

    Example:
        >>> get("sar").__name__
        'SAR'
    """
    if isinstance(method, type) and issubclass(method, Method):
        return method
    if not isinstance(method, str):
        swapped = "; the model comes first: come.adapt(model, 'tent')" if isinstance(method, nn.Module) else ""
        raise ConfigError(
            f"method must be a name ({', '.join(names())}) or a subclass of come.Method, got {shown(method)}{swapped}"
        )
    return _registry.get(method)


def make(method: str | type[Method], **hyperparameters: Any) -> Method:
    """A method by its name, with hyperparameters; the name may carry some, `name:argument=value:...`.

    Example:
        >>> make("tent:keep=0.5", lr=1e-3).keep
        0.5
    """
    if isinstance(method, str):
        method, given = parse(method)
        if twice := sorted(given.keys() & hyperparameters.keys()):
            raise ConfigError(f"{twice[0]} must be given once, got it twice: in {shown(method)} and as an argument")
        hyperparameters |= given
    chosen = get(method)
    known = chosen.hyperparameters()
    for name in hyperparameters:
        if name not in known:
            raise unknown_hyperparameter(chosen.name, name, known)
    try:
        return chosen(**hyperparameters)
    except TypeError as error:  # such as a comparison of text with a number
        raise ConfigError(
            f"{chosen.name} has a hyperparameter of the wrong type: {error}; got {shown(hyperparameters)}"
        ) from error
