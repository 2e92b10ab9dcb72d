"""One stream over several processes gives the trajectory of one process; a rank that is lost ends it with a clear error.

What each rank does is in `harness/ranked.py`. Its processes are started once.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import distributed as dist

import come
from come import testing
from come.model.ranks import Ranks

sys.path.append(str(Path(__file__).parent / "harness"))
import ranked

pytestmark = [
    pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="torch was built without gloo"),
    pytest.mark.skipif(sys.platform == "win32", reason="signals"),
]


ROUNDING = 1e-4
"""In float32 ranks add in another order than one process: how far that takes them apart depends on the processor (1.6e-5 was
seen). That they compute the same is shown in float64, to 1e-9."""


class Runs(NamedTuple):
    """Where the processes have left their files, how they have ended, and what each one says it has found."""

    folder: Path
    ended: list[int]
    found: dict[str, list[dict[str, object]]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    processes = []
    try:
        for rank in range(3):
            with (folder / f"log{rank}").open("w") as log:
                command = [sys.executable, ranked.__file__, str(rank), str(folder)]
                processes.append(subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment))
        ended = [process.wait(timeout=300) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    found = {file.stem: torch.load(file, weights_only=True) for file in sorted(folder.glob("*.pt"))}
    logs = "\n".join(file.read_text()[-2000:] for file in folder.glob("log*"))
    assert {f"equal{rank}" for rank in range(3)} <= found.keys(), logs
    return Runs(
        folder, ended, {what: [found.get(f"{what}{r}") for r in range(3)] for what in ("equal", "late", "killed")}
    )


def difference(a, b):
    """Largest difference, where the largest value is above 1 relative to it; 0 where both are NaN, or equal."""
    assert (a.shape, a.dtype) == (b.shape, b.dtype)
    a, b = a.double(), b.double()
    apart = torch.where((a == b) | (a.isnan() & b.isnan()), 0, (a - b).abs())
    size = b[b.isfinite()].abs().max().clamp_min(1) if b.isfinite().any() else 1
    return float((apart / size).max()) if a.numel() else 0.0


@pytest.mark.parametrize("case", ranked.CASES, ids=lambda case: case.name)
def test_ranks_give_the_trajectory_of_one_process(runs, case, record_property):
    one = ranked.trajectory(case.adapter(case.model(), False), case.batches())
    each = [found[case.name] for found in runs.found["equal"][: case.ranks]]
    worst = 0.0
    for t, expected in enumerate(one["steps"]):
        for name, value in expected.items():
            parts = [found["steps"][t][name] for found in each]
            if value is None:
                assert parts == [None] * case.ranks
                continue
            assert [len(part) for part in parts] == list(case.parts()[t])
            apart = difference(torch.cat(parts), value)
            assert apart == 0 or value.is_floating_point(), f"{name} of step {t}"
            worst = max(worst, apart)
    for found in each:
        assert ranked.same(found["state"], each[0]["state"])  # bit for bit
        assert found["state"].keys() == one["state"].keys()
        worst = max(worst, *(difference(value, one["state"][name]) for name, value in found["state"].items()))
        whole = {name for name, value in one["health"].items() if value == int(value)}
        assert {name: found["health"][name] for name in whole} == {name: one["health"][name] for name in whole}
    record_property("largest difference", worst)
    assert worst < (1e-9 if case.exact else ROUNDING)


def test_the_cases_are_what_they_are_meant_to_be(runs):
    """A rank that selects nothing beside one that does, a rank without samples, a collapse, a question to the source."""
    first = runs.found["equal"]
    for method in ("eata", "sar"):
        for case in (case for case in ranked.ISSUED if case.method == method):
            used = [[found[case.name]["steps"][t]["used"] for found in first[: case.ranks]] for t in range(5)]
            some = [[bool(part.any()) for part in parts if len(part)] for parts in used]
            assert any(any(each) and not all(each) for each in some), case.name
    health = {case.name: first[0][case.name]["health"] for case in ranked.CASES}
    assert all(health[case.name]["invalid_samples"] == 1 for case in ranked.ISSUED)
    assert health["tent-em-layer-2-lr=1.0-float64"]["collapse"] > 0
    assert health["tent-em-layer-2-lr=1.0-float64"]["recovered"] > 0


def test_every_method_runs_on_ranks_or_is_refused():
    assert {case.method for case in ranked.CASES} | set(ranked.UNDIVIDED) == set(come.methods.names())


def test_what_differs_between_ranks_is_refused_on_all_of_them(runs):
    all_ranks = [found["refused"] for found in runs.found["equal"]]
    words = {
        "foa": "ConfigError: foa cannot run on several ranks",
        "wrapped": "ConfigError: the ranks exchange gradients themselves; adapt the module in DistributedDataParallel",
        "other method": "ConfigError: rank 1 and rank 0 do not have the same method",
        "other model": "ConfigError: rank 2 and rank 0 do not have the same model",
        "hooks": "ConfigError: this method looks into the model with hooks",
        "bad input": "InputError: rank 1 cannot take its batch",
        "other shape": "InputError: the batches of the ranks differ",
        "empty": "InputError: the batch is empty on every rank",
        "other state": "StateError: the ranks have seen 2, 0 and 2 batches",
        "closed": "InputError: rank 1 cannot take its batch",
        "pass": "",
    }
    own = {
        "bad input": "InputError: the input must be floating point",
        "closed": "ClosedError: this eata adapter is closed",
    }
    for rank, found in enumerate(all_ranks):
        assert found.keys() == words.keys()
        for name, error in found.items():
            expected = own.get(name, words[name]) if rank == 1 else words[name]
            assert error.startswith(expected), (name, rank)
            assert bool(error) == bool(expected), (name, rank)


def test_errors_change_nothing_and_predicting_is_of_all_ranks(runs):
    found = runs.found["equal"]
    case = ranked.Case("eata", "come", "batch", 3)
    x, second, *_ = case.batches()
    one = case.adapter(case.model(), False)
    one.step(x)
    assert all(each["unchanged"] for each in found)
    assert difference(torch.cat([each["predicted"] for each in found]), one.predict(x)) < ROUNDING
    promise = one.calibrate(testing.batches(4), coverage=0.6, follow=True)
    step = one.step(second)
    assert difference(torch.cat([each["after"] for each in found]), step.logits) < ROUNDING
    assert all(abs(each["threshold"] - promise.threshold) < ROUNDING for each in found)
    assert torch.equal(torch.cat([each["abstain"] for each in found]), step.abstain)


def test_files_copies_and_other_ways_to_run(runs):
    folder, found = runs.folder, runs.found["equal"]
    assert sorted(file.name for file in folder.glob("[rs]*.safetensors")) == ["rank0.safetensors", "shared.safetensors"]
    numbers = [f"eata-{number:010d}.safetensors" for number in (3, 4)]
    assert sorted(file.name for file in (folder / "snapshots").iterdir()) == numbers
    for each in found:
        assert each["resumed"]
        assert each["copied"]
        assert ", ranks=3" in each["repr"]
        (said,) = each["compiled"]
        assert (
            said
            == "compile=True, tent: not compiled, since the ranks exchange statistics of the batch in BatchNorm layers"
        )


def test_statistics_that_know_nothing_of_ranks_are_of_the_whole_batch(runs):
    x = ranked.Case("eata", "come", "batch", 3).batches()[0]
    one = come.adapt(testing.TinyClassifier(testing.NORMS["batch"]), ranked.ByHalves(lr=0.1), guard=False)
    found = [each["by halves"] for each in runs.found["equal"]]
    assert difference(torch.cat(found), one.step(x).logits) < ROUNDING


FILES = {"killed": "dies", "late": "fails_in_the_backward"}


@pytest.mark.parametrize("what", FILES)
def test_a_lost_rank_ends_the_others_with_a_clear_error_and_a_state_that_resumes(runs, what):
    found = runs.found[what][: 3 if what == "killed" else 2]
    *others, last = found
    if what == "killed":
        assert runs.ended == [0, 0, -signal.SIGKILL]
        assert last is None
    else:
        assert last["error"] == "OSError: no room on this rank"
        assert last["again"].startswith("RankError: the ranks have lost each other (a step failed on rank 1: OSError)")
        assert last["waited again"] < 1
    for rank, each in enumerate(others):
        assert each["error"].startswith(f"RankError: rank {rank} of {len(found)} no longer reaches the others (")
        assert "load() the last snapshot on every rank" in each["error"]
        assert "\n" not in each["error"]
        assert each["again"].startswith("RankError: the ranks have lost each other")
        assert each["waited again"] < 1
        assert each["waited"] < (30 if what == "killed" else 30 + ranked.TIMEOUT)
    case = ranked.Case("cotta", "come", "batch", len(found))
    whole = case.adapter(case.model(), False)
    expected = [whole.step(x).logits for x in case.batches()]
    for rank, each in enumerate(found):
        if each is not None:
            assert each["unchanged"]
            resumed = case.adapter(case.model(), False)
            resumed.load(runs.folder / f"{FILES[what]}{rank}.safetensors")
            assert resumed.count == ranked.FAILS_AT
            for x, logits in zip(case.batches()[ranked.FAILS_AT :], expected[ranked.FAILS_AT :], strict=True):
                assert difference(resumed.step(x).logits, logits) < 1e-4


# ---- in one process ----


def test_without_a_process_group():
    model = testing.TinyClassifier(testing.NORMS["layer"])
    with pytest.raises(come.ConfigError, match="needs a process group: start the script with torchrun"):
        come.adapt(model, "tent", ranks=True)
    with pytest.raises(
        come.ConfigError, match=r"ranks must be True, False or a torch.distributed process group, got 3"
    ):
        come.adapt(model, "tent", ranks=3)


def test_one_rank_is_no_ranks():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert Ranks.of(True) is None
    finally:
        dist.destroy_process_group()
