"""The page and /debug/steps of a real frontend: subscription, access, headers and bounds."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from msgspec.structs import replace

from protocol.records import StepRecords
from tests.integration.frontend.scripted import PATIENCE, READY, Frontend, ScriptedScheduler, scripted, wait_until
from tests.unit.frontend.steps.records import INCARNATION, batch, step

KEYED = {"authorization": "Bearer sesame"}
STATE = replace(READY, incarnation=INCARNATION)


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Frontend, ScriptedScheduler]]:
    with scripted(state=STATE, api_key=["sesame"], allowed_hosts=["127.0.0.1"], step_ring=64) as pair:
        wait_until(lambda: pair[1].is_subscribed, "the frontend has subscribed")
        yield pair


def steps(frontend: Frontend, query: str = "") -> httpx.Response:
    return httpx.get(f"{frontend.url}/debug/steps{query}", headers=KEYED)


@contextmanager
def stream(frontend: Frontend, query: str = "") -> Iterator[Iterator[dict[str, Any]]]:
    """Yield the answers of a stream."""
    url = f"{frontend.url}/debug/steps/stream{query}"
    with httpx.stream("GET", url, headers=KEYED, timeout=PATIENCE) as response:
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        lines = response.iter_lines()
        yield (json.loads(line.removeprefix("data: ")) for line in lines if line)


def send(pair: tuple[Frontend, ScriptedScheduler], records: StepRecords) -> int:
    """Send records. Return the number of the last entry before them."""
    before = steps(pair[0]).json()["last"]
    pair[1].send(records)
    expected = before + len(records.records) + len(records.events) + len(records.requests)
    wait_until(lambda: steps(pair[0]).json()["last"] == expected, "the records have arrived")
    return int(before)


def test_steps_are_read_from_a_number_on(pair: tuple[Frontend, ScriptedScheduler]) -> None:
    before = send(pair, batch(step(1), step(2), step(3), sent=4.0))
    first = steps(pair[0], f"?since={before}&limit=2").json()
    rest = steps(pair[0], f"?since={first['next']}&rows=false").json()
    found = [entry["step_id"] for entry in (*first["entries"], *rest["entries"])]
    assert (found, rest["next"], rest["missed"]) == ([1, 2, 3], rest["last"], 0)
    assert first["entries"][0]["requests"] == ["0/0", "0/1"]
    assert "requests" not in rest["entries"][0]
    assert rest["engine"] == {"phase": "ready", "num_requests_running": 3}
    assert 4.0 <= rest["now"] < 64.0


def test_the_ring_is_bounded_and_tells_what_was_missed(pair: tuple[Frontend, ScriptedScheduler]) -> None:
    before = send(pair, batch(*map(step, range(1, 101))))
    found = steps(pair[0], f"?since={before}&limit=512").json()
    assert (len(found["entries"]), found["missed"]) == (64, 36)
    assert len(steps(pair[0], "?limit=5").json()["entries"]) == 5


def test_a_stream_continues_with_what_arrives(pair: tuple[Frontend, ScriptedScheduler]) -> None:
    before = send(pair, batch(step(1), step(2)))
    with stream(pair[0], f"?since={before + 1}") as answers, stream(pair[0]) as others:
        assert [entry["step_id"] for entry in next(answers)["entries"]] == [2]
        assert next(others)["entries"][-1]["step_id"] == 2
        send(pair, batch(step(3), step(4)))
        for each in (answers, others):
            found = next(answer for answer in each if answer["entries"])
            assert [entry["step_id"] for entry in found["entries"]] == [3, 4]
            assert (found["next"], found["missed"]) == (before + 4, 0)
            assert "requests" not in found["entries"][0]
        idle = next(answers)
        assert (idle["entries"], idle["next"], idle["engine"]["phase"]) == ([], before + 4, "ready")


def test_a_stream_ends_when_the_server_stops() -> None:
    with scripted(state=STATE, step_ring=4) as (frontend, scheduler):
        wait_until(lambda: scheduler.is_subscribed, "the frontend has subscribed")
        with stream(frontend) as answers:
            next(answers)
            frontend.signal()
            assert all(not answer["entries"] for answer in answers)
        assert frontend.wait() == 0


@pytest.mark.parametrize("query", ["since=-1", "since=x", "since=9007199254740992", "limit=0", "limit=513", "rows=1",
                                   "since=", "since=%C2%B2"])  # fmt: skip
def test_a_query_that_makes_no_sense_is_refused(pair: tuple[Frontend, ScriptedScheduler], query: str) -> None:
    answer = steps(pair[0], f"?{query}")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, query.partition("=")[0])
    assert "parse" not in answer.json()["error"]["message"], "that speaks of the server's code"


def test_steps_need_the_key_and_the_page_does_not(pair: tuple[Frontend, ScriptedScheduler]) -> None:
    url = pair[0].url
    for headers in ({}, {"authorization": "Bearer wrong"}):
        for path in ("/debug/steps", "/debug/steps/stream"):
            assert httpx.get(url + path, headers=headers).status_code == 401
        page = httpx.get(url, headers=headers)
        assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
        assert page.headers["content-security-policy"].startswith("default-src 'self';")
        assert page.headers["x-content-type-options"] == "nosniff"
    script = httpx.get(f"{url}/page/main.js")
    assert (script.status_code, script.headers["content-type"]) == (200, "text/javascript; charset=utf-8")
    assert httpx.get(url, headers={"host": "evil.example.com"}).status_code == 400
    assert httpx.get(f"{url}/page/files.py", headers=KEYED).status_code == 404
    assert httpx.post(url, headers=KEYED).status_code == 405


def test_without_page_and_ring_there_is_neither_route_nor_subscription() -> None:
    with scripted(state=STATE, ui=False, step_ring=0) as (frontend, scheduler):
        assert httpx.get(frontend.url).status_code == 404
        assert httpx.get(f"{frontend.url}/page/main.js").status_code == 404
        for path in ("/debug/steps", "/debug/steps/stream"):
            refused = httpx.get(frontend.url + path)
            assert refused.status_code == 404
            assert "--step-ring 0" in refused.json()["error"]["message"]
        assert not scheduler.is_subscribed


def test_a_scheduler_without_an_incarnation_is_not_subscribed_to(
    frontend: Frontend, scheduler: ScriptedScheduler
) -> None:
    assert not scheduler.is_subscribed
    found = httpx.get(f"{frontend.url}/debug/steps").json()
    assert (found["entries"], found["last"], found["now"]) == ([], 0, None)
