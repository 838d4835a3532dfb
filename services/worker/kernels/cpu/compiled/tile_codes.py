"""Products of many rounded rows (rounded_rows.py) with AMX's products of bytes, for coded_product.py.

A rounded number is 256 times a signed byte plus another one. A tile has both bytes of up to `TILE_ROWS` rows, one below
the other, and one instruction multiplies 32 or 64 inputs of these rows with those of sixteen outputs, as whole numbers:
their codes; or, where scales of groups are factors of the numbers, the upper and the lower bytes of these, one after
the other. The sums are those that other ways compute, so a row has the same bits with each (batch invariance,
docs/invariants.md).
"""

from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import carray
from numba.core import cgutils, types

from services.worker.kernels.cpu.compiled import amx, raw
from services.worker.kernels.cpu.compiled.block_formats import (
    FORMATS,
    KINDS,
    PAIRS,
    PANELS,
    QUADS,
    SPAN,
    STEP,
    block_scale,
    build_pairs,
    code_words,
    group_factor,
    next_codes,
    step_minima,
)
from services.worker.kernels.cpu.compiled.building import for_each_size, load, moved, store, times
from services.worker.kernels.cpu.compiled.code_tile import TASK, CodeTile
from services.worker.kernels.cpu.compiled.intrinsics import CONSTANT, emits
from services.worker.kernels.cpu.compiled.simd import I8, I64, LANES, VI
from services.worker.kernels.cpu.thread_team import compiled

TILE_ROWS = amx.ROWS // 2
"""Most rows that are multiplied together."""
_STEP_BYTES = QUADS * 64
_SUMS_AT, _SUMS_BYTES = 64 + 2 * SPAN * _STEP_BYTES, SPAN * amx.TILE_BYTES
ROOM = _SUMS_AT + 2 * _SUMS_BYTES
"""Bytes for a configuration, the bytes of a span of a panel, and the sums of two tiles."""


