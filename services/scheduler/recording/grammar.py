"""Grammars of a replay: they answer what the recorded ones answered."""

import numpy as np
from numpy.typing import NDArray

from protocol.sampling import StructuredOutputParams
from services.scheduler.grammar import Grammar, Masks


class RecordedGrammar:
    """Implementation of `Grammar`. The replay sets the answers before they are requested. Masks have all bits set: they
    are not recorded."""

    def __init__(self, num_matching: int) -> None:
        self.num_matching = num_matching
        """Tokens that will match."""
        self.num_masks = 1
        """Masks that the next `look_ahead` fills."""

    def accept(self, token_id: int) -> bool:
        self.num_matching -= 1
        return self.num_matching >= 0

    def fill(self, mask: NDArray[np.int32]) -> None:
        mask[:] = -1

    def look_ahead(self, token_ids: list[int], masks: NDArray[np.int32]) -> int:
        filled = min(self.num_masks, len(masks))
        masks[:filled] = -1
        return filled


class RecordedMaskMaker:
    """Implementation of `MaskMaker`: the replay delivers the masks."""

    late = True

    def submit(self, ticket: int, grammar: Grammar, draft_ids: list[int], num_words: int) -> Masks | None:
        return None


class RecordedCompiler:
    """Implementation of `Compiler`: the replay delivers the grammars."""

    def submit(
        self, ticket: int, params: StructuredOutputParams, eos_token_ids: tuple[int, ...], again: bool = False
    ) -> None:
        """Ignored."""

    def cancel(self, ticket: int) -> None:
        """Ignored."""
