"""Shows a run while it goes on: the table as it fills, bars with the time left, and what was left out."""

from __future__ import annotations

import re
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import FrameType

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from come.bench import Bench, Cell, Record, RunFolder, settings
from come.bench.engines.progress import Progress
from come.bench.engines.workload import work
from come.bench.protocols import Outcome
from come.bench.record import Failure
from come.bench.report import Table, rates_table, results_table, to_rich, without_sweeps, write_html, write_report
from come.bench.report.findings import helped
from come.bench.report.tables import averages, scores_note
from come.bench.statistics import Judged, verdicts
from come.callbacks import Log
from come.metrics import trajectory

LISTED = 8  # cells that a line names
PIECES = 2  # of a table at the end of a run; one that needs more is reduced to its averages


def run_watched(
    console: Console, bench: Bench, folder: RunFolder, *, fresh: bool = False, log: Log | None = None
) -> list[Record]:
    """Run a plan, show how it goes, and say what cannot be run, and why; `fresh` runs finished cells again.

    The metrics of each cell along its stream go to `log`, too; the step is the number of samples.
    """
    said = dict(bench.refused)
    say_refused(console, said)
    console.print(escape(what_comes(bench)))

    def finished(record: Record) -> None:
        if log is None:
            return
        found = trajectory(folder.rows(record.key), batch_size=record.cell.batch_size)
        steps, cell = found.pop("samples").tolist(), re.sub(r"[^\w.]+", "-", record.cell.title)
        for name, values in found.items():
            for step, value in zip(steps, values.tolist(), strict=True):
                log(f"{name}/{cell}", value, step)

    watch = _Watch(console, bench.cells, finished)
    with watch.live if console.is_terminal else nullcontext(), watch.catching_ctrl_c():
        records = bench.run(folder, watch, fresh=fresh)
    say_refused(console, {method: why for method, why in bench.refused.items() if method not in said})
    return records


def what_comes(bench: Bench) -> str:
    """What a run will do, in a sentence or two.

    Example:
        >>> from come.bench import Plan
        >>> print(what_comes(Bench(Plan(methods=("source", "tent"), corruptions=("fog", "snow"), limit=100))))
        source; tent with em and come: 6 cells, 600 images.
        Each corruption by itself, from the source model: fog, snow; 100 images of each.
    """
    cells = [cell for cell in bench.cells if cell.method not in bench.refused]
    ran: dict[str, dict[str, None]] = {}
    for cell in cells:
        ran.setdefault(cell.method, {})[cell.objective] = None
    names = [m + (f" with {' and '.join(o)}" if len(o) > 1 else "") for m, o in ran.items()]
    setting, plan = settings.get(bench.plan.setting), bench.plan
    shifts = list(plan.corruptions or ())
    listed = f"{len(shifts)} corruptions" if len(shifts) > 4 else ", ".join(shifts)
    seeds = f", {len(plan.seeds)} seeds" if len(plan.seeds) > 1 else ""
    processes = f", in {bench.jobs} processes" if bench.jobs > 1 else ""
    total = sum(cell.samples for cell in cells)
    about = setting.summary.partition(";")[0]
    return (
        f"{'; '.join(names)}: {len(cells)} cells, {total} images{processes}.\n{about[:1].upper()}{about[1:]}"
        f"{': ' * bool(listed)}{listed}; {cells[0].size if cells else 0} images of each{seeds}."
    )


def say_refused(console: Console, refused: Mapping[str, str]) -> None:
    """Which methods are left out, and why."""
    for method, reason in refused.items():
        console.print(f"[bold]{escape(method)} is left out:[/] {escape(reason)}")


def say_file(console: Console, kind: str, path: Path, more: str = "") -> None:
    """Which file was written."""
    console.print(f"[dim]{kind}[/] {escape(str(path))}{more}", soft_wrap=True)


def say_doubt(console: Console, doubt: str) -> None:
    """That the unadapted model is near chance."""
    console.print(f"[bold]warning:[/] {escape(doubt)}")


def say_unfinished(console: Console, unfinished: Sequence[str], failures: Sequence[str]) -> None:
    """Which cells are missing and which have failed: a line for each kind."""
    for what, lines in (("not finished", unfinished), ("failed", failures)):
        if lines:
            more = f" and {len(lines) - LISTED} more" if len(lines) > LISTED else ""
            listed = escape("; ".join(lines[:LISTED]))
            console.print(f"[bold]{len(lines)} {what}:[/] {listed}{more}", soft_wrap=True)
    if failures:
        console.print("[dim]the next run of the same 'come bench' command tries failed cells again[/]")


