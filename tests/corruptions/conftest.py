"""Shared inputs of the corruption tests."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def reference() -> dict[str, Tensor]:
    """Recorded clean images and outputs of `imagecorruptions`, uint8 (N, 3, H, W)."""
    stored = load_file(HERE / "reference.safetensors")
    return {key: value.permute(0, 3, 1, 2).contiguous() for key, value in stored.items()}


def picture(batch: int = 2, height: int = 64, width: int = 64) -> Tensor:
    """Colour waves with a square and a little grain, uint8 (B, 3, H, W); differs from image to image."""
    generator = torch.Generator().manual_seed(7)
    y = torch.linspace(0, 1, height).view(-1, 1)
    x = torch.linspace(0, 1, width)
    out = []
    for _ in range(batch):
        a = torch.rand(3, 4, 1, 1, generator=generator)
        image = 0.5 + 0.35 * torch.sin(14 * a[:, 0] * x + 14 * a[:, 1] * y + 6 * a[:, 2])
        image[:, height // 4 : height // 2, width // 4 : width // 2] = a[:, 3]
        out.append(image + 0.02 * torch.randn(3, height, width, generator=generator))
    return (torch.stack(out).clamp(0, 1) * 255).to(torch.uint8)


@pytest.fixture
def images() -> Tensor:
    """Two test pictures of 64 pixels."""
    return picture()
