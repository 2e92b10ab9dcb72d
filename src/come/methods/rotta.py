"""RoTTA: a balanced memory and a slow teacher.

Yuan, Xie and Li, "Robust Test-Time Adaptation in Dynamic Scenarios", CVPR 2023.

    answer   teacher(x), BatchNorm on the robust statistics below
    memory   of `capacity` samples: a new one enters if its class is rare, or if it beats the worst of its class (or of the
             largest classes), judged by   age_weight / (1 + exp(-age / capacity)) + doubt_weight * H / ln K
    loss     mean over the memory of  e^-a / (1 + e^-a) * C(student(view of x), teacher(x)),  a = age / capacity,
             one step after every `every` samples
    teacher <- (1 - nu) teacher + nu student
    BatchNorm's statistics <- (1 - alpha) old + alpha those of the memory, at each step

Adapts the affine parameters of normalisation layers and the statistics of BatchNorm; needs images whose normalisation is known,
because the views are made of images in [0, 1]. One forward per batch; at each step two more and one backward.

C is the objective's consistency; H, which orders the memory, is the softmax entropy whatever the objective.

Memory: `capacity` images. Which sample enters depends on the one before it, so the ledger (three numbers per sample) is kept on
the CPU and each batch waits for its predictions there; the images stay on the device.

Deviation from the published code: no gradient flows through the batch's share (alpha) of the statistics.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from come import teacher
from come.augment import Augment, jitter
from come.batchnorm import mixed, normalised_by
from come.errors import InputError, require
from come.images import Normalisation
from come.inputs import Input, image_of, with_image
from come.method import Common, Method, Step
from come.objectives import Softmax
from come.optim import adam

if TYPE_CHECKING:
    from typing_extensions import Unpack


class RoTTA(Method):
    """RoTTA, with any objective.

    Args:
        model: see `Method`.
        normalisation: (mean, std) of the inputs, per channel; None if they are images in [0, 1].
        capacity: samples in the memory, at least 1.
        every: one step after every so many samples, at least 1.
        nu: how far the teacher follows the student at each step, in [0, 1].
        alpha: share of the memory's statistics in BatchNorm's at each step, in [0, 1].
        age_weight: how much age counts against a sample, >= 0.
        doubt_weight: how much entropy counts against a sample, >= 0.
        augment: what makes the student's view, (images (1, B, C, H, W) in [0, 1], generator) -> images; None is
            `come.augment.jitter()`.
        seed: of the views.
        **common: see `Method`.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 5))
        >>> method = RoTTA(model, capacity=8, every=8)
        >>> method(torch.rand(10, 3, 8, 8)).shape
        torch.Size([10, 5])
        >>> method.state["images"].shape  # however long the stream is
        torch.Size([8, 3, 8, 8])
    """

    name = "rotta"
    needs = "images"
    cost = "3f 1b"
    batch_statistics = False
    paper_lr = (1e-3, 1e-3)
    scales_lr = False
    optimises = adam()
    stays = ("ledger.",)

    def __init__(
        self,
        model: nn.Module,
        *,
        normalisation: tuple[Sequence[float], Sequence[float]] | Normalisation | None = None,
        capacity: int = 64,
        every: int = 64,
        nu: float = 0.001,
        alpha: float = 0.05,
        age_weight: float = 1.0,
        doubt_weight: float = 1.0,
        augment: Augment | None = None,
        seed: int = 0,
        **common: Unpack[Common],
    ) -> None:
        require(isinstance(capacity, int) and capacity >= 1, "capacity", capacity, "a whole number, at least 1")
        require(isinstance(every, int) and every >= 1, "every", every, "a whole number, at least 1")
        require(0 <= nu <= 1, "nu", nu, "in [0, 1]")
        require(0 <= alpha <= 1, "alpha", alpha, "in [0, 1]")
        require(age_weight >= 0, "age_weight", age_weight, "at least 0")
        require(doubt_weight >= 0, "doubt_weight", doubt_weight, "at least 0")
        self.normalisation = Normalisation.of(normalisation)
        self.capacity, self.every, self.nu, self.alpha, self.seed = capacity, every, nu, alpha, seed
        self.age_weight, self.doubt_weight = age_weight, doubt_weight
        self.augment: Augment = augment or jitter()
        super().__init__(model, **common)

    def initial_state(self) -> dict[str, Tensor]:
        """An empty memory, a teacher that is the source, BatchNorm's own statistics."""
        state = teacher.first(self)
        for who in ("student", "teacher"):
            for i, layer in self._tracked().items():
                assert layer.running_mean is not None
                assert layer.running_var is not None
                state[f"{who}_mean.{i}"] = layer.running_mean.detach().clone()
                state[f"{who}_var.{i}"] = layer.running_var.detach().clone()
        return {
            **state,
            "ledger.label": torch.full((self.capacity,), -1),
            "ledger.age": torch.zeros(self.capacity, dtype=torch.int64),
            "ledger.entropy": torch.zeros(self.capacity, dtype=torch.float64),
            "ledger.seen": torch.zeros((), dtype=torch.int64),
        }

    def adapt(self, x: Input) -> Step:
        """The teacher's answer; then the batch goes into the memory, sample by sample, with a step when one is due."""
        images = image_of(x, "rotta")
        if not self.count:
            self.normalisation.check(images, "rotta")
        if "images" in self.state and self.state["images"].shape[1:] != images.shape[1:]:
            raise InputError(
                f"images are {tuple(images.shape[1:])}, those before were {tuple(self.state['images'].shape[1:])}; RoTTA's "
                "memory holds one size: resize them, or reset() between sizes"
            )
        with torch.no_grad(), self._statistics("teacher", 0.0):
            logits = self.forward(x, teacher.weights(self))
        entropy = Softmax().entropy(logits)
        label, doubt = logits.argmax(dim=1).tolist(), (entropy.double() / math.log(logits.shape[1])).tolist()
        used = torch.zeros(len(images), dtype=torch.bool)
        begin = 0
        while begin < len(images):  # up to the next step, or to the end of the batch
            seen = int(self.state["ledger.seen"])
            end = min(len(images), begin + self.every - seen % self.every)
            entered = self._remember(images, range(begin, end), label, doubt, logits.shape[1])
            self.state["ledger.seen"] = torch.tensor(seen + end - begin)
            if (seen + end - begin) % self.every == 0:
                self._update(x)
                used[entered] = True
            begin = end
        return Step(logits, entropy, used.to(images.device))

    def _remember(
        self, images: Tensor, samples: range, label: list[int], doubt: list[float], classes: int
    ) -> list[int]:
        """Put samples into the memory, one after the other; the numbers in the batch of those that are in it at the end."""
        labels = self.state["ledger.label"].tolist()
        ages = self.state["ledger.age"].tolist()
        doubts = self.state["ledger.entropy"].tolist()
        placed: dict[int, int] = {}

        def score(age: int, entropy: float) -> float:
            return self.age_weight / (1 + math.exp(-age / self.capacity)) + self.doubt_weight * entropy

        valid = self.valid.tolist()
        for i in (i for i in samples if valid[i]):
            size = Counter(k for k in labels if k >= 0)
            if size[label[i]] >= self.capacity / classes:
                rivals = [s for s, k in enumerate(labels) if k == label[i]]
            elif size.total() < self.capacity:
                rivals = []
            else:
                most = max(size.values())
                rivals = [s for s, k in enumerate(labels) if size[k] == most]
            slot: int | None = labels.index(-1) if not rivals else None
            if rivals:
                worst = max(rivals, key=lambda s: score(ages[s], doubts[s]))
                slot = worst if score(ages[worst], doubts[worst]) > score(0, doubt[i]) else None
            if slot is not None:
                labels[slot], ages[slot], doubts[slot] = label[i], 0, doubt[i]
                placed[slot] = i
            ages = [age + 1 for age in ages]

        if "images" not in self.state:
            self.state["images"] = images.new_zeros(self.capacity, *images.shape[1:])
        if placed:
            slots = torch.tensor(list(placed), device=images.device)
            rows = torch.tensor(list(placed.values()), device=images.device)
            self.state["images"] = self.state["images"].to(images).index_copy(0, slots, images[rows])
        self.state["ledger.label"] = torch.tensor(labels)
        self.state["ledger.age"] = torch.tensor(ages)
        self.state["ledger.entropy"] = torch.tensor(doubts, dtype=torch.float64)
        return list(placed.values())

    def _update(self, x: Input) -> None:
        """One step of the student on the memory, and the teacher after it."""
        filled = self.state["ledger.label"] >= 0
        memory = self.state["images"][filled.to(self.state["images"].device)]
        age = (self.state["ledger.age"][filled].float() / self.capacity).to(memory.device)
        view = self.augment(self.normalisation.images(memory)[None], self.generator())[0]
        with torch.no_grad(), self._statistics("teacher", self.alpha):
            target = self.forward(_instead(x, memory), teacher.weights(self))
        with self._statistics("student", self.alpha):
            student = self.forward(_instead(x, self.normalisation.inputs(view)))
        freshness = torch.sigmoid(-age)
        self.descend((freshness * self.objective.consistency(student, target)).mean())
        teacher.follow(self, self.nu)

    def _tracked(self) -> dict[int, nn.BatchNorm2d]:
        return {i: layer for i, layer in enumerate(self.batch_norms) if layer.running_mean is not None}

    @contextmanager
    def _statistics(self, who: str, share: float) -> Iterator[None]:
        """Within the block BatchNorm uses the robust statistics of student or teacher, moved by `share` and then kept."""
        layers = self._tracked()
        old = [(self.state[f"{who}_mean.{i}"], self.state[f"{who}_var.{i}"]) for i in layers]
        new = list(old)
        with normalised_by(list(layers.values()), mixed(old, share, correction=0, new=new)):
            yield
        for i, (mean, var) in zip(layers, new if share else old, strict=True):
            self.state[f"{who}_mean.{i}"], self.state[f"{who}_var.{i}"] = mean, var


def _instead(x: Input, images: Tensor) -> Input:
    """A batch like `x` that consists of other images; other tensors beside them would belong to other samples."""
    values = [] if isinstance(x, Tensor) else list(x.values() if isinstance(x, dict) else x)
    if sum(isinstance(value, Tensor) for value in values) > 1:
        raise InputError(
            "rotta remembers images only, but the batch holds other tensors beside them; pass images alone"
        )
    return with_image(x, images)
