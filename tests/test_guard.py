"""The guard, part by part: samples, signals, verdict, watch; and what an adapter does with them."""

from __future__ import annotations

import logging
import math

import pytest
import torch
from torch import nn

import come
from come import Guard
from come.guard.samples import _median_by_rank, judge, no_history
from come.guard.signals import SIGNALS, Bands, measure
from come.guard.verdict import Verdict, compare, judged, misled
from come.guard.watch import CHECKS, COUNTED, LAG, Watch
from come.inputs import Inputs
from come.testing import NORMS, TinyClassifier, batches

METHODS = come.methods.names()


def tiny(norm="layer"):
    return TinyClassifier(NORMS[norm])


def poisoned(value, where=(1, 5), seed=0):
    x = batches(1, seed=seed)[0]
    x[list(where)] = value
    return x


# ---- samples ----


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e30, -1e20])
@pytest.mark.parametrize("method", METHODS)
def test_bad_samples_are_flagged_and_the_others_answered(method, value, build):
    adapter = build(build.model(method)(NORMS["batch"]), method)
    adapter(batches(1, seed=3)[0])
    step = adapter.step(poisoned(value))
    assert step.valid.tolist() == [i not in (1, 5) for i in range(12)]
    assert (step.logits[~step.valid] == -1e4).all()
    assert step.logits.isfinite().all()
    assert step.loss is None or step.loss.isfinite().all()
    assert step.used is None or not step.used[~step.valid].any()
    assert all(v.isfinite().all() for k, v in adapter.state_dict().items() if not k.startswith("guard."))
    for x in batches(LAG):
        adapter(x)
    assert adapter.health()["invalid_samples"] == 2


@pytest.mark.parametrize("method", ["tent", "eata", "sar", "pl", "deyo", "rdumb"])
def test_the_others_drive_the_update_as_if_the_bad_ones_were_not_there(method, build):
    """On a model without BatchNorm, where samples do not see each other."""
    more = {"shuffle": lambda images, generator: images.flip(-1)} if method == "deyo" else {}
    adapter, alone = (build(tiny("layer"), method, "em", **({"lr": 0.1} | more)) for _ in range(2))
    x = poisoned(math.nan)
    adapter(x)
    alone(x[[i for i in range(12) if i not in (1, 5)]])
    for name, p in adapter.adapted_parameters.items():
        torch.testing.assert_close(p, alone.adapted_parameters[name])


@pytest.mark.parametrize("method", METHODS)
def test_a_batch_of_nothing_usable_changes_nothing(method, build):
    adapter = build(build.model(method)(NORMS["batch"]), method)
    adapter(batches(1, seed=3)[0])
    before = adapter.adapted_parameters
    step = adapter.step(torch.full((12, 3, 8, 8), math.nan))
    assert not step.valid.any()
    if method not in ("roid", "cotta", "rotta"):  # these go back to the source a little, or learn from older samples
        assert all(torch.equal(p, before[name]) for name, p in adapter.adapted_parameters.items())
    assert adapter.step(batches(1)[0]).valid.all()


def test_unusual_is_relative_to_the_last_batches():
    adapter = come.adapt(tiny(), "tent")
    for scale in (1.0, 3.0, 10.0):
        assert adapter.step(batches(1)[0] * scale).valid.all()
    x = batches(1)[0]
    x[0] *= 1e5
    assert adapter.step(x).valid.tolist() == [False] + [True] * 11


def test_the_history_forgets():
    x, history = torch.ones(3, 4), no_history(torch.device("cpu"))
    for _ in range(9):
        _, valid, history = judge(Inputs.of(x), history, 1e6)
        assert valid.all()
    valids = []
    for _ in range(9):
        _, valid, history = judge(Inputs.of(2000 * x), history, 1e6)
        valids.append(bool(valid.all()))
    assert valids == [False] * 4 + [True] * 5


def test_text_has_nothing_to_judge():
    x = Inputs.of({"input_ids": torch.ones(3, 5, dtype=torch.int64)})
    given, valid, _ = judge(x, no_history(torch.device("cpu")), 1e6)
    assert given is x
    assert valid.tolist() == [True] * 3


# ---- without a guard, and with one on a healthy stream ----


def test_without_a_guard_the_bare_method_is_there():
    adapter = come.adapt(tiny(), "tent", guard=False)
    assert adapter.guard is None
    assert adapter.step(batches(1)[0]).valid is None
    assert adapter.health() == {"steps": 1.0}


