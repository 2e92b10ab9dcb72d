"""The report of a run: tables in all formats, figures, and the page. The runs are made up: a few hundred samples each."""

from __future__ import annotations

import csv
import io
import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from rich.console import Console

from come.bench.folder import RunFolder
from come.bench.report import (
    configurations,
    describe_configurations,
    metrics_table,
    panels,
    rates_table,
    reading,
    results_table,
    to_csv,
    to_json,
    to_latex,
    to_markdown,
    to_rich,
    without_sweeps,
    write_figures,
    write_html,
    write_report,
)
from come.bench.report.costs import by_pair, cost
from come.bench.report.findings import by_effect, changes, collapses, headline, missing
from come.bench.report.panels import MEASURES, looks
from come.bench.report.reading import read
from come.bench.report.tables import METRICS, Entry, Row, Table
from come.bench.statistics import Judged, Verdict, verdicts
from come.errors import ConfigError, InputError, StateError

sys.path.append(str(Path(__file__).parent / "harness"))
from made_up import PAIRS, add, grid, rows_of

HOSTILE = (
    "<img src=x onerror=alert(1)>",
    '"</script><script>alert(2)</script>',
    "$\\alpha_{",
    "a & b | c % d_e #f ~ ^",
    "{{ 7*7 }}{% raw %}",
    "[0] * `x` ***b***",
)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return grid(tmp_path_factory.mktemp("run") / "r", seeds=(0, 1))


@pytest.fixture(scope="module")
def judged(run):
    return verdicts(run, run.records())


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return grid(tmp_path_factory.mktemp("small") / "r", PAIRS[:3], ("fog",))


@pytest.fixture(scope="module")
def page(run):
    write_html(run, run.records(), run.path / "report.html", ["come", "bench", "--out", "a b"])
    return (run.path / "report.html").read_text()


