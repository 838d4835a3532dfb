"""Requests without a slot, in the order in which they will be served."""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from services.scheduler.core.request import Request


class WaitingQueue:
    """Requests by order key. A preempted request therefore precedes everything that arrived after it."""

    def __init__(self) -> None:
        self._keys: list[int] = []
        """Order keys of the members, ascending."""
        self._members: dict[int, Request] = {}
        self.num_tokens = 0
        """Tokens of all members; the limit on queued tokens counts these."""

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Request]:
        """Iterate over all members in order. They may leave meanwhile."""
        at = 0
        while at < len(self._keys):
            key = self._keys[at]
            yield self._members[key]
            at = bisect_right(self._keys, key)

    def add(self, request: Request) -> None:
        self._members[request.order_key] = request
        insort(self._keys, request.order_key)
        self.num_tokens += len(request.token_ids)

    def remove(self, request: Request) -> None:
        del self._members[request.order_key]
        del self._keys[bisect_left(self._keys, request.order_key)]
        self.num_tokens -= len(request.token_ids)

    def set_tokens(self, request: Request, token_ids: NDArray[np.int32]) -> None:
        """Replace the tokens of a member: some arrived after it was preempted."""
        self.num_tokens += len(token_ids) - len(request.token_ids)
        request.token_ids = token_ids

    def head(self) -> Request | None:
        return self._members[self._keys[0]] if self._keys else None
