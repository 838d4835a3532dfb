"""The routes."""

import time
import uuid
from collections.abc import Awaitable
from typing import Any

import msgspec
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, Response

from protocol.requests import EnginePhase
from services.frontend.engine_client import EngineClient
from services.frontend.errors import RETRY_AFTER, APIError
from services.frontend.metrics import Metrics
from services.frontend.model import ServedModel
from services.frontend.openai.dialects import ChatDialect, CompletionDialect, Dialect
from services.frontend.openai.event_stream import EventStream
from services.frontend.openai.generation import Generation
from services.frontend.openai.parameters import sampling_params
from services.frontend.openai.parsing import parse
from services.frontend.openai.prompts import Prompts
from services.frontend.openai.schemas import ChatRequest, CompletionRequest


def build(model: ServedModel, engine: EngineClient) -> FastAPI:
    app = FastAPI(title="Runahead", docs_url=None, redoc_url=None, openapi_url=None)
    metrics = Metrics(engine, model.names[0])
    _add_errors(app)
    _add_probes(app, engine, metrics)
    _add_models(app, engine, model)
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


class _Answers:
    """The routes that generate."""

    def __init__(self, app: FastAPI, engine: EngineClient, model: ServedModel, metrics: Metrics) -> None:
        self._engine = engine
        self._model = model
        self._metrics = metrics
        self._prompts = Prompts(model)

        @app.post("/v1/completions")
        async def completions(http: HTTPRequest) -> Response:
            return await self._counted(self._complete(http))

        @app.post("/v1/chat/completions")
        async def chat(http: HTTPRequest) -> Response:
            return await self._counted(self._chat(http))

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
        return await self._answer(http, body, prompts, CompletionDialect())

    async def _chat(self, http: HTTPRequest) -> Response:
        body = await parse(http, ChatRequest)
        self._check(body)
        state = self._engine.state
        prompt = await self._prompts.of_chat(body, state.vocab_size, state.max_model_len)
        return await self._answer(http, body, [prompt], ChatDialect())

    def _check(self, body: CompletionRequest | ChatRequest) -> None:
        """Raises: APIError"""
        if body.model is not None and body.model not in self._model.names:
            raise APIError(404, f"the model {body.model!r} does not exist", "model", "model_not_found")
        self._engine.check_ready()

    async def _answer(
        self,
        http: HTTPRequest,
        body: CompletionRequest | ChatRequest,
        prompts: list[list[int]],
        dialect: Dialect,
    ) -> Response:
        """The whole answer, or its stream once the first event has decided the status. Raises: APIError"""
        state = self._engine.state
        name, tenant, salt = http.state.request_id, http.state.tenant, body.cache_salt or ""
        salt = f"{tenant}/{salt}" if tenant else salt  # who holds another key learns nothing from cache hits
        params = [
            sampling_params(body, self._model.defaults, len(prompt), state.max_model_len, state.vocab_size)
            for prompt in prompts
        ]
        generation = Generation(self._engine, self._metrics)
        try:
            for prompt, wanted in zip(prompts, params, strict=True):
                generation.submit(
                    self._model.tokenizer, prompt, wanted, body.stops(), body.priority or 0, salt, name
                )
            generation.watch(http.receive)
            head: dict[str, Any] = {
                "id": f"{dialect.prefix}-{uuid.uuid4().hex}",
                "object": dialect.chunk_object if body.stream else dialect.object,
                "created": int(time.time()),
                "model": body.model or self._model.names[0],
            }
            if body.stream:
                with_usage = body.stream_options is not None and body.stream_options.include_usage
                first = await generation.advance()
                return EventStream(generation, first, dialect, head, with_usage, self._metrics)
            await generation.run()
        except BaseException:
            generation.close()
            raise
        generation.close()
        choices = [dialect.choice(choice.index, choice.whole) for choice in generation.choices]
        answer = {**head, "choices": choices, "usage": generation.usage()}
        return Response(msgspec.json.encode(answer), media_type="application/json")
