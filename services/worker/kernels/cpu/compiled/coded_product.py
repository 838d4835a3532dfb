"""y = W x + b from quantised weights, with products of whole numbers.

Activations are rounded to whole numbers of up to 16 bits, with one scale for 256 inputs, which loses less than
bfloat16. Numbers of weights and activations are multiplied exactly; scales and minima are applied to the sums of a
block (of half a block in some formats) in float32, in the order of the inputs. Few rows are multiplied with codes that
are decoded in registers, more rows by AMX (tile_codes.py) or, without it, with panels that are decoded once. All
compute the same sums, so a row has the same bits in a batch of any size (batch invariance, docs/invariants.md).

The kernel and the program for decoded panels are the same for all formats. A format has a coder (`coder`), which the
kernel calls.
"""

from functools import cache, reduce
from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import carray, njit
from numba.core import cgutils, types
from numpy.typing import NDArray

from services.worker.kernels.cpu.compiled import raw, simd
from services.worker.kernels.cpu.compiled.block_formats import (
    BYTES,
    FORMATS,
    KINDS,
    MINIMA_AT,
    PANEL,
    PANELS,
    QUADS,
    SCALES_AT,
    SPAN,
    SPAN_BYTES,
    STEP,
    Format,
    block_scale,
    code_bytes,
    code_pairs,
    decode_span,
    group_factor,
    next_codes,
    read_ahead,
    step_minima,
)
from services.worker.kernels.cpu.compiled.building import for_each_size, load, moved, times
from services.worker.kernels.cpu.compiled.code_tile import TASK, TASK_BYTES, CodeTile, add_byte_products, add_products
from services.worker.kernels.cpu.compiled.intrinsics import CONSTANT, emits
from services.worker.kernels.cpu.compiled.product import FIELDS
from services.worker.kernels.cpu.compiled.rounded_rows import HALVES_AT, round_rows, size_of_row
from services.worker.kernels.cpu.compiled.simd import I16, I32, I64, LANES, VF, VI
from services.worker.kernels.cpu.compiled.tile_codes import ROOM, TILE_ROWS
from services.worker.kernels.cpu.thread_team import Kernel, arguments, compiled, take

BLOCK = PANELS * PANEL
"""Outputs of one item."""
ROWS, WIDTH = (6, 2) if simd.WIDE else (6, 1)
"""Largest numbers of rows and panels that are multiplied together once the panels are decoded."""
UNROLLED = 4
"""Pairs of inputs of one turn of the innermost loop."""
TURNS = SPAN * STEP // 2 // UNROLLED
"""Turns for a span."""
LINES = 2 * WIDTH
"""Most lines of codes that are read ahead in such a turn: those of eight bits, if the rows have one part."""
CHUNK = 32 * ROWS
"""Maximum number of rows of one item."""
WORTH = 1 << 17
"""Smallest number of multiplications for which another thread is used."""
CODED = arguments(
    *FIELDS,
    ("format", np.int64),  # int64[NUMBERS], as `format_table` returns it
    ("half", np.int64),  # activations are bfloat16, and not float32
    ("tiles", np.int64),  # address, as `tile_coder` returns it; 0: no AMX
)
NUMBERS = 8
PARTS = (0, 1, 2, 3, 4, 3, 6, 4, 8, 3, 4, 3, 6, 6, 6, 8, 8)
"""Rows that are multiplied first with codes that are decoded in registers, by the number of rows. One row is never a
part: it is rounded in another way."""


