"""Products of many rounded rows (rounded_rows.py) with AMX's products of bytes, for coded_product.py.

A rounded number is 256 times a signed byte plus another one. A tile has both bytes of up to `TILE_ROWS` rows, one below
the other. One instruction multiplies 32 inputs of them with the codes of sixteen outputs, or, where scales of groups
are factors of the numbers, 64 inputs with one of the two bytes of these. All sums of products are the whole numbers
that other ways compute, and they are scaled in the same order, so a row has the same bits with each (batch invariance,
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
    PAIRS,
    PANELS,
    QUADS,
    SPAN,
    STEP,
    Format,
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
_PART_BYTES = SPAN * _STEP_BYTES
_SUMS_AT, _SUMS_BYTES = 64 + 2 * _PART_BYTES, SPAN * amx.TILE_BYTES
ROOM = _SUMS_AT + 2 * _SUMS_BYTES
"""Bytes for a configuration, the bytes of a span of a panel, and the sums of two tiles."""


def _constant(value: int) -> ir.Constant:
    return ir.Constant(VI, [value] * LANES)


def _upper_bits(own: Format) -> int:
    """Return how far the upper byte of a number is above the lower one.

    Both bytes of a code times a factor of 6 bits are the code times 3 bits of the factor: two such products are one of
    16 bits, because neither is larger than a byte.
    """
    return 3 if own.has_minima else 8


@emits(types.void, CONSTANT, *(types.int64,) * 5)
def _write_bytes(builder: Any, kind: int, block: Any, steps: Any, to: Any, end: Any, jump: Any) -> None:
    """Write the bytes of a span of a panel: int8[`Format.tile_parts`, SPAN, QUADS, 16, 4], the lower ones first.

    Args:
        block: address of the panel's first block in the span
        steps: of the span
        end, jump: see `next_codes`
    """
    name = KINDS[kind]
    own, bytes_ = FORMATS[name], ir.VectorType(I8, 4 * LANES)

    def write(parts: list[Any], place: Any, quad: int) -> None:
        for part, words in enumerate(parts):
            store(builder, words, moved(builder, place, part * _PART_BYTES + 64 * quad), 4)

    with cgutils.for_range(builder, builder.udiv(steps, ir.Constant(I64, own.unit))) as units:
        step = times(builder, units.index, own.unit)
        here = builder.add(block, times(builder, builder.udiv(step, ir.Constant(I64, own.steps)), PANELS * own.bytes))
        ahead = next_codes(builder, name, [here], end, jump)
        unit = builder.urem(units.index, ir.Constant(I64, own.steps // own.unit))
        to_unit = builder.add(to, times(builder, step, _STEP_BYTES))

        def write_pairs(number: int, quad: Any, both: list[Any]) -> None:
            even, odd = (builder.bitcast(pairs, VI) for pairs in both)
            low, high, eight = _constant(0x00FF00FF), _constant(0xFF00FF00), _constant(8)
            lower = builder.or_(builder.and_(even, low), builder.and_(builder.shl(odd, eight), high))
            upper = builder.or_(builder.and_(builder.lshr(even, eight), low), builder.and_(odd, high))
            write([lower, upper], builder.add(to_unit, times(builder, quad, 64)), number * QUADS)

        def factors(number: int) -> list[Any]:
            group = moved(builder, times(builder, unit, own.unit), number)
            whole = builder.mul(group_factor(builder, name, here, group), _constant(0x00010001))
            lower = builder.and_(whole, _constant(0x00070007))
            upper = builder.lshr(builder.xor(whole, lower), _constant(_upper_bits(own)))
            return [builder.bitcast(each, PAIRS) for each in (lower, upper)]

        if own.multiplies and not own.has_minima:
            build_pairs(builder, name, here, unit, ahead, write_pairs)
            return
        of_steps = [factors(number) for number in range(own.unit if own.multiplies else 0)]
        with cgutils.for_range(builder, ir.Constant(I64, own.turns)) as loop:
            place = builder.add(to_unit, times(builder, loop.index, 64))
            for number, quad, words in code_words(builder, name, here, unit, loop.index, ahead):
                parts = [builder.bitcast(words, bytes_)]
                if own.zero:
                    parts = [builder.sub(parts[0], ir.Constant(bytes_, [own.zero] * 4 * LANES))]
                if of_steps:
                    parts = [builder.mul(builder.bitcast(words, PAIRS), factor) for factor in of_steps[number]]
                write(parts, place, number * QUADS + quad)


@emits(types.void, CONSTANT, *(types.int64,) * 8)
def _multiply(
    builder: Any, kind: int, task: Any, tile: Any, numbers: Any, to: Any, rows: Any, row: Any, panel: Any, found: Any
) -> None:  # fmt: skip
    """Multiply a tile of rows with a span of a panel. Meanwhile scale the sums of other rows or of another panel.

    Args:
        task: address of a `TASK`
        tile: address of int8[steps / `Format.tile_steps`, `tile_rows`, 2, 32 * `tile_steps`]; 0: none is left
        numbers: address of the panel's bytes
        to: address for int32[steps / `scale_steps`, `tile_parts`, 16, 16]
        rows: number of rows whose sums are scaled
        row: the first of them
        panel: theirs
        found: their sums, as they are written `to`
    """
    name = KINDS[kind]
    own, line, eight = FORMATS[name], ir.Constant(I64, 64), _constant(8)
    x, row_bytes, row_steps, first, steps, codes, out, tile_rows = (
        load(builder, moved(builder, task, TASK.fields[field][1]), I64)  # type: ignore[index]
        for field in ("x", "row_bytes", "row_steps", "first", "steps", "codes", "out", "tile_rows")
    )
    x = builder.add(x, builder.mul(row, row_bytes))
    out = builder.add(out, times(builder, builder.add(times(builder, row, PANELS), panel), 64))
    tile_bytes = times(builder, tile_rows, 2 * STEP * own.tile_steps)
    has_tile = builder.icmp_signed("!=", tile, ir.Constant(I64, 0))

    def with_memory(text: str, address: Any, more: int = 0, stride: Any = line) -> None:
        amx.emit(builder, text, moved(builder, address, more), stride)

    def multiply(scale: Any, sums: Any) -> None:
        for part in range(own.tile_parts):
            amx.emit(builder, f"tilezero %tmm{part}")
        with cgutils.for_range(builder, ir.Constant(I64, own.scale_steps // own.tile_steps)) as loop:
            index = builder.add(times(builder, scale, own.scale_steps // own.tile_steps), loop.index)
            place = builder.add(tile, builder.mul(index, tile_bytes))
            with_memory("tileloadd ($0,$1,1), %tmm4", place, 0, ir.Constant(I64, STEP * own.tile_steps))
            here = builder.add(numbers, times(builder, index, own.tile_steps * _STEP_BYTES))
            for part in range(own.tile_parts):
                with_memory(f"tileloadd ($0,$1,1), %tmm{6 + part}", here, part * _PART_BYTES)
                is_signed = part == own.tile_parts - 1 and not own.has_minima
                amx.emit(builder, f"tdpbs{'s' if is_signed else 'u'}d %tmm{6 + part}, %tmm4, %tmm{part}")
        for part in range(own.tile_parts):
            with_memory(f"tilestored %tmm{part}, ($0,$1,1)", sums, part * amx.TILE_BYTES)

    def joined(place: Any, part: int) -> Any:
        """The sums of the upper bytes of a row, and of the lower ones below."""
        upper, lower = (load(builder, moved(builder, place, part * amx.TILE_BYTES + more), VI, 4) for more in (0, 64))
        return builder.add(builder.shl(upper, eight), lower)

    def add(rows: int) -> None:
        sums_of, only = CodeTile(builder, rows, 1, x, row_bytes, row_steps, first), ir.Constant(I64, 0)
        sums = sums_of.vectors(VI, 1)
        with cgutils.for_range(builder, builder.udiv(steps, ir.Constant(I64, own.scale_steps))) as loop:
            step = times(builder, loop.index, own.scale_steps)
            apart = times(builder, loop.index, own.tile_parts * amx.TILE_BYTES)
            with builder.if_then(has_tile):
                multiply(loop.index, builder.add(to, apart))
            number = builder.udiv(builder.add(first, step), ir.Constant(I64, own.steps))
            block = builder.add(codes, times(builder, builder.add(times(builder, number, PANELS), panel), own.bytes))
            with cgutils.for_range(builder, ir.Constant(I64, own.scale_steps * own.has_minima)) as inner:
                some = builder.add(builder.add(first, step), inner.index)
                minima = step_minima(builder, name, block, builder.urem(some, ir.Constant(I64, own.steps)))
                sums_of.add_minima([minima], some, only)
            for index, (place,) in enumerate(sums):
                at = moved(builder, builder.add(found, apart), 2 * 64 * index)
                whole = joined(at, 0)
                if own.tile_parts == 2:
                    whole = builder.add(whole, builder.shl(joined(at, 1), _constant(_upper_bits(own))))
                builder.store(whole, place)
            sums_of.add_scaled(sums, [block_scale(builder, name, block)], only)
        sums_of.add_to(out)

    for_each_size(builder, rows, range(TILE_ROWS + 1), add)


@cache
def tile_coder(kind: int) -> int:
    """Compile the products of a format with more rows than are multiplied with codes that are decoded in registers.
    Return the address of a C function with the address of a `TASK`. For no rows, it releases the tiles."""
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
        block, size = a.codes + a.first // STEPS * (PANELS * SIZE), a.tile_rows * 2 * STEP
        numbers, sums, spare = a.room + 64, a.room + _SUMS_AT, a.room + _SUMS_AT + _SUMS_BYTES
        tiles = (a.rows + a.tile_rows - 1) // a.tile_rows
        rows = row = panel = 0
        for job in range(a.width * tiles + 1):
            following, number = job // tiles, job % tiles
            tile = 0
            if following < a.width:
                tile = a.bytes + (number * a.row_steps + a.first) * size
                if number == 0:
                    _write_bytes(KIND, block + following * SIZE, a.steps, numbers, a.end, a.jump)
            _multiply(KIND, address, tile, numbers, sums, rows, row, panel, spare)
            row, panel, sums, spare = number * a.tile_rows, following, spare, sums
            rows = min(a.rows - row, a.tile_rows)

    return int(compiled(multiply).address)
