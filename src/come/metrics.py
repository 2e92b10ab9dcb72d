r"""What a run is judged by, on one-dimensional tensors with one entry per sample, on any device.

A confidence is any score that is larger for a more confident prediction. Equal confidences are accepted together, so no
value depends on the order of the samples. Infinite confidences are allowed; a NaN is refused with an `InputError`, except
by `fpr`. Every metric has a value for every set, also for an empty one; `summary` leaves out what says nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from come.errors import InputError, require, require_int, unknown

Rows = Mapping[str, Tensor]

LARGEST_NLL = 100.0
"""In nats; the same bound as in PyTorch's `binary_cross_entropy`."""

POINTS = 100
"""No trajectory has more."""


def accuracy(prediction: Tensor, label: Tensor) -> float:
    r"""Share of labelled samples that are predicted right: :math:`\frac{1}{n} \sum_i [\hat y_i = y_i]`.

    Args:
        prediction: (N,) class indices.
        label: (N,) class indices; negative marks an outlier, which has no label and does not count.

    Returns:
        in [0, 1]; NaN if nothing is labelled.

    Example:
        >>> accuracy(torch.tensor([1, 2, 3, 3]), torch.tensor([1, 2, 0, -1]))
        0.6666666666666666
    """
    _alike(prediction=prediction, label=label)
    return labelled_mean(prediction == label, label)


def labelled_mean(values: Tensor, label: Tensor) -> float:
    r"""Mean over the labelled samples: :math:`\frac{1}{n} \sum_{i : y_i \ge 0} v_i`.

    Args:
        values: (N,), for example of `nll` or `brier`.
        label: (N,) class indices; negative marks an outlier, which does not count.

    Returns:
        the mean, in float64; NaN if nothing is labelled.

    Example:
        >>> labelled_mean(torch.tensor([1.0, 2.0, 9.0]), torch.tensor([0, 3, -1]))
        1.5
    """
    _alike(values=values, label=label)
    return values[label >= 0].cpu().double().mean().item()


def fpr(confidence: Tensor, correct: Tensor, *, accept: float = 0.95) -> float:
    r"""The paper's FPR: share of wrong samples that pass the threshold which accepts 95% of the right ones.

    "Wrong" are misclassified samples and outliers. The threshold t is the one of the detection-error curve at which the
    share of right samples with a confidence of at most t is nearest to 5%;

    .. math:: \mathrm{FPR} = |\{i \text{ wrong} : c_i > t\}| \,/\, |\{i \text{ wrong}\}|

    and 1 if the nearest share is above 10% (a collapsed score). This is not OpenOOD's FPR95, which puts all
    in-distribution samples on one side: that is `fpr95`.

    Args:
        confidence: (N,), larger is more confident. A NaN counts as the least confident.
        correct: (N,) bool; false for misclassified samples and for outliers.
        accept: share of the right samples to accept, in (0, 1).

    Returns:
        in [0, 1], smaller is better. 0 if nothing is wrong, 1 if nothing is right.

    Example:
        >>> confidence = torch.tensor([0.9, 0.8, 0.7, 0.6, 0.3, 0.2])
        >>> fpr(confidence, torch.tensor([True, True, True, True, False, False]))
        0.0
    """
    _alike(confidence=confidence, correct=correct)
    wrong = ~correct
    n_right, n_wrong = int(correct.sum()), int(wrong.sum())
    if not n_wrong:
        return 0.0
    if not n_right:
        return 1.0
    # The detection-error curve of "wrong" by the score -confidence: one point per distinct score, and one at infinity.
    score = -confidence.double()
    score, order = score.where(~score.isnan(), math.inf).sort(descending=True, stable=True)
    last = torch.cat([score[1:] != score[:-1], torch.ones(1, dtype=torch.bool, device=score.device)])
    zero = torch.zeros(1, dtype=torch.int64, device=score.device)
    alarms = torch.cat([zero, correct[order].long().cumsum(0)[last]])  # right samples at or above each threshold
    found = torch.cat([zero, wrong[order].long().cumsum(0)[last]])  # wrong ones
    first = int((alarms == 0).sum()) - 1  # of the points without a false alarm only the last counts
    end = int((found < n_wrong).sum()) + 1  # and none behind the first that finds everything
    rate, missed = alarms[first:end].double() / n_right, (n_wrong - found[first:end]).double() / n_wrong
    # Nearest to 5%; of equally near ones the one with the lowest threshold.
    nearest = len(rate) - 1 - int((rate.flip(0) - (1 - accept)).abs().argmin())
    return 1.0 if rate[nearest] > 2 * (1 - accept) else missed[nearest].item()


