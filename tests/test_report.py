"""The report of a run: tables in all formats, figures, and the page. The runs are made up: a few hundred samples each."""

from __future__ import annotations

import csv
import io
import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
import torch

from come.bench.cell import Cell
from come.bench.report import (
    configurations,
    metrics_table,
    results_table,
    to_csv,
    to_json,
    to_latex,
    to_markdown,
    to_rich,
    write_figures,
    write_html,
)
from come.bench.report.findings import changes, collapses, headline, missing
from come.bench.report.panels import MEASURES, costs, draw_cost, drawing, looks, new_figure
from come.bench.report.reading import read
from come.bench.report.tables import METRICS, Entry, Row, Table
from come.bench.store import RunFolder
from come.errors import ConfigError, InputError, StateError
from come.metrics import summary

HOSTILE = (
    "<img src=x onerror=alert(1)>",
    '"</script><script>alert(2)</script>',
    "$\\alpha_{",
    "a & b | c % d_e #f ~ ^",
)
PAIRS = (("source", "em"), ("tent", "em"), ("tent", "come"), ("sar", "em"), ("sar", "come"))
RIGHT = {"source": 0.5, "tent": 0.6, "sar": 0.7}


def rows_of(right, *, size=200, seed=0, outliers=0, domains=1):
    """Rows of a classifier of ten classes that is right that often; a function of the place in the stream, or a number."""
    draw = torch.Generator().manual_seed(seed)
    n = size * domains
    label = torch.randint(0, 10, (n,), generator=draw, dtype=torch.int32)
    chance = torch.tensor([right(i / size % 1) if callable(right) else right for i in range(n)])
    correct = torch.rand(n, generator=draw) < chance
    prediction = torch.where(correct, label, torch.zeros(n, dtype=torch.int32))
    label[:outliers] = -1
    confidence = (0.3 * correct + 0.7 * torch.rand(n, generator=draw)).clamp(0, 1)
    return {
        "label": label,
        "prediction": prediction,
        "confidence": confidence,
        "entropy": 2 * (1 - confidence),
        "uncertainty": 1 - confidence,
        "norm": 10 + confidence,
        "used": torch.rand(n, generator=draw) < 0.5,
        "domain": torch.arange(domains).repeat_interleave(size).to(torch.int16),
        "index": torch.arange(n, dtype=torch.int32),
        "kind": torch.zeros(n, dtype=torch.int16),
        "finite": torch.ones(n, dtype=torch.bool),
        **{name: k + confidence for k, name in enumerate(("msp", "energy", "nll", "brier"))},
    }


def add(folder, method, objective, domains=("fog",), *, right=None, seed=0, outliers=0, fresh=None, **more):
    """Write a finished cell."""
    more = {"model": "glyphs-vit", "data": "glyphs", "size": 200, "setting": "standard", "severity": 5, **more}
    right = RIGHT.get(method, 0.5) + 0.05 * (objective == "come") if right is None else right
    cell = Cell(corruptions=tuple(domains), method=method, objective=objective, seed=seed, **more)
    rows = rows_of(right, seed=seed, outliers=outliers, domains=len(domains))
    parts = [{name: column[rows["domain"] == i] for name, column in rows.items()} for i in range(len(domains))]
    result = {
        "domains": list(domains),
        "metrics": {domain: summary(part) for domain, part in zip(domains, parts, strict=True)},
        "fresh": [True] * len(domains) if fresh is None else fresh,
        "samples": len(rows["label"]),
        "bad_images": 0,
        "lr": None if method == "source" else 0.001,
        "seconds": 2.0 + (method != "source"),
        "seconds_waiting_for_data": 0.5,
        "peak_memory_mb": 900.0,
    }
    around = {"versions": {"python": "3.11", "torch": "2"}, "device": "cpu: test", "threads": 1}
    return folder.write(cell, rows, result, around)


def grid(path, pairs=PAIRS, domains=("fog", "contrast"), seeds=(0,), **more):
    folder = RunFolder(path)
    for method, objective in pairs:
        for seed in seeds:
            for domain in domains:
                add(folder, method, objective, (domain,), seed=seed, **more)
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return grid(tmp_path_factory.mktemp("run") / "r", seeds=(0, 1))


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
    assert table.columns == ("Fog", "Contr.", "FPR↓")
    assert table.keys == (("fog", "fpr"), ("contrast", "fpr"), ("average", "fpr"))
    both = results_table(run.records())
    assert table.rows[0].entries[-1] == both.rows[0].entries[-1]
    improve = next(row for row in table.rows if row.objective == "improve")
    assert all(e.change in ("same", "better" if e.mean < 0 else "worse") for e in improve.entries)


