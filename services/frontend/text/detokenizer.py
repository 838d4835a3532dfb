"""Tokens of one answer to text, token by token, without incomplete characters."""

import codecs
from collections.abc import Callable
from typing import Any

Decode = Callable[[list[int]], str]
"""Returns the text of tokens; bytes that are no character are U+FFFD."""


class WindowDetokenizer:
    """Detokenizer for any tokenizer.

    A character's bytes may be spread over up to four tokens, and a token's text may depend on the one before it. So the
    text of a token is the difference of two decodings of a small window that begins with earlier tokens.
    """

    _MAX_BYTES = 4
    """Maximum bytes of a character in UTF-8, and so of the tokens it is spread over."""
    _MAX_WINDOW = 32
    """Maximum tokens, which bounds the cost of a text whose characters are never completed."""

    def __init__(self, decode: Decode, prompt: list[int]) -> None:
        """
        Args:
            prompt: the tokens before the answer.
        """
        self._decode = decode
        self._window: list[int] = []
        self._shown = ""
        for size in range(8, 8 + self._MAX_BYTES):  # one of these begins at a character boundary
            text = self._decode(prompt[-size:])
            if not text.endswith("\ufffd"):
                self._window, self._shown = prompt[-size:], text
                break
        # Otherwise the prompt itself ends inside a character, which this answer does not complete.
        self._num_context = len(self._window)

    def push(self, token_id: int) -> str:
        """Return the text that became certain with this token; "" while a character is incomplete."""
        self._window.append(token_id)
        text = self._decode(self._window)
        if text.endswith("\ufffd"):
            return self._push_damaged(text)
        new = text[len(self._shown) :]
        if new:
            self._window = self._window[self._num_context :]
            self._num_context = len(self._window)
            self._shown = self._decode(self._window)
        elif len(self._window) > self._MAX_WINDOW:
            self._window.pop()  # tokens without text, such as special tokens
        return new

    def _push_damaged(self, text: str) -> str:
        """Return the new text, without bytes at its end that may still become a character."""
        if len(self._window) - self._num_context < self._MAX_BYTES:
            return ""
        open_end = min(len(text) - len(text.rstrip("\ufffd")), self._MAX_BYTES - 1)
        new = text[len(self._shown) : len(text) - open_end]
        self._shown += new
        if len(self._window) > self._MAX_WINDOW:
            self._window, self._num_context = self._window[-8:], 0
            text = self._decode(self._window)
            self._shown = text[: len(text) - open_end]
        return new

    def flush(self) -> str:
        """Return the rest, when no more tokens follow: an incomplete character becomes U+FFFD."""
        new = self._decode(self._window)[len(self._shown) :]
        self._shown += new
        return new


# Byte-level vocabularies: GPT-2's and later ones. A token's bytes do not depend on its neighbours.


def _byte_letters() -> dict[str, int]:
    """Return the byte for each letter: such a vocabulary writes a byte as one printable letter, itself or U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_LETTER = _byte_letters()


def byte_level_bytes(name: str) -> bytes:
    """Return the bytes of a token of such a vocabulary; b"" if its name is not written in these letters."""
    return bytes(map(_BYTE_OF_LETTER.__getitem__, name)) if _BYTE_OF_LETTER.keys() >= {*name} else b""


class ByteLevelVocabulary(dict[int, str | bytes]):
    """Content of each token, filled on demand: text, or bytes if they are no complete characters."""

    def __init__(self, name: Callable[[int], str], hidden: frozenset[int]) -> None:
        """
        Args:
            name: returns the vocabulary's form of a token, "" for an unknown id.
            hidden: tokens without text.
        """
        super().__init__()
        self._name = name
        self._hidden = hidden

    def __missing__(self, token_id: int) -> str | bytes:
        content = self[token_id] = "" if token_id in self._hidden else self._read(self._name(token_id))
        return content

    @staticmethod
    def _read(name: str) -> str | bytes:
        raw = byte_level_bytes(name) or name.encode()  # an added token is written as its text
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return raw


class ByteLevelDetokenizer:
    __slots__ = ("_decoder", "_is_inside", "_vocabulary")

    def __init__(self, vocabulary: ByteLevelVocabulary) -> None:
        """The prompt is not needed: an answer does not complete the prompt's last character."""
        self._vocabulary = vocabulary
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._is_inside = False
        """True while the last character is incomplete."""

    def push(self, token_id: int) -> str:
        content = self._vocabulary[token_id]
        if type(content) is str:
            if not self._is_inside:
                return content
            content = content.encode()
        text = self._decoder.decode(content)  # type: ignore[arg-type]
        self._is_inside = bool(self._decoder.getstate()[0])
        return text

    def flush(self) -> str:
        self._is_inside = False
        return self._decoder.decode(b"", final=True)


# Vocabularies of words with "▁" for spaces, and bytes for unknown characters: Llama 2, Mistral, Gemma.


class WordVocabulary(dict[int, str]):
    """Texts of the tokens whose text is the same everywhere but at the beginning of a text; "" for others."""

    def __init__(self, name: Callable[[int], str], added: frozenset[int]) -> None:
        super().__init__()
        self._name = name
        self._added = added

    def __missing__(self, token_id: int) -> str:
        name = self._name(token_id)
        is_word = token_id not in self._added and not name.startswith("<0x") and "\ufffd" not in name
        text = self[token_id] = name.replace("▁", " ") if is_word else ""
        return text


class WordDetokenizer(WindowDetokenizer):
    """Decodes only where a token's text depends on others: at the beginning, and around characters spelled in bytes."""

    def __init__(self, decode: Decode, prompt: list[int], words: WordVocabulary) -> None:
        super().__init__(decode, prompt)
        self._words = words
        self._last: int | None = None
        """The last word, if no text is held back after it; None while the window is in use."""

    def push(self, token_id: int) -> str:
        word = self._words[token_id]
        if self._last is not None:
            if word:
                self._last = token_id
                return word
            self._window, self._num_context, self._last = [self._last], 1, None
            self._shown = self._decode(self._window)
        text = super().push(token_id)
        if word and text:
            self._last = token_id
        return text

    def flush(self) -> str:
        return super().flush() if self._last is None else ""


Detokenizer = ByteLevelDetokenizer | WindowDetokenizer
"""The state of one answer."""
_WORDS: list[dict[str, Any]] = [
    {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
    {"type": "ByteFallback"},
    {"type": "Fuse"},
]
_STRIP: dict[str, Any] = {"type": "Strip", "content": " ", "start": 1, "stop": 0}


def is_byte_level(decoder: dict[str, Any] | None) -> bool:
    """Return whether a decoder of tokenizer.json joins bytes."""
    return decoder is not None and decoder["type"] == "ByteLevel"


def is_word_level(decoder: dict[str, Any] | None) -> bool:
    """Return whether a decoder of tokenizer.json joins words and bytes."""
    if decoder is None or decoder["type"] != "Sequence":
        return False
    return decoder["decoders"] in (_WORDS, [*_WORDS, _STRIP])
