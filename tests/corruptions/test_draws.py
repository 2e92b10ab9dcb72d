"""Quality and identity of the counter-based random numbers."""

from __future__ import annotations

import math

import pytest
import torch

from come.corruptions.draws import Draws


def draws(batch: int = 4, seed: int = 0, name: str = "fog", severity: int = 5) -> Draws:
    return Draws(seed, torch.arange(batch), name, severity)


def test_words_are_fixed_for_ever() -> None:
    """These values are part of the definition: a change would change every corrupted data set."""
    words = Draws(1, torch.tensor([0, 7, 2**40 + 3, -1]), "snow", 2).bits(3, 3)
    assert words.tolist() == GOLDEN


def test_words_follow_the_definition_in_plain_integers() -> None:
    """The int32 tensor arithmetic wraps as unsigned 32-bit arithmetic does."""
    word = 0xFFFFFFFF

    def mix(x: int, middle: int = 0) -> int:
        x &= word
        x = (x ^ x >> 16) * 0x7FEB352D + middle & word
        x = (x ^ x >> 15) * 0x846CA68B & word
        return x ^ x >> 16

    made = draws(3)
    k0, k1 = (made._key(2, lane).view(-1).tolist() for lane in (0, 1))
    words = made.bits(2, 1000)
    for i in range(3):
        for j in (0, 1, 17, 999):
            assert int(words[i, j]) & word == mix(j * 0x9E3779B9 + k0[i], k1[i])


def test_uniform_moments_and_bounds() -> None:
    u = draws().uniform(0, 200_000).double()
    assert u.min() > 0.0
    assert u.max() <= 1.0
    assert abs(float(u.mean()) - 0.5) < 4 * math.sqrt(1 / 12 / 800_000)
    assert abs(float(u.var()) - 1 / 12) < 5e-4
    share = torch.histc(u[0].float(), 100, 0.0, 1.0) / 2000
    assert float((share - 1).abs().max()) < 0.12


def test_normal_moments_and_tails() -> None:
    z = draws().normal(0, 200_001).double()
    assert z.shape == (4, 200_001)
    assert abs(float(z.mean())) < 0.005
    assert abs(float(z.std()) - 1.0) < 0.005
    assert abs(float((z**3).mean())) < 0.02
    assert abs(float((z**4).mean()) - 3.0) < 0.05
    for bound, mass in ((1.0, 0.317311), (2.0, 0.0455003), (3.0, 0.0026998)):
        assert abs(float((z.abs() > bound).double().mean()) - mass) < 5 * math.sqrt(mass / z.numel())


@pytest.mark.parametrize("lag", [1, 2, 3, 32, 64, 224, 256, 672, 1024, 4096, 50176])
def test_no_correlation_along_a_stream(lag: int) -> None:
    u = draws(1).uniform(0, 400_000)[0].double() - 0.5
    correlation = float((u[lag:] * u[:-lag]).mean()) * 12
    assert abs(correlation) < 5 / math.sqrt(400_000)
    # pairs fill the square evenly
    cell = (u + 0.5).mul(32).long().clamp_(max=31)
    counts = torch.bincount(cell[lag:] * 32 + cell[:-lag], minlength=1024).double()
    expected = (400_000 - lag) / 1024
    chi = float(((counts - expected) ** 2 / expected).sum())
    assert abs(chi - 1023) < 6 * math.sqrt(2 * 1023)


def test_images_streams_seeds_names_and_severities_are_independent() -> None:
    base = draws(40).uniform(0, 20_000)
    others = [
        draws(40, seed=1).uniform(0, 20_000),
        draws(40, name="frost").uniform(0, 20_000),
        draws(40, severity=4).uniform(0, 20_000),
        draws(40).uniform(1, 20_000),
        draws(40, seed=2**32).uniform(0, 20_000),
    ]
    rows = torch.cat([base, *others]).double() - 0.5
    correlation = rows @ rows.T * 12 / 20_000
    correlation.fill_diagonal_(0.0)
    assert float(correlation.abs().max()) < 6 / math.sqrt(20_000)


def test_first_words_of_many_images_are_uniform() -> None:
    """Across images, at a fixed position, numbers are as good as along a stream."""
    u = Draws(5, torch.arange(100_000), "fog", 1).uniform(0, 2).double()
    assert abs(float(u.mean()) - 0.5) < 0.005
    assert abs(float(u.var()) - 1 / 12) < 0.002
    centred = u[:, 0] - 0.5
    assert abs(float((centred[1:] * centred[:-1]).mean()) * 12) < 5 / math.sqrt(100_000)


@pytest.mark.parametrize(
    ("peak", "share"), [(3, 0.5), (3, 1.0), (5, 0.1), (12, 0.6), (60, 0.9), (500, 0.02), (500, 0.9)]
)
def test_poisson_probabilities(peak: int, share: float) -> None:
    level = round(share * 2040) / 2040
    count = 400_000
    made = draws(4).poisson(1, torch.full((4, count // 4), level), peak).long().flatten()
    rate = level * peak
    k = torch.arange(peak, dtype=torch.float64)
    mass = torch.exp(torch.xlogy(k, torch.tensor(rate)) - rate - torch.lgamma(k + 1))
    mass = torch.cat((mass, (1 - mass.sum()).clamp(min=0).view(1)))
    seen = torch.bincount(made, minlength=peak + 1).double()
    assert seen.numel() == peak + 1
    enough = mass * count > 5
    chi = float(((seen - mass * count) ** 2 / (mass * count))[enough].sum())
    freedom = max(int(enough.sum()) - 1, 1)
    assert chi < freedom + 5 * math.sqrt(2 * freedom)


def test_poisson_of_nothing_is_nothing() -> None:
    assert int(draws(1).poisson(0, torch.zeros(1, 1000), 60).max()) == 0


def test_poisson_rejects_a_peak_beyond_its_tables() -> None:
    with pytest.raises(ValueError, match="1 to 511"):
        draws(1).poisson(0, torch.zeros(1, 4), 600)


GOLDEN = [
    [2077378981, -1609825203, -1896071157],
    [1303181110, 1459865587, 779077513],
    [2093384257, -541051529, -1817018041],
    [97350409, 47444204, -619061951],
]
