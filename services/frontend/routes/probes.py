"""Routes for the programs that watch this process: probes and metrics."""

import re
from typing import Annotated, Literal

from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request as HTTPRequest
from starlette.responses import PlainTextResponse, Response
from typing_extensions import TypedDict

from protocol.requests import EnginePhase
from services.frontend.context import Context
from services.frontend.errors import RETRY_AFTER
from services.frontend.openapi import GUARDED, UNGUARDED, errors

PHASE_TEXTS = {
    EnginePhase.WAITING_FOR_WORKERS: "waiting for workers",
    EnginePhase.LOADING: "loading the model",
    EnginePhase.READY: "ready",
    EnginePhase.DRAINING: "stopping; open requests finish",
    EnginePhase.FAILED: "failed; the log has the reason",
    EnginePhase.RECOVERING: "waiting for the scheduler or for lost workers",
}
"""Texts for clients without an API key. The engine's own may have paths, and errors of workers."""
_OPEN_DETAIL = re.compile(
    "preparing compiled kernels|loading weights|weights|simulated model|allocating the KV cache|"
    r"connecting to the scheduler|waiting for workers(: \d+ of \d+ have registered| that have the weights in memory)"
)
"""Texts of the engine that every client may see."""

router = APIRouter(responses=errors(*UNGUARDED))


class LivenessResponse(TypedDict):
    status: Literal["alive"]


class ReadinessResponse(TypedDict):
    phase: str
    detail: str
    """One line for people."""
    progress: Annotated[float, Field(ge=0, le=1)]


@router.get("/livez", summary="Whether the process responds")
@router.head("/livez", include_in_schema=False)
async def livez() -> LivenessResponse:
    return {"status": "alive"}


_NOT_READY = errors(503, body=ReadinessResponse)


@router.get("/readyz", summary="Whether requests are served", responses=_NOT_READY)
@router.get("/health", summary="The same as /readyz", responses=_NOT_READY)
@router.get("/ping", summary="The same as /readyz", responses=_NOT_READY, operation_id="get_ping")
@router.post("/ping", summary="The same as /readyz", responses=_NOT_READY, operation_id="post_ping")
@router.head("/readyz", include_in_schema=False)
@router.head("/health", include_in_schema=False)
@router.head("/ping", include_in_schema=False)
async def readyz(http: HTTPRequest, response: Response, context: Context) -> ReadinessResponse:
    engine, state = context.engine, context.engine.state
    if not engine.ready:
        response.status_code = 503
        response.headers.update(RETRY_AFTER)
    phase = EnginePhase.DRAINING if engine.draining else state.phase
    is_open = http.state.tenant or _OPEN_DETAIL.fullmatch(state.detail)
    detail = state.detail if is_open else PHASE_TEXTS[phase]
    return {"phase": phase.name.lower(), "detail": detail, "progress": state.progress}


@router.get("/metrics", summary="Metrics for Prometheus", response_class=PlainTextResponse, responses=errors(*GUARDED))
async def metrics(context: Context) -> Response:
    return Response(await context.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")
