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
    # The last tiles of a prompt read the most keys: they begin first.
    tile = (tl.num_programs(0) - 1 - tl.program_id(0)) // programs
    first_row = ((tl.num_programs(0) - 1 - tl.program_id(0)) % programs) * rows
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

    blocks = table + slot * table_stride
    greatest = tl.full([rows], float("-inf"), tl.float32)
    total = tl.zeros([rows], tl.float32)
    if has_sinks:  # the first part has a score without a key
        greatest = tl.load(sinks + head) * 1.4426950408889634
        total += 1.0
        if splits > 1:
            total = tl.where(split == 0, total, 0.0)
            greatest = tl.where(split == 0, greatest, float("-inf"))
    mixed = tl.zeros([rows, width], tl.float32)
    # Every row sees the keys before `whole`, which need no mask: a shorter loop, for programs of many rows.
    apart: tl.constexpr = (window == 0) & (rows >= 64)
    whole = begin
    if apart:
        whole += (
            tl.maximum(tl.minimum(position + first_row // group + 1, end) - begin, 0) // keys_at_once * keys_at_once
        )
    for masked in tl.static_range(0 if apart else 1, 2):
        for first in range(whole if masked else begin, end if masked else whole, keys_at_once):
            key_at = first + tl.arange(0, keys_at_once)
            inside = key_at < end
            block = _loaded(blocks + key_at // block_size, inside, masked)
            base = (block.to(tl.int64) * kv_heads + kv_head) * block_size + key_at % block_size
            place = base[:, None] * head_dim + dim[None, :]
            exists = inside[:, None] & (dim < head_dim)[None, :]
            key = _loaded(keys + place, exists, masked | (width > head_dim))
            value = _loaded(values + place, exists, masked | (width > head_dim))
            scores = tl.dot(query, tl.trans(key).to(query.dtype), input_precision="ieee")
            if masked:
                seen = inside[None, :] & (key_at[None, :] <= where[:, None])
                if window > 0:
                    seen = seen & (key_at[None, :] > where[:, None] - window)
                scores = tl.where(seen, scores, float("-inf"))
            highest = tl.maximum(greatest, tl.max(scores, 1) * scale)
            # A row of which no key was seen yet has no maximum.
            shift = tl.where(highest == float("-inf"), 0.0, highest)
            weights, factor = tl.exp2(scores * scale - shift[:, None]), tl.exp2(greatest - shift)
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
def _loaded(at, mask, masked: tl.constexpr):
    if masked:
        return tl.load(at, mask=mask, other=0)
    return tl.load(at)


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
    tile, kv_head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    count, token = tl.load(tiles + tile * 4 + 3), tl.load(tiles + tile * 4 + 2)
    if (row >= count * group) | (count > most):
        return
    dim = tl.arange(0, width)
    part = ((tile * kv_heads + kv_head) * splits + tl.arange(0, splits)) * rows + row
    maximum = tl.load(maxima + part)
    greatest = tl.max(maximum, 0)
    factor = tl.exp2(maximum - tl.where(greatest == float("-inf"), 0.0, greatest))
    total = tl.sum(tl.load(sums + part) * factor, 0)
    place = part[:, None] * head_dim + dim[None, :]
    mixed = tl.load(parts + place, mask=(dim < head_dim)[None, :], other=0.0) * factor[:, None]
    result = tl.sum(mixed, 0) / tl.where(total > 0, total, 1.0)
    at = ((token + row // group).to(tl.int64) * kv_heads * group + kv_head * group + row % group) * head_dim
    tl.store(out + at + dim, result.to(out.dtype.element_ty), mask=dim < head_dim)
