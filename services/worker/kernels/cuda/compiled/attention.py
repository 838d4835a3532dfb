# mypy: disable-error-code="no-untyped-def"
"""Paged attention: tiles of queries over the blocks of their slot.

A program computes some query heads that share a KV head, for some tokens of a tile. Its rows are the pairs of token and
query head, so a decode row of grouped queries reads its keys once. With few tiles the keys of a tile are divided among
several programs, and a second kernel adds their parts.
"""

import triton
import triton.language as tl


@triton.jit
def attention_kernel(
    queries,  # activations[tokens, heads, head_dim], rotated
    keys,  # [blocks, kv_heads, block_size, head_dim], one layer
    values,
    table,  # int32[slots, blocks]
    tiles,  # int32[tiles, 4]
    out,  # activations[tokens, heads, head_dim]
    parts,  # float32[tiles, kv_heads, splits, rows, head_dim]; used with splits > 1
    maxima,  # float32[tiles, kv_heads, splits, rows]
    sums,  # float32[tiles, kv_heads, splits, rows]
    sinks,  # float32[heads], read if `has_sinks`
    scale,  # float32: factor of the scores, log2(e) included
    table_stride,
    kv_heads,
    least,  # tiles of fewer or more tokens belong to another launch
    most,
    group: tl.constexpr,  # query heads of a KV head
    head_dim: tl.constexpr,
    width: tl.constexpr,  # head_dim, padded
    block_size: tl.constexpr,
    window: tl.constexpr,  # 0: all keys
    has_sinks: tl.constexpr,
    rows: tl.constexpr,  # pairs of token and query head in a program
    programs: tl.constexpr,  # programs of a tile and KV head, side by side
    keys_at_once: tl.constexpr,
    splits: tl.constexpr,
):
    tile = tl.program_id(0) // programs
    first_row = (tl.program_id(0) % programs) * rows
    kv_head, split = tl.program_id(1), tl.program_id(2)
    count = tl.load(tiles + tile * 4 + 3)
    if (count < least) | (count > most) | (first_row >= count * group):
        return
    slot = tl.load(tiles + tile * 4).to(tl.int64)
    position = tl.load(tiles + tile * 4 + 1)
    token = tl.load(tiles + tile * 4 + 2)

    row = first_row + tl.arange(0, rows)
    offset, dim = row // group, tl.arange(0, width)
    head = kv_head * group + row % group
    at = ((token + offset).to(tl.int64) * kv_heads * group + head) * head_dim
    real = (offset < count)[:, None] & (dim < head_dim)[None, :]
    query = tl.load(queries + at[:, None] + dim[None, :], mask=real, other=0.0)
    where = position + offset

    end = position + tl.minimum(count, (first_row + rows - 1) // group + 1)
    begin = tl.maximum(position + first_row // group - window + 1, 0) if window > 0 else 0
    if splits > 1:
        span = tl.cdiv(tl.cdiv(end - begin, splits), keys_at_once) * keys_at_once
        begin += split * span
        end = tl.minimum(end, begin + span)

    greatest = tl.full([rows], float("-inf"), tl.float32)
    total = tl.zeros([rows], tl.float32)
    if has_sinks:  # the first part has a score without a key
        greatest = tl.load(sinks + head) * 1.4426950408889634
        total += 1.0
        if splits > 1:
            total = tl.where(split == 0, total, 0.0)
            greatest = tl.where(split == 0, greatest, float("-inf"))
    mixed = tl.zeros([rows, width], tl.float32)
    for first in range(begin, end, keys_at_once):
        key_at = first + tl.arange(0, keys_at_once)
        inside = key_at < end
        block = tl.load(table + slot * table_stride + key_at // block_size, mask=inside, other=0)
        base = (block.to(tl.int64) * kv_heads + kv_head) * block_size + key_at % block_size
        exists = inside[:, None] & (dim < head_dim)[None, :]
        place = base[:, None] * head_dim + dim[None, :]
        key = tl.load(keys + place, mask=exists, other=0.0)
        value = tl.load(values + place, mask=exists, other=0.0)
        scores = tl.dot(query, tl.trans(key).to(query.dtype), input_precision="ieee") * scale
        seen = inside[None, :] & (key_at[None, :] <= where[:, None])
        if window > 0:
            seen = seen & (key_at[None, :] > where[:, None] - window)
        scores = tl.where(seen, scores, float("-inf"))
        highest = tl.maximum(greatest, tl.max(scores, 1))
        # A row of which no key was seen yet has no maximum.
        shift = tl.where(highest == float("-inf"), 0.0, highest)
        weights, factor = tl.exp2(scores - shift[:, None]), tl.exp2(greatest - shift)
        total = total * factor + tl.sum(weights, 1)
        mixed = tl.dot(weights.to(value.dtype), value, mixed * factor[:, None], input_precision="ieee")
        greatest = highest

    if splits == 1:
        result = mixed / tl.where(total > 0, total, 1.0)[:, None]
        tl.store(out + at[:, None] + dim[None, :], result.to(out.dtype.element_ty), mask=real)
    else:
        part = ((tile * kv_heads + kv_head) * splits + split) * rows + tl.arange(0, rows)
        tl.store(maxima + part, greatest)
        tl.store(sums + part, total)
        tl.store(parts + part[:, None] * head_dim + dim[None, :], mixed, mask=real)


@triton.jit
def merge_kernel(
    parts,  # as `attention_kernel` wrote them
    maxima,
    sums,
    tiles,
    out,
    kv_heads,
    most,
    group: tl.constexpr,
    head_dim: tl.constexpr,
    width: tl.constexpr,
    rows: tl.constexpr,
    splits: tl.constexpr,
):
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    count, token = tl.load(tiles + tile * 4 + 3), tl.load(tiles + tile * 4 + 2)
    if (count < 1) | (count > most):
        return
    row, dim = tl.arange(0, rows), tl.arange(0, width)
    real = (row // group < count)[:, None] & (dim < head_dim)[None, :]
    greatest = tl.full([rows], float("-inf"), tl.float32)
    total = tl.zeros([rows], tl.float32)
    mixed = tl.zeros([rows, width], tl.float32)
    for split in range(splits):
        part = ((tile * kv_heads + kv_head) * splits + split) * rows + row
        maximum = tl.load(maxima + part)
        highest = tl.maximum(greatest, maximum)
        shift = tl.where(highest == float("-inf"), 0.0, highest)
        before, here = tl.exp2(greatest - shift), tl.exp2(maximum - shift)
        own = tl.load(parts + part[:, None] * head_dim + dim[None, :], mask=real, other=0.0)
        total = total * before + tl.load(sums + part) * here
        mixed = mixed * before[:, None] + own * here[:, None]
        greatest = highest
    result = mixed / tl.where(total > 0, total, 1.0)[:, None]
    head = kv_head * group + row % group
    at = ((token + row // group).to(tl.int64) * kv_heads * group + head) * head_dim
    tl.store(out + at[:, None] + dim[None, :], result.to(out.dtype.element_ty), mask=real)
