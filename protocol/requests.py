"""Messages between frontend and scheduler.

A frontend numbers its own requests (uint32); all messages identify a request by this number only. Every accepted
request ends with exactly one `Finish`.
"""

import enum
import sys
from typing import Annotated

import msgspec

from protocol.epochs import Incarnation
from protocol.fields import MAX_ITEMS, Count, Duration, Finite, Fraction, Int32, LabelName, Name, Number, StatName, Text
from protocol.logprobs import Logprobs
from protocol.lora import LoRAAdapter, salt_of
from protocol.media import Media, MediaModel
from protocol.pooling import PoolingModel, PoolingParams
from protocol.records import CachedBlocks, RequestTimes, StepRecords, Subscribe
from protocol.sampling import Pooling, SamplingParams, StructuredOutputParams

ITERATION_TOKENS = (1.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0)
"""Upper bounds of the buckets of `stats["iteration_tokens:N"]`, the number of steps by their tokens; vLLM's."""
MAX_PRIORITY = 2**20
"""Priorities are integers from -MAX_PRIORITY to MAX_PRIORITY."""


class FinishReason(enum.IntEnum):
    """Reason for the end of a request. STOP and LENGTH are successes; the others are not."""

    STOP = 0
    """EOS or a stop token."""
    LENGTH = 1
    """max_tokens or the context limit."""
    ABORT = 2
    """The frontend aborted the request. This reason is never sent."""
    ERROR = 3
    """The request failed; `Finish.message` has the reason."""
    REJECTED = 4
    """Not admitted: a bounded queue was full; try again later."""
    INVALID = 5
    """Not admitted: it can never be served; `Finish.message` has the reason."""


class GenerateRequest(msgspec.Struct, array_like=True, frozen=True, tag="generate"):
    """Request for output tokens. It contains all data for a replay after a fault: delivered output, seed, prompt
    length."""

    number: Number
    """uint32, unique among this frontend's open requests."""
    token_ids: bytes
    """int32 little-endian: the prompt, followed by output tokens that were already delivered (usually none)."""
    num_prompt_tokens: Count
    params: SamplingParams
    priority: Int32 = 0
    """Lower values run earlier with the `priority` scheduling policy, as in vLLM."""
    cache_salt: Text = ""
    """Requests share prefix-cache blocks only with requests of the same salt."""
    request_id: Text = ""
    """The external id, for logs only."""
    structured: StructuredOutputParams | None = None
    """Grammar of the output. The request waits until it is compiled; other requests do not."""
    pooling: Pooling = Pooling.NONE
    """Other than NONE: the request ends with an `Embedding` and no token; `params` must have one greedy token."""
    incarnation: Incarnation = 0
    """The scheduler that this message is for; another one drops it. 0: any."""
    attempts: Count = 0
    """Number of schedulers that have died since this request made progress. The scheduler logs those of a suspect."""
    age: Annotated[float, msgspec.Meta(ge=0, le=sys.float_info.max)] = 0.0
    """Seconds since the request was first submitted; 0.0: now. A request that was submitted before meets wider limits
    of load, and precedes every new one of its priority; the oldest comes first."""
    kv_peers: Annotated[list[Text], msgspec.Meta(max_length=MAX_ITEMS)] = []
    """`EngineState.kv_peers` of another engine that may have KV blocks of the request's prefix; []: none is known."""
    lora: LoRAAdapter | None = None
    """None: the model itself."""
    pooling_params: PoolingParams | None = None
    """For `Pooling.MODEL`; None: the defaults."""
    media: Media | None = None
    """Images and sounds of the prompt."""

    @property
    def salt(self) -> str:
        """Return the beginning of the names of its KV blocks."""
        return salt_of(self.lora, self.cache_salt)


MAX_RETRY_AFTER = 3600.0
"""Maximum of `Finish.retry_after`, seconds."""


class AbortRequest(msgspec.Struct, array_like=True, frozen=True, tag="abort"):
    """End open requests. Unknown numbers are ignored, and no `Finish` follows."""

    numbers: Annotated[list[Number], msgspec.Meta(max_length=MAX_ITEMS)]
    incarnation: Incarnation = 0
    """The scheduler that this message is for; another one drops it. 0: any."""


class FrontendAlive(msgspec.Struct, array_like=True, frozen=True, tag="frontend_alive"):
    """Sign of life, sent every second by a frontend whose scheduler has an incarnation. The requests of a frontend that
    has sent one, and then nothing for a number of seconds, end: its lease is over."""

    number: Count = 0
    """Counts the signs on this connection from 1; `RoundTrips.number` answers. 0: the frontend expects no answer."""


