"""The open requests of a frontend, and what it takes to submit each of them again. No sockets, no clock.

Rules (docs/invariants.md):

- The frontend owns the stream: prompt, parameters, seed and delivered tokens of every open request are kept here, so
  that a scheduler or a connection may be lost at any moment.
- Next index: a token is delivered if its index is the next one. So each arrives exactly once, whatever is sent twice.
- Suspects: a request that was open when several schedulers in a row died, without progress in between, is submitted
  alone among its like. If the scheduler dies again, the request is refused. An expulsion of this frontend for a message
  that the scheduler could not read counts like a death, for requests without an output since they were sent.
"""

import sys
from collections.abc import Iterable
from dataclasses import dataclass

from msgspec.structs import replace

from protocol.codec import pack
from protocol.requests import Finish, FinishReason, GenerateRequest
from protocol.suspects import PROGRESS, SUSPECT_AFTER
from services.frontend.engine.streams import RequestStream, Token
from services.frontend.errors import APIError

GUILTY = (
    f"the scheduler died {SUSPECT_AFTER + 1} times while it had this request, or could not read it, "
    "the last time without any other suspect; it is refused"
)


@dataclass(slots=True)
class LedgerEntry:
    stream: RequestStream
    request: GenerateRequest
    """As it was submitted first."""
    since: float
    """When it was submitted first: monotonic seconds."""
    holder: int = 0
    """Incarnation of the scheduler that had it last and is not known to be dead; 0: none."""
    attempts: int = 0
    """Number of schedulers that have died, and of expulsions, since the request made progress."""
    sent_length: int = 0
    """Output tokens when it was sent last."""
    seen_length: int = 0
    """Output tokens when its progress was checked last."""
    progress: float = 0.0
    """When the check last found more of them: monotonic seconds."""
    was_sent: bool = False
    """A scheduler has had it."""

    @property
    def has_progress(self) -> bool:
        return len(self.stream.output) - self.sent_length > PROGRESS

    @property
    def is_suspect(self) -> bool:
        return self.attempts >= SUSPECT_AFTER and not self.has_progress

    def count_death(self, incarnation: int) -> None:
        """Count the death of the scheduler that had it, if another one is connected now."""
        if self.holder not in (0, incarnation):
            self.attempts, self.holder = 1 if self.has_progress else self.attempts + 1, 0

    def end(self) -> Finish | None:
        """Return the end of a request that no scheduler must see again, or None."""
        number, output = self.request.number, self.stream.output
        if self.attempts > SUSPECT_AFTER:
            return Finish(number, FinishReason.ERROR, message=GUILTY)
        if self.was_sent and len(output) >= self.request.params.max_tokens:  # only its end was lost
            return Finish(number, FinishReason.LENGTH)
        return None

    def submission(self, incarnation: int, now: float) -> GenerateRequest:
        """Return the message for the scheduler that is connected; it has the request from now on."""
        request, output = self.request, self.stream.output
        age = max(now - self.since, sys.float_info.min) if self.was_sent else 0.0
        self.was_sent, self.holder, self.sent_length = True, incarnation, len(output)
        return replace(
            request,
            token_ids=request.token_ids + pack(output) if output else request.token_ids,
            incarnation=incarnation,
            attempts=self.attempts,
            age=age,
        )


class RequestLedger:
    """Open requests by number, oldest first."""

    def __init__(self) -> None:
        self._entries: dict[int, LedgerEntry] = {}
        self.streams: dict[int, RequestStream] = {}
        """The same requests, for the path of each token."""
        self._unsent: dict[int, LedgerEntry] = {}
        """Requests that the scheduler that is connected does not have."""
        self._on_trial: LedgerEntry | None = None
        """The suspect that it has."""
        self.resubmitted = 0
        """Requests that were submitted again, over all time."""

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    def open(self, stream: RequestStream, request: GenerateRequest, now: float) -> None:
        """Keep a request. `submissions` returns it next. `now`: monotonic seconds."""
        entry = LedgerEntry(stream, request, now, progress=now)
        self._entries[request.number] = self._unsent[request.number] = entry
        self.streams[request.number] = stream

    def close(self, number: int) -> RequestStream | None:
        """Remove a request that has ended; None if it is not open."""
        entry = self._entries.pop(number, None)
        self._unsent.pop(number, None)
        if entry is self._on_trial:
            self._on_trial = None
        return self.streams.pop(number, None)

    def end(self, number: int, end: Finish | APIError) -> None:
        """Remove a request and pass its end to it. Unknown numbers are ignored."""
        if (stream := self.close(number)) is not None:
            stream.end = end
            stream.response.mark_due(stream)

    def deliver(self, numbers: list[int], tokens: Iterable[Token]) -> None:
        """Pass tokens to their requests. One that is not the next is passed for its index alone: a repeated one is
        counted there, and a gap is an error."""
        streams = self.streams
        for number, token in zip(numbers, tokens, strict=True):
            if (stream := streams.get(number)) is not None:
                if token[0] == len(stream.output):
                    stream.output.append(token[1])
                stream.tokens.append(token)
                if not stream.is_due:  # as `mark_due` would find, without a call per token
                    stream.response.mark_due(stream)

    def stuck(self, now: float, seconds: float) -> list[RequestStream]:
        """Return the requests that have made no progress for a number of seconds. Call it regularly.

        Args:
            now: monotonic seconds.
        """
        found = []
        for entry in self._entries.values():
            if (length := len(entry.stream.output)) != entry.seen_length:
                entry.seen_length, entry.progress = length, now
            elif now - entry.progress > seconds:
                found.append(entry.stream)
        return found

    def expelled(self) -> None:
        """The scheduler has ended the connection for a bad message. Call it before `disconnected`."""
        for number, entry in self._entries.items():
            if number not in self._unsent and entry.holder and len(entry.stream.output) == entry.sent_length:
                entry.attempts, entry.holder = entry.attempts + 1, 0

    def disconnected(self) -> None:
        """The connection is lost: no scheduler has a request."""
        self._unsent, self._on_trial = dict(self._entries), None

    def submissions(self, incarnation: int, now: float) -> list[GenerateRequest]:
        """Return the messages to send, oldest first. Suspects wait for the one before them; requests that no scheduler
        must see again end.

        Args:
            incarnation: the scheduler that is connected.
            now: monotonic seconds.
        """
        messages = []
        if self._on_trial is not None and self._on_trial.has_progress:
            self._on_trial = None
        for number, entry in list(self._unsent.items()):
            entry.count_death(incarnation)
            if (end := entry.end()) is not None:
                self.end(number, end)
                continue
            if entry.is_suspect:
                if self._on_trial is not None:
                    continue
                self._on_trial = entry
            del self._unsent[number]
            self.resubmitted += entry.was_sent
            messages.append(entry.submission(incarnation, now))
        return messages
