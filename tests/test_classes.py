"""The order of the classes: from a file, in the plan, and a model that is near chance because of it."""

from __future__ import annotations

import hashlib
import json
import sys

import numpy as np
import pytest
import torch
from calling import call
from PIL import Image

import come
from come.bench import Bench, Cell, Plan, RunFolder, chance, models, run
from come.bench.cell import LATER, digest
from come.bench.data import DatasetSource, Preprocess, Source, open_source
from come.bench.data.classes import read_classes
from come.bench.plan import typed

NAMES = ("tshirt", "boot", "coat", "dress")
"""In the order of the model's outputs; that of the alphabet is another for each of them."""
EACH = 12
NETS = """
import torch
from torch import nn

class Brightness(nn.Module):
    def __init__(self, classes=4):
        super().__init__()
        self.norm, self.classes = nn.LayerNorm(1), classes

    def forward(self, x):
        level = self.norm(x.mean(dim=(1, 2, 3))[:, None]) * 0 + x.mean(dim=(1, 2, 3))[:, None]
        return -200 * (level - (torch.arange(self.classes) + 0.5) / self.classes) ** 2
"""


@pytest.fixture
def wardrobe(tmp_path, monkeypatch):
    """Pictures whose brightness says the class, and a model that knows this: in its own order it is always right."""
    for place in ("photos", "corrupted/fog/5"):
        for number, name in enumerate(NAMES):
            (tmp_path / place / name).mkdir(parents=True)
            for i in range(EACH):
                grey = round(255 * (number + 0.5) / len(NAMES)) + i - EACH // 2
                picture = Image.fromarray(np.full((16, 16, 3), grey, dtype=np.uint8))
                picture.save(tmp_path / place / name / f"{i}.png")
    (tmp_path / "classes.txt").write_text("\n".join(NAMES) + "\n")
    (tmp_path / "brightness_nets.py").write_text(NETS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    yield tmp_path
    sys.modules.pop("brightness_nets", None)


PLAN = {
    "model": "brightness_nets:Brightness",
    "data": "folder:photos",
    "image_size": 16,
    "mean": (0.0, 0.0, 0.0),
    "std": (1.0, 1.0, 1.0),
    "setting": "natural",
    "methods": ("source",),
}
OPTIONS = ("--model", PLAN["model"], "--image-size", "16", "--mean", "0,0,0", "--std", "1,1,1", "--methods", "source")
FOLDER = ("bench", *OPTIONS, "--data", "folder:photos", "--setting", "natural")


# ---- the file ----


@pytest.mark.parametrize(
    "text",
    [
        "boot\ncoat\ndress",
        "\ufeffboot\r\n coat \r\ndress\r\n\r\n",
        '["boot", "coat", "dress"]',
        '{"1": "coat", "0": "boot", "2": "dress"}',
        '{"model_type": "vit", "id2label": {"0": "boot", "1": "coat", "2": "dress"}}',
    ],
)
def test_files_with_classes(text, tmp_path):
    (tmp_path / "classes").write_bytes(text.encode())
    assert read_classes(tmp_path / "classes") == ["boot", "coat", "dress"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is empty; it must name a class in each line, in the order of the model's outputs"),
        (" \n\n", "is empty"),
        ("[]", "is empty"),
        ("boot\n\ncoat", "has no name for class 1; it must have one for each output"),
        ("boot\ncoat\nboot", "has the name 'boot' for class 0 and for class 2; each class must have its own"),
        ('["a", "a"]', "has the name 'a' for class 0 and for class 1"),
        ("[", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ('["a", 3]', "must hold names of classes, got 3"),
        ('{"0": "a", "2": "b"}', "an object from the indices 0, 1, ... to names, got '2'"),
        ('{"boot": 0}', "an object from the indices 0, 1, ... to names, got 'boot'"),
        ('{"id2label": 7}', "an object from the indices 0, 1, ... to names, got 7"),
        (b"\xff\xfe", "cannot read the classes"),
    ],
)
def test_files_that_are_refused(text, words, tmp_path):
    (tmp_path / "classes").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(come.InputError, match=words) as found:
        read_classes(tmp_path / "classes")
    assert "\n" not in str(found.value)
    for path in (tmp_path / "none", tmp_path, "~nobody-here/classes", "a\0b"):
        with pytest.raises(
            come.InputError, match=r"cannot read the classes .*; give a text file with the name of a class"
        ):
            read_classes(path)


# ---- the data ----


def test_folders_get_the_numbers_of_their_names(wardrobe):
    for spec in ("folder:photos", "tiny-imagenet:photos", "imagenet-c:corrupted"):
        source = open_source(spec, Preprocess(16, 16))
        assert source.labels().tolist() == sorted([0, 1, 2, 3] * EACH)
        before, digest = source.names(), source.digest()
        source.number([*NAMES, "bag"], "a file")
        assert (source.num_classes, list(source.classes)) == (5, [*NAMES, "bag"])
        assert source.labels().tolist() == [1] * EACH + [2] * EACH + [3] * EACH + [0] * EACH
        assert source.names() == before
        assert source.digest() != digest  # cells of other labels are other cells
        source.require(["fog"] if source.holds else [], 5)


def test_folders_without_a_line_are_named_with_the_nearest(wardrobe):
    (wardrobe / "photos" / "notes").mkdir()  # holds no image: it needs no line
    source = open_source("folder:photos", Preprocess(16, 16))
    before = source.labels().tolist()
    with pytest.raises(
        come.ConfigError, match=r"no class in my\.txt for the folder 'boot'; did you mean 'bot'"
    ) as found:
        source.number(["tshirt", "bot", "coat", "dres"], "my.txt")
    assert str(found.value).endswith("it lacks 2 of 4 folders: rename them, or correct it")
    assert source.labels().tolist() == before
    source.number(NAMES, "my.txt")
    assert list(source.classes) == list(NAMES)


def test_only_data_in_folders_takes_classes(wardrobe):
    for name in ("n01440764", "n01443537"):
        (wardrobe / "imagenet" / name).mkdir(parents=True)
        Image.new("RGB", (16, 16)).save(wardrobe / "imagenet" / name / "a.png")
    (wardrobe / "list.txt").write_text("boot/0.png 1\ncoat/0.png 0\n")
    for spec in ("fashion", "imagenet:imagenet", "openood:photos:list=list.txt", "torchvision:FakeData"):
        words = f"classes has no effect on {spec.partition(':')[0]}; only folder:, tiny-imagenet: and imagenet-c: data take it"
        with pytest.raises(come.ConfigError, match=words):
            open_source(spec, Preprocess(16, 16)).number(NAMES, "my.txt")
    with pytest.raises(come.ConfigError, match="classes has no effect on fashion"):
        Bench(Plan(methods=("source",), corruptions=("fog",), classes="classes.txt"))


# ---- the plan ----


def test_a_model_is_right_in_its_own_order(wardrobe):
    (right,) = run(Plan(**PLAN, classes="classes.txt"), "right")
    assert right.result.metrics["photos"]["accuracy"] == 1
    with pytest.warns(UserWarning, match="right for 0.0% of 48 images"):
        (wrong,) = run(Plan(**PLAN), "wrong")
    assert wrong.result.metrics["photos"]["accuracy"] == 0
    assert right.cell.classes == "classes.txt"
    assert right.key != wrong.key
    (wardrobe / "classes.txt").write_text("\n".join(("boot", "tshirt", *NAMES[2:])))
    assert Bench(Plan(**PLAN, classes="classes.txt")).cells[0].key != right.key  # the same name, and other labels


def test_without_the_option_the_names_of_cells_and_runs_are_what_they_were():
    cell = Cell(method="tent", objective="come", corruptions=("fog",), severity=5, size=100)
    plain = Plan(methods=("source",), corruptions=("fog",))
    for one in (cell, plain):
        old = {name: value for name, value in one.model_dump().items() if name not in LATER}
        assert digest(one) == hashlib.sha256(json.dumps(old, sort_keys=True).encode()).hexdigest()
    assert digest(cell)[:16] == cell.key != cell.model_copy(update={"classes": "a.txt"}).key
    assert digest(plain)[:8] in plain.slug
    assert plain.slug != plain.but(classes="a.txt").slug


def test_it_is_an_option_and_a_key_of_a_configuration(wardrobe, monkeypatch, capsys):
    assert typed({"classes": "classes.txt"}) == {"classes": "classes.txt"}
    code, out, err = call(monkeypatch, capsys, *FOLDER, "--classes", "classes.txt", "--out", "run")
    assert (code, err) == (0, "")
    assert "photos 100.0" in out
    assert "warning" not in out
    assert RunFolder("run").records()[0].cell.classes == "classes.txt"
    (wardrobe / "c.toml").write_text('classes = "classes.txt"\n')
    _, dry, _ = call(monkeypatch, capsys, *FOLDER, "--config", "c.toml", "--dry-run")
    assert "0 tshirt, 1 boot, 2 coat, 3 dress" in dry
    _, shown, _ = call(monkeypatch, capsys, "bench", "--help")
    assert "--classes" in shown


def test_more_classes_than_folders_must_be_those_of_the_model(wardrobe):
    (wardrobe / "more.txt").write_text("\n".join((*NAMES, "bag", "sandal")))
    with pytest.raises(
        come.InputError, match=r"more\.txt names 6 classes, .* has 4; give a file that names each output"
    ):
        Bench(Plan(**PLAN, classes="more.txt"))
    wide = PLAN | {"model": "brightness_nets:Brightness:classes=6"}
    with pytest.raises(
        come.InputError, match=r"has 4 classes, .* has 6; .* name all classes of the model with --classes"
    ):
        Bench(Plan(**wide))
    bench = Bench(Plan(**wide, classes="more.txt"))
    assert bench.inputs.class_order == "0 tshirt, 1 boot, 2 coat, ... 5 sandal (6 classes, as in more.txt, images of 4)"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("tshirt\nboot\ncoat\ndres\n", "no class in bad.txt for the folder 'dress'; did you mean 'dres'?"),
        ("tshirt\nboot\n", "no class in bad.txt for the folder 'coat'"),
        ("tshirt\nboot\nboot\ncoat\ndress\n", "has the name 'boot' for class 1 and for class 2"),
        ("", "bad.txt is empty"),
    ],
)
@pytest.mark.parametrize("dry", [[], ["--dry-run"]], ids=["run", "dry"])
def test_mistakes_in_the_file_get_one_line(text, words, dry, wardrobe, monkeypatch, capsys):
    (wardrobe / "bad.txt").write_text(text)
    code, _, err = call(monkeypatch, capsys, *FOLDER, "--classes", "bad.txt", *dry)
    assert code == 2
    assert len(err.splitlines()) == 1
    assert words in err
    assert not (wardrobe / "runs").exists()


