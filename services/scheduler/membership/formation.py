"""The size of a group, when it may form, and which worker gets which rank."""

from collections.abc import Collection
from typing import NamedTuple

from protocol.membership import Shard
from services.config import SchedulerConfig
from services.scheduler.membership.member import Member

RETURN_SECONDS = 3.0
"""Seconds for which the first group of a scheduler waits for workers that have its weights in memory, if a worker says
that another scheduler was lost."""


class GroupSize(NamedTuple):
    tensor_parallel: int
    pipeline_parallel: int

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.tensor_parallel * self.pipeline_parallel


class Formation:
    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._changed_at = 0.0
        """When a worker last came or went."""
        self._returns_until: float | None = None
        """Until then other workers of a lost scheduler are expected; None: there was none so far."""

    @property
    def is_auto(self) -> bool:
        """Return whether the size follows the number of workers."""
        return self._config.tensor_parallel_size == "auto"

    def on_change(self, now: float) -> None:
        """A worker came or went."""
        self._changed_at = now

    def settled(self, now: float) -> bool:
        """Return whether a group may form: under `auto` when no worker has come or gone for some time, else at once."""
        return not self.is_auto or now - self._changed_at >= self._config.settle_seconds

    def on_return(self, now: float) -> None:
        """A worker of a lost scheduler has registered."""
        if self._returns_until is None:
            self._returns_until = now + RETURN_SECONDS

    def on_formed(self) -> None:
        """A group has formed: from now on a lost rank is replaced at once."""
        self._returns_until = 0.0

    def awaits_weights(self, spares: Collection[Member], size: GroupSize, now: float) -> bool:
        """Return whether to wait for workers that have the weights of some rank in memory."""
        if self._returns_until is None or now >= self._returns_until:
            return False
        ranks = enumerate(assign_ranks(spares, size))
        return any(member.register.shard != _shard(rank, size) for rank, member in ranks)

    def best_size(self, members: Collection[Member]) -> GroupSize | None:
        """Return the size of the group that these workers should form, or None if they are too few."""
        stages = self._config.pipeline_parallel_size
        if self._config.tensor_parallel_size != "auto":
            size = GroupSize(self._config.tensor_parallel_size, stages)
            return size if len(members) >= size.world else None
        allowed = [set(member.register.tensor_parallel_sizes) for member in members]
        sizes = set.intersection(*allowed) if allowed else set()
        fitting = [size for size in sizes if size * stages <= len(members)]
        return GroupSize(max(fitting), stages) if fitting else None

    def waits_for(self, num_members: int) -> str:
        """Return what a group that cannot form yet waits for, for people."""
        if not num_members:
            return "waiting for a worker to register"
        if self._config.tensor_parallel_size == "auto":
            return f"{num_members} workers have registered; waiting {self._config.settle_seconds:g} s for more"
        needed = GroupSize(self._config.tensor_parallel_size, self._config.pipeline_parallel_size).world
        return f"waiting for workers: {num_members} of {needed} have registered"


def assign_ranks(spares: Collection[Member], size: GroupSize) -> list[Member]:
    """Return a worker for each rank. A worker that has a rank's weights in memory gets that rank again; the others get
    theirs machine by machine, so that a tensor-parallel group shares one if the machines allow it."""
    ranks: list[Member | None] = [None] * size.world
    others = list[Member]()
    for member in spares:
        shard = member.register.shard
        rank = -1 if shard is None else shard.pp_rank * size.tensor_parallel + shard.tp_rank
        if 0 <= rank < size.world and shard == _shard(rank, size) and ranks[rank] is None:
            ranks[rank] = member
        else:
            others.append(member)
    machines = [_machine(member) for member in others]
    others.sort(key=lambda member: (-machines.count(_machine(member)), machines.index(_machine(member))))
    return [member or others.pop(0) for member in ranks]


def _machine(member: Member) -> str:
    """Return the address at which other ranks reach a worker."""
    return member.register.rendezvous.rpartition(":")[0]


def _shard(rank: int, size: GroupSize) -> Shard:
    tp, pp = size
    return Shard(rank % tp, tp, rank // tp, pp)
