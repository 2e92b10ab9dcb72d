"""What arrives may be anything; what answers stays sound."""

from __future__ import annotations

import copy
import gc
import logging
import math
import multiprocessing
import threading

import pytest
import torch
from torch import nn

import come
from come import Guard
from come.signals import SIGNALS
from come.testing import NORMS, TinyClassifier, batches

METHODS = come.methods.names()


def tiny(norm="layer"):
    return TinyClassifier(NORMS[norm])


def poisoned(value, where=(1, 5), seed=0):
    x = batches(1, seed=seed)[0]
    x[list(where)] = value
    return x


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e30, -1e20])
@pytest.mark.parametrize("method", METHODS)
def test_bad_samples_are_flagged_and_the_others_answered(method, value, build):
    adapter = build(build.model(method)(NORMS["batch"]), method)
    adapter(batches(1, seed=3)[0])
    step = adapter.step(poisoned(value))
    assert step.valid.tolist() == [i not in (1, 5) for i in range(12)]
    assert not step.logits[~step.valid].any()
    assert step.logits.isfinite().all()
    assert step.loss is None or step.loss.isfinite().all()
    assert step.used is None or not step.used[~step.valid].any()
    assert all(p.isfinite().all() for p in adapter.model.parameters())
    own = {
        k: v for k, v in adapter.state_dict().items() if not k.startswith("state.search.")
    }  # cma's own has limits of inf
    assert all(v.isfinite().all() or "entropy" in k or "average" in k for k, v in own.items())
    assert adapter.health()["invalid_samples"] == 2


@pytest.mark.parametrize("method", ["tent", "eata", "sar", "pl", "deyo", "roid", "rdumb"])
def test_the_others_drive_the_update_as_if_the_bad_ones_were_not_there(method, build):
    """On a model without BatchNorm, where samples do not see each other."""
    adapter, alone = (build(tiny("layer"), method, "em", lr=0.1) for _ in range(2))
    x = poisoned(math.nan)
    if method == "roid":
        adapter.consistency = alone.consistency = False  # its view draws random numbers by place in the batch
    if method == "deyo":
        adapter.shuffle = alone.shuffle = lambda images, generator: images.flip(-1)
    adapter(x)
    alone(x[[i for i in range(12) if i not in (1, 5)]])
    for name, p in adapter.parameters.items():
        if method != "roid":  # it weighs samples against the whole batch
            torch.testing.assert_close(p, alone.parameters[name])


@pytest.mark.parametrize("method", METHODS)
def test_a_batch_of_nothing_usable_changes_nothing(method, build):
    adapter = build(build.model(method)(NORMS["batch"]), method)
    adapter(batches(1, seed=3)[0])
    before = {name: p.detach().clone() for name, p in adapter.parameters.items()}
    step = adapter.step(torch.full((12, 3, 8, 8), math.nan))
    assert not step.valid.any()
    assert not step.logits.any()
    if method not in ("roid", "cotta", "rotta"):  # these go back to the source a little, or learn from older samples
        assert all(torch.equal(p, before[name]) for name, p in adapter.parameters.items())
    assert adapter(batches(1)[0]).isfinite().all()


def test_absurd_is_relative_to_what_is_usual():
    adapter = come.adapt(tiny(), "tent")
    for scale in (1.0, 3.0, 10.0):  # grows slowly: a new camera
        assert adapter.step(batches(1)[0] * scale).valid.all()
    x = batches(1)[0]
    x[0] *= 1e5
    assert adapter.step(x).valid.tolist() == [False] + [True] * 11


class Explodes(nn.Module):
    """Gives finite logits and an infinite gradient, from its second call on."""

    def __init__(self):
        super().__init__()
        self.norm, self.head, self.calls = nn.LayerNorm(4), nn.Linear(4, 3), 0

    def forward(self, x):
        self.calls += 1
        z = self.head(self.norm(x))
        return z + (0 if self.calls < 2 else 1e-30 * torch.sqrt((z * 0).abs()))  # d sqrt at 0 is infinite


