"""The steps in flight, at most `depth`, and their results in the order of dispatch. Tokens are not its business."""

from collections import deque

from protocol.steps import ModelRunnerOutput
from services.scheduler.core.ledger import InflightStep


class BatchQueue:
    """Queue of the run-ahead loop. Depth 1 is the synchronous engine, depth 2 runs one step ahead."""

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.steps: deque[InflightStep] = deque()
        self.results: dict[int, ModelRunnerOutput] = {}
        """step_id -> result that arrived before that of an older step."""

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def full(self) -> bool:
        return len(self.steps) >= self.depth

    @property
    def unmasked(self) -> list[InflightStep]:
        """Steps whose masks have not all been sent, in order."""
        return [step for step in self.steps if step.unmasked]

    def deliver(self, result: ModelRunnerOutput) -> bool:
        """Match a result to its step by id (identity matching). Return False if no such step is in flight."""
        steps, step_id = self.steps, result.step_id  # without gaps
        known = bool(steps) and steps[0].step_id <= step_id <= steps[-1].step_id and step_id not in self.results
        if known:
            self.results[step_id] = result
        return known

    def pop(self) -> tuple[InflightStep, ModelRunnerOutput] | None:
        """Remove the oldest step, if its result has arrived."""
        if not self.steps or self.steps[0].step_id not in self.results:
            return None
        step = self.steps.popleft()
        return step, self.results.pop(step.step_id)

    def clear(self) -> None:
        self.steps.clear()
        self.results.clear()
