"""frontend <-> scheduler.

A frontend numbers its own requests (uint32) and both sides speak of a request by that number only.
Every accepted request ends in exactly one `Finish`.
"""

import enum
from typing import Annotated

import msgspec

from protocol.fields import MAX_ITEMS, Count, Finite, Fraction, Int32, Name, Number, Text
from protocol.logprobs import Logprobs
from protocol.records import StepRecords, Subscribe
from protocol.sampling import Pooling, SamplingParams, StructuredOutputParams


class FinishReason(enum.IntEnum):
    """Why a request ended. STOP and LENGTH are successes; the others are not."""

    STOP = 0
    """EOS or a stop token."""
    LENGTH = 1
    """max_tokens or the context limit."""
    ABORT = 2
    """The frontend asked for it; nobody waits for this one."""
    ERROR = 3
    """This request failed; `Finish.message` says why."""
    REJECTED = 4
    """Not admitted: a bounded queue was full; try again later."""
    INVALID = 5
    """Not admitted: it can never be served as it is; `Finish.message` says why."""


class GenerateRequest(msgspec.Struct, array_like=True, frozen=True, tag="generate"):
    """Asks for a continuation. Carries what a replay after a fault needs: delivered output, seed, prompt length."""

    number: Number
    """uint32, unique among this frontend's open requests."""
    token_ids: bytes
    """int32 little-endian: the prompt, followed by output tokens that were already delivered (usually none)."""
    num_prompt_tokens: Count
    params: SamplingParams
    priority: Int32 = 0
    """Lower runs earlier under the `priority` scheduling policy (vLLM's meaning)."""
    cache_salt: Text = ""
    """Requests share prefix-cache blocks only with requests of equal salt."""
    request_id: Text = ""
    """The external id, for logs only."""
    structured: StructuredOutputParams | None = None
    """What the output must match; the request waits until that is compiled, others do not."""
    pooling: Pooling = Pooling.NONE
    """Other than NONE: the request ends with an `Embedding` and no token; `params` ask for one token, greedy."""


class AbortRequest(msgspec.Struct, array_like=True, frozen=True, tag="abort"):
    """Ends open requests; unknown numbers are ignored. No `Finish` follows."""

    numbers: Annotated[list[Number], msgspec.Meta(max_length=MAX_ITEMS)]


class RequestTimes(msgspec.Struct, array_like=True, frozen=True):
    """Times of one request on the scheduler's monotonic clock, in seconds; 0.0: it did not happen."""

    queued: Finite = 0.0
    """The request was admitted to the queue."""
    scheduled: Finite = 0.0
    """Its first step was dispatched."""
    first_token: Finite = 0.0
    """The result with its first output token was applied."""
    ended: Finite = 0.0


class Finish(msgspec.Struct, array_like=True, frozen=True):
    number: Number
    reason: FinishReason
    stop_reason: Count | None = None
    """The token of `stop_token_ids` that ended it; None for EOS and for every other reason."""
    num_cached_tokens: Count = 0
    """Prompt tokens that came from the prefix cache when the request was first scheduled."""
    num_preemptions: Count = 0
    message: Text = ""
    """For ERROR, REJECTED and INVALID: what happened and what would work, fit for the client's eyes."""
    num_draft_tokens: Count = 0
    """Drafts that were verified for it, and ..."""
    num_accepted_tokens: Count = 0
    """... how many of them became output."""
    times: RequestTimes | None = None


class Embedding(msgspec.Struct, array_like=True, frozen=True):
    """What a pooling request asked for; its `Finish` follows."""

    number: Number
    values: bytes
    """float32[hidden size], as the model has it: not normalised."""


class RequestOutputs(msgspec.Struct, array_like=True, frozen=True, tag="outputs"):
    """Everything one step produced for one frontend: columns of equal length, then the requests that ended.

    Rows of one request stand in order of `indices`; a `Finish` comes after all rows of its request.
    """

    numbers: bytes
    """uint32: whose token it is."""
    indices: bytes
    """int32: the token's index in the output, counted from 0; a receiver accepts the next one only."""
    token_ids: bytes
    """int32."""
    finished: Annotated[list[Finish], msgspec.Meta(max_length=MAX_ITEMS)] = []
    logprobs: Logprobs | None = None
    """Of output tokens, in the message that has the token. Of prompt tokens, before the first output token of their
    request; after a preemption such a position may come again, and the first one counts."""
    embeddings: Annotated[list[Embedding], msgspec.Meta(max_length=MAX_ITEMS)] = []


class EnginePhase(enum.IntEnum):
    WAITING_FOR_WORKERS = 0
    LOADING = 1
    READY = 2
    DRAINING = 3
    FAILED = 4
    RECOVERING = 5
    """Workers were lost; open requests go on when the group is complete again, and new ones may queue."""


class EngineState(msgspec.Struct, array_like=True, frozen=True, tag="state"):
    """What a frontend must know of the engine: sent on connect, on every change, and each second while busy."""

    phase: EnginePhase
    detail: Text = ""
    """One line for people: what is being loaded, or why it failed."""
    progress: Fraction = 0.0
    """0 to 1 while loading."""
    max_model_len: Count = 0
    vocab_size: Count = 0
    """Width of the logits row; token ids at or beyond it are invalid."""
    num_blocks: Count = 0
    block_size: Count = 0
    max_num_seqs: Count = 0
    simulated: bool = False
    """True when the answers come from the simulator and mean nothing."""
    stats: Annotated[dict[Name, float], msgspec.Meta(max_length=MAX_ITEMS)] = {}
    """Gauges and running totals under vLLM's metric names, without the prefix; "name:position" for one of several."""
    info: Annotated[dict[Name, Name], msgspec.Meta(max_length=MAX_ITEMS)] = {}
    """What is combined: the cell of the capability table, and the sizes of the group."""
    hidden_size: Count = 0
    """Length of an embedding; 0: none are served."""


ClientMessage = GenerateRequest | AbortRequest | Subscribe
"""What a frontend sends after its handshake."""
EngineMessage = RequestOutputs | EngineState | StepRecords
"""What the scheduler sends to a frontend after the handshake."""
