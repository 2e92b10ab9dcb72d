"""Break a benchmark in every way we know, go on, and compare every number with a run that nobody disturbed.

    OMP_NUM_THREADS=1 python tests/harness/faults.py [--kills 60] [--times 12] [--seed 0] [--only NAME ...]

Prints a Markdown table of what was done and how often what happened. A number that differs, a cell that is missing, or a
finished cell that is run again stops the script. Full and read-only disks need the right to mount a tmpfs (root).
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
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from cells import apart
from safetensors.torch import save

from come.bench import Plan, RunFolder, run
from come.bench.cli import app
from come.bench.runner import Progress
from come.errors import ComeError

PLAN = Plan(
    methods=("source", "tent", "sar"), corruptions=("fog", "contrast", "snow"), seeds=(0, 1), limit=64, batch_size=32
)
WARM = multiprocessing.get_context("forkserver")  # a clean process that has imported everything, and forks the runners
WARM.set_forkserver_preload(["come.bench", "come.bench.cli", "timm", "fontTools.ttLib", "PIL.ImageFile", "numpy.ma"])
CHANGING = {"seconds", "seconds_waiting_for_data", "peak_memory_mb"}
STAMPS = (0, 4_102_444_800)
"""1970 and 2100."""


Found = dict[str, int]
"""How often what happened."""


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
        self.log, self.done_before = log, finished(out)
        log.touch()
        self.process = WARM.Process(target=work, args=(plan, out, log, trouble))
        self.process.start()

    def end(self, after: float | None = None) -> Runner:
        """Wait for the end, or kill it after so many seconds."""
        self.process.join(after)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        return self

    @property
    def code(self) -> int | None:
        return self.process.exitcode

    @property
    def killed(self) -> bool:
        return self.code == -signal.SIGKILL

    @property
    def started(self) -> list[str]:
        return re.findall(r"^(\w+)$", self.log.read_text(), re.MULTILINE)

    @property
    def message(self) -> str:
        return "".join(re.findall(r"^! (.*)", self.log.read_text(), re.MULTILINE))


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
        rows = {n: (str(v.dtype), tuple(v.shape), v.numpy().tobytes()) for n, v in folder.rows(record.key).items()}
        about = [record.cell.model_dump(), record.result.model_dump(exclude=CHANGING)]
        found[record.key] = (json.dumps(about, sort_keys=True), rows)
    return found


def contents(out: Path) -> set[str]:
    return {str(path.relative_to(out)) for path in out.rglob("*")}


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
            (out / "cells" / f"{key}.safetensors").unlink()
        return out

    def some(self) -> list[str]:
        """Half of the cells."""
        return self.random.sample(sorted(self.expected), len(self.expected) // 2)

    def start(self, out: Path, trouble: Callable[[], None] | None = None, plan: Plan | None = None) -> Runner:
        return Runner(plan or self.plan, out, self.root / f"log{next(self.count)}.txt", trouble)

    def check(self, out: Path, runners: Sequence[Runner], *, alone: bool = True) -> int:
        """Every cell is there once, with the numbers of the undisturbed run, and nothing else but what killed writers left.

        Returns how many cells were begun again; `alone` says that no two runners may have worked on one cell.
        """
        assert numbers(out) == self.expected, f"the numbers in {out} differ"
        missing, more = contents(self.whole) - contents(out), contents(out) - contents(self.whole)
        assert all(name.endswith(".lock") for name in missing), missing
        assert all(re.fullmatch(r"(.*/)?\.[^/]+\.tmp", name) for name in more), more
        for runner in runners:
            assert not runner.done_before & set(runner.started), "a finished cell was run again"
        started = [key for runner in runners for key in runner.started]
        again = len(started) - len(set(started))
        assert not alone or again <= sum(runner.code != 0 for runner in runners), (
            "more than a cell in flight was run again"
        )
        return again

    def finish(self, out: Path, runners: Sequence[Runner] = ()) -> tuple[Runner, int]:
        """Run to the end, and check."""
        last = self.start(out).end()
        assert last.code == 0, last.message
        return last, self.check(out, [*runners, last])


# ---- kills ----


def kills(ground: Ground, times: int, longest: float = 2.0) -> Found:
    """SIGKILL of a runner, 0.01 to 2 s after its start; the next one resumes."""
    out, runners, killed, runs, again = ground.folder(), [], 0, 0, 0
    while killed < times:
        runners.append(ground.start(out).end(after=ground.random.uniform(0.01, longest)))
        killed += runners[-1].killed
        if not runners[-1].killed:
            assert runners[-1].code == 0, runners[-1].message
            again, runs = again + ground.check(out, runners), runs + 1
            out, runners = ground.folder(), []
    again, runs = again + ground.finish(out, runners)[1], runs + 1
    return {"kills": killed, "runs finished": runs, "cells in flight run again": again}


def kills_at_operations(ground: Ground, times: int) -> Found:
    """SIGKILL before every single file operation of a cell (mkdir, lock, half of each write, fsync, rename)."""
    small = ground.plan.but(methods=ground.plan.methods[:1], corruptions=ground.plan.corruptions[:1], seeds=(0,))
    tiny = Ground(small, Path(tempfile.mkdtemp(dir=ground.root)), ground.random)
    again, left = 0, 0
    for place in itertools.count(1):
        out = tiny.folder()
        runner = tiny.start(out, partial(die_at, place)).end()
        if not runner.killed:
            assert runner.code == 0, runner.message
            return {"kills": place - 1, "cells in flight run again": again, "temporary files left": left}
        again += tiny.finish(out, [runner])[1]
        left += len(contents(out) - contents(tiny.whole))


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
    Path.mkdir, os.replace, os.fsync = mortal(Path.mkdir), mortal(os.replace), mortal(os.fsync)
    fcntl.flock = mortal(fcntl.flock)  # what filelock calls


def kills_of_the_command(ground: Ground, times: int) -> Found:
    """SIGKILL of `come bench`, at any time from the start of Python to the report; the same command goes on."""
    plan, out = ground.plan, ground.folder()
    command = [
        *(sys.executable, "-m", "come", "bench", "--methods", ",".join(plan.methods), "--limit", str(plan.limit)),
        *("--corruptions", ",".join(plan.corruptions or ()), "--seeds", ",".join(map(str, plan.seeds))),
        *("--batch-size", str(plan.batch_size), "--out"),
    ]
    began = time.perf_counter()
    assert subprocess.run([*command, str(ground.folder())], capture_output=True).returncode == 0
    life = time.perf_counter() - began
    killed, resumed, runs = 0, 0, 1
    for _ in range(times):
        process = subprocess.Popen([*command, str(out)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(ground.random.uniform(0, life))
        killed += process.poll() is None
        process.kill()
        process.wait()
        before = len(finished(out))
        assert before >= resumed, "a finished cell was lost"
        resumed = before
        if before == len(ground.expected):
            out, resumed, runs = ground.folder(), 0, runs + 1
    done = subprocess.run([*command, str(out)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("(done before)") == resumed
    assert numbers(out) == ground.expected
    return {"kills": killed, "runs finished": runs}


# ---- several runners ----


def several(ground: Ground, times: int) -> Found:
    """2 and 4 runners on one folder, begun at once: every cell is begun exactly once."""
    for runners in (2, 4):
        for _ in range(times):
            out = ground.folder()
            together = [ground.start(out) for _ in range(runners)]
            assert [runner.end().code for runner in together] == [0] * runners, [r.message for r in together]
            assert ground.check(out, together) == 0
    return {"runs by 2": times, "runs by 4": times}


def several_killed(ground: Ground, times: int) -> Found:
    """4 runners on one folder, 3 of them killed: the fourth finishes."""
    again = 0
    for _ in range(times):
        out = ground.folder()
        together = [ground.start(out) for _ in range(4)]
        for runner in together[:3]:
            runner.end(after=ground.random.uniform(0.01, 1.5))
        assert together[3].end().code == 0, together[3].message
        again += ground.check(out, together)
    return {"runs": times, "cells in flight run again": again}


def locks_for_everyone(ground: Ground, times: int) -> Found:
    """3 runners, one of them killed, where every lock is granted to everyone: they run each other's cells, and none is lost."""
    again = 0
    for _ in range(times):
        out = ground.folder()
        together = [ground.start(out, no_locks) for _ in range(3)]
        together[0].end(after=ground.random.uniform(0.3, 1.5))
        assert [runner.end().code for runner in together[1:]] == [0, 0], [r.message for r in together]
        again += ground.check(out, together, alone=False)
    return {"runs": times, "cells run more than once, with the same numbers": again}


