"""The endpoints that generate, embed or tokenize."""

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import Awaitable, Iterator
from typing import Any

import msgspec
from fastapi import FastAPI
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from protocol.sampling import Pooling, SamplingParams, StructuredOutputParams
from services.frontend.engine.client import EngineClient, RequestContext
from services.frontend.errors import APIError
from services.frontend.http.disconnect import watch_disconnect
from services.frontend.metrics import Metrics, outcome_of
from services.frontend.model import ServedModel
from services.frontend.openai.answers.chat_output import ChatOutput
from services.frontend.openai.answers.dialects import CompletionDialect, Dialect
from services.frontend.openai.answers.event_stream import EventStream
from services.frontend.openai.answers.events import EventEncoder
from services.frontend.openai.answers.generation import Generation
from services.frontend.openai.answers.logprobs import LogprobFormatter
from services.frontend.openai.answers.options import AnswerOptions
from services.frontend.openai.answers.usage import UsageCounter
from services.frontend.openai.answers.writers import AnswerCollector, AnswerWriter
from services.frontend.openai.embeddings import Embedder, EmbeddingFormat, embeddings_json, token_ids
from services.frontend.openai.parameters.body import BodyParser, parse_object
from services.frontend.openai.parameters.sampling import sampling_params
from services.frontend.openai.parameters.structured import structured_params
from services.frontend.openai.prompts.encoder import PromptEncoder, answer_role
from services.frontend.openai.prompts.prompt import Prompt
from services.frontend.openai.schemas.requests import (
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    StreamOptions,
)
from services.frontend.openai.tokenize import (
    DetokenizeRequest,
    TokenizeChatRequest,
    TokenizeCompletionRequest,
    detokenize,
    tokenize,
)
from services.frontend.text.token_texts import TokenTexts

log = logging.getLogger("runahead.frontend")


def add_endpoints(
    app: FastAPI, engine: EngineClient, model: ServedModel, metrics: Metrics, bodies: BodyParser
) -> None:
    endpoints = Endpoints(engine, model, metrics, bodies)
    for path, handler in (
        ("/v1/completions", endpoints.completions),
        ("/v1/chat/completions", endpoints.chat),
        ("/v1/embeddings", endpoints.embeddings),
        ("/tokenize", endpoints.tokenize),
        ("/detokenize", endpoints.detokenize),
    ):
        app.post(path)(handler)


