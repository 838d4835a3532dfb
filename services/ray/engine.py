"""An engine as a replica of a Ray Serve deployment: it owns the actors of its scheduler and its ranks.

The replica's placement group is the engine's. The replica itself computes nothing: it watches the engine as a frontend
does, so that Serve sees its health and its load.
"""

import asyncio
import contextlib
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from protocol.requests import EnginePhase
from services.config import RayConfig
from services.frontend.engine.client import EngineClient
from services.ray.actors import RankActor, SchedulerActor, check_version
from services.ray.discovery import Discovery, prefix
from services.ray.keys import key_directory
from services.ray.resources import SCHEDULER_CPUS, bundles, rank_resources, ranks_per_bundle

POLL_INTERVAL = 0.5
"""Seconds between two looks at an engine that starts."""
ALWAYS = {"max_restarts": -1, "max_concurrency": 1000}
"""Options of actors: Ray starts them again, and many calls of `join` may wait."""


class EngineReplica:
    """`settings`: those of `RayConfig` that were given. `version`: version of Runahead of the application."""

    async def __init__(self, settings: dict[str, Any], version: str) -> None:  # type: ignore[misc]  # Serve awaits it
        check_version(version)
        self._config = RayConfig(**settings)
        context = serve.get_replica_context()
        self._stack = contextlib.ExitStack()
        keys = self._stack.enter_context(key_directory("frontend"))
        name = prefix(context.app_name) + context.replica_tag
        self._actors = _start(self._config, name, settings, version)
        config = self._config
        self._client = EngineClient(
            [], 1, config.scheduler_timeout_seconds, config.recovery_timeout_seconds, 1.0, keys.security
        )
        engines = Discovery(context.app_name, keys, only=context.replica_tag).file
        self._watching = asyncio.create_task(self._client.run(str(engines)))
        while not self._client.ready:
            await self.check_health()
            await asyncio.sleep(POLL_INTERVAL)

    async def check_health(self) -> None:
        """Raises: RuntimeError, if Serve has to replace this engine. A busy one, or one that recovers, is healthy."""
        failures = [failure for failure in await self._failures() if failure]
        if failures:
            raise RuntimeError(failures[0])
        if self._watching.done():
            self._watching.result()
        if self._client.state.phase is EnginePhase.FAILED:
            raise RuntimeError(self._client.state.detail)

    async def _failures(self) -> list[str]:
        """Return how services have ended for good. An actor that Ray starts again has no failure."""
        calls = [actor.failure.remote() for actor in self._actors]
        done, _ = await asyncio.to_thread(ray.wait, calls, num_returns=len(calls), timeout=1.0)
        failures = []
        for call in done:
            try:
                failures.append(await call)
            except ray.exceptions.ActorDiedError as error:
                failures.append(_reason(error))
            except RayError:
                pass
        return failures

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the expected queue, and the share of this engine that is in use: of its rows or of its KV cache."""
        state, stats = self._client.state, self._client.state.stats
        rows = stats.get("num_requests_running", 0.0) / (state.max_num_seqs or 1)
        busy = max(rows, stats.get("kv_cache_usage_perc", 0.0))
        return {"expected_queue_seconds": stats.get("expected_queue_seconds", 0.0), "busy": busy}

    async def __del__(self) -> None:
        if not hasattr(self, "_actors"):
            return
        scheduler = self._actors[0]
        with contextlib.suppress(RayError):
            await scheduler.drain.remote()
        if hasattr(self, "_watching"):
            self._watching.cancel()
        self._stack.close()


def _start(config: RayConfig, name: str, settings: dict[str, Any], version: str) -> list[Any]:
    """Start the scheduler's actor and those of the ranks. They end with this process."""
    group = ray.util.get_current_placement_group()

    def place(bundle: int) -> PlacementGroupSchedulingStrategy:
        return PlacementGroupSchedulingStrategy(group, bundle, placement_group_capture_child_tasks=True)

    scheduler = (
        ray.remote(SchedulerActor)
        .options(name=name, num_cpus=SCHEDULER_CPUS, scheduling_strategy=place(len(bundles(config)) - 1), **ALWAYS)
        .remote(name, settings, version)
    )
    resources = rank_resources(config)
    options = {"num_cpus": resources["CPU"], "num_gpus": resources.get("GPU", 0), **ALWAYS}
    ranks = [
        ray.remote(RankActor)
        .options(scheduling_strategy=place(rank // ranks_per_bundle(config)), **options)
        .remote(name, settings, version)
        for rank in range(config.num_workers)
    ]
    return [scheduler, *ranks]


def _reason(error: RayError) -> str:
    """Return the last line of an error, without the traceback that Ray puts before it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
