"""Routes of `--enable-admin-routes`, which change the engines."""

from collections.abc import Mapping
from typing import Annotated

from fastapi import APIRouter, Path, Query
from pydantic import Field
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request as HTTPRequest
from starlette.responses import PlainTextResponse
from typing_extensions import TypedDict

from services.checkpoint import CheckpointError
from services.frontend.context import Context
from services.frontend.engine.owners import MoveEntry
from services.frontend.engine.replan import ReplanStatus
from services.frontend.errors import APIError
from services.frontend.openai.parameters.body import read_object
from services.frontend.openai.schemas.open_object import OpenObject
from services.frontend.openapi import GUARDED, WITH_BODY, errors, operation_id, read_by_handler

router = APIRouter(responses=errors(400, *GUARDED, 503), generate_unique_id_function=operation_id)


_SETTINGS = {"type": "object", "maxProperties": 256}


class AdapterRequest(OpenObject):
    lora_name: str = Field(max_length=256)


class LoadAdapterRequest(AdapterRequest):
    lora_path: str = Field(max_length=4096)


class ResetResponse(TypedDict):
    success: bool
    """False: running requests still share blocks."""


class TierEntry(TypedDict):
    bytes: int
    """Size of its KV blocks, of all ranks together."""
    hit_tokens: int
    """Prompt tokens that were found there so far."""


class EngineEntry(TypedDict):
    name: str
    role: str
    """both, prefill or decode."""
    state: str
    streams: int
    """Requests of this frontend that it owns."""
    endpoint: str
    pids: list[int]
    """Process ids on their machines: of the scheduler, then of the workers by rank."""
    identity: str
    """Streams move between engines of equal identity only."""
    queue_seconds: float
    """Expected wait of a new request."""
    detail: str
    """One line for people."""
    kv_tiers: dict[str, TierEntry]
    """device, host, disk and peer (another engine), as far as there are any."""


class EngineList(TypedDict):
    engines: list[EngineEntry]


class StreamEntry(TypedDict):
    request_id: str
    """Id of the HTTP request."""
    engines: list[str]
    """Names of the engines that its HTTP request was placed on, in this order."""
    engine: str
    """Name of its engine; "": it waits for one."""
    output_tokens: int


class StreamList(TypedDict):
    open: int
    """Open streams; `streams` has the oldest ones."""
    streams: list[StreamEntry]
    moves: list[MoveEntry]
    """The latest ones, in their order."""


class DrainResponse(TypedDict):
    name: str
    streams: int
    """Requests that it still owns."""


@router.post(
    "/v1/load_lora_adapter",
    summary="Serves a LoRA adapter",
    response_class=PlainTextResponse,
    responses=errors(*WITH_BODY),
    openapi_extra=read_by_handler(LoadAdapterRequest),
)
async def load_lora_adapter(http: HTTPRequest, context: Context) -> str:
    """Open requests and new ones go on while its files are checked."""
    body = await context.bodies.parse(http, LoadAdapterRequest)
    try:
        await run_in_threadpool(context.model.adapters.load, body.lora_name, body.lora_path)
    except (CheckpointError, OSError) as error:
        raise APIError(400, str(error)) from None
    return f"Success: LoRA adapter '{body.lora_name}' added successfully."


@router.post(
    "/v1/unload_lora_adapter",
    summary="Serves a LoRA adapter no longer",
    response_class=PlainTextResponse,
    responses=errors(*WITH_BODY),
    openapi_extra=read_by_handler(AdapterRequest),
)
async def unload_lora_adapter(http: HTTPRequest, context: Context) -> str:
    """New requests cannot name it; open ones end as they began."""
    body = await context.bodies.parse(http, AdapterRequest)
    try:
        context.model.adapters.unload(body.lora_name)
    except CheckpointError as error:
        raise APIError(404, str(error)) from None
    return f"Success: LoRA adapter '{body.lora_name}' removed successfully."


@router.post("/reset_prefix_cache", summary="Empties the prefix caches of all engines")
async def reset_prefix_cache(context: Context, reset_running_requests: bool = False) -> ResetResponse:
    return {"success": await context.engine.reset_prefix_cache(reset_running_requests)}


@router.get("/engines", summary="Engines of this server")
async def engines(context: Context) -> EngineList:
    client = context.engine
    counts = client.ledger.num_owned()
    return {
        "engines": [
            {
                "name": engine.name,
                "role": engine.role,
                "state": engine.status,
                "streams": counts[engine.name],
                "endpoint": engine.address.endpoint,
                "pids": engine.state.pids,
                "identity": engine.identity,
                "queue_seconds": engine.state.stats.get("expected_queue_seconds", 0.0),
                "detail": engine.refusal or engine.state.detail,
                "kv_tiers": _tiers(engine.state.stats),
            }
            for engine in client.engines.values()
        ]
    }


def _tiers(stats: Mapping[str, float]) -> dict[str, TierEntry]:
    sizes, hits = "kv_tier_bytes:", "kv_tier_hit_tokens_total:"
    names = [name.partition(":")[2] for name in stats if name.startswith((sizes, hits))]
    return {
        name: {"bytes": int(stats.get(sizes + name, 0)), "hit_tokens": int(stats.get(hits + name, 0))}
        for name in dict.fromkeys(names)
    }


@router.get("/engines/streams", summary="Open streams by engine, and the latest moves")
async def streams(context: Context, limit: Annotated[int, Query(ge=0, le=10000)] = 200) -> StreamList:
    client = context.engine
    return {
        "open": len(client.ledger),
        "streams": [
            {
                "request_id": entry.request.request_id,
                "engine": entry.engine,
                "engines": entry.stream.response.engines,
                "output_tokens": len(entry.stream.output),
            }
            for entry in client.ledger.oldest(limit)
        ],
        "moves": [*client.owners.latest_moves],
    }


@router.post(
    "/engines/replan",
    summary="Replaces the engines by one with other settings",
    operation_id="post_engines_replan",
    responses=errors(*WITH_BODY),
    openapi_extra={"requestBody": {"required": True, "content": {"application/json": {"schema": _SETTINGS}}}},
)
async def replan(
    http: HTTPRequest,
    context: Context,
    timeout: Annotated[float, Query(gt=0, le=86400)] = 600.0,  # noqa: ASYNC109  of the new engine's start
    drain_timeout: Annotated[float, Query(ge=0, le=86400)] = 60.0,
) -> ReplanStatus:
    """The body is an object with names and values of settings, such as {"tensor_parallel_size": 2}."""
    await context.replans.begin(await read_object(http), timeout, drain_timeout)
    return await replan_status(context)


@router.get("/engines/replan", summary="Phase of the last replan", operation_id="get_engines_replan")
async def replan_status(context: Context) -> ReplanStatus:
    return context.replans.status


@router.post("/engines/{name:path}/drain", summary="Moves the streams of an engine", responses=errors(404, 409))
async def drain(name: Annotated[str, Path(max_length=256)], context: Context, cancel: bool = False) -> DrainResponse:
    """New requests go to other engines from now on, and open ones move there; `cancel` takes that back."""
    context.engine.engines.drain(name, not cancel)
    return {"name": name, "streams": context.engine.ledger.num_owned()[name]}
