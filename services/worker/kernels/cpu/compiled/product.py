"""y = W x + b in float32, from weights in float32 or bfloat16.

Up to six rows are multiplied together. AVX-512 multiplies them with 64 outputs at once: a weight is loaded once for six
rows, and an input once for 64 outputs. AVX2 has registers for one panel of 16 outputs, or for one row and four panels:
independent sums hide each other's latency. With few rows, a product takes no longer than reading the weights. Every
output is summed over the inputs in order, so a row has the same bits in a batch of any size (batch invariance,
docs/invariants.md), and in both ways.
"""

from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import carray, njit
from numba.core import cgutils, types

from services.worker.kernels.cpu.compiled import raw, simd
from services.worker.kernels.cpu.compiled.building import for_each_size, load, moved, store, times
from services.worker.kernels.cpu.compiled.intrinsics import CONSTANT, emits
from services.worker.kernels.cpu.compiled.simd import F32, I64, VF, VI, spread
from services.worker.kernels.cpu.thread_team import Kernel, arguments, items

PANEL = 16
"""Number of outputs whose weights are side by side, input after input; with AVX-512 it is `BLOCK`."""
PANELS = 4
BLOCK = PANELS * PANEL
"""Outputs of one item."""
ROWS = 6
"""Rows that are multiplied together. With AVX-512, 24 sums, four weights and one input fit into 32 registers; with
AVX2, the sums of six rows and a panel fill 12 of 16."""
CHUNK, WIDE_CHUNK = 8 * ROWS, 16 * ROWS
"""Maximum number of rows of one item; the second with AVX-512."""
FEW = 3
"""AVX2 multiplies fewer rows one after the other, each with a whole block."""
AHEAD = 1 << 14
"""Bytes from the weights that one row reads to those that are prefetched; more rows take longer for each weight. The
processor's own prefetching ends with a page."""
WORTH = 1 << 19
"""Smallest number of multiplications for which another thread is used: 10 to 20 us."""
FIELDS = (
    ("x", np.int64),  # [rows, inputs] in the dtype of the activations: float32 here
    ("weight", np.int64),  # [blocks * PANELS, inputs, PANEL] here; with AVX-512 [blocks, inputs, BLOCK]
    ("bias", np.int64),  # float32[blocks * BLOCK]
    ("out", np.int64),  # [rows, stride], float32, or bfloat16 if the activations are
    ("rows", np.int64),
    ("inputs", np.int64),
    ("outputs", np.int64),
    ("stride", np.int64),  # numbers from one row of `out` to the next
    ("out_bytes", np.int64),  # of one number of `out`
)
"""Arguments of every product; `BLOCK` is the kernel's own."""
PRODUCT = arguments(*FIELDS)


