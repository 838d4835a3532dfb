"""Text to token ids and back, directly from the checkpoint's tokenizer.json."""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as HFTokenizer

from services.checkpoint import CheckpointError, special_tokens
from services.frontend.text.detokenizer import (
    ByteLevelDetokenizer,
    BytePieces,
    Detokenizer,
    WindowDetokenizer,
    WordDetokenizer,
    WordPieces,
    is_byte_level,
    is_of_words,
)

_HARMLESS_NORMALIZERS = {"NFC", "NFKC", "Prepend", "Replace", "Sequence"}


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
        self.special = special_tokens(directory)
        """Texts of the special tokens that a chat template may use."""
        self.eos_token_id: int | None = self._tokenizer.token_to_id(self.special.get("eos_token", ""))
        layout = json.loads(self._tokenizer.to_str())
        self.max_token_chars = _max_token_chars(self._tokenizer, layout)
        """No token stands for more characters of the text; 0 where that cannot be known."""
        self._prepare_streams(layout)

    def _prepare_streams(self, layout: dict[str, Any]) -> None:
        """What all answers share; `layout` is tokenizer.json."""
        decoder = layout.get("decoder")
        added = frozenset(token["id"] for token in layout["added_tokens"])
        special = frozenset(token["id"] for token in layout["added_tokens"] if token["special"])
        self._byte_pieces: tuple[BytePieces, ...] = ()
        """Without the texts of special tokens, and with them."""
        if is_byte_level(decoder):
            self._byte_pieces = BytePieces(self.name, special), BytePieces(self.name, frozenset())
        self._words = WordPieces(self.name, added) if is_of_words(decoder) else None

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

    def stream(self, prompt: list[int], show_special: bool = False) -> Detokenizer:
        """For one answer after `prompt`."""
        if self._byte_pieces:
            return ByteLevelDetokenizer(self._byte_pieces[show_special])
        decode = self.decode_all if show_special else self.decode
        return (
            WordDetokenizer(decode, prompt, self._words)
            if self._words is not None
            else WindowDetokenizer(decode, prompt)
        )


def _max_token_chars(tokenizer: HFTokenizer, layout: dict[str, Any]) -> int:
    """0 where a token may stand for any amount of text: unknown words, stripped whitespace, other normalizers."""
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
