"""Products of many rounded rows (rounded_rows.py) with AMX's products of bytes, for coded_product.py.

A rounded number is 256 times a signed byte plus another one. A tile has both bytes of up to `TILE_ROWS` rows, one below
the other, and one instruction multiplies 32 or 64 inputs of these rows with those of sixteen outputs, as whole numbers:
their codes; or, where scales of groups are factors of the numbers, the upper and the lower bytes of these, one after
the other. The sums are those that other ways compute, so a row has the same bits with each (batch invariance,
docs/invariants.md).
"""

from functools import cache
from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import carray
from numba.core import cgutils, types

from services.worker.kernels.cpu.compiled import amx, raw
from services.worker.kernels.cpu.compiled.block_formats import (
    FORMATS,
    KINDS,
    PANELS,
    QUADS,
    SPAN,
    STEP,
    block_scale,
    build_pairs,
    code_words,
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
LEAST_ROWS = 5
"""Fewer rows take as long without AMX."""
_STEP_BYTES = QUADS * 64
_SUMS_AT = 64 + 2 * SPAN * _STEP_BYTES
ROOM = _SUMS_AT + SPAN * amx.TILE_BYTES
"""Bytes for a configuration, and for the bytes and sums of a span of a panel."""


@emits(types.void, CONSTANT, CONSTANT, *(types.int64,) * 7)
def _multiply(
    builder: Any, kind: int, decodes: int, block: Any, steps: Any, rows: Any, tile_bytes: Any, room: Any, end: Any,
    jump: Any
) -> None:  # fmt: skip
    """Multiply a span of a panel with the rows of a tile.

    Args:
        decodes: write the panel's bytes to `room`, where they are otherwise
        block: address of the panel's first block in the span
        steps: of the span
        rows: address of the rows in the span: int8[steps / `Format.tile_steps`, rows, 2, 32 * `tile_steps`]
        tile_bytes: of such a step
        room: gets the sums: int32[steps / `scale_steps`, 1 or 2, 16, 16]
        end, jump: see `next_codes`
    """
    name = KINDS[kind]
    own, bytes_, line = FORMATS[name], ir.VectorType(I8, 4 * LANES), ir.Constant(I64, 64)
    parts, turn = 2 if own.multiplies else 1, max(own.unit, own.tile_steps)
    numbers, sums = moved(builder, room, 64), moved(builder, room, _SUMS_AT)

    def decode(step: Any) -> None:
        here = builder.add(block, times(builder, builder.udiv(step, ir.Constant(I64, own.steps)), PANELS * own.bytes))
        ahead = next_codes(builder, name, [here], end, jump)
        unit = builder.udiv(builder.urem(step, ir.Constant(I64, own.steps)), ir.Constant(I64, own.unit))
        to = builder.add(numbers, times(builder, step, _STEP_BYTES))

        def write(words: Any, place: Any, part: int = 0) -> None:
            store(builder, words, moved(builder, place, part * SPAN * _STEP_BYTES), 4)

        def write_pairs(number: int, quad: Any, both: tuple[Any, Any]) -> None:
            even, odd = (builder.bitcast(pairs, VI) for pairs in both)
            place = builder.add(to, times(builder, moved(builder, quad, number * QUADS), 64))
            low, high, eight = (ir.Constant(VI, [value] * LANES) for value in (0x00FF00FF, 0xFF00FF00, 8))
            write(builder.or_(builder.and_(even, low), builder.and_(builder.shl(odd, eight), high)), place)
            write(builder.or_(builder.and_(builder.lshr(even, eight), low), builder.and_(odd, high)), place, 1)

        if own.multiplies:
            build_pairs(builder, name, here, unit, ahead, write_pairs)
            return
        with cgutils.for_range(builder, ir.Constant(I64, own.turns)) as loop:
            for number, quad, words in code_words(builder, name, here, unit, loop.index, ahead):
                codes = builder.bitcast(words, bytes_)
                if own.zero:
                    codes = builder.sub(codes, ir.Constant(bytes_, [own.zero] * 4 * LANES))
                place = builder.add(to, times(builder, loop.index, 64))
                write(codes, moved(builder, place, 64 * (number * QUADS + quad)))

    if decodes:
        with cgutils.for_range(builder, builder.udiv(steps, ir.Constant(I64, own.unit))) as units:
            decode(times(builder, units.index, own.unit))
    with cgutils.for_range(builder, builder.udiv(steps, ir.Constant(I64, own.scale_steps))) as scales:
        for part in range(parts):
            amx.emit(builder, f"tilezero %tmm{part}")
        with cgutils.for_range(builder, ir.Constant(I64, own.scale_steps // turn)) as turns:
            step = builder.add(times(builder, scales.index, own.scale_steps), times(builder, turns.index, turn))
            for more in range(0, turn, own.tile_steps):
                here = moved(builder, step, more)
                tile = builder.mul(builder.udiv(here, ir.Constant(I64, own.tile_steps)), tile_bytes)
                amx.emit(
                    builder, "tileloadd ($0,$1,1), %tmm4", builder.add(rows, tile),
                    ir.Constant(I64, STEP * own.tile_steps),
                )  # fmt: skip
                for part in range(parts):
                    at = builder.add(numbers, times(builder, here, _STEP_BYTES))
                    at = moved(builder, at, part * SPAN * _STEP_BYTES)
                    amx.emit(builder, f"tileloadd ($0,$1,1), %tmm{6 + part}", at, line)
                    # The lower bytes of numbers are unsigned
                    signs = "su" if part < parts - 1 else "ss"
                    amx.emit(builder, f"tdpb{signs}d %tmm{6 + part}, %tmm4, %tmm{part}")
        for part in range(parts):
            at = moved(builder, builder.add(sums, times(builder, scales.index, parts * amx.TILE_BYTES)), part * amx.TILE_BYTES)
            amx.emit(builder, f"tilestored %tmm{part}, ($0,$1,1)", at, line)


@emits(types.void, CONSTANT, *(types.int64,) * 9)
def _add_sums(
    builder: Any, kind: int, rows: Any, x: Any, row_bytes: Any, steps: Any, first: Any, number: Any, block: Any,
    room: Any, out: Any
) -> None:  # fmt: skip
    """Scale the sums in `room`, and add them to float32[rows, PANELS, 16].

    Args:
        x: address of the first rounded row
        row_bytes: from one row to the next
        steps: of a row
        first: step of the span
        number: of steps of the span
        block: address of the panel's first block in the span
    """
    name = KINDS[kind]
    own = FORMATS[name]
    eight, scale_steps = ir.Constant(VI, [8] * LANES), ir.Constant(I64, own.scale_steps)
    parts = 2 if own.multiplies else 1

    def above(upper: Any, lower: Any) -> Any:
        return builder.add(builder.shl(upper, eight), lower)

    def add(rows: int) -> None:
        tile, panel = CodeTile(builder, rows, 1, x, row_bytes, steps, first), ir.Constant(I64, 0)
        sums = tile.vectors(VI, 1)
        with cgutils.for_range(builder, builder.udiv(number, scale_steps)) as loop:
            step = builder.mul(loop.index, scale_steps)
            here = builder.add(block, times(builder, builder.udiv(step, ir.Constant(I64, own.steps)), PANELS * own.bytes))
            with cgutils.for_range(builder, ir.Constant(I64, own.scale_steps * own.has_minima)) as inner:
                some = builder.add(step, inner.index)
                minima = step_minima(builder, name, here, builder.urem(some, ir.Constant(I64, own.steps)))
                tile.add_minima([minima], builder.add(first, some), panel)
            at = moved(builder, builder.add(room, times(builder, loop.index, parts * amx.TILE_BYTES)), _SUMS_AT)
            for row, (place,) in enumerate(sums):
                # By the upper and the lower bytes of the row; of the lower bytes of the numbers, and of the upper ones
                found = [
                    load(builder, moved(builder, at, part * amx.TILE_BYTES + 64 * (2 * row + byte)), VI, 4)
                    for part in range(parts)
                    for byte in range(2)
                ]
                whole = above(found[0], found[1])
                if parts == 2:
                    whole = builder.add(whole, builder.shl(above(found[2], found[3]), eight))
                builder.store(whole, place)
            tile.add_scaled(sums, [block_scale(builder, name, here)], panel)
        tile.add_to(out)

    for_each_size(builder, rows, range(1, TILE_ROWS + 1), add)


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
        x, tile, out = a.x, a.bytes + a.first // TILE_STEPS * size, a.out
        for row in range(0, a.rows, a.tile_rows):
            if row == 0:
                _multiply(KIND, 1, block, a.steps, tile, size, a.room, a.end, a.jump)
            else:
                _multiply(KIND, 0, block, a.steps, tile, size, a.room, a.end, a.jump)
            rows = min(a.rows - row, a.tile_rows)
            _add_sums(KIND, rows, x, a.row_bytes, a.row_steps, a.first, a.steps, block, a.room, out)
            x += a.tile_rows * a.row_bytes
            tile += a.row_steps // TILE_STEPS * size
            out += a.tile_rows * PANELS * 64

    return int(compiled(multiply).address)
