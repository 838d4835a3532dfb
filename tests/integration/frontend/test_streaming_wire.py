"""Streams as bytes: any text is preserved however it is read, and a step is one write."""

import json
import random
import re

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from protocol.codec import pack
from protocol.requests import FinishReason, RequestOutputs
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
)
from tests.integration.frontend.sse import EventParser, SseClient, events_of, texts
from tests.integration.frontend.test_logprobs import step

FIRST = "x"
USAGE = {"include_usage": False, "continuous_usage_stats": True}
LINE_ENDS = "\n|\r|\r\n|\n\n|\x0b|\x0c|\x1c|\x1d|\x1e|\x85|\u2028|\u2029|\0|data: [DONE]\n\n|\ufeff"


def in_steps(text: str, dice: random.Random) -> list[list[int]]:
    """Return the tokens of `text`, cut into steps."""
    ids, steps = ids_of(text), []
    while ids:
        size = dice.randint(1, 5)
        steps.append(ids[:size])
        ids = ids[size:]
    return steps


def begin(client: SseClient, scheduler: ScriptedScheduler) -> int:
    """Wait until the stream has shown `FIRST`, so that later text is written separately; return the number."""
    number = scheduler.request().number
    scheduler.send(tokens(number, ids_of(FIRST)))
    assert texts([*events_of(client.read()), "[DONE]"]) == {0: FIRST}
    return number


def at_random(raw: bytes, dice: random.Random) -> list[bytes]:
    parts = []
    while raw:
        size = dice.randint(1, 40)
        parts.append(raw[:size])
        raw = raw[size:]
    return parts


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text(max_size=60), st.randoms(use_true_random=False))
@example(LINE_ENDS, random.Random(1))
@example("é世😀\u2028" * 20, random.Random(2))
def test_any_text_is_preserved_however_it_is_read(
    frontend: Frontend, scheduler: ScriptedScheduler, text: str, dice: random.Random
) -> None:
    scheduler.script(silent)
    with SseClient(frontend) as client:
        client.post(prompt="x")
        number = begin(client, scheduler)
        index = 1
        for ids in in_steps(text, dice):
            scheduler.send(tokens(number, ids, index))
            index += len(ids)
        scheduler.send(ended(number))
        answer = client.read_all()
    raw = answer.body
    assert answer.status == 200
    byte_by_byte, in_parts = EventParser(), EventParser()
    whole = events_of(raw)
    assert texts(whole) == {0: FIRST + text}
    assert [event for byte in raw for event in byte_by_byte.feed(bytes([byte]))] == whole
    assert [event for part in at_random(raw, dice) for event in in_parts.feed(part)] == whole
    lines = [line for line in raw.decode().splitlines() if line]  # splits at many characters besides \n
    assert [line.removeprefix("data: ") for line in lines] == whole
    assert all(events_of(chunk) for chunk in answer.chunks), "no event is spread over two writes"


@pytest.mark.parametrize("logprobs", [None, 1])
def test_event_has_as_many_tokens_as_the_request_asks_for(
    frontend: Frontend, scheduler: ScriptedScheduler, logprobs: int | None
) -> None:
    scheduler.script(silent)
    said = ids_of(" eight tokens come one by one")[:8]
    with SseClient(frontend) as client:
        client.post(prompt="x", stream_interval=3, return_token_ids=True, logprobs=logprobs)
        request, written = scheduler.request(), list[str]()
        for index, token in enumerate(said):
            scheduler.send(step(request, index, token) if logprobs else tokens(request.number, [token], index))
            if index in (0, 3, 6):
                written += events_of(client.read())
        scheduler.send(ended(request.number))
        *rest, done = events_of(client.read_all().body)[len(written) :]
    ids = [json.loads(event)["choices"][0]["token_ids"] for event in (*written, *rest)]
    assert (ids, done) == ([said[:1], said[1:4], said[4:7], said[7:]], "[DONE]")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("more", [{}, {"stop": "aX"}, {"logprobs": 1, "stream_options": USAGE}], ids=str)
