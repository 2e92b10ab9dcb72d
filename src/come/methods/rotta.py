"""RoTTA: a balanced memory and a slow teacher.

Yuan, Xie and Li, "Robust Test-Time Adaptation in Dynamic Scenarios", CVPR 2023.

    answer   teacher(x), BatchNorm on the robust statistics below
    memory   of `capacity` samples: a new one enters if its class is rare, or if it beats the worst of its class (or of the
             largest classes), judged by   age_weight / (1 + exp(-age / capacity)) + doubt_weight * H / ln K
    loss     mean over the memory of  e^-a / (1 + e^-a) * C(student(view of x), teacher(x)),  a = age / capacity,
             one step after every `every` samples
    teacher <- (1 - nu) teacher + nu student
    BatchNorm's statistics <- (1 - alpha) old + alpha those of the memory, at each step

Adapts the affine parameters of normalization layers and the statistics of BatchNorm; needs images whose normalization is
known, because the views are made of images in [0, 1]. One forward per batch; at each step two more and one backward. C is the
objective's consistency; H, which ranks the memory, is the softmax entropy whatever the objective.

Where the answer has positions (pixels), the memory holds whole images: the class of one is that of most of its positions, its
uncertainty their mean, and `capacity` and `every` count images. Where one class covers most of all images it holds capacity/K.
The view then keeps every pixel in its place.

Memory: `capacity` images. Which sample enters depends on the one before it, so the ledger (three numbers per sample) is kept
on the CPU and each batch waits for its predictions there; the images stay on the device.

Deviation from the published code: no gradient flows through the batch's share (alpha) of the statistics.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor

from come.errors import InputError, require, require_int
from come.images.augment import Augment, jitter, still
from come.images.normalization import MeanStd, Normalization, same_size
from come.method import Context, Frozen, Method, Step, converted, register
from come.model.batchnorm import Layer, batch_statistics, following
from come.model.inputs import Inputs
from come.model.positions import anywhere, by_position
from come.objectives import Softmax
from come.optim import OptimizerFactory, adam, sgd


@register
@dataclass(kw_only=True, eq=False)
class RoTTA(Method):
    """RoTTA, with any objective.

    Args:
        normalization: (mean, std) of the inputs, per channel; None if they are images in [0, 1].
        capacity: samples in the memory, at least 1.
        every: one step after every so many samples, at least 1.
        nu: how far the teacher follows the student at each step, in [0, 1].
        alpha: share of the memory's statistics in BatchNorm's at each step, in [0, 1].
        age_weight: how much age counts against a sample, >= 0.
        doubt_weight: how much entropy counts against a sample, >= 0.
        augment: makes the student's view of images (1, B, C, H, W) in [0, 1] from a generator; None is
            `come.images.augment.jitter()`, and `come.images.augment.still` for logits with positions.
        seed: of the views.

    Example:
        >>> import come
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 5))
        >>> classifier = come.adapt(model, RoTTA(capacity=8, every=8))
        >>> classifier(torch.rand(10, 3, 8, 8)).shape
        torch.Size([10, 5])
        >>> classifier.state["images"].shape  # however long the stream is
        torch.Size([8, 3, 8, 8])
    """

    name = "rotta"
    needs = "images"
    waits = "which sample enters the memory depends on the one before it"
    cost = "3f 1b"
    batch_statistics = False
    paper_lr = (1e-3, 1e-3)
    scales_lr = False
    on_host = ("ledger.",)
    optimizer: str | sgd | adam | OptimizerFactory = adam()
    normalization: converted[MeanStd, Normalization] = converted(Normalization.of, None)
    capacity: int = 64
    every: int = 64
    nu: float = 0.001
    alpha: float = 0.05
    age_weight: float = 1.0
    doubt_weight: float = 1.0
    augment: Augment | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        require_int("capacity", self.capacity, 1)
        require_int("every", self.every, 1)
        require(0 <= self.nu <= 1, "nu", self.nu, "in [0, 1]")
        require(0 <= self.alpha <= 1, "alpha", self.alpha, "in [0, 1]")
        require(self.age_weight >= 0, "age_weight", self.age_weight, ">= 0")
        require(self.doubt_weight >= 0, "doubt_weight", self.doubt_weight, ">= 0")

    def check(self, ctx: Context, x: Inputs, first: bool) -> None:
        """The memory holds nothing but images of one size."""
        images = x.image("rotta")
        self.normalization.check(images, "rotta", first)
        if sum(isinstance(value, Tensor) for value in x.values()) > 1:
            raise InputError("rotta remembers images only, but the batch holds other tensors too; pass images alone")
        same_size(images, ctx.state.get("images", images), "RoTTA's memory")

    def initial_state(self, ctx: Context, x: Inputs) -> dict[str, Tensor]:
        """An empty memory, a teacher that is the source, BatchNorm's own statistics."""
        images = x.image("rotta")
        state = {"teacher": ctx.source, "images": images.new_zeros(self.capacity, *images.shape[1:])}
        for layer in ctx.batch_norms:
            if layer.mean is not None and layer.var is not None:
                for who in ("student", "teacher"):
                    state[f"{who}_mean.{layer.number}"] = layer.mean.detach().float().clone()
                    state[f"{who}_var.{layer.number}"] = layer.var.detach().float().clone()
        return {
            **state,
            "ledger.label": torch.full((self.capacity,), -1),
            "ledger.age": torch.zeros(self.capacity, dtype=torch.int64),
            "ledger.entropy": torch.zeros(self.capacity, dtype=torch.float64),
            "ledger.seen": torch.zeros((), dtype=torch.int64),
        }

    def predict(self, ctx: Context, x: Inputs) -> Tensor:
        """The teacher's answer."""
        return self._forward(ctx, x, "teacher", 0.0)

    def frozen(self, ctx: Context) -> Frozen:
        """The teacher, with its robust statistics."""
        return Frozen(ctx.state.get("teacher", ctx.source), self._statistics(ctx, "teacher"))

    def adapt(self, ctx: Context, x: Inputs) -> Step:
        """Answer with the teacher, then put the batch into the memory, sample by sample, with a step when one is due."""
        images = x.image("rotta")
        with torch.no_grad():
            logits = self.predict(ctx, x)
        entropy = Softmax().entropy(logits)
        label, doubt = self._summary(ctx, logits, entropy.double() / math.log(logits.shape[1]))
        used = torch.zeros(len(images), dtype=torch.bool)
        begin = 0
        while begin < len(images):  # up to the next step, or to the end of the batch
            seen = int(ctx.state["ledger.seen"])
            end = min(len(images), begin + self.every - seen % self.every)
            entered = self._remember(ctx, images, range(begin, end), label, doubt, logits.shape[1])
            ctx.state["ledger.seen"] = torch.tensor(seen + end - begin)
            if (seen + end - begin) % self.every == 0 and bool((ctx.state["ledger.label"] >= 0).any()):
                self._update(ctx, x)
                used[entered] = True
            begin = end
        return Step(logits, entropy, by_position(used.to(images.device), ctx.positions) & ctx.valid)

    def _summary(self, ctx: Context, logits: Tensor, doubt: Tensor) -> tuple[list[int], list[float]]:
        """The class and the uncertainty of each image: with positions the class of most of them, and the mean."""
        label = logits.argmax(dim=1)
        if ctx.positions:
            images, valid = len(ctx.samples), ctx.valid.view(len(ctx.samples), -1)
            counts = label.new_zeros(images, logits.shape[1]).scatter_add(1, label.view(images, -1), valid.long())
            label = counts.argmax(dim=1)
            doubt = torch.where(valid, doubt.view(images, -1), 0).sum(dim=1) / valid.sum(dim=1).clamp_min(1)
        return label.tolist(), doubt.tolist()

    def _remember(
        self, ctx: Context, images: Tensor, samples: range, label: list[int], doubt: list[float], classes: int
    ) -> list[int]:
        """Put samples into the memory one by one; return the numbers in the batch of those that are in it at the end."""
        labels = ctx.state["ledger.label"].tolist()
        ages = ctx.state["ledger.age"].tolist()
        doubts = ctx.state["ledger.entropy"].tolist()
        placed: dict[int, int] = {}

        def score(age: int, entropy: float) -> float:
            return self.age_weight / (1 + math.exp(-age / self.capacity)) + self.doubt_weight * entropy

        valid = anywhere(ctx.valid, ctx.positions).tolist()
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

        if placed:
            slots = torch.tensor(list(placed), device=images.device)
            rows = torch.tensor(list(placed.values()), device=images.device)
            ctx.state["images"] = ctx.state["images"].to(images).index_copy(0, slots, images[rows])
        ctx.state["ledger.label"] = torch.tensor(labels)
        ctx.state["ledger.age"] = torch.tensor(ages)
        ctx.state["ledger.entropy"] = torch.tensor(doubts, dtype=torch.float64)
        return list(placed.values())

    def _update(self, ctx: Context, x: Inputs) -> None:
        """One step of the student on the memory, then the teacher's average."""
        filled = ctx.state["ledger.label"] >= 0
        memory = ctx.state["images"][filled.to(ctx.state["images"].device)]
        age = (ctx.state["ledger.age"][filled].float() / self.capacity).to(memory.device)
        view = (self.augment or (still if ctx.positions else jitter()))(
            self.normalization.images(memory)[None], ctx.generator
        )[0]
        with torch.no_grad():
            target = self._forward(ctx, x.with_image(memory), "teacher", self.alpha)
        student = self._forward(ctx, x.with_image(self.normalization.inputs(view)), "student", self.alpha)
        freshness = by_position(torch.sigmoid(-age), ctx.positions)
        ctx.descend((freshness * self.objective.consistency(student, target)).mean())
        ctx.state["teacher"] = torch.lerp(ctx.state["teacher"], ctx.weights.detach(), self.nu)

    def _forward(self, ctx: Context, x: Inputs, who: str, share: float) -> Tensor:
        """Student or teacher with BatchNorm on the robust statistics, which move by `share` and are then kept."""
        new = self._statistics(ctx, who)
        follow = following(dict(new), share, correction=0, new=new)

        def statistics(layer: Layer, features: Tensor) -> tuple[Tensor, Tensor]:
            return (follow if layer.number in new else batch_statistics)(layer, features)

        weights = ctx.state["teacher"] if who == "teacher" else None
        logits = ctx.forward(x, weights, statistics=statistics if ctx.batch_norms else None)
        if share:
            for i, (mean, var) in new.items():
                ctx.state[f"{who}_mean.{i}"], ctx.state[f"{who}_var.{i}"] = mean.float(), var.float()
        return logits

    def _statistics(self, ctx: Context, who: str) -> dict[int, tuple[Tensor, Tensor]]:
        """Mean and variance (C,) by the number of the layer."""
        numbers = [layer.number for layer in ctx.batch_norms if f"{who}_mean.{layer.number}" in ctx.state]
        return {i: (ctx.state[f"{who}_mean.{i}"], ctx.state[f"{who}_var.{i}"]) for i in numbers}
