"""The HTTP application: error bodies, probes, metrics, and the endpoints of OpenAI's API."""

import logging
import time
from importlib import metadata

import msgspec
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, Response

from protocol.requests import EnginePhase
from services.config import FrontendConfig
from services.frontend.engine.client import EngineClient
from services.frontend.errors import RETRY_AFTER, APIError
from services.frontend.metrics import Metrics
from services.frontend.model import ServedModel
from services.frontend.openai.endpoints import add_endpoints
from services.frontend.openai.parameters.body import BodyParser
from services.frontend.openai.schemas import openapi

log = logging.getLogger("runahead.frontend")

_DETAILS = {
    EnginePhase.WAITING_FOR_WORKERS: "waiting for workers",
    EnginePhase.LOADING: "loading the model",
    EnginePhase.READY: "ready",
    EnginePhase.DRAINING: "stopping; open requests finish",
    EnginePhase.FAILED: "failed; the log has the reason",
    EnginePhase.RECOVERING: "replacing lost workers",
}
"""Texts for clients without an API key. The engine's own may have paths, and errors of workers."""


def build(config: FrontendConfig, model: ServedModel, engine: EngineClient) -> FastAPI:
    app = FastAPI(title="Runahead", docs_url=None, redoc_url=None, openapi_url=None)
    metrics = Metrics(engine, model.names[0])
    _add_errors(app)
    _add_probes(app, engine, metrics)
    _add_models(app, engine, model)
    _add_document(app, closed=config.unknown_parameters == "refuse")
    add_endpoints(app, engine, model, metrics, BodyParser(config.unknown_parameters))
    return app


def _add_errors(app: FastAPI) -> None:
    """Give every error a body of OpenAI's shape."""

    @app.exception_handler(APIError)
    async def on_api_error(_: HTTPRequest, error: APIError) -> Response:
        return error.response()

    @app.exception_handler(HTTPException)
    async def on_http_error(_: HTTPRequest, error: HTTPException) -> Response:
        return APIError(error.status_code, str(error.detail)).response()

    @app.exception_handler(Exception)
    async def on_bug(http: HTTPRequest, _: Exception) -> Response:
        log.error("request failed with a bug: request_id=%s; its traceback follows", http.state.request_id)
        return APIError(500, "an internal error occurred; the log has its details").response()


def _add_probes(app: FastAPI, engine: EngineClient, metrics: Metrics) -> None:
    @app.get("/livez")
    @app.head("/livez")
    async def livez() -> Response:
        return JSONResponse({"status": "alive"})

    @app.get("/readyz")
    @app.head("/readyz")
    @app.get("/health")
    @app.head("/health")
    async def readyz(http: HTTPRequest) -> Response:
        state = engine.state
        phase = EnginePhase.DRAINING if engine.draining else state.phase
        detail = state.detail if http.state.tenant else _DETAILS[phase]
        body = {"phase": phase.name.lower(), "detail": detail, "progress": state.progress}
        return JSONResponse(body, 200 if engine.ready else 503, None if engine.ready else RETRY_AFTER)

    @app.get("/version")
    async def version() -> Response:
        return JSONResponse({"version": metadata.version("runahead-engine")})

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


def _add_document(app: FastAPI, closed: bool) -> None:
    content = msgspec.json.encode(openapi.document(closed))

    @app.get("/openapi.json")
    async def describe() -> Response:
        return Response(content, media_type="application/json")
