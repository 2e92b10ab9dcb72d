"""Models of open_clip as zero-shot classifiers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from come.errors import ConfigError, missing, shown

TEMPLATES = ("a photo of a {}.",)


class ZeroShot(nn.Module):
    r"""Classifies images by the nearest class text: :math:`z_k = \tau \cos(f(x), t_k)`.

    The scaled texts are a linear layer, `head`, so that methods that look for one find it. Norm layers of the image tower
    adapt; the text tower is not part of the model.

    Args:
        visual: the image tower, (B, 3, H, W) -> (B, d).
        texts: (K, d), a unit vector for each class.
        scale: tau, the model's own.

    Example:
        >>> model = ZeroShot(nn.Flatten(), F.normalize(torch.randn(5, 12), dim=1), 100.0)
        >>> model(torch.randn(2, 3, 2, 2)).shape
        torch.Size([2, 5])
    """

    def __init__(self, visual: nn.Module, texts: Tensor, scale: float) -> None:
        super().__init__()
        self.visual = visual
        self.head = nn.Linear(texts.shape[1], texts.shape[0], bias=False)
        self.head.weight = nn.Parameter(texts.detach() * scale)

    def forward(self, images: Tensor) -> Tensor:
        """(B, 3, H, W) -> logits (B, K)."""
        found = self.visual(images)
        features = found[0] if isinstance(found, tuple) else found  # CoCa's tower returns tokens, too
        logits: Tensor = self.head(F.normalize(features, dim=-1))
        return logits


def zero_shot(
    model: nn.Module, tokenizer: Any, classes: Sequence[str], templates: Sequence[str] = TEMPLATES
) -> ZeroShot:
    """A classifier from an open_clip model and class names.

    Args:
        model: of `open_clip.create_model`.
        tokenizer: of `open_clip.get_tokenizer`.
        classes: a name for each class, in the order of the labels.
        templates: sentences with {} in place of the name; their embeddings are averaged.

    Example:
        >>> import open_clip
        >>> model = open_clip.create_model("ViT-S-32-alt")  # doctest: +SKIP
        >>> classifier = zero_shot(model, open_clip.get_tokenizer("ViT-S-32-alt"), ["cat", "dog"])  # doctest: +SKIP
    """
    try:
        from open_clip import build_zero_shot_classifier
    except ModuleNotFoundError as error:
        raise missing("zero_shot", error, "clip") from error
    if isinstance(classes, str) or len(classes) < 2:
        raise ConfigError(f"classes must be 2 or more names, got {shown(classes)}")
    if isinstance(templates, str) or not templates or not all("{}" in template for template in templates):
        raise ConfigError(f"templates must be sentences with {{}} in place of the name, got {shown(templates)}")
    with torch.no_grad():
        device = next(model.parameters()).device
        texts = build_zero_shot_classifier(
            model, tokenizer, classes, [template.format for template in templates], device=device
        )
        scale = float(model.logit_scale.exp())  # type: ignore[operator]
    return ZeroShot(model.visual, texts.T, scale)  # type: ignore[arg-type]
