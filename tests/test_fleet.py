"""Many streams on one model: equal to an adapter for each, apart from each other, and safe to put away and to bring back."""

from __future__ import annotations

import copy
import errno
import gc
import itertools
import json
import multiprocessing
import os
import sys
import threading
from pathlib import Path

import blobs
import pytest
import torch
from torch import nn

import come
from come import methods
from come.streams import store
from come.streams.groups import Groups, in_order
from come.testing import NORMS, TinyClassifier, TinyTransformer, batches

METHODS = ["tent", "eata", "sar", "deyo", "roid", "pl", "steady"]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
needs_cuda = pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")


@pytest.fixture
def make(build):
    """A fleet or an adapter of the same configuration around the same tiny model."""
    models = {}

    def model(method, norm, dtype):
        if (method, norm, dtype) not in models:
            torch.manual_seed(0)
            models[method, norm, dtype] = build.model(method)(NORMS[norm]).to(DEVICE, dtype).eval()
        return models[method, norm, dtype]

    def fleet(method, norm="layer", objective="come", dtype=torch.float64, **more):
        arguments = given(method, dtype)
        return come.Fleet(model(method, norm, dtype), method, objective=objective, **(arguments | more))

    def adapter(method, norm="layer", objective="come", dtype=torch.float64, **more):
        return come.adapt(model(method, norm, dtype), method, objective=objective, **(given(method, dtype) | more))

    def given(method, dtype):
        known = methods.get(method).hyperparameters()
        found = {"lr": 1e-2}
        if "source" in known:
            found["source"] = [x.to(DEVICE, dtype) for x in batches(2, seed=9)]
        if "normalization" in known:
            found["normalization"] = ((0.45,), (0.07,))
        return found

    fleet.adapter = adapter
    return fleet


def stream(count, size=9, seed=3, dtype=torch.float64):
    return [x[:size].to(DEVICE, dtype) for x in batches(count, seed=seed)]


def uneven(count, size, streams, seed=1):
    """Names for each sample: uneven numbers, and streams that are absent from a batch."""
    draw = torch.Generator().manual_seed(seed)
    for _ in range(count):
        present = torch.randperm(streams, generator=draw)[: max(1, streams - 1)]
        yield [str(int(present[int(i)])) for i in torch.randint(len(present), (size,), generator=draw)]


def rows_of(names):
    return {name: [i for i, one in enumerate(names) if one == name] for name in dict.fromkeys(names)}


def assert_same(fleet, adapters, xs, names, atol, rtol=0.0):
    for x, ids in zip(xs, names, strict=True):
        out = fleet.step(x, ids)
        for name, rows in rows_of(ids).items():
            alone = adapters[name].step(x[rows])
            for one, two in zip(alone, out, strict=True):
                if one is not None and two is not None:
                    torch.testing.assert_close(
                        two[rows], one, rtol=rtol, atol=atol, msg=lambda m, name=name: f"{name}: {m}"
                    )


EVERY = list(itertools.product(["layer", "group", "batch"], [("em", True), ("come", True), ("come", False)]))
ALWAYS = [("layer", ("em", True)), ("batch", ("come", True)), ("batch", ("come", False))]


@pytest.mark.parametrize(
    ("norm", "objective", "guard"),
    [pytest.param(norm, *how, marks=() if (norm, how) in ALWAYS else pytest.mark.slow) for norm, how in EVERY],
)
@pytest.mark.parametrize("method", METHODS)
def test_a_stream_is_an_adapter_of_its_own(method, norm, objective, guard, make):
    """20 steps, uneven numbers of samples, streams that are absent; float64, so that nothing but rounding is left."""
    fleet = make(method, norm, objective, guard=guard, streams=4)
    adapters = {str(i): make.adapter(method, norm, objective, guard=guard) for i in range(4)}
    assert_same(fleet, adapters, stream(20), uneven(20, 9, 4), atol=1e-7)
    for name, adapter in adapters.items():
        for key, value in adapter.adapted_parameters.items():
            torch.testing.assert_close(fleet.adapted_parameters(name)[key], value, rtol=0, atol=1e-8)
        assert fleet.health(name) == pytest.approx(adapter.health(), rel=1e-9, abs=1e-6, nan_ok=True)
        assert fleet.count(name) == adapter.count
        for key, value in adapter.state.items():
            torch.testing.assert_close(fleet.state(name)[key], value, rtol=0, atol=1e-7, equal_nan=True)


