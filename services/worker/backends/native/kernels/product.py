"""y = W x + b for few rows, where preparing a general product would take longer than the product itself."""

import numpy as np
from numba import carray

from services.worker.backends.native.kernels import simd
from services.worker.backends.native.kernels.team import HEADER, Kernel, take

BLOCK = 64
"""Outputs whose weights lie side by side."""
PRODUCT = [
    ("x", np.int64),  # float32[rows, inputs]
    ("weight", np.int64),  # [items, inputs, BLOCK]
    ("bias", np.int64),  # float32[items * BLOCK]
    ("out", np.int64),  # float32[rows, outputs]
    ("rows", np.int64),
    ("inputs", np.int64),
    ("outputs", np.int64),
]
_PRODUCT = np.dtype(HEADER + PRODUCT, align=True)


def product_kernel(half: bool) -> Kernel:
    """One item is a block of outputs. Every output is summed over the inputs in order, so a row has the same bits
    among any others. `half`: the weights are bfloat16."""
    HALF, SIZE = int(half), 2 if half else 4

    def product(address):  # type: ignore[no-untyped-def]
        a = carray(simd.pointer(address), 1, _PRODUCT)[0]
        width = a.inputs * 4
        while True:
            block = take(address, 1)
            if block >= a.items:
                break
            weights, first = a.weight + block * a.inputs * BLOCK * SIZE, block * BLOCK
            size = min(BLOCK, a.outputs - first)
            buffer = np.empty(BLOCK, np.float32)
            tail = buffer.ctypes.data
            row = 0
            while row + 4 <= a.rows:  # four rows share each vector of weights
                x = a.x + row * width
                for lane in range(0, size, 16):
                    start = simd.load_f32x16(a.bias + (first + lane) * 4)
                    s0, s1, s2, s3 = start, start, start, start
                    w = weights + lane * SIZE
                    for i in range(0, width, 4):
                        some = simd.load16(w, HALF)
                        s0 = simd.fma(simd.splat(simd.load_f32(x + i)), some, s0)
                        s1 = simd.fma(simd.splat(simd.load_f32(x + width + i)), some, s1)
                        s2 = simd.fma(simd.splat(simd.load_f32(x + 2 * width + i)), some, s2)
                        s3 = simd.fma(simd.splat(simd.load_f32(x + 3 * width + i)), some, s3)
                        w += BLOCK * SIZE
                    out = a.out + (row * a.outputs + first + lane) * 4
                    if lane + 16 <= size:
                        simd.store_f32x16(out, s0)
                        simd.store_f32x16(out + a.outputs * 4, s1)
                        simd.store_f32x16(out + 2 * a.outputs * 4, s2)
                        simd.store_f32x16(out + 3 * a.outputs * 4, s3)
                    else:
                        simd.store_f32x16(tail, s0)
                        simd.store_f32x16(tail + 64, s1)
                        simd.store_f32x16(tail + 128, s2)
                        simd.store_f32x16(tail + 192, s3)
                        for r in range(4):
                            for j in range(size - lane):
                                simd.store_f32(out + (r * a.outputs + j) * 4, buffer[r * 16 + j])
                row += 4
            while row < a.rows:
                x = a.x + row * width
                bias = a.bias + first * 4
                s0, s1 = simd.load_f32x16(bias), simd.load_f32x16(bias + 64)
                s2, s3 = simd.load_f32x16(bias + 128), simd.load_f32x16(bias + 192)
                w = weights
                for i in range(0, width, 4):
                    some = simd.splat(simd.load_f32(x + i))
                    s0 = simd.fma(some, simd.load16(w, HALF), s0)
                    s1 = simd.fma(some, simd.load16(w + 16 * SIZE, HALF), s1)
                    s2 = simd.fma(some, simd.load16(w + 32 * SIZE, HALF), s2)
                    s3 = simd.fma(some, simd.load16(w + 48 * SIZE, HALF), s3)
                    w += BLOCK * SIZE
                out = a.out + (row * a.outputs + first) * 4
                target = out if size == BLOCK else tail
                simd.store_f32x16(target, s0)
                simd.store_f32x16(target + 64, s1)
                simd.store_f32x16(target + 128, s2)
                simd.store_f32x16(target + 192, s3)
                if size < BLOCK:
                    for j in range(size):
                        simd.store_f32(out + j * 4, buffer[j])
                row += 1

    return Kernel(product, PRODUCT, cost=8)
