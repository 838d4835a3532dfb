"""One choice of an answer: the outputs of its engine request become chunks."""

import math
import time
from dataclasses import dataclass, field

from protocol.requests import Finish, FinishReason
from protocol.sampling import SamplingParams
from services.frontend.engine.client import EngineClient, failure
from services.frontend.engine.streams import RawLogprobs, RequestStream, ResponseStream
from services.frontend.errors import APIError
from services.frontend.metrics import Metrics
from services.frontend.openai.answers.chunk import ChoiceWriter, Chunk
from services.frontend.openai.answers.logprobs import LogprobFormatter, LogprobQueue
from services.frontend.openai.answers.usage import UsageCounter
from services.frontend.openai.parameters.structured import grammar_field
from services.frontend.openai.prompts.prompt import Prompt
from services.frontend.openai.schemas.requests import ChatRequest, CompletionRequest
from services.frontend.openai.schemas.responses import FinishName
from services.frontend.request_summary import EndedChoice, RequestSummary
from services.frontend.text.assembler import TextAssembler
from services.frontend.text.tokenizer import Tokenizer

_REASONS: dict[FinishReason, FinishName] = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}


@dataclass(frozen=True, slots=True)
class ChoiceContext:
    """Objects that all choices of one HTTP request share."""

    engine: EngineClient
    tokenizer: Tokenizer
    metrics: Metrics
    usage: UsageCounter
    formatter: LogprobFormatter
    body: CompletionRequest | ChatRequest
    started: float
    """Monotonic seconds when the HTTP request was accepted."""
    summary: RequestSummary


@dataclass(frozen=True, slots=True)
class Delivered:
    """Output of a choice that another frontend has delivered."""

    batches: list[list[int]] = field(default_factory=list)
    """Token ids, as they became chunks."""
    written: bytes = b""
    """Bytes that they became."""
    identity: str = ""
    """Identity of the engines that made them."""