@pytest.mark.parametrize("norm", ["layer", "batch"])
@pytest.mark.parametrize("method", METHODS)
def test_a_healthy_stream_gives_the_same_numbers_with_and_without(method, norm, build):
    model = build.model(method)
    guarded, bare = (build(model(NORMS[norm]), method, statistics="batch", guard=guard) for guard in (True, False))
    for x in batches(4):
        assert torch.equal(guarded(x), bare(x))
    for name, p in guarded.adapted_parameters.items():
        assert torch.equal(p, bare.adapted_parameters[name])


# ---- collapse ----


KINDS = 8


class Plain(nn.Module):
    """A norm and a head: the bias of the norm alone can make every answer the same."""

    def __init__(self):
        super().__init__()
        self.norm, self.head = nn.LayerNorm(KINDS), nn.Linear(KINDS, KINDS)
        with torch.no_grad():
            self.head.weight.copy_(2.0 * torch.eye(KINDS))
            self.head.bias.zero_()

    def forward(self, x):
        return self.head(self.norm(x))


class Sinks(come.Method):
    """After a few batches it learns that everything is of the first class."""

    name = "sinks"

    def initial_state(self, ctx, x):
        return {"seen": torch.zeros((), device=ctx.device)}

    def adapt(self, ctx, x):
        logits = ctx.forward(x)
        loss = -logits.log_softmax(dim=1)[:, 0]
        ctx.state["seen"] = ctx.state["seen"] + 1
        ctx.descend(loss.mean(), go=ctx.state["seen"] > 6)
        return come.Step(logits, loss, ctx.valid)


on_both = pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")),
    ],
)


def collapsing(policy="recover", device="cpu", **more):
    guard = Guard(policy=policy, warmup=4, patience=2, backoff=0.5, **more)
    return come.adapt(Plain().to(device), Sinks(objective="em", lr=0.3), guard=guard)


def stream(count, seed=0):
    """Noisy one-hot vectors of all kinds."""
    generator = torch.Generator().manual_seed(seed)
    kinds = torch.randint(KINDS, (count, 32), generator=generator)
    return list(2 * torch.eye(KINDS)[kinds] + torch.randn(count, 32, KINDS, generator=generator))


def share(logits):
    return torch.bincount(logits.argmax(dim=1), minlength=KINDS).max().item() / len(logits)


def test_it_collapses_without_a_guard():
    adapter = come.adapt(Plain(), Sinks(objective="em", lr=0.3), guard=False)
    shares = [share(adapter(x)) for x in stream(60)]
    assert sum(shares[:5]) / 5 < 0.4
    assert sum(shares[-10:]) / 10 > 0.95


@on_both
def test_recover(device):
    events = []
    adapter = collapsing(device=device, on_event=events.append)
    shares = [share(adapter(x.to(device)).cpu()) for x in stream(60)]
    health, kinds = adapter.health(), [event.kind for event in events]
    assert health["collapse"] == health["recovered"] == kinds.count("collapse") == kinds.count("recovered") >= 1
    assert health["lr_scale"] < 1
    assert sum(shares[-30:]) / 30 < 0.8


@on_both
def test_freeze(device):
    adapter = collapsing("freeze", device)
    for x in stream(60):
        adapter(x.to(device))
    assert adapter.health()["frozen"] == 1.0
    with torch.no_grad():
        assert torch.equal(adapter(x.to(device)), Plain().to(device)(x.to(device)))
        assert torch.equal(adapter.predict(x.to(device)), Plain().to(device)(x.to(device)))
    adapter.reset()
    assert adapter.health()["frozen"] == 0.0


@on_both
def test_raise(device):
    adapter = collapsing("raise", device)
    with pytest.raises(
        come.CollapseError, match=r"sinks has collapsed at step \d+: collapse: agreement with the source"
    ):
        torch.cat([adapter(x.to(device)) for x in stream(60)])
    with pytest.raises(come.CollapseError):  # until it is reset
        adapter(stream(1)[0].to(device))
    adapter.reset()
    adapter(stream(1)[0].to(device))


def test_warn():
    adapter = collapsing("warn")
    bare = come.adapt(Plain(), Sinks(objective="em", lr=0.3), guard=False)
    for x in stream(60):
        assert torch.equal(adapter(x), bare(x))
    assert adapter.health()["collapse"] >= 1
    assert adapter.health()["recovered"] == 0


