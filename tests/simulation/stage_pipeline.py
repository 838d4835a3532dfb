"""Pipeline stages under the control of a test."""

from collections import deque
from collections.abc import Collection


class StagePipeline:
    """Progress of pipeline stages. Each runs the steps in order, one per tick. Ids sampled by the last stage have
    reached the first one when the next tick begins."""

    def __init__(self, stages: int) -> None:
        self.ran = [0] * stages
        """The last step of each stage."""
        self.stalls = 0
        """Ticks in which the first stage had a step but lacked a sampled id."""
        self._waiting: deque[int] = deque()
        """For each step that no stage has run: the step whose ids it needs."""
        self._results: deque[bytes] = deque()

    def enter(self, needs: int) -> None:
        self._waiting.append(needs)

    def sampled(self, result: bytes) -> None:
        """Store the result of the oldest step without one; the last stage can then finish the step."""
        self._results.append(result)

    @property
    def busy(self) -> bool:
        """Return whether a step has a result that has not left the last stage."""
        return bool(self._results)

    def tick(self, running: Collection[int] | None = None) -> bytes | None:
        """Let all stages, or those in `running`, run their next step. Return the result that leaves the last stage, if
        any; a step that waits for its grammar masks stays before the last stage."""
        last, before = len(self.ran) - 1, list(self.ran)
        for stage in range(len(self.ran)) if running is None else running:
            if stage:
                able = stage < last or bool(self._results)
                self.ran[stage] += able and before[stage - 1] > before[stage]
            elif self._waiting and self._waiting[0] <= before[last]:
                self._waiting.popleft()
                self.ran[0] += 1
            else:
                self.stalls += bool(self._waiting)
        return self._results.popleft() if self.ran[last] > before[last] else None

    def take_results(self) -> list[bytes]:
        """Return the results of all steps in the pipeline, and empty it."""
        results = list(self._results)
        self._results.clear()
        self._waiting.clear()
        return results
