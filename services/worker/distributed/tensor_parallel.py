"""The tensor-parallel ranks of one pipeline stage, and what they exchange within a layer.

Ranks of one machine exchange messages through shared memory, other ranks, and large messages, through gloo. Sums over
ranks are made in the order of ranks, so that a row's result does not depend on the batch it is in.
"""

import torch
from torch import distributed

from services.worker.distributed.messages import Peers, Tag, failure, raise_lost
from services.worker.distributed.shared_memory import CAPACITY, SharedMemory

BUFFERED_BYTES = 1 << 16
"""Size of a message that a connection takes at once. The receiver of such a message waits on its own thread, which
saves two thread switches, twice per layer; until the message begins to arrive, the wait fails with its connection."""


class TensorParallelGroup:
    """The ranks of one stage; every one of them calls the same methods in the same order, with tensors of equal shapes
    and dtypes. All methods raise RanksLost.

    Args:
        peers: connections to the other ranks; None for a group of one.
        memory: shared by the ranks; None: not all of them can map it.
    """

    def __init__(self, peers: Peers | None = None, memory: SharedMemory | None = None) -> None:
        self.peers, self.memory = peers, memory
        self.rank, self.size = (peers.rank, len(peers.others) + 1) if peers else (0, 1)
        self._leaving: tuple[torch.Tensor, list[distributed.Work]] | None = None
        """Messages of the last `all_gather`. They have left when the messages of the next one have arrived."""

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def all_gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Return `x` of every rank, in the order of ranks; this rank's own is not copied.

        `x` must not change before the next call has returned. The result is valid until the next call of any
        method.
        """
        if self.peers is None:
            return [x]
        x, peers = x.contiguous(), self.peers
        if (memory := self._memory_for(x)) is not None:
            return memory.exchange(x)
        parts = [x if rank == self.rank else torch.empty_like(x) for rank in range(self.size)]
        sent = [peers.send(x, rank, Tag.LAYER) for rank in peers.others]
        received = [peers.receive(parts[rank], rank, Tag.LAYER) for rank in peers.others]
        if x.nbytes > BUFFERED_BYTES:
            peers.wait(*received, *sent)
        else:
            raise_lost(failure(received))
            self._leaving = x, sent
        return parts

    def _memory_for(self, x: torch.Tensor) -> SharedMemory | None:
        """Return the shared memory, if `x` fits: the same answer on all ranks."""
        return self.memory if x.nbytes <= CAPACITY else None

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of `x` over the ranks, with the same bits on each: made in float32 and rounded once.

        gloo's own sum goes around a ring in pieces, so an element's order of addition would depend on its position."""
        if self.peers is None:
            return x
        first, *others = self.all_gather(x)
        total = first.float()
        for part in others:
            total = total + part
        return total.to(x.dtype)

    def gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Return `x` of every rank, in the order of ranks, on the first rank; an empty list on the others."""
        if self.peers is None:
            return [x]
        x, peers = x.contiguous(), self.peers
        if (memory := self._memory_for(x)) is not None:
            parts = memory.exchange(x)
            return [x, *(part.clone() for part in parts[1:])] if self.is_first else []
        if not self.is_first:
            peers.wait(peers.send(x, 0, Tag.LAYER))
            return []
        parts = [x, *(torch.empty_like(x) for _ in peers.others)]
        peers.wait(*(peers.receive(parts[rank], rank, Tag.LAYER) for rank in peers.others))
        return parts

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """Write the first rank's contiguous `x` into that of every other rank, and return it."""
        if (peers := self.peers) is not None:
            if (memory := self._memory_for(x)) is not None:
                first = memory.exchange(x)[0]
                if not self.is_first:
                    x.copy_(first)
            elif self.is_first:
                peers.wait(*(peers.send(x, rank, Tag.LAYER) for rank in peers.others))
            else:
                peers.wait(peers.receive(x, 0, Tag.LAYER))
        return x
