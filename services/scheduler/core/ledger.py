"""What is in flight: one FIFO of dispatched steps. Every counter about promised work is a sum over it (spec 0.2)."""

from collections import deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from services.scheduler.core.slots import Column, Rows, SlotTable


@dataclass(frozen=True, slots=True)
class InflightStep:
    """One dispatched step; columns with a row per scheduled request."""

    step_id: int
    slots: Rows
    generations: Column
    starts: Column
    counts: Column
    samples: NDArray[np.bool_]
    """Rows that must return a token; decided when scheduled and obeyed by the worker."""
    drafts: Column
    """How many of `counts` are drafts."""
    proposes: int = 0
    """Drafts that it proposes for each row that samples."""


class Ledger:
    """Adds and removes entries, and keeps their sums in the slots: `inflight` (F), `placeholders` (H), `sampling`."""

    def __init__(self, slots: SlotTable) -> None:
        self._slots = slots
        self.steps: deque[InflightStep] = deque()
        self.newest: InflightStep | None = None
        """The step dispatched last, in flight or not."""

    def add(self, step: InflightStep) -> None:
        self.steps.append(step)
        self.newest = step
        s, rows = self._slots, step.slots
        s.computed[rows] = step.starts + step.counts
        s.inflight[rows] = s.inflight.take(rows) + step.counts
        s.placeholders[rows] = s.placeholders.take(rows) + step.samples + step.drafts
        s.sampling[rows] = s.sampling.take(rows) + step.samples
        s.last_step[rows] = step.step_id
        sampling = rows[step.samples]
        s.sampled_step[sampling] = step.step_id
        s.proposed[sampling] = step.proposes

    def remove_oldest(self) -> InflightStep:
        step = self.steps.popleft()
        s, rows, counts, samples, drafts = self._slots, step.slots, step.counts, step.samples, step.drafts
        current = self.current(step)
        if not current.all():
            rows, counts, samples, drafts = rows[current], counts[current], samples[current], drafts[current]
        s.inflight[rows] = s.inflight.take(rows) - counts
        s.placeholders[rows] = s.placeholders.take(rows) - samples - drafts
        s.sampling[rows] = s.sampling.take(rows) - samples
        return step

    def current(self, step: InflightStep) -> NDArray[np.bool_]:
        """bool[rows]: entries of their slot's present generation. The others count for nothing (spec 0.2)."""
        return step.generations == self._slots.generation.take(step.slots)

    def roll_back(self, slot: int, frontier: int) -> None:
        """What is in flight for the slot was formed from a wrong start: it counts for nothing, and the slot goes on
        from `frontier` with its blocks (spec 0.7)."""
        s = self._slots
        s.generation[slot] += 1
        s.inflight[slot] = s.placeholders[slot] = s.sampling[slot] = 0
        s.computed[slot] = frontier

    @property
    def oldest(self) -> int:
        """Id of the oldest step in flight; without any, one that no slot's fence can reach."""
        return self.steps[0].step_id if self.steps else np.iinfo(np.int64).max

    def names(self, slot: int) -> bool:
        """Whether a step in flight names the slot."""
        return bool(self._slots.last_step[slot] >= self.oldest)
