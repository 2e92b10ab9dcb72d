"""Metrics against recorded values of the published code and against scikit-learn."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import det_curve

import come
from come.metrics import accuracy, fpr

RECORDED = json.loads((Path(__file__).parent / "metrics.json").read_text())


@pytest.mark.parametrize("name", RECORDED)
def test_fpr_as_recorded(name):
    case = RECORDED[name]
    right, wrong = case["in_scores"], case["out_scores"]
    confidence = -torch.tensor(right + wrong, dtype=torch.float64)
    correct = torch.tensor([True] * len(right) + [False] * len(wrong))
    assert fpr(confidence, correct) == pytest.approx(case["fpr"], abs=1e-12)


scores = st.lists(st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.9, 1.0]) | st.floats(0, 1), min_size=1, max_size=60)


@given(scores, scores)
@settings(deadline=None, max_examples=300)
def test_fpr_against_the_detection_error_curve_of_scikit_learn(right, wrong):
    labels = np.r_[np.zeros(len(right)), np.ones(len(wrong))]
    rates, missed, _ = det_curve(labels, -np.r_[right, wrong])
    nearest = np.argmin(np.abs(rates - (1 - 0.95)))
    expected = 1.0 if rates[nearest] > 0.1 else missed[nearest]
    confidence = torch.tensor(right + wrong, dtype=torch.float64)
    assert fpr(confidence, torch.from_numpy(labels == 0)) == pytest.approx(expected, abs=1e-12)


def test_degenerate_sets():
    one = torch.ones(3)
    assert fpr(one, torch.tensor([True, True, True])) == 0.0
    assert fpr(one, torch.tensor([False, False, False])) == 1.0
    assert math.isnan(accuracy(torch.zeros(2), torch.tensor([-1, -1])))
    assert accuracy(torch.tensor([1, 0]), torch.tensor([1, -1])) == 1.0
    with pytest.raises(come.InputError, match=r"both must be \(N,\)"):
        fpr(torch.ones(3), torch.tensor([True]))
