"""Pre-tokenizers by `tokenizer.ggml.pre`, as in tokenizer.json of the models that use them."""

from typing import Any

from services.checkpoint.errors import CheckpointError

BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
_BYTES_ONLY = {**BYTE_LEVEL, "use_regex": False}
_DIGITS: list[dict[str, Any]] = [{"type": "Digits", "individual_digits": True}, BYTE_LEVEL]
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


_CASED_WORDS = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""The pattern of o200k, which divides words where capital letters begin."""


def _split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def _words(digits: str) -> list[dict[str, Any]]:
    return [_split(_WORDS.format(digits=digits)), _BYTES_ONLY]


_CASED = [_split(_CASED_WORDS), _BYTES_ONLY]
_DEFAULT = [
    _split(r"[\p{P}\$\+<=>\^~\|]+"),
    _split(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"),
    _split(r"\p{N}+"),
    _split(r"[0-9][0-9][0-9]"),
    _BYTES_ONLY,
]
"""llama.cpp's rules for files that name no pre-tokenizer."""
ADD_BOS = ("llama-bpe", "llama3", "llama-v3")
"""Pre-tokenizers with a BOS token unless the file says otherwise. Whole words of their vocabularies need no merges."""
_QWEN = ("qwen2", "deepseek-r1-qwen")
_NFC = ("olmo", *_QWEN)
_BY_NAME: dict[str, list[dict[str, Any]]] = {
    "gpt-2": [BYTE_LEVEL],
    "olmo": [BYTE_LEVEL],
    "default": _DEFAULT,
    **dict.fromkeys(("smollm", "refact", "starcoder"), _DIGITS),
    **dict.fromkeys(("gpt-4o", "llama4"), _CASED),
    **dict.fromkeys(("dbrx", "smaug-bpe", *ADD_BOS), _words(r"\p{N}{1,3}")),
    **dict.fromkeys(_QWEN, _words(r"\p{N}")),
}


def pre_tokenizer(name: str) -> dict[str, Any]:
    """Raises: CheckpointError, if the name is not supported."""
    if name not in _BY_NAME:
        raise CheckpointError(
            f"tokenizer.ggml.pre {name!r:.80} is not supported; supported are {', '.join(_BY_NAME)}. "
            "Name the original tokenizer with --tokenizer"
        )
    return {"type": "Sequence", "pretokenizers": _BY_NAME[name]}


def normalizer(name: str) -> dict[str, Any] | None:
    return {"type": "NFC"} if name in _NFC else None
