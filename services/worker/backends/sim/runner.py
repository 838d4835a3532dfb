"""The simulator behind `ModelRunner`: it computes nothing, verifies everything, and takes the time it is told to."""

import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from protocol.codec import unpack
from protocol.membership import Assignment, InitializeCache, Loaded
from protocol.steps import GrammarOutput, SchedulerOutput
from services.config import WorkerConfig
from services.worker.backends.sim.checkpoint import Facts
from services.worker.backends.sim.cost import CostModel
from services.worker.backends.sim.device import Device, Event, SimDevice
from services.worker.backends.sim.extras import HIDDEN_SIZE, Copied, Extras, HiddenSums, extras
from services.worker.backends.sim.inputs import StepInputs
from services.worker.backends.sim.logits import Logits
from services.worker.backends.sim.oracle import Activations, Batch, Oracle
from services.worker.backends.sim.output import StepOutput
from services.worker.backends.sim.place import Alone, Place
from services.worker.backends.sim.rigid import Reach, Rigid, Shape, as_scheduled
from services.worker.backends.sim.sampler import Sampler, Wishes, wishes
from services.worker.backends.sim.trace import StepTrace
from services.worker.batch import Rows, SlotTable
from services.worker.runner import Identity, LoadError, Progress
from services.worker.staging import MAX_STEPS_IN_FLIGHT, HostRing

DEFAULT_BLOCKS = 16384
"""Unless `kv_cache_memory_bytes` says it; a block costs its hashes only."""
HASH_BYTES = 8


@dataclass(frozen=True)
class _Pending:
    """A step between its forward pass and its sampling; `hashes` is device memory of this step alone."""

    step: SchedulerOutput
    rows: Rows
    hashes: NDArray[np.uint64]
    wishes: Wishes
    extras: Extras | None
    """On the rank that reports the step."""
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
        self._pending: _Pending | None = None
        self._device: Device | None = None

    def identify(self) -> Identity:
        return Identity(Facts.of(self._config).digest, "float32", (1, 2, 4, 8, 16, 32), 64)

    def load(
        self, assignment: Assignment, progress: Progress, listener: socket.socket | None = None
    ) -> Loaded:
        self._facts = Facts.of(self._config)
        self._assignment = assignment
        wanted, limit = assignment.max_model_len, self._facts.max_model_len
        if wanted > limit:
            raise LoadError(
                f"max_model_len {wanted} is more than the {limit} positions of the model; lower --max-model-len"
            )
        limit = wanted or limit
        bytes_per_block = assignment.block_size * HASH_BYTES
        blocks = self._config.kv_cache_memory_bytes // bytes_per_block
        if not self._config.kv_cache_memory_bytes:
            blocks = max(DEFAULT_BLOCKS, -(-limit // assignment.block_size) + 1)
        if blocks < 1:
            raise LoadError(
                f"--kv-cache-memory-bytes holds no KV block; one takes {bytes_per_block}: raise it"
            )
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
        from services.worker.ranks import Ranks

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
        self._hidden_sums = HiddenSums(slots)

    # -- a step --------------------------------------------------------------------------------------------------

    def execute_model(self, step: SchedulerOutput) -> None:
        if self._pending is not None:
            raise RuntimeError(f"step {self._pending.step.step_id} was executed but never sampled")
        device, oracle = self._ready(), self._oracle
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
        hashes = np.empty(n, np.uint64)
        leaving = None if self._is_last else Activations.empty(int(rows.counts.sum()))

        def forward() -> None:
            for request in step.new:
                oracle.enter(request.slot, unpack(request.token_ids))
            for late in arrived.feedback:
                oracle.append(late.slots, late.positions, late.token_ids)
            i = self._inputs
            batch = Batch(i.slots[:n], i.starts[:n], i.counts[:n], i.block_table[:n])
            hashes[:] = oracle.forward(batch, arrived.activations)
            if leaving is not None:
                leaving.tokens[:], leaving.hashes[:] = oracle.activations(batch)

        seconds = self._cost.step(padded, self._table.num_prompt[rows.slots]) if n else 0.0
        event = device.launch(forward, seconds, arrived.at)
        self._place.forwarded(device, step, rows, hashes, leaving, event.ended)
        more = extras(rows, self._table, self._facts.vocab_size) if self._is_output else None
        self._pending = _Pending(step, rows, hashes, wishes(rows, self._table), more, event, shape)

    def sample_tokens(self, grammar: GrammarOutput | None) -> StepOutput:
        pending, self._pending = self._pending, None
        if pending is None:
            raise RuntimeError("no step was executed that could be sampled")
        step, rows, forward = pending.step, pending.rows, pending.forward
        if not self._is_last:
            return StepOutput(step, rows, None, forward, forward, self._trace, pending.shape)
        if step.has_structured_output_requests and (grammar is None or grammar.step_id != step.step_id):
            raise RuntimeError(f"step {step.step_id} needs its own grammar bitmask to be sampled")
        device, slots, positions = self._ready(), rows.slots[rows.samples], rows.ends[rows.samples]
        work, more = self._sampler.prepare(rows, pending.hashes, pending.wishes, grammar), pending.extras
        ids = np.empty(len(slots), np.int32)  # this step's own: its copy may end after the next step (S3-8)

        def sample() -> None:
            ids[:] = work()
            self._oracle.append(slots, positions, ids)
            if more is not None:
                more.compute(self._logits, self._oracle, self._hidden_sums, ids)

        event = device.launch(sample, 0.0)
        self._place.sampled(device, step, rows, ids, event.ended)
        host_ids, copied = device.copy_out(ids)
        host_extras: Copied | None = None
        if more is not None:
            host_extras, copied = more.copy_out(device)
        reported = host_ids if self._is_output else None
        return StepOutput(step, rows, reported, forward, copied, self._trace, pending.shape, host_extras)

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
        self._pending = None
        if self._device is not None:
            self._device.close()
            self._device = None

    def _ready(self) -> Device:
        if self._device is None:
            raise RuntimeError("init_kv_cache must come before the first step")
        return self._device
