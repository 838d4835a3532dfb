"""Outputs are grouped by frontend, in order for each request, with a finish behind its tokens."""

import numpy as np

from protocol.requests import Finish, FinishReason
from protocol.rows import OutputRows
from services.scheduler.core.outputs import OutputBuffer

Event = tuple[int, int, int, int]
"""(frontend, number, index, token)"""


def tokens(buffer: OutputBuffer, *events: Event) -> None:
    frontends, numbers, indices, token_ids = zip(*events, strict=True)
    buffer.tokens(
        np.array(frontends, np.int32),
        np.array(numbers, np.uint32),
        np.array(indices, np.int32),
        np.array(token_ids, np.int32),
    )


def taken(buffer: OutputBuffer) -> dict[int, list[tuple[int, int, int]]]:
    return {
        frontend: list(zip(*(column.tolist() for column in OutputRows.from_message(message)), strict=True))
        for frontend, message in buffer.take()
    }


def test_one_message_per_frontend_each_in_order() -> None:
    buffer = OutputBuffer()
    tokens(buffer, (2, 7, 0, 10), (0, 7, 3, 11), (2, 8, 0, 12), (1, 7, 0, 13), (0, 9, 1, 14))
    tokens(buffer, (2, 7, 1, 20), (0, 7, 4, 21))
    assert taken(buffer) == {
        0: [(7, 3, 11), (9, 1, 14), (7, 4, 21)],
        1: [(7, 0, 13)],
        2: [(7, 0, 10), (8, 0, 12), (7, 1, 20)],
    }
    assert buffer.take() == []


def test_a_lost_frontend_gets_nothing_and_others_everything() -> None:
    buffer = OutputBuffer()
    tokens(buffer, (0, 1, 0, 5), (1, 1, 0, 6))
    buffer.finish(0, Finish(1, FinishReason.STOP))
    buffer.finish(1, Finish(1, FinishReason.LENGTH))
    buffer.drop_frontend(0)
    ((frontend, message),) = buffer.take()
    assert (frontend, message.finished) == (1, [Finish(1, FinishReason.LENGTH)])
