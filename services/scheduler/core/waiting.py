"""Requests without a slot, in the order in which they are to be served."""

import heapq
from collections.abc import Iterator

import numpy as np

from services.scheduler.core.request import Request


class WaitingQueue:
    """Ordered by rank, so a preempted request stands before everything that arrived after it."""

    def __init__(self) -> None:
        self._heap: list[int] = []
        """Ranks of members, and of some that left: these go when they come to the top."""
        self._members: dict[int, Request] = {}
        self.num_tokens = 0
        """Tokens that wait to be computed: the bound on queued prompt tokens counts these."""

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Request]:
        """In order of rank."""
        return iter(request for _, request in sorted(self._members.items()))

    def add(self, request: Request) -> None:
        self._members[request.rank] = request
        heapq.heappush(self._heap, request.rank)
        self.num_tokens += len(request.token_ids)

    def remove(self, request: Request) -> None:
        del self._members[request.rank]
        self.num_tokens -= len(request.token_ids)

    def append_token(self, request: Request, token: int) -> None:
        """A token that arrived after its request was preempted."""
        request.token_ids = np.append(request.token_ids, np.int32(token))
        self.num_tokens += 1

    def head(self) -> Request | None:
        while self._heap:
            request = self._members.get(self._heap[0])
            if request is not None:
                return request
            heapq.heappop(self._heap)
        return None

    def in_order(self) -> Iterator[Request]:
        """Walks the queue from its head, cheaply when the walk ends early. Members may be removed on the way."""
        walked: list[int] = []
        try:
            while (request := self.head()) is not None:
                while self._heap and self._heap[0] == request.rank:  # more than once if it left and came back
                    heapq.heappop(self._heap)
                walked.append(request.rank)
                yield request
        finally:
            for rank in walked:
                if rank in self._members:
                    heapq.heappush(self._heap, rank)
