"""Cosine and sine of rotary positions."""

import numpy as np
from numba import carray

from services.worker.kernels.cpu.compiled import raw, simd
from services.worker.kernels.cpu.thread_team import Kernel, arguments, items

ROTARY = arguments(
    ("positions", np.int64),  # int32[items]
    ("frequencies", np.int64),  # float32[width], radians per position
    ("amplitudes", np.int64),  # float32[width]
    ("cos", np.int64),  # float32[items, width]
    ("sin", np.int64),
    ("width", np.int64),
)


def rotary_kernel() -> Kernel:
    """One item is one token."""

    def rotate(address):  # type: ignore[no-untyped-def]
        a = carray(raw.pointer(address), 1, ROTARY)[0]
        positions = raw.i32_at(a.positions, a.items)
        for item in items(address, a.items):
            for i in range(a.width):
                angle = np.float32(positions[item]) * simd.load_f32(a.frequencies + i * 4)
                at, amplitude = (item * a.width + i) * 4, simd.load_f32(a.amplitudes + i * 4)
                simd.store_f32(a.cos + at, np.cos(angle) * amplitude)
                simd.store_f32(a.sin + at, np.sin(angle) * amplitude)

    return Kernel(rotate, ROTARY, cost=8)
