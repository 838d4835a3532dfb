"""When a step goes on without its masks."""

import math
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import count

import numpy as np
import pytest

from protocol.codec import pack
from protocol.steps import GrammarOutput
from services.worker.backends.clock import Clock
from services.worker.backends.mask_inbox import ENDLESS, Forward, MaskInbox, joined
from services.worker.runner import RanksLost
from tests.unit.worker.virtual_clock import VirtualClock
from tests.waiting import PATIENCE

OVER = Forward(0.0, 0.0)
"""A forward pass that has ended, and took no time."""


def grammar(step_id: int, *slots: int, counts: list[int] | None = None) -> GrammarOutput:
    number = len(slots) if counts is None else sum(counts)
    words = np.arange(number, dtype=np.int32) + 10 * step_id
    return GrammarOutput(1, step_id, pack(slots), words.tobytes(), b"" if counts is None else pack(counts))


def rows(*slots: int) -> np.ndarray:
    return np.array(slots, np.int32)


class WaitingClock(Clock):
    def __init__(self) -> None:
        self.waits = threading.Event()

    def wait(self, changed: threading.Condition, seconds: float | None) -> None:
        self.waits.set()
        super().wait(changed, seconds)


@pytest.mark.parametrize(
    ("prepared", "end", "expected"),
    [
        ([4, 4], lambda inbox: inbox.put(grammar(1, 4)), [grammar(1, 4)]),
        ([4], lambda inbox: inbox.prepared(2, rows(7)), []),
        ([4], lambda inbox: inbox.prepared(2, rows(4, 7)), []),
        ([4, 4, 4], lambda inbox: inbox.prepared(4, rows(4)), []),
        ([], lambda inbox: inbox.close(), RanksLost),
    ],
    ids=["its masks", "another request", "another request beside it", "no more can be prepared", "the epoch's end"],
)
def test_a_step_waits_while_nobody_else_could_begin(
    prepared: list[int], end: Callable[[MaskInbox], None], expected: object
) -> None:
    """The next steps have only rows that wait for the same masks. If no more can be prepared, the thread that delivers
    masks would wait for this step with the next one."""
    inbox = MaskInbox(2, clock := WaitingClock())
    for step_id, slot in enumerate(prepared, 1):
        inbox.prepared(step_id, rows(slot))
    with ThreadPoolExecutor(1) as pool:
        taken = pool.submit(inbox.take, 1, rows(4), OVER)
        assert clock.waits.wait(PATIENCE)
        end(inbox)
        if expected is RanksLost:
            with pytest.raises(RanksLost):
                taken.result()
        else:
            assert taken.result().parts == expected


def test_masks_of_some_rows_are_used() -> None:
    inbox = MaskInbox(2)
    inbox.prepared(2, rows(9))
    inbox.put(grammar(1, 7))
    taken = inbox.take(1, rows(4, 7), OVER)
    assert (taken.parts, taken.left_out) == ([grammar(1, 7)], {4})


def test_messages_of_one_step_are_joined() -> None:
    assert joined([]) is None
    assert joined([grammar(1, 4)]) == grammar(1, 4)
    message = joined([grammar(1, 4, counts=[3]), grammar(1, 7, 8)])
    assert message.slots == pack([4, 7, 8])
    assert message.counts == pack([3, 1, 1])
    assert np.frombuffer(message.bitmask, np.int32).tolist() == [10, 11, 12, 10, 11]


@pytest.mark.parametrize("number", [1, 5])
def test_masks_of_steps_that_are_over_are_not_kept(number: int) -> None:
    inbox, masks = MaskInbox(2), [grammar(step_id, 4) for step_id in range(1, number + 3)]
    for place in range(number + 1):
        inbox.put(masks[place])
    inbox.take(number, rows(4), OVER)
    inbox.put(masks[number - 1])
    assert inbox.poll(number + 1, rows(4), OVER).parts == [masks[-2]]
    assert len({sys.getrefcount(each) for each in masks}) == 1, "none is kept; the last one was not sent"


class MasksOnTheWay(VirtualClock):
    """A VIRTUAL clock on which masks arrive in the middle of a wait."""

    def __init__(self, at: float, masks: GrammarOutput) -> None:
        super().__init__()
        self.inbox = MaskInbox(2, self)
        self._at, self._masks = at, masks

    def wait(self, changed: threading.Condition, seconds: float | None) -> None:
        end = math.inf if seconds is None else self.now + seconds
        if self.now < self._at <= end:
            self.now = self._at
            self.inbox.put(self._masks)
        else:
            self.now = end