@pytest.mark.parametrize("method", ["norm", "tent", "eata:beta=0", "steady"])
def test_each_stream_has_the_statistics_that_suit_it(method):
    """One is shifted, one holds one class at a time, one is both in turn; in one batch, as adapters of their own."""
    model = blobs.trained().to(DEVICE, torch.float64)
    streams = {
        "shifted": blobs.shuffled(12, seed=5, shifted=True)[0],
        "ordered": blobs.ordered(12, seed=5)[0],
        "turns": (*blobs.shuffled(6, seed=7, shifted=True)[0], *blobs.ordered(6, seed=8)[0]),
    }
    fleet = come.Fleet(model, method, streams=list(streams))
    adapters = {name: come.adapt(model, method) for name in streams}
    used = {name: [] for name in streams}
    for parts in zip(*streams.values(), strict=True):
        x = torch.cat(parts).to(DEVICE, torch.float64)
        ids = [name for name, part in zip(streams, parts, strict=True) for _ in part]
        assert_same(fleet, adapters, [x], [ids], atol=1e-7)
        for name in streams:
            health = fleet.health(name)
            assert health == pytest.approx(adapters[name].health(), rel=1e-9, abs=1e-6, nan_ok=True)
            used[name].append(health["batch_statistics"])
    assert used["shifted"] == [0.0] * 2 + [1.0] * 10
    assert used["ordered"] == [0.0] * 12
    assert (used["turns"][5], used["turns"][-1]) == (1.0, 0.0)


@pytest.mark.parametrize("norm", ["layer", pytest.param("group", marks=pytest.mark.slow), "batch"])
@pytest.mark.parametrize("method", METHODS)
def test_float32_at_a_usual_rate(method, norm, make):
    fleet = make(method, norm, dtype=torch.float32, streams=3, lr=1e-3)
    adapters = {str(i): make.adapter(method, norm, dtype=torch.float32, lr=1e-3) for i in range(3)}
    near = 1e-4 if DEVICE == "cpu" else 5e-4  # a GPU adds up in another order
    assert_same(fleet, adapters, stream(20, dtype=torch.float32), uneven(20, 9, 3), atol=near, rtol=near)
    for name, adapter in adapters.items():
        for key, value in adapter.adapted_parameters.items():
            torch.testing.assert_close(fleet.adapted_parameters(name)[key], value, rtol=0, atol=1e-5)


def test_a_transformer_and_batches_of_one(make):
    torch.manual_seed(0)
    model = TinyTransformer(NORMS["layer"]).to(DEVICE).double().eval()
    fleet = come.Fleet(model, "sar", streams=5, lr=1e-2)
    adapters = {str(i): come.adapt(model, "sar", lr=1e-2) for i in range(5)}
    assert_same(fleet, adapters, stream(6, size=5), [list("43120")] * 6, atol=1e-8)


def test_bf16_close_to_separate_adapters(make):
    fleet = make("tent", dtype=torch.float32, precision="bf16", streams=3, lr=1e-3)
    adapters = {str(i): make.adapter("tent", dtype=torch.float32, precision="bf16", lr=1e-3) for i in range(3)}
    assert_same(fleet, adapters, stream(5, dtype=torch.float32), uneven(5, 9, 3), atol=0.3)


@pytest.mark.parametrize("norm", ["layer", pytest.param("batch", marks=needs_cuda)])
def test_compiled(norm, make, compiler):
    """On a GPU also captured; streams that come in other numbers run as they are."""
    fleet = make("tent", norm, dtype=torch.float32, compile=True, streams=3, lr=1e-3)
    adapters = {str(i): make.adapter("tent", norm, dtype=torch.float32, lr=1e-3) for i in range(3)}
    names = [list("012012012")] * 5 + list(uneven(2, 9, 3)) + [list("012012012")] * 2
    assert_same(fleet, adapters, stream(9, dtype=torch.float32), names, atol=1e-3, rtol=1e-3)


def test_rates_and_thresholds_of_their_own(make):
    fleet = make("eata", lr=1e-3)
    own = {"a": {"lr": 1e-2}, "b": {"margin": 0.2}, "c": {"margin": 0.9, "redundancy": 0.5, "lr": 3e-2}, "d": {}}
    adapters = {}
    for name, values in own.items():
        fleet.open(name, **values)
        adapters[name] = make.adapter("eata", **({"lr": 1e-3} | values))
    assert_same(fleet, adapters, stream(10, size=12), [list("abcd" * 3)] * 10, atol=1e-7)
    with pytest.raises(
        come.ConfigError, match=r"'beta' of eata cannot differ by stream; what can: lr, margin, redundancy"
    ):
        fleet.open("e", beta=1.0)
    with pytest.raises(come.ConfigError, match="margin"):
        fleet.open("e", margin=-1.0)
    assert "e" not in fleet


def test_episodic_and_reset_every(make):
    for more in ({"episodic": True}, {"reset_every": 3}):
        fleet, adapters = make("tent", streams=2, **more), {n: make.adapter("tent", **more) for n in "01"}
        assert_same(fleet, adapters, stream(8, size=4), uneven(8, 4, 2), atol=1e-8)