def fpr95(confidence: Tensor, inlier: Tensor, *, accept: float = 0.95) -> float:
    r"""OpenOOD's FPR at 95% TPR: share of outliers that pass the threshold which accepts 95% of all inliers.

    .. math:: \mathrm{FPR95} = |\{i \text{ outlier} : c_i \ge t\}| \,/\, |\{i \text{ outlier}\}|

    where t is the largest confidence such that at least 95% of the inliers have a confidence of at least t. Inliers are
    all samples of the known classes, right or wrong: this is not the paper's `fpr`. It is OpenOOD's `fpr_recall`; the
    tables of its later versions have outliers as positives (`auc_and_fpr_recall`: the share of inliers that are rejected
    with 95% of the outliers), which is `fpr95(-c, ~inlier)`.

    Args:
        confidence: (N,), larger is more confident.
        inlier: (N,) bool; false for outliers.
        accept: share of the inliers to accept, in (0, 1].

    Returns:
        in [0, 1], smaller is better. 0 without outliers; else 1 without inliers, and 1 if all confidences are equal.

    Example:
        >>> fpr95(torch.tensor([0.9, 0.8, 0.4, 0.6, 0.3]), torch.tensor([True, True, True, False, False]))
        0.5
    """
    require(0 < accept <= 1, "accept", accept, "in (0, 1]")
    accepted, inliers = _accepted(confidence, inlier=inlier)
    outliers = accepted - inliers
    if not outliers[-1]:
        return 0.0
    if not inliers[-1]:
        return 1.0
    at = int((inliers.double() / inliers[-1] < accept).sum())
    return int(outliers[at]) / int(outliers[-1])


def auroc(confidence: Tensor, positive: Tensor) -> float:
    r"""Area under the ROC curve: the probability that a positive is more confident than a negative, ties half.

    .. math:: \mathrm{AUROC} = P(c_+ > c_-) + \tfrac{1}{2} P(c_+ = c_-)

    Args:
        confidence: (N,), larger is more confident.
        positive: (N,) bool; right against wrong samples, or inliers against outliers.

    Returns:
        in [0, 1], larger is better. 0.5 if all confidences are equal, and if there is no positive or no negative.

    Example:
        >>> auroc(torch.tensor([0.9, 0.5, 0.5, 0.1]), torch.tensor([True, True, False, False]))
        0.875
    """
    accepted, hits = _accepted(confidence, positive=positive)
    alarms = accepted - hits
    pairs = int(hits[-1]) * int(alarms[-1])
    return int((alarms.diff() * (hits[1:] + hits[:-1])).sum()) / (2 * pairs) if pairs else 0.5


