"""y = W x + b. Every output is summed over the inputs in order, so a row has the same bits in a batch of any size
(batch invariance, docs/invariants.md). With few rows, a product takes no longer than reading the weights."""

from functools import cache

import numpy as np
from numba import carray, njit

from services.worker.kernels.cpu.compiled import raw, simd
from services.worker.kernels.cpu.thread_team import HEADER, Kernel, take

PANEL = 16
"""Number of outputs whose weights are side by side, input after input."""
BLOCK = 4 * PANEL
"""Outputs of one item."""
CHUNK = 48
"""Maximum number of rows of one item."""
WORTH = 1 << 19
"""Smallest number of multiplications for which another thread is used: 10 to 20 us."""
PRODUCT = [
    ("x", np.int64),  # [rows, inputs] in the dtype of the activations: float32 here
    ("weight", np.int64),  # [blocks * 4, inputs, PANEL] here
    ("bias", np.int64),  # float32[blocks * BLOCK]
    ("out", np.int64),  # [rows, stride] in the dtype of the activations
    ("rows", np.int64),
    ("inputs", np.int64),
    ("outputs", np.int64),
    ("stride", np.int64),  # numbers from one row of `out` to the next
]
"""Arguments of every product; `BLOCK` is the kernel's own."""
_PRODUCT = np.dtype(HEADER + PRODUCT, align=True)


@njit(inline="always")
def store_outputs(a, row, first, value, tail):  # type: ignore[no-untyped-def]
    """Store outputs `first` to `first` + 15 of a row; those beyond the last are skipped."""
    out = a.out + (row * a.stride + first) * 4
    if first + PANEL <= a.outputs:
        simd.store_f32x16(out, value)
    else:
        simd.store_f32x16(tail, value)
        for j in range(a.outputs - first):
            simd.store_f32(out + j * 4, simd.load_f32(tail + j * 4))


@njit(inline="always")
def one_row(a, row, weights, first, tail, HALF):  # type: ignore[no-untyped-def]
    """Compute one row in all panels of the block together: the independent sums hide each other's latency."""
    size = PANEL * (2 if HALF else 4)
    bias, step = a.bias + first * 4, a.inputs * size
    s0, s1 = simd.load_f32x16(bias), simd.load_f32x16(bias + 64)
    s2, s3 = simd.load_f32x16(bias + 128), simd.load_f32x16(bias + 192)
    x, w = a.x + row * a.inputs * 4, weights
    for i in range(0, a.inputs * 4, 4):
        some = simd.splat(simd.load_f32(x + i))
        s0 = simd.fma(some, simd.load_paired(w, HALF), s0)
        s1 = simd.fma(some, simd.load_paired(w + step, HALF), s1)
        s2 = simd.fma(some, simd.load_paired(w + 2 * step, HALF), s2)
        s3 = simd.fma(some, simd.load_paired(w + 3 * step, HALF), s3)
        w += size
    store_outputs(a, row, first, s0, tail)
    if first + PANEL < a.outputs:
        store_outputs(a, row, first + PANEL, s1, tail)
    if first + 2 * PANEL < a.outputs:
        store_outputs(a, row, first + 2 * PANEL, s2, tail)
    if first + 3 * PANEL < a.outputs:
        store_outputs(a, row, first + 3 * PANEL, s3, tail)


