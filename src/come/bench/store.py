"""A run folder: records and rows, written so that a kill at any moment leaves whole cells only.

RUN/run.json              format and version of what wrote it
RUN/cells/KEY.safetensors rows of a cell
RUN/cells/KEY.json        its record, written last, by rename: if it is there and its checksums hold, the cell is done
RUN/cells/KEY.lock        held by the process that is working on the cell; the kernel frees it when that process dies
RUN/streams/*.json        the manifests, for whoever wants to replay them

Nothing here depends on the clock: what is done is known by checksums, who is alive by locks. What a killed process left half
written begins with a dot; the next one that takes the lock removes it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load, save

from come import corruptions
from come.bench import paper
from come.bench.cell import Cell, Rows, domain_metrics
from come.bench.data.streams import Stream
from come.bench.parts import check_parts
from come.errors import ComeError, StateError
from come.files import replacing, settle
from come.version import __version__

FORMAT = "come-run-1"
HEADER = {"format": FORMAT, "come": __version__}
STANDARD = {name: i for i, name in enumerate(corruptions.names())}
ORDER = list(dict.fromkeys(("source", "norm", *(row.method for row in paper.get("standard").rows))))
"""Methods in the paper's order."""
AGAIN = "run the same 'come bench' command again: it runs this cell anew and keeps the others"