def test_a_method_of_ones_own_joins_without_further_code(make):
    class Sharpen(come.Method):
        name = "sharpen"

        def adapt(self, ctx, x):
            logits = ctx.forward(x)
            loss = self.objective.entropy(logits)
            ctx.descend(come.method.masked_mean(loss, ctx.valid), go=ctx.valid.any())
            return come.Step(logits, loss, ctx.valid)

    model = TinyClassifier(NORMS["group"]).to(DEVICE).double()
    fleet = come.Fleet(model, Sharpen(lr=0.1), streams=3)
    adapters = {str(i): come.adapt(model, Sharpen(lr=0.1)) for i in range(3)}
    assert_same(fleet, adapters, stream(5), uneven(5, 9, 3), atol=1e-8)


class Scaled(nn.Module):
    """A norm of a library that multiplies by hand."""

    def __init__(self, size):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(size)), nn.Parameter(torch.zeros(size))

    def forward(self, x):
        return self.weight * (x / x.square().mean(-1, keepdim=True).sqrt()) + self.bias


class ScaledNorm(Scaled):
    pass


@pytest.mark.parametrize("norm", [nn.RMSNorm, ScaledNorm])
def test_norms_of_libraries(norm):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(4, 8), norm(8), nn.Unflatten(1, (2, 4)), norm(4), nn.Flatten(), nn.Linear(8, 3)
    ).double()
    fleet = come.Fleet(model, "tent", streams=3, lr=0.1)
    adapters = {str(i): come.adapt(model, "tent", lr=0.1) for i in range(3)}
    xs = [torch.randn(6, 4, dtype=torch.float64) for _ in range(5)]
    assert_same(fleet, adapters, xs, [list("012012")] * 5, atol=1e-9)


def test_arguments_by_name_and_shared_ones():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 3))

        def forward(self, pixel_values, table, scale=1.0):
            return {"logits": self.inner(pixel_values) + table * scale}

    model = Named().double()
    fleet = come.Fleet(model, "tent", streams=2, lr=0.1, per_sample=("pixel_values",))
    adapters = {n: come.adapt(model, "tent", lr=0.1, per_sample=("pixel_values",)) for n in "01"}
    table = torch.randn(3, dtype=torch.float64)
    for _ in range(3):
        x = torch.randn(4, 4, dtype=torch.float64)
        out = fleet({"pixel_values": x, "table": table, "scale": 2.0}, list("0110"))
        for n, rows in {"0": [0, 3], "1": [1, 2]}.items():
            torch.testing.assert_close(out[rows], adapters[n]({"pixel_values": x[rows], "table": table, "scale": 2.0}))


# ---- apart from each other ----


def test_what_is_absurd_in_one_stream_touches_no_other(make):
    fleet, alone = make("tent", streams=2), make.adapter("tent")
    for i, x in enumerate(stream(6, size=8)):
        x[4:] = torch.nan if i % 2 else x[4:] * 1e30
        out = fleet.step(x, ["0"] * 4 + ["1"] * 4)
        torch.testing.assert_close(out.logits[:4], alone(x[:4]), rtol=0, atol=1e-9)
        assert not out.valid[4:].any() or i == 0
    assert fleet.health("1")["invalid_samples"] > 0
    assert fleet.health("0")["invalid_samples"] == 0


def test_a_collapse_in_one_stream_touches_no_other(make):
    """A learning rate that ruins stream 1: its guard finds that and puts it back; stream 0 is as if alone."""
    events = []
    guard = come.Guard(samples=8, warmup=4, on_event=events.append)
    fleet = make("tent", objective="em", guard=guard)
    fleet.open("0", lr=1e-3)
    fleet.open("1", lr=30.0)
    alone = make.adapter("tent", objective="em", guard=come.Guard(samples=8, warmup=4), lr=1e-3)
    for x in stream(40, size=12):
        out = fleet(x, ["0", "1"] * 6)
        torch.testing.assert_close(out[::2], alone(x[::2]), rtol=0, atol=1e-7)
    assert fleet.health("1")["recovered"] > 0
    assert fleet.health("0")["recovered"] == 0
    assert {event.details["stream"] for event in events if event.kind == "recovered"} == {"1"}
    assert all(event.message.startswith(f"stream {event.details['stream']}: ") for event in events)


def test_the_users_model_is_as_it_was(make):
    model = TinyClassifier(NORMS["batch"]).to(DEVICE).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    needs = [p.requires_grad for p in model.parameters()]
    fleet = come.Fleet(model, "tent", streams=2, lr=0.1)
    for x in stream(3, size=6, dtype=torch.float32):
        fleet(x, list("010101"))
    assert model.training
    assert needs == [p.requires_grad for p in model.parameters()]
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_a_step_that_fails_has_not_happened_for_any_stream(make, monkeypatch):
    fleet = make("tent", streams=2)
    xs = stream(3, size=5)
    fleet(xs[0], list("01010"))
    before = {n: fleet.adapted_parameters(n) for n in "01"}
    calls, ran = [], Groups._run_group

    def fails(self, *args):
        calls.append(1)
        if len(calls) == 2:  # the second group of the batch
            raise KeyboardInterrupt
        return ran(self, *args)

    monkeypatch.setattr(Groups, "_run_group", fails)
    with pytest.raises(KeyboardInterrupt):
        fleet(xs[1], list("01110"))
    monkeypatch.undo()
    for n in "01":
        assert fleet.count(n) == 1
        for key, value in fleet.adapted_parameters(n).items():
            assert torch.equal(value, before[n][key])
    fleet(xs[2], list("01110"))