@emits(types.void, CONSTANT, *(types.int64,) * 5)
def _write_bytes(builder: Any, kind: int, block: Any, steps: Any, to: Any, end: Any, jump: Any) -> None:
    """Write the bytes of a span of a panel: int8[1 or 2, SPAN, QUADS, 16, 4].

    Args:
        block: address of the panel's first block in the span
        steps: of the span
        end, jump: see `next_codes`
    """
    name = KINDS[kind]
    own, bytes_ = FORMATS[name], ir.VectorType(I8, 4 * LANES)

    def write(words: Any, place: Any, quad: int, part: int = 0) -> None:
        store(builder, words, moved(builder, place, part * SPAN * _STEP_BYTES + 64 * quad), 4)

    with cgutils.for_range(builder, builder.udiv(steps, ir.Constant(I64, own.unit))) as units:
        step = times(builder, units.index, own.unit)
        here = builder.add(block, times(builder, builder.udiv(step, ir.Constant(I64, own.steps)), PANELS * own.bytes))
        ahead = next_codes(builder, name, [here], end, jump)
        unit = builder.urem(units.index, ir.Constant(I64, own.steps // own.unit))
        to_unit = builder.add(to, times(builder, step, _STEP_BYTES))

        def write_pairs(number: int, quad: Any, both: tuple[Any, Any]) -> None:
            even, odd = (builder.bitcast(pairs, VI) for pairs in both)
            place = builder.add(to_unit, times(builder, quad, 64))
            low, high, eight = (ir.Constant(VI, [value] * LANES) for value in (0x00FF00FF, 0xFF00FF00, 8))
            lower = builder.or_(builder.and_(even, low), builder.and_(builder.shl(odd, eight), high))
            upper = builder.or_(builder.and_(builder.lshr(even, eight), low), builder.and_(odd, high))
            for part, words in enumerate((lower, upper)):
                write(words, place, number * QUADS, part)

        if own.tile_parts == 2 and not own.has_minima:
            build_pairs(builder, name, here, unit, ahead, write_pairs)
            return
        factors = []
        for number in range(own.unit if own.tile_parts == 2 else 0):
            group = moved(builder, times(builder, unit, own.unit), number)
            factor = builder.mul(group_factor(builder, name, here, group), ir.Constant(VI, [0x00010001] * LANES))
            lower = builder.and_(factor, ir.Constant(VI, [0x00070007] * LANES))
            upper = builder.lshr(builder.xor(factor, lower), ir.Constant(VI, [3] * LANES))
            factors.append([builder.bitcast(each, PAIRS) for each in (lower, upper)])
        with cgutils.for_range(builder, ir.Constant(I64, own.turns)) as loop:
            place = builder.add(to_unit, times(builder, loop.index, 64))
            for number, quad, words in code_words(builder, name, here, unit, loop.index, ahead):
                codes = builder.bitcast(words, bytes_)
                if own.zero:
                    codes = builder.sub(codes, ir.Constant(bytes_, [own.zero] * 4 * LANES))
                parts = [codes]
                if factors:
                    # No product of two bytes is larger than a byte, so two are multiplied as one number of 16 bits
                    parts = [builder.mul(builder.bitcast(words, PAIRS), factor) for factor in factors[number]]
                for part, each in enumerate(parts):
                    write(each, place, number * QUADS + quad, part)


@emits(types.void, CONSTANT, *(types.int64,) * 14)
def _multiply(
    builder: Any, kind: int, tile: Any, tile_bytes: Any, numbers: Any, to: Any, rows: Any, x: Any, row_bytes: Any,
    steps: Any, first: Any, number: Any, block: Any, found: Any, out: Any, has_next: Any
) -> None:  # fmt: skip
    """Multiply the rows of a tile with a span of a panel, and scale the sums of another tile or panel meanwhile.

    Args:
        tile: address of the tile in the span: int8[steps / `Format.tile_steps`, rows, 2, 32 * `tile_steps`]
        tile_bytes: of such a step
        numbers: address of the panel's bytes
        to: address for int32[steps / `scale_steps`, 1 or 2, 16, 16]
        rows: whose sums are scaled
        x: address of the first of these rounded rows
        row_bytes: from one row to the next
        steps: of a row
        first: step of the span
        number: of steps of the span
        block: address of the first block in the span, of the other panel
        found: sums, as they are written `to`
        out: float32[rows, PANELS, 16], to which they are added
        has_next: whether there is such a tile
    """
    name = KINDS[kind]
    own = FORMATS[name]
    parts, line, eight = own.tile_parts, ir.Constant(I64, 64), ir.Constant(VI, [8] * LANES)

    def with_memory(text: str, address: Any, more: int = 0, stride: Any = line) -> None:
        amx.emit(builder, text, moved(builder, address, more), stride)

    def multiply(scale: Any) -> None:
        for part in range(parts):
            amx.emit(builder, f"tilezero %tmm{part}")
        with cgutils.for_range(builder, ir.Constant(I64, own.scale_steps // own.tile_steps)) as tiles:
            index = builder.add(times(builder, scale, own.scale_steps // own.tile_steps), tiles.index)
            place = builder.add(tile, builder.mul(index, tile_bytes))
            with_memory("tileloadd ($0,$1,1), %tmm4", place, 0, ir.Constant(I64, STEP * own.tile_steps))
            here = builder.add(numbers, times(builder, index, own.tile_steps * _STEP_BYTES))
            for part in range(parts):
                with_memory(f"tileloadd ($0,$1,1), %tmm{6 + part}", here, part * SPAN * _STEP_BYTES)
                signs = "su" if part < parts - 1 or own.has_minima else "ss"
                amx.emit(builder, f"tdpb{signs}d %tmm{6 + part}, %tmm4, %tmm{part}")
        place = builder.add(to, times(builder, scale, parts * amx.TILE_BYTES))
        for part in range(parts):
            with_memory(f"tilestored %tmm{part}, ($0,$1,1)", place, part * amx.TILE_BYTES)

    def above(upper: Any, lower: Any) -> Any:
        return builder.add(builder.shl(upper, eight), lower)

    def add(rows: int) -> None:
        sums_of, panel = CodeTile(builder, rows, 1, x, row_bytes, steps, first), ir.Constant(I64, 0)
        sums, scale_steps = sums_of.vectors(VI, 1), ir.Constant(I64, own.scale_steps)
        with cgutils.for_range(builder, builder.udiv(number, scale_steps)) as loop:
            with builder.if_then(builder.trunc(has_next, ir.IntType(1))):
                multiply(loop.index)
            if not rows:
                return
            step = builder.mul(loop.index, scale_steps)
            here = builder.add(block, times(builder, builder.udiv(step, ir.Constant(I64, own.steps)), PANELS * own.bytes))
            with cgutils.for_range(builder, ir.Constant(I64, own.scale_steps * own.has_minima)) as inner:
                some = builder.add(step, inner.index)
                minima = step_minima(builder, name, here, builder.urem(some, ir.Constant(I64, own.steps)))
                sums_of.add_minima([minima], builder.add(first, some), panel)
            at = builder.add(found, times(builder, loop.index, parts * amx.TILE_BYTES))
            for row, (place,) in enumerate(sums):
                bytes_ = [
                    load(builder, moved(builder, at, part * amx.TILE_BYTES + 64 * (2 * row + byte)), VI, 4)
                    for part in range(parts)
                    for byte in range(2)
                ]
                whole = above(*bytes_[:2])
                if parts == 2:
                    more = ir.Constant(VI, [3 if own.has_minima else 8] * LANES)
                    whole = builder.add(whole, builder.shl(above(*bytes_[2:]), more))
                builder.store(whole, place)
            sums_of.add_scaled(sums, [block_scale(builder, name, here)], panel)
        sums_of.add_to(out)

    for_each_size(builder, rows, range(TILE_ROWS + 1), add)


@cache
def tile_coder(kind: int) -> int:
    """Compile the products of a format with `LEAST_ROWS` rows or more. Return the address of a C function with the
    address of a `TASK`. For no rows, it releases the tiles."""
    own = FORMATS[KINDS[kind]]
    KIND, STEPS, SIZE, TILE_STEPS = kind, own.steps, own.bytes, own.tile_steps

    def multiply(address):  # type: ignore[no-untyped-def]
        a = carray(raw.pointer(address), 1, TASK)[0]
        if a.rows == 0:
            amx.release()
            return
        if a.tiles_are_new:
            amx.configure(a.room, 2 * a.tile_rows, STEP * TILE_STEPS)
            a.tiles_are_new = 0
        block, size = a.codes + a.first // STEPS * (PANELS * SIZE), a.tile_rows * 2 * STEP * TILE_STEPS
        numbers, tiles = a.room + 64, (a.rows + a.tile_rows - 1) // a.tile_rows
        first_tile, row_tiles = a.bytes + a.first // TILE_STEPS * size, a.row_steps // TILE_STEPS * size
        jobs = a.width * tiles
        _write_bytes(KIND, block, a.steps, numbers, a.end, a.jump)
        rows = panel = row = 0
        for job in range(jobs + 1):
            tile, sums, has_next = job % tiles, a.room + _SUMS_AT, job < jobs
            _multiply(
                KIND, first_tile + tile * row_tiles, size, numbers, sums + job % 2 * _SUMS_BYTES, rows,
                a.x + row * a.row_bytes, a.row_bytes, a.row_steps, a.first, a.steps, block + panel * SIZE,
                sums + (job + 1) % 2 * _SUMS_BYTES, a.out + (row * PANELS + panel) * 64, np.int64(has_next),
            )  # fmt: skip
            panel, row = job // tiles, tile * a.tile_rows
            rows = min(a.rows - row, a.tile_rows)
            if tile == tiles - 1 and job + 1 < jobs:
                _write_bytes(KIND, block + (panel + 1) * SIZE, a.steps, numbers, a.end, a.jump)

    return int(compiled(multiply).address)
