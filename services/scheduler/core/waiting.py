"""Requests without a slot, in the order in which they will be served."""

import heapq
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from services.scheduler.core.request import Request


class WaitingQueue:
    """Requests by order key. A preempted request therefore precedes everything that arrived after it."""

    def __init__(self) -> None:
        self._heap: list[int] = []
        """Order keys of members and of some that have left; the latter are removed when they reach the top."""
        self._members: dict[int, Request] = {}
        self.num_tokens = 0
        """Tokens of all members; the limit on queued tokens counts these."""

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Request]:
        """Iterate over all members in order."""
        return iter(request for _, request in sorted(self._members.items()))

    def add(self, request: Request) -> None:
        self._members[request.order_key] = request
        heapq.heappush(self._heap, request.order_key)
        self.num_tokens += len(request.token_ids)

    def remove(self, request: Request) -> None:
        del self._members[request.order_key]
        self.num_tokens -= len(request.token_ids)

    def set_tokens(self, request: Request, token_ids: NDArray[np.int32]) -> None:
        """Replace the tokens of a member: some arrived after it was preempted."""
        self.num_tokens += len(token_ids) - len(request.token_ids)
        request.token_ids = token_ids

    def head(self) -> Request | None:
        while self._heap:
            request = self._members.get(self._heap[0])
            if request is not None:
                return request
            heapq.heappop(self._heap)
        return None

    def in_order(self) -> Iterator[Request]:
        """Iterate from the head. Cheap if the walk ends early; members may be removed during the walk."""
        walked: list[int] = []
        try:
            while (request := self.head()) is not None:
                while self._heap and self._heap[0] == request.order_key:  # twice if it left and came back
                    heapq.heappop(self._heap)
                walked.append(request.order_key)
                yield request
        finally:
            for order_key in walked:
                if order_key in self._members:
                    heapq.heappush(self._heap, order_key)