class Page(HTMLParser):
    """The elements and the text of a page, as a browser would read them."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.texts, self.hidden = [], [], 0
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.hidden += tag in ("style", "script")

    def handle_endtag(self, tag):
        self.hidden -= tag in ("style", "script")

    def handle_data(self, data):
        if not self.hidden:
            self.texts.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.texts).split())


# ---- tables ----


def test_a_table_of_any_metric(run):
    table = results_table(run.records(), "T", metric="fpr")
    assert table.columns == ("Fog", "Contr.", "FPR↓", "FPR softmax↓")
    assert table.keys == (("fog", "fpr"), ("contrast", "fpr"), ("average", "fpr"), ("average", "fpr_softmax"))
    both = results_table(run.records())
    assert table.rows[0].entries[-1] == both.rows[0].entries[-1]


def test_marks_are_what_the_verdicts_found(run, judged):
    plain = next(row for row in results_table(run.records()).rows if not row.ran_with)
    assert {e.change for e in plain.entries} == {"same"}
    assert all(str(e)[0] in "+-" for e in plain.entries)
    found = {
        ("tent", "come", d, "accuracy"): Verdict("accuracy", 50, a, 0.1, 0.0, (a - 50,) * 2)
        for d, a in (("fog", 53), ("contrast", 47))
    }
    marked = next(row for row in results_table(run.records(), verdicts=Judged(found)).rows if not row.ran_with)
    assert [e.change for e in marked.entries] == ["better", "worse", "same", "same", "same"]
    assert [str(e)[0] for e in marked.entries[:1]] == ["△"]
    for metric in ("accuracy", "fpr"):
        table = results_table(run.records(), metric=metric, verdicts=judged)
        for row in (row for row in table.rows if not row.ran_with):
            for (domain, name), entry in zip(table.keys, row.entries, strict=True):
                if name == "gain":  # Improve has it in its accuracy
                    assert entry is None
                else:
                    assert entry.change == judged.changes[row.method, "come", domain, name].change


def test_adifference_below_the_last_digit_keeps_its_direction():
    from come.bench.report.tables import improvement

    found = Verdict("accuracy", 50.0, 50.01, 0.001, 0.0, (0.01,))
    assert str(improvement(Entry(50.0), Entry(50.01), found, "accuracy")) == "△0.0"


def test_a_metric_that_is_no_percentage_keeps_its_unit():
    assert str(Entry(1.23456, 0.1, digits=3)) == "1.235±0.100"
    assert {name for name, metric in METRICS.items() if not metric.percent} == {"nll", "brier"}


@pytest.mark.parametrize("metric", ["fpr95", "accurcy"])
def test_a_metric_that_is_not_there_is_refused(run, metric):
    with pytest.raises(InputError, match=f"no table of '{metric}': the records have accuracy, fpr"):
        results_table(run.records(), metric=metric)


def test_all_metrics_in_one_table(run):
    table = metrics_table(run.records())
    assert table.columns[:5] == ("Acc↑", "FPR↓", "FPR softmax↓", "FPR belief↓", "AUROC↑")
    assert "Diverged↓" not in table.columns
    assert [row.name for row in table.rows] == ["source", "tent + em", "tent + come", "sar + em", "sar + come"]
    assert all(entry is not None for row in table.rows for entry in row.entries)
    assert len(to_rich(table, 60)) > 1


def test_averages_are_over_the_domains_that_define_a_metric(tmp_path):
    folder = RunFolder(tmp_path)
    add(folder, "source", "em", ("none",))
    add(folder, "source", "em", ("far",), samples_outside=50)
    table = metrics_table(folder.records())
    found = dict(zip(table.columns, table.rows[0].entries, strict=True))
    expected = [r.result.metrics["far"]["auroc_outlier"] for r in folder.records() if "far" in r.result.metrics]
    assert found["AUROC out↑"].mean == pytest.approx(100 * expected[0])


def test_csv_and_json_hold_the_numbers_as_they_are(run):
    table = results_table(run.records(), "T")
    lines = list(csv.DictReader(io.StringIO(to_csv(table))))
    numbers = json.loads(to_json(table))["numbers"]
    assert len(lines) == len(numbers) == 5 * 5 + 1
    assert lines[0].keys() == numbers[0].keys()
    fog = next(n for n in numbers if (n["method"], n["objective"], n["domain"]) == ("tent", "come", "fog"))
    values = [100 * r.result.metrics["fog"]["accuracy"] for r in run.records()
              if r.cell.pair == ("tent", "come") and "fog" in r.result.metrics]  # fmt: skip
    assert fog["mean"] == pytest.approx(sum(values) / 2, abs=1e-12)
    assert (fog["metric"], fog["seeds"]) == ("accuracy", 2)
    assert fog["spread"] > 0
    assert {n["domain"] for n in numbers} == {"fog", "contrast", "average"}
    assert {n["objective"] for n in numbers if n["method"] == "source"} == {"em"}


def test_missing_numbers_are_empty_in_csv_null_in_json_and_dots_elsewhere(tmp_path):
    folder = RunFolder(tmp_path)
    add(folder, "tent", "em", ("fog",))
    add(folder, "tent", "em", ("snow",))
    add(folder, "tent", "come", ("fog",))
    table = results_table(folder.records())
    assert "tent,come,snow,accuracy,,,,0" in to_csv(table)
    assert [n["domain"] for n in json.loads(to_json(table))["numbers"] if n["mean"] is None] == [
        "snow",
        "average",
        "average",
        "average",
    ]
    assert r"tent + come & " in to_latex(table)
    assert r"$\cdot$" in to_latex(table)
    assert list(missing(folder.records())) == ["tent + come on snow, seed 0"]
    write_html(folder, folder.records(), tmp_path / "r.html")
    text = (tmp_path / "r.html").read_text()
    assert '<td class="same">·</td>' in text
    assert "Not finished" in text
    assert "nan" not in Page(text).text.lower()


def add_rates(folder, *rates):
    """Tent with both objectives at these learning rates; 0.001 is its own."""
    for rate in rates:
        for objective in ("em", "come"):
            add(folder, "tent" if rate == 0.001 else f"tent:lr={rate}", objective, lr=rate)
    return folder


def test_several_learning_rates_of_a_method_are_one_table(tmp_path):
    folder = add_rates(grid(tmp_path / "r", PAIRS[:1], ("fog",)), 0.016, 0.001, 0.004)
    add(folder, "sar", "em")
    judged = verdicts(folder, folder.records())
    table = rates_table(folder.records(), judged)
    assert table is not None
    assert table.columns == ("lr 0.001", "lr 0.004", "lr 0.016")
    assert [row.name.strip() for row in table.rows] == ["source", "tent + em", "tent + come", "Improve"]
    whole = results_table(folder.records())
    found = {row.name: str(row.entries[-3]) for row in whole.rows}
    assert [str(e) for e in table.rows[0].entries] == [found["source"]] * 3
    assert [str(e) for e in table.rows[2].entries] == [found[f"tent{m} + come"] for m in ("", ":lr=0.004", ":lr=0.016")]
    assert [e.change for e in table.rows[3].entries] == [
        judged.changes[m, "come", "average", "accuracy"].change for m in ("tent", "tent:lr=0.004", "tent:lr=0.016")
    ]
    assert {r.cell.method for r in without_sweeps(folder.records())} == {"source", "tent", "sar"}
    write_report(folder.records(), tmp_path / "report.md", verdicts=judged)
    assert "|lr 0.001|lr 0.004|lr 0.016|" in (tmp_path / "report.md").read_text()
    write_html(folder, folder.records(), tmp_path / "report.html", verdicts=judged)
    assert 'href="#rates"' in (tmp_path / "report.html").read_text()
    assert tmp_path / "rates.svg" in write_figures(folder, folder.records(), tmp_path, "svg")


def test_a_sweep_without_the_method_s_own_rate_stays_in_the_table(tmp_path):
    folder = add_rates(RunFolder(tmp_path / "r"), 0.016, 0.004)
    assert len(without_sweeps(folder.records())) == 4
    table = rates_table(folder.records())
    assert table is not None
    assert table.columns == ("lr 0.004", "lr 0.016")
    write_figures(folder, folder.records(), tmp_path, "svg")
    assert "tent + come" in (tmp_path / "rates.svg").read_text()


def test_one_rate_is_no_sweep(run, page):
    assert rates_table(run.records()) is None
    assert without_sweeps(run.records()) == run.records()
    assert "#rates" not in page


def test_latex_is_escaped_and_has_the_paper_s_form():
    entries = (Entry(52.13, 0.4), Entry(-1.2, change="worse"), None)
    keys = (("fog", "accuracy"), ("snow", "accuracy"), ("average", "fpr"))
    text = to_latex(Table("100% & more", ("Fog", "a_b", "FPR↓"), (Row("t$x", "em", entries, "em"),), keys))
    assert r"\caption{100\% \& more}" in text
    assert r" & Fog & a\_b & FPR$\downarrow$ \\" in text
    assert r"t\$x + em & 52.1$\pm$0.4 & \textbf{$\triangledown$1.2} & $\cdot$ \\" in text
    assert text.count(r"\toprule") == text.count(r"\bottomrule") == 1


@pytest.mark.parametrize("name", HOSTILE)
def test_latex_of_hostile_names_is_balanced(name):
    text = to_latex(Table(name, ("Fog",), (Row(name, "", (None,), "em"),), (("fog", "accuracy"),)))
    bare = re.sub(r"\\[{}$&#_%]", "", text)
    assert bare.count("{") == bare.count("}")
    assert bare.count("$") % 2 == 0
    assert not re.search(r"(?<!\\)[#%~^]", text)


def test_a_bar_in_a_name_does_not_cut_a_markdown_row():
    text = to_markdown(Table("", ("a|b",), (Row("a|b", "", (None,), "em"),), (("fog", "accuracy"),)))
    assert "|a\\|b|·|" in text
    assert "| |a\\|b|" in text


def test_no_records_is_an_error(tmp_path):
    folder = RunFolder(tmp_path)
    for make in (results_table, metrics_table, lambda r: write_figures(folder, r, tmp_path / "f")):
        with pytest.raises(InputError, match="there are no records"):
            make([])
    with pytest.raises(InputError, match="there are no records"):
        write_html(folder, [], tmp_path / "r.html")
    assert not (tmp_path / "r.html").exists()


@pytest.mark.parametrize(
    ("other", "message"),
    [({"severity": 3}, "severity 5; --plan 2: severity 3"), ({"model": "x"}, "model fashion-resnet-bn; --plan 2: model x"),
     ({"guard": False}, "guard True; --plan 2: guard False"), ({"size": 100}, "size 200; --plan 2: size 100"),
     ({"setting": "lifelong", "rounds": 2}, "setting standard, rounds 1; --plan 2: setting lifelong, rounds 2")],
)  # fmt: skip
def test_plans_are_not_mixed(tmp_path, other, message):
    folder = RunFolder(tmp_path)
    records = [add(folder, "tent", "em"), add(folder, "tent", "em", **other)]
    with pytest.raises(InputError, match=f"holds 2 plans; choose one with --plan 1: {message}"):
        results_table(records)
    assert [len(group) for group in configurations(records)] == [1, 1]


def test_every_knob_tells_plans_apart(tmp_path):
    """Also one that is added later: the fields are those of the description."""
    from come.bench.cell import Cell, Knobs
    from come.bench.report.configurations import SHARED

    assert set(Knobs.model_fields) < set(SHARED)
    folder = RunFolder(tmp_path)
    write_html(folder, [add(folder, "tent", "em")], tmp_path / "r.html")
    text = Page((tmp_path / "r.html").read_text()).text
    for name in SHARED:
        if getattr(Cell(method="m", objective="o", size=1), name) is not None:
            assert name.replace("_", " ") in text


def test_two_sets_of_hyperparameters_are_two_plans(tmp_path):
    folder = RunFolder(tmp_path)
    for objective in ("em", "come"):
        for lr in (0.1, 0.2):
            add(folder, "tent", objective, hyper={"lr": lr})
    add(folder, "source", "em")
    groups = configurations(folder.records())
    assert [len(group) for group in groups] == [3, 3]
    assert [{r.cell.hyper.get("lr", 0) for r in group} for group in groups] == [{0, 0.1}, {0, 0.2}]
    assert describe_configurations(groups) == ["tent lr 0.1", "tent lr 0.2"]
    with pytest.raises(InputError, match=r"--plan 1: tent lr 0\.1; --plan 2: tent lr 0\.2"):
        results_table(folder.records())
    assert results_table(groups[1]).rows
    other = configurations([*groups[0], add(folder, "sar", "em", setting="lifelong", hyper={"recover_below": 0.0})])
    assert describe_configurations(other) == ["setting standard", "setting lifelong"]


# ---- findings ----


def test_the_finding_says_who_wins_and_who_loses(tmp_path):
    folder = RunFolder(tmp_path)
    for method, objective, right in (
        ("tent", "em", 0.5),
        ("tent", "come", 0.9),
        ("sar", "em", 0.9),
        ("sar", "come", 0.2),
    ):
        add(folder, method, objective, right=right)
    found = verdicts(folder, folder.records())
    text = headline(folder.records(), found)
    assert (
        "With COME in place of entropy minimization (em), accuracy is better for 1 of 2 methods and is worse for 1"
        in text
    )
    assert text.count("One seed: other orders of the stream may give another result; run more seeds.") == 1
    accuracies = [about[0].words for about in changes(folder.records(), found).values()]
    assert accuracies == ["better on this stream", "worse on this stream"]
    write_html(folder, folder.records(), tmp_path / "r.html")
    page = Page((tmp_path / "r.html").read_text()).text
    assert page.count("One seed: other orders") == 1
    write_report(folder.records(), tmp_path / "r.md", (), found)
    for words in ("better for 1 of 2 methods", "better on this stream", "95% interval"):
        assert words in (tmp_path / "r.md").read_text()
        assert words in page


def test_seeds_that_do_not_agree_are_no_finding(tmp_path):
    folder = RunFolder(tmp_path)
    for seed, (em, come) in enumerate([(0.2, 0.9), (0.9, 0.3)]):
        add(folder, "tent", "em", right=em, seed=seed)
        add(folder, "tent", "come", right=come, seed=seed)
    found = verdicts(folder, folder.records())
    assert "accuracy shows no clear difference for the one method" in headline(folder.records(), found)
    assert "One seed" not in headline(folder.records(), found)


def test_a_comparison_that_is_refused_is_said(tmp_path):
    folder = RunFolder(tmp_path)
    add(folder, "tent", "em")
    add(folder, "tent", "come", rows=rows_of(0.6, size=150))
    write_html(folder, folder.records(), tmp_path / "r.html")
    assert (
        "accuracy not comparable: streams of 200 and 150 samples are not compared"
        in Page((tmp_path / "r.html").read_text()).text
    )


def test_one_objective_leaves_nothing_to_compare(tmp_path):
    folder = grid(tmp_path / "run", pairs=(("tent", "em"),))
    write_html(folder, folder.records(), tmp_path / "r.html")
    text = (tmp_path / "r.html").read_text()
    assert "nothing to compare" in text
    assert ">Improve</th>" not in text
    assert "Nothing collapsed" not in text  # there is no source to compare with


def test_a_collapse_is_found(tmp_path):
    folder = RunFolder(tmp_path)
    add(folder, "source", "em", right=0.6)
    add(folder, "tent", "em", right=lambda t: 0.7 if t < 0.5 else 0.05)
    add(folder, "tent", "come", right=0.7)
    (found,) = collapses(read(folder, folder.records()).pieces)
    assert found.startswith("tent + em on fog (")


# ---- reading ----


def test_domains_without_a_reset_are_one_segment(tmp_path):
    folder = RunFolder(tmp_path)
    add(folder, "tent", "em", ("fog", "snow", "frost"), fresh=[True, False, True])
    found = read(folder, folder.records())
    assert [(piece.domain, piece.fresh) for piece in found.pieces] == [("fog", True), ("snow", False), ("frost", True)]
    segments = [(segment.name, segment.borders) for segment in found.segments]
    assert segments == [("fog to snow, 2 domains without a reset", (200,)), ("frost", ())]
    assert found.segments[0].path["samples"][-1] == 400


def test_risk_and_reliability_are_those_of_the_metrics(tmp_path):
    """The mean of the curve is the AURC, and the gap to the diagonal, over all bins, is the ECE but for the width of a bin."""
    folder = RunFolder(tmp_path)
    record = add(folder, "tent", "em", size=600, samples_outside=60)
    (piece,) = read(folder, [record]).pieces
    found = record.result.metrics["fog"]
    assert piece.risk.mean() == pytest.approx(found["aurc"], abs=0.01)
    assert piece.risk[-1] == pytest.approx(1 - found["accuracy"] * 540 / 600)
    right, wrong = (piece.counts[kind].reshape(15, 2).sum(axis=1) for kind in ("right", "wrong"))
    gaps = abs(right - (right + wrong) * (np.arange(15) + 0.5) / 15)
    assert gaps.sum() / 540 == pytest.approx(found["ece"], abs=1 / 30)
    assert piece.counts["outlier"].sum() == 60


def test_rows_that_are_gone_are_an_error_that_names_them(tmp_path):
    folder = grid(tmp_path / "run", pairs=(("tent", "em"),), domains=("fog",))
    records = folder.records()
    folder.file(records[0].key).unlink()
    with pytest.raises(StateError, match=f"cannot read .*{records[0].key}"):
        write_html(folder, records, tmp_path / "r.html")
    assert not (tmp_path / "r.html").exists()


# ---- figures ----


@pytest.mark.parametrize("format", ["pdf", "png", "svg"])
def test_figures_are_written_the_same_each_time(small, tmp_path, format):
    first = write_figures(small, small.records(), tmp_path / "a", format)
    second = write_figures(small, small.records(), tmp_path / "b", format)
    assert [p.name for p in first] == [
        f"{name}.{format}" for name in ("overview", "trajectories-fog", "confidence", "reliability", "cost", "collapse")
    ]
    assert [p.read_bytes() for p in first] == [p.read_bytes() for p in second]
    assert sorted(p.name for p in (tmp_path / "a").iterdir()) == sorted(p.name for p in first)


def test_an_unknown_format_is_refused(run, tmp_path):
    with pytest.raises(ConfigError, match="no format of figures 'pgn'; did you mean 'png'"):
        write_figures(run, run.records(), tmp_path, "pgn")


def test_what_cannot_be_written_is_an_error_that_says_so(small, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(StateError, match="cannot write figures to"):
        write_figures(small, small.records(), tmp_path / "file" / "f", "svg")
    with pytest.raises(StateError, match="cannot write the report"):
        write_html(small, small.records(), tmp_path / "nowhere" / "r.html")


def test_matplotlib_is_imported_late_and_left_as_it_was(small, tmp_path):
    code = f"""