@dataclass(frozen=True)
class Record:
    """A finished cell: its configuration and all that was found."""

    key: str
    cell: dict[str, Any]
    result: dict[str, Any]
    surroundings: dict[str, Any]
    rows: dict[str, Any] | None = None
    """Size and checksum of the file with the rows: {"bytes": ..., "sha256": ...}."""
    sha256: str | None = None
    """Of all the rest; None in a record that was written before there were checksums."""

    @property
    def score(self) -> str:
        """What the FPR of its metrics ranks samples by, a name in `come.metrics.SCORES`."""
        return str(self.result.get("score", "confidence"))

    def digest(self) -> str:
        """What `sha256` must be."""
        text = json.dumps(asdict(replace(self, sha256=None)), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


class RunFolder:
    """The results of one plan on disk.

    Args:
        path: the folder; made if it is not there.
        read_only: only look; the folder must be a run, and need not be writable.

    Raises:
        StateError: the folder belongs to another version, to something else, or cannot be written.
    """

    def __init__(self, path: str | Path, *, read_only: bool = False) -> None:
        self.path = Path(path)
        self.cells, self.streams = self.path / "cells", self.path / "streams"
        if read_only:
            self._check()
            return
        try:
            self._make()
        except OSError as error:
            raise StateError(
                f"cannot write to the run folder {self.path}: {error.strerror}; choose another with --out "
                "('come report' and 'come compare' need not write to it)"
            ) from error

    def _make(self) -> None:
        # The mark comes before everything else, so whoever finds other files here finds it too, whatever another process
        # that opens the same folder is doing at this moment.
        mark = self.path / "run.json"
        self.path.mkdir(parents=True, exist_ok=True)
        others = [name for name in os.listdir(self.path) if not name.startswith(".run.json.")]
        if others and not mark.exists():
            raise StateError(f"{self.path} is not empty and not a run of come; choose another folder with --out")
        if not mark.exists():
            with _alone(mark):
                if not mark.exists():
                    with replacing(mark) as beside:
                        beside.write_text(json.dumps(HEADER) + "\n")
        self._check()
        self.cells.mkdir(exist_ok=True)
        self.streams.mkdir(exist_ok=True)
        settle(self.path)
        if not os.access(self.cells, os.W_OK):
            raise PermissionError(errno.EACCES, "it is not writable")

    def _check(self) -> None:
        mark = self.path / "run.json"
        try:
            found = json.loads(mark.read_text())
        except OSError as error:
            raise StateError(f"cannot read {mark}: {error.strerror}; choose another folder") from error
        except (ValueError, RecursionError):
            found = {}
        if not isinstance(found, dict) or found.get("format") != FORMAT:
            raise StateError(
                f"{mark} is not of format {FORMAT!r}; choose another folder with --out, or, if come {__version__} made this "
                f"run and the file was damaged since, write {json.dumps(HEADER)} into it"
            )
        if found.get("come") != __version__:
            raise StateError(
                f"{self.path} was written by come {found.get('come')}, this is {__version__}: numbers of two versions "
                "are not mixed; choose another folder with --out"
            )

    @classmethod
    def existing(cls, path: str | Path) -> RunFolder:
        """The run at `path`, to read; a folder that is not one is refused and not made into one. Nothing is written."""
        if not (Path(path) / "run.json").is_file():
            raise StateError(f"{path} is no run folder of come (it has no run.json); give one that 'come bench' wrote")
        return cls(path, read_only=True)

    def records(self) -> list[Record]:
        """The records of all finished cells, those of one method and objective next to each other, in the paper's order.

        A cell whose record or rows were damaged is left out, with a warning for all of them.
        """
        found, wrong = [], []
        for path in sorted(self.cells.glob("*.json")):
            try:
                found.append(_read(path)[0])
            except StateError as error:
                wrong.append(str(error))
        if wrong:
            more = f" ({len(wrong)} cells are left out; this is the first)" if len(wrong) > 1 else ""
            warnings.warn(f"left out: {wrong[0]}{more}", stacklevel=2)

        def rank(record: Record) -> tuple[Any, ...]:
            cell = record.cell
            return (method_rank(cell["method"]), cell["method"], cell["objective"] != "em", cell["objective"],
                    cell["seed"], [STANDARD.get(c, 99) for c in cell["corruptions"]], record.key)  # fmt: skip

        return sorted(found, key=rank)

    def record(self, cell: Cell) -> Record | None:
        """The record of `cell`, or None if it is not done (or what is there is not what was written)."""
        try:
            return _read(self.cells / f"{cell.key}.json")[0]
        except StateError:
            return None

    def rows(self, key: str) -> Rows:
        """The rows of a finished cell."""
        try:
            return _read(self.cells / f"{key}.json")[1]
        except StateError as error:
            raise StateError(f"cannot read the rows of cell {key}: {error}") from error

    def rescored(self, records: Iterable[Record], score: str) -> list[Record]:
        """Records with the metrics that follow from their rows under another score, of `come.metrics.SCORES`."""
        return [
            replace(
                r,
                result={
                    **r.result,
                    "score": score,
                    "metrics": domain_metrics(self.rows(r.key), r.result["domains"], r.result["fresh"], score),
                },
            )
            for r in records
        ]

    def write(self, cell: Cell, rows: Rows, result: dict[str, Any], surroundings: dict[str, Any]) -> Record:
        """Store a finished cell: rows first, the record last, each whole or not at all."""
        try:
            with replacing(self.cells / f"{cell.key}.safetensors") as beside:
                save_file(rows, beside)
                sums = _sums(beside.read_bytes())
            record = Record(cell.key, json.loads(json.dumps(asdict(cell))), result, surroundings, sums)
            record = replace(record, sha256=record.digest())
            with replacing(self.cells / f"{cell.key}.json") as beside:
                beside.write_text(json.dumps(asdict(record), indent=1) + "\n")
        except OSError as error:
            raise _unwritable(f"cell {cell.key} to {self.path}", error) from error
        return record

    def write_stream(self, stream: Stream) -> None:
        """Keep a manifest, once; one that was damaged is written again."""
        digest = hashlib.sha256(repr(stream).encode()).hexdigest()[:8]
        name = f"{re.sub(r'[^A-Za-z0-9_]+', '-', stream.domain)}-seed{stream.seed}-{digest}.json"
        path = self.streams / name
        if _holds(path, stream):
            return
        try:
            with _alone(path), replacing(path) as beside:
                stream.save(beside)
        except OSError as error:
            raise _unwritable(f"the stream {name} to {self.path}", error) from error

    @contextmanager
    def claim(self, cell: Cell) -> Iterator[bool]:
        """Whether this process may work on `cell` within the block; another one that lives may hold it."""
        path = self.cells / f"{cell.key}.lock"
        try:
            handle = _lock(path, wait=False)
        except OSError as error:
            raise _unwritable(f"the lock {path}", error) from error
        if handle is None:
            yield False
            return
        try:
            _sweep(self.cells, f".{cell.key}.*")
            yield True
        finally:
            _unlock(path, handle)


def method_rank(name: str) -> int:
    """Place in the paper's order; methods that are not in the paper come last."""
    return ORDER.index(name) if name in ORDER else len(ORDER)


def save_file(rows: Rows, path: Path) -> None:
    """Write rows: by ourselves, since safetensors writes to a name of its own, which a kill leaves behind, in mode 0600."""
    path.write_bytes(save({name: value.contiguous() for name, value in rows.items()}))


def _read(path: Path) -> tuple[Record, Rows]:
    """The record at `path` and its rows, both just as they were written, or a StateError."""
    beside = path.with_suffix(".safetensors")
    try:
        record = Record(**json.loads(path.read_bytes()))
        if record.key != path.stem or record.sha256 not in (None, record.digest()):
            raise StateError(f"{path}: checksum mismatch; {AGAIN}")
        data = beside.read_bytes()
        if record.rows not in (None, _sums(data)):
            raise StateError(f"{beside}: checksum mismatch; {AGAIN}")
        rows = load(data)
        check_parts(record, rows)
        return record, rows
    except OSError as error:
        raise StateError(f"cannot read {error.filename}: {error.strerror}; {AGAIN}") from error
    except SafetensorError as error:
        raise StateError(f"{beside} does not hold rows: {error}; {AGAIN}") from error
    except StateError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise StateError(f"{path} is not a record: {error}; {AGAIN}") from error


def _sums(rows: bytes) -> dict[str, Any]:
    return {"bytes": len(rows), "sha256": hashlib.sha256(rows).hexdigest()}


def _holds(path: Path, stream: Stream) -> bool:
    """Whether the manifest is there already."""
    try:
        return Stream.load(path) == stream
    except (ComeError, TypeError):
        return False


def _unwritable(what: str, error: OSError) -> StateError:
    repair = "make room" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "make it writable"
    return StateError(
        f"cannot write {what}: {error.strerror}; finished cells are intact: {repair}, then run the same command again"
    )


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Be the only living process that writes `path`, and remove what dead ones left beside it."""
    lock = path.with_name(f".{path.name}.lock")
    handle = _lock(lock, wait=True)
    assert handle is not None
    try:
        _sweep(path.parent, f".{path.name}.*.*")
        yield
    finally:
        _unlock(lock, handle)


def _lock(path: Path, *, wait: bool) -> int | None:
    """Take the lock on the file `path`, made if need be; None if a living process holds it and we do not wait for it."""
    while True:
        handle = os.open(path, os.O_CREAT | os.O_RDWR, 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            # Whoever held it last removed it, perhaps after we opened it: then others lock another file of that name.
            if _is_at(handle, path):
                return handle
        except BlockingIOError:
            os.close(handle)
            return None
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)


def _unlock(path: Path, handle: int) -> None:
    with contextlib.suppress(OSError):  # a lock file that stays is locked by nobody
        path.unlink()
    os.close(handle)


def _is_at(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), os.stat(path))
    except FileNotFoundError:
        return False


def _sweep(folder: Path, pattern: str) -> None:
    """Remove what a killed process left half written. Only for who holds the lock under which such files are written."""
    for path in folder.glob(pattern):
        with contextlib.suppress(OSError):
            path.unlink()
