"""When not to answer: a threshold on a score, with a promise for samples like those it was calibrated on.

risk      with probability 1 - delta over the calibration samples, at most this share of the answered samples is wrong
coverage  at least this share of samples is answered, on average over calibration samples; needs no labels

Both need exchangeable samples: future samples are drawn as the calibration samples were. Under a shift neither holds. Coverage
alone can be kept on any stream without labels, see `Abstention`.

The probability of a risk is over all draws of calibration samples, refused ones included. It is not the probability
that a promise that was given holds. Where no threshold has the risk, at least a share 1 - delta of the draws is
refused, and every promise made on the others is wrong.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from come import abstain_by_image
from come.errors import ConfigError, InputError, require, require_number, shown
from come.metrics.scores import SCORES, require_score, score_of
from come.model.inputs import UNKNOWN, answered
from come.objectives import Objective

if TYPE_CHECKING:
    from come.method import Step

DEFAULT_SCORE = "confidence"

PILOT = 0.25  # share of the labelled samples that chooses which thresholds are tested, and in which order
STEPS = 100  # thresholds that are tested, at most
FOLLOW = 0.05  # how far one sample moves a threshold that follows a stream, in standard deviations of the score
EQUAL = 1e-6  # scores whose standard deviation is at most this share of the largest are equal up to rounding


@dataclass(frozen=True)
class Promise:
    """A threshold and what it promises: samples are answered where the score is at least the threshold.

    Example:
        >>> print(Promise("confidence", 0.62, samples=1000, answered=0.71, risk=0.05, delta=0.1))
        at most 5% of the answered samples are wrong (probability 90%): answers where confidence >= 0.62, 71.0% of 1000 samples
    """

    score: str
    """A name in `come.metrics.SCORES`."""
    threshold: float
    samples: int
    """Number of calibration samples."""
    answered: float
    """The share of them that is answered."""
    risk: float | None = None
    """At most this share of the answered samples is wrong ..."""
    delta: float | None = None
    """... with probability 1 - delta over the calibration samples."""
    coverage: float | None = None
    """At least this share is answered."""
    rate: float = 0.0
    """How far one sample moves the threshold; 0 keeps it fixed."""
    positions: bool = False
    """Whether the samples are images, and positions are answered; see `come.abstain_by_image`."""

    def __post_init__(self) -> None:
        numbers = (self.threshold, self.samples, self.answered, self.rate, self.risk, self.delta, self.coverage)
        good = all(value is None or (isinstance(value, (int, float)) and not math.isnan(value)) for value in numbers)
        shares = (self.answered, self.risk, self.delta, self.coverage)
        good = good and all(value is None or 0 <= value <= 1 for value in shares) and 0 <= self.rate < math.inf
        if self.score not in SCORES or not good or (self.rate and self.coverage is None):  # of a file that was changed
            raise InputError(f"{self.score!r}, {numbers} is not a promise")

    def __str__(self) -> str:
        things, samples = ("positions", "images") if self.positions else ("samples", "samples")
        if self.risk is not None and self.delta is not None:
            what = (
                f"at most {100 * self.risk:.3g}% of the answered {things} are wrong "
                f"(probability {100 * (1 - self.delta):.3g}%)"
            )
        else:
            what = f"at least {100 * (self.coverage or 0):.3g}% of the {things} are answered"
        follows = ", following the stream" if self.rate else ""
        return (
            f"{what}: answers where {self.score} >= {self.threshold:.4g}, {100 * self.answered:.1f}% of "
            f"{f'the {things} of ' if self.positions else ''}{self.samples} {samples}{follows}"
        )


@dataclass(frozen=True)
class Abstention:
    r"""A promise, and the threshold that is in force on one stream.

    Without labels nobody can measure the risk under a shift, but the answered samples can be counted. So a threshold
    can follow a stream to keep the coverage c (adaptive conformal inference, Gibbs and Candes, 2021): after a batch

    .. math:: t \leftarrow t + \gamma \sum_i ([s_i \ge t] - c)

    Let r be the range of the first threshold and all scores of the stream. As t cannot leave that range by more than
    one batch's step, the share answered among N valid samples in batches of B is within (r + gamma B) / (gamma N) of c,
    on every stream. A first threshold far from all scores takes long to reach them. Nothing is promised about how often
    the answers are right.
    """

    promise: Promise
    threshold: Tensor | None = None
    """0-d if it follows the stream, None to use the promise's."""

    @classmethod
    def begin(cls, promise: Promise, device: torch.device) -> Abstention:
        """Before the first batch."""
        return cls(promise, torch.tensor(promise.threshold) if promise.rate else None).to(device)

    def to(self, device: torch.device) -> Abstention:
        """On that device, in float64 if it has that: in float32 a step can be lost to rounding."""
        if self.threshold is None:
            return self
        precise = torch.float32 if device.type == "mps" else torch.float64
        return Abstention(self.promise, self.threshold.to(device, precise))