@pytest.mark.parametrize(("size", "length"), [(1, 30), (5, 80), (200, 160)])
def test_small_and_large_batches_are_watched_as_well(size, length):
    adapter = collapsing()
    for x in torch.cat(stream(length)).split(size):
        adapter(x)
    assert adapter.health()["recovered"] == adapter.health()["collapse"] >= 1


def test_a_stream_of_one_class_is_no_collapse():
    one = [x[:1].expand(32, -1) + 0.1 * x for x in stream(20, seed=1)]
    adapter = come.adapt(Plain(), "tent", lr=1e-4, guard=Guard(warmup=4, patience=2))
    for x in (*stream(10), *one):
        adapter(x)
    assert adapter.health()["healthy"] >= 1
    assert adapter.health()["collapse"] == 0


def test_the_source_is_asked_now_and_then():
    asked = []
    adapter = come.adapt(Plain(), "tent", lr=1e-4, guard=Guard(on_event=asked.append))
    for x in torch.cat(stream(2 * 48)).split(64):
        adapter(x)
    assert [event.step for event in asked if event.kind == "healthy"] == [n - 1 + LAG for n in CHECKS if n <= 40]
    assert all(event.details["samples"] == 64 for event in asked)


def test_what_all_samples_share_reaches_the_source_too():
    class Masked(Plain):
        def forward(self, x, mask):
            return super().forward(x) * mask[:KINDS]

    adapter = come.adapt(Masked(), "tent", lr=1e-4, per_sample=["x"])
    for x in torch.cat(stream(44)).split(128):
        adapter(x, torch.ones(50))
    assert adapter.health()["healthy"] == 2


def test_methods_that_cannot_change_are_not_compared_with_themselves():
    adapter, calls = come.adapt(Plain(), "source"), []
    adapter.model.register_forward_hook(lambda *_: calls.append(1))
    for x in stream(60):
        adapter(x)
    assert len(calls) == 60


class Shouts(come.Method):
    """No weights: it just says the first class while it is told to."""

    name = "shouts"
    descends = False
    loud = True

    def adapt(self, ctx, x):
        logits = ctx.forward(x).detach()
        first = 30.0 * nn.functional.one_hot(torch.zeros(x.size, dtype=torch.int64), logits.shape[1])
        return come.Step(first if Shouts.loud else 2 * logits, None, ctx.valid)


def test_a_method_without_weights_rests_while_its_answers_are_wrong():
    adapter = come.adapt(Plain(), Shouts(select=come.select.nothing()))
    data = torch.cat(stream(240)).split(64)
    with torch.no_grad():
        source = [Plain()(x) for x in data]
    answers = [adapter(x) for x in data[:60]]
    right = [torch.equal(a, b) for a, b in zip(answers, source[:60], strict=True)]
    assert not any(right[:2])
    assert all(right[5:])
    assert adapter.health()["recovered"] == 1
    Shouts.loud = False  # on trial it is found well, and answers again
    answers = [adapter(x) for x in data[60:]]
    assert torch.equal(answers[-1], 2 * source[-1])
    assert adapter.health()["raised"] == 1


# ---- signals and bands ----


def row(**known):
    return tuple({"share": 0.1, "entropy": 2.0, "uncertainty": 0.5, "norm": 9.0, "distance": 0.1, **known}.values())


def learned(rows):
    bands = Bands(len(rows))
    for values in rows:
        bands = bands.learned(values)
    return bands


def test_signals_of_a_batch():
    z = torch.tensor([[3.0, 0, 0], [3.0, 0, 0], [0, 4.0, 0], [0, 0, 9.0]])
    usable = torch.tensor([True, True, True, False])
    found = measure(come.Softmax(), z, usable, torch.full((4,), 3.0), torch.zeros(4))
    found = dict(zip(SIGNALS, found.tolist(), strict=True))
    p = z.softmax(dim=1)[:3]
    assert found["share"] == pytest.approx(2 / 3)
    assert found["entropy"] == pytest.approx(float(torch.special.entr(p).sum(dim=1).mean()), abs=1e-6)
    assert found["uncertainty"] == pytest.approx(float((1 - p.amax(dim=1)).mean()), abs=1e-6)
    assert found["norm"] == pytest.approx(10 / 3)
    assert found["distance"] == pytest.approx(6)


