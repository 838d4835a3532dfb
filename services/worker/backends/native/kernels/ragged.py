"""Tokens that stand row after row, a row as many as it has: what numpy says in five calls, and slowly for few rows."""

import numpy as np
from numba import njit, types

_GIVEN = types.Array(types.int32, 1, "A", readonly=True)
_MADE = types.Array(types.int32, 1, "C")
_KEPT = types.Array(types.int32, 2, "C")
_MASK = types.Array(types.boolean, 1, "C")


@njit(types.UniTuple(_MADE, 2)(_GIVEN), cache=True)
def spread(counts):  # type: ignore[no-untyped-def]
    """Of every token of rows int32[rows] `counts`: whose row it is, and its number there; int32[sum(counts)] each."""
    owners = np.empty(counts.sum(), np.int32)
    offsets = np.empty(len(owners), np.int32)
    at = 0
    for row in range(len(counts)):
        for offset in range(counts[row]):
            owners[at], offsets[at] = row, offset
            at += 1
    return owners, offsets


@njit(types.Tuple((*(_MADE,) * 3, types.int64))(*(_GIVEN,) * 4, _MADE, _MADE, _KEPT, _KEPT), cache=True)
def settle(slots, starts, counts, drafts, frontier, proposed, tokens, history):  # type: ignore[no-untyped-def]
    """Brings planned rows to where they really start, each with those of its drafts that there are, and writes these
    into int32[slots, limit] `history`; what is beyond the limit is nobody's input.

    Args:
        slots, starts, counts, drafts: int32[rows], as planned
        frontier: int32[slots], where the next row starts, or -1: where it is planned to; moved to the end of the row
        proposed: int32[slots], how many of int32[slots, most] `tokens` there are; 0 afterwards

    Returns:
        int32[rows] starts, counts and drafts; and which row is planned before its frontier, in which case nothing was
        changed, or -1.
    """
    true_starts, true_counts, true_drafts = starts.copy(), counts.copy(), drafts.copy()
    for row in range(len(slots)):
        if frontier[slots[row]] > starts[row]:
            return true_starts, true_counts, true_drafts, row
    for row in range(len(slots)):
        slot = slots[row]
        start = frontier[slot] if frontier[slot] >= 0 else starts[row]
        number = min(drafts[row], proposed[slot])
        count = counts[row] - drafts[row] + number
        true_starts[row], true_counts[row], true_drafts[row] = start, count, number
        proposed[slot], frontier[slot] = 0, start + count
        first = start + count - number
        for i in range(min(number, history.shape[1] - first)):
            history[slot, first + i] = tokens[slot, i]
    return true_starts, true_counts, true_drafts, -1


@njit(types.Tuple((_MADE, _MADE, _MASK))(*(_GIVEN,) * 5, _KEPT), cache=True)
def verify(slots, firsts, drafts, acceptable, ids, history):  # type: ignore[no-untyped-def]
    """Compares what was sampled, int32[sum(drafts + 1)] `ids`, with the drafts that stand in int32[slots, limit]
    `history` from `firsts` on.

    Args:
        slots, firsts, drafts, acceptable: int32[rows]; no more than `acceptable` drafts are accepted

    Returns:
        As `Accepted` has them.
    """
    counts, compared = np.empty(len(slots), np.int32), np.empty(len(slots), np.int32)
    stays = np.zeros(len(ids), np.bool_)
    start = 0
    for row in range(len(slots)):
        compared[row] = min(drafts[row], acceptable[row])
        most = min(compared[row], history.shape[1] - firsts[row])
        accepted = 0
        while accepted < most and history[slots[row], firsts[row] + accepted] == ids[start + accepted]:
            accepted += 1
        counts[row] = accepted + 1
        stays[start : start + accepted + 1] = True
        start += drafts[row] + 1
    return counts, compared, stays
