"""The state of the engine, its settings and its figures, as frontends receive them."""

import os

from protocol.kv_groups import num_states
from protocol.requests import EngineState, RoundTrips
from services.config import SchedulerConfig
from services.scheduler.membership import GroupStatus, Started, WorkerGroup


class StateReports:
    """Makes the `EngineState` of one scheduler."""

    def __init__(self, config: SchedulerConfig, incarnation: int, tokenizer: str) -> None:
        """`tokenizer`: digest of the tokenizer.json that grammars are compiled for; "": there is none."""
        self._config, self._incarnation, self._tokenizer = config, incarnation, tokenizer

    def state(
        self,
        status: GroupStatus,
        group: WorkerGroup,
        started: Started | None,
        stats: dict[str, float],
        running_loras: list[str],
        waiting_loras: list[str],
    ) -> EngineState:
        """`started`: the epoch in effect, or the last one; None: there was none."""
        limits, loaded = (started.limits, started.loaded) if started else (None, None)
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
            stats=stats,
            info=self._info(group, started),
            hidden_size=loaded.hidden_size if loaded else 0,
            incarnation=self._incarnation,
            tokenizer=self._tokenizer,
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

    def _info(self, group: WorkerGroup, started: Started | None) -> dict[str, str]:
        c = self._config
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
