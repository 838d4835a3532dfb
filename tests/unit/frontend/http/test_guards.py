"""API keys, body sizes and request ids, checked before any route handles the request."""

import re
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from services.config import FrontendConfig, HttpConfig
from services.frontend.app import with_routes
from services.frontend.errors import APIError, error_response
from services.frontend.http.guards import Guards, with_cors
from services.frontend.openai.answering import Answering
from services.frontend.openai.tasks import ANSWER_PATHS
from services.frontend.page.files import load_page


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """A minimal app that reads the body and, like the frontend, answers an APIError with its error body."""
    try:
        body = await Request(scope, receive).body()
        response = PlainTextResponse(str(len(body)))
    except APIError as error:
        response = error_response(error, scope["path"], "")
    await response(scope, receive, send)


def guarded(keys: list[str], *guards: Any, **settings: object) -> httpx.AsyncClient:
    config = HttpConfig.model_validate({"api_key": keys, **settings})
    transport = httpx.ASGITransport(app=with_cors(Guards(echo, config, 1000, *guards), config))
    return httpx.AsyncClient(transport=transport, base_url="http://localhost")


@pytest.mark.parametrize(
    "path",
    ["/v1/models", "/v1/completions/", "/metrics", "/", "/nothing", "/livez/x", "//livez", "/LIVEZ",
     "/%6civez/x", "/v1/models?path=/livez", "/x/../livez/.."],
)  # fmt: skip
async def test_every_path_but_the_probes_needs_a_key(path: str) -> None:
    async with guarded(["right"]) as client:
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Basic right"},
                        {"authorization": "Bearer"}, {"host": "x/livez?"}):  # fmt: skip
            response = await client.get(path, headers=headers)
            assert response.status_code == 401, headers
            assert response.json()["error"]["code"] == "invalid_api_key"
            assert response.headers["www-authenticate"] == "Bearer"
            assert "x-request-id" in response.headers


async def test_every_route_of_the_application_needs_a_key_but_those_listed_here() -> None:
    """The administration and the page included. A new route is protected unless this list and the guards name it."""
    page = load_page()
    app = with_routes(FrontendConfig(enable_admin_routes=True), page)
    routes = [route for route in app.routes if isinstance(route, Route)]
    assert len(routes) == len(app.routes) > 40
    answered = set()
    async with guarded(["right"], frozenset(page)) as client:
        for route in routes:
            path = re.sub(r"\{[^}]*\}", "x", route.path)
            for method in route.methods or ():
                response = await client.request(method, path)
                if response.status_code != 401:
                    answered.add(path)
    assert answered == {"/livez", "/readyz", "/health", "/ping"} | page.keys()
    assert all(path == "/" or path.startswith("/page/") for path in page)


async def test_request_that_is_refused_for_load_is_not_read() -> None:
    is_read = False

    async def body() -> AsyncIterator[bytes]:
        nonlocal is_read
        is_read = True
        yield b"{}"

    def shed(scope: Scope, is_crowded: bool) -> APIError | None:
        return APIError(429, "overloaded", retry_after=2.5) if scope["path"] == "/v1/completions" else None

    async with guarded(["right"], frozenset(), shed) as client:
        right = {"authorization": "Bearer right"}
        refused = await client.post("/v1/completions", content=body(), headers=right)
        assert (refused.status_code, refused.headers["retry-after"], is_read) == (429, "3", False)
        assert refused.headers["x-request-id"]
        assert (await client.post("/v1/completions", content=body())).status_code == 401
        assert (await client.post("/other", content=body(), headers=right)).text == "2"


def test_every_route_that_submits_requests_is_refused_for_load_before_it_is_read() -> None:
    """Handlers of those routes record the end of their requests."""
    submit = {
        route.path
        for route in with_routes(FrontendConfig()).routes
        if isinstance(route, Route) and Answering.record_failure.__name__ in route.endpoint.__code__.co_names
    }
    assert submit == ANSWER_PATHS


async def test_public_files_need_no_key_but_a_known_host() -> None:
    files = frozenset({"/", "/page/main.js"})
    async with guarded(["right"], files, allowed_hosts=["localhost"]) as client:
        for path in files:
            assert (await client.get(path)).status_code == 200
            assert (await client.get(path, headers={"host": "evil.example.com"})).status_code == 400
        for path in ("/page", "/page/", "/page/other.js", "/page/../v1/models", "/%2e/v1/models"):
            assert (await client.get(path)).status_code == 401


async def test_probes_are_open_and_any_configured_key_opens_the_rest() -> None:
    async with guarded(["one", "two"]) as client:
        for path in ("/livez", "/readyz", "/health", "/ping"):
            assert (await client.get(path)).status_code == 200
        for key in ("one", "two"):
            for headers in ({"authorization": f"Bearer {key}"}, {"x-api-key": key}):
                assert (await client.get("/v1/models", headers=headers)).status_code == 200


async def test_key_of_an_anthropic_client_must_be_right_and_its_refusal_has_its_form() -> None:
    async with guarded(["right"]) as client:
        for headers in ({"x-api-key": "wrong"}, {}, {"x-api-key": "right", "authorization": "Bearer wrong"}):
            refused = await client.post("/v1/messages", headers=headers)
            assert refused.status_code == 401
            body = refused.json()
            assert (body["type"], body["error"]["type"]) == ("error", "authentication_error")
            assert body["request_id"] == refused.headers["x-request-id"]


