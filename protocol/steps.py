"""Messages between scheduler and worker for each step.

A worker keeps the batch in *slots*; a step contains only changes. The tokens of a request are sent once, when it enters
a slot; from then on rows are columns (slot, generation, count) of little-endian int32. The generation of a slot
increases each time the slot is assigned, so that a late row is never mistaken for a row of the next request.
"""

from typing import Annotated

import msgspec

from protocol.block_names import NamedBlocks
from protocol.epochs import EpochId
from protocol.fields import MAX_ITEMS, Count, Finite, Fraction, Name, StepId, Text
from protocol.logprobs import Logprobs
from protocol.lora import LoRAAdapter
from protocol.media import Media
from protocol.pooling import PoolingParams
from protocol.sampling import Pooling, SamplingParams

NO_DRAFT = -1
"""Value in `draft_token_ids` at positions without a draft. Never an input of the model."""


class NewRequest(msgspec.Struct, array_like=True, frozen=True):
    """A request that enters a slot: a new one, or one that resumes after preemption with all its tokens."""

    slot: Count
    generation: Count
    token_ids: bytes
    """int32[tokens]: all prompt and confirmed output tokens, not only the first chunk"""
    num_prompt_tokens: Count
    block_ids: bytes
    """int32[blocks]: the block table, in the order of protocol.kv_groups"""
    params: SamplingParams
    pooling: Pooling = Pooling.NONE
    """Other than NONE: the row with `samples` returns an embedding; its token is ignored."""
    request_id: Text = ""
    """The external id, for log lines only."""
    lora: LoRAAdapter | None = None
    """None: the model itself. A step has rows of at most `Assignment.max_loras` adapters (adapter seat)."""
    pooling_params: PoolingParams | None = None
    """For `Pooling.MODEL`; None: the defaults."""
    media: Media | None = None
    """Images and sounds of the prompt, each encoded with the first row that has a position of it (encoder budget)."""


class SchedulerOutput(msgspec.Struct, array_like=True, frozen=True, tag="step"):
    """Plan of a step, an immutable snapshot. The worker applies `released`, then `new`, then the block columns.

    Row i computes positions `starts[i] .. starts[i] + counts[i] - 1` of the request in `slots[i]`. Input tokens that
    the scheduler does not know yet are on the device: slot history (docs/invariants.md).
    """

    epoch: EpochId
    step_id: StepId
    """1, 2, 3 ... within an epoch, without gaps."""
    slots: bytes
    """int32[rows]"""
    generations: bytes
    """int32[rows]"""
    starts: bytes
    """int32[rows]: first position computed. With drafts it is an upper bound; the device knows the true position."""
    counts: bytes
    """int32[rows]: number of scheduled tokens, at least 1, including drafts"""
    samples: bytes
    """uint8[rows]: 1 if the row includes the last known or promised token and returns tokens, else 0"""
    new: Annotated[list[NewRequest], msgspec.Meta(max_length=MAX_ITEMS)] = []
    block_slots: bytes = b""
    """int32[blocks]: slot whose block table grows"""
    block_ids: bytes = b""
    """int32[blocks]: block that is appended to it, in order; with several groups one of each (protocol.kv_groups)"""
    released: bytes = b""
    """int32[slots]: slots whose request finished, was aborted or preempted; no step in flight has a row of them"""
    has_structured_output_requests: bool = False
    """True: a row of `masked` waits for this step's `GrammarOutput`."""
    drafts: bytes = b""
    """int32[rows]: number of draft tokens, the last of `counts`, of a row that samples; b"": no drafts. The drafts are
    on the device, proposed by the step before; if there are fewer, the row is shorter."""
    num_speculative_tokens: Count = 0
    """Number of drafts to propose for each row that samples, for the next step; 0: none."""
    min_acceptance: Fraction = 0.0
    """Minimum probability of acceptance, as estimated by the drafter, of a draft that is proposed. Drafters without an
    estimate propose all drafts."""
    report_times: bool = False
    """True: ranks that return no result send a `StepReport` for this step."""
    masked: bytes = b""
    """int32[slots]: slots of the constrained rows that sample, in plan order"""
    whole: NamedBlocks | None = None
    """Blocks that became whole since the last message; None: none did. They have these names before this plan's blocks
    lose theirs: those of `block_ids`, and those of `new` from the first position that its row computes."""
    speculation_rests: bool = False
    """True: the drafter gets nothing of this step, which proposes no drafts."""
    completes: NamedBlocks | None = None
    """Blocks that have all their positions when this step was executed, with the names that they get now; None: there
    is none. Sent only to workers that serve blocks to other engines (completed block, docs/invariants.md)."""


