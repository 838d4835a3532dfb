"""Everything of a rank that lives one epoch: the device, the batch, the oracle, and the steps that use them."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from protocol.codec import unpack
from protocol.membership import Assignment, InitializeCache
from protocol.rows import EmbeddingRows, LogprobRows
from protocol.steps import NO_DRAFT, GrammarOutput, SchedulerOutput
from services.config import WorkerConfig
from services.worker.backends.mask_inbox import ENDLESS, Forward, MaskInbox
from services.worker.backends.pending_step import PendingStep
from services.worker.backends.sim.checkpoint import SimCheckpoint
from services.worker.backends.sim.cost import CostModel
from services.worker.backends.sim.device.columns import StepColumns
from services.worker.backends.sim.device.rigid import RigidShapes
from services.worker.backends.sim.device.simulated import SimDevice, SimEvent, no_inputs
from services.worker.backends.sim.faults import inject_faults
from services.worker.backends.sim.model.hashing import U64
from services.worker.backends.sim.model.hidden_states import HiddenSums
from services.worker.backends.sim.model.logits import Logits
from services.worker.backends.sim.model.oracle import Activations, DeviceRows, Oracle, OracleError, spread
from services.worker.backends.sim.output.embeddings import StepEmbeddings
from services.worker.backends.sim.output.logprobs import StepLogprobs
from services.worker.backends.sim.output.step_output import StepOutput
from services.worker.backends.sim.ranks.exchange import LeftOut, RankExchange, ReceivedInputs
from services.worker.backends.sim.sampling.acceptance import DraftAcceptance
from services.worker.backends.sim.sampling.device_drafts import DeviceDrafts
from services.worker.backends.sim.sampling.drafter import SimDrafter
from services.worker.backends.sim.sampling.row_rules import RulesByRow, rules_by_row
from services.worker.backends.sim.sampling.sampler import SimSampler
from services.worker.backends.sim.sampling.step_masks import StepMasks
from services.worker.batch.slots import I32, PlanError, Rows, SlotTable
from services.worker.batch.staging import MAX_STEPS_IN_FLIGHT, HostRing


@dataclass(frozen=True)
class LoadedRank:
    """The result of `load`: a rank that has joined its group."""

    config: WorkerConfig
    assignment: Assignment
    checkpoint: SimCheckpoint
    cost: CostModel
    exchange: RankExchange

    @property
    def is_single(self) -> bool:
        """True on the only rank of a group: it waits for nobody's inputs."""
        return self.assignment.world_size == 1

    @property
    def is_last_stage(self) -> bool:
        shard = self.assignment.shard
        return shard.pp_rank + 1 == shard.pipeline_parallel_size

    @property
    def is_output(self) -> bool:
        """True on the rank that reports results."""
        return self.assignment.rank == self.assignment.output_rank


