"""Counter-based random numbers in torch integer arithmetic, one stream per image.

Each number is a pure function of (seed, image index, corruption name, severity, stream, position). The hash is two rounds of
xor-shift and multiply on 32-bit words (the "lowbias32" constants found by C. Wellons), with one 32-bit key of the image added
before the first round and another one between the rounds. Only wrapping int32 operations are used, which give the same bits on
the CPU and on CUDA; torch's global generators are never read or written.
"""

from __future__ import annotations

import math
import zlib
from functools import lru_cache

import torch
from torch import Tensor

_M1 = 0x7FEB352D
_M2 = 0x846CA68B
_WORD = 0xFFFFFFFF


def _signed(value: int) -> int:
    """Reinterpret the low 32 bits of an integer as a signed 32-bit value."""
    value &= _WORD
    return value - (1 << 32) if value >= 1 << 31 else value


def _mix_int(value: int) -> int:
    """Mix one Python integer: the same function as :func:`_mix` on a tensor."""
    value &= _WORD
    value = (value ^ (value >> 16)) * _M1 & _WORD
    value = (value ^ (value >> 15)) * _M2 & _WORD
    return value ^ (value >> 16)


def _fold(x: Tensor, shift: int, work: Tensor) -> Tensor:
    """Compute ``x ^= x >>> shift`` in place (logical shift) on int32."""
    torch.bitwise_right_shift(x, shift, out=work)
    return x.bitwise_xor_(work.bitwise_and_((1 << (32 - shift)) - 1))


def _mix(x: Tensor, middle: Tensor | None = None) -> Tensor:
    """Mix int32 words in place; ``middle`` is a second key, added between the two rounds."""
    work = torch.empty_like(x)
    _fold(x, 16, work).mul_(_M1)
    if middle is not None:
        x.add_(middle)
    _fold(x, 15, work).mul_(_signed(_M2))
    return _fold(x, 16, work)


@lru_cache(maxsize=8)
def _counter(count: int, device: torch.device) -> Tensor:
    return torch.arange(count, dtype=torch.int32, device=device).mul_(_signed(0x9E3779B9))


class Draws:
    """Random numbers of a batch of images, a pure function of (seed, index, name of the corruption, severity).

    64 bits of the seed are used. `index` (B,) int64 is the identity of each image; numbers are made on its device.

    Example:
        >>> draws = Draws(0, torch.tensor([3, 4]), "fog", 5)
        >>> alone = Draws(0, torch.tensor([4]), "fog", 5)
        >>> bool((draws.uniform(0, 8)[1] == alone.uniform(0, 8)[0]).all())
        True
    """

    def __init__(self, seed: int, index: Tensor, name: str, severity: int) -> None:
        self.index = index
        state = _mix_int(zlib.crc32(name.encode()) + 0x9E3779B9 * severity)
        state = _mix_int(state ^ (seed & _WORD))
        self._state = _mix_int(state + (seed >> 32 & _WORD) * 0x85EBCA6B)

    def part(self, start: int, stop: int) -> Draws:
        """Return the generator of images ``start`` to ``stop`` of the batch alone."""
        piece = object.__new__(Draws)
        piece.index, piece._state = self.index[start:stop], self._state
        return piece

    def _key(self, stream: int, lane: int) -> Tensor:
        """Return one int32 key per image, shape (B, 1)."""
        start = _mix_int(self._state + 0xC2B2AE35 * (2 * stream + lane + 1))
        low = (self.index & _WORD).to(torch.int32)
        high = ((self.index >> 32) & _WORD).to(torch.int32)
        key = _mix(_mix(low.bitwise_xor_(_signed(start))).add_(high.mul_(_signed(0x27D4EB2F))))
        return key.unsqueeze(1)

    def bits(self, stream: int, count: int) -> Tensor:
        """Uniform 32-bit words, int32 (B, count); different streams are independent."""
        words = _counter(count, self.index.device) + self._key(stream, 0)
        return _mix(words, self._key(stream, 1))

    def uniform(self, stream: int, *shape: int) -> Tensor:
        """Uniform numbers in (0, 1), multiples of 2^-24 shifted by 2^-25: float32 (B, *shape)."""
        words = self.bits(stream, math.prod(shape)).bitwise_right_shift_(8)
        return words.to(torch.float32).mul_(2.0**-24).add_(0.5 + 2.0**-25).view(-1, *shape)

    def normal(self, stream: int, *shape: int) -> Tensor:
        """Standard normal numbers by the Box-Muller map of two uniforms (largest magnitude 5.9): float32 (B, *shape)."""
        count = math.prod(shape)
        half = (count + 1) // 2
        u = self.uniform(stream, 2, half)
        radius = u[:, 0].log_().mul_(-2.0).sqrt_()
        angle = u[:, 1].mul_(2.0 * math.pi)
        out = torch.empty(u.shape[0], 2 * half, dtype=torch.float32, device=u.device)
        torch.cos(angle, out=out[:, :half])
        torch.sin(angle, out=out[:, half:])
        out.view(-1, 2, half).mul_(radius.unsqueeze(1))
        return out[:, :count].reshape(-1, *shape)

    def poisson(self, stream: int, share: Tensor, peak: int) -> Tensor:
        """Counts min(Poisson(share * peak), peak), int32 like ``share`` (B, ...) in [0, 1]; peak from 1 to 511.

        Sampling is by Walker's alias method on tables of 2041 rates, so it is exact (to the 21 bits of a draw) for shares that
        are multiples of 1/2040, as those of 8-bit images are; other shares are rounded to the nearest.
        """
        table, columns = _alias_table(peak, share.device)
        words = self.bits(stream, share[0].numel()).view(share.shape)
        cell = (words >> 21).bitwise_and_(columns - 1)
        row = (share * _RATES).round_().to(torch.int32).mul_(columns).add_(cell)
        entry = table.index_select(0, row.view(-1)).view(share.shape)
        # -1 where the cell itself is drawn, 0 where its alias is
        own = words.bitwise_and_((1 << 21) - 1).sub_(entry >> 9).bitwise_right_shift_(31)
        alias = entry.bitwise_and_(511)
        return cell.bitwise_xor_(alias).bitwise_and_(own).bitwise_xor_(alias)


