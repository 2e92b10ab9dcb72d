"""What each method promises beyond the contract."""

from __future__ import annotations

import math

import pytest
import torch

import come
from come.testing import CLASSES, NORMS, TinyClassifier, batches

LN_K = math.log(CLASSES)


def tiny(norm="layer"):
    return TinyClassifier(NORMS[norm])


def params(method):
    return {k: p.detach().clone() for k, p in method.parameters.items()}


def test_source_is_the_model_and_norm_uses_the_batch():
    model = tiny("batch").eval()
    x = batches(1)[0]
    expected = model(x).detach()
    with come.adapt(model, "source") as method:
        assert torch.equal(method(x), expected)
    with come.adapt(model, "norm") as method:
        assert not torch.allclose(method(x), expected, atol=1e-3)
    plain = tiny("layer").eval()
    with come.adapt(plain, "norm") as method:
        assert torch.equal(method(x), plain(x))


def test_tent_keeps_the_most_certain():
    step = come.adapt(tiny(), "tent", keep=0.25).step(batches(1)[0])
    assert int(step.used.sum()) == 3
    assert step.loss[step.used].max() <= step.loss[~step.used].min()
    assert int(come.adapt(tiny(), "tent", keep=0.01).step(batches(1)[0]).used.sum()) == 1


def test_tent_with_keep_is_tent_on_those_samples():
    x = batches(1)[0]
    filtered = come.adapt(tiny(), "tent", "em", keep=0.5, lr=0.1)
    used = filtered.step(x).used
    plain = come.adapt(tiny(), "tent", "em", lr=0.1)
    plain.step(x[used])
    for name, p in params(plain).items():
        torch.testing.assert_close(params(filtered)[name], p)


def test_tent_lowers_its_objective():
    for objective in come.objectives.names():
        method = come.adapt(tiny(), "tent", objective, lr=0.02, steps=1)
        x = batches(1)[0]
        losses = [method.step(x).loss.mean().item() for _ in range(10)]
        assert losses[-1] < losses[0]


def test_episodic_forgets():
    x, y = batches(2)
    method = come.adapt(tiny(), "tent", lr=0.1, episodic=True)
    method(x)
    alone = come.adapt(tiny(), "tent", lr=0.1)
    assert torch.equal(method(y), alone(y))


def test_steps_adapt_several_times():
    x = batches(1)[0]
    twice = come.adapt(tiny(), "tent", lr=0.1, steps=2)
    logits = twice(x)
    once = come.adapt(tiny(), "tent", lr=0.1)
    once(x)
    assert torch.equal(logits, once(x))
    assert (twice.count, once.count) == (1, 2)


def test_eata_filters():
    x = batches(1)[0]
    method = come.adapt(tiny(), "eata", "em", beta=0, margin=0.5, redundancy=2.0, lr=0.1)
    step = method.step(x)
    assert torch.equal(step.used, step.loss < 0.5 * LN_K)
    assert 0 < step.used.sum() < len(x)
    strict = come.adapt(tiny(), "eata", "em", beta=0, margin=2.0, redundancy=1e-9, lr=0.1)
    assert strict.step(x).used.all()  # no average yet: nothing is redundant
    assert not strict.step(x).used.any()  # now everything is


def test_eata_is_held_by_what_matters_to_the_source():
    source = batches(2, seed=9)
    free = come.adapt(tiny(), "eata", "em", beta=0, margin=2.0, redundancy=2.0, lr=1e-3)
    held = come.adapt(tiny(), "eata", "em", beta=50, margin=2.0, redundancy=2.0, lr=1e-3, source=iter(source))
    start = params(free)
    for x in batches(5):
        free(x)
        held(x)
    distance = lambda m: sum((params(m)[k] - start[k]).square().sum() for k in start)  # noqa: E731
    assert distance(held) < distance(free)


