"""The simulator behind `ModelRunner`: it computes nothing, verifies everything, and takes the time it is told to."""

import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from protocol.codec import unpack
from protocol.membership import Assignment, InitializeCache, Loaded
from protocol.steps import NO_DRAFT, GrammarOutput, SchedulerOutput
from services.config import WorkerConfig
from services.worker.backends.kv_blocks import affordable_blocks, context_limit
from services.worker.backends.pending_step import PendingStep, own_grammar
from services.worker.backends.sim.acceptance import Acceptance
from services.worker.backends.sim.checkpoint import Facts
from services.worker.backends.sim.cost import CostModel
from services.worker.backends.sim.device import Device, Event, SimDevice
from services.worker.backends.sim.drafter import Drafter, Drafts, Proposed
from services.worker.backends.sim.extras import HIDDEN_SIZE, Copied, Extras, HiddenSums, extras
from services.worker.backends.sim.inputs import StepInputs
from services.worker.backends.sim.logits import Logits
from services.worker.backends.sim.oracle import Activations, Batch, Oracle, OracleError, spread
from services.worker.backends.sim.output import StepOutput
from services.worker.backends.sim.place import Alone, Place
from services.worker.backends.sim.rigid import Reach, Rigid, Shape, as_scheduled
from services.worker.backends.sim.sampler import Masks, Sampler, Wishes, wishes
from services.worker.backends.sim.trace import StepTrace
from services.worker.batch.slots import I32, PlanError, Rows, SlotTable
from services.worker.batch.staging import MAX_STEPS_IN_FLIGHT, HostRing
from services.worker.runner import Identity, LoadError, Progress

DEFAULT_BLOCKS = 16384
"""Unless `kv_cache_memory_bytes` says it; a block costs its hashes only."""
HASH_BYTES = 8


@dataclass(frozen=True)
class _ExecutedStep:
    """A step between its forward pass and its sampling."""

    step: SchedulerOutput
    rows: Rows
    acceptance: Acceptance
    wishes: Wishes
    extras: Extras | None
    """On the rank that reports the step."""
    prepared: float
    """Seconds on the monotonic clock: the step was ready to be launched."""
    forward: Event
    shape: Shape | None


