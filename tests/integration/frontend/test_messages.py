"""/v1/messages and /v1/messages/count_tokens: Anthropic's dialect."""

import json
import re
from typing import Any

import httpx
import pytest
from pydantic_core import from_json

from protocol.codec import unpack
from protocol.requests import FinishReason
from protocol.sampling import GrammarKind
from services.frontend.anthropic.schemas import MessageResponse
from tests.integration.frontend.declared import strict
from tests.integration.frontend.scripted import (
    Frontend,
    ScriptedScheduler,
    answering,
    ended,
    ids_of,
    prompt_of,
    scripted,
)

PATH, COUNT = "/v1/messages", "/v1/messages/count_tokens"
USER = {"role": "user", "content": "Hi"}
TOOL = {
    "name": "add",
    "description": "Adds.",
    "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
}


def body(**fields: object) -> dict[str, object]:
    return {"model": "demo", "max_tokens": 64, "messages": [USER], **fields}


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    """Return the data of all events. Checks that each names its type."""
    assert response.headers["content-type"].startswith("text/event-stream")
    *events, nothing = response.text.split("\n\n")
    assert nothing == ""
    found = []
    for event in events:
        kind, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert kind == f"event: {found[-1]['type']}"
    return found


def joined(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the whole message, as the official client accumulates it. Checks the order of events."""
    first, *others = events
    assert first["type"] == "message_start"
    message, is_open = first["message"], False
    blocks = message["content"]
    for event in others:
        if event["type"].startswith("content_block"):
            assert is_open is (event["type"] != "content_block_start")
            is_open = event["type"] != "content_block_stop"
            assert event["index"] == len(blocks) - (event["type"] != "content_block_start")
        match event["type"]:
            case "content_block_start":
                blocks.append(event["content_block"])
                if blocks[-1]["type"] == "tool_use":
                    blocks[-1]["input"] = ""
            case "content_block_delta":
                (field,) = event["delta"].keys() - {"type"}
                blocks[-1]["input" if field == "partial_json" else field] += event["delta"][field]
            case "message_delta":
                message |= event["delta"]
                message["usage"] |= event["usage"]
    assert not is_open
    assert [event["type"] for event in others[-2:]] == ["message_delta", "message_stop"]
    for block in blocks:
        if block["type"] == "tool_use":
            block["input"] = from_json(block["input"] or "{}", allow_partial=True)
    return message


def answer_of(frontend: Frontend, stream: bool, **fields: object) -> dict[str, Any]:
    response = frontend.post(PATH, body(stream=stream, **fields))
    assert response.status_code == 200, response.text
    answer = joined(events_of(response)) if stream else response.json()
    strict(MessageResponse).validate(answer)
    return answer


def test_answer(frontend: Frontend, scheduler: ScriptedScheduler, stream: bool) -> None:
    scheduler.script(answering("Grüße, 世界", num_cached_tokens=2))
    answer = answer_of(frontend, stream, system="Be brief.", temperature=0.5, top_k=3, top_p=0.9)
    request = scheduler.request()
    num_prompt = len(unpack(request.token_ids))
    assert answer.pop("id").startswith("msg_")
    assert answer == {
        "type": "message", "role": "assistant", "model": "demo", "stop_reason": "end_turn", "stop_sequence": None,
        "content": [{"type": "text", "text": "Grüße, 世界"}],
        "usage": {
            "input_tokens": num_prompt - 2, "output_tokens": len(ids_of("Grüße, 世界")),
            "cache_creation_input_tokens": 0, "cache_read_input_tokens": 2,
        },
    }  # fmt: skip
    params = request.params
    assert (params.max_tokens, params.temperature, params.top_k, params.top_p) == (64, 0.5, 3, 0.9)
    assert "Be brief." in prompt_of(request)


@pytest.mark.parametrize(
    ("reason", "fields", "expected"),
    [
        (FinishReason.LENGTH, {}, ("max_tokens", None)),
        (FinishReason.STOP, {"stop_sequences": ["two"]}, ("stop_sequence", "two")),
    ],
)
def test_reason_of_the_end(
    frontend: Frontend,
    scheduler: ScriptedScheduler,
    stream: bool,
    reason: FinishReason,
    fields: dict[str, object],
    expected: tuple[str, str | None],
) -> None:
    scheduler.script(answering("one two", reason=reason))
    answer = answer_of(frontend, stream, **fields)
    assert (answer["stop_reason"], answer["stop_sequence"]) == expected


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "add"}])
def test_required_tool_is_called(
    frontend: Frontend, scheduler: ScriptedScheduler, stream: bool, choice: dict[str, object]
) -> None:
    said = '{"a": 1}' if choice["type"] == "tool" else '[{"name": "add", "parameters": {"a": 1}}]'
    scheduler.script(answering(said))
    answer = answer_of(frontend, stream, tools=[TOOL], tool_choice=choice)
    (call,) = answer["content"]
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "add", {"a": 1})
    assert answer["stop_reason"] == "tool_use"
    structured = scheduler.request().structured
    assert structured.kind is GrammarKind.JSON
    opening = said.partition('{"a": 1}')[0]
    for arguments, arrived in (("{", {}), ('{"a": 1, "b": [true, {"c": "d', {"a": 1, "b": [True, {}]})):
        scheduler.script(answering(opening + arguments, reason=FinishReason.LENGTH))
        answer = answer_of(frontend, stream, tools=[TOOL], tool_choice=choice)
        assert [(block["name"], block["input"]) for block in answer["content"]] == [("add", arrived)]
        assert answer["stop_reason"] == "max_tokens"


def test_reasoning_text_and_call_are_blocks_of_their_own() -> None:
    said = 'Hm.</think>Sure.<tool_call>{"name": "add", "arguments": {"a": 1, "b": "\\ud800"}}</tool_call>'
    formats = {"reasoning_parser": "deepseek_r1", "tool_call_parser": "hermes", "enable_auto_tool_choice": True}
    with scripted(served_model_name=["demo"], **formats) as (frontend, scheduler):
        scheduler.script(answering(said))
        for stream in (False, True):
            thinking = {"type": "enabled", "budget_tokens": 1024}
            kept = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
            answer = answer_of(frontend, stream, tools=[TOOL], thinking=thinking, context_management=kept)
            thought, text, call = answer["content"]
            assert thought == {"type": "thinking", "thinking": "Hm.", "signature": ""}
            assert text == {"type": "text", "text": "Sure."}
            assert (call["name"], call["input"]) == ("add", {"a": 1, "b": "\ufffd"})
            assert answer["stop_reason"] == "tool_use"
            plain = answer_of(frontend, stream, tools=[TOOL], tool_choice={"type": "none"})
            assert [block["type"] for block in plain["content"]] == ["thinking", "text"]


def test_conversation_with_blocks_is_that_of_a_chat(frontend: Frontend, scheduler: ScriptedScheduler) -> None:
    scheduler.script(answering("x"))
    said = [{"type": "text", "text": "Hi", "cache_control": {"type": "x"}}, {"type": "text", "text": "you"}]
    answered = [{"type": "text", "text": "Hello"}]
    begun = [{"role": "user", "content": said}, USER, {"role": "assistant", "content": answered}]
    attribution = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2; cch=12345;"}
    system = [attribution, {"type": "text", "text": "S"}, {"type": "text", "text": "T"}]
    conversation = {"messages": [*begun, USER], "system": system}
    response = frontend.post(PATH, body(**conversation))
    assert response.headers["x-ignored-parameters"] == "messages.content.cache_control"
    plain = [
        {"role": "system", "content": "ST"},
        {"role": "user", "content": [{"type": "text", "text": text} for text in ("Hi", "you", "Hi")]},
        {"role": "assistant", "content": "Hello"},
        USER,
    ]
    frontend.post("/v1/chat/completions", {"messages": plain})
    assert scheduler.request(0).token_ids == scheduler.request(1).token_ids
    counted = frontend.post(COUNT, {"model": "demo", **conversation})
    assert counted.json() == {"input_tokens": len(unpack(scheduler.request(0).token_ids))}


def test_message_of_the_assistant_is_continued(frontend: Frontend, scheduler: ScriptedScheduler) -> None:
    scheduler.script(answering(" there"))
    answer = answer_of(frontend, False, messages=[USER, {"role": "assistant", "content": "Hello"}])
    assert answer["content"] == [{"type": "text", "text": " there"}]
    assert prompt_of(scheduler.request()) == "<|bos|><|user|>Hi<|eos|><|assistant|>Hello"
    answer_of(frontend, False, messages=[USER, {"role": "assistant", "content": []}])
    assert prompt_of(scheduler.request(1)) == "<|bos|><|user|>Hi<|eos|><|assistant|>"


FORMAT = {"type": "json_schema", "schema": {"type": "object"}}
BAD: list[dict[str, object]] = [
    {"max_tokens": None},
    {"messages": []},
    {"messages": [{"role": "developer", "content": "x"}]},
    {"messages": [{"role": "system", "content": [{"type": "thinking", "thinking": "x"}]}]},
    {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
    {"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}]}]},
    {"messages": [{"role": "user", "content": []}]},
    {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}]}]},
    {"temperature": 3},
    {"thinking": {"type": "enabled", "budget_tokens": 1023}},
    {"tool_choice": {"type": "any"}},
    {"tool_choice": {"type": "tool"}, "tools": [TOOL]},
    {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
    {"container": "x"},
    {"mcp_servers": [{}]},
    {"context_management": {}},
    {"thread": {"type": "create"}},
    {"compaction": {"type": "summarize"}},
    {"output_config": {"format": {"type": "text"}}},
    {"output_format": FORMAT, "output_config": {"format": FORMAT}},
    {"output_config": {"format": FORMAT}, "ignore_eos": True},
    {"stop_sequences": "x"},
    {"best_of": 2},
    {"logit_bias": {"-1": 1}},
]


@pytest.mark.parametrize("fields", BAD, ids=[f"{i}-{next(iter(row))}" for i, row in enumerate(BAD)])
def test_bad_field_is_refused_in_the_dialect(
    frontend: Frontend, scheduler: ScriptedScheduler, fields: dict[str, object]
) -> None:
    response = frontend.post(PATH, body(**fields))
    assert response.status_code == 400, response.text
    error = response.json()
    assert set(error) == {"type", "error", "request_id"}
    assert (error["type"], error["error"]["type"]) == ("error", "invalid_request_error")
    assert next(iter(fields)) in error["error"]["message"]
    details = error["error"].get("details", {})  # by which Anthropic's client knows that it must send all messages
    assert (details.get("error_code") == "thread_unsupported_request") == ("thread" in fields)
    assert scheduler.requests == []


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"messages": [{"role": "user", "content": "Hi " * 3000}]}, r"prompt is too long: \d+ tokens > 2047 maximum"),
        ({"max_tokens": 4096}, r"input length and `max_tokens` exceed context limit: \d+ \+ 4096 > 2048, decrease .*"),
    ],
)
def test_clients_know_by_anthropics_words_that_the_context_is_too_short(
    frontend: Frontend, fields: dict[str, object], words: str
) -> None:
    response = frontend.post(PATH, body(**fields))
    error = response.json()
    assert (response.status_code, error["request_id"]) == (400, response.headers["request-id"])
    assert re.fullmatch(words, error["error"]["message"])


@pytest.mark.parametrize(
    ("reason", "status", "kind"),
    [
        (FinishReason.REJECTED, 429, "rate_limit_error"),
        (FinishReason.ERROR, 500, "api_error"),
        (FinishReason.ABORT, 503, "overloaded_error"),
    ],
)
def test_failures_have_the_dialect(
    frontend: Frontend, scheduler: ScriptedScheduler, reason: FinishReason, status: int, kind: str
) -> None:
    scheduler.script(lambda request: [ended(request.number, reason, message="because")])
    response = frontend.post(PATH, body(stream=True))
    assert (response.status_code, response.json()["error"]) == (status, {"type": kind, "message": "because"})
    unknown = frontend.post(PATH, body(model="claude"))
    assert (unknown.status_code, unknown.json()["error"]["type"]) == (404, "not_found_error")
    assert httpx.get(frontend.url + PATH).json()["type"] == "error"