def aupr(confidence: Tensor, positive: Tensor, *, interpolation: Literal["step", "trapezoid"] = "step") -> float:
    r"""Area under the precision-recall curve, over recalls R and precisions P at the distinct confidences.

    .. math:: \mathrm{AUPR} = \sum_j (R_j - R_{j-1}) P_j
              \quad\text{or}\quad \sum_j (R_j - R_{j-1}) \tfrac{1}{2} (P_j + P_{j-1}), \; P_0 = 1

    The step form is scikit-learn's average precision. The trapezoid form, which is published for COME and OpenOOD, is
    too good where many confidences are equal. With inliers as positives, `aupr(c, inlier)` is the AUPR-in and
    `aupr(-c, ~inlier)` the AUPR-out.

    Args:
        confidence: (N,), larger is more likely positive.
        positive: (N,) bool.
        interpolation: "step" or "trapezoid".

    Returns:
        in [0, 1], larger is better. 0 if there is no positive, 1 if there is no negative. If all confidences are equal,
        the share s of positives, or (1 + s) / 2 for the trapezoid.

    Example:
        >>> aupr(torch.tensor([0.9, 0.5, 0.5, 0.1]), torch.tensor([True, True, False, False]))
        0.8333333333333333
    """
    require(interpolation in ("step", "trapezoid"), "interpolation", interpolation, '"step" or "trapezoid"')
    accepted, hits = _accepted(confidence, positive=positive)
    if not hits[-1]:
        return 0.0
    precision = torch.cat([torch.ones(1, dtype=torch.float64), hits[1:].double() / accepted[1:]])
    height = precision[1:] if interpolation == "step" else (precision[1:] + precision[:-1]) / 2
    return (hits.diff() * height).sum().item() / int(hits[-1])


def ece(confidence: Tensor, correct: Tensor, *, bins: int = 15, adaptive: bool = False) -> float:
    r"""Expected calibration error: the gap between confidence and accuracy, averaged over bins of confidence.

    .. math:: \mathrm{ECE} = \sum_b \frac{|B_b|}{N} \, \bigl| \mathrm{acc}(B_b) - \mathrm{conf}(B_b) \bigr|

    Args:
        confidence: (N,) in [0, 1], the probability that is claimed; beyond it by up to 1e-3 is rounding, and clamped.
        correct: (N,) bool.
        bins: how many, of equal width: (0, 1/bins], (1/bins, 2/bins], ...; 0 belongs to the first.
        adaptive: bins of equal numbers of samples instead; equal confidences stay in one bin, the first they reach.

    Returns:
        in [0, 1], smaller is better. 0 for an empty set.

    Example:
        >>> ece(torch.tensor([1.0, 1.0, 0.5, 0.5]), torch.tensor([True, True, True, False]))
        0.0
    """
    require_int("bins", bins, 1)
    _alike(confidence=confidence, correct=correct)
    _no_nan(confidence)
    if not len(confidence):
        return 0.0
    c = confidence.detach().cpu().double()
    if c.min() < -1e-3 or c.max() > 1 + 1e-3:
        raise InputError(
            f"confidence reaches from {c.min().item():.4g} to {c.max().item():.4g}, but is compared with an accuracy and "
            "must be in [0, 1]: pass the largest probability or belief, not a logit, an energy or an entropy"
        )
    c = c.clamp(0, 1)
    if adaptive:
        which = torch.searchsorted(c.sort().values, c) * bins // len(c)
    else:
        which = torch.bucketize(c, torch.arange(1, bins, dtype=torch.float64) / bins)
    gap = torch.zeros(bins, dtype=torch.float64).index_add_(0, which, c - correct.cpu().double())
    return gap.abs().sum().item() / len(c)


def nll(log_probability: Tensor, label: Tensor) -> Tensor:
    r"""Negative log-likelihood of the label, per sample: :math:`-\ln p_{y_i}`.

    Args:
        log_probability: (N, K), or logits: they are normalized here, which leaves log-probabilities as they are.
        label: (N,) class indices; negative marks an outlier.

    Returns:
        (N,), in nats, never NaN: in [0, 100]. 0 for outliers, so average it with `labelled_mean`. 100 is the largest
        value, and the value where the label is none of the K classes or a logit is NaN.

    Example:
        >>> nll(torch.tensor([[0.0, 0.0], [200.0, 0.0], [0.0, 0.0]]), torch.tensor([1, 1, -1]))
        tensor([  0.6931, 100.0000,   0.0000])
    """
    log_p, target = _log_softmax(log_probability, label)
    value = -log_p.gather(1, target[:, None])[:, 0]
    value = value.where((label < log_p.shape[1]) & ~value.isnan(), LARGEST_NLL).clamp(0, LARGEST_NLL)
    return value.where(label >= 0, 0)


