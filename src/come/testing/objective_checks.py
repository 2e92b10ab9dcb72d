"""The contract of `come.Objective`, and whether adaptation depends on what a softmax classifier leaves undetermined."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, nn

from come.objectives import Objective
from come.testing.method_checks import MethodFactory
from come.testing.models import CLASSES, NORMS, TinyClassifier, batches


def check_objective(objective: Objective) -> None:
    """Check that an objective keeps the contract of `come.Objective`.

    It checks shapes; normalized masses; finite values and gradients for K from 2 to 100,000, for logits up to 1e4, for
    all-zero logits, in float16, bfloat16, float32 and float64; that half precision is computed in float32; that samples do not
    influence each other and classes are interchangeable; and that confidence and uncertainty are in [0, 1].

    Raises:
        AssertionError: says what failed, for which logits.

    Example:
        >>> from come import Opinion
        >>> check_objective(Opinion())
    """
    for what, logits in _logits_to_try():
        z, k = logits.clone().requires_grad_(), logits.shape[-1]
        with _naming(what):
            m = objective.log_mass(z)
            assert m.shape[:-1] == logits.shape[:-1], f"log_mass has shape {tuple(m.shape)}"
            assert m.shape[-1] in (k, k + 1), f"{m.shape[-1]} outcomes for {k} classes; it must be {k} or {k + 1}"
            assert m.dtype == (torch.float64 if logits.dtype == torch.float64 else torch.float32), f"mass in {m.dtype}"
            total = m.exp().sum(dim=-1)
            tolerance = max(2e-3, 2e-7 * k)  # rounding, and the published 1e-7 on each mass
            ones = torch.ones_like(total)
            assert torch.allclose(total, ones, atol=tolerance), f"the masses sum to {total.max().item()}"
            entropy = objective.entropy(z)
            assert entropy.isfinite().all(), "non-finite entropy"
            assert (entropy > -1e-5).all(), f"negative entropy {entropy.min().item()}"
            (grad,) = torch.autograd.grad(entropy.sum(), z)
            assert grad.isfinite().all(), "non-finite gradient"
            for name in ("confidence", "uncertainty"):
                value = getattr(objective, name)(logits)
                assert value.shape == logits.shape[:-1], f"{name} has shape {tuple(value.shape)}"
                assert ((value >= -1e-5) & (value <= 1 + 1e-3)).all(), f"{name} outside [0, 1]"

    z = torch.randn(6, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 3
    order = torch.tensor([3, 0, 6, 1, 5, 2, 4])
    with _naming("classes in another order"):
        assert torch.allclose(objective.entropy(z), objective.entropy(z[:, order])), "the entropy depends on the order"
    with _naming("samples one by one"):
        alone = torch.stack([objective.entropy(row) for row in z])
        assert torch.allclose(objective.entropy(z), alone), "a sample's entropy depends on the other samples"
    with _naming("derived quantities"):
        assert torch.allclose(objective.consistency(z, z), objective.entropy(z)), "C(z, z) is not H(z)"
        views = z.expand(3, *z.shape)
        assert torch.allclose(objective.marginal_entropy(views), objective.entropy(z)), "equal views change the entropy"


def check_invariance(
    make: MethodFactory,
    *,
    norms: Iterable[str] = ("batch", "group", "layer"),
    shift: float = 10.0,
    model: Callable[[Callable[[int], nn.Module]], nn.Module] = TinyClassifier,
) -> None:
    """Check that adaptation treats models with the same probabilities alike.

    A softmax classifier is the same with a constant added to all logits, or with its classes in another order. So answers and
    adapted weights must be the same up to rounding. Every method passes with "em" and "invariant"; none does with "come",
    whose "I do not know" has a fixed logit.

    Args:
        make: puts the method around a model, as for `check_method`.
        norms: kinds of normalization to check with, of `NORMS`.
        shift: the constant.
        model: as for `check_method`.

    Raises:
        AssertionError: says which change of the model matters, with which kind of normalization.

    Example:
        >>> import come
        >>> check_invariance(lambda model: come.adapt(model, "tent", objective="invariant"), norms=["layer"])
        >>> try:
        ...     check_invariance(lambda model: come.adapt(model, "tent", objective="come"), norms=["layer"])
        ... except AssertionError as error:
        ...     print(str(error)[:80])
        layer normalization: a constant of 10 on all logits changes the adapted weights
    """
    order = torch.tensor([3, 0, 4, 1, 2])
    for norm in norms:
        plain, shifted, permuted = (model(NORMS[norm]).double() for _ in range(3))
        with torch.no_grad():
            shifted.head.bias += shift  # type: ignore[union-attr, operator]
            for p in (permuted.head.weight, permuted.head.bias):  # type: ignore[union-attr]
                p.copy_(p[order])  # type: ignore[operator, index]
        expected = _trajectory(make, plain)
        for what, changed, turned in (
            (f"a constant of {shift:g} on all logits", shifted, torch.arange(CLASSES)),
            ("another order of the classes", permuted, order),
        ):
            probabilities, weights = _trajectory(make, changed)
            for kind, found, wanted in (
                ("adapted weights", weights, expected[1]),
                ("answers", probabilities, expected[0][..., turned]),
            ):
                off = (found - wanted).abs().max().item()
                assert off < 1e-6, f"{norm} normalization: {what} changes the {kind} by {off:.2g}"


def _trajectory(make: MethodFactory, model: nn.Module) -> tuple[Tensor, Tensor]:
    """Probabilities (T, B, K) and adapted weights (T, P) along four batches."""
    adapter = make(model)
    answers, weights = [], []
    for x in batches(4):
        answers.append(adapter(x.double()).softmax(dim=1))
        adapted = [value.flatten() for value in adapter.adapted_parameters.values()]
        weights.append(torch.cat([torch.zeros(1), *adapted]))  # some methods adapt none
    return torch.stack(answers), torch.stack(weights)


def _logits_to_try() -> Iterator[tuple[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    for k in (2, 10, 1000, 100_000):
        yield f"K = {k}", torch.randn(3, k, generator=generator) * 4
    base = torch.randn(2, 4, 10, generator=generator)
    yield "leading shape (2, 4)", base
    yield "one vector", base[0, 0]
    yield "all-zero logits", torch.zeros(2, 10)
    for size in (1e-20, 1e2, 1e4):
        yield f"logits of size {size:g}", base / base.abs().max() * size
    yield "one dominant class", torch.nn.functional.one_hot(torch.arange(4), 10).float() * 1e4
    yield "all very negative", torch.full((2, 10), -1e4)
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        yield f"{dtype}", (base * 50).to(dtype)


@contextlib.contextmanager
def _naming(what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise AssertionError(f"{what}: {error}") from error