# ---- what a dry run says ----


def test_a_dry_run_shows_the_order(wardrobe, monkeypatch, capsys):
    code, out, _ = call(monkeypatch, capsys, *FOLDER, "--dry-run")
    assert code == 0
    assert "classes: 0 boot, 1 coat, 2 dress, 3 tshirt (4 classes, in alphabetical order)" in out
    _, out, _ = call(monkeypatch, capsys, *FOLDER, "--dry-run", "--classes", "classes.txt")
    assert "classes: 0 tshirt, 1 boot, 2 coat, 3 dress (4 classes, as in classes.txt)" in out
    _, out, _ = call(monkeypatch, capsys, "bench", "--dry-run")
    assert "classes" not in out


# ---- near chance ----


def flat(text):
    return " ".join(text.split())


@pytest.mark.parametrize("dry", [[], ["--dry-run"]], ids=["run", "dry"])
def test_a_model_with_another_order_is_warned_of(dry, wardrobe, monkeypatch, capsys):
    code, out, err = call(monkeypatch, capsys, *FOLDER, *dry)
    assert (code, err) == (0, "")
    assert max(map(len, (line for line in out.splitlines() if "report.html" not in line))) <= 80
    said = flat(out).partition("warning: ")[2]
    assert said.startswith(
        "without adaptation brightness_nets:Brightness is right for 0.0% of 48 images of folder:photos;"
    )
    for words in (
        "guessing is right for 25.0%.",
        "With the classes in another order 100.0% would be right.",
        "The order is 0 boot, 1 coat, 2 dress, 3 tshirt",
        "give --classes FILE",
        "--normalization (or --mean and --std) and --image-size",
    ):
        assert words in said
    if not dry:
        assert flat(out).index("warning:") < flat(out).index("[1/1]")  # before the grid
        assert "warning:" not in call(monkeypatch, capsys, *FOLDER)[1]  # all is done: nobody looks
    _, out, _ = call(monkeypatch, capsys, *FOLDER, "--classes", "classes.txt", *dry)
    assert "warning:" not in out


