"""Memory of a device that the operations of a step take beside their operands."""

from collections.abc import Mapping
from typing import NamedTuple

from services.worker.kernels.interface.attention import AttentionShape
from services.worker.kernels.interface.kv_cache import CacheShape

Uses = Mapping[str, int]
"""Bytes by use; the names are those of the log."""


class EpochSizes(NamedTuple):
    """The largest step of an epoch."""

    rows: Mapping[str, int]
    """Rows of the buffers of the forward pass, by kind."""
    num_slots: int
    max_model_len: int
    vocab_size: int
    num_drafts: int
    """Maximum number of drafts of a row; 0: no speculation."""
    attention: AttentionShape
    cache: CacheShape
