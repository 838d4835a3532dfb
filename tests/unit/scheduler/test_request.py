"""The transition table, order keys and the terminal message."""

import itertools

import numpy as np
import pytest

from protocol.requests import FinishReason
from services.scheduler.core.request import RequestStatus, make_order_key, priority_of
from services.scheduler.transitions import IllegalTransition
from tests.simulation.requests import request

WAITING, RUNNING, PREEMPTED, FINISHED = RequestStatus
ALLOWED = {
    (WAITING, RUNNING),
    (WAITING, FINISHED),
    (RUNNING, PREEMPTED),
    (RUNNING, FINISHED),
    (PREEMPTED, RUNNING),
    (PREEMPTED, FINISHED),
}


@pytest.mark.parametrize(("before", "after"), [*itertools.product(RequestStatus, repeat=2)])
def test_only_the_transitions_of_the_table_are_taken(before: RequestStatus, after: RequestStatus) -> None:
    r = request(number=7)
    r.status = before
    if (before, after) in ALLOWED:
        r.become(after)
        assert r.status is after
    else:
        with pytest.raises(IllegalTransition, match=rf"0/7 \(no id\): {before.name} -> {after.name}"):
            r.become(after)
        assert r.status is before


def test_an_order_key_orders_by_priority_then_arrival_also_below_zero() -> None:
    pairs = [(-(2**20), 9), (-1, 2**41 - 1), (0, 1), (0, 2), (1, 0), (2**20, 3)]
    keys = [make_order_key(*pair) for pair in pairs]
    assert keys == sorted(keys)
    assert [priority_of(order_key) for order_key in keys] == [priority for priority, _ in pairs]
    assert all(int(np.int64(order_key)) == order_key for order_key in keys)


def test_a_client_stop_token_is_named_and_eos_is_not() -> None:
    r = request(eos_token_ids=(2,), stop_token_ids=(5,))
    assert r.finish_message(FinishReason.STOP, 5).stop_reason == 5
    assert r.finish_message(FinishReason.STOP, 2).stop_reason is None
    assert r.finish_message(FinishReason.LENGTH).stop_reason is None
