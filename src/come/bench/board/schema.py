"""The schema of a result that others can rank: one JSON file for a run under a protocol.

It is the class `Submission`; `format` is its version. Numbers are in percent with three digits. There are neither dates nor
costs in it, so the same run gives the same bytes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, Field, Strict, ValidationError

from come.bench.cell import PLAINER, Count, Description, Seed, Text
from come.bench.data.reading import read_regular
from come.bench.protocols import Sha256
from come.bench.record import Amount
from come.errors import ComeError, ConfigError, InputError, one_line, shown
from come.state.files import replacing, unwritable
from come.version import __version__

FORMAT: Literal["come-result-1"] = "come-result-1"
LARGEST = 2**20  # bytes of a file
DIGITS = 3  # of a percentage: enough to tell one image in 50,000
AGAIN = "write the file again with 'come protocol submit'"
METRICS = ("accuracy", "fpr", "fpr_softmax")


def _short(text: str) -> str:
    if len(text) > 80:
        raise ValueError("must have at most 80 characters")
    return text


def _https(text: str) -> str:
    if len(text) > 300 or not text.isascii() or set(" <>[]\"'`\\") & set(text):
        raise ValueError("must be an address of at most 300 ASCII characters, without spaces, quotes or brackets")
    parts = urlsplit(text)
    if parts.scheme != "https" or not parts.hostname or "@" in parts.netloc:
        raise ValueError("must be an https:// address, without a user name")
    return text


Name = Annotated[Text, AfterValidator(_short)]
Link = Annotated[Text, AfterValidator(_https)]
Names = Annotated[tuple[Name, ...], Strict(False), Field(min_length=1, max_length=200)]
Commit = Annotated[str, Field(pattern="^[0-9a-f]{40}$")]
Plain = None | bool | Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | float | Name
Percent = Annotated[float, Field(ge=0, le=100)]
Percents = Annotated[tuple[Percent | None, ...], Strict(False), Field(max_length=200)]


class Scores(BaseModel):
    """What a method reached with one seed: a number for each domain, in the order of `Submission.domains`."""

    model_config = Description.model_config

    seed: Seed
    accuracy: Percents
    fpr: Percents
    """By the objective's own confidence, as published; null where a domain has no wrong, or no right prediction."""
    fpr_softmax: Percents
    """The same by softmax, whatever the objective."""


class Row(BaseModel):
    """One method with one objective. Averages are over domains, then over seeds."""

    model_config = Description.model_config

    method: Name
    objective: Name
    hyper: Annotated[dict[Name, Plain | list[Plain]], Field(max_length=50)]
    """Those that differ from the method's defaults at this commit."""
    lr: Amount | None
    guard: bool
    statistics: Literal["batch", "mixed", "source"]
    """What BatchNorm normalizes by."""
    accuracy: Percent
    fpr: Percent | None
    fpr_softmax: Percent | None
    seeds: Annotated[tuple[Scores, ...], Strict(False), Field(min_length=1, max_length=100)]

    @property
    def title(self) -> str:
        """As the command line spells it, with the objective.

        Example:
            >>> Row.model_construct(method="tent", objective="come", hyper={"lr": 0.004}).title
            'tent:lr=0.004 + come'
        """
        return f"{':'.join((self.method, *(f'{k}={v}' for k, v in self.hyper.items())))} + {self.objective}"


