# mypy: disable-error-code="no-untyped-def"
"""Changes of logits by the parameters of requests, one row at a time, and by the mask of a grammar.

A rule reads tokens from the token history on the device. It counts each position once, when the row is sampled, so a
step counts the tokens that earlier steps wrote. A draft is counted for the drafts after it, and this is undone at the
end of the step; the next step counts the accepted ones.
"""

import numpy as np
from numba import carray, njit

from services.worker.kernels.cpu.compiled import raw, simd
from services.worker.kernels.cpu.thread_team import ADDRESS, Kernel, arguments, items

RULE = np.dtype(
    [
        ("allowed", ADDRESS),  # int32[num_allowed], ascending, inside the vocabulary
        ("words", ADDRESS),  # int32: bad words back to back
        ("word_ends", ADDRESS),  # int32[num_words]
        ("banned", ADDRESS),  # int32[num_banned], inside the vocabulary
        ("biased", ADDRESS),  # int32[num_biased], inside the vocabulary
        ("biases", ADDRESS),  # float32[num_biased]
        ("places", ADDRESS),  # int32[vocab]: index of each token in the next two, plus one, or 0
        ("seen", ADDRESS),  # int32[num_seen]: the tokens of prompt and output, each once
        ("counts", ADDRESS),  # int32[num_seen]: number of each in the output
        ("num_allowed", np.int32),
        ("num_words", np.int32),
        ("num_banned", np.int32),
        ("banned_until", np.int32),
        ("num_biased", np.int32),
        ("num_seen", np.int32),
        ("counted", np.int32),  # positions of the history that are counted
        ("num_prompt", np.int32),
        ("restricts", np.int32),  # true: only allowed tokens may be sampled
        ("repetition", np.float32),
        ("frequency", np.float32),
        ("presence", np.float32),
    ],
    align=True,
)
"""The rule of one slot; an address of 0 or a number of 0: no such part."""
RULES = arguments(
    ("logits", ADDRESS),  # float32[any, vocab], changed in place
    ("vocab", np.int64),
    ("rows", ADDRESS),  # int32[items]: which row of the logits is the first
    ("sizes", ADDRESS),  # int32[items]: number of rows, at consecutive positions
    ("slots", ADDRESS),  # int32[items]
    ("positions", ADDRESS),  # int32[items]: of the first token to be sampled
    ("rules", ADDRESS),  # RULE[num_slots]
    ("num_slots", np.int64),
    ("history", ADDRESS),  # int32[num_slots, limit]
    ("limit", np.int64),
    ("missing", np.int64),  # written: a slot, plus one, with a position that has no token
)
MASK = arguments(
    ("logits", ADDRESS),  # float32[any, vocab], changed in place
    ("vocab", np.int64),
    ("rows", ADDRESS),  # int32[items]: which rows of the logits
    ("masks", ADDRESS),  # int32[items, ceil(vocab / 32)], least significant bit first
)


@njit
def _keep_allowed(rule, logits):
    allowed, after = raw.i32_at(rule.allowed, rule.num_allowed), 0
    for i in range(rule.num_allowed):
        logits[after : allowed[i]] = -np.inf
        after = allowed[i] + 1
    logits[after:] = -np.inf


@njit
def _forbid_words(rule, logits, history, position):
    """Forbid the last token of each word whose other tokens end the output."""
    ends, first = raw.i32_at(rule.word_ends, rule.num_words), 0
    words = raw.i32_at(rule.words, ends[rule.num_words - 1])
    for word in range(rule.num_words):
        last = ends[word] - 1
        size = last - first
        is_next = size <= position - rule.num_prompt
        for i in range(size if is_next else 0):
            if history[position - size + i] != words[first + i]:
                is_next = False
                break
        if is_next:
            logits[words[last]] = -np.inf
        first = last + 1


@njit
def _count(rule, history, position, vocab):
    """Count positions up to `position`; return whether all of them have tokens."""
    places = raw.i32_at(rule.places, vocab)
    counts, seen = raw.i32_at(rule.counts, vocab), raw.i32_at(rule.seen, vocab)
    for at in range(rule.counted, position):
        token = history[at]
        if token < 0 or token >= vocab:
            return False
        if places[token] == 0:
            seen[rule.num_seen], counts[rule.num_seen] = token, 0
            rule.num_seen += 1
            places[token] = rule.num_seen
        if at >= rule.num_prompt:
            counts[places[token] - 1] += 1
    rule.counted = position
    return True


