# mypy: disable-error-code="no-untyped-def"
"""Rows of a matrix by their indices, in float32."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["number"])
def gather_kernel(
    index,  # int32[rows]; clamped, because padding rows and missing tokens have no valid one
    source,  # [any, width]
    out,  # float32[rows, width]
    number,  # rows of the source, which differ from step to step
    width,
    source_stride,
    out_stride,
    at_once: tl.constexpr,
):
    row, dim = tl.program_id(0).to(tl.int64), tl.program_id(1) * at_once + tl.arange(0, at_once)
    at = tl.minimum(tl.maximum(tl.load(index + row), 0), number - 1).to(tl.int64)
    x = tl.load(source + at * source_stride + dim, mask=dim < width, other=0.0)
    tl.store(out + row * out_stride + dim, x.to(tl.float32), mask=dim < width)
