"""The number of KV blocks and of positions that a rank offers to the scheduler."""

from collections.abc import Sequence

from protocol.kv_groups import ONE_GROUP, KVGroup, most_blocks
from protocol.membership import Assignment
from services.config import WorkerConfig
from services.units import size_text
from services.worker import machine
from services.worker.runner import LoadError


def num_kv_blocks(
    config: WorkerConfig,
    assignment: Assignment,
    bytes_per_block: int,
    max_model_len: int,
    reserved: int = 0,
    budget: int = 0,
    groups: Sequence[KVGroup] = ONE_GROUP,
    ranks: int = 1,
) -> int:
    """Return the number of blocks that fit into memory.

    Of a share of the host's memory no more than what all slots can fill; memory that is given, or that a device has,
    is used whole: prefixes of requests that have ended stay in it.

    Args:
        reserved: blocks that the backend allocates for itself and does not offer.
        bytes_per_block: 0: blocks need no memory.
        budget: bytes; 0: memory of the host, as configured.
        ranks: of this engine on this machine, which share the default, as the engines there do.

    Raises: LoadError, if not one block fits.
    """
    slots = assignment.num_slots * most_blocks(
        groups, max_model_len, assignment.max_num_batched_tokens, assignment.block_size
    )
    if not bytes_per_block:
        return slots
    if given := budget or config.kv_cache_memory_bytes:
        return affordable_blocks(given, bytes_per_block, reserved)
    share = machine.cache_budget(0) // (ranks * config.engines_here)
    return min(affordable_blocks(share, bytes_per_block, reserved), slots)


def affordable_blocks(budget: int, bytes_per_block: int, reserved: int = 0) -> int:
    """Return how many blocks `budget` bytes hold, without the `reserved` ones.

    Raises: LoadError, if not one block fits.
    """
    blocks = budget // bytes_per_block - reserved
    if blocks < 1:
        least = (1 + reserved) * bytes_per_block
        beside = f" beside the {reserved} that the backend needs for itself" if reserved else ""
        raise LoadError(
            f"{size_text(budget)} hold no KV block{beside}; one takes {size_text(bytes_per_block)}: "
            f"raise --kv-cache-memory-bytes to {least} at least"
        )
    return blocks


def context_limit(requested: int, positions: int, counted: str = "of the model") -> int:
    """Return the context length to serve: `requested`, or the model's `positions` if it is 0.

    `counted`: words behind the number of positions in the error.

    Raises: LoadError, if more is requested than the model has.
    """
    if requested > positions:
        raise LoadError(
            f"max_model_len {requested} is more than the {positions} positions {counted}; lower --max-model-len"
        )
    return requested or positions
