"""Twelve promises, and the ways in which each was broken before."""

from __future__ import annotations

import contextlib
import copy
import gc
import math
import multiprocessing
import os
import signal
import threading
import time
import warnings
import weakref

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import come
from come import Guard, corruptions
from come.guard.signals import judge, no_history
from come.guard.verdict import Verdict, collapsed, compare, judged
from come.guard.watch import LAG, Watch, send
from come.method import Context
from come.model.inputs import Arguments
from come.testing import NORMS, TinyClassifier, batches

METHODS = come.methods.names()
HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


def tiny(norm="layer", seed=0):
    return TinyClassifier(NORMS[norm], seed)


def state_of(model):
    return {k: v.clone() for k, v in model.state_dict().items()}


def same(a, b):
    return a.keys() == b.keys() and all(torch.allclose(a[k], b[k], rtol=0, atol=0, equal_nan=True) for k in a)


# ---- 1. It adapts ----


def moved(dtype, method, norm):
    more = {"eata": {"beta": 0.0, "margin": 1.5, "redundancy": 2.0}, "sar": {"margin": 1.5}}.get(method, {})
    adapter = come.adapt(tiny(norm).to(dtype), method, **more)
    before = adapter.adapted_parameters
    labels = torch.cat([adapter(x.to(dtype)).argmax(dim=1) for x in batches(20)])
    after = adapter.adapted_parameters
    return sum(int((after[k] != before[k]).sum()) for k in after), labels


@pytest.mark.parametrize("norm", ["layer", "batch", "group"])
@pytest.mark.parametrize("method", ["tent", "eata", "sar"])
@pytest.mark.parametrize("dtype", HALF.values(), ids=HALF)
def test_half_precision_moves_as_many_values_as_float32(dtype, method, norm):
    full, labels = moved(torch.float32, method, norm)
    half, half_labels = moved(dtype, method, norm)
    assert full > 0
    assert half >= 0.95 * full
    assert (labels == half_labels).double().mean() > 0.93


def test_half_precision_follows_float32_over_many_steps():
    """In bf16 a weight near 1 cannot move by less than 0.004: the steps are kept in float32."""
    paths = {}
    for dtype in (torch.float32, torch.bfloat16):
        adapter = come.adapt(tiny().to(dtype), "tent", objective="em", lr=2e-4)
        for x in batches(40):
            adapter(x.to(dtype))
        change = {k: v - adapter.source_parameters[k] for k, v in adapter.adapted_parameters.items()}
        paths[dtype] = torch.cat([v.flatten() for v in change.values()])
    a, b = paths.values()
    assert torch.cosine_similarity(a, b, dim=0) > 0.95
    assert 0.8 < b.norm() / a.norm() < 1.25


@pytest.mark.parametrize("how", ["assign", "in place", "replaced", "replaced deep"])
def test_weights_that_are_exchanged_behind_the_adapter_are_noticed(how):
    model = tiny()
    adapter = come.adapt(model, "tent", lr=0.1)
    adapter(batches(1)[0])
    if how == "assign":
        model.load_state_dict(state_of(tiny(seed=1)), assign=True)
    elif how == "in place":
        model.load_state_dict(state_of(tiny(seed=1)))
        with torch.no_grad():
            model.blocks[0][1].weight.mul_(1.5)
    elif how == "replaced":
        model.blocks[0][1] = NORMS["layer"](8)
    else:
        model.blocks[0] = copy.deepcopy(model.blocks[0])
    with pytest.raises(come.ModelError, match=r"(replaced|overwritten) after adapt\(\)"):
        adapter(batches(1)[0])


def test_other_weights_of_the_model_are_the_users():
    model = tiny()
    adapter = come.adapt(model, "tent")
    with torch.no_grad():
        model.head.bias.add_(100.0)
    assert (adapter(batches(1)[0]) > 50).all()


class Unreachable(nn.Module):
    """Its norm layer is there, and is not used."""

    def __init__(self):
        super().__init__()
        self.norm, self.head = nn.LayerNorm(4), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(x)


def test_no_gradient_is_an_error():
    with pytest.raises(come.ModelError, match="no gradient reaches the 2 adapted"):
        come.adapt(Unreachable(), "tent")(torch.randn(5, 4))


# ---- 2. The model is given back bit for bit: it is never changed (interrupts: tests/test_interrupts.py) ----


class Wrapper(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)


def test_a_model_and_its_wrapper_can_both_be_adapted():
    model = tiny("batch")
    before = state_of(model)
    alone = [come.adapt(tiny("batch"), "tent", lr=0.1)(x) for x in batches(1)]
    one, two = come.adapt(model, "tent", lr=0.1), come.adapt(Wrapper(model), "sar", lr=0.1)
    for x in batches():
        one(x)
        two(x)
    one.reset()
    assert torch.equal(one(batches(1)[0]), alone[0])
    one.close()
    two(batches(1)[0])
    two.close()
    assert same(before, state_of(model))


def test_close_while_another_threads_step_waits():
    for trial in range(10):
        model = tiny("batch")
        before = state_of(model)
        adapter = come.adapt(model, "tent", lr=0.1)
        wrong = []

        def work(adapter=adapter, wrong=wrong):
            try:
                for x in batches(5):
                    adapter(x)
            except come.ClosedError:
                pass
            except BaseException as error:
                wrong.append(error)

        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        time.sleep(0.001 * trial)
        adapter.close()
        for thread in threads:
            thread.join()
        assert not wrong
        assert same(before, state_of(model))


def test_close_in_an_event():
    model = tiny("batch")
    before = state_of(model)
    x = batches(1)[0]
    x[0] = math.nan
    adapter = come.adapt(model, "tent", lr=0.1, guard=Guard(on_event=lambda event: adapter.close()))
    for _ in range(LAG):
        adapter(x)
    adapter(x)  # reads the signals of the first step: the event closes the adapter
    with pytest.raises(come.ClosedError):
        adapter(x)
    assert same(before, state_of(model))