def no_locks() -> None:
    fcntl.flock = lambda handle, how: None


def stopped(ground: Ground, times: int) -> Found:
    """A runner stopped (SIGSTOP) while it holds a cell, killed later: the other runs the rest, waits, and takes that cell."""
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
    return {"runs": times, "cells in flight run again": again}


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


def full(ground: Ground, times: int) -> Found:
    """A disk that is too small, or that others fill meanwhile (no bytes, or no inodes, left): stops with exit code 2, before
    the first cell or at one, and resumes when there is room."""
    kept = 0
    for i in range(times + 1):
        with disk(ground.folder()) as (out, change):
            cells = (
                ground.random.randrange(len(ground.expected) - 1) if i > 1 else 0
            )  # each takes two files, 8 to 12 KiB
            change(f"nr_inodes={9 + 2 * cells}" if i % 3 == 2 else f"size={16 + 8 * cells if i else 8}k")
            runner = ground.start(out, room_at_first if i else None).end()
            assert runner.code == 2, runner.code
            assert ("No space left on device" if i else "the rows of this run take about") in runner.message, (
                runner.message
            )
            kept += len(finished(out))
            change(ROOMY)
            ground.finish(out, [runner])
    return {"runs": times + 1, "finished cells, all kept": kept}


def room_at_first() -> None:
    """Make this process believe that there is room."""
    shutil.disk_usage = lambda path: SimpleNamespace(free=2**40)


