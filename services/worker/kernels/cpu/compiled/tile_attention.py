"""Attention over the paged KV cache with AMX, with activations, keys and values in bfloat16.

The keys of a block are [head_dim / 2, block_size, 2] and its values [block_size / 2, head_dim, 2]: tiles of pairs of
inputs, which are multiplied where they lie. Queries and weights are rounded to bfloat16; scores and sums are float32.

Prompts, drafts and decoded tokens are computed in the same way, in tiles of few rows if there are few. Each sum runs
over the keys in the order of their positions, sixteen at a time, so the result of a query has the same bits alone, in
any batch and in a chunk of any size (batch invariance, docs/invariants.md). This holds for finite values: the queries
of a tile read the values of all its positions, those after their own with weights of zero.
"""

import numpy as np
from numba import carray, njit

from services.worker.kernels.cpu.compiled import amx, bf16, raw, simd
from services.worker.kernels.cpu.compiled.attention import ATTEND, blocks_read
from services.worker.kernels.cpu.thread_team import Kernel, items

QUERIES = 16
"""Number of queries of one request that read a key together."""
KEYS = amx.ROWS
"""Keys of a tile. Blocks consist of whole tiles."""
WIDTH = 2 * KEYS
"""Dimensions that an instruction sums over. The padded dimensions of a head consist of whole ones."""


