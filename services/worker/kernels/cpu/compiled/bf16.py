"""AVX-512's bfloat16 instructions for numba kernels: rounding, products of pairs, and rows of inputs and outputs.

`vdpbf16ps` adds the products of two inputs to sixteen sums in one fixed order, so a row's sums do not depend on the
rows beside it.
"""

from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import njit
from numba.core import cgutils, types

from services.worker.kernels.cpu.compiled import simd
from services.worker.kernels.cpu.compiled.block_formats import QUADS
from services.worker.kernels.cpu.compiled.building import for_each_size, load, moved, store, times
from services.worker.kernels.cpu.compiled.intrinsics import emits
from services.worker.kernels.cpu.compiled.simd import I16, I32, VF, VI, spread

PANELS = 4
"""Panels that rows are multiplied with."""
ROWS = 6
"""Largest number of rows that are multiplied together: 24 sums, four weights and one pair of inputs fit into 32
registers."""
WORDS = 64
"""Bytes of the weights of two inputs of a panel: sixteen words of two bfloat16."""
WIDTH = 2 * simd.LANES
"""Outputs that are stored together."""
_HALVES = ir.VectorType(I16, 32)


def _rounded(builder: Any, first: Any, second: Any) -> Any:
    """Two vectors of float32 as thirty-two bfloat16, one after the other."""
    kind = ir.FunctionType(_HALVES, [VF, VF])
    return builder.asm(kind, "vcvtne2ps2bf16 $2, $1, $0", "=v,v,v", [second, first], False)


@emits(types.void, types.int64, simd.vector, simd.vector)
def store_bf16x32(builder: Any, address: Any, first: Any, second: Any) -> None:
    """Round two vectors to bfloat16 and store them one after the other."""
    store(builder, _rounded(builder, first, second), address, 2)


def _paired(builder: Any, even: Any, odd: Any) -> Any:
    """Two vectors rounded to bfloat16, in pairs: number i of `even` beside number i of `odd`."""
    rounded = _rounded(builder, even, odd)
    order = [number // 2 + number % 2 * 16 for number in range(32)]
    return builder.shuffle_vector(rounded, rounded, ir.Constant(ir.VectorType(I32, 32), order))


@emits(types.void, *(types.int64,) * 7)
def dot_products(builder: Any, rows: Any, x: Any, stride: Any, weights: Any, step: Any, pairs: Any, out: Any) -> None:
    """Multiply `rows` rows, up to `ROWS`, with `PANELS` panels of bfloat16.

    Args:
        x: address of the first row, bfloat16
        stride: bytes from one row to the next
        weights: address of the first panel: bfloat16[pairs, 16, 2]
        step: bytes from one panel to the next
        pairs: inputs / 2
        out: float32[rows, PANELS, 16], overwritten
    """

    def multiply(rows: int) -> None:
        sums = [[cgutils.alloca_once(builder, VF) for _ in range(PANELS)] for _ in range(rows)]  # in registers
        every = [place for row in sums for place in row]
        for place in every:
            builder.store(ir.Constant(VF, None), place)
        with cgutils.for_range(builder, pairs) as loop:
            offset, inputs = times(builder, loop.index, WORDS), times(builder, loop.index, 4)
            words = [load(builder, _at(builder, weights, step, panel, offset), VI) for panel in range(PANELS)]
            for number, row in enumerate(sums):
                some = spread(builder, load(builder, _at(builder, x, stride, number, inputs), I32), VI)
                for place, word in zip(row, words, strict=True):
                    builder.store(_dot(builder, builder.load(place), some, word), place)
        for number, place in enumerate(every):
            store(builder, builder.load(place), moved(builder, out, number * WORDS))

    for_each_size(builder, rows, range(1, ROWS + 1), multiply)


@emits(types.void, *(types.int64,) * 4)
def round_step(builder: Any, target: Any, numbers: Any, scale: Any, minimum: Any) -> None:
    """Write the weights of a decoded step (`block_formats`) in bfloat16 pairs. All are addresses."""
    scales, minima = load(builder, scale, VF), load(builder, minimum, VF)
    bits = ir.Constant(VI, [16] * simd.LANES)

    def weights(half: int, quad: int) -> list[Any]:
        words = load(builder, moved(builder, numbers, WORDS * (half * QUADS + quad)), VI)
        both = builder.ashr(builder.shl(words, bits), bits), builder.ashr(words, bits)
        return [simd.build_fma(builder, builder.sitofp(some, VF), scales, minima) for some in both]

    for quad in range(QUADS):
        for number, both in enumerate(zip(weights(0, quad), weights(1, quad), strict=True)):
            store(builder, _paired(builder, *both), moved(builder, target, WORDS * (2 * quad + number)), 2)


def _at(builder: Any, base: Any, distance: Any, number: int, offset: Any) -> Any:
    return builder.add(builder.add(base, times(builder, distance, number)), offset)


def _dot(builder: Any, sums: Any, x: Any, weights: Any) -> Any:
    kind = ir.FunctionType(VF, [VF, VI, VI])
    return builder.asm(kind, "vdpbf16ps $3, $2, $0", "=v,0,v,v", [sums, x, weights], False)


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
        store_bf16x32(out, value0, value1)
    else:
        store_bf16x32(spare, value0, value1)
        for j in range(number):
            simd.store_bf16(out + j * 2, simd.load_bf16(spare + j * 2))