@njit(inline="always")
def four_rows(a, row, last, weights, first, tail, HALF):  # type: ignore[no-untyped-def]
    """Compute rows `row` to `row` + 3 in one panel. For rows beyond `last`, `last` is computed again."""
    size, width, start = PANEL * (2 if HALF else 4), a.inputs * 4, simd.load_f32x16(a.bias + first * 4)
    r1, r2, r3 = min(row + 1, last), min(row + 2, last), min(row + 3, last)
    x0, x1, x2, x3 = a.x + row * width, a.x + r1 * width, a.x + r2 * width, a.x + r3 * width
    s0, s1, s2, s3, w = start, start, start, start, weights
    for i in range(0, width, 4):
        some = simd.load_paired(w, HALF)
        s0 = simd.fma(simd.splat(simd.load_f32(x0 + i)), some, s0)
        s1 = simd.fma(simd.splat(simd.load_f32(x1 + i)), some, s1)
        s2 = simd.fma(simd.splat(simd.load_f32(x2 + i)), some, s2)
        s3 = simd.fma(simd.splat(simd.load_f32(x3 + i)), some, s3)
        w += size
    store_outputs(a, row, first, s0, tail)
    store_outputs(a, r1, first, s1, tail)
    store_outputs(a, r2, first, s2, tail)
    store_outputs(a, r3, first, s3, tail)


@njit(inline="always")
def six_rows(a, row, last, weights, first, tail, HALF):  # type: ignore[no-untyped-def]
    """Compute six rows in the same way; their sums fill the registers of AVX2."""
    size, width, start = PANEL * (2 if HALF else 4), a.inputs * 4, simd.load_f32x16(a.bias + first * 4)
    r4, r5 = min(row + 4, last), min(row + 5, last)
    x0, x4, x5 = a.x + row * width, a.x + r4 * width, a.x + r5 * width
    s0, s1, s2, s3, s4, s5, w = start, start, start, start, start, start, weights
    for i in range(0, width, 4):
        some = simd.load_paired(w, HALF)
        s0 = simd.fma(simd.splat(simd.load_f32(x0 + i)), some, s0)
        s1 = simd.fma(simd.splat(simd.load_f32(x0 + width + i)), some, s1)
        s2 = simd.fma(simd.splat(simd.load_f32(x0 + 2 * width + i)), some, s2)
        s3 = simd.fma(simd.splat(simd.load_f32(x0 + 3 * width + i)), some, s3)
        s4 = simd.fma(simd.splat(simd.load_f32(x4 + i)), some, s4)
        s5 = simd.fma(simd.splat(simd.load_f32(x5 + i)), some, s5)
        w += size
    store_outputs(a, row, first, s0, tail)
    store_outputs(a, row + 1, first, s1, tail)
    store_outputs(a, row + 2, first, s2, tail)
    store_outputs(a, row + 3, first, s3, tail)
    store_outputs(a, r4, first, s4, tail)
    store_outputs(a, r5, first, s5, tail)


def product_kernel(half: bool, inputs: int) -> Kernel:
    """One item is a block of outputs of up to `CHUNK` rows; its work is the number of rows. `half`: the weights are
    bfloat16, in pairs."""
    return _compiled(half).again_for(WORTH, BLOCK * inputs)


@cache
def _compiled(half: bool) -> Kernel:
    HALF, SIZE = int(half), 2 if half else 4

    def product(address):  # type: ignore[no-untyped-def]
        a = carray(raw.pointer(address), 1, _PRODUCT)[0]
        tail, panel_size = raw.allocate(PANEL * 4), a.inputs * PANEL * SIZE
        blocks = (a.outputs + BLOCK - 1) // BLOCK
        while True:
            item = take(address)
            if item >= a.items:
                break
            block, start = item % blocks, item // blocks * CHUNK
            end, first = min(start + CHUNK, a.rows), block * BLOCK
            weights = a.weight + block * 4 * panel_size
            if end - start < 3:
                for row in range(start, end):
                    one_row(a, row, weights, first, tail, HALF)
                continue
            for panel in range(min(4, (a.outputs - first + PANEL - 1) // PANEL)):
                w, at, row = weights + panel * panel_size, first + panel * PANEL, start
                while row < end:
                    left = end - row
                    if left > 8 or left == 5 or left == 6:
                        six_rows(a, row, end - 1, w, at, tail, HALF)
                        row += 6
                    else:
                        four_rows(a, row, end - 1, w, at, tail, HALF)
                        row += 4
        raw.release(tail)

    return Kernel(product, PRODUCT, cost=1)
