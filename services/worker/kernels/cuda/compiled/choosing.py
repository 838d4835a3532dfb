# mypy: disable-error-code="no-untyped-def"
"""The greatest logit; or temperature, min-p, top-k, top-p and a draw, without sorting.

Top-k and top-p keep all logits from a smallest value on. The values between the least and the greatest logit are
searched for it: each round compares 16 of them with every logit, so eight rounds find it exactly. A round is a launch
in which several programs share a row. Each of them sums the weights of its own part; the next launch adds the parts up,
in an order that depends on the size of the vocabulary alone.
"""

import triton
import triton.language as tl

from services.worker.kernels.cuda.compiled.noise import gumbel
from services.worker.sampling import reference

_GREEDY_BELOW = tl.constexpr(reference.GREEDY_BELOW)
WAYS, ROUNDS = 16, 8
"""Values that a round compares, and rounds for all values of a float32: `WAYS ** ROUNDS` is 2 ** 32."""
_WAYS = tl.constexpr(WAYS)


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
def least_kernel(
    best,  # float32[rows, parts]: the greatest logit of each part
    temperature,  # float32[rows]
    log_min_p,  # float32[rows]; minus infinity: no filter
    high,  # float32[rows], written: the greatest scaled logit; minus infinity: nothing is searched
    least,  # float32[rows], written: the least scaled logit that min-p keeps
    parts,
    padded: tl.constexpr,  # `parts`, padded
):
    row, part = tl.program_id(0), tl.arange(0, padded)
    degrees = tl.load(temperature + row)
    greatest = tl.load(best + row * parts + part, mask=part < parts, other=float("-inf"))
    top = _scaled(tl.max(greatest, 0), degrees)
    is_greedy = degrees < _GREEDY_BELOW
    tl.store(high + row, tl.where(is_greedy, float("-inf"), top))
    tl.store(least + row, tl.where(is_greedy, float("-inf"), top + tl.load(log_min_p + row)))


@triton.jit
def search_kernel(
    logits,  # float32[rows, vocab]
    temperature,  # float32[rows]
    high,  # float32[rows]
    least,  # float32[rows]
    limit,  # int32[rows], top-k; if `weighs`, float32[rows], top-p
    before,  # int64[rows, 2]: the first and the last value that were searched in the round before
    sums_before,  # float32[rows, parts, ways], of that round
    bounds,  # int64[rows, 2], written: the same of this round; the first behind the last: the row is not searched
    sums,  # float32[rows, parts, ways], written
    totals,  # float32[rows, parts]: if `weighs`, weights of each part, written in the first round
    vocab,
    span,  # tokens of a part, a multiple of `at_once`
    parts,
    begins: tl.constexpr,  # in the first round
    weighs: tl.constexpr,
    padded: tl.constexpr,
    at_once: tl.constexpr,
):
    """A round of the search for the greatest value for which the weights from it up sum to what is wanted. A weight is
    1, or, if `weighs`, the likelihood relative to that of `high`."""
    row, part = tl.program_id(0), tl.program_id(1)
    degrees, top = tl.load(temperature + row), tl.load(high + row)
    low = tl.maximum(tl.load(least + row), top - 87.0)  # weights below e**-87 of the greatest are zero
    if begins:
        some = tl.load(limit + row)
        searched = (some < 1) if weighs else (some > 0) & (some < vocab)
        searched = searched & (top > float("-inf"))
        first, last = tl.where(searched, _ordered(low), 1), tl.where(searched, _ordered(top), 0)
    else:
        first, last = _narrowed(before, sums_before, limit, totals, row, parts, weighs, padded)
    if part == 0:
        tl.store(bounds + 2 * row, first)
        tl.store(bounds + 2 * row + 1, last)
    if first < last:
        source = logits + row.to(tl.int64) * vocab
        lane, way = tl.arange(0, at_once), tl.arange(0, _WAYS)
        bound = _unordered(tl.minimum(first + (way + 1) * _step(first, last), last))
        reached, total = tl.zeros([_WAYS], tl.float32), tl.zeros([at_once], tl.float32)
        for start in range(part * span, tl.minimum(vocab, part * span + span), at_once):
            x = tl.load(source + start + lane, mask=start + lane < vocab, other=float("-inf"))
            x = _scaled(x, degrees)
            weight = tl.exp(x - top) if weighs else tl.where(x > float("-inf"), 1.0, 0.0)
            reached += tl.sum(tl.where(x[None, :] >= bound[:, None], weight[None, :], 0.0), 1)
            total += tl.where(x >= low, weight, 0.0)
        tl.store(sums + (row * parts + part) * _WAYS + way, reached)
        if begins and weighs:
            tl.store(totals + row * parts + part, tl.sum(total, 0))


@triton.jit
def end_search_kernel(
    before,  # as those of `search_kernel`, of the last round
    sums_before,
    limit,
    totals,
    least,  # float32[rows], written where the row was searched
    parts,
    weighs: tl.constexpr,
    padded: tl.constexpr,
):
    row = tl.program_id(0)
    first, last = _narrowed(before, sums_before, limit, totals, row, parts, weighs, padded)
    if first <= last:
        tl.store(least + row, _unordered(first))


@triton.jit
def _narrowed(before, sums, limit, totals, row, parts, weighs: tl.constexpr, padded: tl.constexpr):
    """The first and the last value that remain after a round."""
    first, last = tl.load(before + 2 * row), tl.load(before + 2 * row + 1)
    if first < last:
        part, way = tl.arange(0, padded), tl.arange(0, _WAYS)
        wanted = tl.load(limit + row).to(tl.float32)
        if weighs:
            wanted *= tl.sum(tl.load(totals + row * parts + part, mask=part < parts, other=0.0), 0)
        place = (row * parts + part[:, None]) * _WAYS + way[None, :]
        reached = tl.sum(tl.load(sums + place, mask=part[:, None] < parts, other=0.0), 0)
        step = _step(first, last)
        tried = first + (way + 1) * step
        ways = tl.sum(((reached >= wanted) & (tried <= last)).to(tl.int64), 0)
        first = first + ways * step
        last = tl.minimum(last, first + step - 1)
    return first, last


@triton.jit
def _step(first, last):
    return (last - first) // _WAYS + 1


@triton.jit
def _scaled(x, degrees):
    return tl.div_rn(x, tl.where(degrees < _GREEDY_BELOW, 1.0, degrees))


@triton.jit
def _ordered(value):
    """Map a float32 to an int64, in the same order."""
    bits = value.to(tl.int32, bitcast=True).to(tl.int64)
    return tl.where(bits >= 0, bits, -(bits & 0x7FFFFFFF))


@triton.jit
def _unordered(number):
    bits = tl.where(number >= 0, number, (-number) | 0x80000000)
    return bits.to(tl.int32).to(tl.float32, bitcast=True)
