"""Derived seeds: every random draw that depends on a user's seed gets its own."""

from __future__ import annotations

import hashlib


def derived_seed(seed: int, *purpose: object) -> int:
    """A seed in [0, 2^56) for one purpose, independent of those for other purposes and other values of `seed`.

    Sums such as seed + i are not independent: those of neighbouring seeds overlap, and runs that should differ repeat each
    other. `purpose` says what is drawn: a word, the number of a batch.

    Example:
        >>> derived_seed(0, "order", 1) != derived_seed(1, "order", 0)
        True
    """
    text = " ".join(map(str, (seed, *purpose)))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