def test_a_metric_that_is_no_percentage_keeps_its_unit():
    assert str(Entry(1.23456, 0.1, digits=3)) == "1.235±0.100"
    assert {name for name, metric in METRICS.items() if not metric.percent} == {"nll", "brier"}


@pytest.mark.parametrize("metric", ["fpr95", "accurcy"])
def test_a_metric_that_is_not_there_is_refused(run, metric):
    with pytest.raises(InputError, match=f"no table of '{metric}': the records have accuracy, fpr"):
        results_table(run.records(), metric=metric)


def test_all_metrics_in_one_table(run):
    table = metrics_table(run.records())
    assert table.columns[:4] == ("Acc↑", "FPR↓", "AUROC↑", "AURC↓")
    assert "Diverged↓" not in table.columns
    assert [row.name for row in table.rows] == ["source", "tent + em", "tent + come", "sar + em", "sar + come"]
    assert all(entry is not None for row in table.rows for entry in row.entries)
    assert len(to_rich(table, 60)) > 1


def test_averages_are_over_the_domains_that_define_a_metric(tmp_path):
    folder = RunFolder(tmp_path)
    add(folder, "source", "em", ("none",))
    add(folder, "source", "em", ("far",), outliers=50)
    table = metrics_table(folder.records())
    found = dict(zip(table.columns, table.rows[0].entries, strict=True))
    expected = [r.result["metrics"]["far"]["auroc_outlier"] for r in folder.records() if "far" in r.result["metrics"]]
    assert found["AUROC out↑"].mean == pytest.approx(100 * expected[0])


def test_csv_and_json_hold_the_numbers_as_they_are(run):
    table = results_table(run.records(), "T")
    lines = list(csv.DictReader(io.StringIO(to_csv(table))))
    numbers = json.loads(to_json(table))["numbers"]
    assert len(lines) == len(numbers) == 5 * 4
    assert lines[0].keys() == numbers[0].keys()
    fog = next(n for n in numbers if (n["method"], n["objective"], n["domain"]) == ("tent", "come", "fog"))
    values = [100 * r.result["metrics"]["fog"]["accuracy"] for r in run.records()
              if (r.cell["method"], r.cell["objective"]) == ("tent", "come") and "fog" in r.result["metrics"]]  # fmt: skip
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
    assert "tent,come,snow,accuracy,,,0" in to_csv(table)
    assert [n["domain"] for n in json.loads(to_json(table))["numbers"] if n["mean"] is None] == [
        "snow",
        "average",
        "average",
    ]
    assert r"tent + come & " in to_latex(table)
    assert r"$\cdot$" in to_latex(table)
    assert list(missing(folder.records())) == ["tent + come on snow, seed 0"]
    write_html(folder, folder.records(), tmp_path / "r.html")
    text = (tmp_path / "r.html").read_text()
    assert '<td class="same">·</td>' in text
    assert "Not run yet" in text
    assert "nan" not in Page(text).text.lower()


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
    text = to_markdown(Table("", ("Fog",), (Row("a|b", "", (None,), "em"),), (("fog", "accuracy"),)))
    assert r"|a\|b||" in text


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
    [({"severity": 3}, "severity is 5 and 3"), ({"model": "x"}, "model is glyphs-vit and x"),
     ({"setting": "lifelong"}, "setting is standard and lifelong")],
)  # fmt: skip
def test_configurations_are_not_mixed(tmp_path, other, message):
    folder = RunFolder(tmp_path)
    records = [add(folder, "tent", "em"), add(folder, "tent", "em", **other)]
    with pytest.raises(InputError, match=message):
        results_table(records)
    assert [len(group) for group in configurations(records)] == [1, 1]


