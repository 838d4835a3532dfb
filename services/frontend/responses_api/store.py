"""Responses that clients may continue by `previous_response_id`: in memory as JSON, bounded by bytes and age."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import msgspec
from pydantic import TypeAdapter

from services.frontend.errors import APIError, invalid
from services.frontend.responses_api.background import BackgroundRun, EventLog, MemoryLog, Run
from services.frontend.responses_api.responses import ResponseObject
from services.frontend.responses_api.schemas import Item

MAX_BYTES = 64 << 20
"""Size of all stored conversations together. Responses of the API key that has the most bytes make room."""
MAX_SECONDS = 3600.0
"""Age at which a response is deleted; one that is still generated then fails."""
OVERHEAD = 1024
"""Bytes that a stored response takes besides its JSON, at most."""
_NOT_CONTINUED = ("queued", "in_progress", "failed", "cancelled")
"""Statuses of responses without a whole answer."""
ITEM_LIST: TypeAdapter[list[Item]] = TypeAdapter(list[Item])


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """JSON, as parsed items take eight times as much memory."""

    id: str
    written: bytes | Run
    """The response; that of one which was created with `background` may grow."""
    conversation: bytes
    """Items before the answer."""
    num_given: int
    """Number of those at the end of the conversation that this turn's request had."""

    @property
    def response(self) -> bytes:
        """The response as it is now."""
        return self.written if isinstance(self.written, bytes) else self.written.response

    def items(self) -> list[Item]:
        """Return the conversation up to and with the answer. Raises: APIError, if the answer is not whole"""
        response = msgspec.json.decode(self.response)
        if response.get("status") in _NOT_CONTINUED:
            raise invalid(
                f"the response is {response['status']}; only one that is completed or incomplete can be continued",
                "previous_response_id",
            )
        return self._before() + ITEM_LIST.validate_python(response["output"])

    def run(self, param: str | None = None) -> Run:
        """Return the run of a response with `background`. Raises: APIError, if it is another one"""
        if isinstance(self.written, bytes):
            raise invalid(
                "this response was not created with background; its events were not kept, and it cannot be cancelled",
                param,
            )
        return self.written

    def given(self) -> list[Item]:
        """Return the items of this turn's request."""
        return self._before()[-self.num_given :]

    def _before(self) -> list[Item]:
        return ITEM_LIST.validate_json(self.conversation)


@dataclass(frozen=True, slots=True)
class _Kept(StoredResponse):
    expires: float = 0.0

    @property
    def size(self) -> int:
        if isinstance(self.written, BackgroundRun) and isinstance(self.written.events, MemoryLog):
            written = self.written.events.size
        else:
            written = len(self.response)
        return written + len(self.conversation) + OVERHEAD


@dataclass
class _Share:
    """Responses of one API key."""

    by_id: dict[str, _Kept] = field(default_factory=dict)
    """Oldest first."""
    size: int = 0
    """Bytes."""

    def oldest(self) -> _Kept:
        return next(iter(self.by_id.values()))

    def add(self, stored: _Kept) -> None:
        self.by_id[stored.id] = stored
        self.size += stored.size

    def drop(self, id: str, reason: str) -> None:
        """Delete a response. One that is still generated fails with `reason`."""
        dropped = self.by_id.pop(id)
        self.size -= dropped.size
        if isinstance(dropped.written, BackgroundRun):
            dropped.written.fail(APIError(500, reason))


class Origin(msgspec.Struct, frozen=True):
    """The source of a response with `background`, from which another frontend can go on with it."""

    body: str
    """The request body, as the client sent it."""
    model: str
    created: int
    """Seconds since 1970."""
    prompt: bytes
    """Token ids, int32 little-endian."""
    params: bytes
    """`SamplingParams` as MessagePack, with the seed that was drawn."""


def not_stored(id: str, param: str | None) -> APIError:
    return APIError(
        404,
        f"response {id!r:.80} is not stored here: it is unknown, deleted, expired, or was made by another frontend",
        param,
        "previous_response_not_found" if param else "response_not_found",
        logged="this response is not stored here",
    )


class ResponseStore:
    """The responses of one frontend. Another frontend does not have them: its clients get an error of status 404."""

    def __init__(self, max_bytes: int = MAX_BYTES, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_bytes, self._clock = max_bytes, clock
        self._shares: dict[str, _Share] = {}
        """By digest of the API key. No key sees another's."""

    def add(
        self, tenant: str, response: ResponseObject, history: Sequence[Item], given: Sequence[Item]
    ) -> None:
        """Store a response, unless it is larger than the store.

        A key with less than an equal share of the bytes loses none for another key's.

        Args:
            history: items of the earlier turns.
            given: items of this turn's request, at least one.
        """
        self._add(tenant, response["id"], msgspec.json.encode(response), history, given)

    def log(
        self, tenant: str, id: str, origin: Origin, history: Sequence[Item], given: Sequence[Item]
    ) -> EventLog:
        """Return where the events of a response with `background` are kept."""
        return MemoryLog(partial(self.grow, tenant, id))

    def begin(
        self, tenant: str, id: str, run: BackgroundRun, history: Sequence[Item], given: Sequence[Item]
    ) -> None:
        """Store a response whose run has started, as `add`.

        Raises: APIError, if it is larger than the store
        """
        if not self._add(tenant, id, run, history, given):
            raise APIError(
                413, f"the request is larger than the store of responses ({self._max_bytes} bytes)"
            )

    def _add(
        self,
        tenant: str,
        id: str,
        written: bytes | Run,
        history: Sequence[Item],
        given: Sequence[Item],
    ) -> bool:
        """Return False if the response is larger than the store."""
        self._expire()
        conversation = ITEM_LIST.dump_json([*history, *given], exclude_none=True)
        stored = _Kept(id, written, conversation, len(given), self._clock() + MAX_SECONDS)
        if stored.size > self._max_bytes:
            return False
        self._shares.setdefault(tenant, _Share()).add(stored)
        self._make_room()
        return True

    def grow(self, tenant: str, id: str, num_bytes: int) -> None:
        """Count bytes that the run of a response takes more. As in `add`, others make room, or this one fails."""
        share = self._shares.get(tenant)
        if share is not None and id in share.by_id:
            share.size += num_bytes
            self._make_room()

    def _make_room(self) -> None:
        while self.size > self._max_bytes:
            largest = max(self._shares.values(), key=lambda share: share.size)
            largest.drop(largest.oldest().id, "the store of responses is full")

    @property
    def size(self) -> int:
        """Bytes of all responses."""
        return sum(share.size for share in self._shares.values())

    def get(self, tenant: str, id: str, param: str | None = None, go_on: object = None) -> StoredResponse:
        """Raises: APIError, if this key has no such response. `go_on` is for responses of lost frontends."""
        self._expire()
        found = self._shares[tenant].by_id.get(id) if tenant in self._shares else None
        if found is None:
            raise not_stored(id, param)
        return found

    def delete(self, tenant: str, id: str) -> None:
        """Raises: APIError, if this key has no such response"""
        self.get(tenant, id)
        self._shares[tenant].drop(id, "the response was deleted")

    def _expire(self) -> None:
        now = self._clock()
        for share in self._shares.values():
            while share.by_id and share.oldest().expires <= now:
                share.drop(share.oldest().id, f"the response was not complete after {MAX_SECONDS:g} s")
        self._shares = {tenant: share for tenant, share in self._shares.items() if share.by_id}
