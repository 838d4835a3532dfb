"""Requests without a slot, in the order in which they will be served."""

from bisect import bisect_left, insort
from collections.abc import Iterator
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from services.scheduler.core.request import Request

_order_key = attrgetter("order_key")


class WaitingQueue:
    """Requests by order key. A preempted request therefore precedes everything that arrived after it."""

    def __init__(self) -> None:
        self._members: list[Request] = []
        self.num_tokens = 0
        """Tokens of all members; the limit on queued tokens counts these."""

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Request]:
        """Iterate over all members in order. The member that was yielded last may leave meanwhile."""
        at = 0
        while at < len(self._members):
            request = self._members[at]
            yield request
            at += self._members[at : at + 1] == [request]

    def add(self, request: Request) -> None:
        insort(self._members, request, key=_order_key)
        self.num_tokens += len(request.token_ids)

    def remove(self, request: Request) -> None:
        del self._members[self._members.index(request, bisect_left(self._members, request.order_key, key=_order_key))]
        self.num_tokens -= len(request.token_ids)

    def set_tokens(self, request: Request, token_ids: NDArray[np.int32]) -> None:
        """Replace the tokens of a member: some arrived after it was preempted."""
        self.num_tokens += len(token_ids) - len(request.token_ids)
        request.token_ids = token_ids

    def head(self) -> Request | None:
        return self._members[0] if self._members else None
