"""Text to token ids and back, directly from the checkpoint's tokenizer.json."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as HFTokenizer

from services.checkpoint import CheckpointError

_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_HARMLESS_NORMALIZERS = {"NFC", "NFKC", "Prepend", "Replace", "Sequence"}


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file, empty if there is no such file. Raises: CheckpointError"""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} does not hold a JSON object")
    return content


class Tokenizer:
    """Safe to share between threads."""

    def __init__(self, directory: Path) -> None:
        """Raises: CheckpointError"""
        file = directory / "tokenizer.json"
        if not file.is_file():
            raise CheckpointError(
                f"{directory} has no tokenizer.json; name another tokenizer with --tokenizer"
            )
        try:
            self._tokenizer = HFTokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare Exception
            raise CheckpointError(f"{file} cannot be read: {error}") from None
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        config = read_json(directory / "tokenizer_config.json")
        self.special = _special_tokens(read_json(directory / "special_tokens_map.json") | config)
        """Texts of the special tokens that a chat template may use."""
        self.eos_token_id: int | None = self._tokenizer.token_to_id(self.special.get("eos_token", ""))
        self.max_token_chars = _max_token_chars(self._tokenizer)
        """No token stands for more characters of the text; 0 where that cannot be known."""

    def encode(self, text: str) -> list[int]:
        """A plain prompt, with what tokenizer.json puts around one (as in transformers, where it overrules
        `add_bos_token` in the configuration)."""
        return list(self._tokenizer.encode(text).ids)

    def encode_rendered(self, text: str) -> list[int]:
        """The output of a chat template, which has written its special tokens itself."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, token_ids: list[int]) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=True))

    def decode_all(self, token_ids: list[int]) -> str:
        """With the texts of special tokens."""
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=False))

    def name(self, token_id: int) -> str:
        """As the vocabulary writes it; "" for ids that it does not have."""
        return self._tokenizer.id_to_token(token_id) or ""

    def stream(self, prompt: list[int], show_special: bool = False) -> "Detokenizer":
        return Detokenizer(self.decode_all if show_special else self.decode, prompt)


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    tokens = {name: config.get(name) for name in _SPECIAL}
    texts = {name: t.get("content") if isinstance(t, dict) else t for name, t in tokens.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str) and text}


def _max_token_chars(tokenizer: HFTokenizer) -> int:
    """0 where a token may stand for any amount of text: unknown words, stripped whitespace, other normalizers."""
    layout = json.loads(tokenizer.to_str())
    model, added = layout["model"], layout["added_tokens"]
    names = {
        part["type"]
        for section in ("normalizer", "pre_tokenizer")
        if (top := layout.get(section))
        for part in (top, *(top.get("normalizers") or top.get("pretokenizers") or ()))
    }
    normalizes = bool(layout.get("normalizer"))
    covers_all_bytes = model["type"] == "BPE" and (model.get("byte_fallback") or "ByteLevel" in names)
    known = _HARMLESS_NORMALIZERS | {"ByteLevel", "Split", "Digits", "Metaspace", "Punctuation"}
    if not covers_all_bytes or names - known or any(t["lstrip"] or t["rstrip"] for t in added):
        return 0
    longest = max(map(len, tokenizer.get_vocab(with_added_tokens=True)), default=0)
    return longest * (3 if normalizes else 1)  # composition makes one character of up to three


class Detokenizer:
    """Tokens of one answer to text, piece by piece; never half a character.

    A character's bytes may be spread over up to four tokens, and what a token looks like may depend on the one
    before it. So each piece is the difference of two decodings of a small window that begins with what came before.
    """

    _MAX_BYTES = 4
    """Of one character in UTF-8, hence also the most tokens it is spread over."""
    _MAX_WINDOW = 32
    """Tokens, so that a text without an end of a character costs no more than others."""

    def __init__(self, decode: Callable[[list[int]], str], prompt: list[int]) -> None:
        """`decode` gives the text of some tokens; `prompt` is what comes before the answer."""
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
        """The text that has become certain with this token; "" while a character is incomplete."""
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
        """What is left when no more tokens come: an incomplete character shows as U+FFFD."""
        piece = self._decode(self._window)[len(self._shown) :]
        self._shown += piece
        return piece
