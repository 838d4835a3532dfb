"""Attention over the paged KV cache in place: rotary positions and cache writes, then scores, softmax and values.

The keys of a block are transposed, [head_dim, block_size], so that sixteen scores are one vector and no sum runs across
lanes; the values are [block_size, head_dim]. The dimension along a vector is padded to a multiple of sixteen.

The sums of a query run over its keys in the order of their positions, block after block. Its result therefore has the
same bits alone, in any batch and in a chunk of any size (batch invariance, docs/invariants.md). Each layer runs two
kernels, one after the other, so the keys of all rows are written before any query reads them (write before read).
"""

import numpy as np
from numba import carray, njit

from services.worker.backends.native.kernels.cpu.compiled import simd
from services.worker.backends.native.kernels.cpu.thread_team import HEADER, Kernel, take

ADDRESS = np.int64
TILE = 8
"""Number of queries of one request that read a key block while it is in the innermost cache."""
_CACHE = [
    ("keys", ADDRESS),  # cache[blocks, kv_heads, dim, lanes]
    ("values", ADDRESS),  # cache[blocks, kv_heads, block_size, dim]
    ("table", ADDRESS),  # int32[slots, stride]
    ("stride", np.int64),
    ("block_size", np.int64),
    ("lanes", np.int64),  # block_size padded to 16
    ("heads", np.int64),
    ("kv_heads", np.int64),
    ("head_dim", np.int64),
    ("dim", np.int64),  # head_dim padded to 16
    ("queries", ADDRESS),  # float32[tokens, heads, dim], rotated and scaled, padding zero
]
WRITE = [
    *_CACHE,
    ("qkv", ADDRESS),  # activations[tokens, (heads + 2 * kv_heads) * head_dim]
    ("slots", ADDRESS),  # int32[tokens]
    ("positions", ADDRESS),  # int32[tokens]
    ("cos", ADDRESS),  # float32[tokens, head_dim / 2]
    ("sin", ADDRESS),
    ("q_norm", ADDRESS),  # float32[dim], or 0
    ("k_norm", ADDRESS),
    ("eps", np.float32),
    ("scale", np.float32),
]
ATTEND = [
    *_CACHE,
    ("out", ADDRESS),  # activations[tokens, heads * head_dim]
    ("tiles", ADDRESS),  # int32[items, 4]: slot, first position, first token, tokens
    ("window", np.int64),  # number of keys that a query reads, its own included; 0: all
]
_WRITE, _ATTEND = (np.dtype(HEADER + fields, align=True) for fields in (WRITE, ATTEND))


