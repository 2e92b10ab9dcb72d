"""One score at a time: FPR as published and by one score for all, in rows, tables, verdicts, pages and on the command line."""

import csv
import io
import json
import sys
from pathlib import Path
from statistics import fmean

import pytest
import torch
from calling import call
from rich.console import Console

import come
from come.bench import RunFolder
from come.bench.compare import compare_runs
from come.bench.data import Batch
from come.bench.measure import Table as RowTable
from come.bench.report import results_table, to_csv, to_json, to_latex, to_markdown, to_rich, write_html, write_report
from come.bench.report.findings import extremes, headline
from come.bench.statistics import verdicts
from come.method import Step
from come.metrics import SCORES, fpr

sys.path.append(str(Path(__file__).parent / "harness"))
from made_up import PAIRS, add

DOMAINS = ("fog", "contrast")
NAMED = [name for name in SCORES if name != "confidence"]


def rows_of(objective, seed, n=400, classes=10):
    """Rows of a model whose logits have another norm for each sample, so that scores rank differently."""
    draw = torch.Generator().manual_seed(seed)
    logits = torch.randn(n, classes, generator=draw) * (0.3 + 3 * torch.rand(n, 1, generator=draw))
    label = torch.arange(n) % classes
    said = torch.where(torch.rand(n, generator=draw) < 0.6, label, (label + 1) % classes)
    largest, place = logits.max(dim=1)
    logits[torch.arange(n), place] = logits[torch.arange(n), said]
    logits[torch.arange(n), said] = largest
    return table_of(objective, logits, label), logits


def table_of(objective, logits, label):
    """What a run keeps of these logits."""
    table, n = RowTable(come.objectives.get(objective)), len(logits)
    table.add(Step(logits), Batch(torch.zeros(n, 1), label, torch.arange(n), torch.zeros(n, dtype=torch.int64)), 0)
    return table.rows()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = RunFolder(tmp_path_factory.mktemp("scores") / "run")
    for k, (method, objective) in enumerate(PAIRS):
        for seed in (0, 1):
            for i, domain in enumerate(DOMAINS):
                rows, _ = rows_of(objective, seed + 2 * i + 10 * k)
                add(folder, method, objective, (domain,), seed=seed, rows=rows, size=400)
    return folder


def expected(folder, pair, score, domain=None):
    """FPR in percent by `come.metrics` alone: over the rows of each cell, then over cells."""
    found = []
    for record in folder.records():
        if record.cell.pair == pair and domain in (None, *record.result.domains):
            rows = folder.rows(record.key)
            found.append(100 * fpr(SCORES[score](rows), rows["prediction"] == rows["label"]))
    return pytest.approx(fmean(found), abs=1e-9)


def lines_of(table):
    return {
        (row.method, row.ran_with, row.score): dict(zip(table.keys, row.entries, strict=True)) for row in table.rows
    }


# ---- rows ----


@pytest.mark.parametrize("objective", ["em", "come", "come:tau=2.0"])
def test_rows_hold_each_score_of_the_logits_alone(objective):
    rows, logits = rows_of(objective, 0)
    em, opinion = come.objectives.get("em"), come.objectives.get("come")
    assert torch.equal(rows["confidence"], come.objectives.get(objective).confidence(logits))
    assert torch.equal(rows["softmax"], em.confidence(logits))
    assert torch.equal(rows["belief"], opinion.confidence(logits))
    assert torch.equal(rows["uncertainty"], opinion.uncertainty(logits))


def test_u_ranks_as_the_energy_does():
    rows, _ = rows_of("come", 0)
    assert torch.equal(SCORES["u"](rows).argsort(stable=True), SCORES["energy"](rows).argsort(stable=True))


def test_a_broken_sample_is_the_least_certain_by_every_score():
    logits = torch.randn(8, 5, generator=torch.Generator().manual_seed(0))
    logits[3] = float("nan")
    rows = table_of("come", logits, torch.zeros(8, dtype=torch.int64))
    assert {name: int(score(rows).argmin()) for name, score in SCORES.items()} == dict.fromkeys(SCORES, 3)


# ---- tables ----


