"""Where images come from: one small class for each layout that people have on their disks.

Every source gives uint8 images (B, 3, H, W) and labels (B,) for a list of indices. Clean sources are corrupted on the fly by
`come.corruptions`; the published ones (ImageNet-C, CIFAR-C) hold their corruptions already.

Files are not trusted (SECURITY.md): nothing in them is executed, what they declare is checked before it is allocated, and a
symbolic link that leads out of the folder is not followed.
"""

from __future__ import annotations

import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor
from torch.utils.data import Dataset

from come.bench.data.glyphs import GlyphOutliers, Glyphs
from come.corruptions import names as corruption_names
from come.errors import InputError, unknown

OnBadImage = Literal["raise", "skip"]
IMAGE_ENDINGS = (".jpeg", ".jpg", ".png", ".bmp", ".webp", ".ppm", ".tif", ".tiff")
FORMATS = ("JPEG", "PNG", "BMP", "WEBP", "PPM", "TIFF", "GIF")
"""What a file may hold, whatever its ending says. Pillow knows many more; one of them starts another program."""

MAX_PIXELS = 2**30 // 12
"""Of an image file, 89 million: where Pillow begins to warn. Decoding one takes up to 1 GB."""

MAX_BYTES = 8 * MAX_PIXELS
"""Of an image file: eight bytes a pixel, as uncompressed RGBA of 16 bits has."""

MAX_ASPECT = 16
"""Of what is resized: a longer picture is cut to its middle first, which is all that is kept of it in any case."""

MAX_SOURCE_IMAGES = 1_000_000
"""Of the source domain, for methods that need some."""


class Geometry(NamedTuple):
    """How a picture becomes a square: shorter side to `resize`, then the middle `size` x `size`.

    A picture whose shorter side is `size` already is only cropped: ImageNet-C is made of such crops.
    """

    size: int = 224
    resize: int = 256
    interpolation: str = "bilinear"


class Loaded(NamedTuple):
    """Some samples of a source; those that could not be read are left out and counted."""

    images: Tensor
    """(B, 3, H, W) uint8"""
    labels: Tensor
    """(B,) int64"""
    indices: Tensor
    """(B,) int64: which samples these are"""
    bad: int = 0


