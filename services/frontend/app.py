"""The routes."""

import asyncio
import time
import uuid
from collections.abc import Awaitable
from importlib import metadata
from typing import Any

import msgspec
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, Response

from protocol.requests import EnginePhase
from protocol.sampling import StructuredOutputParams
from services.frontend.engine.client import EngineClient
from services.frontend.errors import RETRY_AFTER, APIError
from services.frontend.metrics import Metrics
from services.frontend.model import ServedModel
from services.frontend.openai import embeddings
from services.frontend.openai.answers.chat_output import Reading
from services.frontend.openai.answers.dialects import CompletionDialect, Dialect
from services.frontend.openai.answers.event_stream import EventStream
from services.frontend.openai.answers.generation import Asked, Generation
from services.frontend.openai.answers.logprobs import LogprobWriter
from services.frontend.openai.parameters.body import checked, parse, parse_object
from services.frontend.openai.parameters.sampling import sampling_params
from services.frontend.openai.parameters.structured import structured_params
from services.frontend.openai.prompts.encoder import Prompts, spoken
from services.frontend.openai.prompts.prompt import Prompt
from services.frontend.openai.schemas import openapi
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
from services.frontend.text.token_texts import Vocabulary


def build(model: ServedModel, engine: EngineClient) -> FastAPI:
    app = FastAPI(title="Runahead", docs_url=None, redoc_url=None, openapi_url=None)
    metrics = Metrics(engine, model.names[0])
    _add_errors(app)
    _add_probes(app, engine, metrics)
    _add_models(app, engine, model)
    _add_document(app)
    _Answers(app, engine, model, metrics)
    return app


def _add_errors(app: FastAPI) -> None:
    """Whatever goes wrong has OpenAI's body."""

    @app.exception_handler(APIError)
    async def on_api_error(_: HTTPRequest, error: APIError) -> Response:
        return error.response()

    @app.exception_handler(HTTPException)
    async def on_http_error(_: HTTPRequest, error: HTTPException) -> Response:
        return APIError(error.status_code, str(error.detail)).response()

    @app.exception_handler(Exception)
    async def on_bug(_: HTTPRequest, __: Exception) -> Response:
        return APIError(500, "an internal error occurred; the log has its details").response()