def show_results(
    console: Console,
    folder: RunFolder,
    records: Sequence[Record],
    title: str,
    command: Sequence[str],
    score: str = "confidence",
) -> Judged:
    """Print the finding and the table, and write the reports; returns what differs beyond chance."""
    records = folder.rescored(records, score)
    judged = verdicts(folder, records)
    if said := helped(records, judged):
        console.print(f"\n[bold]{escape(said)}[/]\n")
    main = results_table(without_sweeps(records), title, verdicts=judged)
    brief = len(to_rich(main, console.width)) > PIECES
    show_tables(console, records, averages(main) if brief else main, rates_table(records, judged))
    write_report(records, folder.path / "report.md", command, judged, folder.failures(), folder.outcome(records))
    write_html(folder, records, folder.path / "report.html", command, judged)
    more = f"[dim]; each domain in the terminal:[/] come report {escape(str(folder.path))}" if brief else ""
    say_file(console, "report", folder.path / "report.html", more)
    return judged


def show_tables(console: Console, records: Sequence[Record], *tables: Table | None) -> None:
    """Print those that there are, each in as many pieces as the terminal asks for, and by which score the FPR is."""
    for part in (part for table in tables if table for part in to_rich(table, console.width)):
        console.print(part)
    console.print(f"[dim]{scores_note(records)}[/]")


class _Row(Progress):
    """A bar for one cell after the other, which also moves the bar of all the work."""

    def __init__(self, bar: Bar, all_: TaskID) -> None:
        self.bar, self.all, self.share = bar, all_, 0.0
        self.one = bar.add_task("", total=None, visible=False)

    def start(self, cell: Cell, samples: int) -> None:
        self._show(f"{_pair(cell)}, {', '.join(cell.corruptions)}, seed {cell.seed}", [cell], samples)

    def start_together(self, cells: Sequence[Cell], samples: int) -> None:
        self._show(f"{_pair(cells[0])}, {len(cells)} cells", cells, samples)

    def _show(self, name: str, cells: Sequence[Cell], samples: int) -> None:
        self.bar.reset(self.one, description=name[:40], total=samples, visible=True)
        self.share = work(cells) / max(samples, 1)

    def advance(self, samples: int) -> None:
        self.bar.advance(self.one, samples)
        self.bar.advance(self.all, samples * self.share)


class _Watch(_Row):
    """Shows the table as it fills and the time left; where the output is no terminal, a line per finished cell."""

    def __init__(self, console: Console, cells: Sequence[Cell], finished: Callable[[Record], None]) -> None:
        self.console, self.cells, self.finished = console, cells, finished
        self.records: list[Record] = []
        self.interrupted = False
        times = TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn()
        columns = TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), *times
        bar = Bar(*columns, console=console, speed_estimate_period=600)
        super().__init__(bar, bar.add_task(f"0 of {len(cells)} cells", total=work(cells)))
        self.live = Live(console=console, refresh_per_second=4, transient=True, get_renderable=self._view)

    def _view(self) -> Group:
        pieces = to_rich(results_table(self.records), self.console.width) if self.records else []
        return Group(*pieces[-1:], self.bar)  # the averages, with as many corruptions as fit beside them

    @contextmanager
    def catching_ctrl_c(self) -> Iterator[None]:
        """A block in which no Ctrl-C is lost: one that Python drops in a finalizer is raised again at the next batch."""

        def note(number: int, frame: FrameType | None) -> None:
            self.interrupted = True
            raise KeyboardInterrupt

        if threading.current_thread() is not threading.main_thread():  # only there can a handler be set
            yield
            return
        before = signal.signal(signal.SIGINT, note)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def advance(self, samples: int) -> None:
        if self.interrupted:
            raise KeyboardInterrupt
        super().advance(samples)

    def doubt(self, doubt: str) -> None:
        say_doubt(self.console, doubt)

    def meet(self, outcome: Outcome) -> None:
        self.console.print(str(outcome), markup=False, soft_wrap=True)

    def beside(self) -> Progress:
        return _Row(self.bar, self.all)

    def refuse(self, cell: Cell, reason: str) -> None:
        """Take it out of the work that is left."""
        task = self.bar.tasks[0]
        self.bar.update(self.all, total=max(0, (task.total or 0) - work([cell])))

    def fail(self, failure: Failure) -> None:
        self.refuse(failure.cell, "")
        self.console.print(f"failed: {failure}", markup=False, soft_wrap=True)

    def finish(self, cell: Cell, record: Record, resumed: bool) -> None:
        self.records.append(record)
        self.finished(record)
        self.bar.update(self.all, description=f"{len(self.records)} of {len(self.cells)} cells")
        if resumed:  # it took no time, and must not promise that the others take none
            self.refuse(cell, "")
        if not self.console.is_terminal:
            metrics = ((domain, record.result.metrics[domain]) for domain in record.result.domains)
            found = ", ".join(f"{d} {100 * m[cell.metric]:.1f}" for d, m in metrics if cell.metric in m)
            line = f"[{len(self.records)}/{len(self.cells)}] {_pair(cell)}, seed {cell.seed}: {found}"
            self.console.print(line + " (done before)" * resumed, markup=False)


def _pair(cell: Cell) -> str:
    return " + ".join(cell.pair)
