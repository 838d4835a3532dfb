"""y = W x + b with AMX, from weights in bfloat16 or quantised ones. Activations are bfloat16, sums float32. The number
of panels is even.

A span of an item's panels is multiplied with all rows while it is in the innermost cache, to which quantised weights
are decoded. Each sum runs over the inputs in order, 32 at a time, so a row has the same bits in a batch of any size
(batch invariance, docs/invariants.md).
"""

from functools import cache

import numpy as np
from numba import carray, njit

from services.worker.kernels.cpu.compiled import amx, bf16, raw, simd
from services.worker.kernels.cpu.compiled.block_formats import FORMATS, KINDS, PANEL, PANELS, SPAN
from services.worker.kernels.cpu.compiled.coded_product import NUMBERS
from services.worker.kernels.cpu.compiled.product import FIELDS
from services.worker.kernels.cpu.compiled.quantized import GROUP
from services.worker.kernels.cpu.thread_team import Kernel, arguments, compiled, items

WIDTH = 2 * PANEL
"""Outputs of two panels, which are multiplied together."""
CHUNK = 1024
"""Maximum number of rows of one item. A panel is decoded once per item."""
WORTH = 1 << 17
"""Smallest number of multiplications for which another thread is used."""
DECODED = PANELS * SPAN * bf16.STEP_BYTES
"""Bytes for decoded weights."""
TILED = arguments(
    *FIELDS,
    ("format", np.int64),  # int64[NUMBERS], as `coded_product.format_table` returns it; 0: weights are bfloat16
    ("decoder", np.int64),  # address, as `decoder` returns it
    ("ahead", np.int64),  # steps that are decoded together if there are few rows: 2 or 4
)
SPAN_TASK = np.dtype(
    [
        ("codes", np.int64),  # address of the first of four panels
        ("first", np.int64),  # step of a span
        ("steps", np.int64),  # of the span
        ("out", np.int64),  # address of the decoded first panel: bfloat16[steps, 16, 16, 2]
        ("apart", np.int64),  # bytes from it to that of the next panel
    ]
)
"""A decoder's arguments."""
TASK_BYTES = 64


@cache
def decoder(kind: int) -> tuple[int, int]:
    """Compile the decoder of a format. Return the address of a C function with the address of a `SPAN_TASK`, and the
    steps that it decodes ahead: few, for the innermost cache."""
    own = FORMATS[KINDS[kind]]
    KIND, STEPS, SIZE, UNIT = kind, own.steps, own.bytes, own.unit

    def decode(address):  # type: ignore[no-untyped-def]
        a = carray(raw.pointer(address), 1, SPAN_TASK)[0]
        bf16.decode_steps(a.codes, a.first, a.steps, a.out, a.apart, KIND, STEPS, SIZE, UNIT)

    return int(compiled(decode).address), max(2, UNIT)


@njit(inline="always")
def _add_products(x0, x1, stride, weights, size, steps, sums, is_first, is_pair):  # type: ignore[no-untyped-def]
    """Multiply one tile of rows, or two if `is_pair`, with a span of two panels of bfloat16, which are `size` bytes
    apart. The products are added to the tiles `sums`, or become them if `is_first`."""
    if is_first:
        amx.zero_0()
        amx.zero_1()
        if is_pair:
            amx.zero_2()
            amx.zero_3()
    else:
        amx.load_0(sums, 64)
        amx.load_1(sums + amx.TILE_BYTES, 64)
        if is_pair:
            amx.load_2(sums + 2 * amx.TILE_BYTES, 64)
            amx.load_3(sums + 3 * amx.TILE_BYTES, 64)
    tile0, tile1 = weights, weights + size
    for number in range(steps):
        amx.load_4(x0 + number * 64, stride)
        amx.load_6(tile0, 64)
        amx.load_7(tile1, 64)
        amx.multiply_0()
        amx.multiply_1()
        if is_pair:
            amx.load_5(x1 + number * 64, stride)
            amx.multiply_2()
            amx.multiply_3()
        tile0 += amx.TILE_BYTES
        tile1 += amx.TILE_BYTES
    amx.store_0(sums, 64)
    amx.store_1(sums + amx.TILE_BYTES, 64)
    if is_pair:
        amx.store_2(sums + 2 * amx.TILE_BYTES, 64)
        amx.store_3(sums + 3 * amx.TILE_BYTES, 64)


