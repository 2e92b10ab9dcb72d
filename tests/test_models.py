"""Models by name: the embedded ones are what they claim, and files are read safely."""

from __future__ import annotations

import http.server
import json
import os
import pickle
import re
import shlex
import socket
import subprocess
import sys
import threading
import time
from importlib.resources import files
from pathlib import Path

import pytest
import torch
from calling import call
from safetensors.torch import save_file

import come
from come.bench import Bench, Plan, models
from come.bench.data import FashionSource
from come.bench.downloads import no_answer
from come.bench.hub import read_processor

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("images", [1000, pytest.param(None, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", models.EMBEDDED)
def test_the_embedded_models_reach_what_they_claim(name, images):
    about = json.loads((files("come.bench") / "embedded" / f"{name.replace('-', '_')}.json").read_text())
    assert about["clean"] >= 0.88  # the criterion in training/fashion.py
    if about["norm"] != "group":  # training/fashion.py says why
        assert 0.35 <= about["severity_5"] <= 0.65
    model, source = models.load(name), FashionSource()
    loaded = source.load(range(images or len(source)))
    with torch.no_grad():
        right = (model.module(model.preprocess(loaded.images)).argmax(1) == loaded.labels).double().mean().item()
    assert right == pytest.approx(about["clean"], abs=0.02 if images else 0.001)
    assert not model.module.training


def test_the_embedded_models_differ_in_norm_layer_and_optimizer():
    batch, group, vit = (models.load(name).module for name in models.EMBEDDED)
    assert "without BatchNorm" in repr(come.adapt(vit, "tent"))
    assert "without BatchNorm" in repr(come.adapt(group, "tent"))
    assert "for BatchNorm models" in repr(come.adapt(batch, "tent"))
    folder = files("come.bench") / "embedded"
    abouts = [json.loads((folder / f"{name.replace('-', '_')}.json").read_text()) for name in models.EMBEDDED]
    assert {about["optimizer"] for about in abouts} == {"adamw", "sgd"}


def test_normalizations():
    images = torch.full((1, 3, 32, 32), 128, dtype=torch.uint8)
    half = models.load("fashion-vit", normalization="half").preprocess
    assert half.mean == (0.5, 0.5, 0.5)
    assert half(images).abs().max() < 0.01
    with pytest.raises(come.ConfigError, match="did you mean 'imagenet'"):
        models.load("fashion-vit", normalization="imagnet")


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


@pytest.mark.parametrize("name", ["squeezenet1_1", "resnet18"])
def test_a_head_of_another_size_in_a_checkpoint_of_torchvision(tmp_path, name):
    import torchvision

    source = torchvision.models.get_model(name, weights=None, num_classes=7)
    torch.save(source.state_dict(), tmp_path / "w.pth")
    model = models.load(f"torchvision:{name}", checkpoint=tmp_path / "w.pth", image_size=64)
    x = torch.randn(1, 3, 64, 64)
    assert model.num_classes == 7
    assert torch.equal(model.module(x), source.eval()(x))
    with pytest.raises(come.ModelError, match="does not fit"):
        models.load(f"torchvision:{name}:num_classes=9", checkpoint=tmp_path / "w.pth")
    with pytest.raises(come.ModelError, match=r"torchvision cannot make .*unexpected keyword.*; change its arguments"):
        models.load(f"torchvision:{name}:clases=9", checkpoint=tmp_path / "w.pth")


def test_preprocessing_by_options():
    found = models.load(
        "fashion-resnet-bn",
        image_size=48,
        interpolation="bicubic",
        mean=(0.1, 0.2, 0.3),
        std=(0.4, 0.5, 0.6),
    )
    assert found.preprocess == models.Preprocess(48, 48, "bicubic", (0.1, 0.2, 0.3), (0.4, 0.5, 0.6))
    assert models.load("fashion-resnet-bn", resize=40).preprocess.resize == 40


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mean": (0.5, 0.5, 0.5)}, "mean and std must be given together"),
        (
            {"mean": (0.5,) * 3, "std": (0.5,) * 3, "normalization": "half"},
            "normalization half has a mean and a std; leave",
        ),
        ({"resize": 16}, "resize must be at least the image size, 32, got 16"),
        (
            {"image_size": 40},
            r"fashion-vit cannot be called with images of shape \(2, 3, 40, 40\): .*; give --image-size N",
        ),
        ({"mean": (0.5,) * 3, "std": (0.0,) * 3}, "std"),
    ],
)
def test_preprocessing_that_is_refused(options, message):
    with pytest.raises(come.ComeError, match=message):
        models.load("fashion-vit", **options)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("mean", [0.5, 0.5], r"mean must be three numbers, of red, green and blue, got \[0.5, 0.5\]"),
        ("mean", "half", "mean must be a list, got 'half'"),
        ("image_size", 0, "image-size must be greater than or equal to 1, got 0"),
        ("interpolation", "cubic", "interpolation must be .*, got 'cubic'"),
    ],
)
def test_a_plan_refuses_such_preprocessing(field, value, message):
    with pytest.raises(come.ConfigError, match=message):
        Plan(**{field: value})


