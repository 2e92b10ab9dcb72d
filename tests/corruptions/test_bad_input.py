"""Every wrong argument is answered by an error that names the value, the limit and a repair."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from come.corruptions import corrupt, jpeg_backend, names

GOOD = torch.zeros(2, 3, 16, 16, dtype=torch.uint8)


def floats(value: float) -> torch.Tensor:
    images = torch.full((1, 3, 16, 16), 0.5)
    images[0, 0, 3, 3] = value
    return images


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            {"name": "gausian_noise"},
            ValueError,
            r"no corruption 'gausian_noise'; did you mean 'gaussian_noise'",
        ),
        ({"name": "zzz"}, ValueError, r"no corruption 'zzz'. Known: brightness, "),
        ({"name": 3}, TypeError, r"name must be a string, .*names\(\), got a int"),
        ({"severity": 0}, ValueError, r"severity must be from 1 to 5, got 0"),
        ({"severity": 6}, ValueError, r"severity must be from 1 to 5, got 6"),
        ({"severity": 2.5}, TypeError, r"severity must be .*, got 2\.5 \(float\)"),
        ({"severity": True}, TypeError, r"severity must be .*, got True \(bool\)"),
        ({"seed": 1.5}, TypeError, r"seed must be an int, got 1\.5 \(float\)"),
        ({"seed": None}, TypeError, r"seed must be an int, got None"),
        ({"table": "imagnet"}, ValueError, r"no table of parameters 'imagnet'; did you mean 'imagenet'"),
        ({"images": [1, 2]}, TypeError, r"images must be .*, got a list: .*torch\.as_tensor"),
        ({"images": GOOD.int()}, TypeError, r"images must be uint8 .*, got torch\.int32"),
        ({"images": GOOD[0]}, ValueError, r"must have 4 axes, .* got shape \(3, 16, 16\): .*unsqueeze"),
        ({"images": GOOD[0, 0]}, ValueError, r"must have 4 axes, .* got shape \(16, 16\)"),
        ({"images": GOOD[:, :1]}, ValueError, r"must have 3 channels, .*\(2, 1, 16, 16\): .*expand"),
        ({"images": GOOD.permute(0, 2, 3, 1)}, ValueError, r"must have 3 channels.*permute\(0, 3, 1, 2\)"),
        ({"images": torch.zeros(1, 4, 16, 16)}, ValueError, r"must have 3 channels"),
        ({"images": GOOD[:0]}, ValueError, r"at least 1 image"),
        ({"images": GOOD[..., :4]}, ValueError, r"at least 8 pixels"),
        ({"images": floats(float("nan"))}, ValueError, r"NaN.*nan_to_num"),
        ({"images": floats(float("inf"))}, ValueError, r"got 0\.5 to inf"),
        ({"images": floats(1.01)}, ValueError, r"must be in \[0, 1\], got 0\.5 to 1\.01"),
        ({"images": floats(-0.5)}, ValueError, r"got -0\.5 to 0\.5.*normalization"),
        ({"images": floats(200.0)}, ValueError, r"divide by 255"),
        ({"index": torch.arange(3)}, ValueError, r"index must have shape \(2,\), .* got \(3,\)"),
        ({"index": torch.zeros(2, 1).long()}, ValueError, r"index must have shape \(2,\), .* got \(2, 1\)"),
        ({"index": torch.zeros(2)}, TypeError, r"index must have .* got torch\.float32.*index\.long\(\)"),
        ({"index": [0, 1]}, TypeError, r"index must be .* got a list: .*torch\.tensor"),
    ],
)
def test_errors(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        corrupt(**{"images": GOOD, "name": "fog", **arguments})


def test_unknown_group_and_backend() -> None:
    with pytest.raises(ValueError, match=r"no group of corruptions 'wether'; did you mean 'weather'"):
        names("wether")
    with pytest.raises(ValueError, match=r"JPEG backend must be .* got 'turbo'"), jpeg_backend("turbo"):
        pass