def usable(logits: Tensor, valid: Tensor | None = None) -> Tensor:
    """Which of logits (B, ..., K) have an answer, (B, ...), given which samples the guard has found valid (B,)."""
    known = answered(logits) & (logits.amax(dim=-1) > UNKNOWN / 2)
    return known if valid is None else known & _of_samples(valid, known)


def _of_samples(values: Tensor, like: Tensor) -> Tensor:
    """One value per sample (B,), shaped to go with (B, ...)."""
    return values.view(-1, *[1] * (like.ndim - 1)) if values.ndim else values


def confidences(score: str, objective: Objective, logits: Tensor, valid: Tensor | None = None) -> Tensor:
    """The score that a threshold is compared with, of each of logits (B, ..., K); the smallest where there is no answer.

    Example:
        >>> from come import Softmax
        >>> confidences("softmax", Softmax(), torch.tensor([[2.0, 0.0], [math.nan, 0.0]]))
        tensor([0.8808, 0.0000])
    """
    good = usable(logits, valid)
    found = score_of(score, objective, torch.where(good[..., None], logits, UNKNOWN))
    return torch.where(good, found, found.clamp(max=0))  # a probability is 0; other scores are negative there


def abstains(
    promise: Promise, objective: Objective, logits: Tensor, threshold: Tensor | None, valid: Tensor | None = None
) -> Tensor:
    """Which of logits (B, ..., K) not to rely on, (B, ...): below the threshold, or without a usable answer.

    `threshold`, 0-d or (B,), replaces that of the promise; `valid` (B,) is what the guard has found.
    """
    score = score_of(promise.score, objective, logits)
    least = promise.threshold if threshold is None else _of_samples(threshold.to(score.dtype), score)
    return ~(usable(logits, valid) & (score >= least))


def by_image(abstain: Tensor, counted: Tensor) -> tuple[Tensor, Tensor]:
    """Of (B, ...) bool: the share of the counted positions that is not answered, and whether there are any, (B,)."""
    abstain, counted = (abstain & counted).flatten(1), counted.flatten(1)
    return abstain.sum(dim=1) / counted.sum(dim=1).clamp_min(1), counted.any(dim=1)


def followed(promise: Promise, threshold: Tensor, abstain: Tensor, counted: Tensor) -> Tensor:
    """The threshold (...,) after a batch: raised if more than the promised share was answered, lowered if less.

    `abstain` and `counted` are (..., B) bool, `abstain` a share where there are positions; samples that are not counted have no
    answer at any threshold, so they do not move it.
    """
    assert promise.coverage is not None
    excess = ((1 - abstain.float()) * counted).sum(dim=-1) - promise.coverage * counted.sum(dim=-1)
    return threshold + promise.rate * excess


