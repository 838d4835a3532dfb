"""Products of many rounded rows (rounded_rows.py) with decoded panels, with AMX's products of bytes, for
coded_product.py.

A number of 16 bits is 256 times a signed byte plus another one. So four tiles of sums, one for each pair of bytes, make
the same whole numbers as products of 16 bits, and a row has the same bits with either (batch invariance,
docs/invariants.md). They pay where several steps share a scale: otherwise the sums of 32 inputs are scaled, which takes
longer than the products.
"""

from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import carray, njit
from numba.core import types

from services.worker.kernels.cpu.compiled import amx, raw
from services.worker.kernels.cpu.compiled.block_formats import MINIMA_AT, NUMBERS_BYTES, PANELS, SCALES_AT, SPAN, STEP
from services.worker.kernels.cpu.compiled.building import for_each_size, load, moved, store
from services.worker.kernels.cpu.compiled.code_tile import CodeTile
from services.worker.kernels.cpu.compiled.intrinsics import CONSTANT, emits
from services.worker.kernels.cpu.compiled.simd import I16, I64, LANES, VF, VI
from services.worker.kernels.cpu.thread_team import compiled

LEAST_ROWS = 13
"""Fewer rows do not pay for the bytes of the panels: a step of 12 takes as long without AMX."""
TILE_TASK = np.dtype(
    [
        ("decoded", np.int64),  # address of a span of a decoded panel, whose numbers are overwritten by their bytes
        ("first", np.int64),  # step of the span
        ("rows", np.int64),  # 0: release the tiles
        ("x", np.int64),  # address of the first rounded row
        ("row_bytes", np.int64),
        ("row_steps", np.int64),
        ("bytes", np.int64),  # address of the split rows
        ("tiles", np.int64),  # number of tiles of all rows
        ("tile_rows", np.int64),  # of each of them; the last one may have fewer
        ("out", np.int64),  # float32[rows, PANELS, 16], to which products are added
        ("ahead", np.int64),  # address of codes that are decoded later: they are read from memory meanwhile
        ("ahead_bytes", np.int64),  # how many for two steps of a tile: all at once would hold up the products
        ("room", np.int64),  # ROOM bytes to write to
        ("configured", np.int64),  # 0 before the first call with this `tile_rows`
    ]
)
"""Arguments of a `tile_multiplier`."""
_PARTS = 4
"""Tiles of sums: by the bytes of inputs and of weights."""
ROOM = 64 + 2 * _PARTS * amx.TILE_BYTES
"""Bytes for a configuration and for the sums of up to two scales in a span."""
_FINISHED = amx.ROWS // 2
"""Largest number of rows whose sums are scaled together."""


@emits(types.void, *(types.int64,) * 3, CONSTANT)
def _split(builder: Any, address: Any, lower: Any, upper: Any, are_neighbours: int) -> None:
    """Write the lower and the upper bytes of two vectors of pairs of int16: word i of each has those of two pairs.

    Args:
        are_neighbours: the pairs of a word are side by side, as in a row, and not in the same place of both vectors,
            as in a panel
    """
    pairs = [load(builder, moved(builder, address, 64 * number), VI) for number in range(2)]
    if are_neighbours:
        orders = [ir.Constant(VI, list(range(first, 2 * LANES, 2))) for first in range(2)]
        pairs = [builder.shuffle_vector(*pairs, order) for order in orders]
    mask, above, eight = (ir.Constant(VI, [value] * LANES) for value in (0x00FF00FF, -0x00FF0100, 8))
    short = ir.VectorType(I16, 2 * LANES)
    half = ir.Constant(short, [128] * 2 * LANES)
    even, odd = pairs
    low = builder.or_(builder.and_(even, mask), builder.and_(builder.shl(odd, eight), above))
    # The upper byte of a number whose lower byte is negative is one more
    even, odd = (builder.bitcast(builder.add(builder.bitcast(some, short), half), VI) for some in pairs)
    high = builder.or_(builder.and_(builder.lshr(even, eight), mask), builder.and_(odd, above))
    store(builder, low, lower)
    store(builder, high, upper)