def read_only(ground: Ground, times: int) -> Found:
    """A read-only run folder: `come bench` refuses it, `come report` reads it; writable again, the run goes on."""
    for _ in range(times):
        with disk(ground.folder()) as (out, change):
            assert ground.start(out, plan=ground.plan.but(methods=ground.plan.methods[:1])).end().code == 0
            change("ro")
            refused = ground.start(out).end()
            assert refused.code == 2
            assert "cannot write to the run folder" in refused.message
            readable = numbers(out)
            assert readable == {key: ground.expected[key] for key in readable} != {}
            assert report(out, "--format", "csv").startswith("method,")
            assert "page.html" in report(out, "--out", str(ground.root / "page.html"))
            assert report(out).startswith("cannot write")
            change("rw")
            last, _ = ground.finish(out)
            assert len(last.started) == len(ground.expected) - len(readable)
    return {"runs": times}


def report(out: Path, *options: str) -> str:
    """What `come report` prints, or its refusal."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        try:
            app(["report", str(out), *options], standalone_mode=False)
        except ComeError as error:
            return str(error)
    return printed.getvalue()


# ---- damage ----


def flipped(data: bytes, at: int, by: int) -> bytes:
    return data[:at] + bytes([data[at] ^ by]) + data[at + 1 :]


def other_digit(data: bytes, rng: random.Random) -> bytes:
    """One digit of an accuracy, or of an index in a manifest, is another."""
    return flipped(data, re.search(rb'accuracy\\": \d\.\d*|order":\[\d', data).end() - 1, 1)


DAMAGE: dict[str, Callable[[bytes, random.Random], bytes | None]] = {
    "cut short": lambda data, rng: data[: rng.randrange(1, len(data))],
    "one bit flipped": lambda data, rng: flipped(data, rng.randrange(len(data)), 1 << rng.randrange(8)),
    "one byte changed": lambda data, rng: flipped(data, rng.randrange(len(data)), rng.randrange(1, 256)),
    "emptied": lambda data, rng: b"",
    "zeroed": lambda data, rng: bytes(len(data)),
    "garbage after the end": lambda data, rng: data + rng.randbytes(9),
    "garbage": lambda data, rng: rng.randbytes(len(data)),
    "deeply nested": lambda data, rng: b"[" * 100_000,
    "one digit changed": other_digit,
    "gone": lambda data, rng: None,
}
EXCHANGES: dict[str, Callable[[bytes, bytes], bytes]] = {
    "file": lambda own, other: other,
    "rows": lambda own, other: save(apart(other)[0], apart(own)[1]),
    "record": lambda own, other: save(apart(own)[0], {**apart(own)[1], "record": apart(other)[1]["record"]}),
    "header": lambda own, other: save(apart(own)[0], apart(other)[1]),
}
"""What of another cell stands in the place of a cell's own."""


def damage(ground: Ground, paths: Sequence[Path], first: int = 0) -> None:
    """Damage each file in another way."""
    for path, way in zip(paths, itertools.islice(itertools.cycle(DAMAGE.values()), first, None), strict=False):
        after = way(path.read_bytes(), ground.random)
        path.unlink() if after is None else path.write_bytes(after)


