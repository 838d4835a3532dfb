"""The routes."""

import asyncio
import json
import time
from typing import Any, TypeGuard, TypeVar

import pydantic
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, Response

from protocol.requests import EnginePhase
from services.frontend.errors import RETRY_AFTER, APIError, invalid
from services.frontend.metrics import Metrics
from services.frontend.model import ServedModel
from services.frontend.openai.dialects import ChatDialect, CompletionDialect
from services.frontend.openai.parameters import refuse_unserved, sampling_params
from services.frontend.openai.schemas import ChatRequest, CompletionRequest
from services.frontend.openai.serving import Dialect, Serving

B = TypeVar("B", CompletionRequest, ChatRequest)
BODY_TIMEOUT = 30.0
"""Seconds a client may take to send its body."""


def build(model: ServedModel, serving: Serving, metrics: Metrics) -> FastAPI:
    app = FastAPI(title="Runahead", docs_url=None, redoc_url=None)
    engine = serving.engine
    started = int(time.time())

    @app.exception_handler(APIError)
    async def on_api_error(_: HTTPRequest, error: APIError) -> Response:
        return error.response()

    @app.exception_handler(HTTPException)
    async def on_http_error(_: HTTPRequest, error: HTTPException) -> Response:
        return APIError(error.status_code, str(error.detail)).response()

    @app.exception_handler(RequestValidationError)
    async def on_invalid(_: HTTPRequest, __: RequestValidationError) -> Response:
        return invalid("the request is not valid").response()

    @app.get("/livez")
    async def livez() -> Response:
        return JSONResponse({"status": "alive"})

    @app.get("/readyz")
    @app.get("/health")
    async def readyz() -> Response:
        phase = EnginePhase.DRAINING if engine.draining else engine.state.phase
        body = {"phase": phase.name.lower(), "detail": engine.state.detail, "progress": engine.state.progress}
        return JSONResponse(body, 200 if engine.ready else 503, None if engine.ready else RETRY_AFTER)

    @app.get("/metrics")
    async def render_metrics() -> Response:
        return Response(metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/v1/models")
    async def models() -> Response:
        length = engine.state.max_model_len or None
        entries = [
            {
                "id": name,
                "object": "model",
                "created": started,
                "owned_by": "runahead",
                "max_model_len": length,
            }
            for name in model.names
        ]
        return JSONResponse({"object": "list", "data": entries})

    @app.post("/v1/completions")
    async def completions(http: HTTPRequest) -> Response:
        body = await _parse(http, CompletionRequest)
        prompts = await run_in_threadpool(_prompts, body, model, engine.state.vocab_size)
        return await _serve(http, body, prompts, CompletionDialect())

    @app.post("/v1/chat/completions")
    async def chat(http: HTTPRequest) -> Response:
        body = await _parse(http, ChatRequest)
        messages = [message.plain() for message in body.messages]
        prompt = await run_in_threadpool(
            lambda: model.tokenizer.encode_rendered(model.template.render(messages))
        )
        return await _serve(http, body, [prompt], ChatDialect())

    async def _serve(
        http: HTTPRequest, body: CompletionRequest | ChatRequest, prompts: list[list[int]], dialect: Dialect
    ) -> Response:
        if body.model is not None and body.model not in model.names:
            raise APIError(404, f"the model {body.model!r} does not exist", "model", "model_not_found")
        if not engine.ready:
            raise APIError(503, f"the engine is not ready: {engine.state.detail}")
        state = engine.state
        params = [
            sampling_params(body, model.defaults, len(prompt), state.max_model_len, state.vocab_size)
            for prompt in prompts
        ]
        name = http.state.request_id
        choices = serving.submit(
            prompts, params, body.stops(), body.priority or 0, body.cache_salt or "", name
        )
        usage = body.stream_options is not None and body.stream_options.include_usage
        return await serving.respond(http, choices, dialect, model.names[0], bool(body.stream), usage)

    return app


async def _parse(http: HTTPRequest, kind: type[B]) -> B:
    """Raises: APIError, naming what is wrong with the body."""
    try:
        raw = await asyncio.wait_for(http.body(), BODY_TIMEOUT)
    except TimeoutError:
        raise APIError(408, "the request body did not arrive in time") from None
    except ClientDisconnect:
        raise APIError(499, "the client closed the connection") from None
    try:
        content: Any = json.loads(raw, parse_constant=_no_constant)
        json.dumps(content, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        text = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise invalid(f"the request body is not valid JSON: {text:.200}") from None
    if not isinstance(content, dict):
        raise invalid("the request body must be a JSON object")
    try:
        body = kind.model_validate(content)
    except pydantic.ValidationError as error:
        raise _named(error) from None
    refuse_unserved(body)
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options is only allowed when stream is true", "stream_options")
    return body


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _named(error: pydantic.ValidationError) -> APIError:
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    where = ".".join(
        str(part)
        for part in first["loc"]
        if not str(part).startswith(("constrained", "list[", "str", "union"))
    )
    param = str(first["loc"][0]) if first["loc"] else None
    return invalid(f"{where}: {first['msg']}" if where else first["msg"], param)


def _prompts(body: CompletionRequest, model: ServedModel, vocab_size: int) -> list[list[int]]:
    """Token ids of each prompt. Raises: APIError"""
    given = body.prompt
    several = [given] if isinstance(given, str) or _are_ids(given) else given
    prompts = [
        list(prompt) if _are_ids(prompt) else model.tokenizer.encode(str(prompt)) if prompt else []
        for prompt in several
    ]
    if not prompts:
        raise invalid("the prompt is empty", "prompt")
    outside = next((token for prompt in prompts for token in prompt if not 0 <= token < vocab_size), None)
    if outside is not None:
        raise invalid(f"prompt: token {outside} is not between 0 and {vocab_size - 1}", "prompt")
    return prompts


def _are_ids(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and bool(value) and isinstance(value[0], int)
