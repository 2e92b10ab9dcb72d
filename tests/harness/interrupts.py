"""Ctrl-C at every line that runs in a step, torch's included, and real signals while other threads work.

    python tests/harness/interrupts.py [--signals 2000] [--every 1]

After each interrupt the model, its hooks and flags, torch's modes, the locks and the counts must be as before, or as after
a whole step. The tests run a part of it.
"""

from __future__ import annotations

import argparse
import contextlib
import dis
import gc
import linecache
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import come
from come.model.locks import _all as all_locks
from come.serve.service import Service
from come.testing import NORMS, TinyClassifier, TinyTransformer, batches

SECONDS = 30
"""A thread that gets no answer for so long waits for ever."""


class Model:
    """A model as a user hands it in, and all that an interrupt could change in it for good."""

    def __init__(self, norm: str, kind: type[nn.Module] = TinyClassifier) -> None:
        self.module = kind(NORMS[norm], 0).train()
        self._values = {name: value.clone() for name, value in self.module.state_dict().items()}
        self._before = self._seen()

    def _seen(self) -> list[Any]:
        """Tensors by identity, flags, and hooks."""
        found: list[Any] = []
        for module in self.module.modules():
            for name, value in vars(module).items():
                if name in ("_parameters", "_buffers"):
                    found += [(name, key, id(t), t is not None and t.requires_grad) for key, t in value.items()]
                elif "hooks" in name:
                    found.append((name, list(value)))
                elif isinstance(value, bool):
                    found.append((name, value))
        return found

    def check(self, where: str) -> None:
        """Raise unless everything is as it was handed in."""
        assert self._seen() == self._before, f"{where}: tensors, flags or hooks of the model"
        now = self.module.state_dict()
        assert all(torch.equal(value, now[name]) for name, value in self._values.items()), f"{where}: values"


def check_torch(where: str) -> None:
    """Raise unless torch's modes in this thread are the usual ones."""
    assert torch.is_grad_enabled(), f"{where}: gradients are off"
    assert not torch.is_inference_mode_enabled(), f"{where}: inference mode is on"
    assert not torch.is_autocast_enabled("cpu"), f"{where}: autocast is on"
    assert torch._C._functorch.get_dynamic_layer_stack_depth() == 0, f"{where}: inside of vmap"
    assert torch._C._len_torch_function_stack() == 0, f"{where}: a mode of torch functions is on"


def check_locks(where: str) -> None:
    """Raise if this thread, which is in no step, holds a model's lock."""
    assert not any(lock.lock._is_owned() for lock in tuple(all_locks)), f"{where}: a lock is held"


# ---- at every line ----


OURS = str(Path(come.__file__).parent)


def _no_signal_here(frame: Any) -> bool:
    """Whether this is a line of others that a signal cannot strike, and where Python does not undo the `with` around it.

    That is the end of a `with` block, whose lock is about to be freed in C, and a `try:`, which does nothing.
    """
    code, line, at = frame.f_code, frame.f_lineno, frame.f_lasti
    if code.co_filename.startswith(OURS):
        return False
    if code.co_code[at] == dis.opmap["NOP"]:
        return True
    entered = next(start for start, _, number in code.co_lines() if number == line)
    return bool(at > entered and linecache.getline(code.co_filename, line).lstrip().startswith("with "))


class AtEvent:
    """A trace function that raises KeyboardInterrupt at one line that runs; without a number it notes all lines."""

    def __init__(self, number: int = 0) -> None:
        self.left, self.seen = number, list[tuple[str, int]]()

    def __call__(self, frame: Any, event: str, arg: Any) -> Any:
        if frame.f_code.co_filename == __file__:
            return None
        if event == "line" and not _no_signal_here(frame):
            if not self.left:
                self.seen.append((frame.f_code.co_filename, frame.f_lineno))
                return self
            self.left -= 1
            if not self.left:
                self.seen.append((frame.f_code.co_filename, frame.f_lineno))
                sys.settrace(None)
                raise KeyboardInterrupt
        return self


def traced(trace: AtEvent, run: Callable[[], Any]) -> bool:
    """Whether `run` came to its end."""
    before, collects = sys.gettrace(), gc.isenabled()
    gc.disable()  # finalizers run at lines of their own
    sys.settrace(trace)
    try:
        run()
        return True
    except KeyboardInterrupt:
        return False
    finally:
        sys.settrace(before)
        if collects:
            gc.enable()


