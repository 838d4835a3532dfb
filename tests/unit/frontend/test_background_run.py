"""Room of responses in the background: their events count, and a response without room fails."""

import asyncio
from functools import partial
from typing import Any

import msgspec
import pytest

from protocol.requests import Finish
from services.frontend.engine.streams import FlushQueue, RawLogprobs, RequestStream, ResponseStream, Token
from services.frontend.errors import APIError
from services.frontend.openai.answers.tool_dialect import AnswerParser
from services.frontend.openai.answers.usage import UsageCounter
from services.frontend.openai.parameters.tool_choice import Mode, ToolChoice
from services.frontend.responses_api.answers import ResponseInProgress
from services.frontend.responses_api.background import (
    EVENT_OVERHEAD,
    MAX_EVENTS_PER_WRITE,
    BackgroundRun,
    MemoryLog,
)
from services.frontend.responses_api.schemas import InputMessage
from services.frontend.responses_api.store import ResponseStore

GIVEN = [InputMessage(role="user", content="Hi")]
NO_TOOLS = ToolChoice(Mode.NONE, frozenset(), None, None, None)


class Texts(RequestStream):
    """An open request of whose tokens each is one word."""

    def __init__(self, run: BackgroundRun, response: ResponseStream) -> None:
        super().__init__(response)
        self._run = run

    def say(self, num_words: int) -> None:
        self.tokens += [(0, 0)] * num_words
        self.response.mark_due(self)

    def feed(self, tokens: list[Token], end: Finish | None, now: float) -> bytes:
        return b"".join(self._run.encoder.text("word ") for _ in tokens)

    def add_logprobs(self, logprobs: RawLogprobs) -> None: ...

    def add_embedding(self, values: bytes) -> None: ...


def begun(store: ResponseStore, id: str) -> tuple[BackgroundRun, Texts]:
    head: Any = {"id": id, "background": True}
    parser = AnswerParser(None, NO_TOOLS, eager=True)
    log = MemoryLog(partial(store.grow, "", id))
    run = BackgroundRun(ResponseInProgress(head, parser, UsageCounter(), len), log)
    stream = ResponseStream(FlushQueue())
    run.start(stream)
    log.write(run.encoder.opening())
    store.begin("", id, run, [], GIVEN)
    return run, Texts(run, stream)


async def events_of(run: BackgroundRun, after: int = -1) -> list[Any]:
    data = b"".join([events async for events in run.behind(after)])
    return [msgspec.json.decode(event.split(b"\ndata: ")[1]) for event in data.split(b"\n\n")[:-1]]


async def test_oldest_responses_make_room_for_a_run_and_then_it_fails() -> None:
    store = ResponseStore(max_bytes=50_000)
    done: Any = {"id": "done", "output": []}
    store.add("", done, [], GIVEN)
    run, texts = begun(store, "run")
    finishing = asyncio.create_task(run.finish())
    events = asyncio.create_task(events_of(run))
    before = store.size
    texts.say(300)
    failure = await finishing
    assert failure is not None
    assert failure.message == "the store of responses is full"
    for id in ("done", "run"):
        with pytest.raises(APIError):
            store.get("", id)
    assert 0 == store.size < before
    *deltas, last = [event for event in await events if event["type"] != "response.in_progress"]
    assert [event["sequence_number"] for event in deltas[1:]] == list(range(2, 2 + len(deltas) - 1))
    assert last["type"] == "response.failed"
    assert last["response"] == msgspec.json.decode(run.response)


async def test_size_of_a_run_is_that_of_its_events_and_its_response() -> None:
    store = ResponseStore()
    run, texts = begun(store, "run")
    before = store.size
    finishing = asyncio.create_task(run.finish())
    texts.say(2 * MAX_EVENTS_PER_WRITE)
    assert b"word" in await anext(run.behind(1))
    run.fail(APIError(500, "it broke"))
    await finishing
    events = await events_of(run)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert len(events) > 2 * MAX_EVENTS_PER_WRITE
    assert await events_of(run, after=300) == events[301:]
    written = b"".join([event async for event in run.behind(1)])
    num_bytes = len(written) + EVENT_OVERHEAD * (len(events) - 2) + len(run.response)
    assert store.size - before == num_bytes
    store.delete("", "run")
    assert store.size == 0
