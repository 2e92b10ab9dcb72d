"""The engine of a server: many tenants, one fleet; limits, modes, states, threads."""

from __future__ import annotations

import math
import threading
import time
from contextlib import contextmanager

import pytest
import torch

import come
from come.metrics.scores import score_of
from come.serve import Mode, RequestError, Service
from come.serve.modes import Signal
from come.serve.tenants import States, key_of, part_of
from come.state import saving
from come.testing import NORMS, TinyClassifier, batches

X = batches(40, size=4, seed=3)
MODEL = TinyClassifier(NORMS["group"])


class Unsure(TinyClassifier):
    """Knows less where its input is close to zero."""

    def forward(self, x):
        return super().forward(x) * x.abs().mean(dim=(1, 2, 3), keepdim=True)[..., 0, 0]


UNSURE = Unsure(NORMS["group"])


def make(method="tent", model=MODEL, **more):
    return Service(model, method, **({"shape": (3, 8, 8), "lr": 0.01} | more))


def alone(data, method="tent", **more):
    """The answers of one adapter for one tenant."""
    adapter = come.adapt(MODEL, method, **({"lr": 0.01} | more))
    return [adapter(x) for x in data]


def refused(status, run, *arguments):
    with pytest.raises(RequestError) as found:
        run(*arguments)
    assert found.value.status == status
    assert "\n" not in str(found.value)
    return str(found.value)


def eventually(true, seconds=10.0):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


# ---- tenants do not see each other ----


def test_each_tenant_is_answered_as_by_an_adapter_of_its_own_whatever_others_send():
    """Many threads, different numbers of samples, one tenant that sends absurd values and one that is refused."""
    sizes = {f"t{i}": 1 + i % 4 for i in range(12)}
    got, errors = {name: [] for name in sizes}, []

    def client(name, service):
        for x in X[:8]:
            got[name].append(service.predict(name, x[: sizes[name]]).logits)

    def disturb(service):
        for _ in range(8):
            service.predict("absurd", torch.full((3, 3, 8, 8), 1e30))
            try:
                service.predict("nan", torch.full((3, 3, 8, 8), torch.nan))
            except RequestError as error:
                errors.append(error)

    with make(max_batch=16) as service:
        threads = [threading.Thread(target=client, args=(name, service)) for name in sizes]
        threads.append(threading.Thread(target=disturb, args=(service,)))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(errors) == 8
    for name, size in sizes.items():
        for mine, expected in zip(got[name], alone(x[:size] for x in X[:8]), strict=True):
            torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-4)