def lines(step: Callable[[], Any], count: Callable[[], Any], model: Model, every: int = 1, first: int = 0) -> int:
    """Interrupt at the first and the last time that each line of each file runs in a step; returns how many times.

    Args:
        step: runs one.
        count: what tells how many steps there were; it must be as before or as after a whole one.
        model: is checked after each.
        every: only every so many lines.
        first: of these.
    """
    step()
    noted = AtEvent()
    before = count()
    assert traced(noted, step)
    one = count()
    assert one != before
    places = dict[tuple[str, int], list[int]]()
    for number, place in enumerate(noted.seen, 1):
        places.setdefault(place, []).append(number)
    numbers = sorted({number for found in places.values() for number in (found[0], found[-1])})
    hit = 0
    for number in numbers[first::every]:
        before, trace = count(), AtEvent(number)
        done = traced(trace, step)
        hit += not done
        where = f"line {trace.seen}"
        model.check(where)
        check_torch(where)
        check_locks(where)
        after = count()
        assert done or after == before or _one_more(before, after), f"{where}: {before} -> {after}"
    step()
    return hit


def _one_more(before: Any, after: Any) -> bool:
    """Whether every count is larger by 1."""
    return all(a - b == 1 for a, b in zip(after, before, strict=True))


# ---- real signals ----


@contextlib.contextmanager
def at_random_moments(longest: float, draw: random.Random) -> Iterator[None]:
    """KeyboardInterrupt by a real signal within so many seconds, unless the block ends before."""
    old = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        try:
            signal.setitimer(signal.ITIMER_REAL, draw.uniform(1e-5, longest))
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    finally:
        signal.signal(signal.SIGALRM, old)


class Others:
    """Threads that work all the time; each says after how much work it is."""

    def __init__(self, *work: Callable[[], Any]) -> None:
        self._stop, self.done, self.wrong = False, [0] * len(work), list[BaseException]()
        self._threads = [threading.Thread(target=self._go, args=one, daemon=True) for one in enumerate(work)]
        for thread in self._threads:
            thread.start()

    def _go(self, number: int, work: Callable[[], Any]) -> None:
        try:
            while not self._stop:
                work()
                self.done[number] += 1
                time.sleep(0.001)
        except BaseException as error:
            self.wrong.append(error)

    def check(self, where: str) -> None:
        """Raise unless each of them has gone on since."""
        before, until = list(self.done), time.monotonic() + SECONDS
        while any(now <= old for now, old in zip(self.done, before, strict=True)):
            assert not self.wrong, f"{where}: {self.wrong}"
            assert time.monotonic() < until, f"{where}: another thread waits for ever"
            time.sleep(0.0005)

    def stop(self) -> None:
        """End them."""
        self._stop = True
        for thread in self._threads:
            thread.join(SECONDS)
            assert not thread.is_alive()


def _struck(
    times: int, run: Callable[[], Any], check: Callable[[str], None], seed: int, longest: float | None = None
) -> int:
    """Run until so many signals have struck; returns how many runs there were."""
    draw, hit, runs = random.Random(seed), 0, 0
    if longest is None:
        began = time.perf_counter()
        run()
        longest = 1.3 * (time.perf_counter() - began)
    while hit < times:
        runs += 1
        struck = False
        try:
            with at_random_moments(longest, draw):
                run()
        except KeyboardInterrupt:
            struck = True
        if struck:
            hit += 1
            check(f"signal {hit}")
    return runs


def adapter_under_signals(times: int, seed: int = 0) -> int:
    """A stepping adapter, while another thread steps an adapter of the same model and one reads its state."""
    model, data = Model("batch"), batches(4)
    one, two = (come.adapt(model.module, method, lr=0.01) for method in ("tent", "sar"))
    steps = 0
    one(data[0])

    def run() -> None:
        nonlocal steps
        steps += 1
        one(data[steps % 4])

    others = Others(lambda: two(data[0]), one.state_dict)
    last = one.count

    def check(where: str) -> None:
        nonlocal last
        check_torch(where)
        check_locks(where)
        others.check(where)
        one._engine.lock.run(lambda: model.check(where))  # between steps of the other thread
        state, count = one.state_dict(), one.count
        assert last <= count <= 1 + steps, f"{where}: {count} steps of {steps}"
        assert int(state["count"]) == count, f"{where}: {count}"
        last = count

    try:
        return _struck(times, run, check, seed)
    finally:
        others.stop()
        one.close()
        two.close()
        model.check("closed")


