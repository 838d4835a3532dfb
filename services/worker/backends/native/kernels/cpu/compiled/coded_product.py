# ruff: noqa: ARG001, the signatures are numba's
"""y = W x + b from quantised weights, with products of whole numbers.

Activations are rounded to whole numbers of up to 16 bits, with one scale for 256 inputs, which loses less than
bfloat16. Numbers of weights and activations are multiplied exactly; scales and minima are applied to the sums of a
block (of half a block in some formats) in float32, in the order of the inputs. Few rows are multiplied with codes that
are decoded in registers, more rows with panels that are decoded once. Both compute the same sums, so a row has the same
bits in a batch of any size (batch invariance, docs/invariants.md).

A rounded row is one after the other:

- int16[steps, 2, 16]: even inputs and odd inputs of each step
- int32[steps, 2]: sums of its halves
- float32[steps]: sums
- float32[spans]: scales

The kernel and the program for decoded panels are the same for all formats. A format has a coder (`coder`), which the
kernel calls.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import carray, njit
from numba.core import cgutils, types
from numba.extending import intrinsic
from numpy.typing import NDArray

from services.worker.backends.native.kernels.cpu.compiled import raw, simd
from services.worker.backends.native.kernels.cpu.compiled.block_formats import (
    DECODED_BYTES,
    FORMATS,
    KINDS,
    NUMBERS_BYTES,
    PANEL,
    QUADS,
    STEP,
    block_scale,
    code_pairs,
    decode_panel,
    group_factors,
    step_minima,
)
from services.worker.backends.native.kernels.cpu.compiled.building import load, moved, spread, store
from services.worker.backends.native.kernels.cpu.compiled.product import PRODUCT
from services.worker.backends.native.kernels.cpu.compiled.simd import F32, I16, I32, I64, LANES, VF, VI
from services.worker.backends.native.kernels.cpu.thread_team import HEADER, Kernel, compiled, take

PANELS = 4
"""Panels of one item."""
BLOCK = PANELS * PANEL
"""Outputs of one item."""
SPAN = 8
"""Steps that share a scale of activations."""
ROWS, WIDTH = (6, 2) if simd.WIDE else (6, 1)
"""Largest numbers of rows and panels that are multiplied together once the panels are decoded."""
FEW = 3
"""Largest number of rows that do not pay for decoded panels."""
WIDTHS = (0, 4, 4, 2) if simd.WIDE else (0, 2, 1, 1)
"""Panels that are multiplied with so few rows together."""
CHUNK = 32 * ROWS
"""Maximum number of rows of one item."""
WORTH = 1 << 18
"""Smallest number of multiplications for which another thread is used."""
CODED = [
    *PRODUCT,
    ("format", np.int64),  # int64[6], as `format_table` returns it
    ("half", np.int64),  # activations are bfloat16, and not float32
]
_CODED = np.dtype(HEADER + CODED, align=True)
_SUMS_BYTES = 64 * max(ROWS * WIDTH, *(rows * width for rows, width in enumerate(WIDTHS)))
TASK = np.dtype(
    [
        ("codes", np.int64),  # address of the first panel
        ("panel_bytes", np.int64),
        ("blocks", np.int64),  # of a panel
        ("rows", np.int64),  # up to `FEW`; 0: decode panels
        ("width", np.int64),  # number of panels to decode
        ("out", np.int64),  # decoded panels, or float32[rows, panels, 16]
        ("x", np.int64),  # address of the first rounded row
        ("row_bytes", np.int64),
    ]
)
"""What the kernel tells a coder."""
TASK_BYTES = TASK.itemsize
_TINY = np.float32(1e-30)
"""Rows whose numbers are all smaller are 0."""


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
    """Sums of some rows and panels. LLVM keeps them in registers."""

    def __init__(
        self, builder: Any, rows: int, panels: int, x: Any, row_bytes: Any, steps: Any, out: Any
    ) -> None:
        self._builder, self._steps, self._out = builder, steps, out
        self._x = [builder.add(x, builder.mul(row_bytes, ir.Constant(I64, row))) for row in range(rows)]
        self.sums, self._parts = self.vectors(VI, panels), self.vectors(VF, panels)
        for number in range(rows * panels):
            store(builder, ir.Constant(VF, None), moved(builder, out, 64 * number), 4)

    def vectors(self, kind: ir.VectorType, panels: int) -> list[list[Any]]:
        return [[cgutils.alloca_once(self._builder, kind) for _ in range(panels)] for _ in self._x]

    def set(self, vectors: list[list[Any]], values: list[Any] | None = None) -> None:
        """Set the vectors of each row to a value, or to 0."""
        for number, row in enumerate(vectors):
            for place in row:
                none = ir.Constant(place.type.pointee, None)
                self._builder.store(none if values is None else values[number], place)

    def of_rows(self, steps_bytes: int, offset: Any, kind: ir.Type) -> list[Any]:
        """Load a number of each row into all lanes: that behind `steps_bytes` for each step and `offset`."""
        builder, vector = self._builder, VF if kind == F32 else VI
        at = builder.add(builder.mul(self._steps, ir.Constant(I64, steps_bytes)), offset)
        return [spread(builder, load(builder, builder.add(x, at), kind, 4), vector) for x in self._x]

    def add_products(self, numbers: list[Any], offset: Any) -> None:
        """Add the products of two inputs, `offset` bytes behind the first one."""
        builder = self._builder
        for row, pair in zip(self.sums, self.of_rows(0, offset, I32), strict=True):
            for place, some in zip(row, numbers, strict=True):
                builder.store(_add_products(builder, builder.load(place), some, pair), place)

    def add_scaled(self, sums: list[list[Any]], scales: list[Any]) -> None:
        """Add sums, times the scales of their panels."""
        for mine, theirs in zip(self._parts, sums, strict=True):
            for place, sum_of, scale in zip(mine, theirs, scales, strict=True):
                self._add_product(place, self._builder.sitofp(self._builder.load(sum_of), VF), scale)

    def add_minima(self, minima: list[Any], step: Any) -> None:
        totals = self.of_rows(NUMBERS_BYTES // PANEL + 8, self.times(step, 4), F32)
        for row, total in zip(self._parts, totals, strict=True):
            for place, minimum in zip(row, minima, strict=True):
                self._add_product(place, minimum, total)

    @contextmanager
    def span(self) -> Iterator[tuple[Any, Any]]:
        """For each span: build code for its first step and its number of steps, and add its sums to the results."""
        builder, most = self._builder, ir.Constant(I64, SPAN)
        spans = builder.udiv(moved(builder, self._steps, SPAN - 1), most)
        with cgutils.for_range(builder, spans) as loop:
            first = builder.mul(loop.index, most)
            left = builder.sub(self._steps, first)
            self.set(self._parts)
            yield first, builder.select(builder.icmp_signed("<", left, most), left, most)
            scales = self.of_rows(NUMBERS_BYTES // PANEL + 12, self.times(loop.index, 4), F32)
            at = self._out
            for row, scale in zip(self._parts, scales, strict=True):
                for place in row:
                    result = load(builder, at, VF, 4)
                    operands = [builder.load(place), scale, result]
                    store(builder, simd.call_llvm(builder, "llvm.fma.v16f32", VF, operands), at, 4)
                    at = moved(builder, at, 64)

    def times(self, value: Any, factor: int) -> Any:
        return self._builder.mul(value, ir.Constant(I64, factor))

    def _add_product(self, place: Any, a: Any, b: Any) -> None:
        operands = [a, b, self._builder.load(place)]
        self._builder.store(simd.call_llvm(self._builder, "llvm.fma.v16f32", VF, operands), place)


@intrinsic(prefer_literal=True)
def _multiply_codes(
    typing_context: Any,
    kind: Any,
    rows: Any,
    panels: Any,
    x: Any,
    row_bytes: Any,
    codes: Any,
    panel_bytes: Any,
    steps: Any,
    out: Any,
) -> Any:
    """Multiply rows with panels that are decoded in registers. `kind`, `rows` and `panels` are constants.

    Args:
        x: address of the first rounded row
        row_bytes: from one row to the next
        codes: address of the first panel
        panel_bytes: from one panel to the next
        out: float32[rows, panels, 16], overwritten
    """
    name = KINDS[kind.literal_value]
    own, width = FORMATS[name], panels.literal_value
    groups = STEP // own.group

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x, row_bytes, codes, panel_bytes, steps, out = args[3:]
        tile = _Tile(builder, rows.literal_value, width, x, row_bytes, steps, out)
        whole = tile.vectors(VI, width) if own.multiplies else tile.sums
        places = [builder.add(codes, tile.times(panel_bytes, panel)) for panel in range(width)]
        in_block = ir.Constant(I64, own.steps)
        together = ir.Constant(I64, own.scale_steps)

        def add_step(step: Any, inner: Any) -> None:
            blocks = [
                builder.add(place, tile.times(builder.udiv(step, in_block), own.bytes)) for place in places
            ]
            inner = builder.urem(step, in_block) if own.steps > 1 else ir.Constant(I64, 0)
            factors = (
                [group_factors(builder, name, block, inner) for block in blocks] if own.multiplies else []
            )
            for group in range(groups):
                starts = None
                if own.zero:  # products with the code of zero are subtracted
                    zero = ir.Constant(VI, [-own.zero] * LANES)
                    totals = tile.of_rows(
                        NUMBERS_BYTES // PANEL, moved(builder, tile.times(step, 8), 4 * group), I32
                    )
                    if groups == 1:
                        others = tile.of_rows(
                            NUMBERS_BYTES // PANEL, moved(builder, tile.times(step, 8), 4), I32
                        )
                        totals = [builder.add(*both) for both in zip(totals, others, strict=True)]
                    starts = [builder.mul(total, zero) for total in totals]
                tile.set(tile.sums, starts)
                for quad in range(QUADS * group // groups, QUADS * (group + 1) // groups):
                    decoded = [code_pairs(builder, name, block, inner, quad) for block in blocks]
                    for half in range(2):
                        offset = moved(builder, tile.times(step, 2 * STEP), STEP * half + 4 * quad)
                        tile.add_products([pairs[half] for pairs in decoded], offset)
                if own.multiplies:
                    for mine, theirs in zip(whole, tile.sums, strict=True):
                        for panel in range(width):
                            scaled = builder.mul(builder.load(theirs[panel]), factors[panel][group])
                            builder.store(builder.add(builder.load(mine[panel]), scaled), mine[panel])
            if own.has_minima:
                tile.add_minima([step_minima(builder, name, block, inner) for block in blocks], step)

        with tile.span() as (first, number):
            with cgutils.for_range(builder, builder.udiv(number, together)) as outer:
                start = builder.add(first, tile.times(outer.index, own.scale_steps))
                if own.multiplies:
                    tile.set(whole)
                    with cgutils.for_range(builder, together) as loop:
                        add_step(builder.add(start, loop.index), loop.index)
                else:
                    add_step(start, None)
                blocks = [
                    builder.add(place, tile.times(builder.udiv(start, in_block), own.bytes))
                    for place in places
                ]
                tile.add_scaled(whole, [block_scale(builder, name, block) for block in blocks])
        return context.get_dummy_value()

    return types.void(kind, rows, panels, *[types.int64] * 6), code


@intrinsic(prefer_literal=True)
def _multiply_decoded(
    typing_context: Any,
    rows: Any,
    panels: Any,
    x: Any,
    row_bytes: Any,
    decoded: Any,
    steps: Any,
    scale_steps: Any,
    has_minima: Any,
    out: Any,
) -> Any:
    """Multiply rows with decoded panels. `rows` and `panels` are constants. The others: see `_multiply_codes`."""
    width = panels.literal_value

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x, row_bytes, decoded, steps, scale_steps, has_minima, out = args[2:]
        tile = _Tile(builder, rows.literal_value, width, x, row_bytes, steps, out)
        panel_bytes = tile.times(steps, DECODED_BYTES)
        numbers = [builder.add(decoded, tile.times(panel_bytes, panel)) for panel in range(width)]
        scales = [builder.add(place, tile.times(steps, NUMBERS_BYTES)) for place in numbers]
        minima = [builder.add(place, tile.times(steps, 4 * PANEL)) for place in scales]

        def loaded(places: list[Any], index: Any, kind: ir.VectorType, distance: int = 0) -> list[Any]:
            offset = moved(builder, tile.times(index, 64), distance)
            return [load(builder, builder.add(place, offset), kind, 4) for place in places]

        with tile.span() as (first, number):
            with cgutils.for_range(builder, builder.udiv(number, scale_steps)) as outer:
                start = builder.add(first, builder.mul(outer.index, scale_steps))
                tile.set(tile.sums)
                pairs = tile.times(scale_steps, STEP // 2 // UNROLLED)
                with cgutils.for_range(builder, pairs) as loop:
                    index = builder.add(tile.times(start, STEP // 2), tile.times(loop.index, UNROLLED))
                    for some in range(UNROLLED):
                        vectors = loaded(numbers, index, ir.VectorType(I16, 2 * LANES), 64 * some)
                        tile.add_products(vectors, moved(builder, tile.times(index, 4), 4 * some))
                with cgutils.for_range(builder, builder.mul(scale_steps, has_minima)) as loop:
                    step = builder.add(start, loop.index)
                    tile.add_minima(loaded(minima, step, VF), step)
                tile.add_scaled(tile.sums, loaded(scales, builder.udiv(start, scale_steps), VF))
        return context.get_dummy_value()

    return types.void(rows, panels, *[types.int64] * 7), code


UNROLLED = 4
"""Pairs of inputs of one turn of the innermost loop."""


def _even_and_odd(builder: Any, address: Any, half: int) -> list[Any]:
    """Load 32 inputs: the even ones and the odd ones, as bits of float32."""
    if half:
        words = load(builder, address, VI, 2)
        high = ir.Constant(VI, [0xFFFF0000] * LANES)
        return [builder.shl(words, ir.Constant(VI, [16] * LANES)), builder.and_(words, high)]
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
    typing_context: Any, address: Any, half: Any, inverse: Any, to: Any, halves: Any, total: Any
) -> Any:
    """Round 32 inputs times `inverse`. `to`, `halves` and `total`: addresses of their parts of a rounded row."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        # The float32 nearest to a small number + 1.5 * 2**23 has that number, rounded, in its lowest bits
        magic, sums = ir.Constant(VF, [12582912.0] * LANES), ir.Constant(VI, [-2 * 0x4B400000] * LANES)
        for number, values in enumerate(_even_and_odd(builder, args[0], half.literal_value)):
            scaled = builder.fmul(builder.bitcast(values, VF), args[2])
            bits = builder.bitcast(builder.fadd(scaled, magic), VI)
            store(
                builder,
                builder.trunc(bits, ir.VectorType(I16, LANES)),
                moved(builder, args[3], STEP * number),
                2,
            )
            sums = builder.add(sums, bits)
        for distance in (4, 2, 1):
            order = ir.Constant(VI, [lane ^ distance for lane in range(LANES)])
            sums = builder.add(sums, builder.shuffle_vector(sums, sums, order))
        ends = [builder.extract_element(sums, ir.Constant(I32, lane)) for lane in (0, LANES // 2)]
        for number, end in enumerate(ends):
            store(builder, end, moved(builder, args[4], 4 * number), 4)
        store(builder, builder.sitofp(builder.add(*ends), F32), args[5], 4)
        return context.get_dummy_value()

    return types.void(types.int64, half, simd.vector, *[types.int64] * 3), code


@intrinsic
def _largest(typing_context: Any, sizes: Any) -> Any:
    """The largest of sixteen numbers that are not negative."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        bits = builder.bitcast(args[0], VI)
        return builder.bitcast(simd.call_llvm(builder, "llvm.vector.reduce.smax.v16i32", I32, [bits]), F32)

    return types.float32(simd.vector), code


@njit(inline="always")
def _round_row(x, steps, limit, to, HALF):  # type: ignore[no-untyped-def]
    size, halves = STEP * (2 if HALF else 4), to + steps * 2 * STEP
    totals = halves + steps * 8
    scales = totals + steps * 4
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
            _round_step(x + step * size, HALF, inverse, target, halves + step * 8, totals + step * 4)


@njit(inline="always")
def _write(a, sums, row, rows, first, panels):  # type: ignore[no-untyped-def]
    """Add the bias to sums, float32[rows, panels, 16], and store the outputs from `first` on."""
    size = 2 if a.half else 4
    for i in range(rows):
        for panel in range(panels):
            output, here = first + panel * PANEL, sums + (i * panels + panel) * 64
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
    SUMS = _SUMS_BYTES

    def coded_product(address):  # type: ignore[no-untyped-def]
        a = carray(raw.pointer(address), 1, _CODED)[0]
        own = raw.i64_at(a.format, 6)
        coder, blocks, scale_steps, has_minima = own[0], a.inputs // STEP // own[1], own[4], own[5]
        steps, items = a.inputs // STEP, (a.outputs + BLOCK - 1) // BLOCK
        row_bytes = (steps * (2 * STEP + 12) + (steps + SPAN - 1) // SPAN * 4 + 63) // 64 * 64
        most = min(a.rows, CHUNK)
        decoded_bytes = WIDTH * steps * DECODED_BYTES if most > FEW else 0
        buffer = raw.allocate(64 + TASK_BYTES + SUMS + decoded_bytes + most * row_bytes)
        sums = (buffer + 63) // 64 * 64
        decoded = sums + SUMS
        rounded = decoded + decoded_bytes
        place = rounded + most * row_bytes
        task = carray(raw.pointer(place), 1, TASK)[0]
        task.panel_bytes, task.blocks, task.row_bytes, task.width = blocks * own[2], blocks, row_bytes, WIDTH
        present = -1  # first row of those that are rounded: most items have the rows of the one before
        while True:
            item = take(address)
            if item >= a.items:
                break
            block, start = item % items, item // items * CHUNK
            rows = min(CHUNK, a.rows - start)
            if present != start:
                present = start
                for row in range(rows):
                    x, to = (start + row) * a.inputs, rounded + row * row_bytes
                    if a.half:
                        _round_row(a.x + x * 2, steps, own[3], to, 1)
                    else:
                        _round_row(a.x + x * 4, steps, own[3], to, 0)
            few = rows <= FEW
            width = WIDTHS[rows] if few else WIDTH
            panel = 0
            while panel < PANELS and block * BLOCK + panel * PANEL < a.outputs:
                first = block * BLOCK + panel * PANEL
                task.codes = a.weight + first // PANEL * task.panel_bytes
                if few:
                    task.rows, task.x, task.out = rows, rounded, sums
                    raw.call(coder, place)
                    _write(a, sums, start, rows, first, width)
                else:
                    task.rows, task.out = 0, decoded
                    raw.call(coder, place)
                    done = 0
                    while done < rows:
                        # Equal parts: seven rows are four and three
                        parts = (rows - done + ROWS - 1) // ROWS
                        some = (rows - done + parts - 1) // parts
                        x = rounded + done * row_bytes
                        if some == 6:
                            _multiply_decoded(
                                6, WIDTH, x, row_bytes, decoded, steps, scale_steps, has_minima, sums
                            )
                        elif some == 5:
                            _multiply_decoded(
                                5, WIDTH, x, row_bytes, decoded, steps, scale_steps, has_minima, sums
                            )
                        elif some == 4:
                            _multiply_decoded(
                                4, WIDTH, x, row_bytes, decoded, steps, scale_steps, has_minima, sums
                            )
                        else:
                            _multiply_decoded(
                                3, WIDTH, x, row_bytes, decoded, steps, scale_steps, has_minima, sums
                            )
                        _write(a, sums, start + done, some, first, WIDTH)
                        done += some
                panel += width
        raw.release(buffer)

    return Kernel(coded_product, CODED, cost=1)


@cache
def _coder(kind: int) -> Any:
    """Return the coder of a format: a C function with the address of a `TASK`."""
    own = FORMATS[KINDS[kind]]
    KIND, STEPS, BYTES, SCALE_STEPS, DECODED = kind, own.steps, own.bytes, own.scale_steps, DECODED_BYTES
    WIDTH1, WIDTH2, WIDTH3 = WIDTHS[1:]

    def coder(address):  # type: ignore[no-untyped-def]
        a = carray(raw.pointer(address), 1, TASK)[0]
        steps = a.blocks * STEPS
        if a.rows == 0:
            for panel in range(a.width):
                codes, to = a.codes + panel * a.panel_bytes, a.out + panel * steps * DECODED
                decode_panel(codes, a.blocks, to, KIND, STEPS, BYTES, SCALE_STEPS)
        elif a.rows == 1:
            _multiply_codes(KIND, 1, WIDTH1, a.x, a.row_bytes, a.codes, a.panel_bytes, steps, a.out)
        elif a.rows == 2:
            _multiply_codes(KIND, 2, WIDTH2, a.x, a.row_bytes, a.codes, a.panel_bytes, steps, a.out)
        else:
            _multiply_codes(KIND, 3, WIDTH3, a.x, a.row_bytes, a.codes, a.panel_bytes, steps, a.out)

    return compiled(coder)


@cache
def format_table(kind: int) -> NDArray[np.int64]:
    """Return what the kernel must know of a format, and compile its coder."""
    own = FORMATS[KINDS[kind]]
    numbers = own.steps, own.bytes, own.limit, own.scale_steps, int(own.has_minima)
    return np.array([_coder(kind).address, *numbers], np.int64)
