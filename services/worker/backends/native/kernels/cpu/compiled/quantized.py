"""Weights in panels of 16 outputs, and their decoding.

A panel is divided into groups of 32 inputs, one after the other:

- INT4: float16[16] scales, float16[16] minima, uint8[16, 16]: the halves of byte [i, lane] are inputs 2 i and 2 i + 1.
- INT8: float16[16] scales, int8[32, 16].
- BF16: bfloat16[16, 16, 2]: inputs 2 i and 2 i + 1 of each output side by side, as AMX reads them.

A weight is code * scale + minimum, rounded once.
"""

import numpy as np
from numba import carray, njit

from services.worker.backends.native.kernels.cpu.compiled import raw, simd
from services.worker.backends.native.kernels.cpu.thread_team import HEADER, Kernel, take

BF16, INT8, INT4 = 0, 1, 2
"""Kinds of panels."""
PANEL = 16
"""Outputs of a panel."""
GROUP = 32
"""Inputs of a group."""
GROUP_BYTES = (2 * PANEL * GROUP, 2 * PANEL + PANEL * GROUP, 4 * PANEL + PANEL * GROUP // 2)
"""Bytes of a group, by kind."""
SCALES_BYTES = (0, 2 * PANEL, 4 * PANEL)
"""Bytes of a group before its codes."""
ROWS = [
    ("panels", np.int64),
    ("index", np.int64),  # int32[items]: which output
    ("out", np.int64),  # float32[items, stride]: the first `inputs` numbers of each row are written
    ("inputs", np.int64),
    ("stride", np.int64),
]
_ROWS = np.dtype(HEADER + ROWS, align=True)


@njit(inline="always")
def scales_of(group, KIND):  # type: ignore[no-untyped-def]
    """The scales and the minima of a group."""
    minima = simd.load_f16x16(group + 2 * PANEL) if KIND == INT4 else simd.splat(np.float32(0))
    return simd.load_f16x16(group), minima


@njit(inline="always")
def two_inputs(group, pair, scales, minima, KIND):  # type: ignore[no-untyped-def]
    """The weights of inputs 2 `pair` and 2 `pair` + 1 of a group."""
    if KIND == INT4:
        codes = group + 4 * PANEL + pair * PANEL
        even, odd = simd.load_low_nibbles(codes), simd.load_high_nibbles(codes)
        return simd.fma(even, scales, minima), simd.fma(odd, scales, minima)
    codes = group + 2 * PANEL + pair * 2 * PANEL
    return simd.mul(simd.load_i8x16(codes), scales), simd.mul(simd.load_i8x16(codes + PANEL), scales)


def rows_kernel(kind: int) -> Kernel:
    """out[i] = weights of output index[i], in float32. One item is one row."""
    KIND, SIZE = kind, GROUP_BYTES[kind]

    def rows(address):  # type: ignore[no-untyped-def]
        a = carray(raw.pointer(address), 1, _ROWS)[0]
        index, groups = raw.i32_at(a.index, a.items), (a.inputs + GROUP - 1) // GROUP
        spare = raw.allocate(2 * PANEL * 4)
        while True:
            item = take(address)
            if item >= a.items:
                break
            row, out = np.int64(index[item]), a.out + item * a.stride * 4
            panel, lane = a.panels + row // PANEL * groups * SIZE, row % PANEL
            for number in range(groups):
                group = panel + number * SIZE
                if KIND == BF16:
                    for i in range(min(GROUP, a.inputs - number * GROUP)):
                        at = group + (i // 2 * PANEL + lane) * 4 + i % 2 * 2
                        simd.store_f32(out + (number * GROUP + i) * 4, simd.load_bf16(at))
                    continue
                scales, minima = scales_of(group, KIND)
                for pair in range(GROUP // 2):
                    even, odd = two_inputs(group, pair, scales, minima, KIND)
                    simd.store_f32x16(spare, even)
                    simd.store_f32x16(spare + 4 * PANEL, odd)
                    to = out + (number * GROUP + 2 * pair) * 4
                    simd.store_f32(to, simd.load_f32(spare + lane * 4))
                    simd.store_f32(to + 4, simd.load_f32(spare + (PANEL + lane) * 4))
        raw.release(spare)

    return Kernel(rows, ROWS, cost=32)
