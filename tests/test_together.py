"""Cells as streams of one fleet: the records of one cell after the other, within rounding."""

from __future__ import annotations

import pytest
import torch

import come
from come.bench import Bench, Plan, RunFolder
from come.bench.cell import Cell
from come.bench.engines.local import bundles
from come.bench.engines.progress import Progress

PLAN = Plan(
    methods=("source", "tent", "tent:lr=0.01", "sar:margin=0.9", "t3a"),
    objectives=("come",),
    corruptions=("fog", "contrast"),
    seeds=(0, 1),
    limit=48,
    batch_size=32,
    guard=True,
)


class Note(Progress):
    def __init__(self):
        self.together, self.alone, self.finished, self.samples = [], [], [], 0

    def start(self, cell, samples):
        self.alone.append(cell)

    def start_together(self, cells, samples):
        self.together.append(list(cells))

    def advance(self, samples):
        self.samples += samples

    def finish(self, cell, record, resumed):
        self.finished.append(resumed)


def same(one, two, atol=1e-6):
    assert one.cell == two.cell
    assert one.result.samples == two.result.samples
    assert one.result.lr == two.result.lr
    assert one.result.events == two.result.events
    assert one.result.health == pytest.approx(two.result.health, abs=1e-3, nan_ok=True)
    for domain, metrics in one.result.metrics.items():
        assert two.result.metrics[domain] == pytest.approx(metrics, abs=atol, nan_ok=True)


def test_the_records_of_one_cell_after_the_other(tmp_path):
    expected = Bench(PLAN).run(RunFolder(tmp_path / "alone"))
    note = Note()
    bench = Bench(PLAN, together=3)
    with pytest.warns(UserWarning, match="one cell after the other: .*hooks"):  # T3A
        found = bench.run(RunFolder(tmp_path / "together"), note)
    assert len(found) == len(expected) == 20
    for one, two in zip(expected, found, strict=True):
        same(one, two, atol=1e-4)
        rows, again = RunFolder(tmp_path / "alone").rows(one.key), RunFolder(tmp_path / "together").rows(two.key)
        assert torch.equal(rows["index"], again["index"])
        torch.testing.assert_close(rows["softmax"], again["softmax"], rtol=0, atol=1e-4)
    assert max(len(cells) for cells in note.together) == 3
    assert note.samples >= 20 * 48
    assert {len({cell.base for cell in cells}) for cells in note.together} == {1}
    assert any(len({cell.method for cell in cells}) > 1 for cells in note.together)  # two rates in one fleet
    assert {r.machine.streams for r in found if r.cell.base == "t3a"} == {1}

    again = Note()
    assert Bench(PLAN, together=3).run(RunFolder(tmp_path / "together"), again) == found
    assert again.finished == [True] * 20
    (tmp_path / "together" / "cells" / f"{found[5].key}.safetensors").unlink()
    resumed = Bench(PLAN, together=3).run(RunFolder(tmp_path / "together"), again := Note())
    assert sorted(again.finished) == [False] + [True] * 19
    same(found[5], resumed[5], atol=1e-4)


def test_one_that_fails_does_not_take_the_others_with_it(tmp_path, monkeypatch):
    plan = Plan(methods=("tent",), objectives=("em", "come"), corruptions=("fog", "snow"), limit=32, batch_size=32)
    monkeypatch.setattr(come.Fleet, "step", lambda self, x, names: 1 / 0)
    bench, note = Bench(plan, together=4), Note()
    assert len(bench.run(RunFolder(tmp_path), note)) == 4
    assert len(note.alone) == 4  # each by itself, since nobody can tell whose fault it is
    assert not bench.failed


def test_memory_that_is_short_means_fewer_at_once(tmp_path, monkeypatch):
    plan = Plan(
        methods=("tent",), objectives=("em",), corruptions=("fog", "snow"), seeds=(0, 1), limit=32, batch_size=32
    )
    step = come.Fleet.step

    def short(self, x, names):
        if len(self) > 2:
            raise torch.cuda.OutOfMemoryError("no")
        return step(self, x, names)

    monkeypatch.setattr(come.Fleet, "step", short)
    note = Note()
    assert len(Bench(plan, together=4).run(RunFolder(tmp_path), note)) == 4
    assert [len(cells) for cells in note.together] == [4, 2, 2]


def test_what_can_run_together():
    def cell(**more):
        return Cell(**({"method": "eata", "objective": "em", "corruptions": ("fog",), "size": 1} | more))

    first = cell()
    others = [
        cell(corruptions=("snow",)),
        cell(seed=3),
        cell(hyper={"lr": 0.1}),
        cell(method="eata:margin=0.2", hyper={"margin": 0.2}),
    ]
    apart = [cell(objective="come"), cell(method="tent"), cell(hyper={"beta": 1.0}), cell(method="cotta")]
    (found, *rest) = bundles([first, *others, *apart], 10, lambda cell: False)
    assert found == [first, *others]
    assert [len(part) for part in rest] == [1, 1, 1, 1]
    assert [len(part) for part in bundles([first, *others], 2, lambda cell: False)] == [2, 2, 1]
    assert [len(part) for part in bundles([first, *others], 1, lambda cell: False)] == [1] * 5


def test_bad_input(tmp_path):
    plan = Plan(methods=("tent",), objectives=("em",), corruptions=("fog",), limit=32)
    with pytest.raises(come.ConfigError, match=r"together \(4\) and jobs \(2\) are two ways to run cells at once"):
        Bench(plan, together=4, jobs=2)
    with pytest.raises(come.ConfigError, match="together"):
        Bench(plan, together=0)
