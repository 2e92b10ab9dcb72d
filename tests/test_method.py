"""The life of an adapter: what it refuses, what it leaves alone, how it ends."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch
from torch import nn

import come
from come import testing
from come.methods import EATA, SAR, Tent
from come.testing import NORMS, TinyClassifier, batches


def tiny(norm="layer"):
    return TinyClassifier(NORMS[norm])


def rms_prop(parameters, lr):
    return torch.optim.RMSprop(parameters, lr=lr)


def assert_same(one, other):
    torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def assert_has(model, before):
    assert_same(dict(model.state_dict()), before)


# ---- what bad input gets ----


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda m: come.adapt(m, "tnet"), "no method 'tnet'; did you mean 'tent'"),
        (lambda m: come.adapt(m, 7), r"method must be a name \(.*\) or a subclass of come\.Method, got 7"),
        (lambda m: come.adapt(m, "tent", objective="cmoe"), "no objective 'cmoe'; did you mean 'come'"),
        (lambda m: come.adapt(m, "tent", learning_rate=1), "tent has no hyperparameter 'learning_rate'"),
        (lambda m: come.adapt(m, "sar", roh=0.1), "sar has no hyperparameter 'roh'; did you mean 'rho'"),
        (lambda m: come.adapt(m, "tent:lr"), "'lr' in 'tent:lr' is not KEY=VALUE; write e.g. tent:lr=1"),
        (
            lambda m: come.adapt(m, "tent:lr=1", lr=1),
            "lr must be given once, got it twice: in 'tent' and as an argument",
        ),
        (lambda m: come.adapt(m, Tent(), lr=1), "lr cannot be combined with a Method instance; pass it to Tent"),
        (lambda m: come.adapt(m, "tent", lr=-1e-3), "lr must be a positive number, .*, got -0.001"),
        (lambda m: come.adapt(m, "tent", lr=float("nan")), "lr must be a positive number, .*, got nan"),
        (lambda m: come.adapt(m, "tent", steps=0), "steps must be an integer >= 1, got 0"),
        (lambda m: come.adapt(m, "tent", keep=0), r"keep must be in \(0, 1\], got 0"),
        (lambda m: come.adapt(m, "tent", optimizer="sdg"), "no optimizer 'sdg'; did you mean 'sgd'"),
        (lambda m: come.adapt(m, "tent", optimizer=3), "optimizer must be 'sgd', 'adam' or a function .*, got 3"),
        (
            lambda m: come.adapt(m, "tent", optimizer=come.optim.sgd(momentum=1.0)),
            r"momentum must be in \[0, 1\), got 1\.0",
        ),
        (
            lambda m: come.adapt(m, "tent", optimizer=come.optim.sgd(momentum=0.0, nesterov=True)),
            r"momentum must be above 0 with nesterov=True, got 0\.0",
        ),
        (lambda m: come.adapt(m, "eata"), "eata needs source batches for its Fisher matrix"),
        (lambda m: come.adapt(m, "eata", source=[]), "got no batch"),
        (
            lambda m: come.adapt(m, "eata", source=[(batches(1)[0], torch.zeros(12))]),
            "pass source=.x for x, _ in loader",
        ),
        (
            lambda m: come.adapt(m, "eata", source=[torch.zeros(2, 3, 8, 8, dtype=torch.uint8)]),
            "must be floating point, got torch.uint8",
        ),
        (lambda m: come.adapt(m, "eata", beta=-1), "beta must be >= 0, got -1"),
        (lambda m: come.adapt(m, "eata", margin=0), "margin must be a positive share of ln K, got 0"),
        (lambda m: come.adapt(m, "sar", rho=-1), "rho must be >= 0, got -1"),
        (lambda m: come.adapt(m, "sar", recover_below=-1), "recover_below must be >= 0 .*, got -1"),
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
    assert_has(model, before)
    come.adapt(model, "tent")  # and it can be adapted


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Linear(4, 3), "tent has nothing to adapt: .* finds no parameter in Linear. It needs normalization layers"),
        (nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3, elementwise_affine=False)), "nothing to adapt"),
        (lambda x: x, "the model must be a torch.nn.Module, got function"),
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
        (lambda z: (z, z), r"must return a tensor \(B, K\) .*, got tuple"),
        (lambda z: {"scores": z}, r"must return a tensor \(B, K\) .*, got dict"),
        (lambda z: z[:, :1], r"shape \(12, K\) with K >= 2 for a batch of 12, got .* shape \(12, 1\)"),
        (lambda z: z[:, 0], r"for a batch of 12, got .* shape \(12,\)"),
        (lambda z: z[:5], r"for a batch of 12, got .* shape \(5, 5\)"),
        (lambda z: z.argmax(1, keepdim=True).expand(12, 5), "must return floating-point logits .*, got torch.int64"),
    ],
)
def test_outputs_that_are_no_logits(make, message):
    model = Returns(make)
    adapter = come.adapt(model, "tent")
    before = adapter.state_dict()
    with pytest.raises(come.InputError, match=message):
        adapter(batches(1)[0])
    assert_same(adapter.state_dict(), before)


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.zeros(2, 3, 8, 8, dtype=torch.uint8), "the input must be floating point, got torch.uint8"),
        (torch.zeros(0, 3, 8, 8), "the batch is empty"),
        (torch.zeros(8), r"at least 2 dimensions, got shape \(8,\)"),
        ([1, 2], "no tensor with a batch dimension, got int, int"),
        ({"x": "text"}, "no tensor with a batch dimension, got str"),
        ("text", "the input is a str; pass a tensor"),
        ((), "no tensor with a batch dimension, got nothing"),
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


# ---- ways to say it ----


@pytest.mark.parametrize(
    "make",
    [
        lambda m: come.adapt(m, "tent", objective="em", lr=0.1, keep=0.5),
        lambda m: come.adapt(m, "tent:lr=0.1:keep=0.5", objective="em"),
        lambda m: come.adapt(m, "tent:lr=0.1", objective=come.Softmax(), keep=0.5),
        lambda m: come.adapt(m, Tent, objective="em", lr=0.1, keep=0.5),
        lambda m: come.adapt(m, Tent(objective="em", lr=0.1, keep=0.5)),
    ],
)
def test_ways_to_name_a_method(make):
    adapter = make(tiny())
    assert type(adapter.method) is Tent
    assert adapter.method.objective == come.Softmax()
    assert (adapter.method.lr, adapter.method.keep) == (0.1, 0.5)


def test_one_configuration_serves_many_models():
    method = EATA(lr=0.1, source=batches(2, seed=9))
    one, two = come.adapt(tiny(), method), come.adapt(tiny("batch"), method)
    one(batches(1)[0])
    assert (one.count, two.count) == (1, 0)
    assert one.method is not method
    assert method.source is not None  # what an adapter has used up is still there for the next


class Masked(nn.Module):
    """Takes images and a mask of the channels."""

    def __init__(self):
        super().__init__()
        self.inner = tiny()

    def forward(self, pixel_values, mask=None):
        return self.inner(pixel_values if mask is None else pixel_values * mask)


def test_the_arguments_are_those_of_the_model():
    x = batches(1)[0]
    mask = torch.tensor([1.0, 0.0, 1.0]).view(1, 3, 1, 1).expand(12, 3, 1, 1)
    model, named = Masked(), {"per_sample": ("pixel_values", "mask")}
    expected, masked = (come.adapt(model, "tent", **named).step(*given).logits for given in ((x,), (x, mask)))
    assert not torch.equal(expected, masked)
    for args, kwargs in [((x,), {}), ((), {"pixel_values": x}), (({"pixel_values": x},), {}), (((x,),), {})]:
        assert torch.equal(come.adapt(model, "tent")(*args, **kwargs), expected)
        assert torch.equal(come.adapt(model, "tent").predict(*args, **kwargs), expected)
    for args, kwargs in [((x, mask), {}), ((x,), {"mask": mask}), (((x, mask),), {}), (([x, mask],), {})]:
        assert torch.equal(come.adapt(model, "tent", **named)(*args, **kwargs), masked)


# ---- how it ends ----


@pytest.mark.parametrize("wrap", [lambda model: model, nn.Sequential], ids=["itself", "a wrapper"])
def test_adapters_of_one_model_are_independent(wrap):
    model = tiny("batch")
    alone = [come.adapt(tiny("batch"), name, lr=0.1) for name in ("tent", "sar")]
    expected = [[adapter(x) for x in batches()] for adapter in alone]
    tent, sar = come.adapt(model, "tent", lr=0.1), come.adapt(wrap(model), "sar", lr=0.1)
    for i, x in enumerate(batches()):
        assert torch.equal(tent(x), expected[0][i])
        assert torch.equal(sar(x), expected[1][i])
    tent.close()
    assert torch.equal(sar.predict(x), alone[1].predict(x))


def test_a_closed_adapter_refuses_everything_that_would_change_it(tmp_path):
    adapter = come.adapt(tiny(), "tent", lr=0.1)
    adapter(batches(1)[0])
    adapter.save(tmp_path / "state")
    state = adapter.state_dict()
    adapter.close()
    adapter.close()
    for call in (
        lambda: adapter(batches(1)[0]),
        lambda: adapter.step(batches(1)[0]),
        lambda: adapter.predict(batches(1)[0]),
        adapter.reset,
        lambda: adapter.load(tmp_path / "state"),
        lambda: adapter.load_state_dict(state),
    ):
        with pytest.raises(come.ClosedError, match=r"this tent adapter is closed; adapt\(\) the model again"):
            call()
    assert_same(adapter.state_dict(), state)  # what it had learned can still be saved


def test_nothing_holds_the_model_of_an_adapter_that_is_gone():
    model = tiny()
    come.adapt(model, "tent", lr=0.1)(batches(1)[0])
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None


def test_keep_writes_the_adapted_weights_into_the_model():
    model = tiny().train()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    adapter = come.adapt(model, "tent", lr=0.1)
    adapter(batches(1)[0])
    adapted = adapter.adapted_parameters
    assert_has(model, before)
    adapter.close(keep=True)
    assert model.training
    assert all(p.requires_grad for p in model.parameters())
    assert_has(model, before | adapted)
    assert any(not torch.equal(value, before[name]) for name, value in adapted.items())


def test_leaving_a_block_keeps_nothing():
    model = tiny()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with come.adapt(model, "tent", lr=0.1) as adapter:
        adapter(batches(1)[0])
    assert_has(model, before)
    with pytest.raises(come.ClosedError):
        adapter(batches(1)[0])


def overwrite(model):
    with torch.no_grad():
        model.blocks[1][1].weight.mul_(2)


def exchange(model):
    model.blocks[1][1] = NORMS["layer"](8)


def exchange_parameter(model):
    model.blocks[1][1].weight = nn.Parameter(torch.ones(8))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (overwrite, r"'blocks\.1\.1\.weight' of TinyClassifier was overwritten after adapt\(\)"),
        (exchange, r"'blocks\.1\.1' of TinyClassifier was replaced after adapt\(\)"),
        (exchange_parameter, r"'blocks\.1\.1\.weight' of TinyClassifier was replaced after adapt\(\)"),
    ],
)
def test_weights_that_were_changed_behind_the_adapter_stay_and_stay_refused(change, message):
    model = tiny()
    adapter = come.adapt(model, "tent", lr=0.1)
    adapter(batches(1)[0])
    change(model)
    after = {k: v.clone() for k, v in model.state_dict().items()}
    for call in (
        lambda: adapter(batches(1)[0]),
        lambda: adapter.predict(batches(1)[0]),
        lambda: adapter.close(keep=True),
    ):
        with pytest.raises(come.ModelError, match=message):
            call()
    assert_has(model, after)
    come.adapt(model, "tent")(batches(1)[0])


def test_a_model_that_was_cast_stays_cast_when_the_adapter_ends():
    model = tiny("batch")
    adapter = come.adapt(model, "tent", lr=0.1)
    adapter(batches(1)[0])
    model.double()
    adapter.close(keep=True)
    assert {value.dtype for value in model.state_dict().values()} == {torch.float64, torch.int64}
    assert model(batches(1)[0].double()).dtype == torch.float64


def test_the_views_of_the_weights_are_copies():
    adapter = come.adapt(tiny(), "tent", lr=0.1)
    for view in (adapter.adapted_parameters, adapter.source_parameters):
        for value in view.values():
            value.zero_()
    assert all(torch.equal(v, tiny().get_parameter(k)) for k, v in adapter.adapted_parameters.items())
    assert_same(adapter.adapted_parameters, adapter.source_parameters)


# ---- what is left alone ----


def test_gradients_of_the_user_survive():
    model = tiny()
    model(batches(1)[0]).sum().backward()
    before = {k: p.grad.clone() for k, p in model.named_parameters()}
    with come.adapt(model, "tent") as adapter:
        adapter(batches(1)[0])
    assert all(torch.equal(p.grad, before[k]) for k, p in model.named_parameters())


def test_running_statistics_are_there_between_steps():
    model = tiny("batch")
    keys = list(model.state_dict())
    layer = model.blocks[0][1]
    mean, counted = layer.running_mean.clone(), int(layer.num_batches_tracked)
    adapter = come.adapt(model, "tent")
    adapter(batches(1)[0])
    assert list(model.state_dict()) == keys  # a checkpoint taken now is complete
    assert torch.equal(layer.running_mean, mean)
    assert int(layer.num_batches_tracked) == counted


def test_running_statistics_are_there_after_a_failed_step():
    model = tiny("batch")
    adapter = come.adapt(model, "tent")
    with pytest.raises(RuntimeError):
        adapter(torch.zeros(2, 4, 8, 8))
    assert model.blocks[0][1].running_mean is not None


def test_other_models_in_the_process_are_untouched():
    other = tiny("batch").eval()
    x = batches(1)[0]
    before = other(x)
    with come.adapt(tiny("batch"), "tent", lr=0.1) as adapter:
        adapter(x)
        assert torch.equal(other(x), before)


# ---- surroundings ----


def test_nothing_stale_under_one_long_autocast():
    """autocast caches casts of the weights until it ends; a cached one must not outlive a step."""
    select = come.select.everything()
    make = lambda: come.adapt(tiny(), "tent", objective="em", lr=0.05, select=select)  # noqa: E731
    adapter = make()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = [adapter(x) for x in batches()]
    adapter = make()
    outside = []
    for x in batches():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            outside.append(adapter(x))
    assert all(torch.equal(a, b) for a, b in zip(inside, outside, strict=True))


@pytest.mark.parametrize("statistics", ["batch", "mixed"])
@pytest.mark.parametrize("sizes", [(1, 3), (1, 3, 1, 1)])
def test_batch_of_one_without_batch_statistics(sizes, statistics):
    """One value per channel has no variance: the layer falls back to its running statistics."""
    layer = nn.BatchNorm1d(3) if len(sizes) == 2 else nn.BatchNorm2d(3)
    model = nn.Sequential(layer, nn.Flatten(), nn.Linear(3, 4))
    layer.running_mean.fill_(0.5)
    x = torch.randn(sizes)
    torch.testing.assert_close(come.adapt(model, "tent", lr=0.1, statistics=statistics)(x), model.eval()(x).detach())
    bare = nn.Sequential(type(layer)(3, track_running_stats=False), nn.Flatten(), nn.Linear(3, 4))
    for guard in (False, True):
        with pytest.raises(come.InputError, match="one value per channel and has no running statistics"):
            come.adapt(bare, "tent", statistics=statistics, guard=guard)(x)


def test_statistics_of_the_batch_are_mixed_with_the_source_under_a_guard():
    x = batches(1, size=4)[0]

    def answer(**how):
        return come.adapt(tiny("batch"), "tent", **how)(x)

    assert torch.equal(answer(), answer(statistics="mixed"))
    assert torch.equal(answer(), answer(statistics="source")), "the guard has not yet found them better"
    assert not torch.equal(answer(), answer(statistics="mixed", guard=False))
    assert torch.equal(answer(guard=False), answer(guard=False, statistics="batch"))
    torch.testing.assert_close(answer(statistics="source"), tiny("batch").eval()(x).detach())
    layer, first = nn.BatchNorm2d(3), x.mean(dim=(0, 2, 3))
    model = nn.Sequential(layer, nn.Flatten(), nn.Linear(192, 2))
    seen = []
    layer.register_forward_hook(lambda _, inputs, out: seen.append(out.mean(dim=(0, 2, 3))))
    share = 4 / (4 + 16)
    scale = 1 / (1 - share + share * x.var(dim=(0, 2, 3), correction=0) + layer.eps).sqrt()
    for guard, where in ((False, 0), (True, -1)):  # with a guard: what the source is asked under last
        seen.clear()
        come.adapt(model, "norm", statistics="mixed", guard=guard)(x)
        torch.testing.assert_close(seen[where], (1 - share) * first * scale)


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
    adapter = come.adapt(model, "tent", objective="em", lr=0.1)
    assert adapter(x).isfinite().all()
    source = adapter.source_parameters
    assert any(not torch.equal(p, source[name]) for name, p in adapter.adapted_parameters.items())
    assert all(torch.equal(p, b) for p, b in zip(layer.parameters(), before, strict=True))


def test_text_classifier_with_tokens():
    t = pytest.importorskip("transformers")

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
            adapter.reset()
            assert torch.equal(first.logits, adapter(**batch))
            assert first.logits.shape == (6, 4)


def test_vision_transformer_of_transformers():
    t = pytest.importorskip("transformers")

    config = t.ViTConfig(
        hidden_size=16, num_hidden_layers=4, num_attention_heads=2, intermediate_size=16, image_size=16, patch_size=8
    )
    model = t.ViTForImageClassification(config)
    with come.adapt(model, "sar", lr=0.1) as adapter:
        assert adapter(pixel_values=torch.randn(5, 3, 16, 16)).shape == (5, 2)
        assert adapter(torch.randn(5, 3, 16, 16)).shape == (5, 2)


# ---- learning rate and repr ----


def test_paper_learning_rate_without_batch_norm():
    adapter = come.adapt(tiny("layer"), "tent")
    assert adapter.learning_rate(64) == pytest.approx(1e-3)
    assert adapter.learning_rate(16) == pytest.approx(2.5e-4)
    assert "lr=0.001 x batch/64 (the default for models without BatchNorm)" in repr(adapter)


def test_paper_learning_rate_with_batch_norm():
    adapter = come.adapt(tiny("batch"), "sar")
    assert adapter.learning_rate(64) == adapter.learning_rate(32) == pytest.approx(2.5e-4)
    assert adapter.learning_rate(8) == pytest.approx(2.5e-4 / 64 * 8 * 2)
    assert "lr=0.00025 (the default for BatchNorm models), BatchNorm statistics=mixed" in repr(adapter)
    assert "BatchNorm statistics=batch" in repr(come.adapt(tiny("batch"), "sar", guard=False))


def test_repr_names_the_objective_and_the_rate():
    assert "objective=Softmax(" in repr(come.adapt(tiny(), "tent", objective="em", lr=0.5))
    assert "lr=0.5, adapts 64 values in 8 tensors" in repr(come.adapt(tiny(), "tent", lr=0.5))
    assert "Source(TinyClassifier" in repr(come.adapt(tiny(), "source"))


def test_the_rate_is_used():
    """One step of plain gradient descent moves by exactly lr times the gradient."""
    model = tiny().eval()
    x = batches(1)[0]
    adapter = come.adapt(model, Tent(lr=0.25, optimizer=come.optim.sgd(momentum=0.0)))
    adapted = [model.get_parameter(name) for name in adapter.adapted_parameters]
    gradient = torch.autograd.grad(adapter.method.objective.entropy(model(x)).mean(), adapted)
    adapter(x)
    for p, moved, g in zip(adapted, adapter.adapted_parameters.values(), gradient, strict=True):
        torch.testing.assert_close(moved, p.detach() - 0.25 * g)


def test_hyperparameters_are_the_constructor():
    assert list(SAR.hyperparameters())[:4] == ["margin", "rho", "recover_below", "quirks"]
    assert SAR.hyperparameters()["rho"] == 0.05
    assert {"lr", "steps", "objective", "episodic"} <= set(Tent.hyperparameters())


# ---- optimizers ----


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("sgd", lambda ps, lr: torch.optim.SGD(ps, lr=lr, momentum=0.9)),
        (come.optim.sgd(momentum=0.0), lambda ps, lr: torch.optim.SGD(ps, lr=lr)),
        (
            come.optim.sgd(momentum=0.5, weight_decay=0.1),
            lambda ps, lr: torch.optim.SGD(ps, lr=lr, momentum=0.5, weight_decay=0.1),
        ),
        (
            come.optim.sgd(momentum=0.5, weight_decay=0.1, nesterov=True),
            lambda ps, lr: torch.optim.SGD(ps, lr=lr, momentum=0.5, weight_decay=0.1, nesterov=True),
        ),
        ("adam", lambda ps, lr: torch.optim.Adam(ps, lr=lr)),
        (
            come.optim.adam(betas=(0.5, 0.9), weight_decay=0.1),
            lambda ps, lr: torch.optim.AdamW(ps, lr=lr, betas=(0.5, 0.9), weight_decay=0.1),
        ),
    ],
)
def test_our_optimizers_are_torchs(ours, theirs):
    adapters = [come.adapt(tiny().double(), "tent", lr=0.05, optimizer=optimizer) for optimizer in (ours, theirs)]
    for x in batches(4):
        torch.testing.assert_close(*(adapter(x.double()) for adapter in adapters))
    torch.testing.assert_close(*(adapter.adapted_parameters for adapter in adapters))


@pytest.mark.parametrize("optimizer", ["sgd", come.optim.sgd(nesterov=True), "adam", rms_prop])
def test_an_optimizer_stands_still_where_no_sample_is_used(optimizer):
    model, unsure = tiny(), []
    model.head.register_forward_hook(lambda _, __, out: out * 0 if unsure else None)
    adapter = come.adapt(model, "sar", objective="em", lr=0.1, optimizer=optimizer)
    assert adapter.step(batches(1)[0]).used.any()
    before = adapter.state_dict()
    unsure.append(True)
    assert not adapter.step(batches(1)[0]).used.any()
    after = adapter.state_dict()
    for name in before:
        if name.startswith(("weights", "moment.")):
            assert torch.equal(before[name], after[name])


@pytest.mark.parametrize("optimizer", [come.optim.sgd(nesterov=True), "adam", rms_prop])
def test_other_optimizers_resume_and_reset(optimizer):
    testing.check_method(
        lambda model: come.adapt(model, Tent(lr=1e-2, optimizer=optimizer)),
        norms=["layer"],
        checks=["reset_replays_identically", "resume_is_exact", "an_error_changes_nothing", "copies_and_pickles"],
    )


def test_uncertainty_for_abstaining():
    adapter = come.adapt(tiny(), "tent", objective="come")
    logits = torch.tensor([[9.0, 0, 0, 0, 0], [-9.0, -9, -9, -9, -9]])
    assert adapter.uncertainty(logits)[0] < 0.01 < 0.99 < adapter.uncertainty(logits)[1]


# ---- state ----


def test_files_that_do_not_belong_are_refused_and_change_nothing(tmp_path):
    from safetensors.torch import save_file

    adapter = come.adapt(tiny(), "tent", lr=0.1)
    adapter(batches(1)[0])
    before = adapter.state_dict()
    adapter.save(tmp_path / "good")
    come.adapt(tiny(), "sar").save(tmp_path / "sar")
    come.adapt(TinyClassifier(NORMS["layer"], seed=1), "tent", lr=0.1).save(tmp_path / "other")
    good = bytearray((tmp_path / "good").read_bytes())
    (tmp_path / "cut").write_bytes(good[:100])
    (tmp_path / "version").write_bytes(good.replace(b'"version":"7"', b'"version":"6"'))
    good[-1] ^= 1
    (tmp_path / "flipped").write_bytes(good)
    (tmp_path / "junk").write_bytes(b"not a state")
    save_file({"x": torch.zeros(1)}, tmp_path / "foreign")
    for name, message in {
        "sar": "was saved by 'sar', not by 'tent'",
        "other": "another source model than this TinyClassifier",
        "cut": "cannot read",
        "flipped": "checksum mismatch",
        "version": "must have format version 7, got '6'",
        "junk": "cannot read",
        "nowhere": "cannot read",
        "foreign": "must have format 'come-state', got None",
    }.items():
        with pytest.raises(come.StateError, match=message):
            adapter.load(tmp_path / name)
    assert_same(adapter.state_dict(), before)
    adapter.load(tmp_path / "good")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda m: come.adapt(m, "pl", lr=0.1), "saved with method='pl', this adapter has 'tent'"),
        (lambda m: come.adapt(m, "tent", lr=0.2), "saved with lr=0.2, this adapter has 0.1"),
        (
            lambda m: come.adapt(m, "tent", lr=0.1, guard=come.Guard(policy="freeze")),
            "saved with guard=.*'policy': 'freeze'.*'policy': 'recover'",
        ),
        (lambda m: come.adapt(m.double(), "tent", lr=0.1), "another source model than this TinyClassifier"),
    ],
)
def test_states_of_another_configuration_are_refused_and_change_nothing(make, message):
    adapter = come.adapt(tiny(), "tent", lr=0.1)
    adapter(batches(1)[0])
    before = adapter.state_dict()
    with pytest.raises(come.StateError, match=message):
        adapter.load_state_dict(make(tiny()).state_dict())
    assert_same(adapter.state_dict(), before)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: {}, "not the state of an adapter: 'weights' is missing"),
        (lambda s: without(s, "fingerprint"), "'fingerprint' is missing"),
        (lambda s: {**s, "surprise": torch.zeros(1)}, "'surprise' of the state must be absent"),
        (lambda s: {**s, "weights": torch.zeros(3)}, r"'weights' of the state must be .* \(512,\), got .* \(3,\)"),
        (lambda s: {**s, "weights": s["weights"] / 0}, "'weights' of the state is not finite; use an older snapshot"),
        (lambda s: without(s, "moment.momentum"), r"'moment.momentum' of the state must be .*, got nothing"),
        (lambda s: {**s, "moment.momentum": torch.zeros(3)}, r"'moment.momentum' of the state .*, got .* \(3,\)"),
        (lambda s: {**s, "moment.momentum": s["moment.momentum"] / 0}, "'moment.momentum' of the state is not finite"),
        (lambda s: {**s, "count": torch.tensor(-1)}, "'count' of the state must be an integer >= 0, got -1"),
        (lambda s: {**s, "configuration": torch.zeros(3, dtype=torch.uint8)}, "configuration .* cannot be read"),
    ],
)
def test_damaged_states_are_refused_and_change_nothing(change, message):
    adapter = come.adapt(tiny(), "tent", lr=0.1)
    adapter(batches(1)[0])
    before = adapter.state_dict()
    with pytest.raises(come.StateError, match=message):
        adapter.load_state_dict(change(before))
    assert_same(adapter.state_dict(), before)


def without(state, name):
    return {key: value for key, value in state.items() if key != name}


@pytest.mark.parametrize("fresh", [False, True])
def test_a_state_that_lacks_what_the_method_remembers_is_refused(fresh):
    adapter = come.adapt(tiny(), "sar")
    adapter(batches(1)[0])
    state = without(adapter.state_dict(), "state.average")
    with pytest.raises(come.StateError, match=r"'state\.average' of the state must be .*, got nothing"):
        (come.adapt(tiny(), "sar") if fresh else adapter).load_state_dict(state)


def test_save_into_a_missing_folder(tmp_path):
    with pytest.raises(come.StateError, match="choose a folder that exists"):
        come.adapt(tiny(), "tent").save(tmp_path / "no" / "state")
    assert list(tmp_path.iterdir()) == []


def test_a_failed_save_leaves_the_old_file(tmp_path, monkeypatch):
    adapter = come.adapt(tiny(), "tent", lr=0.1)
    path = tmp_path / "state"
    adapter.save(path)
    before = path.read_bytes()

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(type(path), "write_bytes", full)
    with pytest.raises(come.StateError, match="No space"):
        adapter.save(path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["state"]


def test_state_dict_is_a_copy():
    adapter = come.adapt(tiny(), "sar", lr=0.1, margin=2.0)
    adapter(batches(1)[0])
    state = adapter.state_dict()
    kept = {name: value.clone() for name, value in state.items()}
    adapter(batches(1)[0])
    assert_same(state, kept)
    assert not torch.equal(state["weights"], adapter.state_dict()["weights"])
    for value in adapter.state_dict().values():
        value.zero_()
    assert adapter.state_dict()["weights"].any()


def test_an_adapter_made_during_a_step_of_another_takes_the_models_own_weights():
    """It took those that stand in their place while a step runs, and could never step."""
    model = TinyClassifier(NORMS["group"])
    inside, go, made = threading.Event(), threading.Event(), []
    first, x = come.adapt(model, "tent"), batches(1)[0]

    def wait(*_):
        inside.set()
        assert go.wait(30)

    hook = model.register_forward_hook(wait)
    step = threading.Thread(target=first.step, args=(x,))
    make = threading.Thread(target=lambda: made.append(come.adapt(model, "tent")))
    step.start()
    assert inside.wait(30)
    make.start()
    make.join(0.2)
    go.set()
    step.join()
    make.join()
    hook.remove()
    made[0].step(x)
    assert made[0].source_parameters.keys() == first.source_parameters.keys()
    for name, value in made[0].source_parameters.items():
        assert value.equal(model.get_parameter(name))
