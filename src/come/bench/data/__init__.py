"""Sources of images, streams (the order of their samples, written down), and batches of a stream on a device."""

from come.bench.data.cifar10 import Cifar10Source
from come.bench.data.cifar_c import CifarCSource
from come.bench.data.embedded import FashionOutlierSource, FashionSource
from come.bench.data.encoded import OnBadImage
from come.bench.data.folders import FolderSource, ImageNetCSource, ImageNetSource, OpenOODSource
from come.bench.data.huggingface import HuggingFaceSource
from come.bench.data.loading import Account, Batch, batches
from come.bench.data.opening import open_source
from come.bench.data.preprocess import Preprocess
from come.bench.data.shards import ShardSource
from come.bench.data.source import DatasetSource, Loaded, Source
from come.bench.data.streams import Stream
from come.bench.data.torchvision_sets import TorchvisionSource

__all__ = [
    "Account",
    "Batch",
    "Cifar10Source",
    "CifarCSource",
    "DatasetSource",
    "FashionOutlierSource",
    "FashionSource",
    "FolderSource",
    "HuggingFaceSource",
    "ImageNetCSource",
    "ImageNetSource",
    "Loaded",
    "OnBadImage",
    "OpenOODSource",
    "Preprocess",
    "ShardSource",
    "Source",
    "Stream",
    "TorchvisionSource",
    "batches",
    "open_source",
]
