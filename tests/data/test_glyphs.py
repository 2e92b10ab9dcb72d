"""The embedded data set: what an image depends on, what it shows, what is refused."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import pickle
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

pytest.importorskip("PIL")
pytest.importorskip("matplotlib")

from come.bench.data import glyphs_fonts as fonts
from come.bench.data import glyphs_render as render
from come.bench.data import glyphs_textures as textures
from come.bench.data.glyphs import MEAN, STD, GlyphOutliers, Glyphs

GOLDEN_LABELS = [99, 42, 4, 90, 82, 18, 58, 87]
GOLDEN_MEANS = [43.29, 94.4, 76.98, 59.07, 119.91, 185.34, 198.43, 158.28]
SPLITS = ("train", "test", "source")


@pytest.fixture(scope="module")
def folder() -> Path:
    return fonts.find_fonts()


@pytest.fixture(scope="module")
def sample() -> tuple[torch.Tensor, torch.Tensor]:
    return Glyphs("train", size=3000, seed=5).batch(range(3000))


# --- what an image depends on -------------------------------------------------------------------------------


@pytest.mark.parametrize("data", [Glyphs("test", 400, 3), GlyphOutliers("near", 400, 3), GlyphOutliers("far", 400, 3)])
def test_item_equals_batch_in_any_order_and_size(data: Glyphs | GlyphOutliers) -> None:
    images, labels = data.batch(range(130))
    order = np.random.default_rng(0).permutation(130)
    shuffled, shuffled_labels = data.batch(order)
    assert torch.equal(shuffled, images[order])
    assert torch.equal(shuffled_labels, labels[order])
    for size in (1, 3, 7, 31, 33):
        assert torch.equal(data.batch(list(range(5, 5 + size)))[0], images[5 : 5 + size])
    for i in (0, 17, 31, 32, 129):
        image, label = data[i]
        assert torch.equal(image, images[i])
        assert label == labels[i]
        assert image.shape == (3, 32, 32)
        assert image.dtype == torch.uint8
        assert isinstance(label, int)
    assert torch.equal(data.batch(torch.tensor([4, -396]))[0][0], images[4])
    assert torch.equal(data[-396][0], images[4])


def test_item_depends_neither_on_size_nor_on_global_generators_nor_on_threads() -> None:
    images, labels = Glyphs("test", size=64, seed=2).batch(range(64))
    torch.manual_seed(99)
    np.random.seed(99)
    random.seed(99)
    state, numpy_state = torch.get_rng_state(), pickle.dumps(np.random.get_state())
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        again, labels_again = Glyphs("test", size=1_000_000, seed=2).batch(range(64))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(images, again)
    assert torch.equal(labels, labels_again)
    assert torch.equal(state, torch.get_rng_state())
    assert numpy_state == pickle.dumps(np.random.get_state())


def test_another_process_draws_the_same_images() -> None:
    code = (
        "import hashlib; from come.bench.data.glyphs import Glyphs, GlyphOutliers;"
        "parts = [Glyphs('source', 200, 7).batch([150, 3, 42]), GlyphOutliers('near', 9, 7).batch([8])];"
        "print(hashlib.sha256(b''.join(x.numpy().tobytes() for p in parts for x in p)).hexdigest())"
    )
    parts = [Glyphs("source", 200, 7).batch([150, 3, 42]), GlyphOutliers("near", 9, 7).batch([8])]
    ours = hashlib.sha256(b"".join(x.numpy().tobytes() for p in parts for x in p)).hexdigest()
    there = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONHASHSEED": "7"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=there)
    assert ours == done.stdout.strip()


def test_data_set_can_be_pickled_for_loader_workers() -> None:
    data = Glyphs("train", 20, 1)
    copy = pickle.loads(pickle.dumps(data))
    assert torch.equal(copy.batch([3, 4])[0], data.batch([3, 4])[0])


def test_splits_seeds_and_kinds_are_different_images() -> None:
    seen: set[bytes] = set()
    total = 0
    for seed in (0, 1):
        for split in SPLITS:
            images, _ = Glyphs(split, 200, seed).batch(range(200))  # type: ignore[arg-type]
            seen.update(image.numpy().tobytes() for image in images)
            total += 200
        for kind in ("near", "far"):
            images, _ = GlyphOutliers(kind, 100, seed).batch(range(100))
            seen.update(image.numpy().tobytes() for image in images)
            total += 100
    assert len(seen) == total


def test_the_streams_have_not_drifted() -> None:
    # labels exactly; pixels within what two versions of FreeType may differ by
    data = Glyphs("test", 256, 0)
    images, labels = data.batch(range(256))
    assert labels[:8].tolist() == GOLDEN_LABELS
    means = images.float().mean((1, 2, 3))[:8]
    assert torch.allclose(means, torch.tensor(GOLDEN_MEANS), atol=0.5), means.tolist()


# --- what an image shows ------------------------------------------------------------------------------------


def test_classes_and_outliers_are_distinct_characters() -> None:
    assert len(fonts.CLASSES) == len(set(fonts.CLASSES)) == 100
    assert len(fonts.NEAR) == len(set(fonts.NEAR)) > 80
    assert not set(fonts.CLASSES) & set(fonts.NEAR)
    for pair in ("0Oo", "lI1", "sS", "cC", "\u0410A", "\u0412B", "\u03c9w"):
        assert len(set(pair) & set(fonts.CLASSES)) <= 1
    assert Glyphs().classes == list(fonts.CLASSES)


@pytest.mark.parametrize("split", SPLITS)
def test_labels_are_balanced_in_every_block_and_shuffled(split: str) -> None:
    data = Glyphs(split, 1050, 4)  # type: ignore[arg-type]
    labels = data.labels()
    assert labels[:1000].bincount(minlength=100).tolist() == [10] * 100
    blocks = labels[:1000].view(10, 100)
    assert (blocks.sort(1).values == torch.arange(100)).all()
    assert len({tuple(block.tolist()) for block in blocks}) == 10
    assert torch.equal(data.batch([1049, 3, 500])[1], data.labels([1049, 3, 500]))


def span(masks: npt.NDArray[np.uint8], axis: int) -> npt.NDArray[np.int64]:
    """Extent of each mask's ink (B,) after looking along one axis."""
    inked = np.max(masks, axis=axis) > 20
    extent: npt.NDArray[np.int64] = inked.shape[1] - inked.argmax(1) - inked[:, ::-1].argmax(1)
    return extent


