"""The most likely token of each row of logits, and its probability."""

import numpy as np
from numba import carray

from services.worker.kernels.cpu.compiled import raw, simd
from services.worker.kernels.cpu.compiled.choosing import first_of, greatest
from services.worker.kernels.cpu.thread_team import Kernel, arguments, items

MOST_LIKELY = arguments(
    ("logits", np.int64),  # float32[items, vocab]
    ("vocab", np.int64),
    ("ids", np.int64),  # int32[items]; among equal logits the lowest id
    ("chances", np.int64),  # float32[items], 0 to 1
    ("sharpness", np.int64),  # float32[items], factor of the logits
)


def most_likely_kernel() -> Kernel:
    """One item is one row."""

    def choose(address):  # type: ignore[no-untyped-def]
        a = carray(raw.pointer(address), 1, MOST_LIKELY)[0]
        whole = a.vocab // 16 * 16
        for item in items(address, a.items):
            row = a.logits + item * a.vocab * 4
            logits, most = raw.f32_at(row, a.vocab), greatest(row, a.vocab)
            sharp, sums, rest = (simd.load_f32(a.sharpness + item * 4), simd.splat(np.float32(0)), np.float32(0))
            top, scale = simd.splat(-most * sharp), simd.splat(sharp)
            for i in range(0, whole, 16):
                sums = simd.add(simd.exp(simd.fma(simd.load_f32x16(row + i * 4), scale, top)), sums)
            for i in range(whole, a.vocab):
                rest += np.exp((logits[i] - most) * sharp)
            raw.i32_at(a.ids, a.items)[item] = first_of(most, row, a.vocab)
            simd.store_f32(a.chances + item * 4, np.float32(1) / (simd.reduce_add(sums) + rest))

    return Kernel(choose, MOST_LIKELY, cost=4)
