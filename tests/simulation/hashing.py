"""Hashes of prefixes and pseudo-random words that depend on nothing but a prefix."""

from hashlib import shake_128

import numpy as np
from numpy.typing import NDArray

from protocol.media import Media

_MASK = (1 << 64) - 1
ROOT = 0x243F6A8885A308D3


def extend(prefix: int, token: int) -> int:
    """Return the hash of a prefix with one more token."""
    mixed = ((prefix ^ (token + 0x9E3779B9)) * 0xBF58476D1CE4E5B9 + 0x94D049BB133111EB) & _MASK
    return mixed ^ (mixed >> 31)


def in_group(prefix: int, group: int) -> int:
    """Return the KV of a prefix in the layers of a group."""
    return prefix ^ (group << 64) if group else prefix


def words(prefix: int, count: int) -> NDArray[np.uint64]:
    """Return uint64[count] pseudo-random words of a prefix."""
    x = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(prefix)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def distinct_tokens(tokens: NDArray[np.int32], media: Media | None) -> NDArray[np.int32]:
    """Return the tokens with numbers that follow from the files' contents at their positions."""
    if media is None:
        return tokens
    tokens = tokens.copy()
    for item in media.items:
        span = tokens[item.start : item.end]
        span[:] = np.frombuffer(shake_128(item.digest.encode()).digest(4 * len(span)), "<i4")
    return tokens
