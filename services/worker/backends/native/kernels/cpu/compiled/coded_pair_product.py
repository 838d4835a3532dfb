"""y = W x + b with AVX-512's products of bfloat16 pairs, from weights in int8 or int4. Activations are bfloat16, sums
float32.

Codes are multiplied as whole numbers, which bfloat16 holds exactly. Few rows are multiplied with codes that are decoded
in registers, more rows with codes that are decoded once per item. Each sum runs over the inputs in the same order in
both cases, so a row has the same bits in a batch of any size (batch invariance, docs/invariants.md).
"""

from functools import cache

import numpy as np
from numba import carray, njit

from services.worker.backends.native.kernels.cpu.compiled import bf16, raw, simd
from services.worker.backends.native.kernels.cpu.compiled.pair_product import (
    BLOCK,
    CHUNK,
    PANELS,
    WORTH,
    write_rows,
)
from services.worker.backends.native.kernels.cpu.compiled.product import PRODUCT
from services.worker.backends.native.kernels.cpu.compiled.quantized import GROUP, GROUP_BYTES, INT4, PANEL
from services.worker.backends.native.kernels.cpu.thread_team import HEADER, Kernel, take

FEW = 3
"""Rows for which codes are decoded in registers: 24 sums with those of a group."""
ROWS, WIDTH = 6, 2 * PANEL
"""Rows and outputs that are multiplied together otherwise: 24 sums."""
_PRODUCT = np.dtype(HEADER + PRODUCT, align=True)


@njit(inline="always")
def _sum_inputs(x, stride, rows, groups, totals):  # type: ignore[no-untyped-def]
    """totals[row, group] = sum of the inputs of a group."""
    for row in range(rows):
        for number in range(groups):
            total = simd.reduce_add(bf16.pair_sums(x + row * stride + number * GROUP * 2))
            simd.store_f32(totals + (row * groups + number) * 4, total)


def coded_pair_product_kernel(kind: int, inputs: int) -> Kernel:
    """One item is a block of outputs of up to `CHUNK` rows; its work is the number of rows."""
    return _compiled(kind).again_for(WORTH, BLOCK * inputs)


@cache
def _compiled(kind: int) -> Kernel:
    KIND, SIZE = kind, GROUP_BYTES[kind]

    def coded_pair_product(address):  # type: ignore[no-untyped-def]
        a = carray(raw.pointer(address), 1, _PRODUCT)[0]
        blocks, groups, stride = (a.outputs + BLOCK - 1) // BLOCK, a.inputs // GROUP, a.inputs * 2
        step, words_step, most = groups * SIZE, groups * GROUP // 2 * bf16.WORDS, min(a.rows, CHUNK)
        sums_size = max(FEW * BLOCK, ROWS * WIDTH) * 4 + 64
        words_size = 0 if most <= FEW else PANELS * words_step
        buffer = raw.allocate(64 + sums_size + words_size + most * groups * 4)
        sums = (buffer + 63) // 64 * 64
        words = sums + sums_size
        totals = words + words_size
        summed = -1  # first row of those whose inputs are summed: most items have the rows of the one before
        while True:
            item = take(address)
            if item >= a.items:
                break
            block, start = item % blocks, item // blocks * CHUNK
            rows, first, x = min(CHUNK, a.rows - start), block * BLOCK, a.x + start * stride
            codes = a.weight + block * PANELS * step
            if KIND == INT4 and summed != start:
                summed = start
                _sum_inputs(x, stride, rows, groups, totals)
            if rows <= FEW:
                if rows == 1:
                    bf16.coded_dot_products(
                        1, PANELS, KIND, 0, x, stride, codes, step, 0, 0, groups, totals, sums
                    )
                elif rows == 2:
                    bf16.coded_dot_products(
                        2, PANELS, KIND, 0, x, stride, codes, step, 0, 0, groups, totals, sums
                    )
                else:
                    bf16.coded_dot_products(
                        3, PANELS, KIND, 0, x, stride, codes, step, 0, 0, groups, totals, sums
                    )
                write_rows(a, sums, start, rows, first, BLOCK)
                continue
            for number in range(PANELS * groups):
                for pair in range(GROUP // 2):
                    target = words + (number * (GROUP // 2) + pair) * bf16.WORDS
                    bf16.store_code_words(KIND, target, codes + number * SIZE, pair)
            row = 0
            while row < rows:
                left = rows - row
                some = 6 if left == 6 or left > 9 else 5 if left == 5 or left == 9 else 4
                at = min(row, rows - some)  # if too few are left, others are computed again
                here, sums_of_x = x + at * stride, totals + at * groups * 4
                for half in range(PANELS // 2):
                    c, w = codes + half * 2 * step, words + half * 2 * words_step
                    if some == 6:
                        bf16.coded_dot_products(
                            6, 2, KIND, 1, here, stride, c, step, w, words_step, groups, sums_of_x, sums
                        )
                    elif some == 5:
                        bf16.coded_dot_products(
                            5, 2, KIND, 1, here, stride, c, step, w, words_step, groups, sums_of_x, sums
                        )
                    else:
                        bf16.coded_dot_products(
                            4, 2, KIND, 1, here, stride, c, step, w, words_step, groups, sums_of_x, sums
                        )
                    if first + half * WIDTH < a.outputs:
                        write_rows(a, sums, start + at, some, first + half * WIDTH, WIDTH)
                row = at + some
        raw.release(buffer)

    return Kernel(coded_pair_product, PRODUCT, cost=1)
