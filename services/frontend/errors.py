"""OpenAI's error body, and the exception that becomes one."""

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
"""Seconds, for 429 and 503."""
GONE = 499
"""The client left; nobody reads this status but the metrics."""


class APIError(Exception):
    """Ends one request with `status` and a message fit for the client."""

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