class CacheAction(enum.IntEnum):
    LIST = 0
    PIN = 1
    """The blocks with these names are not evicted any more, also if they are computed later."""
    UNPIN = 2
    DROP = 3
    """The blocks with these names, or with those of a pin that ends, are found no more: neither in the cache nor in
    tiers."""
    LOAD = 4
    """Blocks with these names that the cache lacks are loaded from tiers and other engines, for a request to come."""
    RESET = 5
    """The cache is emptied; tiers keep their blocks. Without ranks, it waits for the next epoch."""


class ControlCache(msgspec.Struct, array_like=True, frozen=True, tag="control_cache"):
    """Change which blocks are kept. A `CacheControlled` with the same number answers, after a drop or a reset when all
    ranks have dropped the blocks."""

    number: Number
    action: CacheAction
    pin: Name = ""
    """Id of the pin; "": none."""
    owner: Name = ""
    """Digest of the API key whose requests find a new pin's prefix; "": there are no keys."""
    names: bytes = b""
    """uint8[blocks, NAME_BYTES]: consecutive blocks of a prefix from its start (protocol.block_names)"""
    kv_peers: Annotated[list[Text], msgspec.Meta(max_length=MAX_ITEMS)] = []
    """`EngineState.kv_peers` of another engine that may have blocks to load."""
    reset_running: bool = False
    """A reset recomputes running requests, too; without it their blocks stay in use until they end."""


class PinnedPrefix(msgspec.Struct, array_like=True, frozen=True):
    pin: Name
    owner: Name
    num_tokens: Count
    num_held: Count
    """Tokens whose blocks are in the cache. The others are pinned when they are computed."""
    num_bytes: Count
    """Bytes of these blocks on all ranks."""


class CacheControlled(msgspec.Struct, array_like=True, frozen=True, tag="cache_controlled"):
    number: Number
    error: Text = ""
    """Reason of a refusal, and the remedy; "": it was done."""
    pins: Annotated[list[PinnedPrefix], msgspec.Meta(max_length=MAX_ITEMS)] = []
    """All pins, in the order of their begin."""
    num_dropped: Count = 0
    """Tokens of the blocks that have left the cache."""
    complete: bool = True
    """False: after a reset, running requests still share blocks."""


class Finish(msgspec.Struct, array_like=True, frozen=True):
    """End of a request."""

    number: Number
    reason: FinishReason
    stop_reason: Count | None = None
    """Token of `stop_token_ids` that ended the output; None for EOS and for every other reason."""
    num_cached_tokens: Count = 0
    """Prompt tokens that came from the prefix cache when the request was first scheduled."""
    num_preemptions: Count = 0
    message: Text = ""
    """For ERROR, REJECTED and INVALID: the reason and the remedy, for the client."""
    num_draft_tokens: Count = 0
    """Number of drafts that were verified."""
    num_accepted_tokens: Count = 0
    """Number of drafts that became output."""
    times: RequestTimes | None = None
    retry_after: Annotated[float, msgspec.Meta(ge=0, le=MAX_RETRY_AFTER)] = 0.0
    """For REJECTED: seconds until the shortest request is expected to be admitted; 0.0: perhaps now."""
    by_settings: bool = False
    """For INVALID: an engine of the same weights with other settings may serve the request. For ERROR: one whose
    workers can load its adapter may."""


class Embedding(msgspec.Struct, array_like=True, frozen=True):
    """Result of a pooling request. Its `Finish` follows."""

    number: Number
    values: bytes
    """float32[hidden size], not normalised; for `Pooling.MODEL` float32[size], or float32[tokens, size] row after row
    for a task of each token"""


class RequestOutputs(msgspec.Struct, array_like=True, frozen=True, tag="outputs"):
    """Outputs of one step for one frontend: columns of equal length, and the requests that ended.

    Rows of one request are ordered by `indices`. A `Finish` belongs after all rows of its request.
    """

    numbers: bytes
    """uint32[rows]: request number"""
    indices: bytes
    """int32[rows]: index of the token in the output, from 0; a receiver accepts only the next index"""
    token_ids: bytes
    """int32[rows]"""
    finished: Annotated[list[Finish], msgspec.Meta(max_length=MAX_ITEMS)] = []
    logprobs: Logprobs | None = None
    """Log-probabilities of output tokens, in the message with the token, and of prompt tokens, before the first output
    token of the request. After a preemption a prompt position may be sent again; the first message counts."""
    embeddings: Annotated[list[Embedding], msgspec.Meta(max_length=MAX_ITEMS)] = []
    incarnation: Incarnation = 0
    """The scheduler that sends it; 0: unknown."""
    cached: Annotated[dict[Number, Count], msgspec.Meta(max_length=MAX_ITEMS)] = {}
    """`Finish.num_cached_tokens` of the requests whose first token this is: if a stop string ends one, no `Finish`
    follows."""