class SimRunner:
    """A `ModelRunner` on a simulated asynchronous device.

    Args:
        make_device: another device, for tests.
        full_check: every row reads its whole context in every step; slow.
        reach: how far a rigid device comes in its chunks, for tests; the same on all ranks.
    """

    def __init__(
        self,
        config: WorkerConfig,
        make_device: Callable[[], Device] = SimDevice,
        full_check: bool = False,
        reach: Reach = as_scheduled,
    ) -> None:
        self._config = config
        self._make_device, self._full_check = make_device, full_check
        self._reach = reach
        self._place: Place = Alone()
        self._pending = PendingStep[_ExecutedStep]()
        self._device: Device | None = None

    def identify(self) -> Identity:
        return Identity(Facts.of(self._config).digest, "float32", (1, 2, 4, 8, 16, 32), 64)

    def load(
        self, assignment: Assignment, progress: Progress, listener: socket.socket | None = None
    ) -> Loaded:
        if assignment.speculation and self._config.sim_rigid:
            raise LoadError("a rigid device has no room for drafts: speculate without --sim-rigid")
        self._facts = Facts.of(self._config)
        self._assignment = assignment
        limit = context_limit(assignment.max_model_len, self._facts.max_model_len)
        bytes_per_block = assignment.block_size * HASH_BYTES
        budget = self._config.kv_cache_memory_bytes
        if budget:
            blocks = affordable_blocks(budget, bytes_per_block)
        else:
            blocks = max(DEFAULT_BLOCKS, -(-limit // assignment.block_size) + 1)
        self._take_place(listener)
        progress("simulated model", 1.0)
        return Loaded(
            model_hash=self._facts.digest,
            vocab_size=self._facts.vocab_size,
            max_model_len=limit,
            bytes_per_block=bytes_per_block,
            num_blocks=blocks,
            simulated=True,
            hidden_size=HIDDEN_SIZE,
            epoch=assignment.epoch,
        )

    def _take_place(self, listener: socket.socket | None) -> None:
        """Raises: RanksLost"""
        assignment, path = self._assignment, self._config.sim_trace
        shard = assignment.shard
        self._num_stages = shard.pipeline_parallel_size
        self._is_last = shard.pp_rank + 1 == self._num_stages
        self._is_output = assignment.rank == assignment.output_rank
        self._trace = StepTrace(Path(path), shard.pp_rank) if path and not shard.tp_rank else None
        self._cost = CostModel(self._config, self._num_stages)
        if assignment.world_size == 1:
            self._place = Alone()
            if listener is not None:
                listener.close()
            return
        # torch takes seconds to import that a single rank does not need
        from services.worker.backends.sim.stage import Stage
        from services.worker.distributed.ranks import Ranks

        self._place = stage = Stage(Ranks(assignment, listener), self._cost, assignment.num_slots)
        stage.join()

    def init_kv_cache(self, init: InitializeCache) -> None:
        slots, block_size = self._assignment.num_slots, self._assignment.block_size
        vocab_size, max_len = self._facts.vocab_size, init.max_model_len
        self._stop()
        self._device = self._make_device()
        self._table = SlotTable(slots, block_size, init.num_blocks, max_len)
        chunk, volume = self._assignment.max_num_batched_tokens, self._config.sim_max_volume
        self._rigid = Rigid(self._table, chunk, volume, self._reach) if self._config.sim_rigid else None
        max_blocks = self._table.block_table.shape[1]
        in_flight = max(MAX_STEPS_IN_FLIGHT, 2 * self._num_stages)
        self._ring = HostRing(lambda: StepInputs(slots, max_blocks), in_flight + 1)
        self._inputs = StepInputs(slots, max_blocks)
        self._oracle = Oracle(slots, init.num_blocks, block_size, max_len, vocab_size, self._full_check)
        self._logits = Logits(vocab_size, self._facts.eos_token_ids)
        self._sampler = Sampler(self._logits, self._inputs, self._oracle)
        how = self._assignment.speculation
        self._most_drafts = how.num_speculative_tokens if how else 0
        self._drafts = Drafts(slots, self._most_drafts)
        self._drafter = Drafter(
            self._config.sim_draft_acceptance,
            how.max_model_len if how else 0,
            self._sampler,
            self._oracle,
            self._inputs,
            self._drafts,
        )
        self._hidden_sums = HiddenSums(slots)

    # -- a step --------------------------------------------------------------------------------------------------

    def execute_model(self, step: SchedulerOutput) -> None:
        self._pending.require_none()
        if step.num_speculative_tokens > self._most_drafts:
            raise PlanError(
                f"{step.num_speculative_tokens} drafts are asked for, of {self._most_drafts} at most"
            )
        device, oracle, drafts = self._ready(), self._oracle, self._drafts
        rows = padded = self._table.apply(step)
        shape = None if self._rigid is None else self._rigid.shape(step, rows)
        if shape is not None:
            rows, padded = shape.rows, shape.padded
        arrived = self._place.arrive(step, rows)
        n, width = len(rows.slots), -(-int(rows.ends.max(initial=0)) // self._table.block_size)
        staged = self._ring.acquire()
        staged.fill(rows, self._table, width)
        staged.copy_to(device, self._inputs, n, width)
        self._ring.release(device.record())
        hashes, acceptance = np.empty(n, np.uint64), Acceptance(rows)  # this step's own (S3-8)
        leaving = None if self._is_last else Activations.empty(int(rows.counts.sum()), n)

        def forward() -> None:
            for request in step.new:
                oracle.enter(request.slot, unpack(request.token_ids))
                drafts.forget(request.slot)
            for late in arrived.feedback:
                oracle.confirm(late.slots, late.firsts, late.counts, late.token_ids)
                drafts.put(late.step_id, late.slots, late.firsts + late.counts, late.drafts)
            i = self._inputs
            slots, planned, wanted = i.slots[:n], i.counts[:n], i.drafts[:n]
            starts, counts = self._settled(slots, i.starts[:n], planned - wanted, wanted, arrived.activations)
            acceptance.begin(starts + planned - wanted, counts)
            batch = Batch(slots, starts, planned - wanted + counts, i.block_table[:n])
            hashes[:] = oracle.forward(batch, arrived.activations)
            if leaving is not None:
                leaving.starts[:], leaving.drafts[:] = starts, counts
                oracle.activations(batch, leaving)

        seconds = self._cost.step(padded, self._table.num_prompt[rows.slots]) if n else 0.0
        prepared = time.monotonic()
        event = device.launch(forward, seconds, arrived.at)
        self._place.forwarded(device, step, rows, hashes, leaving, event.ended)
        more = extras(rows, self._table, self._facts.vocab_size) if self._is_output else None
        asked = wishes(rows, self._table)
        self._pending.put(_ExecutedStep(step, rows, acceptance, asked, more, prepared, event, shape))

    def _settled(
        self, slots: I32, planned: I32, known: I32, wanted: I32, arrived: Activations | None
    ) -> tuple[I32, I32]:
        """int32[rows] each: where rows really start and how many drafts they have, which are input then. A stage in the
        middle is told both; the last one is, too, and knows.

        Args:
            planned, known, wanted: where rows are planned to start, with how many tokens beside drafts and how many
                drafts

        Raises: OracleError
        """
        oracle = self._oracle
        if arrived is not None and not self._is_last:
            oracle.rewind(slots, arrived.starts)
            return arrived.starts, arrived.drafts
        starts = oracle.starts(slots, planned)
        counts, tokens = self._drafts.take(slots, starts + known, wanted)
        if len(tokens):
            at, positions = spread(starts + known, counts)
            oracle.append(slots[at], positions, tokens)
        if arrived is not None and (wrong := (starts != arrived.starts) | (counts != arrived.drafts)).any():
            i = int(wrong.argmax())
            raise OracleError(
                f"slot {slots[i]}: a row starts at {starts[i]} with {counts[i]} drafts, but on the stage before at "
                f"{arrived.starts[i]} with {arrived.drafts[i]} (S2-5, S2-6)"
            )
        return starts, counts

    def sample_tokens(self, grammar: GrammarOutput | None) -> StepOutput:
        pending = self._pending.take()
        step, rows, forward = pending.step, pending.rows, pending.forward
        if not self._is_last:
            return StepOutput(
                step, rows, None, pending.prepared, forward, forward, self._trace, pending.shape
            )
        grammar = own_grammar(step, grammar)
        device, sampled, more = self._ready(), pending.acceptance, pending.extras
        masks = Masks.read(grammar, sampled.slots, self._facts.vocab_size)

        def sample() -> None:
            sampled.run(self._sampler, self._oracle, pending.wishes, masks)
            if more is not None:
                more.compute(self._logits, self._oracle, self._hidden_sums, sampled)

        device.launch(sample, 0.0)
        tokens, copied = sampled.copy_out(device)
        host_extras: Copied | None = None
        if more is not None:
            host_extras, copied = more.copy_out(device)
        proposed, ended = self._propose(step, sampled, pending.wishes)
        drafts: I32 | None = None
        if step.has_structured_output_requests and proposed.size:  # else no result waits for the drafter
            drafts, copied = device.copy_out(proposed)
        self._place.sampled(device, step, sampled, proposed, ended)
        reported = tokens if self._is_output else None
        return StepOutput(
            step,
            rows,
            reported,
            pending.prepared,
            forward,
            copied,
            self._trace,
            pending.shape,
            host_extras,
            drafts,
        )

    def _propose(self, step: SchedulerOutput, sampled: Acceptance, wishes: Wishes) -> tuple[I32, float]:
        """int32[sampled rows, asked] drafts for the next step, on the device, and when they are there."""
        asked, device, drafter = step.num_speculative_tokens, self._ready(), self._drafter
        to = Proposed(step.step_id, sampled, wishes, np.full((len(sampled.slots), asked), NO_DRAFT, np.int32))
        if not to.tokens.size:
            return to.tokens, device.record().ended
        return to.tokens, device.launch(lambda: drafter.propose(to), self._cost.drafts(asked)).ended

    def release(self, slots: NDArray[np.int32]) -> None:
        self._table.release(slots)

    def leave(self) -> None:
        self._stop()
        self._place = Alone()

    def abort(self) -> None:
        self._place.abort()

    def shutdown(self) -> None:
        self.leave()

    def _stop(self) -> None:
        self._pending = PendingStep()
        if self._device is not None:
            self._device.close()
            self._device = None

    def _ready(self) -> Device:
        if self._device is None:
            raise RuntimeError("init_kv_cache must come before the first step")
        return self._device
