"""Objectives against a float64 NumPy oracle, and the properties that hold for every logit vector."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

import come
from come.objectives import Opinion, Softmax, hold_norm

finite = st.floats(-60, 60, allow_nan=False, width=32)
logits = st.tuples(st.integers(1, 5), st.integers(2, 30)).flatmap(lambda s: arrays(np.float64, s, elements=finite))
orders = st.sampled_from([1.0, 1.5, 2.0, 3.0, 10.0, math.inf])
objectives = st.one_of(
    st.builds(Softmax, freeze_norm=st.booleans(), p=orders, tau=st.sampled_from([0.5, 1.0, 2.0])),
    st.builds(
        Opinion,
        freeze_norm=st.booleans(),
        p=orders,
        tau=st.sampled_from([0.5, 1.0, 2.0]),
        evidence=st.sampled_from(["exp", "exp-1", "relu", "softplus"]),
    ),
)
EVIDENCE = {
    "exp": np.exp,
    "exp-1": lambda z: np.clip(np.expm1(z), 0, None),
    "relu": lambda z: np.clip(z, 0, None),
    "softplus": lambda z: np.log1p(np.exp(-np.abs(z))) + np.clip(z, 0, None),
}


def oracle(objective, z):
    """The masses, straight from the paper's definitions, in float64 (exp(120) does not overflow there)."""
    z = z * objective.tau
    k = z.shape[-1]
    if isinstance(objective, Softmax):
        e = np.exp(z - z.max(axis=-1, keepdims=True))
        return e / e.sum(axis=-1, keepdims=True)
    e = EVIDENCE[objective.evidence](z)
    strength = e.sum(axis=-1, keepdims=True) + k
    return np.concatenate([e, np.full_like(strength, k)], axis=-1) / strength


def oracle_entropy(m):
    return -np.where(m > 0, m * np.log(np.where(m > 0, m, 1)), 0).sum(axis=-1)


