"""A run folder: finished cells, written so that a kill at any moment leaves whole cells only.

RUN/run.json              format and version of what wrote it
RUN/cells/KEY.safetensors a finished cell: the rows, and in the header the record and a checksum of both
RUN/failed/KEY.json       a cell that failed, and why; out of date once the cell is finished
RUN/locks/KEY.lock        held by the process that is working on the cell; the system frees it when that process dies
RUN/streams/*.json        the manifests, for whoever wants to replay them
RUN/protocols/NAME.json   a protocol that was followed, and what No Adapt reached

A cell is one file, which appears by one rename: no order of writes can mix two runs of a cell, also where locks do not work
(some network file systems grant a lock to everyone). Nothing here depends on the clock, and nothing is deleted.

Whether a cell is finished is read from the header of its file alone. The checksum is verified whenever rows are read, and by
`is_damaged`, which a run asks once for each finished cell before it starts.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from filelock import FileLock, Timeout
from safetensors import SafetensorError
from safetensors.torch import load, save

from come import corruptions
from come.bench.cell import Cell, Description
from come.bench.data import Stream
from come.bench.data.reading import FLAGS, read_regular, require_regular
from come.bench.measure import domain_metrics
from come.bench.paper import rank
from come.bench.protocols import Outcome
from come.bench.record import BYTES, Failure, Record, Rows, check_rows, digest
from come.errors import ComeError, ConfigError, StateError, one_line, printable
from come.state.files import replacing, settle
from come.version import __version__

FORMAT = "come-run-2"
HEADER = {"format": FORMAT, "come": __version__}
STANDARD = {name: i for i, name in enumerate(corruptions.names())}
AGAIN = "run the same 'come bench' command again: it runs this cell anew and keeps the others"
Stamp = tuple[int, int]  # inode and modification time of a file; they change when it is written again
LARGEST = 2**31  # bytes of a cell: 40 million rows
LARGEST_HEADER = 10**8  # bytes of a header; safetensors reads no longer ones
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # what a file system says that has no locks
LARGEST_JSON = 2**20  # bytes of a failure, or of a protocol's outcome

Read = TypeVar("Read", bound=Description)


class RunFolder:
    """The results of a plan on disk, in a folder that is made if it is not there; `StateError` if it is something else's.

    One that is `read_only` must be a run, and need not be writable.
    """

    def __init__(self, path: str | Path, *, read_only: bool = False) -> None:
        self.path = Path(path)
        self._parts = [self.path / name for name in ("cells", "streams", "locks", "failed", "protocols")]
        self.cells, self.streams, self.locks, self.failed, self.protocols = self._parts
        if read_only:
            self._check()
            return
        try:
            self._make()
        except OSError as error:
            raise StateError(
                f"cannot write to the run folder {self.path}: {one_line(error)}; choose another with --out "
                "('come report' and 'come compare' need not write to it)"
            ) from error

    def _make(self) -> None:
        # The mark comes before everything else, so whoever finds other files here finds it too, whatever another process
        # that opens the same folder is doing at this moment.
        mark = self.path / "run.json"
        self.path.mkdir(parents=True, exist_ok=True)
        if not mark.exists():
            others = [p.name for p in self.path.iterdir() if not p.name.startswith(".")]
            if others and not mark.exists():
                raise StateError(f"{self.path} is not empty and not a run of come; choose another folder with --out")
            with replacing(mark) as beside:
                beside.write_text(json.dumps(HEADER) + "\n")
        self._check()
        for folder in (self.cells, self.streams, self.locks):
            folder.mkdir(exist_ok=True)
        settle(self.path)
        if not os.access(self.cells, os.W_OK):
            raise PermissionError(errno.EACCES, "it is not writable")

    def _check(self) -> None:
        mark = self.path / "run.json"
        try:
            found: Any = json.loads(read_regular(mark, 10_000))
        except OSError as error:
            raise StateError(f"cannot read {mark}: {one_line(error)}; choose another folder") from error
        except (ValueError, RecursionError):
            found = {}
        named = found.get("format") if isinstance(found, dict) else None
        if named == "come-run-1":
            raise StateError(
                f"{self.path} was written by the first edition of come, whose records this one does not read; choose another "
                "folder with --out and run the command again"
            )
        if named != FORMAT:
            raise StateError(
                f"{mark} is not of format {FORMAT!r}; choose another folder with --out, or, if come {__version__} made this "
                f"run and the file was damaged since, write {json.dumps(HEADER)} into it"
            )
        if found.get("come") != __version__:
            raise StateError(
                f"{self.path} was written by come {str(found.get('come'))[:40]}, this is {__version__}: numbers of two "
                "versions are not mixed; choose another folder with --out"
            )
        for folder in self._parts:
            if folder.is_symlink():
                raise StateError(f"{folder} is a symbolic link; a run folder holds its own: choose another with --out")

    @classmethod
    def existing(cls, path: str | Path) -> RunFolder:
        """The run at `path`, to read; a folder that is not one is refused and not made into one. Nothing is written."""
        if not (Path(path) / "run.json").is_file():
            raise StateError(f"{path} is no run folder of come (it has no run.json); give one that 'come bench' wrote")
        return cls(path, read_only=True)

    def records(self) -> list[Record]:
        """The records of all finished cells, those of one method and objective next to each other, in the paper's order.

        A cell whose file was damaged is left out, with a warning for all of them.
        """
        found, wrong = [], []
        for path in sorted(self.cells.glob("[!.]*.safetensors")):
            try:
                found.append(_read(path)[0])
            except StateError as error:
                wrong.append(printable(str(error)))  # it holds names of files and columns
        if wrong:
            more = f" ({len(wrong)} cells are left out; this is the first)" if len(wrong) > 1 else ""
            warnings.warn(f"left out: {wrong[0]}{more}", stacklevel=2)

        def place(record: Record) -> tuple[Any, ...]:
            cell = record.cell
            shifts = [STANDARD.get(name, 99) for name in cell.corruptions]
            return rank(cell.method), cell.objective != "em", cell.objective, cell.seed, shifts, record.key

        return sorted(found, key=place)

    def record(self, cell: Cell) -> Record | None:
        """The record of `cell`, or None if it is not finished. Only the header of its file is read, none of its rows."""
        try:
            return _read_header(self.file(cell.key))
        except StateError:
            return None

    def is_damaged(self, cell: Cell) -> bool:
        """Whether the file of a cell is there but is not what was written. The whole file is read."""
        path = self.file(cell.key)
        if self.stamp(path) is None:
            return False
        try:
            _read(path)
        except StateError:
            return True
        return False

    def stamp(self, path: Path) -> Stamp | None:
        """What changes when a file is written again; None if there is none."""
        try:
            found = path.stat()
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns

    def failure_file(self, key: str) -> Path:
        """Where the failure of a cell is."""
        return self.failed / f"{key}.json"

    def failure(self, key: str) -> Failure | None:
        """Why a cell failed the last time, or None if it did not (or its file cannot be read)."""
        found = _read_json(Failure, self.failure_file(key))
        return found if found is not None and found.cell.key == key else None

    def failures(self) -> list[Failure]:
        """The cells that failed and were not finished since."""
        keys = sorted(path.stem for path in self.failed.glob("[!.]*.json") if not self.file(path.stem).exists())
        return [failure for key in keys if (failure := self.failure(key)) is not None]

    def rows(self, key: str) -> Rows:
        """The rows of a finished cell."""
        return _read(self.file(key))[1]

    def file(self, key: str) -> Path:
        """Where a cell is."""
        return self.cells / f"{key}.safetensors"

    def rescored(self, records: Iterable[Record], score: str) -> list[Record]:
        """Records with the metrics that follow from their rows under a score, of `come.metrics.SCORES`."""

        def rescored(record: Record) -> Record:
            result = record.result
            if record.cell.dense:
                raise ConfigError(
                    f"score {score} has no effect on segmentation, which records no FPR; leave --score out"
                )
            metrics = domain_metrics(self.rows(record.key), result.domains, result.fresh, score)
            return record.model_copy(update={"result": result.model_copy(update={"score": score, "metrics": metrics})})

        return [record if record.result.score == score else rescored(record) for record in records]

    def write(self, record: Record, rows: Rows) -> None:
        """Store a finished cell, whole or not at all."""
        text = record.encoded()
        rows = {name: column.contiguous() for name, column in rows.items()}
        with _replacing(self.file(record.key), f"cell {record.key} to {self.path}") as beside:
            # safetensors' own save_file makes a temporary file of its own, which a kill would leave behind
            beside.write_bytes(save(rows, {"record": text, "sha256": digest(text, rows)}))

    def write_failure(self, failure: Failure) -> None:
        """Note that a cell failed."""
        key = failure.cell.key
        with _replacing(self.failure_file(key), f"the failure of cell {key} to {self.path}") as beside:
            beside.write_text(json.dumps(failure.model_dump(), sort_keys=True) + "\n")

    def write_outcome(self, outcome: Outcome) -> None:
        """Keep what No Adapt reached under a protocol."""
        path = self.protocols / f"{outcome.protocol.name}.json"
        with _replacing(path, str(path)) as beside:
            beside.write_text(json.dumps(outcome.model_dump(), sort_keys=True, indent=1) + "\n")

    def outcome(self, records: Iterable[Record]) -> Outcome | None:
        """What No Adapt reached, if these records were made under a protocol."""
        keys = {record.key for record in records}
        found = (_read_json(Outcome, path) for path in sorted(self.protocols.glob("[!.]*.json")))
        return next((outcome for outcome in found if outcome is not None and keys.issuperset(outcome.cells)), None)

    def write_stream(self, stream: Stream) -> None:
        """Keep a manifest, once; one that was damaged is written again."""
        name = f"{re.sub(r'[^A-Za-z0-9_]+', '-', stream.domain)[:80]}-seed{stream.seed}-{stream.digest[:8]}.json"
        path = self.streams / name
        with suppress(ComeError):
            if Stream.load(path) == stream:
                return
        with _replacing(path, f"the stream {name} to {self.path}") as beside:
            stream.save(beside)

    @contextmanager
    def claim(self, cell: Cell) -> Iterator[bool]:
        """Whether this process may work on `cell` within the block; another one that lives may hold it.

        On a file system without locks everyone may: a cell that two processes run is written twice, with the same numbers.
        """
        path = self.locks / f"{cell.key}.lock"
        lock, mine = FileLock(path), True
        try:
            with warnings.catch_warnings():
                # where flock is missing filelock raises, or warns and takes a lock that outlives a killed process
                warnings.filterwarnings("error", "flock not supported", UserWarning)
                lock.acquire(blocking=False)
        except Timeout:
            mine = False
        except (NotImplementedError, UserWarning):
            pass
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise _unwritable(f"the lock {path}", error) from error
        try:
            yield mine
        finally:
            lock.release()


def check_space(path: Path, cells: Iterable[Cell]) -> None:
    """Raise a `StateError` if the rows of `cells` do not fit on the disk that holds `path`, or will hold it."""
    there = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    needed = sum(cell.samples * BYTES[cell.task] for cell in cells)
    free = shutil.disk_usage(there).free
    if needed > free:
        raise StateError(
            f"the rows of this run take about {needed / 2**20:.0f} MB, but {there} has {free / 2**20:.0f} MB free; make room, "
            "or choose another folder with --out"
        )


def _read(path: Path) -> tuple[Record, Rows]:
    """The record at `path` and its rows, both just as they were written, or a StateError."""
    with _as_state_error(path):
        data = read_regular(path, LARGEST)
        rows = load(data)
        # safe_open would give the header, but it maps the file, which may change while it is read
        record, about = _parse_header(data[8 : 8 + int.from_bytes(data[:8], "little")], path)
        check_rows(record, rows)
        if about["sha256"] != digest(about["record"], rows):
            raise StateError(f"{path}: checksum mismatch; {AGAIN}")
        return record, rows


def _read_header(path: Path) -> Record:
    """The record at `path`, if the file is as long as its header says; else a StateError. No rows are read."""
    with _as_state_error(path):
        require_regular(path)
        with open(os.open(path, FLAGS), "rb") as file:
            size, length = os.fstat(file.fileno()).st_size, int.from_bytes(file.read(8), "little")
            if not 0 < length <= min(LARGEST_HEADER, size - 8):
                raise ValueError("it has no header")
            header = file.read(length)
        columns = {name: column for name, column in json.loads(header).items() if name != "__metadata__"}
        if 8 + length + max(column["data_offsets"][1] for column in columns.values()) != size:
            raise ValueError("its length is not what its header says")
        return _parse_header(header, path)[0]


def _parse_header(header: bytes, path: Path) -> tuple[Record, dict[str, str]]:
    about = json.loads(header)["__metadata__"]
    record = Record(**json.loads(about["record"]))
    if record.key != path.stem:
        raise StateError(f"{path}: checksum mismatch; {AGAIN}")
    return record, about


@contextmanager
def _as_state_error(path: Path) -> Iterator[None]:
    """Within the block, whatever is wrong with the file of a cell is a `StateError`."""
    try:
        yield
    except OSError as error:
        raise StateError(f"cannot read {path}: {one_line(error)}; {AGAIN}") from error
    except SafetensorError as error:
        raise StateError(f"{path} does not hold rows: {one_line(error)}; {AGAIN}") from error
    except StateError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise StateError(f"{path} is not a record: {one_line(error)}; {AGAIN}") from error


def _read_json(kind: type[Read], path: Path) -> Read | None:
    """What `path` describes, or None if that cannot be read."""
    try:
        return kind(**json.loads(read_regular(path, LARGEST_JSON)))
    except (OSError, ValueError, TypeError, RecursionError):  # a ConfigError is a ValueError
        return None


@contextmanager
def _replacing(path: Path, what: str) -> Iterator[Path]:
    """`replacing`, with an error that names what cannot be written and the repair."""
    try:
        path.parent.mkdir(exist_ok=True)
        with replacing(path) as beside:
            yield beside
    except OSError as error:
        raise _unwritable(what, error) from error


def _unwritable(what: str, error: OSError) -> StateError:
    repair = "make room" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "make it writable"
    return StateError(
        f"cannot write {what}: {one_line(error)}; finished cells are intact: {repair}, then run the same command again"
    )
