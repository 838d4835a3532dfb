"""The seam between the model that answers and what proposes drafts to it.

A drafter runs on the output rank alone, after each step's sampling, and proposes single tokens: its proposals can only
make a request faster or slower, never change a token of it. It reads tokens from the history on the device, where
sampled ones stand by then, so no step waits for the host because of it. Its own keys and values, if it has any, lie in
tensors of its own under the target's block tables.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from protocol.membership import Speculation
from services.worker.backends.native.model.model import Model
from services.worker.backends.native.token_history import TokenHistory
from services.worker.batch.slots import SlotTable
from services.worker.weights import Checkpoint

I32 = NDArray[np.int32]
States = Sequence[torch.Tensor]
"""[tokens, hidden] each"""


@dataclass(frozen=True)
class Target:
    """The model that answers, for loading a drafter."""

    speculation: Speculation
    model: Model
    """This rank's part; with tensor parallelism its embedding and head are those of some token ids only."""
    path: Path
    """Directory or GGUF file of its checkpoint."""
    checkpoint: Checkpoint
    """All of its tensors."""
    block_size: int
    max_model_len: int


@dataclass(frozen=True)
class Slots:
    """The slots of one epoch."""

    table: SlotTable
    """`block_table` and `num_blocks` of each slot; its positions are upper bounds."""
    history: TokenHistory
    num_blocks: int
    """Of the cache."""


class Advance(NamedTuple):
    """How far a step took its requests, rejected drafts left out: one row each, in the plan's order."""

    slots: I32
    generations: I32
    """Of the slots. The slot of a request that left has another one by then."""
    starts: I32
    """First position that the step computed."""
    counts: I32
    """Positions that it computed and that stay, at least 1."""
    samples: NDArray[np.bool_]
    """Rows whose next token was sampled: the history has it at `ends`, unless that is beyond the context. Where nothing
    was sampled, the history has the next token of the prompt there."""
    states: States = ()
    """[sum(counts), hidden] for each of the drafter's `reads`, rows back to back; until the next step"""
    min_acceptance: float = 0.0
    """A row may end at the first draft that is less likely to be accepted, together with those before it."""

    @property
    def ends(self) -> I32:
        return self.starts + self.counts


class Drafter(ABC):
    """The weights of a drafter, kept from epoch to epoch."""

    reads: tuple[int, ...] = ()
    """Hidden states of the target that `propose` gets: `forward.FINAL`, or the number of a layer whose input it is."""
    bytes_per_block: int = 0
    """Of its own cache, beside the target's."""

    @abstractmethod
    def start(self, slots: Slots) -> "Proposer":
        """Draft for one epoch, with an empty cache."""


class Proposer(ABC):
    """A drafter in one epoch. For one calling thread."""

    def assign(self, slot: int) -> None:  # noqa: B027 - most keep nothing of a slot
        """The slot has another request; nothing stays of the one before."""

    @abstractmethod
    def propose(self, advance: Advance, k: int) -> I32:
        """Propose up to `k` drafts for each sampling row.

        Called once after every step, for chunks of prompts and for `k` = 0 as well, so that the drafter's own state of
        each request follows the target's (prompt chunks, docs/invariants.md).

        Returns:
            int32[sampling rows, k]: NO_DRAFT from where a row has no more drafts. Tokens are in the vocabulary, and
            each stands inside the context; there may be fewer where the blocks of a slot end.
        """
