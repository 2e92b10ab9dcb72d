"""Folders of ImageNet classes, models restricted to them, lists of OpenOOD, and the identity of data."""

from __future__ import annotations

import pytest
import torch
from drawing import picture, save_pictures
from torch import nn

import come
from come.bench import Bench, Plan, RunFolder, models, run
from come.bench.data import Preprocess, open_source
from come.bench.data.folders import SHIFTED, places
from come.bench.data.preprocess import decode
from come.bench.models import Chosen, restricted

SMALL = Preprocess(size=8, resize=8)
WNIDS = [name for name in places() if name.startswith("n")]
CHOSEN = (7, 130, 999)


def net(head: nn.Module) -> models.Model:
    torch.manual_seed(0)
    body = nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 1000),
        head,
    )
    return models.Model("net", body.eval(), SMALL, 1000)


@pytest.fixture
def folder(tmp_path):
    """Three classes of ImageNet, two pictures each."""
    save_pictures(tmp_path / "some", [f"{WNIDS[k]}/{i}.png" for k in CHOSEN for i in range(2)], (8, 8))
    return tmp_path / "some"


def test_the_thousand_classes():
    assert len(WNIDS) == 1000
    assert sorted(WNIDS) == WNIDS
    assert [places()[name] for name in ("n01440764", "n15075141", "0", "10")] == [0, 999, 0, 10]


def test_classes_are_those_of_the_folders(folder):
    source = open_source(f"imagenet:{folder}", SMALL)
    assert (source.num_classes, source.subset) == (3, CHOSEN)
    assert source.labels().tolist() == [0, 0, 1, 1, 2, 2]
    source.require(("fog",), 5)
    assert source.source_images(1).shape == (1, 3, 8, 8)


def test_folders_that_are_numbers_keep_the_order_of_imagenet(tmp_path):
    """As texts, 10 comes before 9."""
    save_pictures(tmp_path, ["9/a.png", "10/a.png"], (8, 8))
    source = open_source(f"imagenet:{tmp_path}", SMALL)
    assert source.subset == (9, 10)
    assert sorted(zip(source.names(), source.labels().tolist(), strict=True)) == [("10/a.png", 1), ("9/a.png", 0)]
    assert torch.equal(
        source.load([source.names().index("9/a.png")]).images[0], decode((tmp_path / "9" / "a.png").read_bytes(), SMALL)
    )


@pytest.mark.parametrize(("kind", "count"), SHIFTED.items())
def test_the_published_shifts(kind, count, tmp_path):
    names = [str(i) for i in range(1000)] if kind == "imagenet-v2" else WNIDS[:count]
    one = picture(0, (8, 8))
    for name in names:
        (tmp_path / name).mkdir()
    one.save(tmp_path / names[-1] / "a.png")
    source = open_source(f"{kind}:{tmp_path}", SMALL)
    assert (source.num_classes, source.subset) == (count, tuple(range(count)))
    assert source.labels().tolist() == [count - 1]
    source.require((), 5)
    with pytest.raises(come.InputError, match="is shifted already, and is not corrupted; give --setting natural, or"):
        source.require(("fog",), 5)
    with pytest.raises(come.InputError, match="holds shifted images only; give clean source images with --source-data"):
        source.source_images(1)
    (tmp_path / names[0]).rmdir()
    with pytest.raises(
        come.InputError, match=f"{kind} must have {count} folders, one for each class, got {count - 1} in"
    ):
        open_source(f"{kind}:{tmp_path}", SMALL)


def test_folders_that_are_no_classes(folder):
    for extra, message in (
        ("cats", r"must be classes of ImageNet, such as n01440764, or numbers from 0 to 999; got 'cats': give"),
        ("7", r"imagenet must have from 2 to 1000 folders, one for each class, got 4 in"),
    ):
        (folder / extra).mkdir()
        with pytest.raises(come.InputError, match=message):
            open_source(f"imagenet:{folder}", SMALL)
        (folder / extra).rmdir()


@pytest.mark.parametrize(("head", "narrowed"), [(nn.Identity(), True), (nn.LogSoftmax(1), False)])
def test_a_restricted_model_has_the_logits_of_its_classes(head, narrowed):
    model, x = net(head), torch.randn(4, 3, 8, 8)
    wanted = model.module(x)[:, CHOSEN]
    small = restricted(model, CHOSEN)
    assert small.num_classes == 3
    assert torch.allclose(small.module(x), wanted, atol=1e-6)
    assert isinstance(small.module, Chosen) is not narrowed
    assert model.module(x).shape == (4, 1000)
    adapter = come.adapt(small.module, "tent", objective="come", lr=1e-3)
    assert adapter(x).shape == (4, 3)
    if narrowed:
        assert come.adapt(small.module, "t3a")(x).shape == (4, 3)
    else:
        with pytest.raises(come.ModelError, match="does not give its logits"):
            come.adapt(small.module, "t3a", guard=False)(x)


