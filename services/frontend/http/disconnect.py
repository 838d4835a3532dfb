"""Clients that leave before their response is complete."""

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from starlette.types import Receive

from services.frontend.errors import GONE, APIError

T = TypeVar("T")


@contextmanager
def watch_disconnect(receive: Receive, fail: Callable[[APIError], None]) -> Iterator[None]:
    """Call `fail` if the client closes the connection within this context."""

    async def until_disconnected() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        fail(APIError(GONE, "the client closed the connection"))

    task = asyncio.create_task(until_disconnected())
    try:
        yield
    finally:
        task.cancel()


async def until_left(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`, which is cancelled if the client closes the connection. Raises: APIError"""
    task, gone = asyncio.create_task(work), list[APIError]()

    def cancel(error: APIError) -> None:
        gone.append(error)
        task.cancel()

    with watch_disconnect(receive, cancel):
        try:
            return await task
        except asyncio.CancelledError:
            if gone:
                raise gone[0] from None
            raise
