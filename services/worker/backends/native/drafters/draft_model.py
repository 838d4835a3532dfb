"""A smaller model with the same vocabulary: it reads what the target reads, and goes on from there greedily.

Its tokens come from the history, so it may fall behind: it computes what it has not yet, when it is asked for drafts or
when that has become much.
"""

import numpy as np
import torch
from numpy.typing import NDArray

from protocol.membership import Assignment, Shard
from protocol.steps import NO_DRAFT
from services.checkpoint import WEIGHT_FILES, CheckpointError, resolve
from services.worker.backends.native.attention import Context
from services.worker.backends.native.batch import Batch
from services.worker.backends.native.config import ModelConfig
from services.worker.backends.native.drafters.base import I32, Advance, Drafter, Slots, Target
from services.worker.backends.native.kernels.sampling import greedy_kernel
from services.worker.backends.native.kv_cache import KVCache
from services.worker.backends.native.model import Model
from services.worker.backends.native.partition import Part
from services.worker.batch.slots import EMPTY, Rows
from services.worker.distributed.ranks import Ranks
from services.worker.runner import LoadError
from services.worker.weights import Checkpoint

BEHIND = 16
"""Tokens of a request that are left for later at most while nobody asks for drafts."""


class DraftModelDrafter(Drafter):
    def __init__(self, target: Target) -> None:
        """Raises: LoadError, also for a checkpoint with another vocabulary."""
        wanted = target.speculation
        try:
            directory = resolve(wanted.model, wanted.revision or None, WEIGHT_FILES)
        except CheckpointError as error:
            raise LoadError(f"the draft model: {error}") from error
        config, whole = ModelConfig.from_directory(directory), target.model.part.whole
        if config.vocab_size != whole.vocab_size:
            raise LoadError(
                f"the draft model {wanted.model} has {config.vocab_size} tokens, but the model has {whole.vocab_size}; "
                "they must have the same vocabulary"
            )
        part = Part.of(config, Shard())
        self._model = Model(part, Checkpoint(directory), target.dtype, lambda *_: None)
        self._ranks = Ranks(Assignment(1, 0, 1, target.block_size, 1, 1)).join()
        self._block_size, self._dtype = target.block_size, target.dtype
        self._limit = min(
            target.max_model_len, config.max_position, wanted.max_model_len or config.max_position
        )
        self._context = target.max_model_len
        self._greedy = greedy_kernel()
        self.bytes_per_block = KVCache.bytes_per_block(config, target.block_size, target.dtype)

    def begin(self, slots: Slots) -> None:
        self._slots = slots
        self._cache = KVCache(self._model.config, slots.num_blocks, self._block_size, self._dtype)
        self._computed = np.full(slots.table.num_slots, EMPTY, np.int32)
        """Positions whose keys and values are there, drafts included; EMPTY before the first row."""

    def end(self) -> None:
        self.__dict__.pop("_cache", None)

    def assign(self, slot: int) -> None:
        self._computed[slot] = EMPTY

    def propose(self, advance: Advance, k: int) -> I32:
        slots, table = advance.slots, self._slots.table
        computed = self._computed[slots]
        starts = np.where(computed == EMPTY, advance.starts, np.minimum(computed, advance.ends))
        held = np.minimum(table.num_blocks[slots] * self._block_size, self._limit)
        # A draft takes a position of the cache for the token before it, and one of the context for itself.
        room = np.minimum(held, self._context - 1) - advance.ends
        wanted = np.where(advance.samples, np.clip(room, 0, k), 0).astype(np.int32)
        ends = np.minimum(advance.ends + (wanted > 0), held)
        computes = (ends > starts) & ((wanted > 0) | (ends - starts > BEHIND) | ~advance.samples)
        self._computed[slots] = np.where(computes, ends + np.maximum(wanted - 1, 0), starts)
        drafts = np.full((len(slots), k), NO_DRAFT, np.int32)
        at = np.flatnonzero(computes)
        if len(at):
            logits = self._logits(_rows(slots[at], starts[at], (ends - starts)[at], wanted[at] > 0))
            self._draft(drafts, at[wanted[at] > 0], logits, slots, ends, wanted)
        return drafts[advance.samples]

    def _draft(
        self, drafts: I32, at: NDArray[np.int64], logits: torch.Tensor, slots: I32, ends: I32, wanted: I32
    ) -> None:
        """Fills rows `at`, first from their `logits`, then computing one position after the other."""
        number = 0
        while len(at):
            ids = self._greatest(logits)
            drafts[at, number] = ids
            number += 1
            at = at[going := wanted[at] > number]
            if len(at):
                rows = _rows(
                    slots[at], ends[at] + np.int32(number - 1), np.ones(len(at), np.int32), wanted[at] > 0
                )
                logits = self._logits(rows, torch.from_numpy(ids[going]).long())

    def _logits(self, rows: Rows, ids: torch.Tensor | None = None) -> torch.Tensor:
        """float32[rows that sample, vocab]; `ids` are int64[tokens], the history's unless given."""
        batch = Batch.of(rows)
        if ids is None:
            ids = self._slots.history.gather(batch.slots, batch.positions)
        context = Context(batch, self._cache, self._slots.table.block_table)
        logits = self._model.forward(ids, context, self._ranks)
        assert logits is not None, "a group of one samples itself"
        return logits

    def _greatest(self, logits: torch.Tensor) -> I32:
        """int32[rows]"""
        every, ids = np.arange(len(logits), dtype=np.int32), np.empty(len(logits), np.int32)
        self._greedy.run(len(ids), (logits.data_ptr(), every.ctypes.data, logits.shape[1], ids.ctypes.data))
        return ids


def _rows(slots: I32, starts: I32, counts: I32, samples: NDArray[np.bool_]) -> Rows:
    none = np.zeros(len(slots), np.int32)
    return Rows(slots, none, starts.astype(np.int32), counts.astype(np.int32), samples, none)
