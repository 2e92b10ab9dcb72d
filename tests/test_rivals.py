"""NEO, AdaDEM and ASR beyond their recordings: what is ours, and what they share with the other methods."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
import torch

import come
from come.methods.adadem import remembered, reward
from come.testing import CLASSES, NORMS, TinyClassifier, batches, check_invariance, check_method

RIVALS = ("neo", "adadem", "asr")


def tiny(norm="layer"):
    return TinyClassifier(NORMS[norm])


@pytest.fixture
def bias():
    return tiny().head.bias.detach()


# ---- all three ----


@pytest.mark.parametrize("objective", ["em", "invariant"])
@pytest.mark.parametrize("method", RIVALS)
def test_a_constant_in_the_head_and_the_order_of_classes_do_not_matter(method, objective):
    check_invariance(lambda model: come.adapt(model, method, objective=objective, guard=False))


@pytest.mark.parametrize("guard", [True, False])
@pytest.mark.parametrize("norm", ["layer", "batch"])
@pytest.mark.parametrize("method", RIVALS)
def test_streams_of_a_fleet_are_streams_of_their_own(method, norm, guard):
    model, data = tiny(norm), batches(6)
    fleet = come.Fleet(model, method, streams=2, lr=1e-2, guard=guard)
    alone = [come.adapt(model, method, lr=1e-2, guard=guard) for _ in range(2)]
    for one, other in zip(data[::2], data[1::2], strict=True):
        both = fleet(torch.cat([one, other]), ["0"] * len(one) + ["1"] * len(other))
        expected = torch.cat([adapter(x) for adapter, x in zip(alone, (one, other), strict=True)])
        torch.testing.assert_close(both, expected, rtol=1e-4, atol=1e-4)
    fleet.close()


@pytest.mark.parametrize(
    ("method", "name", "values"),
    [("neo", "prior", (0.0, 30.0)), ("adadem", "rate", (0.1, 0.9)), ("asr", "slope", (0.0, 20.0))],
)
def test_hyperparameters_by_stream(method, name, values):
    model, data = tiny(), batches(4)
    fleet = come.Fleet(model, method, lr=1e-1, guard=False)
    for stream, value in zip("01", values, strict=True):
        fleet.open(stream, **{name: value})
    alone = [come.adapt(model, method, lr=1e-1, guard=False, **{name: value}) for value in values]
    for x in data:
        both = fleet(torch.cat([x, x]), ["0"] * len(x) + ["1"] * len(x))
        torch.testing.assert_close(both, torch.cat([adapter(x) for adapter in alone]), rtol=1e-4, atol=1e-4)
    fleet.close()


@pytest.mark.parametrize("method", RIVALS)
def test_compiled(method, compiler):
    model = tiny()
    plain, fast = (come.adapt(model, method, lr=1e-2, compile=compiled) for compiled in (False, True))
    for x in batches(3):
        torch.testing.assert_close(fast(x), plain(x), rtol=1e-4, atol=1e-4)


class Restricted(TinyClassifier):
    """Rules out a class."""

    def forward(self, x):
        return super().forward(x).index_fill(1, torch.tensor([2]), -math.inf)


@pytest.mark.parametrize("method", ["adadem", "asr"])
def test_a_class_that_is_ruled_out(method):
    adapter = come.adapt(Restricted(NORMS["layer"]), method, lr=1e-2, guard=False)
    for x in batches(3):
        logits = adapter(x)
        assert logits[:, 2].isneginf().all()
        assert logits[:, [0, 1, 3, 4]].isfinite().all()
    assert all(value.isfinite().all() for value in adapter.adapted_parameters.values())
    assert all(value.isfinite().all() for value in adapter.state.values())


# ---- NEO ----


def test_published_neo_answers_a_first_sample_with_the_bias(bias):
    """Why there is a prior: then it is mostly the model's own answer."""
    model, x = tiny(), batches(1, size=1)[0]
    torch.testing.assert_close(come.adapt(model, "neo", prior=0, guard=False)(x)[0], bias)
    source = model.eval()(x)[0]
    torch.testing.assert_close(come.adapt(model, "neo", guard=False)(x)[0], source - (source - bias) / 17)


def test_neo_weighs_samples_not_batches(bias):
    model, x = tiny(), torch.cat(batches(3))
    by_parts, whole = (come.adapt(model, "neo", guard=False) for _ in range(2))
    for part in x.split((1, 20, 3, 12)):
        by_parts.step(part)
    whole.step(x)
    torch.testing.assert_close(by_parts.state["shift"], whole.state["shift"])
    expected = (model.eval()(x) - bias).sum(dim=0) / (len(x) + 16)
    torch.testing.assert_close(whole.state["shift"], expected)


def test_continual_neo_forgets():
    adapter = come.adapt(tiny(), "neo", rate=0.5, guard=False)
    first, second = batches(2)
    adapter(first)
    for _ in range(30):
        adapter(second)
    torch.testing.assert_close(adapter.predict(second).mean(dim=0), tiny().head.bias.detach())


def test_an_exported_neo_differs_in_the_bias_of_the_head_alone():
    model = tiny()
    adapter = come.adapt(model, "neo", guard=False)
    for x in batches(3):
        adapter(x)
    exported, before = adapter.export().state_dict(), model.state_dict()
    assert [name for name in before if not torch.equal(before[name], exported[name])] == ["head.bias"]


