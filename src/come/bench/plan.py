"""What to run: the plan of a benchmark, checked, and the cells it expands into."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import product
from typing import Any

from pydantic import model_validator

from come import corruptions, methods, objectives
from come.bench import settings
from come.bench.cell import (
    BARE,
    HOW,
    Cell,
    Count,
    Knobs,
    Seed,
    Text,
    Texts,
    Value,
    digest,
    knob,
    parse_method,
    shape,
    spelled,
)
from come.bench.data.streams import CONDITIONS
from come.bench.paper import rank
from come.errors import ConfigError, require, unknown
from come.registry import literal

GIVEN = frozenset({"objective", "source", "normalization", "seed"})
"""Hyperparameters that a run sets itself: by its objectives, data, model and seeds."""

SEGMENTATION: Mapping[str, Any] = {
    "model": "scenes-unet-bn",
    "data": "scenes",
    "methods": ("source", "norm", "tent", "cotta", methods.DEFAULT, f"norm:{BARE}", f"tent:{BARE}"),
    "batch_size": 1,
}
"""What a plan has by default where each pixel gets a class: batches of one image, as in the field."""

COMPARED = ("em", "come")
"""Objectives of the paper's comparison."""

QUICK = tuple(members[0] for group, members in corruptions.GROUPS.items() if group != "extra")
"""The first corruption of each of the four groups."""

FASHION_OUTLIERS = ("fashion-outliers:near", "fashion-outliers:far")
STREAMS = "Names or groups (noise, blur, weather, digital, extra); by default the setting's own, or one of each group."


