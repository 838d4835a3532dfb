"""Token counts of one HTTP response."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from services.frontend.openai.schemas.responses import Usage
from services.frontend.text.assembler import TextAssembler

COUNTED_AT_ONCE = 1024
"""Characters of reasoning whose tokens are counted together, about 0.6 ms of work."""


@dataclass
class UsageCounter:
    """Counts so far. A prompt counts once, however many choices it has."""

    answers: list[TextAssembler] = field(default_factory=list)
    prompt_lengths: list[int] = field(default_factory=list)
    cached: list[int] = field(default_factory=list)
    """Tokens of each prompt that the prefix cache held."""

    @property
    def num_cached(self) -> int | None:
        """Number of tokens of all prompts that the prefix cache held; None while it is not known."""
        return sum(self.cached) if len(self.cached) == len(self.prompt_lengths) else None

    def to_json(self, *, is_before_output: bool = False) -> Usage:
        prompt, cached = sum(self.prompt_lengths), self.num_cached
        completion = 0 if is_before_output else sum(answer.num_tokens for answer in self.answers)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": None if cached is None else {"cached_tokens": cached},
        }


@dataclass
class ReasoningCounter:
    """Counts the tokens of the reasoning of all choices while it arrives: a long one would hold up all streams. Each
    choice is cut at the same characters, however it arrives."""

    count_tokens: Callable[[str], int]
    """Returns the number of tokens of a text."""
    num_tokens: int = 0
    """Tokens that are counted: all of the choices that have ended."""
    _waiting: defaultdict[int, str] = field(default_factory=lambda: defaultdict(str))
    """By choice: reasoning whose tokens are not counted yet."""

    def add(self, text: str, choice: int = 0) -> None:
        waiting = self._waiting[choice] + text
        end = len(waiting) // COUNTED_AT_ONCE * COUNTED_AT_ONCE
        self._waiting[choice] = waiting[end:]
        for at in range(0, end, COUNTED_AT_ONCE):
            self.num_tokens += self.count_tokens(waiting[at : at + COUNTED_AT_ONCE])

    def end(self, choice: int = 0) -> None:
        """Count the rest of a choice that has ended."""
        if waiting := self._waiting.pop(choice, ""):
            self.num_tokens += self.count_tokens(waiting)