@njit(inline="always")
def split_row(x, steps, row, tiles, tile_rows, to):  # type: ignore[no-untyped-def]
    """Write the bytes of rounded row number `row` to int8[spans, tiles, SPAN // 2, 2, 16, 64]: tiles of the lower bytes
    of two steps, and of the upper ones. The first `tile_rows` rows of a tile are used."""
    for number in range(steps // 2):
        tile = (number // (SPAN // 2) * tiles + row // tile_rows) * (SPAN // 2) + number % (SPAN // 2)
        place = to + tile * 2 * amx.TILE_BYTES + row % tile_rows * 64
        _split(x + number * 4 * STEP, place, place + amx.TILE_BYTES, 1)


@emits(types.void, CONSTANT, CONSTANT, *(types.int64,) * 8)
def _add_sums(
    builder: Any, scale_steps: int, has_minima: bool, rows: Any, x: Any, row_bytes: Any, steps: Any, first: Any,
    decoded: Any, tiles: Any, out: Any
) -> None:  # fmt: skip
    """Scale the sums of up to `_FINISHED` rows of a span of a panel, and add them to float32[rows, PANELS, 16].

    Args:
        decoded: address of the panel
        tiles: address of the first row in int32[SPAN // scale_steps, 2, 2, 16, 16]: sums by the bytes of inputs and of
            weights
    """

    def add(rows: int) -> None:
        tile, panel = CodeTile(builder, rows, 1, x, row_bytes, steps, first), ir.Constant(I64, 0)
        sums, eight = tile.vectors(VI, 1), ir.Constant(VI, [8] * LANES)

        def loaded(index: int, more: int) -> list[Any]:
            return [load(builder, moved(builder, decoded, more + 64 * index), VF, 4)]

        for group in range(SPAN // scale_steps):
            for step in range(group * scale_steps, (group + 1) * scale_steps) if has_minima else ():
                tile.add_minima(loaded(step, MINIMA_AT), moved(builder, first, step), panel)
            for row, (place,) in enumerate(sums):
                at = group * _PARTS * amx.TILE_BYTES + row * 64
                parts = [
                    load(builder, moved(builder, tiles, at + part * amx.TILE_BYTES), VI, 4) for part in range(_PARTS)
                ]
                upper = builder.add(builder.add(parts[1], parts[2]), builder.shl(parts[3], eight))
                builder.store(builder.add(parts[0], builder.shl(upper, eight)), place)
            tile.add_scaled(sums, loaded(group, SCALES_AT), panel)
        tile.add_to(out)

    for_each_size(builder, rows, range(1, _FINISHED + 1), add)


@cache
def tile_multiplier(scale_steps: int, has_minima: bool) -> int:
    """Compile the products of a span of a decoded panel with `LEAST_ROWS` rows or more, for formats with these two
    properties. Return the address of a C function with the address of a `TILE_TASK`."""
    SCALE_STEPS, HAS_MINIMA = scale_steps, has_minima

    def multiply(address):  # type: ignore[no-untyped-def]
        a = carray(raw.pointer(address), 1, TILE_TASK)[0]
        if a.rows == 0:
            amx.release()
            return
        if a.configured == 0:
            amx.configure(a.room, a.tile_rows)
            a.configured = 1
        ahead, sums, groups, loads = a.ahead, a.room + 64, SPAN // SCALE_STEPS, SCALE_STEPS // 2
        for number in range(SPAN * NUMBERS_BYTES // 128):
            at = a.decoded + number * 128
            _split(at, at, at + 64, 0)
        x = a.bytes + a.first // SPAN * a.tiles * SPAN * amx.TILE_BYTES
        for row in range(0, a.rows, a.tile_rows):
            at, to = a.decoded, sums
            for _ in range(groups):
                amx.zero_0()
                amx.zero_1()
                amx.zero_2()
                amx.zero_3()
                for _ in range(loads):
                    raw.prefetch(ahead, a.ahead_bytes)
                    ahead += a.ahead_bytes
                    amx.load_4(x, 64)
                    amx.load_6(at, 128)
                    amx.multiply_bytes_0()
                    amx.load_7(at + 64, 128)
                    amx.multiply_bytes_1()
                    amx.load_5(x + amx.TILE_BYTES, 64)
                    amx.multiply_bytes_2()
                    amx.multiply_bytes_3()
                    x += 2 * amx.TILE_BYTES
                    at += 2 * amx.TILE_BYTES
                amx.store_0(to, 64)
                amx.store_1(to + amx.TILE_BYTES, 64)
                amx.store_2(to + 2 * amx.TILE_BYTES, 64)
                amx.store_3(to + 3 * amx.TILE_BYTES, 64)
                to += _PARTS * amx.TILE_BYTES
            end = min(row + a.tile_rows, a.rows)
            part = (a.tile_rows + 1) // 2
            for first in range(row, end, part):
                _add_sums(
                    SCALE_STEPS, HAS_MINIMA, min(end - first, part), a.x + first * a.row_bytes, a.row_bytes,
                    a.row_steps, a.first, a.decoded, sums + (first - row) * 64, a.out + first * PANELS * 64,
                )  # fmt: skip

    return int(compiled(multiply).address)
