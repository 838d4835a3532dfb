"""Normalisation with the residual stream, and the gate of the MLP, row by row."""

import numpy as np
from numba import carray, njit

from services.worker.kernels.cpu.compiled import raw, simd
from services.worker.kernels.cpu.thread_team import ADDRESS, Kernel, arguments, items
from services.worker.kernels.interface.network import Activation

NORM = arguments(
    ("residual", ADDRESS),  # float32[rows, width], read and written; or 0: `delta` is normalised
    ("delta", ADDRESS),  # activations[rows, width], added first; or 0
    ("weight", ADDRESS),  # float32[width]; or 0: `out` is the residual
    ("out", ADDRESS),  # activations[rows, width]
    ("width", np.int64),
    ("eps", np.float32),
    ("factor", np.float32),  # of `delta`
)
GATE = arguments(
    ("gate_up", ADDRESS),  # activations[rows, 2 * width]
    ("out", ADDRESS),  # activations[rows, width]
    ("width", np.int64),
)


@njit(inline="always")
def row_factor(x, size, eps, HALF):  # type: ignore[no-untyped-def]
    """Return 1 / rms of `size` numbers. `HALF`: they are bfloat16."""
    SIZE, total, rest = 2 if HALF else 4, simd.splat(np.float32(0)), np.float32(0)
    for i in range(0, size // 16 * 16, 16):
        value = simd.load16(x + i * SIZE, HALF)
        total = simd.fma(value, value, total)
    for i in range(size // 16 * 16, size):
        one = simd.load1(x + i * SIZE, HALF)
        rest += one * one
    return np.float32(1) / np.sqrt((simd.reduce_add(total) + rest) / np.float32(size) + eps)


@njit(inline="always")
def _rms_norm(x, weight, out, width, eps, INPUT_HALF, HALF):  # type: ignore[no-untyped-def]
    """out = x / rms(x) * weight of one row. `INPUT_HALF`: x is bfloat16."""
    SIZE, INPUT = 2 if HALF else 4, 2 if INPUT_HALF else 4
    whole, scale = width // 16 * 16, row_factor(x, width, eps, INPUT_HALF)
    scales = simd.splat(scale)
    for i in range(0, whole, 16):
        value = simd.mul(simd.load16(x + i * INPUT, INPUT_HALF), scales)
        simd.store16(out + i * SIZE, simd.mul(value, simd.load_f32x16(weight + i * 4)), HALF)
    for i in range(whole, width):
        one = simd.load1(x + i * INPUT, INPUT_HALF) * scale * simd.load_f32(weight + i * 4)
        simd.store1(out + i * SIZE, one, HALF)


def norm_kernel(half: bool) -> Kernel:
    """See `NetworkKernels.norm`. `half`: activations are bfloat16."""
    HALF, SIZE = int(half), 2 if half else 4

    def norm(address):  # type: ignore[no-untyped-def]
        a = carray(raw.pointer(address), 1, NORM)[0]
        width, whole, factors = a.width, a.width // 16 * 16, simd.splat(a.factor)
        for row in items(address, a.items):
            x, delta, out = (a.residual + row * width * 4, a.delta + row * width * SIZE, a.out + row * width * SIZE)
            if a.residual == 0:
                _rms_norm(delta, a.weight, out, width, a.eps, HALF, HALF)
                continue
            if a.delta != 0:
                for i in range(0, whole, 16):
                    value = simd.load16(delta + i * SIZE, HALF)
                    simd.store_f32x16(x + i * 4, simd.fma(value, factors, simd.load_f32x16(x + i * 4)))
                for i in range(whole, width):
                    one = simd.load_f32(x + i * 4) + simd.load1(delta + i * SIZE, HALF) * a.factor
                    simd.store_f32(x + i * 4, one)
            if a.weight != 0:
                _rms_norm(x, a.weight, out, width, a.eps, 0, HALF)
                continue
            for i in range(0, whole, 16):
                simd.store16(out + i * SIZE, simd.load_f32x16(x + i * 4), HALF)
            for i in range(whole, width):
                simd.store1(out + i * SIZE, simd.load_f32(x + i * 4), HALF)

    return Kernel(norm, NORM, cost=16)


SILU, GELU_TANH, CLAMPED_SILU = 0, 1, 2
"""Kinds of gates. Each is x * sigmoid(f(x))."""
_KINDS = {"silu": SILU, "gelu_tanh": GELU_TANH, "clamped_silu": CLAMPED_SILU}
_GELU, _CUBIC = 2 * np.sqrt(2 / np.pi), 0.044715


def gate_kernel(half: bool, activation: Activation = "silu") -> Kernel:
    """out = activation(gate) * up, both from one matrix product. `half`: activations are bfloat16."""
    HALF, SIZE, KIND = int(half), 2 if half else 4, _KINDS[activation]
    FIRST, THIRD = np.float32(-_GELU), np.float32(-_GELU * _CUBIC)
    LIMIT, SLOPE = np.float32(7), np.float32(-1.702)

    def gate(address):  # type: ignore[no-untyped-def]
        a = carray(raw.pointer(address), 1, GATE)[0]
        width, whole = a.width, a.width // 16 * 16
        minus, one = simd.splat(np.float32(-1)), simd.splat(np.float32(1))
        first, third, slope = simd.splat(FIRST), simd.splat(THIRD), simd.splat(SLOPE)
        least, most = simd.splat(-LIMIT), simd.splat(LIMIT)
        for row in items(address, a.items):
            gates = a.gate_up + row * 2 * width * SIZE
            ups, out = gates + width * SIZE, a.out + row * width * SIZE
            for i in range(0, whole, 16):
                x, up = simd.load16(gates + i * SIZE, HALF), simd.load16(ups + i * SIZE, HALF)
                if KIND == SILU:
                    exponent = simd.mul(x, minus)
                elif KIND == GELU_TANH:
                    exponent = simd.mul(x, simd.fma(simd.mul(x, x), third, first))
                else:
                    x = simd.minimum(x, most)
                    up = simd.add(simd.minimum(simd.maximum(up, least), most), one)
                    exponent = simd.mul(x, slope)
                gated = simd.div(x, simd.add(one, simd.exp(exponent)))
                simd.store16(out + i * SIZE, simd.mul(gated, up), HALF)
            for i in range(whole, width):
                g, u = simd.load1(gates + i * SIZE, HALF), simd.load1(ups + i * SIZE, HALF)
                if KIND == SILU:
                    power = -g
                elif KIND == GELU_TANH:
                    power = g * (g * g * THIRD + FIRST)
                else:
                    g, u = min(g, LIMIT), min(max(u, -LIMIT), LIMIT) + np.float32(1)
                    power = g * SLOPE
                simd.store1(out + i * SIZE, g / (np.float32(1) + np.exp(power)) * u, HALF)

    return Kernel(gate, GATE, cost=8)
