"""The noise of sampling: a pure function of (seed, absolute position, token id), the same in every backend.

Nothing is drawn from a stream, so batch shape, chunking, preemption, run-ahead and a replaced worker cannot change
what a request samples. The contract, in arithmetic modulo 2**32 (int32, uint32 and masked int64 give the same):

    mix(x):   x ^= x >> 16;  x *= 0x7FEB352D;  x ^= x >> 15;  x *= 0x846CA68B;  x ^= x >> 16      (logical shifts)
    key0    = mix(mix(mix(lo ^ 0x9E3779B9) ^ hi) ^ position) with lo, hi = the seed's low and high 32 bits
    key1    = mix(key0 + 0x85EBCA6B)
    key0    = mix(key1 ^ 0xC2B2AE35)
    x       = token * 0x9E3779B1 + key0
    bits    = x ^= x >> 16;  x *= 0x7FEB352D;  x ^= key1;  x ^= x >> 15;  x *= 0x846CA68B;  x ^= x >> 16
    uniform = ((bits >> 9) + 0.5) * 2**-23      float32, exact, never 0 and never 1
    gumbel  = -log(-log(uniform))               float32; the library's log may differ in the last place

`position` is the index of the sampled token in its request's token sequence (prompt and output). Without speculation
it is `starts + counts` of the plan's row.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

GOLDEN, PRIME, MIX_A, MIX_B = 0x9E3779B9, 0x9E3779B1, 0x7FEB352D, 0x846CA68B
FIRST_KEY, SECOND_KEY = 0x85EBCA6B, 0xC2B2AE35

U32 = NDArray[np.uint32]


def mix(x: U32) -> U32:
    """Return `x` with all 32 bits mixed (the published `lowbias32`); a bijection."""
    x = (x ^ (x >> np.uint32(16))) * np.uint32(MIX_A)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(MIX_B)
    return x ^ (x >> np.uint32(16))


def keys(seeds: NDArray[np.uint64], positions: NDArray[Any]) -> tuple[U32, U32]:
    """Return two keys, uint32[rows] each. `seeds` have 64 bits; `positions` are integers below 2**32."""
    low = (seeds & np.uint64(0xFFFFFFFF)).astype(np.uint32)
    high = (seeds >> np.uint64(32)).astype(np.uint32)
    key0 = mix(mix(mix(low ^ np.uint32(GOLDEN)) ^ high) ^ positions.astype(np.uint32))
    key1 = mix(key0 + np.uint32(FIRST_KEY))
    return mix(key1 ^ np.uint32(SECOND_KEY)), key1


def bits(key0: U32, key1: U32, tokens: NDArray[Any]) -> U32:
    """Return uint32[rows, tokens]: one word for each pair."""
    x = tokens.astype(np.uint32) * np.uint32(PRIME) + key0[:, None]
    x ^= x >> np.uint32(16)
    x *= np.uint32(MIX_A)
    x ^= key1[:, None]
    x ^= x >> np.uint32(15)
    x *= np.uint32(MIX_B)
    x ^= x >> np.uint32(16)
    return x


def uniform(words: U32) -> NDArray[np.float32]:
    """Return numbers strictly between 0 and 1 with 23 random bits, exact in float32."""
    return ((words >> np.uint32(9)).astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-23)


def gumbel(seeds: NDArray[np.uint64], positions: NDArray[Any], tokens: NDArray[Any]) -> NDArray[np.float32]:
    """Return float32[rows, tokens] standard Gumbel noise: argmax(logits + noise) samples from softmax(logits)."""
    noise = uniform(bits(*keys(seeds, positions), tokens))
    np.log(noise, out=noise)
    np.negative(noise, out=noise)
    np.log(noise, out=noise)
    return np.negative(noise, out=noise)
