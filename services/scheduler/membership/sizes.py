"""Sizes of the engine, from the configuration and from what the workers can hold."""

from protocol.membership import Loaded
from services.config import SchedulerConfig
from services.scheduler.core.limits import Limits


class GroupError(Exception):
    """The group cannot serve with this configuration; the text says what to change."""


def fit(c: SchedulerConfig, loaded: list[Loaded], leaves_rows_out: bool = False) -> Limits:
    """Return the engine's sizes for ranks that have loaded.

    A context that does not fit the KV cache is lowered, or refused if the user set it.

    Args:
        leaves_rows_out: all ranks do (`Register.leaves_rows_out`). The shapes of `phased` have no room for it.

    Raises: GroupError
    """
    least = min(rank.num_blocks for rank in loaded)
    num_blocks = c.num_gpu_blocks_override or least
    if num_blocks > least:
        raise GroupError(f"--num-gpu-blocks-override {num_blocks}: the workers can hold {least} blocks")
    capacity = num_blocks * c.block_size
    if c.max_model_len and c.max_model_len > capacity:
        raise GroupError(
            f"--max-model-len {c.max_model_len} does not fit the KV cache of {capacity} tokens; "
            f"use --max-model-len {capacity} or more --kv-cache-memory-bytes"
        )
    s = c.speculative_config
    return Limits(
        max_num_seqs=c.max_num_seqs,
        max_num_batched_tokens=c.max_num_batched_tokens,
        max_model_len=min(capacity, *(rank.max_model_len for rank in loaded)),
        num_blocks=num_blocks,
        block_size=c.block_size,
        enable_prefix_caching=c.enable_prefix_caching,
        stages=c.pipeline_parallel_size,
        lookahead=c.num_drafts if s is not None and s.has_kv_cache else 0,
        drafts_in_flight=c.num_drafts * -(-c.depth // c.pipeline_parallel_size),
        leaves_rows_out=leaves_rows_out and c.batching_policy != "phased",
    )