@pytest.mark.parametrize("method", ["tent", "eata", "sar"])
def test_a_gradient_that_is_not_finite_is_refused(method):
    events = []
    arguments = {
        "tent": {},
        "eata": {"beta": 0, "margin": 5.0, "redundancy": 2.0},
        "sar": {"margin": 5.0, "select": come.select.norm_affine()},
    }[method]
    adapter = come.adapt(Explodes(), method, "em", lr=0.1, guard=Guard(on_event=events.append), **arguments)
    x = torch.randn(8, 4)
    adapter(x)
    if method == "sar":
        adapter(x)
    before = adapter.state_dict()
    logits = adapter(x)
    assert logits.isfinite().all()
    after = adapter.state_dict()
    moved = [k for k in before if k.startswith(("parameter.", "optimizer.")) and not torch.equal(before[k], after[k])]
    assert not moved
    assert adapter.health()["update_refused"] >= 1
    assert {event.kind for event in events} == {"update_refused"}


def test_without_a_guard_the_bare_method_is_there():
    adapter = come.adapt(tiny(), "tent", guard=False)
    assert adapter.guard is None
    assert adapter.step(batches(1)[0]).valid is None
    assert adapter.health() == {"steps": 1.0}


@pytest.mark.parametrize("method", METHODS)
def test_a_healthy_stream_gives_the_same_numbers_with_and_without(method, build):
    model = build.model(method)
    guarded, bare = build(model(NORMS["batch"]), method), build(model(NORMS["batch"]), method, guard=False)
    for x in batches(4):
        assert torch.equal(guarded(x), bare(x))
    for name, p in guarded.parameters.items():
        assert torch.equal(p, bare.parameters[name])


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

    def adapt(self, x):
        logits = self.forward(x)
        loss = -logits.log_softmax(dim=1)[:, 0]
        self.descend(loss.mean(), go=torch.full((), self.count >= 6, device=logits.device))
        return come.Step(logits, loss, self.valid)


on_both = pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")),
    ],
)


def collapsing(policy="recover", device="cpu", **more):
    guard = Guard(policy=policy, warmup=4, patience=2, samples=64, backoff=0.5, **more)
    return come.adapt(Plain().to(device), Sinks, "em", lr=0.3, guard=guard)


def stream(count, seed=0):
    """Noisy one-hot vectors of all kinds."""
    generator = torch.Generator().manual_seed(seed)
    kinds = torch.randint(KINDS, (count, 32), generator=generator)
    return list(2 * torch.eye(KINDS)[kinds] + torch.randn(count, 32, KINDS, generator=generator))


def share(logits):
    return torch.bincount(logits.argmax(dim=1), minlength=KINDS).max().item() / len(logits)


def test_it_collapses_without_a_guard():
    adapter = come.adapt(Plain(), Sinks, "em", lr=0.3, guard=False)
    shares = [share(adapter(x)) for x in stream(60)]
    assert sum(shares[:5]) / 5 < 0.4
    assert sum(shares[-10:]) / 10 > 0.95


@on_both
def test_recover(device):
    events = []
    adapter = collapsing(device=device, on_event=events.append)
    shares = [share(adapter(x.to(device)).cpu()) for x in stream(60)]
    kinds = [event.kind for event in events]
    assert "collapse" in kinds
    assert "recovered" in kinds
    health = adapter.health()
    assert health["recovered"] == kinds.count("recovered") >= 1
    assert health["lr_scale"] == 0.5 ** sum(range(int(health["recovered"]) + 1))  # faster each time
    assert sum(shares[-30:]) / 30 < 0.8
    assert health["collapse"] == health["recovered"]


@on_both
def test_freeze(device):
    adapter = collapsing("freeze", device)
    for x in stream(60):
        adapter(x.to(device))
    assert adapter.health()["frozen"] == 1.0
    with torch.no_grad():
        assert torch.equal(adapter(x.to(device)), Plain().to(device)(x.to(device)))
    adapter.reset()
    assert adapter.health()["frozen"] == 0.0


