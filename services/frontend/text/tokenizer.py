"""Text to token ids and back, with the checkpoint's tokenizer.json."""

import json
from functools import partial
from pathlib import Path
from typing import Any, Literal

from tokenizers import Tokenizer as HFTokenizer

from services.checkpoint import CheckpointError, read_text, special_tokens, text_digest
from services.frontend.text.detokenizer import (
    ByteDetokenizer,
    ByteVocabulary,
    Detokenizer,
    WindowDetokenizer,
    reader_of_names,
    strips_first_space,
)

CutSide = Literal["left", "right"]
MANY = 4096
"""Tokens from which decoding takes so long that it must not hold the GIL."""
_HARMLESS_NORMALIZERS = {"NFC", "NFKC", "Prepend", "Replace", "Sequence"}


class Tokenizer:
    """Thread-safe."""

    def __init__(self, checkpoint: Path) -> None:
        """
        Args:
            checkpoint: a directory or a GGUF file.

        Raises: CheckpointError
        """
        text = read_text(checkpoint, "tokenizer.json")
        if text is None:
            raise CheckpointError(f"{checkpoint} has no tokenizer.json; name another tokenizer with --tokenizer")
        try:
            self._tokenizer = HFTokenizer.from_str(text)
        except Exception as error:  # the library raises bare Exception
            raise CheckpointError(f"{checkpoint / 'tokenizer.json'} cannot be read: {error}") from None
        self.digest = text_digest(text)
        """Digest of tokenizer.json."""
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self.special = special_tokens(checkpoint)
        """Texts of the special tokens by name, for chat templates."""
        self.eos_token_id: int | None = self._tokenizer.token_to_id(self.special.get("eos_token", ""))
        layout = json.loads(self._tokenizer.to_str())
        self.max_token_chars = _max_token_chars(self._tokenizer, layout)
        """Maximum characters of text that one token stands for; 0 if there is no bound."""
        decoder = layout.get("decoder") or {}
        special = frozenset(token["id"] for token in layout["added_tokens"] if token["special"])
        self._vocabularies: list[ByteVocabulary] = []
        """Without and with the texts of special tokens; none if the texts of tokens depend on their neighbours."""
        if (read := reader_of_names(decoder)) is not None:
            self._vocabularies = [ByteVocabulary(self.name, read, hidden) for hidden in (special, frozenset())]
        self._strips = strips_first_space(decoder)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Encode a text, with the special tokens that tokenizer.json adds; a chat template has written them itself.

        As in transformers, tokenizer.json takes precedence over `add_bos_token` in the configuration.
        """
        # The library releases the GIL only for batches. This form also skips offsets, which nothing reads.
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return list(encoding.ids)

    def count(self, text: str) -> int:
        """Return the number of tokens of a text, without special ones that belong to a whole prompt."""
        return len(self.encode(text, add_special_tokens=False))

    def encode_texts(
        self, first: str, second: str | None, add_special_tokens: bool, most: int | None, cut: CutSide = "right"
    ) -> tuple[list[int], int | None]:
        """Encode a text or a pair, cut before the special tokens are added, as transformers does.

        Args:
            most: number of tokens to keep, special ones included; of a pair the longer text is cut first. None: all.
            cut: the side of a text that is cut off.

        Returns: token ids, and the index of the first token of the second text, if the tokenizer marks it.
        """
        texts = [first] if second is None else [first, second]
        parts = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        if most is not None:
            added = self._tokenizer.num_special_tokens_to_add(second is not None) if add_special_tokens else 0
            lengths = _fitting([len(part.ids) for part in parts], max(most - added, 0))
            for part, length in zip(parts, lengths, strict=True):
                part.truncate(length, direction=cut)
        whole = self._tokenizer.post_process(parts[0], None if second is None else parts[1], add_special_tokens)
        types = whole.type_ids
        return list(whole.ids), types.index(1) if 1 in types else None

    def decode(self, token_ids: list[int], show_special: bool = False) -> str:
        """Return the text, with the special tokens' texts if `show_special`."""
        if len(token_ids) < MANY:
            return str(self._tokenizer.decode(token_ids, not show_special))
        (text,) = self._tokenizer.decode_batch([token_ids], not show_special)  # releases the GIL
        return str(text)

    def name(self, token_id: int) -> str:
        """Return the vocabulary's form of the token; "" for an unknown id."""
        return self._tokenizer.id_to_token(token_id) or ""

    def detokenizer(self, prompt: list[int], show_special: bool = False) -> Detokenizer:
        """Return a detokenizer for one answer after `prompt`."""
        if not self._vocabularies:
            return WindowDetokenizer(partial(self.decode, show_special=show_special), prompt)
        vocabulary = self._vocabularies[show_special]
        begins = self._strips and not any(map(vocabulary.__getitem__, prompt))  # the prompt has no text
        return ByteDetokenizer(vocabulary, begins)


def _fitting(lengths: list[int], most: int) -> list[int]:
    """Return the lengths of one or two texts that fit together into `most` tokens, as transformers cuts them with
    "longest_first"."""
    if sum(lengths) <= most:
        return lengths
    if len(lengths) == 1:
        return [most]
    short = min(min(lengths), most // 2)
    return [short, most - short] if lengths[0] <= lengths[1] else [most - short, short]


def _max_token_chars(tokenizer: HFTokenizer, layout: dict[str, Any]) -> int:
    """Return 0 if a token may stand for any amount of text: unknown words, stripped white space, other normalizers."""
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
    return longest * (3 if normalizes else 1)  # NFC and NFKC compose up to three characters into one
