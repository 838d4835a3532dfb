"""Sampling of one step: what the host knows is snapshot at launch, what the device holds is read when it samples."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from protocol.codec import unpack
from protocol.steps import GrammarOutput
from services.worker.backends.sim.hashing import U64
from services.worker.backends.sim.inputs import StepInputs
from services.worker.backends.sim.logits import Logits
from services.worker.batch import I32, Rows, SlotTable
from services.worker.sampling import GREEDY_BELOW, RowParams, apply_bitmask, forbid, sample_row

Banned = dict[int, tuple[int, ...]]
"""Row among the sampled ones -> ids it must not sample."""


def banned(rows: Rows, table: SlotTable) -> Banned:
    """A snapshot: the table may have moved on when the device samples."""
    sampled = rows.samples
    slots, positions = rows.slots[sampled], rows.ends[sampled]
    short = np.flatnonzero(positions < table.banned_until[slots])
    return {i: table.banned[slots[i]] for i in short.tolist()}


@dataclass(frozen=True)
class Sampler:
    """Of one epoch; `inputs` are the device's columns."""

    logits: Logits
    inputs: StepInputs

    def prepare(
        self, rows: Rows, hashes: U64, forbidden: Banned, grammar: GrammarOutput | None
    ) -> Callable[[], I32]:
        """The work that samples a step, int32[sampled rows], for the device to run when `hashes` are there."""
        sampled = np.flatnonzero(rows.samples)
        slots, positions = rows.slots[sampled], rows.ends[sampled]
        masks = self._masks(slots, grammar)
        return lambda: self._sample(hashes[sampled], sampled, positions, forbidden, masks)

    def _masks(self, slots: I32, grammar: GrammarOutput | None) -> dict[int, I32]:
        """Row among the sampled ones -> its grammar bitmask."""
        if grammar is None:
            return {}
        words = unpack(grammar.bitmask).reshape(-1, -(-self.logits.vocab_size // 32))
        row_of = {slot: row for row, slot in enumerate(slots.tolist())}
        constrained = unpack(grammar.slots).tolist()
        return {row_of[s]: mask for s, mask in zip(constrained, words, strict=True) if s in row_of}

    def _sample(
        self, hashes: U64, rows: NDArray[np.int64], positions: I32, forbidden: Banned, masks: dict[int, I32]
    ) -> I32:
        """Full logits rows only where the top token alone does not decide."""
        ids, inputs = self.logits.top(hashes), self.inputs
        needs_row = inputs.temperature[rows] >= GREEDY_BELOW
        needs_row[[i for i, tokens in forbidden.items() if ids[i] in tokens]] = True
        needs_row[list(masks)] = True
        for i in np.flatnonzero(needs_row).tolist():
            logits, row = self.logits.rows(hashes[i : i + 1])[0], rows[i]
            forbid(logits, forbidden.get(i, ()))
            if i in masks:
                apply_bitmask(logits, masks[i])
            ids[i] = sample_row(logits, RowParams(
                float(inputs.temperature[row]), float(inputs.top_p[row]), int(inputs.top_k[row]),
                float(inputs.min_p[row]), int(inputs.seed[row]), int(positions[i]),
            ))  # fmt: skip
        return ids
