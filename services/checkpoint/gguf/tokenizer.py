"""tokenizer.json and tokenizer_config.json from the metadata of a GGUF file."""

from collections.abc import Mapping, Sequence
from typing import Any

from services.checkpoint.errors import CheckpointError
from services.checkpoint.gguf import pre_tokenizers
from services.checkpoint.gguf.header import GgufHeader
from services.checkpoint.gguf.special_tokens import BYTE, CONTROL, NORMAL, UNKNOWN, USER_DEFINED, token_id

_KINDS = ("gpt2", "llama")
_SPACE = "▁"
_KEEPS_SPACE = ("<unk>", "<s>", "<|endoftext|>")
"""Special tokens of Phi-3 that do not strip the white space behind them. The file does not say that the others do."""
MAX_PIECE = 512
"""Maximum number of characters in a piece of a SentencePiece vocabulary. Merges take time and memory in proportion."""


def tokenizer_json(header: GgufHeader) -> dict[str, Any]:
    """Return the content of tokenizer.json. Raises: CheckpointError, if the tokenizer is not supported."""
    kind = header.text("tokenizer.ggml.model")
    if kind not in _KINDS:
        raise CheckpointError(
            f"{header.path}: tokenizer.ggml.model {kind!r:.80} is not supported; supported are {', '.join(_KINDS)}. "
            "Name the original tokenizer with --tokenizer"
        )
    tokens, types = _vocabulary(header)
    strips = header.architecture == "phi3" and kind == "llama"
    sections = _byte_level(header, tokens) if kind == "gpt2" else _sentencepiece(header, tokens, types)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            _added(i, token, of_type, strips and token not in _KEEPS_SPACE)
            for i, (token, of_type) in enumerate(zip(tokens, types, strict=True))
            if of_type in (CONTROL, USER_DEFINED, UNKNOWN)
        ],
        **sections,
        "post_processor": _post_processor(header, tokens, kind),
    }


def tokenizer_config(header: GgufHeader) -> dict[str, Any]:
    """Return the content of tokenizer_config.json: special tokens and chat templates."""
    tokens = header.texts("tokenizer.ggml.tokens")
    ids = {name: token_id(header, name) for name in ("bos", "eos", "unk", "pad")}
    config: dict[str, Any] = {f"{name}_token": tokens[i] for name, i in ids.items() if i is not None}
    config |= {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    template = header.metadata.get("tokenizer.chat_template")
    if isinstance(template, str):
        config["chat_template"] = template
    tool_use = header.metadata.get("tokenizer.chat_template.tool_use")
    if isinstance(template, str) and isinstance(tool_use, str):
        named = {"default": template, "tool_use": tool_use}
        config["chat_template"] = [{"name": name, "template": text} for name, text in named.items()]
    return config


def _vocabulary(header: GgufHeader) -> tuple[list[str], list[int]]:
    """Return the tokens and their types. Raises: CheckpointError, if they do not belong together."""
    tokens = header.texts("tokenizer.ggml.tokens")
    types = header.numbers("tokenizer.ggml.token_type") or [NORMAL] * len(tokens)
    if not tokens or len(types) != len(tokens):
        raise CheckpointError(
            f"{header.path} has {len(tokens)} tokens and {len(types)} types of tokens; convert the model again"
        )
    if len(set(tokens)) != len(tokens):
        raise CheckpointError(f"{header.path} has the same token twice; convert the model again")
    return tokens, types


def _added(number: int, token: str, kind: int, rstrip: bool) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": rstrip, "normalized": False}
    return {"id": number, "content": token, **flags, "special": kind != USER_DEFINED}


def _byte_level(header: GgufHeader, tokens: list[str]) -> dict[str, Any]:
    name = header.text("tokenizer.ggml.pre", "default")
    try:
        pre_tokenizer = pre_tokenizers.pre_tokenizer(name)
    except CheckpointError as error:
        raise CheckpointError(f"{header.path}: {error}") from None
    return {
        "normalizer": pre_tokenizers.normalizer(name),
        "pre_tokenizer": pre_tokenizer,
        "decoder": pre_tokenizers.BYTE_LEVEL,
        "model": _bpe(
            {token: i for i, token in enumerate(tokens)},
            [tuple(merge.split(" ", 1)) for merge in header.texts("tokenizer.ggml.merges")],
            ignore_merges=name in pre_tokenizers.ADD_BOS,
        ),
    }


def _sentencepiece(header: GgufHeader, tokens: list[str], types: list[int]) -> dict[str, Any]:
    scores = header.numbers("tokenizer.ggml.scores")
    if len(scores) != len(tokens) or max(map(len, tokens)) > MAX_PIECE:
        raise CheckpointError(
            f"{header.path} has {len(scores)} scores of {len(tokens)} tokens, or a token with more than {MAX_PIECE} "
            "characters; convert the model again"
        )
    ids = {token: i for i, token in enumerate(tokens)}
    made = {token: score for token, score, kind in zip(tokens, scores, types, strict=True) if kind == NORMAL}
    prefix = header.flag("tokenizer.ggml.add_space_prefix", True)
    unknown = token_id(header, "unk")
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    steps = [{"type": "Prepend", "prepend": _SPACE}] * prefix + [replace]
    decoders = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    decoders += [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] * prefix
    return {
        "normalizer": {"type": "Sequence", "normalizers": steps},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": _bpe(
            ids,
            _merges(made, ids),
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=BYTE in types,
        ),
    }


