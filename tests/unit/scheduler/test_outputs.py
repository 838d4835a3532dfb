"""Outputs of a frontend that is lost. The simulation checks their order for each request."""

import numpy as np

from protocol.requests import Finish, FinishReason
from services.scheduler.core.outputs import OutputBuffer


def test_a_lost_frontend_gets_nothing_and_others_everything() -> None:
    buffer = OutputBuffer()
    frontends, numbers = np.array([0, 1], np.int32), np.array([1, 1], np.uint32)
    buffer.tokens(frontends, numbers, np.zeros(2, np.int32), np.array([5, 6], np.int32))
    buffer.finish(0, Finish(1, FinishReason.STOP))
    buffer.finish(1, Finish(1, FinishReason.LENGTH))
    buffer.drop_frontend(0)
    ((frontend, message),) = buffer.take()
    assert (frontend, message.finished) == (1, [Finish(1, FinishReason.LENGTH)])
