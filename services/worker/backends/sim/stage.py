"""A rank among others: stages hand on tokens and hashes in place of hidden states, ranks of a stage compare results.

What one stage tells another is an int64 array: the step it belongs to, the moment on the modelled timeline when it is
there (the bits of a float64), and the body, which has room for all planned drafts. Activations: input ids, hashes, and
of each row where it starts and how many drafts it has. Feedback, one message per step with sampling rows: sampled ids,
of each row where they begin and how many hold, and its next drafts.

The first stage takes feedback when a step needs it, so it never waits for a token too early. A message belongs to the
owners that the slots had when its step was launched: ids for a slot that was given away since are dropped.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from protocol.steps import SchedulerOutput
from services.worker.backends.sim.acceptance import Acceptance
from services.worker.backends.sim.cost import CostModel
from services.worker.backends.sim.device import Device
from services.worker.backends.sim.hashing import U64
from services.worker.backends.sim.oracle import Activations, OracleError, spread
from services.worker.backends.sim.place import Arrived, Feedback
from services.worker.batch.slots import I32, Rows
from services.worker.batch.staging import MAX_STEPS_IN_FLIGHT
from services.worker.distributed.ranks import Ranks

I64 = NDArray[np.int64]
HEADER = 2
NEVER = -1


@dataclass(frozen=True)
class _Promise:
    """What the last stage will send; int32[rows] each."""

    step_id: int
    slots: I32
    room: I32
    """Tokens that a row may have."""
    proposed: int
    """Drafts for each row."""

    def kept(self, body: I64, stay: NDArray[np.bool_]) -> Feedback:
        """Of the rows that stay; `body` is what came. Raises: OracleError, if a row has more tokens than room."""
        rows, tokens = len(self.slots), int(self.room.sum())
        ids, rest = body[:tokens].astype(np.int32), body[tokens:].astype(np.int32)
        firsts, counts, drafts = (
            rest[:rows],
            rest[rows : 2 * rows],
            rest[2 * rows :].reshape(rows, self.proposed),
        )
        if (wrong := (counts < 1) | (counts > self.room)).any():
            i = int(wrong.argmax())
            raise OracleError(f"slot {self.slots[i]}: {counts[i]} of {self.room[i]} tokens came back")
        _, at = spread((np.cumsum(self.room) - self.room)[stay].astype(np.int32), counts[stay])
        slots, firsts, counts = self.slots[stay], firsts[stay], counts[stay]
        return Feedback(self.step_id, slots, firsts, counts, ids[at], drafts[stay])

    @property
    def size(self) -> int:
        return int(self.room.sum()) + (2 + self.proposed) * len(self.slots)


class Stage:
    """A `Place` in the groups of one epoch; `join` comes first."""

    def __init__(self, ranks: Ranks, cost: CostModel, num_slots: int) -> None:
        self._ranks, self._cost = ranks, cost
        self._link_free_at = 0.0
        """The link to the next stage carries one step after the other."""
        self._most_in_flight = max(MAX_STEPS_IN_FLIGHT, 2 * ranks.shard.pipeline_parallel_size)
        self._promised: deque[_Promise] = deque()
        self._entered_in = np.full(num_slots, NEVER, np.int64)
        """Step with which the slot's owner came."""
        self._sampled_in = np.full(num_slots, NEVER, np.int64)
        """Newest step that samples for the slot's owner."""

    def join(self) -> None:
        """Raises: RanksLost"""
        self._ranks.join()
        self._team, self._stages = self._ranks.team, self._ranks.stages

    # -- between stages ------------------------------------------------------------------------------------------

    def arrive(self, step: SchedulerOutput, rows: Rows) -> Arrived:
        if self._stages.size == 1:
            return Arrived()
        return self._feedback(step, rows) if self._stages.is_first else self._activations(step, rows)

    def _activations(self, step: SchedulerOutput, rows: Rows) -> Arrived:
        tokens, n = int(rows.counts.sum()), len(rows.slots)
        size = 2 * (tokens + n)
        at, body = _receive(self._stages.receive_previous, "activations", step.step_id, size)
        ids, hashes, starts, drafts = np.split(body, (tokens, 2 * tokens, 2 * tokens + n))
        if ((drafts < 0) | (drafts > rows.drafts)).any():
            raise OracleError(
                f"step {step.step_id} has {drafts} drafts on the stage before, of {rows.drafts}"
            )
        small = (column.astype(np.int32) for column in (starts, drafts))
        return Arrived(at, (), Activations(ids.astype(np.int32), hashes.view(np.uint64), *small))

    def _feedback(self, step: SchedulerOutput, rows: Rows) -> Arrived:
        """All messages up to the newest one that a row needs, and those that no step in flight can be about."""
        entering = [request.slot for request in step.new]
        self._entered_in[entering], self._sampled_in[entering] = step.step_id, NEVER
        needed = int(self._sampled_in[rows.slots].max(initial=NEVER))
        needed = max(needed, step.step_id - self._most_in_flight)
        at, feedback = 0.0, []
        while self._promised and self._promised[0].step_id <= needed:
            promise = self._promised.popleft()
            at, body = _receive(self._stages.receive_last, "sampled ids", promise.step_id, promise.size)
            feedback.append(promise.kept(body, self._entered_in[promise.slots] <= promise.step_id))
        sampled = rows.samples
        if sampled.any():
            slots, room = rows.slots[sampled], 1 + rows.drafts[sampled]
            self._promised.append(_Promise(step.step_id, slots, room, step.num_speculative_tokens))
            self._sampled_in[slots] = step.step_id
        return Arrived(at, tuple(feedback))

    def _hand_on(self, step_id: int, leaving: Activations, ended: float) -> None:
        arrives = max(ended, self._link_free_at) + self._cost.hop(len(leaving.tokens))
        self._link_free_at = arrives
        tokens, hashes, starts, drafts = leaving
        self._stages.send_next(_message(step_id, arrives, tokens, hashes.view(np.int64), starts, drafts))

    # -- a step --------------------------------------------------------------------------------------------------

    def forwarded(
        self,
        device: Device,
        step: SchedulerOutput,
        rows: Rows,
        hashes: U64,
        leaving: Activations | None,
        ended: float,
    ) -> None:
        device.settle()
        self._agree("the activation", step.step_id, rows.slots, hashes.view(np.int64))
        if leaving is not None:
            self._hand_on(step.step_id, leaving, ended)

    def sampled(
        self, device: Device, step: SchedulerOutput, sampled: Acceptance, drafts: I32, ended: float
    ) -> None:
        token_ids = sampled.token_ids
        if not len(token_ids):
            return
        device.settle()
        owners = np.repeat(sampled.slots, sampled.room)
        self._agree("token", step.step_id, owners, token_ids.astype(np.int64))
        if self._stages.size > 1:
            body = (token_ids, sampled.firsts, sampled.counts, drafts.ravel())
            self._stages.send_first(_message(step.step_id, ended + self._cost.hop(0), *body))

    def _agree(self, what: str, step_id: int, slots: I32, mine: I64) -> None:
        """Before anything is reported: each rank sees that of all others, so a wrong rank is not alone to know."""
        if self._team.size == 1:
            return
        own = np.concatenate(([step_id], mine))
        for rank, part in enumerate(self._team.all_gather(torch.from_numpy(own))):
            theirs = part.numpy()
            if theirs[0] != step_id:
                raise OracleError(f"step {step_id} meets step {theirs[0]} of tensor-parallel rank {rank}")
            wrong = theirs[1:] != mine
            if wrong.any():
                i = int(wrong.argmax())
                raise OracleError(
                    f"slot {slots[i]}: {what} is {mine[i]} here and {theirs[i + 1]} on tensor-parallel rank {rank}"
                )

    def abort(self) -> None:
        self._ranks.abort()


def _message(step_id: int, at: float, *body: NDArray[np.signedinteger]) -> torch.Tensor:
    header = np.array([step_id, 0], np.int64)
    header[1:].view(np.float64)[0] = at
    return torch.from_numpy(np.concatenate((header, *body)))


def _receive(
    receive: Callable[[torch.Tensor], None], what: str, step_id: int, size: int
) -> tuple[float, I64]:
    """When it is there, and int64[size]. Raises: OracleError, RanksLost"""
    message = np.empty(HEADER + size, np.int64)
    receive(torch.from_numpy(message))
    if message[0] != step_id:
        raise OracleError(f"step {step_id} waits for its {what} and gets those of step {message[0]}")
    return float(message[1:2].view(np.float64)[0]), message[HEADER:]
