"""The interfaces of a grammar, for the scheduler, and of a grammar compiler, for the engine."""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from protocol.sampling import StructuredOutputParams

OVERLOADED = "too many grammars are waiting to be compiled; try again later"
UNABLE = "the server cannot compile grammars at the moment; try again later"
NOT_NOW = frozenset({OVERLOADED, UNABLE})
"""Results of a compilation that say nothing about the grammar."""


class Grammar(Protocol):
    """Matching state of one request's output.

    It belongs to the request, so it survives preemption and the loss of workers. It advances on emitted tokens only
    (docs/invariants.md).
    """

    def accept(self, token_id: int) -> bool:
        """Advance by a token that is about to be emitted. Return False if the token does not match or an earlier
        `fill` failed; the request has then failed."""

    def fill(self, mask: NDArray[np.int32]) -> None:
        """Write the tokens that may come next into `mask`, int32[ceil(vocab / 32)]: one bit per token, least
        significant bit first. All bits are set where every token may come, and after a failure, which the next
        `accept` reports."""

    def look_ahead(self, token_ids: list[int], masks: NDArray[np.int32]) -> int:
        """Fill `masks`, int32[more rows than tokens, ceil(vocab / 32)]: the first row as `fill` does, each further row
        as if one more of the tokens had been accepted. Stops at a token that does not match or ends the output.
        Return the number of rows that were filled. The matching state is unchanged."""


class MaskMaker(Protocol):
    """Makes the masks of a request's next row."""

    @property
    def late(self) -> bool:
        """False: `submit` returns the masks."""

    def submit(self, ticket: int, grammar: Grammar, draft_ids: list[int], num_words: int) -> NDArray[np.int32] | None:
        """Return the masks, int32[masks, num_words], if they are made at once: that of the next token, and one for each
        position that drafts within the grammar lead to. Otherwise return None; `EngineCore.on_masks` receives them.

        The grammar is not used by others until then.
        """


class Compiler(Protocol):
    """Compiles grammars outside of the engine's loop. `EngineCore.on_grammar` receives each result."""

    def submit(
        self, ticket: int, params: StructuredOutputParams, eos_token_ids: tuple[int, ...], again: bool = False
    ) -> None:
        """Start to compile and return at once.

        Args:
            ticket: a number that is used once.
            eos_token_ids: tokens that may be sampled where the grammar may end.
            again: the request was admitted before. It is not refused because others wait.
        """

    def cancel(self, ticket: int) -> None:
        """Drop the request for a grammar. A result that is already on its way may still arrive."""
