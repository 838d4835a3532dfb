"""Results are matched by step id and leave in the order of dispatch."""

import numpy as np

from protocol.steps import ModelRunnerOutput
from services.scheduler.core.batch_queue import BatchQueue
from services.scheduler.core.ledger import InflightStep

_NONE = np.empty(0, np.int32)


def step(step_id: int) -> InflightStep:
    return InflightStep(step_id, _NONE.astype(np.int64), _NONE, _NONE, _NONE, np.empty(0, np.bool_), _NONE)


def result(step_id: int, token: bytes = b"") -> ModelRunnerOutput:
    return ModelRunnerOutput(1, step_id, b"", b"", b"", token)


def queue_of(*step_ids: int, depth: int = 8) -> BatchQueue:
    queue = BatchQueue(depth)
    for step_id in step_ids:
        queue.push(step(step_id))
    return queue


def drained(queue: BatchQueue) -> list[tuple[int, int]]:
    popped = []
    while (ready := queue.pop()) is not None:
        popped.append((ready[0].step_id, ready[1].step_id))
    return popped


def test_results_out_of_order_leave_in_order_of_dispatch() -> None:
    queue = queue_of(1, 2, 3)
    assert queue.deliver(result(3))
    assert queue.deliver(result(2))
    assert drained(queue) == []
    assert queue.deliver(result(1))
    assert drained(queue) == [(1, 1), (2, 2), (3, 3)]


def test_a_repeated_result_is_refused_and_the_first_one_stays() -> None:
    queue = queue_of(1, 2)
    assert queue.deliver(result(2, b"first"))
    assert not queue.deliver(result(2, b"second"))
    queue.deliver(result(1))
    assert queue.pop() is not None
    last = queue.pop()
    assert last[1].token_ids == b"first"
    assert not queue.deliver(result(2)), "its step has left"


def test_an_unknown_step_is_refused_and_changes_nothing() -> None:
    queue = queue_of(4, 5)
    assert not queue.deliver(result(3))
    assert not queue.deliver(result(6))
    assert drained(queue) == []
    assert len(queue) == 2


def test_full_counts_steps_and_not_results() -> None:
    queue = queue_of(1, depth=2)
    assert not queue.full
    queue.push(step(2))
    queue.deliver(result(1))
    assert queue.full
    queue.pop()
    assert not queue.full
    queue.clear()
    assert (len(queue), queue.deliver(result(2))) == (0, False)