@on_both
def test_raise(device):
    adapter = collapsing("raise", device)
    with pytest.raises(come.CollapseError, match="sinks has collapsed at step"):
        torch.cat([adapter(x.to(device)) for x in stream(60)])


def test_warn():
    adapter, bare = collapsing("warn"), come.adapt(Plain(), Sinks, "em", lr=0.3, guard=False)
    for x in stream(60):
        assert torch.equal(adapter(x), bare(x))
    assert adapter.health()["collapse"] >= 1
    assert adapter.health()["recovered"] == 0


def test_a_stream_of_one_class_is_no_collapse():
    """The source model predicts one class as well: it is asked, and nothing is undone."""
    one = [x[:1].expand(32, -1) + 0.1 * x for x in stream(20, seed=1)]
    adapter = come.adapt(Plain(), "tent", "come", lr=1e-4, guard=Guard(warmup=4, patience=2, samples=64))
    for x in (*stream(10), *one):
        adapter(x)
    assert adapter.guard.counters["healthy"] >= 1
    assert adapter.health()["collapse"] == 0


class Late:
    """A message that has arrived when it is asked for the third time."""

    def __init__(self):
        self.asked = 0

    def query(self):
        self.asked += 1
        return self.asked > 2

    def synchronize(self):
        self.asked = 9


@pytest.fixture
def late(monkeypatch):
    """As on a GPU, where nothing waits for the signals."""
    send = Guard._send

    def later(self, values, batch):
        send(self, values, batch)
        self._pending[-1] = self._pending[-1]._replace(arrived=Late())

    monkeypatch.setattr(Guard, "_send", later)


@pytest.mark.usefixtures("late")
def test_what_arrives_after_a_reset_is_still_reported():
    adapter = come.adapt(tiny(), "tent", episodic=True)
    for _ in range(4):
        adapter(poisoned(math.nan))
    assert adapter.health()["invalid_samples"] == 8


@pytest.mark.usefixtures("late")
def test_what_arrives_late_is_acted_upon_later():
    adapter = collapsing()
    shares = [share(adapter(x)) for x in stream(60)]
    assert sum(shares[-30:]) / 30 < 0.8
    assert adapter.health()["recovered"] == adapter.health()["collapse"] >= 1
    assert all(p.requires_grad for p in adapter.parameters.values())


@pytest.mark.parametrize("size", [1, 5, 200])
def test_small_and_large_batches_are_watched_as_well(size):
    adapter = collapsing()
    data = torch.cat(stream(160)).split(size)
    with torch.no_grad():
        for x in data:
            adapter(x)
    health = adapter.health()
    assert health["recovered"] >= 1
    assert health["standing"] < 0.4 or health["recovered"] == health["collapse"]


def test_the_source_is_asked_about_few_samples():
    """Of a batch a part, and not again when that has made it clear."""
    asked = []
    adapter = come.adapt(Plain(), "tent", "come", lr=1e-4)
    forward = adapter.forward
    adapter.forward = lambda x, weights=None: asked.append(len(x) if weights else 0) or forward(x, weights)
    for x in torch.cat(stream(240)).split(128):
        adapter(x)
    assert [size for size in asked if size] == [32] * 4  # after 5, 10, 20 and 40 batches


def test_what_all_samples_share_is_not_cut_with_them():
    class Masked(Plain):
        def forward(self, x, mask):
            return super().forward(x) * mask[:KINDS]

    adapter = come.adapt(Masked(), "tent", "come", lr=1e-4)
    for x in torch.cat(stream(44)).split(128):
        adapter((x, torch.ones(50)))
    assert adapter.guard.counters["healthy"] == 2


def test_methods_that_cannot_change_are_not_compared_with_themselves():
    adapter = come.adapt(Plain(), "source")
    calls = []
    adapter.forward = lambda x, weights=None: calls.append(1) or type(adapter).forward(adapter, x, weights)
    for x in stream(60):
        adapter(x)
    assert len(calls) == 60


# ---- what it says ----


