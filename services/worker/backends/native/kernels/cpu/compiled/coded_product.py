# ruff: noqa: ARG001, the signatures are numba's
"""y = W x + b from quantised weights, with products of whole numbers.

Activations are rounded to 16 bits with one scale for 32 inputs, which loses less than bfloat16. A row of float32
becomes two rows of 16 bits: the second has what the first has lost. The products of codes and activations of a group of
inputs are added exactly; scales and minima are applied to these sums in float32, group after group. So a row has the
same bits in a batch of any size (batch invariance, docs/invariants.md).
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import carray, njit
from numba.core import cgutils, types
from numba.extending import intrinsic

from services.worker.backends.native.kernels.cpu.compiled import raw, simd
from services.worker.backends.native.kernels.cpu.compiled.block_formats import (
    FORMATS,
    KINDS,
    PANEL,
    QUADS,
    STEP,
    code_pairs,
    code_words,
    group_scales,
)
from services.worker.backends.native.kernels.cpu.compiled.building import load, moved, spread, store
from services.worker.backends.native.kernels.cpu.compiled.product import PRODUCT
from services.worker.backends.native.kernels.cpu.compiled.simd import F32, I16, I32, I64, LANES, VF, VI
from services.worker.backends.native.kernels.cpu.thread_team import HEADER, Kernel, take

PANELS = 4
"""Panels of one item."""
BLOCK = PANELS * PANEL
"""Outputs of one item."""
TILES = ((6, 2), (5, 2), (4, 2), (3, 4), (2, 4), (1, 4)) if simd.WIDE else ((4, 1), (3, 1), (2, 1), (1, 2))
"""Numbers of rows of 16 bits that are multiplied together, and of panels: their sums fit into registers."""
ROWS, WIDTHS = TILES[0][0], tuple(dict(TILES).get(rows, 1) for rows in range(7))
IS_DECODED = tuple(int(rows > (3 if simd.WIDE else 2)) for rows in range(7))
"""Fewer rows are multiplied with codes that are decoded in registers: they do not pay for a copy."""
CHUNK = 32 * ROWS
"""Maximum number of rows of one item."""
WORTH = 1 << 18
"""Smallest number of multiplications for which another thread is used."""
_LARGEST = 32767
_ZERO = tuple(own.zero for own in FORMATS.values())
_GROUPS = tuple(STEP // own.group for own in FORMATS.values())
_BYTES = tuple(own.bytes for own in FORMATS.values())
_INPUTS = tuple(own.inputs for own in FORMATS.values())
DECODED_BYTES = tuple(64 * (2 * QUADS + 2 * groups) for groups in _GROUPS)
"""Bytes of a decoded step of a panel."""
_PRODUCT = np.dtype(HEADER + PRODUCT, align=True)


def _add_products(builder: Any, sums: Any, codes: Any, pair: Any) -> Any:
    """Add the products of two inputs to sixteen int32. `codes`: int16[32]; `pair`: an int32 that holds two int16."""
    some = builder.bitcast(spread(builder, pair, VI), codes.type)
    if simd.compiles_for("avx512vnni"):
        return simd.call_llvm(
            builder,
            "llvm.x86.avx512.vpdpwssd.512",
            VI,
            [sums, *(builder.bitcast(x, VI) for x in (codes, some))],
        )
    if simd.compiles_for("avx512bw"):
        products = simd.call_llvm(builder, "llvm.x86.avx512.pmaddw.d.512", VI, [codes, some])
        return builder.add(sums, products)
    wide = ir.VectorType(I32, 2 * LANES)
    products = builder.mul(builder.sext(codes, wide), builder.sext(some, wide))
    for first in (0, 1):  # becomes the same instruction
        order = ir.Constant(VI, list(range(first, 2 * LANES, 2)))
        sums = builder.add(sums, builder.shuffle_vector(products, products, order))
    return sums


class _Coded:
    """The weights of a step of a panel."""

    def __init__(self, builder: Any, kind: str, block: Any, step: Any) -> None:
        self._builder, self._kind, self._block, self._step = builder, kind, block, step

    def pairs(self, quad: int) -> list[Any]:
        words = code_words(self._builder, self._kind, self._block, self._step, quad)
        return code_pairs(self._builder, self._kind, words)

    @staticmethod
    def each_pair(builder: Any, panels: list[Any], first: int, end: int, inputs: Any, add: Any) -> None:
        """Call `add(vectors, offset)` with the pairs of codes of quads `first` to `end` - 1, and the offset of their
        inputs."""
        for quad in range(first, end):
            for half, vectors in enumerate(zip(*(panel.pairs(quad) for panel in panels), strict=True)):
                add(vectors, moved(builder, inputs, 8 * quad + 4 * half))

    def scales(self, group: int) -> tuple[Any, Any]:
        builder, groups = self._builder, STEP // FORMATS[self._kind].group
        first = builder.mul(self._step, ir.Constant(I64, groups))
        return group_scales(builder, self._kind, self._block, builder.add(first, ir.Constant(I64, group)))


class _Decoded(_Coded):
    """The same as `_decode` wrote it: pairs of codes, then a scale and a minimum for each group."""

    def vector(self, index: Any, kind: Any) -> Any:
        place = self._builder.add(self._block, self._builder.mul(index, ir.Constant(I64, 64)))
        return load(self._builder, place, kind, 4)

    @staticmethod
    def each_pair(builder: Any, panels: list[Any], first: int, end: int, inputs: Any, add: Any) -> None:
        with cgutils.for_range(builder, ir.Constant(I64, 2 * (end - first))) as loop:
            index = moved(builder, loop.index, 2 * first)
            vectors = [panel.vector(index, ir.VectorType(I16, 2 * LANES)) for panel in panels]
            add(vectors, builder.add(inputs, builder.mul(index, ir.Constant(I64, 4))))

    def scales(self, group: int) -> tuple[Any, Any]:
        scale, minimum = (self.vector(ir.Constant(I64, 2 * (QUADS + group) + i), VF) for i in range(2))
        return scale, minimum if FORMATS[self._kind].has_minima else None


@intrinsic(prefer_literal=True)
def _decode(typing_context: Any, kind: Any, target: Any, block: Any, step: Any) -> Any:
    """Decode a step of a panel for several tiles of rows. `kind` is a constant."""
    name = KINDS[kind.literal_value]

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        weights = _Coded(builder, name, args[2], args[3])
        vectors = [pair for quad in range(QUADS) for pair in weights.pairs(quad)]
        for group in range(STEP // FORMATS[name].group):
            scale, minimum = weights.scales(group)
            vectors += [scale, ir.Constant(VF, None) if minimum is None else minimum]
        for index, vector in enumerate(vectors):
            store(builder, vector, moved(builder, args[1], index * 64), 4)
        return context.get_dummy_value()

    return types.void(kind, *[types.int64] * 3), code


@intrinsic(prefer_literal=True)
def _multiply(
    typing_context: Any,
    kind: Any,
    rows: Any,
    panels: Any,
    decoded: Any,
    x: Any,
    x_step: Any,
    scales: Any,
    totals: Any,
    blocks: Any,
    codes: Any,
    codes_step: Any,
    out: Any,
) -> Any:
    """Multiply rows with panels.

    `kind`, `rows`, `panels` and `decoded` are constants.

    Args:
        x: address of the first row as `_round_rows` writes it
        x_step: bytes from one row to the next
        scales: address of the first row's scales: float32[steps]; those of the next rows follow
        totals: address of the first row's totals: 32 bits for each group; those of the next rows follow
        blocks: blocks of a row
        codes: address of the first panel, or of what `_decode` wrote of it, if `decoded`
        codes_step: bytes from one panel to the next
        out: float32[rows, panels, 16], overwritten
    """
    name = KINDS[kind.literal_value]
    own, count, width = FORMATS[name], rows.literal_value, panels.literal_value
    groups = STEP // own.group

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x, x_step, scales, totals, blocks, codes, codes_step, out = args[4:]

        def number(value: int) -> Any:
            return ir.Constant(I64, value)

        def at(base: Any, distance: Any, index: int, offset: Any) -> Any:
            return builder.add(builder.add(base, builder.mul(distance, number(index))), offset)

        steps = builder.mul(blocks, number(own.inputs // STEP))
        results, sums = (
            [[cgutils.alloca_once(builder, kind) for _ in range(width)] for _ in range(count)]
            for kind in (VF, VI)
        )
        for place in (place for row in results for place in row):
            builder.store(ir.Constant(VF, None), place)

        def add_pairs(vectors: Sequence[Any], offset: Any) -> None:
            """Add the products of two inputs of each row, `offset` bytes behind its first one."""
            for row, own_sums in enumerate(sums):
                pair = load(builder, at(x, x_step, row, offset), I32)
                for place, vector in zip(own_sums, vectors, strict=True):
                    builder.store(_add_products(builder, builder.load(place), vector, pair), place)

        in_block = number(own.inputs // STEP)
        with cgutils.for_range(builder, blocks) as outer, cgutils.for_range(builder, in_block) as inner:
            step = builder.add(builder.mul(outer.index, in_block), inner.index)
            inputs, words = builder.mul(step, number(2 * STEP)), builder.mul(step, number(4))
            row_words = builder.mul(steps, number(4))
            scale_of = [
                spread(builder, load(builder, at(scales, row_words, row, words), F32), VF)
                for row in range(count)
            ]
            source: type[_Coded] = _Decoded if decoded.literal_value else _Coded
            if decoded.literal_value:
                offset = builder.mul(step, number(DECODED_BYTES[kind.literal_value]))
            else:
                offset = builder.mul(outer.index, number(own.bytes))
            places = [at(codes, codes_step, panel, offset) for panel in range(width)]
            weights = [source(builder, name, place, inner.index) for place in places]
            for group in range(groups):
                here = moved(builder, builder.mul(words, number(groups)), 4 * group)
                row_totals = builder.mul(row_words, number(groups))
                own_total = [at(totals, row_totals, row, here) for row in range(count)]
                for row, total in enumerate(own_total):  # products with the code of zero are subtracted
                    start = (
                        spread(builder, load(builder, total, I32), VI) if own.zero else ir.Constant(VI, None)
                    )
                    for place in sums[row]:
                        builder.store(start, place)
                first, end = (edge * QUADS // groups for edge in (group, group + 1))
                source.each_pair(builder, weights, first, end, inputs, add_pairs)
                for panel, each in enumerate(weights):
                    scale, minimum = each.scales(group)
                    for row, total in enumerate(own_total):
                        result, sum_of = builder.load(results[row][panel]), builder.load(sums[row][panel])
                        scaled = builder.fmul(builder.sitofp(sum_of, VF), scale)
                        result = simd.call_llvm(
                            builder, "llvm.fma.v16f32", VF, [scaled, scale_of[row], result]
                        )
                        if minimum is not None:
                            of_inputs = spread(builder, load(builder, total, F32), VF)
                            result = simd.call_llvm(
                                builder, "llvm.fma.v16f32", VF, [minimum, of_inputs, result]
                            )
                        builder.store(result, results[row][panel])
        for index, place in enumerate(place for row in results for place in row):
            store(builder, builder.load(place), moved(builder, out, index * 64), 4)
        return context.get_dummy_value()

    return types.void(kind, rows, panels, decoded, *[types.int64] * 8), code


@intrinsic
def _store_rounded(typing_context: Any, address: Any, first: Any, second: Any) -> Any:
    """Round 32 numbers to int16 and store them: in each four, the first beside the third, the second beside the last.

    Returns: the sums of the first 16 and of the last 16, and the rounded numbers.
    """

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        parts, sums, rounded = [], [], []
        for value in args[1:]:
            near = simd.call_llvm(builder, "llvm.nearbyint.v16f32", VF, [value])
            whole = simd.call_llvm(builder, "llvm.fptosi.sat.v16i32.v16f32", VI, [near])
            rounded.append(near)
            parts.append(builder.trunc(whole, ir.VectorType(I16, LANES)))
            sums.append(
                builder.sext(simd.call_llvm(builder, "llvm.vector.reduce.add.v16i32", I32, [whole]), I64)
            )
        order = [first + number for first in range(0, STEP, 4) for number in (0, 2, 1, 3)]
        store(builder, builder.shuffle_vector(*parts, ir.Constant(ir.VectorType(I32, STEP), order)), args[0])
        return context.make_tuple(builder, signature.return_type, [*sums, *rounded])

    returned = types.Tuple([types.int64, types.int64, simd.vector, simd.vector])
    return returned(types.int64, simd.vector, simd.vector), code


@njit(inline="always")
def _round_rows(x, rows, steps, target, scales, totals, KIND, HALF):  # type: ignore[no-untyped-def]
    """Round rows to 16 bits, and add the inputs of each group: minus the code of zero times the sum, or the sum times
    the scale."""
    ZERO, GROUPS, PARTS = _ZERO[KIND], _GROUPS[KIND], 1 if HALF else 2
    for number in range(rows * steps):
        value0, value1 = simd.load16(x, HALF), simd.load16(x + (32 if HALF else 64), HALF)
        minus = simd.splat(np.float32(-1))
        for part in range(PARTS):
            at = (number // steps * PARTS + part) * steps + number % steps
            size0, size1 = (
                simd.maximum(value0, simd.mul(value0, minus)),
                simd.maximum(value1, simd.mul(value1, minus)),
            )
            most = simd.reduce_max(simd.maximum(size0, size1))
            scale = most / np.float32(_LARGEST)
            inverse = simd.splat(np.float32(_LARGEST) / most if most > 0 else np.float32(0))
            first, second = simd.mul(value0, inverse), simd.mul(value1, inverse)
            sum0, sum1, near0, near1 = _store_rounded(target + at * 2 * STEP, first, second)
            simd.store_f32(scales + at * 4, scale)
            if GROUPS == 2:
                raw.store_u32(totals + at * 8, -ZERO * sum0)
                raw.store_u32(totals + at * 8 + 4, -ZERO * sum1)
            elif ZERO:
                raw.store_u32(totals + at * 4, -ZERO * (sum0 + sum1))
            else:
                simd.store_f32(totals + at * 4, np.float32(sum0 + sum1) * scale)
            unit = simd.splat(-scale)
            value0, value1 = simd.fma(near0, unit, value0), simd.fma(near1, unit, value1)
        x += 64 if HALF else 128


@njit(inline="always")
def _write(a, sums, row, rows, first, panels, HALF):  # type: ignore[no-untyped-def]
    """Add the bias to sums, float32[rows, parts, panels, 16], and store the outputs from `first` on."""
    size, PARTS = 2 if HALF else 4, 1 if HALF else 2
    for i in range(rows):
        for panel in range(panels):
            output = first + panel * PANEL
            here = sums + (i * PARTS * panels + panel) * 64
            value = simd.load_f32x16(here)
            if PARTS == 2:
                value = simd.add(value, simd.load_f32x16(here + panels * 64))
            value = simd.add(value, simd.load_f32x16(a.bias + output * 4))
            out = a.out + ((row + i) * a.stride + output) * size
            if output + PANEL <= a.outputs:
                simd.store16(out, value, HALF)
            else:
                simd.store_f32x16(here, value)
                for j in range(a.outputs - output):
                    simd.store1(out + j * size, simd.load_f32(here + j * 4), HALF)


@njit(inline="always")
def _tile(a, KIND, ROWS, WIDTH, DECODED, x, scales, totals, codes, sums, row, first, HALF):  # type: ignore[no-untyped-def]
    """Multiply `ROWS` rows of 16 bits with a block of outputs, `WIDTH` panels at a time. `codes`: address of the block,
    or of its decoded panels."""
    blocks = a.inputs // _INPUTS[KIND]
    step = a.inputs // STEP * DECODED_BYTES[KIND] if DECODED else blocks * _BYTES[KIND]
    for panel in range(0, PANELS, WIDTH):
        here = first + panel * PANEL
        if here < a.outputs:
            place = codes + panel * step
            _multiply(KIND, ROWS, WIDTH, DECODED, x, a.inputs * 2, scales, totals, blocks, place, step, sums)
            _write(a, sums, row, ROWS if HALF else ROWS // 2, here, WIDTH, HALF)


@njit(inline="always")
def _decode_panels(a, codes, target, KIND):  # type: ignore[no-untyped-def]
    blocks, steps = a.inputs // _INPUTS[KIND], _INPUTS[KIND] // STEP
    for number in range(PANELS * blocks):
        for step in range(steps):
            _decode(KIND, target, codes + number * _BYTES[KIND], step)
            target += DECODED_BYTES[KIND]


def coded_product_kernel(kind: int, half: bool, inputs: int) -> Kernel:
    """One item is a block of outputs of up to `CHUNK` rows; its work is the number of rows. `half`: activations are
    bfloat16, and not float32."""
    return _compiled(kind, half).again_for(WORTH, BLOCK * inputs)


@cache
def _compiled(kind: int, half: bool) -> Kernel:
    KIND, HALF, GROUPS, SIZE, INPUTS = kind, int(half), _GROUPS[kind], _BYTES[kind], _INPUTS[kind]
    DECODED, PARTS = DECODED_BYTES[kind], 1 if half else 2
    W1, W2, W3, W4, W5, W6 = WIDTHS[1:]
    D3 = IS_DECODED[3]

    def coded_product(address):  # type: ignore[no-untyped-def]
        a = carray(raw.pointer(address), 1, _PRODUCT)[0]
        blocks, steps = (a.outputs + BLOCK - 1) // BLOCK, a.inputs // STEP
        most = min(a.rows, CHUNK) * PARTS
        decoded_size = PANELS * steps * DECODED if IS_DECODED[min(most, 6)] else 0
        rounded_size = most * steps * (2 * STEP + 4 + 4 * GROUPS)
        buffer = raw.allocate(64 + ROWS * PANELS * 64 + decoded_size + rounded_size)
        sums = (buffer + 63) // 64 * 64
        place = sums + ROWS * PANELS * 64
        rounded = place + decoded_size
        all_scales = rounded + most * steps * 2 * STEP
        all_totals = all_scales + most * steps * 4
        present = -1  # first row of those that are rounded: most items have the rows of the one before
        while True:
            item = take(address)
            if item >= a.items:
                break
            block, start = item % blocks, item // blocks * CHUNK
            rows, first = min(CHUNK, a.rows - start), block * BLOCK
            if present != start:
                present = start
                source = a.x + start * a.inputs * (2 if HALF else 4)
                _round_rows(source, rows, steps, rounded, all_scales, all_totals, KIND, HALF)
            codes, done = a.weight + block * PANELS * (a.inputs // INPUTS) * SIZE, 0
            decoded = place
            if IS_DECODED[min(rows * PARTS, 6)]:
                _decode_panels(a, codes, decoded, KIND)
            while done < rows:
                tiles = (rows - done + ROWS // PARTS - 1) // (ROWS // PARTS)
                some = (rows - done + tiles - 1) // tiles
                own, row = done * PARTS * steps, start + done
                x, scales, totals = (
                    rounded + own * 2 * STEP,
                    all_scales + own * 4,
                    all_totals + own * 4 * GROUPS,
                )
                done += some
                few = decoded if D3 else codes
                if PARTS == 2:
                    if some == 1:
                        _tile(a, KIND, 2, W2, 0, x, scales, totals, codes, sums, row, first, HALF)
                    elif some == 2:
                        _tile(a, KIND, 4, W4, 1, x, scales, totals, decoded, sums, row, first, HALF)
                    elif ROWS > 4:
                        _tile(a, KIND, 6, W6, 1, x, scales, totals, decoded, sums, row, first, HALF)
                elif some == 1:
                    _tile(a, KIND, 1, W1, 0, x, scales, totals, codes, sums, row, first, HALF)
                elif some == 2:
                    _tile(a, KIND, 2, W2, 0, x, scales, totals, codes, sums, row, first, HALF)
                elif some == 3:
                    _tile(a, KIND, 3, W3, D3, x, scales, totals, few, sums, row, first, HALF)
                elif some == 4:
                    _tile(a, KIND, 4, W4, 1, x, scales, totals, decoded, sums, row, first, HALF)
                elif ROWS > 4:
                    if some == 5:
                        _tile(a, KIND, 5, W5, 1, x, scales, totals, decoded, sums, row, first, HALF)
                    else:
                        _tile(a, KIND, 6, W6, 1, x, scales, totals, decoded, sums, row, first, HALF)
        raw.release(buffer)

    return Kernel(coded_product, PRODUCT, cost=1)
