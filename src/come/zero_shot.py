r"""Zero-shot classifiers: an image belongs to the class whose text embedding is the nearest.

.. math:: z_k = \tau \cos(f(x), t_k) + b

f is the image tower, t_k the prototype of class k: the averaged embedding of sentences with its name. Prototypes are computed
once, so the text tower is not part of the classifier. tau is the logit scale that the network has learned, b SigLIP's bias.

Norm layers of the image tower adapt; with `select="head"` the prototypes do, and stay unit vectors. Use an objective that does
not depend on the constant in the logits: "invariant", which is the default of `come.adapt`. See docs/zeroshot.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from come.errors import ConfigError, InputError, require, shown

TEMPLATES = ("a photo of a {}.",)

Template = str | Callable[[str], str]
"""A sentence with {} in place of the name of a class, or a function from the name to a sentence."""


class Prototypes(nn.Linear):
    r"""The cosine of features with one vector for each class, times their length: :math:`z_k = v \cdot w_k / |w_k| + b_k`.

    A linear layer whose rows count by their direction alone.

    Args:
        vectors: (K, d).
        bias: added to all logits; 0 makes a layer without a bias.

    Example:
        >>> Prototypes(torch.eye(2) * 7)(torch.tensor([[3.0, 4.0]])).detach()
        tensor([[3., 4.]])
    """

    def __init__(self, vectors: Tensor, bias: float = 0.0) -> None:
        super().__init__(vectors.shape[1], vectors.shape[0], bias=bool(bias), device="meta")
        self.weight = nn.Parameter(F.normalize(vectors.detach(), dim=1))
        if bias:
            self.bias = nn.Parameter(vectors.new_full((len(vectors),), bias))

    def forward(self, features: Tensor) -> Tensor:
        """(B, d) -> (B, K)."""
        return F.linear(features, F.normalize(self.weight, dim=1), self.bias)


class ZeroShot(nn.Module):
    r"""An image tower and the prototypes of its classes: :math:`z_k = \tau \cos(f(x), t_k) + b`, (B, ...) -> (B, K).

    Args:
        visual: the image tower, images -> embeddings (B, d); a tuple is read for its first entry, another object for its
            `image_embeds` or `pooler_output`.
        texts: (K, d), the prototypes; see `prototypes`.
        scale: tau, the network's own, > 0: `exp(logit_scale)` in the weights of CLIP and SigLIP.
        bias: b, the network's own: `logit_bias` of SigLIP, 0 for CLIP.

    Example:
        >>> import come
        >>> tower = nn.Sequential(nn.Flatten(), nn.Linear(12, 6), nn.LayerNorm(6))
        >>> model = ZeroShot(tower, torch.randn(5, 6), scale=100.0)
        >>> model(torch.randn(2, 3, 2, 2)).shape
        torch.Size([2, 5])
        >>> list(come.adapt(model).adapted_parameters), list(come.adapt(model, select="head").adapted_parameters)
        (['visual.2.weight', 'visual.2.bias'], ['head.weight'])
    """

    def __init__(self, visual: nn.Module, texts: Tensor, scale: float, bias: float = 0.0) -> None:
        super().__init__()
        if texts.ndim != 2 or len(texts) < 2:
            raise InputError(f"texts must be a vector for each of 2 or more classes, (K, d), got {tuple(texts.shape)}")
        require(0 < scale < float("inf"), "scale", scale, "a positive number: exp(logit_scale) of the weights")
        self.visual, self.scale = visual, scale
        self.head = Prototypes(texts, bias)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Logits (B, K) of what the image tower takes."""
        features = embedding(self.visual(*args, **kwargs))
        logits: Tensor = self.head(self.scale * F.normalize(features, dim=-1))
        return logits


@torch.no_grad()
def prototypes(
    encode: Callable[[list[str]], Tensor], classes: Sequence[str], templates: Sequence[Template] = TEMPLATES
) -> Tensor:
    """One unit vector for each class, (K, d): the mean of the unit embeddings of its sentences, made a unit vector again.

    Args:
        encode: sentences -> embeddings (N, d), of any length; called once for each class.
        classes: a name for each class, in the order of the labels.
        templates: sentences with {} in place of the name, or functions from the name to a sentence.

    Example:
        >>> letters = lambda sentences: torch.tensor([[float(s.count(c)) for c in "abcdefgh"] for s in sentences])
        >>> prototypes(letters, ["cat", "dog"]).shape
        torch.Size([2, 8])
    """
    if isinstance(classes, str) or len(classes) < 2:
        raise ConfigError(f"classes must be 2 or more names, got {shown(classes)}")
    usable = not isinstance(templates, str) and bool(templates)
    if not usable or not all(callable(one) or (isinstance(one, str) and "{}" in one) for one in templates):
        raise ConfigError(f"templates must be sentences with {{}} in place of the name, got {shown(templates)}")
    found = []
    for name in classes:
        sentences = [one.format(name) if isinstance(one, str) else one(name) for one in templates]
        vectors = encode(sentences)
        found.append(F.normalize(vectors.float(), dim=-1).mean(dim=0))
    return F.normalize(torch.stack(found), dim=-1).to(vectors)


def of_pair(
    model: nn.Module,
    visual: nn.Module,
    encode: Callable[[list[str]], Tensor],
    classes: Sequence[str],
    templates: Sequence[Template],
) -> ZeroShot:
    """The classifier of a CLIP or SigLIP `model`, which holds the learned `logit_scale` and, of SigLIP, `logit_bias`."""
    bias, learned = getattr(model, "logit_bias", None), cast("Tensor", model.logit_scale)
    scale = float(learned.detach().exp())
    return ZeroShot(
        visual, prototypes(encode, classes, templates), scale, 0.0 if bias is None else float(bias.detach())
    )


def embedding(found: Any) -> Tensor:
    """The embeddings (B, d) in what a tower returns."""
    if isinstance(found, tuple):
        found = found[0]  # CoCa's tower returns tokens, too
    for name in ("image_embeds", "pooler_output"):
        if not isinstance(found, Tensor) and isinstance(getattr(found, name, None), Tensor):
            found = getattr(found, name)
    if not isinstance(found, Tensor):
        raise InputError(
            f"a tower must return embeddings (B, d), got {type(found).__name__}; wrap it in a module that does"
        )
    return found
