"""Run a plan: check everything, then one cell after the other, skipping what is done, losing at most the cell in flight."""

from __future__ import annotations

import hashlib
import os
import pickle
import re
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from multiprocessing.context import get_spawning_popen
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from come.adapter import Adapter, adapt
from come.bench import chance, models, settings
from come.bench.cell import Cell
from come.bench.cluster import Cluster, Workers
from come.bench.data import FashionSource, OnBadImage, Source, Stream, open_source
from come.bench.data.classes import in_order, read_classes
from come.bench.data.reading import reason
from come.bench.data.store import DecodedStore, DeviceCache
from come.bench.data.streams import OUTLIER, shuffle
from come.bench.folder import RunFolder, Stamp, check_space
from come.bench.helpers import Helpers
from come.bench.machine import ALONE, Jobs, Meter
from come.bench.measure import Course, UnfitError, run_cell
from come.bench.plan import Plan
from come.bench.protocols import Outcome, Protocol
from come.bench.record import Failure, Record, Rows
from come.bench.settings import Episode
from come.bench.subset import restricted
from come.bench.together import automatic_streams, bundle_key, bundles, given, own, run_together
from come.errors import ComeError, ConfigError, InputError, ModelError, require, require_int, warn
from come.fleet import Fleet
from come.guard import Event, Guard
from come.methods import get as get_method
from come.model.copies import ModelCopies

SMALL = 5_000_000
"""Parameters of a model that leaves a core or a GPU idle now and then."""
FEW = 2**26
"""Bytes of source images that are kept for the next method that asks for them."""
WORTH = {"cpu": 20_000, "cuda": 1_000_000}
"""Forward passes of a sample that are worth a process of their own, which takes seconds to start."""
IMAGENET = 1000
"""Classes of a model that can be restricted to some of them, see `Source.subset`."""
WORKERS = 256
"""Threads that decode images, at most."""


class Progress:
    """What a runner tells whoever watches; this one watches nothing. Subclass it to show something."""

    def start(self, cell: Cell, samples: int) -> None:
        """A cell begins."""

    def start_together(self, cells: Sequence[Cell], samples: int) -> None:
        """Several cells begin, as streams of one fleet."""
        self.start(cells[0], samples)

    def advance(self, samples: int) -> None:
        """Some samples of it are done."""

    def finish(self, cell: Cell, record: Record, resumed: bool) -> None:
        """It is done, now or in an earlier run."""

    def refuse(self, cell: Cell, reason: str) -> None:
        """The method cannot be run on this model or stream; the others can."""

    def fail(self, failure: Failure) -> None:
        """It failed; the others go on."""

    def doubt(self, doubt: str) -> None:
        """The unadapted model is near chance, before anything runs; by default a warning."""
        warn(doubt)

    def meet(self, outcome: Outcome) -> None:
        """No Adapt reached the number of the protocol, or there is none."""

    def beside(self) -> Progress:
        """Who is told how cells begin and advance in another process, at the same time."""
        return self


class _Made(NamedTuple):
    """An adapter that several cells use, one after the other."""

    key: tuple[object, ...]
    adapter: Adapter
    first: dict[str, Tensor]
    """Its state when it was made."""
    events: list[Event]
    """What its guard reports."""


class _Fleet(NamedTuple):
    """A fleet whose streams are cells."""

    key: object
    made: Fleet
    events: list[Event]
    """What their guards report."""


class UnderWay:
    """A run that is under way, in this process and in those that help it.

    Args:
        folder: where results go.
        progress: who watches.
        before: files of an earlier run that do not count in this one, as they were: earlier failures, and with `fresh`
            finished cells.
    """

    def __init__(self, folder: RunFolder, progress: Progress, before: Mapping[Path, Stamp]) -> None:
        self.folder, self.progress, self.before = folder, progress, before
        self.done: dict[str, Record] = {}
        self.failed: list[Failure] = []
        self.settled: set[str] = set()
        """Keys of the cells that are done, have failed or cannot be run."""
        self.old: set[str] = set()
        """Keys of those that were done before helpers came."""
        self.helpers: Helpers | None = None

    def record(self, cell: Cell) -> Record | None:
        """What was found in a cell that needs not be run."""
        return None if self._old(self.folder.file(cell.key)) else self.folder.record(cell)

    def failure(self, cell: Cell) -> Failure | None:
        """Why a cell failed in this run, in whichever process."""
        return None if self._old(self.folder.failure_file(cell.key)) else self.folder.failure(cell.key)

    def _old(self, path: Path) -> bool:
        """Whether a file is not there, or does not count."""
        return self.folder.stamp(path) == self.before.get(path)

    def advance(self, samples: int) -> None:
        """Some samples were done here."""
        self.progress.advance(samples)
        self.hear()

    def finish(self, cell: Cell, record: Record, resumed: bool = False) -> None:
        """A cell is done; it is a helper's if it was found here, and not before."""
        if cell.key not in self.settled:
            self.settled.add(cell.key)
            self.done[cell.key] = record
            self.progress.finish(cell, record, resumed and (self.helpers is None or cell.key in self.old))

    def refuse(self, cell: Cell, reason: str) -> None:
        """A cell cannot be run."""
        if cell.key not in self.settled:
            self.settled.add(cell.key)
            self.progress.refuse(cell, reason)

    def fail(self, failure: Failure) -> None:
        """A cell has failed."""
        if failure.cell.key not in self.settled:
            self.settled.add(failure.cell.key)
            self.failed.append(failure)
            self.progress.fail(failure)

    def hear(self) -> None:
        """Take note of what the helpers have done."""
        if self.helpers is not None:
            self.helpers.hear()

    def wait(self) -> None:
        """Until it is worth looking again."""
        if self.helpers is not None:
            self.helpers.wait(0.5)
        else:
            time.sleep(0.5)


