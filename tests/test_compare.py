"""Two runs side by side."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
from rich.console import Console

import come
from come.bench import Plan, RunFolder, run
from come.bench.compare import compare_runs, shown_changes

sys.path.append(str(Path(__file__).parent / "harness"))
from made_up import add, grid, rows_of

PLAN = {
    "model": "fashion-vit",
    "objectives": ("em",),
    "corruptions": ("contrast", "fog"),
    "limit": 96,
    "batch_size": 16,
    "seeds": (0, 1),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    run(Plan(methods=("source", "tent"), **PLAN), root / "a")
    run(Plan(methods=("source", "tent"), **PLAN, hyper={"tent": {"lr": 0.5}}, guard=False), root / "broken")
    return {name: RunFolder.existing(root / name) for name in ("a", "broken")}


def said(comparison, **more):
    console = Console(width=160, record=True, file=io.StringIO())
    for part in shown_changes(comparison, **more):
        console.print(part)
    return " ".join(console.export_text().split())


def by_row(comparison, metric="accuracy"):
    return {(c.method, c.domain): c.verdicts[metric] for c in comparison.changes}


def test_a_run_is_like_itself(runs):
    found = compare_runs(runs["a"], runs["a"])
    assert {(c.method, c.domain) for c in found.changes} == {
        (method, domain) for method in ("source", "tent") for domain in ("contrast", "fog", "average")
    }
    for change in found.changes:
        for verdict in change.verdicts.values():
            assert (verdict.gain, verdict.p, verdict.claim) == (0.0, 1.0, "no difference found")
    assert (found.differing, found.alone) == ([], (0, 0))
    assert "accuracy: 0 better, 0 worse, 6 without a difference, 0 not comparable, of 6 rows" in said(found)


def test_what_broke_is_found_and_nothing_else(runs):
    found = by_row(compare_runs(runs["a"], runs["broken"]))
    assert found["tent", "contrast"].change == found["tent", "average"].change == "worse"
    assert found["source", "fog"].change == found["source", "contrast"].change == "same"
    assert by_row(compare_runs(runs["broken"], runs["a"]))["tent", "contrast"].change == "better"
    assert "differs: hyper of tent: {} and {'lr': 0.5}" in said(compare_runs(runs["a"], runs["broken"]))


def test_streams_of_different_length_are_not_compared(tmp_path):
    first, second = grid(tmp_path / "a", (("tent", "em"),)), RunFolder(tmp_path / "b")
    add(second, "tent", "em", ("fog",), size=100)
    add(second, "tent", "em", ("contrast",))
    found = compare_runs(first, second)
    rows = by_row(found)
    assert rows["tent", "fog"].reason == "streams of 200 and 100 samples are not compared"
    assert not rows["tent", "contrast"].reason
    assert "not comparable: streams of 200 and 100 samples are not compared" in said(found)
    assert "1 without a difference, 2 not comparable, of 3 rows" in said(found)
    assert "differs: size: 200 and 100" in said(found)


def test_other_samples_of_the_same_number_are_not_compared(tmp_path):
    first, second, rows = RunFolder(tmp_path / "a"), RunFolder(tmp_path / "b"), rows_of(0.6)
    add(first, "tent", "em", rows=rows)
    add(second, "tent", "em", rows={**rows, "index": rows["index"] + 5})
    assert by_row(compare_runs(first, second))["tent", "fog"].reason == "the two streams hold different samples"


def test_a_domain_of_one_run_only_is_said(tmp_path):
    first, second = RunFolder(tmp_path / "a"), RunFolder(tmp_path / "b")
    record = add(first, "tent", "em", ("fog", "snow"))
    other = record.result.model_copy(update={"domains": ("fog", "rain"), "metrics": {"fog": {}, "rain": {}}})
    second.write(record.model_copy(update={"result": other}), first.rows(record.key))
    rows = by_row(compare_runs(first, second), "fpr")
    assert {domain: verdict.reason for (_, domain), verdict in rows.items()} == {
        "fog": "", "snow": "only one run has this domain", "rain": "only one run has this domain"
    }  # fmt: skip


def test_accuracy_and_fpr_with_their_intervals(tmp_path):
    first, second = RunFolder(tmp_path / "a"), RunFolder(tmp_path / "b")
    add(first, "tent", "em", right=0.4)
    add(second, "tent", "em", right=0.9)
    found = compare_runs(first, second)
    text = said(found)
    for change in found.changes:
        for verdict in change.verdicts.values():
            assert f"{verdict.points} {verdict.low:+.1f} to {verdict.high:+.1f}" in text
    assert "better (one seed)" in text
    assert "other orders of the stream may give another result" in text


def test_rows_are_corrected_together(tmp_path):
    """A difference that is just found alone is not among forty rows in which nothing happened."""
    first, second = RunFolder(tmp_path / "a"), RunFolder(tmp_path / "b")
    before, after = rows_of(0.5), rows_of(0.5)
    wrong = (before["prediction"] != before["label"]).nonzero()[:8, 0]
    after["prediction"][wrong] = after["label"][wrong]
    add(first, "tent", "em", ("fog",), rows=before)
    add(second, "tent", "em", ("fog",), rows=after)
    assert by_row(compare_runs(first, second))["tent", "fog"].found
    for i in range(40):
        for folder in (first, second):
            add(folder, "source", "em", (f"domain {i}",))
    verdict = by_row(compare_runs(first, second))["tent", "fog"]
    assert not verdict.found
    assert verdict.low > 0  # the interval is of the row alone


def test_fields_that_users_change_pair_and_are_said(tmp_path):
    first = grid(tmp_path / "a", (("tent", "em"),))
    second = grid(tmp_path / "b", (("tent", "em"),), guard=False, model="fashion-vit", checkpoint="w.safetensors")
    text = said(compare_runs(first, second))
    for words in (
        "guard: True and False",
        "model: fashion-resnet-bn and fashion-vit",
        "checkpoint: None and w.safetensors",
    ):
        assert f"differs: {words}" in text


@pytest.mark.parametrize(
    "other", [{"severity": 3}, {"batch_size": 16}, {"data": "x"}, {"seed": 1}, {"outlier_ratio": 0.3}]
)
def test_fields_of_the_stream_must_agree(tmp_path, other):
    first, second = RunFolder(tmp_path / "a"), RunFolder(tmp_path / "b")
    add(first, "tent", "em")
    add(second, "tent", "em", **other)
    with pytest.raises(come.InputError, match="have no cell in common"):
        compare_runs(first, second)


def test_cells_of_one_run_only_are_counted(tmp_path):
    first, second = grid(tmp_path / "a", (("tent", "em"),)), grid(tmp_path / "b", (("tent", "em"),), ("fog",))
    assert "left out: 1 cells of the first run only, 0 of the second" in said(compare_runs(first, second))


def test_a_folder_with_two_plans_is_refused(tmp_path):
    first, second = RunFolder(tmp_path / "a"), grid(tmp_path / "b", (("tent", "em"),), ("fog",))
    add(first, "tent", "em")
    add(first, "tent", "em", guard=False)
    with pytest.raises(
        come.InputError, match=r"two cells of tent \+ em on the same stream \(guard: .*give each plan its own"
    ):
        compare_runs(first, second)


@pytest.mark.parametrize(
    ("machine", "reason"),
    [
        ({"device": "cuda: H200"}, "they ran on different devices: cpu: test, cuda: H200"),
        ({"threads": 4}, "they ran on different numbers of threads: 1, 4"),
        ({"load": 1.0}, "other programs kept 0.00 cores busy during some of them and 1.00 during others"),
    ],
)
def test_costs_of_other_machines_are_not_compared(tmp_path, machine, reason):
    first = grid(tmp_path / "a", (("tent", "em"),))
    text = said(compare_runs(first, grid(tmp_path / "b", (("tent", "em"),), **machine)))
    assert f"Costs are not compared: {reason}." in text
    assert "ms per image" not in text


def test_costs_of_one_machine_are_compared(tmp_path):
    first = grid(tmp_path / "a", (("tent", "em"),))
    second = grid(tmp_path / "b", (("tent", "em"),), seconds=5.5, peak_memory_mb=450.0, load=0.5)
    assert "tent + em 12.50 → 25.00 2.00 900 → 450 0.50" in said(compare_runs(first, second))


def test_folders_that_are_no_runs(tmp_path):
    with pytest.raises(come.StateError, match="no run folder"):
        RunFolder.existing(tmp_path / "nothing")
    assert not (tmp_path / "nothing").exists()
