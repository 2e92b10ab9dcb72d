"""A run that is watched: the table as it fills, a bar, and what was left out."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from come.bench import Bench, Cell, Record, RunFolder
from come.bench.report import results_table, to_rich
from come.bench.runner import Progress


def run_watched(console: Console, bench: Bench, folder: RunFolder, *, fresh: bool = False) -> list[Record]:
    """Run a plan before the user's eyes, and say at the end what could not be run, and why."""
    with Watch(console, bench.cells) as watch, watch.heeding_ctrl_c():
        records = bench.run(folder, watch, fresh=fresh)
    for method, reason in {cell.method: reason for cell, reason in bench.refused.values()}.items():
        console.print(f"[bold]{escape(method)} was left out:[/] {escape(reason)}", soft_wrap=True)
    return records


class Watch(Progress):
    """Shows the table as it fills and a bar; where the output is no terminal, a line per finished cell."""

    def __init__(self, console: Console, cells: list[Cell]) -> None:
        self.console, self.cells = console, cells
        self.records: list[Record] = []
        self.interrupted = False
        self.bar = Bar(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console
        )
        self.all = self.bar.add_task("cells", total=len(cells))
        self.one = self.bar.add_task("", total=None, visible=False)
        self.live = Live(console=console, refresh_per_second=4, transient=True, get_renderable=self._view)

    def __enter__(self) -> Watch:
        if self.console.is_terminal:
            self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.console.is_terminal:
            self.live.stop()

    def _view(self) -> Group:
        pieces = to_rich(results_table(self.records), self.console.width) if self.records else []
        return Group(*pieces[-1:], self.bar)  # the averages, with as many corruptions as fit beside them

    @contextmanager
    def heeding_ctrl_c(self) -> Iterator[None]:
        """Within the block no Ctrl-C is lost: one that Python drops in a finalizer is raised again at the next batch."""

        def note(number: int, frame: FrameType | None) -> None:
            self.interrupted = True
            raise KeyboardInterrupt

        before = signal.signal(signal.SIGINT, note)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def start(self, cell: Cell, samples: int) -> None:
        """Show what runs now."""
        name = f"{cell.method} + {cell.objective}, {', '.join(cell.corruptions)}, seed {cell.seed}"
        self.bar.reset(self.one, description=name[:44], total=samples, visible=True)

    def advance(self, samples: int) -> None:
        """Move the bar."""
        if self.interrupted:
            raise KeyboardInterrupt
        self.bar.advance(self.one, samples)

    def refuse(self, cell: Cell, reason: str) -> None:
        """Count it as done; what was refused is said at the end."""
        self.bar.advance(self.all)

    def finish(self, cell: Cell, record: Record, resumed: bool) -> None:
        """Add the result to the table."""
        self.records.append(record)
        self.bar.advance(self.all)
        if not self.console.is_terminal:
            found = ", ".join(f"{d} {100 * m['accuracy']:.1f}" for d, m in record.result["metrics"].items())
            note = " (done before)" if resumed else ""
            count = f"[{len(self.records)}/{len(self.cells)}]"
            self.console.print(
                f"{count} {cell.method} + {cell.objective}, seed {cell.seed}: {found}{note}", markup=False
            )
