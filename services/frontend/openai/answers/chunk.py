"""The unit between the engine's outputs and a dialect: what one choice grows by."""

from dataclasses import dataclass, field

from services.frontend.openai.schemas.responses import FinishName


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A token with its text and log-probability."""

    text: str
    """Bytes that are no complete character are U+FFFD."""
    raw: bytes
    logprob: float | None
    """Finite. None for the first token of a prompt, which nothing precedes."""


@dataclass(frozen=True, slots=True)
class ScoredPosition:
    """The token at one position, and the most likely tokens there in descending order."""

    token: ScoredToken
    top: tuple[ScoredToken, ...]
    offset: int
    """Characters before it in the answer's text."""


@dataclass(slots=True)
class Chunk:
    """Text of one choice that became certain, with its details."""

    text: str = ""
    logprobs: list[ScoredPosition] = field(default_factory=list)
    """Positions that `text` covers, if the body requests log-probabilities."""
    finish: FinishName | None = None
    """OpenAI's `finish_reason`; None in all chunks of a choice but the last."""
    stop: int | str | None = None
    """The stop string or token that ended the choice."""
    token_ids: list[int] | None = None
    """Tokens that arrived; None if the body does not request token ids."""
    prompt_token_ids: list[int] | None = None
    """Set in the first chunk if the body requests token ids."""

    @property
    def is_text_only(self) -> bool:
        return self.finish is None and not self.logprobs and not self.token_ids

    @property
    def is_empty(self) -> bool:
        return not self.text and self.is_text_only

    @classmethod
    def joined(cls, chunks: "list[Chunk]") -> "Chunk":
        whole = cls("".join(chunk.text for chunk in chunks))
        for chunk in chunks:
            whole.logprobs += chunk.logprobs
            whole.finish, whole.stop = chunk.finish, chunk.stop
            if chunk.token_ids is not None:
                whole.token_ids = [*(whole.token_ids or ()), *chunk.token_ids]
            if chunk.prompt_token_ids is not None:
                whole.prompt_token_ids = chunk.prompt_token_ids
        return whole
