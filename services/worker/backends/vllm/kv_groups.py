"""vLLM's groups of KV cache, as the scheduler receives them."""

from collections.abc import Sequence
from typing import Any

from protocol.kv_groups import KVGroup
from services.worker.backends.vllm import vllm_api
from services.worker.runner import LoadError


def kv_groups(groups: Sequence[Any], block_size: int, most: int) -> tuple[KVGroup, ...]:
    """Return the kind of each of vLLM's groups.

    Args:
        groups: vLLM's `KVCacheGroupSpec`, in the order in which its block tables are numbered
        block_size: tokens of a block
        most: maximum number of groups

    Raises: LoadError, for a group that the scheduler has no rules for.
    """
    found = [kind for group in groups if (kind := _kind(group.kv_cache_spec)) is not None]
    sizes = {g.kv_cache_spec.block_size for g in groups if not isinstance(g.kv_cache_spec, vllm_api.MambaSpec)}
    if len(found) < len(groups) or len(groups) > most or sizes != {block_size}:
        kinds = ", ".join(f"{type(g.kv_cache_spec).__name__} of {g.kv_cache_spec.block_size}" for g in groups)
        raise LoadError(
            f"this model needs {len(groups)} groups of KV cache ({kinds or 'none'}); --backend vllm serves full "
            f"attention, sliding windows and local chunks in blocks of {block_size} tokens, beside them recurrent "
            f"states, at most {most} groups"
        )
    return tuple(found)


def _kind(spec: Any) -> KVGroup | None:
    """Return the group of a `KVCacheSpec`; None: there are no rules for it."""
    if isinstance(spec, vllm_api.UniformTypeKVCacheSpecs):  # layers of one kind with different heads
        spec = next(iter(spec.kv_cache_specs.values()))
    match spec:
        case vllm_api.FullAttentionSpec():
            return KVGroup()
        case vllm_api.SlidingWindowSpec() if spec.prefix_cacheable:
            return KVGroup("sliding_window", spec.sliding_window + spec.extra_retained_tokens)
        case vllm_api.ChunkedLocalAttentionSpec():
            return KVGroup("chunked_local_attention", spec.attention_chunk_size)
        case vllm_api.MambaSpec() if spec.mamba_cache_mode == "none":  # one state of each request
            return KVGroup("recurrent_state")
    return None
