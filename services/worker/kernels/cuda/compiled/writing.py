# mypy: disable-error-code="no-untyped-def"
"""Norm of heads, rotary positions and writes to the cache, in one pass over queries, keys and values."""

import triton
import triton.language as tl


@triton.jit
def write_kernel(
    qkv,  # activations[tokens, heads + 2 * kv_heads, head_dim]
    cosines,  # float32[tokens, head_dim / 2]
    sines,
    positions,  # int32[tokens]
    slots,  # int32[tokens]; below 0: a padding row, which is not written to the cache
    table,  # int32[slots, blocks]
    query_norm,  # float32[head_dim], or of all heads; read if `normed`
    key_norm,
    queries,  # activations[tokens, heads, head_dim], written
    keys,  # [blocks, kv_heads, block_size, head_dim] of one layer, written
    values,
    eps,
    table_stride,
    heads: tl.constexpr,
    kv_heads: tl.constexpr,
    half: tl.constexpr,  # head_dim / 2
    width: tl.constexpr,  # `half`, padded
    block_size: tl.constexpr,
    normed: tl.constexpr,
    all_heads: tl.constexpr,  # the norms are over all heads of a token, with a weight for each dimension
    at_once: tl.constexpr,  # heads of a program
):
    token = tl.program_id(0).to(tl.int64)
    head, dim = tl.program_id(1) * at_once + tl.arange(0, at_once), tl.arange(0, width)
    inside = (dim < half)[None, :]
    is_query, is_value = (head < heads)[:, None], (head >= heads + kv_heads)[:, None]
    is_key = ((head >= heads) & (head < heads + kv_heads))[:, None]
    exists = inside & (head < heads + 2 * kv_heads)[:, None]
    at = qkv + ((token * (heads + 2 * kv_heads) + head) * 2 * half)[:, None] + dim[None, :]
    first = tl.load(at, mask=exists, other=0.0).to(tl.float32)
    second = tl.load(at + half, mask=exists, other=0.0).to(tl.float32)
    left, right = first, second
    if normed:
        if all_heads:
            start = qkv + token * (heads + 2 * kv_heads) * 2 * half
            queries_square = _mean_square(start, heads * 2 * half)
            keys_square = _mean_square(start + heads * 2 * half, kv_heads * 2 * half)
            squares = tl.where(head < heads, queries_square, keys_square)
            number = tl.where(head < heads, head, tl.minimum(tl.maximum(head - heads, 0), kv_heads - 1))
        else:
            squares = tl.sum(first * first + second * second, 1) / (2 * half)
            number = head * 0
        factor = (1.0 / tl.sqrt(squares + eps))[:, None]
        place = (number * 2 * half)[:, None] + dim[None, :]
        left = first * factor * _weight(query_norm, key_norm, is_query, place, inside)
        right = second * factor * _weight(query_norm + half, key_norm + half, is_query, place, inside)
    angle = token * half + dim
    cosine = tl.load(cosines + angle, mask=dim < half, other=0.0)[None, :]
    sine = tl.load(sines + angle, mask=dim < half, other=0.0)[None, :]
    left, right = left * cosine - right * sine, right * cosine + left * sine
    left, right = tl.where(is_value, first, left), tl.where(is_value, second, right)

    query_at = queries + ((token * heads + head) * 2 * half)[:, None] + dim[None, :]
    tl.store(query_at, left.to(queries.dtype.element_ty), mask=exists & is_query)
    tl.store(query_at + half, right.to(queries.dtype.element_ty), mask=exists & is_query)

    slot, position = tl.load(slots + token).to(tl.int64), tl.load(positions + token)
    block = tl.load(table + slot * table_stride + position // block_size, mask=slot >= 0, other=0)
    kv_head = tl.where(is_value, head[:, None] - heads - kv_heads, head[:, None] - heads)
    row = (block.to(tl.int64) * kv_heads + kv_head) * block_size + position % block_size
    cached = inside & (head < tl.where(slot >= 0, heads + 2 * kv_heads, 0))[:, None]
    place = row * 2 * half + dim[None, :]
    tl.store(keys + place, left.to(keys.dtype.element_ty), mask=cached & is_key)
    tl.store(keys + place + half, right.to(keys.dtype.element_ty), mask=cached & is_key)
    tl.store(values + place, left.to(values.dtype.element_ty), mask=cached & is_value)
    tl.store(values + place + half, right.to(values.dtype.element_ty), mask=cached & is_value)


@triton.jit
def _weight(query_norm, key_norm, is_query, place, inside):
    """float32[heads, width]: the norm's weights of query heads and of key heads."""
    of_queries = tl.load(query_norm + place, mask=inside & is_query, other=0.0)
    of_keys = tl.load(key_norm + place, mask=inside & (is_query == 0), other=0.0)
    return tl.where(is_query, of_queries, of_keys)


@triton.jit
def _mean_square(source, size: tl.constexpr):
    """Return the mean of the squares of `size` numbers."""
    total = tl.zeros([512], tl.float32)
    for begin in range(0, size, 512):
        at = begin + tl.arange(0, 512)
        x = tl.load(source + at, mask=at < size, other=0.0).to(tl.float32)
        total += x * x
    return tl.sum(total, 0) / size