@pytest.mark.parametrize("setting", ["natural", "standard"])
def test_a_run_answers_with_the_classes_of_the_data(folder, tmp_path, setting):
    shifts = None if setting == "natural" else ("fog",)
    chosen = {"model": "mine", "data": f"imagenet:{folder}", "setting": setting, "corruptions": shifts}
    plan = Plan(**chosen, methods=("source", "tent"), objectives=("come",), batch_size=3)
    records = run(plan, tmp_path / "run", model=net(nn.Identity()), workers=0)
    assert [r.result.domains for r in records] == [("some",) if setting == "natural" else ("fog",)] * 2
    bench = Bench(plan, model=net(nn.Identity()), workers=0)
    assert bench.cells[0].weights == models.fingerprint(net(nn.Identity()).module)[:16]  # of the model that was given
    rows = RunFolder(tmp_path / "run").rows(records[0].key)
    assert rows["prediction"].max() < 3
    if setting == "natural":
        x = SMALL(open_source(f"imagenet:{folder}", SMALL).load(rows["index"].tolist()).images)
        assert torch.equal(
            rows["prediction"], net(nn.Identity()).module(x)[:, CHOSEN].argmax(1).to(rows["prediction"].dtype)
        )


def test_a_model_of_other_classes_is_refused(folder):
    with pytest.raises(
        come.InputError, match="has 3 classes, fashion-resnet-bn has 8; choose a model and data that belong"
    ):
        Bench(Plan(data=f"imagenet:{folder}", setting="natural", methods=("source",)))


@pytest.fixture
def listed(tmp_path):
    save_pictures(tmp_path / "images", ["ninco/a b.png", "ninco/c.png"], (8, 8))
    (tmp_path / "test.txt").write_text("ninco/a b.png -1\n\nninco/c.png -1\n")
    return tmp_path


def test_a_list_of_openood(listed):
    spec = f"openood:{listed / 'images'}:list={listed / 'test.txt'}"
    source = open_source(spec, SMALL)
    assert (source.num_classes, source.names()) == (0, ["ninco/a b.png", "ninco/c.png"])
    assert source.load([1]).labels.tolist() == [-1]
    with pytest.raises(come.InputError, match="has no labels, so it can only be given as --outliers"):
        Bench(Plan(data=spec, setting="natural", methods=("source",)))
    plan = Plan(setting="open-world", outliers=(spec,), methods=("source",), limit=4)
    bench = Bench(plan)
    assert [e.stream.domain for cell in bench.cells for e in bench.inputs.episodes(cell)] == ["none", "test"]
    (listed / "test.txt").write_text("ninco/a b.png 4\nninco/c.png 0\n")
    source = open_source(spec, SMALL)
    assert (source.num_classes, source.labels().tolist()) == (5, [4, 0])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ninco/c.png", "line 1 of .*test.txt must be a path and a label, got 'ninco/c.png'"),
        ("\nninco/c.png one", "line 2 of .* must be a path and a label"),
        ("\n", "is empty; each line must be a path and a label"),
        (
            "ninco/c.png -1\nninco/x.png -1",
            "lists 2 images, 1 of which are not in .*images, such as 'ninco/x.png'; give the",
        ),
        (None, "cannot read the list of images .*No such file"),
    ],
)
def test_lists_that_are_refused(listed, text, message):
    (listed / "test.txt").unlink() if text is None else (listed / "test.txt").write_text(text)
    with pytest.raises(come.InputError, match=message):
        open_source(f"openood:{listed / 'images'}:list={listed / 'test.txt'}", SMALL)


def test_a_list_that_is_not_named_and_one_that_leads_out(listed):
    with pytest.raises(come.InputError, match="lacks its list; write openood:PATH:list=FILE"):
        open_source(f"openood:{listed / 'images'}", SMALL)
    picture(1).save(listed / "out.png")
    (listed / "test.txt").write_text("../out.png -1\n")
    with pytest.raises(come.InputError, match="leads out of the data folder"):
        open_source(f"openood:{listed / 'images'}:list={listed / 'test.txt'}", SMALL).load([0])


def test_other_data_under_the_same_name_is_another_cell(tmp_path):
    save_pictures(tmp_path, [f"{k}/{i}.png" for k in range(8) for i in range(2)], (8, 8))

    def key():
        plan = Plan(data=f"folder:{tmp_path}", methods=("source",), corruptions=("fog",), limit=8)
        return Bench(plan, workers=0).cells[0].key

    first = key()
    assert key() == first
    (tmp_path / "0" / "0.png").rename(tmp_path / "0" / "moved.png")
    picture(5, (8, 8)).save(tmp_path / "0" / "0.png")
    assert key() != first
    assert Bench(Plan(methods=("source",), limit=8)).cells[0].images is None
