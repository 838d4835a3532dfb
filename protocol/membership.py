"""scheduler <-> worker: who is there, in which epoch.

worker                      scheduler
Register            ───►
                    ◄───    Assignment          (or Refused, see protocol.handshake; a spare waits for one)
LoadProgress ...    ───►
Loaded              ───►                        (all ranks are connected to one another)
                    ◄───    InitializeCache     (the least that all ranks can hold)
Ready               ───►                        (a canary step has run)
Heartbeat ...       ───►
                    ◄───    EndEpoch            (a rank was lost, or joined: back to Register, on the same connection)
                    ◄───    Shutdown

Ranks are numbered `pp_rank * tensor_parallel_size + tp_rank`. Every rank gets every plan; the first rank of the last
stage samples and sends the results. Tensors between ranks travel by torch.distributed, from `rendezvous` on.
"""

from typing import Annotated

import msgspec

from protocol.fields import MAX_ITEMS, Bytes, Count, Finite, Fraction, Name, StepId, Text


class Shard(msgspec.Struct, array_like=True, frozen=True):
    """A place in the group, by which weights are cut. It outlives an epoch if the worker gets the same one again."""

    tp_rank: Count = 0
    tensor_parallel_size: Count = 1
    pp_rank: Count = 0
    pipeline_parallel_size: Count = 1


class Speculation(msgspec.Struct, array_like=True, frozen=True):
    """How drafts are proposed; vLLM's field names. The scheduler has it from its user, workers from the scheduler."""

    method: Name
    """"ngram", "eagle", "eagle3" or "draft_model"."""
    num_speculative_tokens: Count
    """Most drafts in a row."""
    model: Text = ""
    """Directory or Hugging Face name of the drafter's checkpoint; "": the method has none."""
    revision: Text = ""
    max_model_len: Count = 0
    """The drafter's own longest sequence; 0: its checkpoint's."""
    prompt_lookup_min: Count = 0
    prompt_lookup_max: Count = 0


class Register(msgspec.Struct, array_like=True, frozen=True, tag="register"):
    """What a worker is. The first message after the handshake, and again after each `EndEpoch`."""

    backend: Name
    model: Text
    """Name of the model as configured, for people."""
    hostname: Name = ""
    pid: Count = 0
    model_hash: Name = ""
    """Hex digest of the checkpoint's configuration and weight index; ranks of one group must agree."""
    dtype: Name = ""
    """Of the weights; ranks of one group must agree."""
    tensor_parallel_sizes: Annotated[tuple[Count, ...], msgspec.Meta(max_length=MAX_ITEMS)] = (1,)
    """Sizes that the model can be cut to, in ascending order."""
    max_pipeline_parallel_size: Count = 1
    """Most stages that the model can be cut to."""
    rendezvous: Name = ""
    """"HOST:PORT" of a listening socket that this worker holds: where the others meet if it becomes rank 0."""
    epoch: Count = 0
    """The last epoch this worker was in; 0: none."""
    shard: Shard | None = None
    """What it has in memory already."""


class Assignment(msgspec.Struct, array_like=True, frozen=True, tag="assignment"):
    """The worker's place in the group of this epoch, and the engine's limits it must size itself for."""

    epoch: Count
    rank: Count
    world_size: Count
    block_size: Count
    """Tokens per KV block."""
    num_slots: Count
    """Slots are numbered 0 .. num_slots - 1."""
    max_num_batched_tokens: Count
    """Most tokens in one step."""
    max_model_len: Count = 0
    """The user's limit; 0: what the checkpoint says."""
    tensor_parallel_size: Count = 1
    pipeline_parallel_size: Count = 1
    rendezvous: Name = ""
    """What rank 0 registered with; "" in a group of one."""
    speculation: Speculation | None = None

    @property
    def shard(self) -> Shard:
        pp_rank, tp_rank = divmod(self.rank, self.tensor_parallel_size)
        return Shard(tp_rank, self.tensor_parallel_size, pp_rank, self.pipeline_parallel_size)

    @property
    def output_rank(self) -> int:
        """The one that samples and sends the results: the first rank of the last stage."""
        return (self.pipeline_parallel_size - 1) * self.tensor_parallel_size


class LoadProgress(msgspec.Struct, array_like=True, frozen=True, tag="progress"):
    phase: Text
    fraction: Fraction
    """0 to 1"""


class Loaded(msgspec.Struct, array_like=True, frozen=True, tag="loaded"):
    """Weights are in memory; what the KV cache costs and how much of it fits."""

    model_hash: Name
    """As registered."""
    vocab_size: Count
    """Width of the logits row."""
    max_model_len: Count
    """The checkpoint's own limit, or the user's where that is lower."""
    bytes_per_block: Bytes
    num_blocks: Count
    """Blocks this rank can hold."""
    simulated: bool = False
    epoch: Count = 0
    hidden_size: Count = 0
    """Length of an embedding; 0: this backend gives none."""


class InitializeCache(msgspec.Struct, array_like=True, frozen=True, tag="init_cache"):
    num_blocks: Count
    max_model_len: Count


class Ready(msgspec.Struct, array_like=True, frozen=True, tag="ready"):
    """The cache is allocated and a canary step ran through forward and sampling, on all ranks together."""

    epoch: Count


class Heartbeat(msgspec.Struct, array_like=True, frozen=True, tag="heartbeat"):
    """Sent by a thread that the forward pass cannot block, on the connection for results."""

    epoch: Count
    last_step_id: StepId
    """The last step this rank has finished."""
    rank: Count = 0


class LoadFailed(msgspec.Struct, array_like=True, frozen=True, tag="load_failed"):
    """The worker cannot serve; it exits after this. One line: what is wrong and what to do."""

    error: Text


class RankLost(msgspec.Struct, array_like=True, frozen=True, tag="rank_lost"):
    """The worker lost another rank (a collective failed); it is well itself and waits for `EndEpoch`."""

    epoch: Count
    error: Text


class EndEpoch(msgspec.Struct, array_like=True, frozen=True, tag="end_epoch"):
    """The epoch is over: its batch and its process groups are void. The worker registers again.

    Comes on both connections of a worker, so that it is read although the executing thread hangs in a collective.
    """

    epoch: Count
    reason: Text = ""


class Ping(msgspec.Struct, array_like=True, frozen=True, tag="ping"):
    """Shows that the connection exists; the worker answers with a `Pong`."""

    sent: Finite = 0.0
    """Seconds on the scheduler's monotonic clock."""


class Pong(msgspec.Struct, array_like=True, frozen=True, tag="pong"):
    """The answer to a `Ping`, from which the scheduler computes how far the two clocks are apart."""

    ping_sent: Finite
    """`Ping.sent`"""
    received: Finite
    """Seconds on the worker's monotonic clock: the `Ping` was read."""
    sent: Finite
    """Seconds on the worker's monotonic clock: this message was sent."""


class Shutdown(msgspec.Struct, array_like=True, frozen=True, tag="shutdown"):
    """The worker leaves in an orderly way."""

    reason: Text = ""


WorkerMessage = Register | LoadProgress | Loaded | Ready | Heartbeat | Pong | LoadFailed | RankLost
"""worker -> scheduler, outside of steps"""
GroupMessage = Assignment | InitializeCache | EndEpoch | Ping | Shutdown
"""scheduler -> worker, outside of steps"""
