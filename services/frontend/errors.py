"""Errors for clients, with OpenAI's body; below /v1/messages with Anthropic's."""

import math
from dataclasses import dataclass
from typing import Any, Literal, NotRequired

import msgspec
from starlette.responses import Response
from typing_extensions import TypedDict

_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}
_ANTHROPIC_TYPES = {**_TYPES, 413: "request_too_large", 503: "overloaded_error"}
_ANTHROPIC_DETAILS = {"thread": {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}}
"""By refused field. Without threads Anthropic's client sends the whole conversation with each request."""
ANTHROPIC_PREFIX = "/v1/messages"
"""Path of the routes with Anthropic's dialect."""
RETRY_AFTER = {"retry-after": "1"}
"""Header of 429 and 503, in seconds."""
GONE = 499
"""Status of a request whose client left; only metrics and logs show it."""


class Error(TypedDict):
    message: str
    """The problem, and what would work."""
    type: str
    param: str | None
    """The field of the body that is wrong."""
    code: str | None


class ErrorResponse(TypedDict):
    error: Error


class AnthropicError(TypedDict):
    type: str
    message: str
    details: NotRequired[dict[str, Any]]


class AnthropicErrorResponse(TypedDict):
    type: Literal["error"]
    error: AnthropicError
    request_id: str


@dataclass(eq=False)
class APIError(Exception):
    """Ends one request with a status and a message for the client."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    retry_after: float = 0.0
    """Seconds after which the request may be served, for 429 and 503."""
    anthropic_message: str = ""
    """Message in Anthropic's dialect; "": `message`."""
    logged: str = ""
    """Message for the log and for traces, which never have text of a request; "": `message`, as it has none."""

    def __post_init__(self) -> None:
        super().__init__(self.message)
        self.logged = self.logged or self.message

    def body(self) -> ErrorResponse:
        kind = _TYPES.get(self.status, "internal_server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def encoded(self) -> bytes:
        return msgspec.json.encode(self.body())

    @property
    def headers(self) -> dict[str, str] | None:
        if self.status == 401:
            return {"www-authenticate": "Bearer"}
        if self.status not in (429, 503):
            return None
        return {"retry-after": str(max(1, math.ceil(self.retry_after)))}


def anthropic_body(error: APIError, request_id: str) -> AnthropicErrorResponse:
    """Return the error in the form of Anthropic's API."""
    kind = _ANTHROPIC_TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    found: AnthropicError = {"type": kind, "message": error.anthropic_message or error.message}
    if error.param in _ANTHROPIC_DETAILS:
        found["details"] = _ANTHROPIC_DETAILS[error.param]
    return {"type": "error", "error": found, "request_id": request_id}


def error_response(error: APIError, path: str, request_id: str) -> Response:
    """Return the error in the dialect of the route."""
    is_anthropic = path.startswith(ANTHROPIC_PREFIX)
    content = msgspec.json.encode(anthropic_body(error, request_id)) if is_anthropic else error.encoded()
    return Response(content, error.status, error.headers, "application/json")


def invalid(message: str, param: str | None = None, logged: str = "") -> APIError:
    """`logged`: message for the log, if `message` quotes the request."""
    return APIError(400, message, param, logged=logged)


def unknown_tool(name: str) -> APIError:
    """Return the refusal of a `tool_choice` that names no tool of the request."""
    problem = "is not among the tools"
    return invalid(f"tool_choice: {name!r} {problem}", "tool_choice", logged=f"tool_choice: the name {problem}")


def beyond_context(message: str, anthropic_message: str, param: str) -> APIError:
    """Return the refusal of a request that the context cannot hold. Clients find it by OpenAI's code or Anthropic's
    words, and shorten the request."""
    return APIError(400, message, param, "context_length_exceeded", anthropic_message=anthropic_message)


def internal_error() -> APIError:
    """Return the end of a request that met a bug. The caller logs the traceback."""
    return APIError(500, "an internal error occurred; the log has its details")
