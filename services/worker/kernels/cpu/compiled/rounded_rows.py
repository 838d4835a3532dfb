"""Rows of activations, rounded to whole numbers of up to 16 bits with one scale for 256 inputs.

A rounded row is one after the other:

- int16[steps, 2, 16]: even inputs and odd inputs of each step; or, for codes that are multiplied as bytes,
  int8[steps, 2, 32]: the upper and the lower bytes, both signed, so that an input is 256 * upper + lower. Those for
  AMX are elsewhere, with two steps together for some formats (tile_codes.py)
- int32[steps, 2]: sums of its halves
- float32[steps]: sums
- float32[spans]: scales
"""

from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import njit
from numba.core import types

from services.worker.kernels.cpu.compiled import simd
from services.worker.kernels.cpu.compiled.block_formats import BYTES, SPAN, STEP
from services.worker.kernels.cpu.compiled.building import load, moved, store
from services.worker.kernels.cpu.compiled.intrinsics import CONSTANT, emits
from services.worker.kernels.cpu.compiled.simd import F32, I16, I32, LANES, VF, VI

HALVES_AT, TOTALS_AT, SCALES_AT = 2 * STEP, 2 * STEP + 8, 2 * STEP + 12
"""Offsets in a row of what follows the activations, in bytes for each step."""
_TINY = np.float32(1e-30)
"""Rows whose numbers are all smaller are 0."""


def _even_and_odd(builder: Any, address: Any, half: int) -> list[Any]:
    """Load 32 inputs: the even ones and the odd ones, as bits of float32."""
    if half:
        return simd.halves(builder, load(builder, address, VI, 2))
    both = [load(builder, moved(builder, address, 64 * number), VI, 4) for number in range(2)]
    orders = [ir.Constant(VI, list(range(first, 2 * LANES, 2))) for first in (0, 1)]
    return [builder.shuffle_vector(*both, order) for order in orders]


@emits(simd.vector, types.int64, CONSTANT, simd.vector)
def _larger(builder: Any, address: Any, half: int, most: Any) -> Any:
    """The larger ones of `most` and the absolute values of 32 inputs. A number that is none is the largest."""
    most = builder.bitcast(most, VI)
    for values in _even_and_odd(builder, address, half):
        size = builder.and_(values, ir.Constant(VI, [0x7FFFFFFF] * LANES))
        most = builder.select(builder.icmp_signed(">", size, most), size, most)
    return builder.bitcast(most, VF)


@emits(types.void, types.int64, CONSTANT, simd.vector, *(types.int64,) * 4, CONSTANT)
def _round_step(
    builder: Any, address: Any, half: int, inverse: Any, upper: Any, lower: Any, halves: Any, total: Any, are_bytes: int
) -> None:
    """Round 32 inputs times `inverse`. The last four: addresses of their parts of a rounded row. Even inputs are at
    `upper`, and odd ones at `lower`, if `are_bytes` is 0."""
    # The float32 nearest to a small number + 1.5 * 2**23 has that number, rounded, in its lowest bits
    magic, sums = ir.Constant(VF, [12582912.0] * LANES), ir.Constant(VI, [-2 * 0x4B400000] * LANES)
    rounded = [
        builder.bitcast(builder.fadd(builder.fmul(builder.bitcast(values, VF), inverse), magic), VI)
        for values in _even_and_odd(builder, address, half)
    ]
    kept = rounded
    if are_bytes:
        low, bits, round_up = (ir.Constant(VI, [number] * LANES) for number in (255, 8, 128))
        above = [builder.lshr(builder.add(some, round_up), bits) for some in rounded]
        kept = [builder.or_(builder.and_(even, low), builder.shl(odd, bits)) for even, odd in (above, rounded)]
    for number, (some, place) in enumerate(zip(kept, (upper, lower), strict=True)):
        store(builder, builder.trunc(some, ir.VectorType(I16, LANES)), place, 2)
        sums = builder.add(sums, rounded[number])
    for distance in (4, 2, 1):
        order = ir.Constant(VI, [lane ^ distance for lane in range(LANES)])
        sums = builder.add(sums, builder.shuffle_vector(sums, sums, order))
    ends = [builder.extract_element(sums, ir.Constant(I32, lane)) for lane in (0, LANES // 2)]
    for number, end in enumerate(ends):
        store(builder, end, moved(builder, halves, 4 * number), 4)
    store(builder, builder.sitofp(builder.add(*ends), F32), total, 4)


@emits(types.float32, simd.vector)
def _largest(builder: Any, sizes: Any) -> Any:
    """The largest of sixteen numbers that are not negative."""
    bits = builder.bitcast(sizes, VI)
    return builder.bitcast(simd.call_llvm(builder, "llvm.vector.reduce.smax.v16i32", I32, [bits]), F32)


@njit(inline="always")
def size_of_row(steps):  # type: ignore[no-untyped-def]
    """Memory of a rounded row, a multiple of a cache line."""
    return (steps * SCALES_AT + (steps + SPAN - 1) // SPAN * 4 + 63) // 64 * 64


@njit(inline="always")
def _round_row(x, steps, limit, to, numbers, apart, together, HALF, ARE_BYTES):  # type: ignore[no-untyped-def]
    size, halves, totals = STEP * (2 if HALF else 4), to + steps * HALVES_AT, to + steps * TOTALS_AT
    scales, odd = to + steps * SCALES_AT, together - 1  # one or two are together: no division
    for span in range((steps + SPAN - 1) // SPAN):
        first, end = span * SPAN, min(steps, span * SPAN + SPAN)
        sizes = simd.splat(np.float32(0))
        for step in range(first, end):
            sizes = _larger(x + step * size, HALF, sizes)
        largest = _largest(sizes)
        is_tiny = largest <= _TINY
        scale = np.float32(0) if is_tiny else largest / np.float32(limit)
        inverse = simd.splat(np.float32(0) if is_tiny else np.float32(limit) / largest)
        simd.store_f32(scales + span * 4, scale)
        for step in range(first, end):
            upper = numbers + (step >> odd) * apart + (step & odd) * STEP
            lower = upper + together * STEP
            _round_step(x + step * size, HALF, inverse, upper, lower, halves + step * 8, totals + step * 4, ARE_BYTES)


@njit(inline="always")
def round_rows(x, half, rows, steps, limit, to, tiles, tile_rows, together):  # type: ignore[no-untyped-def]
    """Round rows of bfloat16 (`half`) or float32 to numbers up to `limit`. Rows of tiles get the form for codes that
    are multiplied as bytes, as does one row alone, where the processor has such products.

    Args:
        tiles: address for the bytes of rows, if there are `tile_rows`, with `together` steps side by side
    """
    are_bytes, apart = tile_rows > 0 or (BYTES and rows == 1), 2 * STEP
    for row in range(rows):
        at, place = x + row * steps * STEP * (2 if half else 4), to + row * size_of_row(steps)
        numbers = place
        if tile_rows:
            apart = 2 * STEP * together * tile_rows
            numbers = tiles + row // tile_rows * (steps // together) * apart + row % tile_rows * 2 * STEP * together
        if half and are_bytes:
            _round_row(at, steps, limit, place, numbers, apart, together, 1, 1)
        elif half:
            _round_row(at, steps, limit, place, numbers, apart, together, 1, 0)
        elif are_bytes:
            _round_row(at, steps, limit, place, numbers, apart, together, 0, 1)
        else:
            _round_row(at, steps, limit, place, numbers, apart, together, 0, 0)
