"""Sources of images, streams made of them, and the way from a stream to batches on a device."""

from come.bench.data.glyphs import GlyphOutliers, Glyphs
from come.bench.data.loading import Account, Batch, batches
from come.bench.data.sources import (
    CifarCSource,
    DatasetSource,
    FolderSource,
    Geometry,
    GlyphOutlierSource,
    GlyphSource,
    ImageNetCSource,
    Loaded,
    Source,
    open_source,
)
from come.bench.data.streams import Stream

__all__ = [
    "Account",
    "Batch",
    "CifarCSource",
    "DatasetSource",
    "FolderSource",
    "Geometry",
    "GlyphOutlierSource",
    "GlyphOutliers",
    "GlyphSource",
    "Glyphs",
    "ImageNetCSource",
    "Loaded",
    "Source",
    "Stream",
    "batches",
    "open_source",
]
