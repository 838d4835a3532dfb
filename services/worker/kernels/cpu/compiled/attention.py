"""Attention over the paged KV cache in place: rotary positions and cache writes, then scores, softmax and values.

The keys of a block are transposed, [head_dim, block_size], so that sixteen scores are one vector and no sum runs across
lanes; the values are [block_size, head_dim]. The dimension along a vector is padded to a multiple of sixteen.

The sums of a query run over its keys in the order of their positions, block after block. Its result therefore has the
same bits alone, in any batch and in a chunk of any size (batch invariance, docs/invariants.md). Each layer runs two
kernels, one after the other, so the keys of all rows are written before any query reads them (write before read).
"""

import numpy as np
from numba import carray, njit

from services.worker.kernels.cpu.compiled import raw, simd
from services.worker.kernels.cpu.compiled.norm_and_gate import row_factor
from services.worker.kernels.cpu.thread_team import Kernel, arguments, items

ADDRESS = np.int64
TILE = 8
"""Number of queries of one request that read a key block while it is in the innermost cache."""
AHEAD = 2
"""Number of blocks from the one that is read to the one that is prefetched: blocks lie anywhere in memory."""
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
WRITE = arguments(
    *_CACHE,
    ("qkv", ADDRESS),  # activations[tokens, (heads + 2 * kv_heads) * head_dim]
    ("slots", ADDRESS),  # int32[tokens]
    ("positions", ADDRESS),  # int32[tokens]
    ("cos", ADDRESS),  # float32[tokens, head_dim / 2]
    ("sin", ADDRESS),
    ("q_norm", ADDRESS),  # float32[dim], or 0
    ("k_norm", ADDRESS),
    ("all_heads", np.int64),  # 1: the norms are over all heads of a token; float32[heads * head_dim]
    ("eps", np.float32),
    ("scale", np.float32),
)
ATTEND = arguments(
    *_CACHE,
    ("out", ADDRESS),  # activations[tokens, heads * head_dim]
    ("tiles", ADDRESS),  # int32[items, 4]: slot, first position, first token, tokens
    ("window", np.int64),  # number of keys that a query reads, its own included; 0: all
    ("sinks", ADDRESS),  # float32[heads], or 0
)


