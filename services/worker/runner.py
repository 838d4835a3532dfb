"""The interface between services and compute: a backend is a class with the methods of `ModelRunner`.

The service calls them on one thread, in this order: `identify`; in each epoch `load`, `init_kv_cache`, then per step
`execute_model` and `sample_tokens`, with `release` between steps and `add_masks` at any time, and `leave` at the end of
the epoch; `shutdown` at the end of the process. A canary step at start-up goes through the same calls. `Output.get`
runs on the output thread unless the output is done, and `abort` on any thread.
"""

import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from protocol.fields import MAX_TEXT
from protocol.membership import Assignment, InitializeCache, Loaded, RankLost, Shard
from protocol.steps import GrammarOutput, ModelRunnerOutput, SchedulerOutput, StepTimes
from services.worker.kv_memory import KVMemory

MAX_STEPS_IN_FLIGHT = 8
"""The deepest batch queue that can be configured without pipeline stages."""
Progress = Callable[[str, float], None]
"""Called with the name of a phase and a fraction from 0 to 1 while loading."""


@dataclass(frozen=True)
class Identity:
    """A model's properties that are known without its weights; fields of `protocol.membership.Register`."""

    model_hash: str
    dtype: str
    tensor_parallel_sizes: tuple[int, ...] = (1,)
    """Sizes to which the model can be cut, in ascending order."""
    max_pipeline_parallel_size: int = 1
    tokenizer: str = ""
    """Digest of tokenizer.json beside the weights; "": there is none."""
    leaves_rows_out: bool = False
    """True: rows without masks do not hold back the others (left-out row, docs/invariants.md)."""
    waits_for_masks: bool = True
    """True: `sample_tokens` is called at once and without a grammar, and another thread of the runner waits for the
    masks of `add_masks`. False: the runner computes on the calling thread, which waits for masks (step_queue.py);
    `sample_tokens` leaves out the constrained rows without masks in its grammar."""
    single_rank: str = ""
    """Reason why the worker can only be the single rank of a group; "": it may have others."""
    serves_loras: bool = False


SINGLE_GPU = (
    "a worker on a GPU is the only rank of its group so far: ranks on GPUs would exchange through NCCL, which was not "
    "run yet; use 1 for both, or workers with --device cpu"
)
"""`Identity.single_rank` of workers on GPUs."""


class Output(Protocol):
    """An asynchronous result (docs/invariants.md): the sampled ids may still be on their way to the host."""

    @property
    def is_done(self) -> bool:
        """True: the sampled ids are on the host, and `get` waits for nothing."""

    def get(self) -> ModelRunnerOutput | StepTimes:
        """Wait, without spinning, for the host copy. No later step changes the result (immutable result).

        Return `StepTimes` on other ranks than the output rank: their part of the step has ended, and the output rank
        returns the result. The caller sets `received`, `sent`, `idle`, `plan_wait` and `forward_gap`, and
        takes the wait for the plan out of `prepared_wait`.
        """


@dataclass(frozen=True)
class ForwardDone:
    """The `Output` of a rank other than the output rank, after its part of the step has ended."""

    is_done = True
    times: StepTimes

    def get(self) -> StepTimes:
        return self.times


class ModelRunner(Protocol):
    kv_memory: KVMemory
    """Memory of the KV cache. The runner begins and takes it; one that keeps no cache for the next epoch does not."""

    @property
    def shard(self) -> Shard | None:
        """The shard that `load` reads fastest: its weights are in memory, or were read last. None: all are equal."""

    def identify(self) -> Identity:
        """Read the checkpoint's configuration, but not its weights.

        Raises:
            LoadError or CheckpointError: the model cannot be served.
        """

    def load(self, assignment: Assignment, progress: Progress, listener: socket.socket | None = None) -> Loaded:
        """Join the other ranks, and read this rank's weights unless they are in memory from an earlier epoch.

        Args:
            listener: the socket that this worker registered with; the runner owns it now
                (services.worker.distributed.ranks).

        Raises:
            LoadError or CheckpointError: the model cannot be served.
            RanksLost: the other ranks cannot be reached.
        """

    def init_kv_cache(self, init: InitializeCache) -> None:
        """Allocate `num_blocks` blocks of `Assignment.block_size` tokens.

        Raises:
            RanksLost: another rank has gone or `abort` was called.
        """

    def execute_model(self, step: SchedulerOutput) -> None:
        """Apply the plan to the batch and launch the forward pass. The logits stay on the device.

        Raises:
            RuntimeError: the previous step was executed but not sampled (single pending state).
            RanksLost: another rank has gone or `abort` was called.
        """

    def sample_tokens(self, grammar: GrammarOutput | None) -> Output:
        """Sample the rows with `samples`. The ids stay in their slots for the next step, and are copied to the host.

        Raises:
            RanksLost: another rank has gone or `abort` was called.
        """

    def add_masks(self, grammar: GrammarOutput) -> None:
        """Take masks of a launched step, which may have been sampled without them. Called only for a runner that waits
        for masks itself (`Identity`)."""

    def end_masks(self) -> None:
        """The worker leaves, and takes no more masks: a step that waits for some ends with RanksLost."""

    def release(self, slots: NDArray[np.int32]) -> None:
        """Empty slots whose request has left, without a step."""

    def leave(self) -> None:
        """End the epoch: drop batch, cache and process groups, and keep the weights. Wait for no other rank."""

    def abort(self) -> None:
        """End a call that hangs in a collective with RanksLost, if possible. May be called from any thread."""

    def shutdown(self) -> None: ...


def steps_in_flight(stages: int) -> int:
    """Return the largest number of steps that a scheduler has launched at once."""
    return max(MAX_STEPS_IN_FLIGHT, 2 * stages)


class RanksLost(RuntimeError):
    """Another rank of the group has gone or is slower than the deadline. The epoch is over; this worker is healthy."""


class OutOfMemory(Exception):
    """A step did not fit into memory. The epoch is over; this worker is healthy, and its weights are still loaded."""

    def __init__(self, step_id: int, error: BaseException) -> None:
        super().__init__(f"step {step_id} ran out of memory: {error}")
        self.step_id = step_id

    def message(self, epoch: int) -> RankLost:
        """Return what the scheduler is sent."""
        return RankLost(epoch, str(self)[:MAX_TEXT], out_of_memory=True, step_id=self.step_id)


_MEMORY_TEXTS = ("out of memory", "can't allocate memory", "bad_alloc")
"""Parts of the texts of torch's errors on CPUs and on CUDA."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error of a step says that memory was missing. Backends raise errors of several libraries."""
    text = str(error).lower()
    return isinstance(error, MemoryError) or any(part in text for part in _MEMORY_TEXTS)


class LoadError(Exception):
    """A model that cannot be served. The text is one line: what is wrong and what to do."""