import sys
from come.bench import RunFolder
from come.bench.report import write_figures
assert "matplotlib" not in sys.modules
import matplotlib
settings = lambda: {{k: matplotlib.rcParams[k] for k in matplotlib.rcParams if k != "backend"}}  # to ask for that sets it
before = settings()
folder = RunFolder.existing({str(small.path)!r})
write_figures(folder, folder.records(), {str(tmp_path)!r}, "svg")
assert settings() == before
assert "matplotlib.pyplot" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_looks_are_colour_by_method_and_dashes_by_objective(run):
    found = looks(run.records())
    assert found["tent", "em"].colour == found["tent", "come"].colour != found["sar", "em"].colour
    assert found["tent", "em"].dash == found["sar", "em"].dash != found["tent", "come"].dash == (0.0, ())
    assert found["tent", "em"].marker != found["sar", "em"].marker
    assert found["source", "em"].label == "source"


def test_cost_leaves_out_the_wait_for_data(run):
    found = {pair: cost(group) for pair, group in by_pair(run.records()).items()}
    assert found["source", "em"].seconds_per_image == pytest.approx(1.5 / 200)
    assert found["tent", "come"].seconds_per_image == pytest.approx(2.5 / 200)


@pytest.mark.parametrize("machine", [{"device": "cuda: other"}, {"threads": 8}, {"load": 2.0}])
def test_costs_of_unlike_machines_are_not_compared(tmp_path, machine):
    folder = grid(tmp_path / "run", PAIRS[:2], ("fog",))
    add(folder, "tent", "come", **machine)
    records = folder.records()
    write_html(folder, records, tmp_path / "r.html")
    text = Page((tmp_path / "r.html").read_text()).text
    assert "These costs are not comparable" in text
    assert "x source" not in text
    assert "Accuracy against time" not in (tmp_path / "r.html").read_text()
    write_report(records, tmp_path / "r.md")
    assert "These costs are not comparable: " in (tmp_path / "r.md").read_text()
    assert "cost.svg" not in [path.name for path in write_figures(folder, records, tmp_path / "f", "svg")]


