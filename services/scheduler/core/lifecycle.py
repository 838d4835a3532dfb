"""Requests between both owners: finish, preemption, loss of the workers.

Stateless; acts on what survives (`RequestStore`) and on the present epoch (`EpochState`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from protocol.requests import Finish
from services.scheduler.core.epoch import EpochState
from services.scheduler.core.observer import PreemptionCause, RequestPreempted
from services.scheduler.core.request import Request, RequestStatus
from services.scheduler.core.slots import DELIVER, DROP
from services.scheduler.core.store import RequestStore


@dataclass(eq=False)
class Lifecycle:
    store: RequestStore
    epoch: EpochState

    def finish(self, request: Request, finish: Finish | None) -> None:
        """End a request in any state; `finish` None: nothing is sent (abort). Its rows in flight are ignored."""
        if request.status is RequestStatus.RUNNING:
            self.epoch.leave(request.slot, DROP)
        elif request in self.store.loading.load_of:
            if (load := self.store.loading.leave(request)) is not None:
                self.epoch.loads.end(load, 0)
        elif not self.store.compiling.cancel(request):
            self.store.waiting.remove(request)
            self.drop_stale(request)
        self.store.end(request, finish)

    def preempt(self, slot: int, cause: PreemptionCause, stale: int = DELIVER) -> None:
        """Move a running request back to the queue with its confirmed tokens.

        Its tokens in flight are appended when they arrive (stale delivery), or with `stale=DROP` ignored and sampled
        again; the request may then resume at once.
        """
        promised = int(self.epoch.slots.sampling[slot]) if stale == DELIVER else 0
        request = self._return(slot, DELIVER if promised else DROP)
        request.stale_rows += promised
        request.num_preemptions += 1
        self.store.counters["num_preemptions"] += 1
        self.store.observers.emit(RequestPreempted(request.key, slot, cause))

    def _return(self, slot: int, state: int) -> Request:
        request = self.epoch.slots.request(slot)
        self.epoch.leave(slot, state)
        request.become(RequestStatus.PREEMPTED)
        self.store.waiting.add(request)
        return request

    def drop_stale(self, request: Request) -> None:
        """Ignore the rows in flight of a preempted request (stale drop)."""
        slots = self.epoch.slots
        for slot, owner in enumerate(slots.owner if request.stale_rows else ()):
            if owner is request and slots.state[slot] == DELIVER:
                slots.state[slot] = DROP
        request.stale_rows = 0

    def drop_blocks(self, names: Sequence[bytes]) -> int:
        """Remove the blocks with these names from the prefix cache, and end the loads that would fill such ones
        (dropped block). Return the number of blocks."""
        dropped = set(names)
        for load in [*self.store.loading]:
            if not dropped.isdisjoint(load.names):
                self.epoch.loads.end(load, 0)
        return self.epoch.kv.drop(names)

    def end_loads(self) -> None:
        for load in [*self.store.loading]:
            self.epoch.loads.end(load, 0)

    def void(self) -> None:
        """The workers are lost: running requests wait again with their confirmed tokens, every resume gate is open, and
        the epoch is void."""
        self.store.counters["wasted_tokens_total:lost_epoch"] += int(self.epoch.slots.inflight.sum())
        for slot in self.epoch.running.tolist():
            self._return(slot, DROP)
        self.end_loads()
        self.store.loading.unsent.clear()
        self.store.loading.ahead.clear()
        for request in self.store.waiting:
            self.drop_stale(request)
            request.asked = False
        self.epoch.void()
