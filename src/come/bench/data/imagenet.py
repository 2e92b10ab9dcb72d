"""Folders of ImageNet classes: any subset of the 1,000, and the published shifts ImageNet-R, -A, -V2 and -Sketch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from torch import Tensor

from come.bench.data.folders import FolderSource
from come.bench.data.source import Source
from come.errors import InputError

SHIFTED = {"imagenet-r": 200, "imagenet-a": 200, "imagenet-v2": 1000, "imagenet-sketch": 1000}
"""The published shifts, and how many classes each has."""


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
