"""The model and the data of a plan: opened, checked against each other, and decoded once for all cells."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Iterable, Sequence
from itertools import product
from multiprocessing.context import get_spawning_popen
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from come.bench import chance, models, settings
from come.bench.cell import Cell
from come.bench.data import FashionSource, OnBadImage, Source, Stream, open_source
from come.bench.data.classes import in_order, read_classes
from come.bench.data.scenes import ScenesSource
from come.bench.data.store import DecodedStore, DeviceCache
from come.bench.data.streams import OUTLIER, shuffle
from come.bench.plan import Plan
from come.bench.protocols import Protocol
from come.bench.settings import Episode
from come.errors import ConfigError, InputError
from come.methods import get as get_method

IMAGENET = 1000  # classes of a model that can be restricted to some of them, see `Source.subset`


class Inputs:
    """The model and the data of a plan, opened; the arguments are those of `Bench`."""

    def __init__(
        self,
        plan: Plan,
        device: torch.device,
        *,
        on_bad_image: OnBadImage,
        source: Source | None,
        model: models.Model | None,
        streams: Sequence[Stream],
        protocol: Protocol | None,
    ) -> None:
        self.plan, self.streams, self._on_bad_image = plan, tuple(streams), on_bad_image
        self.model = model or models.load(plan.model, **{name: getattr(plan, name) for name in models.OPTIONS})
        self.weights_sha256 = "" if protocol is None else protocol.check_weights(self.model)
        self.model.module.to(device)
        embedded = plan.model in (*models.EMBEDDED, *models.EMBEDDED_SEGMENTERS)
        self._weights = None if embedded else (self.weights_sha256 or models.fingerprint(self.model.module))[:16]
        self.source = source or self._open(plan.data)
        self.is_embedded = source is None and isinstance(self.source, (FashionSource, ScenesSource))
        if plan.classes is not None:
            self.source.number(read_classes(plan.classes), plan.classes)
        self.images_sha256 = None if protocol is None else protocol.check_images(self.source)
        self.outliers = {spec: self._open(spec) for spec in plan.outliers or ()}
        self.clean: Source | None = None  # where source images come from, if a method needs some
        if any("source" in get_method(name.partition(":")[0]).hyperparameters() for name in plan.methods):
            self.clean = self._open(plan.source_data) if plan.source_data else self.source
        self.restricted = 0  # to how many of its classes the model is restricted; 0 if it is not
        subset = self.source.subset
        if subset and self.model.num_classes == IMAGENET and self.source.num_classes != IMAGENET:
            self.model = models.restricted(self.model, subset)
            self.restricted = self.model.num_classes

    def _open(self, spec: str) -> Source:
        return open_source(spec, self.model.preprocess, self._on_bad_image)

    def __getstate__(self) -> dict[str, Any]:
        """For another process: a helper gets the model by value, or its tensors would be moved to shared memory, under the
        user's hands. Ray pickles by value itself, and classes of the main module too.
        """
        return vars(self) | {"model": self.model if get_spawning_popen() is None else pickle.dumps(self.model)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        if isinstance(state["model"], bytes):
            self.model = pickle.loads(state["model"])

    # ---- checks ----

    def check(self) -> None:
        """Raise a `ComeError` unless model, data and streams belong together."""
        plan, source, model = self.plan, self.source, self.model
        for severity in self.severities:
            source.require(plan.corruptions or (), severity)
        dense = plan.task == "segmentation"
        if source.dense is not dense:
            has, other = (
                ("a label for each pixel", "add") if source.dense else ("one label for each image", "leave out")
            )
            raise InputError(f"{source.name} has {has}; {other} --task segmentation, or choose other --data")
        if model.dense is not dense:
            says, other = ("pixels", "add") if model.dense else ("images", "leave out")
            raise InputError(f"{model.name} classifies {says}; {other} --task segmentation, or choose another --model")
        if not source.num_classes:
            raise InputError(f"{source.name} has no labels, so it can only be given as --outliers; choose other --data")
        if source.num_classes != model.num_classes:
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
        if self.clean is not None:
            self.clean.source_images(1)
        for stream in self.streams:
            last = max((i for p, i in enumerate(stream.order) if stream.kind(p) != OUTLIER), default=0)
            if stream.data != plan.data or last >= len(source):
                raise InputError(
                    f"the stream is of {stream.data!r} up to index {last}, the data is {plan.data!r} with {len(source)} "
                    "samples; replay it on the data it was made from"
                )
            if stream.outliers is not None and stream.outliers not in self.outliers:
                raise InputError(
                    f"the stream has outliers of {stream.outliers!r}, which is opened only if you name it: give --setting "
                    f"open-world --outliers {stream.outliers}"
                )

    def check_domains(self, cells: Sequence[Cell]) -> None:
        """Raise a `ConfigError` if two streams would share a column of the table."""
        alike = [cell for cell in cells if (cell.pair, cell.seed) == (cells[0].pair, cells[0].seed)]
        names = [episode.stream.domain for cell in alike for episode in self.episodes(cell)]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ConfigError(f"two streams of this run are called {twice[0]!r}; give folders with different names")

    def check_readable(self) -> None:
        """Raise an `InputError` unless the first images can be read, as on another machine they may not."""
        for source in (self.source, *self.outliers.values()):
            shift = None if source.holds is None else (self.plan.corruptions or source.holds)[0]
            if not len(source.load(range(min(8, len(source))), shift, self.severities[0]).labels):
                raise InputError(f"none of the first images of {source.name} can be read")
        if self.clean is not None:
            self.clean.source_images(1)

    def doubt(self, cell: Cell, device: torch.device) -> str:
        """Why the model may not fit the data: without adaptation it is near chance on a few images of a cell; else empty."""
        source = self.source
        if source.dense:  # the largest class alone is a good guess
            return ""
        shift = (None, 5) if source.holds is None else ((self.plan.corruptions or source.holds)[0], self.severities[0])
        indices = shuffle(settings.samples(cell, source), cell.seed)
        try:
            return chance.doubt(self.model, source, indices, shift, device, self.class_order)
        except Exception:  # the run itself reports what is broken
            return ""

    # ---- cells and their streams ----

    def cells(self) -> list[Cell]:
        """The cells of the plan, with what identifies weights, images and streams; of a replay those that have streams."""
        replay = None
        if self.streams:
            digests = "".join(sorted(stream.digest for stream in self.streams))
            replay = hashlib.sha256(digests.encode()).hexdigest()[:16]
        found = {"replay": replay, "weights": self._weights, "images": self.source.digest()}
        found |= {"total": None, "edition": None} if self.streams else {}
        cells = [cell.model_copy(update=found) for cell in self.plan.cells(len(self.source))]
        return [cell for cell in cells if any(s.outliers == cell.outliers for s in self.streams)] or cells

    def episodes(self, cell: Cell) -> list[Episode]:
        """The streams of a cell, in order: the setting's own, or those that are replayed."""
        if not self.streams:
            found = list(settings.get(cell.setting).episodes(cell, self.source, self.outliers.get(cell.outliers or "")))
            if empty := [episode.stream.domain for episode in found if not len(episode.stream)]:
                raise InputError(
                    f"{cell.size} samples are too few for the {cell.setting} setting: its stream {empty[0]!r} has none; use "
                    "more data, or a larger --limit"
                )
            return found
        chosen = [s for s in self.streams if (s.seed, s.outliers) == (cell.seed, cell.outliers)]
        chosen = [s for s in chosen if {name for name, _ in s.shifts} & set(cell.corruptions)]
        if not chosen:
            raise InputError(f"no stream was given for {', '.join(cell.corruptions)} with seed {cell.seed}")
        return [Episode(stream, reset=True) for stream in chosen]

    @property
    def severities(self) -> Sequence[int]:
        """Those of all streams."""
        return range(1, 6) if self.plan.setting == "gradual" else (self.plan.severity or 5,)

    @property
    def class_order(self) -> str:
        """The order of the classes, where folders are named after them, and where it is from; else empty."""
        source, file = self.source, self.plan.classes
        if not source.classes:
            return ""
        origin = "in ImageNet's order" if source.subset is not None else "in alphabetical order"
        if file is not None:
            there = len(torch.unique(source.labels()))
            origin = f"as in {file}" + (f", images of {there}" if there < source.num_classes else "")
        return f"{in_order(source.classes)} ({source.num_classes} classes, {origin})"

    # ---- images in memory ----

    def keep_images(self, device: torch.device, *, for_others: bool = False) -> None:
        """Keep what is decoded for later cells; what is in memory already is kept once more only for other processes."""
        source, plan = self.source, self.plan
        if source.dense:  # labels are as large as images, and are read with them
            return
        orders: list[Sequence[int]] = [stream.order for stream in self.streams]
        if not orders:
            seeds = {cell.seed: cell for cell in plan.cells(len(source))}.values()
            orders = [settings.samples(cell, source) for cell in seeds]
        shifts = [shift for stream in self.streams for shift in stream.shifts]
        shifts += product(plan.corruptions or (), self.severities)

        def kept(source: Source, used: Iterable[int]) -> Source:
            if not source.at_hand or (for_others and source.holds is None):
                source = DecodedStore(source, used, shifts)
            return DeviceCache(source, used) if device.type == "cuda" else source

        self.source = kept(source, set[int]().union(*orders))
        self.outliers = {spec: kept(outliers, range(len(outliers))) for spec, outliers in self.outliers.items()}
