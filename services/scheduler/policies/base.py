"""The interface of batching policies."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol, Self, runtime_checkable

import numpy as np

from services.config import SchedulerConfig
from services.scheduler.core.kv_cache import KVCacheManager
from services.scheduler.core.ledger import Ledger
from services.scheduler.core.limits import Limits
from services.scheduler.core.request import Request
from services.scheduler.core.slots import FREE, SlotColumns, SlotIds
from services.scheduler.core.waiting import WaitingQueue


class SchedulerView(NamedTuple):
    """The state that a policy reads while a step is formed. Only the scheduler writes it."""

    running: SlotIds
    """Live slots by order key."""
    slots: SlotColumns
    ledger: Ledger
    waiting: WaitingQueue
    kv: KVCacheManager
    limits: Limits
    next_step: int
    """Id of the step that is being formed."""

    def ready(self, rows: SlotIds) -> SlotIds:
        """Return those of `rows` whose next token can be computed now."""
        return rows[self.slots.wanted(rows, self.next_step, self.limits.stages) > 0]

    def candidates(self) -> Iterator[Request]:
        """Iterate over the waiting requests, in order, that do not wait for their stale rows or for an adapter seat.
        Each may be admitted meanwhile.

        Once no running request with an adapter precedes one that waits for a seat, nobody with an adapter passes it: so
        a seat becomes free (adapter seat).
        """
        seated, held = self.adapters(), False
        for request in self.waiting:
            if request.stale_rows:
                continue
            if request.lora is None:
                yield request
            elif held or (request.lora.digest not in seated and len(seated) >= self.limits.max_loras):
                held = held or request.order_key < min(seated.values(), default=0)
            else:
                yield request
                seated = self.adapters()

    def adapters(self) -> dict[str, int]:
        """Return the adapters of the slots that are not free, which the workers hold, each with the lowest order key of
        its requests."""
        seated: dict[str, int] = {}
        slots = np.flatnonzero(self.slots.state != FREE).tolist() if self.limits.max_loras else []
        for request in map(self.slots.request, slots):
            if request.lora is not None:
                key = request.order_key
                seated[request.lora.digest] = min(key, seated.get(request.lora.digest, key))
        return seated

    def admissible(self) -> Iterator[tuple[Request, int]]:
        """Iterate over waiting requests that seats and blocks would admit now, in order, each with the tokens of its
        prefix hit.

        For `begin` only: while requests are being admitted, the scheduler itself walks the queue.
        """
        seats = min(self.limits.max_num_seqs - len(self.running), len(self.slots.free))
        free = self.kv.num_free
        for request in self.candidates():
            if seats <= 0:
                return
            prefix = self.kv.find_prefix(request)
            num_tokens = len(request.token_ids)
            # Blocks behind windows are freed meanwhile.
            needed = min(self.kv.num_missing(prefix, num_tokens), self.limits.most_blocks(num_tokens))
            if needed > free:
                return
            seats, free = seats - 1, free - needed
            yield request, self.kv.covered(prefix)


@dataclass(frozen=True, slots=True)
class StepBudget:
    """Limits of one step. None: no limit."""

    tokens: int
    """Maximum number of tokens in the step, at least 1."""
    chunk: int
    """Maximum number of tokens of one request in the step, at least 1."""
    decodes: int | None = None
    """Maximum number of requests past their prefill; each computes a token and its drafts."""
    prefill: int | None = None
    """Maximum number of tokens of requests in prefill, new ones included."""
    admissions: int | None = None
    """Maximum number of waiting requests that enter."""
    runner_reports: bool = False
    """The runner may report another prefill progress than planned (runner-reported progress). Requests then enter with
    blocks for all their tokens, and blocks are shared only when a result has confirmed them."""


@runtime_checkable
class BatchingPolicy(Protocol):
    """Questions that `StepPlanner.schedule` asks. A policy has no loop, no queue and no state (stateless policy): it
    derives every answer from the view, so an abort, a preemption or an additional call cannot corrupt it."""

    def begin(self, view: SchedulerView) -> StepBudget:
        """Return the budget of the step. Called once at the start of each `schedule()`."""

    def order(self, view: SchedulerView) -> SlotIds:
        """Return the running slots in the order in which they take from the budget. A slot that is left out is not in
        the step. Called again if a request was preempted meanwhile."""

    def admit(self, view: SchedulerView, request: Request, hit: int, count: int) -> tuple[int, int]:
        """Return the first slice of a waiting request: (prefix tokens taken from the cache, tokens computed).

        Offered are `hit` cached tokens and `count` more. Both may be lowered, `hit` to whole blocks; what the hit loses
        may be added to the count, within the budget. A count of 0 keeps this request and all behind it waiting.
        """


@runtime_checkable
class ConfigurablePolicy(BatchingPolicy, Protocol):
    """A policy that `--batching-policy` can name."""

    @classmethod
    def from_config(cls, config: SchedulerConfig, limits: Limits) -> Self:
        """Return a policy for one epoch.

        Raises: ValueError, if it cannot work within `limits`; the text names the number that would do.
        """
