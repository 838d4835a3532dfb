# ruff: noqa: ARG001, the signatures are numba's
"""y = W x + b from quantised weights, with products of whole numbers.

Activations are rounded to whole numbers of up to 16 bits, with one scale for 256 inputs, which loses less than
bfloat16. Numbers of weights and activations are multiplied exactly; scales and minima are applied to the sums of a
block (of half a block in some formats) in float32, in the order of the inputs. Few rows are multiplied with codes that
are decoded in registers, more rows with panels that are decoded once. Both compute the same sums, so a row has the same
bits in a batch of any size (batch invariance, docs/invariants.md).

A rounded row is one after the other:

- int16[steps, 2, 16]: even inputs and odd inputs of each step; or, for codes that are multiplied as bytes,
  int8[steps, 2, 32]: the upper and the lower bytes, both signed, so that an input is 256 * upper + lower
- int32[steps, 2]: sums of its halves
- float32[steps]: sums
- float32[spans]: scales

The kernel and the program for decoded panels are the same for all formats. A format has a coder (`coder`), which the
kernel calls.
"""

from functools import cache, reduce
from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import carray, njit
from numba.core import cgutils, types
from numba.extending import intrinsic
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
    step_minima,
)
from services.worker.kernels.cpu.compiled.building import for_each_size, load, moved, spread, store
from services.worker.kernels.cpu.compiled.product import FIELDS
from services.worker.kernels.cpu.compiled.raw import prefetch_line
from services.worker.kernels.cpu.compiled.simd import F32, I16, I32, I64, LANES, VF, VI
from services.worker.kernels.cpu.thread_team import Kernel, arguments, compiled, take

BLOCK = PANELS * PANEL
"""Outputs of one item."""
ROWS, WIDTH = (6, 2) if simd.WIDE else (6, 1)
"""Largest numbers of rows and panels that are multiplied together once the panels are decoded."""
UNROLLED = 4
"""Pairs of inputs of one turn of the innermost loop."""
LINES = 2 * WIDTH
"""Lines of codes that are read from memory in such a turn: those of eight bits, or more."""
CHUNK = 32 * ROWS
"""Maximum number of rows of one item."""
WORTH = 1 << 18
"""Smallest number of multiplications for which another thread is used."""
HALVES_AT, TOTALS_AT, SCALES_OF_ROWS_AT = 2 * STEP, 2 * STEP + 8, 2 * STEP + 12
"""Offsets in a rounded row of what follows the activations, in bytes for each step."""
CODED = arguments(
    *FIELDS,
    ("format", np.int64),  # int64[NUMBERS], as `format_table` returns it
    ("half", np.int64),  # activations are bfloat16, and not float32
)
NUMBERS = 7
TASK = np.dtype(
    [
        ("codes", np.int64),  # address of the first panel
        ("first", np.int64),  # step of a span
        ("steps", np.int64),  # of the span
        ("rows", np.int64),  # up to `_few_rows`; 0: decode panels
        ("width", np.int64),  # number of panels
        ("out", np.int64),  # decoded panels, or float32[rows, PANELS, 16], to which products are added
        ("x", np.int64),  # address of the first rounded row
        ("row_bytes", np.int64),
        ("row_steps", np.int64),
        ("end", np.int64),  # of the item's panels; codes behind it are not read beforehand
        ("jump", np.int64),  # from there to the codes that this thread reads next
    ]
)
"""A coder's arguments."""
TASK_BYTES = 128
PARTS = (0, 1, 2, 3, 4, 3, 6, 4, 8, 3, 4, 3, 6, 6, 6, 8, 8)
"""Rows that are multiplied first with codes that are decoded in registers, by the number of rows. One row is never a
part: it is rounded in another way."""
_TINY = np.float32(1e-30)
"""Rows whose numbers are all smaller are 0."""


def _add_byte_products(builder: Any, sums: Any, codes: Any, bytes_: Any) -> Any:
    """Add the products of four inputs to sixteen int32. `codes`: uint8[64]; `bytes_`: int32[16] that hold four int8."""
    return simd.call_llvm(builder, "llvm.x86.avx512.vpdpbusd.512", VI, [sums, codes, bytes_])


