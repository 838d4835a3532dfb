"""Tokens of one answer to text, token by token, without incomplete characters."""

import codecs
import contextlib
import re
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


# Vocabularies whose tokens are bytes, which do not depend on their neighbours.

ReadName = Callable[[str], bytes]
"""Returns the bytes of a token from its form in the vocabulary."""


def _byte_letters() -> dict[str, int]:
    """Return the byte for each letter: GPT-2's vocabulary writes a byte as a printable letter, itself or U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_LETTER = _byte_letters()
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_level_bytes(name: str) -> bytes:
    """Return the bytes of a token of GPT-2's and later vocabularies; b"" if its name has other letters."""
    return bytes(map(_BYTE_OF_LETTER.__getitem__, name)) if _BYTE_OF_LETTER.keys() >= {*name} else b""


def single_byte(name: str) -> bytes:
    """Return the byte of a token that is one in a vocabulary of words; b"" for any other token."""
    found = _BYTE.fullmatch(name)
    return bytes.fromhex(found[1]) if found else b""


def _of_letters(name: str) -> bytes:
    return byte_level_bytes(name) or name.encode()  # an added token is written as its text


def _of_words(name: str) -> bytes:
    """The vocabularies of Llama 2, Mistral and Gemma have words with "▁" for spaces."""
    return single_byte(name) or name.replace("▁", " ").encode()


_WORDS: list[dict[str, Any]] = [
    {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
    {"type": "ByteFallback"},
    {"type": "Fuse"},
]
_STRIP: dict[str, Any] = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
_EACH = "runahead.each"


def _replace_each(error: UnicodeError) -> tuple[str, int]:
    """Handle errors as ByteFallback does: every byte is U+FFFD. The decoder of letters shows one for all of them."""
    assert isinstance(error, UnicodeDecodeError)
    return "\ufffd" * (error.end - error.start), error.end


codecs.register_error(_EACH, _replace_each)


def reader_of_names(decoder: dict[str, Any]) -> ReadName | None:
    """`decoder`: of tokenizer.json. None: the texts of its tokens depend on their neighbours."""
    if decoder.get("type") == "ByteLevel":
        return _of_letters
    return _of_words if decoder.get("decoders") in (_WORDS, [*_WORDS, _STRIP]) else None


def strips_first_space(decoder: dict[str, Any]) -> bool:
    """Return whether a text of these tokens has no space at its beginning."""
    return decoder.get("decoders") == [*_WORDS, _STRIP]


class ByteVocabulary(dict[int, str | bytes]):
    """Content of each token, filled on demand: text, or bytes if they are no complete characters."""

    def __init__(self, name: Callable[[int], str], read: ReadName, hidden: frozenset[int]) -> None:
        """
        Args:
            name: returns the vocabulary's form of a token, "" for an unknown id.
            hidden: tokens without text.
        """
        super().__init__()
        self._name, self._read, self._hidden = name, read, hidden
        self.errors = _EACH if read is _of_words else "replace"
        """Name of the handler of bytes that are no character."""

    def __missing__(self, token_id: int) -> str | bytes:
        content: str | bytes = b"" if token_id in self._hidden else self._read(self._name(token_id))
        with contextlib.suppress(UnicodeDecodeError):
            content = content.decode()  # type: ignore[union-attr]
        self[token_id] = content
        return content


class ByteDetokenizer:
    __slots__ = ("_decoder", "_is_inside", "_strips", "_vocabulary")

    def __init__(self, vocabulary: ByteVocabulary, strips: bool = False) -> None:
        """The prompt is not needed: an answer does not complete the prompt's last character.

        Args:
            strips: leave out a space at the beginning.
        """
        self._vocabulary, self._strips = vocabulary, strips
        self._decoder = codecs.getincrementaldecoder("utf-8")(vocabulary.errors)
        self._is_inside = strips
        """True while the last character is incomplete, or the first one has not come."""

    def push(self, token_id: int) -> str:
        content = self._vocabulary[token_id]
        if type(content) is str:
            if not self._is_inside:
                return content
            content = content.encode()
        text = self._decoder.decode(content)  # type: ignore[arg-type]
        if self._strips and text:
            self._strips, text = False, text.removeprefix(" ")
        self._is_inside = self._strips or bool(self._decoder.getstate()[0])
        return text

    def flush(self) -> str:
        self._is_inside = False
        return self._decoder.decode(b"", final=True)


Detokenizer = ByteDetokenizer | WindowDetokenizer
"""The state of one answer."""
