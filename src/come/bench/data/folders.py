"""Sources of image files in folders: a folder per class, the layouts of ImageNet and ImageNet-C, the lists of OpenOOD."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from come.bench.data.encoded import EncodedSource
from come.bench.data.reading import IMAGE_ENDINGS, as_input_error, data_folder, images_below, read_regular, subfolders
from come.bench.data.source import Source
from come.corruptions import names as corruption_names
from come.errors import InputError, shown, unknown

SHIFTED = {"imagenet-r": 200, "imagenet-a": 200, "imagenet-v2": 1000, "imagenet-sketch": 1000}
"""The published shifts, and how many classes each has."""
LIST = ":list="  # between a folder and a file that lists the images to use
LONGEST_LIST = 2**28  # bytes of such a file


class FileSource(EncodedSource):
    """Images in files below one folder, `PATH` or `PATH:list=FILE`."""

    files: list[Path]  # of each sample, relative to `root`

    def _open(self, rest: str) -> None:
        path, _, self._list = rest.partition(LIST)
        self.root = data_folder(path)
        self.roots = (self.root,)

    def _encoded(self, index: int, corruption: str | None, severity: int) -> Path:
        return self.root / self.files[index]

    def _called(self, index: int, corruption: str | None, severity: int) -> str:
        return str(self._encoded(index, corruption, severity))

    def names(self) -> list[str]:
        """Class and file of each sample, `n01440764/ILSVRC2012_val_00000293.JPEG`."""
        labels = self.targets.tolist()
        return [f"{self.classes[label]}/{file.name}" for file, label in zip(self.files, labels, strict=True)]

    def number(self, classes: Sequence[str], file: str) -> None:
        """Number the classes by their names; folders without an image may have any."""
        if not self.classes:
            return super().number(classes, file)
        places = {name: place for place, name in enumerate(classes)}
        used = [self.classes[label] for label in torch.unique(self.targets).tolist()]
        if strange := [name for name in used if name not in places]:
            raise unknown(
                f"class in {file} for the folder",
                strange[0],
                places,
                hint=f"it lacks {len(strange)} of {len(used)} folders: rename them, or correct it",
            )
        numbers = torch.tensor([places.get(name, -1) for name in self.classes])
        self.targets = numbers[self.targets]
        self.classes, self.num_classes = list(classes), len(classes)

    def _lines(self) -> list[str]:
        """Of the list of images."""
        with as_input_error(f"cannot read the list of images {self._list}", "give a text file"):
            return read_regular(Path(self._list).expanduser(), LONGEST_LIST).decode().splitlines()

    def _keep_listed(self) -> None:
        """Leave out what the list, if there is one, does not name; its order does not matter."""
        if not self._list:
            return
        wanted, names = set(self._lines()) - {""}, self.names()
        if missing := sorted(wanted.difference(names)):
            raise InputError(
                f"{self._list} lists {len(wanted)} images, {len(missing)} of which are not in {self.root}, such as "
                f"{missing[0]!r}; each line must be CLASS/FILE"
            )
        if not wanted:
            raise InputError(f"the list of images {self._list} is empty; each line must be CLASS/FILE")
        chosen = [i for i, name in enumerate(names) if name in wanted]
        self.files, self.targets = [self.files[i] for i in chosen], self.targets[chosen]


class FolderSource(FileSource):
    """`PATH/<class>/<image>`: classes are the subfolders in sorted order.

    `folder:PATH`, and `tiny-imagenet:PATH` for the layout with an `images` folder below each class. `PATH:list=FILE` uses the
    images that a text file names, a line CLASS/FILE for each.

    Example:
        >>> import tempfile
        >>> from PIL import Image
        >>> from come.bench.data import Preprocess
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     (Path(folder) / "cat").mkdir()
        ...     Image.new("RGB", (8, 8)).save(Path(folder) / "cat" / "a.png")
        ...     FolderSource("folder:mine", folder, Preprocess(4, 4)).load([0]).images.shape
        torch.Size([1, 3, 4, 4])
    """

    def _open(self, rest: str) -> None:
        super()._open(rest)
        self.classes = subfolders(self.root)
        self.num_classes = len(self.classes)
        if not self.classes:
            raise InputError(f"{self.root} has no subfolders; it must hold one folder of images per class")
        self._check_classes()
        found = [images_below(self.root, name) for name in self.classes]
        self.files = [file for files in found for file in files]
        self.targets = torch.tensor([k for k, files in enumerate(found) for _ in files], dtype=torch.int64)
        if not self.files:
            raise InputError(
                f"{self.root} has {self.num_classes} class folders but no image in them ({', '.join(IMAGE_ENDINGS)})"
            )
        self._keep_listed()

    def _check_classes(self) -> None:
        """Check or reorder `classes` before their folders are read."""


class ImageNetCSource(FileSource):
    """The published layout `PATH/<corruption>/<severity>/<class>/<image>`; `imagenet-c:PATH`, or `imagenet-c:PATH:list=FILE`.

    The samples are those of the first corruption, at its highest severity.
    """

    def _open(self, rest: str) -> None:
        super()._open(rest)
        there = subfolders(self.root)
        self.holds = tuple(n for n in corruption_names() if n in there)
        if not self.holds:
            raise InputError(f"{self.root} has no folder named after a corruption, such as gaussian_noise")
        self.severities = {
            n: tuple(int(s) for s in subfolders(self.root / n) if s in ("1", "2", "3", "4", "5")) for n in self.holds
        }
        first = self.holds[0]
        if not self.severities[first]:
            raise InputError(f"{self.root / first} has no severity folders 1 to 5")
        layout = FolderSource(self.name, str(self.root / first / str(self.severities[first][-1])), self.preprocess)
        self.classes, self.num_classes, self._folders = layout.classes, layout.num_classes, layout.classes
        self.files, self.targets = layout.files, layout.targets
        self._keep_listed()

    def require(self, corruptions: Sequence[str | None], severity: int) -> None:
        """Raise `InputError` unless all corruptions are there at this severity, with all classes."""
        super().require(corruptions, severity)
        for name in corruptions:
            place = self.root / str(name) / str(severity)
            there = set(subfolders(place))
            if missing := [n for n in self._folders if n not in there]:
                raise InputError(
                    f"{place} has {len(there)} class folders, and lacks {len(missing)} of {len(self._folders)}, such as "
                    f"{missing[0]!r}; unpack it again"
                )

    def _encoded(self, index: int, corruption: str | None, severity: int) -> Path:
        return self.root / str(corruption) / str(severity) / self.files[index]


class ImageNetSource(FolderSource):
    """`PATH/<class>/<image>` with a class of ImageNet as the name of each folder: n01440764, or 0 to 999 (ImageNet-V2).

    Classes keep the order of ImageNet. Where there are fewer than 1,000, `subset` says which ones: the benchmark restricts a
    model of 1,000 classes to their logits, as is published for ImageNet-R and ImageNet-A.
    """

    def _check_classes(self) -> None:
        known = places()
        if strange := [folder for folder in self.classes if folder not in known]:
            raise InputError(
                f"the folders in {self.root} must be classes of ImageNet, such as n01440764, or numbers from 0 to 999; got "
                f"{strange[0]!r}: give the folder that holds them"
            )
        self.classes = sorted(self.classes, key=known.__getitem__)
        self.subset = tuple(known[folder] for folder in self.classes)
        wanted, found = SHIFTED.get(self.kind), len(set(self.subset))
        if found < self.num_classes or found != (wanted or max(2, found)):
            raise InputError(
                f"{self.kind} must have {wanted or 'from 2 to 1000'} folders, one for each class, got {self.num_classes} in "
                f"{self.root}; unpack it again, or write imagenet:PATH to use the classes that are there"
            )

    def number(self, classes: Sequence[str], file: str) -> None:
        """Refuse: the classes have the numbers of ImageNet."""
        Source.number(self, classes, file)

    def require(self, corruptions: Sequence[str | None], severity: int) -> None:
        """Raise `InputError` if images that are shifted already are to be corrupted."""
        if self.kind in SHIFTED and any(corruptions):
            raise InputError(
                f"{self.name} is shifted already, and is not corrupted; give --setting natural, or write imagenet:PATH to "
                "corrupt it all the same"
            )

    def source_images(self, count: int) -> Tensor:
        """`count` clean images, which the published shifts do not have."""
        if self.kind in SHIFTED:
            raise InputError(
                f"{self.name} holds shifted images only; give clean source images with --source-data folder:PATH"
            )
        return super().source_images(count)


@cache
def places() -> dict[str, int]:
    """The number of each class of ImageNet, by its WordNet id and by the number as text."""
    from timm.data.imagenet_info import ImageNetInfo

    names = ImageNetInfo("imagenet-1k").label_names()  # type: ignore[no-untyped-call]
    return {name: i for i, name in enumerate(names)} | {str(i): i for i in range(len(names))}


class OpenOODSource(FileSource):
    """`openood:PATH:list=FILE`: the images in the folder PATH that a file of `benchmark_imglist` names, `path label` a line.

    Labels of -1 mark outliers. A list with a negative label has no classes, and serves as `--outliers`.
    """

    def _open(self, rest: str) -> None:
        super()._open(rest)
        if not self._list:
            raise InputError(f"data {self.name!r} lacks its list; write openood:PATH:list=FILE")
        self.files, labels = [], []
        for number, line in enumerate(self._lines(), 1):
            if not line.strip():
                continue
            file, _, label = line.strip().rpartition(" ")
            if not file or not label.removeprefix("-").isdecimal() or len(label) > 9:
                raise InputError(f"line {number} of {self._list} must be a path and a label, got {shown(line)}")
            self.files.append(Path(file))
            labels.append(int(label))
        if not labels:
            raise InputError(f"the list of images {self._list} is empty; each line must be a path and a label")
        if missing := [file for file in self.files if not os.path.isfile(self.root / file)]:
            raise InputError(
                f"{self._list} lists {len(labels)} images, {len(missing)} of which are not in {self.root}, such as "
                f"{str(missing[0])!r}; give the folder that these paths begin in"
            )
        self._set_labels(labels)

    def names(self) -> list[str]:
        """The paths of the list."""
        return [str(file) for file in self.files]
