"""Shows the leaderboard: as a page that loads nothing, and as tables in a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table as RichTable
from rich.text import Text

from come.bench.board.ranking import Board, Line
from come.bench.protocols import Protocol
from come.bench.report.html import rendered
from come.bench.report.tables import METRICS, Entry, cut, short
from come.bench.report.writing import write_text

HEADS = (
    ("Gain", "descending", METRICS["gain"].meaning),
    ("Acc↑", "descending", METRICS["accuracy"].meaning),
    ("FPR↓", "ascending", f"{METRICS['fpr'].meaning}; each method by its own confidence"),
    ("FPR softmax↓", "ascending", METRICS["fpr_softmax"].meaning),
    ("Worst domain", "descending", "the domain with the least gain over the source"),
    ("Seeds", "descending", "orders of the stream"),
)
FULL = 10.0  # points above or below the source at which a gain has its full colour, at least


def write_board(board: Board, path: str | Path) -> None:
    """Write the leaderboard: whole or not at all, and the same bytes for the same files.

    Raises:
        StateError: the page cannot be written.
    """
    rankings = board.rankings()
    rows = sum(not line.is_source for _, lines in rankings for line in lines)
    about = [_counted(len(rankings), "protocol"), _counted(len(board.found), "file"), _counted(rows, "row")]
    parts = [_part(board, protocol, lines) for protocol, lines in rankings]
    text = rendered(
        "board.html.jinja", title="Leaderboard", about=", ".join(about), parts=parts, heads=HEADS, wrong=board.wrong
    )
    write_text(path, text)


def best(lines: Sequence[Line]) -> str:
    """What gains most, in a sentence."""
    first = lines[0]
    if first.is_source:
        return "No method gains anything over the source model."
    seeds = _counted(first.gain.seeds, "seed")
    return (
        f"{first.title} ({first.guard}) gains most: {first.gain} points of accuracy over the source model ({seeds}), "
        f"{first.worst[1]} in its worst domain, {first.worst[0].replace('_', ' ')}."
    )


def shown(board: Board) -> Iterator[RichTable | Text]:
    """The rankings for a terminal of 80 columns."""
    for protocol, lines in board.rankings():
        yield Text(f"{protocol.name}: {protocol.summary}; No Adapt must reach {protocol.expected}", "bold")
        yield Text(best(lines))
        table = RichTable(box=None, padding=(0, 1, 0, 0), header_style="dim")
        for i, head in enumerate(("", "Gain", "Acc↑", "FPR↓", "Guard", "Who", "Commit")):
            widest = {0: 22, 5: 12}.get(i)
            table.add_column(head, justify="right" if 0 < i < 4 else "left", no_wrap=True, max_width=widest)
        for line in lines:
            numbers = [str(one) if one else "·" for one in (line.gain, line.accuracy, line.fpr)]
            texts = (line.title, *numbers, line.guard, line.who, line.commit)
            table.add_row(*map(Text, texts), style="dim" if line.is_source else "")
        yield table
        yield Text()


def _part(board: Board, protocol: Protocol, lines: Sequence[Line]) -> dict[str, Any]:
    """What the template shows of a protocol."""
    most = max(FULL, *(abs(line.gain.mean) for line in lines))
    numbers = {}
    for name, best_of in (("accuracy", max), ("fpr", min), ("fpr_softmax", min)):
        entries: list[Entry | None] = [getattr(line, name) for line in lines]
        first = best_of((entry.printed for entry in entries if entry), default=None)
        numbers[name] = [(entry, entry is not None and entry.printed == first, 0) for entry in entries]
    rows = []
    for i, line in enumerate(lines):
        worst, by = line.worst
        rows.append(
            {
                "name": line.title,
                "kind": "base" if line.is_source else "",
                "numbers": [
                    (line.gain, False, round(100 * line.gain.mean / most)),
                    *(of[i] for of in numbers.values()),
                ],
                "worst": None if line.is_source else (short(worst, 14), by),
                "who": cut(line.who),
                "line": line,
            }
        )
    files = [(name, one) for name, one in board.found.items() if one.protocol == protocol.name]
    return {"protocol": protocol, "best": best(lines), "rows": rows, "files": files}


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"
