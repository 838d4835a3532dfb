"""Messages between scheduler and worker about the worker group and its epochs.

worker                      scheduler
Register            ───►
                    ◄───    Assignment          (or Refused, see protocol.handshake; a spare worker waits for it)
LoadProgress ...    ───►
Loaded              ───►                        (all ranks are connected)
                    ◄───    InitializeCache     (the minimum over all ranks)
Ready               ───►                        (a test step has run)
Heartbeat ...       ───►
                    ◄───    EndEpoch            (a rank was lost or joined: Register again, on the same connection)
                    ◄───    Shutdown

Ranks are numbered `pp_rank * tensor_parallel_size + tp_rank`. Every rank gets every plan; the first rank of the last
stage samples and sends the results. Tensors between ranks are sent by torch.distributed, which connects at
`rendezvous`.
"""

from typing import Annotated

import msgspec

from protocol.block_names import NamedBlocks
from protocol.epochs import EpochId, RegisteredEpoch
from protocol.fields import MAX_ITEMS, Bytes, Count, Finite, Fraction, Name, Positive, StepId, Text
from protocol.kv_groups import KVGroups
from protocol.media import MediaModel
from protocol.pooling import PoolingModel
from protocol.steps import KeepPins


class Shard(msgspec.Struct, array_like=True, frozen=True):
    """Part of the weights of one rank. It is kept over epochs if the worker gets the same shard again."""

    tp_rank: Count = 0
    tensor_parallel_size: Count = 1
    pp_rank: Count = 0
    pipeline_parallel_size: Count = 1


class Speculation(msgspec.Struct, array_like=True, frozen=True):
    """Configuration of speculative decoding, sent to workers by the scheduler. The field names are vLLM's."""

    method: Name
    """"ngram", "eagle", "eagle3" or "draft_model"."""
    num_speculative_tokens: Count
    """Maximum number of drafts of a row."""
    model: Text = ""
    """Directory or Hugging Face name of the drafter's checkpoint; "": the method has none."""
    revision: Text = ""
    max_model_len: Count = 0
    """Longest sequence that gets drafts, tokens; 0: the limit of the drafter's checkpoint."""
    prompt_lookup_min: Count = 0
    """ngram: shortest match, tokens."""
    prompt_lookup_max: Count = 0
    """ngram: longest match, tokens."""


class Register(msgspec.Struct, array_like=True, frozen=True, tag="register"):
    """Properties of a worker. The first message after the handshake, and again after each `EndEpoch`."""

    backend: Name
    model: Text
    """Name of the model in the configuration, for logs."""
    hostname: Name = ""
    pid: Count = 0
    model_hash: Name = ""
    """Hex digest of the checkpoint's configuration and weight index; ranks of one group must agree."""
    dtype: Name = ""
    """Data type of the weights; ranks of one group must agree."""
    tensor_parallel_sizes: Annotated[tuple[Positive, ...], msgspec.Meta(min_length=1, max_length=MAX_ITEMS)] = (1,)
    """Tensor-parallel sizes that the model allows, in ascending order."""
    max_pipeline_parallel_size: Count = 1
    """Maximum number of stages that the model allows."""
    rendezvous: Name = ""
    """"HOST:PORT" of a listening socket of this worker, to which the other ranks connect if it becomes rank 0."""
    epoch: RegisteredEpoch = 0
    """Last epoch of this worker, perhaps of another scheduler; 0: none. The next one is later."""
    shard: Shard | None = None
    """Shard of the weights in memory; None: no weights are loaded."""
    returns: bool = False
    """It was registered with a scheduler that is lost. So were others, perhaps, which have weights in memory."""
    tokenizer: Name = ""
    """Digest of the tokenizer.json beside the weights; "": there is none."""
    leaves_rows_out: bool = False
    """True: the worker samples a step without the constrained rows whose masks are missing, if others would wait."""
    single_rank: Text = ""
    """Reason why this worker can only be the single rank of a group; "": it may have others."""


