"""A whole draft of a head of one layer: its kernels token after token, and between them what only goes round."""

import numpy as np
from numba import carray, njit, types

from services.worker.backends.native.kernels import sequence, simd
from services.worker.backends.native.kernels.team import HEADER, Kernel, take

COPY = [
    ("source", np.int64),  # [any, width], bfloat16 or float32
    ("index", np.int64),  # int32[items]: which row, or 0: each in turn
    ("out", np.int64),  # float32[items, stride]: the first `width` numbers of each row are written
    ("width", np.int64),
    ("stride", np.int64),
    ("adds", np.int64),  # 1: to what is there
]
DRAFT = [
    ("before", np.int64),  # `Sequence` over places: up to their keys and values
    ("before_size", np.int64),
    ("after", np.int64),  # over rows: from attention to the likeliest tokens
    ("after_size", np.int64),
    ("share", np.int64),  # see `team.shared`
    ("among", np.int64),
    ("k", np.int64),
    ("places", np.int64),  # in the first round
    ("rows", np.int64),
    ("least", np.float32),  # chance that a draft must have
    # of places, for `before`
    ("slots", np.int64),  # int32
    ("positions", np.int64),  # int32
    ("ids", np.int64),  # int32
    ("hidden", np.int64),  # float32[places, width]
    # of rows, for `after`, and what that yields
    ("tiles", np.int64),  # int32[rows, 4]
    ("last", np.int64),  # int32: place of each row
    ("yielded", np.int64),  # float32[rows, width]
    ("chosen", np.int64),  # int32, of draft ids
    ("sure", np.int64),  # float32
    ("sharpness", np.int64),  # float32, which `after` reads
    # of rows, kept from round to round
    ("room", np.int64),  # int32: drafts that it may have
    ("owner", np.int64),  # int32: row of `proposed`
    ("chance", np.int64),  # float32: of all of the row's drafts together
    ("width", np.int64),
    ("tokens", np.int64),  # int32: token of each draft id, or 0: its own
    ("proposed", np.int64),  # int32[any, k], filled with what is no draft
]
_COPY, _DRAFT = (np.dtype(HEADER + fields, align=True) for fields in (COPY, DRAFT))

_COLUMN, _INTS = types.Array(types.int32, 1, "A", readonly=True), types.Array(types.int32, 1, "C")
_FLOATS, _TABLE = types.Array(types.float32, 1, "C"), types.Array(types.int32, 2, "C")
_GIVEN = *(_COLUMN,) * 3, types.Array(types.boolean, 1, "A", readonly=True), _INTS, _FLOATS, _TABLE
_LAID = *(_INTS,) * 6, _FLOATS, _FLOATS, _TABLE


@njit(types.UniTuple(types.int64, 3)(*_GIVEN, *(types.int64,) * 3, types.float64, *_LAID), cache=True)
def lay(  # type: ignore[no-untyped-def]
    slots, starts, counts, samples, num_blocks, temperature, history, block_size, k, limit, error,
    place_slots, positions, ids, last, room, owner, sharpness, chance, tiles,
):  # fmt: skip
    """Writes where a step's tokens stand that are below position `limit`, each with the token after it, and the rows
    that have room for drafts: at ends + 1, ends + 2 ... below `limit`, those after the first computed inside of the
    slot's blocks.

    Args:
        slots, starts, counts, samples: [rows], of an `Advance`
        num_blocks, temperature, history: [slots], [slots] and [slots, context]
        place_slots, positions, ids: [places], written
        last, room, owner, sharpness, chance, tiles: [rows], as `DRAFT` has them, written

    Returns:
        How many places and rows, and the position after the last place.
    """
    place = row = sampled = furthest = 0
    for i in range(len(slots)):
        slot, end = slots[i], starts[i] + counts[i]
        for position in range(starts[i], min(end, limit)):
            place_slots[place], positions[place] = slot, position
            ids[place] = history[slot, min(position + 1, history.shape[1] - 1)]
            place += 1
            furthest = max(furthest, position + 1)
        if not samples[i]:
            continue
        here = min(limit - 1 - end, num_blocks[slot] * block_size - end + 1, k)
        if here > 0:
            last[row], room[row], owner[row] = place - 1, here, sampled
            sharpness[row], chance[row] = 1 / np.hypot(temperature[slot], error), 1
            tiles[row, 0], tiles[row, 1], tiles[row, 2], tiles[row, 3] = slot, end - 1, place - 1, 1
            row += 1
        sampled += 1
    return place, row, furthest


