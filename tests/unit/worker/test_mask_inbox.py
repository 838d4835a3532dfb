"""When a step goes on without its masks."""

import math
import threading

import numpy as np
import pytest

from protocol.codec import pack
from protocol.steps import GrammarOutput
from services.worker.backends.mask_inbox import MaskInbox, joined
from services.worker.runner import RanksLost
from tests.unit.worker.virtual_clock import VirtualClock


def grammar(step_id: int, *slots: int, counts: list[int] | None = None) -> GrammarOutput:
    number = len(slots) if counts is None else sum(counts)
    words = np.arange(number, dtype=np.int32) + 10 * step_id
    return GrammarOutput(1, step_id, pack(slots), words.tobytes(), b"" if counts is None else pack(counts))


def rows(*slots: int) -> np.ndarray:
    return np.array(slots, np.int32)


def taken_later(inbox: MaskInbox, step_id: int, *slots: int) -> tuple[threading.Thread, list[object]]:
    """Take masks on another thread, which must wait for them."""
    taken: list[object] = []

    def take() -> None:
        try:
            taken.append(inbox.take(step_id, rows(*slots)).parts)
        except RanksLost as error:
            taken.append(error)

    thread = threading.Thread(target=take)
    thread.start()
    thread.join(0.05)
    assert thread.is_alive()
    return thread, taken


def test_masks_that_have_arrived_are_taken_at_once() -> None:
    inbox = MaskInbox(2)
    first, second = grammar(1, 4), grammar(1, 7)
    inbox.put(first)
    inbox.put(second)
    assert inbox.take(1, rows(4, 7)).parts == [first, second]


def test_a_step_waits_while_nobody_else_could_begin() -> None:
    """The next step has only rows that wait for the same masks."""
    inbox = MaskInbox(2)
    inbox.prepared(1, rows(4))
    inbox.prepared(2, rows(4))
    thread, taken = taken_later(inbox, 1, 4)
    inbox.put(grammar(1, 4))
    thread.join()
    assert taken == [[grammar(1, 4)]]


@pytest.mark.parametrize("later", [(4,), (4, 7)])
def test_another_request_ends_the_wait(later: tuple[int, ...]) -> None:
    inbox = MaskInbox(2)
    inbox.prepared(1, rows(4, 7))
    thread, taken = taken_later(inbox, 1, 4)
    inbox.prepared(2, rows(*later))
    thread.join()
    assert taken == [[]]


def test_masks_of_some_rows_are_used() -> None:
    inbox = MaskInbox(2)
    inbox.prepared(2, rows(9))
    inbox.put(grammar(1, 7))
    taken = inbox.take(1, rows(4, 7))
    assert (taken.parts, taken.left_out) == ([grammar(1, 7)], {4})


def test_no_more_steps_can_be_prepared() -> None:
    """The thread that delivers masks would wait for this step with the next one."""
    inbox = MaskInbox(2)
    for step_id in (1, 2, 3):
        inbox.prepared(step_id, rows(4))
    thread, taken = taken_later(inbox, 1, 4)
    inbox.prepared(4, rows(4))
    thread.join()
    assert taken == [[]]


def test_late_masks_are_dropped() -> None:
    inbox = MaskInbox(2)
    inbox.prepared(2, rows(9))
    assert inbox.take(1, rows(4)).parts == []
    inbox.put(grammar(1, 4))
    inbox.put(grammar(2, 4))
    assert inbox.take(2, rows(4)).parts == [grammar(2, 4)]


def test_the_end_of_an_epoch_ends_the_wait() -> None:
    inbox = MaskInbox(2)
    thread, taken = taken_later(inbox, 1, 4)
    inbox.close()
    thread.join()
    assert isinstance(taken[0], RanksLost)


def test_messages_of_one_step_are_joined() -> None:
    assert joined([]) is None
    assert joined([grammar(1, 4)]) == grammar(1, 4)
    message = joined([grammar(1, 4, counts=[3]), grammar(1, 7, 8)])
    assert message is not None
    assert message.slots == pack([4, 7, 8])
    assert message.counts == pack([3, 1, 1])
    assert np.frombuffer(message.bitmask, np.int32).tolist() == [10, 11, 12, 10, 11]


@pytest.mark.parametrize("number", [1, 5])
def test_masks_of_steps_that_are_over_are_not_kept(number: int) -> None:
    inbox = MaskInbox(2)
    for step_id in range(1, number + 1):
        inbox.put(grammar(step_id, 4))
    inbox.take(number, rows(4))
    inbox.prepared(number + 2, rows(9))
    assert inbox.take(number + 1, rows(4)).parts == []


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
    masks = clock.inbox.take(1, rows(4), forward_ended=110.0)
    assert (masks.at, clock.now, len(masks.parts)) == (decided, decided, taken)


def test_without_others_masks_are_waited_for_behind_the_forward_pass() -> None:
    clock = MasksOnTheWay(130.0, grammar(1, 4))
    clock.inbox.prepared(2, rows(4))
    assert clock.inbox.take(1, rows(4), forward_ended=110.0) == ([grammar(1, 4)], frozenset(), 130.0)


def test_masks_that_are_taken_late_cost_no_more_than_leaving_their_rows_out() -> None:
    clock = VirtualClock()
    inbox = MaskInbox(2, clock)
    inbox.prepared(2, rows(9))
    clock.now = 130.0
    inbox.put(grammar(1, 4))
    assert inbox.take(1, rows(4), forward_ended=110.0) == ([grammar(1, 4)], frozenset(), 110.0)
