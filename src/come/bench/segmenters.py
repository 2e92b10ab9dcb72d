"""The embedded networks for segmentation: a U-Net with BatchNorm, and a SegFormer with LayerNorm (Xie et al., NeurIPS 2021)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def build_segmenter(kind: str, arguments: dict[str, Any]) -> nn.Module:
    """An untrained network, (B, 3, H, W) normalized -> (B, K, H, W), or half of that size for a SegFormer.

    Args:
        kind: "unet" or "segformer".
        arguments: of its constructor.

    Example:
        >>> net = build_segmenter("segformer", {"classes": 9, "widths": [8, 16, 16]})
        >>> net(torch.zeros(1, 3, 64, 64)).shape
        torch.Size([1, 9, 32, 32])
    """
    return SEGMENTERS[kind](**arguments)


def _convolved(inside: int, outside: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inside, outside, 3, stride, 1, bias=False), nn.BatchNorm2d(outside), nn.ReLU(inplace=True)
    )


class UNet(nn.Module):
    """Down by halves and up again; on the way up each level adds what the way down found there."""

    def __init__(self, classes: int, widths: Sequence[int]) -> None:
        super().__init__()
        pairs = list(pairwise(widths))
        self.stem = nn.Sequential(_convolved(3, widths[0]), _convolved(widths[0], widths[0]))
        self.down = nn.ModuleList(nn.Sequential(_convolved(a, b, 2), _convolved(b, b)) for a, b in pairs)
        self.across = nn.ModuleList(nn.Conv2d(b, a, 1) for a, b in pairs[::-1])
        self.up = nn.ModuleList(_convolved(a, a) for a, _ in pairs[::-1])
        self.head = nn.Conv2d(widths[0], classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of each pixel."""
        levels = [self.stem(x)]
        for down in self.down:
            levels.append(down(levels[-1]))
        x = levels.pop()
        for across, up in zip(self.across, self.up, strict=True):
            level = levels.pop()
            x = up(level + F.interpolate(across(x), level.shape[2:], mode="bilinear"))
        logits: Tensor = self.head(x)
        return logits


class _Block(nn.Module):
    """Attention to a reduced grid, and a perceptron with a depthwise convolution in it, (B, H, W, C) -> the same."""

    def __init__(self, width: int, reduction: int, heads: int = 2) -> None:
        super().__init__()
        self.heads, self.reduction = heads, reduction
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key_value, self.out = (nn.Linear(width, outside) for outside in (width, 2 * width, width))
        self.grow, self.shrink = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.mix = nn.Conv2d(4 * width, 4 * width, 3, 1, 1, groups=4 * width)

    def forward(self, x: Tensor) -> Tensor:
        b, h, w, c = x.shape
        inside = self.norm1(x)
        coarse = F.avg_pool2d(inside.permute(0, 3, 1, 2), self.reduction).flatten(2).mT
        q = self.query(inside).reshape(b, h * w, self.heads, -1).transpose(1, 2)
        k, v = self.key_value(coarse).reshape(b, coarse.shape[1], 2, self.heads, -1).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, h, w, c))
        wide = self.mix(self.grow(self.norm2(x)).permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
        x = x + self.shrink(F.gelu(wide))
        return x


class SegFormer(nn.Module):
    """Three levels, at a half, a quarter and an eighth of the image; all of them together at the size of the first."""

    def __init__(self, classes: int, widths: Sequence[int], depth: int = 2) -> None:
        super().__init__()
        before = (3, *widths)
        self.patches = nn.ModuleList(nn.Conv2d(a, b, 3, 2, 1) for a, b in zip(before, widths, strict=False))
        self.start = nn.ModuleList(nn.LayerNorm(width) for width in widths)
        self.blocks = nn.ModuleList(
            nn.Sequential(*(_Block(width, 2 ** (2 - i)) for _ in range(depth))) for i, width in enumerate(widths)
        )
        self.norm = nn.ModuleList(nn.LayerNorm(width) for width in widths)
        self.level = nn.ModuleList(nn.Linear(width, widths[1]) for width in widths)
        self.fuse, self.fused = nn.Linear(len(widths) * widths[1], widths[1]), nn.LayerNorm(widths[1])
        self.head = nn.Linear(widths[1], classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits at half of the image's size."""
        found: list[Tensor] = []
        for patches, start, blocks, norm, level in zip(
            self.patches, self.start, self.blocks, self.norm, self.level, strict=True
        ):
            tokens = norm(blocks(start(patches(x).permute(0, 2, 3, 1))))
            x = tokens.permute(0, 3, 1, 2)
            at_level = level(tokens).permute(0, 3, 1, 2)
            found.append(F.interpolate(at_level, found[0].shape[2:], mode="bilinear") if found else at_level)
        together = torch.cat(found, dim=1).permute(0, 2, 3, 1)
        logits: Tensor = self.head(F.gelu(self.fused(self.fuse(together))))
        return logits.permute(0, 3, 1, 2)


SEGMENTERS: dict[str, Callable[..., nn.Module]] = {"unet": UNet, "segformer": SegFormer}
