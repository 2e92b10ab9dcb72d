"""The script that packs the embedded images and trains their source models, from end to end on made-up files."""

from __future__ import annotations

import gzip
import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

pytest.importorskip("timm")
FOLDER = Path(__file__).parents[2] / "training"


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    spec = importlib.util.spec_from_file_location("training_fashion", FOLDER / "fashion.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "training_fashion", module)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def published(tmp_path):
    """Files in Fashion-MNIST's layout: 20 pictures of each class for training, 10 for tests; the class is the brightness."""
    draw = np.random.default_rng(0)
    for part, each in (("train", 20), ("t10k", 10)):
        labels = draw.permutation(np.repeat(np.arange(10, dtype=np.uint8), each))
        images = labels[:, None, None] * 20 + draw.integers(0, 20, (len(labels), 28, 28), dtype=np.uint8)
        (tmp_path / f"{part}-images-idx3-ubyte.gz").write_bytes(gzip.compress(bytes(16) + images.tobytes()))
        (tmp_path / f"{part}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(bytes(8) + labels.tobytes()))
    return tmp_path


def run(script, monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["fashion.py", *map(str, arguments)])
    script.main()


def test_packing(script, published, tmp_path, monkeypatch):
    monkeypatch.setattr(script, "SHOWN", 7)
    monkeypatch.setattr(script, "SOURCE", 3)
    run(script, monkeypatch, "pack", published, tmp_path / "out")
    labels = json.loads((tmp_path / "out" / "fashion_labels.json").read_text())
    assert {name: len(text) for name, text in labels.items()} == {"test": 56, "outliers": 14, "source": 24}
    assert set(labels["outliers"]) == {"6", "8"}
    sheet = np.asarray(Image.open(tmp_path / "out" / "fashion_test.png"))
    assert sheet.shape == (2 * 28, 50 * 28)
    for place, label in enumerate(labels["test"]):
        y, x = 28 * (place // 50), 28 * (place % 50)
        assert sheet[y : y + 28, x : x + 28].mean() // 20 == int(label)


def test_a_short_training_writes_weights_that_load(script, published, tmp_path, monkeypatch):
    from safetensors.torch import load_file

    monkeypatch.setattr(script, "SOURCE", 3)
    words = ("train", published, tmp_path / "out", "--only", "fashion-resnet-gn", "--steps", 3, "--epochs", 2, 1)
    run(script, monkeypatch, *words, "--device", "cpu")
    about = json.loads((tmp_path / "out" / "fashion_resnet_gn.json").read_text())
    assert (about["train_images"], about["test_images"], about["epochs"]) == (8 * 17, 80, 2)
    model = script.MODELS["fashion-resnet-gn"].build()
    state = load_file(tmp_path / "out" / "fashion_resnet_gn.safetensors")
    model.load_state_dict({k: v.float() if v.is_floating_point() else v for k, v in state.items()})
    assert script.fingerprint(model) == about["sha256"]
    assert model(torch.zeros(1, 3, 32, 32)).shape == (1, 8)


def test_the_criterion_has_two_sides(script):
    assert script.met({"severity 5": 0.5}, "severity 5")
    assert not script.met({"severity 5": 0.66}, "severity 5")
    assert not script.met({"severity 5": 0.34}, "severity 5")
    assert not script.met({"clean": 0.87}, "clean")
