"""What adaptation minimizes: log-masses, and everything that follows from them.

An objective is one function, `log_mass(logits) -> (..., M)`: a normalized log-distribution over M outcomes. Softmax has the K
classes as outcomes. A subjective opinion has K + 1: the classes and "I do not know". Everything else is derived here, for
every objective:

    entropy      H(m)    = -sum_j exp(m_j) m_j                  Tent, EATA, SAR
    consistency  C(s, t) = -sum_j exp(t_j) s_j                  student and teacher
    marginal     H(log mean_v exp m^v)                          several views of one image
    confidence   max_{k <= K} exp(m_k)                          the score for FPR and AUROC
    uncertainty  exp(m_{K+1})                                   the mass on "I do not know"

No method knows which objective it was given, so COME is a drop-in replacement in every one.

Reference: Zhang et al., "COME: Test-time Adaption by Conservatively Minimizing Entropy", ICLR 2025.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from come.errors import ConfigError, InputError, require, shown, unknown
from come.model.positions import by_rows
from come.registry import Registry, parse

Evidence = Literal["exp", "exp-1", "relu", "softplus"]

SMALLEST_NORM = 1e-30  # below this a vector of logits counts as zero: dividing by it would overflow float32
MASKED = -1e30  # stands for a logit of -inf: its mass is exactly 0, and 0 * ln 0 is 0


def hold_norm(logits: Tensor, p: float = 2.0) -> Tensor:
    r"""Return logits (..., K) unchanged in value, but without a gradient along their p-norm (Eq. 9), 1 <= p <= inf.

    .. math:: z = f \cdot \mathrm{sg}(\lVert f \rVert_p) / \lVert f \rVert_p

    The gradient with respect to f is orthogonal to f: :math:`\langle f, \partial L / \partial f \rangle = 0`, so no step can
    lower the loss by growing the logits. A zero vector stays zero and gets a zero gradient.

    Example:
        >>> f = torch.tensor([3.0, 4.0], requires_grad=True)
        >>> hold_norm(f)[0].backward()
        >>> f.grad  # orthogonal to (3, 4)
        tensor([ 0.6400, -0.4800])
    """
    # Dividing by the largest entry first keeps |f|^p finite for every p.
    size = logits.detach().abs().amax(dim=-1, keepdim=True).clamp_min(SMALLEST_NORM)
    norm = torch.linalg.vector_norm(logits / size, ord=p, dim=-1, keepdim=True)
    nonzero = norm > 0
    ratio = norm.detach() / torch.where(nonzero, norm, 1)
    return logits * torch.where(nonzero, ratio, 0)


class Objective(ABC):
    """A log-mass over M outcomes and everything that is derived from it.

    To write your own, subclass it with one method, `log_mass`, and pass an instance wherever a name is accepted. If M = K + 1,
    the last outcome means "I do not know". `come.testing.check_objective` checks the contract.

    Example:
        >>> class Tempered(Objective):
        ...     def log_mass(self, logits):
        ...         z = logits if logits.dtype == torch.float64 else logits.float()  # half precision is too coarse
        ...         return torch.log_softmax(z / 2, dim=-1)
        >>> Tempered().entropy(torch.zeros(1, 4))  # ln 4
        tensor([1.3863])
        >>> from come.testing import check_objective
        >>> check_objective(Tempered())
    """

    @abstractmethod
    def log_mass(self, logits: Tensor) -> Tensor:
        """Map logits (..., K) to log-masses (..., M), computed in float32 or better, finite for finite logits.

        A logit of -inf is a class that the model rules out: its mass is 0.
        """

    def entropy(self, logits: Tensor) -> Tensor:
        r"""Entropy of the mass in nats, :math:`H = -\sum_j e^{m_j} m_j`, of logits (..., K) to (...,).

        Example:
            >>> Softmax().entropy(torch.zeros(2, 4))
            tensor([1.3863, 1.3863])
        """
        return by_rows(lambda z: _entropy(self.log_mass(z)), logits)

    def consistency(self, student: Tensor, teacher: Tensor, *, symmetric: bool = False) -> Tensor:
        r"""Cross-entropy between two masses in nats, :math:`C = -\sum_j e^{m^t_j} m^s_j`; the entropy when the two agree.

        Args:
            student: logits (..., K).
            teacher: logits (..., K); detach it if it must not receive a gradient.
            symmetric: return the mean of C(student, teacher) and C(teacher, student).

        Example:
            >>> z = torch.tensor([[1.0, 2.0, 3.0]])
            >>> bool(torch.isclose(Softmax().consistency(z, z), Softmax().entropy(z)))
            True
        """

        def of_rows(student: Tensor, teacher: Tensor) -> Tensor:
            s, t = self.log_mass(student), self.log_mass(teacher)
            forward = -(t.exp() * s).sum(dim=-1)
            return 0.5 * forward - 0.5 * (s.exp() * t).sum(dim=-1) if symmetric else forward

        return by_rows(of_rows, student, teacher)

    def marginal_entropy(self, logits: Tensor, dim: int = 0) -> Tensor:
        r"""Entropy of the mass averaged over views, :math:`H(\frac{1}{V} \sum_v e^{m^v})`.

        Logits are (..., V, ..., K) with the views along `dim`; the result lacks that axis and the class axis.

        Example:
            >>> views = torch.tensor([[9.0, 0.0], [0.0, 9.0]])  # two views that contradict each other
            >>> Softmax().marginal_entropy(views)  # ln 2
            tensor(0.6931)
        """
        m = self.log_mass(logits)
        if dim % logits.ndim == logits.ndim - 1:
            raise InputError(
                f"dim must be the axis of the views of logits {tuple(logits.shape)}, got {dim}, the class axis"
            )
        return _entropy(torch.logsumexp(m, dim=dim) - math.log(logits.shape[dim]))

    def confidence(self, logits: Tensor) -> Tensor:
        r"""Largest mass on a class, :math:`\max_{k \le K} e^{m_k}` in [0, 1], of logits (..., K) to (...,).

        Example:
            >>> Opinion().confidence(torch.zeros(1, 4))  # half of the mass is "I do not know"
            tensor([0.1250])
        """
        return by_rows(lambda z: self.log_mass(z)[..., : z.shape[-1]].amax(dim=-1).exp(), logits)

    def uncertainty(self, logits: Tensor) -> Tensor:
        """Mass on "I do not know", :math:`u = e^{m_{K+1}}` in [0, 1], of logits (..., K) to (...,); 1 - confidence where M = K.

        Example:
            >>> Opinion().uncertainty(torch.tensor([[5.0, 0.0], [-5.0, -5.0]]))
            tensor([0.0132, 0.9933])
        """

        def of_rows(z: Tensor) -> Tensor:
            m = self.log_mass(z)
            return m[..., -1].exp() if m.shape[-1] > z.shape[-1] else 1 - m.amax(dim=-1).exp()

        return by_rows(of_rows, logits)


def _normalized(z: Tensor) -> Tensor:
    # Not log_softmax: on the CPU it adds up long rows one by one and is off by 1e-4 at K = 100,000. The shift keeps the
    # digits that z - logsumexp(z) loses when both are large.
    z = z - z.detach().amax(dim=-1, keepdim=True)
    return z - torch.logsumexp(z, dim=-1, keepdim=True)


def _entropy(m: Tensor) -> Tensor:
    return -(m.exp() * m).sum(dim=-1)


@dataclass(frozen=True)
class Softmax(Objective):
    r"""Entropy minimization (EM): the mass is the softmax of the logits.

    .. math:: m = \log \mathrm{softmax}(\tau f)

    Args:
        freeze_norm: take the gradient with the norm of the logits held (Eq. 9), the ablation's "UC without SL".
        p: order of that norm, 1 <= p <= inf.
        tau: factor on the logits, > 0.

    Example:
        >>> Softmax().entropy(torch.tensor([[0.0, 0.0], [5.0, 0.0]]))
        tensor([0.6931, 0.0402])
    """

    freeze_norm: bool = False
    p: float = 2.0
    tau: float = 1.0

    def __post_init__(self) -> None:
        _check_norm(self.p, self.tau)

    def log_mass(self, logits: Tensor) -> Tensor:
        """Log-softmax over the K classes, (..., K) -> (..., K)."""
        return _normalized(_prepare(logits, self.freeze_norm, self.p, self.tau))


@dataclass(frozen=True)
class Opinion(Objective):
    r"""COME: the mass is a subjective opinion, K beliefs and one uncertainty.

    With the evidence :math:`e = \exp z` of the held logits z, :math:`S = \sum_k e_k + K`:

    .. math:: b_k = e_k / S, \qquad u = K / S

    which is the softmax over the K logits and one more logit, ln K; it is computed in that form, so it is exact and finite for
    every K, dtype and scale.

    Args:
        freeze_norm: take the gradient with the norm of the logits held (Eq. 9); without it, the ablation's "SL without UC".
        p: order of that norm, 1 <= p <= inf.
        tau: factor on the logits, > 0.
        evidence: "exp" is what the published implementation does. "exp-1" is Eq. 3 to 5 of the paper with the evidence clamped
            at 0 (as printed, a negative logit makes a negative belief and a NaN). "relu" and "softplus" are the usual
            alternatives of evidential learning.
        eps: added to every mass, without renormalizing. 0 by default; 1e-7 reproduces the published numbers.

    Example:
        >>> come = Opinion()
        >>> come.log_mass(torch.zeros(1, 3)).exp()  # no evidence beyond 1 per class: u = 1/2
        tensor([[0.1667, 0.1667, 0.1667, 0.5000]])
        >>> come.uncertainty(torch.tensor([[8.0, 0.0, 0.0], [-8.0, -8.0, -8.0]]))
        tensor([0.0010, 0.9997])
    """

    freeze_norm: bool = True
    p: float = 2.0
    tau: float = 1.0
    evidence: Evidence = "exp"
    eps: float = 0.0

    def __post_init__(self) -> None:
        _check_norm(self.p, self.tau)
        kinds = get_args(Evidence)
        require(self.evidence in kinds, "evidence", self.evidence, f"one of {', '.join(kinds)}")
        require(0 <= self.eps < 1, "eps", self.eps, "in [0, 1)")

    def log_mass(self, logits: Tensor) -> Tensor:
        """Log-beliefs and log-uncertainty, (..., K) -> (..., K + 1)."""
        z = _log_evidence(_prepare(logits, self.freeze_norm, self.p, self.tau), self.evidence)
        ignorance = (~logits.isneginf()).sum(dim=-1, keepdim=True).clamp_min(1).to(z.dtype).log()  # ln K
        m = _normalized(torch.cat([z, ignorance], dim=-1))
        return (m.exp() + self.eps).log() if self.eps else m


@dataclass(frozen=True)
class Invariant(Objective):
    r"""COME for any classifier: an opinion that does not depend on the constant that training leaves undetermined.

    A softmax classifier is the same for every constant added to its logits, but the opinion of `Opinion` is not: there "I do
    not know" has the fixed logit ln K. Here its mass is the normalized entropy of the classifier itself. With the centred
    logits :math:`c = f - \bar f`, their held form :math:`z = c \, \mathrm{sg}(\lVert c \rVert_2) / \lVert c \rVert_2` and
    :math:`p = \mathrm{softmax}(f)`:

    .. math:: u = \min\left(\frac{H(p)}{\ln K},\ \frac12\right), \qquad
              m = \log \mathrm{softmax}\left(z_1, \ldots, z_K,\
                  \mathrm{sg}\left(\ln \sum_k e^{z_k} + \ln \frac{u}{1 - u}\right)\right)

    so that :math:`b_k = (1 - u) \, p_k`. The logit of "I do not know" is a constant for the gradient, as ln K is in COME, and
    the gradient has no part along c. Two classifiers with the same probabilities get the same masses and gradients
    (`come.testing.check_invariance`).

    Args:
        freeze_norm: take the gradient with the norm of the centred logits held.
        most: the largest uncertainty, in (0, 1): above 1/2 the classes would hardly count.

    Example:
        >>> f = torch.tensor([[2.0, 0.0, 0.0]])
        >>> Invariant().log_mass(f).exp()
        tensor([[0.3935, 0.0533, 0.0533, 0.5000]])
        >>> torch.allclose(Invariant().log_mass(f), Invariant().log_mass(f - 10))
        True
    """

    freeze_norm: bool = True
    most: float = 0.5

    def __post_init__(self) -> None:
        require(0 < self.most < 1, "most", self.most, "in (0, 1)")

    def log_mass(self, logits: Tensor) -> Tensor:
        """Log-beliefs and log-uncertainty, (..., K) -> (..., K + 1)."""
        z = _prepare(logits, self.freeze_norm, 2.0, 1.0, centred=True)
        fixed = z.detach()
        count = (~logits.isneginf()).sum(dim=-1, keepdim=True).clamp_min(2)
        open_share = _entropy(_normalized(fixed))[..., None] / count.to(z.dtype).log()
        u = open_share.clamp(SMALLEST_NORM, self.most)
        ignorance = torch.logsumexp(fixed, dim=-1, keepdim=True) + u.log() - (-u).log1p()
        return _normalized(torch.cat([z, ignorance], dim=-1))


def _check_norm(p: float, tau: float) -> None:
    require(p >= 1, "p", p, "at least 1 (math.inf included)")
    require(0 < tau < math.inf, "tau", tau, "a positive number")


def _prepare(logits: Tensor, freeze_norm: bool, p: float, tau: float, centred: bool = False) -> Tensor:
    """Check the class axis, convert to float32 or better, apply Eq. 9 to the classes that are not masked by -inf.

    `centred`: after subtracting the mean of these classes.
    """
    if logits.ndim < 1 or logits.shape[-1] < 2:
        raise InputError(f"logits must be (..., K) with K >= 2 classes, got shape {tuple(logits.shape)}")
    if not logits.is_floating_point():
        raise InputError(f"logits must be floating point, got {logits.dtype}: call .float()")
    masked = logits.isneginf()
    z = logits.to(torch.promote_types(logits.dtype, torch.float32)).masked_fill(masked, 0)
    if centred:
        mean = z.sum(dim=-1, keepdim=True) / (~masked).sum(dim=-1, keepdim=True).clamp_min(1)
        z = (z - mean).masked_fill(masked, 0)
    if freeze_norm and torch.is_grad_enabled():  # it changes only the gradient
        z = hold_norm(z, p)
    return (z if tau == 1 else z * tau).masked_fill(masked, MASKED)


def _log_evidence(z: Tensor, evidence: Evidence) -> Tensor:
    """Logarithm of the evidence; evidence of exactly 0 becomes the smallest normal number, whose mass rounds to 0."""
    if evidence == "exp":
        return z
    if evidence == "softplus":  # ln(1 + e^z) is e^z to the last bit of float64 below -40
        small = z < -40
        return torch.where(small, z, F.softplus(torch.where(small, 0, z)).log())
    tiny = torch.finfo(z.dtype).tiny
    some = z > tiny
    safe = torch.where(some, z, 1)
    log_e = safe.log() if evidence == "relu" else safe + (-torch.expm1(-safe)).log()
    return torch.where(some, log_e, math.log(tiny))


def _check(name: str, thing: object) -> str:
    if isinstance(thing, Objective):
        return ""
    made = isinstance(thing, type) and issubclass(thing, Objective)
    repair = f"; make one: {thing.__name__.lower()} = {thing.__name__}()" if made else ""  # type: ignore[attr-defined]
    return f"must be an instance of come.Objective, got {shown(thing)}{repair}"


_registry: Registry[Objective] = Registry("objective", entry_points="come.objectives", check=_check)
_registry.add("em", Softmax())
_registry.add("come", Opinion())
_registry.add("invariant", Invariant())


def names() -> list[str]:
    """Names of all registered objectives, in the order in which they were added.

    Example:
        >>> names()
        ['em', 'come', 'invariant']
    """
    return _registry.names()


def get(objective: str | Objective) -> Objective:
    """The objective of that name, or the object itself if it is an objective.

    A name may carry arguments, `name:argument=value:...`, so that ablations can be run from the command line.

    Example:
        >>> get("em")
        Softmax(freeze_norm=False, p=2.0, tau=1.0)
        >>> get("come:freeze_norm=false:tau=2.0")
        Opinion(freeze_norm=False, p=2.0, tau=2.0, evidence='exp', eps=0.0)
    """
    if isinstance(objective, Objective):
        return objective
    if not isinstance(objective, str):
        raise ConfigError(
            f"objective must be a name ({', '.join(names())}) or an instance of come.Objective, got {shown(objective)}"
        )
    name, changes = parse(objective)
    found = _registry.get(name)
    known: set[str] = {f.name for f in fields(found)} if is_dataclass(found) else set()
    for key in changes:
        if key not in known:
            raise unknown(f"argument of the objective {name}", key, known)
    try:
        return replace(found, **changes) if changes else found  # type: ignore[type-var]
    except TypeError as error:
        raise ConfigError(f"objective {shown(objective)} has a value of the wrong type: {error}") from error


def register(name: str, objective: Objective) -> None:
    """Make `objective` available under `name`, here and on the command line.

    Example:
        >>> register("em-uc", Softmax(freeze_norm=True))
        >>> get("em-uc").freeze_norm
        True
        >>> _registry.remove("em-uc")
    """
    _registry.add(name, objective)