@pytest.mark.parametrize("characters", [fonts.CLASSES, fonts.NEAR], ids=["classes", "near"])
def test_every_mask_has_ink_inside_its_margin_and_is_no_replacement_box(
    characters: tuple[str, ...], folder: Path
) -> None:
    atlas = fonts.Atlas(characters, folder)
    atlas.fetch(np.arange(len(atlas.slots)))
    ink = (atlas.masks > 127).sum((1, 2))
    assert ink.min() > 100
    assert ink.max() < 0.6 * fonts.CANVAS**2
    border = atlas.masks.copy()
    border[:, 1:-1, 1:-1] = 0
    assert border.max() == 0
    longest = np.maximum(span(atlas.masks, 1), span(atlas.masks, 2))
    assert longest.min() >= 0.88 * fonts.INK
    assert longest.max() <= 1.2 * fonts.INK
    boxes = {
        font.name: fonts.draw_mask(folder / f"{font.name}.ttf", "\u2fff")
        for font in fonts.FONTS
        if 0x2FFF not in fonts.coverage(folder / f"{font.name}.ttf")
    }
    assert len(boxes) == len(fonts.FONTS)
    for slot, (_, font, stroke) in enumerate(atlas.slots):
        assert stroke or not (atlas.masks[slot] == boxes[font.name]).all()


def test_each_font_has_the_same_share(folder: Path) -> None:
    atlas = fonts.Atlas(("A", "\u00d7"), folder)
    picked = atlas.pick(np.zeros(8000, np.int64), np.linspace(0, 1, 8000, endpoint=False, dtype=np.float32))
    names = [atlas.slots[slot][1].name for slot in picked]
    assert all(399 <= names.count(name) <= 401 for name in names)  # float32 rounds at the borders
    assert len(set(names)) == 20


def test_characters_of_every_class_and_font_stand_out_from_their_background(folder: Path) -> None:
    # the same random row drawn with a character and with an empty mask in its place differs by its ink alone
    atlas = fonts.Atlas(fonts.CLASSES, folder)
    blank = fonts.Atlas(fonts.CLASSES, folder)
    blank.fetch(np.arange(len(blank.slots)))
    blank.masks[:] = 0
    rng = np.random.default_rng(1)
    labels = np.repeat(np.arange(100), 10)
    rows = rng.random((1000, render.CHARACTER_NUMBERS), dtype=np.float32)
    shown = render.render_characters(rows, labels, atlas, blank).astype(np.int64)
    empty = render.render_characters(rows, labels, blank, blank).astype(np.int64)
    change = np.abs(shown - empty).max(1)
    ink = (change > 0.6 * 255 * render.CONTRAST[0]).sum((1, 2))
    assert ink.min() >= 12
    # and its ink does not run out of the picture
    frame = change.copy()
    frame[:, 1:-1, 1:-1] = 0
    assert (frame > 60).sum() < 0.01 * ink.sum()


def test_images_are_neither_blank_nor_alike(sample: tuple[torch.Tensor, torch.Tensor]) -> None:
    images, _ = sample
    flat = images.float().flatten(1)
    assert flat.std(1).min() > 5
    unit = images.float() / 255
    assert torch.allclose(unit.mean((0, 2, 3)), torch.tensor(MEAN), atol=0.03)
    assert torch.allclose(unit.std((0, 2, 3)), torch.tensor(STD), atol=0.02)


