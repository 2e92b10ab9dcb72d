"""Ranks submissions by what their methods gain, protocol by protocol."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from come.bench import protocols
from come.bench.board.check import read
from come.bench.board.schema import Row, Submission, is_submission, read_json
from come.bench.protocols import Protocol
from come.bench.report.tables import Entry
from come.errors import InputError


@dataclass(frozen=True)
class Line:
    """One row of a ranking; numbers are means over seeds, with their deviation."""

    row: Row
    of: Submission
    files: int  # that it is from: several for the source model, which all of them have
    gain: Entry  # accuracy above that of the source model of the same file, seed by seed
    accuracy: Entry
    fpr: Entry | None
    fpr_softmax: Entry | None
    worst: tuple[str, Entry]  # the domain with the least gain

    @property
    def is_source(self) -> bool:
        """Whether it is the model that does not adapt."""
        return self.row.method == "source"

    @property
    def title(self) -> str:
        """Method and objective; of the source model, which minimizes nothing, the name alone."""
        return self.row.method if self.is_source else self.row.title

    @property
    def guard(self) -> str:
        """How it ran; the source model needs no guard."""
        return "·" if self.is_source else "guard" if self.row.guard else "bare"

    @property
    def who(self) -> str:
        """Who submitted it."""
        return self.of.submitted_by if self.files == 1 else f"{self.files} files"

    @property
    def commit(self) -> str:
        """Of the library, as git shortens it."""
        return self.of.commit[:7] if self.files == 1 else "·"


@dataclass(frozen=True)
class Board:
    """What a folder of submissions holds."""

    found: Mapping[str, Submission]  # by the name of the file
    wrong: Sequence[str] = ()  # what is wrong with each submission that is left out
    others: int = 0  # JSON files that are no submissions

    def rankings(self) -> list[tuple[Protocol, list[Line]]]:
        """The lines of each protocol, the largest gain first; protocols in their own order."""
        by_protocol: dict[str, list[Submission]] = {}
        for one in self.found.values():
            by_protocol.setdefault(one.protocol, []).append(one)
        return [(protocols.get(name), _ranked(by_protocol[name])) for name in protocols.names() if name in by_protocol]


def read_board(folder: Path) -> Board:
    """The submissions in a folder and in the folders right in it.

    Raises:
        InputError: there are none.
    """
    found: dict[str, Submission] = {}
    wrong: list[str] = []
    others = 0
    for path in json_files(folder):
        try:
            if is_submission(read_json(path)):
                found[path.relative_to(folder).as_posix()] = read(path)
            else:
                others += 1
        except InputError as error:
            wrong.append(str(error))
    if not found:
        first = f"; the first wrong one: {wrong[0]}" if wrong else ""
        raise InputError(
            f"{folder} must be a run folder of come, which has a run.json, or hold files of 'come protocol submit', and holds "
            f"neither ({others} other JSON files){first}"
        )
    return Board(found, wrong, others)


def json_files(folder: Path) -> list[Path]:
    """Those in a folder and in the folders right in it, where submissions are looked for."""
    return sorted((*folder.glob("[!.]*.json"), *folder.glob("[!.]*/[!.]*.json")))


def _ranked(submissions: Sequence[Submission]) -> list[Line]:
    lines = [_line(row, one) for one in submissions for row in one.rows if row is not one.source]
    # the source model once, of the file with the most seeds; the protocol holds all to one number
    of = max(submissions, key=lambda one: len(one.rows[0].seeds))
    assert of.source is not None  # checked when it was read
    lines.append(_line(of.source, of, len(submissions)))
    return sorted(lines, key=lambda line: (-line.gain.mean, not line.is_source, line.title))


def _line(row: Row, of: Submission, files: int = 1) -> Line:
    assert of.source is not None
    before = {scores.seed: _known(scores.accuracy) for scores in of.source.seeds}
    gains = [[b - a for a, b in zip(before[s.seed], _known(s.accuracy), strict=True)] for s in row.seeds]
    by_domain = [fmean(values) for values in zip(*gains, strict=True)]
    least = min(range(len(by_domain)), key=by_domain.__getitem__)
    return Line(
        row,
        of,
        files,
        Entry.over([fmean(gain) for gain in gains], signed=True),
        Entry.over([fmean(_known(s.accuracy)) for s in row.seeds]),
        None if row.fpr is None else Entry.over([fmean(_known(s.fpr)) for s in row.seeds]),
        None if row.fpr_softmax is None else Entry.over([fmean(_known(s.fpr_softmax)) for s in row.seeds]),
        (of.domains[least], Entry(by_domain[least], signed=True)),
    )


def _known(values: Sequence[float | None]) -> list[float]:
    return [value for value in values if value is not None]