@dataclass(frozen=True)
class Wanted:
    """What to promise, checked before any data is read."""

    risk: float | None = None
    coverage: float | None = None
    delta: float = 0.1
    score: str = DEFAULT_SCORE
    follow: bool = False
    ignore_index: int | None = None

    def __post_init__(self) -> None:
        if (self.risk is None) == (self.coverage is None):
            given = "neither" if self.risk is None else f"risk={shown(self.risk)} and coverage={shown(self.coverage)}"
            raise ConfigError(f"calibrate() must be given either risk (needs labels) or coverage, got {given}")
        for name in ("risk", "coverage", "delta"):
            value = getattr(self, name)
            if value is not None:
                require(require_number(name, value, "in (0, 1)") and 0 < value < 1, name, value, "in (0, 1)")
        require_score(self.score)
        require(isinstance(self.follow, bool), "follow", self.follow, "True or False")
        if self.follow and self.risk is not None:
            raise ConfigError(
                "follow must be False with risk: without labels nothing shows how often answers are wrong, so no threshold "
                "can follow it; promise a coverage, or calibrate again on labelled samples of the stream"
            )

    def promise(self, score: Tensor, wrong: Tensor | None) -> Promise:
        """The promise for calibration samples with these scores (N,), and for a risk, which of them are wrong (N,).

        With positions, `score` are the images of `come.abstain_by_image.sampled`, which holds both.
        """
        score = score.cpu()
        if score.ndim > 1:
            return self._by_image(score)
        if self.coverage is not None:
            threshold = coverage_threshold(score, self.coverage)
        else:
            assert wrong is not None and self.risk is not None  # noqa: PT018
            threshold = risk_threshold(score, wrong.cpu(), self.risk, self.delta)
        return Promise(
            self.score,
            threshold,
            samples=len(score),
            answered=(score >= threshold).double().mean().item(),
            risk=self.risk,
            delta=None if self.risk is None else self.delta,
            coverage=self.coverage,
            rate=FOLLOW * _spread(score.double()) if self.follow else 0.0,
        )

    def _by_image(self, images: Tensor) -> Promise:
        """The promise for images with positions."""
        if self.coverage is not None:
            threshold = abstain_by_image.coverage_threshold(images, self.coverage)
        else:
            assert self.risk is not None
            threshold = abstain_by_image.risk_threshold(images, self.risk, self.delta)
        score, weight, _ = images.double().unbind(dim=1)
        return Promise(
            self.score,
            threshold,
            samples=len(images),
            answered=torch.where(score >= threshold, weight, 0).sum(dim=1).mean().item(),
            risk=self.risk,
            delta=None if self.risk is None else self.delta,
            coverage=self.coverage,
            rate=FOLLOW * _spread(score[weight > 0]) if self.follow else 0.0,
            positions=True,
        )


def _spread(score: Tensor) -> float:
    """Standard deviation of scores (N,), or a tenth of their size (at least of 1) if they are all equal."""
    spread, size = score.std(correction=0).item(), score.abs().amax().item()
    return spread if spread > EQUAL * size else 0.1 * max(size, 1.0)


def coverage_threshold(score: Tensor, coverage: float) -> float:
    r"""The conformal quantile of scores (N,): a threshold that the next sample reaches with probability >= coverage.

    It is the k-th smallest of N scores, :math:`k = \lfloor (N + 1)(1 - \text{coverage}) \rfloor`: of N + 1 exchangeable
    scores the next one is below the k-th smallest of the others with probability at most k / (N + 1).

    Example:
        >>> coverage_threshold(torch.arange(19.0), 0.9)
        1.0
    """
    k = math.floor((len(score) + 1) * (1 - coverage) + 1e-9)
    if k < 1:
        needed = math.ceil(coverage / (1 - coverage) - 1e-9)
        raise InputError(f"coverage={coverage:g} needs at least {needed} calibration samples, got {len(score)}")
    return score.sort().values[k - 1].item()


