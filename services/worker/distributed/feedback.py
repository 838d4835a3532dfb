"""Outcomes on their way from the last stage back to an earlier one, on the earlier stage's side.

The last stage sends one message per step with a sampling row, in the order of steps. Both sides know from the plan
which steps these are and how large their messages are (plan agreement, docs/invariants.md). An earlier stage takes a
message only when a step needs it; until then the pipeline computes steps of other requests. A message that no step
needs is taken when its step must have ended long ago, so that messages do not accumulate.
"""

from collections import deque
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from protocol.steps import SchedulerOutput
from services.worker.batch.slots import I32, Rows
from services.worker.runner import steps_in_flight


class FeedbackMessage(NamedTuple):
    """The outcome of one step."""

    number: int
    """Number of the message in its epoch, from 1."""
    step: SchedulerOutput
    rows: Rows
    """Rows of the step that sample, as given to `expect`: planned ones, or these at their true positions."""


class TokenFeedback:
    """The messages that were not taken yet. A message older than the steps that can be in flight has arrived."""

    def __init__(self, num_slots: int, stages: int) -> None:
        self._most = steps_in_flight(stages)
        self.awaited: deque[FeedbackMessage] = deque()
        self._sent = 0
        self._newest = np.zeros(num_slots, np.int64)
        """Number of the last message with a token of the slot's request; 0: none."""
        self._since = np.zeros(num_slots, np.int64)
        """Number of messages sent before the slot's request entered it."""

    def assign(self, slot: int) -> None:
        """Another request gets the slot, with all its tokens. Messages in flight belong to the one before."""
        self._newest[slot], self._since[slot] = 0, self._sent

    def expect(self, step: SchedulerOutput, rows: Rows) -> None:
        """Expect the message of a launched step, if one of its rows samples."""
        sampled = rows.select(rows.samples)
        if len(sampled.slots):
            self._sent += 1
            self.awaited.append(FeedbackMessage(self._sent, step, sampled))
            self._newest[sampled.slots] = self._sent

    def due(self, slots: I32) -> list[FeedbackMessage]:
        """Take and return, in order, the messages that a step with rows of `slots` needs."""
        needed = max(int(self._newest[slots].max(initial=0)), self._sent - self._most)
        messages = []
        while self.awaited and self.awaited[0].number <= needed:
            messages.append(self.awaited.popleft())
        return messages

    def wanted(self, message: FeedbackMessage) -> NDArray[np.bool_]:
        """bool[rows]: whether the row's request still has its slot."""
        return self._since[message.rows.slots] < message.number
