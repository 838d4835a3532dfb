"""The rows of a mixture of experts."""

import numpy as np
from numba import njit, types

_ROWS = types.Array(types.float32, 2, "C")
_NUMBERS, _WEIGHTS = types.Array(types.int64, 1, "C"), types.Array(types.float32, 1, "C")


@njit(types.Tuple((_NUMBERS, _WEIGHTS, _NUMBERS))(_ROWS, types.int64, types.boolean, types.boolean), cache=True)
def route(logits, per_token, normalised, sigmoid):  # type: ignore[no-untyped-def]
    """See `RoutingKernels.route`. Returns: tokens, weights, ends."""
    rows, number = logits.shape
    chosen, chances = np.empty((rows, per_token), np.int64), np.empty((rows, per_token), np.float32)
    ends, taken = np.zeros(number + 1, np.int64), np.empty(number, np.bool_)
    for row in range(rows):
        taken[:] = False
        for place in range(per_token):
            best = -1
            for expert in range(number):
                if not taken[expert] and (best < 0 or logits[row, expert] > logits[row, best]):
                    best = expert
            taken[best], chosen[row, place] = True, best
            ends[best + 1] += 1
        most, total = logits[row, chosen[row, 0]], np.float32(0)
        for expert in range(number):
            if not sigmoid and (taken[expert] or not normalised):
                total += np.exp(logits[row, expert] - most)
        for place in range(per_token):
            logit = logits[row, chosen[row, place]]
            chances[row, place] = 1 / (1 + np.exp(-logit)) if sigmoid else np.exp(logit - most) / total
    ends = np.cumsum(ends)
    at = ends[:-1].copy()
    tokens, weights = np.empty(rows * per_token, np.int64), np.empty(rows * per_token, np.float32)
    for row in range(rows):
        for place in range(per_token):
            pair = at[chosen[row, place]]
            tokens[pair], weights[pair] = row, chances[row, place]
            at[chosen[row, place]] += 1
    return tokens, weights, ends


@njit(types.void(_ROWS, _NUMBERS, _WEIGHTS, _ROWS), cache=True)
def combine(results, tokens, weights, out):  # type: ignore[no-untyped-def]
    """See `RoutingKernels.combine`; added to `out`."""
    for pair in range(len(tokens)):
        token, weight = tokens[pair], weights[pair]
        for i in range(out.shape[1]):
            out[token, i] += weight * results[pair, i]