def test_figures_are_not_written_through_a_link(small, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "figures").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StateError, match="symbolic link"):
        write_figures(small, small.records(), tmp_path / "figures", "svg")
    assert not list((tmp_path / "elsewhere").iterdir())
    (tmp_path / "precious").write_text("kept")
    (tmp_path / "f").mkdir()
    (tmp_path / "f" / "cost.svg").symlink_to(tmp_path / "precious")
    write_figures(small, small.records(), tmp_path / "f", "svg")
    assert (tmp_path / "precious").read_text() == "kept"
    assert not (tmp_path / "f" / "cost.svg").is_symlink()


# ---- the page ----


def test_the_page_is_the_same_each_time(run, page, tmp_path):
    write_html(run, run.records(), run.path / "again.html", ["come", "bench", "--out", "a b"])
    assert (run.path / "again.html").read_text() == page
    assert not list(run.path.glob(".again*"))
    (run.path / "again.html").unlink()


def test_the_page_needs_nothing_else(page):
    found = Page(page)
    policy = next(a["content"] for tag, a in found.tags if tag == "meta" and "http-equiv" in a)
    assert policy.startswith("default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-")
    assert "img-src data:;" in policy
    for tag, attributes in found.tags:
        assert tag not in ("link", "iframe", "object", "embed", "base", "form", "img", "foreignobject")
        for name in ("src", "href"):
            assert not re.match(r"(?:[a-z]+:)?//", attributes.get(name) or ""), (tag, attributes)
        if tag in ("use", "image"):
            assert re.match("#f[0-9]+-[0-9]+$" if tag == "use" else "data:image/png;base64,", attributes["href"])
    assert not re.search(r"url\((?!#)|@import", page)


