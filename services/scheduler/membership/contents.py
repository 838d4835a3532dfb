"""Digests of weights: parts that two workers both have must be equal (contents, docs/invariants.md)."""

from collections.abc import Mapping

MAX_PARTS = 1_000_000
"""Parts that are kept; more are not compared."""


class WeightContents:
    """Digests that workers have reported so far. Ranks of another tensor-parallel size have other parts."""

    def __init__(self) -> None:
        self._digests: dict[str, str] = {}

    def mismatch(self, reported: Mapping[str, str]) -> str | None:
        """Return the first part that differs from that of an earlier worker, or None after storing all of them."""
        for part, digest in reported.items():
            if (known := self._digests.get(part, digest)) != digest:
                return f"weights mismatch: {part} has the digest {digest}, and {known} on the other workers"
        if len(self._digests) < MAX_PARTS:
            self._digests |= reported
        return None
