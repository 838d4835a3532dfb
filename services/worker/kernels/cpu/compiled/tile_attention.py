"""Attention over the paged KV cache with AMX, with activations, keys and values in bfloat16.

The keys of a block are [head_dim / 2, block_size, 2] and its values [block_size / 2, head_dim, 2]: tiles of pairs of
inputs, which are multiplied where they lie. Queries and weights are rounded to bfloat16; scores and sums are float32.

Prompts, drafts and decoded tokens are computed in the same way, in tiles of few rows if there are few. Each sum runs
over the keys in the order of their positions, sixteen at a time, so the result of a query has the same bits alone, in
any batch and in a chunk of any size (batch invariance, docs/invariants.md).
"""

from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import carray, njit
from numba.core import types

from services.worker.kernels.cpu.compiled import amx, bf16, raw, simd
from services.worker.kernels.cpu.compiled.attention import ATTEND, blocks_read
from services.worker.kernels.cpu.compiled.building import load, store
from services.worker.kernels.cpu.compiled.intrinsics import emits
from services.worker.kernels.cpu.compiled.simd import I32, VI, spread
from services.worker.kernels.cpu.thread_team import Kernel, items

KEYS = amx.ROWS
"""Keys of a tile. Blocks consist of whole tiles."""
WIDTH = 2 * KEYS
"""Dimensions that an instruction sums over. The padded dimensions of a head consist of whole ones."""
AHEAD = 8
"""Number of tiles from the one that is read to the one that is prefetched: blocks lie anywhere in memory."""


@emits(types.void, *(types.int64,) * 3)
def _copy_masked(builder: Any, source: Any, target: Any, mask: Any) -> None:
    """Copy sixteen words, and with each the lowest 32 bits of `mask`."""
    bits = spread(builder, builder.trunc(mask, I32), VI)
    store(builder, builder.and_(load(builder, source, VI), bits), target)