def test_the_page_holds_what_was_asked_for(page, run):
    found = Page(page)
    for words in ("With COME in place of entropy minimization (em)", "Improve", "Mean and standard deviation over seeds",
                  "come bench --out 'a b'", "cpu: test, 1 threads", "python 3.11", "learning rates", "seeds 0, 1",
                  "95% interval", "The highest average accuracy", "Nothing collapsed"):  # fmt: skip
        assert words in found.text, words
    links = {a["href"] for tag, a in found.tags if tag == "a"}
    assert {f"cells/{record.key}.safetensors" for record in run.records()} <= links
    anchors = [a["id"] for _, a in found.tags if "id" in a]
    assert len(anchors) == len(set(anchors))
    assert {link[1:] for link in links if link.startswith("#")} <= set(anchors)
    plots = [a for tag, a in found.tags if tag == "svg" and a["aria-label"]]
    # the whole stream, two streams, confidence, reliability, collapse, cost
    assert len(plots) == 1 + 2 * len(MEASURES) + len(PAIRS) + 2 + 2 + 2
    assert all(a["role"] == "img" for a in plots)


def drawings(page):
    return [ElementTree.fromstring(text) for text in re.findall(r"<svg.*?</svg>", page, re.DOTALL)]


def test_drawings_are_whole_and_hold_numbers_only(page):
    for drawing in drawings(page):
        for element in drawing.iter():
            numbers = [
                value
                for key, value in element.attrib.items()
                if key in ("d", "x", "y", "transform", "data-x", "data-y")
            ]
            assert not re.search("nan|inf", " ".join(numbers).lower())