def test_a_reset_after_close_touches_nothing():
    model = tiny()
    adapter = come.adapt(model, "tent", lr=0.1)
    adapter(batches(1)[0])
    adapter.close()
    with torch.no_grad():
        model.blocks[0][1].weight.fill_(7.0)
    with pytest.raises(come.ClosedError):
        adapter.reset()
    assert (model.blocks[0][1].weight == 7).all()


class Counts(TinyClassifier):
    """Writes a buffer in place and rebinds another in each forward."""

    def __init__(self):
        super().__init__(NORMS["layer"])
        self.register_buffer("calls", torch.zeros(1))
        self.register_buffer("last", torch.zeros(2))

    def forward(self, x):
        self.calls.add_(1)
        self.last = x.new_ones(2)
        return super().forward(x) * (1 + 0.1 * self.calls)


def test_buffers_that_a_forward_writes_stay_as_they_were(tmp_path):
    model = Counts()
    buffers = model.calls, model.last
    with come.adapt(model, "sar", lr=0.1) as adapter:
        first = [adapter(x) for x in batches()]
        assert float(model.calls) == 0
        assert model.last is buffers[1]
        adapter.save(tmp_path / "state")
        expected = adapter(batches(1)[0])
        adapter.reset()
        assert all(torch.equal(a, adapter(x)) for a, x in zip(first, batches(), strict=True))
    resumed = come.adapt(model, "sar", lr=0.1)
    resumed.load(tmp_path / "state")
    assert torch.equal(resumed(batches(1)[0]), expected)


def test_a_buffer_that_the_user_changes_is_used():
    model = Counts()
    adapter = come.adapt(model, "source")
    x = batches(1)[0]
    first = adapter(x)
    model.calls.fill_(9.0)
    assert not torch.equal(adapter(x), first)
    model.register_buffer("calls", torch.zeros(1))
    assert torch.equal(adapter(x), first)


# ---- 3. A step is a transaction (errors in forwards: tests/test_contract.py) ----


class Explodes(TinyClassifier):
    """Gives finite logits and an infinite gradient once it is told to."""

    explode = False

    def forward(self, x):
        z = super().forward(x)
        return z + 1e-30 * torch.sqrt((z * 0).abs()) if self.explode else z  # d sqrt at 0 is infinite


@pytest.mark.parametrize("method", ["tent", "eata", "sar", "deyo", "roid", "tea", "rotta", "cotta"])
def test_a_refused_update_is_refused_as_a_whole(method, build):
    """Weights, moments and memory: RoTTA's ledger, TEA's buffer, ROID's average, CoTTA's teacher."""
    model = Explodes(NORMS["layer"])
    always = {"eata": {"margin": 9.0, "redundancy": 9.0}, "sar": {"margin": 9.0}, "deyo": {"limit": 9.0, "drop": -1.0}}
    adapter = build(model, method, **always.get(method, {}), **({"every": 12} if method == "rotta" else {}))
    adapter(batches(1)[0])
    before = adapter.state_dict()
    model.explode = True
    step = adapter.step(batches(2)[1])
    model.explode = False
    after = adapter.state_dict()
    kept = [k for k in before if k.startswith(("weights", "moment.", "state."))]
    assert [k for k in kept if not torch.equal(before[k].nan_to_num(), after[k].nan_to_num())] == []
    assert step.logits.isfinite().all()
    for _ in range(LAG):
        adapter(batches(1)[0])
    assert adapter.health()["update_refused"] == 1


def test_a_refused_step_of_foa_keeps_its_search(build):
    model = build.model("foa")(NORMS["layer"])
    adapter, untouched = build(model, "foa"), build(model, "foa")
    for each in (adapter, untouched):
        each(batches(1)[0])
    broken = model.head.register_forward_hook(lambda _, __, out: out * math.nan)
    adapter(batches(2)[1])
    broken.remove()
    assert torch.equal(adapter.state["best"], untouched.state["best"])
    assert all(torch.equal(v.nan_to_num(), untouched.state[k].nan_to_num()) for k, v in adapter.state.items())


# ---- 4. No weight that is not finite ----


