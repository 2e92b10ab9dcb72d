"""The tiny models that methods are checked on, one for each kind of normalization, and batches for them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

CLASSES = 5
SHAPE = (3, 8, 8)


class TinyClassifier(nn.Module):
    """Four small convolution blocks with one kind of normalization, dropout included, (B, 3, 8, 8) -> (B, 5).

    Args:
        norm: makes a normalization layer for a number of channels.
        seed: of the weights; torch's global generator is left alone.

    Example:
        >>> TinyClassifier(nn.BatchNorm2d)(torch.randn(2, 3, 8, 8)).shape
        torch.Size([2, 5])
    """

    def __init__(self, norm: Callable[[int], nn.Module], seed: int = 0) -> None:
        super().__init__()
        widths = (3, 8, 8, 8, 8)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.blocks = nn.Sequential(
                *(
                    nn.Sequential(nn.Conv2d(a, b, 3, padding=1), norm(b), nn.SiLU(), nn.Dropout(0.5))
                    for a, b in pairwise(widths)
                )
            )
            self.head = nn.Linear(4 * widths[-1], CLASSES)
        _settle(self, self.head, TinyClassifier.forward)

    def forward(self, x: Tensor) -> Tensor:
        """Classify."""
        logits: Tensor = self.head(nn.functional.adaptive_avg_pool2d(self.blocks(x), 2).flatten(1))
        return logits


class TinyTransformer(nn.Module):
    """Four small attention blocks with one kind of normalization and a class token, (B, 3, 8, 8) -> (B, 5).

    Args:
        norm: makes a normalization layer for a number of channels, as for `TinyClassifier`.
        seed: of the weights; torch's global generator is left alone.

    Example:
        >>> TinyTransformer(nn.BatchNorm2d)(torch.randn(2, 3, 8, 8)).shape
        torch.Size([2, 5])
    """

    def __init__(self, norm: Callable[[int], nn.Module], seed: int = 0) -> None:
        super().__init__()
        width = 8
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.embedding = nn.Conv2d(3, width, 2, stride=2)
            self.class_token = nn.Parameter(torch.randn(1, 1, width))
            self.position = nn.Parameter(torch.randn(1, 17, width) * 0.2)
            self.blocks = nn.Sequential(*(_Block(width, norm) for _ in range(4)))
            self.norm = _for_tokens(norm(width))
            self.head = nn.Linear(width, CLASSES)
        _settle(self, self.head, TinyTransformer.forward)

    def forward(self, x: Tensor) -> Tensor:
        """Classify by the class token."""
        tokens = self.embedding(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.class_token.expand(len(x), -1, -1), tokens], dim=1) + self.position
        logits: Tensor = self.head(self.norm(self.blocks(tokens))[:, 0])
        return logits


@torch.no_grad()
def _settle(model: nn.Module, head: nn.Linear, forward: Callable[[Any, Tensor], Tensor]) -> None:
    """Stand in for training: set running statistics to those of data, and scale the logits so that samples differ.

    Logits get a standard deviation of 3: by every usual margin some samples are reliable and some are not.
    """
    model.eval()
    momenta = {m: m.momentum for m in model.modules() if isinstance(m, nn.BatchNorm2d)}
    for layer in momenta:
        layer.train()
        layer.momentum = 1.0
    logits = forward(model, torch.cat(batches(2, seed=1)))
    for layer, momentum in momenta.items():
        layer.momentum = momentum
    scale = 3.0 / logits.std(dim=0)
    head.bias.sub_(logits.mean(dim=0)).mul_(scale)
    head.weight.mul_(scale[:, None])
    model.train()


class _Block(nn.Module):
    def __init__(self, width: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.norm = _for_tokens(norm(width))
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Sequential(nn.Linear(width, width), nn.Dropout(0.5))

    def forward(self, tokens: Tensor) -> Tensor:
        q, k, v = self.mix(self.norm(tokens)).chunk(3, dim=-1)
        mixed: Tensor = self.out(nn.functional.scaled_dot_product_attention(q, k, v))
        return tokens + mixed


def _for_tokens(layer: nn.Module) -> nn.Module:
    """Make a normalization of channels-first images take and return tokens (B, N, d)."""
    layer.register_forward_pre_hook(_tokens_in)
    layer.register_forward_hook(_tokens_out)
    return layer


def _tokens_in(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (inputs[0].transpose(1, 2)[..., None],)


def _tokens_out(_: nn.Module, inputs: tuple[Tensor, ...], out: Tensor) -> Tensor:
    return out[..., 0].transpose(1, 2)


class _ChannelsLayerNorm(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.movedim(1, -1)).movedim(-1, 1)


NORMS: dict[str, Callable[[int], nn.Module]] = {
    "batch": nn.BatchNorm2d,
    "group": lambda channels: nn.GroupNorm(2, channels),
    "layer": _ChannelsLayerNorm,
    "instance": lambda channels: nn.InstanceNorm2d(channels, affine=True),
}
"""The kinds of normalization that every method is checked with."""


def batches(count: int = 3, size: int = 12, seed: int = 0) -> list[Tensor]:
    """Reproducible batches (size, 3, 8, 8) for the tiny models: four patches with some noise, so that shape matters.

    Example:
        >>> [tuple(x.shape) for x in batches(2, size=4)]
        [(4, 3, 8, 8), (4, 3, 8, 8)]
    """
    generator = torch.Generator().manual_seed(seed)
    c, h, w = SHAPE
    made = []
    for _ in range(count):
        patches = torch.randn(size, c, 2, 2, generator=generator)
        noise = torch.randn(size, c, h, w, generator=generator)
        made.append(1.2 * patches.repeat_interleave(h // 2, 2).repeat_interleave(w // 2, 3) + 0.8 * noise + 0.5)
    return made