@njit(inline="always")
def _copy_known(values, known, dim, target):  # type: ignore[no-untyped-def]
    """Copy the values of the first `known` positions of a tile. Those of the others are zeros, because a weight of zero
    does not hide what their memory contains."""
    for pair in range(KEYS // 2):
        left = known - 2 * pair
        mask = 0
        if left > 0:
            mask = -1 if left > 1 else 0xFFFF
        for d in range(0, dim, KEYS):
            offset = (pair * dim + d) * 4
            _copy_masked(values + offset, target + offset, mask)


@njit(inline="always")
def _weights(row, low, high, size, sink):  # type: ignore[no-untyped-def]
    """Turn the scores low .. high - 1 of a row of `size` scores into weights in bfloat16, the others into zeros. Return
    the inverse of their sum, to which the score `sink` belongs."""
    for j in range(low):
        simd.store_f32(row + j * 4, np.float32(-np.inf))
    for j in range(high, size):
        simd.store_f32(row + j * 4, np.float32(-np.inf))
    most = simd.splat(sink)
    for j in range(0, size, 16):
        most = simd.maximum(simd.load_f32x16(row + j * 4), most)
    greatest = simd.reduce_max(most)
    top, total = simd.splat(-greatest), simd.splat(np.float32(0))
    for j in range(0, size, 32):
        first = simd.exp(simd.add(simd.load_f32x16(row + j * 4), top))
        second = simd.exp(simd.add(simd.load_f32x16(row + j * 4 + 64), top))
        total = simd.add(simd.add(total, first), second)
        bf16.store_bf16x32(row + j * 2, first, second)
    rest = np.exp(sink - greatest) if sink > -np.inf else np.float32(0)
    return np.float32(1) / (simd.reduce_add(total) + rest)


def tile_attention_kernel() -> Kernel:
    """As `attention_kernel`."""

    def attend(address):  # type: ignore[no-untyped-def]
        a = carray(raw.pointer(address), 1, ATTEND)[0]
        dim, size, group = a.dim, a.block_size, a.heads // a.kv_heads
        tiles = raw.i32_at(a.tiles, a.items // a.kv_heads * 4)
        most_rows, score_bytes = 0, 0
        for tile in range(a.items // a.kv_heads):
            first, count = np.int64(tiles[tile * 4 + 1]), np.int64(tiles[tile * 4 + 3])
            begin, end = blocks_read(first, count, a.window, size)
            rows = (count * group + amx.ROWS - 1) // amx.ROWS * amx.ROWS
            score_bytes = max(score_bytes, rows * (((end - begin) * size + KEYS) * 4 + 64))
            most_rows = max(most_rows, rows)
        memory = raw.allocate(192 + KEYS * dim * 2 + most_rows * (dim * 2 + 4) + amx.ROWS * dim * 4 + score_bytes)
        spare = (memory + 63) // 64 * 64
        last = spare + 64
        sums = last + KEYS * dim * 2
        queries = sums + amx.ROWS * dim * 4
        scores = queries + most_rows * dim * 2
        inverses = scores + score_bytes
        configured = 0
        for item in items(address, a.items):
            tile, head = item // a.kv_heads, item % a.kv_heads
            slot, first = np.int64(tiles[tile * 4]), np.int64(tiles[tile * 4 + 1])
            token, count = np.int64(tiles[tile * 4 + 2]), np.int64(tiles[tile * 4 + 3])
            begin, end = blocks_read(first, count, a.window, size)
            blocks = raw.i32_at(a.table + slot * a.stride * 4, end)
            # row r of the tile is head r % group of query r // group
            rows = count * group
            if configured != min(rows, amx.ROWS):
                configured = min(rows, amx.ROWS)
                amx.configure(spare, configured, True)
            start, after = begin * size, first + count
            whole = (after - start + 31) // 32 * 32
            stride = whole * 4 + 64
            source = a.queries + (head * a.most_tokens + token) * group * dim * 4
            for d in range(0, rows * dim, 32):
                value, other = simd.load_f32x16(source + d * 4), simd.load_f32x16(source + d * 4 + 64)
                bf16.store_bf16x32(queries + d * 2, value, other)

            place, block_bytes = head * size * dim * 2, a.kv_heads * size * dim * 2
            for key in range(start, after, 2 * KEYS):
                after_key = key + KEYS if key + KEYS < after else key
                at0 = a.keys + blocks[key // size] * block_bytes + place + key % size * 4
                at1 = a.keys + blocks[after_key // size] * block_bytes + place + after_key % size * 4
                for ahead in range(key + AHEAD * KEYS, min(after, key + (AHEAD + 2) * KEYS), KEYS):
                    raw.prefetch(a.keys + blocks[ahead // size] * block_bytes + place + ahead % size * dim * 2, KEYS * dim * 2)
                for near in range(key, min(after, key + 2 * KEYS), KEYS):
                    raw.prefetch(a.values + blocks[near // size] * block_bytes + place + near % size * dim * 2, KEYS * dim * 2)
                for r in range(0, rows, amx.ROWS):
                    amx.zero_0()
                    amx.zero_1()
                    for d in range(0, dim, WIDTH):
                        amx.load_4(queries + (r * dim + d) * 2, dim * 2)
                        amx.load_6(at0 + d * size * 2, size * 4)
                        amx.load_7(at1 + d * size * 2, size * 4)
                        amx.multiply_0()
                        amx.multiply_1()
                    to = scores + r * stride + (key - start) * 4
                    amx.store_0(to, stride)
                    amx.store_1(to + 64, stride)

            for r in range(rows):
                high = first + r // group + 1
                low = max(0, high - a.window) if a.window else 0
                sink = np.float32(-np.inf)
                if a.sinks != 0:
                    sink = simd.load_f32(a.sinks + (head * group + r % group) * 4)
                inverse = _weights(scores + r * stride, max(0, low - start), high - start, whole, sink)
                simd.store_f32(inverses + r * 4, inverse)

            key = (after - 1) // KEYS * KEYS
            if after > start:
                _copy_known(a.values + blocks[key // size] * block_bytes + place + key % size * dim * 2, after - key, dim, last)
            for r in range(0, rows, amx.ROWS):
                for d in range(0, dim, WIDTH):
                    amx.zero_0()
                    amx.zero_1()
                    for key in range(start, after, KEYS):
                        at = last
                        if key + KEYS <= after:
                            at = a.values + blocks[key // size] * block_bytes + place + key % size * dim * 2
                        amx.load_5(scores + r * stride + (key - start) * 2, stride)
                        amx.load_2(at + d * 4, dim * 4)
                        amx.load_3(at + d * 4 + 64, dim * 4)
                        amx.multiply_short_0()
                        amx.multiply_short_1()
                    amx.store_0(sums + d * 4, dim * 4)
                    amx.store_1(sums + d * 4 + 64, dim * 4)
                for s in range(r, min(r + amx.ROWS, rows)):
                    inverse = simd.splat(simd.load_f32(inverses + s * 4))
                    to = ((token + s // group) * a.heads + head * group + s % group) * a.head_dim
                    for d in range(0, a.head_dim, WIDTH):
                        at = sums + ((s - r) * dim + d) * 4
                        first_half = simd.mul(simd.load_f32x16(at), inverse)
                        second_half = simd.mul(simd.load_f32x16(at + 64), inverse)
                        bf16.store_outputs(a.out + (to + d) * 2, a.head_dim - d, first_half, second_half, spare)
        if configured:
            amx.release()
        raw.release(memory)

    return Kernel(attend, ATTEND, cost=2)
