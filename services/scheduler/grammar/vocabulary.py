"""What grammars need of a checkpoint: its tokens' texts, and which of them end an answer."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeGuard

from llguidance import LLTokenizer

from services.checkpoint import CheckpointError, named_eos, resolve, special_tokens


@dataclass(frozen=True, slots=True)
class Vocabulary:
    text: str
    """tokenizer.json."""
    num_tokens: int
    """One more than its largest token id."""
    eos_token_ids: tuple[int, ...]
    """The checkpoint's, at least one; what a request without any (`ignore_eos`) may end its answer with."""

    @classmethod
    def load(cls, model: str, revision: str | None = None, tokenizer: str | None = None) -> Self:
        """From where the frontend takes its tokenizer. Raises: CheckpointError"""
        directory = resolve(model, revision)
        source = resolve(tokenizer) if tokenizer else directory
        file = source / "tokenizer.json"
        try:
            text = file.read_text(encoding="utf-8")
            ids = _token_ids(json.loads(text))
        except FileNotFoundError:
            raise CheckpointError(f"{source} has no tokenizer.json") from None
        except (OSError, ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
            raise CheckpointError(f"{file} cannot be read: {error}") from None
        eos = _eos_token_ids(directory, source, ids)
        if not eos:
            raise CheckpointError(f"{directory} names no end-of-sequence token")
        return cls(text, max(ids.values(), default=-1) + 1, eos)

    def library_tokenizer(self, n_vocab: int) -> LLTokenizer:
        """Takes a second for 150,000 tokens, during which no other thread runs.

        Args:
            n_vocab: width of the logits, at least `num_tokens`.

        Raises: ValueError, if the library cannot read it.
        """
        return LLTokenizer(self.text, n_vocab=n_vocab, eos_token=list(self.eos_token_ids))


def _token_ids(content: dict[str, Any]) -> dict[str, int]:
    """By text; Unigram models list their tokens in the order of ids."""
    vocab = content["model"]["vocab"]
    ids = dict(vocab) if isinstance(vocab, dict) else {str(token[0]): i for i, token in enumerate(vocab)}
    return ids | {str(token["content"]): int(token["id"]) for token in content.get("added_tokens", ())}


def _eos_token_ids(directory: Path, source: Path, ids: dict[str, int]) -> tuple[int, ...]:
    """The same that the frontend sends with requests. Raises: CheckpointError"""
    found: dict[int, None] = dict.fromkeys(filter(_is_id, named_eos(directory)))
    token = ids.get(special_tokens(source).get("eos_token", ""))
    return tuple(found if token is None else found | {token: None})


def _is_id(token: object) -> TypeGuard[int]:
    return type(token) is int and 0 <= token < 2**31
