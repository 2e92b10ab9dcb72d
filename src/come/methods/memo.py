"""MEMO: agreement over views, image by image.

Zhang, Levine and Finn, "MEMO: Test Time Robustness via Adaptation and Augmentation", NeurIPS 2022.

    m      = mean over views v of the mass of f_theta(view_v(x))
    theta' = theta - lr dH(m)/dtheta
    answer f_theta'(x), and back to theta

Adapts the whole model to each image by itself; needs images whose normalisation is known, because AugMix acts on images in
[0, 1]. For each image one forward and one backward of all its views, and one forward. Images are a loop, since each has
weights of its own; their views are one batch.

BatchNorm mixes prior/(prior + 1) of its source statistics with 1/(prior + 1) of the views' own (of the image's own for the
answer), without a gradient through them.

COME: H is the objective's entropy of the averaged mass, so with opinions that of the view-averaged opinion. The paper only says
that the objective is replaced; this is our reading of it.

Deviation from the published code: the optimiser's moments are forgotten with the weights, where that code carries AdamW's
from image to image; `quirks=True` does so too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from come.augment import Augment, augmix
from come.batchnorm import mixed, normalised_by
from come.errors import require
from come.images import Normalisation
from come.inputs import Input, image_of, take, with_image
from come.method import Common, Method, Step
from come.optim import sgd
from come.select import everything

if TYPE_CHECKING:
    from typing_extensions import Unpack

TOGETHER = 8
"""Images whose views are made at once."""


class MEMO(Method):
    """MEMO, with any objective.

    Args:
        model: see `Method`.
        normalisation: (mean, std) of the inputs, per channel; None if they are images in [0, 1].
        views: views of each image, at least 2.
        augment: what makes a view, (images (V, B, C, H, W) in [0, 1], generator) -> images; None is `come.augment.augmix()`.
        prior: how many images BatchNorm's source statistics count for, at least 0; None uses them alone.
        quirks: carry the optimiser's moments from image to image, as the published code does.
        seed: of the views.
        **common: see `Method`.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 5))
        >>> MEMO(model, views=4)(torch.rand(3, 3, 8, 8)).shape
        torch.Size([3, 5])
    """

    name = "memo"
    needs = "images"
    cost = "33f 32b"
    selects = everything()
    batch_statistics = False
    paper_lr = (2.5e-4, 2.5e-4)
    scales_lr = False
    optimises = sgd(momentum=0.0)

    def __init__(
        self,
        model: nn.Module,
        *,
        normalisation: tuple[Sequence[float], Sequence[float]] | Normalisation | None = None,
        views: int = 32,
        augment: Augment | None = None,
        prior: float | None = 16.0,
        quirks: bool = False,
        seed: int = 0,
        **common: Unpack[Common],
    ) -> None:
        require(
            isinstance(views, int) and views >= 2,
            "views",
            views,
            "a whole number, at least 2: one view agrees with itself",
        )
        require(prior is None or prior >= 0, "prior", prior, "at least 0, or None for the source statistics alone")
        self.normalisation = Normalisation.of(normalisation)
        self.views, self.prior, self.quirks, self.seed = views, prior, quirks, seed
        self.augment: Augment = augment or augmix()
        super().__init__(model, **common)

    def adapt(self, x: Input) -> Step:
        """For each image: one step on its views, the answer, and back."""
        images = image_of(x, "memo")
        if not self.count:
            self.normalisation.check(images, "memo")
        generator = self.generator()
        logits, losses = [], []
        for begin in range(0, len(images), TOGETHER):
            some = self.normalisation.images(images[begin : begin + TOGETHER])
            views = self.normalisation.inputs(self.augment(some.expand(self.views, *some.shape), generator))
            for i in range(views.shape[1]):
                answer, loss = self._one(take(x, slice(begin + i, begin + i + 1)), views[:, i])
                logits.append(answer)
                losses.append(loss)
        loss = torch.stack(losses)
        return Step(torch.cat(logits), loss, self.valid)

    def _one(self, x: Input, views: Tensor) -> tuple[Tensor, Tensor]:
        """The answer for one image (1, K), and the loss on its views."""
        with self._prior():
            loss = self.objective.marginal_entropy(self.forward(with_image(x, views)))
        self.descend(loss)
        with torch.no_grad(), self._prior():
            answer = self.forward(x)
        self.recover(torch.ones((), dtype=torch.bool, device=answer.device), moments=not self.quirks)
        return answer, loss.detach()

    @contextmanager
    def _prior(self) -> Iterator[None]:
        """BatchNorm on source statistics with a share of those of the batch to come."""
        if self.prior is None:
            yield
            return
        kept: list[Any] = [(layer.running_mean, layer.running_var) for layer in self.batch_norms]
        tracked = [(layer, pair) for layer, pair in zip(self.batch_norms, kept, strict=True) if pair[0] is not None]
        statistics = mixed([pair for _, pair in tracked], 1 / (self.prior + 1), correction=1)
        with normalised_by([layer for layer, _ in tracked], statistics):
            yield
