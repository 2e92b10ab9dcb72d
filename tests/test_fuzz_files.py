"""Files of others: broken, hostile or absurdly large ones are refused with a typed error, and nothing in them is executed.

The strategies are those of `harness/fuzz_files.py`, which runs many more cases; the named cases below are what it found.
"""

from __future__ import annotations

import os
import pickle
import struct
import sys
import warnings
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from PIL import Image
from safetensors.torch import save_file

import come
from come.bench import Plan, cli, models
from come.bench.cli.options import from_toml
from come.bench.data import Preprocess, Stream, batches, open_source
from come.bench.machine import Meter

sys.path.append(str(Path(__file__).parent / "harness"))
import fuzz_files as fuzz

SMALL = Preprocess(size=32, resize=36)
CPU = torch.device("cpu")
CASES = {"run folder": 40, "checkpoint": 80, "saved state": 80}


@pytest.mark.parametrize("target", fuzz.TARGETS.values(), ids=list(fuzz.TARGETS))
def test_whatever_is_in_a_file_it_is_read_or_refused(target):
    @settings(
        max_examples=CASES.get(target.name, 120),
        derandomize=True,
        phases=(Phase.generate, Phase.shrink),
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(target.cases)
    def read(case):
        assert target(case) in ("accepted", "refused")

    read()


# ---- folders of images ----


@pytest.fixture
def photos(tmp_path):
    """A class with one good picture, and a picture outside of the folder."""
    (tmp_path / "photos" / "cat").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    Image.new("RGB", (40, 40), "red").save(tmp_path / "photos" / "cat" / "a.png")
    Image.new("RGB", (40, 40), "blue").save(tmp_path / "elsewhere" / "private.png")
    return tmp_path / "photos"


def test_links_out_of_the_folder_are_not_followed(photos):
    outside = photos.parent / "elsewhere"
    (photos / "cat" / "b.png").symlink_to(outside / "private.png")
    (photos / "dog").symlink_to(outside)
    source = open_source(f"folder:{photos}", SMALL)
    assert (len(source), source.num_classes) == (3, 2)
    for index in (1, 2):
        with pytest.raises(
            come.InputError,
            match=r"a link or a name in the data leads out of the data folder, to .*private.png; if you",
        ):
            source.load([index])
    loaded = open_source(f"folder:{photos}", SMALL, "skip").load(range(3))
    assert (loaded.indices.tolist(), loaded.bad) == ([0], 2)


def test_links_that_stay_inside_and_a_linked_root_are_followed(photos):
    (photos / "cat" / "b.png").symlink_to("a.png")
    (photos / "dog").symlink_to("cat")
    (photos.parent / "link").symlink_to(photos)
    for root in (photos, photos.parent / "link", photos.parent / "elsewhere" / ".." / "photos"):
        assert open_source(f"folder:{root}", SMALL).load(range(4)).labels.tolist() == [0, 0, 1, 1]


def test_links_in_a_circle_and_deep_folders_end(photos):
    (photos / "cat" / "again").symlink_to("..")
    (photos / "loop").symlink_to("loop")
    (photos / "cat" / "loop.png").symlink_to("loop.png")
    os.mkfifo(photos / "cat" / "pipe.png")
    here = photos / "cat"
    for _ in range(500):
        here = here / "d"
        here.mkdir()
    Image.new("RGB", (40, 40)).save(here / "deep.png")
    assert len(open_source(f"folder:{photos}", SMALL)) == 2


BOMBS = {
    "60000 x 60000": lambda: fuzz.png(60_000, 60_000),
    "10000 x 10000, which Pillow only warns of": lambda: fuzz.png(10_000, 10_000, zlib.compress(bytes(10**8))),
    "a PPM": lambda: b"P6 90000 90000 255 ",
    "a BMP": lambda: fuzz.pictures()["bmp bomb"],
}


@pytest.mark.parametrize("name", BOMBS)
def test_an_image_that_declares_too_many_pixels_is_refused_unread(name, photos):
    (photos / "cat" / "b.png").write_bytes(BOMBS[name]())
    source = open_source(f"folder:{photos}", SMALL)
    source.load([0])
    meter = Meter(CPU)
    before = meter.peak_megabytes()
    with pytest.raises(come.InputError, match=r"b\.png: .*--on-bad-image skip"):
        source.load([1])
    assert meter.peak_megabytes() - before < 50
    assert open_source(f"folder:{photos}", SMALL, "skip").load([0, 1]).bad == 1


def test_a_file_too_large_for_an_image_is_refused_unread(photos):
    path = photos / "cat" / "b.webp"
    path.write_bytes(fuzz.pictures()["webp"])
    os.truncate(path, 2**40)  # a terabyte, on no more disk than before
    with pytest.raises(come.InputError, match="it is longer than 715827880 bytes"):
        open_source(f"folder:{photos}", SMALL).load([1])


@pytest.mark.parametrize("size", [(200_000, 1), (1, 200_000), (100_000, 36), (32, 5000), (1, 1)])
def test_long_pictures_are_not_blown_up(size, photos):
    Image.new("RGB", size, (10, 20, 30)).save(photos / "cat" / "b.png")
    source = open_source(f"folder:{photos}", Preprocess(224, 256))
    source.load([0])
    meter = Meter(CPU)
    before = meter.peak_megabytes()
    image = source.load([1]).images[0]
    assert image.flatten(1).unique(dim=1).tolist() == [[10], [20], [30]]
    assert meter.peak_megabytes() - before < 100


@pytest.mark.parametrize("size", [(48, 40), (36, 500), (300, 36), (16, 16), (32, 480)])
def test_other_pictures_are_resized_and_cut_as_ever(size):
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (*size[::-1], 3), dtype=np.uint8))
    scale = SMALL.resize / min(size)
    large = (
        picture if min(size) == 32 else picture.resize(tuple(round(s * scale) for s in size), Image.Resampling.BILINEAR)
    )
    left, top = (large.width - 32) // 2, (large.height - 32) // 2
    assert SMALL.square(picture).tobytes() == large.crop((left, top, left + 32, top + 32)).tobytes()


