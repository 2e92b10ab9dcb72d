"""Sources for every layout, what they refuse, and batches made of them."""

from __future__ import annotations

import multiprocessing
import threading

import numpy as np
import pytest
import torch
from drawing import picture

import come
from come.bench.data import Account, DatasetSource, FashionSource, Preprocess, Stream, batches, open_source
from come.corruptions import corrupt

SMALL = Preprocess(size=32, resize=36)


@pytest.fixture
def folder(tmp_path):
    """Two classes with three pictures each, in a folder whose name needs escaping."""
    root = tmp_path / "photos [1] <b>"
    for k, name in enumerate(("cat", "dog")):
        (root / name).mkdir(parents=True)
        for i in range(3):
            picture(10 * k + i).save(root / name / f"{i}.png")
    return root


def test_folder(folder):
    source = open_source(f"folder:{folder}", SMALL)
    assert (len(source), source.num_classes) == (6, 2)
    loaded = source.load([5, 0])
    assert loaded.images.shape == (2, 3, 32, 32)
    assert loaded.images.dtype == torch.uint8
    assert loaded.labels.tolist() == [1, 0]
    assert source.source_images(2).shape == (2, 3, 32, 32)


def test_a_picture_of_the_right_size_is_not_resampled(folder):
    exact = picture(99, (32, 32))
    exact.save(folder / "cat" / "exact.png")
    source = open_source(f"folder:{folder}", SMALL)
    loaded = source.load([3]).images[0]
    assert np.array_equal(loaded.permute(1, 2, 0).numpy(), np.array(exact))


def test_tiny_imagenet_layout(tmp_path):
    for name in ("n01", "n02"):
        (tmp_path / name / "images").mkdir(parents=True)
        picture(1, (64, 64)).save(tmp_path / name / "images" / "a.JPEG")
    assert len(open_source(f"tiny-imagenet:{tmp_path}", SMALL)) == 2


def test_imagenet_c(tmp_path):
    for corruption in ("fog", "snow"):
        for severity in (3, 5):
            place = tmp_path / corruption / str(severity) / "n01"
            place.mkdir(parents=True)
            picture(severity, (32, 32)).save(place / "a.png")
    source = open_source(f"imagenet-c:{tmp_path}", SMALL)
    assert source.holds == ("snow", "fog")
    three, five = (source.load([0], "fog", s).images for s in (3, 5))
    assert not torch.equal(three, five)
    with pytest.raises(come.InputError, match="holds corrupted images only; give clean source images"):
        source.source_images(1)


@pytest.fixture
def imagenet_c(tmp_path):
    """Fog at severities 3 and 5, snow at 5 with a class less, frost at none."""
    for place in ("fog/3/n01", "fog/3/n02", "fog/5/n01", "fog/5/n02", "snow/5/n01", "frost/notes"):
        (tmp_path / place).mkdir(parents=True)
        picture(1, (32, 32)).save(tmp_path / place / "a.png")
    return tmp_path


def test_imagenet_c_says_what_it_lacks_before_anything_runs(imagenet_c):
    (imagenet_c / "snow" / "5" / "n02").mkdir()
    source = open_source(f"imagenet-c:{imagenet_c}", SMALL)
    assert source.severities == {"snow": (5,), "frost": (), "fog": (3, 5)}
    source.require(("fog",), 3)
    source.require(("fog", "snow"), 5)
    for corruptions, severity, message in (
        (("fog", "contrast", None), 5, "does not hold contrast, clean images; it holds snow, frost, fog"),
        (("fog", "snow"), 3, "does not hold snow of severity 3; of snow it holds 5"),
        (("frost",), 5, "does not hold frost of severity 5; of frost it holds none"),
    ):
        with pytest.raises(come.InputError, match=message):
            source.require(corruptions, severity)


def test_a_class_that_one_corruption_of_imagenet_c_lacks_is_named(imagenet_c):
    (imagenet_c / "fog").rename(imagenet_c / "gaussian_noise")
    source = open_source(f"imagenet-c:{imagenet_c}", SMALL)
    source.require(("gaussian_noise",), 5)
    with pytest.raises(come.InputError, match=r"snow/5 has 1 class folders, and lacks 1 of 2, such as 'n02'; unpack"):
        source.require(("gaussian_noise", "snow"), 5)


def test_clean_sources_hold_whatever_is_asked(folder):
    for spec in (f"folder:{folder}", "fashion:10", "torchvision:FakeData"):
        open_source(spec, SMALL).require(("fog", None), 2)


def test_cifar_c(tmp_path):
    rng = np.random.default_rng(0)
    array = rng.integers(0, 256, (5 * 4, 32, 32, 3), dtype=np.uint8)
    np.save(tmp_path / "fog.npy", array)
    np.save(tmp_path / "labels.npy", np.tile(np.array([0, 1, 2, 9]), 5))
    source = open_source(f"cifar10-c:{tmp_path}")
    assert (len(source), source.holds) == (4, ("fog",))
    loaded = source.load([3, 1], "fog", 2)
    assert np.array_equal(loaded.images.permute(0, 2, 3, 1).numpy(), array[[4 + 3, 4 + 1]])
    assert loaded.labels.tolist() == [9, 1]
    source.require(("fog",), 2)
    with pytest.raises(come.InputError, match="does not hold snow; it holds fog"):
        source.require(("fog", "snow"), 2)
    for bad in (array[:-1], array.astype(np.float32)):
        np.save(tmp_path / "snow.npy", bad)
        with pytest.raises(come.InputError, match=r"snow.npy must be uint8 of shape \(20, H, W, 3\), got"):
            open_source(f"cifar10-c:{tmp_path}").require(("fog", "snow"), 2)
    np.save(tmp_path / "labels.npy", np.tile(np.array([0, 1, 2, 10]), 5))
    with pytest.raises(come.InputError, match="has 11 classes; cifar10-c has 10"):
        open_source(f"cifar10-c:{tmp_path}")
    np.save(tmp_path / "labels.npy", np.zeros(7))
    with pytest.raises(come.InputError, match="five severities"):
        open_source(f"cifar10-c:{tmp_path}")


