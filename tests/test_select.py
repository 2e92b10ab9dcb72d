"""Which parameters adapt, on the models people use."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import come
from come.select import blocks, everything, is_norm, norm_affine, norms


def timm_model(name):
    import timm

    return timm.create_model(name, pretrained=False)


def torchvision_model(name):
    import torchvision

    return getattr(torchvision.models, name)(weights=None)


def transformers_model(kind):
    t = pytest.importorskip("transformers")

    size = {"num_hidden_layers": 12, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16}
    if kind == "vit":
        return t.ViTForImageClassification(t.ViTConfig(**size, image_size=32, patch_size=16))
    if kind == "bert":
        return t.BertForSequenceClassification(t.BertConfig(**size, vocab_size=20))
    return t.LlamaForSequenceClassification(t.LlamaConfig(**size, num_key_value_heads=2, vocab_size=20))


# Number of blocks found, the last layer that SAR adapts, the first and the last one that it leaves alone.
MODELS = {
    (timm_model, "vit_tiny_patch16_224"): (12, "blocks.8.norm2", "blocks.9.norm1", "norm"),
    (timm_model, "resnet18"): (4, "layer3.1.bn2", "layer4.0.bn1", "layer4.1.bn2"),
    (timm_model, "convnext_atto"): (4, "stages.2.blocks.5.norm", "stages.3.downsample.0", "head.norm"),
    (timm_model, "swin_tiny_patch4_window7_224"): (4, "layers.2.blocks.5.norm2", "layers.3.downsample.norm", "norm"),
    (timm_model, "mobilenetv3_small_050"): (6, "blocks.3.1.bn3", "blocks.4.0.bn1", "blocks.5.0.bn1"),
    (timm_model, "efficientnet_b0"): (7, "blocks.4.2.bn3", "blocks.5.0.bn1", "bn2"),
    (torchvision_model, "vit_b_32"): (
        12,
        "encoder.layers.encoder_layer_8.ln_2",
        "encoder.layers.encoder_layer_9.ln_1",
        "encoder.ln",
    ),
    (torchvision_model, "resnet18"): (4, "layer3.1.bn2", "layer4.0.bn1", "layer4.1.bn2"),
    (torchvision_model, "densenet121"): (
        7,
        "features.denseblock3.denselayer24.norm2",
        "features.transition3.norm",
        "features.norm5",
    ),
    (transformers_model, "vit"): (12, "vit.layers.8.layernorm_after", "vit.layers.9.layernorm_before", "vit.layernorm"),
    (transformers_model, "bert"): (
        12,
        "bert.encoder.layer.8.output.LayerNorm",
        "bert.encoder.layer.9.attention.output.LayerNorm",
        "bert.encoder.layer.11.output.LayerNorm",
    ),
    (transformers_model, "llama"): (
        12,
        "model.layers.8.post_attention_layernorm",
        "model.layers.9.input_layernorm",
        "model.norm",
    ),
}


@pytest.mark.parametrize(("library", "name"), MODELS, ids=lambda part: getattr(part, "__name__", part))
def test_depth_on_real_models(library, name):
    count, last, skipped, final = MODELS[library, name]
    model = library(name)
    assert len(blocks(model)) == count
    every = list(norm_affine()(model))
    kept = list(norm_affine(skip_last=0.25)(model))
    left = [key for key in every if key not in kept]
    assert set(kept) | set(left) == set(every)
    assert kept == [key for key in every if key in set(kept)], "not in the model's order"
    assert kept[-1].rpartition(".")[0] == last
    assert left[0].rpartition(".")[0] == skipped
    assert left[-1].rpartition(".")[0] == final


@pytest.mark.parametrize(
    "layer",
    [
        nn.BatchNorm1d(4), nn.BatchNorm2d(4), nn.BatchNorm3d(4), nn.SyncBatchNorm(4), nn.LayerNorm(4), nn.GroupNorm(2, 4),
        nn.InstanceNorm1d(4, affine=True), nn.InstanceNorm2d(4, affine=True), nn.InstanceNorm3d(4, affine=True), nn.RMSNorm(4),
    ],
    ids=lambda layer: type(layer).__name__,
)  # fmt: skip
def test_kinds_of_norm_layers(layer):
    assert is_norm(layer)
    assert all(key.startswith("1.") for key in norm_affine()(nn.Sequential(nn.Linear(4, 4), layer)))
    assert norm_affine()(nn.Sequential(nn.Linear(4, 4), layer))


def test_norms_of_other_libraries():
    import timm.layers

    llama = pytest.importorskip("transformers.models.llama.modeling_llama").LlamaRMSNorm
    for layer in (timm.layers.BatchNormAct2d(4), timm.layers.LayerNorm2d(4), timm.layers.RmsNorm(4), llama(4)):
        assert is_norm(layer), layer
    for layer in (nn.Linear(4, 4), nn.Conv2d(4, 4, 1), nn.Embedding(4, 4), nn.PReLU(4), nn.InstanceNorm2d(4)):
        assert not norm_affine()(nn.Sequential(layer)), layer


def test_a_wrapper_around_a_model_is_no_block():
    class Normalize(nn.Module):
        def forward(self, x):
            return x - 0.5

    inner = timm_model("resnet18")
    wrapped = norm_affine(skip_last=0.25)(nn.Sequential(Normalize(), inner))
    assert list(wrapped) == [f"1.{key}" for key in norm_affine(skip_last=0.25)(inner)]


def test_without_a_stack_the_last_norm_layers_are_left_alone():
    model = nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(4, 4), nn.LayerNorm(4))))
    assert blocks(model) == []
    assert len(norms(model)) == 8
    assert list(norm_affine(skip_last=0.25)(model))[-1] == "11.bias"


def test_your_own_selection():
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 3))
    before = {key: value.clone() for key, value in model.state_dict().items()}
    adapter = come.adapt(model, "tent", lr=0.1, select=lambda m: {"2.bias": m[2].bias})
    adapter(torch.randn(6, 4))
    assert list(adapter.adapted_parameters) == ["2.bias"]
    adapter.close(keep=True)
    assert [key for key, value in model.state_dict().items() if not torch.equal(value, before[key])] == ["2.bias"]
    assert set(everything()(model)) == set(dict(model.named_parameters()))


def test_a_parameter_under_two_names_adapts_once():
    norm = nn.LayerNorm(4)
    model = nn.Sequential(norm, nn.Linear(4, 4), norm, nn.Linear(4, 3))
    both = {"0.weight": norm.weight, "2.weight": norm.weight}
    adapter = come.adapt(model, "tent", lr=0.1, select=lambda _: both)
    x = torch.randn(6, 4)
    first = adapter(x)
    assert list(adapter.adapted_parameters) == ["0.weight"]
    again = adapter.predict(x)
    assert not torch.equal(first, again)
    adapter.close(keep=True)
    with torch.no_grad():
        torch.testing.assert_close(model(x), again)  # both places had the adapted values


@pytest.mark.parametrize(
    ("select", "message"),
    [
        (lambda m: {"nowhere": m[1].weight}, "'nowhere', which is not a parameter of Sequential"),
        (lambda m: {}, "tent has nothing to adapt"),
        ("norms", "no selector 'norms'; did you mean 'norm_affine'"),
        (3, "select must be a function .*, got 3"),
    ],
)
def test_bad_selections(select, message):
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 3))
    with pytest.raises(come.ComeError, match=message):
        come.adapt(model, "tent", select=select)


def test_bad_share():
    with pytest.raises(come.ConfigError, match=r"skip_last must be in \[0, 1\), got 1\.0"):
        norm_affine(skip_last=1.0)
