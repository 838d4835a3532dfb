"""AVX-512's bfloat16 instructions for numba kernels: rounding, products of pairs, quantised weights decoded to
pairs, and rows of inputs and outputs.

`vdpbf16ps` adds the products of two inputs to sixteen sums in one fixed order, so a row's sums do not depend on the
rows beside it.
"""

from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import njit
from numba.core import cgutils, types

from services.worker.kernels.cpu.compiled import simd
from services.worker.kernels.cpu.compiled.block_formats import (
    FORMATS,
    KINDS,
    PANELS,
    SPAN,
    block_scale,
    code_words,
    group_factor,
    step_minima,
)
from services.worker.kernels.cpu.compiled.building import for_each_size, load, moved, store, times
from services.worker.kernels.cpu.compiled.intrinsics import CONSTANT, emits
from services.worker.kernels.cpu.compiled.raw import prefetch_line
from services.worker.kernels.cpu.compiled.simd import I16, I32, I64, VF, VI, spread

ROWS = 6
"""Largest number of rows that are multiplied together: 24 sums, four weights and one pair of inputs fit into 32
registers."""
WORDS = 64
"""Bytes of the weights of two inputs of a panel: sixteen words of two bfloat16."""
STEP_BYTES = 16 * WORDS
"""Bytes of the weights of a step of a panel."""
WIDTH = 2 * simd.LANES
"""Outputs that are stored together."""
SPARE = 4 * WIDTH
"""Bytes of memory that `store_outputs` writes to."""
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
    """Two vectors rounded to bfloat16, in pairs: number i of `even` beside number i of `odd`.

    With whole numbers, because `vcvtne2ps2bf16` and the shuffle after it take longer, as does the shuffle that LLVM
    would choose. Ties are rounded up.
    """
    half, bits, upper = (ir.Constant(VI, [value] * simd.LANES) for value in (0x8000, 16, -0x10000))
    low, high = (builder.add(builder.bitcast(some, VI), half) for some in (even, odd))
    operands = [builder.lshr(low, bits), high, upper]
    return builder.asm(ir.FunctionType(VI, [VI] * 3), "vpternlogd $$0xf8, $3, $2, $0", "=v,0,v,v", operands, False)


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


@emits(types.void, CONSTANT, *(types.int64,) * 3)
def _round_unit(builder: Any, kind: int, block: Any, unit: Any, target: Any) -> None:
    """Write the weights of a unit of a block in bfloat16 pairs, each rounded twice: to float32 and from it. Begin to
    read what is a span later. Addresses: `block`, `target`."""
    name = KINDS[kind]
    own, first = FORMATS[name], times(builder, unit, FORMATS[name].unit)
    ahead = ir.Constant(I64, PANELS * own.bytes * SPAN // own.steps)
    scale = builder.fmul(block_scale(builder, name, block), ir.Constant(VF, [2.0**-24] * simd.LANES))
    for line in range(0, own.codes_at, 64):
        prefetch_line(builder, moved(builder, builder.add(block, ahead), line))
    zero = ir.Constant(VF, [-float(own.zero << 24)] * simd.LANES)
    minima = [builder.fmul(scale, zero)] * own.unit
    if own.has_minima:
        minima = [step_minima(builder, name, block, moved(builder, first, step)) for step in range(own.unit)]
    turns = own.turns // own.groups
    for group in range(own.groups):
        scales = [scale] * own.unit
        for step in range(own.unit if own.multiplies else 0):
            number = moved(builder, times(builder, moved(builder, first, step), own.groups), group)
            scales[step] = builder.fmul(scale, builder.sitofp(group_factor(builder, name, block, number), VF))
            if own.zero:
                minima[step] = builder.fmul(scales[step], zero)
        for index in range(group * turns, (group + 1) * turns):
            for step, quad, words in code_words(builder, name, block, unit, ir.Constant(I64, index), ahead):
                codes = [_byte(builder, words, byte) for byte in range(4)]
                weights = [simd.build_fma(builder, code, scales[step], minima[step]) for code in codes]
                for pair in range(2):
                    place = moved(builder, target, step * STEP_BYTES + WORDS * (2 * (index + quad) + pair))
                    store(builder, _paired(builder, *weights[2 * pair : 2 * pair + 2]), place, 64)


def _byte(builder: Any, words: Any, number: int) -> Any:
    """Return a byte of each word as float32, times 2**24: one shift less than the byte itself."""
    bits, mask = (ir.Constant(VI, [value] * simd.LANES) for value in (24 - 8 * number, -(1 << 24)))
    return builder.sitofp(builder.and_(builder.shl(words, bits), mask), VF)


@njit(inline="always")
def decode_steps(codes, first, steps, target, apart, KIND, BLOCK_STEPS, BYTES, UNIT):  # type: ignore[no-untyped-def]
    """Write `steps` steps of four panels of quantised weights, from `first` on, in the order of the memory.

    Args:
        target: bfloat16[steps, 16, 16, 2], pairs of inputs of sixteen outputs; the other panels' are `apart` bytes on
        KIND, BLOCK_STEPS, BYTES, UNIT: the format's
    """
    for number in range(0, steps, UNIT):
        step, to = first + number, target + number * STEP_BYTES
        block, unit = codes + step // BLOCK_STEPS * (PANELS * BYTES), step % BLOCK_STEPS // UNIT
        for panel in range(PANELS):
            _round_unit(KIND, block + panel * BYTES, unit, to + panel * apart)


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
def store_outputs(out, size, number, value0, value1, spare):  # type: ignore[no-untyped-def]
    """Store the first `number` of `WIDTH` outputs, or all of them.

    Args:
        size: bytes of an output: 2 for bfloat16, 4 for float32
        spare: `SPARE` bytes to write to; half of them for bfloat16
    """
    place, short = out if number >= WIDTH else spare, size == 2
    if short:
        store_bf16x32(place, value0, value1)
    else:
        simd.store_f32x16(place, value0)
        simd.store_f32x16(place + 64, value1)
    for j in range(number if number < WIDTH else 0):
        simd.store1(out + j * size, simd.load1(spare + j * size, short), short)