def fleet_under_signals(times: int, seed: int = 0) -> int:
    """A fleet of streams of two sizes, so that groups run in threads, while another thread predicts."""
    model, x = Model("layer"), batches(1, size=6)[0]
    fleet = come.Fleet(model.module, "tent", streams=3, lr=0.01)
    names = ["0", "1", "1", "2", "2", "2"]
    fleet(x, names)
    others = Others(lambda: fleet.predict(x, names), fleet.health)

    def check(where: str) -> None:
        check_torch(where)
        check_locks(where)
        others.check(where)
        fleet._engine.lock.run(lambda: model.check(where))
        counts = {fleet.count(name) for name in "012"}
        assert len(counts) == 1, f"{where}: {counts}"

    try:
        return _struck(times, lambda: fleet(x, names), check, seed)
    finally:
        others.stop()
        fleet.close()
        model.check("closed")


def service_under_signals(times: int, seed: int = 0) -> int:
    """A service that the main thread asks, while two other threads do."""
    model, x = Model("layer"), batches(1, size=2)[0]
    service = Service(model.module, "tent", shape=x.shape[1:], lr=1e-4, max_wait=0.0)
    service.predict("main", x)
    others = Others(lambda: service.predict("one", x), lambda: service.health("main"))
    asked, answered = 1, 1

    def run() -> None:
        nonlocal asked, answered
        asked += 1
        service.predict("main", x)
        answered += 1

    def check(where: str) -> None:
        check_torch(where)
        others.check(where)
        requests, until = 0, time.monotonic() + SECONDS
        while service._queue.samples("main"):
            assert time.monotonic() < until, f"{where}: a request is never taken"
            time.sleep(0.0005)
        requests = service.health("main")["requests"]
        assert answered <= requests <= asked, f"{where}: {requests} requests, {answered} answered of {asked}"
        assert service.health("main")["steps"] == requests, where

    try:
        return _struck(times, run, check, seed)
    finally:
        others.stop()
        service.close()
        model.check("closed")


CASES = {
    "tent": ("batch", TinyClassifier, {}),
    "sar": ("layer", TinyClassifier, {}),
    "deyo": ("batch", TinyClassifier, {}),
    "rotta": ("batch", TinyClassifier, {"capacity": 8, "every": 6, "normalization": ((0.45,), (0.07,))}),
    "t3a": ("layer", TinyClassifier, {"supports": 3}),
    "foa": ("layer", TinyTransformer, {"prompts": 1, "population": 3, "source": batches(1, seed=9)}),
    "tea": ("batch", TinyClassifier, {"dreams": 1, "buffer": 8, "normalization": ((0.45,), (0.07,))}),
    "memo": ("batch", TinyClassifier, {"views": 2, "normalization": ((0.45,), (0.07,))}),
}
"""By method: what it is put around, and what keeps its steps short."""


def adapter_lines(method: str, every: int = 1, first: int = 0) -> int:
    """Interrupt the steps of an adapter, and see at the end that it answers as one that was not interrupted."""
    norm, kind, more = CASES[method]
    x = batches(1, size=2 if method == "memo" else 6)[0]
    model = Model(norm, kind)
    adapter = come.adapt(model.module, method, lr=0.05, **more)
    adapter(x)
    hit = lines(lambda: adapter(x), lambda: (adapter.count,), model, every, first)
    undisturbed = come.adapt(kind(NORMS[norm], 0), method, lr=0.05, **more)
    for _ in range(adapter.count):
        undisturbed(x)
    # Another place in memory may be summed in another order.
    for mine, theirs in zip(adapter.adapted_parameters.values(), undisturbed.adapted_parameters.values(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)
    adapter.close()
    model.check("closed")
    return hit


def fleet_lines(every: int = 1, first: int = 0, names: str = "001122") -> int:
    """Interrupt the steps of a fleet."""
    model, x = Model("layer"), batches(1, size=6)[0]
    fleet = come.Fleet(model.module, "tent", streams=3, lr=0.01)
    fleet(x, list(names))
    streams = sorted(set(names))
    hit = lines(
        lambda: fleet(x, list(names)), lambda: tuple(fleet.count(name) for name in streams), model, every, first
    )
    fleet.close()
    model.check("closed")
    return hit


def main() -> None:
    """Print a line for each."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--signals", type=int, default=2000, help="against each of adapter, fleet and service")
    parser.add_argument("--every", type=int, default=1, help="interrupt at every so many lines")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for run in (adapter_under_signals, fleet_under_signals, service_under_signals):
        began = time.perf_counter()
        runs = run(options.signals)
        print(
            f"{run.__name__}: {options.signals} signals in {runs} runs, {time.perf_counter() - began:.0f} s", flush=True
        )
    for method in CASES:
        print(f"{method}: {adapter_lines(method, options.every)} interrupts", flush=True)
    print(f"fleet: {fleet_lines(options.every) + fleet_lines(options.every, 0, '011222')} interrupts", flush=True)


if __name__ == "__main__":
    main()
