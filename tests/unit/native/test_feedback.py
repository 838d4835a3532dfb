"""The first stage takes sampled ids when it needs them, in order, and never for a slot's next request."""

import numpy as np

from protocol.steps import SchedulerOutput
from services.worker.batch.slots import Rows
from services.worker.distributed.feedback import TokenFeedback


def i32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def expect(feedback: TokenFeedback, *slots: int) -> None:
    """Expect the message of a step with these rows."""
    zeros, ones = np.zeros(len(slots), np.int32), np.ones(len(slots), np.int32)
    rows = Rows(i32(*slots), ones, zeros, ones, ones > 0, zeros)
    feedback.expect(SchedulerOutput(1, 1, b"", b"", b"", b"", b"", []), rows)


def taken(feedback: TokenFeedback, *slots: int) -> list[int]:
    return [message.number for message in feedback.due(i32(*slots))]


def test_a_step_takes_what_its_rows_need_and_all_before_it() -> None:
    feedback = TokenFeedback(8, 1)
    expect(feedback, 0, 1)
    expect(feedback, 2)
    expect(feedback, 0, 3)
    assert taken(feedback, 5) == []
    assert taken(feedback, 2, 5) == [1, 2]
    assert taken(feedback, 1) == []  # message 1 has come
    assert taken(feedback, 3) == [3]
    assert taken(feedback, 0, 1, 2, 3) == []


def test_a_slots_next_request_needs_nothing_and_gets_nothing() -> None:
    """Not even if its generation is that of the one before, as after a canary step."""
    feedback = TokenFeedback(4, 1)
    expect(feedback, 0, 1)
    feedback.assign(0)
    assert taken(feedback, 0) == []
    expect(feedback, 0)
    first, second = feedback.due(i32(0))
    assert feedback.wanted(first).tolist() == [False, True]
    assert feedback.wanted(second).tolist() == [True]


def test_messages_that_no_step_needs_do_not_pile_up() -> None:
    feedback = TokenFeedback(4, 1)
    seen: list[int] = []
    for number in range(20):
        seen += taken(feedback, 3)
        assert seen == list(range(1, number - 7))
        feedback.assign(0)
        expect(feedback, 0)
    assert len(seen) == 11