@given(objectives, logits)
@settings(deadline=None, max_examples=200)
def test_agreement_with_the_oracle(objective, z):
    mass = oracle(objective, z)
    x = torch.from_numpy(z)
    np.testing.assert_allclose(objective.log_mass(x).exp().numpy(), mass, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(objective.entropy(x).numpy(), oracle_entropy(mass), rtol=1e-9, atol=1e-9)
    k = z.shape[-1]
    np.testing.assert_allclose(objective.confidence(x).numpy(), mass[..., :k].max(axis=-1), rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(objective.entropy(x.float()).numpy(), oracle_entropy(mass), rtol=1e-4, atol=2e-4)


@given(objectives, logits, st.randoms(use_true_random=False))
@settings(deadline=None)
def test_classes_are_treated_alike(objective, z, random):
    order = list(range(z.shape[-1]))
    random.shuffle(order)
    x = torch.from_numpy(z)
    k = len(order)
    m, permuted = objective.log_mass(x), objective.log_mass(x[:, order])
    torch.testing.assert_close(permuted[:, :k], m[:, :k][:, order])
    torch.testing.assert_close(permuted[:, k:], m[:, k:])


@given(objectives, logits)
@settings(deadline=None)
def test_samples_are_independent(objective, z):
    x = torch.from_numpy(z).requires_grad_()
    (whole,) = torch.autograd.grad(objective.entropy(x).sum(), x)
    for i in range(len(z)):
        row = torch.from_numpy(z[i]).requires_grad_()
        (alone,) = torch.autograd.grad(objective.entropy(row), row)
        torch.testing.assert_close(whole[i], alone)


@given(st.sampled_from([Softmax, Opinion]), orders, logits)
@settings(deadline=None)
def test_a_held_norm_has_no_radial_gradient(kind, p, z):
    x = torch.from_numpy(z).requires_grad_()
    (held,) = torch.autograd.grad(kind(freeze_norm=True, p=p).entropy(x).sum(), x)
    (free,) = torch.autograd.grad(kind(freeze_norm=False).entropy(x).sum(), x)
    scale = (free.norm(dim=-1) * x.norm(dim=-1)).clamp_min(1e-9)
    assert ((held * x).sum(dim=-1).abs() <= 1e-9 * scale + 1e-12).all()


@given(orders, logits)
@settings(deadline=None)
def test_holding_the_norm_does_not_change_the_value(p, z):
    x = torch.from_numpy(z)
    torch.testing.assert_close(hold_norm(x, p), x, rtol=0, atol=0)


def test_without_a_held_norm_the_gradient_is_right():
    x = torch.randn(3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    for objective in (Softmax(), *(Opinion(freeze_norm=False, evidence=e) for e in EVIDENCE)):
        assert torch.autograd.gradcheck(objective.entropy, x)


def test_a_held_norm_projects_the_gradient():
    """For p = 2: grad - f <f, grad> / <f, f>."""
    x = torch.randn(4, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    (free,) = torch.autograd.grad(Opinion(freeze_norm=False).entropy(x).sum(), x)
    (held,) = torch.autograd.grad(Opinion().entropy(x).sum(), x)
    f = x.detach()
    projected = free - f * (f * free).sum(-1, keepdim=True) / f.square().sum(-1, keepdim=True)
    torch.testing.assert_close(held, projected)


@pytest.mark.parametrize("k", [2, 10, 1000, 100_000])
def test_entropy_of_no_evidence(k):
    zero = torch.zeros(1, k)
    torch.testing.assert_close(Softmax().entropy(zero).item(), math.log(k), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(Opinion().entropy(zero).item(), math.log(2 * k) - math.log(k) / 2, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(Opinion().uncertainty(zero).item(), 0.5, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(dtype):
    z = torch.tensor([[20.0, 3.0, -4.0]], dtype=dtype, requires_grad=True)
    entropy = Opinion().entropy(z)
    assert entropy.dtype == torch.float32
    torch.testing.assert_close(entropy, Opinion().entropy(z.detach().float()))
    entropy.sum().backward()
    assert z.grad is not None
    assert z.grad.dtype == dtype


def test_a_zero_vector_gets_a_zero_gradient():
    z = torch.zeros(2, 5, requires_grad=True)
    Opinion().entropy(z).sum().backward()
    assert torch.equal(z.grad, torch.zeros(2, 5))


def test_symmetric_consistency():
    a, b = torch.randn(2, 4, 5, generator=torch.Generator().manual_seed(0)).unbind()
    for objective in (Softmax(), Opinion()):
        forward, backward = objective.consistency(a, b), objective.consistency(b, a)
        torch.testing.assert_close(objective.consistency(a, b, symmetric=True), (forward + backward) / 2)
        assert (forward >= objective.entropy(b) - 1e-6).all()  # Gibbs


def test_marginal_entropy_averages_masses_not_logits():
    views = torch.randn(6, 3, 5, generator=torch.Generator().manual_seed(0))
    mean = Opinion().log_mass(views).exp().mean(dim=0)
    torch.testing.assert_close(Opinion().marginal_entropy(views), -(mean * mean.log()).sum(-1))
    torch.testing.assert_close(Opinion().marginal_entropy(views.movedim(0, 1), dim=1), -(mean * mean.log()).sum(-1))
    with pytest.raises(come.InputError, match="axis of the views"):
        Opinion().marginal_entropy(views, dim=-1)


def test_four_combinations_of_the_ablation_differ():
    z = torch.randn(5, 8, generator=torch.Generator().manual_seed(0), requires_grad=True)
    grads = [
        torch.autograd.grad(kind(freeze_norm=held).entropy(z).sum(), z)[0]
        for kind in (Softmax, Opinion)
        for held in (False, True)
    ]
    assert all(not torch.allclose(a, b, atol=1e-3) for i, a in enumerate(grads) for b in grads[:i])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Opinion(p=0.5), r"p must be at least 1 .*, got 0\.5"),
        (lambda: Softmax(tau=0), "tau must be a positive number, got 0"),
        (lambda: Softmax(tau=math.nan), "tau must be a positive number, got nan"),
        (lambda: Opinion(evidence="tanh"), "evidence must be one of exp, exp-1, relu, softplus, got 'tanh'"),
        (lambda: Opinion(eps=-1e-7), r"eps must be in \[0, 1\), got -1e-07"),
        (lambda: come.objectives.get("comme"), "no objective 'comme'; did you mean 'come'"),
        (
            lambda: come.objectives.get(3),
            r"objective must be a name \(em, come.*\) or an instance of come\.Objective, got 3",
        ),
        (
            lambda: come.objectives.register("x", Opinion),
            "objective 'x' must be an instance of come.Objective, got the class Opinion",
        ),
        (lambda: Softmax().entropy(torch.zeros(3, 1)), r"K >= 2 classes, got shape \(3, 1\)"),
        (lambda: Softmax().entropy(torch.zeros(3, 2, dtype=torch.int64)), "must be floating point, got torch.int64"),
    ],
)
def test_bad_arguments(make, message):
    with pytest.raises(come.ComeError, match=message):
        make()
