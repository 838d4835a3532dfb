"""The work that all routes for answers share: checks, sampling parameters, submission, the response, its record."""

import asyncio
import contextlib
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

from msgspec.structs import replace
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response
from starlette.types import Scope

from protocol.requests import GenerateRequest
from protocol.sampling import SamplingParams
from services.frontend.engine.client import NO_PROMPT, EngineClient
from services.frontend.engine.streams import ResponseStream
from services.frontend.errors import APIError, invalid
from services.frontend.http.disconnect import watch_disconnect
from services.frontend.metrics import Metrics
from services.frontend.model import ServedModel
from services.frontend.openai.answers.choice import Choice, ChoiceContext, Delivered
from services.frontend.openai.answers.chunk import ChoiceWriter, Chunk, ChunkCollector
from services.frontend.openai.answers.event_stream import EventStream, StreamEncoder
from services.frontend.openai.answers.logprobs import ChatLogprobFormatter, LogprobFormatter
from services.frontend.openai.answers.usage import UsageCounter
from services.frontend.openai.parameters.sampling import sampling_params
from services.frontend.openai.prompts.conversation import media_files
from services.frontend.openai.prompts.encoder import PromptEncoder
from services.frontend.openai.prompts.prompt import Prompt
from services.frontend.openai.schemas.requests import BaseRequest, ChatRequest, CompletionRequest, ScheduledRequest
from services.frontend.openai.schemas.responses import AnswerHead, PromptLogprobs
from services.frontend.openai.tasks import ANSWER_PATHS, GENERATE, check_task
from services.frontend.request_log import EndedRequestLog
from services.frontend.request_summary import EndedChoice, RequestSummary
from services.frontend.text.token_texts import TokenTexts

T = TypeVar("T")
Submission = tuple[Prompt, SamplingParams]
Body = CompletionRequest | ChatRequest
NextWriter = Callable[[], ChoiceWriter]
"""Returns the writer of the next choice of a response."""
TraceExport = Callable[[HTTPRequest], None]
"""Takes a request that has ended."""
LONG_ANSWER = 16_384
"""Characters from which a whole answer is parsed on a thread; its reasoning is counted there, 0.6 ms per 1,000."""
NOTHING = Delivered()
OTHER_EVENTS = "its frontend is lost, and this one, with another release or other settings, cannot go on with it"


class Generation:
    """Submits one engine request per choice. The caller must close it."""

    def __init__(self, context: ChoiceContext, shared: GenerateRequest, next_writer: NextWriter, interval: int) -> None:
        """`interval`: tokens of a choice that are written together."""
        self.choices: list[Choice] = []
        self.response = ResponseStream(context.engine.flush_queue, shared.request_id, interval)
        self._context, self._shared, self._next_writer = context, shared, next_writer

    def close(self) -> None:
        """Abort the requests that are still open, and count the tokens that they have brought."""
        self._context.summary.output_tokens += sum(choice.num_unfinished_tokens for choice in self.choices)
        self._context.engine.abort(self.choices)
        if len(self._context.engine.engines) > 1:
            self._context.summary.engines = self.response.engines

    def submit(self, prompt: Prompt, params: SamplingParams, delivered: Delivered = NOTHING) -> None:
        """Submit the choices of one prompt. Each has its own seed; only the first requests the prompt's logprobs.

        Args:
            delivered: what the only choice goes on from.

        Raises: APIError
        """
        self._context.usage.prompt_lengths.append(len(prompt.token_ids))
        summary = self._context.summary
        summary.prompt_tokens += len(prompt.token_ids)
        summary.params = summary.params or params
        for sample in range(self._context.body.n or 1):
            choice = Choice(self.response, self._context, prompt, params, sample == 0, self._next_writer())
            if choice.replay(delivered.batches) != delivered.written:
                raise APIError(500, OTHER_EVENTS)
            self._context.engine.submit(choice, prompt.token_ids, params, self._shared, delivered.identity)
            self.choices.append(choice)
            seed = (params.seed + 1) % 2**64
            params = replace(params, seed=seed, prompt_logprobs=None)

    def prompt_logprobs(self) -> list[PromptLogprobs]:
        """Return vLLM's `prompt_logprobs` for each choice. Raises: APIError, if some have not arrived"""
        if not all(choice.prompt.is_scored for choice in self.choices):
            raise APIError(500, "log-probabilities of the prompt were lost")
        written: list[PromptLogprobs] = []
        for choice in self.choices:  # those of one prompt follow its first
            entry = self._context.formatter.prompt_json(choice.prompt) if choice.is_first else written[-1]
            written.append(entry)
        return written


