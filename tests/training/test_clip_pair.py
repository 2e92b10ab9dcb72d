"""The script that trains the small CLIP pair, from made-up files to a table."""

from __future__ import annotations

import gzip
import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from calling import call

for package in ("timm", "open_clip"):
    pytest.importorskip(package)
ROOT = Path(__file__).parents[2]


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))  # the clone, where the commands are typed
    monkeypatch.syspath_prepend(str(ROOT / "training"))
    spec = importlib.util.spec_from_file_location("clip_pair", ROOT / "training" / "clip_pair.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "clip_pair", module)
    spec.loader.exec_module(module)
    return module


def made_up(folder):
    """The four files of Fashion-MNIST, with enough images of each class."""
    random = np.random.default_rng(0)
    for part, count in (("train", 900), ("t10k", 30)):
        images, labels = random.integers(0, 256, (count, 28, 28), np.uint8), (np.arange(count) % 10).astype(np.uint8)
        (folder / f"{part}-images-idx3-ubyte.gz").write_bytes(gzip.compress(bytes(16) + images.tobytes()))
        (folder / f"{part}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(bytes(8) + labels.tobytes()))


def test_one_command_makes_the_weights_and_the_next_uses_them(script, tmp_path, monkeypatch, capsys):
    made_up(tmp_path)
    weights = tmp_path / "pair.safetensors"
    monkeypatch.setattr(script, "BATCH", 16)
    monkeypatch.setattr(sys, "argv", ["clip_pair.py", str(tmp_path), str(weights), "--steps", "2"])
    script.main()
    assert "zero-shot accuracy on clean images" in capsys.readouterr().out
    model = ("--model", f"training.clip_pair:classifier:img_size=32:weights={weights}", "--data", "fashion:32")
    scaled = ("--mean", "0.5,0.5,0.5", "--std", "0.5,0.5,0.5")
    how = ("--methods", "source,tda", "--corruptions", "fog", "--out", str(tmp_path / "run"), "--workers", "0")
    code, out, err = call(monkeypatch, capsys, "bench", *model, *scaled, *how)
    assert code == 0, err
    assert "tda" in out


def test_attributes_split_images_in_three(script):
    x = torch.zeros(9, 3, 32, 32, dtype=torch.uint8)
    for i in range(9):
        x[i, :, : 3 * (i + 1)] = 40 + 20 * i
    bright, size = script.attributes(x)
    assert bright == ["dark"] * 3 + ["grey"] * 3 + ["bright"] * 3
    assert size == ["small"] * 3 + ["medium-sized"] * 3 + ["large"] * 3
