"""Construction of the core from a configuration, for the service and for replays."""

from typing import NamedTuple

from services.config import SchedulerConfig
from services.scheduler.core.drafting import Drafting, drafting_from_config
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


class CoreFactory:
    """Makes the core, and what its epochs and restarts begin with, from a configuration."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config

    def policy(self, limits: Limits) -> BatchingPolicy:
        """Return the batching policy of an epoch. Raises: as `make_policy`"""
        return make_policy(self._config, limits)

    def drafting(self) -> Drafting:
        return drafting_from_config(self._config.speculative_config)

    def core(self, start: CoreStart, policy: BatchingPolicy | None = None) -> EngineCore:
        """`policy`: that of the first epoch; None: it is made, too. Raises: as `policy`"""
        c = self._config
        return EngineCore(
            start.limits,
            policy or self.policy(start.limits),
            c.depth,
            start.vocab_size,
            epoch=start.epoch,
            drafting=self.drafting(),
            max_num_queued_reqs=c.max_num_queued_reqs,
            max_num_queued_tokens=c.max_num_queued_tokens,
            max_queue_seconds=c.max_queue_seconds,
            use_priority=c.scheduling_policy == "priority",
            compiler=start.compiler,
            mask_maker=start.mask_maker,
            hidden_size=start.hidden_size,
        )
