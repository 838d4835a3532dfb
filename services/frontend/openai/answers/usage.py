"""Token counts of one HTTP response."""

from services.frontend.openai.schemas.responses import Usage
from services.frontend.text.assembler import TextAssembler


class UsageCounter:
    """Counts so far. A prompt counts once, however many choices it has."""

    def __init__(self) -> None:
        self._answers: list[TextAssembler] = []
        self._prompt_lengths: list[int] = []
        self._cached: list[int] = []

    def add_prompt(self, num_tokens: int) -> None:
        self._prompt_lengths.append(num_tokens)

    def add_answer(self, answer: TextAssembler) -> None:
        self._answers.append(answer)

    def add_cached(self, num_tokens: int) -> None:
        """Count the tokens of one prompt that the prefix cache held.

        The number is unknown if a stop string ended the answer before the engine ended the request.
        """
        self._cached.append(num_tokens)

    @property
    def num_cached(self) -> int | None:
        """Number of tokens of all prompts that the prefix cache held; None while it is not known."""
        return sum(self._cached) if len(self._cached) == len(self._prompt_lengths) else None

    def to_json(self) -> Usage:
        prompt, cached = sum(self._prompt_lengths), self.num_cached
        completion = sum(answer.num_tokens for answer in self._answers)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": None if cached is None else {"cached_tokens": cached},
        }
