"""Break a benchmark in every way we know, go on, and compare every number with a run that nobody disturbed.

    OMP_NUM_THREADS=1 python benchmarks/faults.py [--kills 60] [--seed 0] [--only NAME ...]

Prints a Markdown table: what was done how often, what happened, what was lost. A number that differs, a cell that is missing,
or a finished cell that is run again stops the script. Full and read-only disks need the right to mount a tmpfs (root).
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import io
import itertools
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from come.bench import Plan, RunFolder, run
from come.bench.cli import app
from come.bench.runner import Progress
from come.errors import ComeError

PLAN = Plan(
    methods=("source", "tent", "sar"), corruptions=("fog", "contrast", "snow"), seeds=(0, 1), limit=64, batch_size=32
)
WARM = multiprocessing.get_context("forkserver")  # a clean process that has imported everything, and forks the runners
WARM.set_forkserver_preload(["come.bench", "come.bench.cli", "timm", "fontTools.ttLib", "PIL.ImageFile", "numpy.ma"])
CHANGING = ("seconds", "seconds_waiting_for_data", "peak_memory_mb")
FAULTS: dict[str, Callable[[Ground, int], Iterator[Row]]] = {}


@dataclass
class Row:
    """A line of the table."""

    fault: str
    times: int
    happened: str
    lost: str


def fault(function: Callable[[Ground, int], Iterator[Row]]) -> Callable[[Ground, int], Iterator[Row]]:
    FAULTS[function.__name__] = function
    return function


# ---- runners ----


class Started(Progress):
    """Notes which cells are begun, in a file that outlives the process."""

    def __init__(self, log: Path) -> None:
        self.log = log

    def start(self, cell, samples):
        self.note(cell.key)

    def note(self, text: str) -> None:
        with open(self.log, "a") as file:
            file.write(text + "\n")


def work(plan: Plan, out: Path, log: Path, trouble: Callable[[], None] | None) -> None:
    """What a runner's process does."""
    torch.set_num_threads(1)
    if trouble is not None:
        trouble()
    try:
        run(plan, out, progress=Started(log))
    except ComeError as error:
        Started(log).note(f"! {error}")
        sys.exit(2)


