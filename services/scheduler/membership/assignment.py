"""The assignment that each rank of an epoch is sent."""

from protocol.membership import Assignment, Speculation
from services.config import SchedulerConfig
from services.scheduler.membership.formation import GroupSize


def make_assignment(
    config: SchedulerConfig, size: GroupSize, epoch: int, rank: int, rendezvous: str
) -> Assignment:
    """`rendezvous`: where ranks meet; "" in a group of one."""
    return Assignment(
        epoch=epoch,
        rank=rank,
        world_size=size.world,
        block_size=config.block_size,
        num_slots=2 * config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=config.max_model_len or 0,
        tensor_parallel_size=size.tensor_parallel,
        pipeline_parallel_size=size.pipeline_parallel,
        rendezvous=rendezvous,
        speculation=_speculation(config),
        max_kv_groups=config.max_kv_groups,
        max_loras=config.num_loras,
        max_lora_rank=config.max_lora_rank if config.enable_lora else 0,
    )


def _speculation(config: SchedulerConfig) -> Speculation | None:
    """Return how ranks propose drafts; None: they propose none."""
    s = config.speculative_config
    if s is None:
        return None
    return Speculation(
        method=s.method,
        num_speculative_tokens=s.num_speculative_tokens,
        model=s.model,
        revision=s.revision or "",
        max_model_len=s.max_model_len or 0,
        prompt_lookup_min=s.prompt_lookup_min,
        prompt_lookup_max=s.prompt_lookup_max,
    )
