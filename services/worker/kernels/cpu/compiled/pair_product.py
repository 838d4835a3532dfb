"""y = W x + b with AVX-512's products of bfloat16 pairs. Activations and weights are bfloat16, sums float32. The number
of panels is a multiple of four.

Each sum runs over the inputs in order, two at a time, so a row has the same bits in a batch of any size (batch
invariance, docs/invariants.md).
"""

from numba import carray, njit

from services.worker.kernels.cpu.compiled import bf16, raw, simd
from services.worker.kernels.cpu.compiled.block_formats import PANEL, PANELS
from services.worker.kernels.cpu.compiled.product import PRODUCT
from services.worker.kernels.cpu.compiled.quantized import GROUP
from services.worker.kernels.cpu.thread_team import Kernel, items

BLOCK = PANELS * PANEL
"""Outputs of one item."""
CHUNK = 32 * bf16.ROWS
"""Maximum number of rows of one item."""
WORTH = 1 << 18
"""Smallest number of multiplications for which another thread is used."""


@njit(inline="always")
def write_rows(a, sums, row, rows, first, width):  # type: ignore[no-untyped-def]
    """Add the bias to the sums of some rows, and store outputs `first` to `first` + `width` - 1.

    Args:
        sums: float32[rows, width], and `bf16.SPARE` bytes more
    """
    tail = sums + rows * width * 4
    for i in range(rows):
        for some in range(first, min(first + width, a.outputs), 2 * PANEL):
            here, bias = sums + (i * width + some - first) * 4, a.bias + some * 4
            value0 = simd.add(simd.load_f32x16(here), simd.load_f32x16(bias))
            value1 = simd.add(simd.load_f32x16(here + 64), simd.load_f32x16(bias + 64))
            out = a.out + ((row + i) * a.stride + some) * a.out_bytes
            bf16.store_outputs(out, a.out_bytes, a.outputs - some, value0, value1, tail)


def pair_product_kernel(inputs: int) -> Kernel:
    """One item is a block of outputs of up to `CHUNK` rows; its work is the number of rows."""

    def pair_product(address):  # type: ignore[no-untyped-def]
        a = carray(raw.pointer(address), 1, PRODUCT)[0]
        blocks, groups = (a.outputs + BLOCK - 1) // BLOCK, (a.inputs + GROUP - 1) // GROUP
        # Without a partner, the last input of a row is multiplied with zero weights, and must not be the next row's
        pairs, odd = (a.inputs + 1) // 2, a.inputs % 2
        step, stride = groups * GROUP * PANEL * 2, pairs * 4
        sums_size = bf16.ROWS * BLOCK * 4 + bf16.SPARE
        buffer = raw.allocate(64 + sums_size + (min(a.rows, CHUNK) * stride if odd else 0))
        sums = (buffer + 63) // 64 * 64
        copied = sums + sums_size
        for item in items(address, a.items):
            block, start = item % blocks, item // blocks * CHUNK
            end, first, x = min(start + CHUNK, a.rows), block * BLOCK, a.x + start * a.inputs * 2
            if odd:
                bf16.copy_padded(x, end - start, a.inputs, copied, 2 * pairs)
                x = copied
            weights, row = a.weight + block * PANELS * step, start
            while row < end:
                rows = min(bf16.ROWS, end - row)
                bf16.dot_products(rows, x, stride, weights, step, pairs, sums)
                write_rows(a, sums, row, rows, first, BLOCK)
                x += rows * stride
                row += rows
        raw.release(buffer)

    return Kernel(pair_product, PRODUCT, cost=-(-WORTH // (BLOCK * inputs)))
