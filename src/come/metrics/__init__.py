"""What a run is judged by, on one-dimensional tensors with one entry per sample, on any device.

A confidence is any score that is larger for a more confident prediction. Equal confidences are accepted together, so no
value depends on the order of the samples. Infinite confidences are allowed; a NaN raises an `InputError`, except in
`fpr`. Every metric has a value for every set, also for an empty one; `summary` leaves out what the data do not define.

    counting     accuracy, labelled_mean, dominant_share
    ranking      fpr (the paper's), fpr95 (OpenOOD's), auroc, aupr
    calibration  ece, nll, brier
    selective    risk_by_coverage, aurc, abstention_accuracy; selective: of the rows of a run
    scores       SCORES: confidences by name
    summaries    summary: all of them; trajectory: along the stream
    segmentation confusion, iou, miou, pixel_accuracy, binned: of positions (B, H, W), counted image by image; Segmentation
"""

from come.metrics.calibration import LARGEST_NLL, brier, ece, nll
from come.metrics.counting import accuracy, dominant_share, labelled_mean
from come.metrics.ranking import aupr, auroc, fpr, fpr95
from come.metrics.scores import PROBABILITIES, SCORES, Rows, uniform_cross_entropy
from come.metrics.segmentation import Segmentation, binned, confusion, iou, miou, pixel_accuracy
from come.metrics.selective import abstention_accuracy, aurc, risk_by_coverage, selective
from come.metrics.summaries import POINTS, summary, trajectory

__all__ = [
    "LARGEST_NLL", "POINTS", "PROBABILITIES", "SCORES", "Rows", "Segmentation", "abstention_accuracy", "accuracy", "aupr",
    "aurc", "auroc", "binned", "brier", "confusion", "dominant_share", "ece", "fpr", "fpr95", "iou", "labelled_mean", "miou",
    "nll", "pixel_accuracy", "risk_by_coverage", "selective", "summary", "trajectory", "uniform_cross_entropy",
]  # fmt: skip