class EnginePhase(enum.IntEnum):
    WAITING_FOR_WORKERS = 0
    LOADING = 1
    READY = 2
    DRAINING = 3
    FAILED = 4
    RECOVERING = 5
    """Workers were lost. Open requests continue when the group is complete again; new ones may wait."""


class RoundTrips(msgspec.Struct, array_like=True, frozen=True):
    """Answers to signs of life, from which a frontend knows that its messages and the plans of the scheduler arrive."""

    number: Count = 0
    """Last `FrontendAlive.number` that has arrived from the frontend that gets this message; 0: none."""
    unanswered: Annotated[list[Duration], msgspec.Meta(max_length=MAX_ITEMS)] = []
    """By rank of the epoch in effect: seconds that a sign of the scheduler has waited for the rank's answer."""


class EngineState(msgspec.Struct, array_like=True, frozen=True, tag="state"):
    """State of the engine for frontends: sent on connect, on every change, and every second as a sign of life."""

    phase: EnginePhase
    detail: Text = ""
    """One line for people: the progress of loading, or the reason of a failure."""
    progress: Fraction = 0.0
    """0 to 1 while loading."""
    max_model_len: Count = 0
    vocab_size: Count = 0
    """Width of the logits; token ids at or above it are invalid."""
    num_blocks: Count = 0
    block_size: Count = 0
    max_num_seqs: Count = 0
    simulated: bool = False
    """True: the outputs come from the simulator and have no meaning."""
    stats: Annotated[dict[StatName, Finite], msgspec.Meta(max_length=MAX_ITEMS)] = {}
    """Gauges and totals under vLLM's metric names without the prefix; "name:position" for the metric of a draft
    position."""
    info: Annotated[dict[LabelName, Name], msgspec.Meta(max_length=MAX_ITEMS)] = {}
    """Combination of features, as in the capability table, and sizes of the group."""
    hidden_size: Count = 0
    """Length of an embedding; 0: none are served."""
    incarnation: Incarnation = 0
    """The scheduler that sends it; 0: unknown, and no sign of life follows."""
    tokenizer: Name = ""
    """Digest of the tokenizer.json that grammars are compiled for; "": the scheduler has none."""
    lease: Count = 0
    """Number of the lease of the frontend that gets this message; 0: unknown. When another lease begins on the same
    connection, the requests of the one before have ended."""
    round_trips: RoundTrips | None = None
    """None: the scheduler does not answer signs of life."""
    identity: Name = ""
    """Digest of everything that the engine's tokens depend on, besides the tokenizer: backend, weights, data type,
    batch invariance. Streams move between engines of equal identity only. "": not known yet."""
    pids: Annotated[list[Count], msgspec.Meta(max_length=MAX_ITEMS)] = []
    """Process ids on their machines: of the scheduler, then of the workers by rank."""
    kv_peers: Annotated[list[Text], msgspec.Meta(max_length=MAX_ITEMS)] = []
    """`Loaded.kv_peer` of each rank; []: not all have one."""
    pooling: PoolingModel | None = None
    """A model that generates no text; None: it generates text."""
    media: MediaModel | None = None
    """None: images and sounds are refused."""
    adapted_modules: Annotated[tuple[Name, ...], msgspec.Meta(max_length=MAX_ITEMS)] = ()
    """`Loaded.adapted_modules`"""
    max_loras: Count = 0
    """LoRA adapters of the running requests together, at most; 0: none are served."""
    running_loras: Annotated[list[Name], msgspec.Meta(max_length=MAX_ITEMS)] = []
    """Names of the adapters of running requests."""
    waiting_loras: Annotated[list[Name], msgspec.Meta(max_length=MAX_ITEMS)] = []
    """Names of the adapters of requests that wait."""


ClientMessage = GenerateRequest | AbortRequest | Subscribe | FrontendAlive | ControlCache
"""frontend -> scheduler, after the handshake"""
EngineMessage = RequestOutputs | EngineState | StepRecords | CachedBlocks | CacheControlled
"""scheduler -> frontend, after the handshake"""
