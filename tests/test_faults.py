"""Faults of the machine under a benchmark: the script `benchmarks/faults.py`, with a small plan and few repetitions.

Every function of it raises unless each cell is there exactly once, with the numbers of an undisturbed run.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import random
import sys
from pathlib import Path

import pytest

import come
from come import files
from come.bench import Plan, RunFolder

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))  # the runners' processes import it by its name
import faults

PLAN = Plan(methods=("source", "tent"), objectives=("come",), corruptions=("fog", "contrast", "snow"), limit=16)

mounts = pytest.mark.skipif(not faults.can_mount(), reason="a tmpfs cannot be mounted here: that needs root")


@pytest.fixture(scope="module")
def ground(tmp_path_factory):
    return faults.Ground(PLAN, tmp_path_factory.mktemp("ground"), random.Random(0))


def test_kills_at_random_moments(ground):
    (row,) = faults.kills(ground, 8, longest=1.0)
    assert row.times == 8


@pytest.mark.parametrize(
    "name",
    [
        "damaged",
        "marks",
        "clock",
        "leftovers",
        pytest.param("full", marks=mounts),
        pytest.param("read_only", marks=mounts),
    ],
)
def test_fault(ground, name):
    assert all(row.times for row in faults.FAULTS[name](ground, 1))


def test_a_report_says_what_it_leaves_out(ground):
    out = ground.copy()
    key = min(ground.expected)
    path = out / "cells" / f"{key}.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    folder = RunFolder.existing(out)
    with pytest.warns(UserWarning, match=f"left out: .*{key}.safetensors: checksum mismatch.*run the same"):
        assert key not in {record.key for record in folder.records()}
    with pytest.raises(come.StateError, match=f"cannot read the rows of cell {key}: .*checksum mismatch"):
        folder.rows(key)
    for damaged in out.glob("cells/*.json"):
        damaged.write_text("{}")
    with pytest.warns(UserWarning, match="left out") as told:
        assert folder.records() == []
    (warning,) = told  # not one for each
    assert f"({len(ground.expected)} cells are left out; this is the first)" in str(warning.message)


def test_a_copy_of_a_record_under_another_name_is_not_a_second_cell(ground):
    out = ground.copy()
    key = min(ground.expected)
    for suffix in (".json", ".safetensors"):
        (out / "cells" / f"copy{suffix}").write_bytes((out / "cells" / f"{key}{suffix}").read_bytes())
    with pytest.warns(UserWarning, match=r"copy\.json"):
        assert len(RunFolder.existing(out).records()) == len(ground.expected)


def test_records_without_checksums_count_as_they_did(ground):
    """Runs from before there were checksums."""
    out = ground.copy()
    for record in RunFolder.existing(out).records():
        old = {name: value for name, value in vars(record).items() if name not in ("rows", "sha256")}
        (out / "cells" / f"{record.key}.json").write_text(json.dumps(old))
    broken = out / "cells" / f"{min(ground.expected)}.safetensors"
    broken.write_bytes(broken.read_bytes()[:-1])
    last, _ = ground.finish(out)
    assert last.started == [broken.stem]


def test_rows_are_as_readable_as_records(ground):
    modes = {path.stat().st_mode & 0o777 for path in (ground.whole / "cells").iterdir()}
    assert len(modes) == 1


def test_a_lock_whose_file_was_removed_is_not_one(tmp_path, monkeypatch):
    """The last holder may remove the file after we opened it and before we lock it; others would lock the next one."""
    folder = RunFolder(tmp_path)
    cell = next(PLAN.cells(16))
    flock, calls = fcntl.flock, []

    def late(handle, how):
        calls.append(handle)
        if len(calls) == 1:
            (folder.cells / f"{cell.key}.lock").unlink()
        flock(handle, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with folder.claim(cell) as mine, folder.claim(cell) as another:
        assert mine
        assert not another


def test_an_error_within_a_claim_is_passed_on_and_frees_the_cell(tmp_path):
    folder = RunFolder(tmp_path)
    cell = next(PLAN.cells(16))
    with pytest.raises(OSError, match="of the data"), folder.claim(cell):
        raise OSError("of the data")
    with folder.claim(cell) as mine:
        assert mine


def test_a_lock_that_cannot_be_made_is_named(tmp_path):
    folder = RunFolder(tmp_path)
    cell = next(PLAN.cells(16))
    (folder.cells / f"{cell.key}.lock").mkdir()
    message = rf"cannot write the lock .*{cell.key}\.lock: .*finished cells are intact"
    with pytest.raises(come.StateError, match=message), folder.claim(cell):
        pass


def test_names_are_flushed_after_the_rename(tmp_path, monkeypatch):
    done = []
    replace_, fsync = os.replace, os.fsync
    monkeypatch.setattr(os, "replace", lambda a, b: (done.append("rename"), replace_(a, b)))
    monkeypatch.setattr(
        os, "fsync", lambda handle: (done.append("folder" if is_folder(handle) else "file"), fsync(handle))
    )
    with files.replacing(tmp_path / "a") as beside:
        beside.write_text("whole")
    assert done == ["file", "rename", "folder"]


def is_folder(handle):
    return os.path.isdir(f"/proc/self/fd/{handle}")


@pytest.mark.parametrize(("number", "fails"), [(errno.EINVAL, False), (errno.EIO, True)])
def test_a_folder_that_cannot_be_flushed(tmp_path, monkeypatch, number, fails):
    def fsync(handle):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fsync)
    if fails:
        with pytest.raises(OSError, match="Input/output"):
            files.settle(tmp_path)
    else:
        files.settle(tmp_path)