class ReleaseSlots(msgspec.Struct, array_like=True, frozen=True, tag="release"):
    """`SchedulerOutput.released` without a step, sent when no step follows: the release notice (docs/invariants.md)."""

    epoch: EpochId
    slots: bytes
    """int32[slots]"""
    whole: NamedBlocks | None = None
    """As in `SchedulerOutput`."""


class LoadBlocks(msgspec.Struct, array_like=True, frozen=True, tag="load"):
    """Fill blocks from elsewhere, beside the steps (loaded block, docs/invariants.md). Each rank fills them in order up
    to the first one that it lacks, and answers with `BlocksLoaded`. A block that a later plan or load gives away is not
    filled any more."""

    epoch: EpochId
    next_step: StepId
    """The step that follows this message."""
    ticket: Count
    """1, 2, 3 ... for each scheduler; not all are used."""
    blocks: bytes
    """int32[blocks]"""
    names: bytes
    """uint8[blocks, NAME_BYTES]"""
    peers: Annotated[list[Text], msgspec.Meta(max_length=MAX_ITEMS)] = []
    """By rank: a worker of another engine that may have what the tier lacks (`Loaded.kv_peer`); []: none is known."""
    dropped: bytes = b""
    """uint8[blocks, NAME_BYTES]: names that no block in memory and in tiers may have when this message is answered; no
    block is filled then."""
    drops_all: bool = False
    """True: all names of blocks in memory are dropped, by a reset, and tiers keep those that are not in `dropped`. With
    a drop of any kind, spares are sent this."""

    @property
    def is_drop(self) -> bool:
        return bool(self.dropped) or self.drops_all


class KeptPin(msgspec.Struct, array_like=True, frozen=True):
    """A pin of `protocol.requests.ControlCache`."""

    pin: Name
    owner: Name
    names: bytes
    """uint8[blocks, NAME_BYTES]"""


class KeepPins(msgspec.Struct, array_like=True, frozen=True, tag="pins"):
    """All pins of the scheduler, which each rank keeps for the next one (`Loaded.pins`). Sent when they have changed,
    and, if there has been any, when an epoch has begun."""

    epoch: EpochId
    block_size: Count
    """Tokens per block."""
    pins: Annotated[list[KeptPin], msgspec.Meta(max_length=MAX_ITEMS)]


class BlocksLoaded(msgspec.Struct, array_like=True, frozen=True, tag="loaded_blocks"):
    """Answer of a rank to `LoadBlocks`."""

    epoch: EpochId
    ticket: Count
    count: Count
    """Number of blocks, from the first one, that were filled."""
    sources: Annotated[dict[Name, Count], msgspec.Meta(max_length=MAX_ITEMS)] = {}
    """Number of them by source: "host", "disk", or "peer" for another engine."""
    num_failed: Count = 0
    """Number of blocks of a drop that a tier still has: their files cannot be removed."""


class GrammarOutput(msgspec.Struct, array_like=True, frozen=True, tag="grammar"):
    """Token masks of constrained rows of a step.

    Workers that leave rows out (`Register.leaves_rows_out`) may receive several messages for a step, each with the
    masks of other rows, and some too late. For other workers one message has all of them, and the sampling of the step
    waits for it.
    """

    epoch: EpochId
    step_id: StepId
    slots: bytes
    """int32[rows]: slots of the constrained rows, in plan order"""
    bitmask: memoryview
    """int32[masks, ceil(vocab / 32)]: a set bit allows the token. May take megabytes; encoding copies it once, decoding
    does not."""
    counts: bytes = b""
    """int32[rows]: number of masks of each row, one per position from the first sampled one; b"": one each. A draft
    without a mask cannot be accepted: acceptable drafts (docs/invariants.md)."""


