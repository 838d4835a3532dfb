"""Requests that fail: status and error body of each kind of failure, and the time at which it is reported."""

import asyncio
import codecs
import gzip
import json
from pathlib import Path

import httpx
import pytest

from protocol.requests import FinishReason, GenerateRequest, RequestOutputs
from services.checkpoint import DEMO_MODEL
from services.config import FrontendConfig
from services.frontend import service as frontend_service
from services.frontend.http.listener import listen
from services.frontend.model import ServedModel
from services.frontend.service import FrontendService
from services.process import NO_ALARM
from tests.integration.frontend.scripted import (
    CONTEXT,
    PATIENCE,
    VOCAB,
    Frontend,
    ScriptedScheduler,
    answering,
    ended,
    ids_of,
    scripted,
    tokens,
)
from tests.metrics import samples

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def error_of(response: httpx.Response, status: int) -> dict[str, object]:
    assert response.status_code == status, response.text[:500]
    assert response.headers["x-request-id"]
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    sent = response.request.content  # an error may quote it
    leaks = [leak for leak in (b"Traceback", b"0x", b"/services/", b"pydantic") if leak not in sent]
    assert not any(leak in response.content for leak in leaks)
    return error


@pytest.mark.parametrize(
    ("reason", "status"),
    [(FinishReason.REJECTED, 429), (FinishReason.INVALID, 400), (FinishReason.ERROR, 500), (FinishReason.ABORT, 503)],
)
def test_refusal_before_the_first_token_keeps_its_status(
    frontend: Frontend, scheduler: ScriptedScheduler, reason: FinishReason, status: int, stream: bool
) -> None:
    scheduler.script(lambda request: [ended(request.number, reason, message="because of the test")])
    before = frontend.metric("request_refusal_seconds_count")
    response = frontend.post(COMPLETIONS, {"prompt": "x", "stream": stream})
    rise = frontend.metric("request_refusal_seconds_count") - before
    assert rise == (status in (429, 503)), "the frontend measures how long a refusal takes"
    assert error_of(response, status)["message"] == "because of the test"
    assert response.headers.get("retry-after") == ("1" if status in (429, 503) else None)


@pytest.mark.parametrize(
    ("path", "body", "begin"),
    [
        (COMPLETIONS, {"prompt": "x"}, 'data: {"error":{"message":"the worker failed","type":"internal_server_error"'),
        (
            "/v1/messages",
            {"messages": [{"role": "user", "content": "x"}], "max_tokens": 9},
            'event: error\ndata: {"type":"error","error":{"type":"api_error","message":"the worker failed"}',
        ),
        ("/v1/responses", {"input": "x"}, "event: response.failed\n"),
    ],
)
def test_event_of_a_failure_is_the_last_one_in_each_dialect(
    frontend: Frontend, scheduler: ScriptedScheduler, path: str, body: dict[str, object], begin: str
) -> None:
    scheduler.script(lambda request: [tokens(request.number, ids_of("some text "))])
    with httpx.stream("POST", frontend.url + path, json=body | {"stream": True}, timeout=PATIENCE) as response:
        scheduler.send(ended(scheduler.request().number, FinishReason.ERROR, message="the worker failed"))
        *_, last, nothing = response.read().decode().split("\n\n")
    assert (response.status_code, nothing) == (200, "")
    assert last.startswith(begin)
    assert '"message":"the worker failed"' in last
    assert path != "/v1/messages" or f'"request_id":"{response.headers["request-id"]}"' in last


def test_one_refused_prompt_of_several_aborts_the_others(frontend: Frontend, scheduler: ScriptedScheduler) -> None:
    def second(request: GenerateRequest) -> list[RequestOutputs]:
        return [ended(request.number, FinishReason.REJECTED)] if len(scheduler.requests) == 2 else []

    scheduler.script(second)
    error_of(frontend.post(COMPLETIONS, {"prompt": ["a", "b", "c"], "stream": True}), 429)
    scheduler.wait_aborted(scheduler.request(0).number)
    scheduler.wait_aborted(scheduler.request(2).number)


def test_lost_token_is_an_error(frontend: Frontend, scheduler: ScriptedScheduler) -> None:
    scheduler.script(lambda request: [tokens(request.number, ids_of("a")), tokens(request.number, ids_of("b"), 2)])
    error_of(frontend.post(COMPLETIONS, {"prompt": "x"}), 500)
    scheduler.wait_aborted(scheduler.request().number)