def copy_kernel(half: bool) -> Kernel:
    """One item is one row. `half`: the source is bfloat16."""
    HALF, SIZE = int(half), 2 if half else 4

    def copy(address):  # type: ignore[no-untyped-def]
        a = carray(simd.pointer(address), 1, _COPY)[0]
        index, whole = simd.i32_at(a.index, a.items), a.width // 16 * 16
        while True:
            item = take(address)
            if item >= a.items:
                break
            row = np.int64(index[item]) if a.index != 0 else item
            source, out = a.source + row * a.width * SIZE, a.out + item * a.stride * 4
            for i in range(0, whole, 16):
                value = simd.load16(source + i * SIZE, HALF)
                if a.adds != 0:
                    value = simd.add(simd.load_f32x16(out + i * 4), value)
                simd.store_f32x16(out + i * 4, value)
            for i in range(whole, a.width):
                one = simd.load1(source + i * SIZE, HALF)
                if a.adds != 0:
                    one += simd.load_f32(out + i * 4)
                simd.store_f32(out + i * 4, one)

    return Kernel(copy, COPY, cost=64)


def draft_kernel() -> Kernel:
    """One item is the whole batch, and may share its parts with other threads."""

    def draft(address):  # type: ignore[no-untyped-def]
        a = carray(simd.pointer(address), 1, _DRAFT)[0]
        places, rows, k = a.places, a.rows, a.k
        slots, positions = simd.i32_at(a.slots, places), simd.i32_at(a.positions, places)
        ids, last = simd.i32_at(a.ids, places), simd.i32_at(a.last, rows)
        tiles, chosen = simd.i32_at(a.tiles, rows * 4), simd.i32_at(a.chosen, rows)
        sure, chance = simd.f32_at(a.sure, rows), simd.f32_at(a.chance, rows)
        room, owner = simd.i32_at(a.room, rows), simd.i32_at(a.owner, rows)
        sharpness = simd.f32_at(a.sharpness, rows)
        for number in range(max(k, 1)):
            sequence.run(a.before, a.before_size, places, a.share, a.among)
            if rows == 0 or k == 0:
                break
            sequence.run(a.after, a.after_size, rows, a.share, a.among)
            left = 0
            for row in range(rows):
                together = chance[row] * sure[row]
                if together < a.least:
                    continue
                token = chosen[row]
                if a.tokens != 0:
                    token = simd.i32_at(a.tokens + np.int64(token) * 4, 1)[0]
                simd.i32_at(a.proposed + (np.int64(owner[row]) * k + number) * 4, 1)[0] = token
                if number + 1 == k or number + 1 >= room[row]:
                    continue
                room[left], owner[left], chance[left] = room[row], owner[row], together
                sharpness[left] = sharpness[row]
                slots[left], positions[left], ids[left] = tiles[row * 4], tiles[row * 4 + 1] + 1, token
                tiles[left * 4], tiles[left * 4 + 1] = slots[left], positions[left]
                tiles[left * 4 + 2], tiles[left * 4 + 3], last[left] = left, 1, left
                start, end = a.yielded + row * a.width * 4, a.hidden + left * a.width * 4
                for i in range(0, a.width * 4, 4):
                    simd.store_f32(end + i, simd.load_f32(start + i))
                left += 1
            places = rows = left
            if left == 0:
                break

    return Kernel(draft, DRAFT, cost=1)
