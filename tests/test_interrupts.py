"""Ctrl-C anywhere: the script `harness/interrupts.py` with fewer lines and signals, and what a second one could break."""

from __future__ import annotations

import signal
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

import come
from come.model.locks import ModelLock, _after_fork, _before_fork, _holding
from come.streams.rendezvous import Rendezvous, ask
from come.testing import batches

sys.path.append(str(Path(__file__).parent / "harness"))
import interrupts


@pytest.mark.parametrize("method", interrupts.CASES)
def test_at_lines_of_everything_that_runs_in_a_step(method):
    number = list(interrupts.CASES).index(method)  # other lines for each
    assert interrupts.adapter_lines(method, every=48, first=5 * number) > 10


# A generator of torch that was interrupted before its `with` block began says so when it is collected; its nesting is undone.
@pytest.mark.filterwarnings("ignore:Exception ignored in. <generator object vmap_increment_nesting")
@pytest.mark.parametrize("names", ["001122", "011222"], ids=["one group", "groups in threads"])
def test_at_lines_of_a_step_of_a_fleet(names):
    assert interrupts.fleet_lines(48, 5, names) > 10


class In(interrupts.AtEvent):
    """Interrupts at the n-th line of a function."""

    def __init__(self, function, number):
        super().__init__(number)
        self.code = function.__code__

    def __call__(self, frame, event, arg):
        return super().__call__(frame, event, arg) if frame.f_code is self.code else self


def test_where_torch_registers_a_hook():
    """Between the entry in the table and the handle: it was left in the model for good."""
    model, x = interrupts.Model("batch"), batches(1)[0]
    adapter = come.adapt(model.module, "tent", lr=0.05)
    number = 0
    while not interrupts.traced(In(nn.Module.register_forward_pre_hook, number := number + 1), lambda: adapter(x)):
        model.check(f"line {number}")
    assert number > 5


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="signals")
@pytest.mark.parametrize("what", ["adapter", "fleet", "service"])
def test_signals_while_other_threads_work(what):
    assert getattr(interrupts, f"{what}_under_signals")(20) >= 20


class Twice(dict):
    """The parameters of a module; after `strikes` changes each change is interrupted, until there are no more."""

    strikes = 0

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        if self.strikes:
            self.strikes -= 1
            if self.strikes < 2:
                raise KeyboardInterrupt


@pytest.mark.parametrize("then", ["step", "close"])
def test_a_second_interrupt_while_the_model_is_given_back(then):
    """What is left then is put back by the next call."""
    model, x = interrupts.Model("layer"), batches(1)[0]
    adapter = come.adapt(model.module, "tent", lr=0.05)
    adapter(x)
    norm = model.module.blocks[0][1]
    norm._parameters = Twice(norm._parameters)
    own = dict(norm._parameters)
    for strikes in (2, 3, 4, 5):
        norm._parameters.strikes = strikes
        with pytest.raises(KeyboardInterrupt):
            adapter(x)
        norm._parameters.strikes = 0
        if then == "step":
            adapter(x)
        else:
            adapter._engine.model.give_back()
        assert all(norm._parameters[name] is value for name, value in own.items())
    adapter.close()
    model.check(then)


def test_keeping_the_weights_is_all_or_nothing():
    number, found, done = 0, set(), False
    while not done:
        number += 7
        model = interrupts.Model("layer")
        adapter = come.adapt(model.module, "tent")
        own = {name: p.clone() for name, p in adapter._engine.model.parameters.items()}
        weights = adapter._engine.model.source() + 1
        done = interrupts.traced(
            interrupts.AtEvent(number),
            lambda one=adapter, weights=weights: one._engine.lock.run(lambda: one._engine.model.overwrite(weights)),
        )
        change = [(p - own[name]).detach() for name, p in adapter._engine.model.parameters.items()]
        found.add(round(float(change[0].mean()), 3))
        assert len({round(float(one.mean()), 3) for one in change}) == 1, number
        if not change[0].any():
            adapter._engine.model.check_unchanged()
    assert number > 50
    assert 0.0 in found


# ---- locks ----


def finishes(run, seconds=20):
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return not thread.is_alive()


def fork_during(model, work, forked=lambda: None):
    """A thread holds the lock of a model, and goes on with `work` when a fork has come to its first lock."""
    holding, forking = threading.Event(), threading.Event()

    def step():
        holding.set()
        forking.wait()
        threading.Event().wait(0.05)
        work()

    stepping = threading.Thread(target=lambda: ModelLock(model).run(step), daemon=True)
    stepping.start()
    holding.wait()

    def fork():
        forking.set()
        _before_fork()
        forked()
        _after_fork()

    assert finishes(fork)
    assert finishes(stepping.join)


def test_a_fork_while_a_step_makes_an_adapter():
    """The step holds its model's lock and asks for a new one; the fork wants all of them."""
    model, seen = nn.Linear(2, 2), []
    fork_during(model, lambda: seen.append(ModelLock(nn.Linear(2, 2))), lambda: seen.append("all locks"))
    assert len(seen) == 2
    assert seen[1] == "all locks"
    assert finishes(lambda: ModelLock(model).run(lambda: None))


def test_a_fork_while_one_model_is_run_inside_of_another():
    """Against the order of the locks, as an event of one adapter may call the other."""
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    ModelLock(first)
    fork_during(second, lambda: ModelLock(first).run(lambda: None))


def test_locks_of_several_models_are_free_after_an_interrupt_at_any_line():
    one, two = nn.Linear(2, 2), nn.Linear(2, 2)
    ModelLock(one), ModelLock(two)
    both = ModelLock(nn.Sequential(one, two))
    assert len(both._locks) == 3
    noted = interrupts.AtEvent()
    assert interrupts.traced(noted, lambda: both.run(torch.is_grad_enabled))
    assert any(line > _holding.__code__.co_firstlineno for _, line in noted.seen)
    for number in range(1, len(noted.seen) + 1):
        assert not interrupts.traced(interrupts.AtEvent(number), lambda: both.run(torch.is_grad_enabled))
        interrupts.check_locks(f"line {noted.seen[number - 1]}")
        interrupts.check_torch(f"line {noted.seen[number - 1]}")
    assert finishes(lambda: both.run(lambda: None))


def test_an_interrupt_while_groups_meet_ends_all_of_them():
    def job():
        for _ in range(3):
            ask(0, "sum", lambda values: values, 1)
        return threading.get_ident()

    jobs = [job, job, job]
    noted = interrupts.AtEvent()
    assert interrupts.traced(noted, lambda: Rendezvous().run(jobs))
    for number in range(1, len(noted.seen), 5):
        interrupts.traced(interrupts.AtEvent(number), lambda: Rendezvous().run(jobs))
    assert len(set(Rendezvous().run(jobs))) == 3


def test_an_interrupt_stays_one_where_torch_fails_after_it():
    def call():
        try:
            raise KeyboardInterrupt
        finally:
            raise RuntimeError("trying to pop from empty mode stack")

    with pytest.raises(KeyboardInterrupt):
        ModelLock(nn.Linear(1, 1)).run(call)
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt:  # one that was handled has nothing to do with it
        with pytest.raises(RuntimeError, match="of its own"):
            ModelLock(nn.Linear(1, 1)).run(lambda: (_ for _ in ()).throw(RuntimeError("of its own")))
