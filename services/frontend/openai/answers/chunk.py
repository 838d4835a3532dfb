"""The unit between the engine's outputs and a dialect: what one choice grows by. Its receivers: `events` has those of
streams; answers that are sent as a whole are collected here."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

from services.frontend.openai.schemas.responses import FinishName, PositionLogprobs

CompletionPosition = tuple[str, float | None, dict[str, float] | None, int]
"""Token, its log-probability, `top_logprobs` and `text_offset`; without the two values for the first of a prompt."""
ScoredPosition = CompletionPosition | PositionLogprobs
"""Log-probabilities at one position, as the answer has them; all of one answer are of the same kind."""


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


class ChoiceWriter(ABC):
    """Takes the chunks of one choice; returns the bytes to write for each."""

    __slots__ = ()

    def text(self, text: str) -> bytes:
        """Take a chunk that is only text: that of new tokens, "" if they have none yet."""
        return self.chunk(Chunk(text)) if text else b""

    @abstractmethod
    def chunk(self, chunk: Chunk) -> bytes: ...


class ChunkCollector(ChoiceWriter):
    """Keeps the chunks of a choice whose answer is sent as a whole."""

    def __init__(self) -> None:
        self.chunks: list[Chunk] = []

    def chunk(self, chunk: Chunk) -> bytes:
        self.chunks.append(chunk)
        return b""