def test_eata_reads_the_source_once():
    reads = []

    def source():
        for x in batches(2, seed=9):
            reads.append(1)
            yield x

    method = come.adapt(tiny(), "eata", source=source(), margin=2.0)
    fisher = {k: v.clone() for k, v in method.state.items() if k.startswith("fisher.")}
    assert len(fisher) == len(method.parameters)
    method(batches(1)[0])
    method.reset()
    assert len(reads) == 2
    assert all(torch.equal(method.state[k], v) for k, v in fisher.items())
    assert not method.state["averaged"]


@pytest.mark.parametrize("method", ["eata", "sar"])
@pytest.mark.parametrize("objective", come.objectives.names())
def test_no_reliable_sample_moves_nothing(method, objective):
    arguments = {"beta": 0} if method == "eata" else {}
    adapter = come.adapt(tiny(), method, objective, margin=1e-6, lr=0.1, **arguments)
    before = adapter.state_dict()
    step = adapter.step(batches(1)[0])
    assert not step.used.any()
    after = adapter.state_dict()
    assert [
        k for k in before if k.startswith(("parameter", "optimizer")) and not torch.equal(before[k], after[k])
    ] == []


def test_sar_leaves_the_last_blocks_alone():
    assert {k.split(".")[1] for k in come.adapt(tiny(), "sar").parameters} == {"0", "1", "2"}


def test_sar_recovers():
    method = come.adapt(tiny(), "sar", "em", margin=2.0, recover_below=100.0, lr=0.1)
    start = params(method)
    method(batches(1)[0])
    assert int(method.state["recoveries"]) == 1
    assert method.state["average"].isnan()
    assert all(torch.equal(params(method)[k], v) for k, v in start.items())
    momentum = [v for k, v in method.state_dict().items() if k.startswith("optimizer.")]
    assert momentum
    assert all(not v.any() for v in momentum)


def test_sar_with_quirks_keeps_average_and_momentum_at_recovery():
    method = come.adapt(tiny(), "sar", "em", margin=2.0, recover_below=100.0, lr=0.1, quirks=True)
    method(batches(1)[0])
    assert int(method.state["recoveries"]) == 1
    assert method.state["average"].isfinite()
    assert any(v.any() for k, v in method.state_dict().items() if k.startswith("optimizer."))


def test_sar_never_recovers_at_zero():
    method = come.adapt(tiny(), "sar", "em", margin=2.0, recover_below=0.0, lr=0.1)
    for x in batches(5):
        method(x)
    assert int(method.state["recoveries"]) == 0


def test_sar_goes_back_when_its_second_forward_fails():
    model = tiny()
    method = come.adapt(model, "sar", "em", margin=2.0, lr=0.1)
    start = params(method)
    calls = []

    def fail(*_):
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("out of memory")

    model.register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        method(batches(1)[0])
    assert all(torch.equal(params(method)[k], v) for k, v in start.items())


def test_come_holds_the_norm_where_em_grows_it():
    """The point of the paper in small: on one batch, again and again, EM inflates the logits, COME does not."""
    growth = {}
    for objective in ("em", "come"):
        method = come.adapt(tiny(), "tent", objective, lr=0.05)
        x = batches(1)[0]
        norms = [method(x).norm(dim=1).mean().item() for _ in range(30)]
        growth[objective] = norms[-1] / norms[0]
    assert growth["come"] < growth["em"]


def test_your_own_method_registers_by_name():
    class Mine(come.methods.Tent):
        name = "mine"

    come.methods.register(Mine)
    try:
        assert isinstance(come.adapt(tiny(), "mine"), Mine)
        with pytest.raises(come.ConfigError, match="'mine' is taken"):
            come.methods.register(type("Other", (come.methods.Tent,), {"name": "mine"}))
    finally:
        come.methods._registry.remove("mine")
    with pytest.raises(come.ConfigError, match="not a subclass"):
        come.methods.register(torch.nn.Linear)
