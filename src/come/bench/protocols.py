"""Protocols: benchmarks by name, with everything fixed that decides a number, and the number that No Adapt must reach.

"ViT-B, ImageNet-C, No Adapt" is 28.5, 39.8 or 55.5 in the literature, depending on weights, normalization and list of images.
A protocol fixes these, checks them by hash where it can, and by the accuracy of the model that does not adapt.
"""

from __future__ import annotations

import hashlib
import json
import textwrap
from collections.abc import Mapping, Sequence
from importlib.resources import files
from statistics import fmean
from typing import Annotated, Any

from pydantic import Field

from come import corruptions
from come.bench import settings
from come.bench.cell import Count, Description, Text, Texts, digest, spelled
from come.bench.data import opening
from come.bench.data.embedded import FashionSource
from come.bench.data.source import Source
from come.bench.models import EMBEDDED, NORMALIZATIONS, Model, embedded_facts, fingerprint
from come.bench.plan import Plan
from come.bench.record import Amount, Record
from come.errors import ConfigError, InputError, ModelError, shown
from come.registry import Registry
from come.version import __version__

FREE = frozenset(
    {"data", "checkpoint", "source_data", "source_size", "methods", "objectives", "seeds", "hyper", "guard"}
)
FREE |= {"statistics", "compile", "channels_last"}
"""Fields of a plan that are the user's: where things are, what is compared, and what changes no number but by rounding."""