def test_an_interrupt_at_any_line_of_a_step_strikes_all_streams_or_none(make):
    """An interrupt between the first and the last stream left a step that some had made and others not."""
    fleet, x = make("tent", streams=3, dtype=torch.float32), stream(1, size=6, dtype=torch.float32)[0]
    fleet(x, list("012012"))
    left = 0

    def trace(frame, event, _):
        nonlocal left
        files = (come.fleet.__file__, store.__file__)
        if frame.f_code.co_filename not in files or frame.f_code.co_name not in ("step", "fetched", "_follow"):
            return None
        if event == "line":
            left -= 1
            if left == 0:
                raise KeyboardInterrupt
        return trace

    def interrupted(line):
        nonlocal left
        left = line
        sys.settrace(trace)
        try:
            fleet(x, list("012012"))
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(None)
        return False

    line = 1
    while interrupted(line):
        counts = [fleet.count(name) for name in "012"]
        assert len(set(counts)) == 1, (line, counts)
        line += 1
    assert line > 20


def test_an_interrupt_inside_of_vmap_leaves_nothing_behind(make):
    """At some lines of torch it left a layer of vmap open, in this thread for good, or came out as another error."""
    from torch._C import _functorch

    fleet, x = make("tent", streams=2, dtype=torch.float32), stream(1, size=4, dtype=torch.float32)[0]
    fleet(x, list("0101"))
    seen, at = set(), None

    def trace(frame, event, _):
        nonlocal at
        place = frame.f_code.co_filename, frame.f_lineno
        if "_functorch" not in place[0]:
            return None
        if event == "line" and at is None and place not in seen:  # each line once
            seen.add(place)
            at = place
            raise KeyboardInterrupt
        return trace

    while True:
        at = None
        sys.settrace(trace)
        try:
            fleet(x, list("0101"))
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        assert _functorch.get_dynamic_layer_stack_depth() == 0, at
        assert fleet.count("0") == fleet.count("1")
        if at is None:
            break
    assert len(seen) > 30


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_what_an_event_handler_raises(error, make):
    """An interrupt in it undoes the step for all streams; an error of its own is counted for the stream of the event."""
    raised = []

    def handler(event):
        raised.append(event)
        raise error("in the handler")

    fleet = make("tent", streams=2, guard=come.Guard(on_event=handler), dtype=torch.float32)
    x = stream(1, size=4, dtype=torch.float32)[0]
    bad = x.clone()
    bad[0] = torch.nan
    for batch in (bad, x):
        fleet(batch, list("0101"))
    before = {name: fleet.adapted_parameters(name) for name in "01"}
    if error is KeyboardInterrupt:
        with pytest.raises(KeyboardInterrupt):
            fleet(x, list("0101"))
        assert [fleet.count(name) for name in "01"] == [2, 2]
        for name in "01":
            assert all(torch.equal(v, before[name][k]) for k, v in fleet.adapted_parameters(name).items())
    else:
        fleet(x, list("0101"))
        assert [fleet.health(name)["callback_failed"] for name in "01"] == [1, 0]
    assert [event.details["stream"] for event in raised] == ["0"]


def test_predict_changes_nothing_and_is_what_an_adapter_predicts(make):
    fleet, adapters = make("sar", streams=2), {n: make.adapter("sar") for n in "01"}
    xs = stream(4, size=5)
    names = [list("01101")] * 3
    assert_same(fleet, adapters, xs[:3], names, atol=1e-8)
    before = {n: fleet.adapted_parameters(n) for n in "01"}
    out = fleet.predict(xs[3], list("01101"))
    assert not out.requires_grad
    for n, rows in rows_of(list("01101")).items():
        torch.testing.assert_close(out[rows], adapters[n].predict(xs[3][rows]), rtol=0, atol=1e-8)
        assert all(torch.equal(v, before[n][k]) for k, v in fleet.adapted_parameters(n).items())
        assert fleet.count(n) == 3


def test_threads_take_turns(make):
    fleet = make("tent", streams=8, dtype=torch.float32)
    alone = {str(i): make.adapter("tent", dtype=torch.float32) for i in range(8)}
    x, failed = stream(1, size=4, dtype=torch.float32)[0], []

    def work(name):
        try:
            for _ in range(5):
                fleet(x, name)
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(str(i),)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    for name, adapter in alone.items():
        for _ in range(5):
            adapter(x)
        for key, value in adapter.adapted_parameters.items():
            torch.testing.assert_close(fleet.adapted_parameters(name)[key], value, rtol=0, atol=1e-5)


def count_calls(fleet, monkeypatch):
    """A list that gets the number of rows of each call of the model."""
    rows, borrowed = [], fleet._engine.model
    call = borrowed.call_streams

    def counted(x, weights, blocks):
        rows.append(x.size)
        return call(x, weights, blocks)

    monkeypatch.setattr(borrowed, "call_streams", counted)
    return rows


