"""Every setting gives the streams that it promises, and only those."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch
from PIL import Image

import come
from come.bench import Bench, Cell, Plan, RunFolder, run, settings
from come.bench.data import FashionOutlierSource, FashionSource, Preprocess, Source, Stream, batches
from come.bench.data.streams import OUTLIER
from come.bench.report import findings, reading
from come.corruptions import corrupt

LABELS = [i % 4 for i in range(40)]
CELL = Cell(data="fashion:40", size=40, corruptions=("fog", "snow", "contrast"), method="tent", objective="em")


class Labelled(Source):
    """Samples with labels and nothing else."""

    name, num_classes = "labelled", 10

    def __init__(self, labels):
        self._labels = labels

    def __len__(self):
        return len(self._labels)

    def labels(self):
        return torch.tensor(self._labels)

    def load(self, indices, corruption=None, severity=5):
        raise AssertionError("an order is made without looking at images")


def streams(name, outliers_size=None, **changes):
    outliers = None if outliers_size is None else Labelled([-1] * outliers_size)
    return list(settings.get(name).episodes(CELL.model_copy(update=changes), Labelled(LABELS), outliers))


def test_names_in_the_papers_order():
    assert settings.names() == [
        "standard", "lifelong", "open-world", "imbalanced", "mixed", "in-distribution", "natural", "gradual", "changing",
        "recurring", "small-batches", "episodic", "episodic-natural",
    ]  # fmt: skip


@pytest.mark.parametrize("name", settings.names())
def test_every_setting_is_a_function_of_its_seed(name):
    more = {"outliers": "fashion-outliers:near", "outliers_size": 30}
    assert streams(name, **more) == streams(name, **more)
    if name != "in-distribution":
        assert streams(name, **more) != streams(name, seed=1, **more)
    for episode in streams(name, **more):
        assert isinstance(episode.stream, Stream)
    assert streams(name, **more)[0].reset


@pytest.mark.parametrize("name", settings.names())
def test_no_seed_repeats_what_another_draws(name, monkeypatch):
    """Sums such as seed + 1 would: the second of seed 0 would be the first of seed 1."""
    found, drawn = {}, []
    for draw in ("randperm", "rand", "randint"):
        inner = getattr(torch, draw)
        monkeypatch.setattr(
            torch, draw, lambda *a, f=inner, **k: drawn.append(k["generator"].initial_seed()) or f(*a, **k)
        )
    for seed in range(5):
        drawn.clear()
        streams(name, outliers="folder:x", outliers_size=30, seed=seed, size=20, imbalance=2.0)
        found[seed] = set(drawn)
    assert all(found[a].isdisjoint(found[b]) for a, b in itertools.combinations(found, 2))


def test_changing_draws_each_order_and_each_fading_for_itself():
    orders = [e.stream.order for seed in range(4) for e in streams("changing", seed=seed)]
    assert len(set(orders)) == len(orders)


BY_CLASS = [0] * 10 + [1] * 10 + [2] * 10 + [3] * 10


@pytest.mark.parametrize("name", settings.names())
def test_fewer_samples_are_spread_over_the_classes(name):
    """As a folder has them: the first ones would be of one class."""

    def used(**changes):
        cell = CELL.model_copy(update={"size": 12, "outliers": "folder:x"} | changes)
        episodes = list(settings.get(name).episodes(cell, Labelled(BY_CLASS), Labelled([-1] * 30)))
        return {i for e in episodes for p, i in enumerate(e.stream.order) if e.stream.kind(p) != OUTLIER}

    chosen = used()
    assert Counter(BY_CLASS[i] for i in chosen) == {0: 3, 1: 3, 2: 3, 3: 3}
    assert used(method="sar", objective="come") == chosen
    assert used(seed=1) != chosen


def test_a_class_has_its_share_of_fewer_samples():
    labels = [0] * 50 + [1] * 30 + [2] * 20
    cell = CELL.model_copy(update={"size": 10})
    assert Counter(labels[i] for i in settings.samples(cell, Labelled(labels))) == {0: 5, 1: 3, 2: 2}
    many = list(range(100))
    seen = Counter(
        i for seed in range(40) for i in settings.samples(cell.model_copy(update={"seed": seed}), Labelled(many))
    )
    assert sum(seen.values()) == 400
    assert len(seen) > 90  # of the classes too, any
    assert list(settings.samples(cell.model_copy(update={"size": 100}), Labelled(many))) == many


def test_standard_resets_and_lifelong_does_not():
    assert [e.reset for e in streams("standard")] == [True, True, True]
    assert [e.reset for e in streams("lifelong")] == [True, False, False]
    assert [e.stream for e in streams("standard")] == [
        e.stream for e in streams("lifelong")
    ]  # the same order of samples
    twice = streams("lifelong", rounds=2)
    assert [e.stream.domain for e in twice][2:4] == ["contrast (1)", "fog (2)"]
    assert sum(e.reset for e in twice) == 1


@pytest.mark.parametrize(
    ("ratio", "outside", "expected"),
    [(0.5, 100, (40, 40)), (0.5, 10, (10, 10)), (0.3, 100, (40, 17)), (0.3, 6, (14, 6))],
)
def test_open_world_cuts_the_larger_side(ratio, outside, expected):
    (episode,) = streams(
        "open-world",
        corruptions=settings.PAPERS,
        outliers="folder:a/textures",
        outliers_size=outside,
        outlier_ratio=ratio,
    )
    kinds = Counter(episode.stream.kinds)
    assert (kinds[0], kinds[OUTLIER]) == expected
    assert episode.stream.domain == "textures"
    seen = [i for i, kind in zip(episode.stream.order, episode.stream.kinds, strict=True) if kind == OUTLIER]
    assert len(set(seen)) == len(seen)
    assert max(seen) < outside
    first = episode.stream.kinds[: len(episode.stream) // 2]
    assert 0 < first.count(OUTLIER) < len(first)  # mixed, not one after the other


def test_an_open_world_of_several_corruptions_has_a_column_for_each():
    plan = Plan(setting="open-world", methods=("source",), data="fashion:20", corruptions=("fog", "gaussian_noise"))
    bench = Bench(plan)
    domains = [e.stream.domain for cell in bench.cells for e in bench.inputs.episodes(cell)]
    assert domains == ["fog, none", "fog, near", "fog, far", "none", "near", "far"]


def test_two_streams_of_one_name_are_refused(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name / "textures" / "x").mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(tmp_path / name / "textures" / "x" / "1.png")
    outliers = tuple(f"folder:{tmp_path / name / 'textures'}" for name in ("a", "b"))
    with pytest.raises(come.ConfigError, match="two streams of this run are called 'textures'"):
        Bench(Plan(setting="open-world", methods=("source",), data="fashion:20", outliers=outliers))


def test_open_world_without_outliers():
    (episode,) = streams("open-world", corruptions=settings.PAPERS)
    assert episode.stream.domain == "none"
    assert not episode.stream.kinds
    with pytest.raises(come.InputError, match="outlier source is empty"):
        streams("open-world", outliers="folder:x", outliers_size=0)


def test_imbalanced_is_sorted_by_class():
    for episode in streams("imbalanced"):
        labels = [LABELS[i] for i in episode.stream.order]
        assert sorted(episode.stream.order) == list(range(40))
        assert sum(a != b for a, b in itertools.pairwise(labels)) == 3
        assert episode.reset


def test_imbalance_of_a_finite_ratio():
    labels = [i % 10 for i in range(5000)]

    def in_own_part(ratio):
        cell = CELL.model_copy(update={"size": 5000, "corruptions": ("fog",), "imbalance": ratio})
        (episode,) = settings.get("imbalanced").episodes(cell, Labelled(labels), None)
        assert sorted(episode.stream.order) == list(range(5000))
        parts = [[labels[i] for i in episode.stream.order[k * 500 : (k + 1) * 500]] for k in range(10)]
        return sum(max(Counter(part).values()) for part in parts) / 5000

    assert in_own_part(1.0) < 0.2
    assert 0.4 < in_own_part(9.0) < 0.6  # 9 / (9 + 9)
    assert in_own_part(1e9) > 0.95


def test_mixed_holds_every_image_under_every_corruption():
    (episode,) = streams("mixed")
    stream = episode.stream
    assert Counter(zip(stream.order, stream.kinds, strict=True)) == Counter((i, k) for i in range(40) for k in range(3))
    assert stream.domain == "mixed"


def test_in_distribution_is_clean():
    (episode,) = streams("in-distribution", corruptions=())
    assert episode.stream.shifts == ((None, 5),)


def test_gradual_grows_and_fades():
    first, *others = streams("gradual")
    levels = [first.stream.shifts[k][1] for k in first.stream.kinds]
    assert levels[0] == levels[-1] == 1
    assert max(levels) == 5
    assert levels == [*sorted(levels[:22]), *sorted(levels[22:], reverse=True)]
    assert first.reset
    assert not any(e.reset for e in others)


def test_changing_fades_one_corruption_into_the_next():
    episodes = streams("changing", severity=3)
    assert [e.stream.domain for e in episodes] == ["fog to snow", "snow to contrast", "contrast to fog"]
    assert [e.reset for e in episodes] == [True, False, False]
    stream = episodes[0].stream
    assert stream.shifts == (("fog", 3), ("fog", 2), ("fog", 1), ("snow", 3))
    assert stream.then == ((None, 3), ("snow", 1), ("snow", 2), (None, 3))
    assert sorted(stream.order) == list(range(40))
    way = [3 * i / 40 for i in range(40)]
    assert all(k in (int(x), int(x) + 1) for k, x in zip(stream.kinds, way, strict=True))  # neighbours mix ...
    assert list(stream.kinds) != sorted(stream.kinds)
    assert [e.stream.kinds for e in streams("changing", severity=3)] == [
        e.stream.kinds for e in episodes
    ]  # by the seed


def test_changing_corrupts_an_image_twice():
    shifts, then = (("fog", 2), ("snow", 3)), (("contrast", 1), (None, 3))
    stream = Stream(data="fashion:4", order=(0, 1, 2, 3), shifts=shifts, then=then, kinds=(0, 1, 0, 1), seed=7)
    source = FashionSource("fashion:4", 4)
    (batch,) = batches(source, stream, lambda images: images)
    clean, index = source.load(range(4)).images, torch.arange(4)
    twice = corrupt(corrupt(clean, "fog", 2, seed=7, index=index), "contrast", 1, seed=7, index=index)
    once = corrupt(clean, "snow", 3, seed=7, index=index)
    assert torch.equal(batch.images[::2], twice[::2])
    assert torch.equal(batch.images[1::2], once[1::2])
    (alike,) = batches(source, stream.model_copy(update={"kinds": ()}), lambda images: images)
    assert torch.equal(alike.images, twice)


def test_changing_needs_two_corruptions_and_clean_images():
    with pytest.raises(come.ConfigError, match="corruptions must be at least two in the changing setting, got fog"):
        streams("changing", corruptions=("fog",))
    source = Labelled(LABELS)
    source.holds = ("fog", "snow")
    with pytest.raises(come.InputError, match="labelled holds corrupted images only"):
        list(settings.get("changing").episodes(CELL, source, None))
    with pytest.raises(come.ConfigError, match="then must be one for each of 1, got 2"):
        Stream(data="fashion", order=(0,), then=(("fog", 1), ("fog", 2)))


def test_recurring_comes_back_with_new_images():
    episodes = streams("recurring")
    fog = [e.stream for e in episodes if e.stream.shifts[0][0] == "fog"]
    assert len(fog) == 10
    assert sorted(i for s in fog for i in s.order) == list(range(40))
    assert sum(e.reset for e in episodes) == 1


def test_small_batches():
    assert [e.batch_size for e in streams("small-batches", corruptions=("fog",))] == [64, 16, 4, 2, 1]


# ---- through the loader and the runner ----


def test_mixed_batches_are_corrupted_each_as_its_kind():
    source, pre = FashionSource(size=6), Preprocess(32)
    mixed = Stream(
        data="fashion",
        order=(0, 1, 2, 3, 1),
        shifts=(("fog", 5), ("contrast", 3), (None, 5)),
        kinds=(0, 1, 2, 0, 0),
        seed=7,
    )
    (batch,) = batches(source, mixed, pre)
    for place, (index, kind) in enumerate(zip(mixed.order, mixed.kinds, strict=True)):
        (alone,) = batches(source, Stream.of("fashion", (index,), *mixed.shifts[kind], 7), pre)
        torch.testing.assert_close(batch.images[place], alone.images[0])
    assert batch.kinds.tolist() == list(mixed.kinds)
    assert batch.indices.tolist() == list(mixed.order)


def test_outliers_have_no_label_and_no_corruption():
    source, outliers = FashionSource(size=6), FashionOutlierSource("fashion-outliers:far", "far")
    stream = Stream(
        data="fashion", order=(0, 3, 2), shifts=(("fog", 5),), kinds=(0, OUTLIER, 0), seed=7, domain="far",
        outliers="fashion-outliers:far",
    )  # fmt: skip
    (batch,) = batches(source, stream, Preprocess(32), outliers=outliers)
    assert batch.labels.tolist()[1] == -1
    assert (batch.labels[[0, 2]] >= 0).all()
    assert torch.equal(batch.images[1], Preprocess(32)(outliers.load([3]).images)[0])


SMALL = Plan(methods=("source", "tent", "sar"), limit=64, batch_size=32)


@pytest.mark.parametrize("name", settings.names())
def test_every_setting_runs(name, tmp_path):
    plan = SMALL.but(
        setting=name, corruptions=None, severity=None, batch_size=64, methods=("tent",), objectives=("come",)
    )
    plan = plan.but(data="fashion:20", limit=20)
    records = run(plan, tmp_path / "run")
    assert records
    for record in records:
        assert set(record.result.metrics) == set(record.result.domains)
        for values in record.result.metrics.values():
            assert all(value == value for value in values.values())  # NaN-free


def test_lifelong_switches_sars_recovery_off_and_counts_fpr_both_ways(tmp_path):
    plan = SMALL.but(setting="lifelong", objectives=("em",), methods=("sar",), corruptions=("fog", "contrast"))
    (cell,) = plan.cells(64)
    assert cell.hyper == {"recover_below": 0.0}
    assert next(iter(plan.but(hyper={"sar": {"recover_below": 0.1}}).cells(64))).hyper == {"recover_below": 0.1}
    (record,) = run(plan, tmp_path / "run")
    fog, contrast = record.result.metrics["fog"], record.result.metrics["contrast"]
    assert fog["fpr"] == fog["fpr_so_far"]
    rows = RunFolder(tmp_path / "run").rows(record.key)
    assert contrast["fpr_so_far"] == come.metrics.fpr(rows["confidence"], rows["prediction"] == rows["label"])


def test_open_world_has_a_column_without_outliers(tmp_path):
    plan = Plan(setting="open-world", methods=("source",), limit=48)
    assert (plan.severity, plan.corruptions) == (3, ("gaussian_noise",))
    records = run(plan, tmp_path / "run")
    metrics = {domain: values for r in records for domain, values in r.result.metrics.items()}
    assert list(metrics) == ["none", "near", "far"]
    assert metrics["near"]["outliers"] == metrics["near"]["samples"] / 2 == 48
    assert "fpr95" in metrics["far"]
    assert "fpr95" not in metrics["none"]


def test_a_record_tells_what_the_guard_did(tmp_path):
    """In this cell alone: the adapter is shared with the cells before it."""
    plan = SMALL.but(
        model="fashion-vit",
        data="fashion:960",
        methods=("source", "tent:lr=0.3"),
        objectives=("em",),
        corruptions=("fog", "contrast"),
        guard=True,
        limit=None,
    )
    records = run(plan, tmp_path / "run")
    for record in records[:2]:
        assert record.result.events == ()
    for record in records[2:]:
        health = record.result.health
        assert health["collapse"] == health["recovered"] >= 1
        steps = [step for kind, step in record.result.events if kind == "collapse"]
        assert len(steps) == health["collapse"]
        assert all(0 < step < 30 for step in steps)
    (alone,) = run(plan.but(methods=plan.methods[1:], corruptions=("contrast",)), tmp_path / "alone")
    for name in ("health", "events", "metrics"):
        assert getattr(alone.result, name) == getattr(records[-1].result, name)
    assert len(findings.recoveries(records)) == 2
    assert "tent:lr=0.3 + em on fog (after batch" in findings.recoveries(records)[0]


def test_scores_can_be_changed_afterwards(tmp_path):
    plan = SMALL.but(methods=("tent",), objectives=("come",), corruptions=("contrast",))
    records = run(plan, tmp_path / "run")
    folder = RunFolder.existing(tmp_path / "run")
    (same,) = folder.rescored(records, "confidence")
    assert same.result.metrics == records[0].result.metrics
    (other,) = folder.rescored(records, "energy")
    assert other.result.metrics["contrast"]["accuracy"] == records[0].result.metrics["contrast"]["accuracy"]
    assert other.result.metrics["contrast"]["fpr"] != records[0].result.metrics["contrast"]["fpr"]
    for record in (*records, other):  # the line along the stream ends where the table says
        (segment,) = reading.read(folder, [record]).segments
        assert segment.path["fpr"][-1] == record.result.metrics["contrast"]["fpr"]


def test_variants_of_a_method_and_of_an_objective(tmp_path):
    plan = SMALL.but(
        methods=("tent", "tent:keep=0.5"),
        objectives=("em", "come:freeze_norm=false"),
        corruptions=("contrast",),
    )
    records = run(plan, tmp_path / "run")
    assert [(r.cell.method, r.cell.objective) for r in records] == [
        ("tent", "em"), ("tent", "come:freeze_norm=false"),
        ("tent:keep=0.5", "em"), ("tent:keep=0.5", "come:freeze_norm=false"),
    ]  # fmt: skip
    assert records[2].cell.hyper == {"keep": 0.5}
    assert records[2].result.metrics["contrast"]["used"] == 0.5


def test_what_does_not_fit_is_left_out_and_said(tmp_path):
    plan = SMALL.but(model="fashion-resnet-bn", methods=("source", "foa"), corruptions=("contrast",), source_size=32)
    bench = Bench(plan)
    records = bench.run(RunFolder(tmp_path / "run"))
    assert {r.cell.method for r in records} == {"source"}
    assert set(bench.refused) == {"foa"}
    assert "tokens" in bench.refused["foa"]
    small = SMALL.but(methods=("source", "lame"), corruptions=("contrast",), batch_size=5)
    bench = Bench(small)
    assert len(bench.run(RunFolder(tmp_path / "small"))) == 1
    assert "needs a batch of at least 6 samples, got 4" in bench.refused["lame"]  # 64 samples: the last batch has 4
    with pytest.raises(come.InputError, match="needs a batch of at least 6 samples, got 4"):
        Bench(small.but(methods=("lame",)))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"setting": "livelong"}, "did you mean 'lifelong'"),
        ({"setting": "open-world", "outlier_ratio": 1.0}, "outlier-ratio must be less than 1, got 1.0"),
        ({"setting": "open-world", "data": "folder:x"}, "give --outliers"),
        ({"outliers": ("folder:x",)}, "no effect in the standard setting.*or choose --setting open-world"),
        ({"imbalance": 0.5, "setting": "imbalanced"}, "imbalance must be greater than or equal to 1, got 0.5"),
        ({"rounds": 0, "setting": "lifelong"}, "rounds must be greater than or equal to 1, got 0"),
        ({"rounds": 2}, "rounds has no effect in the standard setting; leave it out, or choose --setting lifelong"),
        ({"severity": 3, "setting": "gradual"}, "severity has no effect in the gradual setting; leave it out"),
        ({"batch_size": 8, "setting": "small-batches"}, "batch-size has no effect in the small-batches setting"),
        ({"source_size": 8, "methods": ("tent",)}, "source-size has no effect: none of tent uses source images"),
        ({"methods": ("tent:kep=1",)}, "did you mean 'keep'"),
        ({"methods": ("tent:keep",)}, "not KEY=VALUE"),
        ({"objectives": ("come:tua=1",)}, "did you mean 'tau'"),
        ({"objectives": ("come:tau=-1",)}, "tau must be .* got -1"),
        ({"objectives": ("come:tau=fast",)}, "wrong type"),
        ({"methods": ("tent:seed=1",)}, "no hyperparameter of tent 'seed'"),
        ({"corruptions": ()}, "corruptions must be a list of at least one"),
    ],
)
def test_bad_plans(changes, words):
    with pytest.raises(come.ConfigError, match=words):
        Plan(**changes)


def test_clean_images_are_needed_where_nothing_is_corrupted(tmp_path):
    root = tmp_path / "c" / "fog" / "5" / "a"
    root.mkdir(parents=True)
    (root / "x.png").write_bytes(b"")
    plan = Plan(setting="in-distribution", data=f"imagenet-c:{tmp_path / 'c'}", model="fashion-vit")
    with pytest.raises(come.InputError, match=r"classes|needs clean ones"):
        Bench(plan)
