"""The seam between services and compute: a backend is a class with these methods and nothing else.

The service calls them from one thread, in this order: `identify`, then in each epoch `load`, `init_kv_cache`, per step
`execute_model` and `sample_tokens` with `release` between steps, and `leave` when the epoch ends; `shutdown` at the end
of the process. A canary step at start-up goes through the same two calls. `Output.get` runs on the output thread, and
`abort` on any.
"""

import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from protocol.membership import Assignment, InitializeCache, Loaded
from protocol.steps import GrammarOutput, ModelRunnerOutput, SchedulerOutput, StepTimes

Progress = Callable[[str, float], None]
"""Called with a phase name and a fraction from 0 to 1 while loading."""


@dataclass(frozen=True)
class Identity:
    """What can be said of a model before its weights are read; the fields of `protocol.membership.Register`."""

    model_hash: str
    dtype: str
    tensor_parallel_sizes: tuple[int, ...] = (1,)
    """Sizes it can be cut to, in ascending order."""
    max_pipeline_parallel_size: int = 1


class Output(Protocol):
    """The result of a step whose sampled ids may still be on their way to the host (spec S3, rule 4)."""

    def get(self) -> ModelRunnerOutput | StepTimes:
        """Wait for the host copy, without spinning. Depends on nothing that a later step may change (S3-1).

        Returns `StepTimes` on a rank that is not the output rank: its part of the step has ended, another rank returns
        the result. `received`, `sent` and `idle` are left to the caller.
        """
        ...


@dataclass(frozen=True)
class Passed:
    """An `Output` of a rank that is not the output rank."""

    times: StepTimes

    def get(self) -> StepTimes:
        return self.times


class ModelRunner(Protocol):
    def identify(self) -> Identity:
        """Reads what the checkpoint says of itself, no weights.

        Raises:
            LoadError: the model cannot be served; the text says what to do.
        """
        ...

    def load(
        self, assignment: Assignment, progress: Progress, listener: socket.socket | None = None
    ) -> Loaded:
        """Joins the other ranks and reads the weights of this one, unless it has them from an epoch before.

        `listener` is the socket this worker registered with, taken over here (services.worker.distributed.ranks).

        Raises:
            LoadError: the model cannot be served; the text says what to do.
            RanksLost: the other ranks cannot be reached.
        """
        ...

    def init_kv_cache(self, init: InitializeCache) -> None:
        """Allocates `num_blocks` blocks of `Assignment.block_size` tokens."""
        ...

    def execute_model(self, step: SchedulerOutput) -> None:
        """Applies what changed in the batch and launches the forward pass; the logits stay on the device.

        Raises:
            RuntimeError: the step before was executed but never sampled (S3-4).
            RanksLost: another rank has gone or `abort` was called; also from `sample_tokens` and `init_kv_cache`.
        """
        ...

    def sample_tokens(self, grammar: GrammarOutput | None) -> Output:
        """Samples the rows with `samples`; the ids stay in their slots, where the next step finds them, and are
        copied to the host behind the returned handle."""
        ...

    def release(self, slots: NDArray[np.int32]) -> None:
        """Empties slots whose request left, when no step is there to say so."""
        ...

    def leave(self) -> None:
        """The epoch is over: forgets batch, cache and process groups, keeps the weights. Waits for nobody."""
        ...

    def abort(self) -> None:
        """From any thread: a call that hangs in a collective raises RanksLost soon, if that can be brought about."""
        ...

    def shutdown(self) -> None: ...


class RanksLost(RuntimeError):
    """Another rank of the group is gone, or slower than the deadline: this epoch is over, this worker is well."""


class LoadError(Exception):
    """A model that cannot be served; one line that says what is wrong and what to do."""
