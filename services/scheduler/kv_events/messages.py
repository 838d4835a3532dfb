"""Messages of KV cache events, in the format of vLLM 0.32 (vllm/distributed/kv_events.py).

A batch is a msgpack array, an event a map with the key `type`. Defaults are left out.
"""

from typing import Any

import msgspec

MEDIUM = "GPU"
"""vLLM's name of the KV cache that the model reads, on every device."""
TIER_MEDIA = {"host": "CPU", "disk": "STORAGE"}
"""vLLM's names of tiers."""


class KVCacheEvent(msgspec.Struct, frozen=True, omit_defaults=True, gc=False, tag=True):
    pass


class BlockStored(KVCacheEvent, frozen=True):
    """Consecutive blocks of one request can be found from now on."""

    block_hashes: list[bytes]
    """SHA-256 over the blocks and all before them."""
    parent_block_hash: bytes | None
    """Hash of the block before the first one."""
    token_ids: list[int]
    """Tokens of all blocks."""
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    """Per block: the name of the adapter, if there is one, and for its first block the salt, which has the adapter's
    digest; None: neither."""
    group_idx: int | None = None


class BlockRemoved(KVCacheEvent, frozen=True):
    block_hashes: list[bytes]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(KVCacheEvent, frozen=True):
    pass


class KVEventBatch(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True, gc=False):
    ts: float
    """Seconds since 1970."""
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None