class Submission(Description):
    """What one run under a protocol has found, who submits it, and what it takes to run it again.

    Args:
        format: the version of this schema.
        protocol: its name, and `protocol_sha256` what it fixes, see `Protocol.sha256`.
        weights_sha256: see `come.bench.models.fingerprint`.
        images: how many, and `images_sha256` of their names, null where they have none.
        samples: in all domains together, for each method and seed.
        no_adapt: accuracy of the model that does not adapt: the mean that the protocol checks.
        domains: of each list of numbers.
        come: version of the library, `commit` its git commit, `torch` the version of torch.
        submitted_by: a name, and `link` where the paper or the code is.
        rows: a method with an objective each; the source model is one of them.
    """

    format: Literal["come-result-1"]
    protocol: Name
    protocol_sha256: Sha256
    weights_sha256: Sha256
    images: Count
    images_sha256: Sha256 | None
    samples: Count
    precision: Literal["float32", "tf32", "bf16"]
    no_adapt: Percent
    come: Name
    commit: Commit
    torch: Name
    devices: Names
    submitted_by: Name
    link: Link | None
    domains: Names
    rows: Annotated[tuple[Row, ...], Strict(False), Field(min_length=1, max_length=200)]

    @classmethod
    def _refusal(cls, error: ValidationError) -> ComeError:
        """What is wrong with the first wrong field, spelled as in the file."""
        first = error.errors(include_url=False)[0]
        place, kind, value = first["loc"], first["type"], shown(first["input"])
        in_hyper = "hyper" in place[:-1]
        place = place[: place.index("hyper") + 2] if in_hyper else place  # behind it pydantic names types
        name = ".".join(map(str, place))[:100]
        if name == "format" and kind != "missing":
            return ConfigError(
                f"format must be {FORMAT!r}, the only one that come {__version__} reads, got {value}; {AGAIN}"
            )
        if kind == "missing":
            return ConfigError(f"{name} is missing; {AGAIN}")
        if kind == "extra_forbidden":
            return ConfigError(f"{name} is no field of {FORMAT}; leave it out")
        limit = str(first.get("ctx", {}).get("error") or first["msg"])
        if in_hyper:
            limit = "must be a finite number, a short text, true, false or a list of them"
        for theirs, ours in PLAINER.items():
            limit = limit.replace(theirs, ours)
        return ConfigError(f"{name} {limit[:200]}, got {value}; {AGAIN}")

    @property
    def source(self) -> Row | None:
        """The row of the model that does not adapt."""
        return next((row for row in self.rows if row.method == "source"), None)

    def encoded(self) -> str:
        """As JSON with a line for each row, the same text for the same values."""
        values = self.model_dump()
        rows = ",\n".join(f"  {json.dumps(row)}" for row in values.pop("rows"))
        head = "".join(f' "{name}": {json.dumps(value)},\n' for name, value in values.items())
        return f'{{\n{head} "rows": [\n{rows}\n ]\n}}\n'

    def save(self, path: Path) -> None:
        """Write the whole file, or none."""
        try:
            with replacing(path) as beside:
                beside.write_text(self.encoded(), encoding="utf-8", newline="\n")
        except OSError as error:
            raise unwritable(path, error) from error


def is_submission(found: object) -> bool:
    """Whether JSON is of this schema, in whatever version; results/ has other files too.

    Example:
        >>> is_submission({"format": "come-result-7"}), is_submission({"cells": {}})
        (True, False)
    """
    named = found.get("format") if isinstance(found, dict) else None
    return isinstance(named, str) and named.startswith("come-result-")


def read_json(path: Path) -> Any:
    """What a small JSON file of others holds.

    Raises:
        InputError: it cannot be read, or is no JSON.
    """
    try:
        return json.loads(read_regular(path, LARGEST))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(
            f"cannot read {path}: {one_line(error)}; give a JSON file that 'come protocol submit' wrote"
        ) from error


def load(path: Path) -> Submission:
    """The submission at `path`: of the right types, and no more is known."""
    found = read_json(path)
    if not isinstance(found, dict):
        raise InputError(f"{path}: must hold a JSON object that 'come protocol submit' wrote, got {shown(found)}")
    try:
        return Submission(**found)
    except ConfigError as error:
        raise InputError(f"{path}: {error}") from error
    except TypeError as error:  # a key that Python cannot pass as an argument twice
        raise InputError(f"{path}: self is no field of {FORMAT}; leave it out") from error
