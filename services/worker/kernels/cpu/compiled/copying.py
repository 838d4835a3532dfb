"""Rows that are gathered, copied or added."""

import numpy as np
from numba import carray

from services.worker.kernels.cpu.compiled import raw, simd
from services.worker.kernels.cpu.thread_team import Kernel, arguments, items

WORTH = 1 << 16
"""Smallest amount of numbers for which another thread is used."""
COPY = arguments(
    ("source", np.int64),  # [any, width], bfloat16 or float32
    ("index", np.int64),  # int32[items]: which row, or 0: each in turn
    ("out", np.int64),  # float32[items, stride]: the first `width` numbers of each row are written
    ("width", np.int64),
    ("stride", np.int64),
    ("adds", np.int64),  # 1: added to the present numbers; 0: written
    ("factor", np.float32),  # of the source
)


def copy_kernel(half: bool) -> Kernel:
    """One item is one row. Set the cost to that of the width. `half`: the source is bfloat16."""
    HALF, SIZE = int(half), 2 if half else 4

    def copy(address):  # type: ignore[no-untyped-def]
        a = carray(raw.pointer(address), 1, COPY)[0]
        index, whole, factors = raw.i32_at(a.index, a.items), a.width // 16 * 16, simd.splat(a.factor)
        for item in items(address, a.items):
            row = np.int64(index[item]) if a.index != 0 else item
            source, out = a.source + row * a.width * SIZE, a.out + item * a.stride * 4
            for i in range(0, whole, 16):
                value = simd.load16(source + i * SIZE, HALF)
                if a.adds != 0:
                    value = simd.fma(value, factors, simd.load_f32x16(out + i * 4))
                else:
                    value = simd.mul(value, factors)
                simd.store_f32x16(out + i * 4, value)
            for i in range(whole, a.width):
                one = simd.load1(source + i * SIZE, HALF) * a.factor
                if a.adds != 0:
                    one += simd.load_f32(out + i * 4)
                simd.store_f32(out + i * 4, one)

    return Kernel(copy, COPY, cost=1)