@pytest.mark.parametrize(
    ("values", "names"),
    [
        ({"entropy": 0.2}, ["entropy"]),
        ({"entropy": 9.0}, []),  # less sure is no collapse
        ({"share": 0.9, "norm": 30.0}, ["share", "norm"]),
        ({"uncertainty": 0.01}, ["uncertainty"]),
        ({"distance": 5.0}, ["distance"]),
        ({}, []),
    ],
)
def test_only_the_side_of_a_collapse_is_suspicious(values, names):
    bands = learned([row(entropy=2 + 0.1 * (-1) ** i) for i in range(10)])
    assert list(bands.outside(row(**values))) == names


def test_a_drift_while_learning_is_not_learned():
    """A model that collapses from the start must not teach its own collapse."""
    bands = learned([row(entropy=2.0 - 0.1 * i) for i in range(10)])
    assert list(bands.outside(row(entropy=1.2))) == ["entropy"]


def test_a_noisy_signal_has_a_wide_band():
    bands = learned([row(entropy=2.0 + 0.5 * (-1) ** i) for i in range(10)])
    assert bands.outside(row(entropy=1.2)) == {}


def test_distance_may_grow_as_it_did():
    bands = learned([row(distance=0.1 * (i + 1)) for i in range(10)])
    for i in range(10, 200):
        assert bands.outside(row(distance=0.1 * (i + 1))) == {}
        bands = bands.learned(row(distance=0.1 * (i + 1)))
    assert list(bands.outside(row(distance=60.0))) == ["distance"]


# ---- verdict ----


def one_hot(labels, size=4.0, kinds=4):
    return size * torch.eye(kinds)[labels]


def found(mine, source, **more):
    return Verdict(*judged(compare(mine, source, torch.ones(len(mine), dtype=torch.bool), **more)).tolist())


def test_a_verdict_by_hand():
    source, mine = one_hot([0, 1, 2, 3]), one_hot([0, 1, 2, 2])
    q = source.softmax(dim=1)
    verdict = found(mine, source)
    assert verdict.agreement == pytest.approx(float((3 * q[0, 0] + q[3, 2]) / (4 * q[0, 0])), rel=1e-6)
    assert verdict.confidence == pytest.approx(float(q[0, 0]), rel=1e-6)
    three = -(2 * 0.25 * math.log(0.25) + 0.5 * math.log(0.5))  # two classes once, one twice, of four
    assert verdict.spread == pytest.approx(math.exp(three - math.log(4)), rel=1e-6)
    assert verdict.other == verdict.agreement
    assert verdict.samples == 4


def test_who_agrees_is_healthy_and_who_collapsed_is_not():
    source = one_hot(torch.arange(64) % 16, kinds=16)
    assert not misled(found(source, source), False)
    assert misled(found(one_hot(torch.zeros(64, dtype=torch.long), kinds=16), source), False)


def test_to_contradict_an_unsure_source_costs_little():
    """As a model does that has adapted well."""
    mine = one_hot(torch.arange(64) % 16, kinds=16)
    for size, low, high in ((0.1, 0.8, 1.0), (6.0, 0.0, 0.05)):
        verdict = found(mine, one_hot((torch.arange(64) + 1) % 16, size=size, kinds=16))
        assert low < verdict.agreement < high


@pytest.mark.parametrize(
    ("agreement", "confidence", "spread", "statistics", "expected"),
    [
        (0.5, 0.6, 1.0, False, False),
        (0.4, 0.6, 1.0, False, True),
        (0.4, 0.6, 5.0, False, True),
        (0.4, 0.6, 1.0, True, True),
        (0.4, 0.6, 5.0, True, False),  # an unsure source is no judge of a model that sees more
        (0.4, 0.7, 5.0, True, True),
        (0.92, 0.95, 1.0, False, False),
        (0.85, 0.95, 1.0, False, True),  # a sure source is held to more
        (0.92, 0.95, 1.0, True, True),
        (0.98, 0.95, 1.0, True, False),
    ],
)
def test_the_limits(agreement, confidence, spread, statistics, expected):
    assert misled(Verdict(agreement, confidence, spread, 1.0, 64.0), statistics) == expected


def test_the_weights_are_judged_under_the_same_statistics():
    source, same = one_hot(torch.zeros(8, dtype=torch.long), size=0.5), one_hot(torch.arange(8) % 4)
    verdict = found(same, source, same_statistics=same)
    assert verdict.other == pytest.approx(1)
    assert verdict.agreement < 1


def test_comparisons_add_up_and_leave_out_what_is_not_usable():
    torch.manual_seed(0)
    mine, source = torch.randn(10, 5), torch.randn(10, 5)
    source[3] = math.nan
    usable = torch.arange(10) != 7
    parts = compare(mine[:4], source[:4], usable[:4]) + compare(mine[4:], source[4:], usable[4:])
    keep = [i for i in range(10) if i not in (3, 7)]
    whole = compare(mine[keep], source[keep], torch.ones(8, dtype=torch.bool))
    torch.testing.assert_close(judged(parts), judged(whole))
    assert judged(parts)[-1] == 8


