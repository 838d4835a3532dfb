# mypy: disable-error-code="no-untyped-def"
"""RMS norm with the sum before it, and the gate of the MLP."""

import triton
import triton.language as tl


@triton.jit
def norm_kernel(
    residual,  # float32[rows, width], written if there is a delta
    delta,  # activations[rows, width]
    weight,  # float32[width]
    out,  # activations[rows, width]
    eps,
    width,
    adds: tl.constexpr,  # there is a delta
    padded: tl.constexpr,  # `width`, padded
):
    row, dim = tl.program_id(0).to(tl.int64) * width, tl.arange(0, padded)
    inside = dim < width
    x = tl.load(residual + row + dim, mask=inside, other=0.0)
    if adds:
        x += tl.load(delta + row + dim, mask=inside, other=0.0).to(tl.float32)
        tl.store(residual + row + dim, x, mask=inside)
    factor = 1.0 / tl.sqrt(tl.sum(x * x, 0) / width + eps)
    result = x * factor * tl.load(weight + dim, mask=inside, other=0.0)
    tl.store(out + row + dim, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def gate_kernel(
    gate_up,  # activations[rows, 2 * width]
    out,  # activations[rows, width]
    width,
    at_once: tl.constexpr,
):
    row, dim = tl.program_id(0).to(tl.int64), tl.program_id(1) * at_once + tl.arange(0, at_once)
    inside = dim < width
    at = gate_up + row * 2 * width + dim
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(at + width, mask=inside, other=0.0).to(tl.float32)
    small = tl.exp(-tl.abs(gate))  # never overflows
    result = gate * tl.where(gate >= 0, 1.0, small) / (1.0 + small) * up
    tl.store(out + row * width + dim, result.to(out.dtype.element_ty), mask=inside)