def brier(log_probability: Tensor, label: Tensor) -> Tensor:
    r"""Brier score over all classes, per sample: :math:`\sum_k (p_k - [k = y_i])^2`.

    Args:
        log_probability: (N, K), or logits: they are normalized here, which leaves log-probabilities as they are.
        label: (N,) class indices; negative marks an outlier.

    Returns:
        (N,), never NaN: in [0, 2]. 0 for outliers, so average it with `labelled_mean`. 2 is the largest value, and the
        value where a logit is NaN. A label that is none of the K classes counts as a class of probability 0.

    Example:
        >>> brier(torch.tensor([[0.0, 0.0], [200.0, 0.0], [0.0, 0.0]]), torch.tensor([1, 1, -1]))
        tensor([0.5000, 2.0000, 0.0000])
    """
    log_p, target = _log_softmax(log_probability, label)
    known = (label < log_p.shape[1]).to(log_p)
    value = log_p.exp().scatter_add(1, target[:, None], -known[:, None]).square().sum(dim=1) + (1 - known)
    return value.where(~value.isnan(), 2).where(label >= 0, 0)


def aurc(confidence: Tensor, correct: Tensor) -> float:
    r"""Area under the risk-coverage curve: the error among the k most confident, averaged over k.

    .. math:: \mathrm{AURC} = \frac{1}{N} \sum_{k=1}^{N} \frac{1}{k} \sum_{i \le k} [\text{i-th most confident is wrong}]

    Equal confidences are in random order: the value is the expectation over it. The best that any score could do for
    these samples is `aurc(correct, correct)`; what is above it is the excess AURC.

    Args:
        confidence: (N,), larger is more confident.
        correct: (N,) bool.

    Returns:
        in [0, 1], smaller is better. 0 if nothing is wrong (or there is nothing), 1 if nothing is right. The error rate
        if all confidences are equal.

    Example:
        >>> aurc(torch.tensor([0.9, 0.8, 0.1, 0.1]), torch.tensor([True, True, False, True]))  # risks 0, 0, 1/6, 1/4
        0.10416666666666666
    """
    risk = 1 - _accuracy_by_coverage(confidence, correct)
    return risk.sum().item() / max(len(risk), 1)


def abstention_accuracy(confidence: Tensor, correct: Tensor, coverage: float) -> float:
    r"""Accuracy on the most confident share, when the model may abstain on the rest.

    .. math:: \frac{1}{k} \sum_{i \le k} [\text{i-th most confident is right}], \quad k = \lceil \text{coverage} \cdot N \rceil

    Args:
        confidence: (N,), larger is more confident.
        correct: (N,) bool.
        coverage: share of the samples that are answered, in (0, 1].

    Returns:
        in [0, 1]; with equal confidences at the border, the expectation over their random order. 1 for an empty set.

    Example:
        >>> abstention_accuracy(torch.tensor([0.9, 0.8, 0.7, 0.1]), torch.tensor([True, True, False, False]), 0.5)
        1.0
    """
    require(0 < coverage <= 1, "coverage", coverage, "in (0, 1]")
    by_coverage = _accuracy_by_coverage(confidence, correct)
    k = math.ceil(coverage * len(by_coverage) - 1e-9)
    return by_coverage[max(k, 1) - 1].item() if len(by_coverage) else 1.0


def dominant_share(prediction: Tensor) -> float:
    r"""Share of the class that is predicted most: :math:`\max_k \frac{1}{N} |\{i : \hat y_i = k\}|`.

    A model that collapses predicts ever fewer classes: the share grows towards 1.

    Args:
        prediction: (N,) class indices.

    Returns:
        in [0, 1]; 0 for an empty set.

    Example:
        >>> dominant_share(torch.tensor([3, 3, 3, 1]))
        0.75
    """
    _alike(prediction=prediction)
    if not len(prediction):
        return 0.0
    return int((prediction == prediction.mode().values).sum()) / len(prediction)