def test_two_hyper_parameters_of_one_method_are_not_mixed(tmp_path):
    folder = RunFolder(tmp_path)
    records = [add(folder, "tent", "em", hyper={"lr": lr}) for lr in (0.1, 0.2)]
    with pytest.raises(InputError, match=r"tent \+ em ran with hyperparameters \{'lr': 0.1\} and with"):
        results_table(records)


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
    text = headline(folder.records())
    assert (
        "With COME in place of entropy minimization (em), accuracy is better for 1 of 2 methods and worse for 1" in text
    )
    first, second = changes(folder.records(), "accuracy")
    assert (first.method, first.verdict, second.method, second.verdict) == ("tent", "better", "sar", "worse")
    assert first.words.startswith("rises by ")
    assert second.words.startswith("falls by ")


def test_a_change_within_the_spread_of_the_seeds_is_no_finding(tmp_path):
    folder = RunFolder(tmp_path)
    for seed, (em, come) in enumerate([(0.2, 0.9), (0.9, 0.3)]):
        add(folder, "tent", "em", right=em, seed=seed)
        add(folder, "tent", "come", right=come, seed=seed)
    (change,) = changes(folder.records(), "accuracy")
    assert change.doubtful
    assert "(2 seeds; within their spread)" in change.words
    assert "accuracy is within the spread of the seeds for the one method" in headline(folder.records())


def test_one_objective_leaves_nothing_to_compare(tmp_path):
    folder = grid(tmp_path / "run", pairs=(("tent", "em"),))
    write_html(folder, folder.records(), tmp_path / "r.html")
    text = (tmp_path / "r.html").read_text()
    assert "nothing to compare yet" in text
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


def test_domains_without_a_reset_are_one_way(tmp_path):
    folder = RunFolder(tmp_path)
    add(folder, "tent", "em", ("fog", "snow", "frost"), fresh=[True, False, True])
    found = read(folder, folder.records())
    assert [piece.domain for piece in found.pieces] == ["fog", "snow", "frost"]
    assert [(way.name, way.borders) for way in found.ways] == [("fog to snow, 2 in a row", (200,)), ("frost", ())]
    assert found.ways[0].path["samples"][-1] == 400


def test_rows_that_are_gone_are_an_error_that_names_them(tmp_path):
    folder = grid(tmp_path / "run", pairs=(("tent", "em"),), domains=("fog",))
    records = folder.records()
    (folder.cells / f"{records[0].key}.safetensors").unlink()
    with pytest.raises(StateError, match=f"cannot read the rows of cell {records[0].key}"):
        write_html(folder, records, tmp_path / "r.html")
    assert not (tmp_path / "r.html").exists()


# ---- figures ----


@pytest.mark.parametrize("format", ["pdf", "png", "svg"])
def test_figures_are_written_the_same_each_time(small, tmp_path, format):
    first = write_figures(small, small.records(), tmp_path / "a", format)
    second = write_figures(small, small.records(), tmp_path / "b", format)
    assert [p.name for p in first] == [
        f"{name}.{format}" for name in ("trajectories-fog", "confidence", "cost", "collapse")
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


def test_labels_of_the_cost_do_not_overlap(tmp_path):
    from matplotlib.text import Text

    folder = RunFolder(tmp_path)
    for number, objective in ((i, o) for i in range(6) for o in ("em", "come")):
        add(folder, f"method{number}", objective, right=0.6)  # all at nearly the same place
    records = folder.records()
    with drawing():
        figure = new_figure(320, 225)
        ax = figure.subplots()
        draw_cost(ax, records, looks(records), "time")
        figure.draw_without_rendering()
        boxes = [Text.get_window_extent(text) for text in ax.texts]  # without the line that leads there
    assert len(boxes) == 12
    for i, box in enumerate(boxes):
        assert not any(box.overlaps(other) for other in boxes[:i])


def test_cost_leaves_out_the_wait_for_data(run):
    found = costs(run.records())
    assert found["source", "em"].seconds_per_image == pytest.approx(1.5 / 200)
    assert found["tent", "come"].seconds_per_image == pytest.approx(2.5 / 200)


# ---- the page ----


def test_the_page_is_the_same_each_time(run, page, tmp_path):
    write_html(run, run.records(), run.path / "again.html", ["come", "bench", "--out", "a b"])
    assert (run.path / "again.html").read_text() == page
    assert not list(run.path.glob(".again*"))
    (run.path / "again.html").unlink()


def test_the_page_needs_nothing_else(page):
    found = Page(page)
    policy = next(a["content"] for tag, a in found.tags if tag == "meta" and "http-equiv" in a)
    assert "default-src 'none'" in policy
    for tag, attributes in found.tags:
        assert tag not in ("link", "iframe", "object", "embed", "base", "form")
        for name in ("src", "href", "xlink:href"):
            assert not re.match(r"(?:[a-z]+:)?//", attributes.get(name) or ""), (tag, attributes)
    assert not re.search(r"url\((?!#)|@import", page)


def test_the_page_holds_what_was_asked_for(page, run):
    found = Page(page)
    for words in ("With COME in place of entropy minimization (em)", "Improve", "Mean and standard deviation over seeds",
                  "come bench --out 'a b'", "cpu: test, 1 threads", "python 3.11", "learning rates", "seeds 0, 1"):  # fmt: skip
        assert words in found.text, words
    links = {a["href"] for tag, a in found.tags if tag == "a"}
    for record in run.records():
        assert {f"cells/{record.key}.json", f"cells/{record.key}.safetensors"} <= links
    anchors = {a["id"] for _, a in found.tags if "id" in a}
    assert {link[1:] for link in links if link.startswith("#")} <= anchors
    plots = [a for tag, a in found.tags if tag == "svg" and a["class"] == "plot"]
    assert len(plots) == 2 * len(MEASURES) + 3 + 2 + 2
    assert all(a["aria-label"] for a in plots)


def test_ids_are_unique_and_point_somewhere(page):
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'(?:href="#|url\(#)([^")]+)', page)) <= set(ids)