def test_drawings_take_their_colours_from_the_page(page):
    style = page[page.index("<style>") : page.index("</style>")]
    for drawing in drawings(page):
        for element in drawing.iter():
            found = element.get("style", "")
            assert "#" not in found.replace("url(#", "")
            assert all(f"{name}: light-dark(" in style for name in re.findall(r"var\((--\w+)\)", found))


def test_values_can_be_read_from_what_is_drawn(run, page):
    """The end of a line, by data-x and data-y, is the average of the table."""
    drawing = next(d for d in drawings(page) if d.get("aria-label") == "Accuracy so far (%), fog")
    ends = [list(map(float, drawing.get(f"data-{axis}").split()[:4])) for axis in "xy"]
    for (method, objective), look in looks(run.records()).items():
        (line,) = [
            g.find("path")
            for g in drawing.iter("g")
            if g.get("data-series") == look.series and g.find("path") is not None
        ]
        place = list(map(float, line.get("d").split()[-2:]))
        samples, accuracy = (
            low + (at - a) / (b - a) * (high - low) for at, (a, b, low, high) in zip(place, ends, strict=True)
        )
        seeds = [r.result.metrics["fog"]["accuracy"] for r in run.records()
                 if r.cell.pair == (method, objective) and "fog" in r.result.metrics]  # fmt: skip
        assert samples == pytest.approx(200, abs=0.5)
        assert accuracy == pytest.approx(100 * sum(seeds) / 2, abs=0.02)


def test_axes_span_ten_points_at_least(page):
    for drawing in drawings(page):
        if "%" in drawing.get("aria-label") or "points" in drawing.get("aria-label"):
            *_, low, high, kind = drawing.get("data-y").split()
            assert kind == "linear"
            assert float(high) - float(low) >= 9.999


