"""The building blocks against slow, plain versions of themselves; JPEG against Pillow; the examples in the
docs."""

from __future__ import annotations

import doctest
import importlib
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from come.corruptions import blur, corrupt, digital, filters, jpeg_backend, tables, weather
from come.corruptions.draws import Draws
from come.corruptions.jpeg import jpeg_by_dct, jpeg_by_pillow, jpeg_round_trip, quantization_tables

from .conftest import picture


@pytest.mark.parametrize(
    "module",
    ["", ".tables", ".draws", ".filters", ".noise", ".blur", ".weather", ".digital", ".jpeg", ".frosting"],
)
def test_examples_in_docstrings(module: str) -> None:
    result = doctest.testmod(importlib.import_module("come.corruptions" + module), extraglobs={"torch": torch})
    assert result.failed == 0
    assert result.attempted > 0


@pytest.mark.parametrize(("height", "width", "reach"), [(20, 24, 1), (33, 19, 2), (24, 24, 3), (30, 21, 4), (8, 8, 4)])
def test_glass_source_map_is_the_sequential_loop(height: int, width: int, reach: int) -> None:
    generator = torch.Generator().manual_seed(0)
    offsets = torch.randint(-reach, reach, (2, 2, height, width), generator=generator)
    made = blur.source_map(offsets, reach)
    for b in range(2):
        image = np.arange(height * width).reshape(height, width, 1).repeat(3, 2)
        for h in range(height - reach, reach, -1):
            for w in range(width - reach, reach, -1):
                dy, dx = offsets[b, :, h, w].tolist()
                image[h, w], image[h + dy, w + dx] = image[h + dy, w + dx], image[h, w]
        assert made[b].tolist() == image[..., 0].flatten().tolist()


@pytest.mark.parametrize("angle", [-45.0, -20.0, 0.0, 33.0, 45.0])
def test_motion_line_is_a_sum_of_shifts(angle: float) -> None:
    x = torch.rand(1, 3, 20, 30, generator=torch.Generator().manual_seed(0))
    radius, sigma = 6, 3.0
    side = math.sqrt(0.5)
    degrees = torch.tensor([angle], dtype=torch.float64)
    made = filters.motion_line(x, radius, sigma, degrees, (0.0, 1.0, side, side))
    weights = [math.exp(-0.5 * (i / sigma) ** 2) for i in range(2 * radius + 1)]
    wanted = torch.zeros_like(x)
    for i, weight in enumerate(weights):
        dy = math.ceil(i * math.sin(math.radians(angle)) - 0.5)
        dx = math.ceil(i * math.cos(math.radians(angle)) - 0.5)
        rows = (torch.arange(20) + dy).clamp(0, 19)
        cols = (torch.arange(30) + dx).clamp(0, 29)
        wanted += weight / sum(weights) * x[:, :, rows][..., cols]
    assert float((made - wanted).abs().max()) < 1e-5


def test_snow_reads_along_lines_from_above() -> None:
    x = torch.rand(1, 1, 24, 24, generator=torch.Generator().manual_seed(0))
    side = math.sqrt(0.5)
    for angle in (-135.0, -90.0, -45.0):
        degrees = torch.tensor([angle], dtype=torch.float64)
        narrow = filters.motion_line(x, 5, 4.0, degrees, (side, side, 1.0, 0.0))
        ample = filters.motion_line(x, 5, 4.0, degrees, (1.0, 1.0, 1.0, 1.0))
        assert float((narrow - ample).abs().max()) < 1e-5


@pytest.mark.parametrize(("radius", "antialias"), [(10, 0.5), (8, 0.5), (3, 0.1), (1.5, 0.1), (0.3, 0.4)])
@pytest.mark.parametrize("size", [(40, 33), (16, 16)])
def test_defocus_is_a_direct_convolution(radius: float, antialias: float, size: tuple[int, int]) -> None:
    x = torch.rand(2, 3, *size, generator=torch.Generator().manual_seed(0))
    kernel = blur.disk(radius, antialias).float()
    reach = kernel.shape[0] // 2
    wide = filters.extend(x, reach, reach, reach, reach, "reflect")
    wanted = F.conv2d(wide.flatten(0, 1).unsqueeze(1), kernel[None, None]).view_as(x)
    made = blur.defocus_blur(x, (radius, antialias), Draws(0, torch.arange(2), "defocus_blur", 1))
    assert float((made - wanted).abs().max()) < 1e-5


@pytest.mark.parametrize("mode", ["replicate", "reflect", "symmetric"])
def test_padding_follows_numpy(mode: str) -> None:
    x = torch.rand(1, 2, 5, 4, generator=torch.Generator().manual_seed(0))
    numpy_mode = {"replicate": "edge", "reflect": "reflect", "symmetric": "symmetric"}[mode]
    for width in (0, 2, 3, 9, 13):
        made = filters.extend(x, width, width + 1, width + 2, width, mode)
        wanted = np.pad(x.numpy(), ((0, 0), (0, 0), (width + 2, width), (width, width + 1)), mode=numpy_mode)
        assert np.array_equal(made.numpy(), wanted)


