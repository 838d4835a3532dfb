# ruff: noqa: ARG001, the signatures are numba's
"""y = W x + b in float32 with AVX-512, from weights in float32 or bfloat16.

Up to six rows are multiplied with 64 outputs at once: a weight is loaded once for six rows, and an input once for 64
outputs. Every output is summed over the inputs in order, so a row has the same bits in a batch of any size (batch
invariance, docs/invariants.md), and the same bits as those of `product`.
"""

from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import carray, njit
from numba.core import cgutils, types
from numba.extending import intrinsic

from services.worker.kernels.cpu.compiled import raw, simd
from services.worker.kernels.cpu.compiled.building import load, moved, spread, store
from services.worker.kernels.cpu.compiled.product import BLOCK, PRODUCT, WORTH
from services.worker.kernels.cpu.compiled.simd import F32, I64, LANES, VF, VI
from services.worker.kernels.cpu.thread_team import HEADER, Kernel, take

VECTORS = BLOCK // LANES
ROWS = 6
"""Rows that are multiplied together: 24 sums, four weights and one input fit into 32 registers."""
CHUNK = 16 * ROWS
"""Maximum number of rows of one item."""
AHEAD = 1 << 14
"""Bytes from the weights that one row reads to those that are prefetched; more rows take longer for each weight. The
processor's own prefetching ends with a page."""
_PRODUCT = np.dtype(HEADER + PRODUCT, align=True)


@intrinsic(prefer_literal=True)
def multiply_rows(
    typing_context: Any,
    rows: Any,
    half: Any,
    x: Any,
    stride: Any,
    weights: Any,
    inputs: Any,
    bias: Any,
    out: Any,
    out_stride: Any,
) -> Any:
    """Multiply `rows` rows with a block of outputs.

    `rows` and `half` are constants.

    Args:
        x: address of the first row, float32
        stride: bytes from one row to the next
        weights: address of the block: [inputs, BLOCK], float32 or, if `half`, bfloat16 as `_block_of` loads it
        bias: float32[BLOCK]
        out: address of the first row of sums: float32[BLOCK], overwritten
        out_stride: bytes from one row of sums to the next
    """

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x, stride, weights, inputs, bias, out, out_stride = args[2:]
        size = BLOCK * (2 if half.literal_value else 4)
        sums = [[cgutils.alloca_once(builder, VF) for _ in range(VECTORS)] for _ in range(rows.literal_value)]
        for row in sums:
            for number, place in enumerate(row):
                builder.store(load(builder, moved(builder, bias, number * 64), VF, 4), place)
        with cgutils.for_range(builder, inputs) as loop:
            here = builder.add(weights, builder.mul(loop.index, ir.Constant(I64, size)))
            for line in range(0, size, 64):
                raw.prefetch_line(builder, moved(builder, here, AHEAD // rows.literal_value + line))
            vectors = _block_of(builder, here, half.literal_value)
            for number, row in enumerate(sums):
                start = builder.add(x, builder.mul(stride, ir.Constant(I64, number)))
                at = builder.add(start, builder.mul(loop.index, ir.Constant(I64, 4)))
                some = spread(builder, load(builder, at, F32, 4), VF)
                for place, vector in zip(row, vectors, strict=True):
                    value = simd.call_llvm(builder, "llvm.fma.v16f32", VF, [some, vector, builder.load(place)])
                    builder.store(value, place)
        for number, row in enumerate(sums):
            start = builder.add(out, builder.mul(out_stride, ir.Constant(I64, number)))
            for vector, place in enumerate(row):
                store(builder, builder.load(place), moved(builder, start, vector * 64), 4)
        return context.get_dummy_value()

    return types.void(rows, half, *[types.int64] * 7), code


def _block_of(builder: Any, address: Any, half: int) -> list[Any]:
    """Load the weights of one input. In bfloat16, number i of a vector is in the low half of word i, and number i of
    the next vector in the high half."""
    if not half:
        return [load(builder, moved(builder, address, number * 64), VF, 4) for number in range(VECTORS)]
    vectors = []
    for number in range(VECTORS // 2):
        words = load(builder, moved(builder, address, number * 64), VI, 4)
        low = builder.shl(words, ir.Constant(VI, [16] * LANES))
        high = builder.and_(words, ir.Constant(VI, [0xFFFF0000] * LANES))
        vectors += [builder.bitcast(low, VF), builder.bitcast(high, VF)]
    return vectors


@njit(inline="always")
def _store_outputs(a, sums, row, rows, first):  # type: ignore[no-untyped-def]
    """Copy the sums of the last block, which has fewer than `BLOCK` outputs."""
    for i in range(rows):
        for j in range(a.outputs - first):
            value = simd.load_f32(sums + (i * BLOCK + j) * 4)
            simd.store_f32(a.out + ((row + i) * a.stride + first + j) * 4, value)


def wide_product_kernel(half: bool, inputs: int) -> Kernel:
    """One item is a block of outputs of up to `CHUNK` rows; its work is the number of rows. `half`: the weights are
    bfloat16."""
    return _compiled(half).again_for(WORTH, BLOCK * inputs)


@cache
def _compiled(half: bool) -> Kernel:
    HALF, SIZE = int(half), 2 if half else 4

    def wide_product(address):  # type: ignore[no-untyped-def]
        a = carray(raw.pointer(address), 1, _PRODUCT)[0]
        blocks, stride = (a.outputs + BLOCK - 1) // BLOCK, a.inputs * 4
        scratch = raw.allocate(ROWS * BLOCK * 4)
        while True:
            item = take(address)
            if item >= a.items:
                break
            block, row = item % blocks, item // blocks * CHUNK
            end, first = min(row + CHUNK, a.rows), block * BLOCK
            weights, bias = a.weight + first * a.inputs * SIZE, a.bias + first * 4
            whole = first + BLOCK <= a.outputs
            while row < end:
                # Equal parts: seven rows are four and three, because one alone would wait for its weights
                parts = (end - row + ROWS - 1) // ROWS
                rows = (end - row + parts - 1) // parts
                x = a.x + row * stride
                out = a.out + (row * a.stride + first) * 4 if whole else scratch
                step = a.stride * 4 if whole else BLOCK * 4
                if rows == 6:
                    multiply_rows(6, HALF, x, stride, weights, a.inputs, bias, out, step)
                elif rows == 5:
                    multiply_rows(5, HALF, x, stride, weights, a.inputs, bias, out, step)
                elif rows == 4:
                    multiply_rows(4, HALF, x, stride, weights, a.inputs, bias, out, step)
                elif rows == 3:
                    multiply_rows(3, HALF, x, stride, weights, a.inputs, bias, out, step)
                elif rows == 2:
                    multiply_rows(2, HALF, x, stride, weights, a.inputs, bias, out, step)
                else:
                    multiply_rows(1, HALF, x, stride, weights, a.inputs, bias, out, step)
                if not whole:
                    _store_outputs(a, scratch, row, rows, first)
                row += rows
        raw.release(scratch)

    return Kernel(wide_product, PRODUCT, cost=1)
