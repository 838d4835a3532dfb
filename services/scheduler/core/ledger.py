"""The steps in flight. Every count of promised work is a sum over them (the ledger, docs/invariants.md)."""

from collections import deque
from dataclasses import dataclass

import numpy as np

from services.scheduler.core.slots import Column, Mask, SlotColumns, SlotIds


@dataclass(frozen=True, slots=True)
class InflightStep:
    """One dispatched step; columns with a row per scheduled request."""

    step_id: int
    slots: SlotIds
    generations: Column
    starts: Column
    counts: Column
    samples: Mask
    """Sampling rows; decided when the step is formed and followed by the worker."""
    drafts: Column
    """Number of drafts among `counts`."""
    proposes: int = 0
    """Number of drafts that the step proposes for each sampling row."""


class Ledger:
    """FIFO of steps in flight. Maintains the columns that are sums over it: `inflight`, `placeholders`, `sampling`."""

    def __init__(self, slots: SlotColumns) -> None:
        self._slots = slots
        self.steps: deque[InflightStep] = deque()
        self.newest: InflightStep | None = None
        """The step that was dispatched last, in flight or not."""

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

    def current(self, step: InflightStep) -> Mask:
        """bool[rows]: rows of their slot's present generation. Other rows count for nothing."""
        return step.generations == self._slots.generation.take(step.slots)

    def roll_back(self, slot: int, frontier: int) -> None:
        """Void everything in flight for the slot; it continues from position `frontier` with its blocks (rollback)."""
        s = self._slots
        s.generation[slot] += 1
        s.inflight[slot] = s.placeholders[slot] = s.sampling[slot] = 0
        s.computed[slot] = frontier

    @property
    def oldest(self) -> int:
        """Id of the oldest step in flight; with none in flight, an id greater than every fence."""
        return self.steps[0].step_id if self.steps else np.iinfo(np.int64).max

    def names(self, slot: int) -> bool:
        """Return whether a step in flight names the slot."""
        return bool(self._slots.last_step[slot] >= self.oldest)
