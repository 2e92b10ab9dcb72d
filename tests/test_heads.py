"""The classifier head of the libraries' models, images behind normalized tensors, and BatchNorm on other statistics."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import come
from come.batchnorm import batch_norms, batch_statistics, by_group, by_selection, mixed, normalized_by
from come.heads import Head
from come.images import Normalization
from come.inputs import image_of, take, with_image


def timm_model(name):
    import timm

    return timm.create_model(name, num_classes=7)


def torchvision_model(name):
    import torchvision

    return getattr(torchvision.models, name)(num_classes=7)


def transformers_model(name):
    import transformers

    small = {
        "ViT": {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 32,
                "image_size": 64, "patch_size": 16},
        "ResNet": {"embedding_size": 8, "hidden_sizes": [8, 8, 8, 16], "depths": [1, 1, 1, 1]},
        "ConvNext": {"hidden_sizes": [8, 8, 8, 16], "depths": [1, 1, 1, 1], "image_size": 64},
    }[name]  # fmt: skip
    config = getattr(transformers, f"{name}Config")(num_labels=7, **small)
    return getattr(transformers, f"{name}ForImageClassification")(config)


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
    head = Head(model)
    x = torch.rand(3, 3, 64, 64)
    with torch.no_grad():
        features, logits = head.features(lambda: come.inputs.logits_of(model(x), 3))
        assert logits.shape == (3, 7)
        torch.testing.assert_close(head.linear(features), logits)


def test_a_head_by_name_or_itself():
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 5), nn.Linear(5, 5))
    assert Head(model, "1").linear is model[1]
    assert Head(model, model[2]).name == "2"
    with pytest.raises(come.ModelError, match="a Flatten where its classifier should be"):
        Head(model, "0")
    with pytest.raises(come.ModelError, match="name the layer that does"):
        Head(model, "1").features(lambda: model(torch.rand(2, 3, 2, 2)))


def test_timm_model_without_a_classifier():
    import timm

    with pytest.raises(come.ModelError, match="a Identity where its classifier should be"):
        Head(timm.create_model("resnet10t", num_classes=0))


# ---- images ----


def test_normalization_there_and_back():
    n = Normalization.of(((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    images = torch.rand(2, 3, 4, 4, dtype=torch.float64)
    torch.testing.assert_close(n.images(n.inputs(images)), images)
    n.check(n.inputs(images), "x")
    assert Normalization.of(n) is n
    assert torch.equal(Normalization.of(None).images(images), images)


def test_normalization_with_other_channels():
    n = Normalization.of(((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)))
    with pytest.raises(come.InputError, match="3 means and 3 deviations, the input 1 channels"):
        n.images(torch.rand(2, 1, 4, 4))
    assert Normalization.of(((0.5,), (0.5,))).images(torch.zeros(2, 5, 4, 4)).unique().tolist() == [0.5]


@pytest.mark.parametrize("bad", [1.0, ((0.5,),), ((), ()), ((0.5,), (-1.0,)), ((float("nan"),), (1.0,)), "model"])
def test_bad_normalizations(bad):
    with pytest.raises(come.ConfigError, match="normalization is"):
        Normalization.of(bad)


def test_images_in_a_batch_and_others_in_their_place():
    x = {"pixel_values": torch.zeros(2, 3, 4, 4), "mask": torch.tensor([[1, 0], [0, 1]]), "flag": True}
    assert image_of(x, "test") is x["pixel_values"]
    views = with_image(x, torch.ones(6, 3, 4, 4))
    assert views["pixel_values"].shape == (6, 3, 4, 4)
    assert views["mask"].tolist() == [[1, 0], [0, 1]] * 3
    assert views["flag"] is True
    assert take(x, slice(1, 2))["mask"].tolist() == [[0, 1]]
    with pytest.raises(come.InputError, match="test works on images"):
        image_of((torch.zeros(2, 3, 4, 4), torch.zeros(2, 3, 4, 4)), "test")


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


def test_groups_are_normalized_as_if_they_came_alone(model):
    x, layers = torch.rand(12, 3, 8, 8), batch_norms(model)
    with normalized_by(layers, by_group(3)):
        together = model(x)
    with batch_statistics(layers, 4):
        alone = torch.cat([model(part) for part in x.split(4)])
    torch.testing.assert_close(together, alone)


def test_a_selection_is_normalized_as_if_the_others_were_not_there(model):
    x, layers = torch.rand(12, 3, 8, 8), batch_norms(model)
    used = torch.arange(12) % 3 != 0
    with normalized_by(layers, by_selection(used)):
        masked = model(x)[used]
    with batch_statistics(layers, 8):
        torch.testing.assert_close(masked, model(x[used]))
    with normalized_by(layers, by_selection(torch.zeros(12, dtype=torch.bool))):
        assert model(x).isfinite().all()


def test_mixed_statistics_and_what_is_kept_of_them(model):
    x, layers = torch.rand(12, 3, 8, 8), batch_norms(model)
    old = [(layer.running_mean.clone(), layer.running_var.clone()) for layer in layers]
    with normalized_by(layers, mixed(old, 0.0, 0)):
        torch.testing.assert_close(model(x), model.eval()(x))
    new = list(old)
    with normalized_by(layers, mixed(old, 1.0, 0, new)), torch.no_grad():
        all_own = model(x)
    with batch_statistics(layers, 12):
        torch.testing.assert_close(all_own, model(x))
    first = model[0](x)
    torch.testing.assert_close(new[0][0], first.mean(dim=(0, 2, 3)))
    for layer, (mean, var) in zip(layers, old, strict=True):
        assert torch.equal(layer.running_mean, mean)  # the layers have what they had
        assert torch.equal(layer.running_var, var)


def test_statistics_come_back_after_an_error(model):
    layers = batch_norms(model)
    before = [layer.running_mean for layer in layers]
    with pytest.raises(RuntimeError), normalized_by(layers, by_group(5)):
        model(torch.rand(12, 3, 8, 8))
    assert all(layer.running_mean is mean for layer, mean in zip(layers, before, strict=True))
    assert not any(layer._forward_pre_hooks for layer in layers)