def test_torchvision_and_plain_data_sets():
    source = open_source("torchvision:FakeData", SMALL)
    assert source.num_classes == 10
    assert source.load([0, 1]).images.shape == (2, 3, 32, 32)
    with pytest.raises(come.ConfigError, match="did you mean 'CIFAR10'"):
        open_source("torchvision:CIFAR11")
    with pytest.raises(come.InputError, match="torchvision's CIFAR10 is not in nowhere"):
        open_source("torchvision:CIFAR10:nowhere")
    mine = DatasetSource([(torch.zeros(3, 8, 8), 0)], num_classes=2, name="mine")
    for read in (lambda: mine.load([0]), lambda: mine.require((), 5)):
        with pytest.raises(come.InputError, match="leave normalization to the benchmark"):
            read()
    with pytest.raises(come.InputError, match="is empty"):
        DatasetSource([], num_classes=2, name="mine")


def test_a_torchvision_set_that_cannot_be_read_is_found_before_anything_runs(tmp_path):
    (tmp_path / "eurosat" / "2750" / "Forest").mkdir(parents=True)
    (tmp_path / "eurosat" / "2750" / "Forest" / "a.jpg").write_bytes(b"")
    source = open_source(f"torchvision:EuroSAT:{tmp_path}", SMALL)
    with pytest.raises(come.InputError, match="torchvision cannot read torchvision:EuroSAT"):
        source.require(("fog",), 5)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("folder", "lacks its path; write folder:PATH"),
        ("folder:/does/not/exist", "does not exist; give the folder"),
        ("folder:{file}", "is not a folder"),
        ("folder:{empty}", "has no subfolders"),
        ("folder:{bare}", "1 class folders but no image"),
        ("imagenet-c:{empty}", "no folder named after a corruption"),
        ("cifar10-c:{empty}", "no labels.npy"),
        ("fodler:x", "no data 'fodler'; did you mean 'folder'"),
        ("fashion:many", "asks for 'many' images; write a number"),
        ("fashion:0", "size must be an integer >= 1, got 0"),
    ],
)
def test_bad_specifications(spec, message, tmp_path):
    places = {"file": tmp_path / "file", "empty": tmp_path / "empty", "bare": tmp_path / "bare"}
    places["file"].touch()
    places["empty"].mkdir()
    (places["bare"] / "cat").mkdir(parents=True)
    with pytest.raises(come.ComeError, match=message):
        open_source(spec.format(**places))
    with pytest.raises(come.ConfigError, match="no value of --on-bad-image 'ignore'"):
        open_source("fashion", on_bad_image="ignore")


@pytest.mark.parametrize("damage", [lambda b: b[: len(b) // 2], lambda b: b"no image at all", lambda b: b""])
def test_bad_images_are_named_or_skipped_and_counted(folder, damage):
    bad = folder / "cat" / "1.png"
    bad.write_bytes(damage(bad.read_bytes()))
    with pytest.raises(come.InputError, match=r"cannot read .*cat/1\.png: .*--on-bad-image skip"):
        open_source(f"folder:{folder}", SMALL).load([0, 1, 2])
    loaded = open_source(f"folder:{folder}", SMALL, "skip").load([0, 1, 2])
    assert loaded.indices.tolist() == [0, 2]
    assert loaded.bad == 1
    assert open_source(f"folder:{folder}", SMALL, "skip").load([1]).images.shape == (0, 3, 32, 32)


def test_images_are_decoded_by_threads_that_end_with_the_stream(folder):
    """A process that is forked where CUDA is in use dies when it forgets what is on the device."""
    source = open_source(f"folder:{folder}", Preprocess(32))
    stream = Stream.shuffled(source.name, 6, corruption=None, severity=5, seed=0)
    found = batches(source, stream, Preprocess(32), batch_size=1, workers=2)
    next(found)
    assert not multiprocessing.active_children()
    found.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("loading")]


def test_workers_and_batch_size_change_nothing(folder):
    source = open_source(f"folder:{folder}", SMALL)
    stream = Stream.shuffled(source.name, len(source), corruption="gaussian_noise", severity=5, seed=3)
    found = []
    for batch_size, workers in ((2, 0), (2, 2), (6, 0), (1, 0)):
        account = Account()
        made = list(batches(source, stream, Preprocess(32), batch_size=batch_size, workers=workers, account=account))
        found.append(torch.cat([b.images for b in made]))
        assert torch.cat([b.indices for b in made]).tolist() == list(stream.order)
        assert account.waited > 0
    assert all(torch.equal(found[0], other) for other in found[1:])


def test_the_stream_is_corrupted_by_the_identity_of_each_image():
    source = FashionSource(size=8)
    stream = Stream.of("fashion", (5, 2), "fog", 3, 7)
    (batch,) = batches(source, stream, Preprocess(32))
    expected = corrupt(source.load([2]).images, "fog", 3, seed=7, index=torch.tensor([2]))
    assert torch.equal(batch.images[1:], Preprocess(32)(expected))
