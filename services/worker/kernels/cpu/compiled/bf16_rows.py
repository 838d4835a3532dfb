"""Rows of bfloat16 for products: inputs with zeros behind them, and outputs up to the last one."""

import numpy as np
from numba import njit

from services.worker.kernels.cpu.compiled import bf16, simd

WIDTH = 2 * simd.LANES
"""Outputs that are stored together."""


@njit(inline="always")
def copy_padded(source, rows, inputs, target, padded):  # type: ignore[no-untyped-def]
    """Copy rows of `inputs` numbers, each followed by zeros up to `padded` numbers: an instruction reads several
    inputs, and those behind a row must not be the next row's."""
    for row in range(rows):
        for i in range(padded):
            at = source + (row * inputs + i) * 2
            value = simd.load_bf16(at) if i < inputs else np.float32(0)
            simd.store_bf16(target + (row * padded + i) * 2, value)


@njit(inline="always")
def store_outputs(out, number, value0, value1, spare):  # type: ignore[no-untyped-def]
    """Store the first `number` of `WIDTH` outputs, or all of them.

    Args:
        spare: 64 bytes to write to
    """
    if number >= WIDTH:
        bf16.store_bf16x32(out, value0, value1)
    else:
        bf16.store_bf16x32(spare, value0, value1)
        for j in range(number):
            simd.store_bf16(out + j * 2, simd.load_bf16(spare + j * 2))
