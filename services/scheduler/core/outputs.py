"""Token events on their way to the frontends: columns per frontend, one message per step."""

import numpy as np
from numpy.typing import NDArray

from protocol.codec import pack
from protocol.requests import Embedding, Finish, RequestOutputs
from protocol.rows import LogprobRows
from services.scheduler.core.request import Request


class _Columns:
    def __init__(self) -> None:
        self.numbers: list[NDArray[np.uint32]] = []
        self.indices: list[NDArray[np.int32]] = []
        self.token_ids: list[NDArray[np.int32]] = []
        self.finished: list[Finish] = []
        self.logprobs: list[LogprobRows] = []
        self.embeddings: list[Embedding] = []

    def add(
        self, numbers: NDArray[np.uint32], indices: NDArray[np.int32], token_ids: NDArray[np.int32]
    ) -> None:
        self.numbers.append(numbers)
        self.indices.append(indices)
        self.token_ids.append(token_ids)

    def message(self) -> RequestOutputs:
        numbers, indices, token_ids = (
            b"".join(map(pack, parts)) for parts in (self.numbers, self.indices, self.token_ids)
        )
        logprobs = LogprobRows.concatenate(self.logprobs).to_message() if self.logprobs else None
        return RequestOutputs(numbers, indices, token_ids, self.finished, logprobs, self.embeddings)


class OutputBuffer:
    def __init__(self) -> None:
        self._by_client: dict[int, _Columns] = {}

    def _of(self, client: int) -> _Columns:
        return self._by_client.setdefault(client, _Columns())

    def tokens(
        self,
        clients: NDArray[np.int32],
        numbers: NDArray[np.uint32],
        indices: NDArray[np.int32],
        token_ids: NDArray[np.int32],
    ) -> None:
        """Columns with a row per token, in order for each request."""
        while len(clients):
            client = int(clients[0])
            mine = clients == client
            if mine.all():
                self._of(client).add(numbers, indices, token_ids)
                return
            self._of(client).add(numbers[mine], indices[mine], token_ids[mine])
            clients, numbers, indices, token_ids = (
                clients[~mine],
                numbers[~mine],
                indices[~mine],
                token_ids[~mine],
            )

    def token(self, request: Request, index: int, token_id: int) -> None:
        number, row = np.array([request.number], np.uint32), np.array([index, token_id], np.int32)
        self._of(request.client).add(number, row[:1], row[1:])

    def logprobs(self, clients: NDArray[np.int32], rows: LogprobRows) -> None:
        """`rows.owners` are request numbers of `clients`, int32[rows]."""
        for client in np.unique(clients).tolist():
            self._of(client).logprobs.append(rows.select(clients == client))

    def embedding(self, client: int, embedding: Embedding) -> None:
        self._of(client).embeddings.append(embedding)

    def finish(self, client: int, finish: Finish) -> None:
        self._of(client).finished.append(finish)

    def drop_client(self, client: int) -> None:
        self._by_client.pop(client, None)

    def take(self) -> list[tuple[int, RequestOutputs]]:
        """Everything since the last call, a message per frontend."""
        taken = [(client, columns.message()) for client, columns in self._by_client.items()]
        self._by_client.clear()
        return taken
