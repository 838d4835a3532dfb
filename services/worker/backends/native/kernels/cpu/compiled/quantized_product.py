"""y = W x + b in float32, from weights in int8 or int4.

With few rows, codes are decoded during the multiplication. With more rows, a panel is decoded once into memory that
stays in the innermost caches. Weights and order of sums are the same in both cases, so a row has the same bits in a
batch of any size (batch invariance, docs/invariants.md).
"""

from functools import cache

import numpy as np
from numba import carray, njit

from services.worker.backends.native.kernels.cpu.compiled import raw, simd
from services.worker.backends.native.kernels.cpu.compiled.product import (
    BLOCK,
    PANEL,
    PRODUCT,
    WORTH,
    four_rows,
    six_rows,
    store_outputs,
)
from services.worker.backends.native.kernels.cpu.compiled.quantized import (
    GROUP,
    GROUP_BYTES,
    scales_of,
    two_inputs,
)
from services.worker.backends.native.kernels.cpu.thread_team import HEADER, Kernel, take

CHUNK = 192
"""Maximum number of rows of one item. A panel is decoded once per item."""
_PRODUCT = np.dtype(HEADER + PRODUCT, align=True)


@njit(inline="always")
def _one_row(a, row, weights, first, tail, KIND):  # type: ignore[no-untyped-def]
    """Compute one row in two panels."""
    groups = a.inputs // GROUP
    size = groups * GROUP_BYTES[KIND]
    s0, s1 = simd.load_f32x16(a.bias + first * 4), simd.load_f32x16(a.bias + first * 4 + 64)
    x = a.x + row * a.inputs * 4
    for number in range(groups):
        group = weights + number * GROUP_BYTES[KIND]
        scales0, minima0 = scales_of(group, KIND)
        scales1, minima1 = scales_of(group + size, KIND)
        for pair in range(GROUP // 2):
            even, odd = simd.splat(simd.load_f32(x)), simd.splat(simd.load_f32(x + 4))
            even0, odd0 = two_inputs(group, pair, scales0, minima0, KIND)
            even1, odd1 = two_inputs(group + size, pair, scales1, minima1, KIND)
            s0, s1 = simd.fma(even, even0, s0), simd.fma(even, even1, s1)
            s0, s1 = simd.fma(odd, odd0, s0), simd.fma(odd, odd1, s1)
            x += 8
    store_outputs(a, row, first, s0, tail)
    if first + PANEL < a.outputs:
        store_outputs(a, row, first + PANEL, s1, tail)


@njit(inline="always")
def _decode(panel, groups, target, KIND):  # type: ignore[no-untyped-def]
    for number in range(groups):
        group = panel + number * GROUP_BYTES[KIND]
        scales, minima = scales_of(group, KIND)
        for pair in range(GROUP // 2):
            even, odd = two_inputs(group, pair, scales, minima, KIND)
            simd.store_f32x16(target, even)
            simd.store_f32x16(target + 64, odd)
            target += 128


def quantized_product_kernel(kind: int, inputs: int) -> Kernel:
    """One item is a block of outputs of up to `CHUNK` rows; its work is the number of rows."""
    return _compiled(kind).again_for(WORTH, BLOCK * inputs)


@cache
def _compiled(kind: int) -> Kernel:
    KIND, SIZE = kind, GROUP_BYTES[kind]

    def quantized_product(address):  # type: ignore[no-untyped-def]
        a = carray(raw.pointer(address), 1, _PRODUCT)[0]
        groups = a.inputs // GROUP
        size, few = groups * SIZE, min(a.rows, CHUNK) < 3
        tail = raw.allocate((PANEL + (0 if few else a.inputs * PANEL)) * 4)
        decoded = tail + PANEL * 4
        blocks = (a.outputs + BLOCK - 1) // BLOCK
        while True:
            item = take(address)
            if item >= a.items:
                break
            block, start = item % blocks, item // blocks * CHUNK
            end, first = min(start + CHUNK, a.rows), block * BLOCK
            weights, panels = a.weight + block * 4 * size, min(4, (a.outputs - first + PANEL - 1) // PANEL)
            if end - start < 3:
                for panel in range(0, panels, 2):
                    for row in range(start, end):
                        _one_row(a, row, weights + panel * size, first + panel * PANEL, tail, KIND)
                continue
            for panel in range(panels):
                _decode(weights + panel * size, groups, decoded, KIND)
                at, row = first + panel * PANEL, start
                while row < end:
                    left = end - row
                    if left > 8 or left == 5 or left == 6:
                        six_rows(a, row, end - 1, decoded, at, tail, 0)
                        row += 6
                    else:
                        four_rows(a, row, end - 1, decoded, at, tail, 0)
                        row += 4
        raw.release(tail)

    return Kernel(quantized_product, PRODUCT, cost=1)
