# mypy: disable-error-code="no-untyped-def"
"""The greatest logit; or temperature, min-p, top-k, top-p and a draw, without sorting.

Top-k and top-p keep all logits from a smallest one on. One program for each row searches it: a round reads the row and
compares some values with every logit, until one logit remains between two of them. A row's sums depend on its own
logits only.
"""

import triton
import triton.language as tl

from services.worker.kernels.cuda.compiled.noise import gumbel
from services.worker.sampling import reference

_GREEDY_BELOW = tl.constexpr(reference.GREEDY_BELOW)
_WAYS = tl.constexpr(8)
"""Values that a round compares."""
_RANGE = tl.constexpr(87.0)
"""Likelihoods below e**-87 of the greatest are zero."""


@triton.jit
def best_kernel(
    logits,  # float32[rows, vocab]
    temperature,  # float32[rows]; this and the next three are read if `draws`
    cutoff,  # float32[rows]: scaled logits below it are not drawn
    key0,  # int32[rows], the noise's keys
    key1,
    best,  # float32[rows, parts], written
    part_ids,  # int32[rows, parts], written
    ids,  # int32[rows], written: the best token of all parts
    arrived,  # int32[rows], zeros before and afterwards: programs of the row that have ended
    vocab,
    span,  # tokens of a part, a multiple of `at_once`
    parts,
    padded: tl.constexpr,  # `parts`, padded
    draws: tl.constexpr,
    at_once: tl.constexpr,
):
    """The best token of each part of the vocabulary, and of each row: the lowest id among equals."""
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
    tl.store(part_ids + row * parts + part, tl.min(tl.where(greatest == winner, which, 0x7FFFFFFF), 0))
    tl.debug_barrier()
    if tl.atomic_add(arrived + row, 1, sem="acq_rel") == parts - 1:  # the last program of the row compares its parts
        each = tl.arange(0, padded)
        x = tl.load(best + row * parts + each, each < parts, float("-inf"), volatile=True)
        token = tl.load(part_ids + row * parts + each, each < parts, 0x7FFFFFFF, volatile=True)
        tl.store(ids + row, tl.min(tl.where(x == tl.max(x, 0), token, 0x7FFFFFFF), 0))
        tl.store(arrived + row, 0)


@triton.jit
def cutoff_kernel(
    logits,  # float32[rows, vocab]
    best,  # float32[rows, parts]: the greatest logit of each part
    temperature,  # float32[rows]
    log_min_p,  # float32[rows]; minus infinity: no filter
    top_k,  # int32[rows]; below 1: no filter
    top_p,  # float32[rows]; from 1: no filter
    cutoff,  # float32[rows], written: the least scaled logit that is kept
    vocab,
    parts,
    padded: tl.constexpr,  # `parts`, padded
    at_once: tl.constexpr,
):
    row, part = tl.program_id(0), tl.arange(0, padded)
    degrees = tl.load(temperature + row)
    top = tl.max(tl.load(best + row * parts + part, mask=part < parts, other=float("-inf")), 0)
    drawn = (degrees >= _GREEDY_BELOW) & (top > float("-inf"))
    top = tl.where(drawn, top, 0.0)
    least = _scaled(top, degrees) + tl.load(log_min_p + row)
    low = top - tl.minimum(_scaled(top, degrees) - least, _RANGE) * degrees * 1.000001  # not above a logit that is kept
    source = logits + row.to(tl.int64) * vocab
    k, p = tl.load(top_k + row), tl.load(top_p + row)
    if drawn & (k > 0) & (k < vocab):
        low = _search(source, low, top, degrees, k.to(tl.float32), vocab, False, at_once)
    if drawn & (p < 1):
        low = _search(source, low, top, degrees, p, vocab, True, at_once)
    tl.store(cutoff + row, tl.where(drawn, tl.maximum(_scaled(low, degrees), least), float("-inf")))


@triton.jit
def _search(source, low, top, degrees, wanted, vocab, weighs: tl.constexpr, at_once: tl.constexpr):
    """The greatest logit for which the weights from it up sum to `wanted`. A weight is 1, or, if `weighs`, the
    likelihood relative to that of `top`, and `wanted` is a share of all from `low` up.

    Logits are compared as they are: scaling keeps their order, and a division of each takes longer than the rest.
    """
    first, last = _ordered(low), _ordered(top)
    lane, way = tl.arange(0, at_once), tl.arange(0, _WAYS)
    tried = _ordered(top - (top - low) * tl.exp2(-1.0 - way.to(tl.float32)))  # denser near the greatest
    sharpness = 1.4426950408889634 / degrees
    while first < last:
        bound, lower, upper = _unordered(tried), _unordered(first), _unordered(last)
        # Summed across lanes behind the loop only.
        reached, total = tl.zeros([_WAYS, at_once], tl.float32), tl.zeros([at_once], tl.float32)
        smallest, greatest = tl.full([at_once], float("inf"), tl.float32), tl.full([at_once], float("-inf"), tl.float32)
        for start in range(0, vocab, at_once):
            x = tl.load(source + start + lane, mask=start + lane < vocab, other=float("-inf"))
            weight = tl.exp2((x - top) * sharpness) if weighs else tl.full([at_once], 1.0, tl.float32)
            reached += tl.where(x[None, :] >= bound[:, None], weight[None, :], 0.0)
            if weighs:
                total += tl.where(x >= low, weight, 0.0)
            remains = (x >= lower) & (x <= upper)
            smallest = tl.minimum(smallest, tl.where(remains, x, float("inf")))
            greatest = tl.maximum(greatest, tl.where(remains, x, float("-inf")))
        needed = wanted * tl.sum(total, 0) if weighs else wanted
        enough = (tl.sum(reached, 1) >= needed) & (tried <= last)
        # It is a logit, and one of those that remained before this round.
        first = tl.maximum(tl.max(tl.where(enough, tried, first), 0), _ordered(tl.min(smallest, 0)))
        last = tl.minimum(tl.min(tl.where(enough, last, tried - 1), 0), _ordered(tl.max(greatest, 0)))
        tried = first + (way + 1) * ((last - first) // _WAYS + 1)
    return _unordered(first)


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
