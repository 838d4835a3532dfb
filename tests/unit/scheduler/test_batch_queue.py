"""A repeated result. The simulation checks the order of results, and that each is matched to its step by id."""

import numpy as np
from msgspec.structs import replace

from protocol.steps import ModelRunnerOutput
from services.scheduler.core.batch_queue import BatchQueue
from services.scheduler.core.ledger import InflightStep

_NONE = np.empty(0, np.int32)


def test_a_repeated_result_is_refused_and_the_first_one_stays() -> None:
    queue = BatchQueue(2)
    for step_id in (1, 2):
        queue.push(InflightStep(step_id, _NONE.astype(np.int64), *[_NONE] * 3, np.empty(0, np.bool_), _NONE, 0))
    older = ModelRunnerOutput(1, 1, b"", b"", b"", b"")
    first, second = (replace(older, step_id=2, token_ids=token) for token in (b"first", b"second"))
    assert queue.deliver(first)
    assert not queue.deliver(second)
    queue.deliver(older)
    assert queue.pop() is not None
    assert queue.pop()[1].token_ids == b"first"
    assert not queue.deliver(first), "its step has left"
