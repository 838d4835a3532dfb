"""The open requests of a frontend, and what it takes to submit each of them again. No sockets, no clock.

Its rules are in docs/invariants.md: the frontend's ledger, next index, one owner, and suspects.
"""

import itertools
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from msgspec.structs import replace

from protocol.codec import pack
from protocol.requests import Finish, FinishReason, GenerateRequest
from protocol.silence import MAX_PAUSE
from protocol.suspects import PROGRESS, SUSPECT_AFTER
from services.frontend.engine.streams import RequestStream
from services.frontend.errors import APIError

Holder = tuple[str, int]
"""Name of an engine, and the incarnation of its scheduler."""
NOBODY = ""
"""Owner of the requests that wait for an engine."""

GUILTY = (
    f"the scheduler or its workers died {SUSPECT_AFTER + 1} times while they had this request, or could not read it, "
    "the last time without any other suspect; it is refused"
)


@dataclass(slots=True)
class LedgerEntry:
    stream: RequestStream
    request: GenerateRequest
    """As it was submitted first, with the number that it has now."""
    since: float
    """When it was submitted first: monotonic seconds."""
    key: int = 0
    """Identifies the request as long as it is open, whatever number it has."""
    engine: str = NOBODY
    """Name of the engine that owns it."""
    identity: str = ""
    """Identity of the engines that have had it; "": none has, or it is not known."""
    holder: Holder | None = None
    """The scheduler that had it last and is not known to be dead."""
    blamed_for: Holder | None = None
    """The scheduler whose death `attempts` counted last; None: there is none, or it is certain."""
    rejections: set[str] = field(default_factory=set)
    """Names of the engines that had no room for it, since it waited last."""
    held_until: float = 0.0
    """Until then no engine is chosen: monotonic seconds."""
    attempts: int = 0
    """Number of schedulers that have died, and of expulsions, since the request made progress."""
    sent_length: int = 0
    """Output tokens when it was sent last."""
    seen_length: int = 0
    """Output tokens when its progress was checked last."""
    idle: float = 0.0
    """Seconds since then without another one."""
    num_admissions: int = 0
    """Number of schedulers that have had it and did not reject it."""
    refusals: dict[str, str] = field(default_factory=dict)
    """Why engines have found it invalid, by their names, although another one had admitted it."""
    only_prompt: bool = False
    """Its engine computes the prompt and one token; another one goes on."""

    @property
    def has_progress(self) -> bool:
        return len(self.stream.output) - self.sent_length > PROGRESS

    @property
    def is_suspect(self) -> bool:
        return self.attempts >= SUSPECT_AFTER and not self.has_progress

    def set_owner(self, engine: str) -> None:
        self.engine = engine
        if engine not in (NOBODY, *(seen := self.stream.response.engines)):
            seen.append(engine)

    def set_kv_peers(self, peers: list[str]) -> None:
        """Name the workers of another engine that may have KV blocks of its prefix."""
        if peers != self.request.kv_peers:
            self.request = replace(self.request, kv_peers=peers)

    def count_death(self, scheduler: Holder) -> None:
        """Count the death of the scheduler that had it, if it is submitted to another one now."""
        if self.holder not in (None, scheduler):
            self.attempts, self.blamed_for = 1 if self.has_progress else self.attempts + 1, self.holder
            self.holder = None

    def is_foreign(self, identity: str) -> bool:
        """Return whether engines of this identity would continue the output of another model."""
        return bool(self.num_admissions and self.identity and identity and self.identity != identity)

    def end(self) -> Finish | None:
        """Return the end of a request that no scheduler must see again, or None."""
        number, output = self.request.number, self.stream.output
        if self.attempts > SUSPECT_AFTER:
            return Finish(number, FinishReason.ERROR, message=GUILTY)
        if len(output) >= self.request.params.max_tokens:  # only its end was lost
            return Finish(number, FinishReason.LENGTH)
        return None

    def submission(self, scheduler: Holder, identity: str, now: float) -> GenerateRequest:
        """Return the message for a scheduler; it has the request from now on."""
        request, output = self.request, self.stream.output
        age = max(now - self.since, sys.float_info.min) if self.num_admissions else 0.0
        self.num_admissions += 1
        self.holder, self.sent_length = scheduler, len(output)
        self.identity = identity or self.identity
        params = request.params
        if output:  # what is known of the prompt came before, and would take another computation of all of it
            params = replace(params, prompt_logprobs=None)
        if self.only_prompt:
            most = len(output) + 1
            params = replace(params, max_tokens=most, min_tokens=min(params.min_tokens, most))
        return replace(
            request,
            token_ids=request.token_ids + pack(output) if output else request.token_ids,
            params=params,
            incarnation=scheduler[1],
            attempts=self.attempts,
            age=age,
        )


