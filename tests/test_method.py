"""The life of an adapter: what it refuses, what it leaves alone, what it gives back."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from torch import nn

import come
from come import testing
from come.methods import SAR, Tent
from come.testing import NORMS, TinyClassifier, batches


def tiny(norm="layer"):
    return TinyClassifier(NORMS[norm])


# ---- what bad input gets ----


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda m: come.adapt(m, "tnet"), "no method 'tnet'; did you mean 'tent'"),
        (lambda m: come.adapt(m, 7), "method is 7; give a name"),
        (lambda m: come.adapt(m, "tent", "cmoe"), "no objective 'cmoe'; did you mean 'come'"),
        (lambda m: come.adapt(m, "tent", learning_rate=1), "no hyperparameter of tent 'learning_rate'"),
        (lambda m: come.adapt(m, "sar", roh=0.1), "no hyperparameter of sar 'roh'; did you mean 'rho'"),
        (lambda m: come.adapt(m, "tent", lr=-1e-3), "lr is -0.001; it must be a positive number"),
        (lambda m: come.adapt(m, "tent", lr=float("nan")), "lr is nan"),
        (lambda m: come.adapt(m, "tent", steps=0), "steps is 0; it must be a whole number, at least 1"),
        (lambda m: come.adapt(m, "tent", keep=0), r"keep is 0; it must be in \(0, 1\]"),
        (lambda m: come.adapt(m, "tent", optimizer="sdg"), "no optimizer 'sdg'; did you mean 'sgd'"),
        (lambda m: come.adapt(m, "tent", optimizer=3), "optimizer is 3; give a name or a function"),
        (lambda m: come.adapt(m, "tent", optimizer=come.optim.sgd(momentum=1.0)), r"momentum is 1.0; it must be in"),
        (lambda m: come.adapt(m, "eata"), "eata needs source batches for its Fisher matrix"),
        (lambda m: come.adapt(m, "eata", source=[]), "source holds no batch"),
        (
            lambda m: come.adapt(m, "eata", source=[(batches(1)[0], torch.zeros(12))]),
            "pass source=.x for x, _ in loader",
        ),
        (lambda m: come.adapt(m, "eata", source=[torch.zeros(2, 3, 8, 8, dtype=torch.uint8)]), "input is torch.uint8"),
        (lambda m: come.adapt(m, "eata", beta=-1), "beta is -1; it must be at least 0"),
        (lambda m: come.adapt(m, "eata", margin=0), "margin is 0; it must be positive"),
        (lambda m: come.adapt(m, "sar", rho=-1), "rho is -1; it must be at least 0"),
        (lambda m: come.adapt(m, "sar", recover_below=-1), "recover_below is -1"),
    ],
)
def test_bad_configuration_leaves_the_model_as_it_was(make, message):
    model = tiny().train()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(come.ComeError, match=message):
        make(model)
    assert model.training
    assert all(m.training for m in model.modules())
    assert all(p.requires_grad for p in model.parameters())
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    come.adapt(model, "tent").close()  # and it can be adapted


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Linear(4, 3), "tent has nothing to adapt: .* finds no parameter in Linear. It needs normalization layers"),
        (nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3, elementwise_affine=False)), "nothing to adapt"),
        (lambda x: x, "the model is a function; come adapts a torch.nn.Module"),
    ],
)
def test_models_that_cannot_be_adapted(model, message):
    with pytest.raises(come.ModelError, match=message):
        come.adapt(model, "tent")


def test_a_model_made_under_inference_mode_is_refused():
    with torch.inference_mode():
        model = tiny()
    with pytest.raises(come.ModelError, match=r"made under torch\.inference_mode"):
        come.adapt(model)


class Returns(nn.Module):
    """Returns whatever `make` makes of the logits."""

    def __init__(self, make):
        super().__init__()
        self.inner, self.make = tiny(), make

    def forward(self, x):
        return self.make(self.inner(x))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda z: (z, z), "the model returned a tuple; it must be a tensor"),
        (lambda z: {"scores": z}, "the model returned a dict"),
        (lambda z: z[:, :1], r"shape \(12, 1\) for a batch of 12; .* K >= 2"),
        (lambda z: z[:, 0], r"shape \(12,\) for a batch of 12"),
        (lambda z: z[:5], r"shape \(5, 5\) for a batch of 12"),
        (lambda z: z.argmax(1, keepdim=True).expand(12, 5), "returned torch.int64"),
    ],
)
def test_outputs_that_are_no_logits(make, message):
    model = Returns(make)
    method = come.adapt(model, "tent")
    before = method.state_dict()
    with pytest.raises(come.InputError, match=message):
        method(batches(1)[0])
    after = method.state_dict()
    assert all(torch.equal(after[k], v) for k, v in before.items())


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.zeros(2, 3, 8, 8, dtype=torch.uint8), "input is torch.uint8; it must be floating point"),
        (torch.zeros(0, 3, 8, 8), "the batch is empty"),
        (torch.zeros(8), r"1 dimension\(s\), shape \(8,\)"),
        (torch.zeros(3, 8, 8), r"3 dimensions, shape \(3, 8, 8\), but the model's convolutions take 4"),
        (torch.zeros(2, 2, 3, 8, 8), "5 dimensions"),
        ([1, 2], "holds no batched tensor"),
        ({"x": "text"}, "holds no batched tensor"),
        ("text", "the input is a str; give a tensor"),
    ],
)
def test_inputs_that_are_no_batches(x, message):
    with pytest.raises(come.InputError, match=message):
        come.adapt(tiny(), "tent")(x)


def test_other_errors_of_the_model_come_through():
    with pytest.raises(RuntimeError, match="to have 3 channels"):
        come.adapt(tiny(), "tent")(torch.zeros(2, 4, 8, 8))


def test_a_forward_without_gradients_is_explained():
    class NoGrad(TinyClassifier):
        @torch.no_grad()
        def forward(self, x):
            return super().forward(x)

    with pytest.raises(come.ModelError, match="does its forward run under no_grad"):
        come.adapt(NoGrad(nn.BatchNorm2d), "tent")(batches(1)[0])


def test_adapting_twice_is_refused_and_close_allows_it():
    model = tiny()
    method = come.adapt(model, "tent")
    with pytest.raises(come.ModelError, match=r"adapted already, by tent; close\(\) that adapter first"):
        come.adapt(model, "sar")
    method.close()
    method.close()
    with pytest.raises(come.ClosedError, match="is closed"):
        method(batches(1)[0])
    come.adapt(model, "sar")


# ---- what is given back ----


def test_a_dropped_adapter_gives_the_model_back():
    model = tiny()
    before = {k: v.clone() for k, v in model.state_dict().items()}

    def run():
        return come.adapt(model, "tent", lr=0.1)(batches(1)[0])

    first = run()
    gc.collect()
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert torch.equal(first, run())


def test_keep_leaves_the_adapted_weights():
    model = tiny().train()
    method = come.adapt(model, "tent", lr=0.1)
    method(batches(1)[0])
    adapted = {k: v.detach().clone() for k, v in method.parameters.items()}
    method.close(keep=True)
    assert model.training
    assert all(torch.equal(model.get_parameter(k), v) for k, v in adapted.items())


def test_gradients_of_the_user_survive():
    model = tiny()
    model(batches(1)[0]).sum().backward()
    before = {k: p.grad.clone() for k, p in model.named_parameters()}
    with come.adapt(model, "tent") as method:
        method(batches(1)[0])
    assert all(torch.equal(p.grad, before[k]) for k, p in model.named_parameters())


def test_running_statistics_are_there_between_steps():
    model = tiny("batch")
    keys = list(model.state_dict())
    method = come.adapt(model, "tent")
    method(batches(1)[0])
    assert list(model.state_dict()) == keys  # a checkpoint taken now is complete
    layer = model.blocks[0][1]
    assert torch.equal(layer.running_mean, torch.zeros(8))
    assert int(layer.num_batches_tracked) == 0


def test_running_statistics_are_there_after_a_failed_step():
    model = tiny("batch")
    method = come.adapt(model, "tent")
    with pytest.raises(RuntimeError):
        method(torch.zeros(2, 4, 8, 8))
    assert model.blocks[0][1].running_mean is not None


def test_other_models_in_the_process_are_untouched():
    other = tiny("batch").eval()
    x = batches(1)[0]
    before = other(x)
    with come.adapt(tiny("batch"), "tent", lr=0.1) as method:
        method(x)
        assert torch.equal(other(x), before)


def test_copies_are_independent():
    model = tiny("batch")
    twin = copy.deepcopy(model)
    one, two = come.adapt(model, "tent", lr=0.1), come.adapt(twin, "tent", lr=0.1)
    expected = [one(x) for x in batches()]
    assert all(torch.equal(a, two(x)) for a, x in zip(expected, batches(), strict=True))


# ---- surroundings ----


def test_nothing_stale_under_one_long_autocast():
    """autocast caches casts of the weights until it ends; a cached one must not outlive a step."""
    select = come.select.everything()
    make = lambda: come.adapt(tiny(), "tent", "em", lr=0.05, select=select)  # noqa: E731
    method = make()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = [method(x) for x in batches()]
    method = make()
    outside = []
    for x in batches():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            outside.append(method(x))
    assert all(torch.equal(a, b) for a, b in zip(inside, outside, strict=True))


@pytest.mark.parametrize("sizes", [(1, 3), (1, 3, 1, 1)])
def test_batch_of_one_without_batch_statistics(sizes):
    """One value per channel has no variance: the layer falls back to its running statistics."""
    layer = nn.BatchNorm1d(3) if len(sizes) == 2 else nn.BatchNorm2d(3)
    model = nn.Sequential(layer, nn.Flatten(), nn.Linear(3, 4))
    layer.running_mean.fill_(0.5)
    logits = come.adapt(model, "tent", lr=0.1)(torch.randn(sizes))
    assert logits.isfinite().all()
    bare = nn.Sequential(type(layer)(3, track_running_stats=False), nn.Flatten(), nn.Linear(3, 4))
    with pytest.raises(come.InputError, match="a batch of one has no variance"):
        come.adapt(bare, "tent")(torch.randn(sizes))


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.BatchNorm1d(4), (4,)),
        (nn.BatchNorm3d(4), (4, 2, 3, 3)),
        (nn.SyncBatchNorm(4), (4, 5, 5)),
        (nn.InstanceNorm1d(4, affine=True), (4, 6)),
        (nn.InstanceNorm3d(4, affine=True), (4, 2, 3, 3)),
        (nn.RMSNorm(6), (4, 6)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_other_norm_layers_adapt(layer, shape):
    model = nn.Sequential(layer, nn.Flatten(), nn.Linear(torch.Size(shape).numel(), 3))
    x = torch.randn(6, *shape, generator=torch.Generator().manual_seed(0))
    before = [p.detach().clone() for p in layer.parameters()]
    with come.adapt(model, "tent", "em", lr=0.1) as method:
        assert method(x).isfinite().all()
        assert any(not torch.equal(p, b) for p, b in zip(layer.parameters(), before, strict=True))
    assert all(torch.equal(p, b) for p, b in zip(layer.parameters(), before, strict=True))


def test_text_classifier_with_tokens():
    import transformers as t

    config = t.BertConfig(
        vocab_size=30, hidden_size=16, num_hidden_layers=4, num_attention_heads=2, intermediate_size=16, num_labels=4
    )
    assert config.hidden_dropout_prob > 0
    model = t.BertForSequenceClassification(config)
    batch = {"input_ids": torch.randint(0, 30, (6, 9)), "attention_mask": torch.ones(6, 9, dtype=torch.int64)}
    for method in ("tent", "sar"):
        with come.adapt(model, method, lr=0.1) as adapter:
            first = adapter.step(batch)
            adapter.reset()
            assert torch.equal(first.logits, adapter.step(t.BatchEncoding(batch)).logits)  # dropout is off
            assert first.logits.shape == (6, 4)


def test_vision_transformer_of_transformers():
    import transformers as t

    config = t.ViTConfig(
        hidden_size=16, num_hidden_layers=4, num_attention_heads=2, intermediate_size=16, image_size=16, patch_size=8
    )
    model = t.ViTForImageClassification(config)
    with come.adapt(model, "sar", lr=0.1) as adapter:
        assert adapter({"pixel_values": torch.randn(5, 3, 16, 16)}).shape == (5, 2)
        assert adapter(torch.randn(5, 3, 16, 16)).shape == (5, 2)


# ---- learning rate and repr ----


def test_paper_learning_rate_without_batch_norm():
    method = come.adapt(tiny("layer"), "tent")
    assert method.learning_rate(64) == pytest.approx(1e-3)
    assert method.learning_rate(16) == pytest.approx(2.5e-4)
    assert "lr=0.001 x batch/64 (the paper's for models without BatchNorm)" in repr(method)


def test_paper_learning_rate_with_batch_norm():
    method = come.adapt(tiny("batch"), "sar")
    assert method.learning_rate(64) == method.learning_rate(32) == pytest.approx(2.5e-4)
    assert method.learning_rate(8) == pytest.approx(2.5e-4 / 64 * 8 * 2)
    assert "lr=0.00025 (the paper's for BatchNorm models)" in repr(method)


def test_repr_names_the_objective_and_the_rate():
    assert "objective=Softmax(" in repr(come.adapt(tiny(), "tent", "em", lr=0.5))
    assert "lr=0.5" in repr(come.adapt(tiny(), "tent", "em", lr=0.5))
    assert "Source(TinyClassifier" in repr(come.adapt(tiny(), "source"))


def test_the_rate_is_used():
    """One step of plain gradient descent moves by exactly lr times the gradient."""
    model = tiny()
    x = batches(1)[0]
    method = Tent(model, lr=0.25, optimizer=come.optim.sgd(momentum=0.0))
    before = {k: p.detach().clone() for k, p in method.parameters.items()}
    loss = method.objective.entropy(model.eval()(x)).mean()
    gradient = torch.autograd.grad(loss, list(method.parameters.values()))
    method(x)
    for (k, p), g in zip(method.parameters.items(), gradient, strict=True):
        torch.testing.assert_close(p.detach(), before[k] - 0.25 * g)


def test_hyperparameters_are_the_constructor():
    assert list(SAR.hyperparameters())[:4] == ["margin", "rho", "recover_below", "quirks"]
    assert SAR.hyperparameters()["rho"] == 0.05
    assert {"lr", "steps", "objective", "episodic"} <= set(Tent.hyperparameters())


# ---- optimizers ----


def test_an_optimizer_without_a_device_side_switch_also_stands_still():
    model = tiny()
    method = come.adapt(model, "sar", "em", lr=0.1, optimizer=lambda ps, lr: torch.optim.RMSprop(list(ps), lr=lr))
    testing.METHOD_CHECKS["empty_selection_moves_nothing"](lambda _: method, model)
    assert not method.step(batches(1)[0]).used.any()


def test_adam_resumes_and_resets():
    make = lambda model: Tent(model, lr=1e-2, optimizer="adam")  # noqa: E731
    testing.check_method(make, norms=["layer"], checks=["reset_replays_identically", "resume_is_exact"])


def test_uncertainty_for_abstaining():
    method = come.adapt(tiny(), "tent", "come")
    logits = torch.tensor([[9.0, 0, 0, 0, 0], [-9.0, -9, -9, -9, -9]])
    assert method.uncertainty(logits)[0] < 0.01 < 0.99 < method.uncertainty(logits)[1]


# ---- state ----


def test_states_that_do_not_belong_are_refused_and_change_nothing(tmp_path):
    method = come.adapt(tiny(), "tent", lr=0.1)
    method(batches(1)[0])
    other = come.adapt(TinyClassifier(NORMS["layer"], seed=1), "tent")
    sar = come.adapt(tiny(), "sar")
    before = method.state_dict()
    sar.save(tmp_path / "sar")
    other.save(tmp_path / "other")
    (tmp_path / "cut").write_bytes((tmp_path / "other").read_bytes()[:100])
    (tmp_path / "junk").write_bytes(b"not a state")
    from safetensors.torch import save_file

    save_file({"x": torch.zeros(1)}, tmp_path / "foreign")
    for name, message in {
        "sar": "was saved by 'sar', not by 'tent'",
        "other": "another method or another source model",
        "cut": "cannot read",
        "junk": "cannot read",
        "nowhere": "cannot read",
        "foreign": "has format None",
    }.items():
        with pytest.raises(come.StateError, match=message):
            method.load(tmp_path / name)
    for broken, message in [
        ({}, "'fingerprint' or 'count' is missing"),
        ({**before, "surprise": torch.zeros(1)}, "holds 'surprise'"),
        ({k: v for k, v in before.items() if k != "parameter.blocks.0.1.weight"}, "is missing; it must have shape"),
        ({**before, "parameter.blocks.0.1.weight": torch.zeros(3)}, r"is \(3,\); it must have shape \(8,\)"),
        ({k: v for k, v in before.items() if not k.startswith("optimizer.")}, "no momentum for parameter"),
        (
            {**before, "optimizer.blocks.0.1.bias.momentum_buffer": torch.zeros(3)},
            "momentum_buffer of 'blocks.0.1.bias'",
        ),
    ]:
        with pytest.raises(come.StateError, match=message):
            method.load_state_dict(broken)
    after = method.state_dict()
    assert all(torch.equal(after[k], v) for k, v in before.items())


def test_a_state_that_lacks_what_the_method_remembers_is_refused():
    method = come.adapt(tiny(), "sar")
    state = method.state_dict()
    del state["state.average"]
    with pytest.raises(come.StateError, match="the state lacks average"):
        method.load_state_dict(state)


def test_save_into_a_missing_folder(tmp_path):
    with pytest.raises(come.StateError, match="choose a folder that exists"):
        come.adapt(tiny(), "tent").save(tmp_path / "no" / "state")
    assert list(tmp_path.iterdir()) == []


def test_a_failed_save_leaves_the_old_file(tmp_path, monkeypatch):
    method = come.adapt(tiny(), "tent", lr=0.1)
    path = tmp_path / "state"
    method.save(path)
    before = path.read_bytes()

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(type(path), "write_bytes", full)
    with pytest.raises(come.StateError, match="No space"):
        method.save(path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["state"]


def test_state_dict_is_a_copy():
    method = come.adapt(tiny(), "tent", lr=0.1)
    state = method.state_dict()
    method(batches(1)[0])
    assert not torch.equal(state["parameter.blocks.0.1.weight"], method.parameters["blocks.0.1.weight"])