@dataclass(frozen=True)
class AnswerRequest:
    """An HTTP request for answers, with what is submitted to the engine for it."""

    http: HTTPRequest
    body: Body
    shared: GenerateRequest
    """Fields of all engine requests."""
    submissions: list[Submission]
    usage: UsageCounter = field(default_factory=UsageCounter)


@dataclass
class Answering:
    """Submits requests for answers to the engine."""

    engine: EngineClient
    model: ServedModel
    metrics: Metrics
    _log: EndedRequestLog
    _export_trace: TraceExport | None = None
    _stream_interval: int = 1

    def __post_init__(self) -> None:
        self.prompts = PromptEncoder(self.model)
        self._texts = TokenTexts(self.model.tokenizer)

    def check(self, model: str | None, generates: bool = True) -> None:
        """Raises: APIError, if the model is another one, or generates no text but should, or the engine takes no
        requests"""
        adapter = self.model.adapter(model)
        self.engine.check_ready()
        if adapter is not None:
            self.model.adapters.check_modules(adapter, self.engine.adapted_modules)
        if generates:
            check_task(self.engine.state.pooling, GENERATE)

    def shed(self, scope: Scope, is_crowded: bool) -> APIError | None:
        """Return why the request is refused for load, or None. The refusal of one for an answer is recorded.

        It is decided before the request is read and routed, so that refusals do not delay the outputs of admitted
        requests.

        Args:
            is_crowded: so many connections are open that every request is refused.
        """
        is_for_answer = scope["path"] in ANSWER_PATHS and scope["method"] == "POST"
        try:
            if is_crowded:
                raise APIError(503, "too many connections are open; try again later")
            if is_for_answer:
                self.engine.check_load()
        except APIError as error:
            if is_for_answer:
                http = HTTPRequest(scope)
                self.begin_record(http)
                self.record_failure(http, error)
            return error
        return None

    def begin_record(self, http: HTTPRequest) -> None:
        """Start the numbers that `record_end` writes."""
        choices = None if self._export_trace is None else list[EndedChoice]()
        http.state.summary = RequestSummary(http.state.request_id, http.scope["path"], choices)

    def record_failure(self, http: HTTPRequest, error: Exception) -> None:
        """Record the end of a request without an answer."""
        if isinstance(error, APIError) and error.status in (429, 503):
            has_own = hasattr(http.state, "connection")  # not behind Ray Serve's proxy
            began = http.state.connection.read_at if has_own else http.state.summary.started
            self.metrics.observe_refusal(time.monotonic() - began)
        self.record_end(http, error)

    def record_end(self, http: HTTPRequest, error: Exception | None) -> None:
        status = 200 if error is None else error.status if isinstance(error, APIError) else 500
        reason = "" if error is None else error.logged if isinstance(error, APIError) else str(error)
        http.state.summary.end(status, reason)
        self.metrics.on_request(status)
        self._log.add(http.state.summary)
        if self._export_trace is not None:
            self._export_trace(http)

    def head(self, body: BaseRequest, prefix: str) -> AnswerHead:
        return {
            "id": f"{prefix}-{body.request_id or uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": body.model or self.model.names[0],
        }

    def shared(self, http: HTTPRequest, body: ScheduledRequest, **fields: Any) -> GenerateRequest:
        """Return what all engine requests of an HTTP request share, with some more fields.

        Raises: APIError, if the model is not served any more, or no engine orders requests by priority
        """
        if body.priority and self.engine.scheduling_policies == {"fcfs"}:
            needs = "priority scheduling is not enabled (--scheduling-policy priority); leave it out"
            raise invalid(f"got priority {body.priority}, but {needs}", "priority")
        tenant, salt = http.state.tenant, body.cache_salt or ""
        salt = f"{tenant}/{salt}" if tenant else salt  # cache hits reveal nothing to holders of another key
        own = {"request_id": http.state.request_id, "priority": body.priority or 0, "cache_salt": salt}
        return replace(NO_PROMPT, lora=self.model.adapter(body.model), **own, **fields)

    async def submissions(self, body: Body, prompts: list[Prompt]) -> list[Submission]:
        """Return each prompt with the parameters of its first answer. Raises: APIError"""
        state = self.engine.state
        words = await self.prompts.bad_words(body.bad_words or [])
        sizes = state.max_model_len, state.vocab_size
        defaults = self.model.defaults
        return [(prompt, sampling_params(body, defaults, len(prompt.token_ids), *sizes, words)) for prompt in prompts]

    async def count_tokens(self, http: HTTPRequest, body: ChatRequest) -> int:
        """Return the number of tokens of a conversation. An engine is needed for files alone. Raises: APIError"""
        media = self.engine.state.media
        if media_files(body):
            self.engine.check_ready()  # it is known whether the model has images
        return len(await self.prompts.encode_chat(http, body, media))

    @contextlib.contextmanager
    def generation(
        self, request: AnswerRequest, next_writer: NextWriter, delivered: Delivered = NOTHING
    ) -> Iterator[Generation]:
        """Submit all choices. They end with this context, or when the client leaves, unless the request is detached.

        Args:
            delivered: what the only choice goes on from.

        Raises: APIError
        """
        summary: RequestSummary = request.http.state.summary
        interval = request.body.interval(self._stream_interval)
        kind = ChatLogprobFormatter if isinstance(request.body, ChatRequest) else LogprobFormatter
        formatter = kind(self._texts, bool(request.body.return_tokens_as_token_ids))
        shared = request.usage, formatter, request.body, time.monotonic(), summary
        context = ChoiceContext(self.engine, self.model.tokenizer, self.metrics, *shared)
        generation = Generation(context, request.shared, next_writer, interval)
        fail = generation.response.fail
        watch = contextlib.nullcontext() if summary.is_detached else watch_disconnect(request.http, fail)
        with contextlib.closing(generation), watch:
            for prompt, params in request.submissions:
                generation.submit(prompt, params, delivered)
            yield generation

    async def whole(self, request: AnswerRequest) -> tuple[list[Chunk], Generation]:
        """Return all choices, a chunk each, and how they were generated. Raises: APIError"""
        collectors: list[ChunkCollector] = []

        def next_writer() -> ChunkCollector:
            collectors.append(ChunkCollector())
            return collectors[-1]

        with self.generation(request, next_writer) as generation:
            await generation.response.last()
        return [Chunk.joined(collector.chunks) for collector in collectors], generation

    @staticmethod
    async def built(chunks: list[Chunk], build: Callable[[], T]) -> T:
        """Return what `build` makes of whole choices. Long ones do not hold up the streams."""
        is_long = sum(len(chunk.text) for chunk in chunks) >= LONG_ANSWER
        return await asyncio.to_thread(build) if is_long else build()

    async def streamed(self, request: AnswerRequest, encoder: StreamEncoder) -> Response:
        """Return the response when the first outputs have decided its status. Raises: APIError"""
        with contextlib.ExitStack() as stack:
            generation = stack.enter_context(self.generation(request, encoder.next_choice))
            first = await generation.response.first()
            close = stack.pop_all().close

        def on_end(error: APIError | None) -> None:
            close()
            self.record_end(request.http, error)

        return EventStream(generation.response, first, encoder, on_end)
