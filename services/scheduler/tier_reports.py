"""Reports of the workers about their tiers: bytes, hits, and names of blocks for KV events."""

from collections import Counter, defaultdict
from collections.abc import Iterable

from protocol.block_names import split_names
from protocol.membership import TierReport
from protocol.steps import BlocksLoaded
from services.scheduler.core.observer import Observers, TierChanged

_SHARED = "disk"
"""Ranks of a machine share a directory, and each one reports all of it."""


class TierReports:
    def __init__(self, block_size: int) -> None:
        """`block_size`: tokens per block."""
        self._block_size = block_size
        self._bytes: dict[bytes, dict[str, int]] = {}
        """Worker -> tier -> bytes."""
        self._hits = Counter[str]()
        """Tier -> tokens of blocks that were loaded from it."""

    def on_report(self, worker: bytes, reports: Iterable[TierReport], observers: Observers) -> None:
        """A rank of the epoch in effect has sent a report. Raises: ProtocolError"""
        self._bytes[worker] = {report.name: report.size for report in reports}
        for report in reports:
            stored, removed = split_names(report.stored), split_names(report.removed)
            if observers.blocks and (stored or removed):
                observers.emit(TierChanged(report.name, tuple(stored), tuple(removed)))

    def on_loaded(self, answers: Iterable[BlocksLoaded]) -> None:
        """A load has ended with the blocks that all ranks have filled: those of the rank with the fewest ones."""
        fewest = min(answers, key=lambda answer: answer.count)
        for name, count in fewest.sources.items():
            self._hits[name] += count * self._block_size

    def end_epoch(self) -> None:
        self._bytes.clear()

    def stats(self, device_bytes: int, device_hits: float) -> dict[str, float]:
        """Return bytes and hits by tier; those of the workers' caches are given."""
        sizes: dict[str, list[int]] = defaultdict(list)
        for reported in self._bytes.values():
            for name, size in reported.items():
                sizes[name].append(size)
        found = {name: max(of) if name == _SHARED else sum(of) for name, of in sizes.items()}
        hits = {"device": device_hits} | self._hits
        return {f"kv_tier_bytes:{name}": float(size) for name, size in ({"device": device_bytes} | found).items()} | {
            f"kv_tier_hit_tokens_total:{name}": float(tokens) for name, tokens in hits.items()
        }