@njit(inline="always")
def _copy_known(tile, known, dim, target):  # type: ignore[no-untyped-def]
    """Copy the values of the first `known` positions of a tile. Those of the others become zeros: the product of a
    weight of zero with whatever their memory contains may be NaN."""
    words, copied = raw.i32_at(tile, KEYS // 2 * dim), raw.i32_at(target, KEYS // 2 * dim)
    for pair in range(KEYS // 2):
        left = known - 2 * pair
        mask = np.int32(-1 if left > 1 else 0xFFFF if left == 1 else 0)
        for j in range(pair * dim, (pair + 1) * dim):
            copied[j] = words[j] & mask


@njit(inline="always")
def _weights(row, low, high, size, sink):  # type: ignore[no-untyped-def]
    """Turn the scores low .. high - 1 of a row of `size` scores into weights in bfloat16, the others into zeros. Return
    the inverse of their sum, to which the score `sink` belongs."""
    for j in range(low):
        simd.store_f32(row + j * 4, np.float32(-np.inf))
    for j in range(high, size):
        simd.store_f32(row + j * 4, np.float32(-np.inf))
    most = simd.splat(sink)
    for j in range(0, size, 32):
        both = simd.maximum(simd.load_f32x16(row + j * 4), simd.load_f32x16(row + j * 4 + 64))
        most = simd.maximum(both, most)
    greatest = simd.reduce_max(most)
    top, total = simd.splat(-greatest), simd.splat(np.float32(0))
    for j in range(0, size, 32):
        even = simd.exp(simd.add(simd.load_f32x16(row + j * 4), top))
        odd = simd.exp(simd.add(simd.load_f32x16(row + j * 4 + 64), top))
        total = simd.add(simd.add(total, even), odd)
        bf16.store_bf16x32(row + j * 2, even, odd)
    rest = np.exp(sink - greatest) if sink > -np.inf else np.float32(0)
    return np.float32(1) / (simd.reduce_add(total) + rest)


@njit(inline="always")
def _tile_of(cache, blocks, block_bytes, key, size, bytes_):  # type: ignore[no-untyped-def]
    """Return the address of the tile from position `key` on. `bytes_`: from one position of a block to the next."""
    return cache + blocks[key // size] * block_bytes + key % size * bytes_


def tile_attention_kernel() -> Kernel:
    """As `attention.attention_kernel`."""

    def attend(address):  # type: ignore[no-untyped-def]
        a = carray(raw.pointer(address), 1, ATTEND)[0]
        dim, size, group, number = a.dim, a.block_size, a.heads // a.kv_heads, a.items // a.kv_heads
        tiles = raw.i32_at(a.tiles, number * 4)
        most_rows, score_bytes = 0, 0
        for tile in range(number):
            first, count = np.int64(tiles[tile * 4 + 1]), np.int64(tiles[tile * 4 + 3])
            begin, end = blocks_read(first, count, a.window, size)
            rows = (count * group + amx.ROWS - 1) // amx.ROWS * amx.ROWS
            score_bytes = max(score_bytes, rows * (((end - begin) * size + KEYS) * 4 + 64))
            most_rows = max(most_rows, rows)
        memory = raw.allocate(128 + KEYS * dim * 2 + amx.ROWS * dim * 4 + most_rows * (dim * 2 + 4) + score_bytes)
        spare = (memory + 63) // 64 * 64
        last = spare + 64
        sums = last + KEYS * dim * 2
        queries = sums + amx.ROWS * dim * 4
        scores = queries + most_rows * dim * 2
        inverses = scores + score_bytes
        configured, zero = 0, simd.splat(np.float32(0))
        for item in items(address, a.items):
            tile, head = item // a.kv_heads, item % a.kv_heads
            slot, first = np.int64(tiles[tile * 4]), np.int64(tiles[tile * 4 + 1])
            token, count = np.int64(tiles[tile * 4 + 2]), np.int64(tiles[tile * 4 + 3])
            # row r of the tile is head r % group of query r // group
            rows = count * group
            if rows == 0:
                continue
            if configured != min(rows, amx.ROWS):
                configured = min(rows, amx.ROWS)
                amx.configure(spare, configured, short=True)
            begin, end = blocks_read(first, count, a.window, size)
            blocks, block_bytes = raw.i32_at(a.table + slot * a.stride * 4, end), a.kv_heads * size * dim * 2
            keys, values = a.keys + head * size * dim * 2, a.values + head * size * dim * 2
            start, after = begin * size, first + count
            scored = (after - start + 2 * KEYS - 1) // (2 * KEYS) * 2 * KEYS
            stride = scored * 4 + 64  # not a power of two: the rows of a tile are in different sets of the cache
            source = a.queries + (head * a.most_tokens + token) * group * dim * 4
            for d in range(0, rows * dim, 32):
                even, odd = simd.load_f32x16(source + d * 4), simd.load_f32x16(source + d * 4 + 64)
                bf16.store_bf16x32(queries + d * 2, even, odd)

            for key in range(start, after, 2 * KEYS):
                tile0 = _tile_of(keys, blocks, block_bytes, key, size, 4)
                # The scores of a tile that no query reads are not used
                tile1 = _tile_of(keys, blocks, block_bytes, key + KEYS, size, 4) if key + KEYS < after else tile0
                for r in range(0, rows, amx.ROWS):
                    amx.zero_0()
                    amx.zero_1()
                    for d in range(0, dim, WIDTH):
                        amx.load_4(queries + (r * dim + d) * 2, dim * 2)
                        amx.load_6(tile0 + d * size * 2, size * 4)
                        amx.load_7(tile1 + d * size * 2, size * 4)
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
                inverse = _weights(scores + r * stride, low - start if low > start else 0, high - start, scored, sink)
                simd.store_f32(inverses + r * 4, inverse)

            known = (after - 1) % KEYS + 1
            _copy_known(_tile_of(values, blocks, block_bytes, after - known, size, dim * 2), known, dim, last)
            for r in range(0, rows, amx.ROWS):
                for d in range(0, dim, WIDTH):
                    amx.zero_0()
                    amx.zero_1()
                    for key in range(start, after, KEYS):
                        value = last
                        if key + KEYS <= after:
                            value = _tile_of(values, blocks, block_bytes, key, size, dim * 2)
                        amx.load_5(scores + r * stride + (key - start) * 2, stride)
                        amx.load_2(value + d * 4, dim * 4)
                        amx.load_3(value + d * 4 + 64, dim * 4)
                        amx.multiply_short_0()
                        amx.multiply_short_1()
                    amx.store_0(sums + d * 4, dim * 4)
                    amx.store_1(sums + d * 4 + 64, dim * 4)
                for s in range(r, min(r + amx.ROWS, rows)):
                    inverse = simd.splat(simd.load_f32(inverses + s * 4))
                    to = ((token + s // group) * a.heads + head * group + s % group) * a.head_dim
                    for d in range(0, a.head_dim, WIDTH):
                        at = sums + ((s - r) * dim + d) * 4
                        # A key with a weight of zero may turn a sum of -0 into 0, so 0 is added to all
                        even = simd.fma(simd.load_f32x16(at), inverse, zero)
                        odd = simd.fma(simd.load_f32x16(at + 64), inverse, zero)
                        bf16.store_outputs(a.out + (to + d) * 2, 2, a.head_dim - d, even, odd, spare)
        if configured:
            amx.release()
        raw.release(memory)

    return Kernel(attend, ATTEND, cost=1)