@pytest.mark.parametrize("optimizer", ["AdamW", "RMSprop", "NAdam", "Adagrad", "SGD"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_any_optimizer_keeps_the_weights_finite(optimizer, dtype):
    build = getattr(torch.optim, optimizer)
    model = tiny().to(dtype)
    adapter = come.adapt(model, "tent", lr=1e-2, optimizer=lambda params, lr: build(params, lr=lr))
    before = adapter.adapted_parameters
    for x in batches(8):
        assert adapter.step(x.to(dtype)).valid.all()
    after = adapter.adapted_parameters
    assert all(v.isfinite().all() for v in after.values())
    assert any((after[k] != before[k]).any() for k in after)


@pytest.mark.parametrize("optimizer", ["sgd", "adam", lambda params, lr: torch.optim.AdamW(params, lr=lr)])
def test_a_huge_learning_rate_keeps_the_weights_finite(optimizer):
    adapter = come.adapt(tiny().half(), "tent", lr=1e30, optimizer=optimizer)
    for x in batches(5):
        adapter(x.half())
    assert all(v.isfinite().all() and v.half().isfinite().all() for v in adapter.adapted_parameters.values())


def test_a_model_that_breaks_is_noticed():
    """All answers NaN, from the source too: it is said, and counted."""
    model = tiny()
    events = []
    adapter = come.adapt(model, "tent", guard=Guard(on_event=events.append))
    adapter(batches(1)[0])
    with torch.no_grad():
        model.head.weight.fill_(math.nan)
    for x in batches(20):
        step = adapter.step(x)
        assert not step.valid.any()
    assert adapter.health()["unanswered"] > 0
    assert any("the weights of the model are damaged" in event.message for event in events)


def test_weights_that_break_only_the_adapted_model_are_put_back():
    adapter = come.adapt(tiny(), "tent", lr=1e-3)
    for x in batches(3):
        adapter(x)
    nowhere = torch.full_like(adapter._state.weights, math.nan)
    adapter._state = adapter._state._replace(weights=nowhere)  # as cosmic rays do
    steps = [adapter.step(x) for x in batches(12, seed=5)]
    assert adapter.health()["collapse"] == adapter.health()["recovered"] == 1
    assert steps[-1].valid.all()
    assert all(v.isfinite().all() for v in adapter.adapted_parameters.values())


@pytest.mark.parametrize("name", ["weights", "moment.momentum", "guard.row"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_state_that_is_not_finite_is_refused(name, value):
    adapter = come.adapt(tiny(), "tent", lr=1e-3)
    for x in batches(20, size=64):
        adapter(x)
    before = adapter.state_dict()
    bad = {**before, name: torch.full_like(before[name], value)}
    with pytest.raises(come.StateError, match=r"finite|out of range"):
        adapter.load_state_dict(bad)
    assert same(before, adapter.state_dict())


@pytest.mark.parametrize("method", ["cotta", "eata", "roid", "sar", "steady", "t3a"])
def test_what_a_method_remembers_must_be_finite(method, build):
    adapter = build(build.model(method)(NORMS["batch" if method == "cotta" else "layer"]), method)
    adapter(batches(1)[0])
    saved = adapter.state_dict()
    names = [name for name, value in saved.items() if name.startswith("state.") and value.is_floating_point()]
    assert names
    for name in names:
        for value in (math.nan, math.inf):
            with pytest.raises(come.StateError, match=f"'{name}' of the state is not finite"):
                adapter.load_state_dict(saved | {name: torch.full_like(saved[name], value)})
    adapter.load_state_dict(saved)


UNLIMITED = {("guard.latest", value) for value in ("nan", "inf", "-1", "1e30")} | {
    ("guard.history", "nan"),  # no batch yet
    ("guard.history", "1e30"),
    ("guard.rows", "1e30"),
    ("guard.row", "1e30"),
    ("guard.rows", "-1"),
    ("guard.row", "-1"),
    ("guard.counters", "1e30"),
    ("guard.sums", "1e30"),
    ("guard.sums", "-1"),  # what statistics of the batch gain may be negative
    ("guard.level", "-1"),  # not yet known
}
"""What may be so: signals that were not finite are shown, and these have no limits."""


@pytest.mark.parametrize("value", ["nan", "inf", "-1", "1e30"])
def test_what_the_guard_remembers_must_be_in_range(value):
    """guard.counters gave a raw ValueError, and guard.scale=1e30 multiplied the learning rate."""
    adapter = come.adapt(tiny(), "tent", optimizer="adam")
    for x in batches(20, size=64):
        adapter(x)
    saved = adapter.state_dict()
    names = [name for name in saved if name.startswith("guard.") or name in ("count", "selected")]
    assert {"guard.scale", "guard.counters", "guard.sums", "guard.due", "guard.level", "guard.pending.1"} <= set(names)
    for name in names:
        whole = not saved[name].is_floating_point()
        if (name, value) in UNLIMITED or (whole and value != "-1"):
            continue
        with pytest.raises(come.StateError, match=r"of the state|must be"):
            adapter.load_state_dict(saved | {name: torch.full_like(saved[name], float(value))})
    assert same(saved, adapter.state_dict())
    with pytest.raises(come.StateError, match=r"'moment\.second' of the state must be >= 0"):
        adapter.load_state_dict(saved | {"moment.second": -torch.ones_like(saved["moment.second"])})


def test_the_note_is_under_the_checksum(tmp_path):
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file

    fleet, path = come.Fleet(tiny(), streams=["a"]), tmp_path / "a.safetensors"
    path.write_bytes(fleet.packed("a", "mine"))
    assert come.state.saving.note_of(path) == "mine"
    with safe_open(path, "pt") as file:
        about = file.metadata()
    save_file(load_file(path), path, metadata=about | {"note": "yours"})
    for act in (lambda: fleet.load(path, "a"), lambda: come.state.saving.note_of(path)):
        with pytest.raises(come.StateError, match="checksum mismatch"):
            act()


def test_a_model_that_is_broken_from_the_start_is_refused():
    model = tiny()
    with torch.no_grad():
        model.head.weight[0, 0] = math.nan
    with pytest.raises(come.ModelError, match=r"'head\.weight' of TinyClassifier is not finite"):
        come.adapt(model)


# ---- 5. Never far below the source for long, on BatchNorm too ----


@pytest.fixture(scope="module")
def resnet():
    """The embedded BatchNorm model and clean images: (model, images, labels, source's labels)."""
    from come.bench import models
    from come.bench.data import FashionSource

    model = models.load("fashion-resnet-bn")
    images, y, *_ = FashionSource(size=1400).load(range(1400))
    x = model.preprocess(images)
    with torch.no_grad():
        known = torch.cat([model.module.eval()(part).argmax(dim=1) for part in x.split(200)])
    return model.module, x, y, known


@pytest.mark.parametrize(
    ("method", "size", "order"),
    [
        ("norm", 1, "shuffled"),
        ("tent", 2, "shuffled"),
        ("norm", 4, "shuffled"),
        ("norm", 64, "sorted"),
        ("tent", 64, "sorted"),
    ],
)
def test_batch_norm_stays_within_three_points_of_the_source(method, size, order, resnet):
    model, x, y, known = resnet
    if order == "sorted":
        chosen = y.argsort(stable=True)
        x, y, known = x[chosen], y[chosen], known[chosen]
    last = 1400 if size > 4 else 800
    adapter = come.adapt(model, method)
    mine = torch.cat([adapter(part).argmax(dim=1) for part in x[:last].split(size)])
    later = slice(640, last)  # after ten windows
    accuracy, source = ((labels[later] == y[later]).double().mean() for labels in (mine, known[:last]))
    assert source > 0.85
    assert accuracy > source - 0.03


def test_the_published_statistics_are_available_by_name(resnet):
    model, x, y, _ = resnet
    chosen = y.argsort(stable=True)[:256]
    assert "statistics=mixed" in repr(come.adapt(model, "tent"))
    assert "statistics=batch" in repr(come.adapt(model, "tent", guard=False))
    assert "statistics=mixed" in repr(come.adapt(model, "steady"))
    assert "statistics=source" in repr(come.adapt(model, "steady", guard=False))
    bare = come.adapt(model, "norm", guard=False)
    named = come.adapt(model, "norm", guard=Guard(policy="warn"), statistics="batch")
    for part in x[chosen].split(64):
        assert torch.equal(bare(part), named(part))


def test_batch_statistics_are_used_when_the_stream_calls_for_it(resnet):
    """And not before: it begins on the source's."""
    model, x, y, _ = resnet
    adapter = come.adapt(model, "norm")
    assert adapter.health()["batch_statistics"] == 0
    for part in x[y.argsort(stable=True)][:512].split(64):
        adapter(part)
        assert adapter.health()["batch_statistics"] == 0
    noisy = corruptions.corrupt((127.5 * (x[:1280] + 1)).round().byte(), "gaussian_noise", 5)
    x = noisy / 127.5 - 1
    with torch.no_grad():
        source = torch.cat([model(part).argmax(dim=1) for part in x.split(64)])
    mine = torch.cat([adapter(part).argmax(dim=1) for part in x.split(64)])
    assert adapter.health()["batch_statistics"] == 1
    assert adapter.health()["statistics"] == 1
    late = slice(640, 1280)  # after ten windows
    right, known = ((labels[late] == y[:1280][late]).double().mean() for labels in (mine, source))
    assert right > known + 0.15


# ---- 6. No false alarm ----


def verdict(adapted, source, *, corrected=False):
    usable = torch.ones(len(source), dtype=torch.bool)
    return bool(collapsed(Verdict(*judged(compare(adapted, source, usable, corrected=corrected)).tolist())))


def test_a_model_that_rightly_names_one_class_is_not_condemned_where_the_source_scatters():
    """Class-sorted samples: the source is unsure, and right in half of them; the corrected answers are right in all."""
    generator = torch.Generator().manual_seed(0)
    source = torch.randn(64, 50, generator=generator)
    source[:, 7] += 2.0
    assert (source.argmax(dim=1) == 7).double().mean() < 0.6
    adapted = 9.0 * nn.functional.one_hot(torch.full((64,), 7), 50)
    assert not verdict(adapted, source, corrected=True)
    assert not verdict(adapted[:31], source[:31]), "too few to say so of a method that does not correct by them"
    wrong = 9.0 * nn.functional.one_hot(torch.full((64,), 8), 50)
    assert verdict(wrong, source, corrected=True)


def test_a_model_that_names_one_class_is_not_condemned_where_the_source_does_too():
    source = torch.randn(64, 50, generator=torch.Generator().manual_seed(0))
    source[:, 7] += 5.0
    assert 0.9 < (source.argmax(dim=1) == 7).double().mean() < 1
    assert not verdict(9.0 * nn.functional.one_hot(torch.full((64,), 7), 50), source)


def test_roid_on_a_class_sorted_stream_raises_no_alarm():
    from come.bench import models
    from come.bench.data import Stream, open_source
    from come.bench.data import batches as load

    model = models.load("fashion-vit")
    p = model.preprocess
    source = open_source("fashion:1280", p)
    stream = Stream.shuffled("fashion:1280", 1280, corruption="contrast", severity=5, seed=0)
    parts = list(load(source, stream, p, batch_size=256))
    x, y = torch.cat([b.images for b in parts]), torch.cat([b.labels for b in parts])
    adapter = come.adapt(model.module, "roid", normalization=(p.mean, p.std))
    for part in x[y.argsort(stable=True)].split(64):
        adapter(part)
    assert adapter.health()["collapse"] == 0
    assert adapter.health()["healthy"] >= 3


def fed(watch, guard, batches):
    """A watch that has read healthy signals of so many batches of 64."""
    events = []
    for _ in range(batches):
        watch, seen, _ = watch.read(guard, False, True)
        sums = None
        events += seen
        values = [1.0, 0.0, 0.0, 0.0, 0.1, 2.0, 0.5, 9.0, 0.1, 0.6]
        if watch.asking:
            values += Verdict(1.0, 0.9, 1.0, 64.0, 0.0, 0.0)
            sums = torch.zeros(3)
        sent = send(watch.steps, 64, torch.tensor(values, dtype=torch.float64))
        watch = watch.stepped(guard, sent, watch.history, sums, False)
    return watch, events


def test_the_learning_rate_stays_lower_however_long_the_model_is_healthy():
    """It grew back to the one that had failed, and failed again."""
    guard = Guard()
    watch, _ = fed(Watch.new(guard, torch.device("cpu"), False), guard, 3)
    watch, (event,) = watch.recovered(guard, come.Event("collapse", 3, "", {}), False, True)
    assert event.message == "source weights restored, learning rate x 0.0003 until reset()"
    assert watch.scale == pytest.approx(3e-4)
    watch, events = fed(watch, guard, 600)
    assert watch.scale == pytest.approx(3e-4)
    assert {event.kind for event in events} == {"healthy"}
    assert watch.anew(guard, False).scale == 1.0
    assert watch.forgotten(guard).scale == pytest.approx(3e-4)


def test_after_each_fall_the_learning_rate_is_lower_and_the_source_is_asked_as_at_the_start():
    guard, fall = Guard(), come.Event("collapse", 3, "", {})
    watch, _ = fed(Watch.new(guard, torch.device("cpu"), False), guard, 50)
    for scale in (5e-3, 5e-3 * 11e-4):  # after 50 windows, then after 11
        assert watch.due > watch.age
        watch, _ = watch.recovered(guard, fall, False, True)
        assert watch.scale == pytest.approx(scale)
        assert watch.asking
        watch, events = fed(watch, guard, 11)
        assert [event.kind for event in events] == ["healthy"] * 4, "those at 0, 2, 4 and 7"


def test_weights_that_have_half_collapsed_are_not_what_is_restored():
    """The last weights that were found healthy might be on their way down."""
    model = tiny()
    adapter = come.adapt(model, "tent", lr=1e-2)
    for x in batches(6, size=64):
        adapter(x)
    assert adapter.health()["healthy"] >= 2
    drifted = adapter.adapted_parameters
    adapter._state = adapter._state._replace(weights=torch.full_like(adapter._state.weights, math.nan))
    adapter._state = adapter._state._replace(watch=adapter._state.watch._replace(due=0))
    for x in batches(LAG + 2, size=64, seed=5):
        adapter(x)
        if adapter.health()["recovered"]:
            break
    assert adapter.health()["recovered"] == 1
    anew = come.adapt(model, "tent", lr=1e-2 * adapter.health()["lr_scale"], guard=False)
    anew(x)
    for name, p in adapter.adapted_parameters.items():
        torch.testing.assert_close(p, anew.adapted_parameters[name])
        assert not torch.allclose(p, drifted[name])


# ---- 7. What is refused is refused for a reason ----


@pytest.mark.parametrize("size", [1, 8])
def test_a_dark_start_does_not_lock_the_guard(size):
    adapter = come.adapt(tiny(), "tent")
    x = batches(1)[0][:size]
    for _ in range(5):
        adapter(1e-5 * x)
    answered = [adapter.step(x).valid.all().item() for _ in range(30)]
    assert all(answered[5:])


def test_a_slow_ratchet_ends_at_the_largest_input():
    adapter = come.adapt(tiny(), "tent", guard=Guard(largest_input=1e4))
    x = batches(1)[0] / batches(1)[0].abs().max()
    valid = [adapter.step(x * 3.0**i).valid.all().item() for i in range(20)]
    assert all(valid[:8])
    assert not any(valid[10:])


def test_black_frames_tell_nothing():
    adapter = come.adapt(tiny(), "tent")
    for _ in range(12):
        adapter(torch.zeros(4, 3, 8, 8))
    assert adapter.step(batches(1)[0]).valid.all()


class Takes(nn.Module):
    """A table that all samples share, an additive mask of each sample, and the features."""

    def __init__(self):
        super().__init__()
        self.norm, self.head = nn.LayerNorm(6), nn.Linear(6, 5)

    def forward(self, x, mask=None, table=None):
        z = self.norm(x if mask is None else torch.where(mask.isinf(), 0, x))
        return self.head(z) + (0 if table is None else table.isnan().sum())


@pytest.mark.parametrize("where", ["mask", "table"])
def test_only_samples_are_judged(where):
    adapter = come.adapt(Takes(), "tent", per_sample=("x", "mask"))
    x = torch.randn(8, 6)
    mask = torch.where(torch.rand(8, 6) < 0.3, -math.inf, 0.0)
    table = torch.tensor([[math.nan, -math.inf, 1e30]] * 3)
    step = adapter.step(x, **{where: mask if where == "mask" else table})
    assert step.valid.all()
    x[2] = math.nan
    assert adapter.step(x, mask=mask).valid.tolist() == [i != 2 for i in range(8)]


def test_what_is_not_per_sample_reaches_the_model_as_it_is():
    x, table = torch.randn(8, 6), torch.full((3, 3), math.nan)
    x[1] = math.inf
    given, valid, _ = judge(Arguments(per_sample=(0,)).of((x,), {"table": table}), no_history(x.device), 1e6)
    assert given.kwargs["table"] is table
    assert valid.tolist() == [i != 1 for i in range(8)]


class Masks(TinyClassifier):
    """Rules out the last class."""

    def forward(self, x):
        z = super().forward(x)
        return torch.cat([z[:, :-1], torch.full_like(z[:, -1:], -math.inf)], dim=1)


@pytest.mark.parametrize(
    "objective", ["em", "come", "em:freeze_norm=true", "come:freeze_norm=false", "come:evidence=relu"]
)
def test_a_class_that_is_masked_by_minus_infinity_is_no_fault(objective):
    adapter = come.adapt(Masks(NORMS["layer"]), "tent", objective=objective, lr=0.05)
    for x in batches(4):
        step = adapter.step(x)
        assert step.valid.all()
        assert step.loss.isfinite().all()
    assert adapter.health()["update_refused"] == 0
    assert any((v != adapter.source_parameters[k]).any() for k, v in adapter.adapted_parameters.items())


def test_masked_classes_are_as_if_they_were_not_there():
    z = torch.randn(6, 5, dtype=torch.float64)
    wide = torch.cat([z, torch.full((6, 2), -math.inf, dtype=torch.float64)], dim=1)
    for name in ("em", "come", "em:freeze_norm=true", "come:tau=2"):
        objective = come.objectives.get(name)
        a, b = z.clone().requires_grad_(), wide.clone().requires_grad_()
        torch.testing.assert_close(objective.entropy(a), objective.entropy(b))
        (ga,), (gb,) = (torch.autograd.grad(objective.entropy(t).sum(), t) for t in (a, b))
        torch.testing.assert_close(ga, gb[:, :5])
        torch.testing.assert_close(objective.uncertainty(z), objective.uncertainty(wide))


def test_a_broken_sample_is_the_least_certain_by_every_score():
    from come.metrics import SCORES

    adapter = come.adapt(tiny(), "tent")
    x = batches(1)[0]
    x[3] = math.nan
    step = adapter.step(x)
    z = step.logits
    softmax, opinion = come.Softmax(), come.Opinion()
    scores = {
        "softmax": softmax.confidence(z),
        "belief": opinion.confidence(z),
        "certainty": 1 - opinion.uncertainty(z),
        "entropy": -softmax.entropy(z),
        "energy": z.logsumexp(dim=1),
        "loss": -step.loss,
    }
    assert SCORES
    assert {name: int(score.argmin()) for name, score in scores.items()} == dict.fromkeys(scores, 3)


@pytest.mark.parametrize("norm", ["layer", "batch"])
def test_nothing_selected_is_not_an_update_refused(norm):
    for method, more in {"deyo": {"limit": 1e-9}, "eata": {"margin": 1e-9, "beta": 0}, "sar": {"margin": 1e-9}}.items():
        adapter = come.adapt(tiny(norm), method, **more)
        for x in batches(5):
            assert not adapter.step(x).used.any()
        assert adapter.health()["update_refused"] == 0


# ---- 8. Looking changes nothing, and runs repeat ----


def test_looking_changes_nothing():
    runs = []
    for look in (False, True):
        adapter = come.adapt(tiny("batch"), "tent", lr=0.5)
        answers = []
        for x in batches(30):
            answers.append(adapter(x))
            if look:
                adapter.health()
                adapter.state_dict()
                repr(adapter)
                adapter.predict(x)
                copy.deepcopy(adapter)
        runs.append((answers, adapter.health(), adapter.state_dict()))
    assert all(torch.equal(a, b) for a, b in zip(runs[0][0], runs[1][0], strict=True))
    assert runs[0][1] == runs[1][1]
    assert same(runs[0][2], runs[1][2])


def test_one_guard_for_two_adapters_is_configuration_only():
    guard = Guard(warmup=2)
    first, second = (come.adapt(tiny(seed=s), "tent", lr=0.01, guard=guard) for s in (0, 1))
    alone = come.adapt(tiny(seed=1), "tent", lr=0.01, guard=Guard(warmup=2))
    for x in batches(12):
        first(x)
        assert torch.equal(second(x), alone(x))
    assert second.health() == alone.health()
    with pytest.raises(AttributeError):
        guard.policy = "warn"


def test_signals_are_read_at_a_fixed_lag():
    adapter = come.adapt(tiny(), "tent")
    x = batches(1)[0]
    x[0] = math.nan
    counts = []
    for _ in range(5):
        adapter(x)
        counts.append(adapter.health()["invalid_samples"])
    assert counts == [0.0] * LAG + [1.0, 2.0, 3.0]


class Ruined(come.Method):
    """After three batches its answers are of the first class."""

    name = "ruined"

    def adapt(self, ctx, x):
        seen = ctx.state["seen"] + 1
        ctx.state["seen"] = seen
        logits = ctx.forward(x).detach()
        first = torch.zeros_like(logits)
        first[:, 0] = 30.0
        return come.Step(torch.where(seen > 3, first, logits), None, ctx.valid)

    def initial_state(self, ctx, x):
        return {"seen": torch.zeros(())}


def test_the_whole_batch_is_answered_by_the_source_when_a_collapse_is_found():
    model = tiny()
    with torch.no_grad():
        model.head.weight.mul_(5.0)
    adapter = come.adapt(model, Ruined())
    data = batches(16, size=64)
    answers = [adapter(x) for x in data]
    with torch.no_grad():
        source = [model.eval()(x) for x in data]
    by_source = [torch.equal(a, s) for a, s in zip(answers, source, strict=True)]
    ruined = [bool((a[:, 0] == 30).all()) for a in answers]
    assert all(a or b for a, b in zip(by_source, ruined, strict=True)), "a batch was answered in part"
    asked = 4  # after 0 and 2: the first question since it was ruined
    assert ruined[3:asked] == [True] * (asked - 3)
    assert by_source[asked]
    assert ruined[asked + 1 : asked + LAG] == [True] * (LAG - 1), "its answer is under way"
    assert adapter.health()["collapse"] >= 1


# ---- 9. Resume is exact or refused ----


class Twice(nn.Module):
    """One module under two names, and one parameter in two modules."""

    def __init__(self):
        super().__init__()
        self.a = nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6))
        self.b = self.a
        self.c, self.d = nn.LayerNorm(6), nn.LayerNorm(6)
        self.d.weight = self.c.weight
        self.head = nn.Linear(6, 5)

    def forward(self, x):
        return self.head(self.d(self.c(self.b(self.a(x)).tanh())))


class Extra(Takes):
    """With state beside its tensors."""

    def __init__(self, extra=1):
        super().__init__()
        self.extra = extra

    def get_extra_state(self):
        return {"extra": self.extra}

    def set_extra_state(self, state):
        self.extra = state["extra"]


def quantized():
    from torch.ao.quantization import quantize_dynamic

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return quantize_dynamic(nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 8), nn.Linear(8, 5)), {nn.Linear})


