"""The paper's tables and figures: the right grid for each, and numbers in the right places."""

from __future__ import annotations

import sys

import pytest

import come
from come import corruptions
from come.bench import Cell, Record, RunFolder, cli, paper, run
from come.bench.paper import experiments
from come.bench.paper.agreement import Comparison, Line, compare
from come.bench.paper.experiments import EXPERIMENTS, comparable
from come.bench.record import Machine, Result
from come.bench.statistics import Judged, Verdict, verdicts


def test_every_table_of_the_paper_is_regenerated_by_something():
    assert {table for e in EXPERIMENTS.values() for table in e.tables} == set(paper.names())


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_plan_is_the_papers(name):
    experiment = EXPERIMENTS[name]
    small = experiment.plan()
    assert small.data == "fashion"
    assert small.limit == 1000
    assert small.model == ("fashion-resnet-bn" if "resnet" in name else "fashion-vit")
    outliers = ("folder:textures",) if small.setting == "open-world" else None
    full = experiment.plan(data="imagenet-c:/x", outliers=outliers)
    assert full.limit is None
    assert full.model == ("timm:resnet50" if "resnet" in name else "timm:vit_base_patch16_224")
    assert comparable(full, experiment)
    assert not comparable(small, experiment)
    if full.setting in ("standard", "lifelong", "imbalanced", "mixed"):
        assert full.corruptions == corruptions.names("standard")
    if full.setting == "open-world":
        assert (full.corruptions, full.severity) == (("gaussian_noise",), 3)
        assert full.outlier_ratio == (0.3 if name == "openworld-0.3" else 0.5)
    for table in experiment.tables:
        rows = {(row.method, row.objective) for row in paper.get(table).rows if row.method != "average"}
        cells = {(cell.method, cell.objective) for cell in full.cells(10)}
        assert rows <= cells, f"{table} has rows that the plan does not make"


def test_options_win():
    plan = experiments.get("ablation").plan(limit=10, seeds=(1, 2), model="fashion-resnet-bn", methods=None)
    assert (plan.limit, plan.seeds, plan.model, plan.methods) == (10, (1, 2), "fashion-resnet-bn", ("tent",))
    assert len(plan.objectives) == 4


def test_unknown_name():
    with pytest.raises(come.ConfigError, match="did you mean 'ablation'"):
        experiments.get("ablaton")


def record(method, objective, metrics, setting="standard", **result):
    cell = Cell(method=method, objective=objective, setting=setting, size=10)
    known = {"seconds": 1.0, "peak_memory_mb": 100.0, "samples": 10} | result
    domains = {"domains": tuple(metrics), "fresh": (True,) * len(metrics), "metrics": metrics}
    machine = Machine(versions={}, device="cpu", threads=1, load=0.0)
    return Record(cell=cell, result=Result(**domains, **known), machine=machine)


def test_columns_and_averages_are_laid_beside_each_other():
    table = paper.get("standard")
    records = [
        record("tent", "em", {"fog": {"accuracy": 0.5, "fpr": 0.7}, "snow": {"accuracy": 0.1, "fpr": 0.9}}),
        record("tent", "come", {"fog": {"accuracy": 0.6, "fpr": 0.6}, "snow": {"accuracy": 0.4, "fpr": 0.8}}),
    ]
    found = {(c.domain, c.metric): c for c in compare(table, records, Judged())}
    assert set(found) == {("fog", "accuracy"), ("snow", "accuracy"), ("average", "accuracy"), ("average", "fpr")}
    fog = {(line.method, line.objective): line for line in found["fog", "accuracy"].lines}
    assert (fog["tent", "em"].paper, fog["tent", "em"].measured) == (67.2, 50.0)
    assert fog["sar", "em"].measured is None
    average = found["average", "accuracy"]
    assert average.changes() == [("tent", pytest.approx(8.4), pytest.approx(20.0))]
    assert average.agreement() == [
        "Cannot be told from this run, gain in accuracy of COME over EM: tent (paper +8.4, here +20.0)."
    ]


def test_the_change_of_fpr_is_also_said_by_one_score():
    metrics = {"fog": {"accuracy": 0.5, "fpr": 0.7}}
    records = [record("tent", objective, metrics) for objective in ("em", "come")]
    changes = {
        ("tent", "come", "average", metric): Verdict(metric, 70.0, after, error=1.0, p=p, by_seed=(after - 70,))
        for metric, after, p in (("accuracy", 75.0, 0.0), ("fpr", 65.0, 0.0), ("fpr_softmax", 69.5, 0.6))
    } | {("sar", "come", "average", "fpr_softmax"): Verdict("fpr_softmax", reason="other samples")}
    said = {
        c.metric: c.agreement()[-1]
        for c in compare(paper.get("standard"), records, Judged(changes))
        if c.domain == "average"
    }
    assert said["fpr"] == "With EM and COME both by softmax, the gain in FPR is: tent +0.5 (no difference found)."
    assert "softmax" not in said["accuracy"]


def test_lifelong_fpr_is_over_everything_so_far():
    metrics = {"fog": {"accuracy": 0.5, "fpr": 0.7, "fpr_so_far": 0.2}}
    found = compare(paper.get("lifelong-fpr"), [record("tent", "em", metrics, "lifelong")], Judged())
    line = next(line for c in found if c.domain == "fog" for line in c.lines if line.measured is not None)
    assert line.measured == pytest.approx(20.0)


