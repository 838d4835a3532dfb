# ruff: noqa: ARG001, the signatures are numba's
"""AVX-512's bfloat16 instructions for numba kernels: rounding, and products of pairs.

`vdpbf16ps` adds the products of two inputs to sixteen sums in one fixed order, so a row's sums do not depend on the
rows beside it.
"""

from typing import Any

from llvmlite import binding, ir  # type: ignore[import-untyped]
from numba.core import cgutils, types
from numba.extending import intrinsic

from services.worker.backends.native.kernels.cpu.compiled import simd
from services.worker.backends.native.kernels.cpu.compiled.simd import I32, I64

PANELS = 4
"""Panels of weights that `dot_products` multiplies together."""
WORD = 64
"""Bytes of the weights of two inputs of a panel."""
binding.initialize_native_asmparser()
_HALVES = ir.VectorType(ir.IntType(16), 32)


def _rounded(builder: Any, first: Any, second: Any) -> Any:
    """Two vectors of float32 as thirty-two bfloat16, one after the other."""
    kind = ir.FunctionType(_HALVES, [simd.VF, simd.VF])
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
        pairs = builder.shuffle_vector(rounded, rounded, ir.Constant(ir.VectorType(simd.I32, 32), order))
        builder.store(pairs, builder.inttoptr(args[0], _HALVES.as_pointer()), align=2)
        return context.get_dummy_value()

    return types.void(types.int64, simd.vector, simd.vector), code


def dot_products(rows: int) -> Any:
    """Build the product of so many rows with `PANELS` panels; `rows` * `PANELS` vectors of sums fill the registers.

    The operation's arguments:
        x: address of the first row, bfloat16
        stride: bytes from one row to the next
        weights: address of the first panel: bfloat16[pairs, 16, 2]
        step: bytes from one panel to the next
        pairs: inputs / 2
        out: float32[rows, PANELS, 16], overwritten
    """

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x, stride, weights, step, pairs, out = args
        cells = [(row, panel) for row in range(rows) for panel in range(PANELS)]
        sums = {cell: cgutils.alloca_once(builder, simd.VF) for cell in cells}
        for cell in cells:
            builder.store(ir.Constant(simd.VF, None), sums[cell])

        def at(base: Any, distance: Any, number: int, offset: Any) -> Any:
            moved = builder.add(base, builder.mul(distance, ir.Constant(I64, number)))
            return builder.add(moved, offset)

        with cgutils.for_range(builder, pairs) as loop:
            offset = builder.mul(loop.index, ir.Constant(I64, WORD))
            words = [_load(builder, at(weights, step, panel, offset), simd.VI) for panel in range(PANELS)]
            offset = builder.mul(loop.index, ir.Constant(I64, 4))
            for row in range(rows):
                pair = _load(builder, at(x, stride, row, offset), I32)
                one = builder.insert_element(ir.Constant(simd.VI, ir.Undefined), pair, ir.Constant(I32, 0))
                some = builder.shuffle_vector(one, one, ir.Constant(simd.VI, [0] * simd.LANES))
                for panel, word in enumerate(words):
                    place = sums[row, panel]
                    builder.store(_dot(builder, builder.load(place), some, word), place)
        for number, cell in enumerate(cells):
            target = builder.add(out, ir.Constant(I64, number * WORD))
            builder.store(builder.load(sums[cell]), builder.inttoptr(target, simd.VF.as_pointer()), align=4)
        return context.get_dummy_value()

    def operation(
        typing_context: Any, x: Any, stride: Any, weights: Any, step: Any, pairs: Any, out: Any
    ) -> Any:
        return types.void(*[types.int64] * 6), code

    operation.__name__ = operation.__qualname__ = f"dot_products_{rows}"
    return intrinsic(operation)


def _load(builder: Any, address: Any, kind: ir.Type) -> Any:
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=4)


def _dot(builder: Any, sums: Any, x: Any, weights: Any) -> Any:
    kind = ir.FunctionType(simd.VF, [simd.VF, simd.VI, simd.VI])
    return builder.asm(kind, "vdpbf16ps $3, $2, $0", "=v,0,v,v", [sums, x, weights], False)