def test_bound_on_open_requests_is_429() -> None:
    with scripted(max_open_requests=2) as (frontend, scheduler):
        response = frontend.post(COMPLETIONS, {"prompt": ["a", "b", "c"]})
        assert "2 requests" in str(error_of(response, 429)["message"])
        assert response.headers["retry-after"] == "1"
        for index in range(2):
            scheduler.wait_aborted(scheduler.request(index).number)
        scheduler.script(answering("fine"))
        assert frontend.post(COMPLETIONS, {"prompt": ["a", "b"]}).status_code == 200


MESSAGE = {"role": "user", "content": "x"}
BAD_FIELDS: list[tuple[str, dict[str, object], str]] = [
    (COMPLETIONS, {}, "prompt"),
    (COMPLETIONS, {"prompt": ""}, "prompt"),
    (COMPLETIONS, {"prompt": []}, "prompt"),
    (COMPLETIONS, {"prompt": [[]]}, "prompt"),
    (COMPLETIONS, {"prompt": ["a", ""]}, "prompt"),
    (COMPLETIONS, {"prompt": [1, "a"]}, "prompt"),
    (COMPLETIONS, {"prompt": [VOCAB]}, "prompt"),
    (COMPLETIONS, {"prompt": [True]}, "prompt"),
    (COMPLETIONS, {"prompt": [5] * CONTEXT}, "prompt"),
    (COMPLETIONS, {"prompt": "word " * 5000}, "prompt"),
    (COMPLETIONS, {"prompt": "x" * 3_000_000}, "prompt"),
    (COMPLETIONS, {"prompt": ["x"] * 9, "n": 128}, "n"),
    (COMPLETIONS, {"prompt": "x", "max_tokens": CONTEXT}, "max_tokens"),
    (COMPLETIONS, {"prompt": "x", "stream_options": {}}, "stream_options"),
    (CHAT, {}, "messages"),
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {"messages": {"role": "user"}}, "messages"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
    (CHAT, {"messages": [{"role": "narrator", "content": "x"}]}, "messages"),
    (CHAT, {"messages": [{**MESSAGE, "tool_calls": [{}]}]}, "messages"),
    (CHAT, {"messages": [{"role": "user"}]}, "messages"),
    (CHAT, {"messages": [MESSAGE, {"role": "user", "content": None}]}, "messages"),
    (CHAT, {"messages": [{"role": "user", "content": []}]}, "messages"),
    (CHAT, {"messages": [{"role": "user", "content": "word " * 5000}]}, "messages"),
    (CHAT, {"messages": [MESSAGE], "max_completion_tokens": CONTEXT}, "max_completion_tokens"),
    (CHAT, {"messages": [MESSAGE], "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    (CHAT, {"messages": [MESSAGE], "max_tokens": 0}, "max_tokens"),
    (CHAT, {"messages": [MESSAGE], "tools": [{"type": "function"}]}, "tools"),
    (CHAT, {"messages": [MESSAGE], "response_format": {"type": "xml"}}, "response_format"),
]


@pytest.mark.parametrize(
    ("path", "body", "param"), BAD_FIELDS, ids=[f"{i}-{row[2]}" for i, row in enumerate(BAD_FIELDS)]
)
def test_bad_field_is_400_and_named(
    frontend: Frontend, scheduler: ScriptedScheduler, path: str, body: dict[str, object], param: str
) -> None:
    error = error_of(frontend.post(path, body), 400)
    assert error["param"] == param
    assert len(str(error["message"])) < 400
    assert scheduler.requests == []


F = {"type": "function", "function": {"name": "f"}, "tint": 1}
UNKNOWN: list[tuple[str, dict[str, object], str]] = [
    (COMPLETIONS, {"prompt": "x", "nonsense": {"deep": [1]}}, "nonsense"),
    (CHAT, {"messages": [{**MESSAGE, "colour": "red"}], "no_stop_trim": False}, "no_stop_trim, messages.colour"),
    ("/tokenize", {"prompt": "x", "nonsense": 5}, "nonsense"),
    (
        CHAT,
        {
            "messages": [MESSAGE],
            "tools": [{"type": "function", "function": {"name": "f"}}],
            "tool_choice": {"type": "allowed_tools", "hue": 1, "allowed_tools": {"mode": "required", "tools": [F]}},
        },
        "tool_choice.hue, tool_choice.allowed_tools.tools.tint",
    ),
]


@pytest.mark.parametrize(("path", "body", "names"), UNKNOWN)
def test_unknown_field_is_ignored_and_named_in_a_header(
    frontend: Frontend, scheduler: ScriptedScheduler, path: str, body: dict[str, object], names: str, stream: bool
) -> None:
    scheduler.script(answering("fine"))
    streamed = {"stream": True} if stream and path != "/tokenize" else {}
    response = frontend.post(path, body | streamed)
    assert response.status_code == 200
    assert response.headers["x-ignored-parameters"] == names
    plain = frontend.post(path, {name: body[name] for name in body.keys() & {"prompt"}} | {"messages": [MESSAGE]})
    assert "x-ignored-parameters" not in plain.headers


def test_unknown_field_is_refused_on_request() -> None:
    with scripted(unknown_parameters="refuse", served_model_name=["demo"]) as (frontend, scheduler):
        for path, body, _ in UNKNOWN:
            assert "is not known" in str(error_of(frontend.post(path, body), 400)["message"])
        assert scheduler.requests == []


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "messages: this field is missing"),
        ({"messages": []}, "messages: at least 1 are needed, not 0"),
        ({"messages": [MESSAGE], "stop": ["x"] * 17}, "stop: at most 16 are possible, not 17"),
        ({"prompt": ["x"] * 65}, "prompt: at most 64 are possible, not 65"),
        ({"messages": [{**MESSAGE, "content": [{"text": "x"}]}]}, "messages.0.content.0: the field 'type' is missing"),
        (
            {"messages": [MESSAGE], "response_format": {"type": "text", "x": 1}},
            "response_format.x: there is no such field",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x{y"}}]}]},
            "images and sounds are not served here: this model, backend or route has text only",
        ),
    ],
)
def test_wrong_body_is_refused_in_plain_words(
    frontend: Frontend, scheduler: ScriptedScheduler, body: dict[str, object], message: str
) -> None:
    assert error_of(frontend.post(COMPLETIONS if "prompt" in body else CHAT, body), 400)["message"] == message


