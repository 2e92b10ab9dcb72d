"""One paper, one file. `names()` lists them; `get` finds one; `register` adds yours."""

from __future__ import annotations

from come.errors import ConfigError
from come.method import Method
from come.methods.eata import EATA
from come.methods.norm import Norm
from come.methods.sar import SAR
from come.methods.source import Source
from come.methods.tent import Tent
from come.registry import Registry

__all__ = ["EATA", "SAR", "Norm", "Source", "Tent", "get", "names", "register"]

_registry: Registry[type[Method]] = Registry("method", entry_points="come.methods")


def names() -> list[str]:
    """Names of all registered methods, sorted.

    Example:
        >>> "tent" in names()
        True
    """
    return _registry.names()


def get(method: str | type[Method]) -> type[Method]:
    """The method of that name, or the class itself if it is one already.

    Example:
        >>> get("sar").__name__
        'SAR'
    """
    if isinstance(method, type) and issubclass(method, Method):
        return method
    if not isinstance(method, str):
        raise ConfigError(f"method is {method!r}; give a name ({', '.join(names())}) or a subclass of come.Method")
    return _registry.get(method)


def register(method: type[Method]) -> type[Method]:
    """Make `method` available under its `name`, here and on the command line; usable as a decorator."""
    if not (isinstance(method, type) and issubclass(method, Method)):
        raise ConfigError(f"{method!r} is not a subclass of come.Method")
    if not isinstance(getattr(method, "name", None), str):
        raise ConfigError(f"{method.__name__} has no name; give the class an attribute name = '...'")
    _registry.add(method.name, method)
    return method


for _method in (Source, Norm, Tent, EATA, SAR):
    register(_method)
