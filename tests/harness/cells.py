"""The file of a finished cell, taken apart and put together again: what the faults, the fuzzers and the hostile tests need."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

from safetensors.torch import load, save
from torch import Tensor

from come.bench.record import Record, digest


def apart(data: bytes) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Rows and header of a cell's file."""
    return load(data), json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]


def forge(path: Path, record: str, rows: dict[str, Tensor]) -> Path:
    """Put another record and rows in place of a cell's own, with a checksum that holds and, if it has one, the right name."""
    flat = {
        name: column.reshape(-1) if not column.ndim else column for name, column in rows.items()
    }  # no digest of a scalar
    data = save(rows, {"record": record, "sha256": digest(record, flat)})
    path.unlink()
    with contextlib.suppress(ValueError):  # it is no record
        path = path.with_name(f"{Record.model_validate_json(record).key}.safetensors")
    path.write_bytes(data)
    return path
