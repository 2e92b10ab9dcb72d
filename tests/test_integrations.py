"""Other packages around an adapter: each with the real one, imported in the process that runs these tests only."""

from __future__ import annotations

import doctest
import json
import re
import shlex
import sys
from importlib import import_module
from pathlib import Path

import huggingface_hub
import pytest
import torch
from calling import call
from huggingface_hub import errors as hub
from safetensors.torch import load as load_safetensors
from safetensors.torch import save_file
from torch import nn

import come
from come import metrics
from come.integrations import log
from come.integrations.open_clip import zero_shot

ROOT = Path(__file__).parents[1]
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers:UserWarning"),  # advice of Lightning
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning"),  # and torch 2.15
]


def tiny():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.LayerNorm(8), nn.Linear(8, 3))


def stream(count=4, size=16):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(size, 4, generator=generator) + 1 for _ in range(count)]


# ---- Hugging Face Hub ----


class Server:
    """The two calls of huggingface_hub that are used, on a dictionary."""

    def __init__(self, monkeypatch):
        self.files = {}
        monkeypatch.setattr(huggingface_hub, "upload_file", self.upload)
        monkeypatch.setattr(huggingface_hub, "hf_hub_download", self.download)

    def upload(self, *, path_or_fileobj, path_in_repo, repo_id, revision, commit_message):
        assert commit_message == "State of tent after 4 batches"
        self.files[repo_id, path_in_repo, revision] = path_or_fileobj

    def download(self, repo_id, filename, *, revision):
        if (repo_id, filename, revision) not in self.files:
            raise hub.EntryNotFoundError.__new__(hub.EntryNotFoundError)
        path = Path.cwd() / "downloaded"
        path.write_bytes(self.files[repo_id, filename, revision])
        return str(path)


@pytest.mark.parametrize("at", ["", "@v2"])
def test_a_state_on_the_hub(monkeypatch, tmp_path, at):
    monkeypatch.chdir(tmp_path)
    server, place = Server(monkeypatch), f"hf://acme/states{at}/door/tent.safetensors"
    classifier, other = come.adapt(tiny(), "tent"), come.adapt(tiny(), "tent")
    for x in stream():
        classifier(x)
    classifier.save(place)
    assert list(server.files) == [("acme/states", "door/tent.safetensors", at[1:] or None)]
    assert "weights" in load_safetensors(next(iter(server.files.values())))  # a plain file
    other.load(place)
    assert other.count == 4
    assert torch.equal(other(stream(1)[0]), classifier(stream(1)[0]))
    with pytest.raises(come.StateError, match=r"acme/states has no file 'x.safetensors'; check the name"):
        other.load("hf://acme/states/x.safetensors")


SAVING = {
    hub.GatedRepoError: "is gated; accept its terms at https://huggingface.co/acme/states, and log in: hf auth login",
    hub.RepositoryNotFoundError: r"has no model 'acme/states' that you can write; make it \(hf repos create acme/states\), and",
    hub.LocalTokenNotFoundError: "hf://acme/states@v2/a.safetensors needs a login; log in: hf auth login",
    hub.RevisionNotFoundError: "acme/states has no revision 'v2'; leave it out",
    ConnectionError: "cannot upload hf://acme/states@v2/a.safetensors: ConnectionError; try again, or save to a file",
    PermissionError: "you may not write hf://acme/states@v2/a.safetensors; log in with a token that may: hf auth login",
}
LOADING = {
    hub.RepositoryNotFoundError: "has no model 'acme/states' that you can read; check the name, and if it is private log in",
    hub.LocalEntryNotFoundError: "cannot download hf://acme/states@v2/a.safetensors: .*; try again, or load a file",
}


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [("save", *case) for case in SAVING.items()] + [("load", *case) for case in LOADING.items()],
)
def test_what_the_hub_refuses(monkeypatch, call, kind, message):
    def refuse(*_, **__):
        error = kind.__new__(kind)  # their constructors take an answer of the server
        if kind is PermissionError:
            error.response = type("Response", (), {"status_code": 403})
        raise error

    monkeypatch.setattr(huggingface_hub, "upload_file", refuse)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", refuse)
    with pytest.raises(come.StateError, match=message):
        getattr(come.adapt(tiny(), "tent"), call)("hf://acme/states@v2/a.safetensors")


@pytest.mark.parametrize("path", ["hf://acme/a.safetensors", "hf://", "hf://acme/states@/a.safetensors"])
def test_a_place_that_is_none(path):
    with pytest.raises(come.ConfigError, match=r"path must be hf://OWNER/REPOSITORY\[@REVISION\]/FILE, got 'hf:"):
        come.adapt(tiny(), "tent").save(path)


