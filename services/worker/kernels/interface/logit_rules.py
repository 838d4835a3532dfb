"""Changes of logits by the parameters of a request."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from services.worker.kernels.interface.arrays import F32, I32


@dataclass(frozen=True)
class LogitRule:
    """Changes of one request's logits by its parameters, in this order; ids are in the vocabulary."""

    num_prompt: int
    allowed: I32 | None = None
    """Ascending; None: all."""
    bad_words: tuple[I32, ...] = ()
    banned: I32 | None = None
    """Not sampled below position `banned_until`."""
    banned_until: int = 0
    biased: I32 | None = None
    biases: F32 | None = None
    penalizes: bool = False
    """True: the next three have an effect."""
    repetition: float = 1.0
    frequency: float = 0.0
    presence: float = 0.0


class LogitRules(Protocol):
    """The rule of every slot. Tokens are counted in the history when a row is sampled (penalty history)."""

    def assign(self, slot: int, rule: LogitRule | None) -> None:
        """Set the rule of a slot's new request; None: no rule."""
        ...

    def changes(self, slots: I32) -> NDArray[np.bool_]:
        """Return the rows whose logits `apply` may change, bool[rows]."""
        ...

    def apply(self, logits: torch.Tensor, slots: I32, positions: I32) -> None:
        """Change float32[rows, vocab] in place. `positions` are those of the tokens to sample. The rows of a slot are
        adjacent and their positions consecutive: all but the first follow drafts.

        Raises: RuntimeError, if a position before them has no token (valid ids).
        """
        ...
