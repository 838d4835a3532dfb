"""y = W x + b with AMX, from weights in bfloat16 or quantised ones. Activations are bfloat16, sums float32. The number
of panels is even.

Quantised weights are decoded to bfloat16 into panels that stay in the inner caches. Each sum runs over the inputs in
order, 32 at a time, so a row has the same bits in a batch of any size (batch invariance, docs/invariants.md).
"""

from numba import carray, njit

from services.worker.kernels.cpu.compiled import amx, bf16, raw, simd
from services.worker.kernels.cpu.compiled.block_formats import (
    MINIMA_AT,
    NUMBERS_BYTES,
    PANEL,
    PANELS,
    SCALES_AT,
    SPAN,
    SPAN_BYTES,
)
from services.worker.kernels.cpu.compiled.coded_product import CODED, NUMBERS, TASK, TASK_BYTES
from services.worker.kernels.cpu.compiled.quantized import GROUP
from services.worker.kernels.cpu.thread_team import Kernel, items

BLOCK = 2 * PANEL
"""Outputs of one item: two panels."""
CHUNK = 1024
"""Maximum number of rows of one item. A panel is decoded once per item."""
WORTH = 1 << 17
"""Smallest number of multiplications for which another thread is used."""


@njit(inline="always")
def _decode(task, place, own, steps, weights, size):  # type: ignore[no-untyped-def]
    """Decode two panels to bfloat16; they are `size` bytes apart."""
    for first in range(0, steps, SPAN):
        task.first, task.steps = first, min(SPAN, steps - first)
        raw.call(own[0], place)
        for panel in range(2):
            decoded = task.out + panel * SPAN_BYTES
            for step in range(task.steps):
                scale = decoded + SCALES_AT + step // own[4] * PANEL * 4
                minimum, to = decoded + MINIMA_AT + step * PANEL * 4, weights + panel * size
                bf16.round_step(to + (first + step) * amx.TILE_BYTES, decoded + step * NUMBERS_BYTES, scale, minimum)


@njit(inline="always")
def _sums(x0, x1, stride, weights, size, groups, PAIR):  # type: ignore[no-untyped-def]
    """Multiply one tile of rows, or two if `PAIR`, with two panels of bfloat16, which are `size` bytes apart."""
    amx.zero_0()
    amx.zero_1()
    if PAIR:
        amx.zero_2()
        amx.zero_3()
    tile0, tile1 = weights, weights + size
    for number in range(groups):
        amx.load_4(x0 + number * 64, stride)
        amx.load_6(tile0, 64)
        amx.load_7(tile1, 64)
        amx.multiply_0()
        amx.multiply_1()
        if PAIR:
            amx.load_5(x1 + number * 64, stride)
            amx.multiply_2()
            amx.multiply_3()
        tile0 += amx.TILE_BYTES
        tile1 += amx.TILE_BYTES


@njit(inline="always")
def _write(a, sums, row, rows, first):  # type: ignore[no-untyped-def]
    """Add the bias to two tiles of sums side by side, and store outputs `first` to `first` + 31."""
    bias, number = a.bias + first * 4, a.outputs - first
    bias0, bias1 = simd.load_f32x16(bias), simd.load_f32x16(bias + 64)
    tail = sums + 2 * amx.TILE_BYTES
    out = a.out + (row * a.stride + first) * 2
    for i in range(rows):
        value0 = simd.add(simd.load_f32x16(sums + i * 64), bias0)
        value1 = simd.add(simd.load_f32x16(sums + amx.TILE_BYTES + i * 64), bias1)
        bf16.store_outputs(out, number, value0, value1, tail)
        out += a.stride * 2


@njit(inline="always")
def _tile(a, x0, x1, row0, row1, first, weights, size, memory, stride, PAIR):  # type: ignore[no-untyped-def]
    """Compute one or two tiles of rows of a block of outputs."""
    groups, rows = (a.inputs + GROUP - 1) // GROUP, min(a.rows, amx.ROWS)
    _sums(x0, x1, stride, weights, size, groups, PAIR)
    amx.store_0(memory, 64)
    amx.store_1(memory + amx.TILE_BYTES, 64)
    _write(a, memory, row0, rows, first)
    if PAIR:
        amx.store_2(memory, 64)
        amx.store_3(memory + amx.TILE_BYTES, 64)
        _write(a, memory, row1, rows, first)


def tile_product_kernel(coded: bool, inputs: int) -> Kernel:
    """One item is two panels of up to `CHUNK` rows; its work is the number of rows. `coded`: weights are quantised, and
    not bfloat16."""
    IS_CODED = int(coded)

    def tile_product(address):  # type: ignore[no-untyped-def]
        a = carray(raw.pointer(address), 1, CODED)[0]
        blocks, groups = (a.outputs + BLOCK - 1) // BLOCK, (a.inputs + GROUP - 1) // GROUP
        whole, rows = a.inputs % GROUP == 0, min(a.rows, amx.ROWS)
        stride, size = groups * GROUP * 2, groups * amx.TILE_BYTES
        panels = 2 * size if IS_CODED else 0
        copied = 0 if whole else min(a.rows, CHUNK) * stride
        sums = 2 * amx.TILE_BYTES + 64
        buffer = raw.allocate(64 + TASK_BYTES + 2 * SPAN_BYTES + sums + panels + copied)
        place = (buffer + 63) // 64 * 64
        memory = place + TASK_BYTES + 2 * SPAN_BYTES
        decoded = memory + sums
        task = carray(raw.pointer(place), 1, TASK)[0]
        task.rows, task.width, task.out, task.end, task.jump = 0, 2, place + TASK_BYTES, 0, 0
        configured = False
        for item in items(address, a.items):
            if not configured:
                amx.configure(memory, rows)
                configured = True
            block, start = item % blocks, item // blocks * CHUNK
            # A tile has `rows` rows; if too few rows are left, the last tile of a chunk begins earlier
            start, end = max(0, min(start, a.rows - rows)), min(start + CHUNK, a.rows)
            x = a.x + start * a.inputs * 2
            if not whole:
                x = decoded + panels
                source = a.x + start * a.inputs * 2
                bf16.copy_padded(source, end - start, a.inputs, x, groups * GROUP)
            weights = a.weight + block * 2 * size
            if IS_CODED:
                weights, own = decoded, raw.i64_at(a.format, NUMBERS)
                distance = block * 2 // PANELS * (groups // own[1]) * PANELS + block * 2 % PANELS
                task.codes = a.weight + distance * own[2]
                _decode(task, place, own, groups, weights, size)
            row, first = start, block * BLOCK
            while row < end:
                one, last = min(row, end - rows), end - row <= rows
                two = one if last else min(row + rows, end - rows)
                x0, x1 = x + (one - start) * stride, x + (two - start) * stride
                if last:
                    _tile(a, x0, x1, one, two, first, weights, size, memory, stride, False)
                else:
                    _tile(a, x0, x1, one, two, first, weights, size, memory, stride, True)
                row += 2 * rows
        if configured:
            amx.release()
        raw.release(buffer)

    return Kernel(tile_product, CODED, cost=-(-WORTH // (BLOCK * inputs)))