def _add_probes(app: FastAPI, engine: EngineClient, metrics: Metrics) -> None:
    @app.get("/livez")
    async def livez() -> Response:
        return JSONResponse({"status": "alive"})

    @app.get("/readyz")
    @app.get("/health")
    async def readyz() -> Response:
        state = engine.state
        phase = EnginePhase.DRAINING if engine.draining else state.phase
        body = {"phase": phase.name.lower(), "detail": state.detail, "progress": state.progress}
        return JSONResponse(body, 200 if engine.ready else 503, None if engine.ready else RETRY_AFTER)

    @app.get("/version")
    async def version() -> Response:
        return JSONResponse({"version": metadata.version("runahead")})

    @app.get("/metrics")
    async def render_metrics() -> Response:
        return Response(metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")


def _add_models(app: FastAPI, engine: EngineClient, model: ServedModel) -> None:
    common = {"object": "model", "created": int(time.time()), "owned_by": "runahead"}

    @app.get("/v1/models")
    async def models() -> Response:
        length = engine.state.max_model_len or None
        data = [{"id": name, **common, "max_model_len": length} for name in model.names]
        return JSONResponse({"object": "list", "data": data})


def _add_document(app: FastAPI) -> None:
    content = msgspec.json.encode(openapi.document())

    @app.get("/openapi.json")
    async def describe() -> Response:
        return Response(content, media_type="application/json")


class _Answers:
    """The routes that generate."""

    def __init__(self, app: FastAPI, engine: EngineClient, model: ServedModel, metrics: Metrics) -> None:
        self._engine = engine
        self._model = model
        self._metrics = metrics
        self._prompts = Prompts(model)
        self._vocabulary = Vocabulary(model.tokenizer)

        @app.post("/v1/completions")
        async def completions(http: HTTPRequest) -> Response:
            return await self._counted(self._complete(http))

        @app.post("/v1/chat/completions")
        async def chat(http: HTTPRequest) -> Response:
            return await self._counted(self._chat(http))

        @app.post("/tokenize")
        async def tokenize_text(http: HTTPRequest) -> Response:
            return JSONResponse(await self._tokenize(http))

        @app.post("/detokenize")
        async def detokenize_ids(http: HTTPRequest) -> Response:
            return JSONResponse(await self._detokenize(http))

        @app.post("/v1/embeddings")
        async def embed(http: HTTPRequest) -> Response:
            return await self._counted(self._embed(http))

    async def _counted(self, answer: Awaitable[Response]) -> Response:
        """Every request is counted once, at its end."""
        try:
            response = await answer
        except Exception as error:
            self._metrics.on_request(error.status if isinstance(error, APIError) else 500)
            raise
        if not isinstance(response, EventStream):
            self._metrics.on_request(response.status_code)
        return response

    async def _complete(self, http: HTTPRequest) -> Response:
        body = await parse(http, CompletionRequest)
        self._check(body)
        state = self._engine.state
        prompts = await self._prompts.of_completion(body, state.vocab_size, state.max_model_len)
        return await self._answer(http, body, prompts, CompletionDialect(), structured_params(body))

    async def _chat(self, http: HTTPRequest) -> Response:
        body = await parse(http, ChatRequest)
        self._check(body)
        state, reading = self._engine.state, Reading.of(body, self._model.forms)
        prompt = await self._prompts.of_chat(body, state.vocab_size, state.max_model_len)
        begins = reading.begins(prompt.token_ids, self._model.tokenizer)
        dialect = reading.dialect(begins, *spoken(body))
        return await self._answer(
            http, body, [prompt], dialect, reading.grammar(structured_params(body), begins)
        )

    async def _embed(self, http: HTTPRequest) -> Response:
        body = await parse(http, EmbeddingRequest)
        self._check(body)
        state = self._engine.state
        form = embeddings.Form.of(body, state.hidden_size)
        sizes = state.vocab_size, state.max_model_len
        prompts = await embeddings.token_ids(body, self._prompts, self._model.tokenizer, *sizes)
        embedder = embeddings.Embedder(self._engine, self._metrics, self._model.pooling, form)
        salt, name = self._salt(http, body.cache_salt), http.state.request_id
        try:
            embedder.watch(http.receive)
            entries = await embedder.run(prompts, body.priority or 0, salt, name)
        finally:
            embedder.close()
        head = {
            "id": f"embd-{uuid.uuid4().hex}",
            "object": "list",
            "created": int(time.time()),
            "model": body.model or self._model.names[0],
        }
        content = embeddings.answer(head, entries, sum(map(len, prompts)))
        return Response(content, media_type="application/json")

    async def _tokenize(self, http: HTTPRequest) -> dict[str, Any]:
        content = await parse_object(http)
        kinds = TokenizeCompletionRequest, TokenizeChatRequest
        body = checked(content, kinds[1]) if "messages" in content else checked(content, kinds[0])
        self._check_model(body.model)
        length = self._engine.state.max_model_len
        return await tokenize(body, self._prompts, self._model.tokenizer, length)

    async def _detokenize(self, http: HTTPRequest) -> dict[str, Any]:
        body = await parse(http, DetokenizeRequest)
        self._check_model(body.model)
        return await detokenize(body, self._prompts, self._engine.state.vocab_size)

    @staticmethod
    def _salt(http: HTTPRequest, given: str | None) -> str:
        """Who holds another key learns nothing from cache hits."""
        tenant, salt = http.state.tenant, given or ""
        return f"{tenant}/{salt}" if tenant else salt

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
        """The whole answer, or its stream once the first event has decided the status. Raises: APIError"""
        state = self._engine.state
        words = await self._prompts.bad_words(body.bad_words or [])
        sizes = state.max_model_len, state.vocab_size
        params = [
            sampling_params(body, self._model.defaults, len(prompt.token_ids), *sizes, words)
            for prompt in prompts
        ]
        salt = self._salt(http, body.cache_salt)
        generation = Generation(
            self._engine,
            self._metrics,
            self._model.tokenizer,
            LogprobWriter(self._vocabulary, bool(body.return_tokens_as_token_ids)),
            Asked.of(body, salt, http.state.request_id, structured),
        )
        try:
            for prompt, wanted in zip(prompts, params, strict=True):
                generation.submit(prompt, wanted)
            generation.watch(http.receive)
            head: dict[str, Any] = {
                "id": f"{dialect.prefix}-{uuid.uuid4().hex}",
                "object": dialect.chunk_object if body.stream else dialect.object,
                "created": int(time.time()),
                "model": body.model or self._model.names[0],
            }
            if body.stream:
                options = body.stream_options or StreamOptions()
                beginning = {"prompt_token_ids": prompts[0].token_ids} if body.return_token_ids else {}
                first = await generation.advance()
                return EventStream(generation, first, dialect, head, options, self._metrics, beginning)
            await generation.run()
        except BaseException:
            generation.close()
            raise
        generation.close()
        choices = [dialect.choice(choice.index, choice.whole) for choice in generation.choices]
        answer = {**head, "choices": choices, "usage": generation.usage()}
        if isinstance(body, ChatRequest) and body.return_token_ids:
            answer["prompt_token_ids"] = prompts[0].token_ids
        if body.prompt_logprobs is not None:
            written = await asyncio.to_thread(generation.prompt_logprobs)  # a long prompt's are many
            for known, of_completion in zip(written, choices, strict=True):
                (answer if isinstance(body, ChatRequest) else of_completion)["prompt_logprobs"] = known
        return Response(msgspec.json.encode(answer), media_type="application/json")
