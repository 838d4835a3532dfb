"""The simulator behind `ModelRunner`: it computes nothing, verifies everything, and takes the time it is told to."""

import socket
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from protocol.codec import unpack
from protocol.membership import Assignment, InitializeCache, Loaded
from protocol.steps import GrammarOutput, ModelRunnerOutput, SchedulerOutput
from services.config import WorkerConfig
from services.worker.backends.sim.checkpoint import Facts
from services.worker.backends.sim.device import Device, Event, SimDevice
from services.worker.backends.sim.inputs import StepInputs
from services.worker.backends.sim.logits import Logits
from services.worker.backends.sim.oracle import Batch, Oracle
from services.worker.batch import I32, Rows, SlotTable
from services.worker.runner import Identity, LoadError, Progress
from services.worker.sampling import GREEDY_BELOW, RowParams, apply_bitmask, forbid, sample_row
from services.worker.staging import HostRing

DEFAULT_BLOCKS = 16384
"""Unless `kv_cache_memory_bytes` says it; a block costs its hashes only."""
HASH_BYTES = 8


@dataclass(frozen=True)
class _Pending:
    """A step between its forward pass and its sampling; `hashes` is device memory of this step alone."""

    step: SchedulerOutput
    rows: Rows
    hashes: NDArray[np.uint64]
    banned: dict[int, tuple[int, ...]]
    """Row among the sampled ones -> ids it must not sample."""
    forward: Event


@dataclass(frozen=True)
class _Sampled:
    """An `Output`: the ids are on their way to the host. Everything it refers to is its own (S3-1, S3-8)."""

    step: SchedulerOutput
    rows: Rows
    ids: I32
    forward: Event
    copied: Event

    def get(self) -> ModelRunnerOutput:
        self.copied.synchronize()
        samples = self.rows.samples
        return ModelRunnerOutput(
            epoch=self.step.epoch,
            step_id=self.step.step_id,
            slots=self.rows.slots[samples].tobytes(),
            generations=self.rows.generations[samples].tobytes(),
            counts=np.ones(len(self.ids), np.int32).tobytes(),
            token_ids=self.ids.tobytes(),
            started=self.forward.began,
            ended=self.copied.ended,
        )


