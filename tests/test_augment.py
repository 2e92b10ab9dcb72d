"""Random views: the contract for both, the numbers of `jitter`, and the operations of `augmix` against Pillow."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from torch.utils._python_dispatch import TorchDispatchMode

from come.errors import ConfigError, InputError
from come.images import augment
from come.images.augment import OPERATIONS, augmix, jitter

VIEWS = {
    "jitter": jitter(),
    "soft": jitter(strength=0.5),
    "jitter at most": jitter(strength=2, noise=0.1),
    "augmix": augmix(),
    "augmix at most": augmix(severity=10, width=1, depth=5, alpha=0.3),
    "augmix, whole image": augmix(severity=3, width=2, depth=1, crop=(1.0, 1.0)),
}
every_view = pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS.keys())


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def noise(*shape, dtype=torch.float32):
    return torch.rand(shape, generator=seeded(7)).to(dtype)


def picture(height=64, width=64):
    """A smooth colour picture with an edge, (3, H, W) on 256 levels; its channels do not fill the range."""
    y, x = torch.linspace(0, 1, height).view(-1, 1), torch.linspace(0, 1, width)
    waves = [torch.sin(3 * x + 4 * y), torch.sin(5 * x - 2 * y), torch.cos(4 * x * y + 1)]
    image = 0.5 + 0.3 * torch.stack(waves)
    image[:, height // 4 : height // 2, width // 3 : width // 2] = 0.15
    return (image * 255).round() / 255


def to_pillow(image):
    return Image.fromarray((image * 255).round().to(torch.uint8).permute(1, 2, 0).numpy())


def levels_of(pillow):
    return torch.from_numpy(np.array(pillow)).permute(2, 0, 1).float()


def operate(image, name, level, sign=1.0):
    """One operation on one image, on 256 levels."""
    kind = torch.tensor([OPERATIONS.index(name)])
    made = augment._operate(image[None], kind, torch.tensor([level]), torch.tensor([sign]))
    return made[0] * 255


# --- what holds for every view -------------------------------------------------------------------------------------------


@every_view
@pytest.mark.parametrize(
    "shape",
    [(3, 32, 32), (5, 3, 32, 32), (2, 3, 1, 8, 8), (2, 2, 2, 3, 9, 13), (4, 1, 13, 9), (2, 2, 8, 8), (3, 3, 1, 1)],
    ids=str,
)
def test_shape_dtype_and_range(view, shape):
    images = noise(*shape)
    made = view(images, seeded())
    assert made.shape == images.shape
    assert made.dtype == images.dtype
    assert bool(((made >= 0) & (made <= 1)).all())


@every_view
def test_it_is_fixed_by_the_generator_and_by_nothing_else(view):
    images = noise(2, 3, 3, 16, 16)
    kept = images.clone()
    before = torch.get_rng_state()
    made = view(images, seeded(3))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(images, kept)
    torch.manual_seed(99)
    assert torch.equal(view(images, seeded(3)), made)
    assert not torch.equal(view(images, seeded(4)), made)
    generator = seeded(3)
    view(images, generator)
    assert not torch.equal(view(images, generator), made), "a second view from the same generator is another one"


@every_view
def test_every_image_has_its_own_numbers(view):
    image = picture(16, 16)
    made = view(image.expand(3, 4, 3, 16, 16), seeded()).flatten(0, 1)
    gap = (made[:, None] - made[None]).abs().flatten(2).amax(dim=-1)
    assert bool((gap + torch.eye(12) > 1e-4).all())


@every_view
def test_images_without_contrast_keep_to_the_range(view):
    for value in (0.0, 0.5, 1.0):
        made = view(torch.full((4, 3, 16, 16), value), seeded())
        assert bool(made.isfinite().all())
        assert bool(((made >= 0) & (made <= 1)).all())


@every_view
def test_precisions_see_the_same_view(view):
    images = picture(16, 16).expand(4, 3, 16, 16).bfloat16()
    exact = view(images.double(), seeded())
    assert exact.dtype == torch.float64
    # A pixel at the border of a level or of the image may fall to the other side.
    near = (view(images.float(), seeded()).double() - exact).abs() < 1e-4
    assert float(near.double().mean()) > 0.99
    for dtype in (torch.bfloat16, torch.float16):
        made = view(images.to(dtype), seeded())
        assert made.dtype == dtype
        assert torch.equal(made, view(images.float(), seeded()).to(dtype))


@every_view
def test_memory_is_new_and_layout_does_not_matter(view):
    images = picture(16, 12).expand(4, 3, 16, 12)
    made = view(images, seeded())
    made.zero_()  # an expanded input has one image in memory: none of it may be shared
    assert torch.equal(images[0], picture(16, 12))
    last = images.contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(view(last, seeded()), view(images, seeded()), atol=1e-5, rtol=0)


@every_view
def test_no_gradient_and_no_image(view):
    images = noise(2, 3, 8, 8).requires_grad_()
    assert not view(images, seeded()).requires_grad
    assert view(noise(4, 0, 3, 8, 8), seeded()).shape == (4, 0, 3, 8, 8)


@every_view
def test_a_broken_image_does_not_break_the_others(view):
    images = noise(3, 3, 16, 16)
    images[1, 0, 3, 4] = math.nan
    images[1, 1, 3, 4] = math.inf
    assert bool(view(images, seeded())[[0, 2]].isfinite().all())


@every_view
def test_under_autocast(view):
    images = noise(2, 3, 16, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        made = view(images, seeded())
    torch.testing.assert_close(made, view(images, seeded()), atol=1e-5, rtol=0)


# --- jitter --------------------------------------------------------------------------------------------------------------


def test_no_strength_no_change():
    images = noise(5, 3, 9, 13)
    still = jitter(strength=0, noise=0, flip=0)(images, seeded())
    assert torch.equal(still, images)
    assert still.data_ptr() != images.data_ptr()
    almost = jitter(strength=1e-6, noise=0, flip=0)(images, seeded())
    torch.testing.assert_close(almost, images, atol=1e-4, rtol=0)


@pytest.mark.parametrize("share", [0.5, 0.1, 1.0])
def test_share_of_flips(share):
    images = noise(3, 8, 8).expand(1000, 3, 8, 8)
    for view in (
        jitter(strength=0, noise=0, flip=share),
        augmix(crop=(1, 1), flip=share, width=1, depth=1, alpha=1e-6),
    ):
        made = view(images, seeded())
        if isinstance(view, augmix):  # at so small an alpha m is 0 or 1: keep the images that are not mixed
            made = made[_close(made, images) | _close(made, images.flip(-1))]
            assert len(made) > 400
        flipped = _close(made, images[: len(made)].flip(-1)).double().mean()
        assert abs(float(flipped) - share) < 0.07


def _close(a, b):
    return (a - b).abs().flatten(1).amax(dim=1) < 1e-5


def test_noise_has_its_deviation():
    images = torch.full((40, 3, 16, 16), 0.5)
    grain = jitter(strength=0, noise=0.02)(images, seeded()) - images
    assert abs(float(grain.mean())) < 1e-3
    assert abs(float(grain.std()) - 0.02) < 1e-3


def test_colours_on_flat_images():
    """On a flat grey image only brightness and gamma act: (0.5 b) ** g."""
    images = torch.full((3000, 3, 2, 2), 0.5)
    made = jitter(noise=0)(images, seeded())
    assert float(made.flatten(1).std(dim=1).max()) < 1e-5, "a flat grey image stays flat and grey"
    made = made[:, 0, 0, 0]
    assert (0.5 * 0.6) ** 1.3 - 1e-5 <= float(made.min()) < (0.5 * 0.65) ** 1.2
    assert (0.5 * 1.35) ** 0.8 < float(made.max()) <= (0.5 * 1.4) ** 0.7 + 1e-5
    assert abs(float(made.mean()) - 0.5) < 0.02


def test_hue_against_the_standard_library():
    from colorsys import hsv_to_rgb, rgb_to_hsv

    colours = torch.cat([noise(50, 3), torch.eye(3), 1 - torch.eye(3), torch.zeros(1, 3), torch.ones(1, 3)]).double()
    turn = (2 * noise(len(colours)) - 1).double()
    made = augment._turn_hue(colours.view(-1, 3, 1, 1), turn).view(-1, 3)
    for colour, t, got in zip(colours.tolist(), turn.tolist(), made.tolist(), strict=True):
        h, s, v = rgb_to_hsv(*colour)
        assert got == pytest.approx(hsv_to_rgb((h + t) % 1, s, v), abs=1e-9)


def test_contrast_and_saturation_keep_means():
    images = 0.3 + 0.4 * noise(6, 3, 8, 8)
    change = torch.zeros(5, 6)
    change[1] = -1.0
    flat = augment._recolour(images, change)
    mean = augment._grey(images).mean(dim=(1, 2, 3), keepdim=True)
    torch.testing.assert_close(flat, mean + 0.7 * (images - mean))
    change[1], change[2] = 0.0, -1.0
    pale = augment._recolour(images, change)
    torch.testing.assert_close(augment._grey(pale), augment._grey(images))
    torch.testing.assert_close(pale, 0.5 * images + 0.5 * augment._grey(images))


def test_moves_by_what_it_says():
    """A blob is found again where rotation, scale and shift, at their limits, put it; on an image that is not square."""
    height, width = 64, 96
    y = torch.arange(height).view(-1, 1) - (height - 1) / 2
    x = torch.arange(width) - (width - 1) / 2
    place = torch.tensor([20.0, 8.0])
    image = torch.exp(-((x - place[0]) ** 2 + (y - place[1]) ** 2) / 18)
    for turn, scale, right, down in ((1, 0, 0, 0), (-1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, -1), (1, -1, -1, 1)):
        change = torch.tensor([[turn], [scale], [right], [down]]).float()
        made = augment._move(image.expand(1, 1, height, width), change)[0, 0]
        angle = math.radians(15 * turn)
        rotation = torch.tensor([[math.cos(angle), math.sin(angle)], [-math.sin(angle), math.cos(angle)]])
        there = (1 + 0.1 * scale) * rotation @ place + torch.tensor([right * width / 8, down * height / 8])
        found = torch.stack([(made * x).sum(), (made * y).sum()]) / made.sum()
        torch.testing.assert_close(found, there, atol=0.1, rtol=0)


def test_beyond_the_edge_lies_the_edge():
    images = torch.ones(50, 3, 16, 16)
    assert float(augment._move(images, 2 * noise(4, 50) - 1).min()) > 1 - 1e-5


def test_blur_is_the_gaussian_of_five_pixels():
    impulse = torch.zeros(2, 1, 9, 9, dtype=torch.float64)
    impulse[:, 0, 4, 4] = 1
    sigma = torch.tensor([0.001, 0.5], dtype=torch.float64)
    made = augment._blur(impulse, sigma)
    assert torch.equal(made[0], impulse[0])
    taps = torch.exp(-0.5 * (torch.arange(-2, 3) / sigma[1]) ** 2)
    torch.testing.assert_close(made[1, 0, 2:7, 2:7], torch.outer(taps, taps) / taps.sum() ** 2)
    torch.testing.assert_close(augment._blur(torch.ones(2, 3, 8, 8), sigma.float()), torch.ones(2, 3, 8, 8))


def test_more_strength_more_change():
    images = picture(16, 16).expand(200, 3, 16, 16)
    change = [(jitter(strength=s, flip=0)(images, seeded()) - images).abs().mean() for s in (0.0, 0.25, 0.5, 1.0, 2.0)]
    assert change == sorted(change)
    assert change[0] < 0.006


# --- augmix --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(64, 64), (33, 50), (8, 8)])
def test_autocontrast_and_equalize_are_pillows(size):
    image = picture(*size)
    for name in ("autocontrast", "equalize"):
        gap = (operate(image, name, 1.0) - levels_of(getattr(ImageOps, name)(to_pillow(image)))).abs()
        assert float(gap.max()) < 1.01  # Pillow stretches in floating point and may fall just below a level
        assert float((gap > 0.01).float().mean()) < 0.05


def test_equalize_of_noise_and_of_few_levels():
    for image in (noise(3, 40, 40) ** 3, (noise(3, 40, 40) * 3).floor() / 3, torch.full((3, 20, 20), 0.3)):
        image = (image * 255).round() / 255
        for name in ("autocontrast", "equalize"):
            expected = levels_of(getattr(ImageOps, name)(to_pillow(image)))
            torch.testing.assert_close(operate(image, name, 1.0), expected, atol=1.01, rtol=0)


@pytest.mark.parametrize("level", [0.1, 1.0, 2.6, 5.1, 9.99])
def test_posterize_and_solarize_are_pillows(level):
    image = (noise(3, 20, 20) * 255).round() / 255
    expected = ImageOps.posterize(to_pillow(image), 4 - int(level * 4 / 10))
    torch.testing.assert_close(operate(image, "posterize", level), levels_of(expected), atol=1e-3, rtol=0)
    expected = ImageOps.solarize(to_pillow(image), 256 - int(level * 256 / 10))
    torch.testing.assert_close(operate(image, "solarize", level), levels_of(expected), atol=1e-3, rtol=0)


@pytest.mark.parametrize("sign", [-1.0, 1.0])
@pytest.mark.parametrize("level", [0.5, 3.2, 9.5])
@pytest.mark.parametrize("name", ["rotate", "shear_x", "shear_y", "translate_x", "translate_y"])
def test_geometry_is_pillows(name, level, sign):
    image = picture(48, 64)
    pillow, bilinear = to_pillow(image), Image.Resampling.BILINEAR
    shear, right, down = sign * level * 0.03, sign * int(level * 64 / 30), sign * int(level * 48 / 30)
    maps = {
        "shear_x": (1, shear, 0, 0, 1, 0),
        "shear_y": (1, 0, 0, shear, 1, 0),
        "translate_x": (1, 0, right, 0, 1, 0),
        "translate_y": (1, 0, 0, 0, 1, down),
    }
    if name == "rotate":
        expected = pillow.rotate(sign * int(level * 3), resample=bilinear)
    else:
        expected = pillow.transform(pillow.size, Image.Transform.AFFINE, maps[name], resample=bilinear)
    gap = (operate(image, name, level, sign) - levels_of(expected)).abs()
    # Pillow rounds to whole levels; a pixel read exactly at the edge may be black here and not there.
    assert float((gap > 2).float().mean()) < 0.005
    assert float(gap.median()) < 1


def test_a_slot_serves_each_image_alone():
    """Different operations in one batch give what they give one by one, and an ended chain changes nothing."""
    image = picture(32, 32)
    kinds = torch.arange(-1, len(OPERATIONS))
    level = torch.linspace(0.1, 9.9, len(kinds))
    sign = torch.tensor([1.0, -1.0]).repeat(5)
    made = augment._operate(image.expand(len(kinds), 3, 32, 32), kinds, level, sign)
    assert torch.equal(made[0], image)
    for i, name in enumerate(OPERATIONS, start=1):
        alone = operate(image, name, float(level[i]), float(sign[i])) / 255
        torch.testing.assert_close(made[i], alone)
        assert not torch.allclose(alone, image, atol=1e-3), name


@pytest.mark.parametrize("alpha", [1e-6, 0.2, 1.0, 1.5, 50.0])
def test_shares_are_dirichlet(alpha):
    shares = augment._shares(alpha, (3, 20_000), torch.zeros(1), seeded()).double()
    torch.testing.assert_close(shares.sum(dim=0), torch.ones(20_000).double(), atol=1e-5, rtol=0)
    assert bool((shares >= 0).all())
    assert shares.mean(dim=1).tolist() == pytest.approx([1 / 3] * 3, abs=0.01)
    variance = 2 / 9 / (3 * alpha + 1)
    assert shares.var(dim=1).tolist() == pytest.approx([variance] * 3, rel=0.05)


def test_beta_of_one_is_uniform():
    share = augment._shares(1.0, (2, 20_000), torch.zeros(1), seeded())[0].sort().values
    assert float((share - torch.linspace(0, 1, 20_000)).abs().max()) < 0.02  # Kolmogorov-Smirnov at 1e-6


@pytest.mark.parametrize(("height", "width"), [(60, 60), (40, 90), (90, 20)])
def test_crops_have_their_area_and_ratio(height, width):
    """On images that hold their own coordinates a crop can be read off: it is a straight piece, inside."""
    y, x = torch.meshgrid(torch.arange(height) + 0.5, torch.arange(width) + 0.5, indexing="ij")
    images = torch.stack([x / width, y / height]).expand(2000, 2, height, width)
    made = augment._crop(images, (0.08, 1.0), seeded())
    middle = slice(width // 2 - 1, width // 2 + 1), slice(height // 2 - 1, height // 2 + 1)
    wide = (made[:, 0, 0, middle[0]].diff() * width).flatten() * width  # pixels per pixel, times the pixels
    tall = (made[:, 1, middle[1], 0].diff() * height).flatten() * height
    share, aspect = wide * tall / (height * width), wide / tall
    assert 3 / 4 - 1e-2 < float(aspect.min()) < 0.8
    assert 1.25 < float(aspect.max()) < 4 / 3 + 1e-2
    assert 0.08 - 1e-3 < float(share.min()) < 0.1
    assert bool((wide < width + 1e-2).all() & (tall < height + 1e-2).all())
    if height == width:
        # Shares near 1 fit only with a ratio near 1, so they are rarer than uniform.
        assert 0.44 < float(share.mean()) < 0.54
        centre = made[:, :, height // 2 - 1 : height // 2 + 1, width // 2 - 1 : width // 2 + 1].mean(dim=(2, 3))
        assert centre.mean(dim=0).tolist() == pytest.approx([0.5, 0.5], abs=0.02)


def test_a_crop_that_never_fits_is_the_centre():
    images = (torch.arange(60) + 0.5).expand(8, 1, 20, 60)  # each pixel holds its column
    made = augment._crop(images, (0.95, 1.0), seeded())
    middle = 20 * 4 / 3  # columns
    expected = 30 - middle / 2 + (torch.arange(60) + 0.5) * middle / 60
    torch.testing.assert_close(made, expected.expand_as(made), atol=1e-3, rtol=0)


def test_mixture_lies_between_the_image_and_its_chains():
    """All weights are shares: a flat white image can only get darker, and without operations it stays."""
    images = torch.ones(200, 1, 16, 16)
    made = augmix(severity=10)(images, seeded())
    assert 0.3 < float(made.mean()) < 1.0
    quiet = augmix(severity=1)(images, seeded())
    assert float(quiet.mean()) > float(made.mean())


def test_severity_and_depth_grow_the_change():
    images = picture(32, 32).expand(150, 3, 32, 32)

    def change(**fields):
        made = augmix(crop=(1.0, 1.0), flip=0, **fields)(images, seeded())
        return float((made - images).abs().mean())

    assert change(severity=1) < change(severity=5) < change(severity=10)
    assert change(severity=5, depth=1) < change(severity=5, depth=5)


# --- what they refuse ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "fields", "message"),
    [
        (jitter, {"strength": -0.1}, r"strength must be in \[0, 2\], got -0\.1"),
        (jitter, {"strength": 2.1}, r"strength must be .*, got 2\.1"),
        (jitter, {"strength": math.nan}, r"strength must be .*, got nan"),
        (jitter, {"noise": -1.0}, r"noise must be a standard deviation, .*, got -1\.0"),
        (jitter, {"noise": math.inf}, r"noise must be .*, got inf"),
        (jitter, {"flip": 1.5}, r"flip must be a probability, .*, got 1\.5"),
        (augmix, {"severity": 0}, r"severity must be an integer >= 1, got 0"),
        (augmix, {"severity": 11}, r"severity must be .*, got 11"),
        (augmix, {"severity": 2.5}, r"severity must be .*, got 2\.5"),
        (augmix, {"severity": True}, r"severity must be .*, got True"),
        (augmix, {"width": 0}, r"width must be an integer >= 1, got 0"),
        (augmix, {"depth": 0}, r"depth must be an integer >= 1, got 0"),
        (augmix, {"alpha": 0.0}, r"alpha must be .*, got 0\.0"),
        (augmix, {"alpha": math.inf}, r"alpha must be .*, got inf"),
        (augmix, {"crop": (0.0, 1.0)}, r"crop must be a pair of shares .*, got \(0\.0, 1\.0\)"),
        (augmix, {"crop": (0.5, 0.4)}, r"crop must be .*, got \(0\.5, 0\.4\)"),
        (augmix, {"crop": (0.5, 1.1)}, r"crop must be .*, got \(0\.5, 1\.1\)"),
        (augmix, {"crop": 0.5}, r"crop must be .*, got 0\.5"),
        (augmix, {"flip": -0.5}, r"flip must be .*, got -0\.5"),
    ],
)
def test_bad_fields(make, fields, message):
    with pytest.raises(ConfigError, match=message):
        make(**fields)


@every_view
def test_bad_images(view):
    with pytest.raises(InputError, match=r"got torch\.uint8; .*images\.float\(\) / 255"):
        view(torch.zeros(2, 3, 8, 8, dtype=torch.uint8), seeded())
    with pytest.raises(InputError, match=r"images must have shape \(\.\.\., C, H, W\), got \(8, 8\)"):
        view(torch.zeros(8, 8), seeded())
    with pytest.raises(InputError, match=r"on the device of the images, meta, got cpu; .*torch\.Generator"):
        view(torch.zeros(3, 8, 8, device="meta"), seeded())


class Recorded(TorchDispatchMode):
    """Notes the name of every operation that runs."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@every_view
def test_no_operation_needs_a_value_on_the_host(view):
    images, generator = noise(4, 3, 16, 16), seeded()
    with Recorded() as recorded:
        view(images, generator)
    assert "rand" in recorded.names
    # .item(), shapes that depend on values, and torch.tensor([...]), which is copied to the device
    waiting = {"_local_scalar_dense", "nonzero", "masked_select", "index", "bincount", "histc", "unique", "lift_fresh"}
    assert not recorded.names & waiting


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@every_view
def test_on_cuda_nothing_waits_for_the_device(view):
    images = noise(4, 3, 16, 16).cuda()
    generator = torch.Generator("cuda").manual_seed(0)
    view(images, generator)  # loads kernels
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        made = view(images, generator)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert bool(((made >= 0) & (made <= 1)).all())
