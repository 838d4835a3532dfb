"""A request and its states. A transition that is not in the table raises and changes nothing."""

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from protocol.lora import LoRAAdapter
from protocol.media import Media, MediaItem
from protocol.pooling import PoolingParams
from protocol.requests import Finish, FinishReason
from protocol.sampling import Pooling, SamplingParams
from services.scheduler.grammar import Grammar, Masks
from services.scheduler.transitions import IllegalTransition

RequestKey = tuple[int, int]
"""(frontend, number): identifies an open request. The frontend chooses the number."""


class RequestStatus(enum.Enum):
    WAITING = enum.auto()
    """Never scheduled."""
    RUNNING = enum.auto()
    """Owns a live slot and its blocks."""
    PREEMPTED = enum.auto()
    """Lost its slot and blocks, kept its tokens; waits to be recomputed."""
    FINISHED = enum.auto()
    """Terminal. Steps in flight may still name its slot; their rows are ignored."""


_TRANSITIONS: dict[RequestStatus, frozenset[RequestStatus]] = {
    RequestStatus.WAITING: frozenset({RequestStatus.RUNNING, RequestStatus.FINISHED}),
    RequestStatus.RUNNING: frozenset({RequestStatus.PREEMPTED, RequestStatus.FINISHED}),
    RequestStatus.PREEMPTED: frozenset({RequestStatus.RUNNING, RequestStatus.FINISHED}),
    RequestStatus.FINISHED: frozenset(),
}

_NO_DRAFTS = np.empty(0, np.int32)
ARRIVAL_BITS = 42
"""An order key is `priority << ARRIVAL_BITS | arrival`; a process never sees 2^41 arrivals."""
_NEW = 1 << (ARRIVAL_BITS - 1)
"""Arrivals from here on are those of new requests."""
_TIE_BITS = 15
_OLDEST = (1 << (ARRIVAL_BITS - 1 - _TIE_BITS)) - 1
"""Largest distinguished age, in milliseconds: 18 hours."""


@dataclass(slots=True, eq=False)
class Request:
    """One request from arrival to its finish.

    Numbers that change each step are columns of its slot (`SlotColumns`). While it has no slot (waiting or preempted),
    the request holds its own tokens.
    """

    frontend: int
    number: int
    token_ids: NDArray[np.int32]
    """int32[T]: prompt and confirmed output tokens; valid while `slot` is -1."""
    num_prompt_tokens: int
    params: SamplingParams
    order_key: int
    """The request with the lowest key is served first and preempted last."""
    cache_salt: str = ""
    """`GenerateRequest.salt`, which has the adapter."""
    pooling: Pooling = Pooling.NONE
    request_id: str = ""
    """The external id, for log lines."""
    queued: float = 0.0
    """Times on the scheduler's clock, in seconds; see `RequestTimes`."""
    scheduled: float = 0.0
    first_token: float = 0.0
    grammar: Grammar | None = None
    """Constraint on the output. It has accepted exactly the confirmed output tokens."""
    num_replayed: int = 0
    """Output tokens that the request came with and its grammar has accepted while it was not queued yet."""
    masks: Masks | None = None
    """Masks of the next row, once they are made; None again when a token is emitted."""
    mask_ticket: int = 0
    """Ticket of the masks that are being made; 0: none are."""
    status: RequestStatus = RequestStatus.WAITING
    slot: int = -1
    stale_rows: int = 0
    """Sampling rows of an earlier slot in flight whose tokens will be delivered. The resume gate opens at 0."""
    block_hashes: list[bytes] = field(default_factory=list)
    """Hash chain over the full blocks of the known tokens. Later blocks may not be hashed yet."""
    kv_peers: tuple[str, ...] = ()
    """Workers of another engine that may have blocks of its prefix, by rank."""
    lora: LoRAAdapter | None = None
    pooling_params: PoolingParams | None = None
    media: Media | None = None
    asked: bool = False
    """True: a tier was asked for its blocks since it last left a slot."""
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    draft_ids: NDArray[np.int32] = field(default_factory=lambda: _NO_DRAFTS)
    """int32[proposed]: drafts of the latest sampling row, NO_DRAFT where there is none; only with a grammar."""
    num_draft_tokens: int = 0
    """Verified drafts, counted when the request leaves a slot."""
    num_accepted_tokens: int = 0

    def become(self, status: RequestStatus) -> None:
        """Change the status.

        Raises: IllegalTransition, with nothing changed.
        """
        if status not in _TRANSITIONS[self.status]:
            raise IllegalTransition(
                f"request {self.frontend}/{self.number} ({self.request_id or 'no id'}): "
                f"{self.status.name} -> {status.name}"
            )
        self.status = status

    def matching(self, token_ids: list[int]) -> int:
        """Advance the grammar by new output tokens. Return how many of them, from the first on, match."""
        if self.grammar is None:
            return len(token_ids)
        self.masks = None
        for index, token in enumerate(token_ids):
            if not self.grammar.accept(token):
                return index
        return len(token_ids)

    @property
    def key(self) -> RequestKey:
        return self.frontend, self.number

    @property
    def finished(self) -> bool:
        return self.status is RequestStatus.FINISHED

    @property
    def reads_prefix_cache(self) -> bool:
        """False if every position must be computed, because the answer contains something of each."""
        return self.params.prompt_logprobs is None and self.pooling is not Pooling.MEAN

    @property
    def items(self) -> Sequence[MediaItem]:
        """Images and sounds of the prompt."""
        return () if self.media is None else self.media.items

    def token_limit(self, max_model_len: int) -> int:
        """Total tokens at which the request certainly ends (certain end)."""
        return min(self.num_prompt_tokens + self.params.max_tokens, max_model_len)

    @property
    def stops_from(self) -> int:
        """Total tokens from which stop tokens count. With a grammar they always count: where `min_tokens` forbids one,
        it is sampled only if the grammar allows nothing else."""
        return self.num_prompt_tokens + (self.params.min_tokens if self.grammar is None else 0)

    def finish_message(self, reason: FinishReason, stop_token: int | None = None, message: str = "") -> Finish:
        """Return the terminal message. An EOS token is not reported as stop reason, a stop token of the client is."""
        named = stop_token if stop_token not in self.params.eos_token_ids else None
        return Finish(self.number, reason, named, self.num_cached_tokens, self.num_preemptions, message)


def make_order_key(priority: int, number: int, age: float = 0.0) -> int:
    """Order key of the request that was admitted as number `number`. Lower priority numbers come first. Of equal
    priority, requests that another scheduler had admitted come before new ones, the oldest of them first.

    Args:
        age: seconds since the request was first submitted; 0.0: it is new.
    """
    youth = _OLDEST - int(min(1000 * age, _OLDEST))
    arrival = (youth << _TIE_BITS) + number % (1 << _TIE_BITS) if age else _NEW + number
    return (priority << ARRIVAL_BITS) | arrival


def priority_of(order_key: int) -> int:
    return order_key >> ARRIVAL_BITS