def test_the_hub_without_its_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(come.MissingError, match=r"hf:// needs huggingface_hub, .*: pip install huggingface_hub$"):
        come.adapt(tiny(), "tent").load("hf://acme/states/a.safetensors")


# ---- Lightning ----


@pytest.fixture(scope="module")
def make():
    pl = pytest.importorskip("lightning.pytorch")

    from come.integrations.torchmetrics import AURC

    class Net(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = tiny()
            self.metric = AURC()

        def forward(self, x):
            return self.net(x)

        def predict_step(self, batch):
            return self(batch)

        def test_step(self, batch):
            logits = self.net(batch)
            if logits.isnan().any():
                raise ValueError("no logits")
            self.metric(logits, torch.zeros(len(logits), dtype=torch.int64))
            self.log("aurc", self.metric)

    return Net


def trainer(*callbacks, **options):
    from lightning.pytorch import Trainer

    quiet = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
    }
    return Trainer(accelerator="cpu", devices=1, callbacks=list(callbacks), **(quiet | options))


def loader(data):
    return torch.utils.data.DataLoader(torch.cat(data), batch_size=len(data[0]))


@pytest.mark.parametrize("inference_mode", [True, False])
@pytest.mark.parametrize("name", ["", "net"])
def test_predictions_of_lightning_are_those_of_the_adapter(make, name, inference_mode):
    from come.integrations.lightning import Adapt

    net, data, callback = make(), stream(), Adapt("tent", model=name, lr=0.1)
    before = {key: value.clone() for key, value in net.state_dict().items()}
    classifier = come.adapt(tiny(), "tent", lr=0.1)
    answers = [classifier(x) for x in data]
    for _ in range(2):  # each run begins with the source model
        found = trainer(callback, inference_mode=inference_mode).predict(net, loader(data))
        assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(found, answers, strict=True))
        assert callback.classifier.count == len(data)
    assert "forward" not in vars(net)
    assert "forward" not in vars(net.net)
    assert all(torch.equal(value, before[key]) for key, value in net.state_dict().items())
    assert torch.equal(net.eval()(data[0]), tiny().eval()(data[0]))


def test_lightning_tests_and_errors(make):
    from come.integrations.lightning import Adapt
    from come.integrations.torchmetrics import AURC

    net, data, callback = make(), stream(), Adapt("tent", model="net", lr=0.1)
    (found,) = trainer(callback).test(net, loader(data), verbose=False)
    classifier, metric = come.adapt(tiny(), "tent", lr=0.1), AURC()
    for x in data:
        metric.update(classifier(x), torch.zeros(len(x), dtype=torch.int64))
    assert found["aurc"] == pytest.approx(metric.compute().item(), abs=1e-5)
    callback.options["guard"] = False
    with pytest.raises(ValueError, match="no logits"):
        trainer(callback).test(net, loader([x * torch.nan for x in data]), verbose=False)
    assert "forward" not in vars(net.net)
    with pytest.raises(come.ConfigError, match=r"model must name a module of Net \(net, metric\), got 'head'"):
        trainer(Adapt(model="head")).predict(net, loader(data))


# ---- torchmetrics ----


@pytest.mark.parametrize("objective", ["come", "em"])
def test_metrics_are_those_of_come(objective):
    torchmetrics = pytest.importorskip("torchmetrics")

    from come.integrations import torchmetrics as ours

    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(50, 4, generator=generator) * 3
    target = torch.randint(-1, 4, (50,), generator=generator)
    made = {
        "fpr": ours.FPR(objective), "fpr95": ours.FPR95(objective), "aurc": ours.AURC(objective),
        "at": ours.AbstentionAccuracy(0.8, objective),
    }  # fmt: skip
    together = torchmetrics.MetricCollection(
        {**made, "accuracy": torchmetrics.classification.MulticlassAccuracy(4, ignore_index=-1, average="micro")}
    )
    for part in (slice(0, 7), slice(7, 50)):
        together.update(logits[part], target[part])
    confidence, correct = come.objectives.get(objective).confidence(logits), logits.argmax(dim=1) == target
    expected = {
        "fpr": metrics.fpr(confidence, correct),
        "fpr95": metrics.fpr95(confidence, target >= 0),
        "aurc": metrics.aurc(confidence, correct),
        "at": metrics.abstention_accuracy(confidence, correct, 0.8),
        "accuracy": metrics.accuracy(logits.argmax(dim=1), target),
    }
    assert {name: value.item() for name, value in together.compute().items()} == pytest.approx(expected)
    together.reset()
    together.update(logits[:5], target[:5])
    assert together["aurc"].compute().item() == pytest.approx(metrics.aurc(confidence[:5], correct[:5]))


