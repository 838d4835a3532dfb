"""Responses that are generated apart from the connection that requested them."""

import asyncio
import contextlib
import fcntl
import logging
import os
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from services.frontend.engine.ledger import RequestLedger
from services.frontend.engine.streams import ResponseStream
from services.frontend.errors import GONE, APIError, internal_error
from services.frontend.openai.answering import Generation
from services.frontend.openai.answers.choice import Delivered
from services.frontend.responses_api.answers import ResponseEvents
from services.frontend.responses_api.response_file import (
    CANCEL,
    FileContent,
    StoredHead,
    StoredLine,
    follow_file,
    not_written,
)
from services.frontend.responses_api.responses import ResponseObject

log = logging.getLogger("runahead.frontend")

POLL_INTERVAL = 0.05
"""Seconds between two looks at a file that another frontend writes."""
WATCH_INTERVAL = 0.25
"""Seconds between two looks for another frontend that cancelled or deleted a response of this one."""


@dataclass(eq=False)
class OwnRun:
    """A response that this frontend generates, and its file, which is made with the first events.

    It ends by itself, or by `fail`, but not with a connection. The sink of its `ResponseStream`, which is never full.
    """

    path: Path
    head: StoredHead
    _on_growth: Callable[[int], None]
    """Called with the number of bytes that were written."""
    _lock: int | None = None
    """The open file, if there is one."""

    def __post_init__(self) -> None:
        self.has_begun = False
        """The first events are written: a later failure to write ends the response."""
        self.on_writable: Callable[[], None] | None = None
        self.is_full = self._is_complete = False
        self._grown = asyncio.Event()
        self._answer: ResponseEvents | None = None
        self._stream: ResponseStream | None = None
        """Both are set while the response is generated."""
        self._last = b""
        self._batches: list[list[int]] = []
        self._identity, self._num_tokens = "", 0
        self._unwritten = b""
        """Events that the file does not have."""

    def start(
        self, answer: ResponseEvents, generation: Generation, ledger: RequestLedger, delivered: Delivered
    ) -> None:
        """Write the events of this answer, and the tokens that they are made of. `delivered`: what the file has."""
        (choice,) = generation.choices
        self._answer, self._stream = answer, generation.response
        self._num_tokens = sum(map(len, delivered.batches))

        def on_chunk() -> None:
            entry, tokens = ledger.entry(choice.number), choice.output[self._num_tokens : choice.num_unfinished_tokens]
            self._identity = entry.identity if entry else ""
            self._num_tokens += len(tokens)
            self._batches.append(tokens)

        answer.on_end, answer.on_chunk = self._on_end, on_chunk

    @property
    def response(self) -> bytes:
        """The response as it is now, as JSON."""
        return self._last if self._answer is None else msgspec.json.encode(self._answer.to_json())

    async def finish(self) -> APIError | None:
        """Write all events behind the opening ones. Return the error that ended the response, if one did."""
        answer, stream, failure = self._answer, self._stream, None
        assert answer is not None
        assert stream is not None
        try:
            last = await stream.last(self) + answer.closing()
        except APIError as error:
            failure, last = error, answer.error(error)
        except Exception:
            log.exception("a response in the background failed with a bug: request_id=%s", stream.request_id)
            failure = internal_error()
            last = answer.error(failure)
        self.write(last, self._last)
        return failure

    def _on_end(self, response: ResponseObject) -> None:
        """Keep the bytes alone, as the parser and the items take more memory."""
        self._last = msgspec.json.encode(response)
        self._answer = self._stream = None

    async def cancel(self) -> None:
        """End the response, unless it has ended, and wait for its end."""
        self.fail(APIError(GONE, "the response was cancelled"))
        await self._complete()

    def fail(self, error: APIError) -> None:
        """End the response with `error` soon, unless it has ended."""
        if self._stream is not None:
            self._stream.fail(error)

    def write(self, data: bytes, response: bytes = b"") -> None:
        """Add complete events. With the last ones comes the response, as JSON.

        Raises: APIError, if the first events cannot be written
        """
        self._is_complete |= bool(response)
        if self._unwritten:
            self._unwritten += data
        else:
            line = StoredLine(data.decode(), self._batches, self._identity)
            if response:
                line.response = msgspec.Raw(response)
            self._batches = []
            try:
                self._append(msgspec.json.encode(line) + b"\n")
            except OSError as error:
                self._on_error(error, data)
        if response:
            self.release()
        self._grown.set()
        self._grown = asyncio.Event()

    def release(self) -> None:
        """Give up the lock."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _append(self, line: bytes) -> None:
        """Raises: OSError"""
        if self._lock is None:
            self.path.parent.mkdir(mode=0o700, exist_ok=True)
            self._lock = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            line = msgspec.json.encode(self.head) + b"\n" + line
        size = len(line)
        while line:
            line = line[os.write(self._lock, line) :]
        self._on_growth(size)

    def _on_error(self, error: OSError, data: bytes) -> None:
        """Give up the file, so that no other frontend goes on from it."""
        self._unwritten = data
        with contextlib.suppress(OSError):
            self.path.unlink()
        failure = not_written(self.path, error)
        if not self.has_begun:
            self.release()
            raise failure
        self.fail(failure)

    async def behind(self, number: int) -> AsyncIterator[bytes]:
        """Yield the events behind a sequence number as they are written, until the last one."""
        with contextlib.suppress(FileNotFoundError), self.path.open("rb") as file:
            async for events in follow_file(file, number, self._more):
                yield events
        if self._unwritten:
            yield self._unwritten

    async def _more(self) -> bool:
        if not self._is_complete and not self._unwritten:
            await self._grown.wait()
            return True
        await self._complete()
        return False

    async def _complete(self) -> None:
        """Wait for the last event."""
        while not self._is_complete:
            await self._grown.wait()

    async def watch(self) -> None:
        """Fail the response when its file is deleted, or another frontend cancels it, until it ends."""
        marker = self.path.with_suffix(CANCEL)
        while True:
            if self._lock is None or self._is_complete:
                marker.unlink(missing_ok=True)
                return
            if not os.fstat(self._lock).st_nlink and not self._unwritten:
                self.fail(APIError(500, "the response was deleted, or had no room in the store of responses"))
            elif marker.exists():
                self.fail(APIError(GONE, "the response was cancelled"))
            await asyncio.sleep(WATCH_INTERVAL)


@dataclass(frozen=True)
class OthersRun:
    """A response that another frontend generates, or generated."""

    path: Path
    content: FileContent
    take_up: Callable[[], bool]
    """Goes on with the response if its frontend is lost; returns False if not. Raises: APIError"""

    @property
    def head(self) -> StoredHead:
        return self.content.head

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


Run = OwnRun | OthersRun
"""A response that was created with `background`, as its readers see it."""