def resumed(make, tmp_path):
    torch.manual_seed(0)
    model, data = make(), [torch.randn(12, 6) for _ in range(6)]
    twin = copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapter = come.adapt(model, "tent", lr=0.1)
        for x in data[:3]:
            adapter(x)
        adapter.save(tmp_path / "state")
        other = come.adapt(twin, "tent", lr=0.1)
        other.load(tmp_path / "state")
        for x in data[3:]:
            assert torch.equal(adapter(x), other(x))
    return model, adapter


def test_modules_under_two_names_resume(tmp_path):
    model, adapter = resumed(Twice, tmp_path)
    assert model.a is model.b
    assert model.c.weight is model.d.weight
    assert list(adapter.adapted_parameters) == ["a.1.weight", "a.1.bias", "c.weight", "c.bias", "d.bias"]


def test_models_with_extra_state_resume_and_are_told_apart(tmp_path):
    model, _ = resumed(Extra, tmp_path)
    model.extra = 2
    with pytest.raises(come.StateError, match="another source model"):
        come.adapt(copy.deepcopy(model), "tent", lr=0.1).load(tmp_path / "state")


@pytest.mark.filterwarnings("ignore")
def test_quantized_models_resume_or_say_why_not(tmp_path):
    """No gradient passes through a quantized layer, so only methods without one can be used."""
    torch.manual_seed(0)
    model, x = quantized(), torch.randn(12, 6)
    adapter = come.adapt(model, "norm")
    adapter(x)
    adapter.save(tmp_path / "state")
    other = come.adapt(copy.deepcopy(model), "norm")
    other.load(tmp_path / "state")
    assert torch.equal(adapter(x), other(x))
    torch.manual_seed(1)
    with pytest.raises(come.StateError, match="another source model"):
        come.adapt(quantized(), "norm").load(tmp_path / "state")


