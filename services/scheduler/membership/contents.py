"""Digests of weights: parts that two workers both have must be equal (contents, docs/invariants.md)."""

from collections.abc import Mapping

MAX_PARTS = 1_000_000
"""Parts that are kept; more are not compared."""


class WeightContents:
    """Digests that workers have reported so far. Ranks of another tensor-parallel size have other parts."""

    def __init__(self) -> None:
        self._digests: dict[str, str] = {}
        self.is_full = False
        """Parts were reported that are not compared."""

    def mismatch(self, reported: Mapping[str, str]) -> str | None:
        """Return the first part that differs from that of an earlier worker, or None after storing them."""
        for part, digest in reported.items():
            if (known := self._digests.get(part, digest)) != digest:
                return f"weights mismatch: {part} has the digest {digest}, and {known} on the other workers"
        added = [part for part in reported if part not in self._digests]
        room = MAX_PARTS - len(self._digests)
        self._digests |= {part: reported[part] for part in added[:room]}
        self.is_full |= len(added) > room
        return None
