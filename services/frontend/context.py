"""Objects that the handlers of all routes share, as a dependency of FastAPI."""

import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from functools import wraps
from typing import Annotated, Any

from fastapi import Depends
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from services.frontend.engine.client import EngineClient
from services.frontend.engine.replan import Replans
from services.frontend.metrics import Metrics
from services.frontend.model import ServedModel
from services.frontend.openai.answering import Answering
from services.frontend.openai.answers.event_stream import EventStream
from services.frontend.openai.parameters.body import BodyParser
from services.frontend.responses_api.files import ResponseFiles


@dataclass(frozen=True)
class AppContext:
    engine: EngineClient
    model: ServedModel
    metrics: Metrics
    answering: Answering
    bodies: BodyParser
    replans: Replans
    responses: ResponseFiles | None
    """None, if responses are not kept."""
    started: int = field(default_factory=lambda: int(time.time()))
    """Seconds since 1970."""


async def app_context(http: HTTPRequest) -> AppContext:
    context: AppContext = http.app.state.context
    return context


Context = Annotated[AppContext, Depends(app_context)]
Handler = Callable[[HTTPRequest, AppContext], Coroutine[Any, Any, Response]]


def recorded(handler: Handler) -> Handler:
    """Decorate a route that submits requests to the engine: the end of each request is recorded in the metrics and the
    log. A stream or a detached request records its own."""

    @wraps(handler)
    async def record(http: HTTPRequest, context: AppContext) -> Response:
        answering = context.answering
        answering.begin_record(http)
        try:
            response = await handler(http, context)
        except Exception as error:
            answering.record_failure(http, error)
            raise
        if not isinstance(response, EventStream) and not http.state.summary.is_detached:
            answering.record_end(http, None)
        return response

    return record