def test_a_model_that_differs_in_one_value_is_foreign(tmp_path):
    model = tiny()
    adapter = come.adapt(model, "tent", lr=0.1)
    adapter(batches(1)[0])
    adapter.save(tmp_path / "state")
    twin = tiny()
    with torch.no_grad():
        twin.blocks[2][0].weight.view(-1)[-1] += 1e-4
    with pytest.raises(come.StateError, match="another source model"):
        come.adapt(twin, "tent", lr=0.1).load(tmp_path / "state")


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"objective": "em"}, "objective="),
        ({"lr": 0.2}, r"lr=0\.1, this adapter has 0\.2"),
        ({"keep": 0.5}, "keep=1"),
        ({"optimizer": "adam"}, "optimizer="),
        ({"guard": False}, "guard="),
        ({"guard": Guard(backoff=0.5)}, "guard="),
    ],
)
def test_a_state_of_another_configuration_is_refused(other, words, tmp_path):
    make = lambda **more: come.adapt(tiny(), "tent", **({"lr": 0.1} | more))  # noqa: E731
    adapter = make()
    adapter(batches(1)[0])
    adapter.save(tmp_path / "state")
    with pytest.raises(come.StateError, match=words):
        make(**other).load(tmp_path / "state")


def test_other_source_data_is_refused(tmp_path):
    make = lambda seed: come.adapt(tiny(), "eata", source=batches(2, seed=seed))  # noqa: E731
    make(9).save(tmp_path / "state")
    make(9).load(tmp_path / "state")
    with pytest.raises(come.StateError, match="other source data"):
        make(8).load(tmp_path / "state")


