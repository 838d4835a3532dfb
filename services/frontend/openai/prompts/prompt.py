"""A prompt, and what an answer shows of it."""

from dataclasses import dataclass, field

from protocol.media import Media
from services.frontend.engine.streams import RawLogprobs, RequestStream


@dataclass(slots=True)
class Prompt:
    token_ids: list[int]
    text: str = ""
    """The text that `echo` shows; "" without `echo`."""
    offsets: list[int] = field(default_factory=list)
    """Characters before each token in `text`; filled if log-probabilities are echoed."""
    num_hidden: int = 0
    """Special tokens at the beginning that `text` does not have; filled if log-probabilities are echoed."""
    media: Media | None = None
    num_ended: int = 0
    """Choices that have ended by themselves."""
    longest: int = 0
    """Tokens of the longest of these choices."""
    logprobs: dict[int, RawLogprobs] = field(default_factory=dict)
    """By position, if the body requests them. The first position has none."""
    _waiting: list[RequestStream] = field(default_factory=list)

    def add_logprobs(self, logprobs: RawLogprobs) -> None:
        """Store one position. After a preemption a position may arrive again; the first one counts."""
        self.logprobs.setdefault(logprobs.position, logprobs)
        if self._waiting and self.is_scored:
            waiting, self._waiting = self._waiting, []
            for stream in waiting:
                stream.response.mark_due(stream)

    @property
    def is_scored(self) -> bool:
        """True if the log-probabilities of all tokens have arrived."""
        return len(self.logprobs) >= len(self.token_ids) - 1

    def feed_when_scored(self, stream: RequestStream) -> None:
        """Feed `stream` once more when all log-probabilities have arrived."""
        if stream not in self._waiting:
            self._waiting.append(stream)