def test_the_method_with_the_largest_effect_comes_first(tmp_path):
    folder = RunFolder(tmp_path)
    add(folder, "source", "em", right=0.5)
    for method, em, come in (("tent", 0.5, 0.55), ("sar", 0.9, 0.3)):
        add(folder, method, "em", right=em)
        add(folder, method, "come", right=come)
    judged = verdicts(folder, folder.records())
    assert by_effect(folder.records(), judged)[0] == ("sar", "em", "come")
    write_html(folder, folder.records(), tmp_path / "r.html", verdicts=judged)
    found = Page((tmp_path / "r.html").read_text())
    words = r"The largest change by COME in place of EM: the accuracy of sar goes from 9\S+% to [23]\S+% "
    assert re.search(words + r"\(-[56]\S+ points\)\.", found.text)
    buttons = [a for tag, a in found.tags if tag == "button" and "data-series" in a]
    labels = {look.series: pair[0] for pair, look in looks(folder.records()).items()}
    assert [labels[b["data-series"]] for b in buttons[:5]] == ["source", "sar", "sar", "tent", "tent"]
    assert {labels[b["data-series"]] for b in buttons[:5] if "data-lead" in b} == {"source", "sar"}


def test_a_table_is_a_heat_map_against_the_source(page):
    """Blue and orange by how much better or worse than the source's a number is; the source itself has no colour."""
    rows = re.findall(r'<tr class="[^"]*"><th scope="row" title="(.*?)">.*?</th>(.*?)</tr>', page)
    cells = {name: re.findall(r'<td class="([^"]*)"( style="--h:\d+%")?', found) for name, found in reversed(rows)}
    assert not any(style for _, style in cells["source"])
    sar = [kind.split()[-1] for kind, style in cells["sar + come"] if style]
    assert sar.count("up") >= 3
    assert re.search(r"[123][05] points worse than the source", page)


def test_averages_come_first(page):
    (heads,) = re.findall(r'<section id="accuracy">.*?<thead>(.*?)</thead>', page, re.DOTALL)
    found = re.findall(r'<button type="button">(.*?)</button>', heads)
    assert found == ["Acc↑", "Gain↑", "FPR↓", "FPR<br>softmax↓", "Fog", "Contr."]


def test_links_follow_the_page(small, tmp_path):
    write_html(small, small.records(), tmp_path / "r.html")
    found = Page((tmp_path / "r.html").read_text())
    link = next(a["href"] for tag, a in found.tags if tag == "a" and a["href"].endswith(".safetensors"))
    assert (tmp_path / link).exists()


@pytest.mark.parametrize(("name", "other"), [HOSTILE[:2], HOSTILE[2:4], HOSTILE[4:]])
def test_hostile_names_are_text(tmp_path, name, other):
    folder = grid(tmp_path / "run", ((name, "em"), (name, "come")), (other,), model=name, data=other)
    write_html(folder, folder.records(), tmp_path / "r.html", ["come", name])
    text = (tmp_path / "r.html").read_text()
    found = Page(text)
    assert not [tag for tag, _ in found.tags if tag == "img"]
    assert sum(tag == "script" for tag, _ in found.tags) == 1
    assert not [a for _, a in found.tags if any(key.startswith("on") for key in a)]
    assert found.text.startswith(f"{name} on {other}: test-time adaptation")
    assert [a.get("title") for tag, a in found.tags if tag == "th"].count(f"{name} + come") >= 4  # tables
    drawn = [element.text for drawing in drawings(text) for element in drawing.iter()]
    assert f"{name if len(name) < 25 else f'{name[:23]}…'} + come" in drawn


@pytest.mark.parametrize("name", HOSTILE)
def test_markdown_of_hostile_names_is_text(tmp_path, name):
    folder = grid(tmp_path / "run", ((name, "em"), (name, "come")), (name,), model=name)
    write_report(folder.records(), tmp_path / "r.md", ["come", name], verdicts(folder, folder.records()))
    text = (tmp_path / "r.md").read_text()
    outside = [line for line in text.splitlines() if not line.startswith("    ")]
    assert not re.search(r"(?<!\\)[<$]", "\n".join(outside))
    rows = [line for line in outside if line.startswith("|")]
    assert {len(re.findall(r"(?<!\\)\|", row)) for row in rows} == {6}  # both tables


FORMULAS = ("=cmd()", "@x", "+x", "-x", "=1+1")


def test_a_name_is_no_formula_in_a_spreadsheet(tmp_path):
    folder = grid(tmp_path / "run", (("=m", "em"), ("source", "em")), (*FORMULAS, "-1", "+1"))
    lines = list(csv.DictReader(io.StringIO(to_csv(results_table(folder.records())))))
    assert {line["method"] for line in lines} == {"'=m", "source"}
    assert {line["domain"] for line in lines} == {*(f"'{name}" for name in FORMULAS), "-1", "+1", "average"}
    assert all(float(line["mean"]) > 0 for line in lines)


