# mypy: disable-error-code="no-untyped-def"
"""Prompt lookup: the longest suffix of a sequence that occurs earlier in it, and the tokens that follow there."""

import numpy as np
from numba import carray

from services.worker.kernels.cpu.compiled import raw
from services.worker.kernels.cpu.thread_team import ADDRESS, Kernel, arguments, items

NGRAM = arguments(
    ("history", ADDRESS),  # int32[num_slots, limit]
    ("limit", np.int64),
    ("slots", ADDRESS),  # int32[items]
    ("lengths", ADDRESS),  # int32[items]: tokens of each sequence
    ("shortest", np.int64),  # minimum length of a match, tokens
    ("longest", np.int64),  # maximum length of a match, tokens
    ("k", np.int64),
    ("least", np.float32),  # minimum probability of a token and all before it
    ("found", ADDRESS),  # int32[items, k], written where there is a match
)


def ngram_kernel() -> Kernel:
    """See `DraftingKernels.lookup`. One item is one sequence."""

    def look_up(address):
        a = carray(raw.pointer(address), 1, NGRAM)[0]
        for item in items(address, a.items):
            slot, length = (np.int64(raw.i32_at(a.slots, a.items)[item]), raw.i32_at(a.lengths, a.items)[item])
            tokens = raw.i32_at(a.history + slot * a.limit * 4, a.limit)
            best, after = a.shortest - 1, 0
            for end in range(length - 2, a.shortest - 2, -1):
                if tokens[end] != tokens[length - 1]:
                    continue
                size = 1
                while size < a.longest and size <= end and tokens[end - size] == tokens[length - 1 - size]:
                    size += 1
                if size > best:
                    best, after = size, end + 1
                    if size == a.longest:
                        break
            if after == 0:
                continue
            found = raw.i32_at(a.found + np.int64(item) * a.k * 4, a.k)
            chance = np.float32(1)
            for j in range(a.k):
                chance *= np.float32(best) / np.float32(best + 1)
                if chance < a.least:
                    break
                found[j] = tokens[after + j] if after + j < length else found[after + j - length]

    return Kernel(look_up, NGRAM, cost=4)