class Choice(RequestStream):
    """Assembles the text of one engine request, with log-probabilities and token ids if the body requests them."""

    __slots__ = (
        "_assembler", "_chunk", "_context", "_echoes", "_finish", "_first_token", "_generates", "_is_text_only",
        "_last_token", "_logprobs", "_max_tokens", "_metrics", "_num_shown", "_observe_gap", "_writer", "is_first",
        "prompt",
    )  # fmt: skip

    def __init__(
        self,
        response: ResponseStream,
        context: ChoiceContext,
        prompt: Prompt,
        params: SamplingParams,
        is_first: bool,
        writer: ChoiceWriter,
    ) -> None:
        """
        Args:
            is_first: True for the first choice of its prompt, which receives the prompt's log-probabilities.
        """
        super().__init__(response)
        body, ids = context.body, prompt.token_ids
        is_completion = isinstance(body, CompletionRequest)
        self.prompt = prompt
        self.is_first = is_first
        self._context = context
        self._metrics, self._observe_gap = context.metrics, context.metrics.observe_gap
        self._max_tokens = params.max_tokens
        self._assembler = TextAssembler(
            context.tokenizer.detokenizer(ids, body.skip_special_tokens is False),
            body.stops(),
            params.min_tokens,
            params.eos_token_ids + params.stop_token_ids,
            bool(body.include_stop_str_in_output),
        )
        context.usage.answers.append(self._assembler)
        logprobs = LogprobQueue(context.formatter, len(ids)) if params.logprobs is not None else None
        self._logprobs = logprobs
        self._writer = writer
        self._echoes = is_completion and bool(body.echo)
        """True until the prompt is shown."""
        self._generates = not is_completion or body.max_tokens != 0
        """False if only the prompt is wanted."""
        self._is_text_only = self._generates and not (logprobs or self._echoes or body.return_token_ids)
        self._chunk = self._new_chunk()
        self._chunk.prompt_token_ids = ids if body.return_token_ids else None
        self._num_shown = 0
        """Characters of output that were shown; counted only with log-probabilities."""
        self._finish: FinishName | None = None
        """OpenAI's `finish_reason`; None while the choice is generated."""
        self._first_token: float | None = None
        self._last_token: float | None = None
        """Monotonic seconds."""

    def _new_chunk(self) -> Chunk:
        return Chunk(token_ids=[] if self._context.body.return_token_ids else None)

    @property
    def num_unfinished_tokens(self) -> int:
        """Number of output tokens of a choice that has not ended, 0 after its end."""
        return self._assembler.num_tokens if self._finish is None else 0

    def replay(self, batches: list[list[int]]) -> bytes:
        """Take output that another frontend has delivered, in the same batches. Return the bytes that it wrote. That
        one has measured the latencies of these tokens."""
        if not batches:
            return b""
        now, written = time.monotonic(), []
        self._first_token = self._last_token = now
        self._observe_gap = lambda _: None
        for batch in batches:
            self.output += batch
            written.append(self.feed(batch, None, now))
        self._observe_gap = self._metrics.observe_gap
        return b"".join(written)

    def add_logprobs(self, logprobs: RawLogprobs) -> None:
        if logprobs.position < len(self.prompt.token_ids):
            self.prompt.add_logprobs(logprobs)
        elif self._logprobs is not None:
            self._logprobs.add(logprobs)

    def feed(self, tokens: list[int], end: Finish | None, now: float) -> bytes:
        text, assembler = "", self._assembler
        for token_id in tokens if self._generates else ():
            if self._finish is not None:
                break
            if not self._is_text_only:
                self._add_details(token_id)
            text += assembler.push(token_id)
            if self._last_token is None:
                self._on_first_token(now)
            else:
                self._observe_gap(now - self._last_token)
            self._last_token = now
            if assembler.stop_string is not None:
                self._context.engine.abort([self])
                self._on_finish("stop", None, now, None)
        if end is not None and self._finish is None:
            text += self._on_end(end, now)
        if self._is_text_only and self._finish is None:
            return self._writer.text(text)
        return self._write(text)

    def _on_first_token(self, now: float) -> None:
        self._first_token = now
        self._context.summary.on_first_token(now)
        self._metrics.observe_first_token(now - self._context.started)

    def _add_details(self, token_id: int) -> None:
        """Raises: APIError"""
        if self._chunk.token_ids is not None:
            self._chunk.token_ids.append(token_id)
        if self._logprobs is not None:
            try:
                self._logprobs.push(len(self.prompt.text) + self._assembler.num_chars)
            except KeyError:
                raise APIError(500, "a log-probability of this answer was lost") from None

    def _on_end(self, end: Finish, now: float) -> str:
        """Return the text that was held back. Raises: APIError"""
        if (error := failure(end, grammar_field(self._context.body))) is not None:
            raise error
        if not self._generates:
            self._on_finish("length", None, now, end)
            return ""
        text = self._assembler.finish()
        self._on_finish(_REASONS[end.reason], end.stop_reason, now, end)
        return text

    def _on_finish(self, reason: FinishName, stop: int | None, now: float, end: Finish | None) -> None:
        """
        Args:
            end: None if a stop string ends the choice before the engine does.
        """
        stop_string = self._assembler.stop_string
        if stop_string is not None:  # perhaps found in the text that was held back
            reason = "stop"
        cached = self.num_cached
        if cached is None and end is not None:
            cached = end.num_cached_tokens
        if self.is_first and cached is not None:
            self._context.usage.cached.append(cached)
        prompt, num_choices = self.prompt, self._context.body.n or 1
        prompt.num_ended += 1
        prompt.longest = max(prompt.longest, self._assembler.num_tokens)
        self._finish = self._chunk.finish = reason
        self._chunk.stop = stop if stop_string is None else stop_string
        ended = EndedChoice(
            self._context.started,
            self._first_token,
            now,
            reason,
            self._assembler.num_tokens,
            end,
            self._last_token,
            len(prompt.token_ids),
            self._max_tokens,
            num_choices,
            prompt.longest if prompt.num_ended == num_choices else None,
            self.duplicates,
            self.is_resumed,
            cached,
        )
        self._context.summary.on_choice(ended)
        self._metrics.on_answer(ended)

    def _write(self, text: str) -> bytes:
        chunk, logprobs = self._chunk, self._logprobs
        chunk.text += text
        if logprobs is not None:
            self._num_shown += len(text)
            num_chars: float = len(self.prompt.text) + self._num_shown
            if not self._assembler.has_stops or (self._finish is not None and self._assembler.stop_string is None):
                num_chars = math.inf  # no stop string can cut off the tokens whose text is not complete
            chunk.logprobs += logprobs.shown(num_chars)
        if self._echoes and not self._echo():
            return b""
        self.has_ended = self._finish is not None
        self._chunk = self._new_chunk()
        return self._writer.chunk(chunk)

    def _echo(self) -> bool:
        """Put the prompt before the first chunk. Return False while its log-probabilities are incomplete.

        Raises: APIError, if they stay incomplete
        """
        prompt, chunk = self.prompt, self._chunk
        if self._logprobs is not None:
            if not prompt.is_scored:
                if self.is_first and self._finish is not None:
                    raise APIError(500, "log-probabilities of the prompt were lost")
                prompt.feed_when_scored(self)
                return False
            chunk.logprobs = [*self._context.formatter.prompt(prompt), *chunk.logprobs]
        chunk.text = prompt.text + chunk.text
        self._echoes = False
        return True
