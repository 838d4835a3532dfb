"""Questions to a scheduler that wait for its answer."""

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

from protocol.requests import CacheControlled, ControlCache, ResetDone, ResetPrefixCache
from services.frontend.errors import APIError

TIMEOUT = 10.0
"""Seconds to wait for the answer."""


class Questions:
    def __init__(self) -> None:
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._numbers = itertools.count(1)

    async def reset(self, reset_running: bool, send: Callable[[ResetPrefixCache], None]) -> bool:
        """Return False if running requests still share blocks. Raises: APIError, if there is no answer"""
        done: ResetDone = await self._ask(lambda number: send(ResetPrefixCache(number, reset_running)))
        return done.complete

    async def control(
        self, make: Callable[[int], ControlCache], send: Callable[[ControlCache], None]
    ) -> CacheControlled:
        """`make`: returns the question with a number. Raises: APIError, if there is no answer"""
        done: CacheControlled = await self._ask(lambda number: send(make(number)))
        return done

    async def _ask(self, send: Callable[[int], None]) -> Any:
        number = next(self._numbers) & 0xFFFFFFFF
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        try:
            send(number)
            return await asyncio.wait_for(answer, TIMEOUT)
        except TimeoutError:
            raise APIError(503, "the scheduler did not answer; try again later") from None
        finally:
            del self._answers[number]

    def on_answer(self, done: ResetDone | CacheControlled) -> None:
        if (answer := self._answers.get(done.number)) is not None and not answer.done():
            answer.set_result(done)