def test_neo_without_a_bias():
    model = tiny()
    model.head.bias = None
    adapter = come.adapt(model, "neo", prior=0, guard=False)
    torch.testing.assert_close(adapter(batches(1)[0]).mean(dim=0), torch.zeros(CLASSES))
    x = batches(2)[1]
    torch.testing.assert_close(adapter.export()(x), adapter.predict(x))


def test_neo_needs_the_head_of_the_logits():
    class Doubled(TinyClassifier):
        def forward(self, x):
            return 2 * super().forward(x)

    with pytest.raises(come.ModelError, match="'head' of Doubled does not give its logits"):
        come.adapt(Doubled(NORMS["layer"]), "neo")(batches(1)[0])


# ---- AdaDEM ----


def test_the_norm_variant_is_the_gradient_of_the_entropy_over_delta():
    z = (torch.randn(6, 5, generator=torch.Generator().manual_seed(0)) * 3).requires_grad_()
    entropy = come.Softmax().entropy(z)
    plain = torch.autograd.grad(entropy.sum(), z)[0]
    mass = come.Softmax().log_mass(z)
    p = mass.detach().exp()
    loss = reward(mass, p)
    assert not loss.any()
    delta = (p * (z - (p * z).sum(dim=1, keepdim=True) + 1)).abs().sum(dim=1, keepdim=True)
    assert (delta >= 1 - 1e-6).all()
    torch.testing.assert_close(torch.autograd.grad(loss.sum(), z)[0], plain / delta.detach())


def test_only_classes_that_are_predicted_are_remembered():
    p = torch.softmax(torch.randn(4, 3, generator=torch.Generator().manual_seed(0)), dim=1)
    label, valid = torch.tensor([2, 2, 0, 0]), torch.tensor([True, True, True, False])
    new = remembered(torch.full((3, 3), 1 / 3), p, label, valid, 0.25)
    torch.testing.assert_close(new[2], 0.75 / 3 + 0.25 * p[:2].mean(dim=0))
    torch.testing.assert_close(new[0], 0.75 / 3 + 0.25 * p[2])
    assert torch.equal(new[1], torch.full((3,), 1 / 3))


@pytest.mark.parametrize("variant", ["adadem", "mec", "norm"])
def test_variants_of_adadem(variant):
    checks = ["finite", "reset_replays_identically", "resume_is_exact", "does_what_it_declares", "half_precision"]
    check_method(lambda model: come.adapt(model, "adadem", variant=variant, lr=1e-2), norms=["layer"], checks=checks)


# ---- ASR ----


def test_asr_without_a_reset_and_a_penalty_is_eta():
    model = tiny()
    optimizer = come.optim.sgd(nesterov=True)
    eta = come.adapt(model, "eata", beta=0, lr=0.1, optimizer=optimizer)
    asr = come.adapt(model, "asr", lr=0.1, start=1e-9, follow=0.0)  # the level stays far below
    for x in batches(5):
        assert torch.equal(asr(x), eta(x))
    assert int(asr.state["resets"]) == 0


def test_asr_resets_the_later_tensors():
    adapter = come.adapt(tiny(), "asr", lr=0.1, objective="em", margin=0.9, start=1e6, keep=0.5, slope=0.0, guard=False)
    source = adapter.source_parameters
    adapter(batches(1)[0])
    back = [torch.equal(value, source[name]) for name, value in adapter.adapted_parameters.items()]
    half = math.ceil(len(back) / 2)
    assert not any(back[:half])
    assert all(back[half:])
    assert int(adapter.state["resets"]) == 1
    assert not adapter.state["averaged"]
    adapter.reset()
    assert all(torch.equal(value, source[name]) for name, value in adapter.adapted_parameters.items())


def test_the_penalty_is_bounded():
    """Published, this stream diverges."""

    def far(pull):
        adapter = come.adapt(
            tiny(),
            "asr",
            objective="em",
            lr=0.5,
            margin=0.9,
            start=0.8,
            slope=0.0,
            anchoring=1e6,
            pull=pull,
            guard=False,
        )
        for x in batches(40):
            adapter(x)
        source = adapter.source_parameters
        return max((value - source[name]).abs().max() for name, value in adapter.adapted_parameters.items())

    assert far(1.0) < 100
    assert not far(math.inf) < 1e6


@pytest.mark.parametrize(
    ("method", "arguments", "words"),
    [
        ("neo", {"prior": -1}, "prior must be a number of samples >= 0, got -1"),
        ("neo", {"rate": 0.0}, r"rate must be in \(0, 1\], or None for all samples alike, got 0\.0"),
        ("adadem", {"variant": "dem"}, "variant must be one of adadem, mec, norm, got 'dem'"),
        ("adadem", {"rate": 2.0}, r"rate must be in \(0, 1\], got 2\.0"),
        ("asr", {"start": 0.0}, r"start must be a positive share of K, got 0\.0"),
        ("asr", {"keep": 1.5}, r"keep must be in \[0, 1\], got 1\.5"),
        ("asr", {"pull": 0}, "pull must be a positive share, or math.inf for no limit, got 0"),
    ],
)
def test_arguments_out_of_range_are_named(method, arguments, words):
    with pytest.raises(come.ConfigError, match=words):
        come.adapt(tiny(), method, **arguments)


@pytest.mark.slow
def test_the_benchmark_of_compositions_runs(capsys):
    sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
    import rivals

    sys.path.pop(0)
    rivals.long_stream(batches=3, every=1, lr=1e-3)
    said = capsys.readouterr().out.splitlines()
    assert [line.split(",")[0].split()[0] for line in said][-1] == "steady"
    assert all("resets" in line for line in said)