def write_kernel(half: bool, half_cache: bool) -> Kernel:
    """Normalise and rotate queries and keys; write keys and values to the cache. One item is one token."""
    HALF, SIZE, CHALF, CSIZE = int(half), 2 if half else 4, int(half_cache), 2 if half_cache else 4

    def write(address):  # type: ignore[no-untyped-def]
        a = carray(simd.pointer(address), 1, _WRITE)[0]
        head_dim, dim, middle = a.head_dim, a.dim, a.head_dim // 2
        start = simd.allocate(2 * dim * 4)
        raw, turned = simd.f32_at(start, dim), simd.f32_at(start + dim * 4, dim)
        raw[:], turned[:] = 0, 0
        slots, positions = simd.i32_at(a.slots, a.items), simd.i32_at(a.positions, a.items)
        width = (a.heads + 2 * a.kv_heads) * head_dim
        while True:
            token = take(address)
            if token >= a.items:
                break
            position = positions[token]
            row = a.table + (slots[token] * a.stride + position // a.block_size) * 4
            block, offset = np.int64(simd.i32_at(row, 1)[0]), position % a.block_size
            cos, sin = a.cos + token * middle * 4, a.sin + token * middle * 4
            for head in range(a.heads + 2 * a.kv_heads):
                source = a.qkv + (token * width + head * head_dim) * SIZE
                for d in range(head_dim):
                    raw[d] = simd.load1(source + d * SIZE, HALF)
                if head >= a.heads + a.kv_heads:
                    h = head - a.heads - a.kv_heads
                    target = a.values + (((block * a.kv_heads + h) * a.block_size + offset) * dim) * CSIZE
                    for d in range(dim):
                        simd.store1(target + d * CSIZE, raw[d], CHALF)
                    continue
                weight = a.q_norm if head < a.heads else a.k_norm
                if weight != 0:
                    total = simd.splat(np.float32(0))
                    for d in range(0, dim, 16):
                        value = simd.load_f32x16(start + d * 4)
                        total = simd.fma(value, value, total)
                    factor = np.float32(1) / np.sqrt(simd.reduce_add(total) / np.float32(head_dim) + a.eps)
                    for d in range(head_dim):
                        raw[d] = raw[d] * factor * simd.load_f32(weight + d * 4)
                for d in range(middle):
                    c, s = simd.load_f32(cos + d * 4), simd.load_f32(sin + d * 4)
                    turned[d] = raw[d] * c - raw[d + middle] * s
                    turned[d + middle] = raw[d + middle] * c + raw[d] * s
                if head < a.heads:
                    target = a.queries + (token * a.heads + head) * dim * 4
                    for d in range(dim):
                        simd.store_f32(target + d * 4, turned[d] * a.scale)
                else:
                    h = head - a.heads
                    target = a.keys + ((block * a.kv_heads + h) * dim * a.lanes + offset) * CSIZE
                    for d in range(dim):
                        simd.store1(target + d * a.lanes * CSIZE, turned[d], CHALF)
        simd.release(start)

    return Kernel(write, WRITE, cost=8, beside_torch=half)


@njit(inline="always")
def _blocks(first, count, window, block_size):  # type: ignore[no-untyped-def]
    """Return the blocks that `count` queries from position `first` on read: the first one, and one after the last."""
    begin = max(0, first - window + 1) // block_size if window else 0
    return begin, (first + count - 1) // block_size + 1


@njit(inline="always")
def _score(a, q0, q1, block, at, stride, HALF):  # type: ignore[no-untyped-def]
    """Compute the scores of two query rows with one block of keys; the second is not stored if `stride` is 0.
    `HALF`: the cache is bfloat16."""
    SIZE, zero = 2 if HALF else 4, simd.splat(np.float32(0))
    for lane in range(0, a.lanes, 16):
        even0, odd0, even1, odd1 = zero, zero, zero, zero
        k = block + lane * SIZE
        for d in range(0, a.dim, 2):
            key = simd.load16(k, HALF)
            even0 = simd.fma(simd.splat(simd.load_f32(q0 + d * 4)), key, even0)
            even1 = simd.fma(simd.splat(simd.load_f32(q1 + d * 4)), key, even1)
            key = simd.load16(k + a.lanes * SIZE, HALF)
            odd0 = simd.fma(simd.splat(simd.load_f32(q0 + d * 4 + 4)), key, odd0)
            odd1 = simd.fma(simd.splat(simd.load_f32(q1 + d * 4 + 4)), key, odd1)
            k += 2 * a.lanes * SIZE
        simd.store_f32x16(at + lane * 4, simd.add(even0, odd0))
        if stride:
            simd.store_f32x16(at + lane * 4 + stride, simd.add(even1, odd1))


@njit(inline="always")
def _softmax(row, size):  # type: ignore[no-untyped-def]
    """Turn scores into weights, in place; return the inverse of their sum."""
    most = simd.load_f32x16(row)
    for j in range(16, size, 16):
        most = simd.maximum(simd.load_f32x16(row + j * 4), most)
    top, total = simd.splat(-simd.reduce_max(most)), simd.splat(np.float32(0))
    for j in range(0, size, 16):
        weight = simd.exp(simd.add(simd.load_f32x16(row + j * 4), top))
        total = simd.add(total, weight)
        simd.store_f32x16(row + j * 4, weight)
    return np.float32(1) / simd.reduce_add(total)


@njit(inline="always")
def _average(a, head, table, row, low, high, d, wide, HALF):  # type: ignore[no-untyped-def]
    """The weighted sum of the values at positions low .. high - 1, dimensions d .. d + 63 (or 15)."""
    SIZE, zero = 2 if HALF else 4, simd.splat(np.float32(0))
    o0, o1, o2, o3 = zero, zero, zero, zero
    start, size = low // a.block_size, a.block_size
    for b in range(start, (high - 1) // size + 1):
        block = a.values + ((table[b] * a.kv_heads + head) * size * a.dim + d) * SIZE
        weights = row + (b - start) * a.lanes * 4
        for j in range(max(low - b * size, 0), min(high - b * size, size)):
            p = simd.splat(simd.load_f32(weights + j * 4))
            v = block + j * a.dim * SIZE
            o0 = simd.fma(p, simd.load16(v, HALF), o0)
            if wide:
                o1 = simd.fma(p, simd.load16(v + 16 * SIZE, HALF), o1)
                o2 = simd.fma(p, simd.load16(v + 32 * SIZE, HALF), o2)
                o3 = simd.fma(p, simd.load16(v + 48 * SIZE, HALF), o3)
    return o0, o1, o2, o3


def attention_kernel(half: bool, half_cache: bool) -> Kernel:
    """softmax(queries keys) values. One item is one KV head of one tile of queries, with the heads of its group."""
    HALF, SIZE, CHALF, CSIZE = int(half), 2 if half else 4, int(half_cache), 2 if half_cache else 4

    def attend(address):  # type: ignore[no-untyped-def]
        a = carray(simd.pointer(address), 1, _ATTEND)[0]
        lanes, block_size, group = a.lanes, a.block_size, a.heads // a.kv_heads
        tiles = simd.i32_at(a.tiles, a.items // a.kv_heads * 4)
        most = 0
        for tile in range(a.items // a.kv_heads):
            first, count = np.int64(tiles[tile * 4 + 1]), np.int64(tiles[tile * 4 + 3])
            begin, end = _blocks(first, count, a.window, block_size)
            most = max(most, count * group * (end - begin) * lanes)
        scores = simd.allocate((most + 16) * 4)
        spare = scores + most * 4
        while True:
            item = take(address)
            if item >= a.items:
                break
            tile, head = item // a.kv_heads, item % a.kv_heads
            slot, first = np.int64(tiles[tile * 4]), np.int64(tiles[tile * 4 + 1])
            token, count = np.int64(tiles[tile * 4 + 2]), np.int64(tiles[tile * 4 + 3])
            table = simd.i32_at(a.table + slot * a.stride * 4, a.stride)
            # row r of the tile is head r % group of query r // group
            rows, row_size = count * group, a.dim * 4
            queries = a.queries + (token * a.heads + head * group) * row_size
            begin, end = _blocks(first, count, a.window, block_size)
            stride = (end - begin) * lanes * 4

            for b in range(begin, end):
                block = a.keys + (table[b] * a.kv_heads + head) * a.dim * lanes * CSIZE
                r = max(0, b * block_size - first) * group  # earlier queries read no key of this block
                while r < rows:
                    s = min(r + 1, rows - 1)
                    q0 = queries + (r // group * a.heads + r % group) * row_size
                    q1 = queries + (s // group * a.heads + s % group) * row_size
                    _score(
                        a,
                        q0,
                        q1,
                        block,
                        scores + r * stride + (b - begin) * lanes * 4,
                        (s - r) * stride,
                        CHALF,
                    )
                    r += 2

            for r in range(rows):
                high = first + r // group + 1
                low = max(0, high - a.window) if a.window else 0
                start = low // block_size
                row = scores + r * stride + (start - begin) * lanes * 4
                size = ((high - 1) // block_size + 1 - start) * lanes
                for j in range(low - start * block_size):
                    simd.store_f32(row + j * 4, np.float32(-np.inf))
                for j in range(size // lanes - 1):
                    for lane in range(block_size, lanes):
                        simd.store_f32(row + (j * lanes + lane) * 4, np.float32(-np.inf))
                for j in range(size - lanes + (high - 1) % block_size + 1, size):
                    simd.store_f32(row + j * 4, np.float32(-np.inf))
                inverse = simd.splat(_softmax(row, size))

                out = a.out + ((token + r // group) * a.heads + head * group + r % group) * a.head_dim * SIZE
                d = 0
                while d + 64 <= a.head_dim:
                    o0, o1, o2, o3 = _average(a, head, table, row, low, high, d, True, CHALF)
                    simd.store16(out + d * SIZE, simd.mul(o0, inverse), HALF)
                    simd.store16(out + (d + 16) * SIZE, simd.mul(o1, inverse), HALF)
                    simd.store16(out + (d + 32) * SIZE, simd.mul(o2, inverse), HALF)
                    simd.store16(out + (d + 48) * SIZE, simd.mul(o3, inverse), HALF)
                    d += 64
                while d < a.head_dim:
                    o0, o1, o2, o3 = _average(a, head, table, row, low, high, d, False, CHALF)
                    simd.store_f32x16(spare, simd.mul(o0, inverse))
                    for j in range(min(16, a.head_dim - d)):
                        simd.store1(out + (d + j) * SIZE, simd.load_f32(spare + j * 4), HALF)
                    d += 16
        simd.release(scores)

    return Kernel(attend, ATTEND, cost=2, beside_torch=half)
