"""Who computes: the worker group's life as a state machine without I/O. Messages in, messages out.

One rank for now; a second worker is refused by name. The group starts once and does not outlive its worker.
"""

from collections.abc import Callable

from protocol.membership import (
    Assignment,
    GroupMessage,
    Heartbeat,
    InitializeCache,
    Loaded,
    LoadFailed,
    LoadProgress,
    Ready,
    Register,
    WorkerMessage,
)
from protocol.requests import EnginePhase
from services.config import SchedulerConfig
from services.scheduler.limits import Limits

EPOCH = 1
HEARTBEAT_TIMEOUT = 30.0
"""Seconds without a word from the worker after which it counts as lost."""


class WorkerLost(Exception):
    """The group cannot serve any more; the text says what happened."""


class WorkerGroup:
    def __init__(self, config: SchedulerConfig, send: Callable[[bytes, GroupMessage], None]) -> None:
        self._config = config
        self._send = send
        self.peer: bytes | None = None
        self.phase = EnginePhase.WAITING_FOR_WORKERS
        self.detail = "waiting for a worker to register"
        self.progress = 0.0
        self.loaded: Loaded | None = None
        self.limits: Limits | None = None
        self._last_seen = 0.0

    def refuses(self, peer: bytes) -> str | None:
        """Why another worker is not wanted, or None."""
        if self.peer not in (None, peer):
            return "the group is complete: this scheduler serves with 1 worker and has one"
        return None

    def on_message(self, peer: bytes, message: WorkerMessage, now: float) -> None:
        """Raises: WorkerLost, when the worker says that it cannot serve or does not fit the configuration."""
        self.seen(now)
        match message:
            case Register() if self.phase is EnginePhase.WAITING_FOR_WORKERS:
                self.peer, self.phase = peer, EnginePhase.LOADING
                self.detail = f"loading {message.model or 'the model'}"
                self._send(peer, self._assignment())
            case LoadProgress() if self.phase is EnginePhase.LOADING:
                self.detail, self.progress = message.phase, message.fraction
            case Loaded() if self.phase is EnginePhase.LOADING and self.loaded is None:
                self.loaded, self.limits = message, self._fit(message)
                self._send(peer, InitializeCache(self.limits.num_blocks, self.limits.max_model_len))
            case Ready(epoch=epoch) if self.limits is not None and epoch == EPOCH:
                self.phase, self.detail, self.progress = EnginePhase.READY, "ready", 1.0
            case LoadFailed():
                raise WorkerLost(message.error)
            case Heartbeat():
                pass  # its arrival is all it says
            case _:
                raise WorkerLost(f"the worker sent {type(message).__name__} while {self.phase.name}")

    def seen(self, now: float) -> None:
        """A message of the group's worker arrived."""
        self._last_seen = now

    def check(self, now: float) -> None:
        """Raises: WorkerLost, if the worker has been silent for too long."""
        if self.phase is EnginePhase.READY and now - self._last_seen > HEARTBEAT_TIMEOUT:
            raise WorkerLost(f"the worker was silent for {HEARTBEAT_TIMEOUT:.0f} s")

    def _assignment(self) -> Assignment:
        c = self._config
        return Assignment(
            epoch=EPOCH,
            rank=0,
            world_size=1,
            block_size=c.block_size,
            num_slots=2 * c.max_num_seqs,
            max_num_batched_tokens=c.max_num_batched_tokens,
            max_model_len=c.max_model_len or 0,
        )

    def _fit(self, loaded: Loaded) -> Limits:
        """The engine's sizes from what the worker can hold; a context that does not fit is lowered, or refused where
        the user asked for it."""
        c = self._config
        num_blocks = c.num_gpu_blocks_override or loaded.num_blocks
        if num_blocks > loaded.num_blocks:
            raise WorkerLost(
                f"--num-gpu-blocks-override {num_blocks}: the worker can hold {loaded.num_blocks} blocks"
            )
        holds = num_blocks * c.block_size
        if c.max_model_len and c.max_model_len > holds:
            raise WorkerLost(
                f"--max-model-len {c.max_model_len} does not fit the KV cache of {holds} tokens; "
                f"use --max-model-len {holds} or more --kv-cache-memory-bytes"
            )
        return Limits(
            max_num_seqs=c.max_num_seqs,
            max_num_batched_tokens=c.max_num_batched_tokens,
            max_model_len=min(loaded.max_model_len, holds),
            num_blocks=num_blocks,
            block_size=c.block_size,
            enable_prefix_caching=c.enable_prefix_caching,
        )
