"""A log line about the engine's load every ten seconds while requests run."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Collection, Mapping

from services.frontend.engine.client import EngineClient
from services.frontend.metrics import Metrics

log = logging.getLogger("runahead.frontend")

INTERVAL = 10.0
"""Seconds between two lines."""


class LoadLog:
    """Rates between two readings of the scheduler's statistics."""

    def __init__(self) -> None:
        self._last: dict[str, float] = {}
        self._at = 0.0

    def line(self, stats: Mapping[str, float], now: float) -> str | None:
        """Return the line, or None if nothing has run since the last call. `now`: monotonic seconds."""
        last, seconds = self._last, now - self._at
        self._last, self._at = dict(stats), now

        def rise(name: str) -> float:
            return max(stats.get(name, 0.0) - last.get(name, 0.0), 0.0)

        steps, running = rise("steps_total"), stats.get("num_requests_running", 0.0)
        if not last or seconds <= 0 or (not steps and not running):
            return None
        queries, hits = rise("prefix_cache_queries"), rise("prefix_cache_hits")
        cached = f", prefix cache hits {100 * hits / queries:.1f} %" if queries else ""
        drafts, accepted = rise("spec_decode_num_draft_tokens"), rise("spec_decode_num_accepted_tokens")
        drafting = f", accepted drafts {100 * accepted / drafts:.1f} %" if drafts else ""
        return (
            f"load: prompt {rise('prompt_tokens') / seconds:,.1f} tokens/s, "
            f"generation {rise('generation_tokens') / seconds:,.1f} tokens/s, "
            f"{running:.0f} requests run, {stats.get('num_requests_waiting', 0.0):.0f} wait, "
            f"KV cache {100 * stats.get('kv_cache_usage_perc', 0.0):.1f} % used{cached}{drafting}"
        )


def total(engines: Collection[Mapping[str, float]]) -> dict[str, float]:
    """Return the sums of the statistics of engines, but the mean of the use of their KV caches."""
    stats: Counter[str] = Counter()
    for engine in engines:
        stats.update(engine)
    return {name: value / (len(engines) if name.endswith("_perc") else 1) for name, value in stats.items()}


async def log_load(engine: EngineClient, metrics: Metrics) -> None:
    """Write lines until cancelled. Fold the metrics' values, which bounds their memory."""
    load = LoadLog()
    load.line({}, time.monotonic())
    while True:
        await asyncio.sleep(INTERVAL)
        metrics.fold()
        stats = total([each.state.stats for each in engine.engines.values()])
        if (line := load.line(stats, time.monotonic())) is not None:
            log.info("%s", line)