def uniform_cross_entropy(logits: Tensor) -> Tensor:
    r"""Confidence that the published code of COME calls "entropy", per sample: how far p is from uniform.

    .. math:: H(U, p) = -\frac{1}{K} \sum_k \ln p_k = \ln \sum_k e^{z_k} - \frac{1}{K} \sum_k z_k

    It is not the entropy of p, which the score "entropy" in `SCORES` negates. The published value has the other sign.

    Args:
        logits: (..., K).

    Returns:
        (...,), larger is more confident; ln K for uniform logits.

    Example:
        >>> uniform_cross_entropy(torch.tensor([[0.0, 0.0], [4.0, 0.0]]))
        tensor([0.6931, 2.0181])
    """
    return -logits.log_softmax(dim=-1).mean(dim=-1)


SCORES: Mapping[str, Callable[[Rows], Tensor]] = {
    "confidence": lambda rows: rows["confidence"],
    "msp": lambda rows: rows["msp"],
    "uncertainty": lambda rows: -rows["uncertainty"],
    "energy": lambda rows: rows["energy"],
    "entropy": lambda rows: -rows["entropy"],
}
"""Confidences by name, from the rows of a run; larger is more confident.

"confidence" is the objective's own: the largest probability or belief. "msp" is the largest softmax probability. "energy"
is the logsumexp of the logits, the negative of the energy. "uncertainty" and "entropy" are negated.
"""

PROBABILITIES = ("confidence", "msp")
"""The scores that claim a probability, and so can be calibrated."""


def summary(rows: Rows, *, score: str = "confidence") -> dict[str, float]:
    """All metrics of the rows of a run.

    Right are the samples whose label is predicted; wrong are the misclassified ones and the outliers. This is the split
    of fpr, auroc_correct, aurc and accuracy_at_80 (the accuracy on the most confident 80%). Over labelled samples only:
    accuracy, ece, brier and nll. Inliers against outliers: auroc_outlier, aupr_in, aupr_out (step form) and fpr95. Over
    all: samples, outliers, dominant_share and used.

    Args:
        rows: label and prediction, (N,), and the column of the score; optionally used, brier and nll.
        score: which confidence, a name in `SCORES`.

    Returns:
        numbers by name, none of them NaN. What the data do not define is absent: everything but the two counts
        (samples, outliers) without samples, what is over labelled samples without any, auroc_correct if all are right or
        all wrong, inliers against outliers if one of them is missing, ece for a score that is no probability.

    Example:
        >>> rows = {"label": torch.tensor([0, 1, 1]), "prediction": torch.tensor([0, 1, 0])}
        >>> found = summary({**rows, "confidence": torch.tensor([0.9, 0.8, 0.6])})
        >>> found["accuracy"], found["auroc_correct"], "fpr95" in found
        (0.6666666666666666, 1.0, False)
    """
    if score not in SCORES:
        raise unknown("score", score, SCORES)
    if not rows or not len(rows["label"]):
        return {"samples": 0.0, "outliers": 0.0}
    label, prediction, confidence = rows["label"], rows["prediction"], SCORES[score](rows)
    _alike(label=label, prediction=prediction, confidence=confidence)
    _no_nan(confidence)
    inlier = label >= 0
    correct = inlier & (prediction == label)
    n, inliers, right = len(label), int(inlier.sum()), int(correct.sum())
    found = {"samples": float(n), "outliers": float(n - inliers)}
    if inliers:
        found["accuracy"] = accuracy(prediction, label)
        found |= {name: labelled_mean(rows[name], label) for name in ("brier", "nll") if name in rows}
        if score in PROBABILITIES:
            found["ece"] = ece(confidence[inlier], correct[inlier])
    if 0 < right < n:
        found["auroc_correct"] = auroc(confidence, correct)
    if 0 < inliers < n:
        found["auroc_outlier"] = auroc(confidence, inlier)
        found["aupr_in"] = aupr(confidence, inlier)
        found["aupr_out"] = aupr(-confidence, ~inlier)
        found["fpr95"] = fpr95(confidence, inlier)
    found["fpr"] = fpr(confidence, correct)
    found["aurc"] = aurc(confidence, correct)
    found["accuracy_at_80"] = abstention_accuracy(confidence, correct, 0.8)
    found["dominant_share"] = dominant_share(prediction)
    if "used" in rows:
        found["used"] = rows["used"].cpu().double().mean().item()
    return found


