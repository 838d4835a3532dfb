"""The exchange of a rank in a group: stages send tokens and hashes in place of hidden states, and the ranks of a stage
compare their results.

A message between stages is an int64 array: the step that it belongs to, the moment on the modelled timeline at which it
arrives (the bits of a float64), and the body, which has room for all planned drafts. Activations: input ids, hashes,
and for each row its start and its number of drafts. Feedback, one message per step with sampling rows: sampled ids, and
for each row its first position, its number of tokens and its next drafts.

The first stage receives feedback when a step needs it, so it never waits for a token too early. A message belongs to
the owners that the slots had when its step was launched; ids for a slot that has another owner since then are dropped.
"""

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from protocol.codec import unpack
from protocol.steps import NO_DRAFT, SchedulerOutput
from services.worker.backends.mask_inbox import TakenMasks
from services.worker.backends.sim.cost import CostModel
from services.worker.backends.sim.model.hashing import U64
from services.worker.backends.sim.model.oracle import Activations, OracleError, first_true, spread
from services.worker.backends.sim.ranks.inputs import ReceivedInputs, StageFeedback
from services.worker.backends.sim.sampling.acceptance import DraftAcceptance
from services.worker.batch.slots import I32, Rows
from services.worker.distributed.feedback import FeedbackMessage, TokenFeedback
from services.worker.distributed.ranks import Ranks

I64 = NDArray[np.int64]
HEADER = 2
"""Words before the body of a message."""


