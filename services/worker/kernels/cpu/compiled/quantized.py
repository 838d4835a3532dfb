"""Weights in panels of 16 outputs: bfloat16 and quantised. Their packing, and the look-up of an output's weights, those
of `product` included.

BF16 is bfloat16[groups * 16, 16, 2]: inputs 2 i and 2 i + 1 of each output are side by side, as AMX reads them.
`block_formats` has the other layouts.
"""

import numpy as np
from numba import carray, njit
from numpy.typing import NDArray

from services.worker.kernels.cpu.compiled import raw, simd
from services.worker.kernels.cpu.compiled.block_formats import (
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
)
from services.worker.kernels.cpu.compiled.code_tile import TASK, TASK_BYTES
from services.worker.kernels.cpu.compiled.coded_product import NUMBERS
from services.worker.kernels.cpu.compiled.product import panel_of
from services.worker.kernels.cpu.thread_team import Kernel, arguments, items

GROUP = STEP
"""Inputs that BF16 panels are padded to a multiple of."""
ROWS = arguments(
    ("panels", np.int64),
    ("index", np.int64),  # int32[items]: which output
    ("out", np.int64),  # float32[items, stride]: the first `inputs` numbers of each row are written
    ("inputs", np.int64),
    ("stride", np.int64),
    ("format", np.int64),  # int64[NUMBERS], as `format_table` returns it; 0 of others
)
PACK = arguments(
    ("rows", np.int64),  # int64[items * PANEL]: address of each output's blocks
    ("panels", np.int64),  # uint8[items / PANELS, blocks, PANELS, bytes of a block]
    ("blocks", np.int64),
    ("layout", np.int64),  # int64[11], as `pack_layout` returns it
)


