"""Models of open_clip (CLIP, SigLIP, CoCa and others) as zero-shot classifiers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from come.zero_shot import TEMPLATES, Template, ZeroShot, of_pair


def zero_shot(
    model: nn.Module, tokenizer: Any, classes: Sequence[str], templates: Sequence[Template] = TEMPLATES
) -> ZeroShot:
    """A classifier from an open_clip model and class names, with the model's logit scale and, of SigLIP, its bias.

    Args:
        model: of `open_clip.create_model`.
        tokenizer: of `open_clip.get_tokenizer`.
        classes: a name for each class, in the order of the labels.
        templates: sentences with {} in place of the name, or functions of it, such as `open_clip.OPENAI_IMAGENET_TEMPLATES`;
            their embeddings are averaged.

    Example:
        >>> import open_clip
        >>> model = open_clip.create_model("ViT-S-32-alt")  # doctest: +SKIP
        >>> classifier = zero_shot(model, open_clip.get_tokenizer("ViT-S-32-alt"), ["cat", "dog"])  # doctest: +SKIP
    """
    tower: Any = model
    device = next(model.parameters()).device

    def encode(sentences: list[str]) -> Tensor:
        found: Tensor = tower.encode_text(tokenizer(sentences).to(device))
        return found

    return of_pair(model, tower.visual, encode, classes, templates)
