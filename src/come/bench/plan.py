"""What to run: the plan of a benchmark, checked, and the cells it expands into."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from come import corruptions, methods, objectives, settings
from come.bench.cell import Cell
from come.errors import ConfigError, require, unknown

GIVEN = frozenset({"objective", "source", "normalisation", "seed"})
"""Hyper-parameters that a run sets itself: by its objectives, data, model and seeds."""

QUICK = tuple(members[0] for group, members in corruptions.GROUPS.items() if group != "extra")
"""The first corruption of each of the four groups."""


@dataclass(frozen=True)
class Plan:
    """Everything that decides a run's numbers. Every name in it is checked when it is made.

    Example:
        >>> plan = Plan(methods=("source", "tent"), corruptions=("fog",), seeds=(0, 1))
        >>> len(list(plan.cells(size=100)))  # source once, tent with em and come; two seeds
        6
    """

    model: str = "glyphs-vit"
    data: str = "glyphs"
    setting: str = "standard"
    methods: tuple[str, ...] = ("source", "norm", "tent", "eata", "sar")
    objectives: tuple[str, ...] = ("em", "come")
    corruptions: tuple[str, ...] = QUICK
    severity: int = 5
    batch_size: int = 64
    seeds: tuple[int, ...] = (0,)
    hyper: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Hyper-parameters by method: {"tent": {"lr": 5e-4}}."""
    checkpoint: str | None = None
    normalisation: str = "model"
    source_data: str | None = None
    source_size: int = 2000
    limit: int | None = None
    """Use the first samples only; None uses all."""

    def __post_init__(self) -> None:
        for name in self.methods:
            methods.get(name)
        for name in self.objectives:
            objectives.get(name)
        for name in self.corruptions:
            corruptions.check_choice(name, self.severity, 0, None)
        settings.get(self.setting)
        require(self.batch_size >= 1, "batch-size", self.batch_size, "at least 1")
        require(self.source_size >= 1, "source-size", self.source_size, "at least 1")
        require(self.limit is None or self.limit >= 1, "limit", self.limit, "at least 1")
        for field_name in ("methods", "objectives", "corruptions", "seeds"):
            values = getattr(self, field_name)
            require(bool(values), field_name, values, "a list of at least one")
            require(len(set(values)) == len(values), field_name, values, "a list without repetition")
        for method, chosen in self.hyper.items():
            if method not in self.methods:
                raise unknown("method in this run", method, self.methods)
            known = methods.get(method).hyperparameters()
            for key in chosen:
                if key not in known or key in GIVEN:
                    raise unknown(f"hyper-parameter of {method}", key, set(known) - GIVEN)

    def cells(self, size: int) -> Iterator[Cell]:
        """The cells of the plan for a source of `size` samples, those that share an adapter next to each other."""
        setting = settings.get(self.setting)
        pieces = [(name,) for name in self.corruptions] if setting.independent else [self.corruptions]
        for method in self.methods:
            # A method that minimises nothing is the same with every objective but for its score: run it with the first.
            for objective in self.objectives if methods.get(method).minimises else self.objectives[:1]:
                for seed in self.seeds:
                    for piece in pieces:
                        yield Cell(
                            model=self.model,
                            data=self.data,
                            size=size if self.limit is None else min(size, self.limit),
                            setting=self.setting,
                            corruptions=piece,
                            severity=self.severity,
                            method=method,
                            objective=objective,
                            hyper=self.hyper.get(method, {}),
                            batch_size=self.batch_size,
                            seed=seed,
                            checkpoint=self.checkpoint,
                            normalisation=self.normalisation,
                            source_data=self.source_data,
                            source_size=self.source_size,
                        )

    @property
    def slug(self) -> str:
        """A folder name that is the same for the same plan."""
        digest = hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:8]
        data = self.data.partition(":")[0]
        return f"{self.setting}-{data}-{self.model.replace(':', '-').replace('/', '-')}-{digest}"


PRESETS: dict[str, tuple[str, dict[str, Any]]] = {
    "quick": ("one corruption of each group, about two minutes on two cores", {}),
    "standard": ("all 15 corruptions of the paper", {"corruptions": corruptions.names("standard")}),
}


def preset(name: str) -> dict[str, Any]:
    """What a preset changes of the default plan."""
    if name not in PRESETS:
        raise unknown("preset", name, PRESETS)
    return PRESETS[name][1]


def parse_hyper(text: str) -> tuple[str, str, Any]:
    """`tent.lr=5e-4` -> ("tent", "lr", 0.0005).

    Example:
        >>> parse_hyper("sar.quirks=true")
        ('sar', 'quirks', True)
    """
    target, equals, value = text.partition("=")
    method, dot, key = target.partition(".")
    if not (equals and dot and method and key and value):
        raise ConfigError(f"--set {text!r} is not METHOD.NAME=VALUE; write e.g. --set tent.lr=5e-4")
    for read in (json.loads, float):
        try:
            return method, key, read(value)
        except ValueError:
            continue
    return method, key, value