def test_unknown_model_path_and_method(frontend: Frontend, scheduler: ScriptedScheduler) -> None:
    unknown = error_of(frontend.post(COMPLETIONS, {"prompt": "x", "model": "gpt-9"}), 404)
    assert (unknown["param"], unknown["code"]) == ("model", "model_not_found")
    assert "this server has " in str(unknown["message"])
    nowhere = error_of(httpx.get(f"{frontend.url}/nowhere"), 404)
    assert nowhere["message"] == "GET /nowhere is not served here; /openapi.json lists all routes"
    for path, hint in {
        "/chat/completions": "use /v1/chat/completions",
        "/v1/tokenize": "use /tokenize",
        "/v1/v1/messages": "use /v1/messages",
        "/engines/x/drain": "it needs --enable-admin-routes",
        "/completion": "use /v1/completions",
        "/api/chat": "use /v1/chat/completions",
        "/v1/files/file-1/content": "use `runahead run-batch`",
        "/v1/filesystem": "/openapi.json lists all routes",
    }.items():
        elsewhere = error_of(httpx.post(frontend.url + path), 404)
        assert elsewhere["message"] == f"POST {path} is not served here; {hint}"
    refused = httpx.get(frontend.url + COMPLETIONS)
    error_of(refused, 405)
    assert refused.headers["allow"] == "POST"
    error_of(httpx.get(f"{frontend.url}/docs"), 404)
    error_of(httpx.get(f"{frontend.url}/redoc"), 404)


def test_a_key_is_needed_and_keys_do_not_share_a_cache() -> None:
    with scripted(api_key=["first", "second"]) as (frontend, scheduler):
        assert error_of(frontend.post(COMPLETIONS, {"prompt": "x"}), 401)["code"] == "invalid_api_key"
        scheduler.script(answering("x"))
        for key in ("first", "second", "first"):
            headers = {"authorization": f"Bearer {key}"}
            assert frontend.post(COMPLETIONS, {"prompt": "x"}, headers=headers).status_code == 200
        salts = [request.cache_salt for request in scheduler.requests]
        assert salts[0] == salts[2] != salts[1]
        assert not any(key in salt for key in ("first", "second") for salt in salts)