class Bench:
    """A plan with its model and data at hand, checked and ready to run.

    Args:
        plan: what to run.
        device: where.
        workers: threads that decode images; by default none for the embedded data and your own, else up to 4.
        on_bad_image: "raise" or "skip".
        source: a source to use in place of opening `plan.data` (any torch Dataset, through `come.bench.data.DatasetSource`).
        model: a model to use in place of loading `plan.model`.
        streams: manifests to replay in place of the setting's own streams.
        jobs: processes that run cells at once, see `automatic_jobs` for None. More than one need a main module that can be
            imported, as always in Python where processes are started.
        together: cells that run at once as streams of one fleet, where they differ in corruptions, seeds, rates or thresholds
            only; None for as many as keep a GPU busy. The same numbers within rounding. More than one run in this process.
        shard: (i, n) runs the i-th of n parts of the plan, counted from 0, about as much work each. Processes that run the
            other parts may use the same folder at the same time, on this machine or on others.
        cluster: run cells with Ray, see `come.bench.cluster.Cluster`; `jobs` is then the number of workers, None for as many
            as there is room for, and the device is theirs.
        protocol: check weights and images by it, and run No Adapt first: if that misses its number, nothing is adapted. The
            plan is that of `Protocol.plan_for`.

    Raises:
        ComeError: the device, the model, its checkpoint, the data, the outliers or the source images cannot be used, they do
            not belong together, or no method of the plan can be run on this model.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        device: str = "cpu",
        workers: int | None = None,
        on_bad_image: OnBadImage = "raise",
        source: Source | None = None,
        model: models.Model | None = None,
        streams: Sequence[Stream] = (),
        jobs: int | None = 1,
        together: int | None = 1,
        shard: tuple[int, int] = (0, 1),
        cluster: Cluster | None = None,
        protocol: Protocol | None = None,
    ) -> None:
        self.protocol = protocol
        self.plan, self._on_bad_image, self._streams = plan, on_bad_image, tuple(streams)
        require(0 <= shard[0] < shard[1], "shard", shard, "(i, n) with 0 <= i < n")
        here = source is not None or plan.data.partition(":")[0] == "fashion"
        cores = os.cpu_count() or 1 if cluster is None else int(cluster.cpus) - 1
        self._workers = workers if workers is not None else 0 if here else max(0, min(4, cores))
        require_int("workers", self._workers, 0)
        if self._workers > WORKERS:
            raise ConfigError(f"workers must be an integer from 0 to {WORKERS}, got {workers}")
        self._cluster, self._their_device = cluster, device
        if cluster is not None:
            jobs = cluster.connect(device, jobs)
            device = device if device != "cuda" or torch.cuda.is_available() else "cpu"  # for the checks
        self._device = _device(device)
        self._model = model or models.load(plan.model, **{name: getattr(plan, name) for name in models.OPTIONS})
        self._weights_sha256 = protocol.check_weights(self._model) if protocol is not None else ""
        self._model.module.to(self._device)
        self._clean: Source | None = None
        """Where source images come from, if a method needs some."""
        self._source = source or self._open(plan.data)
        self._embedded = source is None and isinstance(self._source, FashionSource)
        if plan.classes is not None:
            self._source.number(read_classes(plan.classes), plan.classes)
        self._images_sha256 = protocol.check_images(self._source) if protocol is not None else None
        self._outliers = {spec: self._open(spec) for spec in plan.outliers or ()}
        self._check_data()
        self._check_streams()
        replay = (
            hashlib.sha256("".join(sorted(s.digest for s in streams)).encode()).hexdigest()[:16] if streams else None
        )
        embedded = plan.model in models.EMBEDDED
        weights = None if embedded else (self._weights_sha256 or models.fingerprint(self._model.module))[:16]
        found = {"replay": replay, "weights": weights, "images": self._source.digest()}
        found |= {"total": None, "edition": None} if streams else {}
        self.restricted = 0
        """To how many of its classes the model is restricted; 0 if it is not."""
        if self._source.num_classes != self._model.num_classes and self._source.subset:
            self._model = restricted(self._model, self._source.subset)
            self.restricted = self._model.num_classes
        cells = [cell.model_copy(update=found) for cell in plan.cells(len(self._source))]
        replayed = [cell for cell in cells if any(s.outliers == cell.outliers for s in streams)]
        self.planned = self.cells = replayed or cells
        """`planned` are the cells of the plan, `cells` those of this shard."""
        self._made: _Made | None = None
        self._fleet: _Fleet | None = None
        self._stand_ins: ModelCopies | None = None
        self._apart: set[str] = set()
        """Methods, and keys of cells, that were found not to run as streams of a fleet."""
        self._source_images: Tensor | None = None
        self.refused: dict[str, str] = {}
        """Methods that cannot be run on this model or these streams, and why."""
        self.failed: list[Failure] = []
        """Cells that failed in the last run, and why."""
        self._helps = False
        self._check_domains()
        self._try_methods()
        others = [cell for cell in self.planned if not self._is_first(cell)]
        self.cells = [*filter(self._is_first, self.planned), *_dealt(others, *shard)]
        self._waiting: Sequence[Cell] = self.cells
        """Cells that are being run."""
        if cluster is not None and together != 1:
            raise ConfigError(
                f"together ({together or 'auto'}) cannot be used with a Ray cluster; leave one of them out"
            )
        self.together = automatic_streams(self._device, plan.batch_size) if together is None else together
        require_int("together", self.together, 1)
        if self.together > 1:
            if (jobs or 1) > 1:
                raise ConfigError(
                    f"together ({self.together}) and jobs ({jobs}) are two ways to run cells at once; choose one"
                )
            jobs = 1
        self.jobs = automatic_jobs(self._model.module, self._device, self.cells) if jobs is None else jobs
        require_int("jobs", self.jobs, 1)
        self._jobs = ALONE
        if cluster is None:
            self._keep_images()
        else:
            self._model.module.to("cpu")

    def _open(self, spec: str) -> Source:
        return open_source(spec, self._model.preprocess, self._on_bad_image)

    def _keep_images(self) -> None:
        self._source = self._kept(self._source)
        self._outliers = {spec: self._kept(outliers) for spec, outliers in self._outliers.items()}

    def settle(self, device: str, jobs: Jobs) -> None:
        """Make a copy ready in a worker of a cluster: the model on the device, and the data looked at.

        Raises:
            InputError: the device or the data cannot be used there.
        """
        self._device, self._jobs, self.jobs = _device(device), jobs, 1
        self._model.module.to(self._device)
        for source in (self._source, *self._outliers.values()):
            shift = None if source.holds is None else (self.plan.corruptions or source.holds)[0]
            if not len(source.load(range(min(8, len(source))), shift, self._severities[0]).labels):
                raise InputError(f"none of the first images of {source.name} can be read")
        if self._clean is not None:
            self._clean.source_images(1)
        self._keep_images()

    def _kept(self, source: Source) -> Source:
        """The source with what is decoded kept for later cells; what is in memory is kept once more only for others."""
        used: Iterable[int] = range(len(source))
        if source is self._source:
            seeds = {cell.seed: cell for cell in self.planned}.values()
            orders: list[Sequence[int]] = [stream.order for stream in self._streams]
            used = set[int]().union(*orders or [settings.samples(cell, source) for cell in seeds])
        if not source.at_hand or (self.jobs > 1 and source.holds is None):
            shifts: list[tuple[str | None, int]] = []
            shifts += [(name, severity) for name in self.plan.corruptions or () for severity in self._severities]
            shifts += [shift for stream in self._streams for shift in stream.shifts]
            source = DecodedStore(source, used, shifts)
        return DeviceCache(source, used) if self._device.type == "cuda" else source

    @property
    def _severities(self) -> Sequence[int]:
        return range(1, 6) if self.plan.setting == "gradual" else (self.plan.severity or 5,)

    def _check_data(self) -> None:
        plan, source, model = self.plan, self._source, self._model
        for severity in self._severities:
            source.require(plan.corruptions or (), severity)
        if not source.num_classes:
            raise InputError(f"{source.name} has no labels, so it can only be given as --outliers; choose other --data")
        within = source.subset is not None and model.num_classes == IMAGENET
        if source.num_classes != model.num_classes and not within:
            who = f"{source.name} has" if plan.classes is None else f"{plan.classes} names"
            repair = "choose a model and data that belong together"
            if plan.classes is not None:
                repair = "give a file that names each output of the model"
            elif len(source.classes) in range(1, model.num_classes):
                repair += ", or name all classes of the model with --classes FILE"
            raise InputError(f"{who} {source.num_classes} classes, {model.name} has {model.num_classes}; {repair}")
        if plan.statistics is not None and not any(isinstance(m, _BatchNorm) for m in model.module.modules()):
            raise ConfigError(f"statistics has no effect: {model.name} has no BatchNorm layer; leave it out")
        if source.holds is not None and not plan.corruptions:
            raise InputError(
                f"{source.name} holds corrupted images only; the {plan.setting} setting needs clean ones: folder:PATH"
            )
        if any("source" in get_method(name.partition(":")[0]).hyperparameters() for name in plan.methods):
            self._clean = self._open(plan.source_data) if plan.source_data else source
            self._clean.source_images(1)

    def _check_streams(self) -> None:
        for stream in self._streams:
            last = max((i for p, i in enumerate(stream.order) if stream.kind(p) != OUTLIER), default=0)
            if stream.data != self.plan.data or last >= len(self._source):
                raise InputError(
                    f"the stream is of {stream.data!r} up to index {last}, the data is {self.plan.data!r} "
                    f"with {len(self._source)} samples; replay it on the data it was made from"
                )
            if stream.outliers is not None and stream.outliers not in self._outliers:
                raise InputError(
                    f"the stream has outliers of {stream.outliers!r}, which is opened only if you name it: give --setting "
                    f"open-world --outliers {stream.outliers}"
                )

    def _check_domains(self) -> None:
        """Refuse two streams that would share a column of the table."""
        first = self.cells[0]
        alike = [c for c in self.cells if (c.pair, c.seed) == (first.pair, first.seed)]
        names = [episode.stream.domain for cell in alike for episode in self.episodes(cell)]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ConfigError(f"two streams of this run are called {twice[0]!r}; give folders with different names")

    def _try_methods(self) -> None:
        """Find out which methods cannot be run, before anything is: make each once, and show it a batch."""
        side = self._model.preprocess.size
        smallest = min(_smallest_batch(episode, self.plan.batch_size) for episode in self.episodes(self.cells[-1]))
        pixels = torch.Generator().manual_seed(0)
        images = torch.randint(256, (max(smallest, 2), 3, side, side), generator=pixels, dtype=torch.uint8)
        batch = self._model.preprocess(images.to(self._device))
        for cell in {cell.method: cell for cell in self.cells}.values():
            try:
                self._adapter(cell, [batch[:2]]).check(batch[:smallest])
            except (ModelError, InputError) as error:
                self.refused[cell.method] = str(error)
        if len(self.refused) == len(self.plan.methods):
            raise InputError(next(iter(self.refused.values())))

    def episodes(self, cell: Cell) -> list[Episode]:
        """The streams of a cell, in order: the setting's own, or those that are replayed."""
        if not self._streams:
            outliers = self._outliers.get(cell.outliers or "")
            found = list(settings.get(cell.setting).episodes(cell, self._source, outliers))
            if empty := [episode.stream.domain for episode in found if not len(episode.stream)]:
                raise InputError(
                    f"{cell.size} samples are too few for the {cell.setting} setting: its stream {empty[0]!r} has none; use "
                    "more data, or a larger --limit"
                )
            return found
        chosen = [
            Episode(s, reset=True)
            for s in self._streams
            if {name for name, _ in s.shifts} & set(cell.corruptions)
            and (s.seed, s.outliers) == (cell.seed, cell.outliers)
        ]
        if not chosen:
            raise InputError(f"no stream was given for {', '.join(cell.corruptions)} with seed {cell.seed}")
        return chosen

    @property
    def class_order(self) -> str:
        """The order of the classes, where folders are named after them, and where it is from; else empty."""
        source, file = self._source, self.plan.classes
        if not source.classes:
            return ""
        origin = "in ImageNet's order" if source.subset is not None else "in alphabetical order"
        if file is not None:
            there = len(torch.unique(source.labels()))
            origin = f"as in {file}" + (f", images of {there}" if there < source.num_classes else "")
        return f"{in_order(source.classes)} ({source.num_classes} classes, {origin})"

    def doubt(self) -> str:
        """Why the model may not fit the data: without adaptation it is near chance on a few images; else empty.

        Nobody looks at the embedded data, nor where a protocol checks No Adapt by its number.
        """
        if self._embedded or self.protocol is not None:
            return ""
        source, cell = self._source, self.cells[0]
        shift = (None, 5) if source.holds is None else ((self.plan.corruptions or source.holds)[0], self._severities[0])
        device = self._device if self._cluster is None else torch.device("cpu")
        indices = shuffle(settings.samples(cell, source), cell.seed)
        try:
            return chance.doubt(self._model, source, indices, shift, device, self.class_order)
        except Exception:  # whoever needs what is broken says so
            return ""

    def run(self, folder: RunFolder, progress: Progress | None = None, *, fresh: bool = False) -> list[Record]:
        """Run what is not done, and return the records of all cells in the plan's order.

        Cells that another process is working on are left to it and waited for at the end. A cell that fails is noted in
        `failed` and in the folder, stops no other, and is tried again in the next run. Errors that concern all cells are
        raised: a folder that cannot be written, data that cannot be read.
        """
        progress = progress or Progress()
        waiting = [cell for cell in self.cells if cell.method not in self.refused]
        for cell in self.cells:
            if cell.method in self.refused:
                progress.refuse(cell, self.refused[cell.method])
        check_space(folder.path, waiting)
        old = [folder.failure_file(cell.key) for cell in waiting]
        old += [folder.file(cell.key) for cell in waiting if fresh]
        before = {path: stamp for path in old if (stamp := folder.stamp(path)) is not None}
        under_way = UnderWay(folder, progress, before)
        if any(under_way.record(cell) is None for cell in waiting) and (doubt := self.doubt()):
            progress.doubt(doubt)
        if self.protocol is not None:
            firsts = [cell for cell in waiting if self._is_first(cell)]
            self._run_all(firsts, under_way)
            self._require_met(self.protocol, firsts, under_way)
        self._run_all([cell for cell in waiting if not self._is_first(cell)], under_way)
        done, self.failed = under_way.done, under_way.failed
        if self.cells and not done and not self.failed and self.refused:
            raise InputError(next(iter(self.refused.values())))
        return [done[cell.key] for cell in self.cells if cell.key in done]

    def _is_first(self, cell: Cell) -> bool:
        """Whether a cell comes before all others, in every shard: No Adapt of a protocol."""
        return self.protocol is not None and cell.base == "source"

    def _require_met(self, protocol: Protocol, firsts: Sequence[Cell], under_way: UnderWay) -> None:
        """Keep what No Adapt reached; raise `InputError` if that is not the protocol's number."""
        found = [under_way.done[cell.key] for cell in firsts if cell.key in under_way.done]
        if not found or len(found) < len(firsts):
            why = (*under_way.failed, *self.refused.values(), "it is not among the methods")[0]
            raise InputError(f"No Adapt could not be run, so nothing was adapted: {why}")
        outcome = Outcome.of(protocol, self._weights_sha256, found, self._images_sha256)
        under_way.folder.write_outcome(outcome)
        outcome.require(self.plan.data)
        under_way.progress.meet(outcome)

    def _run_all(self, waiting: list[Cell], under_way: UnderWay) -> None:
        self._waiting = waiting
        if self._cluster is None:
            self._run_here(waiting, under_way)
        else:
            self._run_on(self._cluster, waiting, under_way)

    def _run_here(self, waiting: list[Cell], under_way: UnderWay) -> None:
        """In this process, and in others of this machine."""
        count = self.jobs
        if count > 1:
            under_way.old = {cell.key for cell in waiting if under_way.record(cell) is not None}
            count = max(1, min(count, len(waiting) - len(under_way.old)))
        threads = torch.get_num_threads()
        share = max(1, threads // count)
        try:
            if count > 1:
                self._jobs = Jobs(count, os.getpid())
                under_way.helpers = Helpers(self, under_way, count - 1, share)
                torch.set_num_threads(share)
                waiting = _shared_out(waiting, 0, count)
            while waiting:
                parts = bundles(waiting, self.together, self._is_alone)
                later = [cell for part in parts for cell in self._try_all(part, under_way)]
                if len(later) == len(waiting):
                    under_way.wait()
                waiting = later
        finally:
            if under_way.helpers is not None:
                under_way.helpers.close()
                under_way.helpers = None
                torch.set_num_threads(threads)
            self._jobs = ALONE
            self.release()

    def _run_on(self, cluster: Cluster, waiting: list[Cell], under_way: UnderWay) -> None:
        """In workers of a cluster."""
        for cell in waiting:
            if (record := under_way.record(cell)) is not None:
                under_way.finish(cell, record, resumed=True)
        left = [cell for cell in waiting if cell.key not in under_way.settled]
        count = min(self.jobs, len(left))
        if count:
            with Workers(cluster, self, under_way, count, self._their_device) as workers:
                workers.run([_shared_out(left, number, count) for number in range(count)])

    def help(
        self, folder: RunFolder, progress: Progress, before: Mapping[Path, Stamp], number: int, jobs: Jobs
    ) -> None:
        """Run what nobody else has run or is running: what `Helpers` ask of a copy of this bench."""
        self._jobs, self._workers, self._helps = jobs, self._workers // jobs.count, True
        under_way = UnderWay(folder, progress, before)
        waiting = [cell for cell in self._waiting if cell.method not in self.refused]
        for cell in _shared_out(waiting, number, jobs.count):
            self._try(cell, under_way)

    def __getstate__(self) -> dict[str, Any]:
        """For another process: a helper gets the model by value, or its tensors would be moved to shared memory, under the
        user's hands. Ray pickles by value itself, and classes of the main module too.
        """
        model = self._model if get_spawning_popen() is None else pickle.dumps(self._model)
        return vars(self) | {"_made": None, "_fleet": None, "_stand_ins": None, "_source_images": None, "_model": model}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        if isinstance(state["_model"], bytes):
            self._model = pickle.loads(state["_model"])

    def release(self) -> None:
        """Close the adapter."""
        self._stand_ins = ModelCopies.of(self._model.module)  # what was compiled for it is for the next one, too
        if self._made is not None:
            self._made.adapter.close()
            self._made = None
        if self._fleet is not None:
            self._fleet.made.close()
            self._fleet = None

    def _try(self, cell: Cell, under_way: UnderWay) -> bool:
        """Whether a cell needs no further thought: it is done, now or before, has failed, or cannot be run."""
        under_way.hear()
        if cell.key in under_way.settled:
            return True
        record = under_way.record(cell)
        resumed = record is not None
        if record is None:
            with under_way.folder.claim(cell) as mine:
                if not mine:
                    return False
                record = under_way.record(cell)  # another process may have finished it just now
                resumed = record is not None
                if record is None and (failure := under_way.failure(cell)) is not None:
                    under_way.fail(failure)
                    return True
                try:
                    record = record or self._run(cell, under_way)
                except UnfitError as error:
                    self.refused[cell.method] = str(error)
                    under_way.refuse(cell, str(error))
                    return True
                except ComeError:  # of the folder or the data: no other cell would fare better
                    raise
                except Exception as error:
                    self.give_up(error)
                    under_way.folder.write_failure(failure := Failure.of(cell, error))
                    under_way.fail(failure)
                    return True
        under_way.finish(cell, record, resumed)
        return True

    def _is_alone(self, cell: Cell) -> bool:
        """Whether a cell was found not to run as a stream of a fleet."""
        return cell.base in self._apart or cell.key in self._apart

    def _try_all(self, cells: list[Cell], under_way: UnderWay) -> list[Cell]:
        """Run cells together, or the one that there is; returns those that need further thought."""
        if len(cells) == 1:
            return [] if self._try(cells[0], under_way) else cells
        later, mine = list[Cell](), list[Cell]()
        with ExitStack() as claims:
            for cell in cells:
                if under_way.record(cell) is None and not claims.enter_context(under_way.folder.claim(cell)):
                    later.append(cell)
                elif under_way.record(cell) is not None:
                    self._try(cell, under_way)
                elif cell.key not in under_way.settled:
                    mine.append(cell)
            try:
                if mine:
                    self._run_together(mine, under_way)
                return later
            except UnfitError as error:
                for cell in mine:
                    self.refused[cell.method] = str(error)
                    under_way.refuse(cell, str(error))
                return later
            except (torch.cuda.OutOfMemoryError, MemoryError):
                self.together = max(1, len(mine) // 2)
            except ConfigError as error:  # this method cannot
                warnings.warn(f"one cell after the other: {error}", stacklevel=2)
                self._apart.add(mine[0].base)
            except ComeError:
                raise
            except Exception:  # of one of them: alone each says for itself
                self._apart.update(cell.key for cell in mine)
        self.release()
        return later + mine

    def _run_together(self, cells: list[Cell], under_way: UnderWay) -> None:
        """Run cells as streams of one fleet."""
        folder, meter = under_way.folder, Meter(self._device, self._jobs)
        courses, total, fleet = dict[str, Course](), 0, self._make_fleet(cells[0])
        for cell in cells:
            episodes = self.episodes(cell)
            for episode in episodes:
                folder.write_stream(episode.stream)
            total += sum(len(episode.stream) for episode in episodes)
            outliers = next((e.stream.outliers for e in episodes if e.stream.outliers), None)
            apart = None if outliers is None else self._outliers[outliers]
            courses[cell.key] = Course(cell, self._model, self._source, episodes, self._device, self._workers, apart)
            fleet.made.open(cell.key, **own(cell))
        under_way.progress.start_together(cells, total)
        by_key = {cell.key: cell for cell in cells}
        for key, record, rows in run_together(
            courses, fleet.made, meter, fleet.events, lambda _, samples: under_way.advance(samples)
        ):
            folder.write(record, rows)
            under_way.finish(by_key[key], record)

    def _make_fleet(self, cell: Cell) -> _Fleet:
        """The fleet for a cell and others like it: the last one without its streams, if it fits."""
        key = bundle_key(cell)
        if self._fleet is not None and self._fleet.key != key:
            self.release()
        if self._fleet is None:
            events: list[Event] = []
            rest = {name: value for name, value in given(cell).items() if name not in own(cell)}
            arguments = self._arguments(cell, self._source_batches)
            guard = cell.guarded and Guard(on_event=events.append)
            try:
                made = Fleet(self._model.module, cell.base, objective=cell.objective, guard=guard, **(arguments | rest))
            except ModelError as error:
                raise UnfitError(str(error)) from error
            self._fleet = _Fleet(key, made, events)
        for name in self._fleet.made.streams:
            self._fleet.made.close(name)
        self._fleet.events.clear()
        return self._fleet

    def give_up(self, error: Exception) -> None:
        """Get ready for the next cell after one has failed; raises where this process cannot go on."""
        self.release()
        if self._helps and isinstance(error, (MemoryError, torch.cuda.OutOfMemoryError)):
            raise error  # with one process less, the others may have room for the cell
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # after some errors a GPU answers no more

    def _run(self, cell: Cell, under_way: UnderWay) -> Record:
        for episode in self.episodes(cell):
            under_way.folder.write_stream(episode.stream)
        record, rows = self.measure(cell, under_way.progress.start, under_way.advance)
        under_way.folder.write(record, rows)
        return record

    def measure(
        self, cell: Cell, start: Callable[[Cell, int], None], advance: Callable[[int], None]
    ) -> tuple[Record, Rows]:
        """Run a cell, here and now, and write nothing.

        Args:
            cell: which one.
            start: told how many samples it has.
            advance: told how many more are done.
        """
        episodes = self.episodes(cell)
        start(cell, sum(len(episode.stream) for episode in episodes))
        made = self._make(cell)
        outliers = next((e.stream.outliers for e in episodes if e.stream.outliers), None)
        return run_cell(
            cell,
            made.adapter,
            self._model,
            self._source,
            episodes,
            device=self._device,
            workers=self._workers,
            outliers=None if outliers is None else self._outliers[outliers],
            events=made.events,
            jobs=self._jobs,
            on_batch=advance,
        )

    def _make(self, cell: Cell) -> _Made:
        """The adapter for a cell: the last one, as it was when it was made, if it fits; EATA's Fisher matrix costs."""
        key = _adapter_key(cell)
        if self._made is not None and self._made.key != key:
            self.release()
        if self._made is None:
            events: list[Event] = []
            try:
                adapter = self._adapter(cell, self._source_batches, events)
            except ModelError as error:
                raise UnfitError(str(error)) from error
            self._made = _Made(key, adapter, adapter.state_dict(), events)
        else:
            # A reset would keep the guard's counters, and report what happened in the last batches of the cell before.
            self._made.adapter.load_state_dict(self._made.first)
            self._made.events.clear()
        return self._made

    def _adapter(self, cell: Cell, source: Iterable[Tensor], events: list[Event] | None = None) -> Adapter:
        guard = cell.guarded and events is not None and Guard(on_event=events.append)
        arguments = self._arguments(cell, source) | cell.hyper
        return adapt(self._model.module, cell.base, objective=cell.objective, guard=guard, **arguments)

    def _arguments(self, cell: Cell, source: Iterable[Tensor]) -> dict[str, Any]:
        """What the method of a cell is given beside its hyperparameters."""
        offered = {
            "source": source,
            "normalization": self._model.preprocess.normalization,
            "seed": cell.seed,
            "statistics": cell.statistics,
        }
        known = get_method(cell.base).hyperparameters()
        found: dict[str, Any] = {name: value for name, value in offered.items() if name in known and value is not None}
        for name in ("precision", "compile", "channels_last"):
            if (value := getattr(cell, name)) != Cell.model_fields[name].default:
                found[name] = value
        return found

    @property
    def _source_batches(self) -> Iterable[Tensor]:
        found = self._source_images
        if found is None:
            assert self._clean is not None
            found = self._clean.source_images(self.plan.source_size)
            self._source_images = found if found.numel() <= FEW else None
        for images in torch.split(found, 64):
            yield self._model.preprocess(images.to(self._device))


def in_words(error: BaseException) -> str:
    """An error in one line, for a record.

    >>> in_words(RuntimeError("out of\\nmemory"))
    'RuntimeError: out of memory'
    """
    return f"{type(error).__name__}: {reason(error)}"


def automatic_jobs(model: nn.Module, device: torch.device, cells: Sequence[Cell]) -> int:
    """How many processes run cells at once where nobody says: several for a small model that has enough to do.

    On the CPU as many as torch would use threads, since a small model gains little from a second thread; on a GPU, which one
    process keeps waiting, up to four, with 4 GB of its memory and two cores for each.
    """
    if device.type not in WORTH or sum(p.numel() for p in model.parameters()) > SMALL:
        return 1
    work = sum(cell.samples * effort(cell) for cell in cells)
    most = min(work // WORTH[device.type], psutil.virtual_memory().available // 2**31)
    if device.type == "cpu":
        most = min(most, torch.get_num_threads())
    else:
        most = min(most, 4, (os.cpu_count() or 1) // 2, torch.cuda.mem_get_info(device)[0] // 2**32)
    return max(1, int(most))


def effort(cell: Cell) -> int:
    """How much work a sample is, roughly: a backward pass takes as long as two forward passes.

    >>> effort(Cell(method="sar", objective="em", size=1))
    6
    """
    parts = re.findall(r"(\d+)(?:-\d+)?([fb])", get_method(cell.base).cost)
    return sum(int(count) * {"f": 1, "b": 2}[kind] for count, kind in parts) or 1


def _dealt(cells: Sequence[Cell], number: int, count: int) -> list[Cell]:
    """Part `number` of `count`: all cells, the longest first, are dealt out in turn. It follows from the plan alone."""
    longest = sorted(cells, key=lambda cell: -cell.samples * effort(cell))
    mine = {cell.key for cell in longest[number::count]}
    return [cell for cell in cells if cell.key in mine]


def _shared_out(cells: Sequence[Cell], number: int, count: int) -> list[Cell]:
    """The cells in the order of process `number`: those of its own adapters, the longest first, then what others leave."""
    groups: dict[object, list[Cell]] = {}
    for cell in cells:
        groups.setdefault(_adapter_key(cell), []).append(cell)
    longest = sorted(groups.values(), key=lambda group: -sum(cell.samples * effort(cell) for cell in group))
    own = [cell for group in longest[number::count] for cell in group]
    others = [cell for i, group in enumerate(longest) if i % count != number for cell in group]
    return own + others[::-1]


def _adapter_key(cell: Cell) -> tuple[object, ...]:
    """The same for cells that can share an adapter."""
    seed = cell.seed if "seed" in get_method(cell.base).hyperparameters() else None
    return (*cell.pair, repr(sorted(cell.hyper.items())), seed)


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise InputError(
            f"device {name!r} cannot be used here ({str(error).splitlines()[0]}); use cpu, or cuda on a GPU machine"
        ) from error
    return device


def _smallest_batch(episode: Episode, batch_size: int) -> int:
    size, length = episode.batch_size or batch_size, len(episode.stream)
    return min(size, length % size or size, length)


def run(
    plan: Plan,
    out: str | Path,
    *,
    device: str = "cpu",
    workers: int | None = None,
    source: Source | None = None,
    model: models.Model | None = None,
    progress: Progress | None = None,
    jobs: int | None = 1,
    cluster: Cluster | None = None,
) -> list[Record]:
    """Run a plan from Python and return its records.

    Args:
        plan: what to run.
        out: the run folder; what is done there is not run again.
        device: where to run.
        workers: threads that decode images.
        source: your own data, e.g. `come.bench.data.DatasetSource(dataset, num_classes=10, name="mine")`.
        model: your own model, `come.bench.models.Model(name, module, preprocess, num_classes)`.
        progress: who watches.
        jobs: processes that run cells at once; None chooses, see `automatic_jobs`.
        cluster: run cells with Ray, in `jobs` workers.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     records = run(Plan(methods=("source",), corruptions=("fog",), limit=64), folder)
        >>> records[0].result.samples
        64
    """
    bench = Bench(plan, device=device, workers=workers, source=source, model=model, jobs=jobs, cluster=cluster)
    records = bench.run(RunFolder(out), progress)
    if bench.failed:
        more = f" ({len(bench.failed)} cells failed; this is the first)" if len(bench.failed) > 1 else ""
        warnings.warn(f"failed: {bench.failed[0]}{more}; run again to try again", stacklevel=2)
    return records
