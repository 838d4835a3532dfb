"""The endpoints that generate, embed or tokenize."""

import asyncio
import contextlib
import logging

import msgspec
from fastapi import FastAPI
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from protocol.sampling import StructuredOutputParams
from services.frontend.engine.client import RequestContext
from services.frontend.http.disconnect import watch_disconnect
from services.frontend.openai.answering import Answering, Submission
from services.frontend.openai.answers.chat_output import ChatOutput
from services.frontend.openai.answers.dialects import CompletionDialect, Dialect
from services.frontend.openai.answers.events import EventEncoder
from services.frontend.openai.answers.usage import UsageCounter
from services.frontend.openai.answers.writers import AnswerCollector
from services.frontend.openai.embeddings import Embedder, EmbeddingFormat, embeddings_json, token_ids
from services.frontend.openai.parameters.body import BodyParser, parse_object
from services.frontend.openai.parameters.structured import structured_params
from services.frontend.openai.prompts.encoder import answer_role
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

log = logging.getLogger("runahead.frontend")


class Endpoints:
    """Handlers of the endpoints."""

    def __init__(self, answering: Answering, bodies: BodyParser) -> None:
        self._answering = answering
        self._bodies = bodies
        self._engine = answering.engine
        self._model = answering.model
        self._prompts = answering.prompts

    def add_to(self, app: FastAPI) -> None:
        for path, handler in (
            ("/v1/completions", self.completions),
            ("/v1/chat/completions", self.chat),
            ("/v1/embeddings", self.embeddings),
            ("/tokenize", self.tokenize),
            ("/detokenize", self.detokenize),
        ):
            app.post(path)(handler)

    async def completions(self, http: HTTPRequest) -> Response:
        return await self._answering.recorded(http, self._complete(http))

    async def chat(self, http: HTTPRequest) -> Response:
        return await self._answering.recorded(http, self._chat(http))

    async def embeddings(self, http: HTTPRequest) -> Response:
        return await self._answering.recorded(http, self._embed(http))

    async def tokenize(self, http: HTTPRequest) -> Response:
        given = await parse_object(http)
        kind: type[TokenizeCompletionRequest] | type[TokenizeChatRequest]
        kind = TokenizeChatRequest if "messages" in given else TokenizeCompletionRequest
        body = self._bodies.checked(http, given, kind)
        self._answering.check_model(body.model)
        length = self._engine.state.max_model_len
        content = await tokenize(body, self._prompts, self._model.tokenizer, length)
        return Response(content, media_type="application/json")

    async def detokenize(self, http: HTTPRequest) -> Response:
        body = await self._bodies.parse(http, DetokenizeRequest)
        self._answering.check_model(body.model)
        content = await detokenize(body, self._prompts, self._engine.state.vocab_size)
        return Response(content, media_type="application/json")

    async def _complete(self, http: HTTPRequest) -> Response:
        body = await self._bodies.parse(http, CompletionRequest)
        self._answering.check(body.model)
        state = self._engine.state
        prompts = await self._prompts.for_completion(body, state.vocab_size, state.max_model_len)
        return await self._answer(http, body, prompts, CompletionDialect(), structured_params(body))

    async def _chat(self, http: HTTPRequest) -> Response:
        body = await self._bodies.parse(http, ChatRequest)
        self._answering.check(body.model)
        state, output = self._engine.state, ChatOutput.from_body(body, self._model.formats)
        prompt = await self._prompts.for_chat(body, state.vocab_size, state.max_model_len)
        start = output.reasoning_start(prompt.token_ids, self._model.tokenizer)
        dialect = output.dialect(start, *answer_role(body))
        return await self._answer(
            http, body, [prompt], dialect, output.grammar(structured_params(body), start)
        )

    async def _embed(self, http: HTTPRequest) -> Response:
        body = await self._bodies.parse(http, EmbeddingRequest)
        self._answering.check(body.model)
        state = self._engine.state
        format = EmbeddingFormat.from_body(body, state.hidden_size)
        sizes = state.vocab_size, state.max_model_len
        prompts = await token_ids(body, self._prompts, self._model.tokenizer, *sizes)
        request = self._answering.context(http, body, pooling=self._model.pooling)
        http.state.summary.prompt_tokens = sum(map(len, prompts))
        embedder = Embedder(self._engine, self._answering.metrics, format, request, prompts)
        with contextlib.closing(embedder), watch_disconnect(http.receive, embedder.response.fail):
            entries = await embedder.run()
        content = embeddings_json(self._answering.head(body, "embd", "list"), entries, sum(map(len, prompts)))
        return Response(content, media_type="application/json")

    async def _answer(
        self,
        http: HTTPRequest,
        body: CompletionRequest | ChatRequest,
        prompts: list[Prompt],
        dialect: Dialect,
        structured: StructuredOutputParams | None,
    ) -> Response:
        """Raises: APIError"""
        submissions = await self._answering.submissions(body, prompts)
        request = self._answering.context(http, body, structured)
        if body.stream:
            return await self._streamed(http, body, request, submissions, dialect)
        return await self._whole(http, body, request, submissions, dialect)

    async def _streamed(
        self,
        http: HTTPRequest,
        body: CompletionRequest | ChatRequest,
        request: RequestContext,
        submissions: list[Submission],
        dialect: Dialect,
    ) -> Response:
        """Return the response when the first outputs have decided its status. Raises: APIError"""
        head, usage = self._answering.head(body, dialect.prefix, dialect.chunk_object), UsageCounter()
        first_fields = {"prompt_token_ids": submissions[0][0].token_ids} if body.return_token_ids else {}
        encoder = EventEncoder(dialect, head, body.stream_options or StreamOptions(), usage, first_fields)
        return await self._answering.streamed(http, body, request, submissions, usage, encoder)

    async def _whole(
        self,
        http: HTTPRequest,
        body: CompletionRequest | ChatRequest,
        request: RequestContext,
        submissions: list[Submission],
        dialect: Dialect,
    ) -> Response:
        """Raises: APIError"""
        usage, collector = UsageCounter(), AnswerCollector()
        with self._answering.generation(http, body, request, submissions, usage, collector) as generation:
            await generation.response.last()
        choices = [dialect.choice(index, chunk) for index, chunk in enumerate(collector.answers())]
        answer = {
            **self._answering.head(body, dialect.prefix, dialect.object),
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
