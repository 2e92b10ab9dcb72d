"""The runner: cells, records, resuming, and what survives a kill."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

import come
from come.bench import Bench, Plan, Record, RunFolder, models, run
from come.bench.cell import _rows
from come.bench.data import Batch, DatasetSource, Stream
from come.bench.plan import QUICK, parse_hyper
from come.bench.runner import Progress
from come.testing import TinyClassifier

SMALL = Plan(methods=("source", "tent"), corruptions=("fog", "snow"), limit=96, batch_size=32)


class Watching(Progress):
    def __init__(self):
        self.started, self.finished, self.samples = [], [], 0

    def start(self, cell, samples):
        self.started.append(cell.key)

    def advance(self, samples):
        self.samples += samples

    def finish(self, cell, record, resumed):
        self.finished.append(resumed)


def numbers(records):
    return [(r.key, r.result["metrics"]) for r in records]


def test_a_run_and_its_records(tmp_path):
    watching = Watching()
    records = run(SMALL, tmp_path / "run", progress=watching)
    assert len(records) == 2 * 3  # source once, tent with two objectives, each on two corruptions
    assert watching.samples == 6 * 96
    record = records[-1]
    assert record.cell["method"] == "tent"
    assert record.cell["objective"] == "come"
    result = record.result
    assert result["samples"] == 96
    assert result["bad_images"] == 0
    assert result["seconds"] > 0
    assert result["peak_memory_mb"] > 0
    assert result["lr"] == pytest.approx(1e-3 * 32 / 64)
    assert set(record.surroundings["versions"]) == {"python", "come-tta", "torch", "timm", "numpy"}
    folder = RunFolder(tmp_path / "run")
    rows = folder.rows(record.key)
    assert {"index", "label", "prediction", "confidence", "used", "domain"} <= set(rows)
    assert all(len(value) == 96 for value in rows.values())
    right = (rows["label"] == rows["prediction"]).double().mean().item()
    assert right == result["metrics"]["snow"]["accuracy"]
    assert len(list((tmp_path / "run" / "streams").glob("*.json"))) == 2
    assert not list((tmp_path / "run" / "cells").glob("*.lock"))


def test_finished_cells_are_not_run_again(tmp_path):
    first = run(SMALL, tmp_path)
    watching = Watching()
    again = run(SMALL, tmp_path, progress=watching)
    assert again == first
    assert watching.started == []
    larger = replace(SMALL, methods=("source", "norm", "tent"))
    watching = Watching()
    run(larger, tmp_path, progress=watching)
    assert watching.finished.count(False) == 2  # the new method only


def test_fresh_runs_everything_again(tmp_path):
    first = run(SMALL, tmp_path)
    watching = Watching()
    again = Bench(SMALL).run(RunFolder(tmp_path), watching, fresh=True)
    assert len(watching.started) == 6
    assert numbers(again) == numbers(first)


@pytest.mark.parametrize(
    "damage", [b"", b"{}", b"[1", b'{"key": "other", "cell": {}, "result": {}, "surroundings": {}}']
)
def test_a_damaged_record_is_run_again(tmp_path, damage):
    first = run(SMALL, tmp_path)
    (tmp_path / "cells" / f"{first[2].key}.json").write_bytes(damage)
    (tmp_path / "cells" / f"{first[3].key}.safetensors").unlink()
    watching = Watching()
    assert numbers(run(SMALL, tmp_path, progress=watching)) == numbers(first)
    assert watching.started == [first[2].key, first[3].key]


def test_the_order_of_cells_does_not_change_their_numbers(tmp_path):
    """An adapter is kept from cell to cell: it must not remember anything."""
    plan = replace(SMALL, methods=("tent", "eata", "sar"), source_size=64, hyper={"eata": {"margin": 2.0}})
    forward = {r.key: r.result["metrics"] for r in run(plan, tmp_path / "a")}
    backward = replace(plan, corruptions=("snow", "fog"), methods=("sar", "eata", "tent"))
    assert {r.key: r.result["metrics"] for r in run(backward, tmp_path / "b")} == forward


@pytest.mark.parametrize("objective", come.objectives.names())
def test_rows_of_masked_classes_and_of_samples_without_an_answer(objective):
    nan, inf = torch.nan, torch.inf
    logits = torch.tensor([[3.0, 4.0, -inf], [nan, 0.0, 1.0], [-1e4, -1e4, -1e4], [-2e5, 0.0, 1.0]])
    zeros = torch.zeros(4, dtype=torch.int64)
    batch = Batch(torch.zeros(4, 3, 8, 8), zeros, zeros, zeros)
    for valid in (None, torch.tensor([True, False, False, True])):
        rows = _rows(come.objectives.get(objective), come.Step(logits, valid=valid), batch, 0)
        assert all(column.isfinite().all() for column in rows.values())
        assert rows["finite"].tolist() == [True, False, valid is None, True]
        assert rows["norm"][0] == 5
        assert rows["norm"][3] > 1e5
        for name in ("confidence", "energy"):
            assert rows[name].argmin() in (1, 2)


def test_seeds_change_the_stream_and_nothing_else(tmp_path):
    records = run(replace(SMALL, methods=("source",), seeds=(0, 1)), tmp_path)
    rows = [RunFolder(tmp_path).rows(r.key)["index"] for r in records if "fog" in r.cell["corruptions"]]
    assert not torch.equal(rows[0], rows[1])


def test_a_stream_can_be_replayed(tmp_path):
    first = run(SMALL, tmp_path / "a")
    streams = [Stream.load(path) for path in sorted((tmp_path / "a" / "streams").glob("*.json"))]
    bench = Bench(SMALL, streams=streams)
    again = bench.run(RunFolder(tmp_path / "b"))
    assert [r.result["metrics"] for r in again] == [r.result["metrics"] for r in first]
    assert {r.key for r in again}.isdisjoint(r.key for r in first)  # a replay is not mistaken for the plan's own stream
    with pytest.raises(come.InputError, match="no stream was given for fog"):
        Bench(SMALL, streams=[s for s in streams if s.domain != "fog"]).run(RunFolder(tmp_path / "c"))
    with pytest.raises(come.InputError, match="replay it on the data it was made from"):
        Bench(SMALL, streams=[replace(streams[0], data="folder:x")])


def test_your_own_data_and_model(tmp_path):
    model = models.Model("mine", TinyClassifier(torch.nn.BatchNorm2d), models.Preprocess(8, 8), num_classes=5)
    items = [(torch.randint(0, 256, (3, 8, 8), dtype=torch.uint8), i % 5) for i in range(40)]
    source = DatasetSource(items, num_classes=5, name="mine")
    plan = replace(SMALL, model="mine", data="mine", limit=None)
    records = run(plan, tmp_path, model=model, source=source)
    assert records[0].result["samples"] == 40


def test_skipped_images_are_counted_in_the_record(tmp_path):
    for name in ("a", "b"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for i in range(4):
            Image.fromarray(np.full((8, 8, 3), 40 * i, dtype=np.uint8)).save(tmp_path / "photos" / name / f"{i}.png")
    (tmp_path / "photos" / "a" / "2.png").write_bytes(b"broken")
    module = TinyClassifier(torch.nn.BatchNorm2d)
    module.head = torch.nn.Linear(8, 2)
    model = models.Model("mine", module, models.Preprocess(8, 8), num_classes=2)
    plan = replace(SMALL, model="mine", data=f"folder:{tmp_path / 'photos'}", limit=None)
    records = Bench(plan, model=model, on_bad_image="skip").run(RunFolder(tmp_path / "run"))
    assert [(r.result["samples"], r.result["bad_images"]) for r in records] == [(7, 1)] * 6
    with pytest.raises(come.InputError, match=r"a/2\.png"):
        Bench(plan, model=model).run(RunFolder(tmp_path / "other"))


def test_class_counts_that_do_not_fit_are_both_named():
    source = DatasetSource([(torch.zeros(3, 32, 32, dtype=torch.uint8), 0)], num_classes=3, name="mine")
    with pytest.raises(come.InputError, match="mine has 3 classes, glyphs-vit has 100"):
        Bench(SMALL, source=source)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"methods": ("tnet",)}, "did you mean 'tent'"),
        ({"methods": ()}, "methods must be a list of at least one"),
        ({"methods": ("tent", "tent")}, "without repetition"),
        ({"objectives": ("cmoe",)}, "did you mean 'come'"),
        ({"corruptions": ("fogg",)}, "did you mean 'fog'"),
        ({"severity": 0}, "severity must be from 1 to 5, got 0"),
        ({"severity": 6}, "severity must be from 1 to 5, got 6"),
        ({"setting": "standart"}, "did you mean 'standard'"),
        ({"batch_size": 0}, "batch-size must be an integer >= 1, got 0"),
        ({"limit": 0}, "limit must be an integer >= 1, got 0"),
        ({"hyper": {"tent": {"lrr": 1}}}, "no hyperparameter of tent 'lrr'; did you mean 'lr'"),
        ({"hyper": {"eata": {"lr": 1}}}, "no method in this run 'eata'"),
    ],
)
def test_bad_plans(change, message):
    with pytest.raises(come.ConfigError, match=message):
        replace(SMALL, **change)


def test_quick_is_the_first_corruption_of_each_group():
    assert QUICK == ("gaussian_noise", "defocus_blur", "snow", "contrast")


@pytest.mark.parametrize(
    ("text", "value"),
    [("tent.lr=5e-4", 5e-4), ("tent.steps=2", 2), ("sar.quirks=true", True), ("tent.optimizer=adam", "adam")],
)
def test_hyperparameters_from_text(text, value):
    assert parse_hyper(text)[2] == value
    with pytest.raises(come.ConfigError, match=r"write e\.g\. --set tent\.lr=5e-4"):
        parse_hyper("lr=3")


def test_run_folders_that_are_refused(tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").touch()
    with pytest.raises(come.StateError, match="is not empty and not a run of come"):
        RunFolder(tmp_path / "full")
    (tmp_path / "file").touch()
    with pytest.raises(come.StateError, match="cannot write to the run folder"):
        RunFolder(tmp_path / "file" / "run")
    RunFolder(tmp_path / "run")
    for text, message in [
        ('{"format": "come-run-9"}', "is not of format"),
        ("nonsense", "is not of format"),
        ('{"format": "come-run-1", "come": "0.0.1"}', r"was written by come 0\.0\.1"),
    ]:
        (tmp_path / "run" / "run.json").write_text(text)
        with pytest.raises(come.StateError, match=message):
            RunFolder(tmp_path / "run")


def test_a_full_disk_loses_nothing_that_was_finished(tmp_path, monkeypatch):
    count = 0

    def full(tensors, path):
        nonlocal count
        count += 1
        if count == 3:
            path.write_bytes(b"half")
            raise OSError(28, "No space left on device")
        save(tensors, path)

    save = come.bench.store.save_file
    monkeypatch.setattr(come.bench.store, "save_file", full)
    with pytest.raises(come.StateError, match=r"No space left on device.*finished cells are intact"):
        run(SMALL, tmp_path)
    assert len(list((tmp_path / "cells").glob("*.json"))) == 2
    assert not [p for p in (tmp_path / "cells").iterdir() if p.name.startswith(".")]
    monkeypatch.undo()
    watching = Watching()
    run(SMALL, tmp_path, progress=watching)
    assert watching.finished == [True, True, False, False, False, False]


def test_a_model_is_given_back_after_an_error(tmp_path, monkeypatch):
    bench = Bench(SMALL)
    before = {k: v.clone() for k, v in bench._model.module.state_dict().items()}

    class Stops(Progress):
        def finish(self, cell, record, resumed):
            if cell.method == "tent":
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bench.run(RunFolder(tmp_path), Stops())
    assert all(torch.equal(v, before[k]) for k, v in bench._model.module.state_dict().items())


COMMAND = [
    *(sys.executable, "-m", "come", "bench", "--methods", "source,tent,sar", "--corruptions", "weather"),
    *("--limit", "256", "--out"),
]


def test_kill_and_go_on(tmp_path):
    whole = run(
        Plan(methods=("source", "tent", "sar"), corruptions=("snow", "frost", "fog", "brightness"), limit=256),
        tmp_path / "undisturbed",
    )
    out = tmp_path / "killed"
    kills = 0
    for wanted in (1, 6, 13):
        process = subprocess.Popen([*COMMAND, str(out)], stdout=subprocess.DEVNULL)
        until = time.time() + 120
        while time.time() < until and process.poll() is None and len(list(out.glob("cells/*.json"))) < wanted:
            time.sleep(0.005)
        kills += process.poll() is None
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert kills == 3
    survived = len(list(out.glob("cells/*.json")))
    done = subprocess.run([*COMMAND, str(out)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("(done before)") == survived < 20
    records = [Record(**json.loads(p.read_text())) for p in out.glob("cells/*.json")]
    assert sorted(numbers(records), key=str) == sorted(numbers(whole), key=str)
    assert not list(out.glob("cells/.*"))
    assert (out / "report.md").exists()


def test_two_processes_share_one_folder(tmp_path):
    out = tmp_path / "shared"
    both = [
        subprocess.Popen([*COMMAND, str(out)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    texts = [process.communicate(timeout=300) for process in both]
    assert [p.returncode for p in both] == [0, 0], texts
    assert len(list(out.glob("cells/*.json"))) == 20
    ran = sum(text[0].count("\n[") + text[0].startswith("[") - text[0].count("(done before)") for text in texts)
    assert ran == 20  # every cell once, by one of the two


def test_many_open_one_new_folder_at_once(tmp_path):
    for round_ in range(20):
        with ThreadPoolExecutor(8) as pool:
            folders = list(pool.map(lambda _, out=tmp_path / f"{round_}": RunFolder(out), range(8)))
        assert all(folder.cells.is_dir() for folder in folders)
        assert sorted(path.name for path in folders[0].path.iterdir()) == ["cells", "run.json", "streams"]


def test_ctrl_c_keeps_what_is_done(tmp_path):
    out = tmp_path / "run"
    process = subprocess.Popen([*COMMAND, str(out)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    until = time.time() + 120
    while time.time() < until and not list(out.glob("cells/*.json")):
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 130
    assert error.strip() == "error: interrupted; finished cells are kept: run the same command to go on"
    assert list(out.glob("cells/*.json"))