def _add_products(builder: Any, sums: Any, numbers: Any, pair: Any) -> Any:
    """Add the products of two inputs to sixteen int32. `numbers`: int16[32]; `pair`: int32[16] that hold two int16."""
    if simd.compiles_for("avx512vnni"):
        operands = [sums, builder.bitcast(numbers, VI), pair]
        return simd.call_llvm(builder, "llvm.x86.avx512.vpdpwssd.512", VI, operands)
    some = builder.bitcast(pair, numbers.type)
    if simd.compiles_for("avx512bw"):
        products = simd.call_llvm(builder, "llvm.x86.avx512.pmaddw.d.512", VI, [numbers, some])
        return builder.add(sums, products)
    wide = ir.VectorType(I32, 2 * LANES)
    products = builder.mul(builder.sext(numbers, wide), builder.sext(some, wide))
    for first in (0, 1):  # becomes one instruction
        order = ir.Constant(VI, list(range(first, 2 * LANES, 2)))
        sums = builder.add(sums, builder.shuffle_vector(products, products, order))
    return sums


class _Tile:
    """Sums of some rows and panels in a span.

    A rounded row begins at an address of `x`; `steps` is its number of steps, and `first` the first one of the span.
    """

    def __init__(self, builder: Any, rows: int, panels: int, x: Any, row_bytes: Any, steps: Any, first: Any) -> None:
        self._builder, self._panels, self._steps, self.first = builder, panels, steps, first
        self._x = [builder.add(x, builder.mul(row_bytes, ir.Constant(I64, row))) for row in range(rows)]
        self._sums = [cgutils.alloca_once(builder, ir.ArrayType(VF, panels)) for _ in range(rows)]
        self.set(self._parts(ir.Constant(I64, 0), panels))

    def vectors(self, kind: ir.VectorType, panels: int) -> list[list[Any]]:
        """Return places of a vector for each of some panels of each row. LLVM keeps them in registers."""
        return [[cgutils.alloca_once(self._builder, kind) for _ in range(panels)] for _ in self._x]

    def _parts(self, first: Any, panels: int) -> list[list[Any]]:
        """Return places of the sums of each row and of `panels` panels from `first` on."""
        numbers = [moved(self._builder, first, number) for number in range(panels)]
        return [[self._builder.gep(row, [ir.Constant(I64, 0), number]) for number in numbers] for row in self._sums]

    def set(self, vectors: list[list[Any]], values: list[Any] | None = None) -> None:
        """Set the vectors of each row to a value, or to 0."""
        for number, row in enumerate(vectors):
            for place in row:
                none = ir.Constant(place.type.pointee, None)
                self._builder.store(none if values is None else values[number], place)

    def of_rows(self, kind: ir.Type, index: Any, index_bytes: int, step_bytes: int = 0, more: int = 0) -> list[Any]:
        """Load a number of each row into all lanes: that at `steps * step_bytes + index * index_bytes + more`."""
        builder, vector = self._builder, VF if kind == F32 else VI
        at = builder.add(self.times(self._steps, step_bytes), moved(builder, self.times(index, index_bytes), more))
        return [spread(builder, load(builder, builder.add(x, at), kind, 4), vector) for x in self._x]

    def add_products(
        self, sums: list[list[Any]], numbers: list[Any], inputs: list[Any], add: Any = _add_products
    ) -> None:
        """Add the products of inputs of each row and of each panel with `add`."""
        builder = self._builder
        for row, some_inputs in zip(sums, inputs, strict=True):
            for place, some in zip(row, numbers, strict=True):
                builder.store(add(builder, builder.load(place), some, some_inputs), place)

    def join(self, upper: list[list[Any]], sums: list[list[Any]]) -> None:
        """Add 256 times the sums of upper bytes to those of lower bytes."""
        builder = self._builder
        for of_upper, of_lower in zip(upper, sums, strict=True):
            for place, to in zip(of_upper, of_lower, strict=True):
                shifted = builder.shl(builder.load(place), ir.Constant(VI, [8] * LANES))
                builder.store(builder.add(builder.load(to), shifted), to)

    def add_scaled(self, sums: list[list[Any]], scales: list[Any], panel: Any) -> None:
        """Add sums of panels from `panel` on, times the scales of these."""
        for mine, theirs in zip(self._parts(panel, len(scales)), sums, strict=True):
            for place, sum_of, scale in zip(mine, theirs, scales, strict=True):
                self._add_product(place, self._builder.sitofp(self._builder.load(sum_of), VF), scale)

    def add_minima(self, minima: list[Any], step: Any, panel: Any) -> None:
        """Add the minima of panels from `panel` on, times the sum of the inputs of a step."""
        totals = self.of_rows(F32, step, 4, TOTALS_AT)
        for row, total in zip(self._parts(panel, len(minima)), totals, strict=True):
            for place, minimum in zip(row, minima, strict=True):
                self._add_product(place, minimum, total)

    def add_to(self, out: Any) -> None:
        """Add the sums of the span times the scales of the rows to those of the item."""
        builder = self._builder
        span = builder.udiv(self.first, ir.Constant(I64, SPAN))
        scales = self.of_rows(F32, span, 4, SCALES_OF_ROWS_AT)
        parts = self._parts(ir.Constant(I64, 0), self._panels)
        for number, (row, scale) in enumerate(zip(parts, scales, strict=True)):
            for panel, place in enumerate(row):
                at = moved(builder, out, 64 * (number * PANELS + panel))
                operands = [builder.load(place), scale, load(builder, at, VF, 4)]
                store(builder, simd.call_llvm(builder, "llvm.fma.v16f32", VF, operands), at, 4)

    def times(self, value: Any, factor: int) -> Any:
        return self._builder.mul(value, ir.Constant(I64, factor))

    def _add_product(self, place: Any, a: Any, b: Any) -> None:
        operands = [a, b, self._builder.load(place)]
        self._builder.store(simd.call_llvm(self._builder, "llvm.fma.v16f32", VF, operands), place)


