# mypy: disable-error-code="no-untyped-def"
"""The noise of sampling (services.worker.sampling.noise), in registers."""

import triton
import triton.language as tl

from services.worker.sampling import noise

_PRIME, _MIX_A, _MIX_B = tl.constexpr(noise.PRIME), tl.constexpr(noise.MIX_A), tl.constexpr(noise.MIX_B)


@triton.jit
def uniform(tokens, key0, key1):
    """float32 between 0 and 1 for each token; the keys are int32 with the bits of `noise.keys`."""
    second = key1.to(tl.uint32, bitcast=True)
    x = tokens.to(tl.uint32) * _PRIME + key0.to(tl.uint32, bitcast=True)
    x ^= x >> 16
    x *= _MIX_A
    x ^= second
    x ^= x >> 15
    x *= _MIX_B
    x ^= x >> 16
    return ((x >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07


@triton.jit
def log(a):
    """ln(a) within 2 units in the last place, for normal numbers above 0, by the polynomial of the processor's kernels.

    `tl.log` has an absolute error near 1, where the greatest noise comes from.
    """
    bits = a.to(tl.int32, bitcast=True)
    exponent = (bits - 0x3F3504F3) >> 23
    m = (bits - (exponent << 23)).to(tl.float32, bitcast=True)
    e, x = exponent.to(tl.float32), m - 1.0
    p = x * 7.0376836292e-2 - 1.1514610310e-1
    p = p * x + 1.1676998740e-1
    p = p * x - 1.2420140846e-1
    p = p * x + 1.4249322787e-1
    p = p * x - 1.6668057665e-1
    p = p * x + 2.0000714765e-1
    p = p * x - 2.4999993993e-1
    p = p * x + 3.3333331174e-1
    square = x * x
    p = e * -2.12194440e-4 + x * square * p
    return e * 0.693359375 + (x + (p - square * 0.5))


@triton.jit
def gumbel(tokens, key0, key1):
    """Standard Gumbel noise of each token, float32."""
    return -log(-log(uniform(tokens, key0, key1)))
