"""Prepare, compute, publish: the three stages of a step, each on a thread of its own.

    main thread        prepare: unpack the plan and check it against the batch
      │  PreparedStep
    compute thread     compute: settle positions, lay out, forward pass, sampling, drafts
      │  Output
    output thread      publish: pack the result and send it (services/worker/result_sender.py)

So step N+1 is unpacked, checked and ready while step N computes, and the result of step N-1 is sent meanwhile.

**State that crosses threads**, all of it:

- `PreparedStep`, from main to compute. It has the plan's message and read-only views of its bytes, nothing else, so no
  later plan changes it (host-buffer rule, docs/invariants.md): there is no buffer to rewrite.
- `MaskInbox`, from main to compute: messages with grammar masks, and which rows the prepared steps have.
- `NativeResult`, from compute to publish: arrays of its own, and views of the plan's message (immutable result).
- `NativeStages.end_masks` and `Ranks.abort`, called by any thread.

Everything else has one owner. The main thread has the `SlotTable`, which checks plans. The compute thread has
`NativeEpoch`: columns of its own that it changes by the same plans at the step's turn, token history, drafts, rules of
the sampler, KV cache, buffers, and the messages between ranks. Input tokens and, with drafts or grammars, true
positions are known only when the step before has sampled, so rows are laid out there, just before the forward pass.
"""

import logging
import time
from collections import deque
from concurrent.futures import Future, wait
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from protocol.rows import StepRows
from protocol.steps import GrammarOutput, ModelRunnerOutput, SchedulerOutput, StepTimes
from services.worker.backends.mask_inbox import MaskInbox
from services.worker.backends.native.compute_thread import ComputeThread
from services.worker.backends.native.epoch import NativeEpoch
from services.worker.backends.native.step import ComputedStep, NativeResult, PreparedStep
from services.worker.backends.pending_step import PendingStep
from services.worker.batch.slots import SlotTable
from services.worker.distributed.ranks import Ranks
from services.worker.kernels.interface.recording import Captured
from services.worker.runner import ForwardDone

log = logging.getLogger("runahead.worker")

STEPS_PREPARED = 2
"""Maximum number of steps that are prepared while another one computes."""


@dataclass(frozen=True)
class NativeOutput:
    """An `Output` whose step is computed by another thread."""

    is_done = False
    result: Future[NativeResult | ForwardDone]

    def get(self) -> ModelRunnerOutput | StepTimes:
        return self.result.result().get()


class NativeStages:
    """The first stage, and the thread of the second, in one epoch. For one calling thread.

    Args:
        epoch: used by the compute thread from now on
    """

    def __init__(self, table: SlotTable, epoch: NativeEpoch, ranks: Ranks) -> None:
        self.table, self._epoch, self._ranks = table, epoch, ranks
        self._thread = ComputeThread(epoch.device.working)
        self._masks = MaskInbox(STEPS_PREPARED)
        self._pending = PendingStep[Future[ComputedStep]]()
        self._released: list[NDArray[np.int32]] = []
        """Slots released since the last step."""
        self._forwards: deque[Future[ComputedStep]] = deque()
        """Steps that are prepared or computed, in order."""
        self._last: Future[ComputedStep] | Future[NativeResult | ForwardDone] | None = None

    @property
    def computed_epoch(self) -> NativeEpoch:
        """The state of the compute thread, when it has computed everything that it was given.

        Raises: the error of the last forward pass or sampling
        """
        if self._last is not None:
            self._last.result()
        return self._epoch

    def capture(self, progress: Captured) -> int:
        """Prepare the sizes of steps that are replayed, on the compute thread. Before the first step.

        Returns: bytes of device memory that this takes.
        """
        epoch = self._epoch
        return self._thread.submit(lambda: epoch.capture(progress)).result()

    def execute(self, step: SchedulerOutput) -> None:
        """Prepare a step and hand it to the compute thread; see `ModelRunner.execute_model`."""
        self._pending.require_none()
        while self._forwards and (self._forwards[0].done() or len(self._forwards) > STEPS_PREPARED):
            wait([self._forwards.popleft()])
        prepared, epoch = self._prepare(step), self._epoch
        self._masks.prepared(step.step_id, prepared.plan.rows.slots)
        forward = self._thread.submit(lambda: epoch.execute(prepared))
        self._forwards.append(forward)
        self._last = forward
        self._pending.put(step.step_id, forward)

    def _prepare(self, step: SchedulerOutput) -> PreparedStep:
        plan = StepRows.from_message(step)
        self.table.apply_plan(plan, step.new)
        released, self._released = self._released, []
        return PreparedStep(step, plan, released, time.monotonic())

    def sample(self) -> NativeOutput:
        """Sample the step that is pending, on the compute thread; see `ModelRunner.sample_tokens`."""
        forward, epoch, masks = self._pending.take(), self._epoch, self._masks
        result = self._thread.submit(lambda: epoch.sample(forward.result(), masks))
        self._last = result
        return NativeOutput(result)

    def add_masks(self, grammar: GrammarOutput) -> None:
        """Pass masks to the compute thread; see `ModelRunner.add_masks`. Other ranks sample nothing."""
        if self._ranks.is_output:
            self._masks.put(grammar)

    def release(self, slots: NDArray[np.int32]) -> None:
        """Free slots whose requests have left. Their columns are freed before the next step is computed."""
        self.table.release(slots)
        self._released.append(slots.copy())

    def end_masks(self) -> None:
        """End a wait for masks with RanksLost. May be called from any thread."""
        self._masks.close()

    def close(self) -> bool:
        """End the compute thread. A wait for other ranks is aborted, and steps that were not begun are not computed.

        After a step in flight or a failed one the connections end as well, as its messages may be incomplete.

        Returns: False, if the step in computation did not end."""
        self._masks.close()
        incomplete = self._last is not None and (not self._last.done() or self._last.exception() is not None)
        if incomplete and self._ranks.assignment.world_size > 1:
            self._ranks.abort()
        ended = self._thread.close()
        if not ended:
            log.error("the step in computation did not end; its thread is left behind")
        return ended
