"""scheduler -> subscriber: how each step was planned, executed and applied, as data.

A frontend subscribes with `Subscribe` and then receives `StepRecords`: batched, bounded, and only while subscribed.
Every time is in seconds on the scheduler's monotonic clock; times of workers are shifted by the clock offset that is
measured on their connection.
"""

import enum
from typing import Annotated

import msgspec

from protocol.fields import MAX_ITEMS, Count, Finite, Fraction, StepId, Text
from protocol.steps import StepTimes


class Subscribe(msgspec.Struct, array_like=True, frozen=True, tag="subscribe"):
    """Start or end the subscription of this frontend; it ends with the connection."""

    steps: bool = True


class RankTimes(msgspec.Struct, array_like=True, frozen=True):
    """The times of one rank in one step."""

    rank: Count
    times: StepTimes


class StepRecord(msgspec.Struct, array_like=True, frozen=True):
    """One step from its plan to its applied result. A step whose epoch ended first has no record."""

    epoch: Count
    step_id: StepId
    planned: Finite
    """The scheduler began to form the step."""
    dispatched: Finite
    """The plan was handed to the sockets."""
    result_received: Finite
    applied: Finite
    """The result was applied; its tokens were on their way to the frontends."""
    ranks: Annotated[list[RankTimes], msgspec.Meta(max_length=MAX_ITEMS)]
    """In ascending order; ranks whose report came too late are missing."""
    frontends: bytes
    """int32[rows]: the scheduler's number of the frontend whose request the row is."""
    numbers: bytes
    """uint32[rows]: the frontend's number of the request."""
    scheduled: bytes
    """int32[rows]: tokens computed, drafts included."""
    prefills: bytes
    """uint8[rows]: 1 where the row is a prefill chunk."""
    drafted: bytes
    """int32[rows]: drafts among the scheduled tokens."""
    generated: bytes
    """int32[rows]: output tokens appended to the request."""
    steps_in_flight: Count
    """With this one, when it was dispatched."""
    num_running: Count
    """Requests, when the step was dispatched."""
    num_waiting: Count
    kv_cache_usage: Fraction
    """Share of the KV blocks in use, when the step was dispatched."""


class EngineEventKind(enum.IntEnum):
    EPOCH_STARTED = 0
    EPOCH_ENDED = 1
    """The steps in flight are void; running requests are recomputed in the next epoch."""
    PREEMPTED = 2


class EngineEvent(msgspec.Struct, array_like=True, frozen=True):
    """What happened between two steps."""

    kind: EngineEventKind
    at: Finite
    epoch: Count
    text: Text = ""
    """For people: the reason, or the id of the request."""


class StepRecords(msgspec.Struct, array_like=True, frozen=True, tag="records"):
    """What was recorded since the last message, in order of time."""

    records: Annotated[list[StepRecord], msgspec.Meta(max_length=MAX_ITEMS)]
    events: Annotated[list[EngineEvent], msgspec.Meta(max_length=MAX_ITEMS)]
    dropped: Count
    """Records and events left out since the last message, the oldest first, because the bound was reached."""
    sent: Finite
    """The scheduler's clock when this was sent: a subscriber aligns its own clock by the least difference it sees."""
