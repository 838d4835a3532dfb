"""scheduler <-> worker: who is there, in which epoch.

worker                      scheduler
Register            ───►
                    ◄───    Assignment          (or Refused, see protocol.handshake)
LoadProgress ...    ───►
Loaded              ───►
                    ◄───    InitializeCache     (the least that all ranks can hold)
Ready               ───►                        (a canary step has run)
Heartbeat ...       ───►
                    ◄───    Shutdown
"""

import msgspec

from protocol.fields import Bytes, Count, Fraction, Name, StepId, Text


class Register(msgspec.Struct, array_like=True, frozen=True, tag="register"):
    """First message of a worker after the handshake: what it is."""

    backend: Name
    model: Text
    """Name of the model as configured, for people."""
    hostname: Name = ""
    pid: Count = 0


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


class LoadProgress(msgspec.Struct, array_like=True, frozen=True, tag="progress"):
    phase: Text
    fraction: Fraction
    """0 to 1"""


class Loaded(msgspec.Struct, array_like=True, frozen=True, tag="loaded"):
    """Weights are in memory; what the KV cache costs and how much of it fits."""

    model_hash: Name
    """Hex digest of the checkpoint's configuration and weight index; ranks of one group must agree."""
    vocab_size: Count
    """Width of the logits row."""
    max_model_len: Count
    """The checkpoint's own limit, or the user's where that is lower."""
    bytes_per_block: Bytes
    num_blocks: Count
    """Blocks this rank can hold."""
    simulated: bool = False


class InitializeCache(msgspec.Struct, array_like=True, frozen=True, tag="init_cache"):
    num_blocks: Count
    max_model_len: Count


class Ready(msgspec.Struct, array_like=True, frozen=True, tag="ready"):
    """The cache is allocated and a canary step ran through forward and sampling."""

    epoch: Count


class Heartbeat(msgspec.Struct, array_like=True, frozen=True, tag="heartbeat"):
    """Sent by a thread that the forward pass cannot block."""

    epoch: Count
    last_step_id: StepId


class LoadFailed(msgspec.Struct, array_like=True, frozen=True, tag="load_failed"):
    """The worker cannot serve; it exits after this. One line: what is wrong and what to do."""

    error: Text


class Shutdown(msgspec.Struct, array_like=True, frozen=True, tag="shutdown"):
    """The worker leaves in an orderly way."""

    reason: Text = ""


WorkerMessage = Register | LoadProgress | Loaded | Ready | Heartbeat | LoadFailed
"""worker -> scheduler, outside of steps"""
GroupMessage = Assignment | InitializeCache | Shutdown
"""scheduler -> worker, outside of steps"""
