"""Requests without a slot, in the order in which they are to be served."""

import heapq
from collections.abc import Iterator

import numpy as np

from services.scheduler.request import Request


class WaitingQueue:
    """Ordered by rank, so a preempted request stands before everything that arrived after it."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, Request]] = []
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
        heapq.heappush(self._heap, (request.rank, request))
        self.num_tokens += len(request.token_ids)

    def remove(self, request: Request) -> None:
        """Its entry in the heap goes when it comes to the top."""
        del self._members[request.rank]
        self.num_tokens -= len(request.token_ids)

    def append_token(self, request: Request, token: int) -> None:
        """A token that arrived after its request was preempted."""
        request.token_ids = np.append(request.token_ids, np.int32(token))
        self.num_tokens += 1

    def head(self) -> Request | None:
        while self._heap:
            request = self._heap[0][1]
            if self._members.get(request.rank) is request:
                return request
            heapq.heappop(self._heap)
        return None

    def in_order(self) -> Iterator[Request]:
        """Walks the queue from its head, cheaply when the walk ends early. Members may be removed on the way."""
        walked: list[tuple[int, Request]] = []
        try:
            while (request := self.head()) is not None:
                walked.append(heapq.heappop(self._heap))
                yield request
        finally:
            for item in walked:
                if self._members.get(item[0]) is item[1]:
                    heapq.heappush(self._heap, item)
