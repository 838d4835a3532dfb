"""A prompt, and what an answer may have to say about it."""

from dataclasses import dataclass, field

from services.frontend.engine.inbox import Likely


@dataclass(slots=True)
class Prompt:
    token_ids: list[int]
    text: str = ""
    """As `echo` shows it; empty where nobody asked for that."""
    offsets: list[int] = field(default_factory=list)
    """Of each token: characters before it in `text`; where log-probabilities are echoed."""
    likely: dict[int, Likely] = field(default_factory=dict)
    """By position, where they were asked for; there is none of the first token."""

    def learn(self, likely: Likely) -> None:
        """After a preemption a position may come again; the first one counts."""
        self.likely.setdefault(likely.position, likely)

    @property
    def is_known(self) -> bool:
        """Whether the log-probabilities of all its tokens are there."""
        return len(self.likely) >= len(self.token_ids) - 1
