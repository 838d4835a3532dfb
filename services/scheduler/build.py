"""Construction and restart of the core from a configuration, for the service and for replays."""

from typing import NamedTuple

from services.config import SchedulerConfig
from services.scheduler.core.drafting import drafting_from_config
from services.scheduler.core.engine import EngineCore
from services.scheduler.core.limits import Limits
from services.scheduler.grammar import INLINE_MASKS, Compiler, MaskMaker
from services.scheduler.policies import BatchingPolicy, make_policy


class CoreStart(NamedTuple):
    """The workers that a core begins with, and who works for it."""

    limits: Limits
    epoch: int
    vocab_size: int
    hidden_size: int
    """Length of an embedding; 0: embeddings are refused."""
    compiler: Compiler | None
    """None: structured output is refused."""
    mask_maker: MaskMaker = INLINE_MASKS
    """Makes the masks of constrained rows."""
    backend: str = ""
    """Backend of the workers, as in services.scheduler.capabilities; the core does not depend on it."""


class CoreListener:
    """Attaches observers to the core, and owns what they write to."""

    def attach(self, core: EngineCore, start: CoreStart) -> None:
        """The core is built. It has processed nothing yet."""

    def on_turn(self, core: EngineCore) -> None:
        """The service has handled everything that arrived and sent what followed from it; an epoch is in effect. Only
        here a listener may call the core."""

    def close(self) -> None:
        """Write or publish what is left."""


def build_core(config: SchedulerConfig, start: CoreStart, policy: BatchingPolicy) -> EngineCore:
    """Return a core for the workers of its first epoch.

    Args:
        policy: made from the same configuration (`make_policy`).
    """
    return EngineCore(
        start.limits,
        policy,
        config.depth,
        start.vocab_size,
        epoch=start.epoch,
        drafting=drafting_from_config(config.speculative_config),
        max_num_queued_reqs=config.max_num_queued_reqs,
        max_num_queued_tokens=config.max_num_queued_tokens,
        max_queue_seconds=config.max_queue_seconds,
        use_priority=config.scheduling_policy == "priority",
        compiler=start.compiler,
        mask_maker=start.mask_maker,
        hidden_size=start.hidden_size,
    )


def restart_core(core: EngineCore, config: SchedulerConfig) -> None:
    """Restart an empty core, so that a recording can begin here."""
    point = core.restart_point()
    core.restart(point, make_policy(config, point.limits), drafting_from_config(config.speculative_config))
