"""CLIP and SigLIP models of transformers as zero-shot classifiers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from come.errors import ModelError
from come.zero_shot import TEMPLATES, Template, ZeroShot, embedding, of_pair


class Tower(nn.Module):
    """The image tower of a CLIP or SigLIP model of transformers, with its projection: pixel values -> embeddings (B, d)."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        parts: Any = model
        self.vision_model = parts.vision_model
        self.visual_projection = getattr(model, "visual_projection", nn.Identity())

    def forward(self, pixel_values: Tensor) -> Tensor:
        """Embed a batch."""
        found: Tensor = self.visual_projection(self.vision_model(pixel_values=pixel_values).pooler_output)
        return found


def zero_shot(
    model: nn.Module, tokenizer: Any, classes: Sequence[str], templates: Sequence[Template] = TEMPLATES
) -> ZeroShot:
    """A classifier from a CLIP or SigLIP model of transformers and class names.

    Args:
        model: a `CLIPModel`, `SiglipModel` or another with a `vision_model`, `get_text_features` and a `logit_scale`.
        tokenizer: its tokenizer, or its processor.
        classes: a name for each class, in the order of the labels.
        templates: sentences with {} in place of the name; their embeddings are averaged.

    Example:
        >>> from transformers import AutoTokenizer, CLIPModel
        >>> name = "openai/clip-vit-base-patch16"
        >>> model = CLIPModel.from_pretrained(name)  # doctest: +SKIP
        >>> classifier = zero_shot(model, AutoTokenizer.from_pretrained(name), ["cat", "dog"])  # doctest: +SKIP
    """
    both: Any = model
    missing = [name for name in ("vision_model", "get_text_features", "logit_scale") if not hasattr(model, name)]
    if missing:
        raise ModelError(
            f"{type(model).__name__} has no {missing[0]}; load a CLIPModel or SiglipModel, or use come.zero_shot.ZeroShot"
        )
    device = next(model.parameters()).device

    def encode(sentences: list[str]) -> Tensor:
        # padded as SigLIP was trained
        given = tokenizer(text=sentences, padding="max_length", truncation=True, return_tensors="pt")
        return embedding(both.get_text_features(**{name: value.to(device) for name, value in given.items()}))

    return of_pair(model, Tower(model), encode, classes, templates)
