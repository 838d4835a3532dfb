"""Whom a rank computes with: the team of its stage, and the stages before and after it.

Sums over ranks are made in the order of ranks, so that a row's result does not depend on the batch it is in.
"""

from collections import deque

import torch
from torch import distributed

from services.worker.batch.staging import MAX_STEPS_IN_FLIGHT
from services.worker.distributed.messages import Peers, failure, raise_lost

ACTIVATIONS, FEEDBACK, ROWS, TEAM = 0, 1, 2, 3
"""Tags of what stages send onwards, of what the last sends to the first, of what a stage says about a step before its
activations, and of what a team exchanges."""
SMALL = 1 << 16
"""Bytes that a connection gives at once. Who waits for as little to arrive can wait on its own thread, two switches
faster, and layers do that twice: until it begins to arrive it fails with its connection."""
AHEAD = 4
"""Steps that a stage computes before the next stage takes the first of them: as many activations are kept."""


class Team:
    """The tensor-parallel ranks of one stage; every one of them calls the same methods in the same order."""

    def __init__(self, peers: Peers | None = None) -> None:
        self._peers = peers
        self.rank, self.size = (peers.rank, len(peers.others) + 1) if peers else (0, 1)
        self._leaving: tuple[torch.Tensor, list[distributed.Work]] | None = None
        """What was sent in the last `all_gather`: it has arrived by the time that the next one's has, from the same."""

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def all_gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        """`x` of every rank, in the order of ranks, its own not copied; equal shapes and dtypes. `x` must not change
        before the next call has returned.

        Raises: RanksLost
        """
        if self._peers is None:
            return [x]
        x, peers = x.contiguous(), self._peers
        parts = [x if rank == self.rank else torch.empty_like(x) for rank in range(self.size)]
        sent = [peers.send(x, rank, TEAM) for rank in peers.others]
        received = [peers.receive(parts[rank], rank, TEAM) for rank in peers.others]
        if x.nbytes > SMALL:
            peers.wait(*received, *sent)
        else:
            raise_lost(failure(received))
            self._leaving = x, sent
        return parts

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of `x` over the ranks, with the same bits on each. It is made in float32 and rounded once.

        gloo's own sum goes around a ring in pieces, so an element's order of addition would depend on where it lies.

        Raises: RanksLost
        """
        if self._peers is None:
            return x
        first, *others = self.all_gather(x)
        total = first.float()
        for part in others:
            total = total + part
        return total.to(x.dtype)

    def gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        """On the first rank `x` of every rank, in the order of ranks, on the others nothing; equal shapes and dtypes.

        Raises: RanksLost
        """
        if self._peers is None:
            return [x]
        x, peers = x.contiguous(), self._peers
        if not self.is_first:
            peers.wait(peers.send(x, 0, TEAM))
            return []
        parts = [x, *(torch.empty_like(x) for _ in peers.others)]
        peers.wait(*(peers.receive(parts[rank], rank, TEAM) for rank in peers.others))
        return parts

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """The first rank's contiguous `x`, written into everyone's.

        Raises: RanksLost
        """
        if (peers := self._peers) is not None:
            if self.is_first:
                peers.wait(*(peers.send(x, rank, TEAM) for rank in peers.others))
            else:
                peers.wait(peers.receive(x, 0, TEAM))
        return x


class Stages:
    """The pipeline stages that this rank's column of the group goes through: one rank of each, with equal `tp_rank`.

    Sender and receiver must agree from the plan alone what is sent, and of which shape (spec 3(b) 10).
    """

    def __init__(self, peers: Peers | None = None) -> None:
        self._peers = peers
        self.rank, self.size = (peers.rank, len(peers.others) + 1) if peers else (0, 1)
        self._leaving: tuple[deque[tuple[torch.Tensor, distributed.Work]], ...] = (deque(), deque(), deque())
        """What is on its way, by tag, kept until it has left; gloo tells that only to those who wait."""
        self._most = (AHEAD, 2 * max(MAX_STEPS_IN_FLIGHT, 2 * self.size), AHEAD)
        """Messages kept, by tag. Those to the first stage wait there until a step needs them, but never longer than
        steps can be in flight; so nobody waits for them here."""

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        return self.rank == self.size - 1

    def send_next(self, *tensors: torch.Tensor) -> None:
        """Hands activations to the next stage without waiting for it. They must not change any more.

        Raises: RanksLost
        """
        for tensor in tensors:
            self._send(tensor, self.rank + 1, ACTIVATIONS)

    def receive_previous(self, *tensors: torch.Tensor) -> None:
        """Fills `tensors` with what the stage before sends next.

        Raises: RanksLost
        """
        for tensor in tensors:
            self._receive(tensor, self.rank - 1, ACTIVATIONS)

    def tell_next(self, rows: torch.Tensor) -> None:
        """Tells the next stage of a step's rows, before their activations and without waiting for it.

        Raises: RanksLost
        """
        self._send(rows, self.rank + 1, ROWS)

    def hear_previous(self, rows: torch.Tensor) -> torch.Tensor:
        """Fills `rows` with what the stage before tells next, and returns them.

        Raises: RanksLost
        """
        self._receive(rows, self.rank - 1, ROWS)
        return rows

    def send_first(self, tensor: torch.Tensor) -> None:
        """From the last stage back to the first, without waiting for it.

        Raises: RanksLost
        """
        self._send(tensor, 0, FEEDBACK)

    def receive_last(self, tensor: torch.Tensor) -> None:
        """Fills `tensor` with what the last stage sends next.

        Raises: RanksLost
        """
        self._receive(tensor, self.size - 1, FEEDBACK)

    def _send(self, tensor: torch.Tensor, to: int, tag: int) -> None:
        if self._peers is None:
            raise RuntimeError("a group of one stage sends nothing")
        leaving = self._leaving[tag]
        while len(leaving) >= self._most[tag]:
            self._peers.wait(leaving.popleft()[1])
        tensor = tensor.contiguous()
        leaving.append((tensor, self._peers.send(tensor, to, tag)))

    def _receive(self, tensor: torch.Tensor, source: int, tag: int) -> None:
        if self._peers is None:
            raise RuntimeError("a group of one stage receives nothing")
        self._peers.wait(self._peers.receive(tensor, source, tag))