def test_requests_that_wait_run_together_but_one_request_is_one_step():
    with make(max_wait=0.2) as service:
        futures = [service.ask("predict", name, X[i]) for i in range(3) for name in ("a", "b")]
        for i, future in enumerate(futures):
            expected = alone(X[:3])[i // 2]
            torch.testing.assert_close(future.result().logits, expected, rtol=1e-4, atol=1e-4)
        assert service.health("a")["steps"] == 3


def test_a_request_that_fails_fails_alone(monkeypatch):
    real = come.Fleet.step

    def step(fleet, x, streams):
        if "bad" in streams:
            raise RuntimeError("secret of the machine")
        return real(fleet, x, streams)

    monkeypatch.setattr(come.Fleet, "step", step)
    with make(max_wait=0.2) as service:
        good, bad = service.ask("predict", "good", X[0]), service.ask("predict", "bad", X[0])
        torch.testing.assert_close(good.result().logits, alone(X[:1])[0], rtol=1e-4, atol=1e-4)
        assert "secret" not in refused(500, bad.result)
        refused(404, service.health, "bad")  # its first request failed: it leaves nothing


def test_errors_do_not_name_other_tenants():
    with make() as service:
        service.predict("private-customer", X[0])
        for ask in (service.health, service.reset, service.delete):
            assert "private" not in refused(404, ask, "somebody")


# ---- names, sizes, values ----


NAMES = [
    "",
    ".",
    "..",
    "../x",
    "a/b",
    "a\\b",
    ".hidden",
    "a\0",
    "a\nb",
    "ü",
    "a b",
    "\u202ex",
    "a" * 129,
    "%2e%2e",
    7,
    None,
    "\x7f",
]


def test_names_that_are_refused(tmp_path):
    with make(state=tmp_path, write_every=0) as service:
        for name in NAMES:
            for ask in ("predict", "health", "reset", "delete"):
                message = refused(400, service.ask, ask, name, *([X[0]] if ask == "predict" else []))
                assert message.startswith("a tenant's name must be")
                assert message.isprintable()
    assert not list(tmp_path.glob("*.safetensors"))


def test_names_of_any_length_and_case_have_files_of_their_own(tmp_path):
    names = ["@" * 128, ":" * 128, "A", "a", "a.safetensors", "CON"]
    with make(state=tmp_path, write_every=0) as service:
        for i, name in enumerate(names):
            for x in X[: i + 1]:
                service.predict(name, x)
    files = {path.name.lower() for path in tmp_path.glob("*.safetensors")}
    assert len(files) == len(names)
    with make(state=tmp_path) as service:
        service.predict("b", X[0])
        assert [int(service.predict(name, X[0]) and service.health(name)["steps"]) for name in names] == [
            2,
            3,
            4,
            5,
            6,
            7,
        ]


def test_samples_that_are_refused():
    with make() as service:
        for x, status, words in (
            (X[0].double(), 400, "must be float32, got float64"),
            (X[0].to(torch.uint8), 400, "must be float32, got uint8"),
            ([[1.0]], 400, "must be float32, got list"),
            (X[0][:, :2], 400, "must have shape (n, 3, 8, 8), got (4, 2, 8, 8)"),
            (X[0][0], 400, "must have shape"),
            (torch.zeros(()), 400, "must have shape"),
            (X[0][:0], 400, "must hold 1 to 64 samples, got 0"),
            (torch.zeros(65, 3, 8, 8), 413, "must hold 1 to 64 samples, got 65"),
            (torch.full((1, 3, 8, 8), torch.inf), 400, "must be finite"),
        ):
            assert words in refused(status, service.ask, "predict", "a", x)
        assert len(service._tenants) == 0


def test_a_full_queue_and_a_greedy_tenant(monkeypatch):
    go, real = threading.Event(), come.Fleet.step
    monkeypatch.setattr(come.Fleet, "step", lambda *a: go.wait(10) and real(*a))
    with make(max_queue=16, max_samples=4, max_wait=0) as service:
        futures = [service.ask("predict", "first", X[0])]
        eventually(lambda: service._queue.samples() == 0)
        futures.append(service.ask("predict", "a", X[0]))
        assert "too many" in refused(429, service.ask, "predict", "a", X[0])
        futures += [service.ask("predict", name, X[0]) for name in "bcd"]
        assert "busy" in refused(503, service.ask, "predict", "e", X[0])
        assert not service.ready
        go.set()
        assert all(future.result().adapted for future in futures)
        eventually(lambda: service.ready)
        values = {one.name: one.value for one in service.metrics().values if "tenant" not in one.labels}
        assert values["come_serve_refused"] == 2


def test_more_tenants_than_fit():
    with make(tenants=2) as service:
        for name in "ab":
            service.predict(name, X[0])
        assert "as many tenants" in refused(429, service.predict, "c", X[0])
        service.predict("a", X[1])
        service.delete("b")
        service.predict("c", X[0])


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"adapt": "sometimes"}, "adapt must be inline, after"),
        ({"adapt": "every:0"}, "adapt must be"),
        ({"adapt": "shift:2,0"}, "adapt must be"),
        ({"adapt": "shift:a,b,c"}, "adapt must be"),
        ({"tenants": 0}, "tenants must be"),
        ({"resident": 5}, "needs a state folder"),
        ({"state": "/no/such/folder"}, "does not exist"),
        ({"shape": (3, 7)}, "does not take samples of shape (3, 7)"),
        ({"shape": ()}, "shape must be"),
        ({"dtype": "int64"}, "dtype must be float32 or uint8"),
        ({"dtype": "uint8"}, "needs preprocess"),
        ({"write_every": -1}, "write_every must be"),
        ({"max_queue": 8}, "max_queue must be >= 4 * max_samples"),
        ({"method": "tnet"}, "did you mean 'tent'"),
    ],
)
def test_settings_that_are_refused(more, words):
    with pytest.raises(come.ConfigError, match=words.replace("(", r"\(").replace(")", r"\)").replace("*", r"\*")):
        make(**more)


# ---- when to adapt ----


