"""Clients that leave before their response is complete."""

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from starlette.requests import Request

from services.frontend.errors import GONE, APIError

T = TypeVar("T")


@contextmanager
def watch_disconnect(http: Request, fail: Callable[[APIError], None]) -> Iterator[None]:
    """Call `fail` if the client closes the connection within this context."""

    async def until_disconnected() -> None:
        while (await http.receive())["type"] != "http.disconnect":
            pass
        own = getattr(http.state, "connection", None)  # none behind Ray Serve's proxy
        did = "did not read its response" if own is not None and own.has_stalled else "closed the connection"
        fail(APIError(GONE, f"the client {did}"))

    task = asyncio.create_task(until_disconnected())
    try:
        yield
    finally:
        task.cancel()


async def until_left(http: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`, which is cancelled if the client closes the connection. Raises: APIError"""
    task, gone = asyncio.create_task(work), list[APIError]()

    def cancel(error: APIError) -> None:
        gone.append(error)
        task.cancel()

    with watch_disconnect(http, cancel):
        try:
            return await task
        except asyncio.CancelledError:
            if gone:
                raise gone[0] from None
            raise