@pytest.mark.parametrize(("arrives", "decided", "taken"), [(105.0, 105.0, 1), (115.0, 110.0, 0)])
def test_rows_are_left_out_at_the_end_of_the_forward_pass(arrives: float, decided: float, taken: int) -> None:
    """And not before it, although somebody is held back from 100 s on."""
    clock = MasksOnTheWay(arrives, grammar(1, 4))
    clock.inbox.prepared(2, rows(9))
    masks = clock.inbox.take(1, rows(4), Forward(100.0, 110.0))
    assert (masks.at, clock.now, len(masks.parts)) == (decided, decided, taken)


def run_ahead(inbox: MaskInbox) -> None:
    """Let a plan come before the masks of an earlier step."""
    inbox.prepared(1, rows(4))
    inbox.prepared(2, rows(9))
    assert inbox.poll(1, rows(4), ENDLESS) == math.inf


def test_rows_of_others_wait_for_all_masks_if_no_plan_comes_before_them() -> None:
    """The scheduler may expect a token of each row."""
    inbox = MaskInbox(2, VirtualClock())
    inbox.prepared(1, rows(4, 7))
    assert inbox.poll(1, rows(4), OVER) == math.inf


@pytest.mark.parametrize(("arrives", "decided", "taken"), [(112.0, 112.0, 1), (113.0, 112.5, 0)])
def test_rows_of_others_wait_while_that_costs_fewer_tokens(arrives: float, decided: float, taken: int) -> None:
    """One of four rows would lose a forward pass of 10 s, so all wait for a quarter of it at most."""
    clock = MasksOnTheWay(arrives, grammar(3, 4))
    run_ahead(clock.inbox)
    clock.inbox.prepared(3, rows(4, 7, 8, 9))
    masks = clock.inbox.take(3, rows(4), Forward(100.0, 110.0))
    assert (masks.at, clock.now, len(masks.parts)) == (decided, decided, taken)


def test_waits_in_vain_become_rare() -> None:
    clock = VirtualClock()
    inbox, step_ids = MaskInbox(2, clock), count(3)
    run_ahead(inbox)

    def waited(masks_after: float = math.inf) -> float:
        """Return the seconds that the next step waits behind its forward pass of 10 s."""
        step_id, ended = next(step_ids), clock.now + 10.0
        inbox.prepared(step_id, rows(0, step_id))
        forward = Forward(clock.now, ended)
        while isinstance(taken := inbox.poll(step_id, rows(step_id), forward), float):
            clock.now = min(taken, ended + masks_after)
            if clock.now == ended + masks_after:
                inbox.put(grammar(step_id, step_id))
        return taken.at - ended

    assert [waited() for _ in range(7)] == [5.0, 0.0, 5.0, 0.0, 0.0, 0.0, 5.0]
    assert [waited() for _ in range(7)] == [0.0] * 7
    assert waited(masks_after=3.0) == 3.0
    assert [waited() for _ in range(4)] == [5.0, 0.0, 5.0, 0.0]


def test_a_row_that_was_left_out_is_waited_for() -> None:
    """Otherwise it would be left out for ever, if its masks always follow the plan a little too late."""
    clock = VirtualClock()
    inbox = MaskInbox(2, clock)
    run_ahead(inbox)
    for step_id in (3, 5):
        inbox.prepared(step_id, rows(4, 7))
        began, clock.now = clock.now, clock.now + 10.0
        taken = inbox.poll(step_id, rows(4), Forward(began, clock.now))
        if step_id == 3:
            assert taken == clock.now + 5.0
            clock.now += 5.0
            assert inbox.poll(step_id, rows(4), Forward(began, began + 10.0)) == ([], {4}, clock.now)
            inbox.put(grammar(4, 7))  # a step without a row of this slot
            assert inbox.poll(4, rows(7), OVER).parts == [grammar(4, 7)]
    assert taken == math.inf
    inbox.prepared(6, rows(7))
    assert inbox.poll(5, rows(4), Forward(began, clock.now)) == ([], {4}, clock.now)
