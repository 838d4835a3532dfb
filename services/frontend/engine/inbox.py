"""What the engine says of a request, on its way from the step's message to whoever writes the answer."""

import asyncio
import logging
from collections.abc import Callable
from typing import NamedTuple

from starlette.types import Receive

from protocol.requests import Embedding, Finish
from services.frontend.errors import GONE, APIError

log = logging.getLogger("runahead.frontend")

MAX_TAKEN = 1024
"""Events of one inbox handled in one turn of the loop, a few milliseconds' worth."""
MAX_UNWRITTEN = 256
"""Answers whose bytes wait for those of others to be ready."""


class Likely(NamedTuple):
    """How likely the token at one position of a request's sequence was, and what was likeliest there."""

    position: int
    """Counted from the first token of the prompt."""
    rank: int
    """Of the token itself; 1 is the most likely."""
    token_ids: list[int]
    """The token itself, then the most likely ones, the most likely first."""
    values: list[float]
    """Their log-probabilities; minus infinity is possible."""


Token = tuple[int, int]
"""Its index in the output, and its id."""
Event = Token | Likely | Embedding | Finish | APIError
"""Of one request: a token, what is known of a token (before the token itself), an embedding, or the request's end."""


class Turn:
    """The turn of the loop in which readers learn what a step brought, the same for all of them.

    First they say what is to be written, then all of it is written: with a handle of the loop for each, or with a
    system call after each, the same work takes longer. So it does where a token has to look at much memory, as each
    stream's was forgotten by the caches since the last step: hence `__slots__` along its way.
    """

    def __init__(self) -> None:
        self._due: list[Inbox] = []

    def add(self, inbox: "Inbox") -> None:
        if not self._due:
            asyncio.get_running_loop().call_soon(self._run)
        self._due.append(inbox)

    def _run(self) -> None:
        due, self._due = self._due, []
        for begin in range(0, len(due), MAX_UNWRITTEN):
            told = due[begin : begin + MAX_UNWRITTEN]
            said = [(inbox, data) for inbox in told if (data := inbox.tell())]
            for inbox, data in said:
                try:
                    inbox.write(data)
                except Exception:
                    log.exception("an answer was not written")  # and those of others still are


def _write_nowhere(data: bytes) -> None:
    pass


class Inbox:
    """What has arrived for the choices of one HTTP request; its one reader is told once, however much that is."""

    __slots__ = ("_events", "_is_idle", "_read", "_turn", "_wake", "write")

    def __init__(self, turn: Turn) -> None:
        self._turn = turn
        self._events: list[tuple[int, Event]] = []
        self._wake: asyncio.Future[None] | None = None
        self._read: Callable[[], bytes] | None = None
        self._is_idle = False
        """Whether there is a reader that was told of all so far."""
        self.write: Callable[[bytes], None] = _write_nowhere
        """Where that goes what the reader says when it is told."""

    def put(self, choice: int, event: Event) -> None:
        self._events.append((choice, event))
        if self._is_idle:
            self._is_idle = False
            self._turn.add(self)
        elif self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    def put_first(self, event: APIError) -> None:
        """For every choice; whatever else has arrived does not matter any more."""
        self._events.clear()
        self.put(0, event)

    def watch(self, receive: Receive) -> asyncio.Task[None]:
        """While the task runs, the reader hears of it when the client leaves."""

        async def until_gone() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            self.put_first(APIError(GONE, "the client closed the connection"))

        return asyncio.create_task(until_gone())

    async def take(self) -> list[tuple[int, Event]]:
        """What is there, at least one (choice, event), in order of arrival; no more than others can wait for."""
        while not self._events:
            self._wake = asyncio.get_running_loop().create_future()
            await self._wake
        return self.take_now()

    def take_now(self) -> list[tuple[int, Event]]:
        """`take` without waiting: perhaps nothing."""
        if len(self._events) <= MAX_TAKEN:
            taken, self._events = self._events, []
            return taken
        taken = self._events[:MAX_TAKEN]
        del self._events[:MAX_TAKEN]
        self._tell_of_rest()
        return taken

    def take_token(self) -> tuple[int, Token] | None:
        """If a token is all there is: its choice, and the token. Otherwise nothing is taken."""
        events = self._events
        if len(events) == 1 and type(events[0][1]) is tuple:
            return events.pop()  # type: ignore[return-value]
        return None

    def read_by(self, read: Callable[[], bytes], write: Callable[[bytes], None]) -> None:
        """From here on `read` is called, in a turn of the loop of its own, when there is something to `take_now`; what
        it returns goes to `write`, unless it is empty. `read` raises nothing.

        A task that waits takes several times as long to wake.
        """
        self._read, self.write, self._is_idle = read, write, True
        self._tell_of_rest()

    def stop_reading(self) -> None:
        self._read, self.write, self._is_idle = None, _write_nowhere, False

    def tell(self) -> bytes:
        """What the reader has to say, if there is one."""
        if self._read is None:
            return b""
        self._is_idle = True
        return self._read()

    def _tell_of_rest(self) -> None:
        if self._is_idle and self._events:
            self._is_idle = False
            self._turn.add(self)
