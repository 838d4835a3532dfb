"""The engine's state as frontends see it, and the pause while a lost scheduler is replaced. No sockets, no clock."""

from collections import deque
from typing import NamedTuple

from msgspec.structs import replace

from protocol.requests import EnginePhase, EngineState
from services.frontend.errors import APIError
from services.frontend.placement import Condition

NOT_CONNECTED = EngineState(EnginePhase.WAITING_FOR_WORKERS, "connecting to the scheduler")
SERVING = (EnginePhase.READY, EnginePhase.RECOVERING)
"""Phases of an engine that takes requests."""
RECOVERY_GRACE = 5.0
"""Seconds for which streams wait for the workers of their engine before they move to another one: a worker that is
started again finds its KV memory, and a request that has killed the workers kills no others meanwhile."""
STARTING = (EnginePhase.WAITING_FOR_WORKERS, EnginePhase.LOADING)
SIZES = (
    "max_model_len", "vocab_size", "num_blocks", "block_size", "max_num_seqs", "hidden_size", "identity", "pooling",
    "adapted_modules", "media", "max_loras",
)  # fmt: skip
"""Fields of `EngineState` that requests are checked against, and that decide where they may go."""
GAUGES = {
    "num_requests_running", "num_requests_waiting", "num_requests_waiting_by_reason", "kv_cache_usage_perc",
    "inflight_steps", "epoch", "num_workers", "grammar_cache_bytes", "grammars_compiling", "weight_loads",
    "expected_queue_seconds", "seconds_per_prompt_token", "kv_tier_bytes",
}  # fmt: skip
"""Statistics that say nothing of an engine whose scheduler is lost. The others are totals."""


def checked(state: EngineState, limit: float) -> EngineState:
    """Return the state of an engine as one that recovers if a rank has not answered for longer than `limit` seconds."""
    if state.phase is not EnginePhase.READY or state.round_trips is None:
        return state
    silent = [rank for rank, seconds in enumerate(state.round_trips.unanswered) if seconds > limit]
    if not silent:
        return state
    detail = f"rank {', '.join(map(str, silent))} does not answer the scheduler"
    return replace(state, phase=EnginePhase.RECOVERING, detail=detail)


class Recovery(NamedTuple):
    """Loss of workers or of the scheduler, or the end of the pause that followed."""

    at: float
    """Monotonic seconds."""
    name: str
    reason: str
    engine: str
    """Name of the engine."""


class Availability:
    """Requests may wait while lost workers, or a lost scheduler, are replaced. They wait for a bounded time.

    Args:
        patience: seconds that open requests wait for another scheduler.
        recoveries: receives losses and returns.
    """

    def __init__(self, name: str, patience: float, recoveries: deque["Recovery"]) -> None:
        self.name, self._patience = name, patience
        self.state = NOT_CONNECTED
        self.executes = False
        """The scheduler that is connected executes requests, or will when it has its workers again."""
        self._recoveries = recoveries
        self._lost_at: float | None = None
        """When an engine that served was lost, until another one serves; monotonic seconds."""
        self.draining = False
        """An administrator wants its streams to move to other engines; it gets no new ones."""
        self._is_lost = self._is_silent = False
        """No state has arrived since the connection was lost, or since the scheduler gave no sign of life."""
        self._has_drained = False
        """The scheduler that is lost had been stopped."""
        self._stopped_at: float | None = None
        """When the scheduler that is connected lost its workers; monotonic seconds. None: it has them."""
        self._is_stopped = False
        """They were not back within the grace."""

    @property
    def condition(self) -> Condition:
        if self._is_lost:
            return Condition.GONE
        if self.draining or self.state.phase is EnginePhase.DRAINING:
            return Condition.DRAINING
        if self._is_silent:
            return Condition.SILENT
        if self._is_stopped:
            return Condition.RECOVERING
        return Condition.READY if self.ready else Condition.CONNECTING

    @property
    def accepts(self) -> bool:
        """New requests are taken. They may have to wait until the engine is back."""
        return self.state.phase in SERVING and not self.draining

    @property
    def ready(self) -> bool:
        """True if requests are executed now."""
        return self.accepts and self.executes and self.state.phase is EnginePhase.READY

    def check(self) -> None:
        """Raises: APIError, with the reason why no request is taken"""
        if self.state.phase not in SERVING:
            reason = self.state.detail or self.state.phase.name.lower().replace("_", " ")
            raise APIError(503, f"the engine is not ready: {reason}")

    def on_state(self, state: EngineState, now: float) -> None:
        """The scheduler that is connected has sent its state."""
        self._is_lost = self._is_silent = self._has_drained = False
        self.executes = state.phase in (*SERVING, EnginePhase.DRAINING)
        if self.executes:
            self._lost_at = None
        elif self._lost_at is not None and state.phase in STARTING:
            # The sizes of the last engine hold, so that new requests can be checked; `phase` shows the recovery.
            sizes = {name: getattr(self.state, name) for name in SIZES}
            state = replace(state, phase=EnginePhase.RECOVERING, **sizes)
        is_stopped = state.phase is EnginePhase.RECOVERING
        self._stopped_at = (self._stopped_at or now) if is_stopped else None
        self._is_stopped &= is_stopped
        self._set(state, now)

    def check_workers(self, now: float) -> None:
        """Notice that workers are not back in time. Call it regularly."""
        self._is_stopped = self._stopped_at is not None and now - self._stopped_at > RECOVERY_GRACE

    def on_doubt(self, now: float) -> None:
        """The scheduler that is connected gives no sign of life. Its next state ends the doubt."""
        self._is_silent = True
        if self.state.phase is EnginePhase.READY:
            detail = "the scheduler gives no sign of life"
            self._set(replace(self.state, phase=EnginePhase.RECOVERING, detail=detail), now)

    def on_lost(self, now: float) -> None:
        """The connection is lost. An engine that served is expected back."""
        self.executes, self._is_lost = False, True
        self._stopped_at, self._is_stopped = None, False
        self._has_drained |= self.state.phase is EnginePhase.DRAINING
        totals = {name: value for name, value in self.state.stats.items() if name.partition(":")[0] not in GAUGES}
        self.state = replace(self.state, stats=totals, pids=[], running_loras=[], waiting_loras=[])
        if self.state.phase is EnginePhase.FAILED:  # it is not expected back
            self.state = replace(self.state, identity="")
            return
        if self.state.phase in (*SERVING, EnginePhase.DRAINING):
            self._lost_at = self._lost_at or now
            detail = "the scheduler is lost; waiting for another one"
            self._set(replace(self.state, phase=EnginePhase.RECOVERING, detail=detail), now)
        elif self._lost_at is None:
            self._set(NOT_CONNECTED, now)

    def gives_up(self, now: float, is_connected: bool, is_stopping: bool = False) -> bool:
        """Return whether the engine was lost for too long. It is no longer expected back then. `is_stopping`: this
        frontend drains, and does not wait for an engine that was stopped as well."""
        patience = 0.0 if is_stopping and self._has_drained else self._patience
        if self._lost_at is None or now - self._lost_at <= patience:
            return False
        self._lost_at = None
        if not is_connected:
            self._set(NOT_CONNECTED, now)
        return True

    def _set(self, state: EngineState, now: float) -> None:
        was_lost, is_lost = (s.phase is EnginePhase.RECOVERING for s in (self.state, state))
        if is_lost and not was_lost:
            self._recoveries.append(Recovery(now, "engine lost", state.detail, self.name))
        elif was_lost and state.phase is EnginePhase.READY:
            self._recoveries.append(Recovery(now, "engine recovered", "", self.name))
        self.state = state
