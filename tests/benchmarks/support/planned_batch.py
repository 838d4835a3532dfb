"""A batch of requests of equal length, whose steps are planned here, without a scheduler: prefill once, then decode."""

from collections import deque
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from protocol.sampling import SamplingParams
from protocol.steps import ModelRunnerOutput, NewRequest, SchedulerOutput
from services.worker.runner import Output

BLOCK_SIZE = 16
I32 = NDArray[np.int32]
Params = Callable[[int], SamplingParams]
"""Parameters of the request in a slot."""


def greedy(slot: int) -> SamplingParams:
    return SamplingParams(max_tokens=1 << 20, temperature=0.0)


class PlannedBatch:
    """A subclass computes the steps.

    Args:
        batch: number of requests, each in a slot.
        context: tokens of a request's blocks. With drafts, each step takes as many as if all were accepted.
        budget: tokens of the largest step.
        drafts: number of drafts of a row.
    """

    def __init__(self, batch: int, context: int, budget: int, drafts: int = 0) -> None:
        self.batch, self._budget, self._drafts = batch, budget, drafts
        each = -(-context // BLOCK_SIZE)
        self.num_blocks = batch * each
        self._blocks = np.arange(self.num_blocks, dtype=np.int32).reshape(batch, each)
        self._steps = self._length = self._generation = 0
        self._flying: deque[Output] = deque()

    def launch(self, plan: SchedulerOutput) -> Output:
        """Launch the forward pass and the sampling of a step."""
        raise NotImplementedError

    def release(self, slots: I32) -> None:
        raise NotImplementedError

    def prefill(self, prompts: I32, params: Params = greedy) -> list[ModelRunnerOutput]:
        """Compute `prompts`, int32[batch, tokens], one step after the other, as many whole prompts in each as fit.
        Requests of an earlier prefill have ended."""
        if self._generation:
            self.release(np.arange(self.batch, dtype=np.int32))
        self._generation += 1
        self._length = prompts.shape[1]
        together = max(1, self._budget // self._length)
        results = []
        for first in range(0, self.batch, together):
            slots = range(first, min(first + together, self.batch))
            new = [
                NewRequest(
                    slot, self._generation, prompts[slot].tobytes(), self._length, self._blocks[slot].tobytes(),
                    params(slot),
                )
                for slot in slots
            ]  # fmt: skip
            results += self._launched(self._plan(slots, 0, self._length, new), depth=1)
        return results

    def decode(self, steps: int, depth: int) -> list[ModelRunnerOutput]:
        """Compute a token of every request in each step, with `depth` steps in flight. Return their results; ranks that
        do not sample have none."""
        results: list[ModelRunnerOutput] = []
        for _ in range(steps):
            plan = self._plan(range(self.batch), self._length, 1, [], self._drafts)
            self._length += 1 + self._drafts
            results += self._launched(plan, depth)
        while self._flying:
            results += self._oldest()
        return results

    def _plan(self, slots: range, start: int, count: int, new: list[NewRequest], drafts: int = 0) -> SchedulerOutput:
        self._steps += 1
        rows = np.array(slots, np.int32)
        columns = (np.full_like(rows, each).tobytes() for each in (self._generation, start, count + drafts))
        return SchedulerOutput(
            *(1, self._steps, rows.tobytes(), *columns, b"\x01" * len(rows), new),
            drafts=np.full_like(rows, drafts).tobytes() if drafts else b"",
            num_speculative_tokens=self._drafts,
        )

    def _launched(self, plan: SchedulerOutput, depth: int) -> list[ModelRunnerOutput]:
        """Launch a step; return the result of the oldest one, if `depth` steps are in flight."""
        self._flying.append(self.launch(plan))
        return self._oldest() if len(self._flying) >= depth else []

    def _oldest(self) -> list[ModelRunnerOutput]:
        result = self._flying.popleft().get()
        return [result] if isinstance(result, ModelRunnerOutput) else []
