"""Drafts by an EAGLE head, which reads the target's hidden states of all tokens except rejected drafts.

After each step, the head computes the places of the step's tokens with the true hidden states and at the true
positions, and overwrites the keys and values of earlier drafts there. Then it continues from the last place of each
sampled row with its own predictions. Its keys and values are in separate tensors under the target's block tables, so
prefixes are shared here too. The last place of a shared block was computed with the token that followed it in the
request that wrote it. In another request this may reduce the acceptance of a draft; it never changes an answer.

After a rest the head does not know the tokens before. A request then *begins* with the first token that the head gets
of it: that one has position 0 of the head, and the request's blocks from that of the token on. Only differences of
positions count, so these drafts are those of a head that reads a shorter text.
"""

from pathlib import Path

import numpy as np
import torch

from protocol.steps import NO_DRAFT
from services.checkpoint import DEMO_MODEL, WEIGHT_FILES, CheckpointError, resolve
from services.worker.backends.native.drafters.base import Advance, Drafter, DrafterSlots, Proposer, TargetModel
from services.worker.backends.native.drafters.eagle_model import EagleModel, load
from services.worker.backends.native.model.model import cache_shape
from services.worker.batch.slots import I32, spread
from services.worker.kernels.interface.drafting import DraftLayout, DraftLimits, DraftRows
from services.worker.runner import LoadError

DEMO_EAGLE = DEMO_MODEL / "eagle"
"""The head of the demo model, used if no checkpoint is named."""
ERROR = 0.25
"""Prediction error of a head, as a temperature that increases the request's own (root of the sum of squares): the next
token is less certain than the head's logits say. Measured with the head of the demo model on prompts outside of its
training data."""
_FEW = 64
"""Initial number of places in the buffers."""


def eagle_drafter(target: TargetModel) -> Drafter:
    """Load an EAGLE or EAGLE-3 head from a checkpoint in Hugging Face format. Raises: LoadError"""
    speculation = target.speculation
    try:
        model = load(_directory(target), target)
    except (CheckpointError, LoadError) as error:
        raise LoadError(f"drafter {speculation.model or 'of the demo model'}: {error}") from error
    most = model.config.layer.max_position
    longest = speculation.max_model_len or most
    if longest > most:
        raise LoadError(f'"max_model_len" {longest} is more than the {most} positions of the drafter')
    return Drafter(
        lambda slots: EagleProposer(model, slots, min(longest, slots.table.max_model_len)),
        model.config.reads,
        model.bytes_per_block(target.block_size),
    )


class EagleProposer(Proposer):
    """`limit`: upper bound of the positions of drafts, exclusive."""

    def __init__(self, model: EagleModel, slots: DrafterSlots, limit: int) -> None:
        self._model, self._slots, self._limit = model, slots, limit
        table = slots.table
        shape = cache_shape(model.config.layer, table.block_size, model.dtype)
        self._cache = model.network.kv_cache(shape, slots.num_blocks, slots.allocate)
        self._begins = np.zeros(table.num_slots, np.int32)
        """First position that the head knows of each slot."""
        self._table = np.zeros((table.num_slots, table.max_blocks), np.int32)
        """Block table of each slot from that position on."""
        self._held = np.zeros(table.num_slots, np.int32)
        """Blocks of the slot up to the last one that `_table` has; 0: the head knows nothing of the request."""
        self._known = np.ones(slots.num_blocks, np.bool_)
        """Blocks whose keys and values the head has computed from the beginning of the request on."""
        self._has_rested = False
        self._make_room(_FEW)

    def _make_room(self, places: int) -> None:
        """Allocate buffers and record the operations on them."""
        model, network = self._model, self._model.network
        self._buffers = model.buffers(places)
        table = torch.from_numpy(self._table)
        attention = self._attention = network.attention(model.attention, self._cache, table, places)
        self._places = network.record(lambda b: model.compute_places(b, attention), self._buffers)
        self._rows = network.record(lambda b: model.compute_rows(b, attention), self._buffers)

    def assign(self, slot: int) -> None:
        self._held[slot] = 0

    def rest(self) -> bool:
        self._has_rested = True
        self._held.fill(0)
        self._known.fill(False)  # blocks may be written meanwhile
        return True

    def propose(self, advance: Advance, k: int) -> I32:
        proposed = np.full((np.count_nonzero(advance.samples), k), NO_DRAFT, np.int32)
        states, tokens = advance.states, len(advance.states[0])
        if not self._buffers.holds(places=tokens):
            self._make_room(1 << (tokens - 1).bit_length())
        layout = self._model.drafting.lay_out(
            self._rows_of(advance), self._slots.history.tokens, DraftLimits(k, self._limit, ERROR), self._buffers.draft
        )
        if not layout.places:
            return proposed
        self._follow(advance, layout)
        if layout.places < tokens:
            stays = self._inside(advance)
            states = [each[stays] for each in states]
        self._buffers.hidden[: layout.places] = self._model.fuse(states)
        self._model.drafting.draft(
            self._places, self._rows, self._buffers.draft, layout, advance.min_acceptance, self._model.tokens, proposed
        )
        return proposed

    def _follow(self, advance: Advance, layout: DraftLayout) -> None:
        """Begin the rows of requests that the head does not know, and lay out the places at the head's positions."""
        table, slots, size = self._slots.table, advance.slots, self._slots.table.block_size
        for row in np.flatnonzero(table.num_blocks[slots] != self._held[slots]).tolist():
            slot, end = slots[row], table.num_blocks[slots[row]]
            if not self._held[slot]:
                self._begins[slot] = self._first_known(slot, int(advance.starts[row]))
            first = self._begins[slot] // size
            self._table[slot, : end - first] = table.block_table[slot, first:end]
            self._held[slot] = end
        if not self._has_rested:
            return
        begins, firsts, ends = self._begins[slots], advance.starts // size, advance.ends // size
        for row in np.flatnonzero((begins == 0) & (ends > firsts)).tolist():
            self._known[table.block_table[slots[row], firsts[row] : ends[row]]] = True
        if begins.any():
            b, (places, rows) = self._buffers, layout
            b.positions[:places] -= torch.from_numpy(self._begins[b.slots[:places].numpy()])
            b.tiles[:rows, 1] -= torch.from_numpy(self._begins[b.tiles[:rows, 0].numpy()])

    def _first_known(self, slot: int, start: int) -> int:
        """Return where a request begins of which the head gets the tokens from `start` on. What it has missed is in
        blocks that it does not know, as nobody else writes them."""
        cached = self._slots.table.block_table[slot, : -(-start // self._slots.table.block_size)]
        return 0 if self._known[cached].all() else start

    def _rows_of(self, advance: Advance) -> DraftRows:
        table = self._slots.table
        rows = advance.slots, advance.starts, advance.counts, advance.samples
        return DraftRows(*rows, table.num_blocks, table.temperature, table.block_size)

    def _inside(self, advance: Advance) -> torch.Tensor:
        """int64[places]: indices of the tokens whose positions are inside the head's context."""
        owners, offsets = spread(advance.counts)
        return torch.from_numpy(np.flatnonzero(advance.starts[owners] + offsets < self._limit))


def _directory(target: TargetModel) -> Path:
    """Raises: CheckpointError"""
    speculation = target.speculation
    if speculation.model:
        return resolve(speculation.model, speculation.revision or None, WEIGHT_FILES)
    if target.path.resolve() != DEMO_MODEL:
        raise CheckpointError('this model comes without a head of its own; name one as "model"')
    return DEMO_EAGLE
