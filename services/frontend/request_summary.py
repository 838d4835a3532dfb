"""Data of one HTTP request for its log line and its trace."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from protocol.requests import Finish
from protocol.sampling import SamplingParams


class EndedChoice(NamedTuple):
    """Times and counts of one choice that has ended by itself; monotonic seconds."""

    submitted: float
    first_token: float | None
    ended: float
    reason: str
    """OpenAI's `finish_reason`."""
    output_tokens: int = 0
    end: Finish | None = None
    """None if a stop string ended the choice before the engine did."""
    last_token: float | None = None
    prompt_tokens: int = 0
    max_tokens: int = 1
    num_choices: int = 1
    """Choices of the same prompt."""
    longest: int | None = 0
    """Tokens of the longest of them; None: others have not ended."""
    duplicates: int = 0
    """Tokens that were dropped because they had arrived before."""
    is_resumed: bool = False
    """True if the scheduler that ended it was not the first one."""
    cached_tokens: int | None = None
    """Prompt tokens that the prefix cache held; None: the engine did not report it."""


@dataclass(slots=True)
class RequestSummary:
    request_id: str
    route: str
    choices: list[EndedChoice] | None = None
    """None, if no traces are exported."""
    started: float = field(default_factory=time.monotonic)
    """Monotonic seconds when the request arrived."""
    prompt_tokens: int = 0
    output_tokens: int = 0
    queued: float | None = None
    """Longest time from admission to the first step of a choice, seconds."""
    first_token: float | None = None
    """Time to the first token of any choice, seconds."""
    engines: Sequence[str] = ()
    """Names of the engines that it was placed on, if there are several."""
    params: SamplingParams | None = None
    """Parameters of the first choice."""
    is_detached: bool = False
    """True if the request goes on after its response."""
    status: int = 0
    reason: str = ""
    """Message of the error; "" without one."""
    at: float = 0.0
    """When it ended: seconds since 1970."""
    seconds: float = 0.0
    """From its arrival to its end."""

    def end(self, status: int, reason: str) -> None:
        self.status, self.reason = status, reason
        self.at, self.seconds = time.time(), time.monotonic() - self.started

    def on_first_token(self, now: float) -> None:
        if self.first_token is None:
            self.first_token = now - self.started

    def on_choice(self, choice: EndedChoice) -> None:
        """Add a choice that has ended."""
        self.output_tokens += choice.output_tokens
        end = choice.end
        if end is not None and end.times is not None and end.times.scheduled:
            self.queued = max(self.queued or 0.0, end.times.scheduled - end.times.queued)
        if self.choices is not None:
            self.choices.append(choice)

    def text(self) -> str:
        """Return the numbers that are known, for people."""
        queued = "" if self.queued is None else f" queue_seconds={self.queued:.3f}"
        first = "" if self.first_token is None else f" first_token_seconds={self.first_token:.3f}"
        tokens = f"prompt_tokens={self.prompt_tokens} output_tokens={self.output_tokens}"
        engines = f" engines={','.join(self.engines)}" if self.engines else ""
        return f"{tokens}{queued}{first}{engines} seconds={self.seconds:.3f}"

    def fields(self) -> dict[str, float]:
        """Return the numbers that are known by their names."""
        known: dict[str, float | None] = {
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
            "queue_seconds": self.queued,
            "first_token_seconds": self.first_token,
            "seconds": self.seconds,
        }
        return {name: round(value, 3) for name, value in known.items() if value is not None}
