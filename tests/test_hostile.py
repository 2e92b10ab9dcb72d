"""Run folders, manifests and configuration files of others, tampered with, through the command line: `harness/hostile.py`.

Every sixth case meets a quick command, every third one in `pytest -m slow`, and some meet a slow command; the script runs
every case with all of its commands.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent / "harness"))
import hostile

SLOW = ("page", "figures", "bench", "dry")


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    return hostile.finished_run(tmp_path_factory.mktemp("hostile") / "good")


@pytest.mark.parametrize("every", [6, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("group", hostile.GROUPS)
def test_one_sentence_or_left_out(good, group, every):
    def one(number, case):
        quick = [name for name in case.commands if name not in SLOW]
        turn = number // every if number % every == 0 or group == "files" else None
        return () if turn is None or not quick else (quick[turn % len(quick)],)

    found, wrong = hostile.count(group, good, one)
    print(f"{group}: {found.total()} tampered cases: {dict(found)}")
    assert not wrong, "\n".join(wrong)
    assert found.total() > {"cells": 750 // every, "files": 80, "given": 450 // every}[group]
    assert not found.keys() - {"left out", "refused", "accepted"}


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("page", "domain: script"),
        ("page", "rows: outliers only"),
        ("page", "report.html: a link to a file beside"),
        ("figures", "figures: a link to a folder beside"),
        ("figures", "figures/*.svg: links to a file beside"),
        ("bench", "report.md: a link to a file beside"),
        ("bench", "run.json: a FIFO"),
        ("bench", "locks: a link to a folder beside"),
        ("bench", "lock of a cell to be run: a link to a new file beside"),
        ("bench", "cell of a cell to be run: a link to a file beside"),
        ("bench", "stream of a cell to be run: a FIFO"),
    ],
)
def test_what_is_written_stays_in_the_folder(good, command, name):
    (case,) = (case for cases in hostile.GROUPS.values() for case in cases() if case.name == name)
    end = hostile.ended(case, command, good)
    assert not end.wrong
    assert end.how in ("refused", "accepted")