def test_after_answers_first_and_adapts_to_the_same_samples():
    adapter = come.adapt(MODEL, "tent", lr=0.01)
    with make(adapt="after") as service:
        for x in X[:4]:
            answer = service.predict("a", x)
            assert answer.adapted
            torch.testing.assert_close(answer.logits, adapter.predict(x), rtol=1e-4, atol=1e-4)
            adapter.step(x)
        assert service.health("a")["steps"] == 4


def test_after_lets_who_waits_go_first_but_not_the_same_tenant(monkeypatch):
    calls, real = [], (come.Fleet.step, come.Fleet.answer)
    monkeypatch.setattr(come.Fleet, "step", lambda *a: calls.append(("step", *a[2])) or real[0](*a))
    monkeypatch.setattr(come.Fleet, "answer", lambda *a: calls.append(("answer", *a[2])) or real[1](*a))
    with make(adapt="after", max_wait=0.2) as service:
        calls.clear()
        futures = [service.ask("predict", name, X[0][:1]) for name in "aba"]
        for future in futures:
            future.result()
    assert calls[:3] == [("answer", "a", "b"), ("step", "a"), ("answer", "a")]
    assert sorted(calls[3:]) == [("step", "a"), ("step", "b")]
    with make(adapt="after", max_wait=0.2, max_batch=4) as service:
        calls.clear()
        for future in [service.ask("predict", name, X[0][:1]) for name in "abcde"]:
            future.result()
    assert calls[:2] == [("answer", *"abcd"), ("step", *"abcd")]  # as many as are run together


def test_after_adapts_before_a_tenant_is_evicted(tmp_path):
    with make(adapt="after", state=tmp_path, resident=2, max_wait=0.2) as service:
        for future in [service.ask("predict", name, X[0]) for name in "abcd"]:
            future.result()
    for name in "abcd":
        adapter = come.adapt(MODEL, "tent", lr=0.01)
        adapter.load(tmp_path / f"{key_of(name)}.safetensors")
        assert adapter.count == 1


def test_after_adapts_before_a_reset_evicts_who_owes_a_step(tmp_path):
    with make(adapt="after", state=tmp_path, resident=2, max_wait=0.1) as service:
        service.predict("c", X[0])
        for x in X[:2]:
            asked = [service.ask("predict", "a", x), service.ask("predict", "b", x), service.ask("reset", "c")]
            assert [one.result().adapted for one in asked[:2]] == [True, True]
            asked[2].result()
    for name in "ab":
        adapter = come.adapt(MODEL, "tent", lr=0.01)
        adapter.load(tmp_path / f"{key_of(name)}.safetensors")
        assert adapter.count == 2


def test_every_third_request_adapts():
    with make(adapt="every:3") as service:
        assert [service.predict("a", x).adapted for x in X[:7]] == [False, False, True, False, False, True, False]
        assert not service.predict("b", X[0]).adapted  # counted for each tenant
        assert (service.health("a")["steps"], service.health("b")["steps"]) == (2, 0)


def test_never_answers_as_the_source_model():
    with make(adapt="never") as service:
        got = [service.predict("a", x).logits for x in X[:2]]
    MODEL.eval()
    for mine, x in zip(got, X, strict=False):
        torch.testing.assert_close(mine, MODEL(x).detach(), rtol=1e-4, atol=1e-4)
    MODEL.train()


def test_shift_adapts_one_tenant_while_it_is_unsure_and_no_other():
    with make(adapt="shift", model=UNSURE) as service:
        for i in range(24):  # 96 samples: more than the reference takes
            for name in ("moved", "same"):
                assert not service.predict(name, X[i]).adapted
        for i in range(24, 34):
            service.predict("moved", 0.1 * X[i])  # close to zero: the model is unsure
            service.predict("same", X[i])
        assert service.health("moved")["shifted"]
        assert service.predict("moved", 0.1 * X[34]).adapted
        assert service.health("moved")["steps"] > 0
        assert service.health("same")["steps"] == 0
        for i in range(30):
            service.predict("moved", X[i])
        assert not service.health("moved")["shifted"]


def test_shift_with_a_reference_of_the_host_finds_a_tenant_that_begins_shifted():
    source = torch.cat(X)
    with make(model=UNSURE) as service:
        mean, std = service.uncertainty(source)
    with make(adapt=f"shift:{mean},{std}", model=UNSURE) as service:
        for x in X[:8]:
            service.predict("a", 0.1 * x)
        assert service.health("a")["shifted"]