@dataclass(frozen=True)
class _ExecutedSimStep:
    """A step between its forward pass and its sampling."""

    step: SchedulerOutput
    output: StepOutput
    """Without results so far."""
    acceptance: DraftAcceptance
    rules: RulesByRow
    logprobs: StepLogprobs | None
    embeddings: StepEmbeddings | None
    """On the output rank, if a row requests them; likewise `logprobs`."""


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
        max_blocks = self.table.block_table.shape[1]
        in_flight = max(MAX_STEPS_IN_FLIGHT, 2 * assignment.pipeline_parallel_size)
        self.ring = HostRing(lambda: StepColumns(slots, max_blocks), in_flight + 1)
        self.columns = StepColumns(slots, max_blocks)
        """On the device."""
        vocab_size = checkpoint.vocab_size
        self.oracle = Oracle(slots, init.num_blocks, assignment.block_size, max_len, vocab_size, full_check, kv)
        self._logits = Logits(vocab_size, checkpoint.eos_token_ids)
        self.sampler = SimSampler(self._logits, self.columns, self.oracle)
        speculation = assignment.speculation
        self.drafts = DeviceDrafts(slots, speculation.num_speculative_tokens if speculation else 0)
        longest = speculation.max_model_len if speculation else 0
        self.drafter = SimDrafter(
            config.sim_draft_acceptance, longest, self.sampler, self.oracle, self.columns, self.drafts
        )
        self._hidden_sums = HiddenSums(slots)
        self._pending = PendingStep[_ExecutedSimStep]()
        self._masks = MaskInbox(in_flight, device.clock)
        """On the last stage."""

    def release(self, slots: NDArray[np.int32]) -> None:
        self.table.release(slots)

    def add_masks(self, grammar: GrammarOutput) -> None:
        """Take masks of a launched step, as `ModelRunner.add_masks`. Other stages sample nothing."""
        if self._rank.is_last_stage:
            self._masks.put(grammar)

    def end_masks(self) -> None:
        """End a wait for masks with RanksLost. May be called from any thread."""
        self._masks.close()

    def close(self) -> None:
        self._masks.close()
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
        self._stage(rows)
        n = len(rows.slots)
        # Memory of this step alone: a copy may still read that of the steps before.
        hashes, acceptance = np.empty(n, np.uint64), DraftAcceptance(rows)
        leaving = None if rank.is_last_stage else Activations.empty(int(rows.counts.sum()), n)

        received = ReceivedInputs()

        def inputs() -> float:
            nonlocal received
            received = rank.exchange.receive_inputs(step, rows)
            return received.available_at

        def forward() -> None:
            self._take_inputs(step, received)
            hashes[:] = self._forward(n, received.activations, acceptance, leaving)

        def send() -> None:
            rank.exchange.send_activations(step, rows, hashes, leaving, event.ended)

        costly = rows if padded is None else padded.padded
        seconds = rank.cost.step(costly, self.table.num_prompt[rows.slots]) if n else 0.0
        prepared = time.monotonic()
        event = device.launch(forward, seconds, no_inputs if rank.is_single else inputs)
        self._exchange(send)
        output = StepOutput(step, prepared, event, event, padded)
        rules = rules_by_row(rows, self.table)
        executed = _ExecutedSimStep(step, output, acceptance, rules, *self._requested_outputs(rows))
        self._pending.put(step.step_id, executed)

    def _stage(self, rows: Rows) -> None:
        """Enqueue the copies of the step's columns to the device."""
        n, width = len(rows.slots), -(-int(rows.ends.max(initial=0)) // self.table.block_size)
        staged = self.ring.acquire()
        staged.fill(rows, self.table, width)
        staged.copy_to(self.device, self.columns, n, width)
        self.ring.release(self.device.record())

    def _exchange(self, send: Callable[[], None]) -> SimEvent | None:
        """Exchange results with other ranks, if there are any, on the device. Return the event behind it.

        Raises: the error of work that was done so far. Without other ranks it is raised with the result.
        """
        if self._rank.is_single:
            return None
        exchanged = self.device.launch(send, 0.0)
        self.device.settle()
        return exchanged

    def _requested_outputs(self, rows: Rows) -> tuple[StepLogprobs | None, StepEmbeddings | None]:
        if not self._rank.is_output:
            return None, None
        vocab_size = self._rank.checkpoint.vocab_size
        logprobs = StepLogprobs.from_rows(rows, self.table, vocab_size)
        return logprobs, StepEmbeddings.from_rows(rows, self.table)

    def _take_inputs(self, step: SchedulerOutput, received: ReceivedInputs) -> None:
        """Store new requests and feedback. Runs on the device."""
        for request in step.new:
            self.oracle.enter(request.slot, unpack(request.token_ids))
            self.drafts.clear(request.slot)
        for late in received.feedback:
            self.oracle.confirm(late.slots, late.firsts, late.counts, late.token_ids)
            self.drafts.put(late.step_id, late.slots, late.firsts + late.counts, late.drafts)

    def _forward(
        self, n: int, arrived: Activations | None, acceptance: DraftAcceptance, leaving: Activations | None
    ) -> NDArray[np.uint64]:
        """Execute the `n` rows of the device's columns. Return the hash of each row's sequence. Runs on the device."""
        columns = self.columns
        slots, planned, planned_drafts = columns.slots[:n], columns.counts[:n], columns.drafts[:n]
        known = planned - planned_drafts
        starts, drafts = self._settle(slots, columns.starts[:n], known, planned_drafts, arrived)
        acceptance.begin(starts + known, drafts)
        batch = DeviceRows(slots, starts, known + drafts, columns.block_table[:n])
        hashes = self.oracle.forward(batch, arrived)
        if leaving is not None:
            leaving.starts[:], leaving.drafts[:] = starts, drafts
            self.oracle.activations(batch, leaving)
        return hashes

    def _settle(
        self, slots: I32, planned: I32, known: I32, planned_drafts: I32, arrived: Activations | None
    ) -> tuple[I32, I32]:
        """Return the true position at which each row starts and the number of its drafts, which become input.

        A middle stage receives both from the stage before. The last stage receives them too, and compares them with its
        own.

        Args:
            planned: int32[rows], planned starts.
            known: int32[rows], tokens of each row beside drafts.
            planned_drafts: int32[rows].

        Raises: OracleError
        """
        oracle = self.oracle
        if arrived is not None and not self._rank.is_last_stage:
            oracle.rewind(slots, arrived.starts)
            return arrived.starts, arrived.drafts
        starts = oracle.starts(slots, planned)
        counts, tokens = self.drafts.take(slots, starts + known, planned_drafts)
        if len(tokens):
            rows, positions = spread(starts + known, counts)
            oracle.append(slots[rows], positions, tokens)
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
        step, output, acceptance = executed.step, executed.output, executed.acceptance
        if not rank.is_last_stage:
            return output
        slots, masks = acceptance.slots, StepMasks()

        def take_masks() -> float:
            nonlocal masks
            masks, at = self._take_masks(step, slots, Forward(output.forward.began, output.forward.ended))
            return at

        if len(step.masked):
            device.wait_for_masks(take_masks)
        device.launch(lambda: self._sample(executed, masks), 0.0)
        tokens, copied = acceptance.copy_out(device)
        logprobs: LogprobRows | None = None
        embeddings: EmbeddingRows | None = None
        if executed.logprobs is not None:
            logprobs, copied = executed.logprobs.copy_out(device)
        if executed.embeddings is not None:
            embeddings, copied = executed.embeddings.copy_out(device)
        proposed, drafted = self._propose(executed)
        drafts: I32 | None = None
        # Without a grammar no result waits for the drafter
        if step.has_structured_output_requests and proposed.size:
            drafts, copied = device.copy_out(proposed)
        return replace(
            output,
            copied=copied,
            exchanged=self._exchange(lambda: rank.exchange.send_sampled(step, acceptance, proposed, drafted.ended)),
            sampled=tokens if rank.is_output else None,
            logprobs=logprobs,
            embeddings=embeddings,
            drafts=drafts,
        )

    def _take_masks(self, step: SchedulerOutput, slots: I32, forward: Forward) -> tuple[StepMasks, float]:
        """Wait for the masks of a step with constrained rows as long as nobody else is held back (left-out row;
        docs/invariants.md). The output rank decides, by its own modelled timeline, which rows are left out; the others
        of the last stage receive its decision.

        Args:
            slots: int32[sampled rows]

        Returns: the masks, and when it was decided to sample with these.

        Raises: RanksLost
        """
        masked, exchange = unpack(step.masked), self._rank.exchange
        if self._rank.is_output:
            taken = self._masks.take(step.step_id, masked, forward)
            decision = LeftOut(np.isin(masked, [*taken.left_out]), taken.at)
            exchange.send_left_out(step, decision)
        else:
            decision = exchange.receive_left_out(step)
            taken = self._masks.take(step.step_id, masked[~decision.left_out], ENDLESS)
        left_out = frozenset(masked[decision.left_out].tolist())
        return StepMasks.from_messages(taken.parts, slots, self._rank.checkpoint.vocab_size, left_out), decision.at

    def _sample(self, executed: _ExecutedSimStep, masks: StepMasks) -> None:
        """Sample, then fill in what rows request beside tokens. Runs on the device."""
        executed.acceptance.run(self.sampler, self.oracle, executed.rules, masks)
        if executed.logprobs is not None:
            executed.logprobs.compute(self._logits, self.oracle, executed.acceptance)
        if executed.embeddings is not None:
            executed.embeddings.compute(self.oracle, self._hidden_sums)

    def _propose(self, executed: _ExecutedSimStep) -> tuple[I32, SimEvent]:
        """Launch the drafter. Return int32[sampled rows, requested] drafts on the device, and the event behind it."""
        step, acceptance = executed.step, executed.acceptance
        requested = step.num_speculative_tokens
        tokens = np.full((len(acceptance.slots), requested), NO_DRAFT, np.int32)
        if not tokens.size:
            return tokens, self.device.record()

        def propose() -> None:
            self.drafter.propose(step.step_id, acceptance, executed.rules, tokens)

        return tokens, self.device.launch(propose, self._rank.cost.drafts(requested))
