"""The steps in flight, at most `depth`, and their results in the order of dispatch. It knows nothing about tokens."""

from collections import deque

from protocol.steps import ModelRunnerOutput
from services.scheduler.core.ledger import InflightStep


class BatchQueue:
    """Depth 1 is the synchronous engine, 2 runs one step ahead; the same code at every depth (spec 0.4)."""

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self._steps: deque[InflightStep] = deque()
        self._results: dict[int, ModelRunnerOutput] = {}

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def full(self) -> bool:
        return len(self._steps) >= self.depth

    def push(self, step: InflightStep) -> None:
        self._steps.append(step)

    def deliver(self, result: ModelRunnerOutput) -> bool:
        """Matches a result to its step by id, never by arrival (spec 0.4 L4). False: no such step is in flight."""
        known = (
            any(step.step_id == result.step_id for step in self._steps)
            and result.step_id not in self._results
        )
        if known:
            self._results[result.step_id] = result
        return known

    def pop(self) -> tuple[InflightStep, ModelRunnerOutput] | None:
        """The oldest step, if its result is here."""
        if not self._steps or self._steps[0].step_id not in self._results:
            return None
        step = self._steps.popleft()
        return step, self._results.pop(step.step_id)

    def clear(self) -> None:
        self._steps.clear()
        self._results.clear()