def test_every_response_is_counted_by_its_route() -> None:
    """Under the name and with the labels of vLLM."""
    with scripted(api_key=["key"], max_body_bytes=1024) as (frontend, _):
        key = {"authorization": "Bearer key"}
        for method, path, size, headers in (
            ("POST", COMPLETIONS, 0, {}), ("POST", COMPLETIONS, 2000, key), ("GET", CHAT, 0, key),
            ("BREW", "/coffee", 0, key), ("GET", "/v1/models/gpt-9", 0, key), ("GET", "/v1/models", 0, key),
        ):  # fmt: skip
            httpx.request(method, frontend.url + path, content=b"x" * size, headers=headers)
        page = httpx.get(f"{frontend.url}/metrics", headers=key).text
        counts = {tuple(sample.labels.values()): sample.value for sample in samples(page, "http_requests_total")}
    assert counts == {
        (COMPLETIONS, "POST", "4xx"): 2, (CHAT, "GET", "4xx"): 1, ("none", "none", "4xx"): 1,
        ("/v1/models/{name:path}", "GET", "4xx"): 1, ("/v1/models", "GET", "2xx"): 1,
    }  # fmt: skip


async def test_refusal_behind_a_server_that_is_not_ours_keeps_its_status(tmp_path: Path) -> None:
    """Ray Serve calls the application without a connection of ours."""
    config = FrontendConfig(
        model=str(DEMO_MODEL), port=0, scheduler_endpoint=f"ipc://{tmp_path}/scheduler", response_store=False
    )
    with listen(config) as listener:
        service = FrontendService(config, ServedModel.load(config), listener, NO_ALARM)
        transport = httpx.ASGITransport(app=service.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            response = await client.post(COMPLETIONS, json={"prompt": "x"})
    assert "not ready" in str(error_of(response, 503)["message"])


async def test_a_task_beside_the_streams_that_fails_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fails(*_: object) -> None:
        raise KeyError("steps_total")

    monkeypatch.setattr(frontend_service, "log_load", fails)
    config = FrontendConfig(model=str(DEMO_MODEL), port=0, scheduler_endpoint=f"ipc://{tmp_path}/scheduler")
    with listen(config) as listener:
        service = FrontendService(config, ServedModel.load(config), listener, NO_ALARM)
        asyncio.get_running_loop().call_later(0.1, service.stop)
        assert await service.run() == 0
    assert "a task of the frontend has failed: 'steps_total'" in caplog.text


@pytest.mark.parametrize(("depth", "status"), [(125, 200), (126, 400), (300, 400)])
def test_body_that_is_nested_too_deeply_is_refused(
    frontend: Frontend, scheduler: ScriptedScheduler, depth: int, status: int
) -> None:
    """A stored response is written by pydantic, which takes at most 255 levels."""
    scheduler.script(answering("fine"))
    nested = json.loads("[" * depth + "]" * depth)  # within three levels
    answer = frontend.post("/v1/responses", {"input": [{**MESSAGE, "unknown": nested}]})
    assert answer.status_code == status, answer.text
    assert status == 200 or "at most 128 levels are possible" in str(error_of(answer, 400)["message"])


def test_compressed_body_is_refused_by_name(frontend: Frontend) -> None:
    body, headers = gzip.compress(b'{"prompt": "x"}'), {"content-encoding": "gzip"}
    refused = httpx.post(f"{frontend.url}{COMPLETIONS}", content=body, headers=headers, timeout=PATIENCE)
    assert "gzip" in error_of(refused, 415)["message"]


def test_bodies_of_admin_routes_are_read_like_those_of_others() -> None:
    with scripted(enable_admin_routes=True, max_body_bytes=1024) as (frontend, _):
        path = "/v1/load_lora_adapter"
        assert error_of(frontend.post(path, {"lora_name": "a"}), 400)["message"] == "lora_path: this field is missing"
        refused = httpx.post(frontend.url + path, content=iter([b"{", b"x" * 1024]))
        assert (refused.status_code, "1024 bytes" in refused.text) == (413, True)


def test_byte_order_mark_is_no_part_of_a_body(frontend: Frontend, scheduler: ScriptedScheduler) -> None:
    """Editors and shells of Windows put it in front of UTF-8."""
    scheduler.script(answering("fine"))
    body = codecs.BOM_UTF8 + b'{"prompt": "x"}'
    assert httpx.post(f"{frontend.url}{COMPLETIONS}", content=body, timeout=PATIENCE).status_code == 200
