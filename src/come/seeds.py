"""Seeds that are made from one: every draw that a seed decides has a seed of its own."""

from __future__ import annotations

import hashlib


def derived_seed(seed: int, *purpose: object) -> int:
    """A seed for one purpose, independent of those for other purposes and of what any other `seed` leads to.

    Sums such as seed + i are not: those of neighbouring seeds overlap, and runs that should be independent repeat each other.

    Args:
        seed: the one that the user chose.
        purpose: what is drawn with it: a word, the number of a batch.

    Returns:
        An integer from 0 to 2^56 - 1.

    Example:
        >>> derived_seed(0, "order", 1) != derived_seed(1, "order", 0)
        True
    """
    text = " ".join(map(str, (seed, *purpose)))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
