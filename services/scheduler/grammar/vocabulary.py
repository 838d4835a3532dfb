"""Vocabulary of a checkpoint: the text of its tokens, and the tokens that end an output."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from llguidance import LLTokenizer

from services.checkpoint import CheckpointError, named_eos, read_json, read_text, resolve, special_tokens


@dataclass(frozen=True, slots=True)
class GrammarVocabulary:
    text: str
    """Content of tokenizer.json."""
    num_tokens: int
    """Largest token id + 1."""
    eos_token_ids: tuple[int, ...]
    """End-of-sequence tokens of the checkpoint, at least one. A request without any (`ignore_eos`) may end its output
    with one of them."""
    width: int = 0
    """Width of the logits: that of the workers, before it the one that config.json names; 0: it names none that fits.
    """

    @classmethod
    def load(cls, model: str, revision: str | None = None, tokenizer: str | None = None) -> Self:
        """Load the tokenizer from the place where the frontend loads it. Raises: CheckpointError"""
        directory = resolve(model, revision)
        source = resolve(tokenizer) if tokenizer else directory
        if (text := read_text(source, "tokenizer.json")) is None:
            raise CheckpointError(f"{source} has no tokenizer.json")
        try:
            ids = _token_ids(json.loads(text))
        except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
            raise CheckpointError(f"{source / 'tokenizer.json'} cannot be read: {error}") from None
        eos = _eos_token_ids(directory, source, ids)
        if not eos:
            raise CheckpointError(f"{directory} names no end-of-sequence token")
        num_tokens, width = max(ids.values(), default=-1) + 1, read_json(directory, "config.json").get("vocab_size")
        return cls(text, num_tokens, eos, width if type(width) is int and width >= num_tokens else 0)

    def library_tokenizer(self) -> LLTokenizer:
        """Build the tokenizer of llguidance. Takes 1 s for 150,000 tokens and holds the GIL.

        Raises: ValueError, if llguidance cannot read the tokenizer.
        """
        return LLTokenizer(self.text, n_vocab=self.width, eos_token=list(self.eos_token_ids))


def _token_ids(content: dict[str, Any]) -> dict[str, int]:
    """Return the id of each token text. Unigram models list their tokens in the order of ids."""
    vocab = content["model"]["vocab"]
    ids = dict(vocab) if isinstance(vocab, dict) else {str(token[0]): i for i, token in enumerate(vocab)}
    return ids | {str(token["content"]): int(token["id"]) for token in content.get("added_tokens", ())}


def _eos_token_ids(directory: Path, source: Path, ids: dict[str, int]) -> tuple[int, ...]:
    """Return the same ids that the frontend sends with requests. Raises: CheckpointError"""
    found = [token for token in named_eos(directory) if type(token) is int and 0 <= token < 2**31]
    token = ids.get(special_tokens(source).get("eos_token", ""))
    return tuple(dict.fromkeys(found if token is None else [*found, token]))
