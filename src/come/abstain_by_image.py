r"""When not to answer at a position: thresholds calibrated on images, since the pixels of one image are not independent.

What is exchangeable are images: future ones are drawn as the calibration images were, and whatever pixels of one image have in
common is part of the draw. For a threshold t, image i has the share :math:`A_i(t)` of its positions at or above t, and the
share :math:`W_i(t)` of its positions that are so and wrong, in [0, 1] both. Positions that are ignored belong to neither.

coverage  :math:`E[A(t)] \ge c`: conformal risk control (Angelopoulos et al., 2024) on the loss :math:`1 - A_i`, which grows
          with t. The largest t with :math:`\sum_i (1 - A_i(t)) \le (n + 1)(1 - c) - 1` has it, over n images and a new one.
risk      :math:`E[W(t)] \le r \, E[A(t)]`: at most the share r of the answered positions is wrong, images drawn first. It is
          :math:`E[Z(t)] \le r` for :math:`Z_i = W_i + r (1 - A_i)` in [0, 1], tested by betting (Waudby-Smith and Ramdas, 2024)
          for one threshold after the other, as in `come.abstain.risk_threshold`.

With one position per image both are the thresholds of `come.abstain`, but for the test, which is exact there. Of an image at
most 1024 positions are looked at, drawn at random: that changes no expectation, so it costs no promise.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from come.errors import InputError

POSITIONS = 1024  # of one image that are looked at
PILOT = 0.25  # share of the labelled images that chooses which thresholds are tested
STEPS = 100  # thresholds that are tested, at most
CAP = 0.9  # of the largest bet


def sampled(score: Tensor, counted: Tensor, wrong: Tensor | None, generator: torch.Generator) -> Tensor:
    """Of each image with a counted position: score, weight and whether the answer is wrong, (n, 3, 1024).

    From scores (B, P), which positions count (B, P) bool, and which answers are wrong (B, P). Weights of an image sum to 1.

    >>> score, some = torch.tensor([[0.1, 0.9, 0.5]]), torch.tensor([[True, False, True]])
    >>> found = sampled(score, some, None, torch.Generator())
    >>> found[0, :2, :3]
    tensor([[0.1000, 0.5000, 0.0000],
            [0.5000, 0.5000, 0.0000]])
    """
    found = []
    for i in range(len(score)):
        at = counted[i].nonzero()[:, 0]
        if len(at) > POSITIONS:
            at = at[torch.randint(len(at), (POSITIONS,), generator=generator).to(at.device)]
        if len(at):
            row = torch.zeros(3, POSITIONS)
            row[0, : len(at)] = score[i, at].float().cpu()
            row[1, : len(at)] = 1 / len(at)
            if wrong is not None:
                row[2, : len(at)] = wrong[i, at].float().cpu()
            found.append(row)
    return torch.stack(found) if found else torch.zeros(0, 3, POSITIONS)


def coverage_threshold(images: Tensor, coverage: float) -> float:
    """The largest threshold at which a new image has, on average, at least this share of its positions answered.

    `images` (n, 3, 1024) are of `sampled`.

    Example:
        >>> score = torch.arange(19.0)[:, None]  # one position each: the conformal quantile of 19 samples
        >>> coverage_threshold(sampled(score, score >= 0, None, torch.Generator()), 0.9)
        1.0
    """
    spare = (len(images) + 1) * (1 - coverage) - 1
    if spare < -1e-9:
        needed = math.ceil(coverage / (1 - coverage) - 1e-9)
        raise InputError(f"coverage={coverage:g} needs at least {needed} calibration images, got {len(images)}")
    score, weight, _ = images.unbind(dim=1)
    kept = weight > 0
    score, order = score[kept].sort()
    weight = weight[kept].double()[order]
    below = weight.cumsum(0) - weight
    return score[int((below <= spare + 1e-9).sum()) - 1].item()


def risk_threshold(images: Tensor, risk: float, delta: float, seed: int = 0) -> float:
    """A threshold at which, with probability 1 - delta over the images, at most this share of answered positions is wrong.

    `images` (n, 3, 1024) are of `sampled`; -inf if everything can be answered.

    Example:
        >>> score = torch.rand(400, 50, generator=torch.Generator().manual_seed(0))
        >>> found = sampled(score, score >= 0, score < 0.3, torch.Generator())
        >>> 0.2 < risk_threshold(found, risk=0.05, delta=0.1) < 0.35
        True
    """
    drawn = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    cut = int(PILOT * len(images))
    pilot, test = images[drawn[:cut]], images[drawn[cut:]]
    found = _tested(pilot, test, risk, delta) if cut else None
    if found is None:
        higher = [r for r in (risk * step / 4 for step in range(5, 200)) if r < 1] if cut else []
        least = next((r for r in higher if _tested(pilot, test, r, delta) is not None), None)
        repair = "give more images" if least is None else f"ask for a risk of {least:.2g}, or give more images"
        raise InputError(
            f"no threshold has a risk of {risk:g} that {len(images)} labelled images can show with delta={delta:g}; {repair} "
            "or another score"
        )
    return found


def _tested(pilot: Tensor, test: Tensor, risk: float, delta: float) -> float | None:
    """The last threshold of a sequence, chosen by the pilot, that passes before the first that fails."""
    score = pilot[:, 0][pilot[:, 1] > 0].sort(descending=True).values
    sequence = [*score[:: max(1, len(score) // STEPS)].tolist(), -math.inf]
    losses = torch.stack([_losses(pilot, t, risk) for t in sequence])
    margin = (risk - losses.mean(dim=1)) / (losses.std(dim=1, correction=0) + 1 / len(pilot))
    found = None
    for threshold in sequence[3 * int(margin.argmax()) // 4 :]:
        if not _below(_losses(test, threshold, risk), risk, delta):
            break
        found = threshold
    return found


def _losses(images: Tensor, threshold: float, risk: float) -> Tensor:
    """Z (n,) in [0, 1], in float64."""
    score, weight, wrong = images.double().unbind(dim=1)
    answered = torch.where(score >= threshold, weight, 0)
    return (answered * wrong).sum(dim=1) + risk * (1 - answered.sum(dim=1))


def _below(losses: Tensor, mean: float, delta: float) -> bool:
    r"""Whether losses (n,) in [0, 1] show that their expectation is below `mean`; wrongly with probability at most delta.

    The capital :math:`\prod_i (1 + \lambda_i (\text{mean} - Z_i))` of a gambler whose bets depend on the images before. Were
    the expectation `mean` or more, it would reach 1 / delta with probability at most delta (Ville's inequality).
    """
    n, steps = len(losses), torch.arange(1, len(losses) + 1, dtype=torch.float64)
    average = (0.5 + losses.cumsum(0)) / (steps + 1)
    spread = (0.25 + (losses - average).square().cumsum(0)) / (steps + 1)
    before = torch.cat([torch.tensor([0.25], dtype=torch.float64), spread])[:n]
    bets = (2 * math.log(1 / delta) / (n * before)).sqrt().clamp_max(CAP / (1 - mean))
    capital = (bets * (mean - losses)).log1p().cumsum(0)
    return bool(capital.amax() >= math.log(1 / delta)) if n else False