class Assignment(msgspec.Struct, array_like=True, frozen=True, tag="assignment"):
    """Rank of the worker in this epoch, and the limits of the engine for its buffers."""

    epoch: EpochId
    rank: Count
    world_size: Count
    block_size: Count
    """Tokens per KV block."""
    num_slots: Count
    """Slots are numbered 0 .. num_slots - 1."""
    max_num_batched_tokens: Count
    """Maximum number of tokens in one step."""
    max_model_len: Count = 0
    """Configured context length, tokens; 0: the checkpoint's."""
    tensor_parallel_size: Count = 1
    pipeline_parallel_size: Count = 1
    rendezvous: Name = ""
    """`Register.rendezvous` of rank 0; "" in a group of one."""
    speculation: Speculation | None = None
    max_kv_groups: Count = 1
    """Maximum number of `Loaded.groups`; 1: the scheduler knows one block table per request."""
    max_loras: Count = 0
    """Maximum number of LoRA adapters in one step; 0: none are served."""
    max_lora_rank: Count = 0
    """Maximum rank of an adapter."""

    @property
    def shard(self) -> Shard:
        pp_rank, tp_rank = divmod(self.rank, self.tensor_parallel_size)
        return Shard(tp_rank, self.tensor_parallel_size, pp_rank, self.pipeline_parallel_size)

    @property
    def output_rank(self) -> int:
        return output_rank(self.tensor_parallel_size, self.pipeline_parallel_size)


def output_rank(tensor_parallel_size: int, pipeline_parallel_size: int) -> int:
    """Return the rank that samples and sends the results: the first rank of the last stage."""
    return (pipeline_parallel_size - 1) * tensor_parallel_size


class LoadProgress(msgspec.Struct, array_like=True, frozen=True, tag="progress"):
    phase: Text
    fraction: Fraction
    """0 to 1"""
    epoch: EpochId = 0


class Loaded(msgspec.Struct, array_like=True, frozen=True, tag="loaded"):
    """The weights are loaded; sizes of the model and of the KV cache that fits into memory."""

    model_hash: Name
    """`Register.model_hash`"""
    vocab_size: Count
    """Width of the logits."""
    max_model_len: Count
    """Context length, tokens: the minimum of the checkpoint's and the configured one."""
    bytes_per_block: Bytes
    num_blocks: Count
    """Number of KV blocks that fit into the memory of this rank."""
    simulated: bool = False
    epoch: EpochId = 0
    hidden_size: Count = 0
    """Length of an embedding; 0: the backend computes none."""
    num_loads: Count = 0
    """Number of times that this process has read weights; it stays equal when they were kept from an epoch before."""
    contents: Annotated[dict[Text, Name], msgspec.Meta(max_length=MAX_ITEMS)] = {}
    """Digest of each part of the weights, by its tensor, its rows and columns, and its type; {}: not known."""
    held: NamedBlocks | None = None
    """Whole blocks in this rank's KV memory, in the order in which they became whole; None: it holds none."""
    groups: KVGroups = ()
    """Groups of layers, each with a block table; (): one with full attention. All ranks have the same."""
    loads_blocks: bool = False
    """True: this rank has a tier, and answers `LoadBlocks`."""
    kv_peer: Text = ""
    """"ENDPOINT" or "ENDPOINT KEY", with a public key (z85), at which workers of other engines fetch blocks from this
    rank. It fetches from them, too. "": neither."""
    pooling: PoolingModel | None = None
    """A model that generates no text; None: it generates text. Its `max_model_len` is one more than its longest prompt,
    because the result takes the place of a token."""
    pins: KeepPins | None = None
    """Pins of the last scheduler; None: it sent none to this process."""
    media: MediaModel | None = None
    """None: the model, or this backend, reads neither images nor sounds."""
    adapted_modules: Annotated[tuple[Name, ...], msgspec.Meta(max_length=MAX_ITEMS)] = ()
    """Last parts of the names of the modules that LoRA adapters may change; (): not known."""
    longrope: Name = ""
    """"short" or "long": the factors of longrope that the context length has chosen; "": the model has none."""
    dropped_in: EpochId = 0
    """The epoch of the last drop or reset that this rank's KV memory has had; 0: it has had none."""


class InitializeCache(msgspec.Struct, array_like=True, frozen=True, tag="init_cache"):
    """Allocate the KV cache."""

    num_blocks: Count
    max_model_len: Count
    epoch: EpochId = 0
    canary_block: Count = 0
    """The block that the test step writes. It is not adopted."""
    whole_steps: bool = False
    """No row is left out in this epoch, whatever the workers can: all masks of a step come before the next plan."""
    dropped_in: EpochId = 0
    """The epoch of the last drop or reset: memory with another one (`Loaded.dropped_in`) loses all its names."""


