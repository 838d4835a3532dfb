"""Names of the prefixes of a prompt at which engines are compared.

These are the names that the prompt's KV blocks have in an engine (`protocol.block_names`), of every block in the first
segment and of the last block of each later segment. To hash each block again for each turn of a long session would
cost more than the rest of a placement, so the names of segments that were seen are kept under one hash of the segment.
"""

from hashlib import sha256

from protocol.block_names import TOKEN_BYTES, extend_names
from services.frontend.placement.generations import TwoGenerations

SEGMENT_TOKENS = 128
"""Tokens of a segment, if a block has no more."""


class PrefixNames:
    """Makes names for one block size."""

    def __init__(self, block_size: int, size: int) -> None:
        """`size`: segments that are kept, about."""
        self.block_size = block_size
        self.stride = max(1, SEGMENT_TOKENS // block_size)
        """Blocks of a segment."""
        self._segments: TwoGenerations[list[bytes]] = TwoGenerations(max(size, 1))

    def num_tokens(self, num_names: int) -> int:
        """Return the length of the prefix with the name at index `num_names - 1` of `of`."""
        later = max(0, num_names - self.stride)
        return (num_names - later + later * self.stride) * self.block_size

    def of(self, tokens: bytes, salt: str) -> list[bytes]:
        """Return the names of prefixes of a prompt, shortest first. `tokens`: int32[...], little-endian."""
        width = self.stride * self.block_size * TOKEN_BYTES
        segments = self._segments
        names: list[bytes] = []
        key = sha256(salt.encode()).digest()
        end = len(tokens) - width + 1
        for at in range(0, end, width):
            key = sha256(key + tokens[at : at + width]).digest()
            if (found := segments.get(key)) is None:
                found = names[-1:]
                extend_names(found, salt, tokens[at : at + width], self.block_size)
                found = found[-1:] if names else found
                segments.young[key] = found
                segments.rotate_if_full()
            names += found
        if not names:  # no full segment
            extend_names(names, salt, tokens, self.block_size)
        return names