def test_the_signal_rarely_fires_without_a_shift():
    draw = torch.Generator().manual_seed(0)
    signal = Signal.given((0.5, 0.1))
    fired = [signal.update((0.5 + 0.1 * torch.randn(8, generator=draw)).tolist()) for _ in range(2000)]
    assert sum(fired) < 20
    assert signal.update([0.65] * 32)


def test_modes_are_read():
    assert [Mode.of(text).kind for text in ("inline", "after", "every:2", "shift", "never")] == [
        *("inline", "after", "every", "shift", "never")
    ]


# ---- abstention, preprocessing ----


def test_abstention_and_invalid_samples():
    x = X[0].clone()
    x[0] = 1e30  # finite, and absurd
    with make() as service:
        service.predict("a", X[1])
        answer = service.predict("a", x)
        assert answer.valid == [False, True, True, True]
        assert answer.abstain == [True, False, False, False]
    known = come.adapt(MODEL, "tent", lr=0.01)
    promise = known.calibrate(X, coverage=0.6)
    for mode in ("inline", "never"):
        with make(adapt=mode) as service:
            assert service.calibrate(X, coverage=0.6) == promise
            service.predict("a", X[1])
            found = service.predict("a", x)
            assert found.abstain[0]
            assert found.abstain[1:] == known.abstains(found.logits)[1:].tolist()
            assert 0 < sum(found.abstain[1:]) < 3


@pytest.mark.parametrize("adapt", ["inline", "after", "every:2", "shift", "never"])
@pytest.mark.parametrize("score", ["confidence", "softmax", "entropy"])
def test_an_answer_says_why_it_abstains(adapt, score):
    """In every mode the confidence is what the threshold is on: an answer abstains exactly where it is below."""
    broken = X[5].clone()
    broken[1] = 1e30
    with make(adapt=adapt, objective="come") as service:
        known = come.objectives.get("come")
        before = service.predict("new", X[0])
        torch.testing.assert_close(torch.tensor(before.confidence), known.confidence(before.logits))
        promise = service.calibrate(X, coverage=0.6, score=score)
        seen = set()
        for x in (*X[:6], broken):
            for name in ("a", "b"):
                answer = service.predict(name, x)
                below = [c < promise.threshold for c in answer.confidence]
                assert answer.abstain == [b or not good for b, good in zip(below, answer.valid, strict=True)]
                expected = score_of(score, known, answer.logits)[torch.tensor(answer.valid)]
                found = torch.tensor(answer.confidence)[torch.tensor(answer.valid)]
                torch.testing.assert_close(found, expected)
                seen |= set(below)
        assert seen == {True, False}


@pytest.mark.parametrize("adapt", ["inline", "after", "every:1", "shift", "never"])
def test_an_invalid_sample_has_a_confidence_of_0(adapt):
    x = X[0].clone()
    x[2] = 1e30
    with make(adapt=adapt, objective="em") as service:
        service.predict("a", X[1])
        answer = service.predict("a", x)
        assert answer.valid == [True, True, False, True]
        assert [c > 0 for c in answer.confidence] == answer.valid
        assert answer.confidence[2] == 0


def test_the_confidence_of_a_tenant_is_by_its_own_promise(tmp_path):
    """A server that was not calibrated goes on with the thresholds in its tenants' files."""
    with make(state=tmp_path, adapt="never", objective="em") as service:
        service.calibrate(X, coverage=0.6, score="energy")
        service.predict("old", X[0])
        service.reset("old")
    with make(state=tmp_path, adapt="never", objective="em", max_wait=0.2) as service:
        old, new = (one.result() for one in [service.ask("predict", name, X[0]) for name in ("old", "new")])
    assert old.confidence == pytest.approx(old.logits.logsumexp(dim=1).tolist(), rel=1e-4)
    assert new.confidence == pytest.approx(new.logits.softmax(dim=1).amax(dim=1).tolist(), rel=1e-4)
    assert new.abstain == [False] * 4


