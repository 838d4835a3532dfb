"""Names of KV blocks: hashes that chain over every token before them, starting with the request's salt. Equal names
mean equal prefixes under the same salt."""

from collections.abc import Sequence
from hashlib import sha256

import msgspec
import numpy as np

from protocol.codec import ProtocolError, pack, unpack
from protocol.media import MediaItem, contents

TOKEN_BYTES = 4
"""Tokens are int32, little-endian."""
NAME_BYTES = 32


class NamedBlocks(msgspec.Struct, array_like=True, frozen=True):
    """Whole blocks of a KV cache: confirmed steps have written them (adopted block, docs/invariants.md)."""

    blocks: bytes
    """int32[blocks]"""
    names: bytes
    """uint8[blocks, NAME_BYTES]"""

    @classmethod
    def from_lists(cls, blocks: Sequence[int], names: Sequence[bytes]) -> "NamedBlocks":
        return cls(pack(blocks), b"".join(names))

    def pairs(self) -> list[tuple[int, bytes]]:
        """Return each block with its name, in the order of the message. Raises: ProtocolError"""
        blocks, names = unpack(self.blocks, np.int32).tolist(), split_names(self.names)
        if len(names) != len(blocks):
            raise ProtocolError(f"{len(blocks)} blocks have {len(names)} names")
        return list(zip(blocks, names, strict=True))


def split_names(names: bytes) -> list[bytes]:
    """Return the names in a column uint8[names, NAME_BYTES]. Raises: ProtocolError"""
    if len(names) % NAME_BYTES:
        raise ProtocolError(f"{len(names)} bytes are no names of blocks")
    return [names[at : at + NAME_BYTES] for at in range(0, len(names), NAME_BYTES)]


def names_of(salt: str, tokens: bytes, block_size: int, items: Sequence[MediaItem] = ()) -> list[bytes]:
    """Return the names of the full blocks of a sequence; see `extend_names`."""
    names: list[bytes] = []
    extend_names(names, salt, tokens, block_size, items)
    return names


def extend_names(
    names: list[bytes], salt: str, tokens: bytes, block_size: int, items: Sequence[MediaItem] = ()
) -> None:
    """Append the names of the full blocks that follow those of `names`.

    Args:
        names: SHA-256 digests of the first blocks of a sequence, in order.
        tokens: int32[...]: the tokens behind these blocks.
        block_size: tokens per block; 0: not known, and there are no names.
        items: images and sounds of the prompt (prefix-cache content, docs/invariants.md).
    """
    width = block_size * TOKEN_BYTES
    if not width:
        return
    parent = names[-1] if names else sha256(salt.encode()).digest()
    for at in range(0, len(tokens) - width + 1, width):
        begin = len(names) * block_size
        parent = sha256(parent + tokens[at : at + width] + contents(items, begin, begin + block_size)).digest()
        names.append(parent)
