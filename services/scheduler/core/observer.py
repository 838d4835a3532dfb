"""The observer seam: every event that enters the core and every decision that leaves it, as data.

`EngineCore` emits each event exactly once, in the order in which things happen. Inbound events are emitted before they
are processed, so a listener sees a cause before its effects; a recorded sequence of inbound events replays a run.
Events hold references to messages and arrays of the core. A listener must not change them, and must copy an array that
it keeps in mutable form. Nothing is built while nobody listens.
"""

import enum
from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from protocol.block_names import NamedBlocks
from protocol.lora import LoRAAdapter
from protocol.requests import Finish, GenerateRequest
from protocol.steps import GrammarOutput, LoadBlocks, ModelRunnerOutput, ReleaseSlots, SchedulerOutput
from services.scheduler.core.ledger import InflightStep
from services.scheduler.core.limits import Limits
from services.scheduler.core.request import RequestKey
from services.scheduler.core.slots import Column, Mask


class Event(msgspec.Struct, frozen=True):
    """An inbound event or a decision."""


class Record(Event, frozen=True, array_like=True, tag=True):
    """An event that a recording contains as it is (services.scheduler.recording): a message with its name as tag."""


class InboundEvent(Record, frozen=True):
    """An event that enters the core."""


class Decision(Record, frozen=True):
    """A decision that leaves the core. Those with arrays are recorded in another form, and are only an `Event`."""


# -- inbound events ----------------------------------------------------------------------------------------------


class TimeAdvanced(InboundEvent, frozen=True):
    now: float
    """The scheduler's monotonic clock, in seconds. It holds until the next `TimeAdvanced`."""
    worked: float = 0.0
    """Seconds that the shell worked since the `TimeAdvanced` before; 0.0: not measured."""


class RequestArrived(InboundEvent, frozen=True):
    frontend: int
    message: GenerateRequest


class RequestsAborted(InboundEvent, frozen=True):
    frontend: int
    numbers: tuple[int, ...]
    """As received; unknown and finished numbers are included."""


class FrontendLeft(InboundEvent, frozen=True):
    frontend: int


class GrammarReady(InboundEvent, frozen=True):
    ticket: int
    request: RequestKey | None
    """None: the request ended while its grammar was being compiled."""
    error: str
    """Empty if the grammar was compiled."""


class MasksReady(InboundEvent, frozen=True):
    ticket: int
    num_masks: int


class ResultArrived(InboundEvent, frozen=True):
    result: ModelRunnerOutput


class DispatchStarted(InboundEvent, frozen=True):
    """The shell called `dispatch`. The steps and messages that it yields follow as decisions."""


class DispatchInterrupted(InboundEvent, frozen=True):
    """The shell stopped `dispatch` behind the last message, because a worker is gone."""


class PrefixCacheReset(InboundEvent, frozen=True):
    reset_running: bool


class EpochEnded(InboundEvent, frozen=True):
    epoch: int
    is_fault: bool = False
    """The workers were lost, perhaps because of a request in flight."""


class EpochStarted(InboundEvent, frozen=True):
    epoch: int
    limits: Limits


class BlocksAdopted(InboundEvent, frozen=True):
    """The prefix cache of the epoch that has just begun starts with the whole blocks that its workers hold."""

    held: NamedBlocks


class BlocksFilled(InboundEvent, frozen=True):
    """All ranks have filled the first `count` blocks of a load."""

    epoch: int
    ticket: int
    count: int


class AllRequestsFailed(InboundEvent, frozen=True):
    """The epoch ended and every open request ends with `error`."""

    error: str


class CoreRestarted(InboundEvent, frozen=True):
    """While no request was open, the core dropped all that earlier requests left. A new core decides the same from here
    on if it is restarted from these values."""

    epoch: int
    limits: Limits
    next_step: int
    tickets: int
    """Requests admitted so far."""
    generations: bytes
    """int32[slots]"""
    mask_tickets: int = 0
    """The last ticket of `RequestMasks`."""
    load_tickets: int = 0
    """The last ticket of `LoadingRequests`."""


# -- decisions ---------------------------------------------------------------------------------------------------


class RequestRefused(Decision, frozen=True):
    """The answer to a `RequestArrived` that is not admitted."""

    frontend: int
    request_id: str
    finish: Finish