def test_events_are_logged_with_their_details(caplog):
    adapter = come.adapt(tiny(), "tent")
    with caplog.at_level(logging.INFO, logger="come.guard"):
        adapter(poisoned(math.nan))
    (record,) = caplog.records
    assert record.come == {"kind": "invalid_samples", "step": 0, "details": {"samples": 2.0}}
    assert record.getMessage() == "invalid_samples at step 0: samples 2"


def test_a_callback_that_fails_stops_nothing(caplog):
    def broken(event):
        raise RuntimeError("mine")

    adapter = come.adapt(tiny(), "tent", guard=Guard(on_event=broken))
    assert adapter(poisoned(math.nan)).isfinite().all()
    assert "on_event failed" in caplog.text


def test_health_is_flat_numbers():
    adapter = come.adapt(tiny(), "tent")
    adapter(batches(1)[0])
    health = adapter.health()
    assert set(SIGNALS) <= set(health)
    assert all(isinstance(value, (int, float)) and value == value for value in health.values())


def test_scalars_for_tensorboard():
    class Writer:
        seen: list = []  # noqa: RUF012

        def add_scalar(self, name, value, step):
            self.seen.append((name, step))

    adapter = come.adapt(tiny(), "tent", guard=Guard(scalars=Writer()))
    for x in batches(2):
        adapter(x)
    assert ("come/entropy", 1) in Writer.seen
    assert len(Writer.seen) == 2 * len(SIGNALS)
    adapter = come.adapt(Plain(), "tent", guard=Guard(scalars=Writer()))
    for x in stream(12):
        adapter(x)
    assert ("come/standing", 10) in Writer.seen  # the first look, after five windows of two batches


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"policy": "pray"}, "recover, freeze, raise, warn"),
        ({"warmup": 1}, "warmup is 1"),
        ({"patience": 0}, "patience is 0"),
        ({"backoff": 0}, "backoff is 0"),
        ({"on_event": 3}, "on_event is 3"),
    ],
)
def test_bad_arguments(arguments, words):
    with pytest.raises(come.ConfigError, match=words):
        Guard(**arguments)
    with pytest.raises(come.ConfigError, match="guard is 'yes'"):
        come.adapt(tiny(), "tent", guard="yes")


# ---- state ----


def test_snapshots_on_disk_are_bounded_and_load(tmp_path):
    adapter = come.adapt(tiny(), "tent", guard=Guard(snapshots=tmp_path, snapshot_every=2, snapshots_kept=3))
    data = [batches(1, seed=s)[0] for s in range(12)]
    for x in data[:11]:
        adapter(x)
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == [f"tent-{n:010d}.safetensors" for n in (6, 8, 10)]
    other = come.adapt(tiny(), "tent")
    other.load(tmp_path / files[-1])
    assert other.count == 10
    other(data[10])
    assert torch.equal(adapter(data[11]), other(data[11]))


def test_a_snapshot_that_cannot_be_written_stops_nothing(tmp_path):
    (tmp_path / "file").write_text("")
    adapter = come.adapt(tiny(), "tent", guard=Guard(snapshots=tmp_path / "file" / "below", snapshot_every=1))
    adapter(batches(1)[0])
    assert adapter.guard.counters["snapshot_failed"] == 1


def test_what_the_guard_has_learned_is_saved(tmp_path):
    adapter = collapsing()
    for x in stream(60):
        adapter(x)
    adapter.save(tmp_path / "s.safetensors")
    other = collapsing()
    other.load(tmp_path / "s.safetensors")
    assert other.guard.scale == adapter.guard.scale < 1
    assert other.guard.steps == 60
    assert torch.equal(adapter(x), other(x))


@pytest.mark.parametrize("at", [3, 9, 12, 13, 14, 15, 16, 24])
def test_a_guard_goes_on_exactly_where_it_was(at):
    """Also in the middle of a question, and between a fall and what follows from it."""
    one, other = collapsing(), collapsing()
    data = stream(50)
    for x in data[:at]:
        one(x)
    other.load_state_dict(one.state_dict())
    for x in data[at:]:
        assert torch.equal(one(x), other(x))
    assert one.guard.scale == other.guard.scale < 1


