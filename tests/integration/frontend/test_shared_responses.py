"""Responses that several frontends share: followed, ended and taken up at one that did not begin them.

Each frontend has a scripted scheduler of its own, so that a test decides what the next one generates.
"""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import openai
import pytest

from protocol.codec import unpack
from protocol.requests import EngineState
from services.frontend.responses_api.responses import ResponseObject
from tests.integration.frontend.declared import strict
from tests.integration.frontend.scripted import (
    READY,
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
from tests.integration.frontend.test_background_responses import client, status_of, text_of
from tests.integration.frontend.test_responses import TOOL
from tests.unit.frontend.test_adapters import adapter

Pair = tuple[Frontend, ScriptedScheduler]
HELLO, WORLD = ids_of("Hello"), ids_of(" big world")
OF_NO_WEIGHT = {f"base_model.model.x.lora_{kind}.weight": (4, 4) for kind in "AB"}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


def state(identity: str) -> EngineState:
    return msgspec.structs.replace(READY, identity=identity)


@contextlib.contextmanager
def sharing(directory: Path, **config: Any) -> Iterator[Pair]:
    with scripted(served_model_name=["demo"], response_store_dir=str(directory), **config) as pair:
        yield pair


@pytest.fixture(scope="module")
def _two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Pair, Pair]]:
    directory, keys = tmp_path_factory.mktemp("responses"), ["none", "other"]
    with sharing(directory, api_key=keys) as first, sharing(directory, api_key=keys) as second:
        yield first, second


@pytest.fixture
def two(_two: tuple[Pair, Pair]) -> tuple[Pair, Pair]:
    for _, scheduler in _two:
        scheduler.script(silent)
    return _two


def begun(pair: Pair, sent: list[int], **fields: Any) -> tuple[list[Any], Any]:
    """Start a response with background. Return its events up to those of `sent`, and the stream."""
    frontend, scheduler = pair
    stream = client(frontend).create(model="demo", input="Hi", background=True, stream=True, **fields)
    events = [next(stream), next(stream)]
    scheduler.send(tokens(scheduler.request().number, sent))
    events.append(next(stream))
    return events, stream


def test_response_is_followed_and_cancelled_at_another_frontend(two: tuple[Pair, Pair]) -> None:
    (owner, scheduler), (other, idle) = two
    seen, stream = begun(two[0], HELLO)
    id = seen[0].response.id
    wait_until(lambda: client(other).retrieve(id).output_text == "Hello", "its text is seen")
    shown = client(other).retrieve(id)
    assert shown.model_dump() == client(owner).retrieve(id).model_dump()
    with client(other).retrieve(id, stream=True) as followed:
        number = scheduler.request().number
        scheduler.send(tokens(number, WORLD, len(HELLO)))
        events = []
        for event in followed:
            events.append(event)
            if text_of(events) == "Hello big world":
                break
        cancelled = client(other).cancel(id)
        events += followed
    assert (cancelled.status, cancelled.output_text) == ("cancelled", "Hello big world")
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events == seen + list(stream)
    assert client(owner).retrieve(id) == client(owner).cancel(id) == cancelled == events[-1].response
    scheduler.wait_aborted(number)
    assert idle.requests == []


def test_response_is_continued_and_deleted_at_another_frontend(two: tuple[Pair, Pair]) -> None:
    (owner, scheduler), (other, idle) = two
    scheduler.script(answering("Hello"))
    first = client(owner).create(model="demo", input="Hi")
    idle.script(answering("Yes"))
    assert client(other).create(model="demo", input="So?", previous_response_id=first.id).output_text == "Yes"
    assert client(other).input_items.list(first.id).data == client(owner).input_items.list(first.id).data
    with pytest.raises(openai.BadRequestError, match="not created with background"):
        client(other).cancel(first.id)
    client(other).delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client(owner).retrieve(first.id)
    scheduler.script(silent)
    seen, stream = begun(two[0], HELLO)
    client(other).delete(seen[0].response.id)
    *_, last = stream
    assert last.response.error.message.startswith("the response was deleted")
    scheduler.wait_aborted(scheduler.request().number)