def rows_kernel(coded: bool) -> Kernel:
    """out[i] = weights of output index[i], in float32. One item is one row. `coded`: of any format, and not BF16."""
    CODED, SIZE = int(coded), 2 * PANEL * STEP

    def rows(address):  # type: ignore[no-untyped-def]
        a = carray(raw.pointer(address), 1, ROWS)[0]
        index = raw.i32_at(a.index, a.items)
        place = raw.allocate(TASK_BYTES + SPAN_BYTES)
        decoded = place + TASK_BYTES
        task = carray(raw.pointer(place), 1, TASK)[0]
        task.rows, task.width, task.out, task.end, task.jump = 0, 1, decoded, 0, 0
        for item in items(address, a.items):
            row, out = np.int64(index[item]), a.out + item * a.stride * 4
            lane = row % PANEL
            if CODED:
                own = raw.i64_at(a.format, NUMBERS)
                steps, scale_steps = a.inputs // STEP, own[4]
                blocks = row // (PANEL * PANELS) * (steps // own[1])
                task.codes = a.panels + (blocks * PANELS + row // PANEL % PANELS) * own[2]
                for first in range(0, steps, SPAN):
                    task.first, task.steps = first, min(SPAN, steps - first)
                    raw.call(own[0], place)
                    for i in range(task.steps * STEP):
                        step, pair = i // STEP, i % 2 * QUADS + i % STEP // 4
                        number = raw.load_i16(decoded + ((step * STEP // 2 + pair) * PANEL + lane) * 4 + i % 4 // 2 * 2)
                        scale = simd.load_f32(decoded + SCALES_AT + (step // scale_steps * PANEL + lane) * 4)
                        minimum = simd.load_f32(decoded + MINIMA_AT + (step * PANEL + lane) * 4)
                        simd.store_f32(out + (first * STEP + i) * 4, np.float32(number) * scale + minimum)
            else:
                panel = a.panels + row // PANEL * ((a.inputs + STEP - 1) // STEP) * SIZE
                for i in range(a.inputs):
                    simd.store_f32(out + i * 4, simd.load_bf16(panel + (i // 2 * PANEL + lane) * 4 + i % 2 * 2))
        raw.release(place)

    return Kernel(rows, ROWS, cost=32)


def float32_rows_kernel(wide: bool, half: bool) -> Kernel:
    """The same for weights of `product.product_kernel`, which has `wide` and `half`."""
    (WIDTH, APART), HALF, SIZE = panel_of(wide), int(half), 2 if half else 4

    def rows(address):  # type: ignore[no-untyped-def]
        a = carray(raw.pointer(address), 1, ROWS)[0]
        index = raw.i32_at(a.index, a.items)
        for item in items(address, a.items):
            row, out = np.int64(index[item]), a.out + item * a.stride * 4
            lane = row % WIDTH
            place = a.panels + (row - lane) * a.inputs * SIZE
            if HALF:  # a word has lanes i and i + APART
                lane = lane // (2 * APART) * 2 * APART + lane % APART * 2 + lane // APART % 2
            for i in range(a.inputs):
                simd.store_f32(out + i * 4, simd.load1(place + (i * WIDTH + lane) * SIZE, HALF))

    return Kernel(rows, ROWS, cost=32)


def pack_layout(kind: int) -> NDArray[np.int64]:
    """Return what `pack_kernel` must know of a format."""
    own = FORMATS[KINDS[kind]]
    scales = 0 if own.scales is None else 1 if own.has_exponents else 2 if own.has_minima else 3 if own.table else 4
    halves, words = (*own.halves, -1, -1)[:2], (*own.words, (0, 0))[:2]
    numbers = *halves, scales, own.scales or 0, *words[0], *words[1]
    return np.array([own.source_bytes, own.bytes, own.codes_at, *numbers], np.int64)


def pack_kernel() -> Kernel:
    """Bring ggml's blocks into panels. One item is one panel."""

    def pack(address):  # type: ignore[no-untyped-def]
        a = carray(raw.pointer(address), 1, PACK)[0]
        own = raw.i64_at(a.layout, 11)
        source_bytes, size, codes_at, half0, half1, kind, scales, at0, number0, at1, number1 = (
            own[0], own[1], own[2], own[3], own[4], own[5], own[6], own[7], own[8], own[9], own[10]
        )  # fmt: skip
        for item in items(address, a.items):
            rows = raw.i64_at(a.rows + item * PANEL * 8, PANEL)
            for number in range(a.blocks):
                panel = a.panels + ((item // PANELS * a.blocks + number) * PANELS + item % PANELS) * size
                for lane in range(PANEL):
                    source, bytes_at = rows[lane] + number * source_bytes, panel + lane
                    if half0 >= 0:
                        raw.store_u16(panel + 2 * lane, raw.load_u16(source + half0))
                        bytes_at += 2 * PANEL
                    if half1 >= 0:
                        raw.store_u16(panel + 2 * (PANEL + lane), raw.load_u16(source + half1))
                        bytes_at += 2 * PANEL
                    _unpack_scales(bytes_at, source + scales, kind)
                    to = panel + codes_at + 4 * lane
                    for i in range(number0):
                        raw.store_u32(to + i * 4 * PANEL, raw.load_u32(source + at0 + 4 * i))
                    for i in range(number1):
                        raw.store_u32(to + (number0 + i) * 4 * PANEL, raw.load_u32(source + at1 + 4 * i))

    return Kernel(pack, PACK, cost=8)


@njit(inline="always")
def _unpack_scales(to, source, kind):  # type: ignore[no-untyped-def]
    """Write the 8-bit scales of a block's groups, and the minima behind them; `PANEL` bytes from one to the next."""
    if kind == 1:  # MXFP4: an exponent
        raw.store_u8(to, raw.load_u8(source))
    elif kind == 2:  # Q4_K and Q5_K: 6 bits each
        for i in range(4):
            low, high = raw.load_u8(source + i), raw.load_u8(source + 4 + i)
            both = raw.load_u8(source + 8 + i)
            raw.store_u8(to + i * PANEL, low & 63)
            raw.store_u8(to + (4 + i) * PANEL, both & 15 | low >> 6 << 4)
            raw.store_u8(to + (8 + i) * PANEL, high & 63)
            raw.store_u8(to + (12 + i) * PANEL, both >> 4 | high >> 6 << 4)
    elif kind == 3:  # IQ4_XS: 4 bits and 2 bits of a signed number
        upper = raw.load_u16(source)
        for i in range(8):
            low = raw.load_u8(source + 2 + i // 2) >> i % 2 * 4 & 15
            raw.store_u8(to + i * PANEL, (low | (upper >> 2 * i & 3) << 4) - 32)
    elif kind == 4:  # Q6_K
        for i in range(16):
            raw.store_u8(to + i * PANEL, raw.load_u8(source + i))
