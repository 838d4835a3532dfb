"""The interface between the target model and the drafter.

A drafter runs only on the output rank, after the sampling of each step, and proposes one token at a time. Its proposals
make a request faster or slower, but never change its tokens. It reads tokens from the history on the device, which
already contains the sampled ones, so no step waits for the host. A drafter with keys and values has separate tensors
for them, addressed by the block tables of the target.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from protocol.membership import Speculation
from services.worker.backends.native.model.model import Model
from services.worker.backends.native.token_history import TokenHistory
from services.worker.batch.slots import I32, BatchColumns
from services.worker.kernels.interface.kv_cache import Allocate, own_memory
from services.worker.weights import Checkpoint, Contents, HashedCheckpoint, open_checkpoint

States = Sequence[torch.Tensor]
"""[tokens, hidden] each"""


@dataclass(frozen=True)
class TargetModel:
    """The target model, for loading a drafter."""

    speculation: Speculation
    model: Model
    """This rank's part of the model. With tensor parallelism, its embedding and head cover only some token ids."""
    path: Path
    """Directory or GGUF file of its checkpoint."""
    checkpoint: Checkpoint
    """All tensors of the target."""
    block_size: int
    max_model_len: int
    contents: Contents = field(default_factory=dict)
    """Digest of each part of the drafter's weights, once it is loaded."""

    def drafter_checkpoint(self, path: Path) -> Checkpoint:
        """Open the drafter's own checkpoint. What is read of it is added to `contents`. Raises: LoadError"""
        return HashedCheckpoint(open_checkpoint(path), "drafter/", self.contents)


@dataclass(frozen=True)
class DrafterSlots:
    """The slots of one epoch."""

    table: BatchColumns
    """Used for `block_table` and `num_blocks` of each slot. Its positions are upper bounds."""
    history: TokenHistory
    num_blocks: int
    """Number of blocks in the cache."""
    allocate: Allocate = own_memory
    """Memory of the drafter's own cache."""


class Advance(NamedTuple):
    """Progress of each request in a step, without rejected drafts: one row each, in the plan's order."""

    slots: I32
    generations: I32
    """Generation of each slot; it changes when the request leaves the slot."""
    starts: I32
    """First position that the step computed."""
    counts: I32
    """Positions that it computed, without rejected drafts; at least 1."""
    samples: NDArray[np.bool_]
    """Rows whose next token was sampled. The history contains this token at position `ends`, unless `ends` is beyond
    the context. For other rows, it contains the next token of the prompt there."""
    states: States = ()
    """[sum(counts), hidden] for each of the drafter's `reads`, rows back to back; valid until the next step"""
    min_acceptance: float = 0.0
    """A row may end at the first draft at which the product of its drafts' probabilities falls below this value."""

    @property
    def ends(self) -> I32:
        return self.starts + self.counts


class Proposer(ABC):
    """A drafter in one epoch. For one calling thread."""

    def assign(self, slot: int) -> None:  # noqa: B027 - most keep nothing of a slot
        """Drop the state of a slot that another request gets."""

    def rest(self) -> bool:
        """Prepare for a step that the proposer gets nothing of. Return False if it needs every step."""
        return True

    @abstractmethod
    def propose(self, advance: Advance, k: int) -> I32:
        """Propose up to `k` drafts for each sampling row.

        Must be called once after every step, also for chunks of prompts and with `k` = 0, so that the drafter's state
        of each request follows the target's (prompt chunks, docs/invariants.md), except after a `rest`.

        Returns:
            int32[sampling rows, k], padded with NO_DRAFT. Tokens are in the vocabulary and their positions inside the
            context. A row may have fewer drafts if its slot lacks blocks.
        """


@dataclass(frozen=True)
class Drafter:
    """A drafter with its weights, kept from epoch to epoch."""

    start: Callable[[DrafterSlots], Proposer]
    """Returns a proposer for one epoch, with the cache that the memory holds."""
    reads: tuple[int, ...] = ()
    """Hidden states of the target that `propose` reads: `forward.FINAL`, or the number of a layer for its input."""
    bytes_per_block: int = 0
    """Bytes per block of its own cache, in addition to the target's."""
