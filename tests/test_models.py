"""Models by name: the embedded ones are what they claim, and files are read safely."""

from __future__ import annotations

import json
import pickle
from importlib.resources import files

import pytest
import torch
from safetensors.torch import save_file

import come
from come.bench import models
from come.bench.data import GlyphSource


@pytest.mark.parametrize("name", models.GLYPHS)
def test_the_embedded_models_reach_what_they_claim(name):
    about = json.loads((files("come.bench") / "weights" / f"{name.replace('-', '_')}.json").read_text())
    assert about["clean_test_accuracy"] > 0.9
    model = models.load(name)
    loaded = GlyphSource(size=1000).load(range(1000))
    with torch.no_grad():
        right = (model.module(model.preprocess(loaded.images)).argmax(1) == loaded.labels).float().mean().item()
    assert right == pytest.approx(about["clean_test_accuracy"], abs=0.03)
    assert not model.module.training


def test_the_two_embedded_models_stand_for_the_two_families():
    vit, resnet = (models.load(name).module for name in ("glyphs-vit", "glyphs-resnet"))
    assert "without BatchNorm" in repr(come.adapt(vit, "tent"))
    assert "for BatchNorm models" in repr(come.adapt(resnet, "tent"))


def test_normalizations():
    images = torch.full((1, 3, 32, 32), 128, dtype=torch.uint8)
    half = models.load("glyphs-vit", normalization="half").preprocess
    assert half.mean == (0.5, 0.5, 0.5)
    assert half(images).abs().max() < 0.01
    with pytest.raises(come.ConfigError, match="did you mean 'imagenet'"):
        models.load("glyphs-vit", normalization="imagnet")


def test_timm_with_a_checkpoint(tmp_path):
    import timm

    source = timm.create_model("resnet10t", num_classes=7)
    path = tmp_path / "weights.safetensors"
    save_file(source.state_dict(), path)
    model = models.load("timm:resnet10t", checkpoint=path)
    assert model.num_classes == 7
    assert model.preprocess.size == 176
    x = torch.randn(1, 3, 64, 64)
    assert torch.equal(model.module(x), source.eval()(x))
    torch.save({"state_dict": source.state_dict()}, tmp_path / "weights.pth")
    assert models.load("timm:resnet10t", checkpoint=tmp_path / "weights.pth").num_classes == 7


def test_torchvision_with_a_checkpoint(tmp_path):
    import torchvision

    source = torchvision.models.squeezenet1_1(weights=None)
    torch.save(source.state_dict(), tmp_path / "w.pth")
    model = models.load("torchvision:squeezenet1_1", checkpoint=tmp_path / "w.pth")
    assert (model.num_classes, model.preprocess.size, model.preprocess.resize) == (1000, 224, 256)


class Evil:
    def __reduce__(self):
        return (print, ("executed",))


def test_checkpoints_that_are_refused(tmp_path, capsys):
    (tmp_path / "evil.pth").write_bytes(pickle.dumps({"w": Evil()}))
    (tmp_path / "cut.safetensors").write_bytes(b"123")
    torch.save([1, 2], tmp_path / "list.pth")
    save_file({"x": torch.zeros(1)}, tmp_path / "other.safetensors")
    for name, message in {
        "evil.pth": "not a checkpoint of plain tensors|cannot read the checkpoint",
        "cut.safetensors": "cannot read the checkpoint",
        "missing.pth": "cannot read the checkpoint",
        "list.pth": "holds no state dict",
        "other.safetensors": "does not fit timm:resnet10t",
    }.items():
        with pytest.raises(come.ModelError, match=message):
            models.load("timm:resnet10t", checkpoint=tmp_path / name)
    assert "executed" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("glyphs-vti", "no model 'glyphs-vti'; did you mean 'glyphs-vit'"),
        ("timm:resnet5O", "no model of timm 'resnet5O'; did you mean 'resnet5"),
        ("torchvision:resnet51", "no model of torchvision 'resnet51'; did you mean 'resnet5"),
        ("resnet50", "no model 'resnet50'"),
    ],
)
def test_unknown_models(name, message):
    with pytest.raises(come.ConfigError, match=message):
        models.load(name)
    with pytest.raises(come.ConfigError, match="comes with its weights"):
        models.load("glyphs-vit", checkpoint="x")


def test_without_a_network_the_repair_is_named(monkeypatch):
    import timm

    def offline(*_, **__):
        raise OSError("cannot reach the hub\nand more")

    monkeypatch.setattr(timm, "create_model", offline)
    with pytest.raises(come.ModelError, match="cannot reach the hub; with no network, give --checkpoint"):
        models.load("timm:resnet10t")
