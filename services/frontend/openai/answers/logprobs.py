"""Log-probabilities: from what the engine sends to the formats of completions, of chat, and vLLM's of prompts."""

from collections import deque
from collections.abc import Iterable
from typing import Any

from services.frontend.engine.inbox import Likely
from services.frontend.openai.answers.chunk import PositionLogprobs, TokenLogprob
from services.frontend.openai.prompts.prompt import Prompt
from services.frontend.text.token_texts import Vocabulary

IMPOSSIBLE = -9999.0
"""For minus infinity, which JSON cannot carry; as vLLM has it."""


class LogprobWriter:
    """Gives tokens their texts."""

    def __init__(self, vocabulary: Vocabulary, ids_as_text: bool) -> None:
        """`ids_as_text`: tokens are called token_id:123, so that none is mistaken for another of the same text."""
        self._vocabulary = vocabulary
        self._ids_as_text = ids_as_text

    def _token(self, token_id: int, value: float | None) -> TokenLogprob:
        text, raw = self._vocabulary[token_id]
        text = f"token_id:{token_id}" if self._ids_as_text else text
        return TokenLogprob(token_id, text, raw, value if value is None else max(value, IMPOSSIBLE))

    def position(self, likely: Likely, offset: int) -> PositionLogprobs:
        first, *top = map(self._token, likely.token_ids, likely.values)
        return PositionLogprobs(first, tuple(top), offset)

    def prompt(self, prompt: Prompt) -> list[PositionLogprobs]:
        """As `echo` shows them: nothing is known of the first token."""
        known = [
            self.position(likely, prompt.offsets[position])
            for position, likely in sorted(prompt.likely.items())
        ]
        return [PositionLogprobs(self._token(prompt.token_ids[0], None), (), 0), *known]

    def prompt_json(self, prompt: Prompt) -> list[dict[str, Any] | None]:
        """vLLM's `prompt_logprobs`: per position, by token id."""
        return [None, *(self._by_id(likely) for _, likely in sorted(prompt.likely.items()))]

    def _by_id(self, likely: Likely) -> dict[str, Any]:
        entries: dict[str, Any] = {}
        ranks = [likely.rank, *range(1, len(likely.token_ids))]
        for rank, token_id, value in zip(ranks, likely.token_ids, likely.values, strict=True):
            token = self._token(token_id, value)
            fields = {"logprob": token.logprob, "rank": rank, "decoded_token": token.text}
            entries.setdefault(str(token_id), fields)
        return entries


class Trace:
    """Log-probabilities of one answer's tokens, held until the text that they stand for is shown."""

    def __init__(self, writer: LogprobWriter, num_prompt_tokens: int) -> None:
        self._writer = writer
        self._next = num_prompt_tokens
        """Position of the token that comes next."""
        self._arrived: dict[int, Likely] = {}
        self._held: deque[PositionLogprobs] = deque()

    def learn(self, likely: Likely) -> None:
        """Of a token to come; one that was there already may come again and is not wanted."""
        if likely.position >= self._next:
            self._arrived.setdefault(likely.position, likely)

    def push(self, offset: int) -> None:
        """The next token, which has `offset` characters before it. Raises: KeyError, if nothing is known of it"""
        self._held.append(self._writer.position(self._arrived.pop(self._next), offset))
        self._next += 1

    def shown(self, num_chars: int) -> Iterable[PositionLogprobs]:
        """Those that have come into view, now that so many characters of the answer are shown."""
        while self._held and self._held[0].offset < num_chars:
            yield self._held.popleft()

    def rest(self) -> Iterable[PositionLogprobs]:
        """Those without a text of their own at the end of an answer."""
        while self._held:
            yield self._held.popleft()


def completion_json(positions: list[PositionLogprobs]) -> dict[str, Any]:
    """Columns; `top_logprobs` has the token itself too, where it is not among the most likely ones."""
    return {
        "tokens": [p.token.text for p in positions],
        "token_logprobs": [p.token.logprob for p in positions],
        "top_logprobs": [_top(p) for p in positions],
        "text_offset": [p.offset for p in positions],
    }


def _top(position: PositionLogprobs) -> dict[str, float | None] | None:
    if position.token.logprob is None:
        return None
    top: dict[str, float | None] = {}
    for token in (*position.top, position.token):  # the likelier one, if two have the same text
        top.setdefault(token.text, token.logprob)
    return top


def chat_json(positions: list[PositionLogprobs]) -> dict[str, Any]:
    content = [{**_entry(p.token), "top_logprobs": [*map(_entry, p.top)]} for p in positions]
    return {"content": content, "refusal": None}


def _entry(token: TokenLogprob) -> dict[str, Any]:
    return {"token": token.text, "logprob": token.logprob, "bytes": list(token.raw)}
