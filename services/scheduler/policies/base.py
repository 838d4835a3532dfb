from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from services.scheduler.core.kv_cache import KVCacheManager
from services.scheduler.core.ledger import Ledger
from services.scheduler.core.limits import Limits
from services.scheduler.core.request import Request
from services.scheduler.core.slots import SlotColumns, SlotIds
from services.scheduler.core.waiting import WaitingQueue


@dataclass(frozen=True, slots=True)
class SchedulerView:
    """What a policy may look at while a step is formed. It reads; only the scheduler writes."""

    running: SlotIds
    """Live slots in order of rank."""
    slots: SlotColumns
    ledger: Ledger
    waiting: WaitingQueue
    kv: KVCacheManager
    limits: Limits
    next_step: int
    """Id of the step that is being formed."""

    def ready(self, rows: SlotIds) -> SlotIds:
        """Those of `rows` whose next token could be computed now."""
        return rows[self.slots.wanted(rows, self.next_step, self.limits.stages) > 0]

    def admissible(self) -> Iterator[tuple[Request, int]]:
        """Waiting requests that seats and blocks would admit now, in order, each with its prefix hit in tokens.

        For `begin` only: while requests are being admitted the queue is walked already."""
        seats = min(self.limits.max_num_seqs - len(self.running), len(self.slots.free))
        free = self.kv.num_free
        for request in self.waiting.in_order():
            if seats <= 0:
                return
            if request.stale_rows:
                continue
            prefix = self.kv.find_prefix(request)
            needed = self.kv.num_missing(prefix, len(request.token_ids))
            if needed > free:
                return
            seats, free = seats - 1, free - needed
            yield request, len(prefix) * self.limits.block_size


@dataclass(frozen=True, slots=True)
class StepBudget:
    """What one step may hold. None: no limit of its own."""

    tokens: int
    """Most tokens in the step, at least 1."""
    chunk: int
    """Most tokens of one request in the step, at least 1."""
    decodes: int | None = None
    """Most requests that are past their prefill; each computes a token and its drafts."""
    prefill: int | None = None
    """Most tokens of requests that are not, waiting ones included."""
    admissions: int | None = None
    """Most waiting requests that may enter."""
    runner_reports: bool = False
    """The runner may report other prefill progress than it was told (spec 5(b) 14). Requests then enter with blocks for
    all their tokens, and blocks are shared when a result has confirmed them, not before."""


class BatchingPolicy(Protocol):
    """Small questions that `Scheduler.schedule` asks. A policy has no loop, no queue and no state: what it needs to
    know is in the view, so that an abort, a preemption or an additional call cannot corrupt it."""

    def begin(self, view: SchedulerView) -> StepBudget:
        """Called once at the start of each `schedule()`."""
        ...

    def order(self, view: SchedulerView) -> SlotIds:
        """The running slots in the order in which they take from the budget; leaving one out hides it this step.
        Called again when a request was preempted meanwhile."""
        ...

    def admit(self, view: SchedulerView, request: Request, hit: int, count: int) -> tuple[int, int]:
        """The first slice of a waiting request: (prefix tokens taken from the cache, tokens computed).

        Offered are `hit` cached tokens and `count` more; either may be lowered, to whole blocks of cache, and the count
        be raised by what the hit loses, within the budget. A count of 0 keeps this request and all behind it waiting.
        """
        ...