def test_plasma_is_in_range_and_rougher_with_less_decay() -> None:
    def roughness(decay: float) -> float:
        field = weather.plasma(Draws(0, torch.arange(8), "fog", 1), 64, decay)
        assert float(field.amin((1, 2)).max()) == 0.0
        assert abs(float(field.amax((1, 2)).min()) - 1.0) < 1e-6
        return float(field.diff(dim=2).abs().mean())

    assert roughness(1.4) > roughness(2.0) > roughness(3.0)


def test_brightness_and_saturation_follow_colorsys() -> None:
    import colorsys

    colours = torch.rand(60, 3, generator=torch.Generator().manual_seed(0))
    colours[:6] = torch.tensor([[0.0, 0, 0], [1, 1, 1], [0.5, 0.5, 0.5], [1, 0, 0], [0, 0, 0.3], [0.2, 0.2, 0.1]])
    x = colours.T.reshape(1, 3, 6, 10)
    draws = Draws(0, torch.arange(1), "saturate", 1)
    for factor, offset in ((0.3, 0.0), (2.0, 0.0), (5.0, 0.1), (20.0, 0.2)):
        made = digital.saturate(x.clone(), (factor, offset), draws).view(3, 60).T
        for rgb, got in zip(colours.tolist(), made.tolist(), strict=True):
            h, s, v = colorsys.rgb_to_hsv(*rgb)
            wanted = colorsys.hsv_to_rgb(h, min(max(s * factor + offset, 0.0), 1.0), v)
            assert max(abs(a - b) for a, b in zip(got, wanted, strict=True)) < 2e-3
    for amount in (0.05, 0.5):
        made = digital.brightness(x.clone(), amount, draws).view(3, 60).T
        for rgb, got in zip(colours.tolist(), made.tolist(), strict=True):
            h, s, v = colorsys.rgb_to_hsv(*rgb)
            wanted = colorsys.hsv_to_rgb(h, s, min(v + amount, 1.0))
            assert max(abs(a - b) for a, b in zip(got, wanted, strict=True)) < 2e-3


@pytest.mark.parametrize("share", [0.25, 0.3, 0.6, 0.65, 0.95])
def test_pixelate_follows_pillow(share: float) -> None:
    from PIL import Image

    for height, width in ((64, 64), (37, 50), (224, 224)):
        images = picture(1, height, width)
        plain = Image.fromarray(images[0].permute(1, 2, 0).contiguous().numpy())
        small = plain.resize((int(width * share), int(height * share)), Image.Resampling.BOX)
        wanted = np.asarray(small.resize((width, height), Image.Resampling.BOX)).astype(int)
        made = digital.pixelate(images, share, Draws(0, torch.arange(1), "pixelate", 1))
        gap = np.abs(made[0].permute(1, 2, 0).numpy().astype(int) - wanted)
        assert gap.max() <= 1
        assert gap.mean() < 0.35


@pytest.mark.parametrize("size", [(64, 64), (16, 16), (33, 47), (50, 24), (8, 9), (65, 80)])
@pytest.mark.parametrize("quality", [7, 25, 50, 80, 100])
def test_jpeg_by_torch_matches_pillow(size: tuple[int, int], quality: int) -> None:
    """Mean absolute difference well below 1/255: a few coefficients next to a tie fall the other way."""
    images = picture(2, *size)
    gap = (jpeg_by_dct(images, quality).int() - jpeg_by_pillow(images, quality).int()).abs().float()
    assert float(gap.mean()) < 0.4
    assert float((gap <= 1).float().mean()) > 0.9


def test_jpeg_tables_match_those_in_a_file() -> None:
    import io

    from PIL import Image

    for quality in (1, 7, 10, 25, 50, 75, 95, 100):
        with io.BytesIO() as file:
            Image.new("RGB", (8, 8)).save(file, "JPEG", quality=quality)
            with Image.open(file) as image:
                stored = image.quantization
        wanted = [sorted(stored[0]), sorted(stored[1])]
        assert [sorted(sum(table, ())) for table in quantization_tables(quality)] == wanted
    with pytest.raises(ValueError, match="1 to 100"):
        quantization_tables(0)


def test_jpeg_backend_is_forced_and_restored() -> None:
    images = picture(1, 33, 47)
    with jpeg_backend("dct"):
        assert torch.equal(jpeg_round_trip(images, 10), jpeg_by_dct(images, 10))
        with jpeg_backend("pillow"):
            assert torch.equal(jpeg_round_trip(images, 10), jpeg_by_pillow(images, 10))
        assert torch.equal(corrupt(images, "jpeg_compression", 3, table="imagenet"), jpeg_by_dct(images, 15))
    assert torch.equal(jpeg_round_trip(images, 10), jpeg_by_pillow(images, 10))


def test_every_table_has_five_rows_for_each_name() -> None:
    everything = {name for group in tables.GROUPS.values() for name in group}
    for table in tables.PARAMETERS.values():
        assert set(table) == everything
        assert all(len(rows) == 5 for rows in table.values())


def test_frost_textures_have_the_colours_of_the_photographs() -> None:
    from come.corruptions.frosting import _STYLES, frost_textures

    textures = frost_textures(480, 640, torch.device("cpu")).float()
    for texture, style in zip(textures, _STYLES, strict=True):
        assert torch.allclose(texture.mean((1, 2)), torch.tensor(style.mean), atol=3.0)
        assert torch.allclose(texture.std((1, 2)), torch.tensor(style.deviation), atol=3.0)
