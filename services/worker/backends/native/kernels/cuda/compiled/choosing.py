# mypy: disable-error-code="no-untyped-def"
"""The greatest logit; or temperature, min-p, top-k, top-p and a draw, without sorting.

Top-k and top-p keep all logits from a smallest value on. The values between the least and the greatest logit are
searched for it: each pass over the row compares 16 of them at once, so eight passes find it exactly.
"""

import triton
import triton.language as tl

from services.worker.backends.native.kernels.cuda.compiled.noise import gumbel
from services.worker.sampling import reference

_GREEDY_BELOW = tl.constexpr(reference.GREEDY_BELOW)
_WAYS = tl.constexpr(16)


@triton.jit
def best_parts_kernel(
    logits,  # float32[rows, vocab]
    temperature,  # float32[rows]; this and the next three are read if `draws`
    cutoff,  # float32[rows]: scaled logits below it are not drawn
    key0,  # int32[rows], the noise's keys
    key1,
    best,  # float32[rows, parts], written
    ids,  # int32[rows, parts], written
    vocab,
    span,  # tokens of a part, a multiple of `at_once`
    parts,
    draws: tl.constexpr,
    at_once: tl.constexpr,
):
    """The best token of each part of the vocabulary: the lowest id among equals."""
    row, part = tl.program_id(0), tl.program_id(1)
    lane = tl.arange(0, at_once)
    greatest = tl.full([at_once], float("-inf"), tl.float32)
    which = part * span + lane
    for first in range(part * span, tl.minimum(vocab, part * span + span), at_once):
        token = first + lane
        x = tl.load(logits + row.to(tl.int64) * vocab + token, mask=token < vocab, other=float("-inf"))
        if draws:
            degrees = tl.load(temperature + row)
            x = _scaled(x, degrees)
            noise = gumbel(token, tl.load(key0 + row), tl.load(key1 + row))
            noise = tl.where(degrees < _GREEDY_BELOW, 0.0, noise)
            x = tl.where(x >= tl.load(cutoff + row), x + noise, float("-inf"))
        better = x > greatest
        which, greatest = tl.where(better, token, which), tl.where(better, x, greatest)
    winner = tl.max(greatest, 0)
    tl.store(best + row * parts + part, winner)
    tl.store(ids + row * parts + part, tl.min(tl.where(greatest == winner, which, 0x7FFFFFFF), 0))


@triton.jit
def best_kernel(
    best,  # float32[rows, parts]
    part_ids,  # int32[rows, parts]
    ids,  # int32[rows], written
    parts,
    padded: tl.constexpr,  # `parts`, padded
):
    row, part = tl.program_id(0), tl.arange(0, padded)
    x = tl.load(best + row * parts + part, mask=part < parts, other=float("-inf"))
    token = tl.load(part_ids + row * parts + part, mask=part < parts, other=0x7FFFFFFF)
    tl.store(ids + row, tl.min(tl.where(x == tl.max(x, 0), token, 0x7FFFFFFF), 0))


@triton.jit
def cutoff_kernel(
    logits,  # float32[rows, vocab]
    temperature,  # float32[rows]
    log_min_p,  # float32[rows]; minus infinity: no filter
    top_k,  # int32[rows], 0: all
    top_p,  # float32[rows], 1: all
    cutoff,  # float32[rows], written
    vocab,
    at_once: tl.constexpr,
):
    """The least scaled logit that min-p, top-k and top-p keep. One program is one row."""
    row = tl.program_id(0)
    source, degrees = logits + row.to(tl.int64) * vocab, tl.load(temperature + row)
    lane = tl.arange(0, at_once)
    greatest = tl.full([at_once], float("-inf"), tl.float32)
    for first in range(0, vocab, at_once):
        x = tl.load(source + first + lane, mask=first + lane < vocab, other=float("-inf"))
        greatest = tl.maximum(greatest, _scaled(x, degrees))
    high = tl.max(greatest, 0)
    least = high + tl.load(log_min_p + row)
    limit, share = tl.load(top_k + row), tl.load(top_p + row)
    is_greedy = (degrees < _GREEDY_BELOW) | (high == float("-inf"))
    limited = (limit > 0) & (limit < vocab) & (is_greedy == 0)
    shared = (share < 1) & (is_greedy == 0)
    if limited | shared:
        low = tl.maximum(least, high - 87.0)  # weights below e**-87 of the greatest are zero
        if limited:
            least = _greatest_with(limit.to(tl.float32), source, degrees, low, high, vocab, False, at_once)
            low = least
        if shared:
            total = tl.zeros([at_once], tl.float32)
            for first in range(0, vocab, at_once):
                x = tl.load(source + first + lane, mask=first + lane < vocab, other=float("-inf"))
                x = _scaled(x, degrees)
                total += tl.where(x >= low, tl.exp(x - high), 0.0)
            wanted = share * tl.sum(total, 0)
            least = _greatest_with(wanted, source, degrees, low, high, vocab, True, at_once)
    tl.store(cutoff + row, tl.where(is_greedy, float("-inf"), least))


@triton.jit
def _scaled(x, degrees):
    return tl.div_rn(x, tl.where(degrees < _GREEDY_BELOW, 1.0, degrees))


@triton.jit
def _greatest_with(wanted, source, degrees, low, high, vocab, weighs: tl.constexpr, at_once: tl.constexpr):
    """The greatest value from `low` to `high` for which the weights from it up sum to `wanted`; else `low`. A weight is
    1, or, if `weighs`, the likelihood relative to that of `high`."""
    first, last = _ordered(low), _ordered(high)
    lane, way = tl.arange(0, at_once), tl.arange(0, _WAYS)
    while first < last:
        step = (last - first) // _WAYS + 1
        tried = first + (way + 1) * step
        bound = _unordered(tl.minimum(tried, last))
        sums = tl.zeros([_WAYS], tl.float32)
        for start in range(0, vocab, at_once):
            x = tl.load(source + start + lane, mask=start + lane < vocab, other=float("-inf"))
            x = _scaled(x, degrees)
            weight = tl.exp(x - high) if weighs else tl.where(x > float("-inf"), 1.0, 0.0)
            sums += tl.sum(tl.where(x[None, :] >= bound[:, None], weight[None, :], 0.0), 1)
        reached = tl.sum(((sums >= wanted) & (tried <= last)).to(tl.int64), 0)
        first = first + reached * step
        last = tl.minimum(last, first + step - 1)
    return _unordered(first)


@triton.jit
def _ordered(value):
    """Map a float32 to an int64, in the same order."""
    bits = value.to(tl.int32, bitcast=True).to(tl.int64)
    return tl.where(bits >= 0, bits, -(bits & 0x7FFFFFFF))


@triton.jit
def _unordered(number):
    bits = tl.where(number >= 0, number, (-number) | 0x80000000)
    return bits.to(tl.int32).to(tl.float32, bitcast=True)
