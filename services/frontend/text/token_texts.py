"""Text and bytes of single tokens."""

from typing import NamedTuple

from services.frontend.text.detokenizer import byte_level_bytes, single_byte
from services.frontend.text.tokenizer import Tokenizer


class TokenText(NamedTuple):
    text: str
    """Bytes that are no complete character are U+FFFD."""
    raw: bytes


class TokenTexts(dict[int, TokenText]):
    """Texts by token id, filled on demand, at most to the size of the vocabulary."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._before = tokenizer.encode("a", add_special_tokens=False)[-1:]
        """Decoded before each token, as a token may lose its leading space at the beginning of a text."""
        self._skip = len(tokenizer.decode(self._before, show_special=True))

    def __missing__(self, token_id: int) -> TokenText:
        text = self._tokenizer.decode([*self._before, token_id], show_special=True)[self._skip :]
        found = self[token_id] = TokenText(text, self._bytes(token_id) if "\ufffd" in text else text.encode())
        return found

    def _bytes(self, token_id: int) -> bytes:
        """Return the bytes of a token that holds part of a character."""
        name = self._tokenizer.name(token_id)
        return single_byte(name) or byte_level_bytes(name) or "\ufffd".encode()
