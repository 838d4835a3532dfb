"""y = W x + b with AMX, from weights in bfloat16 or quantised ones. Activations are bfloat16, sums float32. The number
of panels is even.

While the first rows are multiplied, codes are decoded to bfloat16 into a panel that stays in the innermost caches. Each
sum runs over the inputs in order, 32 at a time, so a row has the same bits in a batch of any size (batch invariance,
docs/invariants.md).
"""

from functools import cache

import numpy as np
from numba import carray, njit

from services.worker.backends.native.kernels.cpu.compiled import amx, bf16, bf16_rows, raw, simd
from services.worker.backends.native.kernels.cpu.compiled.block_formats import PANEL
from services.worker.backends.native.kernels.cpu.compiled.product import PRODUCT
from services.worker.backends.native.kernels.cpu.compiled.quantized import (
    BF16,
    BLOCK_BYTES,
    BLOCK_INPUTS,
    GROUP,
)
from services.worker.backends.native.kernels.cpu.thread_team import HEADER, Kernel, take

BLOCK = 2 * PANEL
"""Outputs of one item: two panels."""
CHUNK = 1024
"""Maximum number of rows of one item. A panel is decoded once per item."""
WORTH = 1 << 17
"""Smallest number of multiplications for which another thread is used."""
_PRODUCT = np.dtype(HEADER + PRODUCT, align=True)


@njit(inline="always")
def _sums(x0, x1, stride, weights, size, decoded, groups, DECODES, PAIR, KIND):  # type: ignore[no-untyped-def]
    """Multiply one tile of rows, or two if `PAIR`, with two panels.

    `weights` are the first panel's codes, and `size` its bytes, if `DECODES`; else `decoded` has the weights already.
    """
    amx.zero_0()
    amx.zero_1()
    if PAIR:
        amx.zero_2()
        amx.zero_3()
    tile0, tile1 = decoded, decoded + groups * amx.TILE_BYTES
    for number in range(groups):
        if DECODES:
            steps = BLOCK_INPUTS[KIND] // GROUP
            block, step = weights + number // steps * BLOCK_BYTES[KIND], number % steps
            bf16.decode_tile(KIND, tile0, block, step)
            bf16.decode_tile(KIND, tile1, block + size, step)
        amx.load_4(x0 + number * 64, stride)
        amx.load_6(tile0, 64)
        amx.load_7(tile1, 64)
        amx.multiply_0()
        amx.multiply_1()
        if PAIR:
            amx.load_5(x1 + number * 64, stride)
            amx.multiply_2()
            amx.multiply_3()
        tile0 += amx.TILE_BYTES
        tile1 += amx.TILE_BYTES


@njit(inline="always")
def _write(a, sums, row, rows, first):  # type: ignore[no-untyped-def]
    """Add the bias to two tiles of sums side by side, and store outputs `first` to `first` + 31."""
    bias, number = a.bias + first * 4, a.outputs - first
    bias0, bias1 = simd.load_f32x16(bias), simd.load_f32x16(bias + 64)
    tail = sums + 2 * amx.TILE_BYTES
    out = a.out + (row * a.stride + first) * 2
    for i in range(rows):
        value0 = simd.add(simd.load_f32x16(sums + i * 64), bias0)
        value1 = simd.add(simd.load_f32x16(sums + amx.TILE_BYTES + i * 64), bias1)
        bf16_rows.store_outputs(out, number, value0, value1, tail)
        out += a.stride * 2


@njit(inline="always")
def _tile(a, x0, x1, row0, row1, block, decoded, size, memory, stride, DECODES, PAIR, KIND):  # type: ignore[no-untyped-def]
    """Compute one or two tiles of rows of a block of outputs."""
    groups, first, rows = (a.inputs + GROUP - 1) // GROUP, block * BLOCK, min(a.rows, amx.ROWS)
    _sums(x0, x1, stride, a.weight + block * 2 * size, size, decoded, groups, DECODES, PAIR, KIND)
    amx.store_0(memory, 64)
    amx.store_1(memory + amx.TILE_BYTES, 64)
    _write(a, memory, row0, rows, first)
    if PAIR:
        amx.store_2(memory, 64)
        amx.store_3(memory + amx.TILE_BYTES, 64)
        _write(a, memory, row1, rows, first)


def tile_product_kernel(kind: int, inputs: int) -> Kernel:
    """One item is two panels of up to `CHUNK` rows; its work is the number of rows."""
    return _compiled(kind).again_for(WORTH, BLOCK * inputs)


@cache
def _compiled(kind: int) -> Kernel:
    KIND, SIZE, INPUTS, CODED = kind, BLOCK_BYTES[kind], BLOCK_INPUTS[kind], kind != BF16

    def tile_product(address):  # type: ignore[no-untyped-def]
        a = carray(raw.pointer(address), 1, _PRODUCT)[0]
        blocks, groups = (a.outputs + BLOCK - 1) // BLOCK, (a.inputs + GROUP - 1) // GROUP
        size, whole, rows = (
            (a.inputs + INPUTS - 1) // INPUTS * SIZE,
            a.inputs % GROUP == 0,
            min(a.rows, amx.ROWS),
        )
        stride = groups * GROUP * 2
        panels = 2 * groups * amx.TILE_BYTES if CODED else 0
        copied = 0 if whole else min(a.rows, CHUNK) * stride
        sums = 2 * amx.TILE_BYTES + 64
        buffer = raw.allocate(64 + sums + panels + copied)
        memory = (buffer + 63) // 64 * 64
        scratch = memory + sums
        configured = False
        while True:
            item = take(address)
            if item >= a.items:
                break
            if not configured:
                amx.configure(memory, rows)
                configured = True
            block, start = item % blocks, item // blocks * CHUNK
            # A tile has `rows` rows; if too few rows are left, the last tile of a chunk begins earlier
            start, end = max(0, min(start, a.rows - rows)), min(start + CHUNK, a.rows)
            x = a.x + start * a.inputs * 2
            if not whole:
                x = scratch + panels
                source = a.x + start * a.inputs * 2
                bf16_rows.copy_padded(source, end - start, a.inputs, x, groups * GROUP)
            decoded = scratch if CODED else a.weight + block * 2 * size
            row = start
            while row < end:
                one, last = min(row, end - rows), end - row <= rows
                two = one if last else min(row + rows, end - rows)
                x0, x1 = x + (one - start) * stride, x + (two - start) * stride
                if CODED and row == start:
                    if last:
                        _tile(a, x0, x1, one, two, block, decoded, size, memory, stride, True, False, KIND)
                    else:
                        _tile(a, x0, x1, one, two, block, decoded, size, memory, stride, True, True, KIND)
                elif last:
                    _tile(a, x0, x1, one, two, block, decoded, size, memory, stride, False, False, KIND)
                else:
                    _tile(a, x0, x1, one, two, block, decoded, size, memory, stride, False, True, KIND)
                row += 2 * rows
        if configured:
            amx.release()
        raw.release(buffer)

    return Kernel(tile_product, PRODUCT, cost=1)
