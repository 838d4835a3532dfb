"""Attention over the paged KV cache in place: rotary positions and cache writes, then scores, softmax and values.

The keys of a block are transposed, [head_dim, block_size], so that sixteen scores are one vector and no sum runs across
lanes; the values are [block_size, head_dim]. The dimension along a vector is padded to a multiple of sixteen.

The sums of a query run over its keys in the order of their positions, block after block. Its result therefore has the
same bits alone, in any batch and in a chunk of any size (batch invariance, docs/invariants.md). Each layer runs two
kernels, one after the other, so the keys of all rows are written before any query reads them (write before read).
"""

from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import carray, njit
from numba.core import cgutils, types

from services.worker.kernels.cpu.compiled import raw, simd
from services.worker.kernels.cpu.compiled.building import for_each_size, load, moved, store, times
from services.worker.kernels.cpu.compiled.intrinsics import CONSTANT, emits
from services.worker.kernels.cpu.compiled.norm_and_gate import row_factor
from services.worker.kernels.cpu.compiled.simd import F32, I32, I64, VF, spread
from services.worker.kernels.cpu.thread_team import ADDRESS, Kernel, arguments, items

TILE = 8
"""Number of queries of one request that read a key block while it is in the innermost cache."""
SCORED, AVERAGED = (4, 4) if simd.WIDE else (2, 1)
"""Queries whose scores, and whose results, are computed together: as many as the registers hold."""
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
    ("queries", ADDRESS),  # float32[kv_heads, most_tokens, heads / kv_heads, dim], rotated and scaled, padding zero
    ("most_tokens", np.int64),
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