@pytest.mark.parametrize(("method", "calls"), [("tent", 1), ("sar", 2), ("deyo", 2)])
@pytest.mark.parametrize("norm", ["layer", "batch"])
def test_a_batch_goes_through_the_model_once(method, calls, norm, make, monkeypatch):
    """However many samples each stream has, and whether it is new: 1, 2, 3 and 5 are four groups."""
    fleet = make(method, norm, streams=5, guard=False)
    names = [list("00012344433")[i] for i in (3, 0, 9, 1, 4, 7, 2, 5, 8, 6, 10)]
    x = stream(2, size=11)
    fleet(x[0], names)
    rows = count_calls(fleet, monkeypatch)
    fleet(x[1], names)
    assert rows == [11] * calls
    fleet.reset("3")
    rows.clear()
    fleet.predict(x[1], names)
    assert rows == [11]


def test_an_error_in_the_model_ends_all_groups(make, monkeypatch):
    fleet = make("tent", streams=3)
    x = stream(3, size=6)
    fleet(x[0], list("011222"))
    before = fleet.adapted_parameters("2")

    def fails(*_):
        raise RuntimeError("no memory")

    threads = threading.active_count()
    with monkeypatch.context() as patch:
        patch.setattr(fleet._engine.model, "call_streams", fails)
        with pytest.raises(RuntimeError, match="no memory"):
            fleet(x[1], list("011222"))
    assert threading.active_count() == threads
    assert all(torch.equal(value, before[name]) for name, value in fleet.adapted_parameters("2").items())
    fleet(x[2], list("011222"))


def test_under_autocast_groups_run_as_one_does(make):
    fleet = make("tent", dtype=torch.float32, streams=3, lr=1e-3)
    adapters = {str(i): make.adapter("tent", dtype=torch.float32, lr=1e-3) for i in range(3)}
    with torch.autocast(DEVICE, torch.bfloat16):
        assert_same(fleet, adapters, stream(4, size=6, dtype=torch.float32), [list("011222")] * 4, atol=0.3, rtol=0.02)


# ---- coming and going ----


@pytest.mark.parametrize("on_disk", [False, True])
def test_the_least_recently_used_is_put_away_and_comes_back(on_disk, make, tmp_path):
    more = {"folder": tmp_path} if on_disk else {}
    fleet = make("eata", streams=6, resident=2, **more)
    adapters = {str(i): make.adapter("eata") for i in range(6)}
    draw = torch.Generator().manual_seed(0)
    names = []
    for _ in range(15):
        a, b = torch.randperm(6, generator=draw)[:2].tolist()
        names.append([str(a), str(b), str(b), str(a), str(a)])
    assert_same(fleet, adapters, stream(15, size=5), names, atol=1e-7)
    assert fleet.streams[-2:] == [names[-1][0], names[-1][1]] or fleet.streams[-2:] == [names[-1][1], names[-1][0]]
    if on_disk:
        assert len(list(tmp_path.glob("*/*.safetensors"))) == 4
    for name, adapter in adapters.items():
        assert fleet.health(name) == pytest.approx(adapter.health(), abs=1e-6, nan_ok=True)
    with pytest.raises(come.InputError, match="samples of 3 streams, and resident=2 fit"):
        fleet(stream(1, size=3)[0], list("012"))
    fleet.close(names[0][0])
    assert len(fleet) == 5
    assert names[0][0] not in fleet
    fleet.close()
    assert not list(tmp_path.iterdir())


def test_save_and_load_of_one_and_of_all(make, tmp_path):
    fleet = make("sar", streams=["north", "south:1"])
    fleet.open("fast", lr=0.05)
    xs = stream(8, size=6)
    names = ["north", "south:1", "fast"] * 2
    for x in xs[:4]:
        fleet(x, names)
    fleet.save(tmp_path / "all")
    fleet.save(tmp_path / "one.safetensors", "north")
    after = [fleet(x, names) for x in xs[4:]]

    again = make("sar")
    again.load(tmp_path / "all")
    assert sorted(again.streams) == ["fast", "north", "south:1"]
    for x, logits in zip(xs[4:], after, strict=True):
        assert torch.equal(again(x, names), logits)

    adapter = make.adapter("sar")  # a stream moves to an adapter, and back
    adapter.load(tmp_path / "one.safetensors")
    for x, logits in zip(xs[4:], after, strict=True):
        torch.testing.assert_close(adapter(x[::3]), logits[::3], rtol=0, atol=1e-8)
    adapter.save(tmp_path / "back.safetensors")
    again.load(tmp_path / "back.safetensors", "new")
    assert again.count("new") == 8

    with pytest.raises(come.StateError, match="lr"):
        again.load(tmp_path / "all" / "fast.safetensors", "north")  # another learning rate
    with pytest.raises(come.StateError, match=r"fleet\.json"):
        again.load(tmp_path)
    index = tmp_path / "all" / "fleet.json"
    index.write_text(json.dumps({"format": "come-fleet-1", "streams": {"../evil": {}}}))
    with pytest.raises(come.ComeError, match="name of a stream"):
        again.load(tmp_path / "all")
    assert sorted(again.streams) == ["fast", "new", "north", "south:1"]


