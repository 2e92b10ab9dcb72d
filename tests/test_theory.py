"""The corrected bounds hold for logits of any sign, are tight where they should be, and the printed ones do not hold."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

import come
from come.theory import belief_bound, confidence_bound, uncertainty_bounds

values = st.floats(-30, 30, allow_nan=False, width=32)
logits = st.integers(2, 40).flatmap(lambda k: arrays(np.float64, k, elements=values)).map(torch.from_numpy)
orders = st.sampled_from([1.0, 1.3, 2.0, 5.0, math.inf])
OPINION = come.Opinion()
SLACK = 1e-9


@given(logits, orders)
@settings(max_examples=300, deadline=None)
def test_the_norm_brackets_the_uncertainty(f, p):
    low, high = uncertainty_bounds(torch.linalg.vector_norm(f, p), len(f), p)
    u = OPINION.uncertainty(f)
    assert low - SLACK <= u <= high + SLACK


@given(logits, orders)
@settings(max_examples=300, deadline=None)
def test_the_norm_bounds_the_confidence(f, p):
    bound = confidence_bound(torch.linalg.vector_norm(f, p), len(f), p)
    assert come.Softmax().confidence(f) <= bound + SLACK


@given(logits, logits, st.floats(0, 1))
@settings(max_examples=200, deadline=None)
def test_the_uncertainty_bounds_the_belief(f, f0, delta):
    u, u0 = OPINION.uncertainty(f), OPINION.uncertainty(f0)
    delta = max(delta, float((u - u0).abs()))
    assert OPINION.confidence(f) <= belief_bound(u0, delta) + SLACK


@pytest.mark.parametrize("k", [2, 7, 1000])
@pytest.mark.parametrize("size", [0.0, 0.3, 5.0])
def test_tight(k, size):
    equal = torch.full((k,), size, dtype=torch.float64)
    for p in (1.0, 2.0, math.inf):
        _, high = uncertainty_bounds(torch.linalg.vector_norm(equal, p), k, p)
        torch.testing.assert_close(OPINION.uncertainty(-equal), high)
    low, _ = uncertainty_bounds(torch.tensor(size, dtype=torch.float64), k, math.inf)
    torch.testing.assert_close(OPINION.uncertainty(equal), low)

    peak = -equal
    peak[0] = size
    bound = confidence_bound(torch.tensor(size, dtype=torch.float64), k, math.inf)
    torch.testing.assert_close(come.Softmax().confidence(peak), bound)
    pair = torch.tensor([size, -size], dtype=torch.float64)
    for p in (1.0, 2.0, math.inf):
        bound = confidence_bound(torch.linalg.vector_norm(pair, p), 2, p)
        torch.testing.assert_close(come.Softmax().confidence(pair), bound)


def test_belief_bound_is_attained_in_the_limit():
    f = torch.tensor([4.0, -300.0, -300.0], dtype=torch.float64)
    torch.testing.assert_close(OPINION.confidence(f), belief_bound(OPINION.uncertainty(f)))


def test_the_printed_lemma_fails():
    k = 2
    printed_lower = k / (0.0 + math.log(k))
    assert printed_lower > 1 >= OPINION.uncertainty(torch.zeros(k))


def test_the_printed_theorem_fails():
    f = torch.tensor([math.log(2), -40.0], dtype=torch.float64)
    u0 = OPINION.uncertainty(f)
    torch.testing.assert_close(u0.item(), 0.5)
    printed = 1 / (1 + (2 - 1) * torch.exp(-2 / u0))
    assert come.Softmax().confidence(f) > printed


def test_bad_arguments():
    with pytest.raises(come.ConfigError, match="num_classes must be at least 2, got 1"):
        uncertainty_bounds(torch.ones(1), 1)
    with pytest.raises(come.ConfigError, match=r"p must be .*, got 0\.5"):
        confidence_bound(torch.ones(1), 3, p=0.5)
    with pytest.raises(come.ConfigError, match=r"delta must be at least 0, got -0\.1"):
        belief_bound(torch.ones(1), delta=-0.1)
