"""The state of the engine, its settings and its figures, as frontends receive them."""

import os
import time

from protocol.kv_groups import num_states
from protocol.requests import EngineState, RoundTrips
from services.config import SchedulerConfig
from services.scheduler.core.engine import EngineCore
from services.scheduler.membership import GroupStatus, Started, WorkerGroup
from services.scheduler.structured_output import StructuredOutput
from services.scheduler.tier_reports import TierReports
from services.scheduler.worker_seconds import WorkerSeconds

GAUGE_INTERVAL = 0.1
"""Seconds between two reports of the gauges while there are requests."""


class StateReports:
    """Makes the `EngineState` of one scheduler. It is due when the status has changed, every `GAUGE_INTERVAL` while
    there are requests, and when they have ended."""

    def __init__(
        self,
        config: SchedulerConfig,
        incarnation: int,
        group: WorkerGroup,
        structured: StructuredOutput,
        tiers: TierReports,
    ) -> None:
        self._config, self._incarnation, self._group = config, incarnation, group
        self._structured, self._tiers = structured, tiers
        self.worker_seconds = WorkerSeconds()
        self._reported: GroupStatus | None = None
        self._next_gauges = 0.0
        self._was_busy = False

    def is_due(self, now: float, status: GroupStatus, engine: EngineCore | None) -> bool:
        """Return whether to report. Call it in each turn of the loop."""
        was_busy, busy = self._was_busy, engine is not None and (engine.has_requests or len(engine.queue) > 0)
        self._was_busy = busy
        is_stale = now >= self._next_gauges if busy else was_busy
        return is_stale or status != self._reported

    def report(self, status: GroupStatus, started: Started | None, engine: EngineCore | None) -> EngineState:
        """Return the state for all frontends; arguments as of `state`."""
        self._reported, self._next_gauges = status, time.monotonic() + GAUGE_INTERVAL
        return self.state(status, started, engine)

    def state(self, status: GroupStatus, started: Started | None, engine: EngineCore | None) -> EngineState:
        """`started`: the epoch in effect, or the last one; None: there was none."""
        group = self._group
        limits, loaded = (started.limits, started.loaded) if started else (None, None)
        running_loras, waiting_loras = ([], []) if engine is None else engine.loras()
        return EngineState(
            phase=status.phase,
            detail=status.detail,
            progress=status.progress,
            max_model_len=limits.max_model_len - limits.pools_only if limits else 0,  # no token follows a prompt
            vocab_size=loaded.vocab_size if loaded else 0,
            num_blocks=limits.num_blocks if limits else 0,
            block_size=self._config.block_size,
            max_num_seqs=limits.max_num_seqs if limits else self._config.max_num_seqs,
            simulated=loaded.simulated if loaded else False,
            stats={} if engine is None else self._stats(engine, started),
            info=self._info(started),
            hidden_size=loaded.hidden_size if loaded else 0,
            incarnation=self._incarnation,
            tokenizer=self._structured.tokenizer,
            round_trips=RoundTrips(unanswered=group.unanswered),
            identity=group.identity(loaded.longrope if loaded else ""),
            pids=[os.getpid(), *group.pids],
            kv_peers=[*started.kv_peers] if started else [],
            pooling=loaded.pooling if loaded else None,
            media=loaded.media if loaded else None,
            adapted_modules=loaded.adapted_modules if loaded else (),
            max_loras=limits.max_loras if limits else 0,
            running_loras=running_loras,
            waiting_loras=waiting_loras,
        )

    def _stats(self, engine: EngineCore, started: Started | None) -> dict[str, float]:
        grammars = self._structured.compiler.stats() if self._structured.compiler is not None else {}
        held = len(engine.epoch.kv.pool.by_hash) * (started.bytes_per_block if started else 0)
        tiers = self._tiers.stats(held, engine.store.counters["prefix_cache_hits"])
        return engine.stats() | self.worker_seconds.stats() | self._group.stats() | grammars | tiers

    def _info(self, started: Started | None) -> dict[str, str]:
        c, group = self._config, self._group
        info = {
            "batching_policy": c.policy,
            "batch_queue_depth": str(c.depth),
            "prefix_caching": str(c.enable_prefix_caching and not (started and num_states(started.limits.groups))),
            "role": c.role,
            "scheduling_policy": c.scheduling_policy,
        }
        if c.speculative_config is not None:
            info["speculative_method"] = c.speculative_config.method
        if started is not None and group.backend:
            info |= {
                "backend": group.backend,
                "tensor_parallel_size": str(group.size.tensor_parallel if group.size else 0),
                "pipeline_parallel_size": str(started.limits.stages),
                "max_num_batched_tokens": str(started.limits.max_num_batched_tokens),
            }
        return info
