"""A smaller model with the same vocabulary, which continues the request greedily.

It reads tokens from the history and may therefore compute fewer positions than the target. It computes the missing ones
when drafts are proposed or when many are missing.
"""

import numpy as np
import torch
from numpy.typing import NDArray

from protocol.membership import Assignment, Shard
from protocol.steps import NO_DRAFT
from services.worker.backends.native.drafters.base import Advance, Drafter, DrafterSlots, Proposer, TargetModel
from services.worker.backends.native.model.config import ModelConfig
from services.worker.backends.native.model.forward import ForwardPass
from services.worker.backends.native.model.model import Model
from services.worker.backends.native.model.partition import ModelPart
from services.worker.batch.slots import EMPTY, I32, Rows
from services.worker.distributed.ranks import Ranks
from services.worker.kernels.interface.sampling import SamplingKernels
from services.worker.runner import LoadError
from services.worker.weights import drafter_path

BEHIND = 16
"""Maximum number of missing positions of a request while no drafts are proposed."""


def draft_model_drafter(target: TargetModel) -> Drafter:
    """Raises: LoadError, also for a checkpoint with another vocabulary."""
    wanted = target.speculation
    path = drafter_path(wanted)
    config, whole = ModelConfig.from_checkpoint(path), target.model.part.whole
    if config.vocab_size != whole.vocab_size:
        raise LoadError(
            f"the draft model {wanted.model} has {config.vocab_size} tokens, but the model has {whole.vocab_size}; "
            "they must have the same vocabulary"
        )
    part, checkpoint = ModelPart.from_shard(config, Shard()), target.drafter_checkpoint(path)
    model = Model(part, checkpoint, target.model.dtype, target.model.kernels, lambda *_: None)
    ranks = Ranks(Assignment(1, 0, 1, target.block_size, 1, 1)).join()
    limit = min(target.max_model_len, config.max_position, wanted.max_model_len or config.max_position)

    def start(slots: DrafterSlots) -> Proposer:
        table = slots.table
        sizes = slots.num_blocks, table.block_size, table.max_model_len
        forward = ForwardPass(model, ranks, *sizes, torch.from_numpy(table.block_table), allocate=slots.allocate)
        return DraftModelProposer(forward, model.kernels.sampling, slots, limit)

    return Drafter(start, bytes_per_block=model.bytes_per_block(target.block_size))


class DraftModelProposer(Proposer):
    """`limit`: the longest sequence that the draft model computes."""

    def __init__(self, forward: ForwardPass, kernels: SamplingKernels, slots: DrafterSlots, limit: int) -> None:
        self._forward, self._kernels, self._slots, self._limit = forward, kernels, slots, limit
        self._computed = np.full(slots.table.num_slots, EMPTY, np.int32)
        """Number of computed positions, drafts included; EMPTY before the first row."""

    def assign(self, slot: int) -> None:
        self._computed[slot] = EMPTY

    def rest(self) -> bool:
        return False  # cached prefixes that it never computed would spoil the drafts of later requests

    def propose(self, advance: Advance, k: int) -> I32:
        slots, table = advance.slots, self._slots.table
        computed = self._computed[slots]
        starts = np.where(computed == EMPTY, advance.starts, np.minimum(computed, advance.ends))
        held = np.minimum(table.num_blocks[slots] * table.block_size, self._limit)
        # A draft needs a cache position for the token before it, and a position in the context for itself.
        room = np.minimum(held, table.max_model_len - 1) - advance.ends
        wanted = np.where(advance.samples, np.clip(room, 0, k), 0).astype(np.int32)
        ends = np.minimum(advance.ends + (wanted > 0), held)
        computes = (ends > starts) & ((wanted > 0) | (ends - starts > BEHIND) | ~advance.samples)
        self._computed[slots] = np.where(computes, ends + np.maximum(wanted - 1, 0), starts)
        drafts = np.full((len(slots), k), NO_DRAFT, np.int32)
        at = np.flatnonzero(computes)
        if len(at):
            ids = self._most_likely(_rows(slots[at], starts[at], (ends - starts)[at], wanted[at] > 0))
            self._draft(drafts, at[wanted[at] > 0], ids, slots, ends, wanted)
        return drafts[advance.samples]

    def _draft(self, drafts: I32, at: NDArray[np.int64], ids: torch.Tensor, slots: I32, ends: I32, wanted: I32) -> None:
        """Fill rows `at` with drafts: `ids` first, then the result of one forward pass after another."""
        number = 0
        while len(at):
            drafts[at, number] = ids.numpy()
            number += 1
            going = np.flatnonzero(wanted[at] > number)
            at = at[going]
            if len(at):
                ones, position = np.ones(len(at), np.int32), ends[at] + np.int32(number - 1)
                ids = self._most_likely(_rows(slots[at], position, ones, ones > 0), ids[torch.from_numpy(going)])

    def _most_likely(self, rows: Rows, ids: torch.Tensor | None = None) -> torch.Tensor:
        """int32[rows that sample]; `ids` are int32[tokens], those of the history unless given."""
        self._forward.lay_out(rows, self._slots.history, ids)
        logits = self._forward.run()
        assert logits is not None, "a group of one rank samples"
        return self._kernels.greedy(logits)


def _rows(slots: I32, starts: I32, counts: I32, samples: NDArray[np.bool_]) -> Rows:
    none = np.zeros(len(slots), np.int32)
    return Rows(slots, none, starts.astype(np.int32), counts.astype(np.int32), samples, none)
