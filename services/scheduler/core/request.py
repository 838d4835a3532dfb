"""A request and the states it may be in. A transition that is not in the table raises and changes nothing."""

import enum

import numpy as np
from numpy.typing import NDArray

from protocol.requests import Finish, FinishReason, RequestTimes
from protocol.sampling import Pooling, SamplingParams
from services.scheduler.grammar import Grammar


class RequestStatus(enum.Enum):
    WAITING = enum.auto()
    """Never scheduled yet."""
    RUNNING = enum.auto()
    """Owns a live slot and its blocks."""
    PREEMPTED = enum.auto()
    """Lost slot and blocks, kept its tokens; waits to be recomputed."""
    FINISHED = enum.auto()
    """Terminal. In-flight rows may still name its slot; what they bring is ignored."""


_TRANSITIONS: dict[RequestStatus, frozenset[RequestStatus]] = {
    RequestStatus.WAITING: frozenset({RequestStatus.RUNNING, RequestStatus.FINISHED}),
    RequestStatus.RUNNING: frozenset({RequestStatus.PREEMPTED, RequestStatus.FINISHED}),
    RequestStatus.PREEMPTED: frozenset({RequestStatus.RUNNING, RequestStatus.FINISHED}),
    RequestStatus.FINISHED: frozenset(),
}


_NO_DRAFTS = np.empty(0, np.int32)


class IllegalTransition(Exception):
    """A state change the table does not know: a bug in the scheduler, never the peer's fault."""


RANK_BITS = 42
"""A rank is `priority << RANK_BITS | arrival`; 2^42 arrivals outlast any process."""


class Request:
    """One request from arrival to its finish.

    What changes each step lives in the columns of its slot (`SlotTable`), not here. Without a slot (waiting or
    preempted) the request holds its own tokens.
    """

    __slots__ = (
        "block_hashes",
        "cache_salt",
        "client",
        "draft_ids",
        "first_token",
        "grammar",
        "num_accepted_tokens",
        "num_cached_tokens",
        "num_draft_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "number",
        "params",
        "pooling",
        "queued",
        "rank",
        "request_id",
        "scheduled",
        "slot",
        "stale_rows",
        "status",
        "token_ids",
    )

    def __init__(
        self,
        client: int,
        number: int,
        token_ids: NDArray[np.int32],
        num_prompt_tokens: int,
        params: SamplingParams,
        rank: int,
        cache_salt: str = "",
        pooling: Pooling = Pooling.NONE,
        request_id: str = "",
        queued: float = 0.0,
    ) -> None:
        self.client = client
        self.number = number
        self.token_ids = token_ids
        """int32[T]: prompt and confirmed outputs; valid while `slot` is -1."""
        self.num_prompt_tokens = num_prompt_tokens
        self.params = params
        self.rank = rank
        """Order among requests, unique: lower is served first and preempted last."""
        self.cache_salt = cache_salt
        self.pooling = pooling
        self.grammar: Grammar | None = None
        """What the output must match; it has accepted the confirmed output tokens, and no others."""
        self.status = RequestStatus.WAITING
        self.slot = -1
        self.stale_rows = 0
        """Rows of an earlier slot in flight whose tokens will be delivered; no resume before 0 (S1-14)."""
        self.block_hashes: list[bytes] = []
        """Hash chain over the full blocks of the known tokens, as far as computed."""
        self.num_cached_tokens = 0
        self.num_preemptions = 0
        self.draft_ids = _NO_DRAFTS
        """int32[proposed]: what its latest sampling row proposed, NO_DRAFT where nothing; under a grammar only."""
        self.num_draft_tokens = 0
        """Verified so far, in slots it has left."""
        self.num_accepted_tokens = 0
        self.request_id = request_id
        """The external id, for log lines."""
        self.queued = queued
        """Times on the scheduler's clock, in seconds; see `RequestTimes`."""
        self.scheduled = 0.0
        self.first_token = 0.0

    def become(self, status: RequestStatus) -> None:
        """Raises: IllegalTransition, with nothing changed."""
        if status not in _TRANSITIONS[self.status]:
            raise IllegalTransition(
                f"request {self.client}/{self.number}: {self.status.name} -> {status.name}"
            )
        self.status = status

    def matching(self, token_ids: list[int]) -> int:
        """How many of new output tokens, from the first on, are what the output must match."""
        if self.grammar is None:
            return len(token_ids)
        for index, token in enumerate(token_ids):
            if not self.grammar.accept(token):
                return index
        return len(token_ids)

    @property
    def finished(self) -> bool:
        return self.status is RequestStatus.FINISHED

    @property
    def reads_prefix_cache(self) -> bool:
        """Whether it can do without computing positions that others have computed."""
        return self.params.prompt_logprobs is None and self.pooling is not Pooling.MEAN

    @property
    def stops_from(self) -> int:
        """Total tokens from which stop tokens count. Under a grammar at once: one that `min_tokens` forbids is only
        sampled where nothing else may follow."""
        return self.num_prompt_tokens + (self.params.min_tokens if self.grammar is None else 0)

    def finish_message(
        self, reason: FinishReason, stop_token: int | None = None, message: str = ""
    ) -> Finish:
        """The one terminal message of this request. EOS is not named as a stop reason, a client's stop token is."""
        named = stop_token if stop_token not in self.params.eos_token_ids else None
        return Finish(self.number, reason, named, self.num_cached_tokens, self.num_preemptions, message)

    def times(self, ended: float) -> RequestTimes:
        return RequestTimes(self.queued, self.scheduled, self.first_token, ended)

    @staticmethod
    def rank_of(priority: int, arrival: int) -> int:
        return (priority << RANK_BITS) | arrival

    @staticmethod
    def priority_of(rank: int) -> int:
        return rank >> RANK_BITS
