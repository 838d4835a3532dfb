"""Sampling of one step: what the host knows is snapshot at launch, what the device holds is read when it samples."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from protocol.rows import GrammarRows
from protocol.sampling import SamplingParams
from protocol.steps import GrammarOutput
from services.worker.backends.sim.hashing import U64
from services.worker.backends.sim.inputs import StepInputs
from services.worker.backends.sim.logits import Logits
from services.worker.backends.sim.oracle import Oracle
from services.worker.batch.slots import I32, Rows, SlotTable
from services.worker.sampling.reference import GREEDY_BELOW, RowParams, allowed_by, sample_row, shaped


@dataclass(frozen=True)
class Wish:
    """What the request of a sampled row asks for beside the draw; a snapshot, for the table may have moved on when
    the device samples."""

    params: SamplingParams
    num_prompt: int
    banned: tuple[int, ...]
    """Ids that `min_tokens` forbids at positions ..."""
    banned_until: int
    """... before this one."""
    reshapes: bool
    """Whether there is more than `banned` that may make another token than the top one the greatest."""


Wishes = dict[int, Wish]
"""By row among the sampled ones."""


def wishes(rows: Rows, table: SlotTable) -> Wishes:
    """Of rows whose own logits alone do not decide; a grammar's come later."""
    slots = rows.slots[rows.samples]
    earliest = rows.ends[rows.samples] - table.unsettled[slots]
    short = earliest < table.banned_until[slots]
    reshapes = table.penalized[slots] | table.edited[slots]
    return {
        i: Wish(
            table.params[slots[i]],
            int(table.num_prompt[slots[i]]),
            table.banned[slots[i]],
            int(table.banned_until[slots[i]]),
            bool(reshapes[i]),
        )
        for i in np.flatnonzero(short | reshapes).tolist()
    }


class Masks(NamedTuple):
    """Of a step's constrained rows; a row's masks are for as many positions from its first sampled one."""

    of: dict[int, I32]
    """Row among the sampled ones -> int32[masks, words]."""

    @classmethod
    def read(cls, grammar: GrammarOutput | None, slots: I32, vocab_size: int) -> "Masks":
        """`slots` are those of the sampled rows."""
        if grammar is None:
            return cls({})
        constrained, counts, masks = GrammarRows.from_message(grammar, vocab_size)
        row_of = {slot: row for row, slot in enumerate(slots.tolist())}
        rows = zip(constrained.tolist(), counts.tolist(), np.cumsum(counts).tolist(), strict=True)
        return cls({row_of[s]: masks[end - count : end] for s, count, end in rows if s in row_of})

    def acceptable(self, drafts: I32) -> I32:
        """Drafts of each sampled row that may be accepted: one less than it has masks (spec 2(b) 14)."""
        acceptable = drafts.copy()
        for row, masks in self.of.items():
            acceptable[row] = min(acceptable[row], len(masks) - 1)
        return acceptable


class Places(NamedTuple):
    """Where a token is to be sampled, one entry each."""

    owners: NDArray[np.int64]
    """Row among the sampled ones."""
    rows: NDArray[np.int64]
    """Row of the device's columns."""
    slots: I32
    positions: I32
    """Where the token will stand."""
    hashes: U64
    """Of everything before it."""


NO_MASKS: dict[int, I32] = {}


@dataclass(frozen=True)
class Sampler:
    """Of one epoch; `inputs` are the device's columns, `oracle` has its tokens. Its methods run on the device."""

    logits: Logits
    inputs: StepInputs
    oracle: Oracle

    def sample(
        self, at: Places, wishes: Wishes, masks: dict[int, I32] = NO_MASKS, behind: I32 | None = None
    ) -> I32:
        """int32[places]. Full logits rows only where the top token alone does not decide.

        Args:
            masks: place -> its grammar bitmask
            behind: int32[places, tokens] that stand before each place behind what its slot knows
        """
        ids, inputs = self.logits.top(at.hashes), self.inputs
        wished = (
            {i: wishes[row] for i, row in enumerate(at.owners.tolist()) if row in wishes} if wishes else {}
        )
        draws = inputs.temperature[at.rows] >= GREEDY_BELOW
        greedy = [
            i
            for i, mask in masks.items()
            if not draws[i] and i not in wished and not _stays(int(ids[i]), None, mask, 0)
        ]
        if greedy:
            ids[greedy] = self.logits.greatest(at.hashes[greedy], np.stack([masks[i] for i in greedy]))
        special = {*np.flatnonzero(draws).tolist(), *wished, *masks} - set(greedy)
        for i in sorted(special):
            wish, mask = wished.get(i), masks.get(i)
            row, position = at.rows[i], int(at.positions[i])
            if not draws[i] and _stays(int(ids[i]), wish, mask, position):
                continue
            logits = self.logits.row(at.hashes[i : i + 1], _only(mask, self.logits.vocab_size))
            if wish is not None:
                known = self._before(int(at.slots[i]), position, None if behind is None else behind[i])
                logits = shaped(logits, wish.params, known[: wish.num_prompt], known[wish.num_prompt :], mask)
            ids[i] = sample_row(logits, RowParams(
                float(inputs.temperature[row]), float(inputs.top_p[row]), int(inputs.top_k[row]),
                float(inputs.min_p[row]), int(inputs.seed[row]), position,
            ))  # fmt: skip
        return ids

    def _before(self, slot: int, position: int, behind: I32 | None) -> I32:
        """int32[position] ids before a position."""
        if behind is None:
            return self.oracle.known(slot, 0, position)
        return np.concatenate((self.oracle.known(slot, 0, position - len(behind)), behind))


def _stays(top: int, wish: Wish | None, mask: I32 | None, position: int) -> bool:
    """Whether the row's top token is the greatest of those that are left."""
    if wish is not None and (wish.reshapes or (position < wish.banned_until and top in wish.banned)):
        return False
    return mask is None or bool(mask.item(top // 32) >> top % 32 & 1)


def _only(mask: I32 | None, vocab_size: int) -> NDArray[np.int64] | None:
    return None if mask is None else np.flatnonzero(allowed_by(mask, vocab_size))
