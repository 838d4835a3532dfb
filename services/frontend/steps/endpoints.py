"""/debug/steps: the last step records, for `runahead trace`, and as a stream for the page."""

import time
from collections.abc import AsyncIterator
from typing import Annotated, Literal

import msgspec
from fastapi import APIRouter, Query
from starlette.responses import Response, StreamingResponse
from typing_extensions import TypedDict

from services.frontend.context import AppContext, Context
from services.frontend.engine.client import EngineClient
from services.frontend.errors import APIError
from services.frontend.openai.schemas.responses import Natural
from services.frontend.openapi import GUARDED, errors
from services.frontend.steps.ring import MAX_ROWS, StepRing
from services.frontend.steps.view import entry_json

MAX_ENTRIES = 512
"""Maximum number of entries in one answer: 15 ms of work, while no stream is served."""
MAX_ANSWER_ROWS = 16_384
"""Maximum number of rows in one answer, unless a single step has more."""
DEFAULT_ENTRIES = 256
MAX_SEQUENCE = 2**53 - 1
IDLE_SECONDS = 1.0
"""Time between two events of a stream without new entries: they carry the clock and the state of the engine."""
_GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "inflight_steps")


router = APIRouter(responses=errors(*GUARDED, 400, 404))


class StepEntry(TypedDict):
    """A step, an event of the engine, or a request; its other properties depend on the kind."""

    sequence: Natural
    kind: Literal["step", "request", "epoch_started", "epoch_ended", "preempted", "dropped"]


class StepsHead(TypedDict):
    ring: str
    """Changes when the server starts again."""
    now: float | None
    """Seconds on the scheduler's clock."""
    last: Natural
    """Number of the latest entry."""
    next: Natural
    """Value of `since` for the entries that follow."""
    missed: Natural
    """Entries after `since` that are no longer kept."""
    engine: dict[str, str | float]
    """Phase and load as the scheduler reported them last."""


class StepsResponse(StepsHead):
    entries: list[StepEntry]


@router.get("/debug/steps", summary="The last step records, events and requests", response_model=StepsResponse)
async def steps(
    context: Context,
    since: Annotated[int | None, Query(ge=0, le=MAX_SEQUENCE)] = None,
    limit: Annotated[int, Query(ge=1, le=MAX_ENTRIES)] = DEFAULT_ENTRIES,
    rows: Literal["true", "false"] = "true",
) -> Response:
    """Return the entries after `since`, or the latest ones, as one JSON object."""
    ring = _ring(context)
    begin = max(0, ring.last - limit) if since is None else since
    content, _ = _answer(context.engine, ring, begin, limit, rows == "true")
    return Response(content, media_type="application/json")


@router.get(
    "/debug/steps/stream",
    summary="The last step records and then each new one, as server-sent events",
    response_class=StreamingResponse,
    responses={
        200: {
            "description": "Server-sent events; the data of each is an answer of /debug/steps without rows",
            "content": {"text/event-stream": {"schema": {"type": "string"}}},
        }
    },
)
async def stream(context: Context, since: Annotated[int | None, Query(ge=0, le=MAX_SEQUENCE)] = None) -> Response:
    """Stream the entries after `since`, or the latest ones, and then those that arrive."""
    ring = _ring(context)
    begin = max(0, ring.last - MAX_ENTRIES) if since is None else since
    events = _events(context.engine, ring, begin)
    return StreamingResponse(events, media_type="text/event-stream", headers={"cache-control": "no-store"})


async def _events(engine: EngineClient, ring: StepRing, since: int) -> AsyncIterator[bytes]:
    """Yield events until the client leaves or the server stops."""
    while True:
        content, since = _answer(engine, ring, since, MAX_ENTRIES, with_rows=False)
        yield b"data: %b\n\n" % content
        if engine.draining:
            return
        if since >= ring.last:
            await ring.wait(IDLE_SECONDS)


def _ring(context: AppContext) -> StepRing:
    """Raises: APIError"""
    if context.engine.steps is None:
        raise APIError(404, "steps are not recorded here; start the frontend without --step-ring 0")
    return context.engine.steps


def _answer(engine: EngineClient, ring: StepRing, since: int, limit: int, with_rows: bool) -> tuple[bytes, int]:
    """Return the JSON of an answer and the value of its `next`."""
    entries, missed = ring.read(since, limit, MAX_ANSWER_ROWS if with_rows else MAX_ROWS)
    head: StepsHead = {
        "ring": ring.id,
        "now": ring.scheduler_time(time.monotonic()),
        "last": ring.last,
        "next": entries[-1].sequence if entries else min(since, ring.last),
        "missed": missed,
        "engine": _state(engine),
    }
    listed = b",".join(entry_json(entry, with_rows) for entry in entries)
    return msgspec.json.encode(head)[:-1] + b',"entries":[' + listed + b"]}", head["next"]


def _state(engine: EngineClient) -> dict[str, str | float]:
    """Return what the scheduler reported last, for times without steps."""
    state = engine.state
    gauges = {name: state.stats[name] for name in _GAUGES if name in state.stats}
    return {"phase": state.phase.name.lower()} | gauges
