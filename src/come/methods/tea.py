"""TEA: lowers the energy of the test data.

Yuan et al., "TEA: Test-time Energy Adaptation", CVPR 2024.

    E(x)   = -logsumexp_k f_k(x)
    dream  y <- y - step * dE/dy + noise * N(0, 1),  `dreams` times (SGLD), from a replay buffer of earlier dreams
    loss   = mean E(x) - mean E(y)

Adapts the affine parameters of normalization layers, with BatchNorm on batch statistics; needs images (or any one tensor of
floating-point inputs) whose normalization is known. 22 + 1 forwards and 21 backwards per batch with 20 SGLD steps. The
objective is not used. Memory: the buffer holds `buffer` inputs, on the CPU if asked: 10,000 images of 224 x 224 in float32
take 6 GB.

Deviations from the published code: dreams start uniformly in the range of images, [0, 1] before normalization, where that code
draws from [-1, 1] whatever the data; `reset()` also empties the buffer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from come.errors import ConfigError, require, require_int
from come.images.normalization import MeanStd, Normalization, same_size
from come.method import Context, Method, Step, converted, masked_mean, register
from come.model.inputs import Inputs, at_least_float32

Draw = Callable[[int, int, Tensor], Tensor]
"""(number of the batch, number of the SGLD step, a tensor like the result) -> random numbers."""


@register
@dataclass(kw_only=True, eq=False)
class TEA(Method):
    """Test-time energy adaptation.

    Args:
        normalization: (mean, std) of the inputs, per channel; None if they are images in [0, 1].
        dreams: SGLD steps, at least 1.
        step_size: of SGLD, > 0.
        noise: standard deviation of SGLD's noise, >= 0.
        fresh: share of dreams that start from new noise and not from the buffer, in [0, 1].
        buffer: number of dreams that are kept, at least 1.
        buffer_device: "model" or "cpu".
        start: replaces the buffer as the start of dreams: (batch, -1, like) -> tensor.
        draw: replaces the standard normal noise: (batch, SGLD step, like) -> tensor.
        seed: of the random numbers.

    Example:
        >>> import come
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(144, 5))
        >>> classifier = come.adapt(model, TEA(dreams=2, buffer=100))
        >>> classifier(torch.rand(10, 3, 8, 8)).shape
        torch.Size([10, 5])
        >>> classifier.state["buffer"].shape
        torch.Size([100, 3, 8, 8])
    """

    name = "tea"
    vectors_only = "its energy is of whole images"
    needs = "images"
    cost = "23f 21b"
    minimizes = False
    normalization: converted[MeanStd, Normalization] = converted(Normalization.of, None)
    dreams: int = 20
    step_size: float = 0.1
    noise: float = 0.01
    fresh: float = 0.05
    buffer: int = 10_000
    buffer_device: str = "model"
    start: Draw | None = None
    draw: Draw | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        require_int("dreams", self.dreams, 1)
        require(self.step_size > 0, "step_size", self.step_size, "positive")
        require(self.noise >= 0, "noise", self.noise, ">= 0")
        require(0 <= self.fresh <= 1, "fresh", self.fresh, "a share in [0, 1]")
        require_int("buffer", self.buffer, 1)
        require(self.buffer_device in ("model", "cpu"), "buffer_device", self.buffer_device, "'model' or 'cpu'")
        if self.buffer_device == "cpu":
            self.on_host = ("buffer",)  # type: ignore[misc]

    def check(self, ctx: Context, x: Inputs, first: bool) -> None:
        """The buffer holds images of one size."""
        images = x.image("tea")
        self.normalization.check(images, "tea", first)
        same_size(images, ctx.state.get("buffer", images), "TEA's buffer")

    def initial_state(self, ctx: Context, x: Inputs) -> dict[str, Tensor]:
        """A buffer of uniform noise."""
        if self.start is not None:
            return {}
        images = x.image("tea")
        noise = torch.rand(self.buffer, *images.shape[1:], generator=ctx.generator, device=images.device)
        kept = self.normalization.inputs(noise.to(images))
        return {"buffer": kept.cpu() if self.buffer_device == "cpu" else kept}

    def adapt(self, ctx: Context, x: Inputs) -> Step:
        """Dream, then one step that lowers the energy of the batch relative to that of the dreams; predict after it."""
        dream, places = self._begin(ctx, x.image("tea"))
        dream = self._dream(ctx, x, dream)
        real = energy(ctx.forward(x))
        fake = energy(ctx.forward(x.with_image(dream)))
        ctx.descend(masked_mean(real, ctx.valid) - fake.mean(), go=ctx.valid.any())
        if places is not None:
            ctx.put("buffer", places, torch.where(dream.isfinite(), dream, 0))
        with torch.no_grad():
            logits = ctx.forward(x)
        return Step(logits, real, ctx.valid)

    def _begin(self, ctx: Context, images: Tensor) -> tuple[Tensor, Tensor | None]:
        """The start of the dreams, and their places in the buffer."""
        if self.start is not None:
            return self.start(ctx.count, -1, images).to(images), None
        batch, kept = len(images), ctx.state["buffer"]
        draw: dict[str, Any] = {"generator": ctx.generator, "device": images.device}
        # A permutation's beginning: no dream is in the batch twice, unless the batch is larger than the buffer.
        order = torch.rand(self.buffer, **draw).argsort()
        places = order[torch.arange(batch, device=images.device) % self.buffer].to(kept.device)
        anew = torch.rand(batch, 1, 1, 1, **draw) < self.fresh
        uniform = torch.rand(images.shape, **draw).to(images)
        return torch.where(anew, self.normalization.inputs(uniform), kept[places].to(images)), places

    def _dream(self, ctx: Context, x: Inputs, dream: Tensor) -> Tensor:
        """SGLD on the input, with the weights held."""
        weights = ctx.weights.detach()
        for k in range(self.dreams):
            dream = dream.detach().requires_grad_()
            total = energy(ctx.forward(x.with_image(dream), weights)).sum()
            if not total.requires_grad:
                raise ConfigError("tea needs a model that passes gradients back to its input; this one does not")
            (slope,) = torch.autograd.grad(total, dream)
            dream = dream.detach() - self.step_size * slope
            if self.noise:
                if self.draw is not None:
                    drawn = self.draw(ctx.count, k, dream).to(dream)
                else:
                    drawn = torch.randn(dream.shape, generator=ctx.generator, device=dream.device).to(dream)
                dream = dream + self.noise * drawn
        return dream.detach()


def energy(logits: Tensor) -> Tensor:
    r"""Free energy of each sample, :math:`E = -\log \sum_k e^{f_k}`, (B, K) -> (B,).

    Example:
        >>> energy(torch.zeros(1, 4))  # -ln 4
        tensor([-1.3863])
    """
    return -at_least_float32(logits).logsumexp(dim=1)
