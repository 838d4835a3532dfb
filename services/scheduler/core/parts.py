"""The classes that the core is composed of.

`EngineCore` builds everything it owns from a `Parts`. The defaults are the only ones used in production; tests pass a
subclass of one of them whose public method does something wrong, and demand that the simulation notices.
"""

from dataclasses import dataclass

from services.scheduler.core.apply import ResultApplier
from services.scheduler.core.batch_queue import BatchQueue
from services.scheduler.core.block_pool import BlockPool
from services.scheduler.core.compiling import CompilingRequests
from services.scheduler.core.deferred_masks import DeferredMasks
from services.scheduler.core.epoch import EpochState
from services.scheduler.core.kv_cache import KVCacheManager
from services.scheduler.core.ledger import Ledger
from services.scheduler.core.lifecycle import Lifecycle
from services.scheduler.core.limits import Limits
from services.scheduler.core.loading import LoadingRequests
from services.scheduler.core.masks import RequestMasks
from services.scheduler.core.observer import Observers
from services.scheduler.core.outputs import OutputBuffer
from services.scheduler.core.pins import Pins
from services.scheduler.core.plan import StepPlanner
from services.scheduler.core.request import Request
from services.scheduler.core.slots import SlotColumns
from services.scheduler.core.store import RequestStore
from services.scheduler.core.waiting import WaitingQueue
from services.scheduler.grammar import INLINE_MASKS, Compiler, MaskMaker
from services.scheduler.policies import BatchingPolicy


@dataclass(frozen=True, slots=True)
class Parts:
    request: type[Request] = Request
    compiling: type[CompilingRequests] = CompilingRequests
    masks: type[RequestMasks] = RequestMasks
    waiting: type[WaitingQueue] = WaitingQueue
    loading: type[LoadingRequests] = LoadingRequests
    outputs: type[OutputBuffer] = OutputBuffer
    store: type[RequestStore] = RequestStore
    queue: type[BatchQueue] = BatchQueue
    slots: type[SlotColumns] = SlotColumns
    ledger: type[Ledger] = Ledger
    pool: type[BlockPool] = BlockPool
    pins: type[Pins] = Pins
    kv: type[KVCacheManager] = KVCacheManager
    epoch: type[EpochState] = EpochState
    lifecycle: type[Lifecycle] = Lifecycle
    planner: type[StepPlanner] = StepPlanner
    applier: type[ResultApplier] = ResultApplier
    deferred_masks: type[DeferredMasks] = DeferredMasks

    def build_store(self, compiler: Compiler | None, mask_maker: MaskMaker = INLINE_MASKS) -> RequestStore:
        compiling, masks = self.compiling(compiler), self.masks(mask_maker)
        return self.store(compiling, masks, self.waiting(), self.loading(), self.outputs(), self.pins())

    def build_epoch(
        self,
        number: int,
        limits: Limits,
        policy: BatchingPolicy,
        observers: Observers | None = None,
        pins: Pins | None = None,
    ) -> EpochState:
        slots = self.slots(limits.num_slots, limits.max_model_len)
        pool = self.pool(limits.num_blocks)
        kv = self.kv(slots, pool, limits.block_size, limits.enable_prefix_caching, observers, limits.groups, pins)
        return self.epoch(number, limits, policy, slots, self.ledger(slots), kv)


DEFAULT_PARTS = Parts()