def test_both_columns_are_what_the_metrics_find_in_the_rows(run):
    table = results_table(run.records())
    assert table.columns == ("Fog", "Contr.", "Acc↑", "FPR↓", "FPR softmax↓")
    for (method, objective, score), line in lines_of(table).items():
        if objective and not score:
            own = {"em": "softmax", "come": "belief"}[objective]
            assert line["average", "fpr"].mean == expected(run, (method, objective), own)
            assert line["average", "fpr_softmax"].mean == expected(run, (method, objective), "softmax")
            assert (line["average", "fpr"] == line["average", "fpr_softmax"]) == (objective == "em")


def test_the_difference_is_shown_for_both(run):
    lines = lines_of(results_table(run.records()))
    for metric in ("fpr", "fpr_softmax"):
        em, better = (round(lines["tent", objective, ""]["average", metric].mean, 1) for objective in ("em", "come"))
        assert lines["tent", "", ""]["average", metric].mean == pytest.approx(em - better, abs=1e-6)


@pytest.mark.parametrize("score", NAMED)
def test_any_score_for_all(run, score):
    records = run.rescored(run.records(), score)
    for metric in ("accuracy", "fpr"):
        table = results_table(records, metric=metric)
        assert table.columns[-1] == f"FPR {score}↓"
        assert [key for key in table.keys if key[0] == "average" and key[1] != "accuracy"] == [("average", "fpr")]
        for (method, objective, again), line in lines_of(table).items():
            assert not again
            if objective:
                assert line["average", "fpr"].mean == expected(run, (method, objective), score)
    assert f'"score": "{score}"' in to_json(table)
    assert f"tent,come,fog,fpr,{score}," in to_csv(table)


def test_the_source_has_a_second_line_by_belief(run):
    table = results_table(run.records(), metric="fpr")
    names = [row.name for row in table.rows]
    assert names[:3] == ["source", "  by belief", "tent + em"]
    line = lines_of(table)["source", "em", "belief"]
    for domain in DOMAINS:
        assert line[domain, "fpr"].mean == expected(run, ("source", "em"), "belief", domain)
    assert line["average", "fpr"].mean == expected(run, ("source", "em"), "belief")
    assert line["average", "fpr_softmax"] is None
    small = lines_of(results_table(run.records()))["source", "em", "belief"]
    assert [key for key, entry in small.items() if entry is not None] == [
        ("average", "fpr")
    ]  # the accuracy is the same


def test_the_second_line_stands_where_belief_is_another_score(run):
    records = run.records()
    assert "by belief" not in to_markdown(results_table(run.rescored(records, "belief")))
    assert "by belief" not in to_markdown(results_table([r for r in records if r.cell.objective == "em"]))
    assert "by belief" not in to_markdown(results_table([r for r in records if r.cell.method != "source"]))
    assert "by belief" not in to_markdown(results_table(records, metric="fpr_softmax"))


def test_every_format_has_both_and_the_source_by_belief(run):
    table = results_table(run.records())
    numbers = list(csv.DictReader(io.StringIO(to_csv(table))))
    found = {
        (n["method"], n["objective"], n["score"]): float(n["mean"])
        for n in numbers
        if (n["domain"], n["metric"]) == ("average", "fpr")
    }
    assert found["tent", "come", "confidence"] == expected(run, ("tent", "come"), "belief")
    assert found["tent", "come", "softmax"] == expected(run, ("tent", "come"), "softmax")
    assert found["source", "em", "belief"] == expected(run, ("source", "em"), "belief")
    assert len(found) == 2 * len(PAIRS) + 1
    assert {n["score"] for n in numbers if n["metric"] == "accuracy"} == {""}
    assert [list(map(str, n.values())) for n in json.loads(to_json(table))["numbers"]] == [
        list(n.values()) for n in numbers
    ]
    by_belief = str(lines_of(table)["source", "em", "belief"]["average", "fpr"])
    assert f"|by belief||||{by_belief}||" in to_markdown(table)
    assert r"\quad by belief &  &  &  & " + by_belief.replace("±", r"$\pm$") + r" &  \\" in to_latex(table)
    assert r"FPR softmax$\downarrow$" in to_latex(table)


def test_the_table_fits_a_terminal_of_80_columns(run):
    console = Console(width=80, record=True, file=io.StringIO())
    pieces = to_rich(results_table(run.records()), 80)
    assert len(pieces) == 1
    console.print(pieces[0])
    lines = console.export_text().splitlines()
    assert max(map(len, lines)) <= 80
    assert any(line.split() == ["FPR"] for line in lines)  # the head stands on two lines
    assert any("softmax↓" in line and "FPR↓" in line for line in lines)


