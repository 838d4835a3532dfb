# mypy: disable-error-code="no-untyped-def"
"""Loops over the rows of a step, written once: they use only arrays and numbers, so that a backend may compile them."""

import numpy as np


def write_tokens(history, slots, positions, ids):
    """See `RowKernels.write_tokens`."""
    for token in range(len(slots)):
        if positions[token] < history.shape[1]:
            history[slots[token], positions[token]] = ids[token]


def lay_out(slots, starts, counts, samples, drafts, history, vocab, tile, ids, token_slots, positions, tiles, sampled):
    """See `RowKernels.lay_out`. A history without slots is not read. Return the numbers of tiles and sampled tokens, or
    -1 and a token without a valid id."""
    token = number = chosen = 0
    for row in range(len(slots)):
        slot, start, count = slots[row], starts[row], counts[row]
        for i in range(count):
            token_slots[token + i], positions[token + i] = slot, start + i
            if len(history) > 0:
                ids[token + i] = history[slot, start + i]
                if not 0 <= ids[token + i] < vocab:
                    return -1, token + i
        for first in range(0, count, tile):
            tiles[number, 0], tiles[number, 1] = slot, start + first
            tiles[number, 2], tiles[number, 3] = token + first, min(count - first, tile)
            number += 1
        token += count
        if samples[row]:
            for i in range(token - 1 - drafts[row], token):
                sampled[chosen] = i
                chosen += 1
    return number, chosen


def verify(slots, firsts, drafts, acceptable, ids, history):
    """See `RowKernels.verify`."""
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


def lay_out_drafts(
    slots, starts, counts, samples, num_blocks, temperature, history, block_size, k, limit, error,
    place_slots, positions, ids, last, room, owner, sharpness, chance, tiles,
):  # fmt: skip
    """See `DraftingKernels.lay_out`. Arguments: columns of `DraftRows`, the history, `DraftLimits`, and the results.

    The drafts of a row have the positions ends + 1, ends + 2 ... below `limit`. All except the first are computed
    inside of the slot's blocks."""
    place = row = sampled = 0
    for i in range(len(slots)):
        slot, end = slots[i], starts[i] + counts[i]
        for position in range(starts[i], min(end, limit)):
            place_slots[place], positions[place] = slot, position
            ids[place] = history[slot, min(position + 1, history.shape[1] - 1)]
            place += 1
        if not samples[i]:
            continue
        here = min(limit - 1 - end, num_blocks[slot] * block_size - end + 1, k)
        if here > 0:
            last[row], room[row], owner[row] = place - 1, here, sampled
            sharpness[row], chance[row] = 1 / np.hypot(temperature[slot], error), 1
            tiles[row, 0], tiles[row, 1], tiles[row, 2], tiles[row, 3] = slot, end - 1, place - 1, 1
            row += 1
        sampled += 1
    return place, row
