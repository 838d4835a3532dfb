"""Weights in panels of 16 outputs: bfloat16 and quantised. Their packing, and the look-up of an output's weights.

BF16 is bfloat16[groups * 16, 16, 2]: inputs 2 i and 2 i + 1 of each output are side by side, as AMX reads them.
`block_formats` has the other layouts.
"""

from functools import cache

import numpy as np
from numba import carray, njit

from services.worker.backends.native.kernels.cpu.compiled import raw, simd
from services.worker.backends.native.kernels.cpu.compiled.block_formats import (
    FORMATS,
    KINDS,
    PANEL,
    STEP,
    decode_step,
)
from services.worker.backends.native.kernels.cpu.thread_team import HEADER, Kernel, take

BF16 = -1
"""Kind of panels that have no blocks; the others are numbers in `KINDS`."""
GROUP = STEP
"""Inputs that BF16 panels are padded to a multiple of."""
BLOCK_BYTES = (*(own.bytes for own in FORMATS.values()), 2 * PANEL * GROUP)
"""Bytes of a block of a panel, by kind."""
BLOCK_INPUTS = (*(own.inputs for own in FORMATS.values()), GROUP)
ROWS = [
    ("panels", np.int64),
    ("index", np.int64),  # int32[items]: which output
    ("out", np.int64),  # float32[items, stride]: the first `inputs` numbers of each row are written
    ("inputs", np.int64),
    ("stride", np.int64),
]
_ROWS = np.dtype(HEADER + ROWS, align=True)
PACK = [
    ("rows", np.int64),  # int64[items * PANEL]: address of each output's blocks
    ("panels", np.int64),  # uint8[items, blocks, bytes of a block]
    ("blocks", np.int64),
]
_PACK = np.dtype(HEADER + PACK, align=True)


def rows_kernel(kind: int) -> Kernel:
    """out[i] = weights of output index[i], in float32. One item is one row."""
    KIND, SIZE, INPUTS = kind, BLOCK_BYTES[kind], BLOCK_INPUTS[kind]

    def rows(address):  # type: ignore[no-untyped-def]
        a = carray(raw.pointer(address), 1, _ROWS)[0]
        index, blocks = raw.i32_at(a.index, a.items), (a.inputs + INPUTS - 1) // INPUTS
        spare = raw.allocate(STEP * PANEL * 4)
        while True:
            item = take(address)
            if item >= a.items:
                break
            row, out = np.int64(index[item]), a.out + item * a.stride * 4
            panel, lane = a.panels + row // PANEL * blocks * SIZE, row % PANEL
            for number in range((a.inputs + STEP - 1) // STEP):
                to = out + number * STEP * 4
                if KIND == BF16:
                    for i in range(min(STEP, a.inputs - number * STEP)):
                        at = panel + number * SIZE + (i // 2 * PANEL + lane) * 4 + i % 2 * 2
                        simd.store_f32(to + i * 4, simd.load_bf16(at))
                else:
                    block, step = number // (INPUTS // STEP), number % (INPUTS // STEP)
                    decode_step(KIND, spare, panel + block * SIZE, step)
                    for i in range(STEP):
                        simd.store_f32(to + i * 4, simd.load_f32(spare + (i * PANEL + lane) * 4))
        raw.release(spare)

    return Kernel(rows, ROWS, cost=32)


@cache
def pack_kernel(kind: int) -> Kernel:
    """Bring ggml's blocks into panels. One item is one panel."""
    own = FORMATS[KINDS[kind]]
    SIZE, SOURCE, SCALES, CODES = own.bytes, own.source_bytes, own.scales, own.codes_at
    HALF0, HALF1 = own.halves[0], own.halves[-1]
    (AT0, NUMBER0), (AT1, NUMBER1) = own.words[0], own.words[-1]
    HALVES, PARTS, IS_NONLINEAR = len(own.halves), len(own.words), bool(own.table)

    def pack(address):  # type: ignore[no-untyped-def]
        a = carray(raw.pointer(address), 1, _PACK)[0]
        while True:
            item = take(address)
            if item >= a.items:
                break
            rows = raw.i64_at(a.rows + item * PANEL * 8, PANEL)
            for number in range(a.blocks):
                panel = a.panels + (item * a.blocks + number) * SIZE
                for lane in range(PANEL):
                    source = rows[lane] + number * SOURCE
                    to = panel + 2 * lane
                    raw.store_u16(to, raw.load_u16(source + HALF0))
                    if HALVES == 2:
                        raw.store_u16(to + 2 * PANEL, raw.load_u16(source + HALF1))
                    if SCALES:
                        _unpack_scales(
                            panel + 2 * HALVES * PANEL + lane, source + SCALES, HALVES, IS_NONLINEAR
                        )
                    to = panel + CODES + 4 * lane
                    for i in range(NUMBER0):
                        raw.store_u32(to + i * 4 * PANEL, raw.load_u32(source + AT0 + 4 * i))
                    if PARTS == 2:
                        for i in range(NUMBER1):
                            at = to + (NUMBER0 + i) * 4 * PANEL
                            raw.store_u32(at, raw.load_u32(source + AT1 + 4 * i))

    return Kernel(pack, PACK, cost=8)


@njit(inline="always")
def _unpack_scales(to, source, HALVES, IS_NONLINEAR):  # type: ignore[no-untyped-def]
    """Write the 8-bit scales of a block's groups, and the minima behind them; `PANEL` bytes from one to the next."""
    if HALVES == 2:  # Q4_K and Q5_K: 6 bits each
        for i in range(4):
            low, high = raw.load_u8(source + i), raw.load_u8(source + 4 + i)
            both = raw.load_u8(source + 8 + i)
            raw.store_u8(to + i * PANEL, low & 63)
            raw.store_u8(to + (4 + i) * PANEL, both & 15 | low >> 6 << 4)
            raw.store_u8(to + (8 + i) * PANEL, high & 63)
            raw.store_u8(to + (12 + i) * PANEL, both >> 4 | high >> 6 << 4)
    elif IS_NONLINEAR:  # IQ4_XS: 4 bits and 2 bits of a signed number
        upper = raw.load_u16(source)
        for i in range(8):
            low = raw.load_u8(source + 2 + i // 2) >> i % 2 * 4 & 15
            raw.store_u8(to + i * PANEL, (low | (upper >> 2 * i & 3) << 4) - 32)
    else:
        for i in range(16):
            raw.store_u8(to + i * PANEL, raw.load_u8(source + i))