def trajectory(
    rows: Rows, *, batch_size: int = 64, window: int | None = None, score: str = "confidence"
) -> dict[str, Tensor]:
    """How a run went along its stream, at no more than 100 points, each behind a whole number of batches.

    Args:
        rows: in the order of the stream: label, prediction, confidence, entropy, uncertainty and norm, (N,), and the column
            of the score.
        batch_size: samples in a batch.
        window: samples that the means look back on; by default, those since the point before.
        score: what the FPR ranks samples by, a name in `SCORES`.

    Returns:
        columns of equal length, float64 but for samples; empty for an empty stream:

        - samples: seen so far, int64; the last one is N.
        - accuracy, fpr: of all samples so far. The accuracy is over labelled ones, and 0 before the first of them.
        - confidence, entropy, uncertainty, norm: means over the window.
        - dominant_share: of the predictions in the window.

    Example:
        >>> two = torch.tensor([0.5, 0.7])
        >>> rows = {name: two for name in ("confidence", "entropy", "uncertainty", "norm")}
        >>> found = trajectory({**rows, "label": torch.tensor([0, 1]), "prediction": torch.tensor([0, 0])}, batch_size=1)
        >>> found["samples"], found["accuracy"]
        (tensor([1, 2]), tensor([1.0000, 0.5000], dtype=torch.float64))
    """
    require_int("batch_size", batch_size, 1)
    if window is not None:
        require_int("window", window, 1, ", or None")
    if score not in SCORES:
        raise unknown("score", score, SCORES)
    means = ("confidence", "entropy", "uncertainty", "norm")
    columns = {name: rows[name].cpu() if rows else torch.zeros(0) for name in ("label", "prediction", *means)}
    ranked = SCORES[score](rows).cpu() if rows else torch.zeros(0)
    _alike(**columns, score=ranked)
    for name, values in (*((name, columns[name]) for name in means), ("score", ranked)):
        _no_nan(values, name)
    n = len(columns["label"])
    step = batch_size * max(1, math.ceil(n / (POINTS * batch_size)))
    points: dict[str, list[float]] = {name: [] for name in ("accuracy", "fpr", *means, "dominant_share")}
    ends = [*range(step, n, step), n] if n else []
    for end in ends:
        label, prediction = columns["label"][:end], columns["prediction"][:end]
        recent = slice(max(0, end - window) if window else (end - 1) // step * step, end)
        points["accuracy"].append(accuracy(prediction, label) if (label >= 0).any() else 0.0)
        points["fpr"].append(fpr(ranked[:end], (label >= 0) & (prediction == label)))
        points["dominant_share"].append(dominant_share(prediction[recent]))
        for name in means:
            points[name].append(columns[name][recent].double().mean().item())
    floats = {name: torch.tensor(values, dtype=torch.float64) for name, values in points.items()}
    return {"samples": torch.tensor(ends, dtype=torch.int64), **floats}


class Paired(NamedTuple):
    """Two runs on the same samples."""

    difference: float
    """Accuracy of the second minus accuracy of the first."""
    p: float
    """Two-sided, exact."""
    only_a: int
    """Samples that only the first has right (McNemar's b)."""
    only_b: int
    """Samples that only the second has right (McNemar's c)."""


def paired_difference(correct_a: Tensor, correct_b: Tensor) -> Paired:
    r"""Compare two runs on the same samples with McNemar's exact test.

    If both were equally good, each sample that only one of them has right would be a toss of a fair coin:

    .. math:: p = \min\Bigl(1, \; 2 \cdot 2^{-(b+c)} \sum_{i=0}^{\min(b, c)} \binom{b+c}{i}\Bigr)

    Args:
        correct_a: (N,) bool, of the first run; leave outliers out.
        correct_b: (N,) bool, of the second, for the same samples in the same order.

    Returns:
        the difference of the accuracies, p, and the counts b and c. p is 1 if no sample has b or c; the difference of
        empty sets is 0.

    Example:
        >>> a, b = torch.tensor([True, False, False, False, True]), torch.tensor([True, True, True, True, True])
        >>> paired_difference(a, b)
        Paired(difference=0.6, p=0.25, only_a=0, only_b=3)
    """
    _alike(correct_a=correct_a, correct_b=correct_b)
    a, b = correct_a.bool(), correct_b.bool()
    only_a, only_b = int((a & ~b).sum()), int((b & ~a).sum())
    n, term, total = only_a + only_b, 1, 0
    for i in range(min(only_a, only_b) + 1):
        total += term
        term = term * (n - i) // (i + 1)  # the next binomial coefficient; whole numbers, so exact for every n
    return Paired((only_b - only_a) / max(len(a), 1), min(1.0, 2 * total / 2**n), only_a, only_b)


def _alike(**columns: Tensor) -> None:
    """Refuse what is not (N,), all of one N."""
    shapes = {name: tuple(column.shape) for name, column in columns.items()}
    if len(set(shapes.values())) > 1 or any(len(shape) != 1 for shape in shapes.values()):
        named = " and ".join(f"{name} has shape {shape}" for name, shape in shapes.items())
        raise InputError(f"{named}; {'both' if len(shapes) == 2 else 'all'} must be (N,)")


def _no_nan(column: Tensor, name: str = "confidence") -> None:
    bad = int(column.isnan().sum())
    if bad:
        raise InputError(
            f"{name} is NaN for {bad} of {len(column)} samples; leave those samples out, or replace the NaN first (a "
            "confidence of -inf is the least confident)"
        )


def _accepted(confidence: Tensor, **flag: Tensor) -> tuple[Tensor, Tensor]:
    """Count the samples, and those with the flag, that pass each threshold, from none to all of them.

    There is one threshold per distinct confidence, and one above all: two int64 tensors of that length, on the CPU.
    """
    _alike(confidence=confidence, **flag)
    _no_nan(confidence)
    (flagged,) = flag.values()
    value, order = confidence.detach().sort(descending=True)
    last = torch.ones_like(value, dtype=torch.bool)
    last[:-1] = value[1:] != value[:-1]
    hits = flagged.bool()[order].long().cumsum(0)[last]
    zero = torch.zeros(1, dtype=torch.int64)
    return torch.cat([zero, last.nonzero()[:, 0].cpu() + 1]), torch.cat([zero, hits.cpu()])


def _accuracy_by_coverage(confidence: Tensor, correct: Tensor) -> Tensor:
    """Expected accuracy on the k most confident, k = 1..N, over random orders of equal confidences: (N,), float64."""
    accepted, hits = _accepted(confidence, correct=correct)
    sizes = accepted.diff()
    right = (hits.diff().double() / sizes).repeat_interleave(sizes).cumsum(0)
    return (right / torch.arange(1, len(right) + 1)).clamp_max(1)


def _log_softmax(scores: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
    """(N, K) log-probabilities in float32 or better, and (N,) labels as an index that is always inside."""
    if scores.ndim != 2 or not scores.shape[1] or label.shape != scores.shape[:1]:
        raise InputError(
            f"log_probability has shape {tuple(scores.shape)} and label {tuple(label.shape)}; they must be (N, K) and (N,)"
        )
    log_p = scores.to(torch.promote_types(scores.dtype, torch.float32)).log_softmax(dim=1)
    return log_p, label.long().clamp(0, scores.shape[1] - 1)