def test_reset_and_close(make):
    fleet = make("tent", streams=2)
    x = stream(1, size=4)[0]
    source = fleet.predict(x, "0")
    fleet(x, list("0011"))
    fleet.reset("0")
    assert torch.equal(fleet.predict(x, "0"), source)
    assert not torch.equal(fleet.predict(x, "1"), source)
    fleet.reset()
    assert torch.equal(fleet.predict(x, "1"), source)
    with fleet:
        pass
    with pytest.raises(come.ComeError):
        fleet(x, "0")


def test_the_model_moves_and_is_cast(make):
    model = TinyClassifier(NORMS["layer"]).to(DEVICE)
    fleet = come.Fleet(model, "tent", streams=2, lr=1e-2)
    x = stream(1, size=4)[0]
    fleet(x.float(), list("0101"))
    model.double()
    assert fleet(x, list("0101")).dtype == torch.float64
    assert {value.dtype for value in fleet.adapted_parameters("0").values()} == {torch.float64}
    model.to(torch.float64)
    moment = fleet._streams["1"].state
    assert {value.dtype for value in (moment.weights, *moment.moments.values())} == {torch.float64}
    model.float()
    fleet(x.float(), "0")  # the other stream's momentum follows, too
    moment = fleet._streams["1"].state
    assert {value.dtype for value in (moment.weights, *moment.moments.values())} == {torch.float32}


@pytest.mark.parametrize("value", [torch.nan, torch.inf, 1e30])
def test_the_first_batch_of_a_fleet_may_hold_invalid_samples(value):
    fleet = come.Fleet(TinyClassifier(NORMS["group"]), streams=2)
    x = batches(1, size=4)[0]
    x[0] = x[3] = value
    out = fleet.step(x, ["0", "0", "1", "1"])
    assert out.valid.tolist() == [False, True, True, False]
    assert out.logits.isfinite().all()


def test_names_that_differ_in_case_have_different_files():
    assert len({come.streams.names.file_name(name).lower() for name in ("north", "North", "NORTH")}) == 3


@pytest.mark.parametrize("name", ["@" * 128, ":" * 127 + "a", "a" * 128])
def test_the_longest_names_can_be_evicted_and_saved(name, tmp_path):
    """128 characters that are escaped in a file name are longer than a file name may be."""
    (tmp_path / "evicted").mkdir()
    model = TinyClassifier(NORMS["group"])
    x = batches(1, size=4)[0]
    fleet = come.Fleet(model, streams=[name, "other"], resident=1, folder=tmp_path / "evicted")
    fleet.step(x, name)
    fleet.step(x, "other")
    fleet.save(tmp_path / "all")
    again = come.Fleet(model)
    again.load(tmp_path / "all")
    assert torch.equal(again.predict(x, name), fleet.predict(x, name))


def test_a_stream_on_disk_can_be_looked_at(tmp_path):
    """Its parameters were those of the source model, its state empty, and count() failed."""
    model = TinyClassifier(NORMS["group"])
    fleet = come.Fleet(model, "eata", streams=["a", "b"], resident=1, folder=tmp_path, lr=0.1, beta=0)
    alone = come.Fleet(model, "eata", streams=["a"], lr=0.1, beta=0)
    x = batches(1, size=4)[0]
    for one in (fleet, alone):
        one.step(x, "a")
    for look in (come.Fleet.adapted_parameters, come.Fleet.state):
        fleet.step(x, "b")  # puts "a" on disk
        found, expected = look(fleet, "a"), look(alone, "a")
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], expected[key]) for key in expected)
    fleet.step(x, "b")
    assert fleet.count("a") == 1


# ---- on disk ----


def on_disk(tmp_path, **more):
    """A fleet of a and b, of which only one is in memory, and its batch."""
    torch.manual_seed(0)
    model = TinyClassifier(NORMS["group"])
    return come.Fleet(model, "tent", streams=["a", "b"], resident=1, folder=tmp_path, lr=0.05, **more), batches(
        1, size=8
    )[0]


def test_two_fleets_in_one_folder(tmp_path):
    """The second one wrote over the files of the first, which then had its weights."""
    (first, x), (second, _) = on_disk(tmp_path), on_disk(tmp_path)
    first.step(x, "a")
    expected = first.predict(x, "a")
    first.step(x, "b")
    for _ in range(3):
        second.step(x, "a")
    second.step(x, "b")
    assert torch.equal(first.predict(x, "a"), expected)


