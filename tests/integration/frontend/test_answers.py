"""Answers through the official client; the scripted scheduler decides every token and its time."""

import asyncio
from itertools import cycle
from typing import Any

import httpx
import pytest
from msgspec.structs import replace

from protocol.codec import unpack
from protocol.requests import FinishReason, GenerateRequest, RequestOutputs, RequestTimes
from tests.integration.frontend.scripted import (
    TOKENIZER,
    Frontend,
    ScriptedScheduler,
    answering,
    ended,
    ids_of,
    one_by_one,
    tokens,
)
from tests.integration.frontend.streams import events
from tests.waiting import PATIENCE

TEXT = "Grüße, 世界! 👩‍👩‍👧 ok"


def test_completion_whole_and_streamed(frontend: Frontend, scheduler: ScriptedScheduler) -> None:
    def behave(request: GenerateRequest) -> list[RequestOutputs]:
        first, *others = one_by_one(request, ids_of(TEXT), num_cached_tokens=9)  # of an engine that it has moved to
        return [replace(first, cached={request.number: 2}), *others]

    scheduler.script(behave)
    with frontend.client() as client:
        whole = client.completions.create(model="demo", prompt="Hello there")
        assert (whole.choices[0].text, whole.choices[0].finish_reason) == (TEXT, "stop")
        asked, given = len(TOKENIZER.encode("Hello there")), len(ids_of(TEXT))
        assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (asked, given)
        assert whole.usage.prompt_tokens_details.cached_tokens == 2
        assert (whole.model, whole.object) == ("demo", "text_completion")
        *chunks, last = client.completions.create(
            model="demo", prompt="x", stream=True, stream_options={"include_usage": True}
        )
    assert "".join(chunk.choices[0].text for chunk in chunks) == TEXT
    assert not any("\ufffd" in chunk.choices[0].text for chunk in chunks)
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert (last.choices, last.usage.completion_tokens) == ([], given)
    assert {chunk.id for chunk in [*chunks, last]} == {last.id}


