"""Faults of the machine under a benchmark: the script `harness/faults.py`, with a small plan and few repetitions.

Every function of it raises unless each cell is there exactly once, with the numbers of an undisturbed run.
"""

from __future__ import annotations

import errno
import os
import random
import sys
from pathlib import Path

import pytest

import come
from come.bench import Plan, RunFolder
from come.state import files

sys.path.append(str(Path(__file__).parent / "harness"))  # the runners' processes import it by its name
import faults

PLAN = Plan(methods=("source", "tent"), objectives=("come",), corruptions=("fog", "contrast", "snow"), limit=16)

mounts = pytest.mark.skipif(not faults.can_mount(), reason="a tmpfs cannot be mounted here: that needs root")


@pytest.fixture(scope="module")
def ground(tmp_path_factory):
    return faults.Ground(PLAN, tmp_path_factory.mktemp("ground"), random.Random(0))


def test_kills_at_random_moments(ground):
    assert faults.kills(ground, 4, longest=1.0)["kills"] == 4


@pytest.mark.parametrize(
    "name",
    [
        "locks_for_everyone",
        "damaged",
        "exchanged",
        "marks",
        "manifests",
        "clock",
        "leftovers",
        pytest.param("full", marks=mounts),
        pytest.param("read_only", marks=mounts),
    ],
)
def test_fault(ground, name):
    assert faults.FAULTS[name](ground, 1)


def test_a_report_says_what_it_leaves_out(ground):
    out = ground.copy()
    key = min(ground.expected)
    path = out / "cells" / f"{key}.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    folder = RunFolder.existing(out)
    with pytest.warns(UserWarning, match=rf"left out: .*{key}\.safetensors does not hold rows.*run the same"):
        assert key not in {record.key for record in folder.records()}
    with pytest.raises(come.StateError, match=rf"{key}\.safetensors does not hold rows"):
        folder.rows(key)
    for damaged in out.glob("cells/*"):
        damaged.write_text("{}")
    with pytest.warns(UserWarning, match="left out") as told:
        assert folder.records() == []
    (warning,) = told  # not one for each
    assert f"({len(ground.expected)} cells are left out; this is the first)" in str(warning.message)


def test_a_copy_of_a_cell_under_another_name_is_not_a_second_cell(ground):
    out = ground.copy()
    whole = (out / "cells" / f"{min(ground.expected)}.safetensors").read_bytes()
    (out / "cells" / "copy.safetensors").write_bytes(whole)
    (out / "cells" / ".hidden.safetensors").write_bytes(whole)
    with pytest.warns(
        UserWarning, match=r"copy\.safetensors: checksum mismatch; run the same .*anew and keeps the others$"
    ):
        assert len(RunFolder.existing(out).records()) == len(ground.expected)


def test_cells_are_as_readable_as_other_files(ground, tmp_path):
    (tmp_path / "other").touch()
    modes = {path.stat().st_mode for path in (ground.whole / "cells").iterdir()}
    assert modes == {(tmp_path / "other").stat().st_mode}


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
    (folder.locks / f"{cell.key}.lock").mkdir()
    message = rf"cannot write the lock .*{cell.key}\.lock: .*finished cells are intact"
    with pytest.raises(come.StateError, match=message), folder.claim(cell):
        pass


def test_writers_of_one_file_do_not_touch_each_other(tmp_path):
    """The first to be done must not take away what the second is writing, or a dead one has left."""
    (tmp_path / ".a.0123456789abcdef.tmp").write_text("of a dead writer")
    with files.replacing(tmp_path / "a") as one:
        one.write_text("one")
        with files.replacing(tmp_path / "a") as two:
            two.write_text("two")
            assert len({one, two, *tmp_path.iterdir()}) == 3
        assert (tmp_path / "a").read_text() == "two"
        with pytest.raises(ZeroDivisionError), files.replacing(tmp_path / "a") as three:
            three.write_text(str(1 / 0))
        assert (one.read_text(), (tmp_path / "a").read_text()) == ("one", "two")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        "a": "one",
        ".a.0123456789abcdef.tmp": "of a dead writer",
    }


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
