"""The simulated model: a logits row that is a function of the hash of everything before it.

Each row has one top token, which is known without computing the row, and a long tail shaped like natural text: the
weights of the other tokens fall off as one over their place in the order. The place of a token is its id xor a number
of the row, so that the first of many allowed tokens is found from the words of a bitmask. So greedy decoding is cheap,
with grammars too, and sampling has real entropy.
"""

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
I32 = NDArray[np.int32]
U64 = NDArray[np.uint64]
EOS_EVERY = 64
"""One row in this many has an EOS token as its top token, if the model has one."""
WORD = np.arange(32, dtype=np.int32)


def scramble(x: U64) -> U64:
    """Return `x` with all 64 bits mixed (the finaliser of splitmix64)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class Logits:
    """Logits of a model with `vocab_size` tokens, of which `eos_token_ids` end a text.

    Logits of different places differ for vocabularies of at most 2**19 tokens.
    """

    def __init__(self, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self.vocab_size = vocab_size
        self._eos = np.array([token for token in eos_token_ids if token < vocab_size], np.int64)
        self._tokens = np.arange(vocab_size)
        places = np.arange(1 << (vocab_size - 1).bit_length())
        self._at_place = np.log(vocab_size / (places + 1)).astype(np.float32)
        self._of_top = self._at_place[0] + np.float32(1.5)

    def top(self, hashes: U64) -> NDArray[np.int32]:
        """Return int32[rows]: the argmax of each row, without computing the row."""
        words = scramble(hashes)
        top = (words % np.uint64(self.vocab_size)).astype(np.int32)
        if len(self._eos):
            draw = words >> np.uint64(32)
            ends = draw % np.uint64(EOS_EVERY) == 0
            top[ends] = self._eos[draw[ends] // np.uint64(EOS_EVERY) % np.uint64(len(self._eos))]
        return top

    def rows(self, hashes: U64) -> F32:
        """Return float32[rows, vocab]."""
        rows = self._at_place[self._firsts(hashes) ^ self._tokens]
        rows[np.arange(len(rows)), self.top(hashes)] = self._of_top
        return rows

    def greatest(self, hashes: U64, masks: I32) -> I32:
        """Return int32[rows]: the argmax of each row among the tokens whose bit is set in `masks`; 0 if none is set.

        The masks must not allow a row's top token.

        Args:
            masks: int32[rows, ceil(vocab / 32)].
        """
        if beyond := self.vocab_size % 32:
            masks = masks.copy()
            masks[:, -1] &= (1 << beyond) - 1
        firsts, numbers = self._firsts(hashes).astype(np.int32), np.arange(masks.shape[1], dtype=np.int32)
        words = np.where(masks, firsts >> 5 ^ numbers, len(self._at_place)).argmin(axis=1)
        allowed = np.take_along_axis(masks, words[:, None], axis=1) >> WORD & 1
        bits = np.where(allowed, firsts & 31 ^ WORD, 32).argmin(axis=1)
        return (words * 32 + bits).astype(np.int32)

    def _firsts(self, hashes: U64) -> NDArray[np.int64]:
        """Return int64[rows, 1]: the number of each row, which would be its token in the first place."""
        return (scramble(scramble(hashes)) % np.uint64(len(self._at_place))).astype(np.int64)[:, None]
