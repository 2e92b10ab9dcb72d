"""`Source`, the base class of all kinds of data, and the sources of images in memory and of torch data sets."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from come.bench.data.preprocess import Preprocess, pixels
from come.bench.data.streams import CONDITIONS
from come.corruptions import names as corruption_names
from come.errors import ConfigError, InputError


class Loaded(NamedTuple):
    """Samples of a source; those that could not be read are left out and counted."""

    images: Tensor  # (B, 3, H, W) uint8
    labels: Tensor  # (B,) int64; (B, H, W) of a dense source
    indices: Tensor  # (B,) int64: the samples' numbers in the source
    bad: int = 0


class Source(ABC):
    """A data set of images with labels.

    Clean sources are corrupted on the fly by `come.corruptions`; the published ones (ImageNet-C, CIFAR-C) hold their
    corruptions already.
    """

    name: str
    """The specification it was opened by; part of a run's identity."""
    num_classes: int
    holds: tuple[str, ...] | None = None
    """Corruptions that are in the files; None for clean images, which are corrupted on the fly."""
    severities: Mapping[str, tuple[int, ...]] = {}
    """Of each corruption in `holds`."""
    dense: bool = False
    """Whether pixels have labels, -1 where one has none, instead of images."""
    class_names: Sequence[str] = ()
    """Names of the classes in the order of the labels, of a dense source."""
    at_hand: bool = False
    """Whether images are in memory or mapped, so that there is nothing to decode."""
    classes: Sequence[str] = ()
    """Names of the classes in the order of the labels, where folders are named after them."""
    subset: tuple[int, ...] | None = None
    """Which of ImageNet's 1,000 classes its classes are, in order; None for other classes."""

    @abstractmethod
    def __len__(self) -> int:
        """Number of samples; of one corruption, where the files hold some."""

    @abstractmethod
    def load(self, indices: Sequence[int], corruption: str | None = None, severity: int = 5) -> Loaded:
        """The samples at `indices`. Corruption and severity only choose among files (`holds`)."""

    def require(self, corruptions: Sequence[str | None], severity: int) -> None:
        """Raise `InputError` unless each of these can be loaded, as far as a quick look tells; None is a clean image."""
        if self.holds is None:
            if strange := [str(name) for name in corruptions if name in CONDITIONS and name not in corruption_names()]:
                raise InputError(f"{self.name} holds no {', '.join(strange)}, which only acdc:PATH does")
            return
        if missing := [name or "clean images" for name in corruptions if name not in self.holds]:
            raise InputError(f"{self.name} does not hold {', '.join(missing)}; it holds {', '.join(self.holds)}")
        for name in corruptions:
            there = self.severities[str(name)]
            if severity not in there:
                raise InputError(
                    f"{self.name} does not hold {name} of severity {severity}; of {name} it holds "
                    f"{', '.join(map(str, there)) or 'none'}"
                )

    def digest(self) -> str | None:
        """16 hex digits that change with the content; None if the source does not check its content."""
        return None

    def number(self, classes: Sequence[str], file: str) -> None:
        """Number the classes as a model does: by its outputs' names, read from `file`. Some may have no images.

        Raises:
            ConfigError: the data is not in folders of its classes, or one of these is not in the list.
        """
        kind = self.name.partition(":")[0]
        raise ConfigError(f"classes has no effect on {kind}; only folder:, tiny-imagenet: and imagenet-c: data take it")

    def names(self) -> list[str]:
        """A name for each sample that is a file; else empty."""
        return []

    def labels(self) -> Tensor:
        """The labels of all samples, (N,) int64; zeros of a dense source, whose images as a whole have none."""
        if self.dense:
            return torch.zeros(len(self), dtype=torch.int64)
        first, places = (self.holds or (None,))[0], range(len(self))
        return torch.cat([self.load(places[i : i + 64], first).labels for i in places[::64]])

    def source_images(self, count: int) -> Tensor:
        """`count` clean images of the source domain, (count, 3, H, W) uint8, for methods that need some."""
        if self.holds is not None:
            raise InputError(
                f"{self.name} holds corrupted images only; give clean source images with --source-data folder:PATH"
            )
        step = max(1, len(self) // count)
        return self.load(range(0, len(self), step)[:count]).images

    def _known(self, indices: Sequence[int]) -> list[int]:
        """The indices as a list; `InputError` for one that does not exist, since a stream file can name any."""
        found = [int(i) for i in indices]
        wrong = next((i for i in found if not 0 <= i < len(self)), None)
        if wrong is not None:
            raise InputError(f"{self.name} has {len(self)} samples, numbered from 0; there is no sample {wrong}")
        return found


class MemorySource(Source):
    """Images (N, 3, H, W) uint8 and labels (N,) int64 in memory."""

    at_hand = True

    def __init__(self, name: str, images: Tensor, labels: Tensor, num_classes: int) -> None:
        self.name, self.num_classes, self._images, self._labels = name, num_classes, images, labels

    def __len__(self) -> int:
        return len(self._labels)

    def load(self, indices: Sequence[int], corruption: str | None = None, severity: int = 5) -> Loaded:
        """Index the tensors."""
        chosen = torch.tensor(self._known(indices), dtype=torch.int64)
        return Loaded(self._images[chosen], self._labels[chosen], chosen)

    def labels(self) -> Tensor:
        """The labels of all samples, (N,) int64."""
        return self._labels


class DatasetSource(Source):
    """Any torch `Dataset` of (image, label) pairs; images are PIL images or uint8 tensors (3, H, W).

    Args:
        dataset: has a length, and an item for each index.
        num_classes: number of labels.
        name: part of a run's identity.
        preprocess: crops PIL images to squares; without it they must have one size.

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
        preprocess: Preprocess | None = None,
    ) -> None:
        self.name, self.num_classes, self._data, self._preprocess = name, num_classes, dataset, preprocess
        self._labels: Tensor | None = None
        self.at_hand = isinstance(dataset, (list, tuple, TensorDataset))
        if not len(self):
            raise InputError(f"the data set {name} is empty")

    def __len__(self) -> int:
        return len(self._data)  # type: ignore[arg-type]

    def require(self, corruptions: Sequence[str | None], severity: int) -> None:
        """Raise `InputError` unless the first sample is an image with a label."""
        self.load([0])

    def load(self, indices: Sequence[int], corruption: str | None = None, severity: int = 5) -> Loaded:
        """Read item by item."""
        pairs = [self._data[int(i)] for i in indices]
        images = torch.stack([self._tensor(image) for image, _ in pairs])
        return Loaded(images, torch.tensor([int(label) for _, label in pairs]), torch.as_tensor(list(indices)))

    def labels(self) -> Tensor:
        """The labels of all samples, (N,) int64; reads every item, once."""
        if self._labels is None:
            self._labels = torch.tensor([int(self._data[i][1]) for i in range(len(self))])
        return self._labels

    def _tensor(self, image: Any) -> Tensor:
        if isinstance(image, Tensor):
            if image.dtype != torch.uint8 or image.ndim != 3 or image.shape[0] != 3:
                raise InputError(
                    f"images of {self.name} must be PIL images or uint8 tensors (3, H, W), got {image.dtype} of shape "
                    f"{tuple(image.shape)}; leave normalization to the benchmark"
                )
            return image
        return self._preprocess.to_tensor(image) if self._preprocess else pixels(image.convert("RGB"))