async def test_body_over_the_limit_is_413_with_and_without_content_length() -> None:
    async def endless() -> AsyncIterator[bytes]:
        for _ in range(100):
            yield b"x" * 100

    async with guarded([]) as client:
        assert (await client.post("/", content=b"x" * 1000)).text == "1000"
        assert (await client.post("/", content=b"x" * 1001)).status_code == 413
        refused = await client.post("/", content=endless())
        assert refused.status_code == 413
        assert "1000 bytes (--max-body-bytes)" in refused.json()["error"]["message"]


async def test_valid_request_id_is_returned_and_others_are_replaced() -> None:
    async with guarded([]) as client:
        assert (await client.get("/", headers={"x-request-id": "mine"})).headers["x-request-id"] == "mine"
        for bad in ("two words", "x" * 129, ""):
            assert (await client.get("/", headers={"x-request-id": bad})).headers["x-request-id"] != bad
        first, second = [(await client.get("/")).headers["x-request-id"] for _ in range(2)]
        assert first != second


async def test_too_many_headers_are_refused() -> None:
    async with guarded([]) as client:
        response = await client.get("/", headers=[(f"x-{number}", "y") for number in range(101)])
        assert response.status_code == 431


async def test_only_allowed_hosts_are_answered_but_probes_always() -> None:
    async with guarded([], allowed_hosts=["llm.example.com", "*.inner", "[fd00::1]"]) as client:
        for host, status in {
            "llm.example.com": 200, "LLM.example.com:8000": 200, "a.inner": 200, "inner": 400, "evil.com": 400,
            "xllm.example.com": 400, "[::1]:8000": 400, "[fd00::1]:8000": 200,
        }.items():  # fmt: skip
            response = await client.post("/v1/completions", headers={"host": host})
            assert response.status_code == status, host
            assert (await client.get("/livez", headers={"host": host})).status_code == 200
        assert (await client.get("/v1/models", headers={"host": ""})).status_code == 400


@pytest.mark.parametrize("settings", [{}, {"host": "localhost"}, {"host": "127.0.0.2"}, {"uds": "/tmp/x"}])
async def test_local_server_without_a_key_answers_only_to_names_of_this_machine(settings: dict[str, str]) -> None:
    names = ["localhost", "LOCALHOST:8000", "llm.localhost:8000", "127.0.0.1:8000", "[::1]:8000"]
    async with guarded([], **settings) as client:
        for host in [*names, settings.get("host", "localhost")]:
            assert (await client.get("/v1/models", headers={"host": host})).status_code == 200, host
        for host in ("evil.example.com", "localhost.example.com", "xlocalhost", "", "10.0.0.1"):
            for path in ("/", "/v1/chat/completions", "/debug/steps"):
                refused = await client.get(path, headers={"host": host})
                assert refused.status_code == 400, host
                assert "--allowed-hosts" in refused.json()["error"]["message"]
            assert (await client.get("/livez", headers={"host": host})).status_code == 200


@pytest.mark.parametrize(
    ("keys", "settings"), [(["right"], {}), ([], {"host": "0.0.0.0"}), ([], {"allowed_hosts": ["*"]})]
)
async def test_other_servers_answer_to_every_name(keys: list[str], settings: dict[str, Any]) -> None:
    async with guarded(keys, **settings) as client:
        headers = {"host": "llm.example.com", "authorization": "Bearer right"}
        assert (await client.get("/v1/models", headers=headers)).status_code == 200


async def test_root_path_and_a_slash_at_the_end_may_be_given_or_not() -> None:
    async with guarded(["right"], root_path="/llm") as client:
        for path, status in {"/livez": 200, "/llm/livez/": 200, "/llm/llm/livez": 401, "/llmlivez": 401}.items():
            assert (await client.get(path)).status_code == status, path


async def test_pages_of_allowed_origins_pass_and_preflight_needs_no_key() -> None:
    asked = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    origins = dict.fromkeys(("https://chat.example.com", "http://[::1]:3000", "app://here", "file://", "null"), 200)
    async with guarded(["right"], allowed_origins=[*origins]) as client:
        for origin, status in {**origins, "https://evil.com": 400}.items():
            response = await client.options("/v1/completions", headers={"origin": origin, **asked})
            assert response.status_code == status
            allowed = response.headers.get("access-control-allow-origin")
            assert (allowed == origin) is (status == 200)
        refused = await client.get("/v1/models", headers={"origin": "https://chat.example.com"})
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == "https://chat.example.com"
        assert {"x-request-id", "request-id"} <= {*refused.headers["access-control-expose-headers"].split(", ")}
    async with guarded(["right"], allowed_origins=["*"]) as client:
        refused = await client.get("/v1/models", headers={"origin": "https://evil.com"})
        assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, "*")


async def test_without_allowed_origins_no_page_may_read_an_answer_or_post_without_preflight() -> None:
    async with guarded([]) as client:
        for kind, status in {"text/plain": 403, "application/json": 200}.items():
            headers = {"sec-fetch-site": "cross-site", "content-type": kind}
            assert (await client.post("/v1/completions", headers=headers)).status_code == status
        headers = {"origin": "https://evil.com", "sec-fetch-site": "cross-site"}
        response = await client.get("/v1/models", headers=headers)
        assert response.status_code == 200, "a link of a page"
        assert "access-control-allow-origin" not in response.headers
