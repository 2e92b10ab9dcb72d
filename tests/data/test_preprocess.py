"""One class for size, crop and normalization."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

import come
from come.bench.data import Preprocess
from come.images import normalization as images

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def test_normalization_is_that_of_the_library_bit_for_bit():
    x = torch.randint(0, 256, (4, 3, 16, 16), dtype=torch.uint8)
    mean, std = (torch.tensor(v).view(1, 3, 1, 1) for v in (MEAN, STD))
    preprocess = Preprocess(16, 16)
    assert torch.equal(preprocess(x), (x.float() / 255 - mean) / std)
    assert preprocess.normalization == (MEAN, STD)
    back = images.Normalization.of(preprocess.normalization).images(preprocess(x))
    assert torch.allclose(back, x / 255, atol=1e-6)


def test_the_constants_are_made_once_per_device():
    preprocess = Preprocess(4, 4, mean=(0.1, 0.2, 0.3))
    x = torch.zeros(1, 3, 4, 4, dtype=torch.uint8)
    preprocess(x)
    before = images._channels.cache_info().misses
    preprocess(x)
    assert images._channels.cache_info().misses == before


def test_pictures_become_squares():
    picture = Image.fromarray(np.arange(40 * 60, dtype=np.uint8).reshape(40, 60))
    square = Preprocess(32, 36, "bicubic").to_tensor(picture)
    large = picture.convert("RGB").resize((54, 36), Image.Resampling.BICUBIC)
    assert np.array_equal(square.permute(1, 2, 0).numpy(), np.array(large.crop((11, 2, 43, 34))))
    assert Preprocess(40, 99).square(picture).tobytes() == picture.crop((10, 0, 50, 40)).tobytes()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"size": 0}, "size must be an integer >= 1, got 0"),
        ({"resize": 2.5}, "resize must be an integer >= 1, got 2.5"),
        ({"interpolation": "bicbic"}, "no interpolation 'bicbic'; did you mean 'bicubic'"),
        ({"std": (0.2, 0.0, 0.2)}, "normalization must be .* got"),
        ({"mean": (0.2, float("nan"), 0.2)}, "normalization must be .* got"),
    ],
)
def test_what_makes_no_sense_is_refused(change, message):
    with pytest.raises(come.ConfigError, match=message):
        Preprocess(**change)
