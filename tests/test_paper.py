"""The paper's tables as data: whole, as printed, and with the paper's own slips written down."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from importlib.resources import files
from typing import get_args

import pytest

import come
from come import corruptions
from come.bench import paper
from come.bench.paper.published import Metric
from come.objectives import Opinion, Softmax

METHODS = {"source", "pl", "t3a", "tea", "lame", "foa", "tent", "eata", "sar", "cotta", "memo"}
WITH_OBJECTIVE = {"tent", "eata", "sar", "cotta", "memo"}
OUTLIERS = {"none", "ninco", "inaturalist", "ssb_hard", "textures", "places"}

# Rows, columns and Improve rows; then all values added up, and all Improve values: a changed digit changes a sum.
SHAPES = {
    "standard": (16, 17, 5, 14057.9, 386.5),
    "openworld": (16, 14, 5, 15090.0, -64.8),
    "lifelong": (11, 17, 4, 10682.7, 665.6),
    "ablation": (4, 4, 0, 955.9, 0.0),
    "in-distribution": (12, 1, 6, 982.3, 8.1),
    "openworld-resnet": (13, 14, 5, 10079.6, 12.0),
    "cost": (16, 4, 5, 166074.3, 15.4),
    "imbalanced": (16, 16, 5, 13177.4, 462.3),
    "mixed": (10, 2, 5, 1296.0, 11.0),
    "standard-fpr": (16, 16, 5, 17281.0, -148.5),
    "lifelong-fpr": (11, 16, 4, 12163.2, -440.1),
    "openworld-0.3": (14, 14, 4, 13067.7, -30.8),
}

# Typed from the paper by hand, not by the script that made tables.json: table, method, objective, domain, metric, value.
SPOTS = """
standard source em gaussian_noise accuracy 35.1
standard tea em snow accuracy 9.1
standard tent em frost accuracy 28.6
standard sar come average accuracy 64.2
standard memo come jpeg_compression accuracy 59.3
standard memo come average fpr 70.8
openworld source em none accuracy 64.4
openworld t3a em ssb_hard fpr 80.7
openworld tent come places fpr 45.9
openworld cotta come inaturalist accuracy 72.4
openworld memo come average fpr 72.4
lifelong source em average fpr 68.4
lifelong sar em fog accuracy 0.1
lifelong sar em average accuracy 30.4
lifelong cotta come shot_noise accuracy 61.7
lifelong cotta come average fpr 65.7
ablation tent em average accuracy 52.8
ablation tent come:freeze_norm=false worst accuracy 10.4
ablation tent em:freeze_norm=true worst fpr 93.0
ablation tent come average fpr 67.3
in-distribution tent em clean accuracy 81.4
in-distribution sar em clean accuracy 80.7
in-distribution memo come clean accuracy 80.6
in-distribution average come clean accuracy 82.6
openworld-resnet source em places accuracy 2.8
openworld-resnet tea em inaturalist accuracy 9.6
openworld-resnet eata come textures fpr 70.7
openworld-resnet memo come ninco fpr 90.2
openworld-resnet memo come average fpr 86.8
cost source em stream memory_mb 853
cost tea em stream seconds 2865
cost tent come stream seconds 130
cost cotta come stream memory_mb 19611
cost memo come stream seconds 20530
imbalanced tea em zoom_blur accuracy 12.1
imbalanced tent em snow accuracy 10.3
imbalanced sar come average accuracy 63.5
imbalanced memo come jpeg_compression accuracy 59.2
mixed tent em mixed fpr 72.3
mixed sar come mixed accuracy 62.3
mixed cotta come mixed fpr 70.7
mixed average em mixed accuracy 58.1
standard-fpr source em contrast fpr 73.4
standard-fpr tent em snow fpr 95.1
standard-fpr eata come gaussian_noise fpr 63.9
standard-fpr memo come average fpr 70.8
lifelong-fpr source em shot_noise fpr 65.2
lifelong-fpr sar em contrast fpr 75.7
lifelong-fpr sar em elastic_transform fpr 100.0
lifelong-fpr cotta come average fpr 65.7
openworld-0.3 source em places fpr 59.5
openworld-0.3 foa em none fpr 62.4
openworld-0.3 eata come textures accuracy 71.9
openworld-0.3 cotta come average fpr 64.5
"""
# The same for Improve lines, which have no objective.
IMPROVE_SPOTS = """
standard tent snow accuracy 48.2
standard cotta frost accuracy -0.6
standard cotta average fpr -0.3
openworld tent none fpr 1.6
openworld cotta average fpr -
lifelong sar brightness accuracy 75.6
in-distribution memo clean accuracy -
openworld-resnet sar ninco fpr -0.3
cost sar average accuracy 10.1
cost cotta stream memory_mb -
imbalanced cotta contrast accuracy 0.5
mixed cotta mixed fpr 0.9
standard-fpr cotta contrast fpr -6.4
lifelong-fpr tent snow fpr -11.3
openworld-0.3 tent places fpr -10.7
"""

# The paper's own slips. A new line here is either a slip of the transcription or a new rule.
SLIPS = [
    "lifelong: source em average fpr is 68.4, but 67.5 in standard",
    "ablation: tent em worst accuracy is 10.6, but 10.5 by the cells of standard",
    "ablation: tent em average fpr is 70.2, but 70.1 in standard",
    "ablation: tent come worst accuracy is 51.7, but 51.9 by the cells of standard",
    "ablation: tent come average fpr is 67.3, but 66.5 in standard",
    "standard-fpr: eata improves defocus_blur fpr by '-', but 67.2 to 66.6 is -0.6",
    "standard-fpr: tent em worst fpr is 95.1 by its cells, but 95.3 in ablation",
    "standard-fpr: tent come worst fpr is 70.8 by its cells, but 71.4 in ablation",
    "lifelong-fpr: source em average fpr is 68.4, but 67.5 in standard",
]


def tables():
    return [paper.get(name) for name in paper.names()]


def total(rows):
    return sum(value for row in rows for value in row.values if value is not None)


def test_public_names():
    assert paper.__all__ == [
        "Column", "PaperImprove", "PaperRow", "PaperTable", "get", "inconsistencies", "names", "rank",
    ]  # fmt: skip
    assert all(getattr(paper, name).__doc__ for name in paper.__all__)
    assert paper.names() == list(SHAPES) == list(dict.fromkeys(line.split()[0] for line in SPOTS.strip().splitlines()))


@pytest.mark.parametrize("name", paper.names())
def test_shape_and_sums(name):
    table = paper.get(name)
    rows, columns, improve, values, improves = SHAPES[name]
    assert (len(table.rows), len(table.columns), len(table.improve)) == (rows, columns, improve)
    assert all(len(line.values) == columns for line in (*table.rows, *table.improve))
    assert total(table.rows) == pytest.approx(values, abs=0.01)
    assert total(table.improve) == pytest.approx(improves, abs=0.01)


@pytest.mark.parametrize("name", paper.names())
def test_names_and_ranges(name):
    table = paper.get(name)
    assert table.name == name
    assert table.label.startswith("tab:")
    assert table.model == ("ResNet-50-BN" if name == "openworld-resnet" else "ViT-B/16")
    assert table.setting in ("standard", "lifelong", "open-world", "in-distribution", "imbalanced", "mixed")
    assert (table.outliers is None) == (table.setting != "open-world")
    known = {*corruptions.names("standard"), *OUTLIERS, "average", "worst", "stream", "clean", "mixed"}
    assert {column.domain for column in table.columns} <= known
    assert {column.metric for column in table.columns} <= set(get_args(Metric))
    assert len(set(table.columns)) == len(table.columns)
    rows = [(row.method, row.objective) for row in table.rows]
    assert len(set(rows)) == len(rows)
    assert {method for method, _ in rows} <= METHODS | {"average"}
    for column, *values in zip(table.columns, *(row.values for row in table.rows), strict=True):
        limit = 100 if column.metric in ("accuracy", "fpr") else 100_000
        assert all(value is not None and 0 < value <= limit for value in values), column


@pytest.mark.parametrize("name", [name for name in paper.names() if name != "ablation"])
def test_every_pair_has_its_improve_row(name):
    table = paper.get(name)
    pairs = [row.method for row in table.rows if row.objective == "come"]
    assert [line.method for line in table.improve] == pairs
    assert set(pairs) <= WITH_OBJECTIVE | {"average"}
    assert {row.method for row in table.rows if row.objective == "em"} >= set(pairs)
    assert all(row.sl is None and row.uc is None for row in table.rows)


def test_tables_by_corruption_have_the_papers_order():
    for name in ("standard", "lifelong", "imbalanced", "standard-fpr", "lifelong-fpr"):
        assert tuple(column.domain for column in paper.get(name).columns[:15]) == corruptions.names("standard")


def test_the_variants_of_the_ablation():
    variants = {row.objective: (row.sl, row.uc) for row in paper.get("ablation").rows}
    ours = {
        "em": Softmax(),
        "come:freeze_norm=false": Opinion(freeze_norm=False),
        "em:freeze_norm=true": Softmax(freeze_norm=True),
        "come": Opinion(),
    }
    assert variants == {name: (isinstance(o, Opinion), o.freeze_norm) for name, o in ours.items()}


@pytest.mark.parametrize("spot", SPOTS.strip().splitlines())
def test_spot_values(spot):
    name, *where, expected = spot.split()
    assert paper.get(name).value(*where) == float(expected)


@pytest.mark.parametrize("spot", IMPROVE_SPOTS.strip().splitlines())
def test_spot_improves(spot):
    name, method, domain, metric, expected = spot.split()
    table = paper.get(name)
    (line,) = (line for line in table.improve if line.method == method)
    found = line.values[table.columns.index(paper.Column(domain, metric))]
    assert found == (None if expected == "-" else float(expected))


def test_the_slips_of_the_paper():
    assert [finding for table in tables() for finding in paper.inconsistencies(table)] == SLIPS


def change(table, method, objective, domain, metric, value):
    """`table` with one cell changed; the objective None means the Improve row."""
    place = table.columns.index(paper.Column(domain, metric))

    def changed(line):
        values = (*line.values[:place], value, *line.values[place + 1 :])
        return replace(line, values=values) if line.method == method else line

    if objective is None:
        return replace(table, improve=tuple(changed(line) for line in table.improve))
    return replace(table, rows=tuple(changed(row) if row.objective == objective else row for row in table.rows))


@pytest.mark.parametrize(
    ("name", "cell", "finding"),
    [
        # 15 cells of mean 39.84: 39.9 could be rounding, 40.0 could not
        ("standard", ("source", "em", "average", "accuracy", 39.9), None),
        ("standard", ("source", "em", "average", "accuracy", 40.0), "is 40.0, but the mean of its 15 cells is 39.84"),
        ("mixed", ("average", "em", "mixed", "fpr", 70.6), "is 70.6, but the mean of its 4 cells is 70.38"),
        # 72.3 to 67.9 is -4.4
        ("mixed", ("tent", None, "mixed", "fpr", -4.5), None),
        ("mixed", ("tent", None, "mixed", "fpr", -4.6), "tent improves mixed fpr by -4.6, but 72.3 to 67.9 is -4.4"),
        ("mixed", ("tent", None, "mixed", "fpr", 4.4), "tent improves mixed fpr by +4.4, but 72.3 to 67.9 is -4.4"),
        ("mixed", ("tent", None, "mixed", "fpr", None), "tent improves mixed fpr by '-', but 72.3 to 67.9 is -4.4"),
        ("cost", ("pl", "em", "average", "fpr", 69.2), "pl em average fpr is 69.2, but 69.1 in standard"),
    ],
)
def test_what_counts_as_a_slip(name, cell, finding):
    table = paper.get(name)
    new = set(paper.inconsistencies(change(table, *cell))) - set(paper.inconsistencies(table))
    assert any(finding in text for text in new) if finding else not new


def test_unknown_names_are_answered_with_similar_ones():
    with pytest.raises(come.ConfigError, match=r"no table of the paper 'standart'; did you mean 'standard'\?"):
        paper.get("standart")
    with pytest.raises(come.ConfigError, match=r"no row of standard 'source come'"):
        paper.get("standard").value("source", "come", "fog", "accuracy")
    with pytest.raises(come.ConfigError, match=r"no column of standard 'fog fpr'; did you mean 'average fpr'"):
        paper.get("standard").value("tent", "em", "fog", "fpr")


def test_the_data_is_small_and_needs_nothing_heavy():
    assert len((files("come.bench") / "paper" / "tables.json").read_bytes()) < 100_000
    code = (
        "import sys, come.bench\n"
        "come.bench.paper.get('standard')\n"
        "heavy = {'timm', 'torchvision', 'matplotlib', 'typer', 'transformers', 'rich', 'scipy'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