class GroupExchange:
    """The exchange over the groups of one epoch.

    The methods run on the device, in this order in every step. The plan alone determines sender and message (plan
    agreement; docs/invariants.md). Every method raises RanksLost, or OracleError if ranks disagree.

    Args:
        ranks: they have joined before the first step
    """

    def __init__(self, ranks: Ranks, cost: CostModel, num_slots: int) -> None:
        self.ranks, self._cost = ranks, cost
        self._link_free_at = 0.0
        """The link to the next stage carries one step after the other."""
        self.feedback = TokenFeedback(num_slots, ranks.shard.pipeline_parallel_size)
        """On the first stage."""

    # -- between stages ------------------------------------------------------------------------------------------

    def receive_inputs(self, step: SchedulerOutput, rows: Rows) -> ReceivedInputs:
        """Wait for the inputs of a step that was applied."""
        if self.ranks.pipeline.size == 1:
            return ReceivedInputs()
        if self.ranks.pipeline.is_first:
            return self._receive_feedback(step, rows)
        return self._receive_activations(step, rows)

    def _receive_activations(self, step: SchedulerOutput, rows: Rows) -> ReceivedInputs:
        tokens, n = int(rows.counts.sum()), len(rows.slots)
        size = 2 * (tokens + n)
        at, body = _receive(self.ranks.pipeline.receive_activations, "activations", step.step_id, size)
        ids, hashes, starts, drafts = np.split(body, (tokens, 2 * tokens, 2 * tokens + n))
        if ((drafts < 0) | (drafts > rows.drafts)).any():
            raise OracleError(
                f"step {step.step_id} has {drafts} drafts on the stage before, but {rows.drafts} are planned"
            )
        small = (column.astype(np.int32) for column in (starts, drafts))
        return ReceivedInputs(at, (), Activations(ids.astype(np.int32), hashes.view(np.uint64), *small))

    def _receive_feedback(self, step: SchedulerOutput, rows: Rows) -> ReceivedInputs:
        for request in step.new:
            self.feedback.assign(request.slot)
        at, feedback = 0.0, []
        for message in self.feedback.due(rows.slots):
            at, received = self._received(message)
            feedback.append(received)
        self.feedback.expect(step, rows)
        return ReceivedInputs(at, tuple(feedback))

    def _received(self, message: FeedbackMessage) -> tuple[float, StageFeedback]:
        """Receive a message. Return when it arrives, and the feedback of the rows whose owner still has its slot.

        Raises: OracleError, if a row that is not constrained has no token, or one has more than it has room for.
        """
        step, sampled, rows = message.step, message.rows, len(message.rows.slots)
        room, proposed = 1 + sampled.drafts, step.num_speculative_tokens
        size = int(room.sum()) + (2 + proposed) * rows
        at, body = _receive(self.ranks.pipeline.receive_feedback, "sampled ids", step.step_id, size)
        ids, firsts, counts, drafts = np.split(body.astype(np.int32), np.cumsum([room.sum(), rows, rows]))
        least = np.where(np.isin(sampled.slots, unpack(step.masked)), 0, 1)
        if (i := first_true((counts < least) | (counts > room))) is not None:
            raise OracleError(f"slot {sampled.slots[i]}: {counts[i]} tokens came back, with room for {room[i]}")
        kept = self.feedback.wanted(message)
        columns = sampled.slots[kept], firsts[kept], counts[kept]
        _, places = spread((np.cumsum(room) - room)[kept].astype(np.int32), counts[kept])
        return at, StageFeedback(step.step_id, *columns, ids[places], drafts.reshape(rows, proposed)[kept])

    def send_activations(
        self, step: SchedulerOutput, rows: Rows, hashes: U64, leaving: Activations | None, ended: float
    ) -> None:
        """Compare `hashes`, uint64[rows], with the other ranks of the stage, and send `leaving` to the next stage.

        Args:
            leaving: None on the last stage.
            ended: when the forward pass ends on the modelled timeline.
        """
        self._compare("the activation", step.step_id, rows.slots, hashes.view(np.int64))
        if leaving is None:
            return
        tokens, sent_hashes, starts, drafts = leaving
        planned = int(rows.counts.sum())
        arrives = max(ended, self._link_free_at) + self._cost.hop(planned)
        self._link_free_at = arrives
        room = np.zeros(planned - len(tokens), np.int64)
        body = tokens, room, sent_hashes.view(np.int64), room, starts, drafts
        self.ranks.pipeline.send_activations(_message(step.step_id, arrives, *body))

    def send_left_out(self, step: SchedulerOutput, taken: TakenMasks) -> None:
        """Send the slots of left-out rows from the output rank to the other ranks of the last stage."""
        if self.ranks.tensor_parallel.size > 1:
            flags = np.isin(unpack(step.masked), [*taken.left_out]).astype(np.int64)
            self.ranks.tensor_parallel.broadcast(_message(step.step_id, taken.at, flags))

    def receive_left_out(self, step: SchedulerOutput) -> TakenMasks:
        """Receive the slots of left-out rows on another rank of the last stage. The result has no masks."""
        receive, masked = self.ranks.tensor_parallel.broadcast, unpack(step.masked)
        at, flags = _receive(receive, "left-out rows", step.step_id, len(masked))
        return TakenMasks([], frozenset(masked[flags != 0].tolist()), at)

    def send_sampled(self, step: SchedulerOutput, sampled: DraftAcceptance, drafts: I32, ended: float) -> None:
        """Compare the tokens with the other ranks of the last stage, and send them with `drafts` to the first stage.

        Args:
            drafts: int32[sampled rows, proposed].
            ended: when tokens and drafts are there on the modelled timeline.
        """
        if not len(sampled.slots):
            return
        rows, offsets = spread(np.zeros_like(sampled.room), sampled.room)
        token_ids = np.full(len(rows), NO_DRAFT, np.int64)
        token_ids[offsets < sampled.counts[rows]] = sampled.token_ids
        self._compare("the token", step.step_id, sampled.slots[rows], token_ids)
        if self.ranks.pipeline.size > 1:
            body = (token_ids, sampled.firsts, sampled.counts, drafts.ravel())
            self.ranks.pipeline.send_feedback(_message(step.step_id, ended + self._cost.hop(0), *body))

    # -- within a stage ------------------------------------------------------------------------------------------

    def _compare(self, what: str, step_id: int, slots: I32, mine: I64) -> None:
        """Compare `mine` with that of every rank of the stage, before anything is reported.

        Raises: OracleError on every rank, if one differs.
        """
        group = self.ranks.tensor_parallel
        if group.size == 1:
            return
        own = np.concatenate(([step_id], mine))
        for rank, part in enumerate(group.all_gather(torch.from_numpy(own))):
            theirs = part.numpy()
            if theirs[0] != step_id:
                raise OracleError(f"step {step_id} meets step {theirs[0]} of tensor-parallel rank {rank}")
            if (i := first_true(theirs[1:] != mine)) is not None:
                raise OracleError(
                    f"slot {slots[i]}: {what} is {mine[i]} here and {theirs[i + 1]} on tensor-parallel rank {rank}"
                )


def _message(step_id: int, at: float, *body: NDArray[np.signedinteger]) -> torch.Tensor:
    header = np.array([step_id, 0], np.int64)
    header[1:].view(np.float64)[0] = at
    return torch.from_numpy(np.concatenate((header, *body)))


def _receive(receive: Callable[[torch.Tensor], object], what: str, step_id: int, size: int) -> tuple[float, I64]:
    """Return when the message arrives, and its body, int64[size].

    Raises: RanksLost; OracleError, for a message of another step.
    """
    message = np.empty(HEADER + size, np.int64)
    receive(torch.from_numpy(message))
    if message[0] != step_id:
        raise OracleError(f"step {step_id} needs its {what}, but those of step {message[0]} came")
    return float(message[1:2].view(np.float64)[0]), message[HEADER:]