_RATES = 2040


@lru_cache(maxsize=16)
def _alias_table(peak: int, device: torch.device) -> tuple[Tensor, int]:
    """Alias tables of min(Poisson(peak * r / 2040), peak) for r = 0..2040, and their number of cells, a power of two.

    The flat int32 table holds ``threshold << 9 | alias`` for each (rate, cell). The tables of all rates are built side by
    side: each step settles one cell in every row.
    """
    if not 1 <= peak <= 511:
        raise ValueError(f"peak must be from 1 to 511, got {peak}")
    columns = 1 << peak.bit_length()
    rate = torch.arange(_RATES + 1, dtype=torch.float64).mul_(peak / _RATES).unsqueeze(1)
    count = torch.arange(peak, dtype=torch.float64)
    mass = torch.zeros(_RATES + 1, columns, dtype=torch.float64)
    mass[:, :peak] = torch.exp(torch.xlogy(count, rate) - rate - torch.lgamma(count + 1))
    mass[:, peak] = (1.0 - mass.sum(1)).clamp_(min=0.0)
    mass *= columns
    rows = torch.arange(_RATES + 1)
    heavy = mass > 1.0
    n_heavy = heavy.sum(1)
    # cells in order: the light ones first, then the heavy ones
    order = torch.argsort(heavy.to(torch.int8), dim=1, stable=True)
    light_at = torch.zeros_like(rows)
    heavy_at = columns - n_heavy
    threshold = torch.ones_like(mass)
    alias = torch.arange(columns).expand_as(mass).clone()
    left = mass[rows, order[rows, heavy_at.clamp(max=columns - 1)]]
    for _ in range(columns):
        i = order[rows, light_at.clamp(max=columns - 1)]
        j = order[rows, heavy_at.clamp(max=columns - 1)]
        after = order[rows, (heavy_at + 1).clamp(max=columns - 1)]
        give = (left > 1.0) & (light_at < columns - n_heavy) & (heavy_at < columns)
        turn = (left <= 1.0) & (heavy_at + 1 < columns)
        r = rows[give]
        threshold[r, i[give]] = mass[r, i[give]]
        alias[r, i[give]] = j[give]
        r = rows[turn]
        threshold[r, j[turn]] = left[turn]
        alias[r, j[turn]] = after[turn]
        left = torch.where(give, left - (1.0 - mass[rows, i]), left)
        left = torch.where(turn, mass[rows, after] - (1.0 - left), left)
        light_at = light_at + give.long()
        heavy_at = heavy_at + turn.long()
    packed = (threshold * (1 << 21)).round_().long() * 512 + alias
    return packed.to(torch.int32).flatten().to(device), columns
