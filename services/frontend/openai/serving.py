"""One HTTP request to engine requests and back: what completions and chat share; how they differ is a `Dialect`."""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response, StreamingResponse

from protocol.requests import Finish, FinishReason
from protocol.sampling import SamplingParams
from services.frontend.engine_client import EngineClient, RequestStream
from services.frontend.errors import APIError
from services.frontend.metrics import Metrics
from services.frontend.streams import Answer, OutOfOrder
from services.frontend.tokenizer import Tokenizer

_REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}
_FAILURES = {FinishReason.REJECTED: 429, FinishReason.INVALID: 400}


class Dialect(Protocol):
    """How an answer looks on the wire."""

    prefix: str
    object: str
    chunk_object: str

    def choice(self, index: int, text: str, finish: str | None, stop: int | str | None) -> dict[str, Any]: ...
    def first(self, index: int) -> dict[str, Any] | None: ...
    def delta(self, index: int, text: str, finish: str | None, stop: int | str | None) -> dict[str, Any]: ...


@dataclass
class Choice:
    """One answer of a request: its stream, and what has come of it."""

    index: int
    prompt: list[int]
    stream: RequestStream
    answer: Answer
    started: float
    text: list[str] = field(default_factory=list)
    finish: str | None = None
    stop: int | str | None = None
    cached: int = 0
    last_token: float | None = None


class Serving:
    def __init__(self, engine: EngineClient, tokenizer: Tokenizer, metrics: Metrics) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.metrics = metrics

    def submit(
        self,
        prompts: list[list[int]],
        params: list[SamplingParams],
        stops: list[str],
        priority: int,
        salt: str,
        name: str,
    ) -> list[Choice]:
        """Raises: APIError; nothing stays submitted then."""
        choices: list[Choice] = []
        try:
            for index, (prompt, wanted) in enumerate(zip(prompts, params, strict=True)):
                stream = self.engine.submit(prompt, wanted, priority, salt, name)
                answer = Answer(self.tokenizer.stream(prompt), stops)
                choices.append(Choice(index, prompt, stream, answer, time.monotonic()))
        except APIError:
            self.engine.abort([choice.stream for choice in choices])
            raise
        return choices

    async def advance(self, choice: Choice) -> str:
        """Waits for something of this choice; the text that became certain. Raises: APIError"""
        text = ""
        for event in await choice.stream.take():
            if isinstance(event, Finish):
                self._finish(choice, event)
                text += choice.answer.finish()
                break
            try:
                text += choice.answer.push(*event)
            except OutOfOrder as error:
                self.engine.abort([choice.stream])
                raise APIError(500, "a token of this answer was lost") from error
            self.metrics.on_token(choice)
            if choice.answer.stop_string is not None:
                choice.finish, choice.stop = "stop", choice.answer.stop_string
                self.engine.abort([choice.stream])
                break
        if choice.answer.stop_string is not None and choice.finish != "stop":
            choice.finish, choice.stop = "stop", choice.answer.stop_string
        return text

    def _finish(self, choice: Choice, finish: Finish) -> None:
        if finish.reason not in _REASONS:
            raise APIError(
                _FAILURES.get(finish.reason, 500), finish.message or "the request was not completed"
            )
        choice.finish, choice.stop, choice.cached = (
            _REASONS[finish.reason],
            finish.stop_reason,
            finish.num_cached_tokens,
        )

    async def respond(
        self,
        http: HTTPRequest,
        choices: list[Choice],
        dialect: Dialect,
        model: str,
        stream: bool,
        include_usage: bool,
    ) -> Response:
        """The whole answer, or its stream once the first event has decided the status code. Raises: APIError"""
        identity = {"id": f"{dialect.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}
        watcher = asyncio.create_task(self._abort_when_gone(http, choices))
        try:
            if stream:
                first = await self.advance(choices[0])
                body = self._stream(choices, dialect, identity, include_usage, first, watcher)
                return StreamingResponse(
                    body, media_type="text/event-stream", headers={"cache-control": "no-cache"}
                )
            await asyncio.gather(*map(self._complete, choices))
        except BaseException:
            self.engine.abort([choice.stream for choice in choices])
            watcher.cancel()
            raise
        watcher.cancel()
        answer = {
            **identity,
            "object": dialect.object,
            "choices": [dialect.choice(c.index, "".join(c.text), c.finish, c.stop) for c in choices],
            "usage": usage(choices),
        }
        for choice in choices:
            self.metrics.on_finish(choice)
        return Response(msgspec.json.encode(answer), media_type="application/json")

    async def _complete(self, choice: Choice) -> None:
        while choice.finish is None:
            choice.text.append(await self.advance(choice))

    async def _abort_when_gone(self, http: HTTPRequest, choices: list[Choice]) -> None:
        while (await http.receive())["type"] != "http.disconnect":
            pass
        for choice in choices:
            if not choice.stream.ended:
                choice.stream.put(APIError(499, "the client closed the connection"))
        self.engine.abort([choice.stream for choice in choices])

    async def _stream(
        self, choices: list[Choice], dialect: Dialect, identity: dict[str, Any], include_usage: bool, first: str,
        watcher: "asyncio.Task[None]",
    ) -> AsyncIterator[bytes]:  # fmt: skip
        watcher.cancel()  # the response itself notices from here on
        head = {**identity, "object": dialect.chunk_object}
        nothing = {"usage": None} if include_usage else {}

        def event(choice: dict[str, Any]) -> bytes:
            return b"data: " + msgspec.json.encode({**head, "choices": [choice], **nothing}) + b"\n\n"

        queue: asyncio.Queue[tuple[Choice, str] | APIError] = asyncio.Queue()

        async def pump(choice: Choice, text: str | None) -> None:
            try:
                while True:
                    if text is not None and (text or choice.finish):
                        queue.put_nowait((choice, text))
                    if choice.finish is not None:
                        return
                    text = await self.advance(choice)
            except APIError as error:
                queue.put_nowait(error)

        pumps = [asyncio.create_task(pump(c, first if c.index == 0 else None)) for c in choices]
        try:
            yield b"".join(event(opening) for c in choices if (opening := dialect.first(c.index)) is not None)
            open_choices = len(choices)
            while open_choices:
                item = await queue.get()
                if isinstance(item, APIError):
                    yield b"data: " + msgspec.json.encode(item.body()) + b"\n\n"
                    return
                choice, text = item
                yield event(dialect.delta(choice.index, text, choice.finish, choice.stop))
                if choice.finish is not None:
                    open_choices -= 1
                    self.metrics.on_finish(choice)
            if include_usage:
                yield (
                    b"data: "
                    + msgspec.json.encode({**head, "choices": [], "usage": usage(choices)})
                    + b"\n\n"
                )
            yield b"data: [DONE]\n\n"
        finally:
            for task in pumps:
                task.cancel()
            self.engine.abort([choice.stream for choice in choices])


def usage(choices: list[Choice]) -> dict[str, Any]:
    prompt, completion = sum(len(c.prompt) for c in choices), sum(c.answer.num_tokens for c in choices)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(c.cached for c in choices)},
    }
