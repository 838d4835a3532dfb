"""Where the requests of one epoch are, and how they come and go: waiting, running in a slot, or retired behind a fence.

The first layer of the scheduler; results.py applies what workers return, scheduler.py forms the steps.
"""

from collections import Counter
from typing import Self

import numpy as np
from msgspec.structs import replace

from protocol.codec import pack
from protocol.requests import Finish, FinishReason
from protocol.steps import ReleaseSlots
from services.scheduler.core.kv_cache import KVCacheManager
from services.scheduler.core.ledger import Ledger
from services.scheduler.core.limits import Limits
from services.scheduler.core.observer import (
    Observers,
    PreemptionCause,
    RequestFinished,
    RequestKey,
    RequestPreempted,
)
from services.scheduler.core.outputs import OutputBuffer
from services.scheduler.core.request import Request, RequestStatus
from services.scheduler.core.slots import DELIVER, DROP, Rows, SlotTable
from services.scheduler.core.waiting import WaitingQueue


class Lifecycle:
    def __init__(self, limits: Limits, epoch: int, before: Self | None) -> None:
        """`before` is that of the epoch before, voided: its waiting requests, outputs and counters go on."""
        self.limits = limits
        self.epoch = epoch
        self.slots = SlotTable(limits.num_slots, limits.max_model_len)
        self.ledger = Ledger(self.slots)
        self.kv = KVCacheManager(
            self.slots, limits.num_blocks, limits.block_size, limits.enable_prefix_caching
        )
        self.waiting: WaitingQueue = before.waiting if before else WaitingQueue()
        self.running: Rows = np.empty(0, np.int64)
        """Live slots in order of rank."""
        self.outputs: OutputBuffer = before.outputs if before else OutputBuffer()
        self.counters: Counter[str] = before.counters if before else Counter()
        self.observers: Observers = before.observers if before else Observers()
        self.now: float = before.now if before else 0.0
        """The time of the last `EngineCore.advance`, in seconds."""
        self._ended: list[RequestKey] = []
        """Requests that ended with the result that is being applied."""
        if before:
            self.kv.queries, self.kv.hits = before.kv.queries, before.kv.hits
        self._fences: dict[int, list[int]] = {}
        """step_id -> retired slots that leave when that step was processed."""
        self._released: list[int] = []
        """Slots that left; the next message tells the worker."""

    def add(self, request: Request) -> None:
        self.waiting.add(request)

    def finish(self, request: Request, finish: Finish | None) -> None:
        """Ends a request in any state; `finish` None tells nobody (abort). What is in flight for it is ignored."""
        if request.status is RequestStatus.RUNNING:
            self._leave(request.slot, DROP)
        else:
            self.waiting.remove(request)
            if request.stale_rows:
                self._drop_stale(request)
        self.counters["finished"] += 1
        self.end(request, finish)

    def end(self, request: Request, finish: Finish | None) -> None:
        """The one place where a request becomes finished: it has left the queue, its slot or the compiler."""
        request.become(RequestStatus.FINISHED)
        listening = self.observers.listening
        if finish is not None or listening:
            complete = replace(
                finish or request.finish_message(FinishReason.ABORT),
                num_draft_tokens=request.num_draft_tokens,
                num_accepted_tokens=request.num_accepted_tokens,
                times=request.times(ended=self.now),
            )
            if finish is not None:
                self.outputs.finish(request.client, complete)
            if listening:
                self._ended.append((request.client, request.number))
                self.observers.emit(RequestFinished(request.client, request.request_id, complete))

    def preempt(self, slot: int, cause: PreemptionCause, stale: int = DELIVER) -> None:
        """Back to waiting with every confirmed token; blocks go behind the fence. In-flight rows are delivered when
        they arrive, or dropped and sampled again (`stale=DROP`; the request may then resume at once)."""
        promised = int(self.slots.sampling[slot]) if stale == DELIVER else 0
        request = self._return(slot, DELIVER if promised else DROP)
        request.stale_rows += promised
        request.num_preemptions += 1
        self.counters["preemptions"] += 1
        if self.observers.listening:
            self.observers.emit(RequestPreempted((request.client, request.number), slot, cause))

    def _return(self, slot: int, stale: int) -> Request:
        """From running to waiting, with every confirmed token."""
        request = self.slots.request(slot)
        self._leave(slot, stale)
        request.become(RequestStatus.PREEMPTED)
        self.waiting.add(request)
        return request

    def reset_prefix_cache(self, reset_running: bool = False) -> bool:
        """Forgets every cached block; with `reset_running`, running requests are recomputed too (drop mode).
        False if requests that keep running still share blocks."""
        if reset_running:
            for slot in self.running.tolist()[::-1]:
                self.preempt(slot, PreemptionCause.RESET, stale=DROP)
        self.kv.pool.forget_all()
        return not len(self.running)

    def void(self) -> None:
        """The workers are lost: nothing in flight will return, no cached block is left. Running requests wait again
        with their confirmed tokens, and nothing keeps them from being resumed (spec 0.7)."""
        for slot in self.running.tolist():
            self._return(slot, DROP)
        for request in list(self.waiting):
            if request.stale_rows:
                self._drop_stale(request)
        self.ledger.steps.clear()
        for slots in self._fences.values():
            for slot in slots:
                self._free(slot)
        self._fences.clear()
        self._released.clear()
        self.kv.pool.forget_all()

    def _leave(self, slot: int, state: int) -> None:
        self.running = self.running[self.running != slot]
        self.slots.retire(slot, state)
        if self.ledger.names(slot):
            self._fences.setdefault(int(self.slots.last_step[slot]), []).append(slot)
        else:
            self._free(slot)

    def _free(self, slot: int) -> None:
        self.kv.release(slot)
        self.slots.release(slot)
        self._released.append(slot)

    def _drop_stale(self, request: Request) -> None:
        for slot, owner in enumerate(self.slots.owner):
            if owner is request and self.slots.state[slot] == DELIVER:
                self.slots.state[slot] = DROP
        request.stale_rows = 0

    def take_releases(self) -> ReleaseSlots | None:
        """What workers must still be told when no step is left to carry it (spec 0.4 L5)."""
        if not self._released:
            return None
        message = ReleaseSlots(self.epoch, pack(self._released))
        self._released.clear()
        return message