def test_a_copy_deletes_nothing_that_the_fleet_needs(tmp_path):
    fleet, x = on_disk(tmp_path)
    fleet.step(x, "a")
    expected = fleet.predict(x, "a")
    fleet.step(x, "b")
    other = copy.deepcopy(fleet)
    assert torch.equal(other.predict(x, "a"), expected)
    other.close()
    del other
    gc.collect()
    assert torch.equal(fleet.predict(x, "a"), expected)
    assert other_fleet_reads(fleet, x, expected)


def other_fleet_reads(fleet, x, expected):
    """A copy outlives the fleet that it was made of."""
    fleet.step(x, "b")
    other = copy.deepcopy(fleet)
    fleet.close()
    return torch.equal(other.predict(x, "a"), expected)


def step_in_child(fleet, x, answers):
    fleet.step(x, "a")
    fleet.close()
    answers.put(fleet.streams)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_fork_deletes_nothing_that_the_fleet_needs(tmp_path):
    fleet, x = on_disk(tmp_path)
    fleet.step(x, "a")
    expected = fleet.predict(x, "a")
    fleet.step(x, "b")
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    child = context.Process(target=step_in_child, args=(fleet, x, answers))
    child.start()
    child.join(60)
    assert child.exitcode == 0
    assert answers.get() == []
    assert torch.equal(fleet.predict(x, "a"), expected)


def test_a_snapshot_in_the_folder_is_left_alone(tmp_path):
    fleet, x = on_disk(tmp_path)
    fleet.step(x, "a")
    saved, all_of_them = tmp_path / come.streams.names.file_name("a"), tmp_path / "all"
    fleet.save(saved, "a")
    before = saved.read_bytes()
    for name in "ababa":
        fleet.step(x, name)
    fleet.save(all_of_them)
    fleet.close()
    assert saved.read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.safetensors", "all"]


def test_streams_on_disk_follow_the_model(tmp_path):
    """After model.double() they were refused, as of another model."""
    (tmp_path / "other").mkdir()
    (fleet, x), (alone, _) = on_disk(tmp_path), on_disk(tmp_path / "other")
    alone._store.resident = None
    for name in "ab":
        fleet.step(x, name), alone.step(x, name)
    for one in (fleet, alone):
        one._engine.user_model.double()
    for name in "abab":
        torch.testing.assert_close(fleet.step(x.double(), name).logits, alone.step(x.double(), name).logits)
    assert fleet._groups._rates[1].dtype == torch.float64
    fleet.save(tmp_path / "a.safetensors", "a")  # which is on disk
    fleet.load(tmp_path / "a.safetensors", "a")


def test_a_full_disk_changes_nothing(tmp_path, monkeypatch):
    fleet, x = on_disk(tmp_path)
    fleet.step(x, "b")

    def full(self, data):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        for act in (lambda: fleet.open("c"), lambda: fleet.step(x, "a"), lambda: fleet.reset()):
            with pytest.raises(come.StateError, match="No space left on device"):
                act()
    assert fleet.streams == ["a", "b"]
    assert [fleet.count(name) for name in "ab"] == [0, 1]
    fleet.step(x, "a")


def test_looking_at_a_stream_leaves_it_where_it_is_and_a_reset_keeps_its_counters(tmp_path):
    fleet, x = on_disk(tmp_path)
    bad = x.clone()
    bad[0] = torch.nan
    for batch in (bad, x, x):
        fleet.step(batch, "a")
    fleet.step(x, "b")
    files = list(tmp_path.rglob("*.safetensors"))
    assert fleet.count("a") == 3
    assert list(tmp_path.rglob("*.safetensors")) == files
    fleet.step(x, "b")
    fleet.reset("a")
    assert fleet.health("a")["invalid_samples"] == 1


def test_the_memory_that_is_available_counts(monkeypatch):
    """Not what is free: most of a computer's memory is a cache of files, which makes room."""
    monkeypatch.setattr(os, "sysconf", lambda name: 1)
    assert len(come.Fleet(TinyClassifier(NORMS["group"]), streams=3)) == 3


def test_a_stream_without_a_threshold_beside_one_that_has_one(tmp_path):
    model, x = TinyClassifier(NORMS["group"]), batches(1, size=8)[0]
    with_one = come.Fleet(model, "tent", streams=["a"])
    with_one.calibrate(batches(10, seed=5), coverage=0.7)
    with_one.save(tmp_path / "a.safetensors", "a")
    fleet = come.Fleet(model, "tent", streams=["b"])
    fleet.load(tmp_path / "a.safetensors", "a")
    out = fleet.step(x, list("abababab"))
    assert torch.equal(out.abstain[::2], with_one.step(x[::2], "a").abstain)
    assert not out.abstain[1::2].any()


def test_what_only_some_groups_return():
    one, two = torch.ones(1, 3), torch.zeros(2, 3)
    out = in_order([([1], come.method.Step(one)), ([0, 2], come.method.Step(two, torch.ones(2)))], 3)
    assert out.logits[:, 0].tolist() == [0, 1, 0]
    assert out.loss[::2].tolist() == [1, 1]
    assert out.loss[1].isnan()
    assert out.valid is None


