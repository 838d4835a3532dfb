"""Log lines about a request carry its id, from its acceptance to its end."""

import re
from collections.abc import Iterator

import pytest

from protocol.requests import FinishReason
from tests.integration.frontend.scripted import (
    Frontend,
    ScriptedScheduler,
    answering,
    ended,
    scripted,
    silent,
    wait_until,
)
from tests.integration.frontend.test_connections import connect

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


@pytest.mark.parametrize("stream", [False, True])
def test_accepted_and_completed(pair: tuple[Frontend, ScriptedScheduler], stream: bool) -> None:
    frontend, scheduler = pair
    scheduler.script(answering("a b"))
    name = f"complete-{stream}"
    headers = {"x-request-id": name, "authorization": "Bearer key"}
    frontend.post(COMPLETIONS, {"prompt": [5, 6], "n": 2, "stream": stream}, headers=headers)
    numbers = [scheduler.request(index).number for index in range(2)]
    assert {scheduler.request(index).request_id for index in range(2)} == {name}
    accepted = [f"request accepted: number={number} prompt_tokens=2" for number in numbers]
    assert wait_lines(frontend, name, "completed") == [*accepted, "request completed: status=200"]


@pytest.mark.parametrize("stream", [False, True])
def test_failed_by_the_engine(pair: tuple[Frontend, ScriptedScheduler], stream: bool) -> None:
    frontend, scheduler = pair
    scheduler.script(lambda request: [ended(request.number, FinishReason.ERROR, message="the worker failed")])
    headers = {"x-request-id": f"fail-{stream}", "authorization": "Bearer key"}
    frontend.post(COMPLETIONS, {"prompt": [5], "stream": stream}, headers=headers)
    *_, last = wait_lines(frontend, f"fail-{stream}", "failed")
    assert last == "request failed: status=500: the worker failed"


def test_refused(pair: tuple[Frontend, ScriptedScheduler]) -> None:
    frontend, _ = pair
    headers = {"x-request-id": "invalid", "authorization": "Bearer key"}
    frontend.post(COMPLETIONS, {"prompt": [5], "n": 99}, headers=headers)
    (line,) = wait_lines(frontend, "invalid", "invalid")
    assert line.startswith("request invalid: status=400: n:")
    frontend.post(COMPLETIONS, {"prompt": [5]}, headers={"x-request-id": "no-key"})
    (line,) = wait_lines(frontend, "no-key", "refused")
    assert line.startswith("request refused: status=401:")


@pytest.mark.parametrize("stream", [False, True])
def test_aborted_by_its_client(pair: tuple[Frontend, ScriptedScheduler], stream: bool) -> None:
    frontend, scheduler = pair
    scheduler.script(silent)
    name, body = f"abort-{stream}", b'{"prompt": [5], "stream": %s}' % str(stream).lower().encode()
    head = (
        f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer key\r\nX-Request-Id: {name}\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    with connect(frontend) as connection:
        connection.sendall(head.encode() + body)
        scheduler.request()
    *_, last = wait_lines(frontend, name, "aborted")
    assert last == "request aborted: status=499: the client closed the connection"
