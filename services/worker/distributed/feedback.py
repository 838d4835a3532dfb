"""Outcomes on their way from the last stage back to an earlier one, on the earlier stage's side.

The last stage sends one message per step with a sampling row, in the order of steps. Both sides know from the plan
which steps these are and how large their messages are (plan agreement, docs/invariants.md). An earlier stage takes a
message only when a step needs it; until then the pipeline computes steps of other requests. A message that no step
needs is taken when its step must have ended long ago, so that messages do not accumulate.
"""

from collections import deque
from typing import Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

B = TypeVar("B")
I32 = NDArray[np.int32]


class FeedbackMessage(NamedTuple, Generic[B]):
    """The outcome of one step; int32[rows]."""

    number: int
    """Number of the message in its epoch, from 1."""
    slots: I32
    firsts: I32
    """Position of the first token that each row samples."""
    drafts: int
    """Drafts proposed for each row."""
    body: B
    """The buffer in which the backend receives the message, such as an `Outcome.empty_message` to fill."""


class TokenFeedback(Generic[B]):
    """The messages that were not taken yet.

    Args:
        most: maximum number of messages in flight; older ones have arrived.
    """

    def __init__(self, num_slots: int, most: int) -> None:
        self._most = most
        self.awaited: deque[FeedbackMessage[B]] = deque()
        self._sent = 0
        self._newest = np.zeros(num_slots, np.int64)
        """Number of the last message with a token of the slot's request; 0: none."""
        self._since = np.zeros(num_slots, np.int64)
        """Number of messages sent before the slot's request entered it."""

    def assign(self, slot: int) -> None:
        """Another request gets the slot, with all its tokens. Messages in flight belong to the one before."""
        self._newest[slot], self._since[slot] = 0, self._sent

    def expect(self, slots: I32, firsts: I32, drafts: int, body: B) -> None:
        """Expect the message of a launched step whose rows (at least one) sample tokens from `firsts` on."""
        self._sent += 1
        self.awaited.append(FeedbackMessage(self._sent, slots, firsts, drafts, body))
        self._newest[slots] = self._sent

    def due(self, slots: I32) -> list[FeedbackMessage[B]]:
        """Take and return, in order, the messages that a step with rows of `slots` needs."""
        needed = max(int(self._newest[slots].max(initial=0)), self._sent - self._most)
        messages = []
        while self.awaited and self.awaited[0].number <= needed:
            messages.append(self.awaited.popleft())
        return messages

    def wanted(self, message: FeedbackMessage[B]) -> NDArray[np.bool_]:
        """bool[rows]: whether the row's request still has its slot."""
        return self._since[message.slots] < message.number
