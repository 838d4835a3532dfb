"""The steps in flight, at most `depth`, and their results in the order of dispatch. Tokens are not its business."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from protocol.steps import ModelRunnerOutput
from services.scheduler.core.ledger import InflightStep
from services.scheduler.core.slots import Mask, SlotColumns, SlotIds


@dataclass(eq=False, slots=True)
class UnmaskedStep:
    """A step in flight and its rows whose masks have not been sent."""

    step: InflightStep
    rows: dict[int, int]
    """Slot -> row of the step, in plan order."""


class BatchQueue:
    """Queue of the run-ahead loop. Depth 1 is the synchronous engine, depth 2 runs one step ahead."""

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.steps: deque[InflightStep] = deque()
        self.results: dict[int, ModelRunnerOutput] = {}
        """step_id -> result that arrived before that of an older step."""
        self.unmasked: deque[UnmaskedStep] = deque()
        """Steps whose masks have not all been sent (deferred sampling), in order."""

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def full(self) -> bool:
        return len(self.steps) >= self.depth

    def push(self, step: InflightStep, masked: SlotIds | None = None) -> None:
        """Append a step. `masked`: slots of its rows that need masks."""
        self.steps.append(step)
        if masked is not None and len(masked):
            row_of = {slot: row for row, slot in enumerate(step.slots.tolist())}
            self.unmasked.append(UnmaskedStep(step, {slot: row_of[slot] for slot in masked.tolist()}))

    def unmasked_steps(self, slots: SlotColumns) -> Iterator[tuple[UnmaskedStep, Mask]]:
        """Yield the steps with unsent masks, in order, each with bool[slots]: whether an earlier step in flight samples
        for the slot's present generation."""
        if not self.unmasked:
            return
        waiting, sampled = deque(self.unmasked), np.zeros(slots.num_slots, np.bool_)
        for step in self.steps:
            if waiting and waiting[0].step is step:
                yield waiting.popleft(), sampled
            sampled[step.slots[step.samples & (step.generations == slots.generation.take(step.slots))]] = True

    def deliver(self, result: ModelRunnerOutput) -> bool:
        """Match a result to its step by id (identity matching). Return False if no such step is in flight."""
        known = any(step.step_id == result.step_id for step in self.steps) and result.step_id not in self.results
        if known:
            self.results[result.step_id] = result
        return known

    def pop(self) -> tuple[InflightStep, ModelRunnerOutput] | None:
        """Remove the oldest step, if its result has arrived."""
        if not self.steps or self.steps[0].step_id not in self.results:
            return None
        step = self.steps.popleft()
        if self.unmasked and self.unmasked[0].step is step:
            self.unmasked.popleft()
        return step, self.results.pop(step.step_id)

    def clear(self) -> None:
        self.steps.clear()
        self.results.clear()
        self.unmasked.clear()
