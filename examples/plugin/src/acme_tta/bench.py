"""Data and settings of ours, for `come bench`."""

from torch.utils.data import Dataset

from come.bench.data import DatasetSource, FashionSource
from come.bench.data.opening import Kind
from come.bench.settings import Setting, get
from come.errors import require_int
from come.registry import literal


class Negatives(Dataset):
    """Pairs of a uint8 image (3, H, W), or a PIL image, and its label: any data set of torch will do."""

    def __init__(self, size):
        self.photographs = FashionSource(size=size)

    def __len__(self):
        return len(self.photographs)

    def __getitem__(self, i):
        found = self.photographs.load([i])
        return 255 - found.images[0], found.labels[0].item()


def _open(spec, rest, preprocess, on_bad_image):
    """From `negatives` or `negatives:SIZE`."""
    size = literal(rest) if rest else 1920
    require_int("SIZE of negatives:SIZE", size, 1)
    return DatasetSource(Negatives(size), num_classes=8, name=spec, preprocess=preprocess)


negatives = Kind("negatives[:SIZE]", "the embedded photographs in negative", _open)


def _backwards(*world):
    yield from reversed(list(get("standard").episodes(*world)))


backwards = Setting("backwards", "standard, the last corruption first", _backwards)
