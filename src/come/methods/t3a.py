"""T3A: prototypes of the features seen so far.

Iwasawa and Matsuo, "Test-Time Classifier Adjustment Module for Model-Agnostic Domain Generalization", NeurIPS 2021.

    supports   of class k: rows of the classifier and features of the stream that it assigns to k
    kept       the M of them with the lowest entropy
    prototype  c_k = normalized sum of the normalized supports
    logits     f(x) . c_k                                          0 for a class without support

Adapts the classifier, through prototypes; no parameter of the model changes. Needs features: a model whose logits come from
one linear layer. One forward per batch, BatchNorm on its source statistics. The objective is not used. Memory: K x M features;
with M = None ("keep all") only their sum, K features, because then nothing is ever removed.

Deviation from the published code: its "keep all" drops one support of each class in each batch; ours keeps all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from come.errors import require_int
from come.method import Context, Frozen, Method, Step, register
from come.model.heads import Head
from come.model.inputs import Inputs, at_least_float32
from come.objectives import Softmax
from come.select import Selector, nothing

EMPTY = 1e9  # entropy of a missing support: larger than any


@register
@dataclass(kw_only=True, eq=False)
class T3A(Method):
    """Test-time templates.

    Args:
        supports: M, how many supports each class keeps, at least 1; None keeps all.
        head: the linear layer that gives the logits, or its name; None finds it.

    Example:
        >>> import come
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
        >>> classifier = come.adapt(model, T3A(supports=2))
        >>> classifier(torch.randn(10, 4)).shape
        torch.Size([10, 3])
        >>> classifier.state["entropy"].shape  # a place for each class and support; 1e9 where it is empty
        torch.Size([3, 2])
    """

    name = "t3a"
    vectors_only = "its prototypes are of whole samples"
    needs = "features"
    cost = "1f"
    descends = False
    minimizes = False
    batch_statistics = False
    select: Selector = nothing()
    supports: int | None = 20
    head: str | nn.Module | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.supports is not None:
            require_int("supports", self.supports, 1, ", or None to keep all")

    def setup(self, ctx: Context) -> dict[str, Any]:
        """The layer whose input is compared with prototypes."""
        return {"head": Head(ctx.model.model, self.head)}

    def initial_state(self, ctx: Context, x: Inputs) -> dict[str, Tensor]:
        """The rows of the classifier as the first supports."""
        linear: nn.Linear = ctx.fixed["head"].linear
        rows = at_least_float32(linear.weight.detach())
        classes, width = rows.shape
        if self.supports is None:
            empty = {"sum": rows.new_zeros(classes, width)}
        else:
            empty = {
                "support": rows.new_zeros(classes, self.supports, width),
                "entropy": torch.full((classes, self.supports), EMPTY, device=rows.device),
            }
        logits = F.linear(rows, rows, None if linear.bias is None else at_least_float32(linear.bias.detach()))
        return self._with(empty, rows, logits, torch.ones_like(rows[:, 0], dtype=torch.bool))

    def predict(self, ctx: Context, x: Inputs) -> Tensor:
        """Classify by the prototypes."""
        features, logits = ctx.features(x)
        return self._classified(ctx, features).to(logits)

    def frozen(self, ctx: Context) -> Frozen:
        """The prototypes as a linear layer."""
        state = ctx.state or self.initial_state(ctx, Inputs((), {}))  # which depends on no batch
        return Frozen(ctx.weights.detach(), head=(ctx.fixed["head"].name, self._prototypes(state)))

    @torch.no_grad()
    def adapt(self, ctx: Context, x: Inputs) -> Step:
        """Add the batch to the supports, then classify it by the prototypes."""
        features, logits = ctx.features(x)
        ctx.state |= self._with(ctx.state, features, logits, ctx.valid)
        return Step(self._classified(ctx, features).to(logits))

    def _classified(self, ctx: Context, features: Tensor) -> Tensor:
        return at_least_float32(features) @ self._prototypes(ctx.state).to(at_least_float32(features)).T

    def _prototypes(self, state: dict[str, Tensor]) -> Tensor:
        total = state["sum"] if self.supports is None else F.normalize(state["support"], dim=2).sum(dim=1)
        return F.normalize(total, dim=1)

    def _with(self, state: dict[str, Tensor], features: Tensor, logits: Tensor, valid: Tensor) -> dict[str, Tensor]:
        """`state` with the valid samples of these features and logits added."""
        label, entropy = logits.argmax(dim=1), Softmax().entropy(logits)
        if self.supports is None:
            total = state["sum"]
            new = torch.where(valid[:, None], F.normalize(at_least_float32(features), dim=1), 0)
            return {"sum": total.index_add(0, label, new.to(total))}
        kept, least = lowest(state["entropy"], label, torch.where(valid, entropy, EMPTY))
        support = torch.cat([state["support"].flatten(0, 1), features.to(state["support"])])
        return {"support": support[kept].view_as(state["support"]), "entropy": least}


def lowest(old: Tensor, label: Tensor, entropy: Tensor) -> tuple[Tensor, Tensor]:
    """Which M entries of each class have the lowest entropy, of those that a memory holds and those of a batch.

    Args:
        old: (K, M), the entropies of the entries in memory, `EMPTY` where there is none.
        label: (B,), the classes of the new ones.
        entropy: (B,), their entropies, `EMPTY` for one that must not enter.

    Returns:
        places (K * M,) among the K * M old ones and the B new ones behind them, and the entropies (K, M) there; a place that
        holds `EMPTY` holds nothing.

    Example:
        >>> old = torch.tensor([[0.5, EMPTY], [EMPTY, EMPTY]])
        >>> lowest(old, torch.tensor([0, 0, 1]), torch.tensor([0.1, 0.9, 0.3]))[1]
        tensor([[1.0000e-01, 5.0000e-01],
                [3.0000e-01, 1.0000e+09]])
    """
    classes, size = old.shape
    # All entries in a row, by class and within a class by entropy; then the first M of each class take its places.
    entropy = torch.cat([old.flatten(), entropy.to(old)])
    owner = torch.cat([torch.arange(classes, device=label.device).repeat_interleave(size), label])
    order = entropy.argsort(stable=True)
    order = order[owner[order].argsort(stable=True)]
    owner, entropy = owner[order], entropy[order]
    rank = torch.arange(len(owner), device=owner.device) - torch.searchsorted(owner, owner)
    # Those that are not kept, the latest of equals first, go to one more place, which is dropped.
    place = torch.where(rank < size, owner * size + rank, classes * size)
    kept = torch.zeros(classes * size + 1, dtype=order.dtype, device=order.device).scatter(0, place, order)[:-1]
    least = entropy.new_full((classes * size + 1,), EMPTY).scatter(0, place, entropy)[:-1]
    return kept, least.view(classes, size)