# ---- verdicts, page, comparison ----


def test_verdicts_are_about_both(run):
    found = verdicts(run, run.records())
    assert {key[3] for key in found.changes} == {"accuracy", "fpr", "fpr_softmax"}
    for metric, score in (("fpr", "belief"), ("fpr_softmax", "softmax")):
        verdict = found.changes["tent", "come", "average", metric]
        assert verdict.before == expected(run, ("tent", "em"), "softmax")
        assert verdict.after == expected(run, ("tent", "come"), score)
    one = verdicts(run, run.rescored(run.records(), "energy"))
    assert {key[3] for key in one.changes} == {"accuracy", "fpr"}
    assert one.changes["tent", "come", "average", "fpr"].before == expected(run, ("tent", "em"), "energy")
    words = headline(run.records(), found)
    assert "; FPR " in words
    assert "; FPR by softmax " in words
    assert "; FPR by energy " in headline(run.rescored(run.records(), "energy"), one)


def test_reports_say_both(run, tmp_path):
    records = run.records()
    found = verdicts(run, records)
    write_html(run, records, tmp_path / "r.html", (), found)
    write_report(records, tmp_path / "r.md", (), found)
    page, text = (tmp_path / "r.html").read_text(), (tmp_path / "r.md").read_text()
    source = lines_of(results_table(records))["source", "em", "belief"]["average", "fpr"]
    assert f"({source.mean:.1f}% by belief, the score of COME)" in extremes(records)
    assert page.count(">by belief</th>") == 2  # under accuracy and under FPR
    assert page.count("FPR<br>softmax↓</button>") == 4  # with the table of its own, and all metrics
    for words in ("FPR softmax is by softmax for all.", "FPR by softmax"):
        assert words in page
        assert words in text
    write_html(run, run.rescored(records, "u"), tmp_path / "u.html")
    assert "FPR is by u for all." in (tmp_path / "u.html").read_text()
    assert "FPR by softmax" not in (tmp_path / "u.html").read_text()


def test_two_runs_are_compared_by_both_or_by_one(run):
    for change in compare_runs(run, run).changes:
        assert list(change.verdicts) == ["accuracy", "fpr", "fpr_softmax"]
    for change in compare_runs(run, run, "entropy").changes:
        assert list(change.verdicts) == ["accuracy", "fpr"]
        if change.domain == "average":
            assert change.verdicts["fpr"].after == expected(run, (change.method, change.objective), "entropy")


# ---- the command line ----


def test_the_command_line_shows_both_or_one(run, tmp_path, monkeypatch, capsys):
    page = ("--out", str(tmp_path / "r.html"))
    code, out, _ = call(monkeypatch, capsys, "report", str(run.path), *page)
    assert (code, "by belief" in out, "FPR softmax is by softmax for all." in " ".join(out.split())) == (0, True, True)
    assert max(len(line) for line in out.splitlines() if "r.html" not in line) <= 80
    code, out, _ = call(monkeypatch, capsys, "report", str(run.path), *page, "--score", "belief")
    assert (code, "belief↓" in out, "FPR is by belief for all." in out) == (0, True, True)
    code, out, _ = call(monkeypatch, capsys, "compare", str(run.path), str(run.path), "--all")
    assert (code, "FPR softmax" in out, "FPR by softmax: 0 better" in out) == (0, True, True)
    assert max(map(len, out.splitlines())) <= 80
    code, out, _ = call(monkeypatch, capsys, "compare", str(run.path), str(run.path), "--score", "u")
    assert (code, "FPR by u: 0 better" in out, "softmax" in out) == (0, True, False)


@pytest.mark.parametrize("command", [("bench", "--out", "RUN"), ("report", "RUN"), ("compare", "RUN", "RUN")])
def test_a_score_that_nobody_knows_is_refused_before_any_work(command, tmp_path, monkeypatch, capsys):
    where = [str(tmp_path / "run") if word == "RUN" else word for word in command]
    code, _, err = call(monkeypatch, capsys, *where, "--score", "beleif")
    assert (code, "no score 'beleif'; did you mean 'belief'?" in err) == (2, True)
    assert not list(tmp_path.iterdir())
