"""Token counts of one HTTP response."""

from dataclasses import dataclass, field

from services.frontend.openai.schemas.responses import Usage
from services.frontend.text.assembler import TextAssembler


@dataclass
class UsageCounter:
    """Counts so far. A prompt counts once, however many choices it has."""

    answers: list[TextAssembler] = field(default_factory=list)
    prompt_lengths: list[int] = field(default_factory=list)
    cached: list[int] = field(default_factory=list)
    """Tokens of each prompt that the prefix cache held. The number is unknown if a stop string ended the answer before
    the engine ended the request."""

    @property
    def num_cached(self) -> int | None:
        """Number of tokens of all prompts that the prefix cache held; None while it is not known."""
        return sum(self.cached) if len(self.cached) == len(self.prompt_lengths) else None

    def to_json(self) -> Usage:
        prompt, cached = sum(self.prompt_lengths), self.num_cached
        completion = sum(answer.num_tokens for answer in self.answers)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": None if cached is None else {"cached_tokens": cached},
        }
