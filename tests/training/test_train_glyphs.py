"""The script that trains the source models: a run from end to end on a few images, and the file it writes."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

pytest.importorskip("PIL")
pytest.importorskip("matplotlib")
pytest.importorskip("timm")
safetensors = pytest.importorskip("safetensors.torch")

SCRIPT = Path(__file__).parents[2] / "training" / "train_glyphs.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_glyphs", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["train_glyphs"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("name", "override"),
    [("vit", {"embed_dim": 24, "depth": 2}), ("resnet", {"channels": [8, 8, 8, 8], "stem_width": 4})],
)
def test_a_short_run_writes_weights_that_load(
    name: str,
    override: dict[str, object],
    script: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words = f"--model {name} --device cpu --epochs 2 --plain 1 --batch 32 --workers 1"
    arguments = [
        *words.split(),
        "--train-size",
        "64",
        "--test-size",
        "50",
        "--out",
        str(tmp_path),
        "--override",
        json.dumps(override),
    ]
    monkeypatch.setattr(sys, "argv", ["train_glyphs.py", *arguments])
    script.main()
    record = json.loads((tmp_path / f"glyphs_{name}.json").read_text())
    assert record["arguments"].items() >= override.items()
    assert record["test_images"] == 50
    state = safetensors.load_file(tmp_path / f"glyphs_{name}.safetensors")
    model = script.build_glyphs(name, record["arguments"])
    model.load_state_dict(state)
    assert all(v.dtype == (torch.float16 if v.ndim > 1 else torch.float32) for v in state.values() if v.ndim)
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 100)
    images, labels = script.render(script.Glyphs("test", 50, record["test_seed"]), 2)
    assert script.accuracy(model, images, labels) == pytest.approx(record["clean_test_accuracy"])
    assert script.shifted(model, images, labels) == pytest.approx(record["severity_5_accuracy"])


def test_training_goes_on_from_weights(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = "--model vit --device cpu --epochs 1 --batch 32 --workers 1 --train-size 32 --test-size 20"
    start = tmp_path / "first" / "glyphs_vit.safetensors"
    override = json.dumps({"embed_dim": 24, "depth": 1})
    for extra in (["--out", str(start.parent)], ["--start", str(start), "--rate", "1e-9", "--out", str(tmp_path)]):
        monkeypatch.setattr(sys, "argv", ["train_glyphs.py", *words.split(), "--override", override, *extra])
        script.main()
    first, second = (safetensors.load_file(p) for p in (start, tmp_path / start.name))
    assert all(torch.allclose(first[k].float(), second[k].float(), atol=1e-4) for k in first)


def test_the_criterion(script: ModuleType) -> None:
    assert script.met(0.80, 0.35)
    assert script.met(0.95, 0.45)
    assert not script.met(0.79, 0.40)
    assert not script.met(0.90, 0.46)


def test_both_models_fit_in_four_megabytes(script: ModuleType) -> None:
    for name, recipe in script.ARCHITECTURES.items():
        state = script.stored(script.build_glyphs(name, recipe["arguments"]))
        assert sum(v.numel() * v.element_size() for v in state.values()) < 4_000_000


def test_augmentation_shifts_within_two_pixels(script: ModuleType) -> None:
    torch.manual_seed(0)
    images = torch.zeros(64, 3, 32, 32, dtype=torch.uint8)
    images[:, :, 16, 16] = 255
    out = script.augment(images)
    where = out.amax(1).flatten(1).argmax(1)
    rows, columns = where // 32, where % 32
    assert out.shape == images.shape
    assert out.max() <= 1
    assert set(rows.tolist()) <= set(range(14, 19))
    assert set(columns.tolist()) <= set(range(14, 19))
    assert len(set(where.tolist())) > 10
