"""Token counts of one HTTP response."""

from typing import Any

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

    def to_json(self) -> dict[str, Any]:
        prompt = sum(self._prompt_lengths)
        completion = sum(answer.num_tokens for answer in self._answers)
        is_known = len(self._cached) == len(self._prompt_lengths)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached)} if is_known else None,
        }