def test_token_without_text_is_an_event(
    frontend: Frontend, scheduler: ScriptedScheduler, path: str, more: dict[str, object]
) -> None:
    """A special token, an incomplete character, or text that a stop string may begin with: clients measure the times
    of tokens by events."""
    scheduler.script(silent)
    special = TOKENIZER.encode("<|user|>", add_special_tokens=False)
    said = [*ids_of("a"), *special, *ids_of("😀"), *special]
    chat = {"messages": [{"role": "user", "content": "x"}], "logprobs": "logprobs" in more}
    body = {**more, **chat} if "chat" in path else {**more, "prompt": "x"}
    with SseClient(frontend) as client:
        client.post(path, **body)
        request, written = scheduler.request(), list[str]()
        for index, token in enumerate(said):
            scheduler.send(step(request, index, token))
            written += events_of(client.read())
        scheduler.send(ended(request.number))
        last = [json.loads(event) for event in events_of(client.read_all().body)[len(written) : -1]]
    found = [json.loads(event) for event in written[-len(said) :]]
    choices = [event["choices"][0] for event in found]
    parts = [choice["text"] if "text" in choice else choice["delta"]["content"] for choice in choices]
    first = "a" if "stop" not in more else ""
    assert parts == [first, "", *[""] * (len(said) - 4), "a😀".removeprefix(first), ""]
    assert [event["choices"][0].get("delta", {}) for event in last] == [{}]
    if more.keys() - {"stop"}:
        columns = [choice["logprobs"].get("tokens") or choice["logprobs"]["content"] for choice in choices]
        assert [len(column) for column in columns] == [1] * len(said)
        assert [event["usage"]["completion_tokens"] for event in found] == [*range(1, len(said) + 1)]


def test_http_1_0_client_reads_until_the_connection_ends(frontend: Frontend, scheduler: ScriptedScheduler) -> None:
    with SseClient(frontend, version="1.0") as client:
        client.post(prompt="x")
        number = begin(client, scheduler)
        for index, token in enumerate(said := ids_of(" a body without any chunks")):
            scheduler.send(tokens(number, [token], 1 + index))
            assert client.read().startswith(b"data: {")
        scheduler.send(ended(number))
        answer = client.read_all()
        assert client.socket.recv(1) == b""
    assert len(said) > 3
    assert texts(events_of(answer.body)) == {0: FIRST + " a body without any chunks"}


def test_requests_sent_at_once_are_answered_in_order(frontend: Frontend, scheduler: ScriptedScheduler) -> None:
    scheduler.script(lambda request: answering(f"answer {len(scheduler.requests)}")(request))
    data = json.dumps({"prompt": "x", "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n".encode()
    with SseClient(frontend) as client:
        client.socket.sendall((head + data) * 3)
        raw = b""
        while raw.count(b"[DONE]") < 3:
            part = client.socket.recv(1 << 16)
            assert part, raw
            raw += part
    answers = [re.findall(rb"^data: (.*)$", part, re.MULTILINE) for part in raw.split(b"HTTP/1.1 200")]
    said = [texts(event.decode() for event in events)[0] for events in answers[1:]]
    assert said == ["answer 1", "answer 2", "answer 3"]


CHOICES, STEPS = 4, 10
WRITE_PER_TOKEN = "from services.frontend.engine import streams; streams.MAX_TOKENS_PER_FLUSH = 1"


@pytest.mark.parametrize(("patch", "writes_per_step"), [("", 1), (WRITE_PER_TOKEN, CHOICES)])
def test_step_is_one_write_for_all_choices_of_a_connection(patch: str, writes_per_step: int) -> None:
    word = ids_of(" word")
    with scripted(patch) as (frontend, scheduler), SseClient(frontend) as client:
        client.post(prompt=["a", "b", "c", "d"])
        numbers = [scheduler.request(index).number for index in range(CHOICES)]
        for step in range(STEPS):
            rows = pack(numbers), pack([step] * CHOICES), pack(word * CHOICES)
            scheduler.send(RequestOutputs(*rows))
            found = []
            for _ in range(writes_per_step):
                found += events_of(client.read())
            indices = [json.loads(event)["choices"][0]["index"] for event in found]
            assert indices == [*range(CHOICES)], "each choice once, before the next step is sent"
        for number in numbers:
            scheduler.send(ended(number, FinishReason.LENGTH))
        answer = client.read_all()
        assert answer.is_complete
        assert texts(events_of(answer.body)) == dict.fromkeys(range(CHOICES), " word" * STEPS)