def test_foreign_key_or_path_finds_nothing(two: tuple[Pair, Pair]) -> None:
    (owner, scheduler), (other, _) = two
    scheduler.script(answering("Hello"))
    id = client(owner).create(model="demo", input="Hi", background=True).id
    wait_until(lambda: status_of(other, id) == "completed", "it is completed")
    strict(ResponseObject).validate(
        httpx.get(f"{other.url}/v1/responses/{id}", headers={"authorization": "Bearer none"}).json()
    )
    for key, asked in (("other", id), ("none", "resp_" + 32 * "0"), ("none", f"..%2F{id}"), ("none", "x" * 500)):
        with pytest.raises(openai.NotFoundError):
            client(other, key).retrieve(asked)
        with pytest.raises(openai.NotFoundError):
            client(other, key).retrieve(asked, stream=True)
        with pytest.raises(openai.NotFoundError):
            client(other, key).delete(asked)


@pytest.mark.parametrize("text", ["Hello big world", f"Sum: {CALL}{CALL}"])
def test_response_of_a_killed_frontend_goes_on_at_another(tmp_path: Path, text: str) -> None:
    """Every event comes once and in order; the engine gets the prompt, the seed, the delivered tokens and the adapter.
    The other frontend has other files under its name."""
    ids, fields = ids_of(text), {"tools": [TOOL]} if CALL in text else {}
    cut = len(ids) * 2 // 3
    files = [adapter(tmp_path / name, OF_NO_WEIGHT, lora_alpha=len(name)) for name in ("x", "xx")]
    config: list[Any] = [
        {"state": state("m"), "tool_call_parser": "hermes", "enable_lora": True, "lora_modules": [f"a={path}"]}
        for path in files
    ]
    store = tmp_path / "store"
    store.mkdir()
    with sharing(store, **config[0]) as owner, sharing(store, **config[1]) as other:
        stream = client(owner[0]).create(model="a", input="Hi", background=True, stream=True, **fields)
        seen = [next(stream), next(stream)]
        before = owner[1].request()
        id = seen[0].response.id
        (path,) = store.glob("*/*.jsonl")
        owner[1].send(tokens(before.number, ids[:1]))
        wait_until(lambda: _batches(path), "the first token is written")
        owner[1].send(tokens(before.number, ids[1:cut], 1))
        wait_until(lambda: sum(map(len, _batches(path))) >= max(2, cut - 3), "most are written")
        assert len(_batches(path)) > 1
        owner[0].process.kill()
        with contextlib.suppress(httpx.HTTPError, openai.APIError):
            seen += stream
        stream.close()
        with path.open("ab") as file:
            file.write(b'{"events":"torn')
        after = seen[-1].sequence_number
        with client(other[0]).retrieve(id, stream=True, starting_after=after) as taken:
            again = other[1].request()
            delivered = len(unpack(again.token_ids)) - again.num_prompt_tokens
            assert unpack(again.token_ids).tolist() == unpack(before.token_ids).tolist() + ids[:delivered]
            assert cut - 3 <= delivered <= cut
            assert (again.params, again.cache_salt, again.structured, again.lora) == (
                before.params, before.cache_salt, before.structured, before.lora,
            )  # fmt: skip
            assert again.lora is not None
            other[1].send(tokens(again.number, ids[delivered:], delivered))
            wait_until(lambda: sum(map(len, _batches(path))) > delivered, "they are written")
            other[1].send(ended(again.number))
            rest = list(taken)
        gaps = other[0].metric("inter_token_latency_seconds_count")
        first = other[0].metric("time_to_first_token_seconds_count")
        assert (first, gaps) == (0, len(ids) - delivered), "each frontend measures its own tokens"
        whole = list(client(other[0]).retrieve(id, stream=True))
        assert whole == seen + rest
        written = [token for batch in _batches(path) for token in batch]
        assert written == ids[: len(written)]  # so that a third frontend could go on
        assert [event.sequence_number for event in whole] == list(range(len(whole)))
        assert whole[-1].type == "response.completed"
        assert whole[-1].response.usage.output_tokens == len(ids)
        wait_until(lambda: "status=200 route=/v1/responses prompt_tokens" in other[0].log, "its end is logged")
        other[1].script(lambda request: [tokens(request.number, ids), ended(request.number)])
        undisturbed = client(other[0]).create(model="demo", input="Hi", **fields)
        assert [_shape(item) for item in whole[-1].response.output] == [_shape(item) for item in undisturbed.output]
        other[1].script(answering("Yes"))
        assert client(other[0]).create(model="demo", input="So?", previous_response_id=id).output_text == "Yes"


