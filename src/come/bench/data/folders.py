"""Sources of image files in folders: a folder per class, and the layout of ImageNet-C."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from come.bench.data.encoded import EncodedSource
from come.bench.data.reading import IMAGE_ENDINGS, as_input_error, data_folder, images_below, read_regular, subfolders
from come.corruptions import names as corruption_names
from come.errors import InputError, unknown

LIST = ":list="  # between a folder and a file that lists the images to use
LONGEST_LIST = 2**28  # bytes of such a file


class FileSource(EncodedSource):
    """Images in files below one folder, `PATH` or `PATH:list=FILE`."""

    files: list[Path]
    """Of each sample, relative to `root`."""

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