def test_preprocessing_of_the_host():
    with make(dtype="uint8", preprocess=lambda x: x.float() / 255, max_samples=8) as service:
        x = torch.randint(0, 256, (2, 3, 8, 8), dtype=torch.uint8)
        expected = alone([x.float() / 255])[0]
        torch.testing.assert_close(service.predict("a", x).logits, expected, rtol=1e-4, atol=1e-4)
        refused(400, service.ask, "predict", "a", x.float())


# ---- states ----


def test_eviction_writes_a_state_and_another_server_restores_it(tmp_path):
    expected = alone(X[:6])
    with make(state=tmp_path, resident=2, write_every=1000) as service:
        for i, x in enumerate(X[:3]):
            torch.testing.assert_close(service.predict("a", x).logits, expected[i], rtol=1e-4, atol=1e-4)
            for other in ("b", "c"):
                service.predict(other, x)
        assert service.health("a") == {"resident": False}
        assert key_of("a") in {path.stem for path in tmp_path.glob("*.safetensors")}
    with make(state=tmp_path) as service:
        for i in range(3, 6):
            torch.testing.assert_close(service.predict("a", X[i]).logits, expected[i], rtol=1e-4, atol=1e-4)
        assert service.health("a")["requests"] == 6


def test_the_state_of_a_mode_is_restored_too(tmp_path):
    with make(state=tmp_path, adapt="every:3") as service:
        for x in X[:2]:
            service.predict("a", x)
    with make(state=tmp_path, adapt="every:3") as service:
        assert service.predict("a", X[2]).adapted
    with make(state=tmp_path, adapt="shift", model=UNSURE) as service:
        for x in X[:20]:
            service.predict("b", x)
    with make(state=tmp_path, adapt="shift", model=UNSURE) as service:
        for x in X[20:28]:
            service.predict("b", 0.1 * x)
        assert service.health("b")["shifted"]


def test_changes_are_written_within_write_every_and_counted_until_then(tmp_path):
    with make(state=tmp_path, write_every=0.3) as service:
        begin = time.monotonic()
        for x in X[:3]:
            service.predict("a", x)
        if time.monotonic() - begin < 0.25:
            assert service.health("a")["unwritten_steps"] == 3
        eventually(lambda: service.health("a")["unwritten_steps"] == 0)
        saved = come.adapt(MODEL, "tent", lr=0.01)
        saved.load(tmp_path / f"{key_of('a')}.safetensors")
        assert saved.count == 3


def test_reset_and_delete_reach_the_disk(tmp_path):
    with make(state=tmp_path) as service:
        for name in "ab":
            for x in X[:3]:
                service.predict(name, x)
    with make(state=tmp_path, write_every=1000) as service:
        service.reset("a")
        service.delete("b")
        refused(404, service.health, "b")
        assert [path.stem for path in tmp_path.glob("*.safetensors")] == [key_of("a")]
        for name in "ab":
            torch.testing.assert_close(service.predict(name, X[5]).logits, alone(X[5:6])[0], rtol=1e-4, atol=1e-4)


def test_a_reset_waits_for_the_requests_before_it():
    with make(max_wait=0.2) as service:
        before = service.ask("predict", "a", X[0])
        reset = service.ask("reset", "a")
        after = service.ask("predict", "a", X[0])
        reset.result()
        assert torch.equal(before.result().logits, after.result().logits)


def test_a_state_that_does_not_fit_is_refused_and_kept(tmp_path):
    with make(state=tmp_path) as service:
        for name in "ab":
            service.predict(name, X[0])
    one, other = (tmp_path / f"{key_of(name)}.safetensors" for name in "ab")
    kept = one.read_bytes()
    for data in (other.read_bytes(), kept[:-8], b"", b"{}" * 100):  # of another tenant, cut short, empty, garbage
        one.write_bytes(data)
        with make(state=tmp_path) as service:
            message = refused(409, service.predict, "a", X[0])
            assert str(tmp_path) not in message
            service.predict("b", X[1])
        assert one.read_bytes() == data
    one.write_bytes(kept)
    with make(state=tmp_path, lr=0.02) as service:
        refused(409, service.predict, "a", X[0])
        service.delete("a")
        assert service.predict("a", X[0]).adapted


