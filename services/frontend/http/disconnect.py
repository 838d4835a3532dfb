"""Clients that leave before their response is complete."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from starlette.types import Receive

from services.frontend.errors import GONE, APIError


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
