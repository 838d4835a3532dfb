"""What one step forward brought for one choice, as dialects write it."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One token and how likely it was."""

    token_id: int
    text: str
    """Bytes that are no text alone show as U+FFFD."""
    raw: bytes
    logprob: float


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
    """Where the request asks for them: of the tokens that arrived with this piece."""
    finish: str | None = None
    """OpenAI's word for how the choice ended."""
    stop: int | str | None = None
    """The stop string or token that ended it."""

    @property
    def is_plain(self) -> bool:
        """Whether it is text alone."""
        return self.finish is None and not self.logprobs

    def extend(self, later: "Piece") -> None:
        self.text += later.text
        self.logprobs += later.logprobs
        self.finish, self.stop = later.finish, later.stop
