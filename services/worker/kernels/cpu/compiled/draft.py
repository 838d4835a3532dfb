"""All rounds of a draft by a head of one layer: each round runs the recorded kernels, then prepares the next rows."""

import numpy as np
from numba import carray

from services.worker.kernels.cpu import recording
from services.worker.kernels.cpu.compiled import raw, simd
from services.worker.kernels.cpu.thread_team import Kernel, arguments

DRAFT = arguments(
    ("before", np.int64),  # recorded calls over places, up to keys and values
    ("before_size", np.int64),
    ("num_places", np.int64),  # address of their number
    ("after", np.int64),  # recorded calls over rows, from attention to the most likely tokens
    ("after_size", np.int64),
    ("num_rows", np.int64),
    ("helpers", np.int64),  # see `thread_team.helper_state`
    ("k", np.int64),
    ("places", np.int64),  # in the first round
    ("rows", np.int64),
    ("least", np.float32),  # probability that a draft must have
    # columns of places, read by `before`
    ("slots", np.int64),  # int32
    ("positions", np.int64),  # int32
    ("ids", np.int64),  # int32
    ("hidden", np.int64),  # float32[places, width]
    # columns of rows, read by `after`, and its results
    ("tiles", np.int64),  # int32[rows, 4]
    ("last", np.int64),  # int32: place of each row
    ("yielded", np.int64),  # float32[rows, width]
    ("chosen", np.int64),  # int32, of draft ids
    ("sure", np.int64),  # float32
    ("sharpness", np.int64),  # float32, read by `after`
    # per row, kept from round to round
    ("room", np.int64),  # int32: maximum number of drafts
    ("owner", np.int64),  # int32: row of `proposed`
    ("chance", np.int64),  # float32: probability of all of the row's drafts together
    ("width", np.int64),
    ("tokens", np.int64),  # int32: token of each draft id, or 0: the id itself
    ("proposed", np.int64),  # int32[any, k], filled with NO_DRAFT
)


def draft_kernel() -> Kernel:
    """One item is the whole batch. Other threads may share its recorded kernels."""

    def draft(address):  # type: ignore[no-untyped-def]
        a = carray(raw.pointer(address), 1, DRAFT)[0]
        places, rows, k = a.places, a.rows, a.k
        slots, positions = raw.i32_at(a.slots, places), raw.i32_at(a.positions, places)
        ids, last = raw.i32_at(a.ids, places), raw.i32_at(a.last, rows)
        tiles, chosen = raw.i32_at(a.tiles, rows * 4), raw.i32_at(a.chosen, rows)
        sure, chance = raw.f32_at(a.sure, rows), raw.f32_at(a.chance, rows)
        room, owner = raw.i32_at(a.room, rows), raw.i32_at(a.owner, rows)
        sharpness = raw.f32_at(a.sharpness, rows)
        for number in range(max(k, 1)):
            raw.i64_at(a.num_places, 1)[0], raw.i64_at(a.num_rows, 1)[0] = places, rows
            recording.run(a.before, a.before_size, a.helpers)
            if rows == 0 or k == 0:
                break
            recording.run(a.after, a.after_size, a.helpers)
            left = 0
            for row in range(rows):
                together = chance[row] * sure[row]
                if together < a.least:
                    continue
                token = chosen[row]
                if a.tokens != 0:
                    token = raw.i32_at(a.tokens + np.int64(token) * 4, 1)[0]
                raw.i32_at(a.proposed + (np.int64(owner[row]) * k + number) * 4, 1)[0] = token
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
