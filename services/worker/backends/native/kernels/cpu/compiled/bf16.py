# ruff: noqa: ARG001, the signatures are numba's
"""AVX-512's bfloat16 instructions for numba kernels: rounding, and products of pairs.

`vdpbf16ps` adds the products of two inputs to sixteen sums in one fixed order, so a row's sums do not depend on the
rows beside it.
"""

from typing import Any

import numpy as np
from llvmlite import binding, ir  # type: ignore[import-untyped]
from numba.core import cgutils, types
from numba.extending import intrinsic

from services.worker.backends.native.kernels.cpu.compiled import simd
from services.worker.backends.native.kernels.cpu.compiled.building import load, spread, store
from services.worker.backends.native.kernels.cpu.compiled.quantized import (
    GROUP,
    GROUP_BYTES,
    INT4,
    PANEL,
    SCALES_BYTES,
)
from services.worker.backends.native.kernels.cpu.compiled.simd import I8, I16, I32, I64, VF, VI

WORDS = 64
"""Bytes of the weights of two inputs of a panel: sixteen words of two bfloat16."""
binding.initialize_native_asmparser()
_HALVES = ir.VectorType(I16, 32)
_NUMBERS = ir.Constant(
    _HALVES, [int(np.float32(number).view(np.uint32)) >> 16 for number in [*range(16), *range(16)]]
)
"""0 to 15 in bfloat16, twice."""


def _rounded(builder: Any, first: Any, second: Any) -> Any:
    """Two vectors of float32 as thirty-two bfloat16, one after the other."""
    kind = ir.FunctionType(_HALVES, [VF, VF])
    return builder.asm(kind, "vcvtne2ps2bf16 $2, $1, $0", "=v,v,v", [second, first], False)