@intrinsic(prefer_literal=True)
def _multiply_codes(
    typing_context: Any, kind: Any, rows: Any, x: Any, row_bytes: Any, steps: Any, first: Any, number: Any, codes: Any,
    out: Any, end: Any, jump: Any
) -> Any:  # fmt: skip
    """Multiply a span of rows with the panels of an item, which are decoded in registers: `_width` at once, in the
    order of the memory.

    Args:
        kind: a constant
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
    name = KINDS[kind.literal_value]
    own = FORMATS[name]

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        rows, *operands = args[1:]
        sizes = [rows for rows in sorted({*PARTS}) if 0 < rows <= _few_rows(own)]
        for_each_size(builder, rows, sizes, lambda rows: multiply(builder, rows, *operands))
        return context.get_dummy_value()

    def multiply(
        builder: Any, rows: int, x: Any, row_bytes: Any, steps: Any, first: Any, number: Any, codes: Any, out: Any,
        end: Any, jump: Any
    ) -> None:  # fmt: skip
        width, are_bytes = _width(own, rows), BYTES and rows == 1
        codes_of, add, zero_code = (
            (code_bytes, _add_byte_products, own.zero_byte) if are_bytes else (code_pairs, _add_products, own.zero)
        )
        tile = _Tile(builder, rows, PANELS, x, row_bytes, steps, first)
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
                        place = tile.times(moved(builder, step, number), 2)
                        totals = [tile.of_rows(I32, builder.add(place, half), 4, HALVES_AT) for half in halves]
                        starts = [builder.mul(reduce(builder.add, each), zero) for each in zip(*totals, strict=True)]
                    tile.set(some, starts)
                with cgutils.for_range(builder, turns) as inner:
                    index = builder.add(builder.mul(outer.index, turns), inner.index)
                    here = builder.add(tile.times(step, QUADS * 2), index)
                    decoded = [codes_of(builder, name, block, unit, index, ahead) for block in blocks]
                    for same in zip(*decoded, strict=True):
                        number, quad, _ = same[0]
                        for half, to in enumerate((upper[number], sums[number])):
                            inputs = tile.of_rows(I32, here, 4, 0, number * 2 * STEP + half * STEP + quad * 4)
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
            number = builder.add(tile.times(builder.udiv(start, block_steps), PANELS), panel)
            place = builder.add(codes, tile.times(number, own.bytes))
            blocks = [moved(builder, place, number * own.bytes) for number in range(width)]
            ahead = next_codes(builder, name, blocks, end, jump)
            if own.multiplies:
                tile.set(whole)
            with cgutils.for_range(builder, units) as loop:
                add_unit(builder.add(start, tile.times(loop.index, own.unit)), panel, blocks, ahead)
            tile.add_scaled(whole, [block_scale(builder, name, block) for block in blocks], panel)

        with cgutils.for_range(builder, builder.udiv(number, ir.Constant(I64, own.scale_steps))) as loop:
            start = builder.add(first, tile.times(loop.index, own.scale_steps))
            if width == PANELS:
                add_blocks(start, ir.Constant(I64, 0))  # sums are in registers
            else:
                with cgutils.for_range(builder, ir.Constant(I64, PANELS // width)) as some:
                    add_blocks(start, tile.times(some.index, width))
        tile.add_to(out)

    return types.void(kind, *[types.int64] * 10), code


@intrinsic
def _multiply_decoded(
    typing_context: Any, rows: Any, x: Any, row_bytes: Any, steps: Any, first: Any, number: Any,
    decoded: Any, scale_steps: Any, has_minima: Any, out: Any, ahead: Any, ahead_bytes: Any
) -> Any:  # fmt: skip
    """Multiply a span of 3 to `ROWS` rows with `WIDTH` decoded panels.

    Args:
        ahead, ahead_bytes: codes that are read from memory meanwhile: their address, and how many bytes of them in
            each turn of the innermost loop. The others: see above.
    """

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        rows, x, row_bytes, steps, first, number, decoded, scale_steps, has_minima, out, ahead, ahead_bytes = args

        def multiply(rows: int) -> None:
            tile = _Tile(builder, rows, WIDTH, x, row_bytes, steps, first)
            sums, first_panel = tile.vectors(VI, WIDTH), ir.Constant(I64, 0)

            def loaded(index: Any, kind: ir.VectorType, more: int) -> list[Any]:
                place = builder.add(decoded, tile.times(index, 64))
                return [
                    load(builder, moved(builder, place, more + panel * SPAN_BYTES), kind, 4) for panel in range(WIDTH)
                ]

            with cgutils.for_range(builder, builder.udiv(number, scale_steps)) as outer:
                start = builder.mul(outer.index, scale_steps)
                tile.set(sums)
                with cgutils.for_range(builder, tile.times(scale_steps, STEP // 2 // UNROLLED)) as loop:
                    index = builder.add(tile.times(start, STEP // 2), tile.times(loop.index, UNROLLED))
                    here = builder.add(tile.times(first, STEP // 2), index)
                    turn = builder.udiv(index, ir.Constant(I64, UNROLLED))
                    codes = builder.add(ahead, builder.mul(turn, ahead_bytes))
                    for line in range(LINES):
                        prefetch_line(builder, moved(builder, codes, 64 * line))
                    for some in range(UNROLLED):
                        numbers = loaded(index, ir.VectorType(I16, 2 * LANES), 64 * some)
                        tile.add_products(sums, numbers, tile.of_rows(I32, here, 4, 0, 4 * some))
                with cgutils.for_range(builder, builder.mul(scale_steps, has_minima)) as loop:
                    step = builder.add(start, loop.index)
                    tile.add_minima(loaded(step, VF, MINIMA_AT), builder.add(first, step), first_panel)
                tile.add_scaled(sums, loaded(outer.index, VF, SCALES_AT), first_panel)
            tile.add_to(out)

        for_each_size(builder, rows, range(3, ROWS + 1), multiply)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 12), code


def _even_and_odd(builder: Any, address: Any, half: int) -> list[Any]:
    """Load 32 inputs: the even ones and the odd ones, as bits of float32."""
    if half:
        return simd.halves(builder, load(builder, address, VI, 2))
    both = [load(builder, moved(builder, address, 64 * number), VI, 4) for number in range(2)]
    orders = [ir.Constant(VI, list(range(first, 2 * LANES, 2))) for first in (0, 1)]
    return [builder.shuffle_vector(*both, order) for order in orders]


@intrinsic(prefer_literal=True)
def _larger(typing_context: Any, address: Any, half: Any, most: Any) -> Any:
    """The larger ones of `most` and the absolute values of 32 inputs. A number that is none is the largest."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        most = builder.bitcast(args[2], VI)
        for values in _even_and_odd(builder, args[0], half.literal_value):
            size = builder.and_(values, ir.Constant(VI, [0x7FFFFFFF] * LANES))
            most = builder.select(builder.icmp_signed(">", size, most), size, most)
        return builder.bitcast(most, VF)

    return simd.vector(types.int64, half, simd.vector), code


