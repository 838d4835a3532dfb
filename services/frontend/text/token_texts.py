"""What single tokens stand for: their text where they have one of their own, their bytes always."""

import re
from typing import NamedTuple

from services.frontend.text.detokenizer import BYTE_OF_LETTER
from services.frontend.text.tokenizer import Tokenizer

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
"""How vocabularies with byte fallback write a single byte."""


class Word(NamedTuple):
    text: str
    """Bytes that are no text alone show as U+FFFD."""
    raw: bytes


class Vocabulary:
    """Remembers what it was asked for, so it grows to the size of the vocabulary and no further."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._before = tokenizer.encode_rendered("a")[-1:]
        """A token may lose its leading space at the beginning of a text, so each is looked at behind this one."""
        self._skip = len(tokenizer.decode_all(self._before))
        self._words: dict[int, Word] = {}

    def __getitem__(self, token_id: int) -> Word:
        word = self._words.get(token_id)
        if word is None:
            word = self._words[token_id] = self._look_up(token_id)
        return word

    def _look_up(self, token_id: int) -> Word:
        text = self._tokenizer.decode_all([*self._before, token_id])[self._skip :]
        return Word(text, self._bytes(token_id) if "\ufffd" in text else text.encode())

    def _bytes(self, token_id: int) -> bytes:
        """Of a token that holds part of a character."""
        name = self._tokenizer.name(token_id)
        if single := _BYTE.fullmatch(name):
            return bytes.fromhex(single[1])
        letters = [BYTE_OF_LETTER.get(letter) for letter in name]
        known = bytes(letter for letter in letters if letter is not None)
        return known if len(known) == len(letters) else "\ufffd".encode()
