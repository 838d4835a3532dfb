# mypy: disable-error-code="no-untyped-def"
"""Changes of logits by masks, by lists of tokens and by the tokens before."""

import triton
import triton.language as tl

_IN_PROMPT = tl.constexpr(1 << 30)
"""Bit of a count: the token is in the prompt."""


@triton.jit
def mask_kernel(
    logits,  # float32[any, vocab], changed
    rows,  # int32[masks]: which rows of the logits
    masks,  # int32[masks, words], least significant bit first
    vocab,
    words,
    keeps_one: tl.constexpr,  # if no token with a bit is left, the lowest becomes the only one
    at_once: tl.constexpr,
):
    """Forbid tokens whose bit is not set. One program is one row."""
    number = tl.program_id(0)
    source = logits + tl.load(rows + number).to(tl.int64) * vocab
    lane = tl.arange(0, at_once)
    lowest, left = vocab, 0
    for first in range(0, vocab, at_once):
        token = first + lane
        inside = token < vocab
        word = tl.load(masks + number.to(tl.int64) * words + token // 32, mask=inside, other=0)
        allowed = inside & (((word >> (token % 32)) & 1) == 1)
        tl.store(source + token, float("-inf"), mask=inside & (allowed == 0))
        if keeps_one:
            x = tl.load(source + token, mask=allowed, other=float("-inf"))
            lowest = tl.minimum(lowest, tl.min(tl.where(allowed, token, vocab), 0))
            left = tl.maximum(left, tl.max((x > float("-inf")).to(tl.int32), 0))
    if keeps_one:
        tl.store(source + lowest, 0.0, mask=(left == 0) & (lowest < vocab))


@triton.jit
def forbid_words_kernel(
    logits,  # float32[any, vocab], changed
    rows,  # int32[words]
    slots,  # int32[words]
    positions,  # int32[words]: of the token to sample
    firsts,  # int32[words]: where each word begins in `tokens`
    sizes,  # int32[words]
    tokens,  # int32: all words back to back
    history,  # int32[slots, limit]
    vocab,
    limit,
    at_once: tl.constexpr,
):
    """Forbid the last token of each word whose other tokens end the sequence. One program is one word."""
    word = tl.program_id(0)
    size, first = tl.load(sizes + word), tl.load(firsts + word)
    row, slot = tl.load(rows + word).to(tl.int64), tl.load(slots + word).to(tl.int64)
    start = tl.load(positions + word) - (size - 1)
    lane = tl.arange(0, at_once)
    differs = 0
    for at in range(0, size - 1, at_once):
        inside = at + lane < size - 1
        expected = tl.load(tokens + first + at + lane, mask=inside, other=0)
        actual = tl.load(history + slot * limit + start + at + lane, mask=inside, other=0)
        differs = tl.maximum(differs, tl.max((inside & (expected != actual)).to(tl.int32), 0))
    last = tl.load(tokens + first + size - 1)
    tl.store(logits + row * vocab + last, float("-inf"), mask=differs == 0)


@triton.jit(do_not_specialize=["entries"])
def bias_kernel(
    logits,  # float32[any, vocab], changed
    rows,  # int32[entries]
    tokens,  # int32[entries]
    biases,  # float32[entries]; minus infinity: forbidden
    entries,
    vocab,
    at_once: tl.constexpr,
):
    at = tl.program_id(0) * at_once + tl.arange(0, at_once)
    inside = at < entries
    row = tl.load(rows + at, mask=inside, other=0).to(tl.int64)
    token = tl.load(tokens + at, mask=inside, other=0)
    tl.atomic_add(logits + row * vocab + token, tl.load(biases + at, mask=inside, other=0.0), mask=inside)


@triton.jit
def count_kernel(
    slots,  # int32[rows]
    positions,  # int32[rows]: of the token to sample
    prompts,  # int32[rows]: length of the prompt
    history,  # int32[slots, limit]
    counts,  # int32[rows, vocab], zero before
    vocab,
    limit,
    at_once: tl.constexpr,
):
    """Count the tokens before each row: those of the output, and a bit for those of the prompt."""
    row = tl.program_id(0)
    at, token, valid = _tokens_before(slots, positions, history, row, vocab, limit, at_once)
    place = counts + row.to(tl.int64) * vocab + token
    in_prompt = at < tl.load(prompts + row)
    one = tl.full([at_once], 1, tl.int32)
    tl.atomic_add(place, one, mask=valid & (in_prompt == 0))
    tl.atomic_or(place, one * _IN_PROMPT, mask=valid & in_prompt)


@triton.jit
def penalize_kernel(
    logits,  # float32[any, vocab], changed
    rows,  # int32[rows]: which rows of the logits
    slots,
    positions,
    repetition,  # float32[rows]
    frequency,
    presence,
    history,
    counts,  # as `count_kernel` left them; zero afterwards
    vocab,
    limit,
    at_once: tl.constexpr,
):
    """Repetition for all tokens before the row, frequency and presence for those of the output. Of equal tokens, the
    one that takes the count out applies it."""
    row = tl.program_id(0)
    _, token, valid = _tokens_before(slots, positions, history, row, vocab, limit, at_once)
    place = counts + row.to(tl.int64) * vocab + token
    taken = tl.atomic_xchg(place, tl.zeros([at_once], tl.int32), mask=valid)
    mine = valid & (taken != 0)
    emitted = tl.where(mine, taken & (_IN_PROMPT - 1), 0)
    source = logits + tl.load(rows + row).to(tl.int64) * vocab + token
    x, factor = tl.load(source, mask=mine, other=0.0), tl.load(repetition + row)
    x = tl.where(x > 0, tl.div_rn(x, factor), x * factor)
    x -= tl.load(frequency + row) * emitted.to(tl.float32)
    x -= tl.where(emitted > 0, tl.load(presence + row), 0.0)
    tl.store(source, x, mask=mine)


@triton.jit
def _tokens_before(slots, positions, history, row, vocab, limit, at_once: tl.constexpr):
    """Positions of one part of the history, their tokens, and which of them count."""
    at = tl.program_id(1) * at_once + tl.arange(0, at_once)
    inside = at < tl.load(positions + row)
    token = tl.load(history + tl.load(slots + row).to(tl.int64) * limit + at, mask=inside, other=-1)
    valid = (token >= 0) & (token < vocab)
    return at, tl.where(valid, token, 0), valid
