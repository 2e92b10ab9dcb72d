"""Two runs side by side."""

from __future__ import annotations

import pytest
import torch

import come
from come.bench import Plan, RunFolder, run
from come.bench.compare import Change, _holm, compare_runs

PLAN = Plan(
    methods=("source", "tent"),
    objectives=("em",),
    corruptions=("contrast", "fog"),
    limit=96,
    batch_size=16,
    seeds=(0, 1),
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    run(PLAN, root / "a")
    run(Plan(**{**vars(PLAN), "hyper": {"tent": {"lr": 0.5}}}), root / "broken")
    return root


def test_a_run_is_like_itself(runs):
    changes = compare_runs(RunFolder.existing(runs / "a"), RunFolder.existing(runs / "a"))
    assert len(changes) == 4
    assert {(c.p, c.spread, c.before - c.after, c.fpr, c.verdict) for c in changes} == {(1.0, 0.0, 0.0, 0.0, "same")}
    assert {c.samples for c in changes} == {192}


def test_what_broke_is_found_and_nothing_else(runs):
    changes = compare_runs(RunFolder.existing(runs / "a"), RunFolder.existing(runs / "broken"))
    verdicts = {(c.method, c.domain): c.verdict for c in changes}
    assert verdicts["tent", "contrast"] == "worse"
    assert verdicts["source", "fog"] == verdicts["source", "contrast"] == "same"
    back = compare_runs(RunFolder.existing(runs / "broken"), RunFolder.existing(runs / "a"))
    assert {(c.method, c.domain): c.verdict for c in back}["tent", "contrast"] == "better"


def test_only_samples_that_both_saw_count(runs, tmp_path):
    run(Plan(**{**vars(PLAN), "limit": 64, "seeds": (0,)}), tmp_path / "short")
    changes = compare_runs(RunFolder.existing(runs / "a"), RunFolder.existing(tmp_path / "short"))
    assert {c.samples for c in changes} == {64}
    source = next(c for c in changes if c.method == "source")
    assert source.before == source.after
    assert source.spread is None


def test_runs_without_anything_in_common(runs, tmp_path):
    run(Plan(methods=("source",), corruptions=("snow",), limit=16), tmp_path / "other")
    with pytest.raises(come.InputError, match="in common"):
        compare_runs(RunFolder.existing(runs / "a"), RunFolder.existing(tmp_path / "other"))


def test_folders_that_are_no_runs(tmp_path):
    with pytest.raises(come.StateError, match="no run folder"):
        RunFolder.existing(tmp_path / "nothing")
    assert not (tmp_path / "nothing").exists()


def test_verdict_needs_more_than_chance_and_more_than_the_seeds():
    def change(p, spread, after):
        return Change("tent", "em", "fog", 100, 50.0, after, p, spread, 0.0).verdict

    assert change(0.001, None, 60.0) == "better"
    assert change(0.2, None, 60.0) == "same"
    assert change(0.001, 11.0, 60.0) == "same"
    assert change(0.001, 3.0, 40.0) == "worse"


def test_holm_never_decreases():
    p = {(str(i), "", ""): value for i, value in enumerate([0.5, 0.01, 0.02, 0.9])}
    corrected = _holm(p)
    order = sorted(p, key=p.get)
    values = [corrected[key] for key in order]
    assert values == sorted(values)
    assert max(values) <= 1.0
    assert corrected["1", "", ""] == pytest.approx(0.04)


def test_records_come_in_the_papers_order(runs):
    records = RunFolder.existing(runs / "a").records()
    assert [(r.cell["method"], r.cell["seed"], r.cell["corruptions"][0]) for r in records] == [
        (method, seed, corruption)
        for method in ("source", "tent")
        for seed in (0, 1)
        for corruption in ("fog", "contrast")
    ]
    assert torch.equal(
        RunFolder(runs / "a").rows(records[0].key)["label"], RunFolder(runs / "a").rows(records[4].key)["label"]
    )
