"""Cross-origin requests: what pages of other origins may do from a browser."""

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from services.config import HttpConfig
from services.frontend.http.guards import IGNORED_HEADER

EXPOSED = ["x-request-id", "retry-after", IGNORED_HEADER.decode()]
"""Headers of responses that pages may read."""


def with_cors(app: ASGIApp, config: HttpConfig) -> ASGIApp:
    """Answer preflight requests, which carry no API key, and add the headers that browsers ask for."""
    if not config.allowed_origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=config.allowed_origins,
        allow_methods=config.allowed_methods,
        allow_headers=config.allowed_headers,
        allow_credentials=config.allow_credentials,
        expose_headers=EXPOSED,
    )
