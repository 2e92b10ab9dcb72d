"""Street scenes with a class for each pixel: the published layouts of Cityscapes and of ACDC, with Cityscapes' 19 classes."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from come.bench.data.encoded import EncodedSource, place_and_options
from come.bench.data.preprocess import MAX_BYTES, opened
from come.bench.data.reading import data_folder, images_below, read_regular, stay_inside, subfolders
from come.bench.data.source import Loaded
from come.bench.data.streams import CONDITIONS
from come.errors import InputError, one_line, unknown

CLASSES = (
    "road", "sidewalk", "building", "wall", "fence", "pole", "traffic light", "traffic sign", "vegetation", "terrain", "sky",
    "person", "rider", "car", "truck", "bus", "train", "motorcycle", "bicycle",
)  # fmt: skip
"""In the order of the training identifiers."""
UNLABELLED = 255
"""Of pixels that do not count, in a file of labels."""
SPLITS = ("train", "val")


class CityscapesSource(EncodedSource):
    """`PATH/leftImg8bit/val/<city>/*_leftImg8bit.png` with labels in `PATH/gtFine/val/<city>/*_gtFine_labelTrainIds.png`.

    `cityscapes:PATH`, or `cityscapes:PATH:split=train`. Images are resized to the model's size, labels are not: logits are
    resized to them.
    """

    dense = True
    images, labels_in = ("leftImg8bit", "_leftImg8bit.png"), ("gtFine", "_gtFine_labelTrainIds.png")
    split = "val"

    def _open(self, rest: str) -> None:
        path, given = place_and_options(self.kind, rest, ("split",))
        self.split = given.get("split", self.split)
        if self.split not in SPLITS:
            raise unknown(f"split of {self.kind}", self.split, SPLITS)
        self.root = data_folder(path)
        self.roots = (self.root,)
        self.class_names, self.num_classes = CLASSES, len(CLASSES)
        self._find()

    def _find(self) -> None:
        self.files: dict[str | None, list[Path]] = {None: self._below(self.split)}
        self._count()

    def _count(self) -> None:
        self.targets = torch.zeros(min(map(len, self.files.values())), dtype=torch.int64)

    def _below(self, part: str) -> list[Path]:
        """Images of `part`, below the folder of images, without the folder's name, sorted."""
        folder, ending = self.images
        there = images_below(self.root / folder, part) if (self.root / folder / part).is_dir() else []
        found = [path for path in there if path.name.endswith(ending)]
        if not found:
            raise InputError(
                f"{self.root / folder / part} has no image */*{ending}; give the folder that holds {folder} and "
                f"{self.labels_in[0]}"
            )
        return found

    def _encoded(self, index: int, corruption: str | None, severity: int) -> Path:
        return self.root / self.images[0] / self._file(index, corruption)

    def _file(self, index: int, corruption: str | None) -> Path:
        return self.files[None][index]

    def _called(self, index: int, corruption: str | None, severity: int) -> str:
        return str(self._encoded(index, corruption, severity))

    def _label_file(self, index: int, corruption: str | None) -> Path:
        file = self._file(index, corruption)
        folder, ending = self.labels_in
        return self.root / folder / file.parent / (file.name.removesuffix(self.images[1]) + ending)

    def _label_bytes(self, index: int, corruption: str | None) -> bytes:
        path = self._label_file(index, corruption)
        stay_inside(path, self.roots)
        return read_regular(path, MAX_BYTES)

    def load(self, indices: Sequence[int], corruption: str | None = None, severity: int = 5) -> Loaded:
        """Decode images, and labels (B, H, W) at their own size, -1 where a pixel has none."""
        loaded = super().load(indices, corruption, severity)
        maps = [self._label_map(index, corruption) for index in loaded.indices.tolist()]
        return loaded._replace(labels=torch.stack(maps)) if maps else loaded

    def _label_map(self, index: int, corruption: str | None) -> Tensor:
        path = self._label_file(index, corruption)
        try:
            with opened(self._label_bytes(index, corruption)) as image:
                if image.mode not in ("L", "P"):
                    raise ValueError(f"its pixels have the mode {image.mode}, not one number each")
                found = torch.from_numpy(np.array(image, dtype=np.int64))
        except Exception as error:  # decoders raise anything
            raise InputError(
                f"cannot read the labels {path}: {one_line(error)}; Cityscapes' own scripts write labelTrainIds from its labels"
            ) from error
        found[found == UNLABELLED] = -1
        if int(found.max()) >= self.num_classes:
            raise InputError(
                f"{path} has the label {int(found.max())}; training identifiers are 0 to {self.num_classes - 1}, or 255"
            )
        return found

    def digest(self) -> str:
        """Of some images, as ever, and of the labels of the first and the last."""
        found = hashlib.sha256(super().digest().encode())
        for index in (0, len(self) - 1):
            found.update(self._label_bytes(index, (self.holds or (None,))[0]))
        return found.hexdigest()[:16]


class ACDCSource(CityscapesSource):
    """`PATH/rgb_anon/fog/train/<sequence>/*_rgb_anon.png` with labels in `PATH/gt/.../*_gt_labelTrainIds.png`.

    `acdc:PATH`, or `acdc:PATH:split=val`. Fog, night, rain and snow stand in the place of corruptions. Each has the first
    samples in the order of the files' names, as many as the smallest has: 400 of the training images.
    """

    images, labels_in = ("rgb_anon", "_rgb_anon.png"), ("gt", "_gt_labelTrainIds.png")
    split = "train"

    def _find(self) -> None:
        weather = self.root / self.images[0]
        there = subfolders(weather) if weather.is_dir() else []
        self.holds = tuple(name for name in CONDITIONS if name in there)
        if not self.holds:
            raise InputError(f"{weather} has none of the folders {', '.join(CONDITIONS)}")
        self.severities = dict.fromkeys(self.holds, (1, 2, 3, 4, 5))  # the weather has none
        self.files = {name: self._below(f"{name}/{self.split}") for name in self.holds}
        self._count()

    def _file(self, index: int, corruption: str | None) -> Path:
        return self.files[corruption][index]
