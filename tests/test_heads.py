"""The classifier head of the libraries' models, images behind normalized tensors, and BatchNorm on other statistics."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import come
from come.images.normalization import Normalization
from come.model.batchnorm import BatchStatistics, following
from come.model.functional import FunctionalModel
from come.model.heads import Head
from come.model.inputs import Arguments, Inputs
from come.select import BATCH_NORMS, nothing


def batch_norms(model):
    return [module for module in model.modules() if isinstance(module, BATCH_NORMS)]


def timm_model(name):
    import timm

    return timm.create_model(name, num_classes=7)


def torchvision_model(name):
    import torchvision

    return getattr(torchvision.models, name)(num_classes=7)


def transformers_model(name):
    transformers = pytest.importorskip("transformers")

    small = {
        "ViT": {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 32,
                "image_size": 64, "patch_size": 16},
        "ResNet": {"embedding_size": 8, "hidden_sizes": [8, 8, 8, 16], "depths": [1, 1, 1, 1]},
        "ConvNext": {"hidden_sizes": [8, 8, 8, 16], "depths": [1, 1, 1, 1], "image_size": 64},
    }[name]  # fmt: skip
    config = getattr(transformers, f"{name}Config")(num_labels=7, **small)
    return getattr(transformers, f"{name}ForImageClassification")(config)


class Headed(come.Method):
    """Answers with the head on the features that it was given."""

    name = "headed"
    descends = False

    def setup(self, ctx):
        return {"head": Head(ctx.model.model)}

    def adapt(self, ctx, x):
        features, logits = ctx.features(x)
        assert logits.shape == (3, 7)
        return come.Step(ctx.fixed["head"].linear(features))


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (timm_model, "resnet10t"),
        (timm_model, "mobilenetv3_small_050"),
        (timm_model, "convnext_atto"),
        (timm_model, "efficientnet_lite0"),
        (torchvision_model, "resnet18"),
        (torchvision_model, "mobilenet_v3_small"),
        (torchvision_model, "shufflenet_v2_x0_5"),
        (transformers_model, "ViT"),
        (transformers_model, "ResNet"),
        (transformers_model, "ConvNext"),
    ],
)
def test_the_head_gives_the_logits(make, name):
    model = make(name).eval()
    x = torch.rand(3, 3, 64, 64)
    with torch.no_grad():
        expected = come.model.inputs.logits_of(model(x), 3)
    torch.testing.assert_close(come.adapt(model, Headed(select=nothing(), statistics="source"))(x), expected)


def test_a_head_by_name_or_itself():
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 5), nn.Linear(5, 5))
    assert Head(model, "1").linear is model[1]
    assert Head(model, model[2]).name == "2"
    with pytest.raises(come.ModelError, match="a Flatten where its classifier should be"):
        Head(model, "0")
    with pytest.raises(come.ConfigError, match="head must name a module of Sequential, got 'nowhere'"):
        Head(model, "nowhere")
    with pytest.raises(
        come.ModelError, match=r"'1' of Sequential does not give its logits .* name the layer that does"
    ):
        come.adapt(model, "t3a", head="1")(torch.rand(2, 3, 2, 2))


def test_a_head_that_is_called_twice_gives_the_features_behind_the_logits():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(4, 3)

        def forward(self, x):
            self.head(x + 1)
            return self.head(x)

    model, x = Twice(), torch.rand(2, 4)
    seen = [(x + 1, model.head(x + 1)), (x, model.head(x))]
    assert Head(model).pick(seen, model(x)) is x


def test_timm_model_without_a_classifier():
    import timm

    with pytest.raises(come.ModelError, match="a Identity where its classifier should be"):
        Head(timm.create_model("resnet10t", num_classes=0))


# ---- images ----


def test_normalization_there_and_back():
    n = Normalization.of(((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    images = torch.rand(2, 3, 4, 4, dtype=torch.float64)
    torch.testing.assert_close(n.images(n.inputs(images)), images)
    n.check(n.inputs(images), "x", first=True)
    assert Normalization.of(n) is n
    assert torch.equal(Normalization.of(None).images(images), images)


def test_only_the_first_batch_is_held_against_the_normalization():
    n = Normalization.of(((0.5,), (0.5,)))
    with pytest.raises(come.InputError, match=r"test needs images in \[0, 1\], .* ranges from 0\.5 to 2;"):
        n.check(torch.tensor([[[[0.0, 3.0]]]]), "test", first=True)
    n.check(torch.tensor([[[[0.0, 3.0]]]]), "test", first=False)


def test_normalization_with_other_channels():
    n = Normalization.of(((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)))
    with pytest.raises(come.InputError, match="the 1 channels of the input, got 3 means and 3 stds"):
        n.images(torch.rand(2, 1, 4, 4))
    assert Normalization.of(((0.5,), (0.5,))).images(torch.zeros(2, 5, 4, 4)).unique().tolist() == [0.5]


@pytest.mark.parametrize("bad", [1.0, ((0.5,),), ((), ()), ((0.5,), (-1.0,)), ((float("nan"),), (1.0,)), "model"])
def test_bad_normalizations(bad):
    with pytest.raises(come.ConfigError, match="normalization must be"):
        Normalization.of(bad)


def test_images_in_a_batch_and_others_in_their_place():
    given = {"pixel_values": torch.zeros(2, 3, 4, 4), "mask": torch.tensor([[1, 0], [0, 1]]), "flag": True}
    x = Arguments(per_sample=("pixel_values", "mask")).of((given,), {})
    assert x.image("test") is given["pixel_values"]
    views = x.with_image(torch.ones(6, 3, 4, 4)).kwargs
    assert views["pixel_values"].shape == (6, 3, 4, 4)
    assert views["mask"].tolist() == [[1, 0], [0, 1]] * 3
    assert views["flag"] is True
    assert x.take(slice(1, 2)).kwargs["mask"].tolist() == [[0, 1]]
    with pytest.raises(come.InputError, match=r"test needs images, .* got \(2, 3, 4, 4\), \(2, 3, 4, 4\)"):
        Arguments(per_sample=(0, 1)).of((torch.zeros(2, 3, 4, 4), torch.zeros(2, 3, 4, 4)), {}).image("test")


# ---- BatchNorm ----


@pytest.fixture
def model():
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 6), nn.BatchNorm1d(6)
    )
    for layer in batch_norms(net):
        nn.init.uniform_(layer.weight, 0.5, 2)
        nn.init.normal_(layer.running_mean)
        nn.init.uniform_(layer.running_var, 0.5, 2)
    return net.eval()


def run(model, x, statistics):
    borrowed = FunctionalModel(model, nothing(), "test", descends=False)
    with torch.no_grad():
        return borrowed.call(Inputs.of(x), borrowed.source(), statistics)


def test_groups_are_normalized_as_if_they_came_alone(model):
    x = torch.rand(12, 3, 8, 8)
    alone = torch.cat([run(model, part, BatchStatistics()) for part in x.split(4)])
    torch.testing.assert_close(run(model, x, BatchStatistics(groups=3)), alone)


def test_a_selection_is_normalized_as_if_the_others_were_not_there(model):
    x = torch.rand(12, 3, 8, 8)
    used = torch.arange(12) % 3 != 0
    torch.testing.assert_close(run(model, x, BatchStatistics(used=used))[used], run(model, x[used], BatchStatistics()))
    nobody = BatchStatistics(used=torch.zeros(12, dtype=torch.bool))
    torch.testing.assert_close(run(model, x, nobody), run(model, x, BatchStatistics()))


def test_mixed_statistics_lie_between_the_source_and_the_batch(model):
    x = torch.rand(12, 3, 8, 8)
    torch.testing.assert_close(run(model, x, BatchStatistics(0.0)), model(x))
    torch.testing.assert_close(run(model, x, BatchStatistics(1.0)), run(model, x, BatchStatistics()))
    first, layer = model[0](x).detach(), model[1]
    mean = 0.75 * layer.running_mean + 0.25 * first.mean(dim=(0, 2, 3))
    var = 0.75 * layer.running_var + 0.25 * first.var(dim=(0, 2, 3), correction=0)
    expected = nn.functional.batch_norm(first, mean, var, layer.weight, layer.bias, eps=layer.eps)
    torch.testing.assert_close(run(model[:2], x, BatchStatistics(0.25)), expected)


def test_statistics_that_follow_and_what_is_kept_of_them(model):
    x, layers = torch.rand(12, 3, 8, 8), batch_norms(model)
    old = {i: (layer.running_mean.clone(), layer.running_var.clone()) for i, layer in enumerate(layers)}
    torch.testing.assert_close(run(model, x, following(old, 0.0, 0)), model(x))
    new = dict(old)
    torch.testing.assert_close(run(model, x, following(old, 1.0, 0, new)), run(model, x, BatchStatistics()))
    torch.testing.assert_close(new[0][0], model[0](x).mean(dim=(0, 2, 3)))
    for layer, (mean, var) in zip(layers, old.values(), strict=True):
        assert torch.equal(layer.running_mean, mean)  # the layers have what they had
        assert torch.equal(layer.running_var, var)


@pytest.mark.parametrize("statistics", [BatchStatistics(), BatchStatistics(0.5), BatchStatistics(groups=2)])
def test_a_layer_that_does_more_than_normalize_keeps_doing_it(statistics):
    import timm.layers

    layer = timm.layers.BatchNormAct2d(4).eval()
    with torch.no_grad():
        layer.bias.fill_(-0.5)
    out = run(nn.Sequential(layer), torch.randn(6, 4, 5, 5, generator=torch.Generator().manual_seed(0)), statistics)
    assert out.min() == 0  # its ReLU
    assert out.max() > 0


@pytest.mark.parametrize("statistics", [BatchStatistics(), BatchStatistics(groups=5)])
def test_statistics_come_back_after_an_error(model, statistics):
    layers = batch_norms(model)
    before = [(layer.running_mean, layer.running_var, layer.training) for layer in layers]
    handle = model[4].register_forward_hook(lambda *_: model.nowhere)
    with pytest.raises((RuntimeError, AttributeError)):
        run(model, torch.rand(12, 3, 8, 8), statistics)
    handle.remove()
    for layer, (mean, var, training) in zip(layers, before, strict=True):
        assert layer.running_mean is mean
        assert layer.running_var is var
        assert layer.training is training
        assert layer.track_running_stats
        assert not layer._forward_pre_hooks