def write_kernel(half: bool, half_cache: bool) -> Kernel:
    """Normalise and rotate queries and keys; write keys and values to the cache. One item is one token."""
    HALF, SIZE, CHALF, CSIZE = int(half), 2 if half else 4, int(half_cache), 2 if half_cache else 4

    def write(address):  # type: ignore[no-untyped-def]
        a = carray(raw.pointer(address), 1, WRITE)[0]
        head_dim, dim, middle = a.head_dim, a.dim, a.head_dim // 2
        start = raw.allocate(2 * dim * 4)
        plain, turned = raw.f32_at(start, dim), raw.f32_at(start + dim * 4, dim)
        plain[:], turned[:] = 0, 0
        slots, positions = raw.i32_at(a.slots, a.items), raw.i32_at(a.positions, a.items)
        width = (a.heads + 2 * a.kv_heads) * head_dim
        for token in items(address, a.items):
            position = positions[token]
            row = a.table + (slots[token] * a.stride + position // a.block_size) * 4
            block, offset = np.int64(raw.i32_at(row, 1)[0]), position % a.block_size
            cos, sin = a.cos + token * middle * 4, a.sin + token * middle * 4
            q_factor = k_factor = np.float32(0)
            if a.all_heads != 0:
                source = a.qkv + token * width * SIZE
                q_factor = row_factor(source, a.heads * head_dim, a.eps, HALF)
                k_factor = row_factor(source + a.heads * head_dim * SIZE, a.kv_heads * head_dim, a.eps, HALF)
            for head in range(a.heads + 2 * a.kv_heads):
                source = a.qkv + (token * width + head * head_dim) * SIZE
                for d in range(head_dim):
                    plain[d] = simd.load1(source + d * SIZE, HALF)
                if head >= a.heads + a.kv_heads:
                    h = head - a.heads - a.kv_heads
                    target = a.values + (((block * a.kv_heads + h) * a.block_size + offset) * dim) * CSIZE
                    for d in range(dim):
                        simd.store1(target + d * CSIZE, plain[d], CHALF)
                    continue
                weight = a.q_norm if head < a.heads else a.k_norm
                if a.all_heads != 0:
                    factor = q_factor if head < a.heads else k_factor
                    weight += (head if head < a.heads else head - a.heads) * head_dim * 4
                    for d in range(head_dim):
                        plain[d] = plain[d] * factor * simd.load_f32(weight + d * 4)
                elif weight != 0:
                    total = simd.splat(np.float32(0))
                    for d in range(0, dim, 16):
                        value = simd.load_f32x16(start + d * 4)
                        total = simd.fma(value, value, total)
                    factor = np.float32(1) / np.sqrt(simd.reduce_add(total) / np.float32(head_dim) + a.eps)
                    for d in range(head_dim):
                        plain[d] = plain[d] * factor * simd.load_f32(weight + d * 4)
                for d in range(middle):
                    c, s = simd.load_f32(cos + d * 4), simd.load_f32(sin + d * 4)
                    turned[d] = plain[d] * c - plain[d + middle] * s
                    turned[d + middle] = plain[d + middle] * c + plain[d] * s
                if head < a.heads:
                    target = a.queries + (token * a.heads + head) * dim * 4
                    for d in range(dim):
                        simd.store_f32(target + d * 4, turned[d] * a.scale)
                else:
                    h = head - a.heads
                    target = a.keys + ((block * a.kv_heads + h) * dim * a.lanes + offset) * CSIZE
                    for d in range(dim):
                        simd.store1(target + d * a.lanes * CSIZE, turned[d], CHALF)
        raw.release(start)

    return Kernel(write, WRITE, cost=8)


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
def _score_four(a, q0, q1, q2, q3, block, at, stride, rows, HALF):  # type: ignore[no-untyped-def]
    """Compute what `_score` does for three or four query rows. Needs 32 registers."""
    SIZE, zero = 2 if HALF else 4, simd.splat(np.float32(0))
    for lane in range(0, a.lanes, 16):
        even0, odd0, even1, odd1 = zero, zero, zero, zero
        even2, odd2, even3, odd3 = zero, zero, zero, zero
        k = block + lane * SIZE
        for d in range(0, a.dim * 4, 8):
            key = simd.load16(k, HALF)
            even0 = simd.fma(simd.splat(simd.load_f32(q0 + d)), key, even0)
            even1 = simd.fma(simd.splat(simd.load_f32(q1 + d)), key, even1)
            even2 = simd.fma(simd.splat(simd.load_f32(q2 + d)), key, even2)
            even3 = simd.fma(simd.splat(simd.load_f32(q3 + d)), key, even3)
            key = simd.load16(k + a.lanes * SIZE, HALF)
            odd0 = simd.fma(simd.splat(simd.load_f32(q0 + d + 4)), key, odd0)
            odd1 = simd.fma(simd.splat(simd.load_f32(q1 + d + 4)), key, odd1)
            odd2 = simd.fma(simd.splat(simd.load_f32(q2 + d + 4)), key, odd2)
            odd3 = simd.fma(simd.splat(simd.load_f32(q3 + d + 4)), key, odd3)
            k += 2 * a.lanes * SIZE
        simd.store_f32x16(at + lane * 4, simd.add(even0, odd0))
        simd.store_f32x16(at + lane * 4 + stride, simd.add(even1, odd1))
        simd.store_f32x16(at + lane * 4 + 2 * stride, simd.add(even2, odd2))
        if rows > 3:
            simd.store_f32x16(at + lane * 4 + 3 * stride, simd.add(even3, odd3))


@njit(inline="always")
def _softmax(row, size, sink):  # type: ignore[no-untyped-def]
    """Turn scores into weights, in place; return the inverse of their sum, to which the score `sink` belongs."""
    most = simd.maximum(simd.load_f32x16(row), simd.splat(sink))
    for j in range(16, size, 16):
        most = simd.maximum(simd.load_f32x16(row + j * 4), most)
    greatest = simd.reduce_max(most)
    top, total = simd.splat(-greatest), simd.splat(np.float32(0))
    for j in range(0, size, 16):
        weight = simd.exp(simd.add(simd.load_f32x16(row + j * 4), top))
        total = simd.add(total, weight)
        simd.store_f32x16(row + j * 4, weight)
    rest = np.exp(sink - greatest) if sink > -np.inf else np.float32(0)
    return np.float32(1) / (simd.reduce_add(total) + rest)


@njit(inline="always")
def _weights(a, row, low, high, sink):  # type: ignore[no-untyped-def]
    """Turn the scores of the blocks with positions low .. high - 1 into weights, those of other positions into zeros.
    Return the inverse of their sum."""
    start, size = low // a.block_size, ((high - 1) // a.block_size + 1 - low // a.block_size) * a.lanes
    for j in range(low - start * a.block_size):
        simd.store_f32(row + j * 4, np.float32(-np.inf))
    for j in range(size // a.lanes - 1):
        for lane in range(a.block_size, a.lanes):
            simd.store_f32(row + (j * a.lanes + lane) * 4, np.float32(-np.inf))
    for j in range(size - a.lanes + (high - 1) % a.block_size + 1, size):
        simd.store_f32(row + j * 4, np.float32(-np.inf))
    return _softmax(row, size, sink)


@njit(inline="always")
def _average_four(a, head, table, row, stride, last, high, d, sums, HALF):  # type: ignore[no-untyped-def]
    """Store the weighted sums of the values at positions 0 .. high - 1, dimensions d .. d + 63, of rows 0 .. `last`, at
    most four. Each value is read once for all of them. Needs 32 registers."""
    SIZE, zero, size = 2 if HALF else 4, simd.splat(np.float32(0)), a.block_size
    a0, a1, a2, a3, b0, b1, b2, b3 = zero, zero, zero, zero, zero, zero, zero, zero
    c0, c1, c2, c3, d0, d1, d2, d3 = zero, zero, zero, zero, zero, zero, zero, zero
    second, third, fourth = min(1, last) * stride, min(2, last) * stride, min(3, last) * stride
    for b in range((high - 1) // size + 1):
        v = a.values + ((table[b] * a.kv_heads + head) * size * a.dim + d) * SIZE
        weight = row + b * a.lanes * 4
        for _ in range(min(high - b * size, size)):
            v0, v1 = simd.load16(v, HALF), simd.load16(v + 16 * SIZE, HALF)
            v2, v3 = simd.load16(v + 32 * SIZE, HALF), simd.load16(v + 48 * SIZE, HALF)
            p = simd.splat(simd.load_f32(weight))
            a0, a1, a2, a3 = (simd.fma(p, v0, a0), simd.fma(p, v1, a1), simd.fma(p, v2, a2), simd.fma(p, v3, a3))
            p = simd.splat(simd.load_f32(weight + second))
            b0, b1, b2, b3 = (simd.fma(p, v0, b0), simd.fma(p, v1, b1), simd.fma(p, v2, b2), simd.fma(p, v3, b3))
            p = simd.splat(simd.load_f32(weight + third))
            c0, c1, c2, c3 = (simd.fma(p, v0, c0), simd.fma(p, v1, c1), simd.fma(p, v2, c2), simd.fma(p, v3, c3))
            p = simd.splat(simd.load_f32(weight + fourth))
            d0, d1, d2, d3 = (simd.fma(p, v0, d0), simd.fma(p, v1, d1), simd.fma(p, v2, d2), simd.fma(p, v3, d3))
            v += a.dim * SIZE
            weight += 4
    _store_four(sums, a0, a1, a2, a3)
    _store_four(sums + 256, b0, b1, b2, b3)
    _store_four(sums + 512, c0, c1, c2, c3)
    _store_four(sums + 768, d0, d1, d2, d3)


@njit(inline="always")
def _store_four(at, o0, o1, o2, o3):  # type: ignore[no-untyped-def]
    simd.store_f32x16(at, o0)
    simd.store_f32x16(at + 64, o1)
    simd.store_f32x16(at + 128, o2)
    simd.store_f32x16(at + 192, o3)


@njit(inline="always")
def _average(a, head, table, row, low, high, d, wide, o0, o1, o2, o3, HALF):  # type: ignore[no-untyped-def]
    """Add the weighted sum of the values at positions low .. high - 1, dimensions d .. d + 63 (or 15).
    `row`: weights of the block of position `low`"""
    SIZE = 2 if HALF else 4
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
    WIDE = simd.WIDE

    def attend(address):  # type: ignore[no-untyped-def]
        a = carray(raw.pointer(address), 1, ATTEND)[0]
        lanes, block_size, group = a.lanes, a.block_size, a.heads // a.kv_heads
        tiles = raw.i32_at(a.tiles, a.items // a.kv_heads * 4)
        most = 0
        for tile in range(a.items // a.kv_heads):
            first, count = np.int64(tiles[tile * 4 + 1]), np.int64(tiles[tile * 4 + 3])
            begin, end = _blocks(first, count, a.window, block_size)
            most = max(most, count * group * (end - begin) * lanes)
        scores = raw.allocate((most + 16 + 4 * 64 + 4) * 4)
        spare, zero = scores + most * 4, simd.splat(np.float32(0))
        sums = spare + 16 * 4
        inverses = sums + 4 * 64 * 4
        for item in items(address, a.items):
            tile, head = item // a.kv_heads, item % a.kv_heads
            slot, first = np.int64(tiles[tile * 4]), np.int64(tiles[tile * 4 + 1])
            token, count = np.int64(tiles[tile * 4 + 2]), np.int64(tiles[tile * 4 + 3])
            table = raw.i32_at(a.table + slot * a.stride * 4, a.stride)
            # row r of the tile is head r % group of query r // group
            rows, row_size = count * group, a.dim * 4
            queries = a.queries + (token * a.heads + head * group) * row_size
            begin, end = _blocks(first, count, a.window, block_size)
            stride = (end - begin) * lanes * 4

            for b in range(begin, end):
                block = a.keys + (table[b] * a.kv_heads + head) * a.dim * lanes * CSIZE
                ahead = np.int64(table[min(b + AHEAD, end - 1)])
                raw.prefetch(a.keys + (ahead * a.kv_heads + head) * a.dim * lanes * CSIZE, a.dim * lanes * CSIZE)
                raw.prefetch(
                    a.values + (table[b] * a.kv_heads + head) * block_size * a.dim * CSIZE, block_size * a.dim * CSIZE
                )
                r = max(0, b * block_size - first) * group  # earlier queries read no key of this block
                while WIDE and r + 2 < rows:
                    at = scores + r * stride + (b - begin) * lanes * 4
                    s = min(r + 3, rows - 1)
                    _score_four(
                        a,
                        queries + (r // group * a.heads + r % group) * row_size,
                        queries + ((r + 1) // group * a.heads + (r + 1) % group) * row_size,
                        queries + ((r + 2) // group * a.heads + (r + 2) % group) * row_size,
                        queries + (s // group * a.heads + s % group) * row_size,
                        block,
                        at,
                        stride,
                        rows - r,
                        CHALF,
                    )
                    r += 4
                while r < rows:
                    s = min(r + 1, rows - 1)
                    q0 = queries + (r // group * a.heads + r % group) * row_size
                    q1 = queries + (s // group * a.heads + s % group) * row_size
                    _score(a, q0, q1, block, scores + r * stride + (b - begin) * lanes * 4, (s - r) * stride, CHALF)
                    r += 2

            r = 0
            while r < rows:
                # A group's rows share the positions that the first of them reads, unless a window hides some.
                shared, last = first + r // group + 1, min(r + 3, rows - 1)
                is_shared = WIDE and last > r and (not a.window or first + last // group + 1 <= a.window)
                last = last if is_shared else r
                for s in range(r, last + 1):
                    high = first + s // group + 1
                    low = max(0, high - a.window) if a.window else 0
                    row = scores + s * stride + (low // block_size - begin) * lanes * 4
                    sink = np.float32(-np.inf)
                    if a.sinks != 0:
                        sink = simd.load_f32(a.sinks + (head * group + s % group) * 4)
                    simd.store_f32(inverses + (s - r) * 4, _weights(a, row, low, high, sink))
                for d in range(0, a.head_dim, 64):
                    wide = d + 64 <= a.head_dim
                    if wide and is_shared:
                        at = scores + r * stride
                        _average_four(a, head, table, at, stride, last - r, shared, d, sums, CHALF)
                    for s in range(r, last + 1):
                        high = first + s // group + 1
                        low = max(0, high - a.window) if a.window else 0
                        row = scores + s * stride + (low // block_size - begin) * lanes * 4
                        inverse = simd.splat(simd.load_f32(inverses + (s - r) * 4))
                        place = ((token + s // group) * a.heads + head * group + s % group) * a.head_dim + d
                        out = a.out + place * SIZE
                        if wide:
                            o0, o1, o2, o3 = zero, zero, zero, zero
                            if is_shared:
                                at = sums + (s - r) * 256
                                o0, o1 = simd.load_f32x16(at), simd.load_f32x16(at + 64)
                                o2, o3 = simd.load_f32x16(at + 128), simd.load_f32x16(at + 192)
                                low, row = shared, row + shared // block_size * lanes * 4
                            o0, o1, o2, o3 = _average(a, head, table, row, low, high, d, True, o0, o1, o2, o3, CHALF)
                            simd.store16(out, simd.mul(o0, inverse), HALF)
                            simd.store16(out + 16 * SIZE, simd.mul(o1, inverse), HALF)
                            simd.store16(out + 32 * SIZE, simd.mul(o2, inverse), HALF)
                            simd.store16(out + 48 * SIZE, simd.mul(o3, inverse), HALF)
                            continue
                        for e in range(0, a.head_dim - d, 16):
                            o0, o1, o2, o3 = _average(
                                a, head, table, row, low, high, d + e, False, zero, zero, zero, zero, CHALF
                            )
                            simd.store_f32x16(spare, simd.mul(o0, inverse))
                            for j in range(min(16, a.head_dim - d - e)):
                                simd.store1(out + (e + j) * SIZE, simd.load_f32(spare + j * 4), HALF)
                r = last + 1
        raw.release(scores)

    return Kernel(attend, ATTEND, cost=2)