def test_chat_whole_and_streamed_and_its_answer_is_accepted_as_a_message(
    frontend: Frontend, scheduler: ScriptedScheduler
) -> None:
    scheduler.script(answering(TEXT, reason=FinishReason.LENGTH))
    messages = [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
    with frontend.client() as client:
        whole = client.chat.completions.create(model="alias", messages=messages).choices[0]
        assert (whole.message.content, whole.finish_reason) == (TEXT, "length")
        chunks = list(client.chat.completions.create(model="demo", messages=messages, stream=True))
        more = [*messages, whole.message, {"role": "user", "content": "And?"}]
        client.chat.completions.create(model="demo", messages=more)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == TEXT
    assert chunks[-1].choices[0].finish_reason == "length"
    prompt = TOKENIZER.decode(unpack(scheduler.request(2).token_ids).tolist(), show_special=True)
    assert prompt == f"<|bos|><|user|>Hi<|eos|><|assistant|>{TEXT}<|eos|><|user|>And?<|eos|><|assistant|>"


def test_stop_string_over_several_tokens_cuts_the_text_and_ends_the_request(
    frontend: Frontend, scheduler: ScriptedScheduler, stream: bool
) -> None:
    ids = ids_of("one STOP two")
    scheduler.script(
        lambda request: [
            replace(tokens(request.number, [token], i), cached={request.number: 1}) for i, token in enumerate(ids)
        ]
    )
    body = {"prompt": "x", "stop": ["never", "STOP"], "stream": stream}
    response = frontend.post("/v1/completions/", body)  # with the slash that some clients add
    choices = [event["choices"][0] for event in events(response)] if stream else response.json()["choices"]
    assert "".join(choice["text"] for choice in choices) == "one "
    assert (choices[-1]["finish_reason"], choices[-1]["stop_reason"]) == ("stop", "STOP")
    scheduler.wait_aborted(scheduler.request().number)
    if not stream:
        usage = response.json()["usage"]
        assert usage["completion_tokens"] == next(n for n in range(9) if "STOP" in TOKENIZER.decode(ids[:n]))
        assert usage["prompt_tokens_details"] == {"cached_tokens": 1}


def test_a_choice_that_a_stop_string_ends_is_aborted_while_another_goes_on(
    frontend: Frontend, scheduler: ScriptedScheduler
) -> None:
    scheduler.script(lambda request: [] if scheduler.requests[1:] else [tokens(request.number, ids_of("one STOP"))])
    body = {"prompt": "x", "stop": "STOP", "n": 2, "stream": True}
    with httpx.stream("POST", frontend.url + "/v1/completions", json=body, timeout=PATIENCE):
        second = scheduler.request(1).number
        scheduler.wait_aborted(scheduler.request(0).number)
        assert second not in scheduler.aborted
        scheduler.send(ended(second))


def test_beginning_of_a_stop_string_is_shown_when_the_answer_ends_with_it(
    frontend: Frontend, scheduler: ScriptedScheduler
) -> None:
    scheduler.script(answering("so it ST"))
    choice = frontend.post("/v1/completions", {"prompt": "x", "stop": "STOP"}).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("so it ST", "stop", None)


def test_stop_string_before_min_tokens_is_text(frontend: Frontend, scheduler: ScriptedScheduler) -> None:
    ids = ids_of("a.b.c.d")
    scheduler.script(lambda request: one_by_one(request, ids))
    body = {"prompt": "x", "stop": ".", "min_tokens": ids.index(ids_of("b")[0])}
    assert frontend.post("/v1/completions", body).json()["choices"][0]["text"] == "a.b"


def test_tokens_of_one_step_are_one_event(frontend: Frontend, scheduler: ScriptedScheduler) -> None:
    scheduler.script(lambda request: [tokens(request.number, ids_of("a b c d e")), ended(request.number)])
    texts = [e["choices"][0]["text"] for e in events(frontend.post("/v1/completions", {"prompt": "x", "stream": True}))]
    assert "".join(texts) == "a b c d e"
    assert len([text for text in texts if text]) == 1


def test_token_delivered_twice_is_shown_once_and_counted(frontend: Frontend, scheduler: ScriptedScheduler) -> None:
    before = frontend.metric("duplicate_tokens_dropped_total")
    a, b = ids_of("a"), ids_of("b")
    scheduler.script(
        lambda r: [tokens(r.number, a), tokens(r.number, a), tokens(r.number, b, first=1), ended(r.number)]
    )
    assert frontend.post("/v1/completions", {"prompt": "x"}).json()["choices"][0]["text"] == "ab"
    assert frontend.metric("duplicate_tokens_dropped_total") == before + 1


async def test_many_streams_at_once_keep_their_tokens_apart(frontend: Frontend, scheduler: ScriptedScheduler) -> None:
    def echo(request: GenerateRequest) -> list[RequestOutputs]:
        return one_by_one(request, unpack(request.token_ids).tolist()[1:])  # without BOS

    scheduler.script(echo)

    async with frontend.async_client() as client:

        async def one(number: int) -> str:
            stream = await client.completions.create(model="demo", prompt=f"stream {number} 世界", stream=True)
            return "".join([chunk.choices[0].text async for chunk in stream])

        texts = await asyncio.gather(*map(one, range(64)))
    assert texts == [f"stream {number} 世界" for number in range(64)]


FAMILIES = (
    "time_to_first_token_seconds_count", "inter_token_latency_seconds_count", "e2e_request_latency_seconds_count",
    "request_time_per_output_token_seconds_count", "request_queue_time_seconds_sum",
    "request_inference_time_seconds_sum", "request_prefill_time_seconds_sum", "request_decode_time_seconds_sum",
    "request_prompt_tokens_sum", "request_generation_tokens_sum", "request_max_num_generation_tokens_sum",
    "request_params_n_sum", "request_params_max_tokens_sum", "request_num_preemptions_sum",
    "request_prefill_kv_computed_tokens_sum", "request_success_total", "prompt_tokens_cached_total",
    "prompt_tokens_by_source_total",
)  # fmt: skip


def test_numbers_of_a_request_are_in_the_histograms(frontend: Frontend, scheduler: ScriptedScheduler) -> None:
    times = RequestTimes(10.0, 11.0, 13.0, 17.0)
    texts = cycle(("a b c", "a b"))
    end: dict[str, Any] = {"num_cached_tokens": 1, "num_preemptions": 2, "times": times}
    scheduler.script(lambda request: answering(next(texts), **end)(request))
    done = frontend.metric("requests_total", outcome="completed", code="200")
    for prefix in ("runahead", "vllm"):
        before = {name: frontend.metric(name, prefix) for name in FAMILIES}
        frontend.post("/v1/completions", {"prompt": [5, 6, 7], "max_tokens": 9, "n": 2})
        rise = {name: frontend.metric(name, prefix) - before[name] for name in FAMILIES}
        longest = len(ids_of("a b c"))
        said = longest + len(ids_of("a b"))
        assert rise == pytest.approx(dict(zip(FAMILIES, (
            2, said - 2, 2, 2, 2 * 1.0, 2 * 6.0, 2 * 2.0, 2 * 4.0, 2 * 3, said, longest, 2, 2 * 9, 2 * 2,
            2 * 2, 2, 2 * 1, 2 * 3,
        ), strict=True)))  # fmt: skip
    assert frontend.metric("requests_total", outcome="completed", code="200") == done + 2


def test_choice_that_a_stop_string_ends_counts_without_the_engine(
    frontend: Frontend, scheduler: ScriptedScheduler
) -> None:
    said = ids_of("one STOP two")
    scheduler.script(lambda request: [replace(tokens(request.number, said), cached={request.number: 1})])
    names = ("request_generation_tokens_count", "request_queue_time_seconds_count", "prompt_tokens_cached_total")
    before = [frontend.metric(name) for name in names]
    frontend.post("/v1/completions", {"prompt": "x", "stop": "STOP"})
    assert [frontend.metric(name) for name in names] == [before[0] + 1, before[1], before[2] + 1]
