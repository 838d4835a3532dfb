"""/v1/responses with `background`, by the official client: nothing depends on a connection."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from protocol.requests import FinishReason
from services.frontend.responses_api.responses import ResponseObject
from tests.integration.frontend.declared import strict
from tests.integration.frontend.scripted import (
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

HELLO, WORLD = ids_of("Hello"), ids_of(" big world")


def client(frontend: Frontend, key: str = "none") -> Any:
    """Any, as each event has fields of its own."""
    return frontend.client(key).responses


def text_of(events: Iterable[Any]) -> str:
    return "".join(event.delta for event in events if event.type == "response.output_text.delta")


def status_of(frontend: Frontend, id: str) -> Any:
    return client(frontend).retrieve(id).status


def test_stream_whose_client_left_is_taken_up_again(frontend: Frontend, scheduler: ScriptedScheduler) -> None:
    scheduler.script(lambda request: [tokens(request.number, HELLO)])
    responses = client(frontend)
    seen: list[Any] = []
    with responses.create(model="demo", input="Hi", background=True, stream=True) as stream:
        for event in stream:
            seen.append(event)
            if event.type == "response.output_text.delta":
                break
    created = seen[0]
    assert (created.type, created.response.status) == ("response.created", "queued")
    assert created.response.background is True
    id, number = created.response.id, scheduler.request().number
    after = seen[-1].sequence_number
    with responses.retrieve(id, stream=True, starting_after=after) as live:
        scheduler.send(tokens(number, WORLD, len(HELLO)))
        first = next(live)
        assert (first.type, first.sequence_number) == ("response.output_text.delta", after + 1)
        scheduler.send(ended(number))
        rest = [first, *live]
    again = list(responses.retrieve(id, stream=True, starting_after=after))
    whole = list(responses.retrieve(id, stream=True))
    assert again == rest
    assert whole == seen + rest
    assert [event.sequence_number for event in whole] == list(range(len(whole)))
    assert text_of(whole) == "Hello big world"
    assert whole[-1].type == "response.completed"
    assert whole[-1].response == responses.retrieve(id)
    assert list(responses.retrieve(id, stream=True, starting_after=whole[-1].sequence_number)) == []
    assert scheduler.aborted == set()
    scheduler.script(answering("Yes"))
    assert responses.create(model="demo", input="So?", previous_response_id=id).output_text == "Yes"


def test_response_is_queued_then_in_progress_then_completed(frontend: Frontend, scheduler: ScriptedScheduler) -> None:
    responses = client(frontend)
    created = responses.create(model="demo", input="Hi", background=True)
    assert (created.status, created.output, created.background) == ("queued", [], True)
    with pytest.raises(openai.BadRequestError, match="is queued") as refused:
        responses.create(model="demo", input="So?", previous_response_id=created.id)
    assert refused.value.param == "previous_response_id"
    number = scheduler.request().number
    scheduler.send(tokens(number, HELLO))
    wait_until(lambda: status_of(frontend, created.id) == "in_progress", "it is in progress")
    assert responses.retrieve(created.id).output_text == "Hello"
    scheduler.send(ended(number, FinishReason.LENGTH))
    wait_until(lambda: status_of(frontend, created.id) == "incomplete", "it is incomplete")
    assert responses.retrieve(created.id).usage.output_tokens == len(HELLO)
    strict(ResponseObject).validate(httpx.get(f"{frontend.url}/v1/responses/{created.id}").json())


def test_cancelled_response_is_aborted_and_its_streams_end(frontend: Frontend, scheduler: ScriptedScheduler) -> None:
    scheduler.script(lambda request: [tokens(request.number, HELLO)])
    responses = client(frontend)
    with responses.create(model="demo", input="Hi", background=True, stream=True) as stream:
        id = next(stream).response.id
        wait_until(lambda: status_of(frontend, id) == "in_progress", "it is in progress")
        cancelled = responses.cancel(id)
        assert (cancelled.status, cancelled.output_text, cancelled.error) == ("cancelled", "Hello", None)
        *_, last = stream
    assert last.response == cancelled == responses.cancel(id) == responses.retrieve(id)
    scheduler.wait_aborted(scheduler.request().number)


def test_response_that_has_ended_is_not_cancelled(frontend: Frontend, scheduler: ScriptedScheduler) -> None:
    scheduler.script(answering("Hello"))
    responses = client(frontend)
    background = responses.create(model="demo", input="Hi", background=True)
    wait_until(lambda: status_of(frontend, background.id) == "completed", "it is completed")
    assert responses.cancel(background.id).status == "completed"
    foreground = responses.create(model="demo", input="Hi")
    with pytest.raises(openai.BadRequestError, match="not created with background"):
        responses.cancel(foreground.id)
    with pytest.raises(openai.BadRequestError, match="not created with background") as refused:
        responses.retrieve(foreground.id, stream=True)
    assert refused.value.param == "stream"
    url = f"{frontend.url}/v1/responses/{background.id}?starting_after=1"
    assert httpx.get(url).json()["error"]["param"] == "starting_after"


@pytest.mark.parametrize(
    ("reason", "code"), [(FinishReason.ERROR, "server_error"), (FinishReason.REJECTED, "rate_limit_exceeded")]
)
def test_failure_is_the_status_and_the_last_event(
    frontend: Frontend, scheduler: ScriptedScheduler, reason: FinishReason, code: str
) -> None:
    scheduler.script(lambda request: [ended(request.number, reason, message="it broke")])
    responses = client(frontend)
    *_, last = responses.create(model="demo", input="Hi", background=True, stream=True)
    assert (last.type, last.response.status) == ("response.failed", "failed")
    assert (last.response.error.code, last.response.error.message) == (code, "it broke")
    assert responses.retrieve(last.response.id) == last.response


def test_deleted_response_is_aborted(frontend: Frontend, scheduler: ScriptedScheduler) -> None:
    scheduler.script(silent)
    responses = client(frontend)
    with responses.create(model="demo", input="Hi", background=True, stream=True) as stream:
        id = next(stream).response.id
        number = scheduler.request().number
        responses.delete(id)
        *_, last = stream
    assert last.response.error.message == "the response was deleted"
    scheduler.wait_aborted(number)
    with pytest.raises(openai.NotFoundError):
        responses.retrieve(id, stream=True)


def test_response_without_room_fails_and_the_private_directory_is_removed(tmp_path: Path) -> None:
    small = f"""
