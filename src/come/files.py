"""Files that are there whole or not at all."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a name beside `path` to write to; at the end of the block the file there takes its place, by rename.

    If the block fails, what stood at `path` is untouched and nothing is left beside it.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with replacing(Path(folder) / "a.txt") as beside:
        ...         _ = beside.write_text("whole")
        ...     [p.name for p in Path(folder).iterdir()]
        ['a.txt']
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        yield beside
        with open(beside, "rb") as file:
            os.fsync(file.fileno())
        os.replace(beside, path)
    finally:
        with contextlib.suppress(OSError):
            beside.unlink()