@njit
def _take_back(rule, history, num_seen, counted, vocab):
    """Undo what was counted since `num_seen` tokens were seen at `counted` positions."""
    places = raw.i32_at(rule.places, vocab)
    counts, seen = raw.i32_at(rule.counts, vocab), raw.i32_at(rule.seen, vocab)
    for at in range(max(counted, rule.num_prompt), rule.counted):
        counts[places[history[at]] - 1] -= 1
    for i in range(num_seen, rule.num_seen):
        places[seen[i]] = 0
    rule.num_seen, rule.counted = num_seen, counted


@njit
def _penalize(rule, logits, vocab):
    counts, seen = raw.i32_at(rule.counts, vocab), raw.i32_at(rule.seen, vocab)
    for i in range(rule.num_seen):
        token, said = seen[i], counts[i]
        x = logits[token]
        if rule.repetition != 1:
            x = x / rule.repetition if x > 0 else x * rule.repetition
        if said > 0:
            x -= rule.frequency * np.float32(said)
            x -= rule.presence
        logits[token] = x


@njit
def _change(rule, logits, history, position, vocab):
    """Apply the rule to a row; return whether all positions that it reads have tokens."""
    if rule.restricts != 0:
        _keep_allowed(rule, logits)
    if rule.num_words > 0:
        _forbid_words(rule, logits, history, position)
    if position < rule.banned_until:
        for token in raw.i32_at(rule.banned, rule.num_banned):
            logits[token] = -np.inf
    if rule.num_biased > 0:
        biased = raw.i32_at(rule.biased, rule.num_biased)
        biases = raw.f32_at(rule.biases, rule.num_biased)
        for i in range(rule.num_biased):
            logits[biased[i]] += biases[i]
    if rule.places != 0:
        if not _count(rule, history, position, vocab):
            return False
        _penalize(rule, logits, vocab)
    return True


def rules_kernel() -> Kernel:
    """Allowed ids, bad words, bans, biases, penalties, in this order. One item is the rows of one slot."""

    def change(address):
        a = carray(raw.pointer(address), 1, RULES)[0]
        rules = carray(raw.pointer(a.rules), a.num_slots, RULE)
        for item in items(address, a.items):
            row, slot = raw.i32_at(a.rows, a.items)[item], raw.i32_at(a.slots, a.items)[item]
            first, rule = raw.i32_at(a.positions, a.items)[item], rules[slot]
            history = raw.i32_at(a.history + np.int64(slot) * a.limit * 4, a.limit)
            num_seen = counted = 0
            for j in range(raw.i32_at(a.sizes, a.items)[item]):
                logits = raw.f32_at(a.logits + np.int64(row + j) * a.vocab * 4, a.vocab)
                if not _change(rule, logits, history, first + j, a.vocab):
                    a.missing = slot + 1
                    break
                if j == 0:
                    num_seen, counted = rule.num_seen, rule.counted
            if rule.places != 0 and rule.counted > counted > 0:
                _take_back(rule, history, num_seen, counted, a.vocab)

    return Kernel(change, RULES, cost=4)


@njit
def _lowest_left(bits, logits):
    """Return the lowest token with a bit, or -1, and whether a token with a bit is not forbidden yet. The first such
    token ends the search, so it is short."""
    lowest = -1
    for word in range(len(bits)):
        first = word * 32
        for token in range(first, min(first + 32, len(logits)) if bits[word] != 0 else first):
            if (bits[word] >> (token - first)) & 1 == 0:
                continue
            lowest = token if lowest < 0 else lowest
            if logits[token] > -np.inf:
                return lowest, True
    return lowest, False


def mask_kernel() -> Kernel:
    """Forbid tokens whose bit is not set. If none of the others is left, the lowest becomes the only one."""

    def mask(address):
        a = carray(raw.pointer(address), 1, MASK)[0]
        words, whole = (a.vocab + 31) // 32, a.vocab // 32
        never = simd.splat(np.float32(-np.inf))
        for item in items(address, a.items):
            row = a.logits + np.int64(raw.i32_at(a.rows, a.items)[item]) * a.vocab * 4
            logits = raw.f32_at(row, a.vocab)
            bits = raw.i32_at(a.masks + item * words * 4, words)
            lowest, is_left = _lowest_left(bits, logits)
            for word in range(whole):
                if bits[word] != -1:
                    low, high = row + word * 128, row + word * 128 + 64
                    simd.store_f32x16(low, simd.keep_bits(simd.load_f32x16(low), bits[word], never))
                    simd.store_f32x16(high, simd.keep_bits(simd.load_f32x16(high), bits[word] >> 16, never))
            for token in range(whole * 32, a.vocab):
                if (bits[whole] >> (token - whole * 32)) & 1 == 0:
                    logits[token] = -np.inf
            if lowest >= 0 and not is_left:
                logits[lowest] = np.float32(0)

    return Kernel(mask, MASK, cost=8)