# ---- 10. It keeps answering ----


def test_a_callback_that_fails_stops_nothing_and_is_counted(caplog):
    def full_disk(adapter, step):
        raise OSError(28, "No space left on device")

    adapter = come.adapt(tiny(), "tent")
    adapter.callbacks.append(full_disk)
    for x in batches(3):
        assert adapter(x).isfinite().all()
    assert adapter.health()["callback_failed"] == 3
    assert "callback full_disk failed" in caplog.text


def test_snapshots_that_cannot_be_written_stop_nothing(tmp_path):
    (tmp_path / "file").write_text("")
    adapter = come.adapt(tiny(), "tent")
    adapter.callbacks.append(come.callbacks.Snapshots(tmp_path / "file" / "below", every=1))
    adapter(batches(1)[0])
    assert adapter.health()["callback_failed"] == 1


def test_a_restart_keeps_the_newest_snapshots_and_every_other_file(tmp_path):
    mine = tmp_path / "tent-best.safetensors"
    mine.write_text("mine")
    for _ in range(3):  # runs
        adapter = come.adapt(tiny(), "tent")
        adapter.callbacks.append(come.callbacks.Snapshots(tmp_path, every=2, keep=2))
        for x in batches(5):
            adapter(x)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["tent-0000000005.safetensors", "tent-0000000006.safetensors", "tent-best.safetensors"]
    adapter.load(tmp_path / names[1])
    assert adapter.count == 4