class Ready(msgspec.Struct, array_like=True, frozen=True, tag="ready"):
    """The KV cache is allocated, and a test step ran on all ranks together, through forward pass and sampling."""

    epoch: EpochId


class Heartbeat(msgspec.Struct, array_like=True, frozen=True, tag="heartbeat"):
    """Sign of life, sent on the connection for results by a thread that the forward pass cannot block."""

    epoch: EpochId
    last_step_id: StepId
    """Last step that this rank has finished."""
    work: Finite = 0.0
    """While it loads: seconds of processor time that its processes have used so far; 0.0: not measured."""
    answers: Count = 0
    """Last `Ping.number` that has arrived on this connection; 0: none yet."""
    is_stopped: bool = False
    """A signal has stopped this rank. It serves until the scheduler, which may be stopped as well, sends `Shutdown`."""


class LoadFailed(msgspec.Struct, array_like=True, frozen=True, tag="load_failed"):
    """The worker cannot serve and exits after this message. `error` is one line with the reason and the remedy."""

    error: Text


class RankLost(msgspec.Struct, array_like=True, frozen=True, tag="rank_lost"):
    """A collective failed, because another rank was lost; or this rank had not enough memory for a step. This worker is
    well: it waits for `EndEpoch`."""

    epoch: EpochId
    error: Text
    out_of_memory: bool = False
    step_id: StepId = 0
    """The step that ran out of memory; 0: another reason."""


class EndEpoch(msgspec.Struct, array_like=True, frozen=True, tag="end_epoch"):
    """The epoch has ended: its batch and its process groups are void. The worker registers again.

    Sent on both connections of a worker, so that it is read even if the executing thread hangs in a collective.
    """

    epoch: EpochId
    reason: Text = ""
    is_fault: bool = True
    """False: another size fits the workers better, a rank was stopped in order, or smaller steps are tried."""


class Ping(msgspec.Struct, array_like=True, frozen=True, tag="ping"):
    """Checks the connection. The worker answers with a `Pong`, except on its connection for results, where its
    heartbeats answer. Every second one is the scheduler's sign of life: for all workers on that connection, and for
    ranks of the epoch in effect on the other one, too."""

    sent: Finite = 0.0
    """Seconds on the scheduler's monotonic clock."""
    number: Count = 0
    """Counts the scheduler's signs of life from 1; 0: this is none."""


class TierReport(msgspec.Struct, array_like=True, frozen=True):
    """A tier of one rank: a home of KV blocks outside of its cache."""

    name: Name
    """"host" or "disk"."""
    size: Bytes
    """Bytes of all blocks in it, also those of other engines that share it."""
    stored: bytes = b""
    """uint8[blocks, NAME_BYTES]: blocks that this rank has written since its last report, if it is rank 0; under load
    the newest ones"""
    removed: bytes = b""
    """The same of blocks that it has removed. They come after those of `stored`."""


class Pong(msgspec.Struct, array_like=True, frozen=True, tag="pong"):
    """Answer to a `Ping`. The scheduler computes the offset of the two clocks from it."""

    ping_sent: Finite
    """`Ping.sent`"""
    received: Finite
    """Seconds on the worker's monotonic clock: the `Ping` was read."""
    sent: Finite
    """Seconds on the worker's monotonic clock: this message was sent."""
    number: Count = 0
    """`Ping.number`"""
    tiers: Annotated[list[TierReport], msgspec.Meta(max_length=MAX_ITEMS)] = []
    """The tiers of this rank, in answers to signs of life during an epoch."""


class Shutdown(msgspec.Struct, array_like=True, frozen=True, tag="shutdown"):
    """The worker ends in an orderly way."""

    reason: Text = ""


WorkerMessage = Register | LoadProgress | Loaded | Ready | Heartbeat | Pong | LoadFailed | RankLost
"""worker -> scheduler, outside of steps"""
GroupMessage = Assignment | InitializeCache | EndEpoch | Ping | Shutdown
"""scheduler -> worker, outside of steps"""