def test_cost_is_relative_to_no_adapt():
    records = [
        record("source", "em", {"fog": {"accuracy": 0.5, "fpr": 0.5}}, seconds=2.0, peak_memory_mb=50.0),
        record("tent", "em", {"fog": {"accuracy": 0.5, "fpr": 0.5}}, seconds=5.0, peak_memory_mb=200.0),
    ]
    found = {c.metric: c for c in compare(paper.get("cost"), records, Judged()) if c.domain == "stream"}
    tent = next(line for line in found["memory_mb"].lines if line.method == "tent")
    assert (tent.paper, tent.measured) == (pytest.approx(6393 / 853), 4.0)
    assert next(line for line in found["seconds"].lines if line.method == "tent").measured == 2.5


def test_what_agrees_with_the_paper_is_said_in_plain_words():
    def comparison(*rows, **verdicts):
        return Comparison("t", "average", "accuracy", tuple(Line(*row) for row in rows), verdicts)

    rows = [("a", "em", 50, 60), ("a", "come", 55, 66), ("b", "em", 40, 50), ("b", "come", 41, 45), ("c", "em", 1, 1),
            ("c", "come", 1.2, 3), ("d", "em", 20, 20), ("d", "come", 22, 22.1)]  # fmt: skip
    clear = Verdict("accuracy", 60.0, 66.0, error=1.0, p=0.001)
    unclear = Verdict("accuracy", 20.0, 22.1, error=2.6 / 1.96, p=0.1)
    said = comparison(*rows, a=clear, b=clear, c=clear, d=unclear).agreement()
    assert said[0] == "Agrees with the paper, gain in accuracy of COME over EM: a (paper +5.0, here +6.0)."
    assert said[1] == "Contradicts the paper, gain in accuracy of COME over EM: b (paper +1.0, here -5.0)."
    assert said[2] == (
        "Cannot be told from this run, gain in accuracy of COME over EM: c (paper +0.2, here +2.0: the paper calls less than "
        "0.5 no change), d (paper +2.0, here +2.1, 95% interval -0.5 to +4.7)."
    )
    assert said[3] == "Order of the 8 rows: rank correlation +0.98 (more than chance)."
    assert comparison(("a", "em", 1, 2), ("a", "come", 2, 3)).agreement() != []
    assert comparison(("a", "em", 1, 1), ("b", "em", 1, 1), ("c", "em", 1, 1)).agreement() == []
    assert comparison().agreement() == []


def test_the_ablation_end_to_end(tmp_path):
    plan = experiments.get("ablation").plan(limit=64, corruptions=("fog", "contrast"))
    records = run(plan, tmp_path / "run")
    found = compare(paper.get("ablation"), records, verdicts(RunFolder(tmp_path / "run"), records))
    assert {(c.domain, c.metric) for c in found} == {(d, m) for d in ("average", "worst") for m in ("accuracy", "fpr")}
    assert all(line.measured is not None for c in found for line in c.lines)
    worst = next(c for c in found if (c.domain, c.metric) == ("worst", "accuracy"))
    average = next(c for c in found if (c.domain, c.metric) == ("average", "accuracy"))
    assert all(w.measured <= a.measured for w, a in zip(worst.lines, average.lines, strict=True))


LIKE_OTHERS = ("openworld-0.3", "openworld-resnet")  # those of another with a number or a model changed


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in LIKE_OTHERS else name for name in EXPERIMENTS]
)
def test_every_table_and_figure_runs_to_its_end(name, tmp_path, monkeypatch, capsys):
    """Tiny, but whole: grid, table, the paper beside it, report and figures."""
    experiment = EXPERIMENTS[name]
    size = "14" if name == "openworld-0.3" else "7"  # no batch is too small for LAME
    tiny = ["--data", "fashion:20", "--limit", size, "--batch-size", "7", "--out", str(tmp_path / "run")]
    plan = experiment.plan()
    if plan.setting not in ("open-world", "in-distribution"):
        tiny += ["--corruptions", "fog,contrast" if plan.setting in ("lifelong", "mixed") else "fog"]
    methods = plan.methods
    if len(methods) > 6 and name != "standard":  # the slow ones run there
        methods = ("source", "t3a", "tent", "eata", "sar")
        tiny += ["--methods", ",".join(methods)]
    if "eata" in methods:
        tiny += ["--source-size", "8"]
    monkeypatch.setattr(sys, "argv", ["come", "reproduce", name, *tiny])
    monkeypatch.setenv("COLUMNS", "80")
    cli.main()
    out = capsys.readouterr().out
    assert max(len(line) for line in out.splitlines() if str(tmp_path) not in line) <= 80
    records = RunFolder.existing(tmp_path / "run").records()
    assert {r.cell.method for r in records} == set(methods)
    assert (tmp_path / "run" / "report.html").stat().st_size > 10_000
    for table in experiment.tables:
        written = (tmp_path / "run" / "paper.md").read_text()
        assert f"## {table}: " in written
    if not experiment.tables:
        assert list((tmp_path / "run" / "figures").glob("*.pdf"))
