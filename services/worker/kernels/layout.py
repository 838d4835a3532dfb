"""Sizes of data in memory that are known without torch: groups of quantised weights, and padded KV blocks."""

GROUP = 32
"""Inputs of a group. GGUF's Q8_0, Q4_0 and Q4_1 have the same groups, so they are kept without loss."""
LANES = 16
"""Elements that keys and values are padded to a multiple of: float32 in the widest vector."""


def inputs_kept_together(quantization: str | None) -> int:
    """Return the number of neighbouring inputs that no rank's share may separate."""
    return GROUP if quantization in ("int8", "int4") else 1


def padded(size: int) -> int:
    """Round up to a multiple of a vector's lanes."""
    return -(-size // LANES) * LANES


def kv_block_bytes(layers: int, kv_heads: int, head_dim: int, block_size: int, itemsize: int) -> int:
    """Return the bytes of the keys and the values of a block; see `CpuNetwork.kv_cache` for their shapes."""
    per_head = padded(head_dim) * (padded(block_size) + block_size)
    return layers * kv_heads * per_head * itemsize
