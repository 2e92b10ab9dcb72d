"""Statistics of a corrupted image, for comparing random corruptions in distribution (NumPy alone)."""

from __future__ import annotations

import numpy as np

LAGS = ((0, 1), (1, 0), (0, 3), (3, 0), (0, 8), (8, 0))


def measures(clean: np.ndarray, made: np.ndarray) -> np.ndarray:
    """Describe one corrupted image by 13 numbers.

    Args:
        clean: uint8 image, (H, W, 3).
        made: the corrupted image, (H, W, 3).

    Returns:
        Means of R, G, B; deviations of R, G, B; deviation of the difference to the clean image, over all
        channels; and the autocorrelation of that difference (channel means taken off) at the lags LAGS.
    """
    image = made.astype(np.float64)
    difference = image - clean.astype(np.float64)
    spread = difference.std()
    difference = difference - difference.mean((0, 1))
    power = max(float((difference**2).mean()), 1e-9)
    height, width = difference.shape[:2]
    correlation = [
        float((difference[dy:, dx:] * difference[: height - dy, : width - dx]).mean()) / power for dy, dx in LAGS
    ]
    return np.concatenate([image.mean((0, 1)), image.std((0, 1)), [spread], correlation])
