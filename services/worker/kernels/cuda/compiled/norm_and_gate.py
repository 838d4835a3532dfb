# mypy: disable-error-code="no-untyped-def"
"""RMS norm with the sum before it, and the gate of the MLP."""

import triton
import triton.language as tl


@triton.jit
def norm_kernel(
    residual,  # float32[rows, width], read and written if `keeps`
    delta,  # activations[rows, width], read if `adds`
    weight,  # float32[width], read if `normalises`
    out,  # activations[rows, width]
    eps,
    factor,  # of delta
    width,
    keeps: tl.constexpr,  # there is a residual stream; otherwise delta is normalised
    adds: tl.constexpr,  # there is a delta
    normalises: tl.constexpr,
    padded: tl.constexpr,  # `width`, padded
):
    row, dim = tl.program_id(0).to(tl.int64) * width, tl.arange(0, padded)
    inside = dim < width
    if keeps:
        x = tl.load(residual + row + dim, mask=inside, other=0.0)
        if adds:
            x += tl.load(delta + row + dim, mask=inside, other=0.0).to(tl.float32) * factor
            tl.store(residual + row + dim, x, mask=inside)
    else:
        x = tl.load(delta + row + dim, mask=inside, other=0.0).to(tl.float32)
    if normalises:
        scale = 1.0 / tl.sqrt(tl.sum(x * x, 0) / width + eps)
        x = x * scale * tl.load(weight + dim, mask=inside, other=0.0)
    tl.store(out + row + dim, x.to(out.dtype.element_ty), mask=inside)


@triton.jit
def gate_kernel(
    gate_up,  # activations[rows, 2 * width]
    out,  # activations[rows, width]
    width,
    activation: tl.constexpr,
    at_once: tl.constexpr,
):
    row, dim = tl.program_id(0).to(tl.int64), tl.program_id(1) * at_once + tl.arange(0, at_once)
    inside = dim < width
    at = gate_up + row * 2 * width + dim
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(at + width, mask=inside, other=0.0).to(tl.float32)
    x = gate
    if activation == "gelu_tanh":
        x = 1.5957691216057308 * gate * (1.0 + 0.044715 * gate * gate)
    if activation == "clamped_silu":
        gate, up = tl.minimum(gate, 7.0), tl.minimum(tl.maximum(up, -7.0), 7.0) + 1.0
        x = 1.702 * gate
    small = tl.exp(-tl.abs(x))  # never overflows
    result = gate * tl.where(x >= 0, 1.0, small) / (1.0 + small) * up
    tl.store(out + row * width + dim, result.to(out.dtype.element_ty), mask=inside)
