"""The pipeline stages of one tensor-parallel rank, and the messages between them.

    stage 0  ── rows, activations ──►  stage 1  ── rows, activations ──►  ...  last stage
       ▲                                                                          │
       └───────────────────────────── feedback ───────────────────────────────────┘

Sender and receiver derive from the plan alone which messages are sent and of which shape: plan agreement
(docs/invariants.md).
"""

from collections import deque

import torch
from torch import distributed

from services.worker.distributed.messages import Peers, Tag
from services.worker.runner import steps_in_flight

STEPS_AHEAD = 4
"""Steps that a stage computes before the next stage receives the first of them; as many activations are kept."""


class PipelineGroup:
    """One rank of each stage, all with the same `tp_rank`. Sending does not wait for the receiver. Methods that send
    or receive raise RanksLost.

    Args:
        peers: connections to the other stages; None for a group of one.
    """

    def __init__(self, peers: Peers | None = None) -> None:
        self._peers = peers
        self.rank, self.size = (peers.rank, len(peers.others) + 1) if peers else (0, 1)
        self._leaving: dict[Tag, deque[tuple[torch.Tensor, distributed.Work]]] = {
            Tag.ACTIVATIONS: deque(),
            Tag.ROWS: deque(),
            Tag.FEEDBACK: deque(),
        }
        """Messages that may not have left yet; gloo reports that only to a waiting thread."""
        self._capacity = {
            Tag.ACTIVATIONS: STEPS_AHEAD,
            Tag.ROWS: STEPS_AHEAD,
            # Feedback stays with the sender until its receiver needs it, which is never later than the number of steps
            # in flight; so this capacity is never reached by a message that has not left.
            Tag.FEEDBACK: 2 * steps_in_flight(self.size) * self.size,
        }
        """Messages kept per tag."""

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        return self.rank == self.size - 1

    def num_kept(self, tag: Tag) -> int:
        """Return the number of sent messages that may not have left yet."""
        return len(self._leaving[tag])

    # -- from each stage to the next one -------------------------------------------------------------------------

    def send_rows(self, rows: torch.Tensor) -> None:
        """Send a step's rows to the next stage, before their activations."""
        self._send(rows, self.rank + 1, Tag.ROWS)

    def receive_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """Fill `rows` with the next rows of the stage before, and return them."""
        self._receive(rows, self.rank - 1, Tag.ROWS)
        return rows

    def send_activations(self, *tensors: torch.Tensor) -> None:
        """Send activations to the next stage. They must not change any more."""
        for tensor in tensors:
            self._send(tensor, self.rank + 1, Tag.ACTIVATIONS)

    def receive_activations(self, *tensors: torch.Tensor) -> None:
        """Fill `tensors` with the next activations of the stage before."""
        for tensor in tensors:
            self._receive(tensor, self.rank - 1, Tag.ACTIVATIONS)

    # -- from the last stage to the first ------------------------------------------------------------------------

    def send_feedback(self, tensor: torch.Tensor, stages: int = 1) -> None:
        """Send what a step sampled to the first `stages` stages."""
        for stage in range(stages):
            self._send(tensor, stage, Tag.FEEDBACK)

    def receive_feedback(self, tensor: torch.Tensor) -> None:
        """Fill `tensor` with the next feedback of the last stage."""
        self._receive(tensor, self.size - 1, Tag.FEEDBACK)

    def _send(self, tensor: torch.Tensor, to: int, tag: Tag) -> None:
        if self._peers is None:
            raise RuntimeError("a group of one stage sends nothing")
        leaving = self._leaving[tag]
        while len(leaving) >= self._capacity[tag]:
            self._peers.wait(leaving.popleft()[1])
        tensor = tensor.contiguous()
        leaving.append((tensor, self._peers.send(tensor, to, tag)))

    def _receive(self, tensor: torch.Tensor, source: int, tag: Tag) -> None:
        if self._peers is None:
            raise RuntimeError("a group of one stage receives nothing")
        self._peers.wait(self._peers.receive(tensor, source, tag))