@njit(inline="always")
def _write(a, sums, spare, row, rows, first):  # type: ignore[no-untyped-def]
    """Add the bias to two tiles of sums, and store outputs `first` to `first` + 31. `spare`: see `store_outputs`."""
    bias, number = a.bias + first * 4, a.outputs - first
    bias0, bias1 = simd.load_f32x16(bias), simd.load_f32x16(bias + 64)
    out = a.out + (row * a.stride + first) * a.out_bytes
    for i in range(rows):
        value0 = simd.add(simd.load_f32x16(sums + i * 64), bias0)
        value1 = simd.add(simd.load_f32x16(sums + amx.TILE_BYTES + i * 64), bias1)
        bf16.store_outputs(out, a.out_bytes, number, value0, value1, spare)
        out += a.stride * a.out_bytes


def block_of(coded: bool) -> int:
    """Return the outputs of one item: two panels, and four of quantised weights, which lie together."""
    return (2 if coded else 1) * WIDTH


def tile_product_kernel(coded: bool, inputs: int) -> Kernel:
    """One item has up to `CHUNK` rows; its work is the number of rows. `coded`: weights are quantised, and not
    bfloat16."""
    IS_CODED, BLOCK = int(coded), block_of(coded)

    def tile_product(address):  # type: ignore[no-untyped-def]
        a = carray(raw.pointer(address), 1, TILED)[0]
        blocks, groups = (a.outputs + BLOCK - 1) // BLOCK, (a.inputs + GROUP - 1) // GROUP
        whole, rows = a.inputs % GROUP == 0, max(1, min(a.rows, amx.ROWS))
        stride, size = groups * GROUP * 2, groups * amx.TILE_BYTES
        most = min(a.rows, CHUNK)
        # With few rows, weights are decoded beside the products of those before, into the other half of the memory
        few = most <= 2 * rows
        span, ahead = SPAN, 0
        if few and IS_CODED:
            span = ahead = a.ahead
        elif few:
            span = groups
        part_bytes = (most + rows - 1) // rows * 2 * amx.TILE_BYTES
        sums_size = BLOCK // WIDTH * part_bytes + bf16.SPARE
        buffer = raw.allocate(64 + TASK_BYTES + DECODED * IS_CODED + sums_size + most * stride * (not whole))
        place = (buffer + 63) // 64 * 64
        decoded = place + TASK_BYTES
        sums = decoded + DECODED * IS_CODED
        copied = sums + sums_size
        task = carray(raw.pointer(place), 1, SPAN_TASK)[0]
        task.apart = span * bf16.STEP_BYTES
        configured = False
        for item in items(address, a.items):
            if not configured:
                amx.configure(sums, rows)
                configured = True
            block, start = item % blocks, item // blocks * CHUNK
            # A tile has `rows` rows; if too few rows are left, the last tile of a chunk begins earlier
            start, end = max(0, min(start, a.rows - rows)), min(start + CHUNK, a.rows)
            x = a.x + start * a.inputs * 2
            if not whole:
                bf16.copy_padded(x, end - start, a.inputs, copied, groups * GROUP)
                x = copied
            if IS_CODED:
                own = raw.i64_at(a.format, NUMBERS)
                task.codes = a.weight + block * (groups // own[1]) * PANELS * own[2]
            for first in range(-ahead, groups, span):
                weights, apart = a.weight + block * 2 * size + first * amx.TILE_BYTES, size
                if IS_CODED:
                    following = first + ahead
                    if following < groups:
                        task.first, task.steps = following, min(span, groups - following)
                        task.out = decoded + following // span % 2 * (DECODED // 2) * few
                        raw.call(a.decoder, place)
                    if first < 0:
                        continue
                    weights, apart = decoded + first // span % 2 * (DECODED // 2) * few, task.apart
                steps = min(span, groups - first)
                for part in range(BLOCK // WIDTH):
                    at, to, row = weights + part * 2 * apart, sums + part * part_bytes, start
                    while row < end:
                        x0 = x + (min(row, end - rows) - start) * stride + first * 64
                        x1 = x + (min(row + rows, end - rows) - start) * stride + first * 64
                        _add_products(x0, x1, stride, at, apart, steps, to, first == 0, end - row > rows)
                        row += 2 * rows
                        to += 4 * amx.TILE_BYTES
            for part in range(BLOCK // WIDTH):
                for number in range((end - start + rows - 1) // rows):
                    row = min(start + number * rows, end - rows)
                    tiles = sums + part * part_bytes + number * 2 * amx.TILE_BYTES
                    _write(a, tiles, sums + sums_size - bf16.SPARE, row, rows, block * BLOCK + part * WIDTH)
        if configured:
            amx.release()
        raw.release(buffer)

    return Kernel(tile_product, TILED, cost=-(-WORTH // (BLOCK * inputs)))
