"""A grammar that is a token automaton drawn from a seed, and a compiler that answers when the test lets it."""

from copy import copy
from functools import lru_cache
from typing import Self

import numpy as np
from numpy.typing import NDArray

from protocol.sampling import GrammarKind, StructuredOutputParams
from services.scheduler.grammar import Grammar, Masks
from services.scheduler.grammar.masks import make_masks
from tests.simulation.hashing import ROOT, extend, words

REFUSED = "refused"
"""The text of a grammar that cannot be compiled."""


def structured(seed: int, fails_after: int | None = None) -> StructuredOutputParams:
    """Return a random automaton. `fails_after`: tokens after which it fails at run time; None: never."""
    return StructuredOutputParams(GrammarKind.GRAMMAR, f"{seed} {-1 if fails_after is None else fails_after}")


@lru_cache(1 << 13)
def _allowed(state: int, vocab: int) -> NDArray[np.bool_]:
    share = (0.9, 0.4, 0.1, 0.02)[state % 4]
    allowed = words(state, vocab) < np.uint64(share * 2**64)
    allowed[state % vocab] |= not allowed.any()
    allowed.flags.writeable = False
    return allowed


class Automaton:
    """A `Grammar`. Each state draws the tokens that it allows; after an EOS only EOS is allowed."""

    def __init__(self, seed: int, fails_after: int, vocab: int, eos: tuple[int, ...]) -> None:
        self.state = extend(ROOT, seed)
        self._left, self._vocab, self._eos = fails_after, vocab, eos
        self._ended = self.failed = False

    @classmethod
    def from_params(cls, params: StructuredOutputParams, vocab: int, eos: tuple[int, ...]) -> Self:
        seed, fails_after = map(int, params.text.split())
        return cls(seed, fails_after, vocab, eos)

    def allowed(self) -> NDArray[np.bool_]:
        """Return bool[vocab]: the tokens that may come next, at least one."""
        if self._ended:
            return np.isin(np.arange(self._vocab), self._eos)
        return _allowed(self.state, self._vocab)

    def accept(self, token_id: int) -> bool:
        if self.failed or not self.allowed()[token_id]:
            return False
        self._left -= 1
        self._ended = token_id in self._eos
        self.state = extend(self.state, token_id)
        return True

    def fill(self, mask: NDArray[np.int32]) -> None:
        self.failed = self.failed or self._left == 0
        mask[:] = -1 if self.failed else self._bits()

    def look_ahead(self, token_ids: list[int], masks: NDArray[np.int32]) -> int:
        self.fill(masks[0])
        if self.failed or self._ended:
            return 1
        ahead, filled = copy(self), 1
        for token in token_ids:
            if token < 0 or token in self._eos or not ahead.accept(token):
                break
            ahead.fill(masks[filled])
            if ahead.failed:
                break
            filled += 1
        return filled

    def mask(self) -> NDArray[np.int32]:
        """Return the mask of the next token, int32[ceil(vocab / 32)]."""
        mask = np.zeros(-(-self._vocab // 32), np.int32)
        self.fill(mask)
        return mask

    def _bits(self) -> NDArray[np.int32]:
        padded = np.zeros(-(-self._vocab // 32) * 32, np.bool_)
        padded[: self._vocab] = self.allowed()
        return np.packbits(padded, bitorder="little").view(np.int32)


class Compilation:
    """A `Compiler`: submitted grammars wait until the test finishes them, in any order."""

    def __init__(self, vocab: int) -> None:
        self.waiting: dict[int, tuple[StructuredOutputParams, tuple[int, ...]]] = {}
        self.cancelled: set[int] = set()
        self._vocab = vocab

    def submit(
        self, ticket: int, params: StructuredOutputParams, eos_token_ids: tuple[int, ...], again: bool = False
    ) -> None:
        assert ticket not in self.waiting
        self.waiting[ticket] = params, eos_token_ids

    def cancel(self, ticket: int) -> None:
        """The answer may still be delivered."""
        assert ticket in self.waiting
        self.cancelled.add(ticket)

    def finish(self, ticket: int) -> Automaton | str:
        params, eos = self.waiting.pop(ticket)
        if params.text == REFUSED:
            return "it cannot be compiled"
        return Automaton.from_params(params, self._vocab, eos)


class LateMasks:
    """A `MaskMaker`: submitted masks wait until the test finishes them, in any order."""

    late = True

    def __init__(self) -> None:
        self.waiting: dict[int, tuple[Automaton, list[int], int, int]] = {}
        """Ticket -> grammar, drafts, words, and the grammar's state when the masks were submitted."""

    def submit(self, ticket: int, grammar: Grammar, draft_ids: list[int], num_words: int) -> Masks | None:
        assert isinstance(grammar, Automaton)
        assert ticket not in self.waiting
        assert grammar not in [waiting for waiting, *_ in self.waiting.values()], "made twice at once"
        self.waiting[ticket] = grammar, draft_ids, num_words, grammar.state
        return None

    def finish(self, ticket: int) -> Masks:
        grammar, draft_ids, num_words, state = self.waiting.pop(ticket)
        assert grammar.state == state, "emitted tokens only: a grammar moved while its masks were made"
        return make_masks(grammar, draft_ids, num_words)