@emits(types.void, *(CONSTANT,) * 3, *(types.int64,) * 8)
def _multiply_rows(
    builder: Any, wide: int, half: int, panels: int, rows: Any, x: Any, stride: Any, weights: Any, inputs: Any,
    bias: Any, out: Any, out_stride: Any
) -> None:  # fmt: skip
    """Multiply `rows` rows, up to `ROWS`, with some panels; only one row with several panels that are not `wide`.

    Args:
        wide, half: see `product_kernel`
        x: address of the first row, float32
        stride: bytes from one row to the next
        weights: address of the first panel
        bias: float32[panels * PANEL]
        out: address of the first row of sums: float32[panels * PANEL], overwritten
        out_stride: bytes from one row of sums to the next
    """
    size = (BLOCK if wide else PANEL) * (2 if half else 4)
    panel_bytes = times(builder, inputs, size)

    def weights_of(here: Any) -> list[Any]:
        if not wide:
            places = [builder.add(here, times(builder, panel_bytes, n)) for n in range(panels)]
            return [simd.bf16_pairs(builder, at) if half else load(builder, at, VF, 4) for at in places]
        places = [moved(builder, here, at) for at in range(0, size, 64)]
        if not half:
            return [load(builder, at, VF, 4) for at in places]
        words = [load(builder, at, VI, 4) for at in places]
        return [builder.bitcast(some, VF) for both in words for some in simd.halves(builder, both)]

    def multiply(rows: int) -> None:
        sums = [[cgutils.alloca_once(builder, VF) for _ in range(panels)] for _ in range(rows)]
        for row in sums:
            for number, place in enumerate(row):
                builder.store(load(builder, moved(builder, bias, number * 64), VF, 4), place)
        starts = [builder.add(x, times(builder, stride, number)) for number in range(rows)]
        # Kept in registers: LLVM would compute each from the one before in each turn of the loop
        starts = [builder.asm(ir.FunctionType(I64, [I64]), "", "=r,0", [start], False) for start in starts]
        with cgutils.for_range(builder, inputs) as loop:
            here = builder.add(weights, times(builder, loop.index, size))
            for line in range(0, size if wide else 0, 64):
                raw.prefetch_line(builder, moved(builder, here, AHEAD // rows + line))
            values = weights_of(here)
            for start, row in zip(starts, sums, strict=True):
                at = builder.add(start, times(builder, loop.index, 4))
                some = spread(builder, load(builder, at, F32, 4), VF)
                for place, value in zip(row, values, strict=True):
                    builder.store(simd.build_fma(builder, some, value, builder.load(place)), place)
        for number, row in enumerate(sums):
            start = builder.add(out, times(builder, out_stride, number))
            for vector, place in enumerate(row):
                store(builder, builder.load(place), moved(builder, start, vector * 64), 4)

    most = ROWS if wide or panels == 1 else 1
    for_each_size(builder, rows, range(1, most + 1), multiply)


@njit(inline="always")
def _multiply(a, start, end, most, first, scratch, WIDE, HALF, PANELS):  # type: ignore[no-untyped-def]
    """Compute outputs `first` to `first` + 16 `PANELS` - 1 of rows `start` to `end` - 1, up to `most` rows at once."""
    width = PANELS * PANEL
    weights, bias, stride = a.weight + first * a.inputs * (2 if HALF else 4), a.bias + first * 4, a.inputs * 4
    whole, row = first + width <= a.outputs, start
    for parts in range((end - start + most - 1) // most, 0, -1):
        # Equal parts: seven rows are four and three, because one alone would wait for its weights
        rows = (end - row + parts - 1) // parts
        out, step = a.out + (row * a.stride + first) * 4, a.stride * 4
        if not whole:
            out, step = scratch, width * 4
        x = a.x + row * stride
        _multiply_rows(WIDE, HALF, PANELS, rows, x, stride, weights, a.inputs, bias, out, step)
        if not whole:
            for i in range(rows):
                for j in range(a.outputs - first):
                    value = simd.load_f32(scratch + (i * width + j) * 4)
                    simd.store_f32(a.out + ((row + i) * a.stride + first + j) * 4, value)
        row += rows


def panel_of(wide: bool) -> tuple[int, int]:
    """Return the outputs of a panel, and the distance of the two bfloat16 that share a word. `wide`: see below."""
    return (BLOCK, PANEL) if wide else (PANEL, PANEL // 2)


def product_kernel(wide: bool, half: bool, inputs: int) -> Kernel:
    """One item is a block of outputs of up to `CHUNK` rows; its work is the number of rows.

    Args:
        wide: the way of AVX-512, and not that of AVX2
        half: the weights are bfloat16. A word has two numbers of a panel (`panel_of`)
    """
    WIDE, HALF, MOST = int(wide), int(half), WIDE_CHUNK if wide else CHUNK

    def product(address):  # type: ignore[no-untyped-def]
        a = carray(raw.pointer(address), 1, PRODUCT)[0]
        scratch, blocks = raw.allocate(ROWS * BLOCK * 4), (a.outputs + BLOCK - 1) // BLOCK
        for item in items(address, a.items):
            start, first = item // blocks * MOST, item % blocks * BLOCK
            end = min(start + MOST, a.rows)
            if WIDE:
                _multiply(a, start, end, ROWS, first, scratch, WIDE, HALF, PANELS)
            elif end - start < FEW:
                _multiply(a, start, end, 1, first, scratch, WIDE, HALF, PANELS)
            else:
                for panel in range(first, min(first + BLOCK, a.outputs), PANEL):
                    _multiply(a, start, end, ROWS, panel, scratch, WIDE, HALF, 1)
        raw.release(scratch)

    return Kernel(product, PRODUCT, cost=-(-WORTH // (BLOCK * inputs)))