class SimRunner:
    """A `ModelRunner` on a simulated asynchronous device.

    Args:
        make_device: another device, for tests.
        full_check: every row reads its whole context in every step; slow.
    """

    def __init__(
        self, config: WorkerConfig, make_device: Callable[[], Device] = SimDevice, full_check: bool = False
    ) -> None:
        self._config = config
        self._make_device, self._full_check = make_device, full_check
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
        progress("simulated model", 1.0)
        return Loaded(
            model_hash=self._facts.digest,
            vocab_size=self._facts.vocab_size,
            max_model_len=limit,
            bytes_per_block=bytes_per_block,
            num_blocks=blocks,
            simulated=True,
        )

    def init_kv_cache(self, init: InitializeCache) -> None:
        slots, block_size = self._assignment.num_slots, self._assignment.block_size
        vocab_size, max_len = self._facts.vocab_size, init.max_model_len
        self.shutdown()
        self._device = self._make_device()
        self._table = SlotTable(slots, block_size, init.num_blocks, max_len)
        max_blocks = self._table.block_table.shape[1]
        self._ring = HostRing(lambda: StepInputs(slots, max_blocks))
        self._inputs = StepInputs(slots, max_blocks)
        self._oracle = Oracle(slots, init.num_blocks, block_size, max_len, vocab_size, self._full_check)
        self._logits = Logits(vocab_size, self._facts.eos_token_ids)

    # -- a step --------------------------------------------------------------------------------------------------

    def execute_model(self, step: SchedulerOutput) -> None:
        if self._pending is not None:
            raise RuntimeError(f"step {self._pending.step.step_id} was executed but never sampled")
        device, oracle = self._ready(), self._oracle
        rows = self._table.apply(step)
        n, width = len(rows.slots), -(-int(rows.ends.max(initial=0)) // self._table.block_size)
        staged = self._ring.acquire()
        staged.fill(rows, self._table, width)
        staged.copy_to(device, self._inputs, n, width)
        self._ring.release(device.record())
        hashes = np.empty(n, np.uint64)

        def forward() -> None:
            for request in step.new:
                oracle.enter(request.slot, unpack(request.token_ids))
            i = self._inputs
            hashes[:] = oracle.forward(Batch(i.slots[:n], i.starts[:n], i.counts[:n], i.block_table[:n]))

        event = device.launch(forward, self._seconds(rows))
        self._pending = _Pending(step, rows, hashes, self._banned(rows), event)

    def sample_tokens(self, grammar: GrammarOutput | None) -> _Sampled:
        pending, self._pending = self._pending, None
        if pending is None:
            raise RuntimeError("no step was executed that could be sampled")
        step, rows = pending.step, pending.rows
        if step.has_structured_output_requests and (grammar is None or grammar.step_id != step.step_id):
            raise RuntimeError(f"step {step.step_id} needs its own grammar bitmask to be sampled")
        device, sampled = self._ready(), np.flatnonzero(rows.samples)
        slots, positions = rows.slots[sampled], rows.ends[sampled]
        masks = self._masks(slots, grammar)
        ids = np.empty(len(sampled), np.int32)  # this step's own: its copy may end after the next step (S3-8)

        def sample() -> None:
            ids[:] = self._sample(pending.hashes[sampled], sampled, positions, pending.banned, masks)
            self._oracle.append(slots, positions, ids)

        device.launch(sample, 0.0)
        host_ids, copied = device.copy_out(ids)
        return _Sampled(step, rows, host_ids, pending.forward, copied)

    def release(self, slots: NDArray[np.int32]) -> None:
        self._table.release(slots)

    def leave(self) -> None:
        self.shutdown()

    def abort(self) -> None:
        """Nothing here waits for another rank."""

    def shutdown(self) -> None:
        self._pending = None
        if self._device is not None:
            self._device.close()
            self._device = None

    def _ready(self) -> Device:
        if self._device is None:
            raise RuntimeError("init_kv_cache must come before the first step")
        return self._device

    def _seconds(self, rows: Rows) -> float:
        """The cost model: a base, prompt tokens, decoding rows, and the context that attention reads."""
        c = self._config
        decodes = (rows.counts == 1) & (rows.starts >= self._table.num_prompt[rows.slots])
        decoding = int(decodes.sum())
        prefill = int(rows.counts.sum()) - decoding
        return (
            c.sim_step_ms * 1e-3
            + prefill * c.sim_prefill_token_us * 1e-6
            + decoding * c.sim_decode_us * 1e-6
            + int(rows.ends.sum()) * c.sim_context_token_ns * 1e-9
        )

    # -- sampling ------------------------------------------------------------------------------------------------

    def _banned(self, rows: Rows) -> dict[int, tuple[int, ...]]:
        """A snapshot: the table may have moved on when the device samples."""
        sampled = rows.samples
        slots, positions = rows.slots[sampled], rows.ends[sampled]
        short = np.flatnonzero(positions < self._table.banned_until[slots])
        return {i: self._table.banned[slots[i]] for i in short.tolist()}

    def _masks(self, slots: I32, grammar: GrammarOutput | None) -> dict[int, I32]:
        """Row among the sampled ones -> its grammar bitmask."""
        if grammar is None:
            return {}
        words = unpack(grammar.bitmask).reshape(-1, -(-self._facts.vocab_size // 32))
        row_of = {slot: row for row, slot in enumerate(slots.tolist())}
        constrained = unpack(grammar.slots).tolist()
        return {row_of[s]: mask for s, mask in zip(constrained, words, strict=True) if s in row_of}

    def _sample(
        self, hashes: NDArray[np.uint64], rows: NDArray[np.int64], positions: I32,
        banned: dict[int, tuple[int, ...]], masks: dict[int, I32],
    ) -> I32:  # fmt: skip
        """int32[sampled rows]; full logits rows only where the top token alone does not decide."""
        ids, inputs = self._logits.top(hashes), self._inputs
        needs_row = inputs.temperature[rows] >= GREEDY_BELOW
        needs_row[[i for i, forbidden in banned.items() if ids[i] in forbidden]] = True
        needs_row[list(masks)] = True
        for i in np.flatnonzero(needs_row).tolist():
            logits, row = self._logits.rows(hashes[i : i + 1])[0], rows[i]
            forbid(logits, banned.get(i, ()))
            if i in masks:
                apply_bitmask(logits, masks[i])
            ids[i] = sample_row(logits, RowParams(
                float(inputs.temperature[row]), float(inputs.top_p[row]), int(inputs.top_k[row]),
                float(inputs.min_p[row]), int(inputs.seed[row]), int(positions[i]),
            ))  # fmt: skip
        return ids