def damaged(ground: Ground, times: int) -> Found:
    """Files of cells damaged: cut short, one bit flipped, one byte changed, emptied, zeroed, garbage after the end, garbage,
    deeply nested, one digit changed, gone: these cells count as not done and are run again, no other."""
    for i in range(times):
        out = ground.copy()
        damage(ground, sorted((out / "cells").iterdir()), i * len(DAMAGE) // times)
        assert len(ground.finish(out)[0].started) == len(ground.expected)
    return {"damaged": times * len(ground.expected)}


def exchanged(ground: Ground, times: int) -> Found:
    """The file, the rows, the record or the header of another cell in place of a cell's own: it is run again."""
    for _ in range(times):
        out = ground.copy()
        paths = sorted((out / "cells").iterdir())
        whole = [path.read_bytes() for path in paths]
        ways = itertools.cycle(EXCHANGES.values())
        for path, own, other in zip(paths, whole, whole[1:] + whole[:1], strict=True):
            path.write_bytes(next(ways)(own, other))
        assert not finished(out)
        assert len(ground.finish(out)[0].started) == len(paths)
    return {"exchanged": times * len(ground.expected)}


def marks(ground: Ground, times: int) -> Found:
    """run.json emptied, cut short, zeroed: refused, with the repair; that done, the run resumes."""
    for content in (b"", b'{"format": "come-r', bytes(40)):
        out = ground.copy()
        (out / "run.json").write_bytes(content)
        refused = ground.start(out).end()
        assert refused.code == 2
        (out / "run.json").write_text(re.search(r"write (\{.*\}) into it", refused.message).group(1))
        assert not ground.finish(out)[0].started
    return {"damaged": 3}


def manifests(ground: Ground, times: int) -> Found:
    """Manifests of streams damaged: written again with the first cell that uses them."""
    out = ground.copy(without=sorted(ground.expected))
    paths = sorted((out / "streams").iterdir())
    damage(ground, paths)
    ground.finish(out)
    assert all(path.read_bytes() == (ground.whole / "streams" / path.name).read_bytes() for path in paths)
    return {"damaged": len(paths)}


# ---- clocks, locks, leftovers ----


def clock(ground: Ground, times: int) -> Found:
    """A clock that goes back an hour at every look, files dated 1970 and 2100: what is missing is run, no more."""
    for _ in range(times):
        missing = ground.some()
        out = ground.copy(without=missing)
        for path in out.rglob("*"):
            os.utime(path, 2 * (ground.random.choice(STAMPS),))
        last = ground.start(out, backwards).end()
        assert last.code == 0, last.message
        assert sorted(last.started) == sorted(missing)
        ground.check(out, [last])
    return {"runs": times}


def backwards() -> None:
    """Make the clock of this process run backwards."""
    hours, now = itertools.count(), time.time()
    time.time = lambda: now - 3600 * next(hours)
    time.time_ns = lambda: int(time.time() * 1e9)


def leftovers(ground: Ground, times: int) -> Found:
    """Lock files of dead processes, taken over at once; half-written files of killed writers, never read, never deleted."""
    locks = halves = 0
    for _ in range(times):
        missing = ground.some()
        out = ground.copy(without=missing)
        for key in missing:
            lock = out / "locks" / f"{key}.lock"
            lock.write_text(ground.random.choice(("", "1\n", f"{os.getpid()}\n")))
            lock.chmod(ground.random.choice((0o600, 0o644)))
            os.utime(lock, 2 * (STAMPS[1],))
            whole = (ground.whole / "cells" / f"{key}.safetensors").read_bytes()
            half = whole[: ground.random.randrange(len(whole) + 1)]
            (out / "cells" / f".{key}.safetensors.{locks:016x}.tmp").write_bytes(half)
            locks += 1
        for path in list((out / "streams").glob("*.json")):
            path.with_name(f".{path.name}.0123456789abcdef.tmp").write_bytes(path.read_bytes()[:50])
        (out / ".run.json.0123456789abcdef.tmp").write_text('{"form')
        before = {path: path.read_bytes() for path in out.rglob(".*")}
        last, _ = ground.finish(out)
        assert sorted(last.started) == sorted(missing)
        assert before == {path: path.read_bytes() for path in out.rglob(".*")}
        halves += len(before)
    return {"locks": locks, "half-written files": halves}


# ---- all ----

TIMES = {
    kills: 60, kills_at_operations: 1, kills_of_the_command: 12, several: 3, several_killed: 3, locks_for_everyone: 3,
    stopped: 2, full: 9, read_only: 2, damaged: 2, exchanged: 2, marks: 1, manifests: 1, clock: 3, leftovers: 2,
}  # fmt: skip
FAULTS: dict[str, Callable[[Ground, int], Found]] = {fault.__name__: fault for fault in TIMES}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=60, help="how many runners are killed at random moments")
    parser.add_argument("--times", type=int, default=12, help="at most, for each of the other faults")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", choices=list(FAULTS), default=list(FAULTS))
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"  # of the runners: the order of sums is part of a number
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as root:
        ground = Ground(PLAN, Path(root), random.Random(options.seed))
        print("| fault | how often |\n|---|---|")
        for name in options.only:
            times = options.kills if name == "kills" else min(options.times, TIMES[FAULTS[name]])
            found = FAULTS[name](ground, times)
            about, counts = (
                " ".join(FAULTS[name].__doc__.split()),
                ", ".join(f"{n} {what}" for what, n in found.items()),
            )
            print(f"| {about} | {counts} |", flush=True)
    seconds = time.perf_counter() - began
    print(f"\nEvery number of all {len(ground.expected)} cells was that of the undisturbed run; {seconds:.0f} s.")


if __name__ == "__main__":
    main()
