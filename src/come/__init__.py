"""Test-time adaptation that knows what it does not know.

>>> import come, torch
>>> model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.LayerNorm(16), torch.nn.Linear(16, 3))
>>> classifier = come.adapt(model, "tent")  # COME is the objective
>>> logits = classifier(torch.randn(8, 4))  # predicts, and has adapted
>>> classifier.uncertainty(logits).shape
torch.Size([8])
>>> classifier.predict(torch.randn(8, 4)).shape  # without adapting
torch.Size([8, 3])
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

from come import callbacks, methods, objectives, optim, select, theory
from come.adapter import Adapter, adapt
from come.errors import (
    ClosedError,
    CollapseError,
    ComeError,
    ConfigError,
    InputError,
    MissingError,
    ModelError,
    RankError,
    StateError,
    missing,
)
from come.fleet import Fleet
from come.guard import Event, Guard
from come.method import Method, Step
from come.objectives import Invariant, Objective, Opinion, Softmax
from come.version import __version__

__all__ = [
    "Adapter",
    "ClosedError",
    "CollapseError",
    "ComeError",
    "ConfigError",
    "Event",
    "Fleet",
    "Guard",
    "InputError",
    "Invariant",
    "Method",
    "MissingError",
    "ModelError",
    "Objective",
    "Opinion",
    "RankError",
    "Softmax",
    "StateError",
    "Step",
    "__version__",
    "adapt",
    "callbacks",
    "methods",
    "objectives",
    "optim",
    "select",
    "theory",
]

_LATER = {
    "bench": "bench",
    "corruptions": "",
    "episodic": "",
    "metrics": "",
    "serve": "serve",
    "testing": "",
    "zero_shot": "",
}
"""Modules that are imported when they are first asked for, and the extra that they need."""


def __getattr__(name: str) -> ModuleType:
    if name not in _LATER:
        raise AttributeError(f"module 'come' has no attribute {name!r}")
    try:
        return import_module(f"come.{name}")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "come" or not _LATER[name]:
            raise
        raise missing(f"come.{name}", error, _LATER[name]) from error


def __dir__() -> list[str]:
    return sorted([*__all__, *_LATER])