# ---- what it says ----


def test_events_are_logged_in_an_operators_words(caplog):
    adapter = come.adapt(tiny(), "tent")
    with caplog.at_level(logging.INFO, logger="come.guard"):
        for x in (poisoned(math.nan), *batches(LAG)):
            adapter(x)
    (record,) = caplog.records
    assert record.come["kind"] == "invalid_samples"
    assert record.come["details"] == {"samples": 2.0}
    assert record.getMessage() == (
        "tent, step 0: 2 of 12 samples are not finite or absurdly large; they drive no update"
    )


def test_a_collapse_is_told_with_its_limit_and_what_was_done():
    events = []
    adapter = collapsing(on_event=events.append)
    for x in stream(60):
        adapter(x)
    words = {event.kind: event.message for event in reversed(events)}
    assert words["collapse"].startswith("collapse: agreement with the source model 0.")
    assert "(limit 0." in words["collapse"]
    assert words["recovered"].endswith("restored, learning rate x 0.5")
    assert set(words) <= set(COUNTED)


def test_health_is_flat_numbers():
    adapter = come.adapt(tiny(), "tent")
    for x in batches(LAG + 1):
        adapter(x)
    health = adapter.health()
    assert set(SIGNALS) | set(COUNTED) <= set(health)
    assert all(isinstance(value, float) and value == value for value in health.values())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"policy": "pray"}, "policy must be one of recover, freeze, raise, warn, got 'pray'"),
        ({"warmup": 1}, "warmup must be an integer >= 2, got 1"),
        ({"patience": 0}, "patience must be an integer >= 1, got 0"),
        ({"samples": True}, "samples must be an integer >= 1, got True"),
        ({"backoff": 0}, r"backoff must be in \(0, 1\], got 0"),
        ({"largest_input": 0}, "largest_input must be a positive number, got 0"),
        ({"on_event": 3}, "on_event must be a function, or None, got 3"),
    ],
)
def test_bad_arguments(arguments, words):
    with pytest.raises(come.ConfigError, match=words):
        Guard(**arguments)


# ---- state ----


@pytest.mark.parametrize("policy", ["recover", "freeze"])
def test_a_collapsing_stream_resumes_at_any_batch(policy):
    """In the middle of a question too: everything, also the signals under way, is in the state."""
    data = stream(40)
    whole = collapsing(policy)
    states, answers = [], []
    for x in data:
        states.append(whole.state_dict())
        answers.append(whole(x))
    for start in range(0, 40, 3):
        other = collapsing(policy)
        other.load_state_dict(states[start])
        for x, expected in zip(data[start:], answers[start:], strict=True):
            assert torch.equal(other(x), expected)
        assert other.health() == whole.health()


@pytest.mark.parametrize("name", ["rows", "scale", "history", "counters"])
def test_a_damaged_guard_is_refused(name):
    adapter = come.adapt(tiny(), "tent")
    adapter(batches(1)[0])
    saved = {k.removeprefix("guard."): v for k, v in adapter.state_dict().items() if k.startswith("guard.")}
    weights = adapter.state_dict()["weights"]
    assert Watch.of(saved, Guard(), weights).steps == 1
    without = {k: v for k, v in saved.items() if k != name}
    with pytest.raises(come.StateError, match=f"damaged at {name}"):
        Watch.of(without, Guard(), weights)


def test_threads_take_turns():
    import threading

    adapter, alone = come.adapt(tiny(), "tent", lr=1e-3), come.adapt(tiny(), "tent", lr=1e-3)
    x = batches(1)[0]
    threads = [threading.Thread(target=lambda: [adapter(x) for _ in range(5)]) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for _ in range(15):
        alone(x)
    assert adapter.count == 15
    assert torch.equal(adapter(x), alone(x))


@pytest.mark.parametrize("seed", range(20))
def test_the_median_for_a_gpu_is_the_median(seed):
    draw = torch.Generator().manual_seed(seed)
    values = torch.randint(0, 6, (1 + seed,), generator=draw).float()
    values[torch.rand(len(values), generator=draw) < 0.3] = torch.nan
    torch.testing.assert_close(_median_by_rank(values), values.nanmedian(), equal_nan=True)
