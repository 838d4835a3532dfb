"""The sizes of an engine: from what is configured and what its workers can hold."""

from protocol.membership import Loaded, Speculation
from services.config import SchedulerConfig
from services.scheduler.core.limits import Limits


class GroupError(Exception):
    """No group can be formed with this configuration, or none lasts; the text says what to do."""


def speculation(c: SchedulerConfig) -> Speculation | None:
    """What the ranks are told of drafts; None: nothing is drafted."""
    s = c.speculative_config
    if s is None:
        return None
    k, revision, longest = s.num_speculative_tokens, s.revision or "", s.max_model_len or 0
    return Speculation(s.method, k, s.model, revision, longest, s.prompt_lookup_min, s.prompt_lookup_max)


def fit(c: SchedulerConfig, loaded: list[Loaded]) -> Limits:
    """The engine's sizes from what the worker can hold; a context that does not fit is lowered, or refused where
    the user asked for it.

    Raises: GroupError
    """
    least = min(rank.num_blocks for rank in loaded)
    num_blocks = c.num_gpu_blocks_override or least
    if num_blocks > least:
        raise GroupError(f"--num-gpu-blocks-override {num_blocks}: the workers can hold {least} blocks")
    holds = num_blocks * c.block_size
    if c.max_model_len and c.max_model_len > holds:
        raise GroupError(
            f"--max-model-len {c.max_model_len} does not fit the KV cache of {holds} tokens; "
            f"use --max-model-len {holds} or more --kv-cache-memory-bytes"
        )
    s = c.speculative_config
    k = s.num_speculative_tokens if s is not None else 0
    return Limits(
        max_num_seqs=c.max_num_seqs,
        max_num_batched_tokens=c.max_num_batched_tokens,
        max_model_len=min(holds, *(rank.max_model_len for rank in loaded)),
        num_blocks=num_blocks,
        block_size=c.block_size,
        enable_prefix_caching=c.enable_prefix_caching,
        stages=c.pipeline_parallel_size,
        lookahead=k if s is not None and s.has_kv_cache else 0,
        drafts_in_flight=k * -(-c.depth // c.pipeline_parallel_size),
    )
