"""The description of a measurement, in one place.

A field of `Knobs` is an option of `come bench` and `come reproduce`, a key of a configuration file, a part of every cell and so
of its identity, of its record, and a line of the report: a new knob is one line here. `Plan` adds what a grid runs through
(methods, objectives, corruptions, outliers, seeds), `Cell` the one of each that a result is of.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Set
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, Strict, ValidationError
from pydantic.fields import FieldInfo

from come.errors import ComeError, ConfigError, shown, unknown
from come.registry import parse

WHAT, HOW, PREPROCESSING = "What to run", "How to run it", "Preprocessing"
"""Groups of options in `--help`."""

LONGEST = 1000
UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters, half characters, and what changes the direction of the text behind it: names stand in pages."""


def _printable(text: str) -> str:
    if not text or len(text) > LONGEST or UNPRINTABLE.search(text):
        raise ValueError(f"must be printable text of 1 to {LONGEST} characters")
    return text


Text = Annotated[str, AfterValidator(_printable)]
Texts = Annotated[tuple[Text, ...], Strict(False)]  # or a list
Count = Annotated[int, Field(ge=1, le=10**9)]
Seed = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
Pixels = Annotated[int, Field(ge=1, le=10**4)]
Severity = Annotated[int, Field(ge=1, le=5)]
Factor = Annotated[float, Field(ge=1, le=1e9)]
Plain = None | bool | int | Annotated[float, Field(allow_inf_nan=True)] | Text
Value = None | bool | int | Annotated[float, Field(allow_inf_nan=True)] | Text | list[Plain]
"""What a hyperparameter may be."""


def _three(values: tuple[float, ...]) -> tuple[float, ...]:
    if len(values) != 3:
        raise ValueError("must be three numbers, of red, green and blue")
    return values


Channels = Annotated[tuple[float, ...], Strict(False), AfterValidator(_three)]


def knob(default: Any, description: str, group: str = WHAT, **limits: Any) -> Any:
    """A field with what `--help` says of it."""
    return Field(default, description=description, json_schema_extra={"group": group}, **limits)


PLAINER = {"Input should be": "must be", "valid tuple": "list", "Tuple should": "must", "valid dictionary": "table"}
"""Words of pydantic, and ours."""