from pathlib import Path
from services.frontend.responses_api import files
files.SHARED_MEMORY, files.PRIVATE_BYTES, files.PRUNE_INTERVAL = Path({str(tmp_path)!r}), 100_000, 1e9
"""
    with scripted(small, served_model_name=["demo"]) as (killed, _):
        (left,) = tmp_path.iterdir()
        assert left.stat().st_mode & 0o777 == 0o700
        killed.process.kill()
        killed.wait()
    assert left.exists()
    with scripted(small, served_model_name=["demo"]) as (frontend, scheduler):
        assert not left.exists()
        scheduler.script(answering("Hello"))
        done = client(frontend).create(model="demo", input="Hi")
        scheduler.script(silent)
        stream = client(frontend).create(model="demo", input="Hi", background=True, stream=True)
        events = [next(stream), next(stream)]
        number, sent = scheduler.request().number, 0
        while events[-1].type != "response.failed":
            scheduler.send(tokens(number, WORLD[:1], sent))
            sent += 1
            events.append(next(stream))
        assert "no room in the store" in events[-1].response.error.message
        assert [event.sequence_number for event in events] == list(range(len(events)))
        scheduler.wait_aborted(number)
        for id in (done.id, events[0].response.id):
            with pytest.raises(openai.NotFoundError):
                client(frontend).retrieve(id)
        stream.close()
        frontend.signal()
        assert frontend.wait() == 0
    assert list(tmp_path.iterdir()) == []


def test_other_keys_have_no_access_and_draining_waits_for_the_end() -> None:
    with scripted(served_model_name=["demo"], api_key=["a", "b"]) as (frontend, scheduler):
        id = client(frontend, "a").create(model="demo", input="Hi", background=True).id
        other = client(frontend, "b")
        for access in (lambda: other.retrieve(id, stream=True), lambda: other.cancel(id)):
            with pytest.raises(openai.NotFoundError):
                access()
        number = scheduler.request().number
        scheduler.send(tokens(number, HELLO))
        frontend.signal()
        wait_until(lambda: "draining: 1 open" in frontend.log, "it drains")
        scheduler.send(ended(number))
        assert frontend.wait() == 0
        (line,) = [line for line in frontend.log.splitlines() if "request completed" in line]
        assert "route=/v1/responses" in line
        assert f"output_tokens={len(HELLO)} " in line