# ---- functions of the user ----

NETS = """
from torch import nn

def small(classes=5, width=4, img_size=32):
    return nn.Sequential(nn.Conv2d(3, width, img_size), nn.Flatten(), nn.Linear(width, classes))

def number():
    return 3

def fails():
    raise RuntimeError("no weights here\\nand more")

def leaves():
    raise SystemExit

def features():
    return nn.Sequential(nn.Conv2d(3, 4, 1), nn.Flatten(0))

ready = nn.Linear(3, 2)
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A current folder with modules of the user, as the installed command finds it: it is not where Python looks."""
    (tmp_path / "own_nets.py").write_text(NETS)
    (tmp_path / "own_broken.py").write_text("import surely_not_installed")
    (tmp_path / "own_syntax.py").write_text("def (")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [part for part in sys.path if part])
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("own_")]:
        del sys.modules[name]


def test_a_function_of_the_user(own):
    model = models.load("own_nets:small:classes=7:img_size=16")
    assert (model.num_classes, model.preprocess.size, model.preprocess.resize) == (7, 16, 18)
    assert not model.module.training
    again = models.load("own_nets:small:classes=7:img_size=16")
    assert models.fingerprint(model.module) == models.fingerprint(again.module)  # as another process must find it
    state = {key: torch.ones_like(v) for key, v in model.module.state_dict().items()}
    save_file(state, own / "w.safetensors")
    filled = models.load("own_nets:small:classes=7:img_size=16", checkpoint=own / "w.safetensors")
    assert all(torch.equal(v, state[key]) for key, v in filled.module.state_dict().items())
    assert models.load("own_nets:small", image_size=32).preprocess.size == 32


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("own_net:small", "no module 'own_net' for the model own_net:small; run come where it is, or install it"),
        ("own_nets.more:small", "no module 'own_nets.more'|importing own_nets.more"),
        (
            "own_broken:small",
            "importing own_broken .* raised ModuleNotFoundError: No module named 'surely_not_installed'; ins",
        ),
        ("own_syntax:small", "importing own_syntax for own_syntax:small raised SyntaxError: .*; fix the module"),
        ("own_nets:smal", "no function in own_nets 'smal'; did you mean 'small'"),
        (
            "own_nets:small:widht=3",
            "raised TypeError: .*unexpected keyword argument 'widht'; change its arguments, or the func",
        ),
        ("own_nets:small:width", "'width' in 'small:width' is not KEY=VALUE"),
        ("own_nets:fails", "own_nets:fails raised RuntimeError: no weights here; change"),
        ("own_nets:leaves", "own_nets:leaves raised SystemExit; change"),
        ("own_nets:number", "own_nets:number must return a torch.nn.Module, got 3"),
        ("own_nets:ready", "own_nets:ready must be a function that returns a torch.nn.Module, got a model"),
        ("own_nets:features", r"the model must return floating-point logits of shape \(2, K\)"),
        ("own_nets:small:img_size=300", "size|cannot be called"),
        ("own_nets:small:img_size=big", "raised TypeError|size must be an integer"),
        ("own-nets:small", "no model 'own-nets:small'"),
    ],
)
def test_functions_that_are_refused(own, name, message):
    with pytest.raises(come.ComeError, match=message) as refused:
        models.load(name, image_size=32)
    assert "\n" not in str(refused.value)


# ---- transformers ----