WIDTH = 80
Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class Protocol(Description):
    """A plan whose numbers can be compared between papers.

    Args:
        name: a word.
        summary: what it is, in a line.
        plan: all fields but those in `FREE` are fixed; `data` is the kind of data, such as "imagenet-c".
        images: how many.
        images_sha256: of their names, class/file, sorted, one a line; None where nobody knows it.
        weights_sha256: see `come.bench.models.fingerprint`; None where nobody has written it down yet.
        data: where the images come from.
        weights: where the weights come from, if the user has to give them with `--checkpoint`.
        no_adapt: accuracy in percent of the model that does not adapt, over all domains; None if there is no number yet.
        tolerance: by how many points it may be off.
        citation: whose protocol it is, and where the number comes from.

    Example:
        >>> get("come-vit-b").no_adapt, get("come-vit-b").plan.normalization
        (39.8, 'imagenet')
    """

    name: Text
    summary: Text
    plan: Plan
    images: Count
    images_sha256: Sha256 | None = None
    weights_sha256: Sha256 | None = None
    data: Text
    weights: Text | None = None
    no_adapt: Annotated[float, Field(ge=0, le=100)] | None = None
    tolerance: Annotated[float, Field(gt=0, le=100)] = 0.3
    citation: Text

    def plan_for(self, given: Mapping[str, Any]) -> Plan:
        """The plan with what the user says, as fields of `Plan`; the source model comes first.

        Raises:
            ConfigError: the user contradicts the protocol, or does not say where data or weights are.
        """
        chosen: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in given.items()}
        for name, value in chosen.items():
            fixed = getattr(self.plan, name)
            if name not in FREE and value != fixed:
                self._contradicted(name, _said(fixed), _said(value))
        chosen["data"] = self._data(chosen.get("data"))
        if self.weights and not chosen.get("checkpoint"):
            raise ConfigError(f"protocol {self.name} needs --checkpoint FILE: {self.weights}")
        if chosen.get("checkpoint") and not self.weights and not self.weights_sha256:
            self._contradicted("checkpoint", f"the weights of {self.plan.model}", chosen["checkpoint"])
        methods = chosen.get("methods", self.plan.methods)
        chosen["methods"] = ("source", *(name for name in methods if name != "source"))
        return self.plan.but(**chosen)

    def _data(self, given: str | None) -> str:
        ours = self.plan.data
        kind, _, rest = (given or "").partition(":")
        if "[" in opening.get(ours.partition(":")[0]).usage:  # it needs no path
            if given not in (None, ours):
                self._contradicted("data", ours, given)
            return ours
        if not given:
            raise ConfigError(f"protocol {self.name} needs --data PATH: {self.data}")
        if kind in opening.names() and kind != ours:
            self._contradicted("data", f"{ours}:PATH", given)
        return f"{ours}:{rest if kind == ours else given}"

    def _contradicted(self, name: str, fixed: str, given: object) -> None:
        raise ConfigError(
            f"{spelled(name)} must be {fixed} in protocol {self.name}, got {given}; leave --{spelled(name)} out, or leave "
            "--protocol out"
        )

    def check_weights(self, model: Model) -> str:
        """The SHA-256 of a model's weights, if they are the protocol's."""
        found = fingerprint(model.module)
        if self.weights_sha256 not in (None, found):
            raise ModelError(
                f"the weights of {model.name} must have the SHA-256 {self.weights_sha256} in protocol {self.name}, got "
                f"{found}; {self.weights or 'remove them from the cache, and download them again'}"
            )
        return found

    def check_images(self, source: Source) -> str | None:
        """The SHA-256 of the images' names, None if they have none.

        Raises:
            InputError: the images are not the protocol's, by number or, where it is known, by their names.
        """
        if len(source) != self.images:
            raise InputError(
                f"{source.name} must have {self.images} images in protocol {self.name}, got {len(source)}: {self.data}"
            )
        names = source.names()
        found = names_sha256(names) if names else None
        if self.images_sha256 not in (None, found):
            raise InputError(
                f"the names of the images of {source.name} must have the SHA-256 {self.images_sha256} in protocol {self.name}, "
                f"got {found or 'no names'}: {self.data}"
            )
        return found

    @property
    def sha256(self) -> str:
        """Of all that the protocol fixes by definition; hashes and numbers that may still be written down are no part of it.

        Example:
            >>> get("fashion").sha256 == get("fashion").model_copy(update={"no_adapt": 1.0}).sha256
            True
        """
        unset = {name for name, value in self.plan if value is None}  # knobs that come later change nothing
        fixed = digest(self.plan, leave_out=(FREE - {"data"}) | unset)
        return hashlib.sha256(f"{self.images} {fixed}".encode()).hexdigest()

    @property
    def expected(self) -> str:
        """The number that No Adapt must reach."""
        return "none yet" if self.no_adapt is None else f"{self.no_adapt:g} ± {self.tolerance:g}%"

    def paragraph(self) -> str:
        """All of it as a paragraph for a paper, in lines of at most 80 characters.

        Example:
            >>> print(get("fashion").paragraph()[:59])
            Protocol fashion: the embedded ResNet on the embedded data.
        """
        plan, setting = self.plan, settings.get(self.plan.setting)
        normal = [", ".join(f"{x:.3g}" for x in values) for values in NORMALIZATIONS[plan.normalization] or ()]
        metric = "mIoU" if plan.task == "segmentation" else "accuracy"
        shifts = [name.replace("_", " ") for name in plan.corruptions or ()]
        sentences = [
            f"Protocol {self.name}: {self.summary}.",
            f"The model is {plan.model} in {plan.precision};",
            f"its weights have the SHA-256 {self.weights_sha256}."
            if self.weights_sha256
            else "its weights have no hash yet.",
            f"The weights are {self.weights}." if self.weights else "",
            f"The images are {self.images:,} of {plan.data}: {self.data}.",
            f"Their names have the SHA-256 {self.images_sha256}." if self.images_sha256 else "",
            "Inputs are normalized as the weights expect."
            if not normal
            else f"Inputs are normalized by mean ({normal[0]}) and std ({normal[1]}).",
            f"In the {plan.setting} setting ({setting.summary.partition(';')[0]}) there are {len(shifts)} corruptions of "
            f"severity {plan.severity}: {', '.join(shifts)}. Each has"
            if shifts
            else f"In the {plan.setting} setting the stream has",
            f"all images once, in an order drawn from the seed, in batches of {plan.batch_size}.",
            f"The metric is the {metric}, averaged over the {len(shifts)} parts with equal weights."
            if shifts
            else f"The metric is the {metric}.",
            "There is no number for the model without adaptation yet."
            if self.no_adapt is None
            else f"The model without adaptation must reach {self.expected}.",
            f"Source: {self.citation} (come {__version__}).",
        ]
        return textwrap.fill(" ".join(filter(None, sentences)), WIDTH, break_on_hyphens=False)


