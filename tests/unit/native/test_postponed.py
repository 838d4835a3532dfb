"""A drafter that hears of several steps at once hears all of them, in order, and of nobody who has left."""

import numpy as np
import torch

from services.worker.backends.native.drafters.base import I32, Advance, Drafter, Slots
from services.worker.backends.native.drafters.postponed import MOST_BYTES, MOST_TOKENS, Postponed
from services.worker.backends.native.state import TokenHistory
from services.worker.batch.slots import SlotTable


class Heard(Drafter):
    reads = (2, -1)

    def __init__(self) -> None:
        self.heard: list[Advance] = []

    def begin(self, slots: Slots) -> None: ...

    def propose(self, advance: Advance, k: int) -> I32:
        self.heard.append(advance)
        return np.tile(advance.slots[advance.samples][:, None], k)


def postponed(drafter: Drafter) -> Postponed:
    """In an epoch in which every slot has a request."""
    table = SlotTable(num_slots=8, block_size=4, num_blocks=8, max_model_len=8)
    table.generation[:] = 1
    postponed = Postponed(drafter)
    postponed.begin(Slots(table, TokenHistory(8, 8, 8), 8))
    return postponed


def step(*rows: tuple[int, int, int], samples: bool = True, generation: int = 1) -> Advance:
    """(slot, start, count) each; the states of a token say whose it is and where it stands."""
    slots, starts, counts = (np.array(column, np.int32) for column in zip(*rows, strict=True))
    names = np.concatenate([100 * slot + start + np.arange(count) for slot, start, count in rows])
    states = torch.from_numpy(names.astype(np.float32)[:, None])
    generations = np.full(len(rows), generation, np.int32)
    return Advance(slots, generations, starts, counts, np.full(len(rows), samples), [states, states + 0.5])


def test_steps_without_drafts_are_told_with_the_next_that_has_some() -> None:
    drafter = postponed(heard := Heard())
    assert drafter.reads == (2, -1)
    assert drafter.propose(step((5, 0, 4), (3, 7, 2)), 0).shape == (2, 0)
    assert drafter.propose(step((3, 9, 1)), 0).shape == (1, 0)
    drafter.propose(step((1, 0, 2), (5, 4, 1), (4, 8, 1)), 0)
    assert not heard.heard
    assert drafter.propose(step((4, 9, 1), (3, 10, 3)), 2).tolist() == [[4, 4], [3, 3]]
    (told,) = heard.heard
    assert told.slots.tolist() == [4, 3, 1, 5]
    assert told.starts.tolist() == [8, 7, 0, 0]
    assert told.counts.tolist() == [2, 6, 2, 5]
    assert told.samples.tolist() == [True, True, False, False]
    expected = [
        [408],
        [409],
        *([300 + i] for i in range(7, 13)),
        [100],
        [101],
        *([500 + i] for i in range(5)),
    ]
    assert told.states[0].tolist() == expected
    assert torch.equal(told.states[1], told.states[0] + 0.5)


def test_whoever_left_is_not_told_of() -> None:
    drafter = postponed(heard := Heard())
    drafter.propose(step((5, 0, 4), (3, 7, 2)), 0)
    drafter.propose(step((5, 4, 1)), 0)
    drafter._table.generation[5] = 2
    drafter.propose(step((5, 0, 2), samples=False, generation=2), 0)
    drafter.propose(step((5, 2, 1), generation=2), 1)
    (told,) = heard.heard
    assert told.slots.tolist() == [5, 3]
    assert told.states[0].flatten().tolist() == [500, 501, 502, 307, 308]


def test_whoever_left_without_a_successor_is_not_told_of() -> None:
    """Its blocks may be another's by now."""
    drafter = postponed(heard := Heard())
    drafter.propose(step((5, 0, 4), (3, 7, 2)), 0)
    drafter._table.release(np.array([5], np.int32))
    drafter.propose(step((3, 9, 1)), 1)
    (told,) = heard.heard
    assert told.slots.tolist() == [3]
    assert told.states[0].flatten().tolist() == [307, 308, 309]


def test_not_more_is_kept_than_may_be() -> None:
    drafter = postponed(heard := Heard())
    drafter.propose(step((2, 0, MOST_TOKENS - 1), samples=False), 0)
    drafter.propose(step((2, MOST_TOKENS - 1, 1)), 0)
    assert not heard.heard
    drafter.propose(step((2, MOST_TOKENS, 1)), 0)
    assert [int(told.counts.sum()) for told in heard.heard] == [MOST_TOKENS + 1]
    assert drafter.propose(step((2, MOST_TOKENS + 1, 1)), 1).tolist() == [[2]]
    assert heard.heard[-1].counts.tolist() == [1]


def test_whoever_left_makes_room() -> None:
    drafter = postponed(heard := Heard())
    for slot in range(4):
        drafter.propose(step((slot, 0, MOST_TOKENS // 4)), 0)
    drafter._table.release(np.array([0, 2, 3], np.int32))
    drafter.propose(step((1, MOST_TOKENS // 4, 1)), 0)
    assert not heard.heard
    drafter.propose(step((1, MOST_TOKENS // 4 + 1, 1)), 1)
    (told,) = heard.heard
    assert (told.slots.tolist(), told.counts.tolist()) == ([1], [MOST_TOKENS // 4 + 2])


def test_large_states_are_kept_as_long_as_their_bytes_allow() -> None:
    """A drafter that reads two states of a quarter of `MOST_BYTES` each may leave two tokens for later."""
    drafter = postponed(heard := Heard())
    wide = torch.zeros(1, MOST_BYTES // 16)
    for start in range(3):
        assert not heard.heard
        drafter.propose(step((2, start, 1))._replace(states=[wide, wide]), 0)
    assert [told.counts.tolist() for told in heard.heard] == [[3]]