def _batches(path: Path) -> list[list[int]]:
    lines = path.read_bytes().split(b"\n")[1:-1]
    return [batch for line in lines for batch in json.loads(line).get("batches", [])]


def _shape(item: Any) -> Any:
    return item.model_dump(exclude={"id", "call_id"})


def test_response_of_other_weights_waits_and_one_of_other_settings_fails(tmp_path: Path) -> None:
    with sharing(tmp_path, state=state("a")) as owner:
        seen, stream = begun(owner, HELLO)
        id = seen[0].response.id
        stream.close()
        owner[0].process.kill()
        with sharing(tmp_path, state=state("b")) as other:
            for _ in range(2):
                with pytest.raises(openai.InternalServerError, match="no other engine has the model") as refused:
                    client(other[0]).retrieve(id)
                assert refused.value.status_code == 503
    (path,) = tmp_path.glob("*/*.jsonl")
    before = path.read_bytes()
    assert b"Hello" in before
    path.write_bytes(before.replace(b"Hello", b"Hallo"))
    with sharing(tmp_path, state=state("a")) as other:
        failed = client(other[0]).retrieve(id)
        assert (failed.status, failed.output_text) == ("failed", "Hallo")
        assert "cannot go on" in failed.error.message
        *_, last = client(other[0]).retrieve(id, stream=True)
        assert (last.type, last.sequence_number, last.response) == (
            "response.failed", before.count(b"event: "), failed,
        )  # fmt: skip
        assert other[1].requests == []
        path.write_bytes(before[:-1].replace(b'"batches"', b"'batches'") + b"\n")
        with pytest.raises(openai.InternalServerError, match="the stored response is damaged"):
            client(other[0]).retrieve(id, stream=True)
        client(other[0]).delete(id)
        assert not path.exists()


FULL = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (16384, 16384))"
"""Files grow to 16 KiB, then writing fails."""


def test_full_directory_fails_that_response_alone(tmp_path: Path) -> None:
    with sharing(tmp_path, patch=FULL) as (frontend, scheduler):
        events, stream = begun((frontend, scheduler), HELLO)
        events += (next(stream), next(stream))
        number = scheduler.request().number
        while events[-1].type == "response.output_text.delta":
            scheduler.send(tokens(number, WORLD[:1], len(events) - 5 + len(HELLO)))
            events.append(next(stream))
        stream.close()
        last = events[-1]
        assert last.type == "response.failed"
        assert last.response.error.message == ("the response cannot be stored: File too large")
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert list(tmp_path.glob("*/*")) == []
        with pytest.raises(openai.InternalServerError, match="cannot be stored: File too large"):
            client(frontend).create(
                model="demo", input="Hi", background=True, metadata={str(n): 500 * "x" for n in range(16)}
            )
        scheduler.script(answering("Hello"))
        assert client(frontend).create(model="demo", input="Hi").output_text == "Hello"
