"""The engine of a server, without HTTP: takes requests of many tenants, runs them together as one step of a `come.Fleet`.

One thread owns the fleet and all that is known of tenants. It collects requests for a few milliseconds, takes at most one of
each tenant, and runs them together. So one request is one step, and a tenant's answers depend on its own requests alone.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from os import PathLike
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from come.abstain import Promise, labelled
from come.errors import ConfigError, InputError, one_line, require, require_int, require_number, shown
from come.fleet import Fleet
from come.method import Step
from come.methods import DEFAULT
from come.model.inputs import answered
from come.serve.errors import RequestError, check_name, log, refusal
from come.serve.metrics import COUNTERS, GAUGES, SERVICE, Counts, Metric, Metrics
from come.serve.modes import Mode
from come.serve.request_queue import SHARE, Command, Queue, Request
from come.serve.tenants import States, Tenant, Tenants, part_of, unfit

if TYPE_CHECKING:
    from typing_extensions import Self

DTYPES = {"float32": torch.float32, "uint8": torch.uint8}


class Answer(NamedTuple):
    """The answer to a request of n samples; lists have one entry for each sample."""

    labels: list[int]
    uncertainty: list[float]
    """In [0, 1], see `come.Objective.uncertainty`."""
    confidence: list[float]
    """What the threshold for abstaining is on, see `come.Fleet.confidence`; 0 for a sample that is not valid."""
    abstain: list[bool]
    """Do not rely on the label: the sample is invalid, or below the threshold of `Service.calibrate`."""
    valid: list[bool]
    """False if the guard found the sample absurd, or the model could not answer it."""
    logits: Tensor
    """(n, K), on the CPU."""
    adapted: bool
    """Whether the tenant adapts to these samples."""


class Service:
    """Answers requests of many tenants with one model; each tenant adapts by itself.

    Any thread may call it. Use it in a `with` block, or `close` it: waiting requests are answered and states written.

    Args:
        model: as in `come.Fleet`, on the device where it runs.
        method: as in `come.Fleet`.
        shape: of one sample as clients send it, e.g. (3, 224, 224).
        dtype: of samples as clients send them: "float32", or "uint8" together with `preprocess`.
        preprocess: turns a batch `(B, *shape)` into the model's input, each sample by itself. None: it is that already.
        adapt: "inline": the answer is that of the adapting step. "after": answer first, then adapt, before the tenant's next
            answer. "every:N": adapt with every N-th request of a tenant. "shift" or "shift:MEAN,STD": adapt while a tenant's
            uncertainty is above its reference, see `come.serve.modes.Signal`. "never".
        state: an existing folder for states. None: they are in memory only, and gone with the process.
        tenants: the largest number of tenants, on disk included.
        resident: how many of them stay in memory; the least recently used are written to `state` and closed. None: all.
        write_every: seconds until a change is on disk; 0: before the answer.
        max_batch: samples that are run together, unless one request holds more.
        max_wait: seconds that a request waits for others.
        max_samples: samples of one request.
        max_queue: samples that wait; one tenant may have a quarter of them.
        labels: how many tenants have metrics of their own.
        part: this server's part of the tenants, from 0; see `come.serve.tenants`.
        parts: how many servers share `state`.
        **more: objective, guard, precision, channels_last and hyperparameters, as in `come.Fleet`.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 16), nn.LayerNorm(16), nn.Linear(16, 3))
        >>> with Service(model, "tent", shape=(4,)) as service:
        ...     promise = service.calibrate([torch.randn(20, 4)], coverage=0.9)
        ...     answers = [service.predict(name, torch.randn(2, 4)) for name in ("north", "south")]
        ...     service.health("north")["steps"], answers[0].logits.shape, len(answers[1].abstain)
        (1.0, torch.Size([2, 3]), 2)
    """

    def __init__(
        self,
        model: nn.Module,
        method: Any = DEFAULT,
        *,
        shape: Sequence[int],
        dtype: str = "float32",
        preprocess: Callable[[Tensor], Tensor] | None = None,
        adapt: str | Mode = "inline",
        state: str | PathLike[str] | None = None,
        tenants: int = 1000,
        resident: int | None = None,
        write_every: float = 10.0,
        max_batch: int = 64,
        max_wait: float = 0.002,
        max_samples: int = 64,
        max_queue: int = 1024,
        labels: int = 100,
        part: int = 0,
        parts: int = 1,
        **more: Any,
    ) -> None:
        resident = tenants if resident is None else resident
        counts = {"tenants": tenants, "resident": resident, "max_batch": max_batch, "max_samples": max_samples}
        counts |= {"max_queue": max_queue, "parts": parts, "labels": labels}
        for name, value in counts.items():
            require_int(name, value, 0 if name == "labels" else 1)
        for name, seconds in (("write_every", write_every), ("max_wait", max_wait)):
            limit = "a number of seconds >= 0"
            require(require_number(name, seconds, limit) and 0 <= seconds < math.inf, name, seconds, limit)
        if dtype not in DTYPES:
            raise ConfigError(f"dtype must be float32 or uint8, got {shown(dtype)}")
        if dtype == "uint8" and preprocess is None:
            raise ConfigError("dtype='uint8' needs preprocess=, which makes such a batch the model's input")
        self.shape = tuple(shape)
        require(bool(self.shape), "shape", shape, "the shape of one sample, without the batch")
        for side in self.shape:
            require_int("shape", side, 1)
        if max_samples > max_queue // SHARE:
            raise ConfigError(f"max_queue must be >= {SHARE} * max_samples = {SHARE * max_samples}, got {max_queue}")
        if state is None and resident < tenants:
            raise ConfigError(
                f"resident={resident} < tenants={tenants} needs a state folder for the others; give state="
            )
        self.dtype, self.max_samples = dtype, max_samples
        self.mode = adapt if isinstance(adapt, Mode) else Mode.of(adapt)
        self._preprocess = preprocess
        self._max_batch, self._part, self._parts = max_batch, part, parts
        self._device = next(model.parameters()).device
        self._fleet = Fleet(model, method, **more)
        self._check_model()
        states = None if state is None else States(Path(state), part, parts)
        self._tenants = Tenants(self._fleet, self.mode, states, tenants, resident, write_every, self._catch_up)
        self._counts = Counts(labels)
        self._failed = 0
        self._queue = Queue(max_queue, max_batch, resident, max_wait)
        self._later: dict[str, Request] = {}
        """Answered requests that their tenants must still adapt to, one of each; only the thread of the fleet uses it."""
        self._worker = threading.Thread(target=self._work, name="come-serve", daemon=True)
        self._worker.start()

    def _check_model(self) -> None:
        """Run the model once, so that a wrong shape is an error at the start and not of every request."""
        x = torch.rand(2, *self.shape, generator=torch.Generator().manual_seed(0))
        try:
            self._source((x * 255).to(torch.uint8) if self.dtype == "uint8" else x)
        except ConfigError:
            raise
        except Exception as error:
            said = one_line(error, first=True)
            raise ConfigError(
                f"the model does not take samples of shape {self.shape} in {self.dtype}: {said}"
            ) from error

    def _source(self, x: Tensor, step: bool = False) -> Step:
        """The source model's answer, or its first step."""
        free = next(name for name in map(str, itertools.count()) if name not in self._fleet)
        self._fleet.open(free)
        try:
            return (self._fleet.step if step else self._fleet.answer)(self._input([x]), free)
        finally:
            self._fleet.close(free)

    def calibrate(self, data: Iterable[Any], **how: Any) -> Promise:
        """Choose when to abstain, for all tenants; before it, from invalid samples only. Requests wait meanwhile.

        Args:
            data: batches x or (x, y) of source data, x `(n, *shape)` in `dtype` as clients send it.
            **how: risk, coverage, delta, score and follow, as in `come.Adapter.calibrate`. A threshold that follows is each
                tenant's own, and moves when the tenant adapts.
        """

        def batches() -> Iterator[Any]:
            for x, y in map(labelled, data):
                yield self._input([x]) if y is None else (self._input([x]), y)

        return self._fleet.calibrate(batches(), **how)

    # ---- requests ----

    def predict(self, name: str, x: Tensor) -> Answer:
        """Answer some samples of a tenant, and adapt to them as `adapt` says.

        Args:
            name: of the tenant, 1 to 128 letters, digits and `_ . @ + : = -`, no dot first.
            x: `(n, *shape)` in `dtype`, n from 1 to `max_samples`, finite.
        """
        return cast(Answer, self._result("predict", name, x))

    def health(self, name: str) -> dict[str, Any]:
        """Counters and gauges of a tenant, as `come.Fleet.health`; of one on disk, that it is there."""
        return cast(dict[str, Any], self._result("health", name))

    def reset(self, name: str) -> None:
        """Put a tenant back to the source model, on disk too."""
        self._result("reset", name)

    def delete(self, name: str) -> None:
        """Forget a tenant, on disk too; its next request begins at the source model."""
        self._result("delete", name)

    def metrics(self) -> Metrics:
        """Counters and gauges, of the service and of up to `labels` tenants; all others are one, "(other)"."""
        return cast(Metrics, self._result("metrics"))

    def uncertainty(self, x: Tensor) -> tuple[float, float]:
        """Mean and standard deviation of the source model's uncertainty on samples `(n, *shape)`: the reference of "shift"."""
        return cast("tuple[float, float]", self._result("uncertainty", x))

    def ask(self, what: str, *arguments: Any) -> Future[Any]:
        """Call "predict", "health", "reset", "delete", "metrics" or "uncertainty" without waiting for what it returns.

        A bad request raises a `RequestError` at once.
        """
        future = Future[Any]()
        self._ask(future, what, *arguments)
        return future

    def _ask(self, future: Future[Any], what: str, *arguments: Any) -> None:
        if what in ("predict", "health", "reset", "delete"):
            check_name(arguments[0])
            if part_of(arguments[0], self._parts) != self._part:
                raise RequestError(
                    f"this tenant does not belong to this server, part {self._part} of {self._parts}", 421
                )
        if what == "predict":
            name, x = arguments
            self._check_samples(x)
            self._queue.put(Request(name, x, future))
        else:
            name, run = arguments[0] if what in ("reset", "delete") else "", getattr(self, f"_{what}")
            self._queue.put(Command(name, lambda: run(*arguments), future))

    def _result(self, what: str, *arguments: Any) -> Any:
        """Call something and wait for what it returns; Ctrl-C ends the wait, and the request is run all the same."""
        future, done = Future[Any](), SimpleQueue[Future[Any]]()
        future.add_done_callback(done.put)  # now: once the worker has it, its Condition must not be left half way
        self._ask(future, what, *arguments)
        return done.get().result()

    def _check_samples(self, x: Tensor) -> None:
        if not isinstance(x, Tensor) or x.dtype != DTYPES[self.dtype]:
            found = str(x.dtype).removeprefix("torch.") if isinstance(x, Tensor) else type(x).__name__
            raise RequestError(f"samples must be {self.dtype}, got {found}")
        if x.ndim == 0 or tuple(x.shape[1:]) != self.shape:
            raise RequestError(f"samples must have shape (n, {', '.join(map(str, self.shape))}), got {tuple(x.shape)}")
        if not 1 <= len(x) <= self.max_samples:
            status = 413 if len(x) else 400
            raise RequestError(f"a request must hold 1 to {self.max_samples} samples, got {len(x)}", status)
        if self.dtype == "float32" and not bool(x.isfinite().all()):
            raise RequestError("samples must be finite, got NaN or infinity")

    @property
    def alive(self) -> bool:
        """Whether its thread runs."""
        return self._worker.is_alive()

    @property
    def ready(self) -> bool:
        """Whether requests are answered now."""
        return self.alive and not self._queue.closing and self._queue.samples() < self._queue.most

    def close(self) -> None:
        """Refuse new requests, answer those that wait, write all states, and let another server have the folder."""
        self._queue.close()
        self._worker.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # ---- the thread of the fleet ----

    def _work(self) -> None:
        while (found := self._queue.next(0 if self._later else self._tenants.until_due())) is not None:
            try:
                if isinstance(found, Command):
                    found.do()
                elif found:
                    self._answer(found)
                else:  # nobody waits; one at a time, so that the next request does not wait long
                    self._catch_up(list(self._later)[:1])
                self._tenants.write_due()
            except Exception as error:
                log.exception("the service failed")
                for one in found if isinstance(found, list) else ():
                    if not one.future.done():
                        self._fail(one, error)
        self._tenants.close()

    def _answer(self, batch: list[Request]) -> None:
        names = {one.name for one in batch}
        self._catch_up([one.name for one in batch])
        opened = [one for one in batch if self._tried(one, self._tenants.bring, one.name, names)]
        adapting = [one for one in opened if self._adapts(self._tenants.here[one.name])]
        others = [one for one in opened if one not in adapting]
        for one, answer in self._run(adapting, True) + self._run(others, False):
            if not self._tried(one, self._learn, one, answer, one in adapting):
                continue
            self._counts.answer(one.name, len(one.x), sum(answer.abstain), time.monotonic() - one.arrived)
            one.future.set_result(answer)
            if self.mode.kind == "after":
                self._later[one.name] = one
        if sum(len(one.x) for one in self._later.values()) >= self._max_batch:
            self._catch_up()
        for name in names & self._tenants.here.keys():
            if not self._tenants.here[name].requests:  # its first request failed: it leaves nothing
                self._tenants.forget(name)

    def _tried(self, one: Request, do: Callable[..., object], *arguments: Any) -> bool:
        """Whether it was done; if not, this request fails, and no other."""
        try:
            do(*arguments)
        except Exception as error:
            self._fail(one, error)
            return False
        return True

    def _learn(self, one: Request, answer: Answer | None, step: bool) -> None:
        """Take note of a step, and of an answer."""
        known = None if answer is None else itertools.compress(answer.uncertainty, answer.valid)
        self._tenants.learn(self._tenants.here[one.name], known, step)
        self._counts.of(one.name)["steps"] += step

    def _adapts(self, tenant: Tenant) -> bool:
        """Whether the answer is that of an adapting step."""
        if self.mode.kind == "every":
            return (tenant.requests + 1) % self.mode.n == 0
        return self.mode.kind == "inline" or (self.mode.kind == "shift" and tenant.signal.shifted)

    def _catch_up(self, names: Iterable[str] | None = None) -> None:
        """Adapt tenants, or all, to the requests that were answered first."""
        owed = list(self._later) if names is None else [name for name in names if name in self._later]
        for one, _ in self._run([self._later.pop(name) for name in owed], True):
            self._learn(one, None, True)

    def _run(self, requests: list[Request], step: bool) -> list[tuple[Request, Answer]]:
        """Run some requests together; if that fails, one by one, so that each has its own error only."""
        if not requests:
            return []
        try:
            return list(zip(requests, self._together(requests, step), strict=True))
        except Exception as error:
            if len(requests) > 1:
                return [found for one in requests for found in self._run([one], step)]
            self._fail(requests[0], self._blamed(requests[0], step, error))
            return []

    def _blamed(self, one: Request, step: bool, error: Exception) -> Exception:
        """The error of a request; where the source model can do what a restored tenant cannot, its state is to blame."""
        if isinstance(error, InputError) or not self._tenants.here[one.name].restored:
            return error
        try:
            self._source(one.x, step)
        except Exception:
            return error
        return unfit(one.name, error)

    def _together(self, requests: list[Request], step: bool) -> list[Answer]:
        names = [one.name for one in requests for _ in range(len(one.x))]
        x = self._input([one.x for one in requests])
        logits, _, _, valid, below = self._fleet.step(x, names) if step else self._fleet.answer(x, names)
        if logits.ndim > 2:
            raise InputError(
                f"a service answers with one class per sample, got logits of shape {tuple(logits.shape)}; use come.Fleet for "
                "logits with positions"
            )
        good = answered(logits) if valid is None else answered(logits) & valid
        u = self._fleet.uncertainty(logits).nan_to_num(1.0)
        confidence = self._fleet.confidence(logits, names, valid)
        abstain = ~good if below is None else ~good | below
        logits, sizes = logits.float().cpu(), [len(one.x) for one in requests]
        columns = [
            torch.split(value.cpu(), sizes) for value in (logits, logits.argmax(dim=1), u, confidence, abstain, good)
        ]
        adapted = step or self.mode.kind == "after"
        return [
            Answer._make([*(v.tolist() for v in lists), z.clone(), adapted]) for z, *lists in zip(*columns, strict=True)
        ]

    def _input(self, parts: Sequence[Tensor]) -> Tensor:
        x = torch.cat(tuple(parts)).to(self._device)
        return x if self._preprocess is None else self._preprocess(x)

    def _fail(self, one: Request, error: Exception) -> None:
        self._failed += 1
        if one.future.done():  # the step after an answer
            log.error("tenant %s did not adapt: %s", one.name, error)
        else:
            one.future.set_exception(refusal(error, f"a request of tenant {one.name}"))

    # ---- commands ----

    def _reset(self, name: str) -> None:
        self._catch_up([name])  # if the reset fails, it has adapted as it was answered
        self._tenants.reset(name)

    def _delete(self, name: str) -> None:
        self._tenants.delete(name)
        self._later.pop(name, None)
        self._counts.by_tenant.pop(name, None)

    def _uncertainty(self, x: Tensor) -> tuple[float, float]:
        logits, _, _, valid, _ = self._source(x)
        u = self._fleet.uncertainty(logits if valid is None else logits[valid])
        return float(u.mean()), float(u.std())

    def _health(self, name: str) -> dict[str, Any]:
        self._tenants.check_known(name)
        self._catch_up([name])
        tenant = self._tenants.here.get(name)
        if tenant is None:
            return {"resident": False}
        about = {"resident": True, "requests": tenant.requests, "unwritten_steps": tenant.unwritten}
        if self.mode.kind == "shift":
            about["shifted"] = tenant.signal.shifted
        return about | {"uncertainty": tenant.signal.recent} | self._fleet.health(name)

    def _metrics(self) -> Metrics:
        part, here = {"part": str(self._part)}, self._tenants.here
        numbers = {
            "tenants": len(self._tenants),
            "resident_tenants": len(here),
            "queued_samples": self._queue.samples(),
            "unwritten_steps": sum(tenant.unwritten for tenant in here.values()) + len(self._later),
            "refused": self._queue.refused,
            "failed": self._failed,
        }
        found = [
            Metric(kind, f"come_serve_{name}", text, part, float(numbers.get(name, self._tenants.counts[name])))
            for name, (kind, text) in SERVICE.items()
        ]
        for name, counter in self._counts.by_tenant.items():
            values = {key: counter[key] for key in COUNTERS}
            if (tenant := here.get(name)) is not None:
                health = self._fleet.health(name) | {"unwritten_steps": tenant.unwritten}
                health |= {"uncertainty": tenant.signal.recent, "shifted": tenant.signal.shifted}
                values |= {key: health[key] for key in GAUGES if key in health}
            for key, value in values.items():
                kind, text = "counter" if key in COUNTERS else "gauge", f"Of a tenant: {key.replace('_', ' ')}"
                found.append(Metric(kind, f"come_serve_tenant_{key}", text, part | {"tenant": name}, float(value)))
        return Metrics(found, list(self._counts.answered), self._counts.seconds)
