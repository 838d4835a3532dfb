"""The choices of one HTTP request, from their submission until each has ended."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.types import Receive

from protocol.requests import Embedding, Finish, FinishReason
from protocol.sampling import SamplingParams, StructuredOutputParams
from services.frontend.engine.client import EngineClient, RequestStream, failure
from services.frontend.engine.inbox import Event, Inbox, Likely
from services.frontend.errors import APIError
from services.frontend.metrics import Metrics
from services.frontend.openai.answers.chunk import Piece
from services.frontend.openai.answers.logprobs import LogprobWriter, Trace
from services.frontend.openai.parameters.structured import constraint_field
from services.frontend.openai.prompts.prompt import Prompt
from services.frontend.openai.schemas.requests import ChatRequest, CompletionRequest
from services.frontend.text.assembler import Answer, OutOfOrder
from services.frontend.text.tokenizer import Tokenizer

_REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}


@dataclass(frozen=True)
class Asked:
    """What all choices of a request have in common."""

    stops: list[str]
    num_samples: int = 1
    """Choices for each prompt."""
    priority: int = 0
    salt: str = ""
    name: str = ""
    """Of the HTTP request, for logs."""
    structured: StructuredOutputParams | None = None
    constraint: str | None = None
    """The body's field that `structured` comes from."""
    echo: bool = False
    generates: bool = True
    """False: the prompt is all that is wanted."""
    token_ids: bool = False
    include_stop: bool = False
    show_special: bool = False

    @classmethod
    def of(
        cls,
        body: CompletionRequest | ChatRequest,
        salt: str,
        name: str,
        structured: StructuredOutputParams | None,
    ) -> "Asked":
        is_completion = isinstance(body, CompletionRequest)
        return cls(
            stops=body.stops(),
            num_samples=body.n or 1,
            priority=body.priority or 0,
            salt=salt,
            name=name,
            structured=structured,
            constraint=constraint_field(body),
            echo=is_completion and bool(body.echo),
            generates=not is_completion or body.max_tokens != 0,
            token_ids=bool(body.return_token_ids),
            include_stop=bool(body.include_stop_str_in_output),
            show_special=body.skip_special_tokens is False,
        )


@dataclass(slots=True)
class Choice:
    """One answer, and what has come of it."""

    index: int
    prompt: Prompt
    is_first: bool
    """Of its prompt's; it speaks for the prompt in what is counted once."""
    stream: RequestStream
    answer: Answer
    trace: Trace | None
    """Where log-probabilities are asked for."""
    growing: Piece
    """What has become certain and was not yet given away."""
    echoes: bool
    """Whether the prompt still has to be shown."""
    num_shown: int = 0
    """Characters, where there is a trace."""
    whole: Piece = field(default_factory=Piece)
    """What has come so far, where the answer is given as a whole."""
    finish: str | None = None
    """OpenAI's word for how it ended; None while it has not."""
    cached: int | None = None
    """Prompt tokens found in the cache; unknown when a stop string ended the answer before the engine did."""
    last_token: float | None = None


