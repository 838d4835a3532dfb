"""Log lines about a request carry its id, from its acceptance to its end."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from protocol.requests import FinishReason, RequestTimes
from tests.integration.frontend.scripted import (
    TOKENIZER,
    Frontend,
    ScriptedScheduler,
    answering,
    ended,
    ids_of,
    scripted,
    silent,
    tokens,
    wait_until,
)
from tests.integration.frontend.test_connections import connect, post

COMPLETIONS = "/v1/completions"


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Frontend, ScriptedScheduler]]:
    with scripted(log_level="debug", api_key=["key"]) as pair:
        yield pair


def wait_lines(frontend: Frontend, request_id: str, last: str) -> list[str]:
    """Return the log's lines about a request, when the `last` one is there."""

    def lines() -> list[str]:
        found = re.findall(rf"(request \w+: request_id={request_id}\b.*)\n", frontend.log)
        return [line.replace(f" request_id={request_id}", "") for line in found]

    wait_until(lambda: any(line.startswith(f"request {last}:") for line in lines()), "the request is logged")
    return lines()


def test_accepted_and_completed(pair: tuple[Frontend, ScriptedScheduler], stream: bool) -> None:
    frontend, scheduler = pair
    scheduler.script(answering("a b", times=RequestTimes(1.0, 2.5, 3.0, 4.0)))
    name = f"complete-{stream}"
    headers = {"x-request-id": name, "authorization": "Bearer key"}
    frontend.post(COMPLETIONS, {"prompt": [5, 6], "n": 2, "stream": stream}, headers=headers)
    numbers = [scheduler.request(index).number for index in range(2)]
    assert {scheduler.request(index).request_id for index in range(2)} == {name}
    accepted = [f"request accepted: number={number} prompt_tokens=2 engine=0" for number in numbers]
    *lines, last = wait_lines(frontend, name, "completed")
    assert lines == accepted
    assert re.fullmatch(
        r"request completed: status=200 route=/v1/completions prompt_tokens=2 output_tokens=\d+ queue_seconds=1\.500 "
        r"first_token_seconds=\d\.\d+ seconds=\d\.\d+",
        last,
    )
    assert f"output_tokens={2 * len(ids_of('a b'))} " in last


def test_failed_by_the_engine(pair: tuple[Frontend, ScriptedScheduler], stream: bool) -> None:
    frontend, scheduler = pair
    scheduler.script(lambda request: [ended(request.number, FinishReason.ERROR, message="the worker failed")])
    headers = {"x-request-id": f"fail-{stream}", "authorization": "Bearer key"}
    frontend.post(COMPLETIONS, {"prompt": [5], "stream": stream}, headers=headers)
    *_, last = wait_lines(frontend, f"fail-{stream}", "failed")
    assert last.startswith("request failed: status=500 route=/v1/completions prompt_tokens=1 ")
    assert last.endswith(": the worker failed")


def test_refused(pair: tuple[Frontend, ScriptedScheduler]) -> None:
    frontend, _ = pair
    headers = {"x-request-id": "invalid", "authorization": "Bearer key"}
    frontend.post(COMPLETIONS, {"prompt": [5], "n": 129}, headers=headers)
    (line,) = wait_lines(frontend, "invalid", "invalid")
    assert line.startswith("request invalid: status=400 route=/v1/completions ")
    assert ": n:" in line
    frontend.post(COMPLETIONS, {"prompt": [5]}, headers={"x-request-id": "no-key"})
    (line,) = wait_lines(frontend, "no-key", "refused")
    assert line.startswith("request refused: status=401:")


def test_aborted_by_its_client(pair: tuple[Frontend, ScriptedScheduler], stream: bool) -> None:
    frontend, scheduler = pair
    scheduler.script(silent)
    name = f"abort-{stream}"
    headers = f"Authorization: Bearer key\r\nX-Request-Id: {name}\r\n"
    with connect(frontend) as connection:
        post(connection, {"prompt": [5], "stream": stream}, more_headers=headers)
        scheduler.request()
    *_, last = wait_lines(frontend, name, "aborted")
    assert last.startswith("request aborted: status=499 ")
    assert last.endswith(": the client closed the connection")


