"""Responses that are generated apart from the connection that requested them."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from services.frontend.engine.streams import ResponseStream
from services.frontend.errors import GONE, APIError, internal_error
from services.frontend.responses_api.answers import ResponseEvents
from services.frontend.responses_api.response_file import CANCEL, FileContent, FileLog, follow_file, not_written
from services.frontend.responses_api.responses import ResponseObject

log = logging.getLogger("runahead.frontend")

POLL_INTERVAL = 0.05
"""Seconds between two looks at a file that another frontend writes."""


class BackgroundRun:
    """The generation of one response. It ends by itself, or by `fail`, but not with a connection."""

    def __init__(self, answer: ResponseEvents, events: FileLog) -> None:
        self.events = events
        answer.on_end, answer.on_chunk = self._on_end, events.on_chunk
        self._answer: ResponseEvents | None = answer
        self.stream: ResponseStream | None = None
        """Set when the requests were submitted."""
        self._last = b""

    @property
    def response(self) -> bytes:
        """The response as it is now, as JSON."""
        return self._last if self._answer is None else msgspec.json.encode(self._answer.to_json())

    def behind(self, number: int) -> AsyncIterator[bytes]:
        """Yield the events behind a sequence number as they are written, until the last one."""
        return self.events.behind(number)

    async def finish(self) -> APIError | None:
        """Write all events behind the opening ones. Return the error that ended the response, if one did."""
        answer, stream, failure = self._answer, self.stream, None
        assert answer is not None
        assert stream is not None
        try:
            last = await stream.last(self.events) + answer.closing()
        except APIError as error:
            failure, last = error, answer.error(error)
        except Exception:
            log.exception("a response in the background failed with a bug: request_id=%s", stream.request_id)
            failure = internal_error()
            last = answer.error(failure)
        self.events.write(last, self._last)
        return failure

    async def cancel(self) -> None:
        """End the response, unless it has ended, and wait for its end."""
        self.fail(APIError(GONE, "the response was cancelled"))
        await self.events.complete()

    def fail(self, error: APIError) -> None:
        """End the response with `error` soon, unless it has ended."""
        if self.stream is not None:
            self.stream.fail(error)

    def _on_end(self, response: ResponseObject) -> None:
        """Keep the bytes alone, as the parser and the items take more memory."""
        self._last = msgspec.json.encode(response)
        self._answer = self.stream = None


@dataclass(frozen=True)
class OthersRun:
    """A response that another frontend generates, or generated."""

    path: Path
    content: FileContent
    take_up: Callable[[], bool]
    """Goes on with the response if its frontend is lost; returns False if not. Raises: APIError"""

    @property
    def response(self) -> bytes:
        return FileContent(self.path.read_bytes()).response

    async def behind(self, number: int) -> AsyncIterator[bytes]:
        with self.path.open("rb") as file:
            async for events in follow_file(file, number, self._more):
                yield events

    async def _more(self) -> bool:
        """Return False if the response was deleted or cannot be taken up now: its client asks again."""
        await asyncio.sleep(POLL_INTERVAL)
        with contextlib.suppress(APIError):
            self.take_up()
            return True
        return False

    async def cancel(self) -> None:
        if not self.content.last:
            try:
                self.path.with_suffix(CANCEL).touch(mode=0o600)
            except OSError as error:
                raise not_written(self.path, error) from None
            async for _ in self.behind(2**63):
                pass


Run = BackgroundRun | OthersRun
"""A response that was created with `background`, as its readers see it."""
