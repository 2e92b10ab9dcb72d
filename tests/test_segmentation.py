"""Segmentation in the benchmark: data, models, rows, verdicts, reports, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from calling import call
from PIL import Image
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F

import come
from come.bench import Bench, Plan, RunFolder, models, protocols, run
from come.bench.compare import compare_runs
from come.bench.data import Stream, batches, open_source
from come.bench.data.preprocess import WholeImage
from come.bench.data.scenes import CLASSES, compose, embedded_photographs, silhouette
from come.bench.dense import DenseTable
from come.bench.record import check_rows
from come.bench.report import results_table, write_html, write_report
from come.bench.report.pixels import classes_table, pictures
from come.bench.statistics import samples, verdicts
from come.errors import ConfigError, InputError
from come.method import Step
from come.metrics import Segmentation, miou

SHIFTS = ("fog", "gaussian_noise")


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """A run of a few scenes: the source, Tent with both objectives, and norm."""
    folder = RunFolder(tmp_path_factory.mktemp("run"))
    plan = Plan(task="segmentation", methods=("source", "norm", "tent"), corruptions=SHIFTS, limit=8, guard=False)
    return plan, folder, run(plan, folder.path)


# ---- the scenes ----


def test_a_scene_follows_from_its_seed():
    photographs = embedded_photographs("test")
    (image, label), (again, label_again) = (compose(*photographs, seed=7) for _ in range(2))
    assert torch.equal(image, again)
    assert torch.equal(label, label_again)
    other, _ = compose(*photographs, seed=8)
    assert not torch.equal(image, other)


def test_the_scenes_hold_all_classes_and_mostly_ground():
    labels = open_source("scenes:100").load(range(100)).labels
    shares = labels.flatten().bincount(minlength=len(CLASSES)) / labels.numel()
    assert 0.6 < shares[0] < 0.8
    assert shares[1:].min() > 0.01
    assert labels.unique().tolist() == list(range(len(CLASSES)))


def test_longer_data_begins_with_the_same_scenes():
    few, many = open_source("scenes:3").load([2]), open_source("scenes:9").load([2])
    assert torch.equal(few.images, many.images)
    assert torch.equal(few.labels, many.labels)


def test_source_scenes_are_not_those_of_the_stream():
    source = open_source("scenes:20")
    assert source.source_images(4).shape == (4, 3, 64, 64)
    stream = source.load(range(20)).images.flatten(1)
    assert not any((stream == image.flatten()).all(dim=1).any() for image in source.source_images(20))


def test_the_gap_between_trouser_legs_is_ground():
    legs = torch.tensor([[1, 1, 1], [1, 0, 1], [1, 0, 1]], dtype=torch.bool)
    assert torch.equal(silhouette(legs), legs)


@pytest.mark.parametrize("corruption", SHIFTS)
def test_corruptions_leave_labels_alone(corruption):
    source, whole = open_source("scenes:4"), WholeImage(64, 64)
    clean, hard = (
        next(batches(source, Stream.of("scenes:4", range(4), shift, 5, 0), whole, batch_size=4))
        for shift in (None, corruption)
    )
    assert torch.equal(clean.labels, hard.labels)
    assert not torch.equal(clean.images, hard.images)


# ---- the models ----


@pytest.mark.parametrize("name", ["scenes-unet-bn", "scenes-segformer"])
def test_the_embedded_models_are_those_that_were_measured(name):
    facts, model = models.embedded_facts(name), models.load(name)
    assert model.dense
    assert model.num_classes == len(CLASSES)
    assert models.fingerprint(model.module) == facts["sha256"]
    source = open_source("scenes:40")
    images, labels, *_ = source.load(range(40))
    metrics = Segmentation(len(CLASSES))
    with torch.no_grad():
        metrics.add(F.interpolate(model.module(model.preprocess(images)), (64, 64), mode="bilinear"), labels)
    assert metrics.summary()["miou"] == pytest.approx(facts["clean"]["miou"], abs=0.06)


@pytest.mark.parametrize("name", ["scenes_unet_bn", "scenes_segformer"])
def test_the_files_of_weights_are_small_and_keep_vectors_in_float32(name):
    file = models.FOLDER / f"{name}.safetensors"
    assert file.stat().st_size < 10**6
    kept = load_file(file)
    assert all(value.dtype == torch.float32 for value in kept.values() if value.ndim == 1)
    assert any(value.dtype == torch.float16 for value in kept.values())


def test_a_segmenter_of_transformers_from_a_folder(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.SegformerConfig(
        num_labels=3, hidden_sizes=[8, 8, 8, 8], depths=[1] * 4, num_attention_heads=[1] * 4, decoder_hidden_size=8
    )
    transformers.SegformerForSemanticSegmentation(config).save_pretrained(tmp_path)
    size = {"height": 64, "width": 64}
    transformers.SegformerImageProcessor(size=size).save_pretrained(tmp_path)
    model = models.load(f"hf:{tmp_path}")
    assert model.dense
    assert model.num_classes == 3
    adapter = come.adapt(model.module, "tent")
    assert adapter(torch.rand(1, 3, 64, 64)).shape == (1, 3, 16, 16)


# ---- a run ----


def test_the_rows_are_those_of_a_loop_written_by_hand(ran):
    plan, folder, records = ran
    record = next(r for r in records if r.cell.pair == ("tent", "em") and r.cell.corruptions == ("fog",))
    model, source = models.load("scenes-unet-bn"), open_source("scenes")
    adapter = come.adapt(model.module, "tent", objective="em", guard=False)
    (episode,) = Bench(plan).inputs.episodes(record.cell)
    metrics = Segmentation(len(CLASSES))
    for batch in batches(source, episode.stream, model.preprocess, batch_size=1):
        metrics.add(adapter(batch.images), batch.labels)
    found = record.result.metrics["fog"]
    for name, value in metrics.summary().items():
        assert found[name] == pytest.approx(value, abs=1e-5), name
    assert torch.equal(folder.rows(record.key)["confusion"].sum(dim=0).long(), metrics.counts)


def test_a_second_run_does_nothing_anew(ran):
    plan, folder, records = ran
    stamps = {r.key: folder.stamp(folder.file(r.key)) for r in records}
    again = run(plan, folder.path)
    assert [r.encoded() for r in again] == [r.encoded() for r in records]
    assert {r.key: folder.stamp(folder.file(r.key)) for r in again} == stamps


def test_the_task_is_a_part_of_a_cell_and_leaves_other_keys_as_they_were(ran):
    from come.bench import Cell

    before = Cell(method="tent", objective="come", corruptions=("fog",), severity=5, size=100)
    assert before.key == before.model_copy(update={"task": "classification"}).key
    assert before.key != before.model_copy(update={"task": "segmentation"}).key


@pytest.mark.parametrize("column", ["confusion", "softmax", "shown_label"])
def test_rows_of_a_wrong_shape_are_not_read(ran, column):
    _, folder, records = ran
    rows = folder.rows(records[0].key)
    check_rows(records[0], rows)
    with pytest.raises(ValueError, match=column):
        check_rows(records[0], rows | {column: rows[column][..., :-1].contiguous()})


def test_an_image_that_diverged_has_numbers():
    table = DenseTable(WholeImage(8, 8))
    source = open_source("scenes:2")
    batch = next(batches(source, Stream.of("scenes:2", range(2), None, 5, 0), WholeImage(64, 64), batch_size=2))
    logits = torch.zeros(2, 9, 64, 64)
    logits[1] = torch.nan
    table.add(Step(logits, None, None, None, None), batch, 0)
    rows = table.rows()
    assert rows["finite"].tolist() == [True, False]
    assert rows["softmax"].isfinite().all()


def test_verdicts_are_about_miou_over_resampled_images(ran):
    _, folder, records = ran
    found = samples(folder, records[0])["fog"]
    counts = folder.rows(records[0].key)["confusion"].sum(dim=0)
    assert found.estimates["miou"][0] == pytest.approx(miou(counts).item())
    assert found.estimates["miou"][1:].std() > 0
    judged = verdicts(folder, records)
    assert {key[3] for key in judged.gains} == {"miou", "accuracy"}
    same = verdicts(folder, [r for r in records if r.cell.method == "source"])
    assert not same.gains


def test_the_table_shows_miou_gain_accuracy_and_calibration(ran):
    _, folder, records = ran
    table = results_table(records, verdicts=verdicts(folder, records))
    assert [head.rstrip("↑↓") for head in table.columns] == ["Fog", "Gauss.", "mIoU", "Gain", "Acc", "ECE", "AURC"]
    line = dict(zip(table.keys, table.rows[0].entries, strict=True))
    both = [r.result.metrics[d]["miou"] for r in records[:2] for d in r.result.domains]
    assert line["average", "miou"].mean == pytest.approx(50 * sum(both))


def test_the_page_shows_classes_and_pictures(ran, tmp_path):
    _, folder, records = ran
    judged = verdicts(folder, records)
    classes = classes_table(folder, records)
    assert classes.columns == CLASSES
    shown = pictures(folder, records, judged)
    assert len(shown["rows"]) == 4  # two of each corruption
    assert all(None not in answers for *_, answers in shown["rows"])
    write_html(folder, records, tmp_path / "report.html", (), judged)
    page = (tmp_path / "report.html").read_text()
    assert page.count("<td><img") == 4 * (2 + 2 * len(shown["methods"]))
    assert "mIoU" in page
    assert "FPR" not in page
    write_report(records, tmp_path / "report.md", (), judged, [], None)
    assert "mIoU in percent" in (tmp_path / "report.md").read_text()


def test_a_score_is_refused(ran):
    _, folder, records = ran
    with pytest.raises(ConfigError, match="score belief has no effect on segmentation"):
        folder.rescored(records, "belief")


def test_rounds_without_a_reset(tmp_path):
    given = {"setting": "lifelong", "rounds": 2, "corruptions": SHIFTS, "limit": 3, "methods": ("tent",)}
    (record, _) = run(Plan(task="segmentation", **given), tmp_path)
    assert record.result.domains == ("fog (1)", "gaussian_noise (1)", "fog (2)", "gaussian_noise (2)")
    assert record.result.fresh == (True, False, False, False)
    assert record.result.samples == 12


def test_cells_as_streams_of_a_fleet_give_the_same_numbers(ran, tmp_path):
    plan, _, records = ran
    alone = {r.cell.key: r.result.metrics for r in records}
    together = Bench(plan.but(methods=("tent",), objectives=("em",)), together=2).run(RunFolder(tmp_path))
    assert len(together) == 2
    for record in together:
        for domain, found in record.result.metrics.items():
            assert found == pytest.approx(alone[record.cell.key][domain], abs=1e-5)


# ---- what is refused ----


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        ({"task": "segmentation", "setting": "imbalanced"}, ConfigError, "is for one label for each image"),
        ({"task": "segmentation", "setting": "open-world"}, ConfigError, "is for one label for each image"),
        ({"task": "segmentation", "setting": "episodic"}, ConfigError, "is for one label for each image"),
        (
            {"task": "segmentation", "data": "fashion"},
            InputError,
            "fashion has one label for each image; leave out --task",
        ),
        ({"data": "scenes"}, InputError, "scenes has a label for each pixel; add --task segmentation"),
        (
            {"task": "segmentation", "model": "fashion-vit"},
            InputError,
            "fashion-vit classifies images; leave out --task",
        ),
        ({"model": "scenes-segformer"}, InputError, "scenes-segformer classifies pixels; add --task segmentation"),
        (
            {"task": "segmentation", "corruptions": ("night",)},
            InputError,
            "scenes holds no night, which only acdc:PATH",
        ),
        ({"task": "segmentation", "data": "scenes:9999"}, InputError, "at most 2000 can be composed"),
        ({"task": "depth"}, ConfigError, "task must be 'classification' or 'segmentation', got 'depth'"),
    ],
)
def test_bad_combinations_are_refused_in_a_sentence(given, error, said):
    with pytest.raises(error, match=said):
        Bench(Plan(**given))


def test_a_model_with_another_number_of_classes_is_refused(tmp_path):
    streets(tmp_path, "leftImg8bit/val/a", "gtFine/val/a", "_leftImg8bit.png", "_gtFine_labelTrainIds.png")
    with pytest.raises(InputError, match="has 19 classes, scenes-unet-bn has 9"):
        Bench(Plan(task="segmentation", data=f"cityscapes:{tmp_path}"))


# ---- Cityscapes and ACDC ----


def streets(root, images, labels, ending, label_ending, count=2, largest=18):
    draw = np.random.default_rng(0)
    for folder in (images, labels):
        (root / folder).mkdir(parents=True)
    for i in range(count):
        pixels = draw.integers(0, 256, (24, 48, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(root / images / f"a_{i}{ending}")
        classes = draw.integers(0, largest + 1, (24, 48), dtype=np.uint8)
        classes[0] = 255
        Image.fromarray(classes).save(root / labels / f"a_{i}{label_ending}")


CITYSCAPES = ("leftImg8bit/val/a", "gtFine/val/a", "_leftImg8bit.png", "_gtFine_labelTrainIds.png")


def acdc(root, counts):
    for name, count in counts.items():
        place = f"{name}/train/GOPR1"
        streets(root, f"rgb_anon/{place}", f"gt/{place}", "_rgb_anon.png", "_gt_labelTrainIds.png", count)


def test_cityscapes(tmp_path):
    streets(tmp_path, *CITYSCAPES)
    source = open_source(f"cityscapes:{tmp_path}", WholeImage(12, 12))
    images, labels, indices, bad = source.load([1, 0])
    assert images.shape == (2, 3, 12, 24)  # the shorter side is resized, nothing is cropped
    assert labels.shape == (2, 24, 48)
    assert (labels[:, 0] == -1).all()
    assert labels.max() <= 18
    assert (indices.tolist(), bad, source.num_classes) == ([1, 0], 0, 19)
    assert source.labels().tolist() == [0, 0]
    before = source.digest()
    streets(tmp_path / "other", *CITYSCAPES, largest=3)
    assert open_source(f"cityscapes:{tmp_path / 'other'}", WholeImage(12, 12)).digest() != before


def test_acdc_holds_its_weather(tmp_path):
    acdc(tmp_path, {"fog": 2, "night": 3, "rain": 2, "snow": 2})
    source = open_source(f"acdc:{tmp_path}", WholeImage(24, 24))
    assert source.holds == ("fog", "night", "rain", "snow")
    assert len(source) == 2  # as many as the smallest condition has
    assert source.load([0, 1], "night").images.shape == (2, 3, 24, 48)
    with pytest.raises(InputError, match="does not hold gaussian_noise; it holds fog, night, rain, snow"):
        source.require(["gaussian_noise"], 5)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda root: (root / CITYSCAPES[1] / "a_0_gtFine_labelTrainIds.png").unlink(), "cannot read the labels .*a_0"),
        (
            lambda root: Image.new("L", (48, 24), 33).save(root / CITYSCAPES[1] / f"a_0{CITYSCAPES[3]}"),
            "has the label 33",
        ),
        (
            lambda root: Image.new("RGB", (48, 24)).save(root / CITYSCAPES[1] / f"a_0{CITYSCAPES[3]}"),
            "have the mode RGB",
        ),
    ],
)
def test_labels_that_cannot_be_used_are_named(tmp_path, spoil, said):
    streets(tmp_path, *CITYSCAPES)
    spoil(tmp_path)
    with pytest.raises(InputError, match=said):
        open_source(f"cityscapes:{tmp_path}", WholeImage(24, 24)).load([0])


@pytest.mark.parametrize(
    ("spec", "error", "said"),
    [
        (
            "cityscapes:{}",
            InputError,
            "has no image .*_leftImg8bit.png; give the folder that holds leftImg8bit and gtFine",
        ),
        ("cityscapes:{}:split=tset", ConfigError, "no split of cityscapes 'tset'. Known: train, val"),
        ("acdc:{}", InputError, "has none of the folders fog, night, rain, snow"),
    ],
)
def test_folders_that_are_not_the_layout_are_named(tmp_path, spec, error, said):
    with pytest.raises(error, match=said):
        open_source(spec.format(tmp_path), WholeImage(24, 24))


def nineteen():
    """A model for street scenes, with logits at half of the size."""
    return nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 19, 1))


def test_acdc_runs_in_rounds(tmp_path):
    acdc(tmp_path / "data", dict.fromkeys(("fog", "night", "rain", "snow"), 2))
    given = {"setting": "lifelong", "rounds": 2, "methods": ("source", "tent"), "objectives": ("em",), "image_size": 24}
    plan = Plan(
        task="segmentation", data=f"acdc:{tmp_path / 'data'}", model="tests.test_segmentation:nineteen", **given
    )
    assert plan.corruptions == ("fog", "night", "rain", "snow")
    torch.manual_seed(0)
    model = models.Model("mine", nineteen().eval(), WholeImage(24, 24), 19, True)
    bench = Bench(plan, model=model)
    folder = RunFolder(tmp_path / "run")
    records = bench.run(folder)
    assert [len(r.result.domains) for r in records] == [8, 8]
    rows = folder.rows(records[0].key)
    assert rows["confusion"].sum(dim=(1, 2)).tolist() == [23 * 48] * 16  # without the row that has no label
    assert folder.streams.is_dir()


@pytest.mark.parametrize("name", ["cityscapes-c-segformer-b5", "acdc-segformer-b5"])
def test_protocols_of_street_scenes(name):
    protocol = protocols.get(name)
    assert protocol.plan.methods == ("source", "tent", "cotta")
    assert not protocol.plan.guard
    assert protocol.no_adapt is None  # no number that papers agree on
    assert "The metric is the mIoU" in protocol.paragraph()
    with pytest.raises(ConfigError, match="needs --data PATH"):
        protocol.plan_for({})


def test_the_command_says_what_would_run(monkeypatch, capsys, tmp_path):
    given = ("--task", "segmentation", "--limit", "4", "--dry-run", "--out", str(tmp_path / "run"))
    code, out, err = call(monkeypatch, capsys, "bench", *given)
    assert (code, err) == (0, "")
    assert "scenes-unet-bn on scenes" in out


@pytest.mark.parametrize("given", [("--log", "tensorboard:x"), ("--score", "belief")])
def test_options_without_effect_are_refused(monkeypatch, capsys, tmp_path, given):
    options = ("--task", "segmentation", "--out", str(tmp_path / "run"))
    code, _, err = call(monkeypatch, capsys, "bench", *options, *given)
    assert code == 2
    assert "has no effect with --task segmentation" in " ".join(err.split())


def test_two_runs_are_compared_by_miou_and_accuracy(ran):
    _, folder, _ = ran
    found = compare_runs(folder, folder)
    assert {name for change in found.changes for name in change.verdicts} == {"miou", "accuracy"}
    assert not any(verdict.found for change in found.changes for verdict in change.verdicts.values())


def test_no_checkpoint_for_embedded_segmenters():
    with pytest.raises(ConfigError, match="comes with its weights"):
        models.load("scenes-unet-bn", checkpoint="x.safetensors")
