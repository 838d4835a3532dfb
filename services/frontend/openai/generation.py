"""The choices of one HTTP request, from their submission until each has ended."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from starlette.types import Message

from protocol.requests import Embedding, Finish, FinishReason
from protocol.sampling import SamplingParams
from services.frontend.engine_client import EngineClient, Event, Inbox, Likely, RequestStream
from services.frontend.errors import GONE, APIError
from services.frontend.metrics import Metrics
from services.frontend.openai.piece import Piece
from services.frontend.streams import Answer, OutOfOrder
from services.frontend.tokenizer import Tokenizer

_REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}
_FAILURES = {FinishReason.REJECTED: 429, FinishReason.INVALID: 400, FinishReason.ABORT: 503}


@dataclass
class Choice:
    """One answer, and what has come of it."""

    index: int
    num_prompt_tokens: int
    stream: RequestStream
    answer: Answer
    whole: Piece = field(default_factory=Piece)
    """What has come so far, where the answer is given as a whole."""
    finish: str | None = None
    """OpenAI's word for how it ended; None while it has not."""
    stop: int | str | None = None
    """The stop string or token that ended it."""
    cached: int | None = None
    """Prompt tokens found in the cache; unknown when a stop string ended the answer before the engine did."""
    last_token: float | None = None


class Generation:
    """Whoever makes one closes it."""

    def __init__(self, engine: EngineClient, metrics: Metrics) -> None:
        self.choices: list[Choice] = []
        self._engine = engine
        self._metrics = metrics
        self._inbox = Inbox()
        self._started = time.monotonic()
        self._num_open = 0
        self._watcher: asyncio.Task[None] | None = None

    def close(self) -> None:
        """However it went, nothing of it stays open in the engine."""
        self._engine.abort([choice.stream for choice in self.choices])
        if self._watcher is not None:
            self._watcher.cancel()

    def submit(
        self,
        tokenizer: Tokenizer,
        prompt: list[int],
        params: SamplingParams,
        stops: list[str],
        priority: int,
        salt: str,
        name: str,
    ) -> None:
        """One more choice. Raises: APIError"""
        index = len(self.choices)
        stream = self._engine.submit(self._inbox, index, prompt, params, priority, salt, name)
        answer = Answer(tokenizer.stream(prompt), stops, params.min_tokens)
        self.choices.append(Choice(index, len(prompt), stream, answer))
        self._num_open += 1

    def watch(self, receive: Callable[[], Awaitable[Message]]) -> None:
        """From here on `advance` raises when the client leaves."""

        async def until_gone() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            self._inbox.put_first(APIError(GONE, "the client closed the connection"))

        self._watcher = asyncio.create_task(until_gone())

    @property
    def done(self) -> bool:
        return self._num_open == 0

    async def run(self) -> None:
        """Until every choice has ended. Raises: APIError"""
        while not self.done:
            for choice, piece in await self.advance():
                choice.whole.extend(piece)

    async def advance(self) -> list[tuple[Choice, Piece]]:
        """Waits for something to arrive; by choice, what became certain with it (no empty text but at an end).

        Raises: APIError, when one choice failed or nobody waits for them any more
        """
        texts: dict[int, str] = {}
        for index, event in await self._inbox.take():
            if isinstance(event, APIError):
                raise event
            choice = self.choices[index]
            if choice.finish is None:
                texts[index] = texts.get(index, "") + self._apply(choice, event)
        grown = [
            (choice := self.choices[i], Piece(text, [], choice.finish, choice.stop))
            for i, text in texts.items()
        ]
        return [(choice, piece) for choice, piece in grown if piece.text or not piece.is_plain]

    def _apply(self, choice: Choice, event: Event) -> str:
        answer, now = choice.answer, time.monotonic()
        if isinstance(event, Finish):
            if event.reason not in _REASONS:
                status = _FAILURES.get(event.reason, 500)
                raise APIError(status, event.message or "the request was not completed")
            text = answer.finish()
            choice.cached = event.num_cached_tokens
            self._end(choice, _REASONS[event.reason], event.stop_reason, now)
            return text
        if isinstance(event, APIError):
            raise event
        if isinstance(event, Likely | Embedding):
            return ""
        try:
            text = answer.push(*event)
        except OutOfOrder as error:
            raise APIError(500, "a token of this answer was lost") from error
        if choice.last_token is None:
            self._metrics.ttft.observe(now - self._started)
        else:
            self._metrics.itl.observe(now - choice.last_token)
        choice.last_token = now
        if answer.stop_string is not None:
            self._engine.abort([choice.stream])
            self._end(choice, "stop", answer.stop_string, now)
        return text

    def _end(self, choice: Choice, finish: str, stop: int | str | None, now: float) -> None:
        choice.finish, choice.stop = finish, stop
        if choice.answer.stop_string is not None:  # found in what was held back
            choice.finish, choice.stop = "stop", choice.answer.stop_string
        self._num_open -= 1
        self._metrics.on_answer(choice.finish, now - self._started, choice.answer.duplicates)

    def usage(self) -> dict[str, Any]:
        prompt = sum(choice.num_prompt_tokens for choice in self.choices)
        completion = sum(choice.answer.num_tokens for choice in self.choices)
        cached = [choice.cached for choice in self.choices if choice.cached is not None]
        is_known = len(cached) == len(self.choices)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(cached)} if is_known else None,
        }
