"""Several processes on one run: the same records, and nothing is lost when one of them goes."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import psutil
import pytest
import torch
from PIL import Image

import come
from come.bench import Bench, Plan, RunFolder, models, run
from come.bench.data import DatasetSource
from come.bench.data.store import DecodedStore
from come.bench.engines.processes import Helpers
from come.bench.engines.progress import Progress, Reporter
from come.bench.engines.schedule import Schedule
from come.bench.engines.workload import automatic_jobs, order_for
from come.testing import TinyClassifier

PLAN = Plan(methods=("source", "tent"), corruptions=("fog", "snow"), limit=96, batch_size=32)


class Patient(Progress):
    """Holds the first process up in its first cell until the others have done something there."""

    def __init__(self, enough):
        self.enough, self.held, self.finished, self.samples = enough, False, [], 0

    def start(self, cell, samples):
        until = time.monotonic() + 90
        while not self.held and not self.enough() and time.monotonic() < until:
            time.sleep(0.01)
        self.held = True

    def advance(self, samples):
        self.samples += samples

    def finish(self, cell, record, resumed):
        self.finished.append(resumed)


def helpers_of(process):
    # one of the test before may still be ending on a busy machine
    alive = [child for child in process.children() if child.status() != psutil.STATUS_ZOMBIE]
    return [child for child in alive if "spawn_main" in " ".join(child.cmdline())]


def cells(folder):
    return list((folder / "cells").glob("[!.]*.safetensors"))


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    return RunFolder(folder), run(PLAN, folder)


def check_same(alone, folder, records):
    first, expected = alone
    assert [r.key for r in records] == [r.key for r in expected]
    for one, two in zip(expected, records, strict=True):
        assert one.result.metrics == two.result.metrics
        a, b = first.rows(one.key), RunFolder(folder).rows(two.key)
        assert all(torch.equal(a[name], b[name]) for name in a)


def test_two_processes_find_what_one_finds(tmp_path, alone):
    progress = Patient(lambda: len(cells(tmp_path)) >= 2)
    records = Bench(PLAN, jobs=2).run(RunFolder(tmp_path), progress)
    check_same(alone, tmp_path, records)
    assert {(r.machine.jobs, r.machine.threads) for r in records} == {(2, 1)}
    assert progress.finished == [False] * 6
    assert progress.samples == 6 * 96
    assert not helpers_of(psutil.Process())
    again = Patient(lambda: True)
    assert Bench(PLAN, jobs=2).run(RunFolder(tmp_path), again) == records
    assert again.finished == [True] * 6
    before = {path: path.stat().st_mtime_ns for path in cells(tmp_path)}
    progress = Patient(lambda: any(path.stat().st_mtime_ns != before[path] for path in cells(tmp_path)))
    check_same(alone, tmp_path, Bench(PLAN, jobs=2).run(RunFolder(tmp_path), progress, fresh=True))
    assert all(path.stat().st_mtime_ns != before[path] for path in cells(tmp_path))


def test_a_killed_process_loses_nothing(tmp_path, alone):
    def killed():
        """Whether a helper was killed while it worked on a cell: the first process has one lock, it has another."""
        if len(list((tmp_path / "locks").glob("*.lock"))) < 2:
            return False
        for process in helpers_of(psutil.Process()):
            process.kill()
            while process.status() != psutil.STATUS_ZOMBIE:  # a busy machine takes its time
                time.sleep(0.01)
        return True

    with pytest.warns(UserWarning, match="a process of this run was killed by signal 9; the others run its cells"):
        records = Bench(PLAN, jobs=2).run(RunFolder(tmp_path), Patient(killed))
    check_same(alone, tmp_path, records)


def test_images_are_decoded_once_for_all(tmp_path):
    """The file of decoded images travels to the helper: what the first process has read may be gone."""
    for k in range(2):
        (tmp_path / "data" / str(k)).mkdir(parents=True)
        for i in range(4):
            Image.new("RGB", (16, 16), (60 * i, 100 * k, 9)).save(tmp_path / "data" / str(k) / f"{i}.png")
    model = models.Model("tiny", TinyClassifier(torch.nn.BatchNorm2d, 2), models.Preprocess(8, 8), 2)
    plan = Plan(
        model="tiny", data=f"folder:{tmp_path / 'data'}", methods=("source", "norm"), corruptions=("fog", "snow")
    )
    bench = Bench(plan, model=model, jobs=2, workers=0)
    assert isinstance(bench.inputs.source, DecodedStore)
    bench.inputs.source.load(range(8))
    for path in (tmp_path / "data").glob("*/*.png"):
        path.write_bytes(b"")
    progress = Patient(lambda: len(cells(tmp_path / "run")) >= 1)
    assert len(bench.run(RunFolder(tmp_path / "run"), progress)) == 4


def test_a_later_cell_decodes_nothing(tmp_path):
    for i in range(4):
        (tmp_path / "data" / str(i % 2)).mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (16, 16), (60 * i, 9, 9)).save(tmp_path / "data" / str(i % 2) / f"{i}.png")
    model = models.Model("tiny", TinyClassifier(torch.nn.BatchNorm2d, 2), models.Preprocess(8, 8), 2)
    plan = Plan(
        model="tiny", data=f"folder:{tmp_path / 'data'}", methods=("source", "norm"), corruptions=("fog", "snow")
    )
    bench = Bench(plan, model=model, workers=0)
    decoded, load = [], bench.inputs.source.source.load
    bench.inputs.source.source.load = lambda indices, *more: decoded.extend(indices) or load(indices, *more)
    records = bench.run(RunFolder(tmp_path / "run"))
    assert [r.result.samples for r in records] == [4] * 4
    assert len(decoded) <= 4  # one was looked at for its size


def test_what_cannot_travel_is_refused_in_words(tmp_path):
    source = DatasetSource([(torch.zeros(3, 8, 8, dtype=torch.uint8), 0)] * 4, num_classes=2, name="mine")
    source.trap = lambda: None
    model = models.Model("tiny", TinyClassifier(torch.nn.BatchNorm2d, 2), models.Preprocess(8, 8), 2)
    plan = Plan(model="tiny", data="mine", methods=("source", "norm"), corruptions=("fog",))
    bench = Bench(plan, source=source, model=model, jobs=2)
    with pytest.raises(come.ConfigError, match=r"cannot be sent to another process .* leave jobs at 1"):
        bench.run(RunFolder(tmp_path / "run"))
    with pytest.raises(come.ConfigError, match="jobs must be"):
        Bench(PLAN, jobs=0)


def hearing(tmp_path, grid, progress, *said, code=0):
    """What the first process makes of what a helper says."""
    schedule = Schedule(RunFolder(tmp_path), progress, {}, {})
    helpers = object.__new__(Helpers)
    ours, theirs = multiprocessing.Pipe(duplex=False)
    process = SimpleNamespace(exitcode=code, join=lambda *_: None, terminate=lambda: None, is_alive=lambda: False)
    helpers._schedule, helpers._cells = schedule, {c.key: c for c in grid}
    helpers._processes, helpers._shown = {ours: process}, {}
    for words in said:
        theirs.send(words)
    theirs.close()
    try:
        helpers.listen(0)
    finally:
        helpers.close()
    return schedule


def test_what_a_process_says_is_passed_on(tmp_path):
    grid, progress = list(PLAN.cells(96)), Patient(lambda: True)
    cell = grid[-1]
    schedule = hearing(
        tmp_path, grid, progress, ("start", cell.key, 96), ("advance", 32), ("refuse", cell.key, "too small"), ("end",)
    )
    assert progress.samples == 32
    assert schedule.refused == {"tent": "too small"}
    assert schedule.settled == {cell.key}
    with pytest.raises(come.InputError, match="a bad image"):
        hearing(tmp_path, grid, progress, ("error", come.InputError("a bad image")))
    with pytest.warns(
        UserWarning, match=r"of this run failed \(RuntimeError: out of memory\); the others run its cells"
    ):
        hearing(tmp_path, grid, progress, ("end", "RuntimeError: out of memory"), code=1)
    with pytest.warns(UserWarning, match="take care"):
        hearing(tmp_path, grid, progress, ("warning", "take care"))


def test_progress_is_told_now_and_then():
    ours, theirs = multiprocessing.Pipe(duplex=False)
    reporter = Reporter(theirs.send)
    cell = next(PLAN.cells(96))
    reporter.start(cell, 96)
    for _ in range(96):
        reporter.advance(1)
    reporter.finish(cell, None, False)
    theirs.close()
    said = []
    with contextlib.suppress(EOFError):
        while True:
            said.append(ours.recv())
    assert sum(words[1] for words in said if words[0] == "advance") == 96
    assert len(said) <= 5
    assert said[-1] == ("finish", cell.key)
    ours.close()


def test_every_process_goes_through_all_cells_its_own_first():
    grid = list(PLAN.but(methods=("source", "tent", "sar"), seeds=(0, 1)).cells(96))
    orders = [order_for(grid, number, 3) for number in range(3)]
    assert all(sorted(c.key for c in order) == sorted(c.key for c in grid) for order in orders)
    assert len({order[0].pair for order in orders}) == 3
    assert orders[0][0].method == "sar"


def test_how_many_processes_where_nobody_says(monkeypatch):
    cpu, grid = torch.device("cpu"), list(Plan(methods=("tent", "sar")).cells(3000))
    small, large = torch.nn.Linear(10, 10), torch.nn.Linear(3000, 3000)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert automatic_jobs(small, cpu, grid) == 2
    assert automatic_jobs(large, cpu, grid) == 1
    assert automatic_jobs(small, cpu, grid[:1]) == 1  # not worth it
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert automatic_jobs(small, cpu, grid) == 1


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_ctrl_c_ends_all_of_them(tmp_path):
    command = [
        sys.executable,
        "-m",
        "come",
        "bench",
        "--methods",
        "source,tent",
        "--limit",
        "512",
        "--jobs",
        "2",
        "--out",
        str(tmp_path / "r"),
    ]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    until = time.monotonic() + 120
    while time.monotonic() < until and len(cells(tmp_path / "r")) < 1:
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 130
    assert error.strip() == "error: interrupted; finished cells are kept: run the same command to go on"
    until = time.monotonic() + 30
    while (left := _living(process.pid)) and time.monotonic() < until:
        time.sleep(0.05)
    assert not left


def _living(group):
    """Processes of a group."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.cmdline())
    return found
