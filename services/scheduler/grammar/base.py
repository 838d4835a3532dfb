"""What the scheduling core asks of a grammar, and the engine of whoever compiles one."""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from protocol.sampling import StructuredOutputParams


class Grammar(Protocol):
    """The state of one request's output. It lives with the request, so it survives preemption and lost workers; it
    advances on emitted tokens only (S2-7)."""

    def accept(self, token_id: int) -> bool:
        """Advances by a token that is about to be emitted. False: it does not match, or `fill` has failed before; the
        request is over."""
        ...

    def fill(self, mask: NDArray[np.int32]) -> None:
        """Writes what may come next, int32[ceil(vocab / 32)], a bit per token, least significant first. All bits where
        everything may, and after a failure, which the next `accept` reports."""
        ...

    def look_ahead(self, token_ids: list[int], masks: NDArray[np.int32]) -> int:
        """Fills `masks`, int32[more than the tokens, ceil(vocab / 32)]: the first as `fill` would, each further one as
        if one more of the tokens had been accepted, as far as they match and do not end the output. Returns how many
        were filled; the state is as before."""
        ...


class Compiler(Protocol):
    """Compiles elsewhere: `submit` returns at once, and what became of it comes to `EngineCore.on_grammar`."""

    def submit(self, ticket: int, params: StructuredOutputParams, eos_token_ids: tuple[int, ...]) -> None:
        """`ticket` is never used twice. `eos_token_ids` may be sampled where the grammar may end."""
        ...

    def cancel(self, ticket: int) -> None:
        """Nobody waits for it any more; an answer that is on its way may come all the same."""
        ...
