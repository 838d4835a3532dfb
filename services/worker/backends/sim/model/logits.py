"""The simulated model: a logits row that is a function of the hash of everything before it.

Each row has one top token, which is known without computing the row, and a long tail shaped like natural text: the
weights of the other tokens fall off as one over their place in the order. So greedy decoding is cheap and sampling has
real entropy.
"""

import numpy as np
from numpy.typing import NDArray

from services.worker.sampling.noise import gumbel, gumbel_pairs

F32 = NDArray[np.float32]
U64 = NDArray[np.uint64]
EOS_EVERY = 64
"""One row in this many has an EOS token as its top token, if the model has one."""
ROW = 0xFFFFFFFF
"""Position in the noise that is used for logits; no token has it."""


def scramble(x: U64) -> U64:
    """Return `x` with all 64 bits mixed (the finaliser of splitmix64)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def set_bits(masks: NDArray[np.int32]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the row and the number of every set bit of int32[rows, words]: int64[bits] each, ascending by row and bit.

    A word without set bits costs one comparison, not 32.
    """
    words = np.flatnonzero(masks)
    octets = masks.reshape(-1)[words].view(np.uint8)
    at = np.flatnonzero(np.unpackbits(octets, bitorder="little").view(np.bool_))
    rows, word = np.divmod(words, masks.shape[1])
    return rows[at >> 5], word[at >> 5] * 32 + (at & 31)


class Logits:
    """Logits of a model with `vocab_size` tokens, of which `eos_token_ids` end a text."""

    def __init__(self, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self.vocab_size = vocab_size
        self._eos = np.array([token for token in eos_token_ids if token < vocab_size], np.int64)
        self._ceiling = np.float32(np.log(vocab_size) + 1)

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
        rows = gumbel(scramble(hashes), np.full(len(hashes), ROW, np.uint32), np.arange(self.vocab_size))
        np.minimum(rows, self._ceiling, out=rows)
        rows[np.arange(len(rows)), self.top(hashes)] = self._ceiling + np.float32(0.5)
        return rows

    def row(self, hashes: U64, only: NDArray[np.int64] | None = None) -> F32:
        """Return float32[vocab] for uint64[1] hashes. With `only`, other tokens are minus infinity and cost nothing."""
        if only is None:
            return self.rows(hashes)[0]
        row = np.full(self.vocab_size, -np.inf, np.float32)
        row[only] = gumbel(scramble(hashes), np.full(1, ROW, np.uint32), only)[0]
        np.minimum(row, self._ceiling, out=row)
        top = self.top(hashes)[0]
        if row[top] > -np.inf:
            row[top] = self._ceiling + np.float32(0.5)
        return row

    def greatest(self, hashes: U64, masks: NDArray[np.int32]) -> NDArray[np.int32]:
        """Return int32[rows]: the argmax of each row among the tokens whose bit is set in `masks`; 0 if none is set.

        The masks must not allow a row's top token. Several rows with few tokens cost about as much as one.

        Args:
            masks: int32[rows, ceil(vocab / 32)].
        """
        rows, tokens = set_bits(masks)
        if self.vocab_size % 32:
            inside = tokens < self.vocab_size
            rows, tokens = rows[inside], tokens[inside]
        found = np.zeros(len(hashes), np.int32)
        if len(rows):
            noise = gumbel_pairs(scramble(hashes), np.full(len(hashes), ROW, np.uint32), rows, tokens)
            np.minimum(noise, self._ceiling, out=noise)
            starts = _firsts(rows)
            best = np.repeat(np.maximum.reduceat(noise, starts), np.diff(starts, append=len(rows)))
            winners = np.flatnonzero(noise == best)
            first = winners[_firsts(rows[winners])]  # among equal ones the lowest id
            found[rows[first]] = tokens[first]
        return found


def _firsts(rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return where each run of equal numbers begins. `rows` must not be empty."""
    new = np.empty(len(rows), np.bool_)
    new[0] = True
    np.not_equal(rows[1:], rows[:-1], out=new[1:])
    return np.flatnonzero(new)