def _merges(scores: Mapping[str, float], ids: Mapping[str, int]) -> list[tuple[str, str]]:
    """Return all pairs of pieces that make a piece, best first, as the converter of `transformers` orders them.

    A file has equal scores if it was converted without the SentencePiece model; then pieces are in the order of merges.

    Args:
        scores: of the pieces that a merge may make.
        ids: of all pieces.
    """
    found: list[tuple[float, int, int, str, str]] = []
    for piece, score in scores.items():
        pairs = [(piece[:i], piece[i:]) for i in range(1, len(piece))]
        pairs = [(left, right) for left, right in pairs if left in ids and right in ids]
        found.extend((score, -ids[piece], len(left), left, right) for left, right in pairs)
    found.sort(reverse=True)
    return [(left, right) for *_, left, right in found]


def _bpe(ids: dict[str, int], merges: Sequence[tuple[str, ...]], **options: Any) -> dict[str, Any]:
    return {"type": "BPE", **options, "vocab": ids, "merges": merges}


def _post_processor(header: GgufHeader, tokens: list[str], kind: str) -> dict[str, Any] | None:
    """Return the processor that adds BOS and EOS to a plain prompt; None if neither is added."""
    pre = header.text("tokenizer.ggml.pre", "default")
    adds = {
        "bos": header.flag("tokenizer.ggml.add_bos_token", kind == "llama" or pre in pre_tokenizers.ADD_BOS),
        "eos": header.flag("tokenizer.ggml.add_eos_token", False),
    }
    ids = {name: i for name, add in adds.items() if add and (i := token_id(header, name)) is not None}
    if not ids:
        return {**pre_tokenizers.BYTE_LEVEL, "trim_offsets": False} if kind == "gpt2" else None

    def sequence(text: str, number: int) -> list[dict[str, Any]]:
        special = {name: [{"SpecialToken": {"id": tokens[i], "type_id": number}}] for name, i in ids.items()}
        return [*special.get("bos", []), {"Sequence": {"id": text, "type_id": number}}, *special.get("eos", [])]

    return {
        "type": "TemplateProcessing",
        "single": sequence("A", 0),
        "pair": sequence("A", 0) + sequence("B", 1),
        "special_tokens": {tokens[i]: {"id": tokens[i], "ids": [i], "tokens": [tokens[i]]} for i in ids.values()},
    }