def write_kernel(half: bool, half_cache: bool, paired: bool = False) -> Kernel:
    """Normalise and rotate queries and keys; write keys and values to the cache. One item is one token.

    Args:
        paired: the layout of the cache is that of `tile_attention`
    """
    PAIR = 2 if paired else 1
    HALF, SIZE, CHALF, CSIZE = int(half), 2 if half else 4, int(half_cache), 2 if half_cache else 4

    def write(address):  # type: ignore[no-untyped-def]
        a = carray(raw.pointer(address), 1, WRITE)[0]
        head_dim, dim, middle, group = a.head_dim, a.dim, a.head_dim // 2, a.heads // a.kv_heads
        start = raw.allocate(2 * dim * 4)
        plain, turned = raw.f32_at(start, dim), raw.f32_at(start + dim * 4, dim)
        plain[:], turned[:] = 0, 0
        slots, positions = raw.i32_at(a.slots, a.items), raw.i32_at(a.positions, a.items)
        width = (a.heads + 2 * a.kv_heads) * head_dim
        for token in items(address, a.items):
            position = positions[token]
            entry = a.table + (slots[token] * a.stride + position // a.block_size) * 4
            block, offset = np.int64(raw.i32_at(entry, 1)[0]), position % a.block_size
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
                    row = (block * a.kv_heads + h) * a.block_size + offset - offset % PAIR
                    target = a.values + (row * dim + offset % PAIR) * CSIZE
                    for d in range(dim):
                        simd.store1(target + d * PAIR * CSIZE, plain[d], CHALF)
                    continue
                weight = a.q_norm if head < a.heads else a.k_norm
                if weight != 0:
                    factor = q_factor if head < a.heads else k_factor
                    if a.all_heads != 0:
                        weight += (head if head < a.heads else head - a.heads) * head_dim * 4
                    else:
                        factor = row_factor(start, head_dim, a.eps, 0)
                    for d in range(head_dim):
                        plain[d] = plain[d] * factor * simd.load_f32(weight + d * 4)
                for d in range(middle):
                    c, s = simd.load_f32(cos + d * 4), simd.load_f32(sin + d * 4)
                    turned[d] = plain[d] * c - plain[d + middle] * s
                    turned[d + middle] = plain[d + middle] * c + plain[d] * s
                if head < a.heads:
                    row = (head // group * a.most_tokens + token) * group + head % group
                    target = a.queries + row * dim * 4
                    for d in range(dim):
                        simd.store_f32(target + d * 4, turned[d] * a.scale)
                else:
                    h = head - a.heads
                    target = a.keys + ((block * a.kv_heads + h) * dim * a.lanes + offset * PAIR) * CSIZE
                    for d in range(dim):
                        simd.store1(target + ((d - d % PAIR) * a.lanes + d % PAIR) * CSIZE, turned[d], CHALF)
        raw.release(start)

    return Kernel(write, WRITE, cost=8)


@njit(inline="always")
def blocks_read(first, count, window, block_size):  # type: ignore[no-untyped-def]
    """Return the blocks that `count` queries from position `first` on read: the first one, and one after the last."""
    begin = max(0, first - window + 1) // block_size if window else 0
    return begin, (first + count - 1) // block_size + 1


@emits(types.void, CONSTANT, *(types.int64,) * 7)
def _score(
    builder: Any, half: int, rows: Any, queries: Any, block: Any, dim: Any, lanes: Any, at: Any, stride: Any
) -> None:
    """Compute the scores of `rows` queries, up to `SCORED`, with one block of keys, each of which is read once.

    Args:
        half: the cache is bfloat16
        queries: address of the first one, float32[rows, dim]
        block: address of the keys
        at: address of the first query's scores
        stride: bytes from them to those of the next query
    """

    def score(rows: int) -> None:
        sums = [[cgutils.alloca_once(builder, VF) for _ in ("even", "odd")] for _ in range(rows)]
        starts = [builder.add(queries, times(builder, dim, 4 * row)) for row in range(rows)]
        with cgutils.for_range(builder, builder.udiv(lanes, ir.Constant(I64, 16))) as outer:
            for both in sums:
                for place in both:
                    builder.store(ir.Constant(VF, None), place)
            with cgutils.for_range(builder, builder.udiv(dim, ir.Constant(I64, 2))) as loop:
                for number in range(2):
                    d = moved(builder, times(builder, loop.index, 2), number)
                    key_at = builder.add(times(builder, outer.index, 16), builder.mul(d, lanes))
                    key = simd.build_load(
                        builder, builder.add(block, times(builder, key_at, 2 if half else 4)), VF, half
                    )
                    for start, both in zip(starts, sums, strict=True):
                        query = load(builder, builder.add(start, times(builder, d, 4)), F32, 4)
                        total = simd.build_fma(builder, spread(builder, query, VF), key, builder.load(both[number]))
                        builder.store(total, both[number])
            for row, both in enumerate(sums):
                to = builder.add(builder.add(at, times(builder, stride, row)), times(builder, outer.index, 64))
                store(builder, builder.fadd(*map(builder.load, both)), to, 4)

    for_each_size(builder, rows, range(1, SCORED + 1), score)


@njit(inline="always")
def _weights(a, row, low, high, sink):  # type: ignore[no-untyped-def]
    """Turn the scores of the blocks with positions low .. high - 1 into weights, those of other positions into zeros.
    Return the inverse of their sum, to which the score `sink` belongs."""
    start, size = low // a.block_size, ((high - 1) // a.block_size + 1 - low // a.block_size) * a.lanes
    for j in range(low - start * a.block_size):
        simd.store_f32(row + j * 4, np.float32(-np.inf))
    for j in range(size // a.lanes - 1):
        for lane in range(a.block_size, a.lanes):
            simd.store_f32(row + (j * a.lanes + lane) * 4, np.float32(-np.inf))
    for j in range(size - a.lanes + (high - 1) % a.block_size + 1, size):
        simd.store_f32(row + j * 4, np.float32(-np.inf))
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


@emits(types.void, CONSTANT, *(types.int64,) * 13)
def _average(
    builder: Any, half: int, rows: Any, vectors: Any, values: Any, table: Any, block_bytes: Any, size: Any, dim: Any,
    weights: Any, stride: Any, lanes: Any, low: Any, high: Any, sums: Any
) -> None:  # fmt: skip
    """Add the weighted sums of the values at positions low .. high - 1, each of which is read once for all rows.

    Args:
        half: the cache is bfloat16
        rows: of weights, up to `AVERAGED`
        vectors: 1 or 4; sixteen dimensions each
        values: address of the first dimension in block 0
        table: address of the slot's blocks
        block_bytes: from one block to the next
        size: positions of a block
        weights: address of the first row's weights of the block of position `low`
        stride: bytes from them to those of the next row
        lanes: weights of a block
        sums: address of float32[rows, vectors, 16]
    """
    bytes_ = 2 if half else 4

    def average(rows: int, vectors: int) -> None:
        places = [cgutils.alloca_once(builder, VF) for _ in range(rows * vectors)]
        for number, place in enumerate(places):
            builder.store(load(builder, moved(builder, sums, 64 * number), VF, 4), place)
        start, zero = builder.udiv(low, size), ir.Constant(I64, 0)
        after = moved(builder, builder.udiv(moved(builder, high, -1), size), 1)
        with cgutils.for_range(builder, builder.sub(after, start)) as outer:
            entry = builder.add(start, outer.index)
            found = builder.sext(load(builder, builder.add(table, times(builder, entry, 4)), I32, 4), I64)
            block, first = builder.add(values, builder.mul(found, block_bytes)), builder.mul(entry, size)
            begin, end = builder.sub(low, first), builder.sub(high, first)
            begin = builder.select(builder.icmp_signed(">", begin, zero), begin, zero)
            end = builder.select(builder.icmp_signed("<", end, size), end, size)
            with cgutils.for_range(builder, builder.sub(end, begin)) as loop:
                j = builder.add(begin, loop.index)
                value_at = builder.add(block, times(builder, builder.mul(j, dim), bytes_))
                lanes_at = [moved(builder, value_at, 16 * bytes_ * number) for number in range(vectors)]
                loaded = [simd.build_load(builder, at, VF, half) for at in lanes_at]
                weight_at = builder.add(weights, times(builder, builder.add(builder.mul(outer.index, lanes), j), 4))
                weights_at = [builder.add(weight_at, times(builder, stride, row)) for row in range(rows)]
                factors = [spread(builder, load(builder, at, F32, 4), VF) for at in weights_at]
                for number, place in enumerate(places):
                    factor, value = factors[number // vectors], loaded[number % vectors]
                    builder.store(simd.build_fma(builder, factor, value, builder.load(place)), place)
        for number, place in enumerate(places):
            store(builder, builder.load(place), moved(builder, sums, 64 * number), 4)

    def of_rows(rows: int) -> None:
        for_each_size(builder, vectors, (1, 4), lambda number: average(rows, number))

    for_each_size(builder, rows, range(1, AVERAGED + 1), of_rows)


def attention_kernel(half: bool, half_cache: bool) -> Kernel:
    """softmax(queries keys) values. One item is one KV head of one tile of queries, with the heads of its group."""
    HALF, SIZE, CHALF, CSIZE = int(half), 2 if half else 4, int(half_cache), 2 if half_cache else 4

    def attend(address):  # type: ignore[no-untyped-def]
        a = carray(raw.pointer(address), 1, ATTEND)[0]
        lanes, block_size, group = a.lanes, a.block_size, a.heads // a.kv_heads
        tiles = raw.i32_at(a.tiles, a.items // a.kv_heads * 4)
        most = 0
        for tile in range(a.items // a.kv_heads):
            first, count = np.int64(tiles[tile * 4 + 1]), np.int64(tiles[tile * 4 + 3])
            begin, end = blocks_read(first, count, a.window, block_size)
            most = max(most, count * group * (end - begin) * lanes)
        scores = raw.allocate((most + 16 + 4 * 64 + 4) * 4)
        spare = scores + most * 4
        sums = spare + 16 * 4
        inverses = sums + 4 * 64 * 4
        for item in items(address, a.items):
            tile, head = item // a.kv_heads, item % a.kv_heads
            slot, first = np.int64(tiles[tile * 4]), np.int64(tiles[tile * 4 + 1])
            token, count = np.int64(tiles[tile * 4 + 2]), np.int64(tiles[tile * 4 + 3])
            table = a.table + slot * a.stride * 4
            # row r of the tile is head r % group of query r // group
            rows, queries = count * group, a.queries + (head * a.most_tokens + token) * group * a.dim * 4
            begin, end = blocks_read(first, count, a.window, block_size)
            stride = (end - begin) * lanes * 4

            for b in range(begin, end):
                blocks = raw.i32_at(table, end)
                block = a.keys + (blocks[b] * a.kv_heads + head) * a.dim * lanes * CSIZE
                ahead = np.int64(blocks[min(b + AHEAD, end - 1)])
                raw.prefetch(a.keys + (ahead * a.kv_heads + head) * a.dim * lanes * CSIZE, a.dim * lanes * CSIZE)
                raw.prefetch(
                    a.values + (blocks[b] * a.kv_heads + head) * block_size * a.dim * CSIZE, block_size * a.dim * CSIZE
                )
                # Earlier queries read no key of this block
                for r in range(max(0, b * block_size - first) * group, rows, SCORED):
                    at = scores + r * stride + (b - begin) * lanes * 4
                    _score(CHALF, min(SCORED, rows - r), queries + r * a.dim * 4, block, a.dim, lanes, at, stride)

            values, block_bytes = a.values + head * block_size * a.dim * CSIZE, a.kv_heads * block_size * a.dim * CSIZE
            r = 0
            while r < rows:
                # A group's rows share the positions that the first of them reads, unless a window hides some.
                shared, last = first + r // group + 1, min(r + AVERAGED, rows) - 1
                if a.window and first + last // group + 1 > a.window:
                    last = r
                for s in range(r, last + 1):
                    high = first + s // group + 1
                    low = max(0, high - a.window) if a.window else 0
                    row = scores + s * stride + (low // block_size - begin) * lanes * 4
                    sink = np.float32(-np.inf)
                    if a.sinks != 0:
                        sink = simd.load_f32(a.sinks + (head * group + s % group) * 4)
                    simd.store_f32(inverses + (s - r) * 4, _weights(a, row, low, high, sink))
                low, d = max(0, shared - a.window) if a.window else 0, 0
                while d < a.dim:
                    vectors = 4 if d + 64 <= a.dim else 1
                    for number in range(vectors * (last - r + 1)):
                        simd.store_f32x16(sums + number * 64, simd.splat(np.float32(0)))
                    at, here = scores + r * stride - begin * lanes * 4, values + d * CSIZE
                    _average(
                        CHALF, last - r + 1, vectors, here, table, block_bytes, block_size, a.dim,
                        at + low // block_size * lanes * 4, stride, lanes, low, shared, sums,
                    )  # fmt: skip
                    for s in range(r, last + 1):
                        at = scores + s * stride + (shared // block_size - begin) * lanes * 4
                        part = sums + (s - r) * vectors * 64
                        _average(
                            CHALF, 1, vectors, here, table, block_bytes, block_size, a.dim,
                            at, stride, lanes, shared, first + s // group + 1, part,
                        )  # fmt: skip
                        inverse = simd.splat(simd.load_f32(inverses + (s - r) * 4))
                        place = ((token + s // group) * a.heads + head * group + s % group) * a.head_dim
                        for e in range(d, min(d + 16 * vectors, a.head_dim), 16):
                            value = simd.mul(simd.load_f32x16(part + (e - d) * 4), inverse)
                            out = a.out + (place + e) * SIZE
                            if e + 16 <= a.head_dim:
                                simd.store16(out, value, HALF)
                                continue
                            simd.store_f32x16(spare, value)
                            for j in range(a.head_dim - e):
                                simd.store1(out + j * SIZE, simd.load_f32(spare + j * 4), HALF)
                    d += 16 * vectors
                r = last + 1
        raw.release(scores)

    return Kernel(attend, ATTEND, cost=1)
