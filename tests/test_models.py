"""Models by name: the embedded ones are what they claim, and files are read safely."""

from __future__ import annotations

import http.server
import json
import os
import pickle
import socket
import subprocess
import sys
import threading
import time
from importlib.resources import files

import pytest
import torch
from safetensors.torch import save_file

import come
from come.bench import models
from come.bench.data import GlyphSource
from come.bench.downloads import no_answer


@pytest.mark.parametrize("name", models.GLYPHS)
def test_the_embedded_models_reach_what_they_claim(name):
    about = json.loads((files("come.bench") / "weights" / f"{name.replace('-', '_')}.json").read_text())
    assert about["clean_test_accuracy"] >= 0.80  # the criterion of docs/glyphs.md
    assert 0.35 <= about["severity_5_accuracy"] <= 0.45
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
        ".": "cannot read the checkpoint .*: it is not a regular file",
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


@pytest.fixture
def no_proxy(monkeypatch):
    for name in list(os.environ):
        if name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)


@pytest.fixture
def caches(tmp_path, monkeypatch, no_proxy):
    """Empty caches of the two zoos, and no network."""
    from huggingface_hub import constants

    def no_network(*_, **__):
        raise AssertionError("the network was asked")

    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(socket, "getaddrinfo", no_network)
    monkeypatch.setattr(socket.socket, "connect", no_network)
    return tmp_path


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize(
    "name", ["test_resnet.r160_in1k", "test_vit.r160_in1k", "vit_tiny_patch16_224.augreg_in21k_ft_in1k"]
)
def test_weights_of_timm_that_are_in_the_cache_are_used_without_the_network(caches, name, file):
    import timm

    place = caches / "hub" / f"models--timm--{name}"
    (place / "refs").mkdir(parents=True)
    (place / "refs" / "main").write_text("0123")
    (place / "snapshots" / "0123").mkdir(parents=True)
    source = timm.create_model(name)
    if file.endswith(".bin"):
        torch.save(source.state_dict(), place / "snapshots" / "0123" / file)
    else:
        save_file(source.state_dict(), place / "snapshots" / "0123" / file)
    found = models.load(f"timm:{name}").module.state_dict()
    assert all(torch.equal(v, found[key]) for key, v in source.state_dict().items())


def test_a_pickle_in_the_cache_is_not_executed(caches, capsys):
    place = caches / "hub" / "models--timm--test_resnet.r160_in1k" / "snapshots" / "main"
    place.mkdir(parents=True)
    (place / "pytorch_model.bin").write_bytes(pickle.dumps({"w": Evil()}))
    with pytest.raises(come.ModelError, match=r"pytorch_model\.bin"):
        models.load("timm:test_resnet.r160_in1k")
    assert "executed" not in capsys.readouterr().out


def test_weights_of_torchvision_that_are_in_the_cache_are_used_without_the_network(caches):
    import torchvision

    (caches / "torch" / "hub" / "checkpoints").mkdir(parents=True)
    source = torchvision.models.squeezenet1_1(weights=None)
    file = torchvision.models.SqueezeNet1_1_Weights.DEFAULT.url.rpartition("/")[2]
    torch.save(source.state_dict(), caches / "torch" / "hub" / "checkpoints" / file)
    found = models.load("torchvision:squeezenet1_1").module.state_dict()
    assert all(torch.equal(v, found[key]) for key, v in source.state_dict().items())


@pytest.mark.parametrize(
    ("name", "host", "cache"),
    [
        ("timm:test_resnet", "huggingface.co", "hub"),
        ("timm:vit_huge_patch16_gap_448.in1k_ijepa", "dl.fbaipublicfiles.com", "checkpoints"),
        ("torchvision:resnet18", "download.pytorch.org", "checkpoints"),
    ],
)
def test_without_weights_and_network_the_repair_is_named(caches, name, host, cache):
    message = (
        rf"cannot reach {host} to download the weights of {name} \(.*; give --checkpoint FILE, or .* to \S+{cache}$"
    )
    with pytest.raises(come.ModelError, match=message):
        models.load(name)


def test_a_hub_that_is_switched_off_is_not_asked(caches, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(come.ModelError, match=r"weights of timm:test_resnet \(HF_HUB_OFFLINE is set\); give"):
        models.load("timm:test_resnet")


def test_a_closed_port_is_noticed_at_once(tmp_path, no_proxy):
    """As a user meets it: the whole environment, and nothing printed but the error."""
    code = """
import sys, time, timm
from come.bench import models
since = time.perf_counter()
try:
    models.load("timm:test_resnet")
except models.ModelError as error:
    print(error)
print(time.perf_counter() - since, file=sys.stderr)
"""
    environment = {**os.environ, "HF_ENDPOINT": "http://127.0.0.1:1", "HF_HOME": str(tmp_path)}
    found = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert found.stdout.startswith("cannot reach 127.0.0.1:1 to download the weights of timm:test_resnet (Connection")
    assert len(found.stdout.splitlines()) == 1
    assert float(found.stderr) < 3, found.stderr


class Answer(http.server.BaseHTTPRequestHandler):
    def do_HEAD(self):
        self.send_error(503)

    def log_message(self, *_):
        pass


def test_any_answer_is_one_and_silence_is_not_waited_for(monkeypatch, no_proxy):
    with http.server.HTTPServer(("127.0.0.1", 0), Answer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        here = f"http://127.0.0.1:{server.server_port}"
        assert no_answer(f"{here}/weights") == ""
        monkeypatch.setenv("HTTP_PROXY", here)
        assert no_answer("http://nowhere.invalid/weights") == ""
        monkeypatch.delenv("HTTP_PROXY")
        server.shutdown()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        since = time.perf_counter()
        assert no_answer(f"http://127.0.0.1:{silent.getsockname()[1]}", patience=0.2) in (
            "timed out",
            "no answer within 0.2 seconds",
        )
        assert time.perf_counter() - since < 2
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: time.sleep(5))
    since = time.perf_counter()
    assert no_answer("http://slow.invalid", patience=0.1) == "no answer within 0.1 seconds"
    assert time.perf_counter() - since < 2


def test_a_download_that_fails_after_all_names_the_repair(monkeypatch):
    import timm

    def fails(*_, **__):
        raise OSError("the hub has gone\nand more")

    monkeypatch.setattr("come.bench.downloads.no_answer", lambda url: "")
    monkeypatch.setattr(timm, "create_model", fails)
    with pytest.raises(come.ModelError, match="the hub has gone; with no network, give --checkpoint"):
        models.load("timm:resnet10t")
