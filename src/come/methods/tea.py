"""TEA: lowers the energy of the test data.

Yuan et al., "TEA: Test-time Energy Adaptation", CVPR 2024.

    E(x)   = -logsumexp_k f_k(x)
    dream  y <- y - step * dE/dy + noise * N(0, 1),  `dreams` times (SGLD), from a replay buffer of earlier dreams
    loss   = mean E(x) - mean E(y)

Adapts the affine parameters of normalisation layers, with BatchNorm on batch statistics; needs images (or any one tensor of
floating-point inputs) whose normalisation is known. 22 + 1 forwards and 21 backwards per batch of 20 SGLD steps. The
objective plays no part in it.

Memory: the buffer holds `buffer` inputs, on the CPU if asked: 10,000 images of 224 x 224 in float32 take 6 GB.

Deviations from the published code: dreams start uniformly in the range of images, [0, 1] before normalisation, where that
code draws from [-1, 1] whatever the data; `reset()` also empties the buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from come.errors import ConfigError, InputError, require
from come.images import Normalisation
from come.inputs import Input, exact, image_of, with_image
from come.method import Common, Method, Step, masked_mean

if TYPE_CHECKING:
    from typing_extensions import Unpack

Draw = Callable[[int, int, Tensor], Tensor]
"""(number of the batch, number of the SGLD step, a tensor like the result) -> random numbers."""


class TEA(Method):
    """Test-time energy adaptation.

    Args:
        model: see `Method`.
        normalisation: (mean, std) of the inputs, per channel; None if they are images in [0, 1].
        dreams: SGLD steps, at least 1.
        step_size: of SGLD, > 0.
        noise: standard deviation of SGLD's noise, >= 0.
        fresh: share of dreams that start anew and not from the buffer, in [0, 1].
        buffer: how many dreams are kept, at least 1.
        buffer_device: "model" or "cpu".
        start: your own start of the dreams, in place of the buffer: (batch, -1, like) -> tensor.
        draw: your own standard normal noise: (batch, SGLD step, like) -> tensor.
        seed: of the random numbers.
        **common: see `Method`.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(144, 5))
        >>> method = TEA(model, dreams=2, buffer=100)
        >>> method(torch.rand(10, 3, 8, 8)).shape
        torch.Size([10, 5])
        >>> method.state["buffer"].shape
        torch.Size([100, 3, 8, 8])
    """

    name = "tea"
    needs = "images"
    cost = "23f 21b"
    minimises = False

    def __init__(
        self,
        model: nn.Module,
        *,
        normalisation: tuple[Sequence[float], Sequence[float]] | Normalisation | None = None,
        dreams: int = 20,
        step_size: float = 0.1,
        noise: float = 0.01,
        fresh: float = 0.05,
        buffer: int = 10_000,
        buffer_device: str = "model",
        start: Draw | None = None,
        draw: Draw | None = None,
        seed: int = 0,
        **common: Unpack[Common],
    ) -> None:
        require(isinstance(dreams, int) and dreams >= 1, "dreams", dreams, "a whole number, at least 1")
        require(step_size > 0, "step_size", step_size, "positive")
        require(noise >= 0, "noise", noise, "at least 0")
        require(0 <= fresh <= 1, "fresh", fresh, "in [0, 1]: a share")
        require(isinstance(buffer, int) and buffer >= 1, "buffer", buffer, "a whole number, at least 1")
        require(buffer_device in ("model", "cpu"), "buffer_device", buffer_device, "'model' or 'cpu'")
        self.normalisation = Normalisation.of(normalisation)
        self.dreams, self.step_size, self.noise, self.fresh = dreams, step_size, noise, fresh
        self.buffer, self.seed, self.start, self.draw = buffer, seed, start, draw
        self.stays = ("buffer",) if buffer_device == "cpu" else ()
        super().__init__(model, **common)

    def adapt(self, x: Input) -> Step:
        """Dream, then one step that lowers the energy of the batch against that of the dreams; predict after it."""
        images = image_of(x, "tea")
        if not self.count:
            self.normalisation.check(images, "tea")
        generator = self.generator()
        dream, places = self._begin(images, generator)
        dream = self._dream(x, dream, generator)
        real = energy(self.forward(x))
        fake = energy(self.forward(with_image(x, dream)))
        self.descend(masked_mean(real, self.valid) - fake.mean(), go=self.valid.any())
        if places is not None:
            kept = self.state["buffer"]  # changed in place, it may be large: so nothing that is not finite may enter
            kept[places] = torch.where(dream.isfinite(), dream, 0).to(kept)
        with torch.no_grad():
            logits = self.forward(x)
        return Step(logits, real, self.valid)

    def _begin(self, images: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor | None]:
        """Where the dreams start, and the places in the buffer that they came from."""
        if self.start is not None:
            return self.start(self.count, -1, images).to(images), None
        batch = len(images)
        if "buffer" not in self.state:
            start = torch.rand(self.buffer, *images.shape[1:], generator=generator, device=images.device)
            self.state["buffer"] = self.placed("buffer", self.normalisation.inputs(start.to(images)))
        kept = self.state["buffer"]
        if kept.shape[1:] != images.shape[1:]:
            raise InputError(
                f"images are {tuple(images.shape[1:])}, those before were {tuple(kept.shape[1:])}; TEA's buffer holds one "
                "size: resize them, or reset() between sizes"
            )
        # A permutation's beginning: no dream is in the batch twice, unless the batch is larger than the buffer.
        order = torch.rand(self.buffer, generator=generator, device=images.device).argsort()
        places = order[torch.arange(batch, device=images.device) % self.buffer].to(kept.device)
        anew = torch.rand(batch, 1, 1, 1, generator=generator, device=images.device) < self.fresh
        uniform = torch.rand(images.shape, generator=generator, device=images.device).to(images)
        return torch.where(anew, self.normalisation.inputs(uniform), kept[places].to(images)), places

    def _dream(self, x: Input, dream: Tensor, generator: torch.Generator) -> Tensor:
        """SGLD on the input, with the weights held."""
        for k in range(self.dreams):
            dream = dream.detach().requires_grad_()
            total = energy(self.forward(with_image(x, dream))).sum()
            if not total.requires_grad:
                raise ConfigError("tea needs a model that passes gradients back to its input; this one does not")
            (slope,) = torch.autograd.grad(total, dream)
            dream = dream.detach() - self.step_size * slope
            if self.noise:
                if self.draw is not None:
                    drawn = self.draw(self.count, k, dream).to(dream)
                else:
                    drawn = torch.randn(dream.shape, generator=generator, device=dream.device).to(dream)
                dream = dream + self.noise * drawn
        return dream.detach()


def energy(logits: Tensor) -> Tensor:
    r"""Free energy of each sample, :math:`E = -\log \sum_k e^{f_k}`, (B, K) -> (B,).

    Example:
        >>> energy(torch.zeros(1, 4))  # -ln 4
        tensor([-1.3863])
    """
    return -exact(logits).logsumexp(dim=1)
