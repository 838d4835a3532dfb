"""Messages of a recording.

A recording is the sequence of the events of one core (services.scheduler.core.observer), each as one message: inbound
events, and behind each of them the decisions that it caused. Most events are recorded as they are. Those with arrays
are converted, and without `--record-tokens` everything that tells tokens is replaced (services.scheduler.recording.
conversion). A change that old files cannot be read with needs another `VERSION`; otherwise fields are appended with
defaults, as in protocol.codec.
"""

from functools import reduce
from operator import or_
from typing import Any

from protocol.requests import GenerateRequest
from protocol.steps import SchedulerOutput
from services.scheduler.core import observer as events
from services.scheduler.core.limits import Limits
from services.scheduler.core.request import RequestKey

VERSION = 1


class RecordingHeader(events.Record, frozen=True):
    """First message of every segment: the settings that make the core."""

    version: int
    incarnation: int
    """The scheduler that was recorded: milliseconds since 1970 at its start."""
    segment: int
    """Number of the segment, from 0."""
    has_tokens: bool
    config: str
    """JSON of those settings of the scheduler that the core uses."""
    limits: Limits
    """Sizes of the first epoch."""
    epoch: int
    """The first epoch."""
    vocab_size: int
    hidden_size: int
    compiles: bool
    """Structured output is served."""
    release: str
    """Version of Runahead."""
    is_start: bool = False
    """A replay can begin here: with a new core, or with the `CoreRestarted` that follows."""
    late_masks: bool = False
    """Masks are made beside the loop: `MasksReady` follows."""
    backend: str = ""
    """Backend of the workers, as in services.scheduler.capabilities; "": not recorded."""


class ArrivalRecord(events.InboundEvent, frozen=True):
    """`RequestArrived` without tokens."""

    frontend: int
    message: GenerateRequest
    """Without tokens, salt, grammar and parameters that only workers read. `token_ids` is empty; it has the first id
    outside the vocabulary if there is one, and is malformed if the request's was."""
    num_tokens: int
    """Prompt and output tokens that were delivered before."""
    blocks: bytes
    """uint64[full blocks]: ids of the blocks of these tokens; equal ids mean equal prefixes"""


class PlanRecord(events.Decision, frozen=True):
    """`StepDispatched`."""

    plan: SchedulerOutput
    """Without tokens: `NewRequest.token_ids` are empty."""
    num_tokens: tuple[int, ...]
    """Tokens of each request in `plan.new`."""
    requests: tuple[RequestKey, ...]
    """Requests of `plan.new`."""
    steps_in_flight: int
    num_running: int
    num_waiting: int


class MaskRecord(events.Decision, frozen=True):
    """`GrammarSent` without the masks."""

    epoch: int
    step_id: int
    slots: bytes
    counts: bytes
    """As in `GrammarOutput`: the number of masks of each row is a decision of the grammar."""


class AppliedRecord(events.Decision, frozen=True):
    """`ResultApplied`; columns with a row per sampling row of the step."""

    epoch: int
    step_id: int
    states: bytes
    """int8[rows]"""
    counts: bytes
    """int32[rows]: appended tokens"""
    ended: tuple[RequestKey, ...]


class OutcomeRecord(events.Record, frozen=True):
    """Substitutes for the tokens of the `AppliedRecord` before it."""

    slots: bytes
    """int32[rows]"""
    totals: bytes
    """int32[rows]: tokens of the row's request before the result was applied"""
    stop_rows: bytes
    """int32[stops]: rows whose last token is a stop token"""
    stop_positions: bytes
    """int32[stops]: position of this token in its request"""
    stop_tokens: bytes
    """int32[stops]"""
    block_rows: bytes
    """int32[blocks]: rows that filled a block, in order"""
    blocks: bytes
    """uint64[blocks]: ids of these blocks"""


_KINDS = (RecordingHeader, OutcomeRecord, *events.InboundEvent.__subclasses__(), *events.Decision.__subclasses__())
RECORD: Any = reduce(or_, _KINDS)
"""Union of all types of records."""