def test_a_disk_that_cannot_be_written_loses_nothing(tmp_path):
    with make(state=tmp_path, resident=1, write_every=1000) as service:
        service.predict("a", X[0])
        with full_disk():
            assert "cannot write states" in refused(503, service.predict, "b", X[0])
            refused(503, service.reset, "a")
            service.predict("a", X[1])  # still here
        service.predict("b", X[0])
        values = {one.name: one.value for one in service.metrics().values if "tenant" not in one.labels}
        assert values["come_serve_write_errors"] == 2
        assert values["come_serve_unwritten_steps"] == 1


@contextmanager
def full_disk(after=0):
    """A disk that takes so many files more."""
    real, left = States.write, iter([True] * after)

    def write(self, name, data):
        if not next(left, False):
            raise come.StateError("no space left")
        real(self, name, data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(States, "write", write)
        yield


@pytest.mark.parametrize("mode", ["inline", "every:2", "shift:0.0,0.01"])
def test_where_steps_are_written_first_a_full_disk_refuses_without_adapting(mode, tmp_path):
    with make(state=tmp_path, write_every=0, adapt=mode) as service, make(adapt=mode) as expected:
        assert same(service.predict("a", X[0]), expected.predict("a", X[0]))
        with full_disk():
            for x in X[1:4]:
                assert "cannot write states now; try again later" in refused(503, service.predict, "a", x)
            refused(503, service.predict, "new", X[0])
            refused(404, service.health, "new")
        for x in X[4:6]:
            assert same(service.predict("a", x), expected.predict("a", x))
        for key in ("requests", "steps"):
            assert service.health("a")[key] == expected.health("a")[key]


def test_where_the_disk_is_full_a_step_after_an_answer_is_kept_and_the_next_request_refused(tmp_path):
    with make(state=tmp_path, write_every=0, adapt="after") as service, make(adapt="after") as expected:
        with full_disk():
            assert same(service.predict("a", X[0]), expected.predict("a", X[0]))
            refused(503, service.predict, "a", X[1])
        assert same(service.predict("a", X[2]), expected.predict("a", X[2]))
        assert service.health("a")["steps"] == 2


def same(answer, other):
    return torch.equal(answer.logits, other.logits) and answer.adapted == other.adapted


def test_a_write_that_failed_is_not_tried_again_at_once(tmp_path):
    with make(state=tmp_path, write_every=0, adapt="after") as service, full_disk():
        service.predict("a", X[0])
        eventually(lambda: service._tenants.counts["write_errors"] == 1)
        time.sleep(0.1)
        assert service._tenants.counts["write_errors"] == 1


@pytest.mark.parametrize("mode", ["inline", "after"])
@pytest.mark.parametrize("written", [0, 1])
def test_a_reset_that_cannot_be_written_is_not_done(written, mode, tmp_path):
    with make(state=tmp_path, write_every=1000, adapt=mode) as service, make(adapt=mode) as expected:
        for one in (service, expected):
            one.predict("a", X[0])
        with full_disk(after=written):
            assert "try again later" in refused(503, service.reset, "a")
        assert service.health("a")["resident"] == (not written)
        assert same(service.predict("a", X[1]), expected.predict("a", X[1]))
        assert service.health("a")["steps"] == 2
        for one in (service, expected):
            one.reset("a")
        assert same(service.predict("a", X[2]), expected.predict("a", X[2]))


NOTE = {
    "tenant": "a",
    "requests": 1,
    "signal": {"count": 4, "mean": 0.5, "squares": 0.1, "recent": 0.5, "shifted": False},
}


@pytest.mark.parametrize(
    "note",
    [
        {"requests": "1"},
        {"requests": -1},
        {"requests": 1e400},
        {"requests": None},
        {"signal": None},
        {"signal": []},
        *(
            {"signal": NOTE["signal"] | {key: value}}
            for key, value in (
                *(("more", 1), ("count", 65), ("count", 2.5), ("count", "4"), ("mean", "x"), ("mean", None)),
                *(("squares", -1.5), ("squares", math.nan), ("recent", math.inf), ("recent", [0]), ("shifted", 1)),
            )
        ),
    ],
    ids=str,
)
def test_a_note_that_was_changed_is_refused_for_its_tenant_alone(note, tmp_path, monkeypatch):
    with make(state=tmp_path) as service:
        for name in "ab":
            service.predict(name, X[0])
    with make(state=tmp_path, max_wait=0.1) as service, make() as expected:
        expected.predict("b", X[0])
        real = States.note
        monkeypatch.setattr(States, "note", lambda self, name: NOTE | note if name == "a" else real(self, name))
        bad, good = service.ask("predict", "a", X[1]), service.ask("predict", "b", X[1])
        refused(409, bad.result)
        assert same(good.result(), expected.predict("b", X[1]))


def test_a_state_that_loads_and_cannot_step_is_refused_for_its_tenant_alone(tmp_path, monkeypatch):
    """Of a size that its file declares, with a checksum that holds."""
    real = saving.restored

    def damaged(*given):
        now = real(*given)
        return now._replace(weights=torch.cat([now.weights, now.weights]))

    with make(state=tmp_path) as service:
        service.predict("a", X[0])
    with make(state=tmp_path, max_wait=0.1) as service, make() as expected:
        monkeypatch.setattr(saving, "restored", damaged)
        bad, good = service.ask("predict", "a", X[1]), service.ask("predict", "b", X[1])
        refused(409, bad.result)
        assert same(good.result(), expected.predict("b", X[1]))
        monkeypatch.setattr(come.Fleet, "step", lambda *_: 1 / 0)
        refused(500, service.predict, "a", X[1])  # here the model fails for everybody
        monkeypatch.undo()
        service.delete("a")
        assert service.predict("a", X[0]).adapted


def test_a_step_is_on_disk_before_its_answer_if_asked_for(tmp_path):
    with make(state=tmp_path, write_every=0) as service:
        saved = come.adapt(MODEL, "tent", lr=0.01)
        for count, x in enumerate(X[:3], 1):
            service.predict("a", x)
            saved.load(tmp_path / f"{key_of('a')}.safetensors")
            assert saved.count == count


def test_two_servers_never_own_the_same_tenants(tmp_path):
    names = [f"t{i}" for i in range(8)]
    first, second = (make(state=tmp_path, part=part, parts=2) for part in (0, 1))
    with first, second:
        for name in names:
            owner, other = (first, second) if part_of(name, 2) == 0 else (second, first)
            owner.predict(name, X[0])
            refused(421, other.ask, "predict", name, X[0])
        for part, parts, words in ((0, 2, "in use by another server"), (0, 1, "in use"), (2, 3, "in use by 2 servers")):
            with pytest.raises(come.ConfigError, match=words):
                States(tmp_path, part, parts, wait=0)
    with make(state=tmp_path) as alone_:  # another number of servers, when no other runs
        assert len(alone_._tenants) == len(names)
        assert [alone_.predict(name, X[1]) and alone_.health(name)["steps"] for name in names] == [2.0] * 8


def test_left_overs_of_a_killed_server_are_removed(tmp_path):
    left = tmp_path / f".{key_of('a')}.safetensors.0123456789abcdef.tmp"
    left.write_text("half")
    other = tmp_path / ".something.else.tmp"
    other.write_text("not ours")
    make(state=tmp_path).close()
    assert not left.exists()
    assert other.exists()


# ---- metrics, end ----


def test_metrics_have_a_bounded_number_of_labels():
    with make(labels=3) as service:
        for i in range(8):
            service.predict(f"t{i}", X[0])
        requests = [one for one in service.metrics().values if one.name == "come_serve_tenant_requests"]
        assert {one.labels["tenant"]: one.value for one in requests} == {"t0": 1, "t1": 1, "t2": 1, "(other)": 5}
        assert sum(service.metrics().answered) == 8


@pytest.mark.parametrize("cancelled", [0, 1])
def test_closing_answers_what_waits_behind_a_request_that_was_cancelled(cancelled):
    service = make(max_wait=0.2)
    futures = [service.ask("predict", "a", x) for x in X[:3]]
    futures.pop(cancelled).cancel()
    service.close()
    assert all(future.done() and future.result().adapted for future in futures)


def test_closing_answers_what_waits_and_refuses_what_comes(tmp_path):
    service = make(state=tmp_path, write_every=1000, max_wait=0.2)
    futures = [service.ask("predict", f"t{i % 5}", X[i]) for i in range(20)]
    service.close()
    assert all(future.result().adapted for future in futures)
    refused(503, service.ask, "predict", "a", X[0])
    refused(503, service.ask, "metrics")
    assert not service.ready
    with make(state=tmp_path) as again:
        for i in range(5):
            again.predict(f"t{i}", X[0])
            assert again.health(f"t{i}")["steps"] == 5
