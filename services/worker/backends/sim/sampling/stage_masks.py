"""The masks that a step is sampled with, on the ranks of the last stage (left-out row; docs/invariants.md).

The output rank decides, by its own modelled timeline, which rows are left out. The others receive its decision.
"""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from protocol.codec import unpack
from protocol.steps import GrammarOutput, SchedulerOutput
from services.worker.backends.mask_inbox import MaskInbox, joined
from services.worker.backends.sim.ranks.exchange import LeftOut, RankExchange


class StageMasks(NamedTuple):
    inbox: MaskInbox
    exchange: RankExchange
    is_output: bool

    def take(
        self, step: SchedulerOutput, forward_ended: float
    ) -> tuple[GrammarOutput | None, NDArray[np.int32], float]:
        """Wait for the masks of a step with constrained rows as long as nobody else is held back.

        Args:
            forward_ended: when its forward pass ends: monotonic seconds.

        Returns: the masks, the slots that are left out, and when this was decided.

        Raises: RanksLost
        """
        masked = unpack(step.masked)
        if not self.is_output:
            decision = self.exchange.receive_left_out(step)
            taken = self.inbox.take(step.step_id, masked[~decision.left_out], math.inf)
            return joined(taken.parts), masked[decision.left_out], decision.at
        taken = self.inbox.take(step.step_id, masked, forward_ended)
        grammar = joined(taken.parts)
        arrived = unpack(grammar.slots) if grammar is not None else masked[:0]
        left_out = ~np.isin(masked, arrived)
        self.exchange.send_left_out(step, LeftOut(left_out, taken.at))
        return grammar, masked[left_out], taken.at