def risk_threshold(score: Tensor, wrong: Tensor, risk: float, delta: float, seed: int = 0) -> float:
    r"""A threshold above which, with probability 1 - delta, at most the share `risk` of all future samples is wrong.

    "Learn then test" (Angelopoulos et al., 2021) with fixed-sequence testing. A random quarter of the samples chooses a
    sequence of thresholds: first about the one at which the risk is most clearly met, then lower ones. The other
    samples test it. Let m of them reach a threshold and w of these be wrong; it passes if so few would be wrong with
    probability at most delta were the risk not met (the exact binomial test, Clopper and Pearson, 1934):

    .. math:: P(\mathrm{Bin}(m, \text{risk}) \le w) \le \delta

    The result is the last one that passes before the first that fails. The first threshold of the sequence whose true
    risk is above `risk` passes with probability at most delta, and otherwise none after it is reached; so testing many
    costs nothing. Where no threshold has the risk, that is the very first one: an error with probability at least 1 -
    delta, otherwise a threshold that does not have the risk.

    Args:
        score: (N,), larger is more confident.
        wrong: (N,) bool.
        risk: in (0, 1).
        delta: in (0, 1).
        seed: of the random quarter.

    Returns:
        the threshold; -inf if all samples can be answered.

    Example:
        >>> score = torch.arange(1000) / 1000
        >>> wrong = (score < 0.3) & (torch.arange(1000) % 2 == 0)
        >>> round(risk_threshold(score, wrong, risk=0.05, delta=0.1), 3)
        0.241
    """
    needed = _needed(risk, delta)
    drawn = torch.randperm(len(score), generator=torch.Generator().manual_seed(seed))
    cut = int(PILOT * len(score))
    if len(score) - cut < needed:
        least = next(n for n in range(needed, 2 * needed + 2) if n - int(PILOT * n) >= needed)
        raise InputError(
            f"risk={risk:g} with delta={delta:g} needs at least {least} labelled calibration samples (if all answers are "
            f"right; more if not), got {len(score)}"
        )
    pilot, test = (score[drawn[:cut]], wrong[drawn[:cut]]), (score[drawn[cut:]], wrong[drawn[cut:]])
    found = _tested(*pilot, *test, risk, delta)
    if found is None:
        others = (r / 1000 for r in range(math.floor(1000 * risk) + 1, 1000))
        least_risk = next((r for r in others if _tested(*pilot, *test, r, delta) is not None), 1.0)
        raise InputError(
            f"risk must be at least {least_risk:g} for these {len(score)} samples with delta={delta:g}, got {risk:g}; ask for "
            "that risk, or give more samples or another score"
        )
    return found


def _needed(risk: float, delta: float) -> int:
    """How many answers must be right, and none wrong, to promise the risk."""
    return math.ceil(math.log(delta) / math.log1p(-risk))