def test_classes_are_told_apart_by_their_mean_image(folder: Path) -> None:
    # nearest class mean, for characters alone (no background, no clutter), from half of the draws to the rest
    atlas = fonts.Atlas(fonts.CLASSES, folder)
    rng = np.random.default_rng(0)
    draws = 40
    labels = np.repeat(np.arange(100), draws)
    slots = atlas.pick(labels, rng.random(len(labels), dtype=np.float32))
    atlas.fetch(slots)
    masks = atlas.masks[slots].reshape(100, draws, -1).astype(np.float32) / 255
    means = masks[:, : draws // 2].mean(1)
    gaps = ((means[:, None] - means[None]) ** 2).mean(-1) + np.eye(100)
    assert gaps.min() > 0.004, [fonts.CLASSES[i] for i in np.unravel_index(gaps.argmin(), gaps.shape)]
    rest = masks[:, draws // 2 :].reshape(-1, masks.shape[-1])
    nearest = (means**2).sum(1)[None] - 2 * rest @ means.T
    truth = np.repeat(np.arange(100), draws - draws // 2)
    assert (nearest.argmin(1) == truth).mean() > 0.8


def test_plain_images_keep_the_character_and_lose_the_clutter() -> None:
    images, labels = Glyphs("train", 200, 1).batch(range(200))
    plain, same = Glyphs("train", 200, 1, plain=True).batch(range(200))
    assert torch.equal(labels, same)
    rough = [x.float().diff(dim=-1)[..., [0, -1], :].abs().mean() for x in (images, plain)]
    assert rough[1] < 0.5 * rough[0]  # along the upper and lower edge, where there is no character


def test_outliers() -> None:
    near, near_labels = GlyphOutliers("near", 200, 0).batch(range(200))
    far, far_labels = GlyphOutliers("far", 200, 0).batch(range(200))
    assert near.shape == far.shape == (200, 3, 32, 32)
    assert (near_labels == -1).all()
    assert (far_labels == -1).all()
    assert GlyphOutliers("far", 5)[2][1] == -1
    assert len(GlyphOutliers("far", 5)) == 5
    assert near.float().flatten(1).std(1).min() > 5
    assert far.float().flatten(1).std(1).median() > 5


def test_every_texture_spans_its_range() -> None:
    rows = textures.random_rows((1,), np.arange(64), render.TEXTURE_NUMBERS)
    fields = textures.Fields(textures.Stream(rows), grain=True)
    for number, name in enumerate(fields.KINDS):
        field = fields.compute(np.full(64, number))
        assert field.shape == (64, 32, 32)
        assert field.dtype == np.float32
        assert field.min() >= 0
        assert field.max() <= 1
        assert np.median(field.max((1, 2)) - field.min((1, 2))) > 0.2, name


# --- what is refused ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: Glyphs("val"), ValueError, "'train', 'test', 'source', got 'val'"),  # type: ignore[arg-type]
        (lambda: Glyphs("test", 0), ValueError, "size must be from 1 to .* got 0"),
        (lambda: Glyphs("test", 2.5), TypeError, "size must be .* got 2.5"),  # type: ignore[arg-type]
        (lambda: Glyphs("test", True), TypeError, "size must be .* got True"),
        (lambda: Glyphs("test", 5, -1), ValueError, "seed must be from 0 to .* got -1"),
        (lambda: Glyphs("test", 5, 2**63), ValueError, "seed must be"),
        (lambda: GlyphOutliers("mid"), ValueError, "'near', 'far', got 'mid'"),  # type: ignore[arg-type]
        (lambda: Glyphs("test", 5)[5], IndexError, "index 5 is out of range for a data set of 5"),
        (lambda: Glyphs("test", 5)[-6], IndexError, "index -6"),
        (lambda: Glyphs("test", 5).batch([0, 7]), IndexError, "index 7"),
        (lambda: Glyphs("test", 5)[1.0], TypeError, "must be an integer"),  # type: ignore[index]
        (lambda: Glyphs("test", 5).batch([0.5]), TypeError, "sequence of integers"),  # type: ignore[list-item]
        (lambda: Glyphs("test", 5).batch([[1]]), TypeError, "shape"),  # type: ignore[list-item]
        (lambda: Glyphs("test", 5).labels([9]), IndexError, "index 9"),
        (lambda: Glyphs(fonts="/nowhere"), ValueError, r"20 of 20 fonts.*/nowhere.*\.\[bench\]"),
    ],
)
def test_bad_arguments(make: object, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        make()  # type: ignore[operator]


def test_empty_batch() -> None:
    images, labels = Glyphs("test", 5).batch([])
    assert images.shape == (0, 3, 32, 32)
    assert labels.shape == (0,)


def test_missing_packages_name_the_command(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.delenv("COME_GLYPH_FONTS", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r'matplotlib.*pip install -e "\.\[bench\]"'):
        Glyphs()
    monkeypatch.setenv("COME_GLYPH_FONTS", str(folder))
    assert len(Glyphs("test", 3)) == 3
