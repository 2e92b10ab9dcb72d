"""CoTTA: a student and its slow teacher.

Wang et al., "Continual Test-Time Domain Adaptation", CVPR 2022.

    target   = teacher(x) where the source model is sure (mean largest probability >= p_th),
               else the mean of the teacher's logits over random views of x
    loss     = mean of 0.5 C(student, target) + 0.5 C(target, student)
    teacher <- alpha teacher + (1 - alpha) student
    student <- source value for a random share of its entries

Returns the target. Adapts the weights and biases of all layers, with BatchNorm on batch statistics in all three networks;
needs images (none with `views=0`) whose normalization is known, because the augmentations act on images in [0, 1]. Three
forwards and one backward per batch, and one forward for each view where the source model is unsure. Memory: beside the student
its gradient and momentum, the source and the teacher; views go through in chunks.

COME: C is the objective's consistency, so with opinions the K + 1 masses replace the K probabilities. The paper only says that
the objective is replaced; this is our interpretation.

Where the answer has positions (pixels), each decides by itself whether the source is sure of it, and the views are images in
several sizes, as they are and mirrored (`come.images.geometry.flip_scale`), undone on the logits before these are averaged. A
sensible `confident` is then about 0.7.

Deviations from the published code: every image of every view gets its own random transformation, where that code draws one
transformation for a whole batch; with BatchNorm each view is still normalized by its own statistics, though views share a
forward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from come.errors import require, require_int
from come.images.augment import Augment, jitter
from come.images.geometry import flip_scale
from come.images.normalization import MeanStd, Normalization
from come.method import Context, Frozen, Method, Step, converted, masked_mean, register
from come.model.batchnorm import BatchStatistics
from come.model.inputs import Inputs, at_least_float32
from come.model.positions import by_rows, rows_of
from come.select import Selector, layers

Restore = Callable[[str, Tensor, int], Tensor]
"""(name of a parameter, the parameter, number of the batch) -> mask of the entries that go back to the source."""


@register
@dataclass(kw_only=True, eq=False)
class CoTTA(Method):
    """CoTTA, with any objective.

    Args:
        normalization: (mean, std) of the inputs, per channel; None if they are images in [0, 1].
        confident: p_th, from this mean confidence of the source model on no views are needed, in [0, 1].
        views: number of random views that the teacher sees otherwise; 0 never augments.
        augment: makes views of images (V, B, C, H, W) in [0, 1] from a generator, where the answer has positions without moving
            them; or a `come.images.geometry.flip_scale`. None is `come.images.augment.jitter()`, and `flip_scale()`
            for logits with positions.
        alpha: how much of the teacher is kept at each step, in [0, 1].
        restore: share of the entries that are reset to the source after each step, or a function that gives the mask.
        chunk: largest number of images that go through the teacher at once.
        seed: of views and restoration.

    Example:
        >>> import come
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(144, 5))
        >>> come.adapt(model, CoTTA(views=4))(torch.rand(10, 3, 8, 8)).shape
        torch.Size([10, 5])
    """

    name = "cotta"
    needs = "images"
    waits = "whether views are needed is decided for each batch"
    cost = "3-35f 1b"
    paper_lr = (1e-3, 1e-2)
    select: Selector = layers()
    normalization: converted[MeanStd, Normalization] = converted(Normalization.of, None)
    confident: float = 0.1
    views: int = 32
    augment: Augment | flip_scale | None = None
    alpha: float = 0.999
    restore: float | Restore = 0.01
    chunk: int = 256
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 <= self.confident <= 1, "confident", self.confident, "a probability in [0, 1]")
        require_int("views", self.views, 0)
        require(0 <= self.alpha <= 1, "alpha", self.alpha, "in [0, 1]")
        shares = callable(self.restore) or 0 <= self.restore <= 1
        require(shares, "restore", self.restore, "a share in [0, 1], or a function")
        require_int("chunk", self.chunk, 1)

    def check(self, ctx: Context, x: Inputs, first: bool) -> None:
        """The views need images."""
        if self.views:
            self.normalization.check(x.image("cotta's augmentation"), "cotta's augmentation", first)

    def initial_state(self, ctx: Context, x: Inputs) -> dict[str, Tensor]:
        """The teacher, which starts as the source."""
        return {"teacher": ctx.source.clone()}

    def predict(self, ctx: Context, x: Inputs) -> Tensor:
        """The teacher's answer."""
        return ctx.forward(x, ctx.state["teacher"])

    def frozen(self, ctx: Context) -> Frozen:
        """The teacher."""
        return Frozen(ctx.state.get("teacher", ctx.source))

    def adapt(self, ctx: Context, x: Inputs) -> Step:
        """One step of the student towards the teacher's answer, then the teacher's average and the restoration."""
        student = ctx.forward(x)
        with torch.no_grad():
            target = self._target(ctx, x)
        loss = self.objective.consistency(student, target, symmetric=True)
        ctx.descend(masked_mean(loss, ctx.valid), go=ctx.valid.any())
        ctx.state["teacher"] = torch.lerp(ctx.state["teacher"], ctx.weights.detach(), 1 - self.alpha)
        ctx.weights = ctx.leaf(torch.where(self._restored(ctx), ctx.source, ctx.weights))
        return Step(target, loss, ctx.valid)

    def _target(self, ctx: Context, x: Inputs) -> Tensor:
        if self.views:
            sure = by_rows(lambda z: at_least_float32(z).softmax(dim=-1).amax(dim=-1), ctx.forward(x, ctx.source))
            # Whether 32 forwards are needed has to be known here, so this waits for the device.
            if ctx.dense:
                unsure = ~(sure >= self.confident)
                if bool(unsure.any()):
                    return torch.where(unsure[:, None], self._over_views(ctx, x), ctx.forward(x, ctx.state["teacher"]))
            elif not bool(sure.mean() >= self.confident):
                return self._over_views(ctx, x)
        return ctx.forward(x, ctx.state["teacher"])

    def _over_views(self, ctx: Context, x: Inputs) -> Tensor:
        """Mean of the teacher's logits over the views."""
        images, augment = self.normalization.images(x.image("cotta")), self.augment
        if augment is None:
            augment = flip_scale() if ctx.dense else jitter()
        if isinstance(augment, flip_scale):
            return self._over_sizes(ctx, x, images, augment)
        batch = len(images)
        at_once = max(1, self.chunk // batch)
        total = torch.zeros((), device=ctx.device)
        for begin in range(0, self.views, at_once):
            count = min(at_once, self.views - begin)
            views = augment(images.expand(count, *images.shape), ctx.generator)
            inputs = x.with_image(self.normalization.inputs(views).flatten(0, 1))
            statistics = ctx.statistics if ctx.share is None or count == 1 else BatchStatistics(ctx.share, groups=count)
            logits = ctx.forward(inputs, ctx.state["teacher"], statistics=statistics)
            total = total + torch.unflatten(logits, 0, (count, -1)).sum(dim=0)
        return total / self.views

    def _over_sizes(self, ctx: Context, x: Inputs, images: Tensor, views: flip_scale) -> Tensor:
        """The same for views of other sizes, whose logits are brought back to the pixels of the image."""
        total, count = torch.zeros((), device=ctx.device), 0
        for view, undo in views(images):
            logits = ctx.maps(x.with_image(self.normalization.inputs(view)), ctx.state["teacher"])
            total, count = total + (undo(logits, ctx.positions) if ctx.positions else logits), count + 1
        return rows_of(total / count)

    def _restored(self, ctx: Context) -> Tensor:
        """(P,) bool: the entries that are reset to the source."""
        if callable(self.restore):
            parts = {name: self.restore(name, p, ctx.count) for name, p in ctx.named(ctx.weights.detach()).items()}
            return ctx.model.join(list(parts.values())) > 0
        return torch.rand(ctx.weights.shape, generator=ctx.generator, device=ctx.device) < self.restore
