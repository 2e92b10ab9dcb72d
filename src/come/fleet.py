"""`come.Fleet`: one model, many streams, each of which adapts by itself.

Two adapted copies of a model differ only in the affine parameters of its norm layers, 0.05% of a ViT. So a fleet keeps one
model and a `StreamState` for each stream. A batch may hold samples of many streams. Streams with the same number of samples and
the same flags form a group, which is one step (`come.streams.transition`). Groups run at the same time and share one call of
the model (`come.streams.rendezvous`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from come.abstain import DEFAULT_SCORE, Promise, Wanted, abstains, confidences
from come.errors import ConfigError, InputError, StateError, require_int, shown
from come.guard.config import Event, Guard
from come.method import Method, Step
from come.methods import DEFAULT
from come.model.copies import Precision
from come.model.inputs import at_least_float32
from come.model.locks import exclusive, untracked
from come.objectives import Objective
from come.state import files, saving
from come.state.trees import replace
from come.step.engine import Engine
from come.step.lifecycle import Lifecycle
from come.step.transition import StreamState
from come.streams.groups import Groups, StreamRows
from come.streams.names import Name, checked_name, checked_names, file_name, read_index, rows_by_stream, write_index
from come.streams.store import OpenStream, StreamStore
from come.streams.transition import index


class Fleet(Lifecycle):
    r"""One model and many streams: cameras, customers, users, or cells of a grid. Each adapts by itself.

    Stream s has its own adapted parameters, moments, memory and guard. A batch goes through the model once, each sample under
    its own stream's parameters, and one backward gives every stream its own gradient:

    .. math:: \theta_s \leftarrow \theta_s
              - \eta_s \, \partial_{\theta_s} \frac{1}{|R_s|} \sum_{i \in R_s} H(m(f_{\theta_s}(x_i)))

    The result is that of one `come.adapt` for each stream on the same samples, within rounding. A collapse in one stream, or an
    absurd input, touches no other. The model is not changed. Threads take turns; a step that fails or is interrupted has not
    happened, for any stream.

    Args:
        model: any classifier whose normalization layers are LayerNorm, GroupNorm, RMSNorm, InstanceNorm or BatchNorm, and which
            keeps samples in the first dimension.
        method: as in `come.adapt`: Tent, EATA, SAR, DeYO, ROID, PL, and any method that can be replayed as a CUDA graph, calls
            the model through `ctx.forward` only, and draws random numbers through `ctx.drawn`.
        objective: as in `come.adapt`.
        streams: names of streams to open, or how many; these are then called "0", "1", ...
        resident: so many streams at most keep their state on the device; the least recently used go to host memory, or to
            `folder`. None: all.
        folder: where streams go that are not resident, while the fleet lives: into a folder of its own in this one, which
            must exist. To keep states use `save`.
        guard: as in `come.adapt`; a policy "raise" would stop all streams, and is refused.
        precision, compile, channels_last, per_sample, class_dim: as in `come.adapt`. Each number of streams and of samples is
            compiled by itself, so that pays where these repeat.
        **hyperparameters: what the method takes; of all streams, see `open` for one.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 16), nn.LayerNorm(16), nn.Linear(16, 3))
        >>> fleet = Fleet(model, "tent", streams=["north", "south"], lr=1e-3)
        >>> logits = fleet(torch.randn(5, 4), ["north", "north", "south", "north", "south"])
        >>> logits.shape, fleet.health("south")["steps"]
        (torch.Size([5, 3]), 1.0)
    """

    def __init__(
        self,
        model: nn.Module,
        method: str | type[Method] | Method = DEFAULT,
        *,
        objective: str | Objective | None = None,
        streams: int | Sequence[Name] = (),
        resident: int | None = None,
        folder: str | PathLike[str] | None = None,
        guard: bool | Guard = True,
        precision: Precision = "float32",
        compile: bool = False,
        channels_last: bool = False,
        per_sample: Sequence[Name] | None = None,
        class_dim: int = 1,
        **hyperparameters: Any,
    ) -> None:
        names = checked_names(streams)
        if resident is not None:
            require_int("resident", resident, 1, " (streams), or None")
        if isinstance(guard, Guard) and guard.policy == "raise":
            raise ConfigError(
                "a fleet cannot have Guard(policy='raise'): the collapse of one stream would stop all others; use 'recover', "
                "'freeze' or 'warn', and on_event"
            )
        if folder is not None and not Path(folder).is_dir():
            raise ConfigError(f"folder must be a folder that exists, got {shown(str(folder))}")
        self._engine = Engine(
            model,
            method,
            objective=objective,
            guard=guard,
            precision=precision,
            compile=compile,
            channels_last=channels_last,
            per_sample=per_sample,
            class_dim=class_dim,
            **hyperparameters,
        )
        self._groups = Groups(self._engine)
        self._store = StreamStore(self._engine, resident, None if folder is None else Path(folder))
        self._streams: dict[str, OpenStream] = {}
        """Least recently used first. Never changed: whatever changes streams puts another dict here when all has succeeded."""
        self._at = self._engine.transition.source
        """Where, and in which precision, the states of resident streams are."""
        self._warned: set[str] = set()
        self._store.check_room(len(names), {})
        for name in names:
            self.open(name)

    @exclusive
    @untracked()
    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles."""
        return vars(self) | {"_streams": {name: stream.settled() for name, stream in self._streams.items()}}

    # ---- calling it ----

    def __call__(self, x: Any, streams: Any) -> Tensor:
        """Adapt every stream to its samples and return logits (B, K), in the order of the batch."""
        return self.step(x, streams).logits

    @exclusive
    def step(self, x: Any, streams: Any) -> Step:
        """Adapt every stream to its samples; returns what `Adapter.step` does, in the order of the batch.

        Samples of a stream that has no threshold are not abstained from, and have a loss of NaN where the source answers for
        good, if other samples of the batch have these.

        Args:
            x: a batch (B, ...), or a tuple or mapping of the model's arguments.
            streams: the name of the stream of each sample, or one name for all.
        """
        engine = self._engine
        inputs = engine.model.read((x,))
        parts, events = self._parts(streams, inputs.size), list[tuple[str, Event]]()
        if type(engine.method).check is not Method.check:  # most take any batch
            first = any(part.state.state is None for part in parts)
            engine.method.check(engine.context(engine.first(), inputs.size), inputs.for_model(), first)
        for i, part in enumerate(parts):
            state, said = engine.begun(part.state)
            parts[i] = part._replace(state=state)
            events += [(part.name, event) for event in said]
        before = self._streams
        try:
            states, out = self._groups.step(inputs, parts)
            self._streams = before | {name: replace(before[name], state=state) for name, state in states.items()}
            self._tell(events)
            return out
        except BaseException:
            self._streams = before
            raise

    def predict(self, x: Any, streams: Any) -> Tensor:
        """Logits (B, K) of a batch without adapting to it: nothing changes. See `answer` for which are valid."""
        return self.answer(x, streams).logits

    @exclusive
    @untracked()
    def answer(self, x: Any, streams: Any) -> Step:
        """What `step` returns, without adapting: logits, and of each sample whether it is valid, and whether to abstain."""
        inputs = self._engine.model.read((x,))
        parts = self._parts(streams, inputs.size)
        out = self._groups.answer(inputs, parts)
        calibrated = [part for part in parts if part.state.abstention is not None]
        return out._replace(abstain=self._abstains(out.logits, calibrated)) if calibrated else out

    @exclusive
    def confidence(self, logits: Tensor, streams: Any, valid: Tensor | None = None) -> Tensor:
        """How sure each answer is, as `Adapter.confidence`; `streams` as in `step`."""
        by_score: dict[str, list[int]] = {}
        with untracked():
            for part in self._parts(streams, len(logits)):
                known = part.state.abstention
                by_score.setdefault(DEFAULT_SCORE if known is None else known.promise.score, []).extend(part.rows)
            logits = self._engine.classes_last(logits)
            found = at_least_float32(logits).new_zeros(logits.shape[:-1])
            for score, rows in by_score.items():
                at = index(rows, logits.device)
                good = None if valid is None else valid[at]
                found[at] = confidences(score, self._engine.objective, logits[at], good)
            return found

    # ---- abstaining ----

    @exclusive
    def calibrate(self, data: Iterable[Any], **how: Any) -> Promise:
        """Choose when not to answer, for all streams: they begin with the same source model.

        Args:
            data: as in `Adapter.calibrate`.
            **how: risk, coverage, delta, score and follow, as there. A threshold that follows is each stream's own.

        Example:
            >>> model = nn.Sequential(nn.Linear(4, 16), nn.LayerNorm(16), nn.Linear(16, 3))
            >>> fleet = Fleet(model, "tent", streams=["north", "south"])
            >>> promise = fleet.calibrate([torch.randn(8, 4) for _ in range(5)], coverage=0.9)
            >>> fleet.step(torch.randn(4, 4), ["north", "north", "south", "south"]).abstain.shape
            torch.Size([4])
        """
        wanted = Wanted(**how)
        with untracked():
            self._check_open()
            self._follow()
            promise = self._engine.calibrated(data, wanted)
            streams = {name: stream.promising(promise) for name, stream in self._streams.items()}
        self._engine.promise, self._streams = promise, streams
        return promise

    @property
    def promise(self) -> Promise | None:
        """What `calibrate` promised; None before."""
        return self._engine.promise

    @exclusive
    def abstains(self, logits: Tensor, streams: Any) -> Tensor:
        """Which of the answers not to rely on, (B, K, ...) -> (B, ...) bool; `streams` as in `step`."""
        with untracked():
            return self._abstains(logits, self._parts(streams, len(logits)))

    def _abstains(self, logits: Tensor, parts: list[StreamRows]) -> Tensor:
        logits = self._engine.classes_last(logits)
        found = torch.zeros(logits.shape[:-1], dtype=torch.bool, device=logits.device)
        for part in parts:
            if (known := part.state.abstention) is None:
                raise ConfigError("no threshold was chosen; calibrate() first")
            at = index(part.rows, logits.device)
            found[at] = abstains(known.promise, self._engine.objective, logits[at], known.threshold)
        return found

    def _tell(self, events: list[tuple[str, Event]]) -> None:
        for name, event in events:
            if event.kind == "probabilities" and event.kind in self._warned:  # of the model, not of the stream: once
                continue
            details = event.details | {"stream": name}
            failed = self._engine.report([event._replace(message=f"stream {name}: {event.message}", details=details)])
            self._warned.add(event.kind)
            stream = self._streams.get(name)
            if not failed or stream is None or not isinstance(stream.state, StreamState):
                continue
            if stream.state.watch is not None:
                state = stream.state._replace(watch=stream.state.watch.counted(failed))
                self._streams = self._streams | {name: replace(stream, state=state)}

    # ---- streams ----

    @property
    def streams(self) -> list[str]:
        """Names of the open streams, least recently used first."""
        return list(self._streams)

    def __len__(self) -> int:
        """How many streams are open."""
        return len(self._streams)

    def __contains__(self, name: object) -> bool:
        """Whether a stream of that name is open."""
        return str(name) in self._streams

    @exclusive
    def open(self, name: Name, **own: float) -> None:
        """Begin a new stream at the source model.

        Args:
            name: up to 128 letters, digits and `_ . @ + : = -`; not a dot first.
            **own: a learning rate and thresholds of its own: lr, and what the method lists in `by_stream`.
        """
        name = checked_name(name)
        with untracked():
            self._check_open()
            if name in self._streams:
                raise ConfigError(f"stream {name!r} is open already; close() it first, or reset() it")
            self._follow()
            stream = self._new(own)
            self._store.check_room(len(self._streams) + 1, self._streams)
            self._streams = self._store.evicted(self._streams | {name: stream}, keep={name})

    def _new(self, own: dict[str, float]) -> OpenStream:
        method = self._engine.method
        known = ("lr", *method.by_stream, *(["seed"] if hasattr(method, "seed") else []))
        for key in own:
            if key not in known:
                raise ConfigError(
                    f"{key!r} of {method.name} cannot differ by stream; what can: {', '.join(known)}. Give it to Fleet()"
                )
        mine = dataclasses.replace(method, **cast(Any, own)) if own else method
        return OpenStream(mine, dict(own), self._engine.first())

    @exclusive
    def close(self, name: Name | None = None) -> None:
        """Forget a stream; without a name end the fleet. The model is as it was handed in."""
        if name is None:
            self._engine.model.give_back()
            self._end()
            self._streams = {}
            self._store.close()
            return
        gone = self._known(name)
        self._streams = {one: stream for one, stream in self._streams.items() if one != gone}

    @exclusive
    def reset(self, name: Name | None = None) -> None:
        """Put a stream, or all, back to the source model."""
        with untracked():
            self._check_open()
            self._follow()
            names = self._streams if name is None else [self._known(name)]
            anew = {one: replace(self._streams[one], state=self._anew(self._streams[one])) for one in names}
            self._streams = self._store.evicted(self._streams | anew)

    def _anew(self, stream: OpenStream) -> StreamState:
        try:
            return self._engine.reset(self._store.state_of(stream))
        except StateError:  # what it was is lost
            return self._engine.first()

    # ---- what can be seen ----

    @exclusive
    def health(self, name: Name | None = None) -> dict[str, Any]:
        """Counters and gauges of one stream's guard, as `Adapter.health`; without a name those of all, by stream."""
        if name is None:
            return {one: self.health(one) for one in self._streams}
        return self._streams[self._known(name)].state.health()

    @exclusive
    def count(self, name: Name) -> int:
        """Batches that a stream has adapted to since it was opened or reset."""
        return self._look(name).count

    def learning_rate(self, name: Name, batch: int) -> float | None:
        """The learning rate of a stream for so many samples of it, before the guard's factor; None if nothing descends."""
        method = self._streams[self._known(name)].method
        return method.learning_rate(batch, self._engine.model.has_batch_norm) if method.descends else None

    @exclusive
    def adapted_parameters(self, name: Name) -> dict[str, Tensor]:
        """The adapted parameters of a stream by name: copies."""
        weights = self._look(name).weights
        return {name: value.clone() for name, value in self._engine.model.named(weights).items()}

    @exclusive
    def state(self, name: Name) -> dict[str, Tensor]:
        """What the method remembers of a stream: copies."""
        return {name: value.clone() for name, value in (self._look(name).state or {}).items()}

    @untracked()
    def _look(self, name: Name) -> StreamState:
        """The state of a stream where the model is; the stream stays where it is."""
        return self._store.state_of(self._streams[self._known(name)])

    def __repr__(self) -> str:
        """The adapter, and how many streams."""
        resident = self._store.resident
        where = "" if resident is None else f", {resident} resident"
        return f"Fleet({len(self._streams)} streams{where}, each {self._engine!r})"

    # ---- state ----

    @exclusive
    def save(self, path: str | PathLike[str], name: Name | None = None) -> None:
        """Write the state of a stream to a file that `Adapter.load` reads too; without a name, of all into a folder."""
        if name is not None:
            files.write(Path(path), self.packed(name))
            return
        folder = Path(path)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise files.unwritable(folder, error) from error
        for one in self._streams:
            files.write(folder / file_name(one), self.packed(one))
        write_index(folder, {one: stream.own for one, stream in self._streams.items()})

    @exclusive
    def packed(self, name: Name, note: str = "") -> bytes:
        """The bytes of the file that `save` writes of a stream: to keep it elsewhere, or to write it in another thread.

        Args:
            name: of the stream.
            note: a text of yours that travels with it; `come.state.saving.note_of` reads it from the file.
        """
        with untracked():
            return saving.packed(self._engine, self._look(name), note, self._streams[self._known(name)].method)

    @exclusive
    def load(self, path: str | PathLike[str], name: Name | None = None) -> None:
        """Continue a stream, which is opened if it is not, from a file that `save` or `Adapter.save` wrote.

        Without a name: all streams of a folder that `save` wrote. What does not fit changes nothing.
        """
        with untracked():
            self._check_open()
            self._follow()
            if name is not None:
                name = checked_name(name)
                found = {name: self._read(self._streams.get(name) or self._new({}), Path(path))}
            else:
                found = {}
                for one, own in read_index(Path(path)).items():
                    found[one] = self._read(self._new(own), Path(path) / file_name(one))
            others = {one: stream for one, stream in self._streams.items() if one not in found}
            self._streams = self._store.evicted(others | found)

    def _read(self, stream: OpenStream, path: Path) -> OpenStream:
        saved = saving.read(path, self._engine.method.name)
        return replace(stream, state=saving.restored(self._engine, saved, stream.method))

    # ---- inside ----

    def _known(self, name: Name) -> str:
        name = checked_name(name)
        if name not in self._streams:
            raise ConfigError(
                f"there is no stream {name!r}; open() it first ({len(self._streams)} are open"
                + (f", such as {', '.join(map(repr, list(self._streams)[:3]))})" if self._streams else ")")
            )
        return name

    def _parts(self, streams: Any, size: int) -> list[StreamRows]:
        """The streams of a batch in the order in which they occur, with their states where the model is."""
        self._check_open()
        rows, resident = rows_by_stream(streams, size), self._store.resident
        for name in rows:
            if name not in self._streams:
                self._known(name)  # raises
        if resident is not None and len(rows) > resident:
            raise InputError(
                f"the batch holds samples of {len(rows)} streams, and resident={resident} fit on the device; give "
                "smaller batches, or a larger resident"
            )
        self._follow()
        with untracked():
            here = self._streams = self._store.fetched(self._streams, list(rows))
        return [
            StreamRows(name, mine, cast(StreamState, here[name].state), here[name].method)
            for name, mine in rows.items()
        ]

    def _follow(self) -> None:
        """After the user has moved or cast the model, bring all resident streams along."""
        with untracked():
            self._engine.follow(copies=True)
            source = self._engine.transition.source
            if self._at is not source:
                self._streams = self._store.moved(self._streams, self._at.device)
                self._at = source
