"""The seam between services and compute: a backend is a class with these methods and nothing else.

The service calls them from one thread, in this order: `load`, `init_kv_cache`, then per step `execute_model` and
`sample_tokens`, with `release` between steps, and `shutdown` at the end. A canary step at start-up goes through
the same two calls. `Output.get` alone runs on the output thread.
"""

from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from protocol.membership import Assignment, InitializeCache, Loaded
from protocol.steps import GrammarOutput, ModelRunnerOutput, SchedulerOutput

Progress = Callable[[str, float], None]
"""Called with a phase name and a fraction from 0 to 1 while loading."""


class Output(Protocol):
    """The result of a step whose sampled ids may still be on their way to the host (spec S3, rule 4)."""

    def get(self) -> ModelRunnerOutput:
        """Waits for the host copy, without spinning. Depends on nothing that a later step may change (S3-1)."""
        ...


class ModelRunner(Protocol):
    def load(self, assignment: Assignment, progress: Progress) -> Loaded:
        """Reads the weights of this rank.

        Raises:
            LoadError: the model cannot be served; the text says what to do.
        """
        ...

    def init_kv_cache(self, init: InitializeCache) -> None:
        """Allocates `num_blocks` blocks of `Assignment.block_size` tokens."""
        ...

    def execute_model(self, step: SchedulerOutput) -> None:
        """Applies what changed in the batch and launches the forward pass; the logits stay on the device.

        Raises:
            RuntimeError: the step before was executed but never sampled (S3-4).
        """
        ...

    def sample_tokens(self, grammar: GrammarOutput | None) -> Output:
        """Samples the rows with `samples`; the ids stay in their slots, where the next step finds them, and are
        copied to the host behind the returned handle."""
        ...

    def release(self, slots: NDArray[np.int32]) -> None:
        """Empties slots whose request left, when no step is there to say so."""
        ...

    def shutdown(self) -> None: ...


class LoadError(Exception):
    """A model that cannot be served; one line that says what is wrong and what to do."""