class RequestLedger:
    """Open requests by number, oldest first, and the engine that owns each.

    Args:
        on_closed: called with the key of each request that is removed.
        on_forgotten: called with the name of an engine whose refusals are forgotten.
    """

    def __init__(
        self, on_closed: Callable[[int], None] = lambda _: None, on_forgotten: Callable[[str], None] = lambda _: None
    ) -> None:
        self._entries: dict[int, LedgerEntry] = {}
        self.streams: defaultdict[str, dict[int, RequestStream]] = defaultdict(dict)
        """The same requests by owner and number, for the path of each token: an engine reaches those alone that it
        owns."""
        self._by_key: dict[int, LedgerEntry] = {}
        self._keys = itertools.count(1)
        self._unsent: defaultdict[str, dict[int, LedgerEntry]] = defaultdict(dict)
        """By owner: requests that its scheduler does not have."""
        self._on_trial: LedgerEntry | None = None
        """The suspect that a scheduler has."""
        self._on_closed, self._on_forgotten = on_closed, on_forgotten
        self._checked = 0.0
        """When `stuck` was called last: monotonic seconds."""
        self.resubmitted = 0
        """Requests that were submitted again, over all time."""

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, number: int) -> bool:
        return number in self._entries

    @property
    def has_unsent(self) -> bool:
        return any(self._unsent.values())

    def owned(self, engine: str) -> list[LedgerEntry]:
        """Return the requests that an engine owns, oldest first. NOBODY: those that wait for an engine."""
        return [entry for entry in self._entries.values() if entry.engine == engine]

    def oldest(self, count: int) -> Iterator[LedgerEntry]:
        """Return some requests, those that are open longest first."""
        return itertools.islice(self._by_key.values(), count)

    @property
    def waiting(self) -> list[LedgerEntry]:
        """Requests that no engine owns, oldest first."""
        return list(self._unsent[NOBODY].values())

    def owners_of_unsent(self) -> list[str]:
        """Return the owners of requests that no scheduler has; NOBODY may be one of them."""
        return [engine for engine, unsent in self._unsent.items() if unsent]

    def num_owned(self) -> Counter[str]:
        """Return the number of requests by owner."""
        return Counter(entry.engine for entry in self._entries.values())

    def entry(self, number: int) -> LedgerEntry | None:
        return self._entries.get(number)

    def with_key(self, key: int) -> LedgerEntry | None:
        return self._by_key.get(key)

    def open(self, stream: RequestStream, request: GenerateRequest, now: float, identity: str = "") -> LedgerEntry:
        """Keep a request, which nobody owns. If its stream has output, it goes on from there.

        Args:
            now: monotonic seconds.
            identity: identity of the engines that made the output.
        """
        entry = LedgerEntry(stream, request, now, next(self._keys), identity=identity)
        entry.num_admissions = int(bool(stream.output))
        self._by_key[entry.key] = entry
        self._add(request.number, entry)
        return entry

    def assign(self, entry: LedgerEntry, engine: str) -> None:
        """Give a request that no scheduler has another owner. `submissions` returns it next."""
        number = entry.request.number
        self._unsent[engine][number] = self._unsent[entry.engine].pop(number)
        self.streams[engine][number] = self.streams[entry.engine].pop(number)
        entry.set_owner(engine)

    def _add(self, number: int, entry: LedgerEntry) -> None:
        self._entries[number] = self._unsent[entry.engine][number] = entry
        self.streams[entry.engine][number] = entry.stream

    def move(self, number: int, new_number: int, engine: str, is_fault: bool) -> None:
        """Give a request another owner, and another number: what the former owner still sends belongs to no request.

        Args:
            engine: NOBODY: the request waits for an engine.
            is_fault: the former owner is lost; this counts as a death of its scheduler.
        """
        entry = self._entries[number]
        self._remove(number, entry)
        if not is_fault:
            entry.holder = None
        entry.set_owner(engine)
        entry.request = replace(entry.request, number=new_number)
        entry.stream.number = new_number
        self._add(new_number, entry)

    def _remove(self, number: int, entry: LedgerEntry) -> None:
        del self._entries[number], self.streams[entry.engine][number]
        self._unsent[entry.engine].pop(number, None)
        if entry is self._on_trial:
            self._on_trial = None

    def close(self, number: int) -> LedgerEntry | None:
        """Remove a request that has ended; None if it is not open."""
        if (entry := self._entries.get(number)) is None:
            return None
        self._remove(number, entry)
        del self._by_key[entry.key]
        self._on_closed(entry.key)
        return entry

    def end(self, number: int, end: Finish | APIError) -> None:
        """Remove a request and pass its end to it. Unknown numbers are ignored."""
        if (entry := self.close(number)) is not None:
            entry.stream.finish(end)

    def deliver(self, engine: str, numbers: list[int], indices: list[int], tokens: list[int]) -> list[int]:
        """Pass each token of an engine to its request, if it is the next one. A repeated one is counted; a gap is an
        error. Return the numbers that are not those of requests of this engine."""
        streams, strays = self.streams[engine], []
        for number, index, token in zip(numbers, indices, tokens, strict=True):
            if (stream := streams.get(number)) is None:
                strays.append(number)
                continue
            if index == len(stream.output):
                stream.output.append(token)
                stream.tokens.append(token)
                if not stream.is_due and len(stream.tokens) >= stream.interval:  # spares a call per token
                    stream.response.mark_due(stream)
            elif index < len(stream.output):
                stream.duplicates += 1
            else:
                stream.response.fail(APIError(500, "a token of this answer was lost"))
        return strays

    def stuck(self, now: float, seconds: float) -> list[RequestStream]:
        """Return the requests that have made no progress for a number of seconds in which this process ran. Call it
        regularly. `now`: monotonic seconds."""
        found, passed = [], min(now - self._checked, MAX_PAUSE)
        self._checked = now
        for entry in self._entries.values():
            if (length := len(entry.stream.output)) != entry.seen_length:
                entry.seen_length, entry.idle = length, 0.0
            else:
                entry.idle += passed
                if entry.idle > seconds:
                    found.append(entry.stream)
        return found

    def expelled(self, engine: str) -> None:
        """A scheduler has ended the connection for a bad message. Call it before `disconnected`."""
        for entry in self.owned(engine):
            is_unsent = entry.request.number in self._unsent[engine]
            if not is_unsent and len(entry.stream.output) == entry.sent_length:
                entry.attempts, entry.holder = entry.attempts + 1, None

    def disconnected(self, engine: str, is_death: bool = True) -> None:
        """The connection to an engine is lost: its scheduler has no request. Without `is_death` the scheduler was about
        to end, and may have done so."""
        for entry in self._entries.values():
            if entry.blamed_for is not None and entry.blamed_for[0] == engine:
                entry.blamed_for = None  # it was connected then: its workers were lost, and that is certain
        self._unsent[engine] = {entry.request.number: entry for entry in self.owned(engine)}
        for entry in () if is_death else self._unsent[engine].values():
            entry.holder = None
        if self._on_trial is not None and self._on_trial.engine == engine:
            self._on_trial = None

    def forget(self, engine: str) -> None:
        """An engine that owns no request is not connected to any more."""
        self.streams.pop(engine, None)
        self._unsent.pop(engine, None)

    def returned(self, scheduler: Holder) -> None:
        """A scheduler is connected again: it had not died."""
        for entry in self._entries.values():
            if entry.blamed_for == scheduler:
                entry.attempts, entry.blamed_for = max(entry.attempts - 1, 0), None

    def forget_refusals(self, engine: str) -> None:
        """An engine has other settings now, for which it may take the requests that it has refused."""
        for entry in self._entries.values():
            entry.refusals.pop(engine, None)
        self._on_forgotten(engine)

    def submissions(
        self, scheduler: Holder, identity: str, now: float, only_again: bool = False
    ) -> list[GenerateRequest]:
        """Return the messages to send, oldest first. Suspects wait for the one before them; requests that no scheduler
        must see again end, and those with output of another model have no owner from now on.

        Args:
            scheduler: the engine, and the scheduler that is connected.
            identity: its identity; "": not known.
            now: monotonic seconds.
            only_again: requests that no scheduler has had wait.
        """
        messages = []
        if self._on_trial is not None and self._on_trial.has_progress:
            self._on_trial = None
        unsent = self._unsent[scheduler[0]]
        for number, entry in sorted(unsent.items(), key=lambda item: item[1].since):
            if entry.stream.response.has_failed or (only_again and not entry.num_admissions):
                continue
            entry.count_death(scheduler)
            if (end := entry.end()) is not None:
                self.end(number, end)
                continue
            if entry.is_foreign(identity):
                self.assign(entry, NOBODY)
                continue
            if entry.is_suspect:
                if self._on_trial is not None:
                    continue
                self._on_trial = entry
            del unsent[number]
            entry.stream.is_resumed = entry.num_admissions > 0
            self.resubmitted += entry.stream.is_resumed
            messages.append(entry.submission(scheduler, identity, now))
        return messages
