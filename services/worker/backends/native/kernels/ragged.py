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


@njit(types.void(_GIVEN, _GIVEN, _GIVEN, _KEPT, _KEPT), cache=True)
def put_drafts(slots, firsts, counts, tokens, history):  # type: ignore[no-untyped-def]
    """Writes the first `counts` of int32[slots, most] `tokens` into int32[slots, limit] `history`, from `firsts` on;
    int32[rows] each. What is beyond the limit is nobody's input."""
    for row in range(len(slots)):
        slot = slots[row]
        for i in range(min(counts[row], history.shape[1] - firsts[row])):
            history[slot, firsts[row] + i] = tokens[slot, i]


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