def tiny_vit(**more):
    transformers = pytest.importorskip("transformers")

    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    config = transformers.ViTConfig(**(sizes | {"image_size": 32, "patch_size": 8, "num_labels": 5} | more))
    return transformers.ViTForImageClassification(config)


@pytest.fixture
def saved(tmp_path):
    """A folder with a tiny ViT of transformers and its image processor."""
    tiny_vit().save_pretrained(tmp_path / "vit")
    from transformers import ViTImageProcessor

    ViTImageProcessor(size={"height": 32, "width": 32}, resample=3).save_pretrained(tmp_path / "vit")
    return tmp_path / "vit"


def test_a_classifier_of_transformers_in_a_folder(saved, capfd):
    from transformers import AutoModelForImageClassification

    source = AutoModelForImageClassification.from_pretrained(saved).eval()
    capfd.readouterr()
    model = models.load(f"hf:{saved}")
    assert capfd.readouterr() == ("", "")
    x = torch.randn(2, 3, 32, 32)
    assert torch.equal(model.module(x).logits, source(x).logits)
    assert (model.num_classes, model.module.dtype) == (5, torch.float32)
    assert model.preprocess == models.Preprocess(32, 32, "bicubic", (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
    assert come.adapt(model.module, "tent")(x).shape == (2, 5)


def test_a_checkpoint_for_a_classifier_of_transformers(saved, tmp_path):
    source = tiny_vit(num_labels=7).eval()
    save_file(source.state_dict(), tmp_path / "w.safetensors")
    model = models.load(f"hf:{saved}", checkpoint=tmp_path / "w.safetensors")
    x = torch.randn(2, 3, 32, 32)
    assert model.num_classes == 7
    assert torch.equal(model.module(x).logits, source(x).logits)


@pytest.mark.parametrize(
    ("about", "expected"),
    [
        (
            {"size": {"shortest_edge": 256}, "crop_size": {"height": 224, "width": 224}, "do_center_crop": True},
            (224, 256),
        ),
        (
            {"size": {"height": 224, "width": 224}, "crop_size": {"height": 1, "width": 1}, "do_center_crop": False},
            (224, 224),
        ),
        ({"size": {"shortest_edge": 224}, "crop_pct": 0.875}, (224, 256)),
        ({"size": {"shortest_edge": 384}, "crop_pct": 0.875}, (384, 384)),
        ({"size": 30}, (30, 30)),
    ],
)
def test_image_processors(about, expected):
    found = read_processor("hf:x", about)
    assert (found.size, found.resize) == expected
    pixels = {"do_rescale": False, "do_normalize": True, "image_mean": [51.0] * 3, "image_std": [255.0] * 3}
    found = read_processor("hf:x", about | pixels)
    assert (found.mean, found.std) == ((0.2,) * 3, (1.0,) * 3)


@pytest.mark.parametrize("size", [None, {"height": 2, "width": 3}, "large"])
def test_image_processors_without_a_square(size):
    with pytest.raises(come.ModelError, match="size of the image processor of hf:x must be one side of a square, got"):
        read_processor("hf:x", {"size": size})


def test_folders_of_transformers_that_are_refused(saved, tmp_path, caches):
    from transformers import BertConfig, ViTModel

    (tmp_path / "empty").mkdir()
    BertConfig().save_pretrained(tmp_path / "bert")
    ViTModel(tiny_vit().config, add_pooling_layer=False).save_pretrained(tmp_path / "headless")
    tiny_vit().save_pretrained(tmp_path / "bare")
    for name, message in {
        "empty": "transformers cannot make .*empty",
        "bert": "transformers cannot make .*; name an image classifier",
        "headless": "has no weights for classifier.bias, classifier.weight; choose a model that is trained",
        "bare": r"has no image processor that transformers can read; save one .*processor.save_pretrained\(FOLDER\)",
        "vit:num_labels=9": "transformers cannot make",
        "vit:wings=2": "transformers cannot make .*unexpected keyword argument 'wings'",
        "nowhere": "must be hf:NAME with a model of the Hub, such as .*, or a folder; there is no folder",
    }.items():
        with pytest.raises(come.ModelError, match=message) as refused:
            models.load(f"hf:{tmp_path}/{name}")
        assert "\n" not in str(refused.value)


def test_without_transformers_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(come.MissingError, match=r'hf:a/b needs transformers, .*: pip install -e "\.\[hf\]"'):
        models.load("hf:a/b")


def test_a_model_of_the_hub_that_is_in_the_cache_is_used_without_the_network(saved, caches):
    place = caches / "hub" / "models--acme--vit"
    (place / "refs").mkdir(parents=True)
    (place / "refs" / "main").write_text("0123")
    (place / "snapshots").mkdir()
    saved.rename(place / "snapshots" / "0123")
    assert models.load("hf:acme/vit").num_classes == 5


def test_the_hub_says_no(caches, monkeypatch):
    pytest.importorskip("transformers")
    import huggingface_hub
    from huggingface_hub import errors

    monkeypatch.setattr("come.bench.downloads.no_answer", lambda url: "")
    for kind, message in {
        errors.GatedRepoError: "hf:acme/vit is gated; accept its terms at https://huggingface.co/acme/vit, and log in: hf auth",
        errors.RepositoryNotFoundError: "the Hub has no model 'acme/vit' that you can read; check the name",
        errors.RevisionNotFoundError: "acme/vit has no revision 'old'; leave it out",
        errors.EntryNotFoundError: "acme/vit has no config.json, so transformers cannot make it",
        OSError: "cannot download hf:acme/vit.*: .*; try again, or give hf:FOLDER",
    }.items():

        def refuse(*_, kind=kind, **__):
            raise kind.__new__(kind)  # their constructors take an answer of the server

        monkeypatch.setattr(huggingface_hub, "hf_hub_download", refuse)
        with pytest.raises(come.ModelError, match=message):
            models.load(f"hf:acme/vit{':revision=old' if 'Revision' in kind.__name__ else ''}")


def test_the_commands_of_the_page(tmp_path, saved, monkeypatch, capsys):
    import torchvision

    page = (ROOT / "docs" / "models.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    (tmp_path / "nets.py").write_text(code)
    tiny_vit(num_labels=8).save_pretrained(saved)
    torch.save(torchvision.models.squeezenet1_1(num_classes=8).state_dict(), tmp_path / "weights.pth")
    commands = re.findall(r"```sh\n(come .*?)\n```", page, flags=re.DOTALL)
    assert len(commands) == 3
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [part for part in sys.path if part])  # as in the installed command
    for command in commands:
        code, out, err = call(monkeypatch, capsys, *shlex.split(command)[1:])
        assert code == 0, err
        assert "report runs/" in out


def test_cells_of_other_weights_are_other_cells(own):
    plan = Plan(model="own_nets:small:classes=8", image_size=32, methods=("source",), corruptions=("fog",), limit=8)
    first = Bench(plan).cells[0]
    assert first.key == Bench(plan).cells[0].key
    (own / "own_nets.py").write_text(NETS.replace("nn.Flatten()", "nn.ReLU(), nn.Flatten()"))
    del sys.modules["own_nets"]
    assert Bench(plan).cells[0].key != first.key


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
        ("fashion-vti", "no model 'fashion-vti'; did you mean 'fashion-vit'"),
        ("timm:resnet5O", "no model of timm 'resnet5O'; did you mean 'resnet5"),
        ("torchvision:resnet51", "no model of torchvision 'resnet51'; did you mean 'resnet5"),
        ("resnet50", "no model 'resnet50'"),
    ],
)
def test_unknown_models(name, message):
    with pytest.raises(come.ConfigError, match=message):
        models.load(name)
    with pytest.raises(come.ConfigError, match="comes with its weights"):
        models.load("fashion-vit", checkpoint="x")


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
        ("hf:acme/vit", "huggingface.co", "hub"),
    ],
)
def test_without_weights_and_network_the_repair_is_named(caches, name, host, cache):
    if name.startswith("hf:"):
        pytest.importorskip("transformers", reason="the extra hf is not installed")
    instead = (
        "give hf:FOLDER, a folder that save_pretrained wrote" if name.startswith("hf:") else "give --checkpoint FILE"
    )
    message = rf"cannot reach {host} to download the weights of {name} \(.*; {instead}, or .* to \S+{cache}$"
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
from come.bench import Bench, Plan, models
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
