"""Special tokens of a GGUF file."""

from services.checkpoint.errors import CheckpointError
from services.checkpoint.gguf.header import GgufHeader

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
"""Values of `tokenizer.ggml.token_type`."""
_KEYS = {"bos": "bos", "eos": "eos", "eot": "eot", "eom": "eom", "unk": "unknown", "pad": "padding"}
_ENDS = (
    "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|eot|>", "<|eom|>", "<|end|>", "<end_of_turn>", "<|endoftext|>",
    "<|end_of_text|>",
)  # fmt: skip
"""Control tokens that end an answer in the chat formats of common models. Many files name only one of them."""
_HARMONY_ENDS = ("<|return|>", "<|call|>")
"""Tokens that end an answer of gpt-oss. `<|end|>` only ends a message: the answer follows that with the reasoning."""


def token_id(header: GgufHeader, name: str) -> int | None:
    """Return the id of "bos", "eos", "eot", "eom", "unk" or "pad"; None if the file names none.

    Raises: CheckpointError, if the id is outside of the vocabulary.
    """
    key = f"tokenizer.ggml.{_KEYS[name]}_token_id"
    if key not in header.metadata:
        return None
    number, count = header.integer(key), len(header.texts("tokenizer.ggml.tokens"))
    if number == 2**32 - 1:  # ggml's value for none
        return None
    if not 0 <= number < count:
        raise CheckpointError(f"{header.path}: {key} {number} is not among the {count} tokens")
    return number


def end_tokens(header: GgufHeader) -> tuple[int, ...]:
    """Return the ids of the tokens that end an answer, without duplicates."""
    named = [token_id(header, name) for name in ("eos", "eot", "eom")]
    tokens, types = header.texts("tokenizer.ggml.tokens"), header.numbers("tokenizer.ggml.token_type")
    control = {tokens[i] for i, kind in enumerate(types) if kind == CONTROL and tokens[i : i + 1]}
    ends = {*_ENDS}
    if control.issuperset(_HARMONY_ENDS):
        ends = {*ends - {"<|end|>"}, *_HARMONY_ENDS}
    known = [i for i, token in enumerate(tokens) if token in control and token in ends]
    return tuple(dict.fromkeys(i for i in (*named, *known) if i is not None))
