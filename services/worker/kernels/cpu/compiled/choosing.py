"""The greatest logit; or temperature, min-p, top-k, top-p and a draw, one row at a time and without sorting.

Top-k and top-p keep all logits from a smallest value on. This value is found exactly by bisection of the float32 values
between the least and the greatest logit, in at most 32 passes over the row, for a vocabulary of any size.
"""

import numpy as np
from numba import carray, njit

from services.worker.kernels.cpu.compiled import raw, simd
from services.worker.kernels.cpu.thread_team import Kernel, arguments, items
from services.worker.sampling.reference import GREEDY_BELOW

CHOOSE = arguments(
    ("logits", np.int64),  # float32[items, vocab]
    ("vocab", np.int64),
    ("temperature", np.int64),  # float32[items]; or 0: no row is drawn, and the next five are not read
    ("min_p", np.int64),  # float32[items]
    ("top_k", np.int64),  # int32[items], 0: all
    ("top_p", np.int64),  # float32[items], 1: all
    ("key0", np.int64),  # uint32[items], the noise's keys
    ("key1", np.int64),
    ("ids", np.int64),  # int32[items], the result
)


@njit
def greatest(row, size):  # type: ignore[no-untyped-def]
    """Return the greatest of `size` float32."""
    most, whole = simd.splat(np.float32(-np.inf)), size // 16 * 16
    for i in range(0, whole, 16):
        most = simd.maximum(simd.load_f32x16(row + i * 4), most)
    found = simd.reduce_max(most)
    for i in range(whole, size):
        found = max(found, simd.load_f32(row + i * 4))
    return found


@njit
def first_of(value, row, size):  # type: ignore[no-untyped-def]
    """Return the index of the first of `size` float32 that is `value`; the last index, if none is."""
    found = 0
    while found < size - 1 and simd.load_f32(row + found * 4) != value:
        found += 1
    return found


@njit
def _ordered(value):  # type: ignore[no-untyped-def]
    """Map a float32 to an integer, in the same order."""
    bits = simd.bits_of(value)
    return bits if bits >= 0 else -(bits & 0x7FFFFFFF)


@njit
def _unordered(number):  # type: ignore[no-untyped-def]
    return simd.float_of(number if number >= 0 else (-number) | 0x80000000)


@njit
def _sum_from(least, values, weights, size):  # type: ignore[no-untyped-def]
    """Sum the weights whose values are at least `least`, always in the same order."""
    bound, zero = simd.splat(least), simd.splat(np.float32(0))
    total = zero
    for i in range(0, size, 16):
        x, w = simd.load_f32x16(values + i * 4), simd.load_f32x16(weights + i * 4)
        total = simd.add(total, simd.select_at_least(x, bound, w, zero))
    return simd.reduce_add(total)


@njit
def _greatest_with(wanted, values, weights, size, low, high):  # type: ignore[no-untyped-def]
    """Find the greatest value from `low` to `high` for which the weights from it up sum to `wanted`; else `low`."""
    first, last = _ordered(low), _ordered(high)
    while first < last:
        middle = first + (last - first + 1) // 2
        if _sum_from(_unordered(middle), values, weights, size) >= wanted:
            first = middle
        else:
            last = middle - 1
    return _unordered(first)


def choose_kernel(cost: int) -> Kernel:
    """ids = argmax(logits / temperature + Gumbel noise) over the tokens that the filters keep; below GREEDY_BELOW, the
    greatest logit, the lowest id among equals. One item is one row."""
    LEAST = np.float32(GREEDY_BELOW)

    def choose(address):  # type: ignore[no-untyped-def]
        a = carray(raw.pointer(address), 1, CHOOSE)[0]
        size = (a.vocab + 15) // 16 * 16
        values = raw.allocate(2 * size * 4 if a.temperature != 0 else 16)
        weights, scaled = values + size * 4, raw.f32_at(values, size)
        infinite = simd.splat(np.float32(-np.inf))
        minus, ones = simd.splat(np.float32(-1)), simd.splat(np.float32(1))
        for item in items(address, a.items):
            source = a.logits + item * a.vocab * 4
            if a.temperature == 0 or simd.load_f32(a.temperature + item * 4) < LEAST:
                raw.i32_at(a.ids, a.items)[item] = first_of(greatest(source, a.vocab), source, a.vocab)
                continue
            temperature = simd.splat(simd.load_f32(a.temperature + item * 4))
            whole = a.vocab // 16 * 16
            for i in range(0, whole, 16):
                x = simd.div(simd.load_f32x16(source + i * 4), temperature)
                simd.store_f32x16(values + i * 4, x)
            for i in range(whole, size):
                scaled[i] = -np.inf
            for i in range(whole, a.vocab):
                scaled[i] = simd.load_f32(source + i * 4) / simd.load_f32(a.temperature + item * 4)
            high = greatest(values, size)

            cutoff = np.float32(-np.inf)
            min_p = simd.load_f32(a.min_p + item * 4)
            if min_p > 0:
                cutoff = high + np.float32(np.log(min_p))
            top_k, top_p = raw.i32_at(a.top_k, a.items)[item], simd.load_f32(a.top_p + item * 4)
            if (0 < top_k < a.vocab) or top_p < 1:
                # weights below e**-87 of the greatest are zero
                low = max(cutoff, high - np.float32(87))
                top = simd.splat(-high)
                if 0 < top_k < a.vocab:
                    for i in range(0, size, 16):
                        simd.store_f32x16(weights + i * 4, ones)
                    cutoff = _greatest_with(np.float32(top_k), values, weights, size, low, high)
                    low = cutoff
                if top_p < 1:
                    for i in range(0, size, 16):
                        x = simd.exp(simd.add(simd.load_f32x16(values + i * 4), top))
                        simd.store_f32x16(weights + i * 4, x)
                    total = _sum_from(low, values, weights, size)
                    cutoff = _greatest_with(top_p * total, values, weights, size, low, high)

            key0, key1 = raw.i32_at(a.key0, a.items)[item], raw.i32_at(a.key1, a.items)[item]
            bound, best = simd.splat(cutoff), infinite
            for i in range(0, size, 16):
                x = simd.load_f32x16(values + i * 4)
                noise = simd.log(simd.mul(simd.log(simd.uniform(i, key0, key1)), minus))
                x = simd.select_at_least(x, bound, simd.add(x, simd.mul(noise, minus)), infinite)
                best = simd.maximum(x, best)
                simd.store_f32x16(values + i * 4, x)
            raw.i32_at(a.ids, a.items)[item] = first_of(simd.reduce_max(best), values, a.vocab)
        raw.release(values)

    return Kernel(choose, CHOOSE, cost)
