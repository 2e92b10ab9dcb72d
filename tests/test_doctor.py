"""`come doctor`: one screen, never an error of its own, exit code 1 for what is broken."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from email import message_from_string
from importlib.metadata import PackageNotFoundError
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from come.bench import models
from come.bench.cli import app, doctor
from come.errors import pip_install


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setattr(doctor, "no_answer", lambda url, patience: "no network here")


def call():
    done = CliRunner().invoke(app, ["doctor"], env={"COLUMNS": "80"})
    return done.exit_code, done.stdout, done.stderr


def found(part):
    return {check.part: check for check in part()}


def test_one_screen():
    code, out, err = call()
    assert (code, err) == (0, ""), out
    assert out.rstrip().endswith("nothing is broken")
    assert max(len(line.rstrip()) for line in out.splitlines() if "pip install" not in line) <= 80
    notes = out.count("\nnote ")  # an extra that is missing is one, of up to two lines
    assert len(out.splitlines()) <= 30 + 2 * torch.cuda.device_count() + 2 * notes
    for part in ("versions", "torchvision", "timm", "serve-ray", "cpu step", *models.EMBEDDED, "hugging face"):
        assert part in out
    assert "offline" in out


def test_a_broken_torchvision_is_named_with_the_repair(tmp_path):
    """And what needs it fails by itself: the rest is checked all the same."""
    (tmp_path / "torchvision").mkdir()
    broken = 'raise RuntimeError("operator torchvision::nms does not exist")'
    (tmp_path / "torchvision" / "__init__.py").write_text(broken)
    path = os.pathsep.join([str(tmp_path), *sys.path])
    env = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "HF_HOME": os.devnull + "/none"}
    done = subprocess.run(
        [sys.executable, "-m", "come", "doctor", "--json"], env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 1, done.stderr
    said = json.loads(done.stdout)
    checks = {check["part"]: check for check in said["checks"]}
    assert not said["ok"]
    assert {part for part, check in checks.items() if check["status"] == "failed"} == {
        *("torchvision", "timm"), *models.EMBEDDED
    }  # fmt: skip
    assert "torchvision::nms does not exist" in checks["torchvision"]["says"]
    assert checks["torchvision"]["repair"].startswith('pip install --force-reinstall "torch==')
    assert checks["timm"]["says"] == "needs torchvision"
    assert (checks["hugging face"]["status"], checks["hugging face"]["facts"]["writable"]) == ("note", False)
    assert "HF_HUB_OFFLINE is set" in checks["network"]["says"]
    assert checks["cpu step"]["status"] == "ok"


@pytest.mark.parametrize("part", doctor.PARTS)
def test_a_part_that_fails_is_shown_as_failed(part, monkeypatch):
    def fails():
        yield doctor.Check("first", "ok", "as it should be")
        raise OSError("the disk\nis gone")

    monkeypatch.setattr(doctor, "PARTS", {part: fails, "next": lambda: iter([doctor.Check("next", "ok", "")])})
    code, out, _ = call()
    assert code == 1
    assert [line.split()[:2] for line in out.splitlines()] == [
        *(["ok", "first"], ["failed", part], ["ok", "next"], ["broken:", part])
    ]
    assert "OSError: the disk" in out


def test_a_missing_extra_is_named_with_what_it_enables(monkeypatch):
    lines = ["Metadata-Version: 2.1", *(f"Provides-Extra: {extra}" for extra in ("bench", "serve", "serve-ray", "ray"))]
    needs = {
        "come-tta": [
            *('torch; python_version >= "3"', 'timm>=1.0.20; extra == "bench"', 'uvicorn>=0.30; extra == "serve"'),
            *('ray; extra == "ray"', 'come-tta[serve]; extra == "serve-ray"', 'ray[serve]; extra == "serve-ray"'),
            'starlette; extra == "serve" and python_version < "3"',
        ],
    }

    class Installed:
        def __init__(self, name):
            self.requires, self.metadata = needs[name], message_from_string("\n".join(lines))

    def version(name):
        if name in ("ray", "uvicorn"):
            raise PackageNotFoundError(name)
        return "0.1"

    monkeypatch.setattr(doctor, "distribution", Installed)
    monkeypatch.setattr(doctor, "version", version)
    checks = found(doctor._extras)
    assert checks["extra ray"].says == "needs ray for come bench --engine ray: cells on a cluster"
    assert checks["extra ray"].repair == pip_install("ray")
    assert checks["extra serve-ray"].facts == {"missing": ["uvicorn", "ray"]}
    assert "timm>=1.0.20 (not 0.1)" in checks["extra bench"].says
    assert {check.status for check in checks.values()} == {"note"}
    lines[1:] = []
    assert "unknown" in found(doctor._extras)["extra bench"].says
    monkeypatch.setattr(doctor, "version", lambda name: "9.0")
    assert doctor._missing("come-tta", "serve") == []
    assert doctor._missing("come-tta", "") == []


def test_a_gpu_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda i: (30 * 2**30, 40 * 2**30))
    about = SimpleNamespace(name="NVIDIA A100", major=8, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: about)
    check = found(doctor._devices)["cuda:0"]
    assert (check.status, check.says) == ("ok", "NVIDIA A100, 40.0 GB (30.0 GB free), capability 8.0")


def test_a_driver_that_is_too_old_is_said(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: warnings.warn("driver too old", stacklevel=1))
    check = found(doctor._devices)["cuda"]
    assert check.status == "note"
    assert check.says.startswith("no GPU: driver too old; torch is built")


def test_a_step_that_goes_wrong(monkeypatch):
    right = doctor._loss

    def loss(device, precision):
        if precision == "bf16":
            raise RuntimeError("no bf16 here")
        return right(device, precision)

    monkeypatch.setattr(doctor, "_loss", loss)
    check = found(doctor._steps)["cpu step"]
    assert (check.status, "bf16 fails: no bf16 here" in check.says) == ("note", True)
    losses = iter([1.0, 1.1, float("nan")])
    monkeypatch.setattr(doctor, "_loss", lambda *_: next(losses))
    check = found(doctor._steps)["cpu step"]
    assert (check.status, "float32 fails: loss 1.1000, on a CPU in float32 1.0000" in check.says) == ("failed", True)
    assert "bf16 fails" in check.says


def test_an_embedded_model_that_gives_other_numbers(monkeypatch):
    load = models.load

    def wrong(name):
        model = load(name)
        for p in model.module.parameters():
            p.data.zero_()
        return model

    monkeypatch.setattr(doctor.models, "load", wrong)
    checks = found(doctor._models)
    assert {check.status for check in checks.values()} == {"failed"}
    assert "git checkout src" in checks["fashion-vit"].repair
