"""The adapted model by itself equals `predict`: as a module, as a torch.export program, in ONNX Runtime."""

from __future__ import annotations

import gc
import io
import pickle
import sys

import pytest
import torch
from torch import nn
from torch.torch_version import TorchVersion

import come
from come.export import OnBatch

WARNS = pytest.mark.filterwarnings("ignore:You are using `torch.load`:FutureWarning")  # torch.export.load of torch 2.4
SIZES = (1, 2, 7, 32)


def convolutional(norm, classes=4):
    """Norm layers on maps, on one value per channel, and on vectors."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), norm(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), norm(8), nn.Flatten(), nn.Linear(8, classes)
    )  # fmt: skip


MODELS = {
    "layer": lambda: nn.Sequential(nn.Flatten(), nn.Linear(108, 8), nn.LayerNorm(8), nn.Linear(8, 4)),
    "group": lambda: convolutional(lambda width: nn.GroupNorm(2, width)),
    "batch": lambda: convolutional(nn.BatchNorm2d),
    "all": lambda: nn.Sequential(
        nn.GroupNorm(1, 3), convolutional(nn.BatchNorm2d, 8), nn.LayerNorm(8), nn.Linear(8, 4)
    ),
}


def stream(n, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, 3, 6, 6, generator=generator) * 2 + 1


def adapted(kind="batch", method="tent", steps=3, **more):
    torch.manual_seed(0)
    classifier = come.adapt(MODELS[kind](), method, **({"lr": 0.1} | more))
    for seed in range(steps):
        classifier(stream(16, seed))
    return classifier


def same(classifier, alone, sizes=SIZES, atol=1e-5):
    for n in sizes:
        x = stream(n, seed=n)
        assert torch.allclose(torch.as_tensor(alone(x)), classifier.predict(x), atol=atol), n


CASES = [("layer", None), ("group", None), *(("batch", rule) for rule in ("source", "mixed", "batch"))]


@pytest.mark.parametrize(("kind", "rule"), CASES)
def test_a_module(kind, rule):
    classifier = adapted(kind, statistics=rule, guard=False)
    alone = classifier.export()
    assert not torch.allclose(alone(stream(4)), classifier.model.eval()(stream(4)), atol=1e-3)
    same(classifier, alone)
    assert not any(module.training for module in alone.modules())
    assert not any(p.requires_grad for p in alone.parameters())
    wrapped = rule in ("mixed", "batch")
    assert any(isinstance(module, OnBatch) for module in alone.modules()) == wrapped
    if not wrapped:  # the names are those of the model
        MODELS[kind]().load_state_dict(alone.state_dict())


@WARNS
def test_a_program_of_torch_export(tmp_path):
    """Of a model with all three kinds of norm layers."""
    classifier = adapted("all", statistics="mixed", guard=False)
    classifier.export(tmp_path / "model.pt2", stream(2))
    same(classifier, torch.export.load(tmp_path / "model.pt2").module())
    assert [path.name for path in tmp_path.iterdir()] == ["model.pt2"]


@pytest.mark.skipif(torch.__version__ < "2.6", reason="ONNX needs torch 2.6")
def test_onnx(tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")

    classifier = adapted("all", statistics="mixed", guard=False)
    classifier.export(tmp_path / "model.onnx", stream(2))
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    (given,), (answer,) = session.get_inputs(), session.get_outputs()
    assert (given.name, given.shape, answer.name, answer.shape) == ("input", ["batch", 3, 6, 6], "logits", ["batch", 4])
    same(classifier, lambda x: session.run(None, {"input": x.numpy()})[0])


def test_it_knows_nothing_of_the_adapter():
    classifier = adapted()
    alone = classifier.export()
    file = io.BytesIO()
    torch.save(alone, file)
    assert b"come.adapter" not in file.getvalue()
    before = alone(stream(4))
    classifier(stream(16))
    assert torch.equal(alone(stream(4)), before)
    model = classifier.model
    del classifier
    gc.collect()
    for module in (alone, pickle.loads(pickle.dumps(alone))):
        assert torch.equal(module(stream(4)), before)
    assert model[0].weight.data_ptr() != alone[0].weight.data_ptr()


@pytest.mark.parametrize("decision", [{"frozen": True}, {"trusted": False}, {"trusted": True}])
def test_what_the_guard_has_decided(decision):
    """That the source model answers, or whether it trusts the statistics of batches."""
    classifier = adapted()
    now = classifier._state
    classifier._state = now._replace(watch=now.watch._replace(**decision))
    alone = classifier.export()
    same(classifier, alone)
    assert any(isinstance(module, OnBatch) for module in alone.modules()) == decision.get("trusted", False)
    assert torch.equal(alone(stream(4)), classifier.model.eval()(stream(4))) == ("frozen" in decision)


def test_layers_that_do_more_than_normalize():
    timm = pytest.importorskip("timm.layers")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), timm.BatchNormAct2d(8), nn.Flatten(), nn.Linear(128, 4))
    classifier = come.adapt(model, "tent", lr=0.1)
    classifier(stream(16))
    same(classifier, classifier.export())


@pytest.mark.parametrize("rule", ["mixed", "batch"])
def test_layers_without_weights_or_running_statistics(rule):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8, affine=False), nn.BatchNorm2d(8, track_running_stats=False), nn.Flatten(),
        nn.Linear(128, 4), nn.BatchNorm1d(4, track_running_stats=False),
    )  # fmt: skip
    classifier = come.adapt(model, "tent", lr=0.1, statistics=rule, guard=False)
    classifier(stream(16))
    alone = classifier.export()
    same(classifier, alone, sizes=(2, 7))
    with pytest.raises(
        come.InputError, match="without running statistics got one value per channel; use a larger batch"
    ):
        alone(stream(1))


def test_a_model_that_is_one_layer_and_one_that_uses_a_layer_twice():
    norm = nn.BatchNorm1d(4)
    for model in (norm, nn.Sequential(norm, nn.ReLU(), norm)):
        classifier = come.adapt(model, "tent", lr=0.1)
        classifier(torch.randn(16, 4))
        x = torch.randn(5, 4)
        assert torch.allclose(classifier.export()(x), classifier.predict(x), atol=1e-5)


def test_half_precision_keeps_the_types_of_the_model():
    torch.manual_seed(0)
    classifier = come.adapt(MODELS["batch"]().bfloat16(), "tent", lr=0.1)
    classifier(stream(16).bfloat16())
    alone = classifier.export()
    assert {p.dtype for p in alone.parameters()} == {torch.bfloat16}
    x = stream(8).bfloat16()
    assert torch.allclose(alone(x).float(), classifier.predict(x).float(), atol=0.1)


class Named(nn.Module):
    """A model in the style of transformers: arguments by name, and an object with logits."""

    def __init__(self):
        super().__init__()
        self.inner = MODELS["layer"]()

    def forward(self, pixel_values=None, scale=None, return_dict=True):
        logits = self.inner(pixel_values) * (1 if scale is None else scale)
        return {"logits": logits} if return_dict else (logits,)


@WARNS
def test_a_mapping_of_arguments(tmp_path):
    classifier = come.adapt(Named(), "tent", lr=0.1, per_sample=("pixel_values",))
    scale = torch.tensor([2.0])
    classifier(pixel_values=stream(16), scale=scale)
    alone = classifier.export(tmp_path / "model.pt2", {"pixel_values": stream(2), "scale": scale})
    loaded = torch.export.load(tmp_path / "model.pt2").module()
    for n in (1, 7):
        expected = classifier.predict(pixel_values=stream(n), scale=scale)
        assert torch.allclose(alone(pixel_values=stream(n), scale=scale)["logits"], expected)
        assert torch.allclose(loaded(pixel_values=stream(n), scale=scale), expected)


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("lame", "lame cannot be exported: its answers are an agreement between the samples"),
        ("memo", "memo cannot be exported: it returns to the source model after each image"),
        (
            "steady:prior_correction=true",
            "steady cannot be exported: its prior correction .*; adapt with prior_correction=False",
        ),
    ],
)
def test_answers_that_are_more_than_weights(method, message):
    with pytest.raises(come.ModelError, match=message):
        come.adapt(MODELS["layer"](), method).export()


def test_steady_without_its_correction():
    classifier = adapted(method="steady")
    same(classifier, classifier.export())


def test_a_method_of_someone_else_with_a_predict_of_its_own():
    class Doubles(come.Method):
        name = "doubles"

        def adapt(self, ctx, x):
            return come.Step(self.predict(ctx, x))

        def predict(self, ctx, x):
            return 2 * ctx.forward(x)

    with pytest.raises(
        come.ModelError, match=r"doubles cannot be exported: it has a predict\(\) of its own, and no frozen"
    ):
        come.adapt(MODELS["layer"](), Doubles()).export()


@pytest.mark.parametrize("method", ["t3a", "cotta", "rotta"])
def test_before_the_first_batch(method):
    classifier = come.adapt(MODELS["layer"](), method)
    same(classifier, classifier.export())


def test_what_cannot_be_written(tmp_path, monkeypatch):
    classifier = come.adapt(MODELS["layer"](), "tent")
    with pytest.raises(come.ConfigError, match=r"path must be a file that ends in \.pt2 or \.onnx, got 'model.pth'"):
        classifier.export("model.pth", stream(2))
    with pytest.raises(
        come.ConfigError, match=r"model.pt2 needs an example: export\(path, x\), x a batch of 2 or more"
    ):
        classifier.export("model.pt2")
    with pytest.raises(come.ConfigError, match="path must be a file, where there is an example, got None"):
        classifier.export(example=stream(2))
    with pytest.raises(come.InputError, match="example must be a batch of 2 or more samples, got 1"):
        classifier.export("model.pt2", stream(1))
    with pytest.raises(come.StateError, match=r"cannot write .*model.pt2: No such file or directory; choose a folder"):
        classifier.export(tmp_path / "nowhere" / "model.pt2", stream(2))
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.4.1+cpu"))
    with pytest.raises(
        come.ConfigError, match=r"ONNX needs torch 2.6 or newer, got 2.4.1\+cpu; update torch, or export to"
    ):
        classifier.export(tmp_path / "model.onnx", stream(2))
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.6.0"))
    monkeypatch.setitem(sys.modules, "onnx", sys)  # as if it were there
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(come.MissingError, match=r'ONNX needs onnxscript, .*: pip install -e "\.\[export\]"'):
        classifier.export(tmp_path / "model.onnx", stream(2))
    assert not list(tmp_path.iterdir())


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = MODELS["layer"]()

    def forward(self, x):
        return self.inner(x) if x.sum() > 0 else self.inner(-x)


def test_a_model_that_torch_cannot_trace(tmp_path):
    classifier = come.adapt(Branches(), "tent")
    with pytest.raises(come.ModelError, match=r"torch.export cannot trace Branches: .*; change its forward, or call"):
        classifier.export(tmp_path / "model.pt2", stream(2))
    assert not list(tmp_path.iterdir())