class Source(ABC):
    """A data set of images with labels."""

    name: str
    """The specification it was opened by; part of a run's identity."""
    num_classes: int
    holds: tuple[str, ...] | None = None
    """Corruptions that are in the files already; None for clean images, which are corrupted on the fly."""

    @abstractmethod
    def __len__(self) -> int:
        """Number of samples."""

    @abstractmethod
    def load(self, indices: Sequence[int], corruption: str | None = None, severity: int = 5) -> Loaded:
        """The samples at `indices`. Corruption and severity only choose among files (`holds`)."""

    def labels(self) -> Tensor:
        """The labels of all samples, (N,) int64."""
        return self.load(range(len(self)), (self.holds or (None,))[0]).labels

    def source_images(self, count: int) -> Tensor:
        """`count` clean images of the source domain (uint8), for methods that need some."""
        if self.holds is not None:
            raise InputError(
                f"{self.name} holds corrupted images only; give clean source images with --source-data folder:PATH"
            )
        step = max(1, len(self) // count)
        return self.load(range(0, len(self), step)[:count]).images

    def _known(self, indices: Sequence[int]) -> list[int]:
        """The indices as a list, if they are there; a manifest can ask for any."""
        found = [int(i) for i in indices]
        wrong = next((i for i in found if not 0 <= i < len(self)), None)
        if wrong is not None:
            raise InputError(f"{self.name} has {len(self)} samples, numbered from 0; there is no sample {wrong}")
        return found


class GlyphSource(Source):
    """The embedded benchmark: characters drawn on the fly, nothing to download.

    Example:
        >>> source = GlyphSource(size=200)
        >>> source.load([0, 1]).images.shape, source.num_classes
        (torch.Size([2, 3, 32, 32]), 100)
    """

    def __init__(self, name: str = "glyphs", size: int = 3000) -> None:
        self.name = name
        self._data = Glyphs("test", size)
        self.num_classes = len(self._data.classes)
        self._drawn: tuple[Tensor, Tensor] | None = None  # 3 kB an image, drawn once for all methods

    def __len__(self) -> int:
        """Number of samples."""
        return len(self._data)

    def load(self, indices: Sequence[int], corruption: str | None = None, severity: int = 5) -> Loaded:
        """Draw, or look up what was drawn before."""
        if self._drawn is None:
            self._drawn = self._data.batch(range(len(self)))
        chosen = torch.tensor(self._known(indices), dtype=torch.int64)
        return Loaded(self._drawn[0][chosen], self._drawn[1][chosen], chosen)

    def source_images(self, count: int) -> Tensor:
        """Images of the split that is kept for this."""
        if not 1 <= count <= MAX_SOURCE_IMAGES:
            raise InputError(f"source-size must be from 1 to {MAX_SOURCE_IMAGES}, got {count}")
        return Glyphs("source", count).batch(range(count))[0]


class GlyphOutlierSource(Source):
    """Images of no class, drawn on the fly: characters of other scripts ("near") or textures ("far").

    Example:
        >>> GlyphOutlierSource("glyph-outliers:far", "far", size=50).load([0]).labels
        tensor([-1])
    """

    num_classes = 0

    def __init__(self, name: str, kind: str, size: int = 3000) -> None:
        if kind not in ("near", "far"):
            raise unknown("kind of glyph outliers", kind, ("near", "far"))
        self.name = name
        self._data = GlyphOutliers(kind, size)  # type: ignore[arg-type]
        self._drawn: Tensor | None = None

    def __len__(self) -> int:
        """Number of samples."""
        return len(self._data)

    def load(self, indices: Sequence[int], corruption: str | None = None, severity: int = 5) -> Loaded:
        """Draw, or look up what was drawn before."""
        if self._drawn is None:
            self._drawn = self._data.batch(range(len(self)))[0]
        chosen = torch.tensor(self._known(indices), dtype=torch.int64)
        return Loaded(self._drawn[chosen], torch.full_like(chosen, -1), chosen)


class _Files(Source):
    """Pictures in files, decoded when they are asked for."""

    def __init__(self, name: str, path: str, geometry: Geometry, on_bad_image: OnBadImage) -> None:
        self.name, self.geometry, self.on_bad_image = name, geometry, on_bad_image
        self._root = _folder(path)

    @abstractmethod
    def _path(self, index: int, corruption: str | None, severity: int) -> tuple[Path, int]:
        """File and label of a sample."""

    def load(self, indices: Sequence[int], corruption: str | None = None, severity: int = 5) -> Loaded:
        """Decode; a file that cannot be is named in an error, or skipped and counted."""
        images, labels, kept, bad = [], [], [], 0
        for index in self._known(indices):
            path, label = self._path(index, corruption, severity)
            try:
                _stay_inside(path, self._root)
                images.append(_decode(path, self.geometry))
            except Exception as error:  # decoders raise whatever they met in the file
                if self.on_bad_image == "raise":
                    raise InputError(
                        f"cannot read {path}: {_reason(error)}; fix or remove it, or pass --on-bad-image skip"
                    ) from error
                bad += 1
                continue
            labels.append(label)
            kept.append(index)
        side = self.geometry.size
        stacked = torch.stack(images) if images else torch.empty(0, 3, side, side, dtype=torch.uint8)
        return Loaded(stacked, torch.tensor(labels, dtype=torch.int64), torch.tensor(kept, dtype=torch.int64), bad)


class FolderSource(_Files):
    """`PATH/<class>/<image>`: classes are the subfolders in sorted order.

    `folder:PATH`, and `tiny-imagenet:PATH` for the layout with an `images` folder below each class.
    """

    def __init__(self, name: str, path: str, geometry: Geometry, on_bad_image: OnBadImage = "raise") -> None:
        super().__init__(name, path, geometry, on_bad_image)
        root = self._root
        classes = _subfolders(root)
        if not classes:
            raise InputError(f"{root} has no subfolders; it must hold one folder of images per class")
        self.classes = classes
        self.num_classes = len(classes)
        self._files = [(file, k) for k, name in enumerate(classes) for file in _images_below(root / name)]
        if not self._files:
            raise InputError(
                f"{root} has {len(classes)} class folders but no image in them ({', '.join(IMAGE_ENDINGS)})"
            )

    def __len__(self) -> int:
        """Number of samples."""
        return len(self._files)

    def labels(self) -> Tensor:
        """The labels of all samples; no picture is read for them."""
        return torch.tensor([label for _, label in self._files])

    def _path(self, index: int, corruption: str | None, severity: int) -> tuple[Path, int]:
        return self._files[index]


class ImageNetCSource(_Files):
    """The published layout `PATH/<corruption>/<severity>/<class>/<image>`; `imagenet-c:PATH`."""

    def __init__(self, name: str, path: str, geometry: Geometry, on_bad_image: OnBadImage = "raise") -> None:
        super().__init__(name, path, geometry, on_bad_image)
        there = _subfolders(self._root)
        self.holds = tuple(n for n in corruption_names() if n in there)
        if not self.holds:
            raise InputError(f"{self._root} has no folder named after a corruption, such as gaussian_noise")
        severities = _subfolders(self._root / self.holds[0])
        if not severities:
            raise InputError(f"{self._root / self.holds[0]} has no severity folders 1 to 5")
        first = self._root / self.holds[0] / severities[-1]
        layout = FolderSource(name, str(first), geometry)
        self.num_classes = layout.num_classes
        self._files = [(file.relative_to(first), label) for file, label in layout._files]

    def __len__(self) -> int:
        """Number of samples of one corruption."""
        return len(self._files)

    def labels(self) -> Tensor:
        """The labels of all samples; no picture is read for them."""
        return torch.tensor([label for _, label in self._files])

    def _path(self, index: int, corruption: str | None, severity: int) -> tuple[Path, int]:
        file, label = self._files[index]
        return self._root / str(corruption) / str(severity) / file, label


class CifarCSource(Source):
    """The published layout `PATH/<corruption>.npy` and `PATH/labels.npy`: five severities of 10,000 images, one by one."""

    def __init__(self, name: str, path: str, num_classes: int) -> None:
        self.name, self.num_classes = name, num_classes
        self._root = _folder(path)
        self.holds = tuple(n for n in corruption_names() if (self._root / f"{n}.npy").is_file())
        if not self.holds or not (self._root / "labels.npy").is_file():
            raise InputError(f"{self._root} has no labels.npy or no <corruption>.npy; give the unpacked CIFAR-C folder")
        labels = _array(self._root / "labels.npy")
        self._arrays: dict[str, Any] = {}
        if labels.ndim != 1 or len(labels) % 5 or not len(labels):
            raise InputError(
                f"labels.npy in {self._root} must hold five severities of labels, got shape {labels.shape}"
            )
        if labels.dtype.kind not in "iu":
            raise InputError(f"labels.npy in {self._root} must hold integers, got {labels.dtype}")
        self._each = len(labels) // 5
        self._labels = torch.from_numpy(labels.astype(np.int64))
        if int(self._labels.max()) >= num_classes or int(self._labels.min()) < 0:
            found = int(self._labels.max()) + 1
            raise InputError(
                f"labels.npy in {self._root} has {found} classes; {name.partition(':')[0]} has {num_classes}"
            )

    def __len__(self) -> int:
        """Number of samples of one corruption and severity."""
        return self._each

    def labels(self) -> Tensor:
        """The labels of all samples."""
        return self._labels[: self._each]

    def load(self, indices: Sequence[int], corruption: str | None = None, severity: int = 5) -> Loaded:
        """Read from the memory-mapped array."""
        name = str(corruption)
        if name not in self._arrays:
            array = _array(self._root / f"{name}.npy")
            shaped = array.ndim == 4 and array.shape[0] == 5 * self._each and array.shape[3] == 3 and array.size
            if not shaped or array.dtype != np.uint8:
                raise InputError(
                    f"{name}.npy must be uint8 of shape ({5 * self._each}, H, W, 3), got {array.dtype} of shape {array.shape}"
                )
            self._arrays[name] = array
        chosen = np.array(self._known(indices), dtype=np.int64)
        rows = chosen + (severity - 1) * self._each
        images = torch.from_numpy(np.ascontiguousarray(self._arrays[name][rows])).movedim(-1, 1).contiguous()
        return Loaded(images, self._labels[torch.from_numpy(rows)], torch.from_numpy(chosen))


class DatasetSource(Source):
    """Any torch `Dataset` of (image, label) pairs; images are PIL pictures or uint8 tensors (3, H, W).

    Example:
        >>> data = [(torch.zeros(3, 32, 32, dtype=torch.uint8), 1), (torch.zeros(3, 32, 32, dtype=torch.uint8), 0)]
        >>> DatasetSource(data, num_classes=2, name="mine").load([1]).labels
        tensor([0])
    """

    def __init__(
        self,
        dataset: Dataset[Any] | Sequence[Any],
        *,
        num_classes: int,
        name: str,
        geometry: Geometry | None = None,
    ) -> None:
        self.name, self.num_classes, self._data, self._geometry = name, num_classes, dataset, geometry
        if not len(dataset):  # type: ignore[arg-type]
            raise InputError(f"the data set {name} is empty")

    def __len__(self) -> int:
        """Number of samples."""
        return len(self._data)  # type: ignore[arg-type]

    def load(self, indices: Sequence[int], corruption: str | None = None, severity: int = 5) -> Loaded:
        """Ask the data set, item by item."""
        pairs = [self._data[int(i)] for i in indices]
        images = torch.stack([self._tensor(image) for image, _ in pairs])
        return Loaded(images, torch.tensor([int(label) for _, label in pairs]), torch.as_tensor(list(indices)))

    def _tensor(self, image: Any) -> Tensor:
        if isinstance(image, Tensor):
            if image.dtype != torch.uint8 or image.ndim != 3 or image.shape[0] != 3:
                raise InputError(
                    f"images of {self.name} must be PIL images or uint8 tensors (3, H, W), got {image.dtype} of shape "
                    f"{tuple(image.shape)}; leave normalization to the benchmark"
                )
            return image
        return _to_tensor(_square(image.convert("RGB"), self._geometry) if self._geometry else image.convert("RGB"))


class _TorchvisionSource(DatasetSource):
    """A data set that torchvision reads, from files that may hold anything."""

    def load(self, indices: Sequence[int], corruption: str | None = None, severity: int = 5) -> Loaded:
        """Ask torchvision; what goes wrong in there is the files' fault."""
        try:
            with _quiet():
                return super().load(self._known(indices), corruption, severity)
        except InputError:
            raise
        except Exception as error:
            raise InputError(
                f"torchvision cannot read {self.name}: {_reason(error)}; download it again, or give its images as folder:PATH"
            ) from error


# ---- opening by specification ----

_NOT_FROM_TORCHVISION = {
    "ImageFolder": "write folder:PATH",
    "DatasetFolder": "write folder:PATH",
    "LSUN": "torchvision unpickles a file beside it, which could run anything; give its images as folder:PATH",
    "LSUNClass": "torchvision unpickles a file beside it, which could run anything; give its images as folder:PATH",
}


def _open_torchvision(name: str, rest: str, geometry: Geometry, on_bad_image: OnBadImage) -> Source:
    import torchvision.datasets

    kind, _, root = rest.partition(":")
    if kind in _NOT_FROM_TORCHVISION:
        raise InputError(f"torchvision's {kind} is not opened by come: {_NOT_FROM_TORCHVISION[kind]}")
    known = [n for n in torchvision.datasets.__all__ if n[0].isupper()]
    if kind not in known:
        raise unknown("torchvision data set", kind, known)
    make = getattr(torchvision.datasets, kind)
    attempts: list[dict[str, Any]] = [{"train": False}, {"split": "test"}, {"split": "val"}, {}]
    for arguments in attempts:
        try:
            data = make(**({"root": root or "data"} if kind != "FakeData" else {"size": 64}), **arguments)
            break
        except TypeError:
            continue
        except Exception as error:  # whatever torchvision met in the files, or a package that it lacks
            raise InputError(
                f"torchvision's {kind} is not in {root or 'data'} ({_reason(error)}); download it there first, "
                f"or name the folder: torchvision:{kind}:PATH"
            ) from error
    else:
        raise InputError(f"torchvision's {kind} cannot be opened as a classification data set")
    classes = getattr(data, "classes", None)
    count = getattr(data, "num_classes", None) if classes is None else len(classes)
    if not isinstance(count, int):
        raise InputError(
            f"torchvision's {kind} does not say how many classes it has; wrap it in come.bench.data.DatasetSource"
        )
    return _TorchvisionSource(data, num_classes=count, name=name, geometry=geometry)


Opener = Callable[[str, str, Geometry, OnBadImage], Source]
OPENERS: dict[str, tuple[str, Opener]] = {
    "glyphs": ("glyphs[:SIZE]", lambda name, rest, *_: GlyphSource(name, _count(name, rest) if rest else 3000)),
    "glyph-outliers": ("glyph-outliers:near|far", lambda name, rest, *_: GlyphOutlierSource(name, rest)),
    "folder": ("folder:PATH", FolderSource),
    "tiny-imagenet": ("tiny-imagenet:PATH", FolderSource),
    "imagenet-c": ("imagenet-c:PATH", ImageNetCSource),
    "cifar10-c": ("cifar10-c:PATH", lambda name, rest, *_: CifarCSource(name, rest, 10)),
    "cifar100-c": ("cifar100-c:PATH", lambda name, rest, *_: CifarCSource(name, rest, 100)),
    "torchvision": ("torchvision:NAME[:ROOT]", _open_torchvision),
}
DESCRIPTIONS: dict[str, str] = {
    "glyphs": "embedded: 100 classes of characters, 32x32, drawn on the fly",
    "glyph-outliers": "embedded: images of no class, for the open-world setting",
    "folder": "one subfolder of images per class, corrupted on the fly",
    "tiny-imagenet": "wnid/images/*.JPEG or wnid/*.JPEG, corrupted on the fly",
    "imagenet-c": "the published layout corruption/severity/class/image",
    "cifar10-c": "the published .npy files, 10 classes",
    "cifar100-c": "the published .npy files, 100 classes",
    "torchvision": "a data set of torchvision that is on disk",
}


def open_source(spec: str, geometry: Geometry | None = None, on_bad_image: OnBadImage = "raise") -> Source:
    """Open a source by its specification, e.g. "glyphs", "folder:photos", "imagenet-c:/data/imagenet-c".

    Args:
        spec: kind and, after a colon, where it is; `come list data` shows the kinds.
        geometry: how pictures become squares of the model's size.
        on_bad_image: "raise" names the file; "skip" leaves the sample out and counts it.

    Example:
        >>> len(open_source("glyphs:500"))
        500
    """
    kind, _, rest = spec.partition(":")
    if kind not in OPENERS:
        raise unknown("data", kind, OPENERS)
    usage, opener = OPENERS[kind]
    if not rest and "[" not in usage:
        raise InputError(f"data {spec!r} lacks its path; write {usage}")
    return opener(spec, rest, geometry or Geometry(), on_bad_image)


def _count(spec: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 7) or not 1 <= int(text) <= 1_000_000:
        raise InputError(f"{spec!r} asks for {text!r} images; write a number from 1 to 1000000, e.g. glyphs:3000")
    return int(text)


def _folder(path: str) -> Path:
    try:
        root = Path(path).expanduser()
        if root.is_dir():
            return root
        state = "is not a folder" if root.exists() else "does not exist"
    except (OSError, ValueError, RuntimeError) as error:  # too long, a NUL in it, a ~user who is not there
        raise InputError(f"cannot open the folder {path!r}: {_reason(error)}; give one that holds images") from error
    raise InputError(f"{root} {state}; give the folder that holds the images")


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as found:
            return list(found)
    except OSError as error:
        raise InputError(
            f"cannot list the folder {folder}: {_reason(error)}; make it readable, or remove it"
        ) from error


def _is(entry: os.DirEntry[str], kind: Literal["file", "folder"], *, follow: bool = True) -> bool:
    try:
        return entry.is_file(follow_symlinks=follow) if kind == "file" else entry.is_dir(follow_symlinks=follow)
    except OSError:  # a link to itself
        return False


def _subfolders(folder: Path) -> list[str]:
    return sorted(entry.name for entry in _entries(folder) if _is(entry, "folder") and not entry.name.startswith("."))


def _images_below(folder: Path) -> list[Path]:
    """All images, at any depth; links to folders are not gone into, since they can lead in a circle."""
    found, waiting = [], [folder]
    while waiting:
        here = waiting.pop()
        for entry in _entries(here):
            if _is(entry, "folder", follow=False):
                waiting.append(here / entry.name)
            elif Path(entry.name).suffix.lower() in IMAGE_ENDINGS and _is(entry, "file"):
                found.append(here / entry.name)
    return sorted(found)


def _stay_inside(path: Path, root: Path) -> None:
    """Refuse a file that a symbolic link leads to from inside of `root`; where `root` itself leads is the user's choice."""
    real, home = os.path.realpath(path), os.path.realpath(root)
    if os.path.commonpath((real, home)) != home:
        raise ValueError(
            f"a symbolic link leads out of the data folder, to {real}; if you trust it, name the folder that really holds it"
        )


def _array(path: Path) -> npt.NDArray[Any]:
    """A .npy file, mapped: what it declares is not allocated, and nothing in it is executed."""
    try:
        with _quiet():
            array: npt.NDArray[Any] = np.lib.format.open_memmap(path, mode="r")
    except Exception as error:  # whatever numpy met in the header
        raise InputError(f"cannot read {path}: {_reason(error)}; give the unpacked CIFAR-C folder") from error
    return array


def _reason(error: BaseException) -> str:
    """What went wrong, in one line."""
    if isinstance(error, UnidentifiedImageError):
        return "not an image"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return " ".join(str(error).split())[:300] or type(error).__name__


@contextmanager
def _quiet() -> Iterator[None]:
    """No warnings about the insides of files: one is read, or it is not."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _decode(path: Path, geometry: Geometry) -> Tensor:
    if path.stat().st_size > MAX_BYTES:
        raise ValueError(f"the file has {path.stat().st_size} bytes, more than {MAX_BYTES}")
    with _quiet(), Image.open(path, formats=FORMATS) as picture:  # reads the header only
        width, height = picture.size
        if width * height > MAX_PIXELS:
            raise ValueError(f"it declares {width} x {height} pixels, more than {MAX_PIXELS}")
        return _to_tensor(_square(_rgb(picture), geometry))


def _rgb(picture: Image.Image) -> Image.Image:
    """Eight bits a channel; Pillow cuts deeper ones off at 255 in place of scaling them."""
    if picture.mode.startswith("I;16") or (picture.mode == "I" and picture.format in ("PNG", "PPM")):
        return Image.fromarray((np.asarray(picture) >> 8).clip(0, 255).astype(np.uint8)).convert("RGB")
    if picture.mode in ("I", "F"):
        raise ValueError("its pixels are 32-bit numbers of no known range; save it with 8 bits a channel")
    return picture.convert("RGB")


def _to_tensor(picture: Image.Image) -> Tensor:
    return torch.from_numpy(np.array(picture, dtype=np.uint8)).movedim(-1, 0).contiguous()


RESAMPLING: dict[str, Image.Resampling] = {
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "nearest": Image.Resampling.NEAREST,
    "lanczos": Image.Resampling.LANCZOS,
}


def _square(picture: Image.Image, geometry: Geometry) -> Image.Image:
    width, height = picture.size
    if min(width, height) != geometry.size:
        longest = MAX_ASPECT * min(width, height)
        if max(width, height) > longest:
            left, top = max(0, width - longest) // 2, max(0, height - longest) // 2
            picture = picture.crop((left, top, left + min(width, longest), top + min(height, longest)))
            width, height = picture.size
        scale = geometry.resize / min(width, height)
        method = RESAMPLING.get(geometry.interpolation, Image.Resampling.BILINEAR)
        picture = picture.resize((max(1, round(width * scale)), max(1, round(height * scale))), method)
        width, height = picture.size
    left, top = (width - geometry.size) // 2, (height - geometry.size) // 2
    return picture.crop((left, top, left + geometry.size, top + geometry.size))
