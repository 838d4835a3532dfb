"""Tokens of one answer to text, piece by piece; never half a character."""

import codecs
from collections.abc import Callable
from typing import Any, Protocol

Decode = Callable[[list[int]], str]
"""The text of some tokens, for which bytes that are no character are U+FFFD."""


class Detokenizer(Protocol):
    """Of one answer."""

    def push(self, token_id: int) -> str:
        """The text that has become certain with this token; "" while a character is incomplete."""
        ...

    def flush(self) -> str:
        """What is left when no more tokens come: an incomplete character shows as U+FFFD."""
        ...


class WindowDetokenizer:
    """For any tokenizer.

    A character's bytes may be spread over up to four tokens, and what a token looks like may depend on the one
    before it. So each piece is the difference of two decodings of a small window that begins with what came before.
    """

    _MAX_BYTES = 4
    """Of one character in UTF-8, hence also the most tokens it is spread over."""
    _MAX_WINDOW = 32
    """Tokens, so that a text without an end of a character costs no more than others."""

    def __init__(self, decode: Decode, prompt: list[int]) -> None:
        """`prompt` is what comes before the answer."""
        self._decode = decode
        self._window: list[int] = []
        self._shown = ""
        for size in range(8, 8 + self._MAX_BYTES):  # one of them begins with a character, not inside of one
            text = self._decode(prompt[-size:])
            if not text.endswith("\ufffd"):
                self._window, self._shown = prompt[-size:], text
                break
        # Otherwise the prompt itself ends inside a character, which is not ours to complete.
        self._num_context = len(self._window)

    def push(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._decode(self._window)
        if text.endswith("\ufffd"):
            return self._push_damaged(text)
        piece = text[len(self._shown) :]
        if piece:
            self._window = self._window[self._num_context :]
            self._num_context = len(self._window)
            self._shown = self._decode(self._window)
        elif len(self._window) > self._MAX_WINDOW:
            self._window.pop()  # one of many that show nothing, such as special tokens
        return piece

    def _push_damaged(self, text: str) -> str:
        """Bytes that are no character, or not yet one: only those that cannot begin one any more are certain."""
        if len(self._window) - self._num_context < self._MAX_BYTES:
            return ""
        open_end = min(len(text) - len(text.rstrip("\ufffd")), self._MAX_BYTES - 1)
        piece = text[len(self._shown) : len(text) - open_end]
        self._shown += piece
        if len(self._window) > self._MAX_WINDOW:
            self._window, self._num_context = self._window[-8:], 0
            text = self._decode(self._window)
            self._shown = text[: len(text) - open_end]
        return piece

    def flush(self) -> str:
        piece = self._decode(self._window)[len(self._shown) :]
        self._shown += piece
        return piece


# Byte-level vocabularies: GPT-2's and those after it. A text is the bytes of its tokens, whatever stands beside them.


def _byte_letters() -> dict[str, int]:
    """Such a vocabulary writes each byte as one printable letter: itself, or one from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTE_OF_LETTER = _byte_letters()


class BytePieces(dict[int, str | bytes]):
    """What each token stands for: text, or bytes where they are not whole characters. Looked up once."""

    def __init__(self, name: Callable[[int], str], hidden: frozenset[int]) -> None:
        """`name` is how the vocabulary writes a token, "" for none of its own; `hidden` tokens show nothing."""
        super().__init__()
        self._name = name
        self._hidden = hidden

    def __missing__(self, token_id: int) -> str | bytes:
        piece = self[token_id] = "" if token_id in self._hidden else self._read(self._name(token_id))
        return piece

    @staticmethod
    def _read(name: str) -> str | bytes:
        letters = [BYTE_OF_LETTER.get(letter) for letter in name]
        known = bytes(letter for letter in letters if letter is not None)
        raw = known if len(known) == len(letters) else name.encode()  # an added token, written as it is
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return raw


class ByteLevelDetokenizer:
    __slots__ = ("_decoder", "_is_inside", "_pieces")

    def __init__(self, pieces: BytePieces) -> None:
        """What a prompt left unfinished is not ours to complete, so it need not be known."""
        self._pieces = pieces
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._is_inside = False
        """Of a character."""

    def push(self, token_id: int) -> str:
        piece = self._pieces[token_id]
        if type(piece) is str:
            if not self._is_inside:
                return piece
            piece = piece.encode()
        text = self._decoder.decode(piece)  # type: ignore[arg-type]
        self._is_inside = bool(self._decoder.getstate()[0])
        return text

    def flush(self) -> str:
        self._is_inside = False
        return self._decoder.decode(b"", final=True)


# Vocabularies of words with "▁" for spaces, where unknown characters are spelt in bytes: Llama 2, Mistral, Gemma.


class WordPieces(dict[int, str]):
    """Texts of those tokens that stand for the same text wherever they are but at the very beginning; "" for others."""

    def __init__(self, name: Callable[[int], str], others: frozenset[int]) -> None:
        super().__init__()
        self._name = name
        self._others = others

    def __missing__(self, token_id: int) -> str:
        name = self._name(token_id)
        is_word = token_id not in self._others and not name.startswith("<0x") and "\ufffd" not in name
        piece = self[token_id] = name.replace("▁", " ") if is_word else ""
        return piece


class WordDetokenizer(WindowDetokenizer):
    """Decodes only where a token's text depends on others: at the beginning, and around characters spelt in bytes."""

    def __init__(self, decode: Decode, prompt: list[int], pieces: WordPieces) -> None:
        super().__init__(decode, prompt)
        self._pieces = pieces
        self._last: int | None = None
        """The word that was shown last, if nothing is held back behind it; otherwise the window rules."""

    def push(self, token_id: int) -> str:
        piece = self._pieces[token_id]
        if self._last is not None:
            if piece:
                self._last = token_id
                return piece
            self._restore(self._last)
        text = super().push(token_id)
        if piece and text:
            self._last = token_id
        return text

    def _restore(self, last: int) -> None:
        self._last = None
        self._window, self._num_context = [last], 1
        self._shown = self._decode(self._window)

    def flush(self) -> str:
        return super().flush() if self._last is None else ""


_WORDS: list[dict[str, Any]] = [
    {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
    {"type": "ByteFallback"},
    {"type": "Fuse"},
]
_STRIP: dict[str, Any] = {"type": "Strip", "content": " ", "start": 1, "stop": 0}


def is_byte_level(decoder: dict[str, Any] | None) -> bool:
    """Whether this decoder, as tokenizer.json writes it, joins bytes."""
    return decoder is not None and decoder["type"] == "ByteLevel"


def is_of_words(decoder: dict[str, Any] | None) -> bool:
    """Whether this decoder, as tokenizer.json writes it, joins words and spelt bytes."""
    if decoder is None or decoder["type"] != "Sequence":
        return False
    return decoder["decoders"] in (_WORDS, [*_WORDS, _STRIP])