def _for(guard: bool, chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a plan with or without a guard: without, each method once."""
    specs = chosen.get("methods", ())
    return {**chosen, **({"methods": tuple(s for s in specs if guard or not parse_method(s)[2])} if specs else {})}


class Plan(Knobs):
    """Everything that decides a run's numbers. Every value in it is checked when it is made.

    Example:
        >>> plan = Plan(methods=("source", "tent"), corruptions=("fog",), seeds=(0, 1))
        >>> len(list(plan.cells(size=100)))  # source once, tent with em and come; two seeds
        6
    """

    methods: Texts = knob(
        ("source", "tent", "eata", "sar", methods.DEFAULT), "Names, or all. See [bold]come list methods[/]."
    )
    objectives: Texts | None = knob(
        None, "By default em and come, and for steady its own. See [bold]come list objectives[/]."
    )
    corruptions: Texts | None = knob(None, STREAMS)
    outliers: Texts | None = knob(None, "Open world: sources of outliers; by default the embedded ones.")
    seeds: tuple[Seed, ...] = knob((0,), "Several give mean and deviation.", strict=False)
    limit: Count | None = knob(None, "Use N samples only, spread over the classes by the seed.", HOW)
    hyper: dict[Text, dict[Text, Value]] = knob({}, "A hyperparameter, e.g. tent.lr=5e-4. Repeatable.", HOW)

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Put the setting's own values where none are given, and refuse those that would change nothing."""
        if not isinstance(values.get("setting", "standard"), str):
            return values  # which the type of the field refuses
        setting = settings.get(values.get("setting", "standard"))
        dense = values.get("task") == "segmentation"
        filled: dict[str, Any] = (_for(values.get("guard", True), SEGMENTATION) if dense else {}) | {
            "severity": setting.severity,
            "corruptions": QUICK if setting.corruptions is None else setting.corruptions,
        }
        if str(values.get("data")).partition(":")[0] == "acdc" and setting.corruptions is None:
            filled["corruptions"] = CONDITIONS
        if setting.pieces == "outliers" and str(values.get("data", "fashion")).partition(":")[0] == "fashion":
            filled["outliers"] = FASHION_OUTLIERS
        given = {name for name, value in values.items() if value is not None and name in cls.model_fields}
        given = {name for name in given if values[name] not in (cls.model_fields[name].default, filled.get(name))}
        readers = {s.name: s.reads for s in map(settings.get, settings.names())}
        elsewhere = frozenset().union(*readers.values()) - setting.reads
        for name in sorted(given & (elsewhere | setting.ignores)):
            where = [reader for reader, reads in readers.items() if name in reads]
            repair = f", or choose --setting {' or '.join(where)}" if where else ""
            raise ConfigError(f"{spelled(name)} has no effect in the {setting.name} setting; leave it out{repair}")
        return filled | {name: value for name, value in values.items() if value is not None}

    @model_validator(mode="after")
    def _check(self) -> Plan:
        setting = settings.get(self.setting)
        if setting.pieces == "outliers" and self.outliers is None:
            raise ConfigError(
                f"the {self.setting} setting needs outliers for {self.data!r}: give --outliers, e.g. folder:textures"
            )
        if self.task == "segmentation" and (setting.labels or setting.alone):
            fitting = [name for name in settings.names() if not (settings.get(name).labels or settings.get(name).alone)]
            raise ConfigError(
                f"the {self.setting} setting is for one label for each image, not for segmentation; choose --setting "
                f"{', '.join(fitting[:-1])} or {fitting[-1]}"
            )
        for name in self.objectives or ():
            objectives.get(name)
        for name in set(self.corruptions or ()) - set(CONDITIONS):
            corruptions.check_choice(name, self.severity or 5, 0, None)
        for field in ("methods", "objectives", "corruptions", "seeds", "outliers"):
            values = getattr(self, field)
            if values is not None:
                empty = field == "corruptions" and setting.corruptions == ()
                require(bool(values) or empty, field, values, "a list of at least one")
                require(len(set(values)) == len(values), field, values, "a list without repetition")
        names = [parse_method(spec)[0] for spec in self.methods]
        for name in self.hyper:
            if name not in names:
                raise unknown("method in this run", name, self.methods)
        for spec in self.methods:
            name, variant, bare = parse_method(spec)
            if bare and not self.guard:
                raise ConfigError(
                    f"{spec} has no effect with --bare, which runs all methods without the guard; leave it out"
                )
            chosen = self.hyper.get(name, {}) | variant
            known = methods.get(name).hyperparameters()
            for key in chosen:
                if key not in known or key in GIVEN:
                    raise unknown(f"hyperparameter of {name}", key, set(known) - GIVEN)
            methods.make(name, **chosen)  # types and ranges
        if not any("source" in methods.get(name).hyperparameters() for name in names):
            for field in ("source_data", "source_size"):
                if getattr(self, field) != type(self).model_fields[field].default:
                    raise ConfigError(f"{spelled(field)} has no effect: none of {', '.join(names)} uses source images")
        return self

    def cells(self, size: int) -> Iterator[Cell]:
        """The cells of the plan for a source of `size` samples, those that share an adapter next to each other."""
        setting = settings.get(self.setting)
        shifts = self.corruptions or ()
        by_corruption = [(name,) for name in shifts] if setting.pieces else [shifts]
        outliers = (None, *(self.outliers or ()))
        shared = {name: getattr(self, name) for name in Knobs.model_fields}
        fewer = self.limit is not None and self.limit < size
        shared |= {"size": self.limit if fewer else size, "total": size if fewer else None}
        shared["edition"] = setting.edition if setting.edition > 1 else None
        for spec in self.methods:
            method, variant, _ = parse_method(spec)
            hyper = setting.hyper.get(method, {}) | self.hyper.get(method, {}) | variant
            pieces = product(self._objectives_of(method), self.seeds, by_corruption, outliers)
            for objective, seed, piece, outlier in pieces:
                own: dict[str, Any] = {"method": spec, "objective": objective, "hyper": hyper, "seed": seed}
                yield Cell(**shared, **own, corruptions=piece, outliers=outlier)

    def _objectives_of(self, name: str) -> tuple[str, ...]:
        """The objectives that a method runs with."""
        method = methods.get(name)
        chosen = self.objectives or COMPARED
        if not method.minimizes:  # the same with every objective but for its score: run it with the first
            return chosen[:1]
        own = method.hyperparameters().get("objective")
        return (own,) if not self.objectives and isinstance(own, str) and own not in COMPARED else chosen

    def but(self, **changes: Any) -> Plan:
        """This plan with other values for some fields; None is the setting's own.

        Example:
            >>> Plan().but(seeds=(0, 1)).seeds
            (0, 1)
        """
        return Plan(**(dict(self) | changes))

    @property
    def slug(self) -> str:
        """A folder name that is the same for the same plan."""
        data = self.data.partition(":")[0]
        return f"{self.setting}-{data}-{self.model.replace(':', '-').replace('/', '-')}-{digest(self)[:8]}"[-200:]


FAST = "tent:lr=0.004"
"""Tent at 16 times its learning rate on BatchNorm networks."""

PRESETS: dict[str, tuple[str, dict[str, Any]]] = {
    "quick": (
        "one stream of all 15 corruptions without a reset, 384 images of each: the paper's methods and the default one, then "
        "Tent at 16 times its learning rate, with and without the guard; a minute and a half on two cores",
        {
            "setting": "lifelong",
            "corruptions": corruptions.names("standard"),
            "limit": 384,
            "methods": (*Plan.model_fields["methods"].default, FAST, f"tent:{BARE}", f"{FAST}:{BARE}"),
        },
    ),
    "standard": (
        "all 15 corruptions of the paper, each from the source model",
        {"corruptions": corruptions.names("standard")},
    ),
}
"""What `come bench --preset NAME` runs: in words, and as arguments of `Plan`."""


def preset(name: str, guard: bool = True) -> dict[str, Any]:
    """What a preset changes of the default plan; without a guard, each method once."""
    if name not in PRESETS:
        raise unknown("preset", name, PRESETS)
    return _for(guard, PRESETS[name][1])


def named(found: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A table of options, such as a configuration file, by the names of a plan's fields."""
    fields = {spelled(name): name for name in Plan.model_fields}
    for key in found:
        if key.replace("_", "-") not in fields:
            raise unknown(f"option in {where}", key, fields)
    return {fields[key.replace("_", "-")]: value for key, value in found.items()}


def typed(given: Mapping[str, str | bool | Iterable[str]]) -> dict[str, Any]:
    """Options as they were typed: lists with commas between, groups of corruptions, `all`, and METHOD.NAME=VALUE."""
    values: dict[str, Any] = {}
    for name, text in given.items():
        kind = shape(Plan.model_fields[name])
        if kind == "table":
            for method, key, chosen in map(parse_hyper, text):  # type: ignore[arg-type]
                values.setdefault(name, {}).setdefault(method, {})[key] = chosen
        elif kind == "list":
            parts = tuple(part.strip() for part in str(text).split(","))
            values[name] = tuple(map(_number, parts)) if name in ("seeds", "mean", "std") else _expanded(name, parts)
        else:
            values[name] = _number(str(text)) if kind == "number" else text
    return values


def parse_together(text: str) -> int | None:
    """`16` -> 16, `auto` -> None.

    Example:
        >>> parse_together("0")
        Traceback (most recent call last):
        ...
        come.errors.ConfigError: together must be a number from 1 to 4096, or auto, got '0'
    """
    if text == "auto":
        return None
    count = int(text) if re.fullmatch(r"\d{1,4}", text, re.ASCII) else 0
    require(1 <= count <= 4096, "together", text, "a number from 1 to 4096, or auto")
    return count


def parse_shard(text: str) -> tuple[int, int]:
    """`2/8` -> (2, 8): the third of eight parts of a plan."""
    found = re.fullmatch(r"(\d{1,9})/(\d{1,9})", text, re.ASCII)
    number, count = map(int, found.groups()) if found else (0, 0)
    require(number < count, "shard", text, "I/N with 0 <= I < N, such as 0/8 to 7/8")
    return number, count


def _number(text: str) -> Any:
    """A number, or the text, which the plan then refuses in words."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _expanded(name: str, values: tuple[str, ...]) -> tuple[str, ...]:
    if name == "corruptions":
        groups = {**{g: corruptions.names(g) for g in (*corruptions.GROUPS, "standard")}, "all": corruptions.names()}
        return tuple(one for value in values for one in groups.get(value, (value,)))
    if values == ("all",) and name in ("methods", "objectives"):
        return tuple(sorted(methods.names(), key=rank) if name == "methods" else objectives.names())
    return values


def parse_hyper(text: str) -> tuple[str, str, Any]:
    """`tent.lr=5e-4` -> ("tent", "lr", 0.0005)."""
    target, equals, value = text.partition("=")
    method, dot, key = target.partition(".")
    if not (equals and dot and method and key and value):
        raise ConfigError(f"set must be METHOD.NAME=VALUE, e.g. tent.lr=5e-4, got {text!r}")
    return method, key, literal(value)