def test_absurd_metrics_do_no_harm(tmp_path):
    """No accuracy where all are outliers; names that nobody knows; numbers at their limits."""
    folder = RunFolder(tmp_path / "run")
    absurd = {"fpr": 1e15, "used": -1e15, "nll": 1e15, "surprise": 3.0, "dominant_share": 0.0}
    for method, objective in PAIRS[:3]:
        add(folder, method, objective, ("far",), samples_outside=200, seconds=0.0, peak_memory_mb=0.0)
        add(folder, method, objective, ("fog",), metrics={"fog": absurd}, seconds=1e15, peak_memory_mb=1e15)
    records = folder.records()
    table = results_table(records, verdicts=verdicts(folder, records))
    assert {str(entry) for row in table.rows for entry in row.entries[:3]} == {"None"}
    assert "·" in to_markdown(table)
    for form in (to_csv, to_json, to_latex):
        form(table)
    for part in to_rich(metrics_table(records), 80):
        Console(file=io.StringIO()).print(part)
    write_html(folder, records, tmp_path / "r.html")
    assert "surprise" not in (tmp_path / "r.html").read_text()
    write_report(records, tmp_path / "r.md")
    assert write_figures(folder, records, tmp_path / "f", "svg")


def test_long_names_are_cut(tmp_path):
    name = "方" * 500 + "x" * 500
    folder = grid(tmp_path / "run", ((name, "em"), (name, "come")), (name, name[:-1]), model=name)
    records = folder.records()
    names = [path.name for path in write_figures(folder, records, tmp_path / "f", "svg")]
    assert len(set(names)) == len(names)
    assert max(map(len, names)) < 120
    for part in to_rich(results_table(records), 80):
        Console(width=80, file=io.StringIO()).print(part)
    write_html(folder, records, tmp_path / "r.html")
    assert all(len(text or "") < 150 for d in drawings((tmp_path / "r.html").read_text()) for text in d.itertext())


def test_of_many_streams_some_are_drawn_and_it_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "MOST", 2)
    folder = grid(tmp_path / "run", (("source", "em"),), ("fog", "snow", "frost"), size=20)
    records = folder.records()
    write_html(folder, records, tmp_path / "r.html")
    found = Page((tmp_path / "r.html").read_text())
    assert "Of 3 streams, the first 2 are drawn." in found.text
    assert sum(tag == "div" and a.get("class") == "stream" for tag, a in found.tags) == 2
    with pytest.warns(UserWarning, match="of 3 streams, the first 2 are drawn"):
        assert len(write_figures(folder, records, tmp_path / "f", "svg")) == 2 + 5


def test_of_many_domains_some_are_told_apart_and_it_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(panels, "DOMAINS", 20)
    domains = [f"domain {i}" for i in range(30)]
    folder = RunFolder(tmp_path / "run")
    for method in ("source", "tent"):
        add(folder, method, "em", domains, size=4, fresh=[True] + [False] * 29)
    write_html(folder, folder.records(), tmp_path / "r.html")
    assert "Of 30 domains, the first 20 are drawn." in Page((tmp_path / "r.html").read_text()).text


def test_hostile_names_of_domains_stay_in_the_folder(tmp_path):
    folder = grid(tmp_path / "run", (("source", "em"),), ("../../a", "/b", "a/../b", "!"))
    names = [path.name for path in write_figures(folder, folder.records(), tmp_path / "f", "svg")]
    assert set(names[1:5]) == {f"trajectories-{name}.svg" for name in ("a", "a-b", "b", "domain")}
    assert sorted(names) == sorted(path.name for path in (tmp_path / "f").iterdir())


def test_other_alphabets_are_no_problem(tmp_path):
    folder = grid(tmp_path / "run", (("方法", "em"),), ("雾",))
    write_html(folder, folder.records(), tmp_path / "r.html")
    assert "方法" in (tmp_path / "r.html").read_text()
    assert write_figures(folder, folder.records(), tmp_path / "f", "png")


def test_outliers_are_a_kind_of_their_own(tmp_path, page):
    folder = grid(tmp_path / "run", domains=("far",), samples_outside=60)
    write_html(folder, folder.records(), tmp_path / "r.html")
    found = Page((tmp_path / "r.html").read_text())
    assert "outliers" in found.text
    assert "outliers" not in Page(page).text
    # they lead: in the finding, and in the first section behind it
    assert re.search(r"Outliers: \w+ has an AUROC of \S+% \(FPR95 \S+%\) with em and", found.text)
    assert [a["id"] for tag, a in found.tags if tag == "section"][:2] == ["finding", "outliers"]
    (table,) = re.findall(
        r'<section id="outliers">.*?<thead>(.*?)</thead>', (tmp_path / "r.html").read_text(), re.DOTALL
    )
    heads = re.findall(r'<button type="button">(.*?)</button>', table)
    assert heads == ["AUROC<br>out↑", "FPR95↓", "AUPR<br>in↑", "AUPR<br>out↑", "far"]
