"""Outcomes on their way from the last stage back to the first, as the first stage sees it.

The last stage sends one message per step that has a sampling row, in the order of steps; both sides know from the plan
which steps these are (spec 3(b) 10), and what their messages look like. The first stage takes a message when a step
needs it, and no sooner: until then the pipeline holds other requests' steps. What nobody needs is taken when it is so
old that its step has long ended, so that messages do not pile up.
"""

from collections import deque
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

I32 = NDArray[np.int32]


class Message(NamedTuple):
    """The outcome of one step; int32[rows]."""

    number: int
    """1, 2, 3 ... of the messages in an epoch."""
    slots: I32
    firsts: I32
    """Position of the first token that each samples."""
    drafts: int
    """Proposed for each."""
    body: torch.Tensor
    """Of an `Outcome`, to be filled."""


class Feedback:
    """Which messages are still to be taken.

    Args:
        most: messages that can be under way because their steps are; older ones have arrived.
    """

    def __init__(self, num_slots: int, most: int) -> None:
        self._most = most
        self._awaited: deque[Message] = deque()
        self._sent = 0
        self._newest = np.zeros(num_slots, np.int64)
        """Last message with a token of the slot's request; 0: none."""
        self._since = np.zeros(num_slots, np.int64)
        """Messages that the slot's request is too young to have a token in."""

    def assign(self, slot: int) -> None:
        """Another request gets the slot, with all its tokens; what is under way to the one before is nobody's."""
        self._newest[slot], self._since[slot] = 0, self._sent

    def expect(self, slots: I32, firsts: I32, drafts: int, body: torch.Tensor) -> None:
        """A step was launched whose rows (at least one) sample tokens from `firsts` on."""
        self._sent += 1
        self._awaited.append(Message(self._sent, slots, firsts, drafts, body))
        self._newest[slots] = self._sent

    def due(self, slots: I32) -> list[Message]:
        """The messages to take before a step computes rows of `slots`, in order; they count as taken."""
        needed = max(int(self._newest[slots].max(initial=0)), self._sent - self._most)
        messages = []
        while self._awaited and self._awaited[0].number <= needed:
            messages.append(self._awaited.popleft())
        return messages

    def wanted(self, message: Message) -> NDArray[np.bool_]:
        """bool[rows]: whose request still has its slot."""
        return self._since[message.slots] < message.number
