"""CoTTA: a student and its slow teacher.

Wang et al., "Continual Test-Time Domain Adaptation", CVPR 2022.

    target   = teacher(x) where the source model is sure (mean largest probability >= p_th),
               else the mean of the teacher's logits over random views of x
    loss     = mean of 0.5 C(student, target) + 0.5 C(target, student)
    teacher <- alpha teacher + (1 - alpha) student
    student <- source value for a random share of its entries

Returns the target. Adapts the weights and biases of all layers, with BatchNorm on batch statistics in all three networks;
needs images (none with `views=0`) whose normalisation is known, because the augmentations act on images in [0, 1]. Three
forwards and one backward per batch, and one forward for each view where the source model is unsure.

COME: C is the objective's consistency, so with opinions the K + 1 masses take the place of the K probabilities. The paper only
says that the objective is replaced; this is our reading of it.

Memory: beside the student its gradient and momentum, the source and the teacher; views go through in chunks.

Deviations from the published code: each view of each image is drawn for itself, where that code draws one transformation for
a whole batch; with BatchNorm each view is normalised by its own statistics all the same, though views share a forward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from come import teacher
from come.augment import Augment, jitter
from come.batchnorm import by_group, normalised_by
from come.errors import require
from come.images import Normalisation
from come.inputs import Input, exact, image_of, with_image
from come.method import Common, Method, Step, masked_mean, untracked
from come.select import layers

if TYPE_CHECKING:
    from typing_extensions import Unpack

Restore = Callable[[str, Tensor, int], Tensor]
"""(name of a parameter, the parameter, number of the batch) -> mask of the entries that go back to the source."""


class CoTTA(Method):
    """CoTTA, with any objective.

    Args:
        model: see `Method`.
        normalisation: (mean, std) of the inputs, per channel; None if they are images in [0, 1].
        confident: p_th, from this mean confidence of the source model on no views are needed, in [0, 1].
        views: how many random views the teacher sees otherwise; 0 never augments.
        augment: what makes a view, (images (V, B, C, H, W) in [0, 1], generator) -> images; None is `come.augment.jitter()`.
        alpha: how much of the teacher is kept at each step, in [0, 1].
        restore: share of the entries that are put back to the source after each step, or a function that gives the mask.
        chunk: views are handed to the teacher at most so many images at a time.
        seed: of views and restoration.
        **common: see `Method`.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(144, 5))
        >>> CoTTA(model, views=4)(torch.rand(10, 3, 8, 8)).shape
        torch.Size([10, 5])
    """

    name = "cotta"
    needs = "images"
    cost = "3-35f 1b"
    selects = layers()
    paper_lr = (1e-3, 1e-2)

    def __init__(
        self,
        model: nn.Module,
        *,
        normalisation: tuple[Sequence[float], Sequence[float]] | Normalisation | None = None,
        confident: float = 0.1,
        views: int = 32,
        augment: Augment | None = None,
        alpha: float = 0.999,
        restore: float | Restore = 0.01,
        chunk: int = 256,
        seed: int = 0,
        **common: Unpack[Common],
    ) -> None:
        require(0 <= confident <= 1, "confident", confident, "in [0, 1]: a probability")
        require(isinstance(views, int) and views >= 0, "views", views, "a whole number, at least 0")
        require(0 <= alpha <= 1, "alpha", alpha, "in [0, 1]")
        require(callable(restore) or 0 <= restore <= 1, "restore", restore, "a share in [0, 1], or a function")
        require(isinstance(chunk, int) and chunk >= 1, "chunk", chunk, "a whole number, at least 1")
        self.normalisation = Normalisation.of(normalisation)
        self.confident, self.views, self.alpha, self.chunk, self.seed = confident, views, alpha, chunk, seed
        self.augment: Augment = augment or jitter()
        self.restore = restore
        super().__init__(model, **common)

    def initial_state(self) -> dict[str, Tensor]:
        """The teacher, who begins as the source."""
        return teacher.first(self)

    def adapt(self, x: Input) -> Step:
        """One step of the student towards the teacher's word, then teacher and memory of the source."""
        if self.views and not self.count:
            self.normalisation.check(image_of(x, "cotta's augmentation"), "cotta's augmentation")
        generator = self.generator()
        student = self.forward(x)
        with torch.no_grad():
            target = self._target(x, generator)
        loss = self.objective.consistency(student, target, symmetric=True)
        self.descend(masked_mean(loss, self.valid), go=self.valid.any())
        teacher.follow(self, 1 - self.alpha)
        self._restore(generator)
        return Step(target, loss, self.valid)

    def _target(self, x: Input, generator: torch.Generator) -> Tensor:
        weights = teacher.weights(self)
        if self.views:
            anchor = exact(self.forward(x, self.source_values))
            # Whether 32 forwards are needed has to be known here, so this waits for the device.
            if not bool(anchor.softmax(dim=1).amax(dim=1).mean() >= self.confident):
                return self._over_views(x, weights, generator)
        return self.forward(x, weights)

    def _over_views(self, x: Input, weights: dict[str, Tensor], generator: torch.Generator) -> Tensor:
        """Mean of the teacher's logits over the views."""
        images = self.normalisation.images(image_of(x, "cotta's augmentation"))
        batch = len(images)
        # One value per channel has no statistics of its own: a batch of one goes view by view, see `batch_statistics`.
        at_once = 1 if batch == 1 and self.batch_norms else max(1, self.chunk // batch)
        total: Tensor | None = None
        for begin in range(0, self.views, at_once):
            count = min(at_once, self.views - begin)
            views = self.augment(images.expand(count, *images.shape), generator)
            inputs = with_image(x, self.normalisation.inputs(views).flatten(0, 1))
            if count > 1:
                with normalised_by(self.batch_norms, by_group(count)):
                    logits = self.forward(inputs, weights)
            else:
                logits = self.forward(inputs, weights)
            part = torch.unflatten(logits, 0, (count, batch)).sum(dim=0)
            total = part if total is None else total + part
        assert total is not None
        return total / self.views

    @untracked()
    def _restore(self, generator: torch.Generator) -> None:
        """Some of the student goes back to the source."""
        for name, p in self.parameters.items():
            if callable(self.restore):
                mask = self.restore(name, p, self.count)
            elif self.restore:
                mask = torch.rand(p.shape, generator=generator, device=p.device) < self.restore
            else:
                continue
            p.copy_(torch.where(mask, self.source_values[name], p))
