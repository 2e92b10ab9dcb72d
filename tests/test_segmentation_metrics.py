"""Metrics over positions, against torchmetrics and against the metrics of single samples."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from come.errors import InputError
from come.metrics import Segmentation, abstention_accuracy, aurc, binned, confusion, ece, iou, miou, pixel_accuracy
from come.metrics.segmentation import BINS, EDGES, binned_accuracy, binned_aurc, binned_ece, binned_risk


def pixels(seed, classes=5, ignored=0.2, shape=(3, 8, 9)):
    draw = torch.Generator().manual_seed(seed)
    label = torch.randint(classes, shape, generator=draw)
    prediction = torch.where(
        torch.rand(shape, generator=draw) < 0.5, label, torch.randint(classes, shape, generator=draw)
    )
    return prediction, label.where(torch.rand(shape, generator=draw) >= ignored, -1)


@pytest.mark.parametrize("seed", range(3))
def test_confusion_and_iou_are_those_of_torchmetrics(seed):
    pytest.importorskip("torchmetrics", reason="torchmetrics is not installed: pip install torchmetrics")
    from torchmetrics.functional.classification import (
        multiclass_accuracy,
        multiclass_confusion_matrix,
        multiclass_jaccard_index,
    )

    prediction, label = pixels(seed)
    counts = confusion(prediction, label, 5).sum(dim=0)
    given = {"num_classes": 5, "ignore_index": -1}
    assert torch.equal(counts, multiclass_confusion_matrix(prediction, label, **given))
    each = multiclass_jaccard_index(prediction, label, average="none", **given)
    torch.testing.assert_close(iou(counts).float(), each)
    torch.testing.assert_close(
        miou(counts).float(), multiclass_jaccard_index(prediction, label, average="macro", **given)
    )
    torch.testing.assert_close(
        pixel_accuracy(counts).float(), multiclass_accuracy(prediction, label, average="micro", **given)
    )


def test_a_class_that_does_not_occur_is_left_out_as_in_torchmetrics():
    pytest.importorskip("torchmetrics", reason="torchmetrics is not installed: pip install torchmetrics")
    from torchmetrics.functional.classification import multiclass_jaccard_index

    prediction, label = pixels(0, classes=3)
    counts = confusion(prediction, label, 7).sum(dim=0)
    assert iou(counts)[3:].isnan().all()
    macro = multiclass_jaccard_index(prediction, label, num_classes=7, ignore_index=-1, average="macro")
    torch.testing.assert_close(miou(counts).float(), macro)


def test_each_image_is_counted_by_itself():
    prediction, label = pixels(4)
    counts = confusion(prediction, label, 5)
    for i in range(len(label)):
        assert torch.equal(counts[i], confusion(prediction[i : i + 1], label[i : i + 1], 5)[0])
    assert counts.sum() == (label >= 0).sum()


def test_the_order_of_classes_and_of_images_changes_nothing():
    prediction, label = pixels(5)
    order = torch.randperm(5, generator=torch.Generator().manual_seed(0))
    renamed = torch.where(label >= 0, order[label.clamp(min=0)], -1)
    counts, other = confusion(prediction, label, 5).sum(0), confusion(order[prediction], renamed, 5).flip(0).sum(0)
    assert miou(counts) == pytest.approx(miou(other).item(), abs=1e-12)
    torch.testing.assert_close(iou(counts), iou(other)[order])


def test_another_ignored_label():
    prediction, label = pixels(6)
    marked = label.where(label >= 0, 255)
    assert torch.equal(confusion(prediction, marked, 5, ignore=255), confusion(prediction, label, 5))
    with pytest.raises(InputError, match="label must be from 0 to 4, or -1, got 255; give it as ignore"):
        confusion(prediction, marked, 5)


def test_wrong_arguments_are_named():
    label = torch.zeros(1, 2, 2, dtype=torch.long)
    with pytest.raises(InputError, match=r"prediction must be from 0 to 2, got 7; take the argmax"):
        confusion(label + 7, label, 3)
    with pytest.raises(InputError, match=r"one shape \(B, ...\), got \(1, 2, 2\) and \(1, 4\)"):
        confusion(label, label.flatten(1), 3)
    with pytest.raises(InputError, match="one shape"):
        binned(torch.zeros(1, 2), torch.zeros(1, 3).bool(), torch.zeros(1, 2).bool())


def test_nothing_counted():
    label = torch.full((1, 2, 2), -1)
    counts = confusion(label.clamp(min=0), label, 3).sum(dim=0)
    assert math.isnan(miou(counts))
    assert math.isnan(pixel_accuracy(counts))
    bins = binned(torch.rand(1, 2, 2), label > 0, label >= 0).sum(dim=0)
    assert (binned_ece(bins), binned_aurc(bins), binned_accuracy(bins, 0.8)) == (0, 0, 1)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6))
def test_binned_metrics_of_confidences_that_are_equal_within_a_bin_are_exact(seed):
    draw = torch.Generator().manual_seed(seed)
    n = 200
    middles = (EDGES[1:] + EDGES[:-1]) / 2
    confidence = middles[torch.randint(BINS, (n,), generator=draw)]
    correct = torch.rand(n, generator=draw, dtype=torch.float64) < confidence
    bins = binned(confidence[None], correct[None], torch.ones(1, n).bool())[0]
    assert binned_aurc(bins) == pytest.approx(aurc(confidence, correct), abs=1e-9)
    assert binned_ece(bins) == pytest.approx(ece(confidence, correct), abs=1e-9)
    for coverage in (0.1, 0.5, 0.8, 1.0):
        assert binned_accuracy(bins, coverage) == pytest.approx(abstention_accuracy(confidence, correct, coverage))
    coverage, risk = binned_risk(bins)
    assert coverage[-1] == 1
    assert risk[-1] == pytest.approx(1 - correct.double().mean().item())


def test_binned_metrics_of_any_confidences_are_near_and_the_ece_is_exact():
    draw = torch.Generator().manual_seed(0)
    confidence = torch.rand(20_000, generator=draw).pow(0.05)  # most near 1, as of trained networks
    correct = torch.rand(20_000, generator=draw) < confidence.square()
    bins = binned(confidence[None], correct[None], torch.ones(1, 20_000).bool())[0]
    assert binned_aurc(bins) == pytest.approx(aurc(confidence, correct), abs=2e-3)
    assert binned_accuracy(bins, 0.8) == pytest.approx(abstention_accuracy(confidence, correct, 0.8), abs=5e-3)
    assert binned_ece(bins) == pytest.approx(ece(confidence, correct), abs=1e-6)


def test_the_running_metrics_are_those_of_all_images_at_once():
    pytest.importorskip("torchmetrics", reason="torchmetrics is not installed: pip install torchmetrics")
    from torchmetrics.classification import MulticlassCalibrationError, MulticlassJaccardIndex

    draw = torch.Generator().manual_seed(0)
    logits, (_, label) = 2 * torch.randn(6, 5, 8, 9, generator=draw), pixels(7, shape=(6, 8, 9))
    metrics = Segmentation(5)
    for part in (slice(0, 1), slice(1, 4), slice(4, 6)):
        metrics.add(logits[part], label[part])
    found = metrics.summary()
    assert found["miou"] == pytest.approx(MulticlassJaccardIndex(5, ignore_index=-1)(logits, label).item(), abs=1e-6)
    calibration = MulticlassCalibrationError(5, n_bins=15, ignore_index=-1)(logits.softmax(1), label)
    assert found["ece"] == pytest.approx(calibration.item(), abs=1e-5)
    assert len(metrics.iou()) == 5
