"""y = W x + b with AVX-512's products of bfloat16 pairs, from weights in bfloat16, int8 or int4. Activations are
bfloat16, sums float32.

Codes are decoded to bfloat16 into panels that stay in the second cache, once per item. Each sum runs over the inputs in
order, two at a time, so a row has the same bits in a batch of any size (batch invariance, docs/invariants.md).
"""

from functools import cache

import numpy as np
from numba import carray, njit

from services.worker.backends.native.kernels.cpu.compiled import bf16, simd
from services.worker.backends.native.kernels.cpu.compiled.quantized import (
    BF16,
    GROUP,
    GROUP_BYTES,
    PANEL,
    scales_of,
    two_inputs,
)
from services.worker.backends.native.kernels.cpu.thread_team import HEADER, Kernel, take

BLOCK = bf16.PANELS * PANEL
"""Outputs of one item."""
ROWS = 6
"""Rows that are multiplied together: 24 sums, four weights and one pair of inputs fit into 32 registers."""
CHUNK = 32 * ROWS
"""Maximum number of rows of one item."""
WORTH = 1 << 18
"""Smallest number of multiplications for which another thread is used."""
PRODUCT = [
    ("x", np.int64),  # bfloat16[rows, inputs]
    ("weight", np.int64),  # panels; their number is a multiple of four
    ("bias", np.int64),  # float32[blocks * BLOCK]
    ("out", np.int64),  # bfloat16[rows, outputs]
    ("rows", np.int64),
    ("inputs", np.int64),
    ("outputs", np.int64),
]
_PRODUCT = np.dtype(HEADER + PRODUCT, align=True)
_dot_1, _dot_2, _dot_3, _dot_4, _dot_5, _dot_6 = (bf16.dot_products(rows) for rows in range(1, ROWS + 1))


@njit(inline="always")
def _decode(panels, groups, target, KIND):  # type: ignore[no-untyped-def]
    """Decode the panels of a block."""
    for number in range(bf16.PANELS * groups):
        group = panels + number * GROUP_BYTES[KIND]
        scales, minima = scales_of(group, KIND)
        for pair in range(GROUP // 2):
            even, odd = two_inputs(group, pair, scales, minima, KIND)
            bf16.store_bf16_pairs(target, even, odd)
            target += bf16.WORD


@njit(inline="always")
def _write(a, sums, row, rows, first):  # type: ignore[no-untyped-def]
    """Add the bias to the sums of some rows, and store outputs `first` to `first` + 63."""
    tail = sums + ROWS * BLOCK * 4
    for i in range(rows):
        for half in range(first, min(first + BLOCK, a.outputs), 2 * PANEL):
            here, bias = sums + (i * BLOCK + half - first) * 4, a.bias + half * 4
            value0 = simd.add(simd.load_f32x16(here), simd.load_f32x16(bias))
            value1 = simd.add(simd.load_f32x16(here + 64), simd.load_f32x16(bias + 64))
            out = a.out + ((row + i) * a.outputs + half) * 2
            if half + 2 * PANEL <= a.outputs:
                bf16.store_bf16x32(out, value0, value1)
            else:
                bf16.store_bf16x32(tail, value0, value1)
                for j in range(a.outputs - half):
                    simd.store_bf16(out + j * 2, simd.load_bf16(tail + j * 2))


def pair_product_kernel(kind: int, inputs: int) -> Kernel:
    """One item is a block of outputs of up to `CHUNK` rows; its work is the number of rows."""
    kernel = _compiled(kind).again()
    kernel.cost = -(-WORTH // (BLOCK * inputs))
    return kernel


@cache
def _compiled(kind: int) -> Kernel:
    KIND, SIZE, CODED = kind, GROUP_BYTES[kind], kind != BF16

    def pair_product(address):  # type: ignore[no-untyped-def]
        a = carray(simd.pointer(address), 1, _PRODUCT)[0]
        blocks, groups = (a.outputs + BLOCK - 1) // BLOCK, (a.inputs + GROUP - 1) // GROUP
        # Without a partner, the last input of a row is multiplied with zero weights, and must not be the next row's
        pairs, odd = (a.inputs + 1) // 2, a.inputs % 2
        step, stride = groups * GROUP_BYTES[BF16], pairs * 4
        sums_size = ROWS * BLOCK * 4 + 64
        panels_size = bf16.PANELS * step if CODED else 0
        copied = min(a.rows, CHUNK) * stride if odd else 0
        buffer = simd.allocate(64 + sums_size + panels_size + copied)
        sums = (buffer + 63) // 64 * 64
        scratch = sums + sums_size
        while True:
            item = take(address)
            if item >= a.items:
                break
            block, start = item % blocks, item // blocks * CHUNK
            end, first, x = min(start + CHUNK, a.rows), block * BLOCK, a.x + start * a.inputs * 2
            if odd:
                source, x = x, scratch + panels_size
                for row in range(end - start):
                    for i in range(2 * pairs):
                        at = source + (row * a.inputs + i) * 2
                        value = simd.load_bf16(at) if i < a.inputs else np.float32(0)
                        simd.store_bf16(x + row * stride + i * 2, value)
            weights = a.weight + block * bf16.PANELS * groups * SIZE
            if CODED:
                _decode(weights, groups, scratch, KIND)
                weights = scratch
            row = start
            while row < end:
                rows = min(ROWS, end - row)
                if rows == 6:
                    _dot_6(x, stride, weights, step, pairs, sums)
                elif rows == 5:
                    _dot_5(x, stride, weights, step, pairs, sums)
                elif rows == 4:
                    _dot_4(x, stride, weights, step, pairs, sums)
                elif rows == 3:
                    _dot_3(x, stride, weights, step, pairs, sums)
                elif rows == 2:
                    _dot_2(x, stride, weights, step, pairs, sums)
                else:
                    _dot_1(x, stride, weights, step, pairs, sums)
                _write(a, sums, row, rows, first)
                x += rows * stride
                row += rows
        simd.release(buffer)

    return Kernel(pair_product, PRODUCT, cost=1)