@intrinsic(prefer_literal=True)
def _round_step(
    typing_context: Any, address: Any, half: Any, inverse: Any, to: Any, halves: Any, total: Any, are_bytes: Any
) -> Any:
    """Round 32 inputs times `inverse`. `to`, `halves` and `total`: addresses of their parts of a rounded row.
    `are_bytes` is a constant."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        # The float32 nearest to a small number + 1.5 * 2**23 has that number, rounded, in its lowest bits
        magic, sums = ir.Constant(VF, [12582912.0] * LANES), ir.Constant(VI, [-2 * 0x4B400000] * LANES)
        rounded = [
            builder.bitcast(builder.fadd(builder.fmul(builder.bitcast(values, VF), args[2]), magic), VI)
            for values in _even_and_odd(builder, args[0], half.literal_value)
        ]
        kept = rounded
        if are_bytes.literal_value:
            low, bits, round_up = (ir.Constant(VI, [number] * LANES) for number in (255, 8, 128))
            upper = [builder.lshr(builder.add(some, round_up), bits) for some in rounded]
            kept = [builder.or_(builder.and_(even, low), builder.shl(odd, bits)) for even, odd in (upper, rounded)]
        for number, some in enumerate(kept):
            halves = builder.trunc(some, ir.VectorType(I16, LANES))
            store(builder, halves, moved(builder, args[3], STEP * number), 2)
            sums = builder.add(sums, rounded[number])
        for distance in (4, 2, 1):
            order = ir.Constant(VI, [lane ^ distance for lane in range(LANES)])
            sums = builder.add(sums, builder.shuffle_vector(sums, sums, order))
        ends = [builder.extract_element(sums, ir.Constant(I32, lane)) for lane in (0, LANES // 2)]
        for number, end in enumerate(ends):
            store(builder, end, moved(builder, args[4], 4 * number), 4)
        store(builder, builder.sitofp(builder.add(*ends), F32), args[5], 4)
        return context.get_dummy_value()

    return types.void(types.int64, half, simd.vector, *[types.int64] * 3, are_bytes), code


@intrinsic
def _largest(typing_context: Any, sizes: Any) -> Any:
    """The largest of sixteen numbers that are not negative."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        bits = builder.bitcast(args[0], VI)
        return builder.bitcast(simd.call_llvm(builder, "llvm.vector.reduce.smax.v16i32", I32, [bits]), F32)

    return types.float32(simd.vector), code


