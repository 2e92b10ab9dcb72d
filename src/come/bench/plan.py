"""What to run: the plan of a benchmark, checked, and the cells it expands into."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from itertools import product
from typing import Any

from come import corruptions, methods, objectives
from come.bench import settings
from come.bench.cell import Cell
from come.errors import ConfigError, require, require_int, unknown
from come.registry import literal, parse

GIVEN = frozenset({"objective", "source", "normalization", "seed"})
"""Hyperparameters that a run sets itself: by its objectives, data, model and seeds."""

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
    corruptions: tuple[str, ...] | None = None
    """None is the setting's own choice, or one of each group."""
    severity: int | None = None
    """None is the setting's own: 5, or 3 in an open world."""
    batch_size: int = 64
    seeds: tuple[int, ...] = (0,)
    hyper: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Hyperparameters by method: {"tent": {"lr": 5e-4}}."""
    checkpoint: str | None = None
    normalization: str = "model"
    source_data: str | None = None
    source_size: int = 2000
    limit: int | None = None
    """Use the first samples only; None uses all."""
    outliers: tuple[str, ...] | None = None
    """Outlier sources of an open world, beside the column without any; None is those of `glyphs`."""
    outlier_ratio: float = 0.5
    imbalance: float | None = None
    """How many times likelier a class is in its own part of an imbalanced stream; None is infinitely."""
    rounds: int = 1
    """How often a lifelong stream goes through the corruptions."""
    guard: bool = False
    """Run with the guard that `come.adapt` has by default; the paper's methods have none."""

    def __post_init__(self) -> None:
        setting = settings.get(self.setting)
        if self.severity is None:
            object.__setattr__(self, "severity", setting.severity)
        if self.corruptions is None:
            object.__setattr__(self, "corruptions", QUICK if setting.corruptions is None else setting.corruptions)
        for name in self.objectives:
            objectives.get(name)
        assert self.severity is not None
        for name in self.corruptions or ():
            corruptions.check_choice(name, self.severity, 0, None)
        self._check_outliers(setting)
        require(self.imbalance is None or self.imbalance >= 1, "imbalance", self.imbalance, ">= 1, or None")
        require_int("rounds", self.rounds, 1)
        require_int("batch-size", self.batch_size, 1)
        require_int("source-size", self.source_size, 1)
        if self.limit is not None:
            require_int("limit", self.limit, 1)
        for field_name in ("methods", "objectives", "corruptions", "seeds"):
            values = getattr(self, field_name)
            empty = field_name == "corruptions" and setting.corruptions == ()
            require(bool(values) or empty, field_name, values, "a list of at least one")
            require(len(set(values)) == len(values), field_name, values, "a list without repetition")
        for spec in self.methods:
            name, chosen = parse(spec)
            self._check_hyper(name, chosen)
        for method, chosen in self.hyper.items():
            if method not in {parse(spec)[0] for spec in self.methods}:
                raise unknown("method in this run", method, self.methods)
            self._check_hyper(method, chosen)

    def _check_hyper(self, method: str, chosen: dict[str, Any]) -> None:
        known = methods.get(method).hyperparameters()
        for key in chosen:
            if key not in known or key in GIVEN:
                raise unknown(f"hyperparameter of {method}", key, set(known) - GIVEN)

    def _check_outliers(self, setting: settings.Setting) -> None:
        require(0 < self.outlier_ratio < 1, "outlier-ratio", self.outlier_ratio, "between 0 and 1")
        if setting.pieces != "outliers":
            require(self.outliers is None, "outliers", self.outliers, "left out: only the open-world setting has them")
        elif self.outliers is None:
            if self.data.partition(":")[0] != "glyphs":
                raise ConfigError(
                    f"the open-world setting needs outliers for {self.data!r}: give --outliers, e.g. folder:textures"
                )
            object.__setattr__(self, "outliers", ("glyph-outliers:near", "glyph-outliers:far"))

    def cells(self, size: int) -> Iterator[Cell]:
        """The cells of the plan for a source of `size` samples, those that share an adapter next to each other."""
        setting = settings.get(self.setting)
        shifts, severity = self.corruptions, self.severity
        assert shifts is not None
        assert severity is not None
        by_corruption = [(name,) for name in shifts] if setting.pieces else [shifts]
        outliers = (None, *(self.outliers or ())) if setting.pieces == "outliers" else (None,)
        for spec in self.methods:
            method, variant = parse(spec)
            hyper = setting.hyper.get(method, {}) | self.hyper.get(method, {}) | variant
            # A method that minimizes nothing is the same with every objective but for its score: run it with the first.
            for objective in self.objectives if methods.get(method).minimizes else self.objectives[:1]:
                for seed, piece, outlier in product(self.seeds, by_corruption, outliers):
                    yield Cell(
                        model=self.model,
                        data=self.data,
                        size=size if self.limit is None else min(size, self.limit),
                        setting=self.setting,
                        corruptions=piece,
                        severity=severity,
                        method=spec,
                        objective=objective,
                        hyper=hyper,
                        batch_size=self.batch_size,
                        seed=seed,
                        checkpoint=self.checkpoint,
                        normalization=self.normalization,
                        source_data=self.source_data,
                        source_size=self.source_size,
                        outliers=outlier,
                        outlier_ratio=self.outlier_ratio if outlier else 0.5,
                        imbalance=self.imbalance,
                        rounds=self.rounds,
                        guard=self.guard,
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
    return method, key, literal(value)
