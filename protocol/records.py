"""Records of steps, requests and the prefix cache from the scheduler to subscribers.

A frontend subscribes with `Subscribe` and then gets `StepRecords`, batched and bounded, or `CachedBlocks`. All times
are in seconds on the scheduler's monotonic clock; times of workers are shifted by the clock offset measured on their
connection.
"""

import enum
from typing import Annotated

import msgspec

from protocol.epochs import EpochId
from protocol.fields import MAX_ITEMS, Count, Finite, Fraction, Number, StepId, Text
from protocol.steps import StepTimes


class Subscribe(msgspec.Struct, array_like=True, frozen=True, tag="subscribe"):
    """Start or end the subscription of this frontend; it ends with the connection."""

    steps: bool = True
    cached_blocks: bool = False
    """`CachedBlocks` follow: first all names, then changes."""


class CachedBlocks(msgspec.Struct, array_like=True, frozen=True, tag="cached_blocks"):
    """Changes of the engine's prefix cache since the last message, about a second late."""

    number: Count
    """Counts the messages to this frontend. 0: all earlier names are void. After a gap the subscriber ends its
    subscription, and begins another one."""
    stored: bytes = b""
    """uint8[blocks, NAME_BYTES]: names of blocks (protocol.block_names) that can be found now"""
    removed: bytes = b""
    """The same of blocks that cannot be found any more. They come before those of `stored`."""


class RankTimes(msgspec.Struct, array_like=True, frozen=True):
    rank: Count
    times: StepTimes
    returns_result: bool = False
    """The rank sent the step's `ModelRunnerOutput`; its `sent` is the beginning of the result's way back."""


class StepRecord(msgspec.Struct, array_like=True, frozen=True):
    """One step from its plan to its applied result. A step whose epoch ended first has no record."""

    epoch: EpochId
    step_id: StepId
    planned: Finite
    """The scheduler began to form the step."""
    dispatched: Finite
    """The plan was handed to the sockets."""
    result_received: Finite
    applied: Finite
    """The result was applied and its outputs were queued for the frontends."""
    ranks: Annotated[list[RankTimes], msgspec.Meta(max_length=MAX_ITEMS)]
    """In ascending order; ranks whose report arrived too late are missing."""
    frontends: bytes
    """int32[rows]: the scheduler's number of the request's frontend"""
    numbers: bytes
    """uint32[rows]: the frontend's number of the request"""
    scheduled: bytes
    """int32[rows]: number of computed tokens, including drafts"""
    prefills: bytes
    """uint8[rows]: 1 if the row is a prefill chunk"""
    drafted: bytes
    """int32[rows]: number of drafts among the scheduled tokens"""
    generated: bytes
    """int32[rows]: number of output tokens appended to the request"""
    steps_in_flight: Count
    """Steps in flight at the dispatch, including this one."""
    num_running: Count
    """Running requests at the dispatch."""
    num_waiting: Count
    """Waiting requests at the dispatch."""
    kv_cache_usage: Fraction
    """Share of the KV blocks in use at the dispatch."""
    num_speculative_tokens: Count = 0
    """Number of drafts that the step proposed for each row that sampled."""
    is_draft_trial: bool = False
    """The step belonged to a trial: its number of drafts, or that of its verified ones, was chosen to measure it."""
    speculation_rests: bool = False
    """No drafts paid, so the step was that of an engine without speculation."""


class EngineEventKind(enum.IntEnum):
    EPOCH_STARTED = 0
    EPOCH_ENDED = 1
    """The steps in flight are void; running requests are recomputed in the next epoch."""
    PREEMPTED = 2


class EngineEvent(msgspec.Struct, array_like=True, frozen=True):
    """Event between two steps."""

    kind: EngineEventKind
    at: Finite
    epoch: EpochId
    text: Text = ""
    """Reason, or id of the request, for people."""


class RequestTimes(msgspec.Struct, array_like=True, frozen=True):
    """Times of one request on the scheduler's monotonic clock, in seconds; 0.0: it did not happen."""

    queued: Finite = 0.0
    """The request was admitted to the queue."""
    scheduled: Finite = 0.0
    """Its first step was dispatched."""
    first_token: Finite = 0.0
    """The result with its first output token was applied."""
    ended: Finite = 0.0

    def phases(self) -> list[tuple[str, float, float]]:
        """Return name, beginning and end of each phase of a request that has ended."""
        moments = ("queue", self.queued), ("prefill", self.scheduled), ("decode", self.first_token)
        begins = [(name, at) for name, at in moments if at]
        ends = [*(at for _, at in begins[1:]), self.ended]
        return [(name, began, ended) for (name, began), ended in zip(begins, ends, strict=False)]


class RequestRecord(msgspec.Struct, array_like=True, frozen=True):
    """A request that entered a slot, or that ended. Rows of steps name it by the same two numbers."""

    frontend: Count
    number: Number
    request_id: Text = ""
    """The external id."""
    num_prompt_tokens: Count = 0
    """0: unknown, which is so at the end."""
    outcome: Text = ""
    """Name of the `FinishReason`; "": the request has not ended."""
    times: RequestTimes = RequestTimes()
    """Only of a request that has ended."""
    num_cached_tokens: Count = 0
    num_preemptions: Count = 0


class StepRecords(msgspec.Struct, array_like=True, frozen=True, tag="records"):
    """Records and events since the last message, in order of time."""

    records: Annotated[list[StepRecord], msgspec.Meta(max_length=MAX_ITEMS)]
    events: Annotated[list[EngineEvent], msgspec.Meta(max_length=MAX_ITEMS)]
    dropped: Count
    """Number of entries dropped since the last message, oldest first, because the bound was reached."""
    sent: Finite
    """Time of sending. A subscriber computes the offset of its clock from the minimum difference."""
    requests: Annotated[list[RequestRecord], msgspec.Meta(max_length=MAX_ITEMS)] = []
    """Requests that entered a slot or ended, in order of time."""
