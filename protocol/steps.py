"""scheduler <-> worker, once per step.

A worker keeps the batch in *slots*; a step says only what changed. A request is named by its tokens once,
when it enters a slot; from then on rows are columns (slot, generation, count) of little-endian int32.
A slot's generation grows each time the slot is given away, so that a late row can never be taken for its successor.
"""

from typing import Annotated

import msgspec

from protocol.fields import MAX_ITEMS, Count, Finite, Fraction, StepId, Text
from protocol.logprobs import Logprobs
from protocol.sampling import Pooling, SamplingParams

NO_DRAFT = -1
"""Stands in `draft_token_ids` from where a drafter had nothing to propose; never an input."""


class NewRequest(msgspec.Struct, array_like=True, frozen=True):
    """A request that enters a slot: new, or resumed after preemption with every token it has."""

    slot: Count
    generation: Count
    token_ids: bytes
    """int32: prompt and confirmed output tokens, all of them, never cut to the chunk."""
    num_prompt_tokens: Count
    block_ids: bytes
    """int32: the whole block table so far."""
    params: SamplingParams
    pooling: Pooling = Pooling.NONE
    """Other than NONE: the row with `samples` yields an embedding; the token it returns means nothing."""
    request_id: Text = ""
    """The external id, for log lines only."""


class SchedulerOutput(msgspec.Struct, array_like=True, frozen=True, tag="step"):
    """One step's plan, an immutable snapshot. The worker applies `released`, then `new`, then the block columns.

    Row i computes positions `starts[i] .. starts[i] + counts[i] - 1` of the request in `slots[i]`. Input tokens
    that the scheduler does not know yet are on the device, in the slot's own token history.
    """

    epoch: Count
    step_id: StepId
    """1, 2, 3 ... within an epoch, without gaps."""
    slots: bytes
    """int32[rows]"""
    generations: bytes
    """int32[rows]"""
    starts: bytes
    """int32[rows]: first position computed (an upper bound under speculation, where the device's own count decides)."""
    counts: bytes
    """int32[rows]: num_scheduled_tokens, each at least 1, drafts included."""
    samples: bytes
    """uint8[rows]: 1 where the row covers the last known or promised token and so must return tokens; else none."""
    new: Annotated[list[NewRequest], msgspec.Meta(max_length=MAX_ITEMS)] = []
    block_slots: bytes = b""
    """int32[blocks]: the slot that gets ..."""
    block_ids: bytes = b""
    """int32[blocks]: ... this block appended to its table, in order."""
    released: bytes = b""
    """int32: slots whose request finished, was aborted or preempted; no in-flight step names them."""
    has_structured_output_requests: bool = False
    """True: sampling of the whole step waits for this step's `GrammarOutput`."""
    drafts: bytes = b""
    """int32[rows]: how many of `counts` are draft tokens, the last ones of a row that samples; b"": none anywhere. The
    drafts are on the device, proposed by the step before; there may be fewer, and then the row is shorter."""
    num_speculative_tokens: Count = 0
    """Drafts to propose for each row that samples, for the next step; 0: none."""
    least_chance: Fraction = 0.0
    """A draft that its drafter gives less chance of being accepted is not worth verifying; drafters that know none
    propose all."""
    report_times: bool = False
    """True: ranks that return no result send a `StepReport` of this step."""


class ReleaseSlots(msgspec.Struct, array_like=True, frozen=True, tag="release"):
    """`released` when no step is left to carry it, so that worker rows end empty."""

    epoch: Count
    slots: bytes
    """int32"""


class GrammarOutput(msgspec.Struct, array_like=True, frozen=True, tag="grammar"):
    """The bitmask of one step's constrained rows; sampling of that step waits for it."""

    epoch: Count
    step_id: StepId
    slots: bytes
    """int32: constrained rows, in the plan's order"""
    bitmask: memoryview
    """int32[masks, ceil(vocab / 32)]: bit set = token allowed. It may have megabytes: encoding copies it once, decoding
    does not."""
    counts: bytes = b""
    """int32[rows]: masks of each row, for as many positions from its first sampled one; at most one less drafts may be
    accepted (spec 2(b) 14). b"": one each."""


class StepTimes(msgspec.Struct, array_like=True, frozen=True):
    """When one rank executed one step, in this order: seconds on its process's monotonic clock; 0.0: not measured."""

    received: Finite = 0.0
    """The executing thread read the plan."""
    prepared: Finite = 0.0
    """The plan was checked and its batch laid out."""
    forward_began: Finite = 0.0
    forward_ended: Finite = 0.0
    sampled: Finite = 0.0
    """The sampled ids had arrived on the host; on a rank that does not sample, its part of the step had ended."""
    sent: Finite = 0.0
    """The result was handed to the socket."""
    idle: Finite = 0.0
    """Seconds just before the forward pass in which the device had no work, because no plan was queued."""


class ModelRunnerOutput(msgspec.Struct, array_like=True, frozen=True, tag="result"):
    """What one step produced; results leave a worker in step order.

    One row per plan row with `samples`, in plan order. A runner that pads may get less or more far in a prefill row
    than the plan says, and then reports it. Rows of that generation which are on their way are not computed (their
    count is 0); the plan's next generation of the slot goes on from the frontier.
    """

    epoch: Count
    step_id: StepId
    slots: bytes
    """int32[rows]"""
    generations: bytes
    """int32[rows]"""
    counts: bytes
    """int32[rows]: tokens of the row: accepted drafts and one more; 0 where the runner did not come to sample"""
    token_ids: bytes
    """int32[sum(counts)], rows back to back"""
    times: StepTimes = StepTimes()
    """Of the rank that reports the step."""
    progress_slots: bytes = b""
    """int32[reports]: slots of prefill rows of this step whose progress is reported"""
    progress_frontiers: bytes = b""
    """int32[reports]: tokens of the request whose KV is written; at least one more than where the row started"""
    logprobs: Logprobs | None = None
    """Where the request asks for them: of tokens sampled in this step, and of prompt tokens whose predecessor was
    computed in it."""
    embedding_slots: bytes = b""
    """int32[embeddings]: slots of pooling rows with `samples`, in plan order"""
    embeddings: bytes = b""
    """float32[embeddings, hidden size]"""
    drafted: bytes = b""
    """int32[rows]: drafts that were verified, those a grammar forbade not counted; b"": none anywhere"""
    draft_token_ids: bytes = b""
    """int32[rows, num_speculative_tokens]: what was proposed for the next step, NO_DRAFT where nothing was; of plans
    with `has_structured_output_requests`, whose grammars look at drafts, else b\"\""""


class StepReport(msgspec.Struct, array_like=True, frozen=True, tag="report"):
    """The times of a rank that returns no result; sent only for plans with `report_times`."""

    epoch: Count
    step_id: StepId
    rank: Count
    times: StepTimes


class StepFault(msgspec.Struct, array_like=True, frozen=True, tag="fault"):
    """A step failed; it takes the place of that step's result and nothing after it is valid."""

    epoch: Count
    step_id: StepId
    """0: the fault belongs to no step."""
    error: Text
    """Type and text of the worker's own exception."""


StepMessage = SchedulerOutput | ReleaseSlots | GrammarOutput
"""scheduler -> worker, per step"""
StepResult = ModelRunnerOutput | StepReport | StepFault
"""worker -> scheduler, per step"""