def _tested(
    score: Tensor, wrong: Tensor, others: Tensor, others_wrong: Tensor, risk: float, delta: float
) -> float | None:
    """The last threshold of the sequence that passes before the first that fails; None if the first one fails."""
    score, order = score.sort(descending=True)
    reached = torch.arange(1, len(score) + 1)
    margin = (risk * reached - wrong[order].cumsum(0)) / reached.sqrt()  # in standard deviations, but for a factor
    best = int(margin.argmax()) if len(score) else 0
    # Start a little above it, as a small pilot is optimistic; but not so high that too few of the others reach it.
    least = math.ceil(1.25 * _needed(risk, delta) * len(score) / len(others)) - 1
    first = max(3 * best // 4, min(best, least))
    sequence = [*score[first : len(score) - 1 : max(1, len(score) // STEPS)].tolist(), -math.inf]  # in the end all
    found = None
    for threshold in sequence:
        passed = others >= threshold
        if binomial_cdf(int(others_wrong[passed].sum()), int(passed.sum()), risk) > delta:
            break
        found = threshold
    return found


def binomial_cdf(k: int, n: int, p: float) -> float:
    r"""Probability of at most k successes in n trials: :math:`\sum_{i \le k} \binom{n}{i} p^i (1 - p)^{n - i}`.

    Example:
        >>> round(binomial_cdf(1, 3, 0.5), 6)
        0.5
    """
    i, all_of_them = torch.arange(k + 1, dtype=torch.float64), torch.tensor(float(n), dtype=torch.float64)
    ways = torch.lgamma(all_of_them + 1) - torch.lgamma(i + 1) - torch.lgamma(all_of_them - i + 1)
    return torch.logsumexp(ways + i * math.log(p) + (n - i) * math.log1p(-p), dim=0).exp().item()


def labelled(batch: Any, needed: bool = False) -> tuple[Any, Tensor | None]:
    """A batch of calibration samples as the model's input, and the labels if there are any.

    A pair whose second part is a vector of integers is (x, y), and a pair of images (B, C, ...) and integers (B, ...), or any
    integers where a risk asks for labels; everything else is x.
    """
    y = batch[1] if isinstance(batch, (tuple, list)) and len(batch) == 2 else None
    whole = isinstance(y, Tensor) and not (y.is_floating_point() or y.is_complex() or y.dtype == torch.bool)
    if not (isinstance(y, Tensor) and whole):
        return batch, None
    x = batch[0]
    images = isinstance(x, Tensor) and x.is_floating_point() and 2 < x.ndim == y.ndim + 1
    return (x, y) if y.ndim == 1 or images or needed else (batch, None)


def scored(
    data: Iterable[Any], answer: Callable[[Any], Step], objective: Objective, wanted: Wanted
) -> tuple[Tensor, Tensor | None]:
    """Scores (N,) of calibration samples, and for a risk, which of their predictions are wrong (N,).

    `data` are batches x or (x, y), with y = -1 for an outlier, which every answer gets wrong; `answer` runs one step on x, and
    returns its logits (B, ..., K), and as `used` which positions count, None for all. With several positions the scores are the
    images of `come.abstain_by_image.sampled`.
    """
    scores, wrong = list[Tensor](), list[Tensor]()
    generator = torch.Generator().manual_seed(0)
    for batch in data:
        x, y = labelled(batch, wanted.risk is not None)
        if wanted.risk is not None and y is None:
            raise InputError(
                "data must be batches (x, y) with y (B,) the integer labels, or (B, *positions), since a risk needs labels, "
                f"got {shown(batch)}; without labels ask for a coverage"
            )
        logits, _, used, valid, _ = answer(x)
        bad = int((~answered(logits) if valid is None else ~valid).sum())
        if bad:
            raise InputError(
                f"calibration samples and their logits must be finite and not absurdly large, got {bad} of {len(logits)} that "
                "are not; fix the data"
            )
        score, bad_answer = score_of(wanted.score, objective, logits), None
        counted = torch.ones_like(score, dtype=torch.bool) if used is None else used
        if wanted.risk is not None and y is not None:
            y = _fitting(y, logits).to(logits.device)
            if wanted.ignore_index is not None:
                counted = counted & (y != wanted.ignore_index)
            bad_answer = logits.argmax(dim=-1) != _checked(torch.where(counted, y, 0), logits.shape[-1])
        if score.numel() > len(score):
            flat = None if bad_answer is None else bad_answer.flatten(1)
            scores.append(abstain_by_image.sampled(score.flatten(1), counted.flatten(1), flat, generator))
            continue
        scores.append(score[counted])
        if bad_answer is not None:
            wrong.append(bad_answer[counted])
    if not scores:
        raise InputError("data must hold at least one batch, got none (an exhausted iterator?)")
    return torch.cat(scores), torch.cat(wrong) if wrong else None


def _fitting(y: Tensor, logits: Tensor) -> Tensor:
    """Labels (B, ...) with the shape of logits (B, ..., K)."""
    shape = logits.shape[:-1]
    if y.shape != shape:
        if len(shape) == 1 and y.ndim == 1:
            raise InputError(f"y must have a label for each of the {shape[0]} samples of the batch, got {len(y)}")
        raise InputError(f"y must have a label for each position of the logits, {tuple(shape)}, got {tuple(y.shape)}")
    return y


def _checked(y: Tensor, classes: int) -> Tensor:
    low, high = int(y.min()), int(y.max())
    if low < -1 or high >= classes:
        raise InputError(
            f"labels must be from 0 to {classes - 1}, the classes of the model, or -1 for an outlier, got "
            f"{low if low < -1 else high}"
        )
    return y
