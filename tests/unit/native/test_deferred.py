"""Deferred steps reach a drafter together, in order, without requests that have left."""

import numpy as np
import torch

from services.worker.backends.native.drafters.base import I32, Advance, Drafter, DrafterSlots, Proposer
from services.worker.backends.native.drafters.deferred import MOST_BYTES, MOST_TOKENS, deferred
from services.worker.backends.native.token_history import TokenHistory
from services.worker.batch.slots import SlotTable
from tests.unit.native.implementations import make


class RecordingProposer(Proposer):
    """Keeps what it gets; proposes the slot."""

    def __init__(self) -> None:
        self.advances: list[Advance] = []
        self.assigned: list[int] = []

    def assign(self, slot: int) -> None:
        self.assigned.append(slot)

    def propose(self, advance: Advance, k: int) -> I32:
        self.advances.append(advance)
        return np.tile(advance.slots[advance.samples][:, None], k)


class Deferred:
    """An epoch in which every slot has a request."""

    def __init__(self) -> None:
        self.table = SlotTable(num_slots=8, block_size=4, num_blocks=8, max_model_len=8)
        self.table.generation[:] = 1
        proposer = RecordingProposer()
        self.advances, self.assigned = proposer.advances, proposer.assigned
        self.drafter = deferred(Drafter(lambda slots: proposer, reads=(2, -1)))
        history = TokenHistory(8, 8, 8, make("reference"))
        self.proposer = self.drafter.start(DrafterSlots(self.table, history, 8))
        self.propose = self.proposer.propose


def step(*rows: tuple[int, int, int], samples: bool = True, generation: int = 1) -> Advance:
    """(slot, start, count) each; the states of a token are made of its slot and position."""
    slots, starts, counts = (np.array(column, np.int32) for column in zip(*rows, strict=True))
    names = np.concatenate([100 * slot + start + np.arange(count) for slot, start, count in rows])
    states = torch.from_numpy(names.astype(np.float32)[:, None])
    generations = np.full(len(rows), generation, np.int32)
    return Advance(slots, generations, starts, counts, np.full(len(rows), samples), [states, states + 0.5])


def test_what_was_kept_before_a_rest_never_comes() -> None:
    deferred = Deferred()
    deferred.propose(step((5, 0, 4)), 0)
    assert deferred.proposer.rest()
    deferred.propose(step((5, 6, 1)), 0)
    deferred.propose(step((5, 7, 1)), 2)
    ((advance),) = deferred.advances
    assert (advance.starts.tolist(), advance.counts.tolist()) == ([6], [2])


def test_steps_without_drafts_come_with_the_next_that_has_some() -> None:
    deferred = Deferred()
    assert deferred.drafter.reads == (2, -1)
    assert deferred.propose(step((5, 0, 4), (3, 7, 2)), 0).shape == (2, 0)
    assert deferred.propose(step((3, 9, 1)), 0).shape == (1, 0)
    deferred.propose(step((1, 0, 2), (5, 4, 1), (4, 8, 1)), 0)
    assert not deferred.advances
    assert deferred.propose(step((4, 9, 1), (3, 10, 3)), 2).tolist() == [[4, 4], [3, 3]]
    (joined,) = deferred.advances
    assert joined.slots.tolist() == [4, 3, 1, 5]
    assert joined.starts.tolist() == [8, 7, 0, 0]
    assert joined.counts.tolist() == [2, 6, 2, 5]
    assert joined.samples.tolist() == [True, True, False, False]
    expected = [[408], [409], *([300 + i] for i in range(7, 13)), [100], [101], *([500 + i] for i in range(5))]
    assert joined.states[0].tolist() == expected
    assert torch.equal(joined.states[1], joined.states[0] + 0.5)


def test_requests_that_left_are_dropped() -> None:
    """Also without a successor in the slot: their blocks may belong to another request by now."""
    deferred = Deferred()
    deferred.propose(step((5, 0, 4), (3, 7, 2), (2, 1, 1)), 0)
    deferred.propose(step((5, 4, 1)), 0)
    deferred.table.generation[5] = 2
    deferred.proposer.assign(5)
    assert deferred.assigned == [5], "the drafter's own state of the slot ends at once"
    deferred.table.release(np.array([2], np.int32))
    deferred.propose(step((5, 0, 2), samples=False, generation=2), 0)
    deferred.propose(step((5, 2, 1), generation=2), 1)
    (joined,) = deferred.advances
    assert (joined.slots.tolist(), joined.generations.tolist()) == ([5, 3], [2, 1])
    assert joined.states[0].flatten().tolist() == [500, 501, 502, 307, 308]


def test_not_more_than_the_limit_is_kept() -> None:
    deferred = Deferred()
    deferred.propose(step((2, 0, MOST_TOKENS - 1), samples=False), 0)
    deferred.propose(step((2, MOST_TOKENS - 1, 1)), 0)
    assert not deferred.advances
    deferred.propose(step((2, MOST_TOKENS, 1)), 0)
    assert [int(joined.counts.sum()) for joined in deferred.advances] == [MOST_TOKENS + 1]
    assert deferred.propose(step((2, MOST_TOKENS + 1, 1)), 1).tolist() == [[2]]
    assert deferred.advances[-1].counts.tolist() == [1]


def test_a_request_that_left_makes_room() -> None:
    deferred = Deferred()
    for slot in range(4):
        deferred.propose(step((slot, 0, MOST_TOKENS // 4)), 0)
    deferred.table.release(np.array([0, 2, 3], np.int32))
    deferred.propose(step((1, MOST_TOKENS // 4, 1)), 0)
    assert not deferred.advances
    deferred.propose(step((1, MOST_TOKENS // 4 + 1, 1)), 1)
    (joined,) = deferred.advances
    assert (joined.slots.tolist(), joined.counts.tolist()) == ([1], [MOST_TOKENS // 4 + 2])


def test_large_states_are_kept_as_long_as_their_bytes_allow() -> None:
    """A drafter that reads two states of a quarter of `MOST_BYTES` each may leave two tokens for later."""
    deferred = Deferred()
    wide = torch.zeros(1, MOST_BYTES // 16)
    for start in range(3):
        assert not deferred.advances
        deferred.propose(step((2, start, 1))._replace(states=[wide, wide]), 0)
    assert [joined.counts.tolist() for joined in deferred.advances] == [[3]]


def test_kept_states_are_copies() -> None:
    """The model writes its hidden states to the same memory in every step."""
    deferred, states = Deferred(), torch.zeros(1, 1)
    deferred.propose(step((2, 0, 1))._replace(states=[states, states]), 0)
    states.fill_(7.0)
    deferred.propose(step((2, 1, 1))._replace(states=[states, states]), 1)
    (joined,) = deferred.advances
    assert joined.states[0].flatten().tolist() == [0.0, 7.0]
