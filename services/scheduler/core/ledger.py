"""The promised work. Each of its counts is a sum over the steps in flight (the ledger, docs/invariants.md)."""

from msgspec import Struct

from protocol.columns import has_all
from services.scheduler.core.slots import Column, Mask, SlotColumns, SlotIds


class InflightStep(Struct, frozen=True, eq=False):
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
    num_tokens: int
    """Sum of `counts`."""
    proposes: int = 0
    """Number of drafts that the step proposes for each sampling row."""
    is_trial: bool = False
    """The step belongs to a trial of this number."""
    rests: bool = False
    """Speculation rests: the step proposes no drafts, and the drafter gets nothing of it."""
    unmasked: dict[int, int] = {}
    """Slot -> row, in plan order, of the constrained rows that sample and whose masks were not sent yet (deferred
    sampling). It shrinks while the step is in flight."""


class Ledger:
    """Maintains the columns that are sums over the steps in flight: `inflight`, `placeholders`, `sampling`."""

    def __init__(self, slots: SlotColumns) -> None:
        self._slots = slots
        self.oldest = 1
        """Id of the oldest step in flight; with none in flight, of the next step."""
        self.newest: InflightStep | None = None
        """The step that was dispatched last, in flight or not."""

    def add(self, step: InflightStep) -> None:
        self.newest = step
        s, rows = self._slots, step.slots
        s.computed[rows] = step.starts + step.counts
        s.inflight[rows] = s.inflight[rows] + step.counts
        s.placeholders[rows] = s.placeholders[rows] + step.samples + step.drafts
        s.sampling[rows] = s.sampling[rows] + step.samples
        s.last_step[rows] = step.step_id
        sampling = rows if has_all(step.samples) else rows[step.samples]
        s.sampled_step[sampling] = step.step_id
        s.proposed[sampling] = step.proposes

    def remove(self, step: InflightStep, current: Mask) -> None:
        """Remove the oldest step: it was processed. `current`: which of its rows are."""
        self.oldest = step.step_id + 1
        s, rows, counts, samples, drafts = self._slots, step.slots, step.counts, step.samples, step.drafts
        if not has_all(current):
            rows, counts, samples, drafts = rows[current], counts[current], samples[current], drafts[current]
        s.inflight[rows] = s.inflight[rows] - counts
        s.placeholders[rows] = s.placeholders[rows] - samples - drafts
        s.sampling[rows] = s.sampling[rows] - samples

    def current(self, step: InflightStep) -> Mask:
        """bool[rows]: rows of their slot's present generation. Other rows count for nothing."""
        return step.generations == self._slots.generation[step.slots]

    def roll_back(self, slot: int, frontier: int) -> None:
        """Void everything in flight for the slot; it continues from position `frontier` with its blocks (rollback)."""
        s = self._slots
        s.generation[slot] += 1
        s.inflight[slot] = s.placeholders[slot] = s.sampling[slot] = 0
        s.computed[slot] = frontier

    def names(self, slot: int) -> bool:
        """Return whether a step in flight names the slot."""
        return bool(self._slots.last_step[slot] >= self.oldest)