def test_scalars_for_tensorboard():
    seen = []
    adapter = come.adapt(tiny(), "tent")
    adapter.callbacks.append(come.callbacks.Scalars(lambda name, value, step: seen.append((name, step))))
    for x in batches(4):
        adapter(x)
    assert ("come/entropy", 3) in seen
    assert ("come/agreement", 4) in seen


def steps_for_ever(adapter, stop):
    data = batches(1)[0]
    while not stop.is_set():
        adapter(data)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.skipif(
    torch.cuda.is_available(), reason="torch cannot take gradients after a fork where it has started device threads"
)
def test_a_fork_while_a_thread_steps():
    adapter = come.adapt(tiny("batch"), "tent")
    stop = threading.Event()
    thread = threading.Thread(target=steps_for_ever, args=(adapter, stop))
    thread.start()
    context = multiprocessing.get_context("fork")
    try:
        for _ in range(5):
            child = context.Process(target=adapter, args=(batches(1)[0],))
            child.start()
            child.join(60)
            alive = child.is_alive()
            child.kill()
            assert not alive
            assert child.exitcode == 0
    finally:
        stop.set()
        thread.join()


def saves_for_ever(path):
    adapter = come.adapt(tiny(), "tent")
    while True:
        adapter.save(path)


def test_a_killed_save_harms_nothing(tmp_path):
    """The state is whole, and nobody deletes the temporary file of another process: it may be alive on another machine."""
    path = tmp_path / "state"
    context = multiprocessing.get_context("fork")
    for trial in range(4):
        child = context.Process(target=saves_for_ever, args=(path,))
        child.start()
        deadline = time.monotonic() + 30
        while not path.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.03 * trial)
        os.kill(child.pid, signal.SIGKILL)
        child.join()
    beside = tmp_path / ".state.0123456789abcdef.tmp"
    beside.write_text("half of it")
    before = sorted(tmp_path.iterdir())
    adapter = come.adapt(tiny(), "tent")
    adapter.load(path)
    adapter.save(path)
    assert sorted(tmp_path.iterdir()) == before
    assert beside.read_text() == "half of it"


# ---- 11. Nothing is kept or paid for nothing ----


def test_source_batches_are_not_kept():
    for method in ("eata", "foa"):
        from come.testing import TinyTransformer

        source = batches(2, seed=9)
        seen = [weakref.ref(x) for x in source]
        adapter = come.adapt(TinyTransformer(NORMS["layer"]), method, source=source)
        del source
        gc.collect()
        assert not any(ref() is not None for ref in seen), method
        assert adapter.method.source is None


@pytest.mark.parametrize("method", [name for name in METHODS if name != "foa"])  # cma keeps tracebacks until gc runs
def test_an_adapter_that_is_dropped_is_gone_at_once(method, build):
    gc.disable()
    try:
        model = build.model(method)(NORMS["batch"])
        adapter = build(model, method)
        adapter(batches(1)[0])
        gone = weakref.ref(adapter)
        del adapter
        assert gone() is None
    finally:
        gc.enable()


class Counting(TorchDispatchMode):
    """How often each operation is dispatched."""

    def __init__(self):
        super().__init__()
        self.seen = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name()
        self.seen[name] = self.seen.get(name, 0) + 1
        return func(*args, **(kwargs or {}))


def dispatched(method, guard=False, blocks=4, **more):
    layers = [nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)) for _ in range(blocks)]
    adapter = come.adapt(nn.Sequential(*layers, nn.Linear(8, 5)), method, guard=guard, **more)
    x = torch.randn(16, 8)
    adapter(x)
    with Counting() as mode:
        adapter(x)
    return mode.seen


