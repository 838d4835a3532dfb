"""What one step forward brought for one choice, as dialects write it."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One token and how likely it was."""

    token_id: int
    text: str
    """Bytes that are no text alone show as U+FFFD."""
    raw: bytes
    logprob: float | None
    """Finite. None for the first token of a prompt, before which there was nothing."""


@dataclass(frozen=True, slots=True)
class PositionLogprobs:
    """The token at one position, and the most likely ones there, the most likely first."""

    token: TokenLogprob
    top: tuple[TokenLogprob, ...]
    offset: int
    """Characters before it in the answer's text."""


@dataclass(slots=True)
class Piece:
    """Text that has become certain, and what belongs to it. `finish` is None but in the last piece of a choice."""

    text: str = ""
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    """Where the request asks for them: of the tokens whose text this is."""
    finish: str | None = None
    """OpenAI's word for how the choice ended."""
    stop: int | str | None = None
    """The stop string or token that ended it."""
    token_ids: list[int] | None = None
    """Where the request asks for them: those that arrived; None where it does not."""
    prompt_token_ids: list[int] | None = None
    """In the first piece, where the request asks for token ids."""

    @property
    def is_plain(self) -> bool:
        """Whether it is text alone."""
        return self.finish is None and not self.logprobs and not self.token_ids

    @property
    def is_empty(self) -> bool:
        return not self.text and self.is_plain

    def extend(self, later: "Piece") -> None:
        self.text += later.text
        self.logprobs += later.logprobs
        self.finish, self.stop = later.finish, later.stop
        if later.token_ids is not None:
            self.token_ids = [*(self.token_ids or ()), *later.token_ids]
        if later.prompt_token_ids is not None:
            self.prompt_token_ids = later.prompt_token_ids