@emits(types.void, CONSTANT, *(types.int64,) * 10)
def _multiply_codes(
    builder: Any, kind: int, rows: Any, x: Any, row_bytes: Any, steps: Any, first: Any, number: Any, codes: Any,
    out: Any, end: Any, jump: Any
) -> None:  # fmt: skip
    """Multiply a span of rows with the panels of an item, which are decoded in registers: `_width` at once, in the
    order of the memory.

    Args:
        rows: as many as `PARTS` has, up to `_few_rows`
        x: address of the first rounded row
        row_bytes: from one row to the next
        steps: of a row
        first: step of the span
        number: of steps of the span
        codes: address of the first panel
        out: float32[rows, PANELS, 16]; products are added
        end, jump: see `next_codes`
    """
    name = KINDS[kind]
    own = FORMATS[name]

    def multiply(rows: int) -> None:
        width, are_bytes = _width(own, rows), BYTES and rows == 1
        codes_of, add, zero_code = (
            (code_bytes, add_byte_products, own.zero_byte) if are_bytes else (code_pairs, add_products, own.zero)
        )
        tile = CodeTile(builder, rows, PANELS, x, row_bytes, steps, first)
        sums = [tile.vectors(VI, width) for _ in range(own.unit)]
        upper = [tile.vectors(VI, width) for _ in range(own.unit)] if are_bytes else sums
        whole = tile.vectors(VI, width) if own.multiplies else sums[0]
        groups, turns = (ir.Constant(I64, size) for size in (own.groups, own.turns // own.groups))
        block_steps, units = ir.Constant(I64, own.steps), ir.Constant(I64, own.scale_steps // own.unit)

        def add_unit(step: Any, panel: Any, blocks: list[Any], ahead: Any) -> None:
            in_block = builder.urem(step, block_steps)
            unit = builder.udiv(in_block, ir.Constant(I64, own.unit))
            with cgutils.for_range(builder, groups) as outer:
                for number, some in enumerate(sums):
                    starts = None
                    if are_bytes:
                        tile.set(upper[number])
                    if zero_code:  # products with the code of zero are subtracted
                        halves = [outer.index] if own.groups == 2 else [ir.Constant(I64, half) for half in (0, 1)]
                        zero = ir.Constant(VI, [-zero_code] * LANES)
                        place = times(builder, moved(builder, step, number), 2)
                        totals = [tile.of_rows(I32, builder.add(place, half), HALVES_AT) for half in halves]
                        starts = [builder.mul(reduce(builder.add, each), zero) for each in zip(*totals, strict=True)]
                    tile.set(some, starts)
                with cgutils.for_range(builder, turns) as inner:
                    index = builder.add(builder.mul(outer.index, turns), inner.index)
                    here = builder.add(times(builder, step, QUADS * 2), index)
                    decoded = [codes_of(builder, name, block, unit, index, ahead) for block in blocks]
                    for same in zip(*decoded, strict=True):
                        number, quad, _ = same[0]
                        for half, to in enumerate((upper[number], sums[number])):
                            inputs = tile.of_rows(I32, here, 0, number * 2 * STEP + half * STEP + quad * 4)
                            tile.add_products(to, [both[half] for _, _, both in same], inputs, add)
                for number, some in enumerate(sums if are_bytes else ()):
                    tile.join(upper[number], some)
                for number, some in enumerate(sums if own.multiplies else ()):
                    group = builder.add(builder.mul(moved(builder, in_block, number), groups), outer.index)
                    factors = [group_factor(builder, name, block, group) for block in blocks]
                    for mine, theirs in zip(whole, some, strict=True):
                        for to, place, factor in zip(mine, theirs, factors, strict=True):
                            scaled = builder.mul(builder.load(place), factor)
                            builder.store(builder.add(builder.load(to), scaled), to)
            for number in range(own.unit if own.has_minima else 0):
                minima = [step_minima(builder, name, block, moved(builder, in_block, number)) for block in blocks]
                tile.add_minima(minima, moved(builder, step, number), panel)

        def add_blocks(start: Any, panel: Any) -> None:
            number = builder.add(times(builder, builder.udiv(start, block_steps), PANELS), panel)
            place = builder.add(codes, times(builder, number, own.bytes))
            blocks = [moved(builder, place, number * own.bytes) for number in range(width)]
            ahead = next_codes(builder, name, blocks, end, jump)
            if own.multiplies:
                tile.set(whole)
            with cgutils.for_range(builder, units) as loop:
                add_unit(builder.add(start, times(builder, loop.index, own.unit)), panel, blocks, ahead)
            tile.add_scaled(whole, [block_scale(builder, name, block) for block in blocks], panel)

        with cgutils.for_range(builder, builder.udiv(number, ir.Constant(I64, own.scale_steps))) as loop:
            start = builder.add(first, times(builder, loop.index, own.scale_steps))
            if width == PANELS:
                add_blocks(start, ir.Constant(I64, 0))  # sums are in registers
            else:
                with cgutils.for_range(builder, ir.Constant(I64, PANELS // width)) as some:
                    add_blocks(start, times(builder, some.index, width))
        tile.add_to(out)

    for_each_size(builder, rows, [rows for rows in sorted({*PARTS}) if 0 < rows <= _few_rows(own)], multiply)


@emits(types.void, *(types.int64,) * 12)
def _multiply_decoded(
    builder: Any, rows: Any, x: Any, row_bytes: Any, steps: Any, first: Any, number: Any,
    decoded: Any, scale_steps: Any, has_minima: Any, out: Any, ahead: Any, ahead_bytes: Any
) -> None:  # fmt: skip
    """Multiply a span of 3 to `ROWS` rows with `WIDTH` decoded panels.

    Args:
        ahead, ahead_bytes: codes that are read from memory meanwhile: their address, and how many bytes of them in
            each turn of the innermost loop. The others: see above.
    """

    def multiply(rows: int) -> None:
        tile = CodeTile(builder, rows, WIDTH, x, row_bytes, steps, first)
        sums, first_panel = tile.vectors(VI, WIDTH), ir.Constant(I64, 0)

        def loaded(index: Any, kind: ir.VectorType, more: int) -> list[Any]:
            place = builder.add(decoded, times(builder, index, 64))
            return [load(builder, moved(builder, place, more + panel * SPAN_BYTES), kind, 4) for panel in range(WIDTH)]

        with cgutils.for_range(builder, builder.udiv(number, scale_steps)) as outer:
            start = builder.mul(outer.index, scale_steps)
            tile.set(sums)
            with cgutils.for_range(builder, times(builder, scale_steps, STEP // 2 // UNROLLED)) as loop:
                index = builder.add(times(builder, start, STEP // 2), times(builder, loop.index, UNROLLED))
                here = builder.add(times(builder, first, STEP // 2), index)
                turn = builder.udiv(index, ir.Constant(I64, UNROLLED))
                codes = builder.add(ahead, builder.mul(turn, ahead_bytes))
                read_ahead(builder, codes)
                with builder.if_then(builder.icmp_signed(">", ahead_bytes, ir.Constant(I64, 64))):
                    for line in range(1, LINES):
                        read_ahead(builder, moved(builder, codes, 64 * line))
                for some in range(UNROLLED):
                    numbers = loaded(index, ir.VectorType(I16, 2 * LANES), 64 * some)
                    tile.add_products(sums, numbers, tile.of_rows(I32, here, 0, 4 * some))
            with cgutils.for_range(builder, builder.mul(scale_steps, has_minima)) as loop:
                step = builder.add(start, loop.index)
                tile.add_minima(loaded(step, VF, MINIMA_AT), builder.add(first, step), first_panel)
            tile.add_scaled(sums, loaded(outer.index, VF, SCALES_AT), first_panel)
        tile.add_to(out)

    for_each_size(builder, rows, range(3, ROWS + 1), multiply)


@njit(inline="always")
def _write(a, sums, row, rows, first):  # type: ignore[no-untyped-def]
    """Add the bias to sums, float32[rows, BLOCK], and store the outputs from `first` on."""
    size, short = a.out_bytes, a.out_bytes == 2
    for i in range(rows):
        for output in range(first, min(a.outputs, first + BLOCK), PANEL):
            here = sums + (i * BLOCK + output - first) * 4
            value = simd.add(simd.load_f32x16(here), simd.load_f32x16(a.bias + output * 4))
            out = a.out + ((row + i) * a.stride + output) * size
            if output + PANEL <= a.outputs:
                simd.store16(out, value, short)
            else:
                simd.store_f32x16(here, value)
                for j in range(a.outputs - output):
                    simd.store1(out + j * size, simd.load_f32(here + j * 4), short)


def coded_product_kernel(inputs: int) -> Kernel:
    """One item is a block of outputs of up to `CHUNK` rows; its work is the number of rows."""

    def coded_product(address):  # type: ignore[no-untyped-def]
        a = carray(raw.pointer(address), 1, CODED)[0]
        own = raw.i64_at(a.format, NUMBERS)
        coder, limit, scale_steps, has_minima, few, tile_steps = own[0], own[3], own[4], own[5], own[6], own[7]
        steps, items = a.inputs // STEP, (a.outputs + BLOCK - 1) // BLOCK
        row_bytes = size_of_row(steps)
        most, item_bytes = min(a.rows, CHUNK), steps // own[1] * own[2] * PANELS
        span_bytes = SPAN // own[1] * own[2] * PANELS
        has_tiles = a.tiles != 0 and most > few
        tiles_size = (ROOM + (most + TILE_ROWS - 1) // TILE_ROWS * TILE_ROWS * 2 * a.inputs) * has_tiles
        buffer = raw.allocate(64 + TASK_BYTES + WIDTH * SPAN_BYTES + tiles_size + most * (BLOCK * 4 + row_bytes))
        place = (buffer + 63) // 64 * 64
        decoded = place + TASK_BYTES
        room = decoded + WIDTH * SPAN_BYTES
        sums = room + tiles_size
        rounded = sums + most * BLOCK * 4
        task = carray(raw.pointer(place), 1, TASK)[0]
        task.x, task.row_bytes, task.row_steps = rounded, row_bytes, steps
        task.room, task.bytes, task.tile_rows = room, room + ROOM, 0
        # Kept from item to item: no item needs a division
        first_item, start, rows, is_few, is_tiled, ahead_bytes = 0, 0, 0, False, False, 0
        item = take(address)
        while item < a.items:
            following = take(address)  # its codes are read beforehand
            while item - first_item >= items:
                first_item, start, rows = first_item + items, start + CHUNK, 0
            if rows == 0:  # most items have the rows of the one before
                rows = min(CHUNK, a.rows - start)
                is_few = rows <= few
                is_tiled = has_tiles and not is_few
                tile_rows = 0
                if is_tiled:
                    tiles = (rows + TILE_ROWS - 1) // TILE_ROWS
                    tile_rows = (rows + tiles - 1) // tiles  # equal tiles
                    task.tile_rows, task.tiles_are_new = tile_rows, 1
                # Each part of the rows reads as many of the codes that are needed next
                ahead_bytes = span_bytes // PANELS * WIDTH // (TURNS * ((rows + ROWS - 1) // ROWS))
                x = a.x + start * a.inputs * (2 if a.half else 4)
                together = tile_steps if is_tiled else 1
                round_rows(x, a.half, rows, steps, limit, rounded, task.bytes, tile_rows, together)
            block, later = item - first_item, following - first_item
            while later >= items:
                later -= items
            task.end = a.weight + (block + 1) * item_bytes
            task.jump = (later - block - 1) * item_bytes if following < a.items else -item_bytes
            is_decoded = not is_few and not is_tiled
            task.rows = 0 if is_decoded else rows
            for number in range(rows * PANELS):
                simd.store_f32x16(sums + number * 64, simd.splat(np.float32(0)))
            panels = (min(BLOCK, a.outputs - block * BLOCK) + PANEL - 1) // PANEL
            task.width = WIDTH if is_decoded else PANELS if is_few else panels
            for step in range(0, steps, SPAN):
                task.first, task.steps = step, min(SPAN, steps - step)
                ahead = a.weight + block * item_bytes + (step // SPAN + 1) * span_bytes
                if ahead >= task.end:
                    ahead = task.end + task.jump
                for panel in range(0, panels, task.width):
                    out = sums + panel * 64
                    task.codes = a.weight + block * item_bytes + panel * own[2]
                    task.out = decoded if is_decoded else out
                    raw.call(a.tiles if is_tiled else coder, place)
                    done = 0 if is_decoded else rows
                    codes = ahead + panel * (span_bytes // PANELS)
                    while done < rows:
                        # Equal parts: seven rows are four and three
                        parts = (rows - done + ROWS - 1) // ROWS
                        some = (rows - done + parts - 1) // parts
                        # Read from the task: kept in registers, they would displace sums
                        x, size = task.x + done * task.row_bytes, task.row_bytes
                        _multiply_decoded(
                            some, x, size, task.row_steps, task.first, task.steps, decoded, scale_steps, has_minima,
                            out + done * BLOCK * 4, codes, ahead_bytes,
                        )  # fmt: skip
                        done += some
                        codes += ahead_bytes * TURNS
            _write(a, sums, start, rows, block * BLOCK)
            item = following
        if task.tile_rows > 0:
            task.rows = 0
            raw.call(a.tiles, place)
        raw.release(buffer)

    return Kernel(coded_product, CODED, cost=-(-WORTH // (BLOCK * inputs)))


def _coder(kind: int) -> Any:
    """Return the coder of a format: a C function with the address of a `TASK`."""
    own = FORMATS[KINDS[kind]]
    KIND, STEPS, SIZE, UNIT, SCALE_STEPS = kind, own.steps, own.bytes, own.unit, own.scale_steps

    def coder(address):  # type: ignore[no-untyped-def]
        a = carray(raw.pointer(address), 1, TASK)[0]
        x, size, steps, first, number = a.x, a.row_bytes, a.row_steps, a.first, a.steps
        codes, out, end, jump, done = a.codes, a.out, a.end, a.jump, 0
        if a.rows == 0:
            for panel in range(a.width):
                at, to = codes + panel * SIZE, out + panel * SPAN_BYTES
                decode_span(at, first, number, to, KIND, STEPS, SIZE, UNIT, SCALE_STEPS)
        while done < a.rows:
            rows = PARTS[a.rows - done]
            _multiply_codes(KIND, rows, x, size, steps, first, number, codes, out, end, jump)
            x, out, done = x + rows * size, out + rows * BLOCK * 4, done + rows

    return compiled(coder)


def _few_rows(own: Format) -> int:
    """Return the largest number of rows that do not pay for decoded panels: on Zen 3, Zen 4 and Cascade Lake."""
    if not simd.WIDE:
        return 3
    return 11 // own.unit if simd.IS_AMD else 8 if own.has_bytes else 4


def _width(own: Format, rows: int) -> int:
    """Return the number of panels that are multiplied together with few rows.

    With more than one, AVX2 has too few registers for sums and codes, and memory is read at several places by turns:
    AMD's cores read it up to a tenth slower (one row on Zen 4), which costs more than several sums at once gain.
    """
    if not simd.WIDE or (simd.IS_AMD and rows == own.unit == 1):
        return 1
    sums = rows * own.unit * (2 if BYTES and rows == 1 else 1)
    return max(1, min(4, 16 // sums) // 2 * 2)


@cache
def format_table(kind: int) -> NDArray[np.int64]:
    """Return what kernels must know of a format, and compile its coder: address of the coder; steps and bytes of a
    block; largest activation; `scale_steps`; `has_minima`; `_few_rows`; `tile_steps`."""
    own = FORMATS[KINDS[kind]]
    numbers = own.steps, own.bytes, own.limit, own.scale_steps, int(own.has_minima), _few_rows(own), own.tile_steps
    return np.array([_coder(kind).address, *numbers], np.int64)
