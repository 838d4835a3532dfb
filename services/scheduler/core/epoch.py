"""The state that ends with an epoch: slots, the ledger, the KV cache, fences, the policy and the order of running
requests.

Rules (docs/invariants.md):

- A slot is *live* while its request runs. `leave` retires it at once. Slot and blocks become *free* only behind the
  fence: when the last step in flight that names the slot was processed (`open_fence`).
- The workers learn of each free slot exactly once, in the next message to them (release notice).
- Every count of promised work is a sum over the ledger. Step ids are taken at dispatch: 1, 2, 3 ... without gaps.
- `void` leaves nothing: no step, fence, cached block, held block or notice (epoch void). The object is not used for
  another epoch.
"""

import numpy as np

from services.scheduler.core.block_loads import BlockLoads
from services.scheduler.core.kv_cache import KVCacheManager
from services.scheduler.core.ledger import InflightStep, Ledger
from services.scheduler.core.limits import Limits
from services.scheduler.core.request import Request
from services.scheduler.core.slots import Column, SlotColumns, SlotIds
from services.scheduler.core.store import RequestStore
from services.scheduler.core.waiting import WaitingQueue
from services.scheduler.policies import BatchingPolicy, SchedulerView


class EpochState:
    def __init__(self, number: int, limits: Limits, policy: BatchingPolicy, store: RequestStore) -> None:
        self.number, self.limits, self.policy = number, limits, policy
        self.slots = SlotColumns(limits.num_slots, limits.max_model_len)
        self.ledger = Ledger(self.slots)
        self.kv = KVCacheManager(self.slots, limits, store.observers, store.pins)
        self.loads = BlockLoads(store, self.kv, limits)
        self.running: SlotIds = np.empty(0, np.int64)
        """Live slots by order key."""
        self.fences: dict[int, list[int]] = {}
        """step_id -> retired slots that become free when that step was processed."""
        self.released: list[int] = []
        """Free slots that the workers have not been notified of."""
        self.next_step = 1

    def continue_from(self, next_step: int, generations: Column) -> None:
        """Number steps and generations as the workers expect them. No step is in flight."""
        self.next_step = self.ledger.oldest = next_step
        self.slots.generation[:] = generations

    def view(self, waiting: WaitingQueue) -> SchedulerView:
        return SchedulerView(self.running, self.slots, self.ledger, waiting, self.kv, self.limits, self.next_step)

    def enter(self, request: Request, prefix: list[int]) -> int:
        """Give a request a live slot whose table starts with the cached blocks of `prefix`."""
        slot = self.slots.assign(request, self.limits.max_model_len)
        self.kv.adopt(slot, prefix)
        self.slots.computed[slot] = self.kv.covered(prefix)
        at = np.searchsorted(self.slots.order_key[self.running], request.order_key)
        self.running = np.insert(self.running, at, slot)
        return slot

    def leave(self, slot: int, state: int) -> None:
        """Retire a live slot. It becomes free now, or behind its fence if a step in flight names it."""
        self.running = self.running[self.running != slot]
        self.slots.retire(slot, state)
        if self.ledger.names(slot):
            self.fences.setdefault(int(self.slots.last_step[slot]), []).append(slot)
        else:
            self.free(slot)

    def open_fence(self, step: InflightStep) -> None:
        """The step was processed: free the slots behind its fence."""
        for slot in self.fences.pop(step.step_id, ()):
            self.free(slot)

    def free(self, slot: int) -> None:
        self.kv.release(slot)
        self.slots.release(slot)
        self.released.append(slot)

    def take_released(self) -> list[int]:
        """Return the slots to notify the workers of."""
        released, self.released = self.released, []
        return released

    def void(self) -> None:
        """The workers are lost. No request is running any more; drop everything else."""
        self.ledger.oldest = self.next_step
        for slots in self.fences.values():
            for slot in slots:
                self.free(slot)
        self.fences.clear()
        self.released.clear()
        self.kv.pins.release(self.kv)
        self.kv.pool.forget_all()
