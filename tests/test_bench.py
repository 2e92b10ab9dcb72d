"""The runner: cells, records, resuming, and what survives a kill."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

import come
from come.bench import Bench, Plan, RunFolder, cli, measure, models, run
from come.bench.data import Batch, DatasetSource, Preprocess, Stream
from come.bench.engines import cell_runner, local
from come.bench.engines.cell_runner import CellRunner
from come.bench.engines.progress import Progress
from come.bench.engines.schedule import Schedule
from come.bench.engines.workload import shard_of, work
from come.bench.inputs import Inputs
from come.bench.measure import Table
from come.bench.plan import QUICK, parse_hyper, parse_shard, typed
from come.bench.record import Failure
from come.bench.report.writing import write_report
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
    return [(r.key, r.result.metrics) for r in records]


def test_a_run_and_its_records(tmp_path):
    watching = Watching()
    records = run(SMALL, tmp_path / "run", progress=watching)
    assert len(records) == 2 * 3  # source once, tent with two objectives, each on two corruptions
    assert watching.samples == 6 * 96
    record = records[-1]
    assert record.cell.method == "tent"
    assert record.cell.objective == "come"
    result = record.result
    assert result.samples == 96
    assert result.bad_images == 0
    assert result.seconds > 0
    assert result.peak_memory_mb > 0
    assert result.lr == pytest.approx(2.5e-4)
    assert set(record.machine.versions) == {"python", "come-tta", "commit", "torch", "timm", "numpy"}
    folder = RunFolder(tmp_path / "run")
    rows = folder.rows(record.key)
    assert {"index", "label", "prediction", "confidence", "used", "domain"} <= set(rows)
    assert all(len(value) == 96 for value in rows.values())
    right = (rows["label"] == rows["prediction"]).double().mean().item()
    assert right == result.metrics["snow"]["accuracy"]
    assert len(list((tmp_path / "run" / "streams").glob("*.json"))) == 2


def test_finished_cells_are_not_run_again(tmp_path):
    first = run(SMALL, tmp_path)
    watching = Watching()
    again = run(SMALL, tmp_path, progress=watching)
    assert again == first
    assert watching.started == []
    larger = SMALL.but(methods=("source", "norm", "tent"))
    watching = Watching()
    run(larger, tmp_path, progress=watching)
    assert watching.finished.count(False) == 2  # the new method only


def test_fresh_runs_everything_again(tmp_path):
    first = run(SMALL, tmp_path)
    watching = Watching()
    again = Bench(SMALL).run(RunFolder(tmp_path), watching, fresh=True)
    assert len(watching.started) == 6
    assert numbers(again) == numbers(first)


@pytest.mark.parametrize("damage", [b"", b"{}", b"[1", b"\x08\0\0\0\0\0\0\0{}      "])
def test_a_damaged_cell_is_run_again(tmp_path, damage):
    first = run(SMALL, tmp_path)
    (tmp_path / "cells" / f"{first[2].key}.safetensors").write_bytes(damage)
    (tmp_path / "cells" / f"{first[3].key}.safetensors").unlink()
    watching = Watching()
    assert numbers(run(SMALL, tmp_path, progress=watching)) == numbers(first)
    assert watching.started == [first[2].key, first[3].key]


@pytest.mark.parametrize("place", ["header", "middle", "end"])
def test_a_flipped_bit_is_noticed(tmp_path, place):
    first = run(SMALL.but(methods=("source",), corruptions=("fog",)), tmp_path)
    path = tmp_path / "cells" / f"{first[0].key}.safetensors"
    data = bytearray(path.read_bytes())
    at = {"header": data.index(b"accuracy") + 3, "middle": len(data) // 2 + 200, "end": len(data) - 1}[place]
    data[at] ^= 1
    path.write_bytes(bytes(data))
    with pytest.warns(UserWarning, match="left out"):
        assert not RunFolder.existing(tmp_path).records()


def test_whether_a_cell_is_finished_is_asked_of_its_header_alone(tmp_path):
    """Rows that were zeroed in place are noticed when they are used, and by the next run, not when somebody asks."""
    (first,) = run(SMALL.but(methods=("source",), corruptions=("fog",)), tmp_path)
    folder = RunFolder(tmp_path)
    path, whole = folder.file(first.key), folder.file(first.key).read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    path.write_bytes(whole[:header] + bytes(len(whole) - header))
    assert folder.record(first.cell) == first
    assert folder.is_damaged(first.cell)
    with pytest.raises(come.StateError, match="checksum mismatch"):
        folder.rows(first.key)
    path.write_bytes(whole[:-1])  # too short for what the header says
    assert folder.record(first.cell) is None
    path.write_bytes(whole)
    with open(path, "r+b") as file:
        os.truncate(file.fileno(), 2**40)  # too long to be read
    assert folder.record(first.cell) is None
    path.write_bytes(whole[:header] + bytes(len(whole) - header))
    watching = Watching()
    assert numbers(run(SMALL.but(methods=("source",), corruptions=("fog",)), tmp_path, progress=watching))
    assert watching.finished == [False]


def test_a_resumed_run_reads_the_rows_of_a_cell_once(tmp_path, monkeypatch):
    first = run(SMALL, tmp_path)
    reads, read = [], come.bench.folder.load
    monkeypatch.setattr(come.bench.folder, "load", lambda data: reads.append(len(data)) or read(data))
    assert run(SMALL, tmp_path) == first
    assert len(reads) == len(first)


def test_the_streams_of_a_cell_are_made_once(tmp_path, monkeypatch):
    bench, made = Bench(SMALL), []
    episodes = Inputs.episodes
    monkeypatch.setattr(Inputs, "episodes", lambda self, cell: made.append(cell.key) or episodes(self, cell))
    bench.run(RunFolder(tmp_path))
    assert made == [cell.key for cell in bench.cells]


def test_the_order_of_cells_does_not_change_their_numbers(tmp_path):
    """An adapter is kept from cell to cell: it must not remember anything."""
    plan = SMALL.but(methods=("tent", "eata", "sar"), source_size=64, hyper={"eata": {"margin": 2.0}})
    forward = {r.key: r.result.metrics for r in run(plan, tmp_path / "a")}
    backward = plan.but(corruptions=("snow", "fog"), methods=("sar", "eata", "tent"))
    assert {r.key: r.result.metrics for r in run(backward, tmp_path / "b")} == forward


@pytest.mark.parametrize("objective", come.objectives.names())
def test_rows_of_masked_classes_and_of_samples_without_an_answer(objective):
    nan, inf = torch.nan, torch.inf
    logits = torch.tensor([[3.0, 4.0, -inf], [nan, 0.0, 1.0], [-1e4, -1e4, -1e4], [-2e5, 0.0, 1.0]])
    zeros = torch.zeros(4, dtype=torch.int64)
    batch = Batch(torch.zeros(4, 3, 8, 8), zeros, zeros, zeros)
    for valid in (None, torch.tensor([True, False, False, True])):
        table = Table(come.objectives.get(objective))
        table.add(come.Step(logits, valid=valid), batch, 0)
        rows = table.rows()
        assert all(column.isfinite().all() for column in rows.values())
        assert rows["finite"].tolist() == [True, False, valid is None, True]
        assert rows["norm"][0] == 5
        assert rows["norm"][3] > 1e5
        for name in ("confidence", "energy"):
            assert rows[name].argmin() in (1, 2)


def test_rows_of_many_batches_at_once_are_those_of_each(monkeypatch):
    draw = torch.Generator().manual_seed(0)
    steps = [
        (
            come.Step(
                torch.randn(size, 10, generator=draw) * 5,
                used=None if size == 3 else torch.rand(size, generator=draw) > 0.5,
                valid=torch.rand(size, generator=draw) > 0.2,
            ),
            Batch(torch.empty(0), *(torch.randint(10, (size,), generator=draw) for _ in range(3))),
        )
        for size in (64, 64, 3, 64, 1)
    ]
    for objective in map(come.objectives.get, come.objectives.names()):
        found = []
        for block in (1, 1000, 2**21):
            monkeypatch.setattr(measure, "BLOCK", block)
            table = Table(objective)
            for number, (step, batch) in enumerate(steps):
                table.add(step, batch, number // 2)
            found.append(table.rows())
        for rows in found[1:]:
            assert all(torch.equal(rows[name], column) for name, column in found[0].items())
    assert Table(objective).rows() == {}


def test_how_a_model_computes_is_a_knob(monkeypatch):
    given = []
    adapt = cell_runner.adapt

    def noting(*args, **more):
        known = {name: more.pop(name) for name in ("precision", "compile", "channels_last") if name in more}
        given.append(known)
        return adapt(*args, **more)

    monkeypatch.setattr(cell_runner, "adapt", noting)
    plan = SMALL.but(methods=("source",), precision="bf16", compile=True, channels_last=True)
    Bench(plan)
    Bench(SMALL.but(methods=("source",)))
    assert given == [{"precision": "bf16", "compile": True, "channels_last": True}, {}]
    assert next(plan.cells(9)).key != next(SMALL.cells(9)).key
    with pytest.raises(come.ConfigError, match="precision must be 'float32', 'tf32' or 'bf16', got 'fp8'"):
        SMALL.but(precision="fp8")


def test_seeds_change_the_stream_and_nothing_else(tmp_path):
    records = run(SMALL.but(methods=("source",), seeds=(0, 1)), tmp_path)
    rows = [RunFolder(tmp_path).rows(r.key)["index"] for r in records if "fog" in r.cell.corruptions]
    assert not torch.equal(rows[0], rows[1])


def test_a_limited_run_uses_samples_of_all_classes(tmp_path):
    """The same ones for every method, in a run that goes on too, and the report says so."""
    images, labels = torch.randint(256, (40, 3, 8, 8), dtype=torch.uint8), [i // 10 for i in range(40)]
    source = DatasetSource(list(zip(images, labels, strict=True)), num_classes=4, name="mine")
    layers = torch.nn.Flatten(), torch.nn.LayerNorm(192), torch.nn.Linear(192, 4)
    model = models.Model("mine", torch.nn.Sequential(*layers), Preprocess(8, 8), 4)
    plan = SMALL.but(model="mine", data="mine", limit=12, seeds=(0, 1), corruptions=("fog",))
    first = run(plan.but(methods=("source",)), tmp_path, source=source, model=model)
    records = run(plan, tmp_path, source=source, model=model)
    assert [r.machine for r in records[:2]] == [r.machine for r in first]
    used = {r.cell.seed: set() for r in records}
    for record in records:
        rows = RunFolder(tmp_path).rows(record.key)
        used[record.cell.seed].add(tuple(rows["index"].tolist()))
        assert rows["label"].bincount().tolist() == [3, 3, 3, 3]
    assert [len(orders) for orders in used.values()] == [1, 1]
    assert used[0] != used[1]
    write_report(records, tmp_path / "summary.md")
    assert "12 of 40 images (spread over the classes by the seed" in (tmp_path / "summary.md").read_text()
    assert records[0].key != Bench(plan.but(limit=None), source=source, model=model).cells[0].key
    streams = [Stream.load(path) for path in sorted((tmp_path / "streams").glob("*.json"))]
    again = Bench(plan, source=source, model=model, streams=streams).run(RunFolder(tmp_path / "b"))
    assert [r.result.metrics for r in again] == [r.result.metrics for r in records]
    assert again[0].cell.total is None


def test_a_stream_can_be_replayed(tmp_path):
    first = run(SMALL, tmp_path / "a")
    streams = [Stream.load(path) for path in sorted((tmp_path / "a" / "streams").glob("*.json"))]
    bench = Bench(SMALL, streams=streams)
    again = bench.run(RunFolder(tmp_path / "b"))
    assert [r.result.metrics for r in again] == [r.result.metrics for r in first]
    assert {r.key for r in again}.isdisjoint(r.key for r in first)  # a replay is not mistaken for the plan's own stream
    with pytest.raises(come.InputError, match="no stream was given for fog"):
        Bench(SMALL, streams=[s for s in streams if s.domain != "fog"]).run(RunFolder(tmp_path / "c"))
    with pytest.raises(come.InputError, match="replay it on the data it was made from"):
        Bench(SMALL, streams=[Stream(data="folder:x", order=(0,))])


def test_an_open_world_can_be_replayed(tmp_path):
    plan = Plan(setting="open-world", methods=("source",), data="fashion:20", outliers=("fashion-outliers:far",))
    first = run(plan, tmp_path / "a")
    streams = [Stream.load(path) for path in sorted((tmp_path / "a" / "streams").glob("*.json"))]
    again = Bench(plan, streams=streams).run(RunFolder(tmp_path / "b"))
    assert [r.result.metrics for r in again] == [r.result.metrics for r in first]
    one = [s for s in streams if s.outliers]
    (alone,) = Bench(plan, streams=one).run(RunFolder(tmp_path / "c"))
    assert alone.result.metrics == first[1].result.metrics


def test_your_own_data_and_model(tmp_path):
    model = models.Model("mine", TinyClassifier(torch.nn.BatchNorm2d), models.Preprocess(8, 8), num_classes=5)
    draw = torch.Generator().manual_seed(0)
    items = [(torch.randint(0, 256, (3, 8, 8), dtype=torch.uint8, generator=draw), i % 5) for i in range(40)]
    source = DatasetSource(items, num_classes=5, name="mine")
    plan = SMALL.but(model="mine", data="mine", limit=None)
    with pytest.warns(
        UserWarning, match="without adaptation mine is right for .* of 40 images of mine; guessing"
    ) as said:
        records = run(plan, tmp_path, model=model, source=source)
    assert said[0].filename == __file__
    assert "The labels must be numbered as the model's outputs are." in str(said[0].message)
    assert records[0].result.samples == 40


def test_skipped_images_are_counted_in_the_record(tmp_path):
    for name in ("a", "b"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for i in range(4):
            Image.fromarray(np.full((8, 8, 3), 40 * i, dtype=np.uint8)).save(tmp_path / "photos" / name / f"{i}.png")
    (tmp_path / "photos" / "a" / "2.png").write_bytes(b"broken")
    module = TinyClassifier(torch.nn.BatchNorm2d)
    module.head = torch.nn.Linear(module.head.in_features, 2)
    model = models.Model("mine", module, models.Preprocess(8, 8), num_classes=2)
    plan = SMALL.but(model="mine", data=f"folder:{tmp_path / 'photos'}", limit=None)
    records = Bench(plan, model=model, on_bad_image="skip").run(RunFolder(tmp_path / "run"))
    assert [(r.result.samples, r.result.bad_images) for r in records] == [(7, 1)] * 6
    with pytest.raises(come.InputError, match=r"a/2\.png"):
        Bench(plan, model=model).run(RunFolder(tmp_path / "other"))


def test_a_knob_is_an_option_a_part_of_the_identity_and_of_the_record(tmp_path):
    """One line in `Knobs`: here the statistics of BatchNorm."""
    plan = SMALL.but(methods=("tent",), objectives=("em",), corruptions=("gaussian_noise",))
    (batch,) = run(plan, tmp_path / "run")
    (source,) = run(plan.but(**typed({"statistics": "source"})), tmp_path / "run")
    assert (batch.cell.statistics, source.cell.statistics) == (None, "source")
    assert batch.key != source.key
    assert batch.result.metrics != source.result.metrics
    with pytest.raises(come.ConfigError, match="statistics has no effect: fashion-vit has no BatchNorm layer"):
        Bench(SMALL.but(model="fashion-vit", statistics="source"))


def test_class_counts_that_do_not_fit_are_both_named():
    source = DatasetSource([(torch.zeros(3, 32, 32, dtype=torch.uint8), 0)], num_classes=3, name="mine")
    with pytest.raises(come.InputError, match="mine has 3 classes, fashion-resnet-bn has 8"):
        Bench(SMALL, source=source)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"methods": ("tnet",)}, "did you mean 'tent'"),
        ({"methods": ()}, "methods must be a list of at least one"),
        ({"methods": ("tent", "tent")}, "without repetition"),
        ({"objectives": ("cmoe",)}, "did you mean 'come'"),
        ({"corruptions": ("fogg",)}, "did you mean 'fog'"),
        ({"severity": 0}, "severity must be greater than or equal to 1, got 0"),
        ({"severity": 6}, "severity must be less than or equal to 5, got 6"),
        ({"severity": "5"}, "severity must be a valid integer, got '5'"),
        ({"data": "a\nb"}, "data must be printable text"),
        ({"model": "m" * 2000}, "model must be printable text of 1 to 1000 characters"),
        ({"guard": 1}, "guard must be a valid boolean, got 1"),
        ({"seeds": (2**63,)}, "seeds"),
        (
            {"normalization": "imagnet"},
            "normalization must be 'model', 'imagenet', 'half', 'caffe' or 'lite', got 'imagnet'",
        ),
        ({"hyper": {"tent": {"lr": "fast"}}}, "lr must be a positive number, or None for the default, got 'fast'"),
        ({"hyper": {"tent": {"steps": 0}}}, "steps must be an integer >= 1, got 0"),
        ({"smeed": 1}, "no option 'smeed'; did you mean 'seeds'"),
        ({"setting": "standart"}, "did you mean 'standard'"),
        ({"batch_size": 0}, "batch-size must be greater than or equal to 1, got 0"),
        ({"limit": 0}, "limit must be greater than or equal to 1, got 0"),
        ({"hyper": {"tent": {"lrr": 1}}}, "no hyperparameter of tent 'lrr'; did you mean 'lr'"),
        ({"hyper": {"eata": {"lr": 1}}}, "no method in this run 'eata'"),
    ],
)
def test_bad_plans(change, message):
    with pytest.raises(come.ConfigError, match=message):
        SMALL.but(**change)


def test_quick_is_the_first_corruption_of_each_group():
    assert QUICK == ("gaussian_noise", "defocus_blur", "snow", "contrast")


@pytest.mark.parametrize(
    ("text", "value"),
    [("tent.lr=5e-4", 5e-4), ("tent.steps=2", 2), ("sar.quirks=true", True), ("tent.optimizer=adam", "adam")],
)
def test_hyperparameters_from_text(text, value):
    assert parse_hyper(text)[2] == value
    with pytest.raises(come.ConfigError, match=r"set must be METHOD\.NAME=VALUE, e\.g\. tent\.lr=5e-4"):
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
        ('{"format": "come-run-2", "come": "0.0.1"}', r"was written by come 0\.0\.1"),
        ('{"format": "come-run-1", "come": "0.1.0"}', "was written by the first edition of come"),
    ]:
        (tmp_path / "run" / "run.json").write_text(text)
        with pytest.raises(come.StateError, match=message):
            RunFolder(tmp_path / "run")


def test_a_full_disk_loses_nothing_that_was_finished(tmp_path, monkeypatch):
    count = 0

    def full(tensors, metadata=None):
        nonlocal count
        count += 1
        if count == 3:
            raise OSError(28, "No space left on device")
        return save(tensors, metadata)

    save = come.bench.folder.save
    monkeypatch.setattr(come.bench.folder, "save", full)
    with pytest.raises(come.StateError, match=r"No space left on device.*finished cells are intact"):
        run(SMALL, tmp_path)
    assert len(list((tmp_path / "cells").iterdir())) == 2
    monkeypatch.undo()
    watching = Watching()
    run(SMALL, tmp_path, progress=watching)
    assert watching.finished == [True, True, False, False, False, False]


def test_a_disk_that_is_too_small_is_noticed_before_the_first_cell(tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1000))
    watching = Watching()
    with pytest.raises(
        come.StateError, match=r"the rows of this run take about .* MB, but .* has 0 MB free; make room"
    ):
        run(SMALL, tmp_path / "run", progress=watching)
    assert watching.started == []


def test_a_lock_that_everyone_gets_loses_no_cell(tmp_path, monkeypatch):
    """Some network file systems grant a lock to all who ask; then two processes may run one cell at the same time."""
    monkeypatch.setattr(
        "come.bench.folder.FileLock", lambda path: SimpleNamespace(acquire=lambda **_: None, release=lambda: None)
    )
    with ThreadPoolExecutor(3) as pool:
        done = list(pool.map(lambda _: run(SMALL, tmp_path), range(3)))
    assert numbers(done[0]) == numbers(done[1]) == numbers(done[2])
    assert len(RunFolder.existing(tmp_path).records()) == 6


def test_nothing_is_written_through_links(tmp_path):
    """A lock or a folder that is a link to somewhere else is refused, and nothing appears there."""
    run(SMALL, tmp_path / "run")
    records = RunFolder.existing(tmp_path / "run").records()
    cell = records[0].cell
    (tmp_path / "run" / "locks" / f"{cell.key}.lock").unlink()
    (tmp_path / "run" / "locks" / f"{cell.key}.lock").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "run" / "cells" / f"{cell.key}.safetensors").unlink()
    with pytest.raises(come.StateError, match="cannot write the lock"):
        run(SMALL, tmp_path / "run")
    assert not (tmp_path / "elsewhere").exists()
    for name in ("cells", "streams", "locks"):
        other = tmp_path / f"with-{name}"
        RunFolder(other)
        (other / name).rmdir()
        (tmp_path / "away").mkdir(exist_ok=True)
        (other / name).symlink_to(tmp_path / "away")
        with pytest.raises(come.StateError, match="is a symbolic link"):
            RunFolder(other)
    assert not list((tmp_path / "away").iterdir())


def test_a_model_is_given_back_after_an_error(tmp_path, monkeypatch):
    bench = Bench(SMALL)
    before = {k: v.clone() for k, v in bench.inputs.model.module.state_dict().items()}

    class Stops(Progress):
        def finish(self, cell, record, resumed):
            if cell.method == "tent":
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bench.run(RunFolder(tmp_path), Stops())
    assert all(torch.equal(v, before[k]) for k, v in bench.inputs.model.module.state_dict().items())


@pytest.fixture
def fragile(monkeypatch):
    """A benchmark whose cells on fog fail for as long as the list has anything in it."""
    ill, measure = ["ill"], CellRunner.measure

    def fails(self, cell, start, advance):
        if ill and "fog" in cell.corruptions and cell.method == "tent":
            raise RuntimeError("no\nluck")
        return measure(self, cell, start, advance)

    monkeypatch.setattr(CellRunner, "measure", fails)
    return ill


FRAGILE = Plan(methods=("source", "tent"), objectives=("em",), corruptions=("fog", "snow"), limit=32)


def test_a_cell_that_fails_stops_no_other_and_is_tried_again(tmp_path, fragile):
    class Notes(Progress):
        def fail(self, failure):
            told.append(str(failure))

    told = []
    bench, folder = Bench(FRAGILE), RunFolder(tmp_path)
    assert len(bench.run(folder, Notes())) == 3
    assert told == [str(failure) for failure in bench.failed] == ["tent + em, fog, seed 0: RuntimeError: no luck"]
    assert folder.failures() == RunFolder.existing(tmp_path).failures() == bench.failed
    with pytest.warns(UserWarning, match="failed: tent [+] em, fog, seed 0: RuntimeError: no luck; run again"):
        assert len(run(FRAGILE, tmp_path)) == 3
    fragile.clear()
    assert len(run(FRAGILE, tmp_path)) == 4
    assert folder.failures() == []


def test_a_cell_that_failed_in_another_process_of_this_run_is_not_run_again(tmp_path, fragile):
    folder = RunFolder(tmp_path)
    cell = next(cell for cell in Bench(FRAGILE).cells if cell.method == "tent")

    class Meanwhile(Progress):
        def start(self, cell_, samples):
            folder.write_failure(Failure(cell=cell, reason="in another process"))

    fragile.clear()
    bench = Bench(FRAGILE)
    assert len(bench.run(folder, Meanwhile())) == 3
    assert [failure.reason for failure in bench.failed] == ["in another process"]


@pytest.mark.parametrize("text", ["", "[]", "{}", "[" * 10_000, '{"cell": {}, "reason": ""}', '{"cell": 1, "more": 2}'])
def test_a_damaged_failure_counts_as_none(tmp_path, text):
    folder = RunFolder(tmp_path)
    folder.failed.mkdir()
    folder.failure_file("0123456789abcdef").write_text(text)
    assert folder.failures() == []


def test_the_command_says_what_failed_and_its_exit_status_too(tmp_path, fragile, capsys, monkeypatch):
    command = ["come", "bench", "--methods", "source,tent", "--objectives", "em", "--limit", "32", "--jobs", "1"]
    monkeypatch.setattr(sys, "argv", [*command, "--corruptions", "fog,snow", "--out", str(tmp_path)])
    line = "tent + em, fog, seed 0: RuntimeError: no luck"
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 1
    assert f"1 failed: {line}" in capsys.readouterr().out
    assert f"Failed: {line}".replace("+", "") in (tmp_path / "report.md").read_text().replace("\\", "").replace("+", "")
    assert f"Failed: {line}" in (tmp_path / "report.html").read_text().replace("&#43;", "+")
    monkeypatch.setattr(sys, "argv", ["come", "report", str(tmp_path)])
    cli.main()
    assert f"1 failed: {line}" in (said := capsys.readouterr().out)
    assert "1 not finished: tent + em on fog, seed 0" in said
    fragile.clear()
    monkeypatch.setattr(sys, "argv", [*command, "--corruptions", "fog,snow", "--out", str(tmp_path)])
    cli.main()
    assert "failed" not in capsys.readouterr().out


def test_a_helper_without_memory_leaves_the_cell_to_the_others(tmp_path, monkeypatch):
    bench, folder = Bench(FRAGILE), RunFolder(tmp_path)
    bench._runner.is_helper = True
    monkeypatch.setattr(CellRunner, "measure", lambda *_: (_ for _ in ()).throw(MemoryError()))
    with pytest.raises(MemoryError):
        local.run(bench._runner, Schedule(folder, Progress(), {}, {}), bench.cells)
    assert folder.failures() == []


def test_shards_are_disjoint_complete_and_even():
    plan = Plan(methods=("source", "tent", "sar"), corruptions=("fog", "snow", "contrast"), seeds=(0, 1), limit=32)
    grid = list(plan.cells(32))
    for count in (1, 2, 5, 7, len(grid) + 1):
        shards = [shard_of(grid, number, count) for number in range(count)]
        assert sorted(cell.key for shard in shards for cell in shard) == sorted(cell.key for cell in grid)
        sums = [work(shard) for shard in shards]
        longest = max(work([cell]) for cell in grid)
        assert max(sums) - min(sums) <= longest


@pytest.mark.parametrize("shard", [(-1, 2), (2, 2), (0, 0)])
def test_a_shard_that_is_none_is_refused(shard):
    with pytest.raises(come.ConfigError, match="shard must be"):
        Bench(SMALL, shard=shard)
    with pytest.raises(come.ConfigError, match="shard must be I/N with 0 <= I < N"):
        parse_shard("/".join(map(str, shard)))


def test_shards_fill_one_folder_and_say_what_is_missing(tmp_path, monkeypatch, capsys):
    command = ["come", "bench", "--methods", "source,tent", "--objectives", "em", "--limit", "32", "--jobs", "1"]
    command += ["--corruptions", "fog,snow", "--out", str(tmp_path / "run"), "--shard"]
    said = []
    for number in range(2):
        monkeypatch.setattr(sys, "argv", [*command, f"{number}/2"])
        cli.main()
        said.append(capsys.readouterr().out)
        assert len(list((tmp_path / "run" / "cells").iterdir())) == 2 + 2 * number
    assert "2 not finished: source + em, snow, seed 0; tent + em, snow, seed 0" in said[0]
    assert "not finished" not in said[1]
    assert "(done before)" not in said[1]
    assert "snow" in said[1]
    monkeypatch.setattr(sys, "argv", [*command, "4/5"])  # more shards than cells
    cli.main()
    assert numbers(run(FRAGILE, tmp_path / "alone")) == numbers(run(FRAGILE, tmp_path / "run"))


@pytest.mark.skipif(os.name != "posix", reason="flock")
@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_stops_nobody(tmp_path, monkeypatch, number):
    import fcntl

    def refuses(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuses)
    assert len(run(FRAGILE, tmp_path)) == 4


COMMAND = [
    *(sys.executable, "-m", "come", "bench", "--methods", "source,tent,sar", "--corruptions", "weather"),
    *("--limit", "256", "--out"),
]


def test_many_open_one_new_folder_at_once(tmp_path):
    for round_ in range(20):
        with ThreadPoolExecutor(8) as pool:
            folders = list(pool.map(lambda _, out=tmp_path / f"{round_}": RunFolder(out), range(8)))
        assert all(folder.cells.is_dir() for folder in folders)
        assert sorted(path.name for path in folders[0].path.iterdir()) == ["cells", "locks", "run.json", "streams"]


def test_ctrl_c_keeps_what_is_done(tmp_path):
    out = tmp_path / "run"
    process = subprocess.Popen([*COMMAND, str(out)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    until = time.time() + 120
    while time.time() < until and not list(out.glob("cells/*.safetensors")):
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 130
    assert error.strip() == "error: interrupted; finished cells are kept: run the same command to go on"
    assert list(out.glob("cells/*.safetensors"))