@pytest.mark.parametrize(
    "change", [{"guard.rows": None}, {"guard.healthy.norm.weight": torch.zeros(3)}, {"guard.x": torch.zeros(1)}]
)
def test_half_a_guard_is_refused(change):
    adapter = come.adapt(Plain(), "tent", "come", lr=1e-4)
    for x in stream(24):
        adapter(x)
    before = adapter.state_dict()
    assert "guard.healthy.norm.weight" in before
    with pytest.raises(come.StateError, match="the guard had learned"):
        adapter.load_state_dict({k: v for k, v in (before | change).items() if v is not None})
    assert all(torch.equal(v, before[k]) for k, v in adapter.state_dict().items())


def test_damage_of_a_state_is_found(tmp_path):
    adapter = come.adapt(tiny(), "tent")
    adapter(batches(1)[0])
    path = tmp_path / "s.safetensors"
    adapter.save(path)
    whole = path.read_bytes()
    before = adapter.state_dict()
    for damaged in (
        whole[:-1],
        whole[: len(whole) // 2],
        whole[:-200] + bytes([whole[-200] ^ 1]) + whole[-199:],
        b"",
        b"x" * 99,
    ):
        path.write_bytes(damaged)
        with pytest.raises(come.StateError):
            adapter.load(path)
    path.write_bytes(whole.replace(b'"version":"3"', b'"version":"9"'))
    with pytest.raises(come.StateError, match="version '9'"):
        adapter.load(path)
    after = adapter.state_dict()
    assert all(torch.equal(before[k], after[k]) for k in before)
    path.write_bytes(whole)
    adapter.load(path)


# ---- long streams ----


@pytest.mark.parametrize("method", METHODS)
def test_nothing_grows(method, build):
    """The short version of benchmarks/soak.py."""
    adapter = build(build.model(method)(NORMS["batch"]), method, lr=1e-4)
    data = batches(10, size=8)
    data[3][0] = math.nan

    def objects(steps):
        for number in range(steps):
            adapter(data[number % 10])
        gc.collect()
        sizes = {name: value.numel() for name, value in adapter.state_dict().items()}
        return len(gc.get_objects()), sum(n for name, n in sizes.items() if not name.startswith("guard."))

    warm, end = objects(50), objects(90)  # the guard's first healthy weights are there after 40
    assert end[0] - warm[0] < 100
    assert end[1] == warm[1]
    assert len(adapter.guard.state()["rows"]) <= adapter.guard.warmup


# ---- concurrency ----


def test_threads_take_turns():
    adapter, alone = (come.adapt(tiny(), "tent", lr=1e-2) for _ in range(2))
    x = batches(1)[0]
    failures = []

    def work():
        try:
            for _ in range(20):
                adapter(x)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert adapter.count == 80
    for _ in range(80):
        alone(x)
    for name, p in adapter.parameters.items():
        assert torch.equal(p, alone.parameters[name])


def test_adapters_on_copies_are_independent():
    model = tiny()
    one, other = come.adapt(model, "tent", lr=0.1), come.adapt(copy.deepcopy(model), "tent", lr=0.1)
    alone = come.adapt(tiny(), "tent", lr=0.1)
    for x in batches(3):
        one(x + 1)
        assert torch.equal(other(x), alone(x))


def _in_a_child(adapter, queue):
    torch.set_num_threads(1)
    queue.put(adapter(batches(1)[0]).tolist())


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_fork_goes_on_by_itself():
    adapter, alone = (come.adapt(tiny(), "tent", lr=0.1) for _ in range(2))
    for a in (adapter, alone):
        a(batches(1)[0])
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_in_a_child, args=(adapter, queue))
    child.start()
    logits = torch.tensor(queue.get(timeout=60))
    child.join(timeout=60)
    expected = alone(batches(1)[0])
    assert torch.equal(logits, expected)
    assert torch.equal(adapter(batches(1)[0]), expected)  # the parent did not move
    assert child.exitcode == 0
