"""Sampling of one step: what the host knows is snapshot at launch, what the device holds is read when it samples."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from protocol.codec import unpack
from protocol.sampling import SamplingParams
from protocol.steps import GrammarOutput
from services.worker.backends.sim.hashing import U64
from services.worker.backends.sim.inputs import StepInputs
from services.worker.backends.sim.logits import Logits
from services.worker.backends.sim.oracle import Oracle
from services.worker.batch import I32, Rows, SlotTable
from services.worker.sampling import GREEDY_BELOW, RowParams, allowed_by, sample_row, shaped


@dataclass(frozen=True)
class Wish:
    """What the request of a sampled row asks for beside the draw; a snapshot, for the table may have moved on when
    the device samples."""

    params: SamplingParams
    num_prompt: int
    banned: tuple[int, ...]
    """Ids that `min_tokens` forbids this time."""
    reshapes: bool
    """Whether there is more than `banned` that may make another token than the top one the greatest."""


Wishes = dict[int, Wish]
"""By row among the sampled ones."""


def wishes(rows: Rows, table: SlotTable) -> Wishes:
    """Of rows whose own logits alone do not decide; a grammar's come later."""
    slots, positions = rows.slots[rows.samples], rows.ends[rows.samples]
    short = positions < table.banned_until[slots]
    reshapes = table.penalized[slots] | table.edited[slots]
    return {
        i: Wish(
            table.params[slots[i]],
            int(table.num_prompt[slots[i]]),
            table.banned[slots[i]] if short[i] else (),
            bool(reshapes[i]),
        )
        for i in np.flatnonzero(short | reshapes).tolist()
    }


@dataclass(frozen=True)
class Sampler:
    """Of one epoch; `inputs` are the device's columns, `oracle` has its tokens."""

    logits: Logits
    inputs: StepInputs
    oracle: Oracle

    def prepare(
        self, rows: Rows, hashes: U64, wishes: Wishes, grammar: GrammarOutput | None
    ) -> Callable[[], I32]:
        """The work that samples a step, int32[sampled rows], for the device to run when `hashes` are there."""
        sampled = np.flatnonzero(rows.samples)
        slots, positions = rows.slots[sampled], rows.ends[sampled]
        masks = self._masks(slots, grammar)
        return lambda: self._sample(hashes[sampled], sampled, slots, positions, wishes, masks)

    def _masks(self, slots: I32, grammar: GrammarOutput | None) -> dict[int, I32]:
        """Row among the sampled ones -> its grammar bitmask."""
        if grammar is None:
            return {}
        words = unpack(grammar.bitmask).reshape(-1, -(-self.logits.vocab_size // 32))
        row_of = {slot: row for row, slot in enumerate(slots.tolist())}
        constrained = unpack(grammar.slots).tolist()
        return {row_of[s]: mask for s, mask in zip(constrained, words, strict=True) if s in row_of}

    def _sample(
        self,
        hashes: U64,
        rows: NDArray[np.int64],
        slots: I32,
        positions: I32,
        wishes: Wishes,
        masks: dict[int, I32],
    ) -> I32:
        """Full logits rows only where the top token alone does not decide."""
        ids, inputs = self.logits.top(hashes), self.inputs
        draws = inputs.temperature[rows] >= GREEDY_BELOW
        greedy = [
            i
            for i, mask in masks.items()
            if not draws[i] and i not in wishes and not _stays(int(ids[i]), None, mask)
        ]
        if greedy:
            ids[greedy] = self.logits.greatest(hashes[greedy], np.stack([masks[i] for i in greedy]))
        special = {*np.flatnonzero(draws).tolist(), *wishes, *masks} - set(greedy)
        for i in sorted(special):
            wish, mask = wishes.get(i), masks.get(i)
            if not draws[i] and _stays(int(ids[i]), wish, mask):
                continue
            row, position = rows[i], int(positions[i])
            logits = self.logits.row(hashes[i : i + 1], _only(mask, self.logits.vocab_size))
            if wish is not None:
                known = self.oracle.known(int(slots[i]), 0, position)
                logits = shaped(logits, wish.params, known[: wish.num_prompt], known[wish.num_prompt :], mask)
            ids[i] = sample_row(logits, RowParams(
                float(inputs.temperature[row]), float(inputs.top_p[row]), int(inputs.top_k[row]),
                float(inputs.min_p[row]), int(inputs.seed[row]), position,
            ))  # fmt: skip
        return ids


def _stays(top: int, wish: Wish | None, mask: I32 | None) -> bool:
    """Whether the row's top token is the greatest of those that are left."""
    if wish is not None and (wish.reshapes or top in wish.banned):
        return False
    return mask is None or bool(mask.item(top // 32) >> top % 32 & 1)


def _only(mask: I32 | None, vocab_size: int) -> NDArray[np.int64] | None:
    return None if mask is None else np.flatnonzero(allowed_by(mask, vocab_size))
