"""SAR: sharpness-aware, with recovery.

Niu et al., "Towards Stable Test-time Adaptation in Dynamic Wild World", ICLR 2023.

    R      = {i : H_i(theta) < E0}                              E0 = margin * ln K
    e      = rho * g / |g|,  g = d/dtheta mean_R H              climb to the sharpest point nearby
    R'     = {i in R : H_i(theta + e) < E0}
    theta <- theta - lr * d/dtheta mean_R' H (theta + e)
    m     <- 0.9 m + 0.1 mean_R' H (theta + e);  if m < recover_below: back to the source

Adapts the affine parameters of normalisation layers but those of the last quarter of the blocks and the final norm, with
BatchNorm on batch statistics; needs nothing; two forwards and two backwards per batch.

Deviations from the published code, all undone by `quirks=True`: a recovery also clears the moving average and the momentum,
which survive there; when no sample is reliable nothing moves, where the published optimiser still takes a momentum step.
`reset()` always clears everything.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from come.errors import require
from come.inputs import Input
from come.method import Common, Method, Step, masked_mean
from come.select import norm_affine

if TYPE_CHECKING:
    from typing_extensions import Unpack


class SAR(Method):
    """SAR, with any objective.

    Args:
        model: see `Method`.
        margin: E0 as a share of ln K, > 0.
        rho: radius of the sharpness-aware step, >= 0.
        recover_below: recover when the moving average of the loss falls below this; 0 never does.
        quirks: behave as the published code at recovery and when no sample is reliable.
        **common: see `Method`.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 3))
        >>> method = SAR(model, margin=1.0)
        >>> step = method.step(torch.randn(10, 4))
        >>> int(method.state["recoveries"])
        0
    """

    name = "sar"
    cost = "2f 2b"
    selects = norm_affine(skip_last=0.25)

    def __init__(
        self,
        model: nn.Module,
        *,
        margin: float = 0.4,
        rho: float = 0.05,
        recover_below: float = 0.2,
        quirks: bool = False,
        **common: Unpack[Common],
    ) -> None:
        require(margin > 0, "margin", margin, "positive: a share of ln K")
        require(0 <= rho < math.inf, "rho", rho, "at least 0")
        require(recover_below >= 0, "recover_below", recover_below, "at least 0 (0 never recovers)")
        self.margin, self.rho, self.recover_below, self.quirks = margin, rho, recover_below, quirks
        super().__init__(model, **common)

    def initial_state(self) -> dict[str, Tensor]:
        """An undefined (NaN) moving average and no recoveries."""
        return {
            "average": torch.full((), math.nan, device=self._device),
            "recoveries": torch.zeros((), dtype=torch.int64, device=self._device),
        }

    def adapt(self, x: Input) -> Step:
        """Predict, climb, then descend from there; recover if the loss has become too small to be true."""
        logits = self.forward(x)
        entropy = self.objective.entropy(logits)
        margin = self.margin * math.log(logits.shape[1])
        reliable = self.valid & (entropy < margin)
        with self._climbed(self.gradient(masked_mean(entropy, reliable))):
            perturbed = self.objective.entropy(self.forward(x))
            used = reliable & (perturbed < margin)
            loss = masked_mean(perturbed, used)
            gradient = self.gradient(loss)
        some = used.any()
        self.descend_along(gradient, go=None if self.quirks else some)
        self._watch(loss.detach().float(), some)
        return Step(logits, entropy, used)

    def _climbed(self, gradient: list[Tensor]) -> _Moved:
        norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in gradient]))
        scale = self.rho / (norm + 1e-12)
        return _Moved(list(self.parameters.values()), [g * scale for g in gradient])

    def _watch(self, loss: Tensor, some: Tensor) -> None:
        """Follow the loss and recover where its moving average has fallen below the limit."""
        average = self.state["average"]
        followed = torch.where(average.isnan(), loss, 0.9 * average + 0.1 * loss)
        average = torch.where(some, followed, average)
        collapsed = average < self.recover_below  # false while undefined
        self.recover(collapsed, moments=not self.quirks)
        self.state["average"] = average if self.quirks else torch.where(collapsed, math.nan, average)
        self.state["recoveries"] = self.state["recoveries"] + collapsed


class _Moved:
    """Within the block the parameters are moved by `offset`; afterwards they are back, bit for bit, whatever happened."""

    def __init__(self, params: list[Tensor], offset: list[Tensor]) -> None:
        self.params, self.offset = params, offset

    @torch.no_grad()
    def __enter__(self) -> None:
        self.before = [p.detach().clone() for p in self.params]
        for p, offset in zip(self.params, self.offset, strict=True):
            p.add_(offset)

    @torch.no_grad()
    def __exit__(self, *_: object) -> None:
        for p, before in zip(self.params, self.before, strict=True):
            p.copy_(before)
