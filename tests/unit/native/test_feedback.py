"""The first stage takes sampled ids when it needs them, in order, and never for a slot's next request."""

import numpy as np
import torch

from services.worker.distributed.feedback import TokenFeedback


def i32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def expect(feedback: TokenFeedback, slots: np.ndarray, firsts: np.ndarray) -> None:
    feedback.expect(slots, firsts, 0, torch.empty(len(slots), 2, dtype=torch.int32))


def taken(feedback: TokenFeedback, *slots: int) -> list[int]:
    return [message.number for message in feedback.due(i32(*slots))]


def test_a_step_takes_what_its_rows_need_and_all_before_it() -> None:
    feedback = TokenFeedback(8, most=8)
    expect(feedback, i32(0, 1), i32(5, 9))
    expect(feedback, i32(2), i32(4))
    expect(feedback, i32(0, 3), i32(6, 7))
    assert taken(feedback, 5) == []
    assert taken(feedback, 2, 5) == [1, 2]
    assert taken(feedback, 1) == []  # message 1 has come
    assert taken(feedback, 3) == [3]
    assert taken(feedback, 0, 1, 2, 3) == []


def test_a_slots_next_request_needs_nothing_and_gets_nothing() -> None:
    """Not even if its generation is that of the one before, as after a canary step."""
    feedback = TokenFeedback(4, most=8)
    expect(feedback, i32(0, 1), i32(5, 9))
    feedback.assign(0)
    assert taken(feedback, 0) == []
    expect(feedback, i32(0), i32(3))
    first, second = feedback.due(i32(0))
    assert feedback.wanted(first).tolist() == [False, True]
    assert feedback.wanted(second).tolist() == [True]


def test_messages_that_no_step_needs_do_not_pile_up() -> None:
    feedback = TokenFeedback(4, most=3)
    seen: list[int] = []
    for number in range(20):
        seen += taken(feedback, 3)
        assert seen == list(range(1, number - 2))
        feedback.assign(0)
        expect(feedback, i32(0), i32(1))
    assert len(seen) == 16