class Endpoints:
    """Handlers of the endpoints."""

    def __init__(
        self, engine: EngineClient, model: ServedModel, metrics: Metrics, bodies: BodyParser
    ) -> None:
        self._bodies = bodies
        self._engine = engine
        self._model = model
        self._metrics = metrics
        self._prompts = PromptEncoder(model)
        self._texts = TokenTexts(model.tokenizer)

    async def completions(self, http: HTTPRequest) -> Response:
        return await self._recorded(http, self._complete(http))

    async def chat(self, http: HTTPRequest) -> Response:
        return await self._recorded(http, self._chat(http))

    async def embeddings(self, http: HTTPRequest) -> Response:
        return await self._recorded(http, self._embed(http))

    async def tokenize(self, http: HTTPRequest) -> Response:
        given = await parse_object(http)
        kind: type[TokenizeCompletionRequest] | type[TokenizeChatRequest]
        kind = TokenizeChatRequest if "messages" in given else TokenizeCompletionRequest
        body = self._bodies.checked(http, given, kind)
        self._check_model(body.model)
        length = self._engine.state.max_model_len
        content = await tokenize(body, self._prompts, self._model.tokenizer, length)
        return Response(content, media_type="application/json")

    async def detokenize(self, http: HTTPRequest) -> Response:
        body = await self._bodies.parse(http, DetokenizeRequest)
        self._check_model(body.model)
        content = await detokenize(body, self._prompts, self._engine.state.vocab_size)
        return Response(content, media_type="application/json")

    async def _recorded(self, http: HTTPRequest, answer: Awaitable[Response]) -> Response:
        """Record the end of the request in the metrics and the log. A stream records its own end."""
        try:
            response = await answer
        except Exception as error:
            self._record_end(http, error)
            raise
        if not isinstance(response, EventStream):
            self._record_end(http, None)
        return response

    def _record_end(self, http: HTTPRequest, error: Exception | None) -> None:
        status = 200 if error is None else error.status if isinstance(error, APIError) else 500
        self._metrics.on_request(status)
        reason = "" if error is None else f": {error}"
        log.debug(
            "request %s: request_id=%s status=%d%s", outcome_of(status), http.state.request_id, status, reason
        )

    async def _complete(self, http: HTTPRequest) -> Response:
        body = await self._bodies.parse(http, CompletionRequest)
        self._check(body)
        state = self._engine.state
        prompts = await self._prompts.for_completion(body, state.vocab_size, state.max_model_len)
        return await self._answer(http, body, prompts, CompletionDialect(), structured_params(body))

    async def _chat(self, http: HTTPRequest) -> Response:
        body = await self._bodies.parse(http, ChatRequest)
        self._check(body)
        state, output = self._engine.state, ChatOutput.from_body(body, self._model.formats)
        prompt = await self._prompts.for_chat(body, state.vocab_size, state.max_model_len)
        start = output.reasoning_start(prompt.token_ids, self._model.tokenizer)
        dialect = output.dialect(start, *answer_role(body))
        return await self._answer(
            http, body, [prompt], dialect, output.grammar(structured_params(body), start)
        )

    async def _embed(self, http: HTTPRequest) -> Response:
        body = await self._bodies.parse(http, EmbeddingRequest)
        self._check(body)
        state = self._engine.state
        format = EmbeddingFormat.from_body(body, state.hidden_size)
        sizes = state.vocab_size, state.max_model_len
        prompts = await token_ids(body, self._prompts, self._model.tokenizer, *sizes)
        request = self._context(http, body, pooling=self._model.pooling)
        embedder = Embedder(self._engine, self._metrics, format, request, prompts)
        with contextlib.closing(embedder), watch_disconnect(http.receive, embedder.response.fail):
            entries = await embedder.run()
        content = embeddings_json(self._head(body, "embd", "list"), entries, sum(map(len, prompts)))
        return Response(content, media_type="application/json")

    def _context(
        self,
        http: HTTPRequest,
        body: CompletionRequest | ChatRequest | EmbeddingRequest,
        structured: StructuredOutputParams | None = None,
        pooling: Pooling = Pooling.NONE,
    ) -> RequestContext:
        tenant, salt = http.state.tenant, body.cache_salt or ""
        salt = f"{tenant}/{salt}" if tenant else salt  # cache hits reveal nothing to holders of another key
        return RequestContext(http.state.request_id, body.priority or 0, salt, structured, pooling)

    def _head(
        self, body: CompletionRequest | ChatRequest | EmbeddingRequest, prefix: str, object: str
    ) -> dict[str, Any]:
        """Return the fields that begin every response body and every event."""
        return {
            "id": f"{prefix}-{body.request_id or uuid.uuid4().hex}",
            "object": object,
            "created": int(time.time()),
            "model": body.model or self._model.names[0],
        }

    def _check(self, body: CompletionRequest | ChatRequest | EmbeddingRequest) -> None:
        """Raises: APIError"""
        self._check_model(body.model)
        self._engine.check_ready()

    def _check_model(self, name: str | None) -> None:
        """Raises: APIError"""
        if name is not None and name not in self._model.names:
            raise APIError(404, f"the model {name!r} does not exist", "model", "model_not_found")

    async def _answer(
        self,
        http: HTTPRequest,
        body: CompletionRequest | ChatRequest,
        prompts: list[Prompt],
        dialect: Dialect,
        structured: StructuredOutputParams | None,
    ) -> Response:
        """Raises: APIError"""
        state = self._engine.state
        words = await self._prompts.bad_words(body.bad_words or [])
        sizes = state.max_model_len, state.vocab_size
        params = [
            sampling_params(body, self._model.defaults, len(prompt.token_ids), *sizes, words)
            for prompt in prompts
        ]
        request = self._context(http, body, structured)
        submissions = [*zip(prompts, params, strict=True)]
        if body.stream:
            return await self._streamed(http, body, request, submissions, dialect)
        return await self._whole(http, body, request, submissions, dialect)

    @contextlib.contextmanager
    def _generation(
        self,
        http: HTTPRequest,
        body: CompletionRequest | ChatRequest,
        request: RequestContext,
        submissions: list[tuple[Prompt, SamplingParams]],
        usage: UsageCounter,
        writer: AnswerWriter,
    ) -> Iterator[Generation]:
        """Submit all choices. They end with this context, or when the client leaves. Raises: APIError"""
        generation = Generation(
            self._engine,
            self._metrics,
            self._model.tokenizer,
            LogprobFormatter(self._texts, bool(body.return_tokens_as_token_ids)),
            AnswerOptions.from_body(body),
            request,
            usage,
            writer,
        )
        with contextlib.closing(generation), watch_disconnect(http.receive, generation.response.fail):
            for prompt, params in submissions:
                generation.submit(prompt, params)
            yield generation

    async def _streamed(
        self,
        http: HTTPRequest,
        body: CompletionRequest | ChatRequest,
        request: RequestContext,
        submissions: list[tuple[Prompt, SamplingParams]],
        dialect: Dialect,
    ) -> Response:
        """Return the response when the first outputs have decided its status. Raises: APIError"""
        head, usage = self._head(body, dialect.prefix, dialect.chunk_object), UsageCounter()
        first_fields = {"prompt_token_ids": submissions[0][0].token_ids} if body.return_token_ids else {}
        encoder = EventEncoder(dialect, head, body.stream_options or StreamOptions(), usage, first_fields)
        with contextlib.ExitStack() as stack:
            generation = stack.enter_context(
                self._generation(http, body, request, submissions, usage, encoder)
            )
            first = await generation.response.first()
            close = stack.pop_all().close

        def on_end(error: APIError | None) -> None:
            close()
            self._record_end(http, error)

        return EventStream(generation.response, first, encoder, on_end)

    async def _whole(
        self,
        http: HTTPRequest,
        body: CompletionRequest | ChatRequest,
        request: RequestContext,
        submissions: list[tuple[Prompt, SamplingParams]],
        dialect: Dialect,
    ) -> Response:
        """Raises: APIError"""
        usage, collector = UsageCounter(), AnswerCollector()
        with self._generation(http, body, request, submissions, usage, collector) as generation:
            await generation.response.last()
        choices = [dialect.choice(index, chunk) for index, chunk in enumerate(collector.answers())]
        answer = {
            **self._head(body, dialect.prefix, dialect.object),
            "choices": choices,
            "usage": usage.to_json(),
        }
        if isinstance(body, ChatRequest) and body.return_token_ids:
            answer["prompt_token_ids"] = submissions[0][0].token_ids
        if body.prompt_logprobs is not None:
            written = await asyncio.to_thread(generation.prompt_logprobs)  # a long prompt has many
            for entry, of_completion in zip(written, choices, strict=True):
                (answer if isinstance(body, ChatRequest) else of_completion)["prompt_logprobs"] = entry
        return Response(msgspec.json.encode(answer), media_type="application/json")
