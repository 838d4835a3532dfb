"""Bound on whitespace between the parts of a JSON output: a weak model may emit whitespace without end.

llguidance accepts any amount of it. A line feed is allowed between two parts and never inside of a string, so the mask
itself shows the position in the JSON text.
"""

from typing import Self

import numpy as np
from llguidance import LLTokenizer
from numpy.typing import NDArray


class Whitespace:
    def __init__(self, token_ids: frozenset[int], line_feed: int, n_vocab: int) -> None:
        self.token_ids = token_ids
        """Tokens that consist of whitespace only."""
        self._word, self._bit = divmod(line_feed, 32)
        bits = np.zeros(-(-n_vocab // 32) * 32, np.uint8)
        bits[list(token_ids)] = 1
        self._others = ~np.packbits(bits, bitorder="little").view(np.int32)

    @classmethod
    def from_tokenizer(cls, tokenizer: LLTokenizer) -> Self | None:
        """Return None if no single token is a line feed."""
        line_feed = tokenizer.tokenize_bytes(b"\n")
        if len(line_feed) != 1:
            return None
        plain = (token for token in range(tokenizer.vocab_size) if not tokenizer.is_special_token(token))
        texts = ((token, tokenizer.decode_bytes([token])) for token in plain)
        blank = (token for token, text in texts if text and not text.strip(b" \t\r\n"))
        return cls(frozenset(blank), line_feed[0], tokenizer.vocab_size)

    def forbid(self, mask: NDArray[np.int32]) -> None:
        """Clear the whitespace tokens in `mask`, int32[ceil(vocab / 32)], if the position is between two parts and
        another token may follow."""
        if int(mask[self._word]) >> self._bit & 1:
            rest = mask & self._others
            if rest.any():
                mask[:] = rest