def test_tokens_of_an_answer_that_its_client_leaves_are_counted() -> None:
    count = len(ids_of("a b c"))
    with scripted() as (frontend, scheduler):
        for number, stream in enumerate((False, True)):
            scheduler.script(lambda request: [tokens(request.number, ids_of("a b c"))])
            body, first = {"prompt": [5], "n": 2, "stream": stream}, 2 * (number + 1)
            with connect(frontend) as connection:
                post(connection, body, more_headers=f"X-Request-Id: {stream}\r\n")
                wait_until(
                    lambda first=first: frontend.metric("time_to_first_token_seconds_count") == first,
                    "both choices have their tokens",
                )
            wait_until(lambda stream=stream: f"aborted: request_id={stream} " in frontend.log, "it is logged")
        assert len(re.findall(rf"request aborted: .* output_tokens={2 * count} ", frontend.log)) == 2


def test_line_is_there_by_default_and_has_no_text_of_the_request() -> None:
    with scripted(served_model_name=["demo"], log_format="json") as (frontend, scheduler):
        scheduler.script(answering("secret answer"))
        frontend.post(COMPLETIONS, {"prompt": "secret prompt"}, headers={"x-request-id": "mine"})
        wait_until(lambda: "request completed" in frontend.log, "the request is logged")
        lines = [json.loads(line) for line in frontend.log.splitlines()]
        (found,) = [line for line in lines if line["message"].startswith("request completed")]
        assert (found["request_id"], found["status"], found["route"]) == ("mine", 200, COMPLETIONS)
        assert (found["outcome"], found["level"]) == ("completed", "INFO")
        assert found["prompt_tokens"] == len(TOKENIZER.encode("secret prompt"))
        assert "secret" not in frontend.log


TOOL = {"type": "function", "function": {"name": "secret"}}
CHAT = {"messages": [{"role": "user", "content": "secret"}]}
QUOTING: list[tuple[str, dict[str, Any]]] = [
    (COMPLETIONS, {"prompt": [5], "guided_regex": "secret"}),
    (COMPLETIONS, {"prompt": [5], "secret text": 1}),
    (COMPLETIONS, {"prompt": [5], "logit_bias": {"secret": 1}}),
    (COMPLETIONS, {"prompt": [5], "logit_bias": {"secret": "x"}}),
    (COMPLETIONS, {"prompt": [5], "bad_words": [f"secret{chr(0x4E2D) * 200}"]}),
    (COMPLETIONS, {"prompt": [5], "structured_outputs": {"json": "secret", "disable_any_whitespace": True}}),
    (COMPLETIONS, {"prompt": [5], "response_format": {"type": "text", "secret": 1}}),
    ("/v1/chat/completions", {"messages": [{"role": "secret", "content": "x"}]}),
    ("/v1/chat/completions", {**CHAT, "tools": [TOOL, TOOL]}),
    ("/v1/chat/completions", {**CHAT, "chat_template_kwargs": {"secret key": 1}}),
    ("/v1/responses", {"input": [{"role": "user", "content": [{"type": "secret"}]}]}),
    ("/v1/responses", {"input": "x", "previous_response_id": "secret"}),
    ("/v1/messages", {**CHAT, "max_tokens": 1, "container": "secret"}),
]
"""Bodies that are refused with an error that may quote them."""


def test_line_of_a_refused_request_has_no_text_of_it() -> None:
    with scripted(unknown_parameters="refuse") as (frontend, scheduler):
        told = ""
        for number, (route, body) in enumerate(QUOTING):
            response = frontend.post(route, body, headers={"x-request-id": f"refused-{number}"})
            assert response.status_code in (400, 404), body
            told += response.text
            (line,) = wait_lines(frontend, f"refused-{number}", "invalid")
            assert re.search(r"seconds=\S+: \S", line), line  # the reason
        assert "secret" in told  # the client is told
        scheduler.script(lambda request: [ended(request.number, FinishReason.INVALID, message="bad regex: secret")])
        tool = {"type": "function", "function": {"name": "f", "parameters": {"$ref": "#/secret"}}}
        form = {"response_format": {"type": "json_object"}}
        for field, (route, body) in {
            "structured_outputs": (COMPLETIONS, {"prompt": [5], "structured_outputs": {"regex": "secret"}}),
            "tools": ("/v1/chat/completions", {**CHAT, "tools": [tool], "tool_choice": "required"}),
            "response_format": ("/v1/chat/completions", {**CHAT, "tools": [tool], "tool_choice": "none", **form}),
        }.items():
            response = frontend.post(route, body, headers={"x-request-id": field})
            assert "bad regex: secret" in response.text
            assert wait_lines(frontend, field, "invalid")[-1].endswith(f": {field}: the engine refused the request")
        assert "secret" not in frontend.log
