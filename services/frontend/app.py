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
from services.frontend.anthropic.endpoints import MessagesEndpoints
from services.frontend.engine.client import EngineClient
from services.frontend.errors import RETRY_AFTER, APIError, error_response, invalid
from services.frontend.metrics import Metrics
from services.frontend.model import ServedModel
from services.frontend.openai.answering import Answering
from services.frontend.openai.endpoints import Endpoints
from services.frontend.openai.parameters.body import BodyParser
from services.frontend.openai.schemas import openapi
from services.frontend.openai.scores import ScoreEndpoints
from services.frontend.responses_api.endpoints import ResponsesEndpoints
from services.frontend.responses_api.store import ResponseStore
from services.frontend.traces import TraceExporter

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
_LOADING_PHASES = frozenset({"loading weights", "weights", "simulated model"})
"""Texts of the engine that every client may see."""


def build(
    config: FrontendConfig,
    model: ServedModel,
    engine: EngineClient,
    metrics: Metrics,
    traces: TraceExporter | None = None,
) -> FastAPI:
    app = FastAPI(title="Runahead", docs_url=None, redoc_url=None, openapi_url=None)
    _add_errors(app)
    _add_probes(app, engine, metrics)
    _add_models(app, engine, model)
    _add_information(app, engine, model)
    if config.enable_admin_routes:
        _add_admin(app, engine)
    _add_document(app, config.enable_admin_routes, closed=config.unknown_parameters == "refuse")
    answering, bodies = Answering(engine, model, metrics, traces), BodyParser(config.unknown_parameters)
    Endpoints(answering, bodies).add_to(app)
    MessagesEndpoints(answering, bodies).add_to(app)
    store = ResponseStore() if config.response_store else None
    ResponsesEndpoints(answering, bodies, store).add_to(app)
    ScoreEndpoints(answering, bodies).add_to(app)
    return app


def _add_errors(app: FastAPI) -> None:
    """Give every error the body of its route's dialect."""

    @app.exception_handler(APIError)
    async def on_api_error(http: HTTPRequest, error: APIError) -> Response:
        return error_response(error, http.url.path, http.state.request_id)

    @app.exception_handler(HTTPException)
    async def on_http_error(http: HTTPRequest, error: HTTPException) -> Response:
        refused = APIError(error.status_code, str(error.detail))
        return error_response(refused, http.url.path, http.state.request_id)

    @app.exception_handler(Exception)
    async def on_bug(http: HTTPRequest, _: Exception) -> Response:
        log.error("request failed with a bug: request_id=%s; its traceback follows", http.state.request_id)
        failed = APIError(500, "an internal error occurred; the log has its details")
        return error_response(failed, http.url.path, http.state.request_id)


def _add_probes(app: FastAPI, engine: EngineClient, metrics: Metrics) -> None:
    @app.get("/livez")
    @app.head("/livez")
    async def livez() -> Response:
        return JSONResponse({"status": "alive"})

    @app.get("/readyz")
    @app.head("/readyz")
    @app.get("/health")
    @app.head("/health")
    @app.get("/ping")
    @app.head("/ping")
    @app.post("/ping")
    async def readyz(http: HTTPRequest) -> Response:
        state = engine.state
        phase = EnginePhase.DRAINING if engine.draining else state.phase
        is_open = http.state.tenant or state.detail in _LOADING_PHASES
        detail = state.detail if is_open else _DETAILS[phase]
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

    @app.get("/v1/models/{name:path}")
    async def model_entry(name: str) -> Response:
        if name not in model.names:
            raise APIError(404, f"the model {name!r:.200} does not exist", "model", "model_not_found")
        return JSONResponse({"id": name, **common, "max_model_len": engine.state.max_model_len or None})


def _add_information(app: FastAPI, engine: EngineClient, model: ServedModel) -> None:
    """Add what routers and people ask a server. Answers have names and sizes, and no paths or keys."""

    @app.get("/server_info")
    async def server_info() -> Response:
        state = engine.state
        return JSONResponse(
            {
                "version": metadata.version("runahead-engine"),
                "phase": state.phase.name.lower(),
                "detail": _DETAILS[state.phase],
                "served_model_names": model.names,
                "max_model_len": state.max_model_len or None,
                "num_blocks": state.num_blocks,
                "block_size": state.block_size,
                "max_num_seqs": state.max_num_seqs,
                "features": state.info,
            }
        )

    @app.get("/get_model_info")
    async def model_info() -> Response:
        name = model.names[0]
        return JSONResponse(
            {
                "model_path": name,
                "tokenizer_path": name,
                "served_model_name": name,
                "is_generation": True,
                "max_model_len": engine.state.max_model_len or None,
            }
        )

    @app.get("/tokenizer_info")
    async def tokenizer_info() -> Response:
        return JSONResponse(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "special_tokens": model.tokenizer.special,
                "chat_template": model.template.text,
            }
        )

    @app.get("/load")
    async def load() -> Response:
        return JSONResponse({"server_load": engine.num_open})


def _add_admin(app: FastAPI, engine: EngineClient) -> None:
    """Add what changes the engine, for its operator."""

    @app.post("/reset_prefix_cache")
    async def reset_prefix_cache(http: HTTPRequest) -> Response:
        running = http.query_params.get("reset_running_requests", "false").lower()
        if running not in ("true", "false"):
            raise invalid("reset_running_requests must be true or false", "reset_running_requests")
        return JSONResponse({"success": await engine.reset_prefix_cache(running == "true")})


def _add_document(app: FastAPI, admin: bool, closed: bool) -> None:
    content = msgspec.json.encode(openapi.document(closed, admin))

    @app.get("/openapi.json")
    async def describe() -> Response:
        return Response(content, media_type="application/json")