@intrinsic
def store_bf16x32(typing_context: Any, address: Any, first: Any, second: Any) -> Any:
    """Round two vectors to bfloat16 and store them one after the other."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        rounded = _rounded(builder, args[1], args[2])
        builder.store(rounded, builder.inttoptr(args[0], _HALVES.as_pointer()), align=2)
        return context.get_dummy_value()

    return types.void(types.int64, simd.vector, simd.vector), code


@intrinsic
def store_bf16_pairs(typing_context: Any, address: Any, even: Any, odd: Any) -> Any:
    """Round two vectors to bfloat16 and store them in pairs: number i of `even` beside number i of `odd`."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        rounded = _rounded(builder, args[1], args[2])
        order = [number // 2 + number % 2 * 16 for number in range(32)]
        pairs = builder.shuffle_vector(rounded, rounded, ir.Constant(ir.VectorType(I32, 32), order))
        builder.store(pairs, builder.inttoptr(args[0], _HALVES.as_pointer()), align=2)
        return context.get_dummy_value()

    return types.void(types.int64, simd.vector, simd.vector), code


@intrinsic(prefer_literal=True)
def dot_products(
    typing_context: Any,
    rows: Any,
    panels: Any,
    x: Any,
    stride: Any,
    weights: Any,
    step: Any,
    pairs: Any,
    out: Any,
) -> Any:
    """Multiply rows with panels of bfloat16.

    `rows` and `panels` are constants: `rows` * `panels` vectors of sums and `panels` of weights must fit into 31
    registers.

    Args:
        x: address of the first row, bfloat16
        stride: bytes from one row to the next
        weights: address of the first panel: bfloat16[pairs, 16, 2]
        step: bytes from one panel to the next
        pairs: inputs / 2
        out: float32[rows, panels, 16], overwritten
    """

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x, stride, weights, step, pairs, out = args[2:]
        sums = _Sums(builder, rows.literal_value, panels.literal_value)
        with cgutils.for_range(builder, pairs) as loop:
            offset = builder.mul(loop.index, ir.Constant(I64, WORDS))
            words = [
                load(builder, _at(builder, weights, step, panel, offset), VI)
                for panel in range(panels.literal_value)
            ]
            sums.add_products(words, x, stride, builder.mul(loop.index, ir.Constant(I64, 4)))
        sums.store(out)
        return context.get_dummy_value()

    return types.void(rows, panels, *[types.int64] * 6), code


@intrinsic(prefer_literal=True)
def coded_dot_products(
    typing_context: Any,
    rows: Any,
    panels: Any,
    kind: Any,
    decoded: Any,
    x: Any,
    stride: Any,
    codes: Any,
    step: Any,
    words: Any,
    words_step: Any,
    groups: Any,
    totals: Any,
    out: Any,
) -> Any:
    """Multiply rows with panels of codes.

    `rows`, `panels`, `kind` and `decoded` are constants: 2 * `rows` * `panels` vectors of sums and `panels` of weights
    must fit into 30 registers.

    The codes of a group are multiplied as whole numbers, which bfloat16 holds exactly; scales and minima are applied
    to the sums of the group: y = sum over groups (scale * sum(code * x) + minimum * sum(x)).

    Args:
        x: address of the first row, bfloat16
        stride: bytes from one row to the next
        codes: address of the first panel
        step: bytes from one panel to the next
        words: address of the first panel's codes in bfloat16, if `decoded`
        words_step: bytes from one panel to the next
        groups: inputs / 32
        totals: float32[rows, groups]: sums of x, if the kind has minima
        out: float32[rows, panels, 16], overwritten
    """

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x, stride, codes, step, words, words_step, groups, totals, out = args[4:]
        size, number_of_panels = (rows.literal_value, panels.literal_value), range(panels.literal_value)
        whole = _Sums(builder, *size)
        with cgutils.for_range(builder, groups) as outer:
            offset = builder.mul(outer.index, ir.Constant(I64, GROUP_BYTES[kind.literal_value]))
            group = [_at(builder, codes, step, panel, offset) for panel in number_of_panels]
            first = builder.mul(outer.index, ir.Constant(I64, GROUP // 2 * WORDS))
            inputs = builder.mul(outer.index, ir.Constant(I64, GROUP * 2))
            sums = _Sums(builder, *size)
            with cgutils.for_range(builder, ir.Constant(I64, GROUP // 2)) as inner:
                if decoded.literal_value:
                    here = builder.add(first, builder.mul(inner.index, ir.Constant(I64, WORDS)))
                    places = [_at(builder, words, words_step, panel, here) for panel in number_of_panels]
                    some = [load(builder, place, VI) for place in places]
                else:
                    some = [_code_words(builder, each, inner.index, kind.literal_value) for each in group]
                sums.add_products(
                    some, x, stride, builder.add(inputs, builder.mul(inner.index, ir.Constant(I64, 4)))
                )
            row_bytes, place = (builder.mul(of, ir.Constant(I64, 4)) for of in (groups, outer.index))
            for panel in number_of_panels:
                whole.scale_and_add(panel, sums, _halves(builder, group[panel], 0))
                if kind.literal_value == INT4:
                    minima = _halves(builder, group[panel], 2 * PANEL)
                    whole.add_minima(panel, minima, totals, row_bytes, place)
        whole.store(out)
        return context.get_dummy_value()

    return types.void(rows, panels, kind, decoded, *[types.int64] * 9), code


@intrinsic(prefer_literal=True)
def store_code_words(typing_context: Any, kind: Any, target: Any, group: Any, pair: Any) -> Any:
    """Decode the codes of two inputs of a panel to bfloat16. `kind` is a constant."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        store(builder, _code_words(builder, args[2], args[3], kind.literal_value), args[1])
        return context.get_dummy_value()

    return types.void(kind, *[types.int64] * 3), code


@intrinsic
def pair_sums(typing_context: Any, address: Any) -> Any:
    """The sums of sixteen pairs of bfloat16."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        ones = ir.Constant(VI, [0x3F803F80] * simd.LANES)
        return _dot(builder, ir.Constant(VF, None), load(builder, args[0], VI), ones)

    return simd.vector(types.int64), code


class _Sums:
    """Vectors of sums, by row and panel, which begin with 0. LLVM keeps them in registers."""

    def __init__(self, builder: Any, rows: int, panels: int) -> None:
        self._builder, self._rows, self._panels = builder, rows, panels
        self.places = [[cgutils.alloca_once(builder, VF) for _ in range(panels)] for _ in range(rows)]
        for row in self.places:
            for place in row:
                builder.store(ir.Constant(VF, None), place)

    def add_products(self, words: list[Any], x: Any, stride: Any, offset: Any) -> None:
        """Add the products of two inputs. `offset`: of the inputs in a row, in bytes."""
        builder = self._builder
        for number, row in enumerate(self.places):
            some = spread(builder, load(builder, _at(builder, x, stride, number, offset), I32), VI)
            for place, word in zip(row, words, strict=True):
                builder.store(_dot(builder, builder.load(place), some, word), place)

    def scale_and_add(self, panel: int, sums: "_Sums", scales: Any) -> None:
        for mine, theirs in zip(self.places, sums.places, strict=True):
            self._add_product(mine[panel], self._builder.load(theirs[panel]), scales)

    def add_minima(self, panel: int, minima: Any, totals: Any, row_bytes: Any, place: Any) -> None:
        builder = self._builder
        for number, row in enumerate(self.places):
            total = load(builder, _at(builder, totals, row_bytes, number, place), simd.F32)
            self._add_product(row[panel], spread(builder, total, VF), minima)

    def _add_product(self, place: Any, a: Any, b: Any) -> None:
        builder = self._builder
        builder.store(simd.call_llvm(builder, "llvm.fma.v16f32", VF, [a, b, builder.load(place)]), place)

    def store(self, out: Any) -> None:
        builder = self._builder
        for number, place in enumerate(place for row in self.places for place in row):
            store(builder, builder.load(place), builder.add(out, ir.Constant(I64, number * WORDS)))


def _code_words(builder: Any, group: Any, pair: Any, kind: int) -> Any:
    """The codes of two inputs of a panel as sixteen words of two bfloat16."""
    size = GROUP_BYTES[kind] - SCALES_BYTES[kind]
    start = builder.add(group, ir.Constant(I64, SCALES_BYTES[kind]))
    at = builder.add(start, builder.mul(pair, ir.Constant(I64, size * 2 // GROUP)))
    if kind == INT4:
        # The low half of a word is the low four bits, and one more; the table has all numbers twice
        code = builder.zext(load(builder, at, ir.VectorType(I8, simd.LANES)), VI)
        shifted = builder.shl(code, ir.Constant(VI, [12] * simd.LANES))
        index = builder.bitcast(builder.or_(code, shifted), _HALVES)
        found = simd.call_llvm(builder, "llvm.x86.avx512.permvar.hi.512", _HALVES, [_NUMBERS, index])
        return builder.bitcast(found, VI)
    even, odd = (
        builder.bitcast(builder.sitofp(builder.sext(codes, VI), VF), VI)
        for codes in (
            load(builder, builder.add(at, ir.Constant(I64, first)), ir.VectorType(I8, simd.LANES))
            for first in (0, PANEL)
        )
    )
    return builder.or_(builder.lshr(even, ir.Constant(VI, [16] * simd.LANES)), odd)


def _halves(builder: Any, group: Any, offset: int) -> Any:
    """Sixteen float16 of a group in float32."""
    kind = ir.VectorType(ir.HalfType(), simd.LANES)
    return builder.fpext(load(builder, builder.add(group, ir.Constant(I64, offset)), kind), VF)


def _at(builder: Any, base: Any, distance: Any, number: int, offset: Any) -> Any:
    return builder.add(builder.add(base, builder.mul(distance, ir.Constant(I64, number))), offset)


def _dot(builder: Any, sums: Any, x: Any, weights: Any) -> Any:
    kind = ir.FunctionType(VF, [VF, VI, VI])
    return builder.asm(kind, "vdpbf16ps $3, $2, $0", "=v,0,v,v", [sums, x, weights], False)