def test_a_wrong_normalization_is_warned_of(wardrobe):
    (wrong,) = [Bench(Plan(**(PLAN | {"mean": (5.0,) * 3}), classes="classes.txt")).doubt()]
    assert "right for 25.0% of 48 images" in wrong
    assert "another order" not in wrong.partition("The order")[0]
    assert Bench(Plan(**PLAN, classes="classes.txt")).doubt() == ""


def test_clean_images_are_asked_for_where_there_are_some(wardrobe, monkeypatch):
    asked = []
    look = chance.look
    monkeypatch.setattr(chance, "look", lambda *a: asked.append(a[3]) or look(*a))
    plan = PLAN | {"setting": "standard", "corruptions": ("fog",)}
    assert "images of folder:photos;" in Bench(Plan(**plan)).doubt()
    said = Bench(Plan(**plan | {"data": "imagenet-c:corrupted"})).doubt()
    assert "48 images of imagenet-c:corrupted with fog, severity 5;" in said
    assert "If it is right and the images are not that hard, check" in said
    assert asked == [(None, 5), ("fog", 5)]


def test_nothing_fails_and_nothing_changes_because_somebody_looked(wardrobe):
    bench = Bench(Plan(**PLAN))
    state, drawn = torch.get_rng_state(), bench.cells[0].key
    before = {name: value.clone() for name, value in bench.inputs.model.module.state_dict().items()}
    assert bench.doubt() == bench.doubt() != ""
    assert torch.equal(torch.get_rng_state(), state)
    assert bench.cells[0].key == drawn
    assert all(torch.equal(value, before[name]) for name, value in bench.inputs.model.module.state_dict().items())
    for picture in (wardrobe / "photos").glob("*/*.png"):
        picture.write_bytes(b"broken")
    assert Bench(Plan(**PLAN)).doubt() == ""  # the cell that needs the picture names it


