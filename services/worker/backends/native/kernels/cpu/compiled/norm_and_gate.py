"""Normalisation with the residual stream, and the gate of the MLP, row by row."""

import numpy as np
from numba import carray

from services.worker.backends.native.kernels.cpu.compiled import raw, simd
from services.worker.backends.native.kernels.cpu.thread_team import HEADER, Kernel, take

ADDRESS = np.int64
NORM = [
    ("residual", ADDRESS),  # float32[rows, width], read and written
    ("delta", ADDRESS),  # activations[rows, width], added first; or 0
    ("weight", ADDRESS),  # float32[width]
    ("out", ADDRESS),  # activations[rows, width]
    ("width", np.int64),
    ("eps", np.float32),
]
GATE = [
    ("gate_up", ADDRESS),  # activations[rows, 2 * width]
    ("out", ADDRESS),  # activations[rows, width]
    ("width", np.int64),
]
_NORM, _GATE = (np.dtype(HEADER + fields, align=True) for fields in (NORM, GATE))


def norm_kernel(half: bool) -> Kernel:
    """residual += delta; out = residual / rms(residual) * weight. `half`: activations are bfloat16."""
    HALF, SIZE = int(half), 2 if half else 4

    def norm(address):  # type: ignore[no-untyped-def]
        a = carray(raw.pointer(address), 1, _NORM)[0]
        width, whole = a.width, a.width // 16 * 16
        while True:
            row = take(address)
            if row >= a.items:
                break
            x, delta, out = (
                a.residual + row * width * 4,
                a.delta + row * width * SIZE,
                a.out + row * width * SIZE,
            )
            total = simd.splat(np.float32(0))
            rest = np.float32(0)
            for i in range(0, whole, 16):
                value = simd.load_f32x16(x + i * 4)
                if a.delta != 0:
                    value = simd.add(value, simd.load16(delta + i * SIZE, HALF))
                    simd.store_f32x16(x + i * 4, value)
                total = simd.fma(value, value, total)
            for i in range(whole, width):
                one = simd.load_f32(x + i * 4)
                if a.delta != 0:
                    one += simd.load1(delta + i * SIZE, HALF)
                    simd.store_f32(x + i * 4, one)
                rest += one * one
            mean = (simd.reduce_add(total) + rest) / np.float32(width)
            scale = np.float32(1) / np.sqrt(mean + a.eps)
            scales = simd.splat(scale)
            for i in range(0, whole, 16):
                value = simd.mul(simd.load_f32x16(x + i * 4), scales)
                simd.store16(out + i * SIZE, simd.mul(value, simd.load_f32x16(a.weight + i * 4)), HALF)
            for i in range(whole, width):
                one = simd.load_f32(x + i * 4) * scale * simd.load_f32(a.weight + i * 4)
                simd.store1(out + i * SIZE, one, HALF)

    return Kernel(norm, NORM, cost=16, beside_torch=half)


def gate_kernel(half: bool) -> Kernel:
    """out = silu(gate) * up, both from one matrix product. `half`: activations are bfloat16."""
    HALF, SIZE = int(half), 2 if half else 4

    def gate(address):  # type: ignore[no-untyped-def]
        a = carray(raw.pointer(address), 1, _GATE)[0]
        width, whole = a.width, a.width // 16 * 16
        minus, one = simd.splat(np.float32(-1)), simd.splat(np.float32(1))
        while True:
            row = take(address)
            if row >= a.items:
                break
            gates = a.gate_up + row * 2 * width * SIZE
            ups, out = gates + width * SIZE, a.out + row * width * SIZE
            for i in range(0, whole, 16):
                x, up = simd.load16(gates + i * SIZE, HALF), simd.load16(ups + i * SIZE, HALF)
                silu = simd.div(x, simd.add(one, simd.exp(simd.mul(x, minus))))
                simd.store16(out + i * SIZE, simd.mul(silu, up), HALF)
            for i in range(whole, width):
                g, u = simd.load1(gates + i * SIZE, HALF), simd.load1(ups + i * SIZE, HALF)
                simd.store1(out + i * SIZE, g / (np.float32(1) + np.exp(-g)) * u, HALF)

    return Kernel(gate, GATE, cost=8, beside_torch=half)
