"""Drafts by an EAGLE head, which reads the target's hidden states of every token that stays.

After each step the head computes the places of the step's tokens, with the true hidden states and at the true
positions, over whatever an earlier draft left there; then it goes on from the last place of each sampled row with its
own predictions. Its keys and values lie under the target's block tables, in tensors of their own, so that a shared
prefix is shared here too: only the last place of a shared block was computed with the token that followed it in the
request that wrote it, which may cost a draft and never an answer.
"""

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from protocol.steps import NO_DRAFT
from services.checkpoint import DEMO_MODEL, WEIGHT_FILES, CheckpointError, resolve
from services.worker.backends.native.attention import Context
from services.worker.backends.native.batch import Batch
from services.worker.backends.native.drafters.base import I32, Advance, Drafter, Slots, Target
from services.worker.backends.native.drafters.eagle_model import EagleModel, load
from services.worker.backends.native.kv_cache import KVCache
from services.worker.runner import LoadError

DEMO_EAGLE = DEMO_MODEL / "eagle"
"""The head that is meant when none is named."""
LEAST_CHANCE = 0.03
"""A draft whose chance, by the head's own word and with those before it, is less is not proposed: computing it and
verifying it would cost more than it brings."""

_NOTHING = torch.empty(0, dtype=torch.int64)


class EagleDrafter(Drafter):
    """EAGLE and EAGLE-3 heads, from checkpoints in Hugging Face format."""

    def __init__(self, target: Target, least_chance: float = LEAST_CHANCE) -> None:
        """Raises: LoadError"""
        self._least_chance = least_chance
        speculation = target.speculation
        try:
            self._model: EagleModel = load(_directory(target), target)
        except (CheckpointError, LoadError) as error:
            raise LoadError(f"drafter {speculation.model or 'of the demo model'}: {error}") from error
        config = self._model.config
        self.reads = config.reads
        self._dtype, self._block_size = target.dtype, target.block_size
        self.bytes_per_block = KVCache.bytes_per_block(config.layer, target.block_size, target.dtype)
        self._longest = speculation.max_model_len or config.layer.max_position
        if self._longest > config.layer.max_position:
            raise LoadError(
                f'"max_model_len" {self._longest} is more than the {config.layer.max_position} positions of the drafter'
            )

    def begin(self, slots: Slots) -> None:
        self._slots = slots
        self._limit = min(self._longest, slots.table.max_model_len)
        self._cache = KVCache(self._model.config.layer, slots.num_blocks, self._block_size, self._dtype)

    def end(self) -> None:
        self.__dict__.pop("_cache", None)

    def propose(self, advance: Advance, k: int) -> I32:
        proposed = np.full((int(advance.samples.sum()), k), NO_DRAFT, np.int32)
        if int(advance.starts.min(initial=self._limit)) >= self._limit:
            return proposed
        slots, ends = advance.slots[advance.samples], advance.ends[advance.samples]
        room = self._room(slots, ends, k)
        at = np.flatnonzero(room > 0)
        chances = np.ones(len(room), np.float32)
        hidden = self._follow(advance, np.flatnonzero(advance.samples)[at])
        for number in range(k):
            going = (room[at] > number) & (chances[at] >= self._least_chance)
            if not going.all():
                at, hidden = at[going], hidden[torch.from_numpy(np.flatnonzero(going))]
            if not len(at):
                break
            if number:
                ids = torch.from_numpy(proposed[at, number - 1]).long()
                batch = _batch(slots[at], ends[at] + np.int32(number - 1), np.arange(len(at)))
                hidden = self._model.predict(ids, hidden, self._context(batch))
            drafts, sure = self._model.drafts(hidden)
            chances[at] *= sure
            proposed[at, number] = np.where(chances[at] >= self._least_chance, drafts, NO_DRAFT)
        return proposed

    def _room(self, slots: I32, ends: I32, k: int) -> I32:
        """int32[rows]: how many of the drafts, at ends + 1, ends + 2 ..., are inside of both contexts, and those whose
        computation, from the second one on at `ends`, is inside of the blocks of the slot."""
        blocks = self._slots.table.num_blocks[slots] * np.int32(self._block_size)
        return np.minimum(np.minimum(self._limit - 1 - ends, blocks - ends + 1), k).astype(np.int32)

    def _follow(self, advance: Advance, drafting: NDArray[np.int64]) -> torch.Tensor:
        """Computes the places of the step's tokens; float32[drafting rows, hidden] after the last one of each."""
        counts = advance.counts
        first = np.cumsum(counts, dtype=np.int32) - counts
        offsets = np.arange(int(counts.sum()), dtype=np.int32) - np.repeat(first, counts)
        positions, slots = np.repeat(advance.starts, counts) + offsets, np.repeat(advance.slots, counts)
        last, states = (first + counts - 1)[drafting], advance.states
        if int(advance.ends.max()) > self._limit:
            inside = positions < self._limit
            stay = np.flatnonzero(inside)
            positions, slots = positions[stay], slots[stay]
            states = [s[torch.from_numpy(stay)] for s in states]
            last = (np.cumsum(inside) - 1)[last]
        batch = _batch(slots, positions, last)
        following = torch.from_numpy(np.minimum(positions + 1, self._slots.table.max_model_len - 1))
        ids = self._slots.history.gather(batch.slots, following)
        hidden = self._model.fuse(states)
        return self._model.predict(ids, hidden, self._context(batch), torch.from_numpy(last).long())

    def _context(self, batch: Batch) -> Context:
        return Context(batch, self._cache, self._slots.table.block_table)


def _directory(target: Target) -> Path:
    """Raises: CheckpointError"""
    speculation = target.speculation
    if speculation.model:
        return resolve(speculation.model, speculation.revision or None, WEIGHT_FILES)
    if target.directory.resolve() != DEMO_MODEL:
        raise CheckpointError('this model comes without a head of its own; name one as "model"')
    return DEMO_EAGLE


def _batch(slots: I32, positions: I32, last: NDArray[np.int64]) -> Batch:
    """Of places of which those of int64[rows] `last` are attended from."""
    tiles = np.empty((len(last), 4), np.int32)
    tiles[:, 0], tiles[:, 1], tiles[:, 2], tiles[:, 3] = slots[last], positions[last], last, 1
    return Batch(
        slots=torch.from_numpy(slots),
        positions=torch.from_numpy(positions),
        tiles=torch.from_numpy(tiles),
        num_tiles=len(tiles),
        longest=int(positions.max(initial=0)) + 1,
        widest=1,
        sampled=_NOTHING,
    )
