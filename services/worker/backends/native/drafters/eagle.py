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

from protocol.steps import NO_DRAFT
from services.checkpoint import DEMO_MODEL, WEIGHT_FILES, CheckpointError, resolve
from services.worker.backends.native.drafters.base import I32, Advance, Drafter, Slots, Target
from services.worker.backends.native.drafters.eagle_model import EagleModel, load
from services.worker.backends.native.kernels.ragged import spread
from services.worker.backends.native.kv_cache import KVCache
from services.worker.runner import LoadError

DEMO_EAGLE = DEMO_MODEL / "eagle"
"""The head that is meant when none is named."""
ERROR = 0.25
"""How far a head is from the model that it guesses, as a temperature: what a request says next is less certain than by
the head's logits and the request's own temperature. Measured of the demo model's head, on prompts of which it has seen
none (`deploy/demo_model/train_eagle.py`)."""


class EagleDrafter(Drafter):
    """EAGLE and EAGLE-3 heads, from checkpoints in Hugging Face format."""

    def __init__(self, target: Target) -> None:
        """Raises: LoadError"""
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
        cache = KVCache(self._model.config.layer, slots.num_blocks, self._block_size, self._dtype)
        self._model.begin(cache, slots.table.block_table)

    def end(self) -> None:
        self._model.end()

    def propose(self, advance: Advance, k: int) -> I32:
        proposed = np.full((np.count_nonzero(advance.samples), k), NO_DRAFT, np.int32)
        tokens, states = len(advance.states[0]), advance.states
        laid = self._model.desk(tokens).put(advance, self._slots, k, self._limit, ERROR)
        if not laid.places:
            return proposed
        if laid.places < tokens:
            stay = self._inside(advance)
            states = [each[stay] for each in states]
        self._model.draft(laid, self._model.fuse(states), proposed, advance.least_chance)
        return proposed

    def _inside(self, advance: Advance) -> torch.Tensor:
        """int64[places]: which tokens are inside of the head's context."""
        owners, offsets = spread(advance.counts)
        return torch.from_numpy(np.flatnonzero(advance.starts[owners] + offsets < self._limit))


def _directory(target: Target) -> Path:
    """Raises: CheckpointError"""
    speculation = target.speculation
    if speculation.model:
        return resolve(speculation.model, speculation.revision or None, WEIGHT_FILES)
    if target.directory.resolve() != DEMO_MODEL:
        raise CheckpointError('this model comes without a head of its own; name one as "model"')
    return DEMO_EAGLE
