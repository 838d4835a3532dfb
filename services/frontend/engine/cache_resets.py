"""Resets of the prefix cache that wait for the scheduler's answer."""

import asyncio
import itertools
from collections.abc import Callable

from protocol.requests import ResetDone, ResetPrefixCache
from services.frontend.errors import APIError

TIMEOUT = 10.0
"""Seconds to wait for the answer."""


class CacheResets:
    def __init__(self) -> None:
        self._answers: dict[int, asyncio.Future[bool]] = {}
        self._numbers = itertools.count(1)

    async def request(self, reset_running: bool, send: Callable[[ResetPrefixCache], None]) -> bool:
        """Send a request and wait for its answer. Return False if running requests still share blocks.

        Raises: APIError, if there is no answer
        """
        number = next(self._numbers) & 0xFFFFFFFF
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        try:
            send(ResetPrefixCache(number, reset_running))
            return await asyncio.wait_for(answer, TIMEOUT)
        except TimeoutError:
            raise APIError(503, "the scheduler did not answer; try again later") from None
        finally:
            del self._answers[number]

    def on_done(self, done: ResetDone) -> None:
        if (answer := self._answers.get(done.number)) is not None and not answer.done():
            answer.set_result(done.complete)
