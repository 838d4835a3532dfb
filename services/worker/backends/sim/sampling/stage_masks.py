"""The masks that a step is sampled with, on the ranks of the last stage (left-out row; docs/invariants.md).

The output rank decides, by its own modelled timeline, which rows are left out. The others receive its decision.
"""

from typing import NamedTuple

import numpy as np

from protocol.codec import unpack
from protocol.steps import SchedulerOutput
from services.worker.backends.mask_inbox import ENDLESS, Forward, MaskInbox
from services.worker.backends.sim.ranks.exchange import LeftOut, RankExchange
from services.worker.backends.sim.sampling.step_masks import StepMasks
from services.worker.batch.slots import I32


class StageMasks(NamedTuple):
    inbox: MaskInbox
    exchange: RankExchange
    is_output: bool
    vocab_size: int

    def take(self, step: SchedulerOutput, slots: I32, forward: Forward) -> tuple[StepMasks, float]:
        """Wait for the masks of a step with constrained rows as long as nobody else is held back.

        Args:
            slots: int32[sampled rows]

        Returns: the masks, and when it was decided to sample with these.

        Raises: RanksLost
        """
        masked = unpack(step.masked)
        if self.is_output:
            taken = self.inbox.take(step.step_id, masked, forward)
            flags = np.array([slot in taken.left_out for slot in masked.tolist()], np.bool_)
            decision = LeftOut(flags, taken.at)
            self.exchange.send_left_out(step, decision)
        else:
            decision = self.exchange.receive_left_out(step)
            taken = self.inbox.take(step.step_id, masked[~decision.left_out], ENDLESS)
        left_out = frozenset(masked[decision.left_out].tolist())
        return StepMasks.from_messages(taken.parts, slots, self.vocab_size, left_out), decision.at
