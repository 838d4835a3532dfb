"""Log-probabilities: from the engine's rows to the formats of completions, of chat, and of vLLM's `prompt_logprobs`."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from services.frontend.engine.streams import RawLogprobs
from services.frontend.openai.answers.chunk import ScoredPosition, ScoredToken
from services.frontend.openai.prompts.prompt import Prompt
from services.frontend.openai.schemas import responses
from services.frontend.text.token_texts import TokenTexts

IMPOSSIBLE = -9999.0
"""Stands for minus infinity, which JSON has no number for; vLLM's value."""


@dataclass(frozen=True)
class LogprobFormatter:
    """Adds the tokens' texts to the engine's rows."""

    texts: TokenTexts
    ids_as_text: bool
    """Write a token as token_id:123, so that tokens with equal texts stay distinct."""

    def _token(self, token_id: int, value: float | None) -> ScoredToken:
        text, raw = self.texts[token_id]
        text = f"token_id:{token_id}" if self.ids_as_text else text
        return ScoredToken(text, raw, value if value is None else max(value, IMPOSSIBLE))

    def position(self, logprobs: RawLogprobs, offset: int) -> ScoredPosition:
        """
        Args:
            offset: characters before the token in the answer's text.
        """
        first, *top = map(self._token, logprobs.token_ids, logprobs.values)
        return ScoredPosition(first, tuple(top), offset)

    def prompt(self, prompt: Prompt) -> list[ScoredPosition]:
        """Return the positions of a prompt's text for `echo`; the prompt's first token has no log-probability."""
        scored = [
            self.position(logprobs, prompt.offsets[position])
            for position, logprobs in sorted(prompt.logprobs.items())
            if position >= prompt.num_hidden
        ]
        if prompt.num_hidden:
            return scored
        return [ScoredPosition(self._token(prompt.token_ids[0], None), (), 0), *scored]

    def prompt_json(self, prompt: Prompt) -> responses.PromptLogprobs:
        """Return vLLM's `prompt_logprobs`: per position a dictionary by token id, None for the first."""
        return [None, *(self._by_id(logprobs) for _, logprobs in sorted(prompt.logprobs.items()))]

    def _by_id(self, logprobs: RawLogprobs) -> dict[str, responses.PromptToken]:
        entries: dict[str, responses.PromptToken] = {}
        ranks = [logprobs.token_rank, *range(1, len(logprobs.token_ids))]
        for rank, token_id, value in zip(ranks, logprobs.token_ids, logprobs.values, strict=True):
            text, _ = self.texts[token_id]
            entry: responses.PromptToken = {"logprob": max(value, IMPOSSIBLE), "rank": rank, "decoded_token": text}
            entries.setdefault(str(token_id), entry)
        return entries


class LogprobQueue:
    """Log-probabilities of one choice's tokens, held back until the tokens' text is shown."""

    def __init__(self, formatter: LogprobFormatter, num_prompt_tokens: int) -> None:
        self._formatter = formatter
        self._next = num_prompt_tokens
        """Position of the next token."""
        self._arrived: dict[int, RawLogprobs] = {}
        self._held: deque[ScoredPosition] = deque()

    def add(self, logprobs: RawLogprobs) -> None:
        """Store the row of a token that is not pushed yet. After a preemption a position may arrive again; the first
        one counts."""
        if logprobs.position >= self._next:
            self._arrived.setdefault(logprobs.position, logprobs)

    def push(self, offset: int) -> None:
        """Take the next token, which has `offset` characters before it. Raises: KeyError, if its row did not arrive"""
        self._held.append(self._formatter.position(self._arrived.pop(self._next), offset))
        self._next += 1

    def shown(self, num_chars: float) -> Iterable[ScoredPosition]:
        """Yield the tokens whose text begins within the first `num_chars` characters, which are shown now."""
        while self._held and self._held[0].offset < num_chars:
            yield self._held.popleft()


def completion_json(positions: list[ScoredPosition]) -> responses.CompletionLogprobs:
    """Return the columns of a completion's `logprobs`. `top_logprobs` includes the token itself."""
    return {
        "tokens": [p.token.text for p in positions],
        "token_logprobs": [p.token.logprob for p in positions],
        "top_logprobs": [_top(p) for p in positions],
        "text_offset": [p.offset for p in positions],
    }


def _top(position: ScoredPosition) -> dict[str, float] | None:
    if position.token.logprob is None:
        return None
    top: dict[str, float] = {}
    for token in (*position.top, position.token):
        top.setdefault(token.text, _value(token))  # of equal texts, the most likely token stays
    return top


def chat_json(positions: list[ScoredPosition]) -> responses.ChatLogprobs:
    content: list[responses.PositionLogprobs] = [
        {**_entry(p.token), "top_logprobs": [*map(_entry, p.top)]} for p in positions
    ]
    return {"content": content, "refusal": None}


def _entry(token: ScoredToken) -> responses.TokenLogprob:
    return {"token": token.text, "logprob": _value(token), "bytes": list(token.raw)}


def _value(token: ScoredToken) -> float:
    assert token.logprob is not None  # only an echoed prompt begins with a token without one
    return token.logprob
