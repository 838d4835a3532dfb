"""Construction and restart of the core from a configuration, for the service and for replays."""

from services.config import SchedulerConfig
from services.scheduler.core.drafting import drafting_from_config
from services.scheduler.core.engine import EngineCore
from services.scheduler.core.limits import Limits
from services.scheduler.core.parts import DEFAULT_PARTS, Parts
from services.scheduler.grammar import INLINE_MASKS, Compiler, MaskMaker
from services.scheduler.policies import BatchingPolicy, make_policy


def build_core(
    config: SchedulerConfig,
    limits: Limits,
    policy: BatchingPolicy,
    epoch: int,
    vocab_size: int,
    hidden_size: int,
    compiler: Compiler | None,
    mask_maker: MaskMaker = INLINE_MASKS,
    parts: Parts = DEFAULT_PARTS,
) -> EngineCore:
    """Return a core for the workers of its first epoch.

    Args:
        policy: made from the same configuration (`make_policy`).
        hidden_size: length of an embedding; 0: embeddings are refused.
        compiler: None: structured output is refused.
        mask_maker: makes the masks of constrained rows.
    """
    return EngineCore(
        limits,
        policy,
        config.depth,
        vocab_size,
        epoch=epoch,
        drafting=drafting_from_config(config.speculative_config),
        max_num_queued_reqs=config.max_num_queued_reqs,
        max_num_queued_tokens=config.max_num_queued_tokens,
        max_queue_seconds=config.max_queue_seconds,
        use_priority=config.scheduling_policy == "priority",
        compiler=compiler,
        mask_maker=mask_maker,
        hidden_size=hidden_size,
        parts=parts,
    )


def restart_core(core: EngineCore, config: SchedulerConfig) -> None:
    """Restart an empty core, so that a recording can begin here."""
    point = core.restart_point()
    core.restart(point, make_policy(config, point.limits), drafting_from_config(config.speculative_config))