@njit(inline="always")
def _round_row(x, steps, limit, to, HALF, ARE_BYTES):  # type: ignore[no-untyped-def]
    size, halves, totals = STEP * (2 if HALF else 4), to + steps * HALVES_AT, to + steps * TOTALS_AT
    scales = to + steps * SCALES_OF_ROWS_AT
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
            target = to + step * 2 * STEP
            _round_step(x + step * size, HALF, inverse, target, halves + step * 8, totals + step * 4, ARE_BYTES)


@njit(inline="always")
def _write(a, sums, row, rows, first):  # type: ignore[no-untyped-def]
    """Add the bias to sums, float32[rows, BLOCK], and store the outputs from `first` on."""
    size = 2 if a.half else 4
    for i in range(rows):
        for output in range(first, min(a.outputs, first + BLOCK), PANEL):
            here = sums + (i * BLOCK + output - first) * 4
            value = simd.add(simd.load_f32x16(here), simd.load_f32x16(a.bias + output * 4))
            out = a.out + ((row + i) * a.stride + output) * size
            if output + PANEL <= a.outputs:
                simd.store16(out, value, a.half)
            else:
                simd.store_f32x16(here, value)
                for j in range(a.outputs - output):
                    simd.store1(out + j * size, simd.load_f32(here + j * 4), a.half)


def coded_product_kernel(inputs: int) -> Kernel:
    """One item is a block of outputs of up to `CHUNK` rows; its work is the number of rows."""
    return _compiled().again_for(WORTH, BLOCK * inputs)


