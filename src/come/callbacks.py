"""Functions that run after each step: `adapter.callbacks.append(Snapshots("folder"))`.

A callback is any function of (adapter, step). An exception in it is logged, counted in `health()["callback_failed"]`, and
stops nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from come.errors import require, require_int
from come.guard.signals import SIGNALS
from come.method import Step

if TYPE_CHECKING:
    from come.adapter import Adapter


Log = Callable[[str, float, int], object]
"""Takes a scalar: its name, its value, and the step that it belongs to."""


class Snapshots:
    """Write the state to disk every `every` steps, and keep the last `keep` files.

    Files are called `METHOD-NUMBER.safetensors`; numbers continue after those in the folder, which is created if missing. Only
    files with such a name are removed, oldest first; no other file is touched.

    Example:
        >>> import come, tempfile, torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 3))
        >>> classifier = come.adapt(model, "tent")
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     classifier.callbacks.append(Snapshots(folder, every=2))
        ...     for _ in range(5):
        ...         _ = classifier(torch.randn(8, 4))
        ...     sorted(path.name for path in Path(folder).iterdir())
        ['tent-0000000001.safetensors', 'tent-0000000002.safetensors']
    """

    def __init__(self, folder: str | Path, *, every: int = 1000, keep: int = 3) -> None:
        require_int("every", every, 1)
        require_int("keep", keep, 1)
        self.folder, self.every, self.keep = Path(folder), every, keep
        self._steps = 0

    def __call__(self, adapter: Adapter, step: Step) -> None:
        """Write a snapshot if one is due."""
        self._steps += 1
        if self._steps % self.every or not adapter.writes:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        name = adapter.method.name
        pattern = re.compile(rf"{re.escape(name)}-(\d{{10}})\.safetensors")
        found = sorted(path for path in self.folder.iterdir() if pattern.fullmatch(path.name))
        last = pattern.fullmatch(found[-1].name) if found else None
        path = self.folder / f"{name}-{int(last[1]) + 1 if last else 1:010d}.safetensors"
        adapter.save(path)
        for old in [*found, path][: -self.keep]:
            old.unlink(missing_ok=True)


class Scalars:
    """Log the signals of each step as scalars.

    Args:
        log: a function of (name, value, step): `add_scalar` of a `torch.utils.tensorboard.SummaryWriter`, one that
            `come.integrations.log.opened` gives, or your own.

    Example:
        >>> import come, torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 3))
        >>> classifier, seen = come.adapt(model, "tent"), {}
        >>> classifier.callbacks.append(Scalars(lambda name, value, step: seen.update({name: step})))
        >>> for _ in range(3):
        ...     _ = classifier(torch.randn(8, 4))
        >>> seen["come/entropy"]
        3
    """

    def __init__(self, log: Log) -> None:
        require(callable(log), "log", log, "a function of (name, value, step), such as SummaryWriter(...).add_scalar")
        self.log = log

    def __call__(self, adapter: Adapter, step: Step) -> None:
        """Log the guard's latest signals."""
        health = adapter.health()
        for name in (*SIGNALS, "agreement", "lr_scale"):
            if name in health:
                self.log(f"come/{name}", health[name], int(health["steps"]))
