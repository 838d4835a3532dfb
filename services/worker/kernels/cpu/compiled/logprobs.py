# mypy: disable-error-code="no-untyped-def"
"""Log-probabilities of one token of a row, with its token rank, and of the most likely ones, without sorting."""

import numpy as np
from numba import carray, njit

from services.worker.kernels.cpu.compiled import raw, simd
from services.worker.kernels.cpu.compiled.choosing import greatest
from services.worker.kernels.cpu.thread_team import ADDRESS, Kernel, arguments, items

BLOCK = 64
"""Number of logits that are skipped together if none of them is among the greatest."""
LOGPROBS = arguments(
    ("logits", ADDRESS),  # float32[any, vocab]
    ("vocab", np.int64),
    ("rows", ADDRESS),  # int32[items]: which rows of the logits
    ("tokens", ADDRESS),  # int32[items]
    ("tops", ADDRESS),  # int32[items]: number of most likely tokens, 0 to vocab
    ("firsts", ADDRESS),  # int32[items]: where the row's entries begin
    ("ids", ADDRESS),  # int32[entries], written: the token, then the most likely ones
    ("values", ADDRESS),  # float32[entries], written
    ("ranks", ADDRESS),  # int32[items], written: 1 plus the number of greater logits
    ("entries", np.int64),
)


@njit
def _greatest(row, vocab, top, ids, values):
    """Fill `ids` and `values` with the `top` greatest logits of the row, the greatest and lowest id first."""
    logits, found, least = raw.f32_at(row, vocab), 0, np.float32(-np.inf)
    for first in range(0, vocab, BLOCK):
        if found == top and first + BLOCK <= vocab:
            at = row + first * 4
            a = simd.maximum(simd.load_f32x16(at), simd.load_f32x16(at + 64))
            b = simd.maximum(simd.load_f32x16(at + 128), simd.load_f32x16(at + 192))
            if simd.reduce_max(simd.maximum(a, b)) <= least:
                continue
        for token in range(first, min(first + BLOCK, vocab)):
            x = logits[token]
            if found == top and not x > least:
                continue
            place = found if found < top else top - 1
            while place > 0 and values[place - 1] < x:
                ids[place], values[place] = ids[place - 1], values[place - 1]
                place -= 1
            ids[place], values[place] = token, x
            found = min(found + 1, top)
            if found == top:
                least = values[top - 1]


def logprobs_kernel() -> Kernel:
    """One item is one row. The order of its sum is fixed."""

    def score(address):
        a = carray(raw.pointer(address), 1, LOGPROBS)[0]
        ids, values = raw.i32_at(a.ids, a.entries), raw.f32_at(a.values, a.entries)
        zeros, ones = simd.splat(np.float32(0)), simd.splat(np.float32(1))
        whole = a.vocab // 16 * 16
        for item in items(address, a.items):
            row = a.logits + np.int64(raw.i32_at(a.rows, a.items)[item]) * a.vocab * 4
            logits, token = raw.f32_at(row, a.vocab), raw.i32_at(a.tokens, a.items)[item]
            most, own = greatest(row, a.vocab), logits[token]
            total, above, minus, bound = zeros, zeros, simd.splat(-most), simd.splat(own)
            for i in range(0, whole, 16):
                x = simd.load_f32x16(row + i * 4)
                total = simd.add(total, simd.exp(simd.add(x, minus)))
                above = simd.add(above, simd.select_at_least(bound, x, zeros, ones))
            weights, rank = simd.reduce_add(total), np.int64(simd.reduce_add(above)) + 1
            for i in range(whole, a.vocab):
                weights += np.exp(logits[i] - most)
                rank += logits[i] > own
            log_weights = np.float32(np.log(weights))

            first, top = raw.i32_at(a.firsts, a.items)[item], raw.i32_at(a.tops, a.items)[item]
            ids[first], values[first] = token, own
            if top > 0:
                last = first + 1 + top
                _greatest(row, a.vocab, top, ids[first + 1 : last], values[first + 1 : last])
            for i in range(first, first + 1 + top):
                values[i] = (values[i] - most) - log_weights
            raw.i32_at(a.ranks, a.items)[item] = rank

    return Kernel(score, LOGPROBS, cost=2)
