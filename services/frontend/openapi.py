"""/openapi.json: FastAPI's document of the routes, and what FastAPI cannot know about them.

Handlers read their bodies and write their streams themselves, so routes describe both in `openapi_extra`.
"""

import re
import threading
from typing import Any

from fastapi import FastAPI
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from pydantic import TypeAdapter

from services import release
from services.frontend.errors import ErrorResponse
from services.frontend.http.guards import OPEN_PATHS

JSON = dict[str, Any]
Responses = dict[int | str, JSON]
"""FastAPI's `responses` of a route."""
_BODIES = "x-bodies"
"""Key of `openapi_extra` until the document is requested."""
_REF = "#/components/schemas/{model}"
_ERRORS = {
    400: "the request is not what this route takes; the message names the field",
    401: "no valid API key",
    403: "a page of another site sent it without Content-Type: application/json",
    404: "no such path or model",
    405: "no such method",
    409: "the engines cannot be changed like this now",
    408: "the body did not arrive in time",
    413: "the body is too large",
    415: "the body is compressed",
    429: "overloaded; try again later",
    431: "too many headers",
    500: "an internal error",
    503: "not ready, or stopping; try again later",
}
UNGUARDED = (405, 431, 500)
"""Errors of routes without a key and a body."""
GUARDED = (401, *UNGUARDED)
"""Errors of routes without a body."""
WITH_BODY = tuple(_ERRORS)
RETRY_AFTER = {"retry-after": {"description": "seconds", "schema": {"type": "string"}}}
"""Header of 429 and 503."""


def errors(*statuses: int, body: type = ErrorResponse) -> Responses:
    """Return `responses` for errors. References, as FastAPI compiles a `model` for each status of each route."""
    content = {"application/json": {"schema": {"$ref": _REF.format(model=body.__name__)}}}
    return {
        status: {
            "description": _ERRORS[status],
            "content": content,
            **({"headers": RETRY_AFTER} if status in (429, 503) else {}),
        }
        for status in statuses
    }


def read_by_handler(*bodies: type, event: type | None = None, error: type = ErrorResponse) -> JSON:
    """Return `openapi_extra` of a route whose handler reads a body. Its schemas are made when the document is
    requested: those of all routes take a fifth of the frontend's start.

    Args:
        bodies: alternatives for the body.
        event: data of each event, if the body requests a stream.
        error: data of the event that ends a stream that failed.
    """
    return {_BODIES: (bodies, event, error)}


def _described(bodies: tuple[type, ...], event: type | None, error: type) -> JSON:
    kinds = [*bodies, *([event, error] if event is not None else [])]
    inputs: Any = [(kind, "validation", TypeAdapter(kind)) for kind in kinds]
    schemas, definitions = TypeAdapter.json_schemas(inputs, ref_template=_REF)
    refs = [schemas[kind, "validation"] for kind in kinds]
    given = refs[: len(bodies)]
    schema = given[0] if len(given) == 1 else {"anyOf": given}
    extra: JSON = {
        "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
        "$defs": definitions["$defs"],
    }
    if event is not None:
        extra["responses"] = {"200": _streamed(refs[len(bodies) :])}
    return extra


def _streamed(data: list[JSON]) -> JSON:
    content = {"type": "string", "contentMediaType": "application/json", "contentSchema": {"anyOf": data}}
    properties = {"data": {"anyOf": [{"const": "[DONE]"}, content]}}
    event = {"type": "object", "properties": properties, "required": ["data"]}
    return {
        "description": "The response. With `stream`: server-sent events whose data are chunks; the last one is [DONE] "
        "or an error",
        "content": {"text/event-stream": {"schema": event}},
    }


class DocumentedApp(FastAPI):
    """`closed`: unknown properties of bodies are refused."""

    def __init__(self, closed: bool) -> None:
        super().__init__(
            title="Runahead",
            version=release.version(),
            summary="OpenAI's API with vLLM's additional parameters",
            description="Bodies are UTF-8 JSON. Numbers are finite, and integers are written without a fraction. "
            "The header x-request-id names a request in logs and is returned with the response.",
            license_info={"name": "Apache 2.0", "identifier": "Apache-2.0"},
            docs_url=None,
            redoc_url=None,
            openapi_url=None,
        )
        self._closed, self._lock = closed, threading.Lock()
        # No coroutine: the first request takes 0.2 s, on a thread
        self.add_route("/openapi.json", lambda _: JSONResponse(self.openapi()), include_in_schema=False)

    def openapi(self) -> JSON:
        with self._lock:
            if self.openapi_schema is None:
                for route in self.routes:
                    if not isinstance(route, APIRoute):
                        continue
                    route.unique_id = operation_id(route)
                    if _BODIES in (extra := route.openapi_extra or {}):
                        route.openapi_extra = _described(*extra[_BODIES])
                _complete(super().openapi(), self._closed)
            return super().openapi()


def operation_id(route: APIRoute) -> str:
    return re.sub(r"\W+", "_", route.path_format).strip("_")


def _complete(document: JSON, closed: bool) -> None:
    """Add what the guards in front of all routes do, and definitions; remove errors that are not FastAPI's here."""
    schemas = document["components"]["schemas"]
    for path, operations in document["paths"].items():
        for operation in operations.values():
            schemas |= operation.pop("$defs", {})
            operation["responses"].pop("422", None)  # it is a 400
            for response in operation["responses"].values():
                header = {"description": "The request's id", "schema": {"type": "string"}}
                response["headers"] = {"x-request-id": header, **response.get("headers", {})}
            if path not in OPEN_PATHS:
                operation["security"] = [{}, {"key": []}]  # where no keys are configured, none is needed
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    for schema in schemas.values():
        if schema.get("additionalProperties") is True:
            schema["additionalProperties"] = not closed
    document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