@pytest.mark.filterwarnings("ignore:The ``compute`` method of metric:UserWarning")
def test_metrics_of_nothing_and_a_wrong_coverage():
    pytest.importorskip("torchmetrics")
    from come.integrations import torchmetrics as ours

    assert ours.FPR().compute() == 0
    with pytest.raises(come.ConfigError, match=r"coverage must be in \(0, 1\], got 2"):
        ours.AbstentionAccuracy(2)


# ---- logs ----


def test_tensorboard(tmp_path):
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")

    classifier = come.adapt(tiny(), "tent")
    with log.opened(f"tensorboard:{tmp_path}") as write:
        classifier.callbacks.append(come.callbacks.Scalars(write))
        for x in stream():
            classifier(x)
    events = events.EventAccumulator(str(tmp_path)).Reload()
    assert {"come/entropy", "come/lr_scale"} <= set(events.Tags()["scalars"])
    assert [event.step for event in events.Scalars("come/lr_scale")] == [1, 2, 3, 4]
    assert events.Scalars("come/entropy")[-1].value == pytest.approx(classifier.health()["entropy"])


def test_weights_and_biases(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    classifier = come.adapt(tiny(), "tent")
    with log.opened("wandb:doors") as write:
        classifier.callbacks.append(come.callbacks.Scalars(write))
        for x in stream():
            classifier(x)
        write("accuracy", 0.5, 1)  # a step back is fine
        summary = dict(wandb.run.summary)
    assert summary["come/entropy"] == pytest.approx(classifier.health()["entropy"])
    assert (summary["accuracy"], summary["step"]) == (0.5, 1)
    assert list(tmp_path.rglob("*.wandb"))


def test_logs_that_cannot_be_opened(monkeypatch):
    with (
        pytest.raises(come.ConfigError, match="log must be tensorboard:FOLDER or wandb:PROJECT, got 'mlflow:x'"),
        log.opened("mlflow:x"),
    ):
        pass
    monkeypatch.setitem(sys.modules, "wandb", None)
    with (
        pytest.raises(come.MissingError, match=r'wandb needs wandb, .*: pip install -e "\.\[log\]"'),
        log.opened("wandb:x"),
    ):
        pass
    with pytest.raises(come.ConfigError, match=r"log must be a function of \(name, value, step\), such as"):
        come.callbacks.Scalars("runs")


@pytest.mark.parametrize("package", ["lightning.pytorch", "torchmetrics"])
def test_a_missing_package_is_named(monkeypatch, package):
    name = package.partition(".")[0]
    monkeypatch.delitem(sys.modules, f"come.integrations.{name}", raising=False)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(
        come.MissingError, match=rf'^come.integrations.{name} needs .*: pip install -e "\.\[lightning\]"'
    ):
        import_module(f"come.integrations.{name}")


# ---- transformers and open_clip ----


def test_an_image_classifier_of_transformers():
    transformers = pytest.importorskip("transformers")
    small = {
        "hidden_size": 8,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 16,
        "patch_size": 4,
    }
    config = transformers.ViTConfig(**small, image_size=8, num_labels=3)
    model, images = transformers.ViTForImageClassification(config).eval(), torch.randn(6, 3, 8, 8)
    classifier = come.adapt(model, "tent", lr=0.1)
    before = classifier.predict(pixel_values=images)
    assert torch.allclose(before, model(images).logits, atol=1e-6)
    classifier({"pixel_values": images})
    assert not torch.equal(classifier.predict(images), before)
    assert torch.allclose(classifier.export()(pixel_values=images).logits, classifier.predict(images), atol=1e-6)


VISION = {"image_size": 8, "layers": 2, "width": 16, "head_width": 8, "patch_size": 4}
TEXT = {"context_length": 77, "vocab_size": 49408, "width": 8, "heads": 2, "layers": 1}


def clip():
    open_clip = pytest.importorskip("open_clip")

    torch.manual_seed(0)
    return open_clip.CLIP(
        embed_dim=8,
        vision_cfg=VISION,
        text_cfg=TEXT,
    ).eval()


def test_a_model_of_open_clip():
    open_clip = pytest.importorskip("open_clip")

    model, tokenizer, images = clip(), open_clip.SimpleTokenizer(), torch.randn(6, 3, 8, 8)
    classes = ["cat", "dog", "owl"]
    found = zero_shot(model, tokenizer, classes, ["a photo of a {}."])
    texts = model.encode_text(tokenizer([f"a photo of a {name}." for name in classes]), normalize=True)
    expected = model.logit_scale.exp() * model.encode_image(images, normalize=True) @ texts.T
    assert torch.allclose(found(images), expected, atol=1e-4)
    for method in ("tent", "t3a"):
        classifier = come.adapt(found, method)
        classifier(images)
        assert torch.allclose(classifier.export()(images), classifier.predict(images), atol=1e-5)
    assert not any("transformer.resblocks" in name and "visual" not in name for name in classifier.state_dict())
    with pytest.raises(come.ConfigError, match="classes must be 2 or more names, got 'cat'"):
        zero_shot(model, tokenizer, "cat")
    with pytest.raises(come.ConfigError, match=r"templates must be sentences with \{\} in place of the name, got \['a"):
        zero_shot(model, tokenizer, classes, ["a photo"])


def test_a_model_of_open_clip_for_the_benchmark(tmp_path, monkeypatch):
    open_clip = pytest.importorskip("open_clip")

    from come.bench import models

    about = {"embed_dim": 8, "vision_cfg": VISION, "text_cfg": TEXT}
    (tmp_path / "tiny-clip.json").write_text(json.dumps(about))
    open_clip.add_model_config(tmp_path / "tiny-clip.json")
    (tmp_path / "classes.txt").write_text("cat\ndog\nowl\n")
    weights, spec = tmp_path / "weights.safetensors", f"open_clip:tiny-clip:classes={tmp_path}/classes.txt"
    save_file({key: value.contiguous() for key, value in clip().state_dict().items()}, weights)
    model, images = models.load(spec, checkpoint=weights), torch.randn(2, 3, 8, 8)
    assert (model.num_classes, model.preprocess.size, model.preprocess.interpolation) == (3, 8, "bicubic")
    expected = zero_shot(clip(), open_clip.SimpleTokenizer(), ["cat", "dog", "owl"])
    assert torch.allclose(model.module(images), expected(images), atol=1e-4)
    for given, message in {
        "open_clip:tiny-clop": "no model of open_clip 'tiny-clop'; did you mean 'tiny-clip'",
        "open_clip:tiny-clip": "needs the names of the classes: open_clip:tiny-clip:classes=FILE, a text file with a name",
        f"{spec}x": "cannot read the classes of open_clip:.*: .*No such file",
    }.items():
        with pytest.raises(come.ConfigError, match=message):
            models.load(given, checkpoint=weights)
    with pytest.raises(
        come.ModelError, match=r"needs weights: add :pretrained=TAG, one of .*, or give --checkpoint FILE"
    ):
        models.load(spec)
    monkeypatch.setitem(sys.modules, "open_clip", None)
    with pytest.raises(come.MissingError, match=r'needs open_clip, .*: pip install -e "\.\[clip\]"'):
        models.load(spec)


# ---- the page, and the examples in the docstrings ----


@pytest.mark.parametrize("name", ["lightning", "log", "open_clip", "torchmetrics", "transformers"])
def test_the_examples_in_the_docstrings(name):
    pytest.importorskip({"lightning": "lightning.pytorch", "log": "tensorboard"}.get(name, name))
    failed, tried = doctest.testmod(import_module(f"come.integrations.{name}"))
    assert (failed, tried > 0) == (0, True)


@pytest.fixture(scope="module")
def page():
    return (ROOT / "docs" / "integrations.md").read_text()


def test_the_examples_of_the_page(page, monkeypatch, tmp_path):
    for package in ("lightning.pytorch", "torchmetrics", "tensorboard", "transformers", "open_clip", "onnxscript"):
        pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    Server(monkeypatch)
    names = {"__name__": "page"}
    for block in re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL):
        exec(block, names)
    expected = names["classifier"].predict(torch.ones(2, 3, 32, 32))
    assert expected.shape == (2, 3)
    assert {"model.pt2", "model.onnx", "state.safetensors", "runs"} <= {path.name for path in tmp_path.iterdir()}


def test_the_command_of_the_page(page, monkeypatch, capsys, tmp_path):
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")

    monkeypatch.chdir(tmp_path)
    (command,) = re.findall(r"```sh\ncome (.*?)\n```", page, flags=re.DOTALL)
    code, out, err = call(monkeypatch, capsys, *shlex.split(command), "--jobs", "1")
    assert code == 0, err
    events = events.EventAccumulator(str(tmp_path / "runs" / "tb")).Reload()
    (last,) = [event for event in events.Scalars("accuracy/tent-come-fog-seed-0") if event.step == 64]
    assert f"{100 * last.value:.1f}" in out
    code, _, err = call(monkeypatch, capsys, *shlex.split(command)[:-1], "mlflow")
    assert (code, err.strip()) == (2, "error: log must be tensorboard:FOLDER or wandb:PROJECT, got 'mlflow'")