class Outcome(Description):
    """What No Adapt reached under a protocol: accuracy in percent, the mean of the cells with these keys."""

    protocol: Protocol
    weights_sha256: Sha256
    images_sha256: Sha256 | None = None
    measured: Amount
    cells: Texts

    @classmethod
    def of(cls, protocol: Protocol, weights: str, records: Sequence[Record], images: str | None = None) -> Outcome:
        """The mean over all domains of the records of No Adapt; weights and names of images by their SHA-256."""
        found = [100 * metrics[r.cell.metric] for r in records for metrics in r.result.metrics.values()]
        said: dict[str, Any] = {"protocol": protocol, "weights_sha256": weights, "images_sha256": images}
        return cls(**said, measured=fmean(found), cells=tuple(r.key for r in records))

    @property
    def met(self) -> bool | None:
        """Whether No Adapt reached its number; None if the protocol has none."""
        expected = self.protocol.no_adapt
        return None if expected is None else abs(self.measured - expected) <= self.protocol.tolerance

    def require(self, data: str) -> None:
        """Raise `InputError` if the number was missed."""
        if self.met is False:
            protocol, plan = self.protocol, self.protocol.plan
            raise InputError(
                f"No Adapt must reach {protocol.expected} in protocol {protocol.name}, got {self.measured:.2f}%; nothing was "
                f"adapted. Likely causes: another normalization than {plan.normalization}, other weights than {plan.model} "
                f"(got SHA-256 {self.weights_sha256}), or another list of images than the {protocol.images} of the protocol "
                f"(in {data})"
            )

    def __str__(self) -> str:
        """In a sentence."""
        protocol, reached = self.protocol, f"No Adapt reached {self.measured:.2f}%"
        if self.met is None:
            return f"protocol {protocol.name}: {reached}; the protocol has no number for it yet"
        return f"protocol {protocol.name}: {reached}, {'as' if self.met else 'not as'} expected ({protocol.expected})"


def names_sha256(names: Sequence[str]) -> str:
    """SHA-256 of a list of images, whatever its order.

    Example:
        >>> names_sha256(["b/2.png", "a/1.png"]) == names_sha256(["a/1.png", "b/2.png"])
        True
    """
    return hashlib.sha256("\n".join(sorted(names)).encode()).hexdigest()


def _said(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _check(name: str, thing: object) -> str:
    return "" if isinstance(thing, Protocol) else f"must be a come.bench.protocols.Protocol, got {shown(thing)}"


_registry: Registry[Protocol] = Registry("protocol", entry_points="come.protocols", check=_check)


def names() -> list[str]:
    """Names of all protocols."""
    return _filled().names()


def get(name: str) -> Protocol:
    """The protocol of that name."""
    return _filled().get(name)


def register(protocol: Protocol) -> Protocol:
    """Make a protocol available under its name, here and on the command line."""
    _filled().add(getattr(protocol, "name", ""), protocol)
    return protocol


def _filled() -> Registry[Protocol]:
    """All protocols; ours are made when they are first asked for, since a plan asks for settings that packages bring.

    Ours, in protocols.json, run the paper's corruptions, if any, and methods as they were published, without a guard.
    """
    if _registry.loaded():
        return _registry
    text = (files("come.bench") / "protocols.json").read_text(encoding="utf-8")
    for name, about in json.loads(text).items():
        if name == "fashion":  # hash and number stand beside the weights, so that they change together
            measured = embedded_facts(about["plan"].get("model", next(iter(EMBEDDED))))
            about["images"] = len(FashionSource())
            about |= {"weights_sha256": measured.get("sha256"), "no_adapt": measured.get("no_adapt")}
        fixed = {"guard": False} | about.pop("plan")
        if settings.get(fixed.get("setting", "standard")).corruptions is None:
            fixed["corruptions"] = corruptions.names("standard")
        plan = Plan(**fixed)
        if name not in _registry.loaded():  # a package may have asked meanwhile
            _registry.add(name, Protocol(name=name, plan=plan, **about))
    return _registry
