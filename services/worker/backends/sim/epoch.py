"""Everything of a rank that lives one epoch: the device, the batch, the oracle, and the steps that use them."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from protocol.codec import unpack
from protocol.membership import Assignment, InitializeCache
from protocol.steps import NO_DRAFT, GrammarOutput, SchedulerOutput
from services.config import WorkerConfig
from services.worker.backends.mask_inbox import ENDLESS, Forward, MaskInbox, TakenMasks, joined
from services.worker.backends.pending_step import PendingStep
from services.worker.backends.pooling import PooledRows, Pooler
from services.worker.backends.sim.checkpoint import SimCheckpoint
from services.worker.backends.sim.cost import CostModel
from services.worker.backends.sim.device.rigid import RigidShapes
from services.worker.backends.sim.device.simulated import SimDevice, SimEvent, no_inputs
from services.worker.backends.sim.faults import inject_faults
from services.worker.backends.sim.model.hashing import U64
from services.worker.backends.sim.model.hidden_states import HIDDEN_SIZE, hidden_states
from services.worker.backends.sim.model.logits import Logits
from services.worker.backends.sim.model.oracle import Activations, Oracle, OracleError, spread
from services.worker.backends.sim.output.logprobs import StepLogprobs
from services.worker.backends.sim.output.step_output import StepOutput
from services.worker.backends.sim.ranks.inputs import ReceivedInputs
from services.worker.backends.sim.sampling.acceptance import DraftAcceptance
from services.worker.backends.sim.sampling.device_drafts import DeviceDrafts
from services.worker.backends.sim.sampling.drafter import SimDrafter
from services.worker.backends.sim.sampling.sampler import SimSampler
from services.worker.batch.slots import I32, PlanError, Rows, SlotTable
from services.worker.runner import steps_in_flight

if TYPE_CHECKING:
    from services.worker.backends.sim.ranks.group_exchange import GroupExchange


@dataclass(frozen=True)
class LoadedRank:
    """The result of `load`: a rank that has joined its group."""

    config: WorkerConfig
    assignment: Assignment
    checkpoint: SimCheckpoint
    cost: CostModel
    exchange: "GroupExchange | None"
    """None on the only rank of a group."""

    @property
    def is_last_stage(self) -> bool:
        shard = self.assignment.shard
        return shard.pp_rank + 1 == shard.pipeline_parallel_size

    @property
    def is_output(self) -> bool:
        """True on the rank that reports results."""
        return self.assignment.rank == self.assignment.output_rank


class SimEpoch:
    """One epoch of a simulated rank. Its attributes are public for tests that corrupt them.

    Args:
        full_check: every row reads its whole context in every step; slow.
        kv: uint64[positions]: the KV cache, perhaps with blocks of an earlier epoch.
    """

    def __init__(self, rank: LoadedRank, init: InitializeCache, device: SimDevice, full_check: bool, kv: U64) -> None:
        self._rank, self.device = rank, device
        assignment, config, checkpoint = rank.assignment, rank.config, rank.checkpoint
        slots, max_len = assignment.num_slots, init.max_model_len
        self.table = SlotTable(
            *(slots, assignment.block_size, init.num_blocks, max_len),
            leaves_rows_out=not (config.sim_rigid or init.whole_steps),
        )
        chunk, volume = assignment.max_num_batched_tokens, config.sim_max_volume
        self._rigid = RigidShapes(self.table, chunk, volume) if config.sim_rigid else None
        vocab_size = checkpoint.vocab_size
        self.oracle = Oracle(slots, assignment.block_size, max_len, vocab_size, full_check, kv)
        self._logits = Logits(vocab_size, checkpoint.eos_token_ids)
        self.sampler = SimSampler(self._logits, self.oracle)
        speculation = assignment.speculation
        self.drafts = DeviceDrafts(slots, speculation.num_speculative_tokens if speculation else 0)
        longest = speculation.max_model_len if speculation else 0
        self.drafter = SimDrafter(config.sim_draft_acceptance, longest, self.sampler, self.oracle, self.drafts)
        # In float64 the sums are equal in any order
        self._pooler = Pooler(slots, HIDDEN_SIZE, lambda *shape: np.zeros(shape))
        self._pending = PendingStep[StepOutput]()
        self._masks = MaskInbox(steps_in_flight(assignment.pipeline_parallel_size), device.clock)
        """On the last stage."""

    def add_masks(self, grammar: GrammarOutput) -> None:
        """Take masks of a launched step, as `ModelRunner.add_masks`. Other stages sample nothing."""
        if self._rank.is_last_stage:
            self._masks.put(grammar)

    def end_masks(self) -> None:
        """End a wait for masks with RanksLost. May be called from any thread."""
        self._masks.close()

    def close(self) -> None:
        """End the waits of steps in flight for masks and for other ranks, with RanksLost. Messages of such a step or of
        a failed one may be incomplete, so the connections end as well."""
        self._masks.close()
        if self._rank.exchange is not None and not self.device.is_idle:
            self._rank.exchange.ranks.abort()
        self.oracle.kv = self.oracle.kv.copy()  # a step that is still computed leaves the memory alone

    # -- the forward pass ----------------------------------------------------------------------------------------

    def execute(self, step: SchedulerOutput) -> None:
        """Apply a plan and launch its forward pass, as `ModelRunner.execute_model`."""
        self._pending.require_none()
        if step.num_speculative_tokens > self.drafts.most:
            raise PlanError(
                f"{step.num_speculative_tokens} drafts per row are planned, but at most {self.drafts.most} were agreed"
            )
        rank, device = self._rank, self.device
        inject_faults(rank.config, step)
        rows = self.table.apply(step)
        padded = None if self._rigid is None else self._rigid.pad(step, rows)
        self._masks.prepared(step.step_id, rows.slots)
        # Memory of this step alone: it may run when later plans have changed the table.
        width = -(-int(rows.ends.max(initial=0)) // self.table.block_size)
        blocks, acceptance = self.table.block_table[rows.slots, :width], DraftAcceptance(rows, self.table)
        logprobs = StepLogprobs.from_rows(rows, self.table) if rank.is_output else None
        pooled = self._pooler.rows(rows, self.table) if rank.is_output else None

        received, hashes = ReceivedInputs(), np.empty(0, np.uint64)
        leaving: Activations | None = None

        def inputs() -> float:
            nonlocal received
            if rank.exchange is not None:
                received = rank.exchange.receive_inputs(step, rows)
            return received.available_at

        def forward() -> None:
            nonlocal hashes, leaving
            self._take_inputs(step, received)
            hashes, leaving = self._forward(rows, blocks, received.activations, acceptance)
            if pooled is not None:
                self._pool(rows, pooled)

        costly = rows if padded is None else padded.padded
        seconds = rank.cost.step(costly, self.table.num_prompt[rows.slots]) if len(rows.slots) else 0.0
        prepared = time.monotonic()
        event = device.launch(forward, seconds, no_inputs if rank.exchange is None else inputs)
        self._exchange(lambda others: others.send_activations(step, rows, hashes, leaving, event.ended))
        self._pending.put(step.step_id, StepOutput(step, prepared, event, event, acceptance, padded, logprobs, pooled))

    def _exchange(self, send: "Callable[[GroupExchange], None]") -> SimEvent | None:
        """Exchange results with other ranks, if there are any, on the device. Return the event behind it.

        Raises: the error of work that was done so far. Without other ranks it is raised with the result.
        """
        if self._rank.exchange is None:
            return None
        exchanged = self.device.launch(partial(send, self._rank.exchange), 0.0)
        self.device.settle()
        return exchanged

    def _take_inputs(self, step: SchedulerOutput, received: ReceivedInputs) -> None:
        """Store new requests and feedback. Runs on the device."""
        for request in step.new:
            self.oracle.enter(request.slot, unpack(request.token_ids))
        for late in received.feedback:
            self.oracle.confirm(late.slots, late.firsts, late.counts, late.token_ids)
            self.drafts.put(late.step_id, late.slots, late.firsts + late.counts, late.drafts)

    def _forward(
        self, rows: Rows, blocks: I32, arrived: Activations | None, acceptance: DraftAcceptance
    ) -> tuple[U64, Activations | None]:
        """Execute the planned rows, whose block tables are int32[rows, blocks]. Return the hash of each row's sequence,
        and what the next stage gets. Runs on the device."""
        known = rows.counts - rows.drafts
        starts, drafts = self._settle(rows, known, arrived)
        acceptance.begin(starts + known, drafts)
        batch = replace(rows, starts=starts, counts=known + drafts)
        hashes = self.oracle.forward(batch, blocks, arrived)
        return hashes, None if self._rank.is_last_stage else self.oracle.activations(batch, drafts)

    def _pool(self, rows: Rows, pooled: PooledRows) -> None:
        """Take the hidden states of the tokens that `pooled` needs. Runs on the device."""
        owners, positions = spread(rows.starts, rows.counts)
        slots, ends = rows.slots[owners[pooled.tokens]], positions[pooled.tokens] + 1
        pooled.take(hidden_states(self.oracle.chain[slots, ends]).astype(np.float64))

    def _settle(self, rows: Rows, known: I32, arrived: Activations | None) -> tuple[I32, I32]:
        """Return the true position at which each row starts and the number of its drafts, which become input.

        A middle stage receives both from the stage before. The last stage receives them too, and compares them with its
        own.

        Args:
            rows: planned.
            known: int32[rows], tokens of each row beside drafts.

        Raises: OracleError
        """
        oracle, slots = self.oracle, rows.slots
        if arrived is not None and not self._rank.is_last_stage:
            oracle.rewind(slots, arrived.starts)
            return arrived.starts, arrived.drafts
        starts = oracle.starts(slots, rows.starts)
        counts, tokens = self.drafts.take(slots, starts + known, rows.drafts)
        if len(tokens):
            owners, positions = spread(starts + known, counts)
            oracle.append(slots[owners], positions, tokens)
        if arrived is not None and (wrong := (starts != arrived.starts) | (counts != arrived.drafts)).any():
            i = int(wrong.argmax())
            raise OracleError(
                f"true position: slot {slots[i]} starts at {starts[i]} with {counts[i]} drafts, but on the stage "
                f"before at {arrived.starts[i]} with {arrived.drafts[i]}"
            )
        return starts, counts

    # -- sampling ------------------------------------------------------------------------------------------------

    def sample(self) -> StepOutput:
        """Sample the executed step, as `ModelRunner.sample_tokens`."""
        executed, rank, device = self._pending.take(), self._rank, self.device
        step, acceptance = executed.step, executed.acceptance
        if not rank.is_last_stage:
            return executed
        masks = TakenMasks([], frozenset(), 0.0)

        def take_masks() -> float:
            nonlocal masks
            masks = self._take_masks(step, Forward(executed.forward.began, executed.forward.ended))
            return masks.at

        def sample() -> None:
            acceptance.run(self.sampler, self.oracle, joined(masks.parts), masks.left_out)
            if executed.logprobs is not None:
                executed.logprobs.compute(self._logits, self.oracle, acceptance)

        if len(step.masked):
            device.wait_for_masks(take_masks)
        sampled = device.launch(sample, 0.0)
        drafts = np.full((len(acceptance.slots), step.num_speculative_tokens), NO_DRAFT, np.int32)
        drafted = sampled
        if drafts.size:
            seconds = rank.cost.drafts(step.num_speculative_tokens)
            drafted = device.launch(lambda: self.drafter.propose(step.step_id, acceptance, drafts), seconds)
        exchanged = self._exchange(lambda others: others.send_sampled(step, acceptance, drafts, drafted.ended))
        output = replace(executed, ended=sampled, exchanged=exchanged, is_reported=rank.is_output)
        if step.has_structured_output_requests:  # otherwise no result waits for the drafter
            output = replace(output, ended=drafted, drafts=drafts)
        return output

    def _take_masks(self, step: SchedulerOutput, forward: Forward) -> TakenMasks:
        """Wait for the masks of a step with constrained rows as long as nobody else is held back (left-out row;
        docs/invariants.md). The output rank decides, by its own modelled timeline, which rows are left out; the others
        of the last stage receive its decision.

        Raises: RanksLost
        """
        masked, exchange = unpack(step.masked), self._rank.exchange
        if self._rank.is_output:
            taken = self._masks.take(step.step_id, masked, forward)
            if exchange is not None:
                exchange.send_left_out(step, taken)
            return taken
        assert exchange is not None, "the only rank is the output rank"
        decided = exchange.receive_left_out(step)
        sampled = masked[~np.isin(masked, [*decided.left_out])]
        return decided._replace(parts=self._masks.take(step.step_id, sampled, ENDLESS).parts)
