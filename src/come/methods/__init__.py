"""One paper, one file. `names()` lists them; `get` finds one; `register` adds yours."""

from __future__ import annotations

from come.errors import ConfigError
from come.method import Method
from come.methods.cotta import CoTTA
from come.methods.deyo import DeYO
from come.methods.eata import EATA
from come.methods.foa import FOA
from come.methods.lame import LAME
from come.methods.memo import MEMO
from come.methods.norm import Norm
from come.methods.pl import PL
from come.methods.rdumb import RDumb
from come.methods.roid import ROID
from come.methods.rotta import RoTTA
from come.methods.sar import SAR
from come.methods.source import Source
from come.methods.t3a import T3A
from come.methods.tea import TEA
from come.methods.tent import Tent
from come.registry import Registry

__all__ = [
    "EATA",
    "FOA",
    "LAME",
    "MEMO",
    "PL",
    "ROID",
    "SAR",
    "T3A",
    "TEA",
    "CoTTA",
    "DeYO",
    "Norm",
    "RDumb",
    "RoTTA",
    "Source",
    "Tent",
    "get",
    "names",
    "register",
]

_registry: Registry[type[Method]] = Registry("method", entry_points="come.methods")


def names() -> list[str]:
    """Names of all registered methods, in the paper's order, then what goes beyond it.

    Example:
        >>> names()[:3]
        ['source', 'norm', 'pl']
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


for _method in (Source, Norm, PL, T3A, TEA, LAME, FOA, Tent, EATA, SAR, CoTTA, MEMO, DeYO, RoTTA, ROID, RDumb):
    register(_method)