class StepDispatched(Event, frozen=True):
    step: InflightStep
    plan: SchedulerOutput
    requests: tuple[RequestKey, ...]
    """Requests that enter a slot with this step, in the order of `plan.new`."""
    frontends: Column
    """int32[rows], like `numbers`: frontend and number of the request of each row"""
    numbers: NDArray[np.uint32]
    entries: Column
    """int32[rows]: tokens that the request had when it entered its slot"""
    steps_in_flight: int
    """With this one."""
    num_running: int
    num_waiting: int
    """Requests, those whose grammar is being compiled included."""
    kv_cache_usage: float
    """Share of the KV blocks in use."""


class GrammarSent(Event, frozen=True):
    message: GrammarOutput


class LoadSent(Decision, frozen=True):
    message: LoadBlocks


class SlotsReleased(Decision, frozen=True):
    """Slots that are released without a step; other releases are in `StepDispatched.plan.released`."""

    message: ReleaseSlots


class BlocksCached(Event, frozen=True):
    """Consecutive full blocks of one request entered the prefix cache. Emitted only with `Observers.blocks`."""

    hashes: tuple[bytes, ...]
    parent: bytes | None
    """Hash of the block before the first one; None: the request starts with them."""
    token_ids: NDArray[np.int32]
    block_size: int
    salt: str
    lora: LoRAAdapter | None = None
    contents: tuple[bytes, ...] = ()
    """Part of the hash of each block after its tokens, from the images and sounds in it; (): there are none."""


class BlocksEvicted(Event, frozen=True):
    """Blocks left the prefix cache, because others are written to their place. Emitted as `BlocksCached` is."""

    hashes: tuple[bytes, ...]


class TierChanged(Event, frozen=True):
    """Blocks have come to a tier of the workers, and others have left it afterwards. Emitted as `BlocksCached` is."""

    tier: str
    """"host" or "disk"."""
    stored: tuple[bytes, ...]
    removed: tuple[bytes, ...]


class PreemptionCause(enum.Enum):
    BLOCKS = "blocks"
    """Running requests need more blocks than are free."""
    PRIORITY = "priority"
    """A waiting request of better priority takes the seat."""
    RESET = "reset"
    """The prefix cache is reset with running requests."""
    SUSPECT = "suspect"
    """Another request that may be the cause of the workers' deaths runs alone next."""


class RequestPreempted(Decision, frozen=True):
    request: RequestKey
    slot: int
    """The slot that the request leaves."""
    cause: PreemptionCause


class ResultApplied(Event, frozen=True):
    """The result of the oldest step was applied. Columns have a row per entry of `step` with `samples`."""

    step: InflightStep
    result: ModelRunnerOutput
    states: NDArray[np.int8]
    """State of the slot before the result was applied: LIVE, DELIVER, or DROP if the row was ignored."""
    counts: Column
    """Tokens that were appended to the request, at most those of the result."""
    stops: Mask
    """True: the last one is a stop token that ended the request."""
    ended: tuple[RequestKey, ...]
    """Requests that ended with this result, in order; a `RequestFinished` was emitted for each."""


class StaleResultDropped(Decision, frozen=True, tag="StaleRecord"):
    """The result belongs to no step in flight: another epoch, or a repetition."""

    epoch: int
    step_id: int


class ResultRefused(Decision, frozen=True):
    """The rows of a result are not those of its plan; the shell ends the epoch."""

    epoch: int
    step_id: int


class RequestFinished(Decision, frozen=True):
    frontend: int
    request_id: str
    finish: Finish
    """Not sent to the frontend if its reason is ABORT."""


class Observer(Protocol):
    def observe(self, event: Event) -> None:
        """Receive one event. Runs inside the scheduling loop: it must be fast, and must not raise or call the core."""


class Observers:
    """The listeners of one core. Events of every step are built only if `listening` is not empty."""

    __slots__ = ("blocks", "listening", "rank_times")

    def __init__(self) -> None:
        self.listening: tuple[Observer, ...] = ()
        self.rank_times = False
        """A listener needs the step times of every rank: plans are sent with `report_times`."""
        self.blocks = False
        """A listener needs the changes of the prefix cache."""

    def add(self, observer: Observer) -> None:
        """Attach a listener; it receives the events from now on."""
        self.listening = (*self.listening, observer)

    def remove(self, observer: Observer) -> None:
        """Detach a listener; one that is not attached is ignored."""
        self.listening = tuple(other for other in self.listening if other is not observer)

    def emit(self, event: Event) -> None:
        for observer in self.listening:
            observer.observe(event)