def test_nobody_looks_at_the_embedded_data(monkeypatch, capsys):
    monkeypatch.setattr(chance, "look", lambda *_: 1 / 0)
    monkeypatch.setattr(chance, "doubt", lambda *_: pytest.fail("looked"))
    assert call(monkeypatch, capsys, "bench", "--dry-run", "--limit", "8", "--methods", "source")[0] == 0


def test_at_most_so_many_images_and_so_long(wardrobe, monkeypatch):
    class Slow(Source):
        name, num_classes, asked = "slow", 4, 0

        def __len__(self):
            return 1000

        def load(self, indices, corruption=None, severity=5):
            self.asked += len(indices)
            return photos.load([i % 48 for i in indices])

    photos = open_source("folder:photos", Preprocess(16, 16))
    model, source = Bench(Plan(**PLAN)).inputs.model, Slow()
    arguments = (range(1000), (None, 5), torch.device("cpu"))
    assert chance.doubt(model, source, *arguments)
    assert source.asked == chance.LOOKED_AT
    source.asked = 0
    monkeypatch.setattr(chance, "PATIENCE", 0.0)
    chance.doubt(model, source, *arguments)
    assert source.asked == chance.AT_ONCE


@pytest.mark.parametrize(
    ("right", "samples", "classes", "near"),
    [
        (33, 256, 8, True),  # 13% of eight classes
        (64, 256, 8, True),  # two of eight classes are in their place
        (77, 256, 8, False),
        (128, 256, 2, True),
        (0, 256, 2, True),
        (180, 256, 2, False),
        (0, 256, 1000, True),
        (8, 256, 1000, False),  # 3%: a model of ImageNet under heavy noise
        (0, 3, 2, False),  # too few to tell
        (0, 12, 3, True),
        (4, 12, 3, False),
        (5, 9, 1, False),
        (0, 0, 10, False),
    ],
)
def test_what_is_near_chance(right, samples, classes, near):
    assert chance.near_chance(right, samples, classes) is near


def test_another_order_is_seen_from_enough_images_only():
    labels = torch.arange(60) % 4
    turned = chance.Look(labels, (labels + 1) % 4)
    assert chance.right_in_another_order(turned, 4) == 1
    assert chance.right_in_another_order(turned, 20) == 0
    assert chance.right_in_another_order(chance.Look(labels, torch.zeros_like(labels)), 4) == 0  # one answer for all


def test_a_model_in_training_mode_is_not_changed():
    module = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.Flatten(), torch.nn.LazyLinear(2)
    )
    module(torch.zeros(2, 3, 8, 8))
    before = {name: value.clone() for name, value in module.state_dict().items()}
    pairs = [(torch.randint(256, (3, 8, 8), dtype=torch.uint8), k % 2) for k in range(40)]
    model = models.Model("mine", module.train(), models.Preprocess(8, 8), 2)
    chance.look(model, DatasetSource(pairs, num_classes=2, name="mine"), range(40), (None, 5), torch.device("cpu"))
    assert module.training
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
