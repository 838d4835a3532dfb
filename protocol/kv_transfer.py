"""Messages between workers of two engines: KV blocks by name (loaded block, docs/invariants.md).

The one that lacks blocks connects to the other one's `Loaded.kv_peer` and sends `FetchBlocks`; each is answered by one
`FetchedBlocks`. A name contains the request's salt, so only who has the prompt and its salt can ask for it; there is no
list of names.
"""

import msgspec

from protocol.fields import Count

PEER_ROLE = "worker-kv"
"""Role of a connection to another worker. It needs the key of a worker."""
MAX_FETCH_BYTES = 8 << 20
"""Bytes of blocks in one answer, unless one block has more."""


class FetchBlocks(msgspec.Struct, array_like=True, frozen=True, tag="fetch"):
    identity: bytes
    """Digest of everything that the content of a block depends on beside tokens. A worker with another one has none."""
    names: bytes
    """uint8[blocks, NAME_BYTES]: consecutive blocks, at most `MAX_FETCH_BYTES` of them"""


class FetchedBlocks(msgspec.Struct, array_like=True, frozen=True, tag="fetched"):
    count: Count
    """Number of blocks, from the first one, up to the first one that is missing."""
    data: memoryview
    """uint8[count, bytes of a block]. Decoding does not copy it."""