@cache
def _compiled() -> Kernel:
    def coded_product(address):  # type: ignore[no-untyped-def]
        a = carray(raw.pointer(address), 1, CODED)[0]
        own = raw.i64_at(a.format, NUMBERS)
        coder, limit, scale_steps, has_minima, few = own[0], own[3], own[4], own[5], own[6]
        steps, items = a.inputs // STEP, (a.outputs + BLOCK - 1) // BLOCK
        row_bytes = (steps * SCALES_OF_ROWS_AT + (steps + SPAN - 1) // SPAN * 4 + 63) // 64 * 64
        most, item_bytes = min(a.rows, CHUNK), steps // own[1] * own[2] * PANELS
        span_bytes = SPAN // own[1] * own[2] * PANELS
        ahead_bytes = span_bytes // PANELS * WIDTH // (SPAN * STEP // 2 // UNROLLED)
        buffer = raw.allocate(64 + TASK_BYTES + WIDTH * SPAN_BYTES + most * (BLOCK * 4 + row_bytes))
        place = (buffer + 63) // 64 * 64
        decoded = place + TASK_BYTES
        sums = decoded + WIDTH * SPAN_BYTES
        rounded = sums + most * BLOCK * 4
        task = carray(raw.pointer(place), 1, TASK)[0]
        task.x, task.row_bytes, task.row_steps = rounded, row_bytes, steps
        present = -1  # first row of those that are rounded: most items have the rows of the one before
        item = take(address)
        while item < a.items:
            following = take(address)  # its codes are read beforehand
            block, start = item % items, item // items * CHUNK
            rows = min(CHUNK, a.rows - start)
            is_few = rows <= few
            if present != start:
                present = start
                for row in range(rows):
                    x, to = (start + row) * a.inputs, rounded + row * row_bytes
                    if a.half and rows == 1:
                        _round_row(a.x + x * 2, steps, limit, to, 1, BYTES)
                    elif a.half:
                        _round_row(a.x + x * 2, steps, limit, to, 1, 0)
                    elif rows == 1:
                        _round_row(a.x + x * 4, steps, limit, to, 0, BYTES)
                    else:
                        _round_row(a.x + x * 4, steps, limit, to, 0, 0)
            task.end = a.weight + (block + 1) * item_bytes
            task.jump = (following % items - block - 1) * item_bytes if following < a.items else -item_bytes
            task.rows, task.width = (rows, PANELS) if is_few else (0, WIDTH)
            for number in range(rows * PANELS):
                simd.store_f32x16(sums + number * 64, simd.splat(np.float32(0)))
            panels = (min(BLOCK, a.outputs - block * BLOCK) + PANEL - 1) // PANEL
            for step in range(0, steps, SPAN):
                task.first, task.steps = step, min(SPAN, steps - step)
                ahead = a.weight + block * item_bytes + (step // SPAN + 1) * span_bytes
                if ahead >= task.end:
                    ahead = task.end + task.jump
                for panel in range(0, panels, task.width):
                    out = sums + panel * 64
                    task.codes = a.weight + block * item_bytes + panel * own[2]
                    task.out = out if is_few else decoded
                    raw.call(coder, place)
                    done = rows if is_few else 0
                    while done < rows:
                        # Equal parts: seven rows are four and three
                        parts = (rows - done + ROWS - 1) // ROWS
                        some = (rows - done + parts - 1) // parts
                        codes = ahead + panel * (span_bytes // PANELS)
                        # Read from the task: kept in registers, they would displace sums
                        x, size = task.x + done * task.row_bytes, task.row_bytes
                        _multiply_decoded(
                            some, x, size, task.row_steps, task.first, task.steps, decoded, scale_steps, has_minima,
                            out + done * BLOCK * 4, codes, ahead_bytes,
                        )  # fmt: skip
                        done += some
            _write(a, sums, start, rows, block * BLOCK)
            item = following
        raw.release(buffer)

    return Kernel(coded_product, CODED, cost=1)


@cache
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
    """Return the largest number of rows that do not pay for decoded panels."""
    return 16 // own.unit if simd.WIDE else 3


def _width(own: Format, rows: int) -> int:
    """Return the number of panels that are multiplied together with few rows.

    With more than one, AVX2 has too few registers for sums and codes, and memory is read at several places by turns.
    """
    if not simd.WIDE:
        return 1
    sums = rows * own.unit * (2 if BYTES and rows == 1 else 1)
    return max(1, min(4, 16 // sums) // 2 * 2)


@cache
def format_table(kind: int) -> NDArray[np.int64]:
    """Return what kernels must know of a format, and compile its coder: address of the coder; steps and bytes of a
    block; largest activation; `scale_steps`; `has_minima`; `_few_rows`."""
    own = FORMATS[KINDS[kind]]
    numbers = own.steps, own.bytes, own.limit, own.scale_steps, int(own.has_minima), _few_rows(own)
    return np.array([_coder(kind).address, *numbers], np.int64)