def test_a_guarded_step_is_hardly_more_than_a_loop_by_hand():
    """In operations, on a ViT of twelve blocks; what is more is small: the guard's time is in docs/performance.md."""
    from come.bench import models

    size = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 12, "num_heads": 2}
    model, x = models.build_embedded("vit", "layer", size), torch.rand(16, 3, 32, 32) - 0.5
    classifier = come.adapt(model, "tent")
    for _ in range(4):  # the source is asked at the third
        classifier(x)
    with Counting() as ours:
        classifier(x)

    model = copy.deepcopy(model).eval().requires_grad_(False)
    norms = [p for m in model.modules() if isinstance(m, nn.LayerNorm) for p in m.requires_grad_().parameters()]
    optimizer = torch.optim.SGD(norms, lr=1e-3, momentum=0.9)

    def by_hand():
        logits = model(x)
        come.Opinion().entropy(logits).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        return logits.detach()

    by_hand()
    with Counting() as theirs:
        by_hand()
    assert sum(ours.seen.values()) <= 1.1 * sum(theirs.seen.values())


def test_tent_does_not_sort():
    assert not any("sort" in name for name in dispatched("tent"))
    assert any("sort" in name for name in dispatched("tent", keep=0.5))


@pytest.mark.parametrize("method", ["eata", "sar", "roid"])
def test_methods_do_not_loop_over_parameters(method, monkeypatch):
    """Beyond the forwards and backwards, which Tent has too, the number of operations does not grow with the model."""
    monkeypatch.setattr(Context, "separate", False)  # a forward more, of few samples
    more = {"eata": {"beta": 1.0, "source": [torch.randn(4, 8)]}, "roid": {"consistency": False}}.get(method, {})
    forwards = 2 if method == "sar" else 1

    def grows(name, **arguments):
        return sum(dispatched(name, blocks=16, **arguments).values()) - sum(
            dispatched(name, blocks=8, **arguments).values()
        )

    assert grows(method, **more) <= forwards * grows("tent") + 4


# ---- 12. What a user would not think of ----


def test_a_model_that_returns_probabilities_is_told_once():
    class Softmaxed(TinyClassifier):
        def forward(self, x):
            return super().forward(x).softmax(dim=1)

    adapter = come.adapt(Softmaxed(NORMS["layer"]), "tent")
    for x in batches(2):
        adapter(x)
    with pytest.warns(UserWarning, match="returns? probabilities, not logits"):
        adapter(batches(1)[0])
    for x in batches(3):  # warnings are errors here
        adapter(x)
    assert adapter.health()["probabilities"] == 1


def test_select_alone_decides_what_adapts():
    """Whether a parameter requires gradients plays no part: most deployed models are frozen as a whole."""
    frozen = tiny().requires_grad_(False)
    come.adapt(frozen, "tent", lr=0.1)(batches(1)[0])
    adapter = come.adapt(frozen, "tent", lr=0.1)
    adapter(batches(1)[0])
    assert any((v != adapter.source_parameters[k]).any() for k, v in adapter.adapted_parameters.items())
    assert not any(p.requires_grad for p in frozen.parameters())

    def trainable(model):
        return {n: p for n, p in come.select.norm_affine()(model).items() if p.requires_grad}

    with pytest.raises(come.ModelError, match="nothing to adapt"):
        come.adapt(frozen, "tent", select=trainable)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"lr": "1e-3"}, "lr must be a positive number, or None for the default, got '1e-3'"),
        ({"lr": True}, "lr must be a positive number"),
        ({"lr": math.nan}, "lr must be a positive number"),
        ({"steps": True}, "steps must be an integer >= 1, got True"),
        ({"steps": 0}, "steps must be an integer >= 1, got 0"),
        ({"keep": "half"}, "hyperparameter of the wrong type"),
        ({"episodic": 1}, "episodic must be True or False, got 1"),
        (
            {"select": lambda model: list(model.parameters())},
            "select must return a dict of parameters by name, got list",
        ),
        ({"optimizer": lambda params, lr: None}, "must return a torch optimizer, got NoneType"),
        ({"statistics": "bach"}, "statistics must be one of batch, mixed, source, or None, got 'bach'"),
        ({"guard": "yes"}, "guard must be True, False or a come.Guard, got 'yes'"),
        ({"rate": 1}, "tent has no hyperparameter 'rate'"),
    ],
)
def test_bad_arguments(arguments, words):
    with pytest.raises(come.ConfigError) as caught:
        come.adapt(tiny(), "tent", **arguments)
    assert words in str(caught.value)


def test_models_without_values():
    with pytest.raises(come.ModelError, match="a lazy module"):
        come.adapt(nn.Sequential(nn.LazyLinear(4), nn.LayerNorm(4)), "tent")
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    with pytest.raises(come.ModelError, match="on the meta device"):
        come.adapt(model, "tent")


def test_wrappers_whose_weights_cannot_be_exchanged():
    with pytest.raises(come.ModelError, match=r"adapt the plain module in it \(for DataParallel: model\.module\)"):
        come.adapt(nn.DataParallel(tiny()), "tent")


def test_inputs_without_values():
    adapter = come.adapt(tiny(), "tent")
    with pytest.raises(come.InputError, match="pass a dense tensor"):
        adapter(batches(1)[0].to_sparse())
    with pytest.raises(come.InputError, match="on the meta device"):
        adapter(batches(1)[0].to("meta"))


def test_it_stands_where_a_model_stood():
    model = tiny()
    model.config = "of the model"
    adapter = come.adapt(model, "tent:lr=0.05")
    assert adapter.method.lr == 0.05
    assert adapter.train() is adapter.eval() is adapter.train(False) is adapter
    assert adapter.config == "of the model"
    with pytest.raises(AttributeError, match="nonsense"):
        _ = adapter.nonsense
    x = batches(1)[0]
    logits = adapter.predict(x)
    assert torch.equal(logits, adapter(x=x))
    assert not torch.equal(logits, adapter.predict(x))
    with contextlib.suppress(come.ConfigError):
        come.adapt(tiny(), "tent:lr=0.1", lr=0.2)
        raise AssertionError("lr was given twice")