class Description(BaseModel):
    """Typed fields that do not change, and no others. A wrong value is a `ConfigError` in words."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise self._refusal(error) from error

    @classmethod
    def _refusal(cls, error: ValidationError) -> ComeError:
        """What is wrong with the first wrong field: "X must be LIMIT, got VALUE"."""
        first = error.errors(include_url=False)[0]
        place, cause = first["loc"], first.get("ctx", {}).get("error")
        if isinstance(cause, ComeError):
            return cause
        if first["type"] == "extra_forbidden":
            return unknown("option", str(place[0]), map(spelled, cls.model_fields))
        name = ".".join(spelled(str(part)) for part in place if part in cls.model_fields or isinstance(part, int))
        limit = str(cause or first["msg"])
        if place[:1] == ("hyper",) and len(place) > 3:  # of several types pydantic names the first
            name, limit = f"set.{place[1]}.{place[2]}", "must be a number, a text, true, false or a list of them"
        for theirs, ours in PLAINER.items():
            limit = limit.replace(theirs, ours)
        return ConfigError(f"{name} {limit[:200]}, got {shown(first['input'])}")


class Knobs(Description):
    """What a plan and all of its cells have in common."""

    model: Text = knob(
        "fashion-resnet-bn",
        "See [bold]come list models[/]; your own is MODULE:FACTORY. Arguments follow: timm:NAME:img_size=64.",
    )
    data: Text = knob("fashion", "See [bold]come list data[/].")
    classes: Text | None = knob(
        None, "A file with the names of the classes in the order of the model's outputs, for data in folders."
    )
    task: Literal["classification", "segmentation"] = knob(
        "classification", "classification, or segmentation: a class for each pixel, on the embedded scenes by default."
    )
    setting: Text = knob("standard", "See [bold]come list settings[/].")
    severity: Severity | None = knob(None, "1 to 5; by default the setting's own.")
    outlier_ratio: float = knob(0.5, "Open world: share of outliers.", gt=0, lt=1)
    imbalance: Factor | None = knob(
        None, "Imbalanced: how many times likelier a class is in its part; else infinitely."
    )
    rounds: int = knob(1, "Lifelong: how often through all corruptions.", ge=1, le=10**4)
    views: Annotated[int, Field(ge=2, le=1000)] | None = knob(None, "Episodic: views of each image; by default 64.")
    guard: bool = knob(
        True,
        "With the guard, as come.adapt deploys methods, or bare, as they were published. One of them: tent:bare.",
        HOW,
    )
    statistics: Literal["batch", "mixed", "source"] | None = knob(
        None, "What BatchNorm normalizes by: batch, mixed or source; by default mixed, or batch with --bare.", HOW
    )
    batch_size: Count = knob(64, "Samples that come at a time.", HOW)
    precision: Literal["float32", "tf32", "bf16"] = knob(
        "float32", "Of the model's arithmetic: float32, tf32 or bf16.", HOW
    )
    compile: bool = knob(False, "Compile the steps: slower to start, faster from then on.", HOW)
    channels_last: bool = knob(False, "Keep channels last in memory: faster convolutions on a GPU.", HOW)
    checkpoint: Text | None = knob(None, "Weights to use in place of the pretrained ones.", HOW)
    normalization: Literal["model", "imagenet", "half", "caffe", "lite"] = knob(
        "model", "model, imagenet, half, caffe or lite.", PREPROCESSING
    )
    mean: Channels | None = knob(None, "Of images in \\[0, 1], in place of the model's own; with --std.", PREPROCESSING)
    std: Channels | None = knob(None, "The same, positive.", PREPROCESSING)
    image_size: Pixels | None = knob(None, "Side of the images, in place of the model's own.", PREPROCESSING)
    resize: Pixels | None = knob(None, "Shorter side of a picture before the crop to that size.", PREPROCESSING)
    interpolation: Literal["nearest", "bilinear", "bicubic", "lanczos", "box", "hamming"] | None = knob(
        None, "Of that resizing: bilinear, bicubic, ...; by default the model's own.", PREPROCESSING
    )
    source_data: Text | None = knob(None, "Clean images for EATA's Fisher matrix, if the data has none.", HOW)
    source_size: int = knob(2000, "How many of them.", HOW, ge=1, le=10**6)


BARE = "bare"
"""Behind the name of a method: without the guard."""

LATER = ("images", "total", "edition", "classes", "task", "views")
"""Fields that came later: with their default they are no part of a cell's key, or of a plan's name."""


class Cell(Knobs):
    """The unit that is run and resumed: one method with one objective on one piece of a setting, with one seed.

    Example:
        >>> cell = Cell(method="tent", objective="come", corruptions=("fog",), severity=5, size=100)
        >>> len(cell.key), cell.model
        (16, 'fashion-resnet-bn')
    """

    size: Count
    """How many samples of the data are used."""
    total: Count | None = None
    """How many there are, where fewer are used; these are spread over the classes by the seed, see `settings.samples`."""
    method: Text
    objective: Text
    hyper: dict[Text, Value] = Field({})
    corruptions: Texts = ()
    outliers: Text | None = None
    seed: Seed = 0
    replay: Text | None = None
    """Digest of the manifests that are replayed, if any."""
    weights: Text | None = None
    """Digest of the model's weights, which may change under its name; None for the embedded models."""
    images: Text | None = None
    """Digest of the data, which may change under its name; None where it says none, see `Source.digest`."""
    edition: Count | None = None
    """Of the setting's streams, which may change under its name; None for the first."""

    @property
    def key(self) -> str:
        """Sixteen hexadecimal digits that name this configuration and no other."""
        return digest(self)[:16]

    @property
    def base(self) -> str:
        """The registered name of the method; `method` may carry arguments, as in "tent:keep=0.5"."""
        return self.method.partition(":")[0]

    @property
    def guarded(self) -> bool:
        """Whether it runs with the guard."""
        return self.guard and not parse_method(self.method)[2]

    @property
    def pair(self) -> tuple[str, str]:
        """Method and objective."""
        return self.method, self.objective

    @property
    def dense(self) -> bool:
        """Whether each pixel gets a class."""
        return self.task == "segmentation"

    @property
    def metric(self) -> str:
        """What verdicts are about: "accuracy", or "miou"."""
        return "miou" if self.dense else "accuracy"

    @property
    def title(self) -> str:
        """What tells it from the other cells of a plan, in a line."""
        shifts = [", ".join(self.corruptions)] if self.corruptions else []
        outliers = [self.outliers] if self.outliers else []
        return ", ".join([" + ".join(self.pair), *shifts, *outliers, f"seed {self.seed}"])

    @property
    def samples(self) -> int:
        """About how many samples its streams have, outliers not counted."""
        return self.size * self.rounds * max(1, len(self.corruptions))

    @property
    def level(self) -> int:
        """The severity, 5 where nobody has chosen one."""
        return 5 if self.severity is None else self.severity


def parse_method(spec: str) -> tuple[str, dict[str, Any], bool]:
    """A method with its arguments: its name, its hyperparameters, and whether it runs without the guard.

    >>> parse_method("tent:lr=0.004:bare")
    ('tent', {'lr': 0.004}, True)
    """
    name, *arguments = spec.split(":")
    name, given = parse(":".join((name, *(text for text in arguments if text != BARE))))
    return name, given, BARE in arguments


def digest(described: Description, leave_out: Set[str] = frozenset()) -> str:
    """64 hexadecimal digits that follow from the values alone."""
    fields = type(described).model_fields
    unset = {name for name in LATER if name in fields and getattr(described, name) == fields[name].default}
    values = described.model_dump(exclude=unset | leave_out)
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def spelled(name: str) -> str:
    """A field as the command line spells it.

    >>> spelled("batch_size"), spelled("hyper")
    ('batch-size', 'set')
    """
    return "set" if name == "hyper" else name.replace("_", "-")


def shape(field: FieldInfo) -> Literal["list", "flag", "number", "table", "text"]:
    """What a field looks like on a command line."""
    kind: Any = field.annotation
    if get_origin(kind) in (Union, UnionType):
        (kind,) = (part for part in get_args(kind) if part is not type(None))
    if get_origin(kind) is Annotated:
        kind = get_args(kind)[0]
    kind = get_origin(kind) or kind
    return {tuple: "list", bool: "flag", int: "number", float: "number", dict: "table"}.get(kind, "text")  # type: ignore[return-value]