class Runner:
    """A process that runs the plan, from a warm start."""

    def __init__(self, plan: Plan, out: Path, log: Path, trouble: Callable[[], None] | None) -> None:
        self.log, self.killed = log, False
        self.done_before = finished(out)
        self.process = WARM.Process(target=work, args=(plan, out, log, trouble))
        self.process.start()

    def end(self, after: float | None = None) -> Runner:
        """Wait for the end, or kill it after so many seconds."""
        self.process.join(after)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self.killed = self.process.exitcode == -signal.SIGKILL
        return self

    @property
    def code(self) -> int | None:
        return self.process.exitcode

    @property
    def lines(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []

    @property
    def started(self) -> list[str]:
        return [line for line in self.lines if not line.startswith("! ")]

    @property
    def message(self) -> str:
        return next((line[2:] for line in self.lines if line.startswith("! ")), "")


def finished(out: Path) -> set[str]:
    """Keys of the cells that are done; none where there is no run, or one with a damaged mark."""
    with warnings.catch_warnings(), contextlib.suppress(ComeError):
        warnings.simplefilter("ignore")
        return {record.key for record in RunFolder.existing(out).records()}
    return set()


def numbers(out: Path) -> dict[str, Any]:
    """Everything that a run found, by cell: metrics and counts as text, rows as bytes."""
    folder = RunFolder.existing(out)
    found = {}
    for record in folder.records():
        result = {name: value for name, value in record.result.items() if name not in CHANGING}
        rows = {n: (str(v.dtype), tuple(v.shape), v.numpy().tobytes()) for n, v in folder.rows(record.key).items()}
        found[record.key] = (json.dumps([record.cell, result], sort_keys=True), rows)
    return found


@dataclass
class Ground:
    """A place to break things in, with the numbers of a run that nobody disturbed."""

    plan: Plan
    root: Path
    random: random.Random
    count: Iterator[int] = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        self.whole = self.root / "undisturbed"
        assert self.start(self.whole).end().code == 0
        self.expected = numbers(self.whole)

    def folder(self) -> Path:
        return self.root / f"run{next(self.count)}"

    def copy(self, without: Sequence[str] = ()) -> Path:
        """A finished run, but for some cells."""
        out = shutil.copytree(self.whole, self.folder())
        for key in without:
            for path in (out / "cells").glob(f"{key}.*"):
                path.unlink()
        return out

    def some(self) -> list[str]:
        """Half of the cells."""
        return self.random.sample(sorted(self.expected), len(self.expected) // 2)

    def start(self, out: Path, trouble: Callable[[], None] | None = None, plan: Plan | None = None) -> Runner:
        return Runner(plan or self.plan, out, self.root / f"log{next(self.count)}.txt", trouble)

    def check(self, out: Path, runners: Sequence[Runner]) -> int:
        """Every cell is there once, with the numbers of the undisturbed run. Returns how many cells were begun again."""
        assert numbers(out) == self.expected, f"the numbers in {out} differ"
        assert len(list((out / "cells").glob("*.json"))) == len(self.expected)
        for runner in runners:
            assert not runner.done_before & set(runner.started), "a finished cell was run again"
        started = [key for runner in runners for key in runner.started]
        again = len(started) - len(set(started))
        assert again <= sum(runner.code != 0 for runner in runners), "more than the cell in flight was run again"
        return again

    def finish(self, out: Path, runners: Sequence[Runner] = ()) -> tuple[Runner, int]:
        """Run to the end, and check."""
        last = self.start(out).end()
        assert last.code == 0, last.message
        return last, self.check(out, [*runners, last])


def hidden(out: Path) -> list[str]:
    return sorted(str(path.relative_to(out)) for path in out.rglob(".*"))


# ---- kills ----


@fault
def kills(ground: Ground, times: int, longest: float = 2.0) -> Iterator[Row]:
    """Kill runners at random moments; a run that finishes in spite of it is checked, and a new one begun."""
    out, runners, killed, runs, again = ground.folder(), [], 0, 0, 0
    while killed < times:
        runners.append(ground.start(out).end(after=ground.random.uniform(0.01, longest)))
        killed += runners[-1].killed
        if not runners[-1].killed:
            assert runners[-1].code == 0, runners[-1].message
            again, runs = again + ground.check(out, runners), runs + 1
            out, runners = ground.folder(), []
    again, runs = again + ground.finish(out, runners)[1], runs + 1
    yield Row(
        f"SIGKILL of a runner, 0.01 to {longest:g} s after its start",
        killed,
        f"{runs} runs resumed and finished",
        f"{again} cells in flight were run again, no finished one",
    )


@fault
def kills_at_operations(ground: Ground, times: int) -> Iterator[Row]:
    """Kill a runner before each single file operation of a run of one cell, half-way through each write."""
    small = replace(ground.plan, methods=ground.plan.methods[:1], corruptions=ground.plan.corruptions[:1], seeds=(0,))
    tiny = Ground(small, Path(tempfile.mkdtemp(dir=ground.root)), ground.random)
    killed, again, left = 0, 0, set()
    for place in itertools.count(1):
        out = tiny.folder()
        runner = tiny.start(out, partial(die_at, place)).end()
        if not runner.killed:
            assert runner.code == 0, runner.message
            break
        killed += 1
        again += tiny.finish(out, [runner])[1]
        left |= set(hidden(out))
    assert all(name.endswith(".lock") for name in left), left
    yield Row(
        "SIGKILL before every single file operation of a cell (mkdir, lock, half of each write, fsync, rename, unlink)",
        killed,
        f"resumed {killed} times",
        f"{again} times the one cell in flight was run again; left behind: {len(left)} empty lock files",
    )


def die_at(place: int) -> None:
    """Make the `place`-th file operation from now on the last thing this process does."""
    count = itertools.count(1)

    def mortal(real, half=None):
        def call(*args, **keywords):
            if next(count) == place:
                if half is not None:
                    half(*args)
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **keywords)

        return call

    write_text, write_bytes = Path.write_text, Path.write_bytes
    Path.write_text = mortal(write_text, lambda path, text, **_: write_text(path, text[: len(text) // 2]))
    Path.write_bytes = mortal(write_bytes, lambda path, data: write_bytes(path, data[: len(data) // 2]))
    Path.mkdir, Path.unlink = mortal(Path.mkdir), mortal(Path.unlink)
    os.replace, os.fsync, fcntl.flock = mortal(os.replace), mortal(os.fsync), mortal(fcntl.flock)


@fault
def kills_of_the_command(ground: Ground, times: int) -> Iterator[Row]:
    """Kill `come bench` itself, at moments spread over its whole life from the start of Python to the report."""
    began = time.perf_counter()
    assert bench(ground, ground.folder()).returncode == 0
    life = time.perf_counter() - began
    out, killed, resumed, runs = ground.folder(), 0, 0, 1
    for _ in range(times):
        process = subprocess.Popen(command(ground, out), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(ground.random.uniform(0, life))
        killed += process.poll() is None
        process.kill()
        process.wait()
        before = len(finished(out))
        assert before >= resumed, "a finished cell was lost"
        resumed = before
        if before == len(ground.expected):
            ground.check(out, [])
            out, resumed, runs = ground.folder(), 0, runs + 1
    done = bench(ground, out)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("(done before)") == resumed
    ground.check(out, [])
    yield Row(
        f"SIGKILL of `come bench`, 0 to {life:.0f} s after its start",
        killed,
        f"the same command went on; {runs} runs finished",
        "the cell in flight; no finished one",
    )


def command(ground: Ground, out: Path) -> list[str]:
    plan = ground.plan
    return [
        *(sys.executable, "-m", "come", "bench", "--methods", ",".join(plan.methods), "--limit", str(plan.limit)),
        *("--corruptions", ",".join(plan.corruptions or ()), "--seeds", ",".join(map(str, plan.seeds))),
        *("--batch-size", str(plan.batch_size), "--out", str(out)),
    ]


def bench(ground: Ground, out: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(ground, out), capture_output=True, text=True)


# ---- several runners ----


@fault
def several(ground: Ground, times: int) -> Iterator[Row]:
    """Two and four runners on one new folder, begun at once; then four of which three are killed."""
    for runners in (2, 4):
        for _ in range(times):
            out = ground.folder()
            together = [ground.start(out) for _ in range(runners)]
            assert [runner.end().code for runner in together] == [0] * runners, [r.message for r in together]
            assert sum(len(runner.started) for runner in together) == len(ground.expected)
            ground.check(out, together)
        yield Row(
            f"{runners} runners on one folder", times, "all finished; every cell was begun exactly once", "nothing"
        )
    again = 0
    for _ in range(times):
        out = ground.folder()
        together = [ground.start(out) for _ in range(4)]
        for runner in together[:3]:
            runner.end(after=ground.random.uniform(0.01, 1.5))
        assert together[3].end().code == 0, together[3].message
        again += ground.check(out, together)
    yield Row(
        "4 runners on one folder, 3 of them killed",
        times,
        "the fourth finished",
        f"{again} cells in flight were run again",
    )


@fault
def stopped(ground: Ground, times: int) -> Iterator[Row]:
    """A runner that hangs holds its cell; the others do the rest and wait; once it is killed, they take that cell too."""
    again = 0
    for _ in range(times):
        out = ground.folder()
        hangs = ground.start(out)
        until(lambda hangs=hangs: len(hangs.started) >= 1)
        os.kill(hangs.process.pid, signal.SIGSTOP)
        other = ground.start(out)
        until(lambda other=other: len(other.started) + len(other.done_before) >= len(ground.expected) - 1)
        assert other.process.is_alive()
        hangs.process.kill()
        assert other.end().code == 0, other.message
        again += ground.check(out, [hangs.end(), other])
    yield Row(
        "a runner stopped (SIGSTOP) while it holds a cell, killed later",
        times,
        "the other ran the rest, waited, and took the cell once its holder was dead",
        f"{again} cells in flight were run again",
    )


def until(true: Callable[[], bool], seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.01)


# ---- disks ----


ROOMY = "size=64m,nr_inodes=9999"


@contextlib.contextmanager
def disk(path: Path) -> Iterator[tuple[Path, Callable[[str], object]]]:
    """A place on a tmpfs of its own, and what changes the options of that."""
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", ROOMY, "tmpfs", path], check=True, capture_output=True)
    try:
        yield path / "run", lambda options: subprocess.run(["mount", "-o", f"remount,{options}", path], check=True)
    finally:
        subprocess.run(["umount", "-l", path], check=True)


def can_mount() -> bool:
    """Whether `full` and `read_only` can be tried here."""
    refusals = contextlib.suppress(subprocess.CalledProcessError, OSError)
    with tempfile.TemporaryDirectory() as root, refusals, disk(Path(root) / "disk"):
        return True
    return False


@fault
def full(ground: Ground, times: int) -> Iterator[Row]:
    """A disk that is full, of bytes or of files, at random points of a run; then there is room again."""
    kept, messages = 0, set()
    for i in range(times):
        with disk(ground.folder()) as (out, change):
            cells = ground.random.randrange(len(ground.expected) - 1) if i else 0  # each takes two files, 8 to 12 KiB
            change(f"nr_inodes={8 + 2 * cells}" if i % 3 == 2 else f"size={16 + 8 * cells}k")
            runner = ground.start(out).end()
            assert runner.code == 2, runner.code
            assert "No space left on device" in runner.message
            messages.add(f'"{re.sub("cell [0-9a-f]+", "cell KEY", runner.message.replace(str(out), "RUN"))}"')
            kept += len(finished(out))
            change(ROOMY)
            ground.finish(out, [runner])
    yield Row(
        "a full disk (no bytes, or no inodes, left)",
        times,
        f"stopped with exit code 2: {'; '.join(sorted(messages))}. With room, resumed",
        f"the cell that could not be written; the {kept} finished before were kept",
    )


@fault
def read_only(ground: Ground, times: int) -> Iterator[Row]:
    """A folder that cannot be written is refused by a run and read by a report; writable again, the run goes on."""
    for _ in range(times):
        with disk(ground.folder()) as (out, change):
            part = replace(ground.plan, methods=ground.plan.methods[:1])
            assert ground.start(out, plan=part).end().code == 0
            change("ro")
            refused = ground.start(out).end()
            assert refused.code == 2
            assert "cannot write to the run folder" in refused.message
            readable = numbers(out)
            assert readable == {key: ground.expected[key] for key in readable} != {}
            assert report(out, "--format", "csv").startswith("method,")
            assert "page.html" in report(out, "--out", str(ground.root / "page.html"))
            assert report(out).startswith("cannot write the report")
            change("rw")
            last, _ = ground.finish(out)
            assert len(last.started) == len(ground.expected) - len(readable)
    yield Row(
        "a read-only run folder",
        times,
        f'`come bench`: "{refused.message.replace(str(out), "RUN")}"; `come report` reads it (`--format`, `--out`). '
        "Writable again, resumed",
        "nothing",
    )


def report(out: Path, *options: str) -> str:
    """What `come report` prints, or its refusal."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        try:
            app(["report", str(out), *options], standalone_mode=False)
        except ComeError as error:
            return str(error)
    return printed.getvalue()


# ---- damage ----


def changed(data: bytes, at: int, byte: int) -> bytes:
    return data[:at] + bytes([byte]) + data[at + 1 :]


def other_digit(data: bytes, rng: random.Random) -> bytes:
    """One digit of an accuracy is another."""
    at = re.search(rb'"accuracy": \d\.\d*', data).end() - 1
    return changed(data, at, data[at] ^ 1)


DAMAGE: dict[str, Callable[[bytes, random.Random], bytes | None]] = {
    "cut short": lambda data, rng: data[: rng.randrange(1, len(data))],
    "one bit flipped": lambda data, rng: changed(
        data, at := rng.randrange(len(data)), data[at] ^ 1 << rng.randrange(8)
    ),
    "one byte changed": lambda data, rng: changed(data, rng.randrange(len(data)), rng.randrange(256)),
    "emptied": lambda data, rng: b"",
    "zeroed": lambda data, rng: bytes(len(data)),
    "garbage after the end": lambda data, rng: data + rng.randbytes(9),
    "garbage": lambda data, rng: rng.randbytes(len(data)),
    "deeply nested": lambda data, rng: b"[" * 100_000,
    "gone": lambda data, rng: None,
}
SUFFIXES = {
    "record": (".json", {**DAMAGE, "one digit changed": other_digit}),
    "rows": (".safetensors", DAMAGE),
}


@fault
def damaged(ground: Ground, times: int) -> Iterator[Row]:
    """Records, and rows, damaged in every way, every cell at once; and files of one cell in place of another's."""
    for what, (suffix, ways) in SUFFIXES.items():
        injected, harmless = 0, 0
        for shift in range(times):
            out = ground.copy()
            for i, path in enumerate(sorted((out / "cells").glob(f"*{suffix}"))):
                after = list(ways.values())[(i + shift) % len(ways)](path.read_bytes(), ground.random)
                path.unlink() if after is None else path.write_bytes(after)
                injected += 1
            last, _ = ground.finish(out)
            harmless += len(ground.expected) - len(last.started)
        yield Row(
            f"{what} damaged: {', '.join(ways)}",
            injected,
            "counted as not done, run again"
            + (f" (but for {harmless} whose white space had changed, or nothing)" if harmless else ""),
            "the damaged cells; no other",
        )
    for what, (suffix, _) in SUFFIXES.items():
        out = ground.copy()
        paths = sorted((out / "cells").glob(f"*{suffix}"))
        texts = [path.read_bytes() for path in paths]
        for path, text in zip(paths, texts[1:] + texts[:1], strict=True):
            path.write_bytes(text)
        last, _ = ground.finish(out)
        assert len(last.started) == len(paths)
        yield Row(f"{what} of another cell in its place", len(paths), "counted as not done, run again", "those cells")


@fault
def marks(ground: Ground, times: int) -> Iterator[Row]:
    """A damaged run.json is refused with the repair, and fixed by it; damaged manifests are written again when needed."""
    for damage in (b"", b'{"format": "come-r', bytes(40)):
        out = ground.copy()
        (out / "run.json").write_bytes(damage)
        refused = ground.start(out).end()
        assert refused.code == 2
        (out / "run.json").write_text(re.search(r"write (\{.*\}) into it", refused.message).group(1))
        assert not ground.finish(out)[0].started
    shown = refused.message.replace(str(out), "RUN")
    yield Row("run.json emptied, cut short, zeroed", 3, f'refused: "{shown}"; did that, resumed', "nothing")
    out = ground.copy(without=sorted(ground.expected))
    manifests = sorted((out / "streams").iterdir())
    for path, way in zip(manifests, itertools.cycle(DAMAGE.values()), strict=False):
        after = way(path.read_bytes(), ground.random)
        path.unlink() if after is None else path.write_bytes(after)
    ground.finish(out)
    assert all(path.read_bytes() == (ground.whole / "streams" / path.name).read_bytes() for path in manifests)
    yield Row(
        "manifests of streams damaged", len(manifests), "written again with the first cell that uses them", "nothing"
    )


# ---- clocks, locks, leftovers ----


@fault
def clock(ground: Ground, times: int) -> Iterator[Row]:
    """Files from the future and from 1970, and a clock that runs backwards."""
    for _ in range(times):
        missing = ground.some()
        out = ground.copy(without=missing)
        for path in out.rglob("*"):
            stamp = ground.random.choice((0, 4_102_444_800))  # 1970, 2100
            os.utime(path, (stamp, stamp))
        last = ground.start(out, backwards).end()
        assert last.code == 0, last.message
        assert sorted(last.started) == sorted(missing)
        ground.check(out, [last])
    yield Row(
        "clock an hour back at every look, files dated 1970 and 2100", times, "resumed what was missing", "nothing"
    )


def backwards() -> None:
    """Make the clock of this process run backwards."""
    hours = itertools.count()
    now = time.time()
    time.time = lambda: now - 3600 * next(hours)
    time.time_ns = lambda: int(time.time() * 1e9)


@fault
def leftovers(ground: Ground, times: int) -> Iterator[Row]:
    """Lock files of processes that are dead, and half-written files of killed writers."""
    locks = halves = 0
    for _ in range(times):
        missing = ground.some()
        out = ground.copy(without=missing)
        for key in missing:
            lock = out / "cells" / f"{key}.lock"
            lock.write_text(ground.random.choice(("", "1\n", f"{os.getpid()}\n")))
            lock.chmod(ground.random.choice((0o600, 0o644, 0o400)))
            os.utime(lock, (4_102_444_800, 4_102_444_800))
            for suffix in ("json", "safetensors"):
                whole = (ground.whole / "cells" / f"{key}.{suffix}").read_bytes()
                (out / "cells" / f".{key}.{suffix}.4242.1").write_bytes(whole[: ground.random.randrange(len(whole))])
        for path in list((out / "streams").glob("*.json")):
            path.rename(path.with_name(f".{path.name}.4242.1"))
        locks, halves = locks + len(missing), halves + 2 * len(missing) + 1
        (out / ".run.json.4242.1").write_text('{"form')
        last, _ = ground.finish(out)
        assert sorted(last.started) == sorted(missing)
        assert not list((out / "cells").glob("*.lock"))
        assert {name for name in hidden(out) if not name.startswith("streams/")} == {".run.json.4242.1"}
    yield Row("lock files of dead processes", locks, "taken over at once, removed at the end", "nothing")
    yield Row(
        "half-written files of killed writers", halves, "never read; removed by who runs the cell next", "nothing"
    )


# ---- all ----

TIMES = {"kills_of_the_command": 12, "several": 3, "stopped": 2, "full": 9, "read_only": 2, "damaged": 2, "clock": 3,
         "leftovers": 2}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=60, help="how many runners are killed at random moments")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", choices=list(FAULTS), default=list(FAULTS))
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"  # of the runners: the order of sums is part of a number
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as root:
        ground = Ground(PLAN, Path(root), random.Random(options.seed))
        print("| fault | times | what happened | what was lost |\n|---|---|---|---|")
        for name in options.only:
            for row in FAULTS[name](ground, options.kills if name == "kills" else TIMES.get(name, 1)):
                print(f"| {row.fault} | {row.times} | {row.happened} | {row.lost} |", flush=True)
    seconds = time.perf_counter() - began
    print(f"\nEvery number of all {len(ground.expected)} cells was that of the undisturbed run; {seconds:.0f} s.")


if __name__ == "__main__":
    main()
