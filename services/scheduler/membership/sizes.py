"""Sizes of the engine, from the configuration and from what the workers can hold."""

from dataclasses import replace

from protocol.kv_groups import ONE_GROUP, num_states
from protocol.membership import Loaded
from services.config import SchedulerConfig
from services.scheduler.core.limits import Limits
from services.scheduler.policies.geometry import Geometry


class GroupError(Exception):
    """The group cannot serve with this configuration; the text says what to change."""


def fit(c: SchedulerConfig, loaded: list[Loaded], leaves_rows_out: bool = False) -> Limits:
    """Return the engine's sizes for ranks that have loaded.

    A context that does not fit the KV cache, or the volume of `phased`, is lowered, or refused if the user set it.

    Args:
        leaves_rows_out: all ranks do (`Register.leaves_rows_out`). The shapes of `phased` have no room for it, and a
            stage that has sent its part of a row on does not take back a recurrent state.

    Raises: GroupError
    """
    least, groups, pooling = min(rank.num_blocks for rank in loaded), loaded[0].groups or ONE_GROUP, loaded[0].pooling
    if (blocks := c.num_gpu_blocks_override or least) > least:
        raise GroupError(
            f"--num-gpu-blocks-override {blocks}: the workers can hold {least} blocks; raise --kv-cache-memory-bytes"
        )
    _refuse_different(loaded)
    _refuse_unserved(c, loaded[0])
    states, whole_prompts = num_states(groups), pooling is not None and pooling.whole_prompts
    s, has_stages = c.speculative_config, c.pipeline_parallel_size > 1
    sizes = Limits(
        max_num_seqs=c.max_num_seqs,
        max_num_batched_tokens=c.max_num_batched_tokens,
        max_model_len=max(rank.max_model_len for rank in loaded),
        num_blocks=blocks,
        block_size=c.block_size,
        lookahead=c.num_drafts if s is not None and s.has_kv_cache else 0,
        groups=groups,
    )
    capacity = sizes.kv_capacity
    if not capacity:
        raise GroupError(
            f"the KV cache of {blocks} blocks holds no step of {c.max_num_batched_tokens} tokens in {len(groups)} "
            "groups; use a lower --max-num-batched-tokens or more --kv-cache-memory-bytes"
        )
    if c.max_model_len and c.max_model_len > capacity:
        raise GroupError(
            f"--max-model-len {c.max_model_len} does not fit the KV cache of {capacity} tokens; "
            f"use --max-model-len {capacity} or more --kv-cache-memory-bytes"
        )
    by_volume = Geometry(c.block_size, c.max_num_batched_tokens).longest_request(c.phased_max_volume)
    return replace(
        sizes,
        max_model_len=min(
            capacity,
            *(rank.max_model_len for rank in loaded),
            *([c.max_num_batched_tokens + 1] if whole_prompts else []),
            *([by_volume] if c.policy == "phased" and c.phased_max_volume and not c.max_model_len else []),
        ),
        enable_prefix_caching=c.enable_prefix_caching and not whole_prompts,
        stages=c.pipeline_parallel_size,
        drafts_in_flight=c.num_drafts * -(-c.depth // c.pipeline_parallel_size),
        leaves_rows_out=leaves_rows_out and c.batching_policy != "phased" and not (states and has_stages),
        loads_blocks=all(rank.loads_blocks for rank in loaded),
        fetches_blocks=all(rank.kv_peer for rank in loaded),
        max_loras=c.num_loras,
        pools_only=pooling is not None,
        whole_prompts=whole_prompts,
        encoder_budget=c.max_num_batched_tokens if loaded[0].media is not None else 0,
    )


def _refuse_different(loaded: list[Loaded]) -> None:
    """Raises: GroupError"""
    groups, sized = loaded[0].groups or ONE_GROUP, ("sliding_window", "chunked_local_attention")
    wrong = any((group.kind in sized) != bool(group.size) for group in groups) or num_states(groups) == len(groups)
    if wrong or any((rank.groups or ONE_GROUP, rank.pooling) != (groups, loaded[0].pooling) for rank in loaded):
        raise GroupError(
            "the workers have different poolers or groups of KV cache, or impossible ones; start all with the same "
            "release and settings"
        )


def _refuse_unserved(c: SchedulerConfig, model: Loaded) -> None:
    """Raises: GroupError, for a model that is not served with these settings"""
    if model.pooling is not None and model.pooling.whole_prompts and c.policy == "phased":
        raise GroupError(
            "this model computes a prompt in one step, and --batching-policy phased in chunks; use chunked"
        )
    if model.media is not None and c.policy == "phased":
        raise GroupError(
            "this model reads images or sounds, which --batching-policy phased does not serve; use chunked"
        )
    if num_states(model.groups or ONE_GROUP) and c.speculative_config is not None:
        raise GroupError(
            "--speculative-config: this model has recurrent states, from which rejected drafts cannot be taken back; "
            "serve it without drafts"
        )
