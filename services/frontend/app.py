"""The HTTP application: routers, what their handlers share, and the bodies of errors."""

import logging
from collections.abc import Mapping
from copy import copy

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response
from starlette.routing import Match, Route

from services.config import FrontendConfig
from services.frontend import routes_of_others
from services.frontend.anthropic import endpoints as anthropic
from services.frontend.errors import APIError, error_response, internal_error, invalid
from services.frontend.openai import endpoints as openai
from services.frontend.openai import scores, tokenize
from services.frontend.openai.parameters.body import problem
from services.frontend.openapi import DocumentedApp
from services.frontend.responses_api import endpoints as responses_api
from services.frontend.routes import admin, cache, information, models, probes
from services.frontend.steps import endpoints as steps

log = logging.getLogger("runahead.frontend")

MODULES = (openai, anthropic, responses_api, scores, tokenize, probes, models, information, steps)
"""Modules with a router. Routes are searched in this order, so those under load come first."""
ADMIN = (admin, cache)
"""The same, with `--enable-admin-routes` only."""
MAX_QUOTED = 100
"""Characters of a path that an error quotes."""


def with_routes(config: FrontendConfig, page: Mapping[str, Response] | None = None) -> FastAPI:
    """Return the application. Its handlers need an `AppContext` as `state.context`."""
    app = DocumentedApp(closed=config.unknown_parameters == "refuse")
    for module in (*MODULES, *ADMIN) if config.enable_admin_routes else MODULES:
        app.router.routes += map(copy, module.router.routes)  # `include_router` would compile the models again
    for path, file in (page or {}).items():
        app.router.routes.append(Route(path, file, methods=["GET"], include_in_schema=False))
    _add_errors(app)
    return app


def _add_errors(app: FastAPI) -> None:
    """Give every error the body of its route's dialect."""

    @app.exception_handler(APIError)
    async def on_api_error(http: HTTPRequest, error: APIError) -> Response:
        return error_response(error, http.url.path, http.state.request_id)

    @app.exception_handler(404)
    @app.exception_handler(405)
    async def on_no_route(http: HTTPRequest, error: HTTPException) -> Response:
        path = http.url.path[:MAX_QUOTED]
        hint = routes_of_others.hint(path) or "/openapi.json lists all routes"
        below = {**http.scope, "path": f"/v1{http.scope['path']}"}
        above = {**http.scope, "path": http.scope["path"].removeprefix("/v1")}
        if any(route.matches(http.scope)[0] is Match.FULL for module in ADMIN for route in module.router.routes):
            hint = "it needs --enable-admin-routes"
        elif any(route.matches(below)[0] is Match.FULL for route in app.routes):  # the client's base URL lacks /v1
            hint = f"use /v1{path}"
        elif any(route.matches(above)[0] is Match.FULL for route in app.routes):  # or has it twice
            hint = f"use {path.removeprefix('/v1')}"
        text = f"{http.method} {path} is not served here; {hint}"
        response = error_response(APIError(error.status_code, text), http.url.path, http.state.request_id)
        response.headers.update(error.headers or {})  # Allow
        return response

    @app.exception_handler(HTTPException)
    async def on_http_error(http: HTTPRequest, error: HTTPException) -> Response:
        refused = APIError(error.status_code, str(error.detail))
        return error_response(refused, http.url.path, http.state.request_id)

    @app.exception_handler(RequestValidationError)
    async def on_invalid(http: HTTPRequest, error: RequestValidationError) -> Response:
        # A parameter in the path or the query; bodies have a parser of their own
        first = error.errors()[0]
        name = str(first["loc"][-1])
        return error_response(invalid(f"{name}: {problem(first)}", name), http.url.path, http.state.request_id)

    @app.exception_handler(Exception)
    async def on_bug(http: HTTPRequest, _: Exception) -> Response:
        log.error("request failed with a bug: request_id=%s; its traceback follows", http.state.request_id)
        return error_response(internal_error(), http.url.path, http.state.request_id)