class StepTimes(msgspec.Struct, array_like=True, frozen=True):
    """Times of one step on one rank, in this order: seconds on the monotonic clock of its process; 0.0: not
    measured. The last four are durations."""

    received: Finite = 0.0
    """The executing thread read the plan."""
    prepared: Finite = 0.0
    """The plan was checked and its batch laid out."""
    forward_began: Finite = 0.0
    forward_ended: Finite = 0.0
    sampled: Finite = 0.0
    """The sampled ids arrived on the host. On a rank that does not sample: its part of the step ended."""
    sent: Finite = 0.0
    """The result was handed to the socket."""
    idle: Finite = 0.0
    """Seconds directly before the forward pass in which the device had no work, because no plan was queued."""
    plan_wait: Finite = 0.0
    """Seconds that the executing thread waited for this plan with none queued."""
    prepared_wait: Finite = 0.0
    """Seconds from the end of the step before until the thread that computes began this one, without those of
    `plan_wait`; 0.0 also where no other thread prepares steps."""
    forward_gap: Finite = 0.0
    """Seconds from the end of the forward pass before, of the same epoch, to the beginning of this one, without those
    of `plan_wait`."""


STEP_DURATIONS = ("idle", "plan_wait", "prepared_wait", "forward_gap")
"""Fields of `StepTimes` that are seconds, not times."""


class ModelRunnerOutput(msgspec.Struct, array_like=True, frozen=True, tag="result"):
    """Result of a step. A worker sends results in step order.

    One row per plan row with `samples`, in plan order. A constrained row whose mask is missing is left out: its count
    is 0, and the next row of the slot begins with the last known token again (left-out row, docs/invariants.md). A
    runner that pads may compute fewer or more positions of a prefill row than planned, and reports that as progress.
    Later rows of the same generation are then not computed (their count is 0); the next generation of the slot
    continues at the reported frontier.
    """

    epoch: EpochId
    step_id: StepId
    slots: bytes
    """int32[rows]"""
    generations: bytes
    """int32[rows]"""
    counts: bytes
    """int32[rows]: number of tokens: accepted drafts and one more; 0 if the runner did not sample the row"""
    token_ids: bytes
    """int32[sum(counts)]: tokens, row after row"""
    times: StepTimes = StepTimes()
    """Times of the rank that sends the result."""
    progress_slots: bytes = b""
    """int32[reports]: slots of prefill rows with reported progress"""
    progress_frontiers: bytes = b""
    """int32[reports]: number of positions whose KV is written; above the start of the row"""
    logprobs: Logprobs | None = None
    """Log-probabilities for requests with that parameter: of tokens sampled in this step, and of prompt tokens whose
    predecessor was computed in it."""
    embedding_slots: bytes = b""
    """int32[embeddings]: slots of pooling rows with `samples`, in plan order"""
    embeddings: bytes = b""
    """float32[embeddings, hidden size], or vectors of the lengths in `embedding_sizes`"""
    drafted: bytes = b""
    """int32[rows]: number of verified drafts, without those that a grammar forbids; b"": no drafts"""
    draft_token_ids: bytes = b""
    """int32[rows, num_speculative_tokens]: drafts for the next step, NO_DRAFT at positions without a draft. Sent only
    for plans with `has_structured_output_requests`, whose masks depend on the drafts."""
    embedding_sizes: bytes = b""
    """int32[embeddings]: numbers of each result of a model's own pooler (`Pooling.MODEL`); b"": hidden size each"""
    failed_slots: bytes = b""
    """int32[failures]: slots of rows whose request entered without its adapter, which a rank cannot load"""


class StepReport(msgspec.Struct, array_like=True, frozen=True, tag="report"):
    """Times of a rank that returns no result. Sent only for plans with `report_times`."""

    epoch: EpochId
    step_id: StepId
    rank: Count
    times: StepTimes


class StepFault(msgspec.Struct, array_like=True, frozen=True, tag="fault"):
    """A step failed. This message replaces its result, and no later message of the epoch is valid."""

    epoch: EpochId
    step_id: StepId
    """0: the fault occurred outside of a step."""
    error: Text
    """Type and text of the exception in the worker."""


StepMessage = SchedulerOutput | ReleaseSlots | GrammarOutput | LoadBlocks | KeepPins
"""scheduler -> worker, per step"""
StepResult = ModelRunnerOutput | StepReport | StepFault | BlocksLoaded
"""worker -> scheduler, per step"""
