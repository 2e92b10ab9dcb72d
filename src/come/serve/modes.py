"""When a tenant adapts: with each answer, after it, with every n-th, or while its data has shifted."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import astuple, dataclass

from come.errors import ConfigError, StateError, shown

FIRST = 64
"""Samples of a tenant that its reference is taken from, unless one is given."""
RECENT = 32
"""Samples that the recent mean looks back, about."""
BEGINS, ENDS = 0.5, 0.25
"""Standard deviations of the recent mean above the reference at which a shift begins and ends. Chance alone moves the mean of
independent samples by 0.13, a quarter of `BEGINS`."""


@dataclass(frozen=True)
class Mode:
    """When to adapt.

    Example:
        >>> Mode.of("every:4")
        Mode(kind='every', n=4, reference=None)
        >>> Mode.of("shift:0.3,0.1").reference
        (0.3, 0.1)
    """

    kind: str = "inline"
    n: int = 1
    reference: tuple[float, float] | None = None
    """Mean and standard deviation of the uncertainty on data without a shift; None: of a tenant's first 64 samples."""

    @classmethod
    def of(cls, text: str) -> Mode:
        """Read "inline", "after", "every:N", "shift", "shift:MEAN,STD" or "never"."""
        try:
            kind, _, rest = text.partition(":")
            if text in ("inline", "after", "shift", "never"):
                return cls(kind)
            if kind == "every" and int(rest) >= 1:
                return cls(kind, int(rest))
            if kind == "shift":
                mean, std = map(float, rest.split(","))
                if 0 <= mean <= 1 and 0 < std <= 1:
                    return cls(kind, reference=(mean, std))
        except (ValueError, TypeError, AttributeError):
            pass
        raise ConfigError(
            f"adapt must be inline, after, every:N with N >= 1, shift, shift:MEAN,STD or never, got {shown(text)}"
        )


@dataclass
class Signal:
    """Whether a tenant's data has shifted, by the uncertainty of its answers.

    The reference is given, or the mean and standard deviation over its first 64 samples. A shift begins when the recent mean,
    an exponential average over about 32 samples, is half a standard deviation above the reference, and ends at a quarter.

    Example:
        >>> signal = Signal(count=64, mean=0.2, squares=64 * 0.1**2, recent=0.2)
        >>> signal.update([0.2] * 8), signal.update([0.5] * 8), signal.update([0.2] * 64)
        (False, True, False)
    """

    count: int = 0
    """Samples in the reference."""
    mean: float = 0.0
    squares: float = 0.0
    """Sum of the squared distances from the mean."""
    recent: float = 0.0
    shifted: bool = False

    def __post_init__(self) -> None:
        finite = all(isinstance(value, (int, float)) and math.isfinite(value) for value in astuple(self))
        if not (finite and self.squares >= 0 and self.count in range(FIRST + 1) and isinstance(self.shifted, bool)):
            raise StateError(f"the signal in this state is damaged: {self}; use an older copy")

    @classmethod
    def given(cls, reference: tuple[float, float] | None) -> Signal:
        """Before the first sample."""
        if reference is None:
            return cls()
        mean, std = reference
        return cls(FIRST, mean, std * std * FIRST, mean)

    def update(self, uncertainties: Iterable[float]) -> bool:
        """Take in the uncertainties of some samples; returns whether there is a shift."""
        for u in filter(math.isfinite, uncertainties):
            if self.count < FIRST:
                self.count += 1
                distance = u - self.mean
                self.mean += distance / self.count
                self.squares += distance * (u - self.mean)
                self.recent = self.mean
                continue
            self.recent += (u - self.recent) / RECENT
            std = max(math.sqrt(self.squares / self.count), 1e-6)
            self.shifted = self.recent - self.mean > (ENDS if self.shifted else BEGINS) * std
        return self.shifted
