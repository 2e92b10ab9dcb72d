"""precision, compile, channels_last: the same answers, the user's model untouched, and what cannot be captured says so."""

from __future__ import annotations

import copy
import gc
import threading
import warnings
import weakref

import pytest
import torch
from pretended import pretend
from torch import nn

import come
from come.model.batchnorm import BatchStatistics
from come.model.copies import MixedNorm, Mode, ModelCopies, ModelCopy, Patches
from come.model.inputs import Inputs
from come.state.trees import leaves, like, signature
from come.step.compiled import CompiledSteps
from come.testing import NORMS, TinyClassifier, TinyTransformer, batches

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
needs_cuda = pytest.mark.skipif(not CUDA, reason="needs a CUDA device")


def said(seen):
    return [str(warning.message) for warning in seen if "compile=True" in str(warning.message)]


@pytest.fixture
def uncompiled(monkeypatch):
    """Without torch.compile, which takes long: what is asked is which batches would be compiled."""
    monkeypatch.setattr(CompiledSteps, "_compiled", lambda self, step, compute, run: step.borrow(compute))


def run(adapter, data):
    return [adapter(x.to(DEVICE)) for x in data]


CAPTURED = [name for name in come.methods.names() if not come.methods.get(name).waits]


@pytest.fixture
def make(build):
    def make(method, norm, objective="come", **more):
        return build(build.model(method)(NORMS[norm]).to(DEVICE), method, objective, **more)

    return make


@needs_cuda
@pytest.mark.parametrize("guard", [False, True])
@pytest.mark.parametrize("norm", ["layer", "batch"])
@pytest.mark.parametrize("method", CAPTURED)
def test_a_captured_stream_gives_the_same_answers(method, norm, guard, make):
    plain, fast = make(method, norm, guard=guard), make(method, norm, guard=guard, compile=True)
    for x in batches(6):
        x = x.to(DEVICE)
        one, two = plain.step(x), fast.step(x)
        torch.testing.assert_close(two.logits, one.logits, rtol=1e-3, atol=1e-3)
        assert (one.used is None) == (two.used is None)
    for name, value in plain.adapted_parameters.items():
        torch.testing.assert_close(fast.adapted_parameters[name], value, rtol=1e-3, atol=1e-3)
    assert plain.count == fast.count == 6


@needs_cuda
@pytest.mark.parametrize("method", ["tent", "sar", "eata", "tea"])
def test_two_captured_runs_give_the_same_numbers(method, make):
    one, two = make(method, "layer", compile=True), make(method, "layer", compile=True)
    for x in batches(5):
        assert torch.equal(one(x.to(DEVICE)), two(x.to(DEVICE)))


@needs_cuda
@pytest.mark.parametrize("method", ["tent", "sar", "eata", "tea", "t3a"])
def test_reset_save_and_load_in_the_middle_of_a_captured_stream(method, make, tmp_path):
    data = [x.to(DEVICE) for x in batches(8)]
    fast = make(method, "layer", compile=True)
    first = [fast(x) for x in data[:4]]
    fast.save(tmp_path / "state")
    later = [fast(x) for x in data[4:]]
    fast.load(tmp_path / "state")
    for x, expected in zip(data[4:], later, strict=True):
        assert torch.equal(fast(x), expected)
    fast.reset()
    for x, expected in zip(data[:4], first, strict=True):
        torch.testing.assert_close(fast(x), expected, rtol=1e-4, atol=1e-4)
    other = make(method, "layer")  # in another mode
    other.load(tmp_path / "state")
    torch.testing.assert_close(other(data[4]), later[0], rtol=1e-3, atol=1e-3)