def test_what_is_not_one_of_the_formats_is_not_opened(photos):
    """Pillow gives an EPS file, whatever it is called, to another program."""
    for number, name in enumerate(("eps", "psd", "svg", "text", "empty")):
        (photos / "cat" / f"b{number}.png").write_bytes(fuzz.pictures()[name])
    for index in range(1, 6):
        with pytest.raises(come.InputError, match="not an image"):
            open_source(f"folder:{photos}", SMALL).load([index])


@pytest.mark.parametrize(
    "name", ["cmyk", "gif", "webp many", "palette", "palette one", "alpha", "one bit", "rotated", "one"]
)
def test_unusual_images_are_read_without_a_warning(name, photos):
    (photos / "cat" / "b.png").write_bytes(fuzz.pictures()[name])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        image = open_source(f"folder:{photos}", Preprocess(40, 40)).load([1]).images[0]
    assert image.shape == (3, 40, 40)
    if name == "rotated":  # as torchvision does, and as the published data sets were made: the tag is not looked at
        (photos / "cat" / "b.png").write_bytes(fuzz.pictures()["jpeg"])
        assert torch.equal(image, open_source(f"folder:{photos}", Preprocess(40, 40)).load([1]).images[0])


def test_sixteen_bits_are_scaled_and_numbers_of_no_range_refused(photos):
    deep = np.full((32, 32), 40_000, dtype=np.uint16)
    Image.fromarray(deep).save(photos / "cat" / "b.png")
    assert open_source(f"folder:{photos}", SMALL).load([1]).images.unique().tolist() == [40_000 // 256]
    Image.fromarray(deep.astype(np.float32)).save(photos / "cat" / "b.png", "TIFF")
    with pytest.raises(come.InputError, match="save it with 8 bits a channel"):
        open_source(f"folder:{photos}", SMALL).load([1])


@pytest.mark.parametrize("name", [n for n in fuzz.NAMES if n.strip()])
def test_names_are_only_names(name, photos):
    (photos / f"x{name}").mkdir()
    Image.new("RGB", (40, 40)).save(photos / f"x{name}" / f"{name[:200]}.png")
    assert open_source(f"folder:{photos}", SMALL).load([0, 1]).labels.tolist() == [0, 1]
    (photos / f"x{name}" / f"{name[:200]}.png").write_bytes(b"")
    with pytest.raises(come.InputError, match=r"cannot read"):
        open_source(f"folder:{photos}", SMALL).load([0, 1])


# ---- nothing is executed ----


@pytest.mark.parametrize("ending", [".pth", ".pt", ".bin", ".safetensors", ""])
@pytest.mark.parametrize("form", ["pickle", "torch", "torch, old"])
def test_a_pickle_is_not_executed(ending, form, tmp_path):
    mark = tmp_path / "executed"
    path = tmp_path / f"weights{ending}"
    payload = {"state_dict": {"w": fuzz.Marker(mark)}}
    if form == "pickle":
        path.write_bytes(pickle.dumps(payload))
    else:
        torch.save(payload, path, _use_new_zipfile_serialization=form == "torch")
    with pytest.raises(come.ModelError, match=r"cannot read the checkpoint|not a checkpoint of plain tensors"):
        models.load("timm:test_resnet", checkpoint=path)
    assert not mark.exists()
    with open(path, "rb") as file:  # it would have been
        if form == "pickle":
            pickle.load(file)
        else:
            torch.load(file, weights_only=False)
    assert mark.exists()


def test_a_pickle_in_an_array_is_not_executed(tmp_path):
    mark = tmp_path / "executed"
    objects = np.empty(10, dtype=object)
    objects[:] = [fuzz.Marker(mark)] * 10
    np.save(tmp_path / "labels.npy", objects, allow_pickle=True)
    np.save(tmp_path / "fog.npy", objects, allow_pickle=True)
    with pytest.raises(come.InputError, match=r"cannot read .*labels.npy"):
        open_source(f"cifar10-c:{tmp_path}")
    np.save(tmp_path / "labels.npy", np.zeros(10, dtype=int))
    with pytest.raises(come.InputError, match=r"cannot read .*fog.npy"):
        open_source(f"cifar10-c:{tmp_path}").load([0], "fog")
    assert not mark.exists()


def test_torchvision_data_sets_that_unpickle_what_lies_beside_them_are_not_opened(tmp_path):
    for name in ("LSUN", "LSUNClass", "ImageFolder"):
        with pytest.raises(come.InputError, match=r"is not opened by come: .*folder:PATH"):
            open_source(f"torchvision:{name}:{tmp_path}")


# ---- what is declared is not believed ----


def test_weights_are_no_larger_than_their_file(tmp_path):
    good = fuzz.weights()
    cases = {
        "packed.pth": fuzz.packed(fuzz.torch_bytes({"w": torch.zeros(10**6)})),
        "wide.pth": fuzz.torch_bytes({**good, "fc.weight": torch.zeros(1).expand(10**9, 10**3)}),
        "huge.safetensors": fuzz.checkpoints()["huge.safetensors"],
        "long.safetensors": struct.pack("<Q", 2**63),
    }
    for name, content in cases.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(come.ModelError, match=name):
            models.load("timm:test_resnet", checkpoint=tmp_path / name)
    save_file({**good, "fc.weight": torch.zeros(7, 7)}, tmp_path / "shapes.safetensors")
    with pytest.raises(come.ModelError, match="does not fit timm:test_resnet"):
        models.load("timm:test_resnet", checkpoint=tmp_path / "shapes.safetensors")


def test_an_array_is_no_larger_than_its_file(tmp_path):
    np.save(tmp_path / "fog.npy", np.zeros((10, 8, 8, 3), dtype=np.uint8))
    (tmp_path / "labels.npy").write_bytes(fuzz.arrays()["huge labels"])
    with pytest.raises(come.InputError, match=r"cannot read .*labels.npy"):
        open_source(f"cifar10-c:{tmp_path}")


def test_manifests_and_configurations_are_files_of_a_largest_size(tmp_path):
    large = tmp_path / "large"
    large.touch()
    os.truncate(large, 2**27)
    for read in (Stream.load, from_toml):
        with pytest.raises(come.InputError, match="it is not a regular file"):
            read(Path("/dev/zero"))
        with pytest.raises(come.InputError, match="it is longer than"):
            read(large)


def test_an_index_that_is_not_there():
    with pytest.raises(come.InputError, match="has 20 samples, numbered from 0; there is no sample 20"):
        open_source("fashion:20").load([20])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("batch-size = '8'", "batch-size must be a valid integer, got '8'"),
        ("limit = true", "limit must be a valid integer, got True"),
        ("methods = 'tent'", "methods must be a list, got 'tent'"),
        ("methods = [['tent']]", r"methods\.0 must be a valid string, got \['tent'\]"),
        ("seeds = [0.5]", r"seeds\.0 must be a valid integer, got 0\.5"),
        (
            "seeds = [-9223372036854775809]",
            "must be greater than or equal to -9223372036854775808, got -9223372036854775809",
        ),
        ("setting = []", "setting must be"),
        ("setting = 'open-world'\noutlier-ratio = nan", "outlier-ratio must be .*, got nan"),
        ("model = 1979-05-27", "model must be a valid string, got"),
        ("set.tent = 1", r"set.* must be a table, got 1"),
        ("set.tent.lr = 1979-05-27", r"set.* must be .*, got datetime"),
        ("limit = " + "9" * 5000, "cannot read the configuration"),
        ("x = " + "[" * 10_000, "cannot read the configuration"),
        ("[" + "a." * 5000 + "a]", "no option in|cannot read the configuration"),
    ],
)
def test_configurations_of_wrong_kinds(text, message, tmp_path):
    (tmp_path / "c.toml").write_text(text)
    with pytest.raises(come.ComeError, match=message):
        Plan(**from_toml(tmp_path / "c.toml"))


