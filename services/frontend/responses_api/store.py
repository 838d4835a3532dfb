"""Responses that clients may continue by `previous_response_id`: in memory, bounded by bytes and age."""

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from services.frontend.errors import APIError
from services.frontend.responses_api.responses import ResponseObject
from services.frontend.responses_api.schemas import Item

MAX_BYTES = 64 << 20
"""Size of all stored conversations together, as JSON. The oldest ones make room."""
MAX_SECONDS = 3600.0
"""Age at which a response is deleted."""


@dataclass(frozen=True)
class StoredResponse:
    tenant: str
    """Digest of the API key that made it; no other key sees it."""
    response: ResponseObject
    items: Sequence[Item]
    """The conversation up to and with the answer."""
    input: list[dict[str, Any]]
    """Items of this turn's request."""
    size: int
    """Bytes."""
    expires: float


class ResponseStore:
    """The responses of one frontend. Another frontend does not have them: its clients get an error of status 404."""

    def __init__(self, max_bytes: int = MAX_BYTES, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_bytes, self._clock = max_bytes, clock
        self._stored: OrderedDict[str, StoredResponse] = OrderedDict()
        """By id, oldest first."""
        self._bytes = 0

    def add(
        self, tenant: str, response: ResponseObject, items: Sequence[Item], given: Sequence[Item]
    ) -> None:
        """Store a response, unless it is larger than the store.

        Args:
            items: the conversation up to and with the answer.
            given: those of them that this turn's request had.
        """
        self._expire()
        written = [item.model_dump(mode="json", exclude_none=True) for item in given]
        conversation = sum(len(item.model_dump_json()) for item in items)
        size = conversation + len(msgspec.json.encode((response, written)))
        if size > self._max_bytes:
            return
        while self._bytes + size > self._max_bytes:
            self._drop(next(iter(self._stored)))
        expires = self._clock() + MAX_SECONDS
        self._stored[response["id"]] = StoredResponse(tenant, response, items, written, size, expires)
        self._bytes += size

    def get(self, tenant: str, id: str, param: str | None = None) -> StoredResponse:
        """Raises: APIError, if this key has no such response"""
        self._expire()
        found = self._stored.get(id)
        if found is None or found.tenant != tenant:
            raise APIError(
                404,
                f"response {id!r:.80} is not stored here: it is unknown, expired, or was made by another frontend",
                param,
                "previous_response_not_found" if param else "response_not_found",
            )
        return found

    def delete(self, tenant: str, id: str) -> None:
        """Raises: APIError, if this key has no such response"""
        self.get(tenant, id)
        self._drop(id)

    def _expire(self) -> None:
        now = self._clock()
        while self._stored and next(iter(self._stored.values())).expires <= now:
            self._drop(next(iter(self._stored)))

    def _drop(self, id: str) -> None:
        self._bytes -= self._stored.pop(id).size