@needs_cuda
@pytest.mark.parametrize("norm", ["layer", "batch"])
def test_a_collapse_is_undone_in_the_middle_of_a_captured_stream(norm, make):
    data = [x.to(DEVICE) for x in batches(40, size=64)]
    fast = make("tent", norm, objective="em", compile=True, lr=30.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for x in data:
            fast(x)
    assert fast.health()["recovered"] + fast.health()["statistics"] > 0
    assert all(value.isfinite().all() for value in fast.adapted_parameters.values())


@needs_cuda
def test_a_broken_batch_changes_nothing_in_a_captured_stream(make):
    fast = make("tent", "layer", compile=True)
    data = [x.to(DEVICE) for x in batches(4)]
    for x in data[:3]:
        fast(x)
    before = fast.adapted_parameters
    step = fast.step(torch.full_like(data[0], torch.nan))
    assert not step.valid.any()
    for name, value in fast.adapted_parameters.items():
        assert torch.equal(value, before[name])
    broken = data[3].clone()
    broken[0] = torch.inf
    assert fast.step(broken).valid.tolist() == [False, *[True] * (len(broken) - 1)]


def test_a_last_batch_that_is_smaller_is_not_compiled(make, uncompiled):
    fast = make("tent", "layer", compile=True)
    for x in [*batches(3), batches(1, size=3)[0], *batches(16), batches(1, size=3)[0]]:
        assert len(fast(x.to(DEVICE))) == len(x)
    assert len(fast._engine.compiled._shapes) == 1
    for x in [batches(1)[0], batches(1, size=3)[0]]:  # two shapes in turn
        fast(x.to(DEVICE))
    assert len(fast._engine.compiled._shapes) == 2


def test_more_shapes_than_are_compiled_say_so_once(make, uncompiled):
    fast = make("tent", "layer", compile=True)
    with pytest.warns(UserWarning, match="8 shapes of batch are compiled; others run as they are") as seen:
        run(fast, [x for size in range(2, 13) for x in batches(2, size=size)])
    assert len(said(seen)) == 1
    assert len(fast._engine.compiled._shapes) == 8


@pytest.mark.parametrize("method", [name for name in come.methods.names() if come.methods.get(name).waits])
@needs_cuda
def test_what_waits_for_the_device_says_so_once(method, make):
    fast = make(method, "layer", compile=True)
    with pytest.warns(
        UserWarning, match=f"{method}: the step is not one CUDA graph: .*; its model is compiled"
    ) as seen:
        run(fast, batches(4))
    assert len(said(seen)) == 1


class Undecided(come.Method):
    """Looks at a number on the host, as a user's method might."""

    name = "undecided"

    def adapt(self, ctx, x):
        logits = ctx.forward(x)
        loss = self.objective.entropy(logits)
        if bool(loss.mean() > 0):
            ctx.descend(loss.mean())
        return come.Step(logits, loss, ctx.valid)


class Counting(come.Method):
    """Asks for the number of the batch."""

    name = "counting"

    def adapt(self, ctx, x):
        logits = ctx.forward(x)
        loss = self.objective.entropy(logits)
        ctx.descend(loss.mean() / (ctx.count + 1))
        return come.Step(logits, loss, ctx.valid)


@needs_cuda
@pytest.mark.parametrize(("method", "reason"), [(Undecided, "waits for the device"), (Counting, "number of the batch")])
def test_a_method_of_the_users_own_falls_back_and_says_so_once(method, reason):
    model = TinyClassifier(NORMS["layer"]).to(DEVICE)
    plain, fast = come.adapt(model, method), come.adapt(model, method, compile=True)
    with pytest.warns(UserWarning, match=f"the step is not one CUDA graph: .*{reason}") as seen:
        answers = run(fast, batches(5))
    assert len(said(seen)) == 1
    torch.testing.assert_close(answers, run(plain, batches(5)), rtol=1e-3, atol=1e-3)
    assert torch.randn(3, device=DEVICE).isfinite().all()  # nothing is left half captured


@needs_cuda
def test_other_threads_may_wait_while_a_step_is_captured():
    model = TinyClassifier(NORMS["layer"]).to(DEVICE)
    stop, failed = threading.Event(), []

    def other():
        try:
            while not stop.is_set():
                torch.ones(100, device=DEVICE).sum().item()
        except RuntimeError as error:
            failed.append(error)

    thread = threading.Thread(target=other)
    thread.start()
    try:
        fast = come.adapt(model, "tent", compile=True)
        for x in batches(6):
            fast(x.to(DEVICE))
    finally:
        stop.set()
        thread.join()
    assert not failed


# ---- a stand-in ----


@pytest.mark.parametrize("norm", list(NORMS))
@pytest.mark.parametrize(
    "mode", [{"precision": "bf16"}, {"channels_last": True}, {"precision": "bf16", "channels_last": True}]
)
def test_precision_and_memory_format_change_little(norm, mode):
    model = TinyClassifier(NORMS[norm]).to(DEVICE)
    plain, fast = come.adapt(model, "tent"), come.adapt(model, "tent", **mode)
    bound = 0.15 if "precision" in mode else 1e-3
    for x in batches(4):
        one, two = plain(x.to(DEVICE)), fast(x.to(DEVICE))
        assert (one - two.float()).abs().max() < bound * one.abs().max().clamp_min(1)


@pytest.mark.parametrize("norm", list(NORMS))
def test_the_users_model_is_not_touched(norm):
    model = TinyClassifier(NORMS[norm]).to(DEVICE).train()
    kept, flags = copy.deepcopy(model.state_dict()), [p.requires_grad for p in model.parameters()]
    fast = come.adapt(model, "tent", precision="bf16", channels_last=True)
    seen = []
    model.register_forward_hook(lambda *_: seen.append(1))
    for x in batches(3):
        fast(x.to(DEVICE))
    source = 2 if norm == "batch" else 1  # how often the source is asked about a batch: under either statistics
    assert all(torch.equal(value, kept[name]) for name, value in model.state_dict().items())
    assert [p.requires_grad for p in model.parameters()] == flags
    assert model.training
    assert len(seen) == 3 * (1 + source)  # a hook of the user's is called all the same


def test_what_adapts_is_in_float32_in_every_precision():
    fast = come.adapt(TinyClassifier(NORMS["layer"]).to(DEVICE), "tent", precision="bf16", lr=1e-6)
    source = fast.source_parameters
    for x in batches(3):
        fast(x.to(DEVICE))
    moved = {name: value for name, value in fast.adapted_parameters.items() if not torch.equal(value, source[name])}
    assert moved  # steps of 1e-6 would be rounded away in bf16
    assert all(value.dtype == torch.float32 for value in moved.values())


def test_a_stand_in_follows_the_model():
    """Weights that the user loads, moves or exchanges are seen by the next step."""
    model = TinyClassifier(NORMS["layer"]).to(DEVICE)
    fast, x = come.adapt(model, "source", precision="bf16"), batches(1)[0].to(DEVICE)
    before = fast(x)
    with torch.no_grad():
        model.head.weight.mul_(2)
    assert not torch.equal(fast(x), before)
    model.head = nn.Linear(model.head.in_features, 7).to(DEVICE)
    assert fast(x).shape[1] == 7


def test_a_stand_in_follows_the_model_without_a_step():
    """Also where the model is called for something else: a prediction, or what a new adapter finds in source data."""
    model, x = TinyClassifier(NORMS["layer"]).to(DEVICE), batches(1)[0].to(DEVICE)
    make = lambda model: come.adapt(model, "eata", precision="bf16", source=[x])  # noqa: E731
    fast = make(model)
    before = fast.predict(x)
    with torch.no_grad():
        model.head.weight.mul_(2)
    assert not torch.equal(fast.predict(x), before)
    with torch.no_grad():
        model.head.weight.mul_(3)
    other = make(copy.deepcopy(model))
    assert torch.equal(make(model)._engine.transition.fixed["fisher"], other._engine.transition.fixed["fisher"])


def test_adapters_of_one_model_share_stand_ins():
    model, x = TinyClassifier(NORMS["layer"]).to(DEVICE), batches(1)[0].to(DEVICE)
    adapters = [come.adapt(model, method, precision="bf16") for method in ("tent", "zerosiam", "pl")]
    for adapter in adapters:
        adapter(x)
    assert len(ModelCopies.of(model).made) == 1


class Detours(nn.Module):
    """A model that comes to one of its norm layers on ways that no copy follows."""

    def __init__(self, norm, way):
        super().__init__()
        self.first, self.norms, self.head = (
            nn.Linear(4, 8),
            nn.ModuleList([NORMS_1D[norm](), NORMS_1D[norm]()]),
            nn.Linear(8, 3),
        )
        layer = self.norms[1]
        if way == "closure":
            self.way = lambda x: layer(x)
        elif way == "its tensors":
            self.way = lambda x: x * layer.weight + layer.bias
        elif way == "weak reference":
            self.parent, self.way = weakref.ref(self), None
        elif way == "forward":
            own = self.forward
            self.forward = lambda x: own(x)
            self.way = layer
        elif way == "uncopied":
            self.way, self.lock = layer, threading.Lock()
        elif way == "shared":
            self.way = layer
            layer.__class__ = type("Shared", (type(layer),), {"__deepcopy__": lambda self, memo: self})

    def forward(self, x):
        way = self.parent().norms[1] if self.way is None else self.way
        return self.head(way(self.norms[0](self.first(x))))


NORMS_1D = {"layer": lambda: nn.LayerNorm(8), "batch": lambda: nn.BatchNorm1d(8)}


@pytest.mark.parametrize("norm", NORMS_1D)
@pytest.mark.parametrize("way", ["closure", "its tensors", "weak reference", "forward", "uncopied", "shared"])
def test_a_model_that_cannot_be_copied_is_run_itself(way, norm):
    """A layer that was reached through a closure stayed as it was, in bf16, and took the statistics of the source."""
    torch.manual_seed(0)
    model, x = Detours(norm, way), torch.randn(32, 4)
    before = copy.deepcopy(model.state_dict())
    plain, fast = (come.adapt(model, "tent", lr=0.05, precision=precision) for precision in ("float32", "bf16"))
    with pytest.warns(UserWarning, match="Detours is run itself and not compiled, since it"):
        fast(x)
    plain(x)
    for _ in range(4):
        plain(x), fast(x)
    weights = "norms.1.weight"
    moved = (plain.adapted_parameters[weights] - before[weights]).abs().max()
    assert (fast.adapted_parameters[weights] - plain.adapted_parameters[weights]).abs().max() < 0.2 * moved
    assert (fast.predict(x) - plain.predict(x)).abs().max() < 0.05
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(isinstance(p, nn.Parameter) for p in model.parameters())
    with pytest.raises(
        come.ModelError, match=r"Detours cannot be shared by streams, since it.*; use one adapter for each"
    ):
        come.Fleet(model, "tent", streams=2)(x, ["0", "1"] * 16)


def test_a_model_is_freed_that_its_stand_in_leads_to():
    model, x = TinyClassifier(NORMS["layer"]), batches(1)[0]
    model.register_forward_hook(lambda *_, model=model: type(model) and None)  # harms no copy, and holds the model
    fast = come.adapt(model, "tent", precision="bf16")
    fast(x)
    gone = weakref.ref(model)
    del model, fast
    gc.collect()
    assert gone() is None


def test_one_model_in_two_modes():
    model, x = TinyClassifier(NORMS["batch"]).to(DEVICE), batches(1, size=16)[0].to(DEVICE)
    plain, fast = come.adapt(model, "tent", lr=0.01), come.adapt(model, "tent", lr=0.01, precision="bf16")
    for _ in range(3):
        assert (plain(x) - fast(x).float()).abs().max() < 0.2


def test_patches_are_the_convolution():
    conv = nn.Conv2d(3, 8, 4, stride=4)
    for side in (8, 11):
        x = torch.randn(2, 3, side, side)
        torch.testing.assert_close(Patches(conv)(x), conv(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", [(6, 4), (6, 4, 3, 3), (1, 4, 1, 1)])
def test_a_mixed_norm_is_what_the_hook_computes(shape):
    from come.model.batchnorm import Layer, normalize

    norm = nn.BatchNorm1d(4) if len(shape) == 2 else nn.BatchNorm2d(4)
    with torch.no_grad():
        for value in (norm.weight, norm.bias, norm.running_mean, norm.running_var):
            value.add_(torch.rand(4))
    norm.eval()
    layer, share = Layer(norm, 0, norm.running_mean, norm.running_var), torch.tensor(0.7)
    x = torch.randn(shape).requires_grad_()
    one = MixedNorm(norm, layer, BatchStatistics(share))(x)
    normalized = normalize(x, (layer.mean, layer.var), BatchStatistics(share), norm.eps)
    sized = (1, -1, *[1] * (len(shape) - 2))
    two = normalized * norm.weight.view(sized) + norm.bias.view(sized)
    torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)
    if shape[0] > 1:
        weights = torch.randn(shape)
        for wanted in (x, norm.weight, norm.bias):
            a, b = (torch.autograd.grad((y * weights).sum(), wanted, retain_graph=True)[0] for y in (one, two))
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("compiled", [False, True])
def test_two_passes_before_one_backward_on_mixed_statistics(compiled, compiler):
    """As in ROID and TEA; each keeps the share that it was called with."""
    torch.manual_seed(0)
    model = TinyClassifier(NORMS["batch"]).eval()
    fast = come.adapt(model, "tent", compile=compiled, precision="float32" if compiled else "bf16")
    borrowed, x, shares = fast._engine.model, Inputs.of(next(iter(batches(1)))), (torch.tensor(0.3), torch.tensor(0.9))
    borrowed.compiled = compiled
    weights = borrowed.source().clone().requires_grad_()
    one, two = (borrowed.call(x, weights, statistics=BatchStatistics(share)).float() for share in shares)
    (both,) = torch.autograd.grad(one.square().sum() + two.square().sum(), weights)
    each = [
        torch.autograd.grad(borrowed.call(x, weights, statistics=BatchStatistics(s)).float().square().sum(), weights)[0]
        for s in shares
    ]
    torch.testing.assert_close(both, each[0] + each[1], rtol=1e-4, atol=1e-5)


def test_inductor_gives_the_same_answers():
    """The backend of users, once; other tests of compiled steps leave it to `pytest -m slow`."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 8), nn.LayerNorm(8), nn.Linear(8, 5)).to(DEVICE)
    plain, fast = (come.adapt(model, "tent", guard=False, compile=c) for c in (False, True))
    torch.testing.assert_close(run(fast, batches(3)), run(plain, batches(3)), rtol=1e-4, atol=1e-4)


def test_a_model_that_cannot_be_compiled_runs_as_it_is(monkeypatch):
    class Refuses(Exception):  # noqa: N818
        __module__ = "torch._dynamo.exc"

    def refuses(self, given, x, **more):
        if self._compiled:
            raise Refuses("no compiler here")
        return inner(self, given, x, **more)

    inner = ModelCopy.__call__
    monkeypatch.setattr(ModelCopy, "__call__", refuses)
    fast = come.adapt(TinyClassifier(NORMS["layer"]).to(DEVICE), "tent", compile=True)
    with pytest.warns(UserWarning, match=r"torch.compile failed \(Refuses: no compiler here\); not compiled") as seen:
        run(fast, batches(4))
    assert len(said(seen)) == 1


# ---- what is said ----


def test_the_mode_is_in_the_repr():
    model = TinyClassifier(NORMS["layer"])
    assert "precision" not in repr(come.adapt(model, "tent"))
    text = repr(come.adapt(model, "tent", precision="bf16", compile=True, channels_last=True))
    assert "precision=bf16, compile=True, channels_last=True" in text
    assert "precision=tf32" in repr(come.adapt(model, "source", precision="tf32"))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"precision": "fp16"}, "precision must be one of float32, tf32, bf16, got 'fp16'"),
        ({"compile": 1}, "compile must be True or False, got 1"),
        ({"channels_last": "yes"}, "channels_last must be True or False, got 'yes'"),
    ],
)
def test_a_mode_that_is_none_is_refused(given, message):
    with pytest.raises(come.ConfigError, match=message):
        come.adapt(TinyClassifier(NORMS["layer"]), "tent", **given)


def test_tf32_is_put_back_by_the_last_of_steps_that_overlap():
    """Two threads: the second one found what the first had set, and put that back for good."""
    settings = [torch.backends.cuda.matmul, torch.backends.cudnn]
    mode, entered, ended = Mode("tf32"), threading.Event(), threading.Event()

    def overlaps():
        with mode.active():
            entered.set()
            ended.wait(10)

    thread = threading.Thread(target=overlaps)
    with mode.active():
        thread.start()
        assert entered.wait(10)
    assert all(one.allow_tf32 for one in settings)  # the other thread's step still runs
    ended.set()
    thread.join()
    assert not any(one.allow_tf32 for one in settings)


def test_tf32_is_put_back():
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    fast = come.adapt(TinyTransformer(NORMS["layer"]), "tent", precision="tf32")
    seen = []
    fast.model.register_forward_hook(lambda *_: seen.append(torch.backends.cuda.matmul.allow_tf32))
    fast(batches(1)[0])
    assert seen == [True, True], "the source is asked about the first batch, too"
    assert (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32) == before


def test_an_adapter_in_another_mode_can_be_copied():
    fast, x = come.adapt(TinyClassifier(NORMS["layer"]).to(DEVICE), "tent", precision="bf16"), batches(1)[0].to(DEVICE)
    fast(x)
    other = copy.deepcopy(fast)
    assert "precision=bf16" in repr(other)
    torch.testing.assert_close(other(x), fast(x))


def test_trees():
    tree = ({"a": torch.zeros(2), "b": None}, [torch.ones(1), 3])
    assert [t.tolist() for t in leaves(tree)] == [[0, 0], [1]]
    other = like(tree, [t + 1 for t in leaves(tree)])
    assert other[0]["a"].tolist() == [1, 1]
    assert other[1][1] == 3
    assert signature(tree) == signature(other) != signature(leaves(tree))
    assert Mode().plain


@pytest.mark.parametrize("norm", ["layer", "batch"])
@pytest.mark.parametrize("method", ["tent", "eata", "steady"])
def test_captured_steps_on_a_pretended_gpu(method, norm, monkeypatch):
    """A replay gives what the step gives; the state before it stays as it was."""
    model, data = TinyClassifier(NORMS[norm]), batches(12, size=16)
    more = {"source": [data[0]]} if method == "eata" else {}
    plain = come.adapt(model, method, lr=0.01, **more)
    expected = [plain.step(x) for x in data]
    made = pretend(monkeypatch)
    fast = come.adapt(model, method, lr=0.01, compile=True, **more)
    for i, x in enumerate(data):
        state = fast._state
        before, kept = state.weights, state.weights.clone()
        step = fast.step(x)
        assert torch.equal(before, kept)
        assert fast._state.weights.data_ptr() != before.data_ptr()
        torch.testing.assert_close(step.logits, expected[i].logits, rtol=1e-3, atol=1e-5)
        torch.testing.assert_close(step.loss, expected[i].loss, rtol=1e-3, atol=1e-5)
    assert 1 <= len(made) <= 4
    for name, value in plain.state_dict().items():
        if value.is_floating_point() and name != "selected":  # a graph runs the model on all samples
            torch.testing.assert_close(fast.state_dict()[name], value, rtol=1e-3, atol=1e-6, equal_nan=True)


def test_captured_steps_of_a_fleet_on_a_pretended_gpu(monkeypatch):
    model, data = TinyClassifier(NORMS["batch"]), batches(6, size=8)
    names = list("aabbaabb")
    plain = come.Fleet(model, "tent", lr=0.01, streams=["a", "b"])
    expected = [plain.step(x, names).logits for x in data]
    made = pretend(monkeypatch)
    fast = come.Fleet(model, "tent", lr=0.01, streams=["a", "b"], compile=True)
    for x, wanted in zip(data, expected, strict=True):
        torch.testing.assert_close(fast.step(x, names).logits, wanted, rtol=1e-5, atol=1e-6)
    assert made
