"""Sums of products of rounded rows (rounded_rows.py) with the codes of weights, for coded_product.py."""

from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import cgutils

from services.worker.kernels.cpu.compiled import simd
from services.worker.kernels.cpu.compiled.block_formats import PANELS, SPAN
from services.worker.kernels.cpu.compiled.building import load, moved, store, times
from services.worker.kernels.cpu.compiled.rounded_rows import SCALES_AT, TOTALS_AT
from services.worker.kernels.cpu.compiled.simd import F32, I32, I64, LANES, VF, VI, spread


def add_byte_products(builder: Any, sums: Any, codes: Any, bytes_: Any) -> Any:
    """Add the products of four inputs to sixteen int32. `codes`: uint8[64]; `bytes_`: int32[16] that hold four int8."""
    return simd.call_llvm(builder, "llvm.x86.avx512.vpdpbusd.512", VI, [sums, codes, bytes_])


def add_products(builder: Any, sums: Any, numbers: Any, pair: Any) -> Any:
    """Add the products of two inputs to sixteen int32. `numbers`: int16[32]; `pair`: int32[16] that hold two int16."""
    if simd.compiles_for("avx512vnni"):
        # Not the intrinsic: LLVM replaces many of them by vpmaddwd and vpaddd, which take twice the time
        operands = [sums, builder.bitcast(numbers, VI), pair]
        return builder.asm(ir.FunctionType(VI, [VI] * 3), "vpdpwssd $3, $2, $0", "=v,0,v,v", operands, False)
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


TASK = np.dtype(
    [
        ("codes", np.int64),  # address of the first panel
        ("first", np.int64),  # step of a span
        ("steps", np.int64),  # of the span
        ("rows", np.int64),  # 0: decode panels, or release AMX's tiles
        ("width", np.int64),  # number of panels
        ("out", np.int64),  # decoded panels, or float32[rows, PANELS, 16], to which products are added
        ("x", np.int64),  # address of the first rounded row
        ("row_bytes", np.int64),
        ("row_steps", np.int64),
        ("end", np.int64),  # of the item's panels; codes behind it are not read beforehand
        ("jump", np.int64),  # from there to the codes that this thread reads next
        ("tile_rows", np.int64),  # rows of a tile of AMX
        ("tiles_are_new", np.int64),  # 1: with this number, which may be smaller for the last tile
        ("bytes", np.int64),  # address of int8[tiles, steps of a row, tile_rows, 2, 32]: numbers of rounded rows
        ("room", np.int64),  # ROOM bytes to write to
    ]
)
"""Arguments of a format's coder, and of its products with AMX, to which the last four belong."""
TASK_BYTES = -(-TASK.itemsize // 64) * 64


class CodeTile:
    """Sums of some rows and panels in a span.

    A rounded row begins at an address of `x`; `steps` is its number of steps, and `first` the first one of the span.
    """

    def __init__(self, builder: Any, rows: int, panels: int, x: Any, row_bytes: Any, steps: Any, first: Any) -> None:
        self._builder, self._panels, self._steps, self.first = builder, panels, steps, first
        self._x = [builder.add(x, times(builder, row_bytes, row)) for row in range(rows)]
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

    def of_rows(self, kind: ir.Type, index: Any, step_bytes: int = 0, more: int = 0) -> list[Any]:
        """Load a number of each row into all lanes: that at `steps * step_bytes + index * 4 + more`."""
        builder, vector = self._builder, VF if kind == F32 else VI
        at = builder.add(times(builder, self._steps, step_bytes), moved(builder, times(builder, index, 4), more))
        return [spread(builder, load(builder, builder.add(x, at), kind, 4), vector) for x in self._x]

    def add_products(
        self, sums: list[list[Any]], numbers: list[Any], inputs: list[Any], add: Any = add_products
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
        totals = self.of_rows(F32, step, TOTALS_AT)
        for row, total in zip(self._parts(panel, len(minima)), totals, strict=True):
            for place, minimum in zip(row, minima, strict=True):
                self._add_product(place, minimum, total)

    def add_to(self, out: Any) -> None:
        """Add the sums of the span times the scales of the rows to those of the item."""
        builder = self._builder
        span = builder.udiv(self.first, ir.Constant(I64, SPAN))
        scales = self.of_rows(F32, span, SCALES_AT)
        parts = self._parts(ir.Constant(I64, 0), self._panels)
        for number, (row, scale) in enumerate(zip(parts, scales, strict=True)):
            for panel, place in enumerate(row):
                at = moved(builder, out, 64 * (number * PANELS + panel))
                total = simd.build_fma(builder, builder.load(place), scale, load(builder, at, VF, 4))
                store(builder, total, at, 4)

    def _add_product(self, place: Any, a: Any, b: Any) -> None:
        self._builder.store(simd.build_fma(self._builder, a, b, self._builder.load(place)), place)