def test_drawings_are_xml_in_the_colours_of_the_theme(page):
    drawings = re.findall(r"<svg .*?</svg>", page, re.DOTALL)
    for text in drawings:
        ElementTree.fromstring(text)
        assert not re.search(r"(?:fill|stroke): #(?!none)\w+", text), re.search(r"(?:fill|stroke): #\w+", text)
        assert "nan" not in re.sub(r"data:image[^\"]+", "", text).lower()


def test_links_follow_the_page(small, tmp_path):
    write_html(small, small.records(), tmp_path / "r.html")
    found = Page((tmp_path / "r.html").read_text())
    link = next(a["href"] for tag, a in found.tags if tag == "a" and a["href"].endswith(".json"))
    assert (tmp_path / link).exists()


@pytest.mark.parametrize(("name", "other"), [HOSTILE[:2], HOSTILE[2:]])
def test_hostile_names_are_text(tmp_path, name, other):
    folder = grid(tmp_path / "run", ((name, "em"), (name, "come")), (other,), model=name, data=other)
    write_html(folder, folder.records(), tmp_path / "r.html", ["come", name])
    found = Page((tmp_path / "r.html").read_text())
    assert not [a for tag, a in found.tags if tag == "img"]
    assert sum(tag == "script" for tag, _ in found.tags) == 1
    assert not [a for _, a in found.tags if any(key.startswith("on") for key in a)]
    assert found.text.startswith(f"{name} on {other}: test-time adaptation")
    drawn = [" ".join(text.split()) for text in found.texts]
    assert drawn.count(f"{name} + come") >= 5  # tables, legends and drawings


def test_hostile_names_of_domains_stay_in_the_folder(tmp_path):
    folder = grid(tmp_path / "run", (("source", "em"),), ("../../a", "/b", "a/../b", "!"))
    names = [path.name for path in write_figures(folder, folder.records(), tmp_path / "f", "svg")]
    assert set(names[:4]) == {f"trajectories-{name}.svg" for name in ("a", "a-b", "b", "domain")}
    assert sorted(names) == sorted(path.name for path in (tmp_path / "f").iterdir())


def test_other_alphabets_are_no_problem(tmp_path):
    folder = grid(tmp_path / "run", (("方法", "em"),), ("雾",))
    write_html(folder, folder.records(), tmp_path / "r.html")
    assert "方法" in (tmp_path / "r.html").read_text()
    assert write_figures(folder, folder.records(), tmp_path / "f", "png")


def test_outliers_are_a_kind_of_their_own(tmp_path, page):
    folder = grid(tmp_path / "run", domains=("far",), outliers=60)
    write_html(folder, folder.records(), tmp_path / "r.html")
    text = Page((tmp_path / "r.html").read_text()).text
    assert "outliers" in text
    assert "AUROC out" in text
    assert "outliers" not in Page(page).text