# ---- the command line: one line and exit code 2 ----


def call(monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", ["come", *arguments])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    return stop.value.code, capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ("--data", "folder:a\0b"),
        ("--data", "folder:" + "x" * 300),
        ("--data", "folder:~nobody-here/photos"),
        ("--data", "folder:../nowhere"),
        ("--data", "fashion:-1"),
        ("--data", "fashion:99999999999"),
        ("--data", "fashion:²"),
        ("--data", "torchvision:.."),
        ("--data", "torchvision:CIFAR10:a\0b"),
        ("--seeds", "--5"),
        ("--seeds", "9" * 5000),
        ("--config", "a\0b"),
        ("--config", "x" * 300),
        ("--replay", "a\0b"),
        ("--model", "timm:test_resnet.nonsense", "--checkpoint", "x"),
        ("--model", "timm:test_resnet", "--checkpoint", "a\0b"),
        ("--model", "timm:test_resnet", "--checkpoint", "/dev/zero"),
        ("--model", "timm:hf-hub:somebody/something"),
    ],
)
def test_hostile_arguments_get_one_line_and_code_2(arguments, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    code, err = call(monkeypatch, capsys, "bench", "--limit", "8", "--methods", "source", "--dry-run", *arguments)
    assert code == 2, err
    assert err.startswith("error: ")
    assert len(err.strip().splitlines()) == 1, err


def test_markup_in_a_configuration_is_shown_as_it_is(tmp_path, monkeypatch, capsys):
    (tmp_path / "c.toml").write_text('methods = ["tent"]\ncorruptions = ["fog"]\nset.tent.select = "[/bold] [red]"\n')
    code, err = call(monkeypatch, capsys, "bench", "--config", str(tmp_path / "c.toml"), "--dry-run")
    assert code == 2
    assert "no selector '[/bold] [red]'" in err


def test_a_line_break_in_a_name_stays_in_one_line(tmp_path, monkeypatch, capsys):
    code, err = call(monkeypatch, capsys, "bench", "--data", f"folder:{tmp_path}/new\nline\x1b[31m")
    assert code == 2
    assert len(err.strip().splitlines()) == 1, err
    assert "\x1b" not in err


@pytest.mark.filterwarnings("ignore")
def test_an_error_in_a_worker_is_one_line(photos):
    (photos / "cat" / "b.png").write_bytes(b"")
    source = open_source(f"folder:{photos}", SMALL)
    stream = Stream.of(source.name, (0, 1), None, 5, 0)
    with pytest.raises(come.InputError, match="not an image") as raised:
        list(batches(source, stream, Preprocess(32), workers=1))
    assert len(str(raised.value).splitlines()) == 1


def test_a_folder_without_a_readable_image_is_refused(tmp_path, monkeypatch, capsys):
    for k in range(100):
        (tmp_path / "photos" / str(k)).mkdir(parents=True)
        (tmp_path / "photos" / str(k) / "a.png").write_bytes(b"")
    arguments = ("--methods", "source", "--corruptions", "fog", "--workers", "0", "--on-bad-image", "skip")
    code, err = call(
        monkeypatch,
        capsys,
        "bench",
        "--data",
        f"folder:{tmp_path / 'photos'}",
        *arguments,
        "--out",
        str(tmp_path / "run"),
    )
    assert code == 2, err
    assert len(err.strip().splitlines()) == 1, err