class Generation:
    """Whoever makes one closes it."""

    def __init__(
        self,
        engine: EngineClient,
        metrics: Metrics,
        tokenizer: Tokenizer,
        writer: LogprobWriter,
        asked: Asked,
    ) -> None:
        self.choices: list[Choice] = []
        self.asked = asked
        self._engine = engine
        self._metrics = metrics
        self._tokenizer = tokenizer
        self._writer = writer
        self._inbox = Inbox(engine.turn)
        self._started = time.monotonic()
        self._num_open = 0
        self._waiting: dict[int, None] = {}
        """Choices that have something to give, but not in the turn that brought it."""
        self._watcher: asyncio.Task[None] | None = None
        self._is_plain = asked.generates and not (asked.echo or asked.token_ids)
        """Whether text is all that is asked for."""

    def close(self) -> None:
        """However it went, nothing of it stays open in the engine."""
        self._engine.abort([choice.stream for choice in self.choices])
        if self._watcher is not None:
            self._watcher.cancel()

    def submit(self, prompt: Prompt, params: SamplingParams) -> None:
        """Another prompt's choices. Each has a seed of its own, and only the first asks what is known of the prompt.

        Raises: APIError
        """
        for sample in range(self.asked.num_samples):
            self._submit(prompt, params, sample == 0)
            seed = (params.seed + 1) % 2**64
            params = msgspec.structs.replace(params, seed=seed, prompt_logprobs=None)

    def _submit(self, prompt: Prompt, params: SamplingParams, is_first: bool) -> None:
        asked, index, ids = self.asked, len(self.choices), prompt.token_ids
        stream = self._engine.submit(
            self._inbox, index, ids, params, asked.priority, asked.salt, asked.name, asked.structured
        )
        text = self._tokenizer.stream(ids, asked.show_special)
        ends = params.eos_token_ids + params.stop_token_ids
        answer = Answer(text, asked.stops, params.min_tokens, ends, asked.include_stop)
        trace = Trace(self._writer, len(ids)) if params.logprobs is not None else None
        self._is_plain &= trace is None
        empty = Piece(token_ids=[], prompt_token_ids=ids) if asked.token_ids else Piece()
        self.choices.append(Choice(index, prompt, is_first, stream, answer, trace, empty, asked.echo))
        self._num_open += 1

    def watch(self, receive: Receive) -> None:
        """From here on `advance` raises when the client leaves."""
        self._watcher = self._inbox.watch(receive)

    @property
    def done(self) -> bool:
        return self._num_open == 0

    async def run(self) -> None:
        """Until every choice has ended. Raises: APIError"""
        while not self.done:
            for choice, piece in await self.advance():
                choice.whole.extend(piece)

    async def advance(self) -> list[tuple[Choice, Piece]]:
        """Waits for something to arrive; by choice, what became certain with it. None of the pieces is empty.

        Raises: APIError, when one choice failed or nobody waits for them any more
        """
        return self._grow(await self._inbox.take())

    def read_by(self, read: Callable[[], bytes], write: Callable[[bytes], None]) -> None:
        """From here on `read` is called when there is something to `take`; what it returns goes to `write`."""
        self._inbox.read_by(read, write)

    def stop_reading(self) -> None:
        self._inbox.stop_reading()

    def take(self) -> list[tuple[Choice, Piece]]:
        """`advance` without waiting: perhaps nothing. Raises: APIError"""
        return self._grow(self._inbox.take_now())

    def take_text(self) -> tuple[int, str] | None:
        """`take` for what almost every turn of a stream brings: a token of an answer that is text alone.

        Its choice and its text, perhaps none yet. None: there is something else to `take`. Raises: APIError
        """
        if not self._is_plain or (token := self._inbox.take_token()) is None:
            return None
        index, (place, token_id) = token
        choice = self.choices[index]
        if choice.finish is not None:
            return index, ""
        text = self._push(choice, place, token_id)
        if choice.answer.stop_string is None:
            return index, text
        choice.growing.text = text
        self._waiting[index] = None
        return None

    def _grow(self, events: list[tuple[int, Event]]) -> list[tuple[Choice, Piece]]:
        grown = self._waiting
        for index, event in events:
            if isinstance(event, APIError):
                raise event
            choice = self.choices[index]
            if choice.finish is None:
                self._apply(choice, event)
                grown[index] = None
        self._waiting = {}
        pieces = []
        for index in grown:
            choice = self.choices[index]
            if choice.echoes and not self._shows_prompt(choice):
                self._waiting[index] = None
            elif not (piece := choice.growing).is_empty:
                pieces.append((choice, piece))
                choice.growing = Piece(token_ids=None if piece.token_ids is None else [])
        return pieces

    def _shows_prompt(self, choice: Choice) -> bool:
        """Puts the prompt before what the choice has to give, once all is known of it that is to be shown."""
        prompt, piece = choice.prompt, choice.growing
        if choice.trace is not None:
            if not prompt.is_known:
                if self.done:
                    raise APIError(500, "log-probabilities of the prompt were lost")
                return False
            piece.logprobs = [*self._writer.prompt(prompt), *piece.logprobs]
        piece.text = prompt.text + piece.text
        choice.echoes = False
        return True

    def _apply(self, choice: Choice, event: Event) -> None:
        """Raises: APIError"""
        if type(event) is tuple:
            if self.asked.generates:
                self._on_token(choice, *event)
        elif isinstance(event, Likely):
            if event.position < len(choice.prompt.token_ids):
                choice.prompt.learn(event)
            elif choice.trace is not None:
                choice.trace.learn(event)
        elif isinstance(event, Finish):
            self._on_finish(choice, event)
        elif isinstance(event, Embedding):
            raise APIError(500, "an embedding came where text was expected")
        elif isinstance(event, APIError):
            raise event

    def _on_token(self, choice: Choice, index: int, token_id: int) -> None:
        answer = choice.answer
        offset, is_next = answer.num_chars, index == answer.num_tokens
        text = self._push(choice, index, token_id)
        if is_next:
            if choice.growing.token_ids is not None:
                choice.growing.token_ids.append(token_id)
            if choice.trace is not None:
                self._trace(choice, choice.trace, offset)
        self._show(choice, text)

    def _push(self, choice: Choice, index: int, token_id: int) -> str:
        """The text that became certain with a token. Perhaps the answer's last: a stop string ends it.

        Raises: APIError
        """
        answer = choice.answer
        try:
            text = answer.push(index, token_id)
        except OutOfOrder as error:
            raise APIError(500, "a token of this answer was lost") from error
        now = time.monotonic()
        if choice.last_token is None:
            self._metrics.ttft.observe(now - self._started)
        else:
            self._metrics.itl.observe(now - choice.last_token)
        choice.last_token = now
        if answer.stop_string is not None:
            self._engine.abort([choice.stream])
            self._end(choice, "stop", answer.stop_string, now)
        return text

    def _trace(self, choice: Choice, trace: Trace, offset: int) -> None:
        try:
            trace.push(len(choice.prompt.text) + offset)
        except KeyError:
            raise APIError(500, "a log-probability of this answer was lost") from None

    def _show(self, choice: Choice, text: str) -> None:
        choice.growing.text += text
        if text and choice.trace is not None:
            choice.num_shown += len(text)
            choice.growing.logprobs += choice.trace.shown(len(choice.prompt.text) + choice.num_shown)

    def _on_finish(self, choice: Choice, event: Finish) -> None:
        if (error := failure(event, self.asked.constraint)) is not None:
            raise error
        choice.cached = event.num_cached_tokens
        if not self.asked.generates:
            self._end(choice, "length", None, time.monotonic())
            return
        self._show(choice, choice.answer.finish())
        self._end(choice, _REASONS[event.reason], event.stop_reason, time.monotonic())

    def _end(self, choice: Choice, finish: str, stop: int | str | None, now: float) -> None:
        stop_string = choice.answer.stop_string
        if stop_string is not None:  # perhaps found in what was held back
            finish, stop = "stop", stop_string
        elif choice.trace is not None:
            choice.growing.logprobs += choice.trace.rest()
        choice.finish = choice.growing.finish = finish
        choice.growing.stop = stop
        self._num_open -= 1
        self._metrics.on_answer(finish, now - self._started, choice.answer.duplicates)

    def prompt_logprobs(self) -> list[list[dict[str, Any] | None]]:
        """vLLM's, for each choice. Raises: APIError"""
        if not all(choice.prompt.is_known for choice in self.choices):
            raise APIError(500, "log-probabilities of the prompt were lost")
        written = {
            choice.index: self._writer.prompt_json(choice.prompt)
            for choice in self.choices
            if choice.is_first
        }
        return [written[c.index - c.index % self.asked.num_samples] for c in self.choices]

    def usage(self) -> dict[str, Any]:
        """So far. Each prompt counts once, however many choices it has."""
        firsts = [choice for choice in self.choices if choice.is_first]
        prompt = sum(len(choice.prompt.token_ids) for choice in firsts)
        completion = sum(choice.answer.num_tokens for choice in self.choices)
        cached = [choice.cached for choice in firsts if choice.cached is not None]
        is_known = len(cached) == len(firsts)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(cached)} if is_known else None,
        }
