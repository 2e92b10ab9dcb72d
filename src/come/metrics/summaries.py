"""All metrics of the rows of a run, over the whole stream and along it."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from come.errors import require_int
from come.metrics.calibration import ece
from come.metrics.counting import accuracy, alike, dominant_share, labelled_mean, no_nan
from come.metrics.ranking import aupr, auroc, fpr, fpr95
from come.metrics.scores import PROBABILITIES, SCORES, Rows, require_score
from come.metrics.selective import abstention_accuracy, aurc

POINTS = 100
"""Most points of a trajectory."""


def summary(rows: Rows, *, score: str = "confidence") -> dict[str, float]:
    """All metrics of the rows of a run.

    Correct are the samples whose label is predicted; wrong are the misclassified ones and the outliers. This is the split of
    fpr, auroc_correct, aurc and accuracy_at_80 (the accuracy on the most confident 80%). Over labelled samples only: accuracy,
    ece, brier and nll. Inliers against outliers: auroc_outlier, aupr_in, aupr_out (step form) and fpr95. Over all: samples,
    outliers, dominant_share and used.

    Args:
        rows: label and prediction, (N,), and the column of the score; optionally used, brier and nll.
        score: which confidence, a name in `SCORES`.

    Returns:
        numbers by name, none of them NaN. What the data do not define is absent: everything but the two counts (samples,
        outliers) without samples, metrics over labelled samples without any, auroc_correct if all are correct or all wrong,
        inliers against outliers if one of them is missing, ece for a score that is no probability.

    Example:
        >>> rows = {"label": torch.tensor([0, 1, 1]), "prediction": torch.tensor([0, 1, 0])}
        >>> found = summary({**rows, "confidence": torch.tensor([0.9, 0.8, 0.6])})
        >>> found["accuracy"], found["auroc_correct"], "fpr95" in found
        (0.6666666666666666, 1.0, False)
    """
    require_score(score)
    if not rows or not len(rows["label"]):
        return {"samples": 0.0, "outliers": 0.0}
    label, prediction, confidence = rows["label"], rows["prediction"], SCORES[score](rows)
    alike(label=label, prediction=prediction, confidence=confidence)
    no_nan(confidence)
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
        found |= {"auroc_outlier": auroc(confidence, inlier), "aupr_in": aupr(confidence, inlier)}
        found |= {"aupr_out": aupr(-confidence, ~inlier), "fpr95": fpr95(confidence, inlier)}
    found |= {"fpr": fpr(confidence, correct), "aurc": aurc(confidence, correct)}
    found["accuracy_at_80"] = abstention_accuracy(confidence, correct, 0.8)
    found["dominant_share"] = dominant_share(prediction)
    if "used" in rows:
        found["used"] = rows["used"].cpu().double().mean().item()
    return found


def trajectory(
    rows: Rows, *, batch_size: int = 64, window: int | None = None, score: str = "confidence"
) -> dict[str, Tensor]:
    """How the metrics of a run develop along its stream, at no more than 100 points, each after a whole number of batches.

    Args:
        rows: in the order of the stream: label, prediction, confidence, entropy, uncertainty and norm, (N,), and the column of
            the score.
        batch_size: samples in a batch.
        window: samples that the means look back on; by default, those since the previous point.
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
    require_score(score)
    means = ("confidence", "entropy", "uncertainty", "norm")
    columns = {name: rows[name].cpu() if rows else torch.zeros(0) for name in ("label", "prediction", *means)}
    ranked = SCORES[score](rows).cpu() if rows else torch.zeros(0)
    alike(**columns, score=ranked)
    for name, values in (*((name, columns[name]) for name in means), ("score", ranked)):
        no_nan(values, name)
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