def test_a_seed_of_its_own_is_loaded_as_it_was(make, tmp_path):
    """It came back as 3.0, which draws other numbers than 3."""
    fleet, again, x = make("deyo"), make("deyo"), stream(1, size=6)[0]
    fleet.open("a", seed=3)
    fleet.save(tmp_path)
    again.load(tmp_path)
    assert repr(again._streams["a"].own) == "{'seed': 3}"
    assert torch.equal(again(x, "a"), fleet(x, "a"))
    assert all(torch.equal(v, fleet.adapted_parameters("a")[k]) for k, v in again.adapted_parameters("a").items())


# ---- bad input ----


@pytest.mark.parametrize(
    "name", ["", "../up", "a/b", "a b", "é", "x" * 129, ".hidden", "a\n", "a\0b", -1, 1.5, None, True]
)
def test_bad_names(name, make):
    fleet = make("tent")
    with pytest.raises(come.ConfigError, match="the name of a stream must be 1 to 128 letters"):
        fleet.open(name)
    assert len(fleet) == 0


def test_bad_input(make, tmp_path, monkeypatch):
    fleet, x = make("tent", streams=2), stream(1, size=4)[0]
    with pytest.raises(come.ConfigError, match="there is no stream '7'; open"):
        fleet(x, list("0107"))
    with pytest.raises(come.InputError, match="each of the 4 samples, got 3 names"):
        fleet(x, list("010"))
    with pytest.raises(come.ConfigError, match="stream '1' is open already"):
        fleet.open(1)
    for name in ("health", "close", "reset", "count"):
        with pytest.raises(come.ConfigError, match="there is no stream 'nobody'"):
            getattr(fleet, name)("nobody")
    assert fleet.count("0") == 0
    with pytest.raises(come.ConfigError, match="streams must be a list of names"):
        make("tent", streams="abc")
    with pytest.raises(come.ConfigError, match="resident must be an integer >= 1"):
        make("tent", resident=0)
    with pytest.raises(come.ConfigError, match="folder that exists"):
        make("tent", folder=tmp_path / "none")
    with pytest.raises(come.ConfigError, match="policy='raise'"):
        make("tent", guard=come.Guard(policy="raise"))
    with pytest.raises(come.ConfigError, match="no torch optimizer"):
        make("tent", optimizer=lambda params, lr: torch.optim.RMSprop(params, lr=lr))
    monkeypatch.setattr("come.streams.store._free", lambda device: 1000)
    with pytest.raises(come.ConfigError, match=r"1000 streams of .* MB each do not fit into the .* resident="):
        make("tent", streams=1000)


@pytest.mark.parametrize("method", ["cotta", "rotta"])
def test_a_method_that_waits_is_refused(method, make):
    with pytest.raises(come.ConfigError, match="cannot run for many streams at once"):
        make(method)


def test_what_cannot_differ_by_stream_is_refused_by_name(make):
    with pytest.raises(come.ConfigError, match=r"cannot differ by stream: a fleet knows weights and biases of norm"):
        make("tent", select=come.select.everything(), streams=2)

    class OddNorm(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(8))

        def forward(self, x):
            return x @ torch.diag(self.scale)

    fleet = come.Fleet(nn.Sequential(nn.Linear(4, 8), OddNorm(), nn.Linear(8, 3)), "tent", streams=2)
    with pytest.raises(come.ConfigError, match="'scale' of OddNorm cannot differ by stream: the layer uses it in diag"):
        fleet(torch.randn(4, 4), list("0101"))


def test_a_method_that_looks_at_values_is_refused(make):
    class Looks(come.Method):
        name = "looks"

        def adapt(self, ctx, x):
            logits = ctx.forward(x)
            if float(logits.mean()) > 0:
                ctx.descend(logits.mean())
            return come.Step(logits)

    fleet = come.Fleet(TinyClassifier(NORMS["layer"]).to(DEVICE).double(), Looks(lr=0.1), streams=2)
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt:  # which is being handled, and is not the cause
        with pytest.raises(come.ConfigError, match="looks cannot run for many streams at once"):
            fleet(stream(1, size=4)[0], list("0101"))


def test_a_model_that_has_tokens_first_is_refused():
    """Its norm layers see (tokens, samples, width): which rows belong to which stream cannot be told."""

    class TokensFirst(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.head = nn.LayerNorm(4), nn.Linear(8, 3)

        def forward(self, x):
            return self.head(self.norm(x.view(len(x), 2, 4).transpose(0, 1)).transpose(0, 1).flatten(1))

    fleet = come.Fleet(TokensFirst(), "tent", streams=2)
    with pytest.raises(come.ConfigError, match="TokensFirst does not keep samples in the first dimension"):
        fleet(torch.randn(4, 8), list("0101"))


def test_how_it_looks(make):
    assert repr(make("tent", streams=3, resident=2)).startswith("Fleet(3 streams, 2 resident, each Tent(TinyClassifier")
