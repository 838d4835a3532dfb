"""Errors for clients, with OpenAI's body."""

from typing import Any

import msgspec
from starlette.responses import Response

_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}
RETRY_AFTER = {"retry-after": "1"}
"""Header of 429 and 503, in seconds."""
GONE = 499
"""Status of a request whose client left; only metrics and logs show it."""


class APIError(Exception):
    """Ends one request with a status and a message for the client."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code

    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(
            self.status, "internal_server_error" if self.status >= 500 else "invalid_request_error"
        )
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def encoded(self) -> bytes:
        return msgspec.json.encode(self.body())

    def response(self) -> Response:
        headers = RETRY_AFTER if self.status in (429, 503) else None
        return Response(self.encoded(), self.status, headers, "application/json")


def invalid(message: str, param: str | None = None) -> APIError:
    return APIError(400, message, param)
