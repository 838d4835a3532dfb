"""Drafts by an EAGLE head, which reads the target's hidden states of all tokens except rejected drafts.

After each step, the head computes the places of the step's tokens with the true hidden states and at the true
positions, and overwrites the keys and values of earlier drafts there. Then it continues from the last place of each
sampled row with its own predictions. Its keys and values are in separate tensors under the target's block tables, so
prefixes are shared here too. The last place of a shared block was computed with the token that followed it in the
request that wrote it. In another request this may reduce the acceptance of a draft; it never changes an answer.
"""

from pathlib import Path

import numpy as np
import torch

from protocol.steps import NO_DRAFT
from services.checkpoint import DEMO_MODEL, WEIGHT_FILES, CheckpointError, resolve
from services.worker.backends.native.drafters.base import (
    I32,
    Advance,
    Drafter,
    DrafterSlots,
    Proposer,
    TargetModel,
)
from services.worker.backends.native.drafters.eagle_model import EagleModel, load
from services.worker.backends.native.model.model import cache_shape
from services.worker.kernels.interface.drafting import DraftLimits, DraftRows
from services.worker.runner import LoadError

DEMO_EAGLE = DEMO_MODEL / "eagle"
"""The head of the demo model, used if no checkpoint is named."""
ERROR = 0.25
"""Prediction error of a head, as a temperature that increases the request's own (root of the sum of squares): the next
token is less certain than the head's logits say. Measured with the head of the demo model on prompts outside of its
training data (`deploy/demo_model/train_eagle.py`)."""
_FEW = 64
"""Initial number of places in the buffers."""


class EagleDrafter(Drafter):
    """EAGLE and EAGLE-3 heads, from checkpoints in Hugging Face format."""

    def __init__(self, target: TargetModel) -> None:
        """Raises: LoadError"""
        speculation = target.speculation
        try:
            self._model: EagleModel = load(_directory(target), target)
        except (CheckpointError, LoadError) as error:
            raise LoadError(f"drafter {speculation.model or 'of the demo model'}: {error}") from error
        config = self._model.config
        self.reads = config.reads
        self.bytes_per_block = self._model.bytes_per_block(target.block_size)
        self._longest = speculation.max_model_len or config.layer.max_position
        if self._longest > config.layer.max_position:
            raise LoadError(
                f'"max_model_len" {self._longest} is more than the {config.layer.max_position} positions of the drafter'
            )

    def start(self, slots: DrafterSlots) -> Proposer:
        return EagleProposer(self._model, slots, min(self._longest, slots.table.max_model_len))


class EagleProposer(Proposer):
    """`limit`: upper bound of the positions of drafts, exclusive."""

    def __init__(self, model: EagleModel, slots: DrafterSlots, limit: int) -> None:
        self._model, self._slots, self._limit = model, slots, limit
        shape = cache_shape(model.config.layer, slots.table.block_size, model.dtype)
        self._cache = model.network.kv_cache(shape, slots.num_blocks, slots.allocate)
        self._make_room(_FEW)

    def _make_room(self, places: int) -> None:
        """Allocate buffers and record the operations on them."""
        model, network = self._model, self._model.network
        self._buffers = model.buffers(places)
        table = torch.from_numpy(self._slots.table.block_table)
        attention = self._attention = network.attention(model.attention, self._cache, table, places)
        self._places = network.record(lambda b: model.compute_places(b, attention), self._buffers)
        self._rows = network.record(lambda b: model.compute_rows(b, attention), self._buffers)

    def propose(self, advance: Advance, k: int) -> I32:
        proposed = np.full((np.count_nonzero(advance.samples), k), NO_DRAFT, np.int32)
        states, tokens = advance.states, len(advance.states[0])
        if not self._buffers.holds(places=tokens):
            self._make_room(1 << (tokens - 1).bit_length())
        layout = self._model.drafting.lay_out(
            self._rows_of(advance),
            self._slots.history.tokens,
            DraftLimits(k, self._limit, ERROR),
            self._buffers.draft,
        )
        if not layout.places:
            return proposed
        if layout.places < tokens:
            stays = self._inside(advance)
            states = [each[stays] for each in states]
        self._buffers.hidden[: layout.places] = self._model.fuse(states)
        self._model.drafting.draft(
            self._places,
            self._rows,
            self._buffers.draft,
            layout,
            advance.min_acceptance,
            self._model.tokens,
            proposed,
        )
        return proposed

    def _rows_of(self, advance: Advance) -> DraftRows:
        table = self._slots.table
        rows = advance.slots, advance.starts, advance.counts, advance.samples
        return DraftRows(*rows, table.num_blocks, table.temperature, table.block_size)

    def _inside(self, advance: Advance) -> torch.Tensor:
        """int64[places]: indices of the tokens whose positions are inside the head's context."""
        owners = np.repeat(np.arange(len(advance.counts)), advance.counts)
        offsets = np.arange(len(owners)) - np.repeat(
            np.cumsum(advance.counts) - advance.counts, advance.counts
        )
        return torch.from_numpy(np.flatnonzero(advance.starts[owners] + offsets < self._limit))


def _directory(target: TargetModel) -> Path:
    """Raises: CheckpointError"""
    speculation = target.speculation
    if speculation.model:
        return resolve(speculation.model, speculation.revision or None, WEIGHT_FILES)
    if target.path.resolve() != DEMO_MODEL:
        raise CheckpointError('this model comes without a head of its own; name one as "model"')
    return DEMO_EAGLE
