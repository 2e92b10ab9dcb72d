"""A run folder: records and rows, written so that a kill at any moment leaves whole cells only.

RUN/run.json              format and version of what wrote it
RUN/cells/KEY.safetensors rows of a cell
RUN/cells/KEY.json        its record, written last, by rename: if it is there, the cell is done
RUN/cells/KEY.lock        held by the process that is working on the cell; the kernel frees it when that process dies
RUN/streams/*.json        the manifests, for whoever wants to replay them
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from come import corruptions
from come.bench.cell import Cell, Rows, domain_metrics
from come.data.streams import Stream
from come.errors import StateError
from come.files import replacing
from come.methods import names as method_names
from come.version import __version__

FORMAT = "come-run-1"
STANDARD = {name: i for i, name in enumerate(corruptions.names())}


@dataclass(frozen=True)
class Record:
    """A finished cell: its configuration and all that was found."""

    key: str
    cell: dict[str, Any]
    result: dict[str, Any]
    surroundings: dict[str, Any]


class RunFolder:
    """The results of one plan on disk.

    Args:
        path: the folder; made if it is not there.

    Raises:
        StateError: the folder belongs to another version, to something else, or cannot be written.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.cells, self.streams = self.path / "cells", self.path / "streams"
        header = {"format": FORMAT, "come": __version__}
        mark = self.path / "run.json"
        try:
            # The mark comes before everything else, so whoever finds other files here finds it too, whatever another
            # process that opens the same folder is doing at this moment.
            self.path.mkdir(parents=True, exist_ok=True)
            others = [name for name in os.listdir(self.path) if not name.startswith(".run.json.")]
            if others and not mark.exists():
                raise StateError(f"{self.path} is not empty and not a run of come; choose another folder with --out")
            if mark.exists():
                self._check(header)
            else:
                with replacing(mark) as beside:
                    beside.write_text(json.dumps(header) + "\n")
            self.cells.mkdir(exist_ok=True)
            self.streams.mkdir(exist_ok=True)
            if not os.access(self.cells, os.W_OK):
                raise PermissionError(13, "it is not writable")
        except OSError as error:
            raise StateError(
                f"cannot write to the run folder {self.path}: {error.strerror}; choose another with --out"
            ) from error

    def _check(self, header: dict[str, str]) -> None:
        try:
            found = json.loads((self.path / "run.json").read_text())
        except ValueError:
            found = {}
        if not isinstance(found, dict) or found.get("format") != FORMAT:
            raise StateError(f"{self.path}/run.json is not of format {FORMAT!r}; choose another folder with --out")
        if found.get("come") != header["come"]:
            raise StateError(
                f"{self.path} was written by come {found.get('come')}, this is {header['come']}: numbers of two versions "
                "are not mixed; choose another folder with --out"
            )

    @classmethod
    def existing(cls, path: str | Path) -> RunFolder:
        """The run at `path`, to read; a folder that is not one is refused and not made into one."""
        if not (Path(path) / "run.json").is_file():
            raise StateError(f"{path} is no run folder of come (it has no run.json); give one that 'come bench' wrote")
        return cls(path)

    def records(self) -> list[Record]:
        """The records of all finished cells, those of one method and objective next to each other, in the paper's order."""
        found = [record for path in sorted(self.cells.glob("*.json")) if (record := _read(path)) is not None]
        order = {name: i for i, name in enumerate(method_names())}

        def rank(record: Record) -> tuple[Any, ...]:
            cell = record.cell
            return (order.get(cell["method"], len(order)), cell["method"], cell["objective"] != "em", cell["objective"],
                    cell["seed"], [STANDARD.get(c, 99) for c in cell["corruptions"]], record.key)  # fmt: skip

        return sorted(found, key=rank)

    def record(self, cell: Cell) -> Record | None:
        """The record of `cell`, or None if it is not done (or what is there is not a record)."""
        record = _read(self.cells / f"{cell.key}.json")
        return record if record is not None and record.key == cell.key else None

    def rows(self, key: str) -> Rows:
        """The rows of a finished cell."""
        try:
            return load_file(self.cells / f"{key}.safetensors")
        except (OSError, SafetensorError) as error:
            raise StateError(f"cannot read the rows of cell {key} in {self.path}: {error}") from error

    def rescored(self, records: Iterable[Record], score: str) -> list[Record]:
        """Records with the metrics that follow from their rows under another score, of `come.metrics.SCORES`."""
        return [
            replace(
                r,
                result={
                    **r.result,
                    "metrics": domain_metrics(self.rows(r.key), r.result["domains"], r.result["fresh"], score),
                },
            )
            for r in records
        ]

    def write(self, cell: Cell, rows: Rows, result: dict[str, Any], surroundings: dict[str, Any]) -> Record:
        """Store a finished cell: rows first, the record last, each whole or not at all."""
        as_json = json.loads(json.dumps(asdict(cell)))
        record = Record(cell.key, as_json, result, surroundings)
        tensors = {name: value.contiguous() for name, value in rows.items()}
        text = json.dumps(asdict(record), indent=1) + "\n"
        try:
            with replacing(self.cells / f"{cell.key}.safetensors") as beside:
                save_file(tensors, beside)
            with replacing(self.cells / f"{cell.key}.json") as beside:
                beside.write_text(text)
        except (OSError, SafetensorError) as error:
            raise StateError(
                f"cannot write cell {cell.key} to {self.path}: {error}; finished cells are intact: make room, then run the "
                "same command again"
            ) from error
        return record

    def write_stream(self, stream: Stream) -> None:
        """Keep a manifest, once."""
        digest = hashlib.sha256(repr(stream).encode()).hexdigest()[:8]
        name = f"{re.sub(r'[^A-Za-z0-9_]+', '-', stream.domain)}-seed{stream.seed}-{digest}.json"
        if not (self.streams / name).exists():
            try:
                with replacing(self.streams / name) as beside:
                    stream.save(beside)
            except OSError as error:
                raise StateError(f"cannot write the stream {name} to {self.path}: {error.strerror}") from error

    @contextmanager
    def claim(self, cell: Cell) -> Iterator[bool]:
        """Whether this process may work on `cell` within the block; another one that lives may hold it."""
        path = self.cells / f"{cell.key}.lock"
        try:
            handle = os.open(path, os.O_CREAT | os.O_RDWR)
        except OSError as error:
            raise StateError(f"cannot write to the run folder {self.path}: {error.strerror}") from error
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
            yield True
            path.unlink(missing_ok=True)
        finally:
            os.close(handle)


def _read(path: Path) -> Record | None:
    """The record in a file, or None where there is none, or something else; one without its rows does not count."""
    try:
        record = Record(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return None
    return record if path.with_suffix(".safetensors").exists() else None
