"""Outputs on their way to the frontends: columns per frontend, one message per turn of the loop."""

from collections import defaultdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protocol.columns import has_all
from protocol.requests import Embedding, Finish, RequestOutputs
from protocol.rows import LogprobRows
from services.scheduler.core.slots import Column


class _FrontendOutputs:
    """Outputs for one frontend since the last message."""

    def __init__(self) -> None:
        self.rows: list[tuple[bytes, ...]] = []
        """Columns of a message in parts: numbers of requests, indices and token ids."""
        self.finished: list[Finish] = []
        self.logprobs: list[LogprobRows] = []
        self.embeddings: list[Embedding] = []
        self.cached: dict[int, int] = {}

    def add(self, *columns: NDArray[Any]) -> None:
        self.rows.append(tuple(map(np.ndarray.tobytes, columns)))

    def message(self) -> RequestOutputs:
        numbers, indices, token_ids = map(b"".join, zip(*self.rows, strict=True)) if self.rows else (b"",) * 3
        logprobs = LogprobRows.concatenate(self.logprobs).to_message() if self.logprobs else None
        return RequestOutputs(numbers, indices, token_ids, self.finished, logprobs, self.embeddings, cached=self.cached)


class OutputBuffer:
    def __init__(self) -> None:
        self._by_frontend = defaultdict[int, _FrontendOutputs](_FrontendOutputs)

    def __len__(self) -> int:
        """Frontends with outputs to take."""
        return len(self._by_frontend)

    def tokens(self, frontends: Column, numbers: NDArray[np.uint32], indices: Column, token_ids: Column) -> None:
        """Add a row per token, in order for each request."""
        while len(frontends):
            frontend = int(frontends[0])
            mine = frontends == frontend
            if has_all(mine):
                self._by_frontend[frontend].add(numbers, indices, token_ids)
                return
            self._by_frontend[frontend].add(numbers[mine], indices[mine], token_ids[mine])
            others = ~mine
            frontends, numbers = frontends[others], numbers[others]
            indices, token_ids = indices[others], token_ids[others]

    def logprobs(self, frontends: Column, rows: LogprobRows) -> None:
        """Add log-probabilities; `rows.owners` are request numbers of `frontends`, int32[rows]."""
        for frontend in np.unique(frontends).tolist():
            self._by_frontend[frontend].logprobs.append(rows.select(frontends == frontend))

    def cached(self, frontend: int, number: int, count: int) -> None:
        """Add the cached prompt tokens of a request, with its first token."""
        self._by_frontend[frontend].cached[number] = count

    def embedding(self, frontend: int, embedding: Embedding) -> None:
        self._by_frontend[frontend].embeddings.append(embedding)

    def finish(self, frontend: int, finish: Finish) -> None:
        self._by_frontend[frontend].finished.append(finish)

    def drop_frontend(self, frontend: int) -> None:
        self._by_frontend.pop(frontend, None)

    def take(self) -> list[tuple[int, RequestOutputs]]:
        """Return one message per frontend with everything since the last call."""
        taken = [(frontend, outputs.message()) for frontend, outputs in self._by_frontend.items()]
        self._by_frontend.clear()
        return taken
