"""Log-probabilities: from the engine's rows to the formats of completions, of chat, and of vLLM's `prompt_logprobs`."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from services.frontend.engine.streams import RawLogprobs
from services.frontend.openai.answers.chunk import ScoredPosition
from services.frontend.openai.prompts.prompt import Prompt
from services.frontend.openai.schemas import responses
from services.frontend.text.token_texts import TokenTexts

IMPOSSIBLE = -9999.0
"""Stands for minus infinity, which JSON has no number for; vLLM's value."""


@dataclass(frozen=True)
class LogprobFormatter:
    """Adds the tokens' texts to the engine's rows. A position is its values in the columns of a completion's
    `logprobs`."""

    texts: TokenTexts
    ids_as_text: bool
    """Write a token as token_id:123, so that tokens with equal texts stay distinct."""

    def _text(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self.ids_as_text else self.texts[token_id].text

    def position(self, logprobs: RawLogprobs, offset: int) -> ScoredPosition:
        """
        Args:
            offset: characters before the token in the answer's text.
        """
        values = [max(value, IMPOSSIBLE) for value in logprobs.values]
        token, *others = zip(map(self._text, logprobs.token_ids), values, strict=True)
        top: dict[str, float] = {}
        for text, value in (*others, token):
            top.setdefault(text, value)  # of equal texts, the most likely token stays
        return *token, top, offset

    def prompt(self, prompt: Prompt) -> list[ScoredPosition]:
        """Return the positions of a prompt's text for `echo`; the prompt's first token has no log-probability."""
        first = [] if prompt.num_hidden else [(self._text(prompt.token_ids[0]), None, None, 0)]
        scored = sorted(prompt.logprobs.items())
        shown = [self.position(logprobs, prompt.offsets[at]) for at, logprobs in scored if at >= prompt.num_hidden]
        return [*first, *shown]

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


class ChatLogprobFormatter(LogprobFormatter):
    """A position is an item of a chat's `logprobs.content`."""

    def position(self, logprobs: RawLogprobs, offset: int) -> ScoredPosition:
        first, *top = map(self._entry, logprobs.token_ids, logprobs.values)
        return {**first, "top_logprobs": top}

    def _entry(self, token_id: int, value: float) -> responses.TokenLogprob:
        raw = self.texts[token_id].raw
        return {"token": self._text(token_id), "logprob": max(value, IMPOSSIBLE), "bytes": list(raw)}


class LogprobQueue:
    """Log-probabilities of one choice's tokens, held back until the tokens' text is shown."""

    def __init__(self, formatter: LogprobFormatter, num_prompt_tokens: int) -> None:
        self._formatter = formatter
        self._next = num_prompt_tokens
        """Position of the next token."""
        self._arrived: dict[int, RawLogprobs] = {}
        self._held: deque[tuple[int, ScoredPosition]] = deque()
        """Each with the characters before it."""

    def add(self, logprobs: RawLogprobs) -> None:
        """Store the row of a token that is not pushed yet. After a preemption a position may arrive again; the first
        one counts."""
        if logprobs.position >= self._next:
            self._arrived.setdefault(logprobs.position, logprobs)

    def push(self, offset: int) -> None:
        """Take the next token, which has `offset` characters before it. Raises: KeyError, if its row did not arrive"""
        self._held.append((offset, self._formatter.position(self._arrived.pop(self._next), offset)))
        self._next += 1

    def shown(self, num_chars: float) -> Iterable[ScoredPosition]:
        """Yield the tokens whose text begins within the first `num_chars` characters, which are shown now."""
        while self._held and self._held[0][0] < num_chars:
            yield self._held.popleft()[1]


def completion_json(positions: list[Any]) -> responses.CompletionLogprobs:
    """Return the columns of a `CompletionPosition`, or several. `top_logprobs` includes the token itself."""
    tokens, values, top, offsets = map(list, zip(*positions, strict=True))
    return {"tokens": tokens, "token_logprobs": values, "top_logprobs": top, "text_offset": offsets}


def chat_json(positions: list[Any]) -> responses.ChatLogprobs:
    return {"content": positions, "refusal": None}
