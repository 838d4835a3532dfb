"""/v1/responses, mostly by the official client, whose types check every answer."""

from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import Response

from protocol.codec import unpack
from protocol.requests import FinishReason
from protocol.sampling import GrammarKind
from services.frontend.responses_api.responses import InputItemList, ResponseObject
from tests.integration.frontend.declared import strict
from tests.integration.frontend.scripted import Frontend, ScriptedScheduler, answering, ids_of, prompt_of, scripted

PATH = "/v1/responses"
TOOL: Any = {
    "type": "function",
    "name": "add",
    "description": "Adds.",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    "strict": False,
}
ADD = {"type": "function", "name": "add"}
REASONING = {"reasoning_parser": "deepseek_r1", "tool_call_parser": "hermes", "enable_auto_tool_choice": True}


def answer_of(frontend: Frontend, stream: bool, **fields: Any) -> Response:
    """Return an answer, which the client joins from a stream's events. Checks their numbers."""
    responses = frontend.client().responses
    if not stream:
        return responses.create(model="demo", **{"input": "Hi", **fields})
    events = list(responses.create(model="demo", stream=True, **{"input": "Hi", **fields}))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    last = events[-1]
    assert last.type in ("response.completed", "response.incomplete")
    grown: list[str] = []
    for event in events:
        match event.type:
            case "response.output_item.added":
                assert event.output_index == len(grown)
                grown.append("")
            case (
                "response.output_text.delta"
                | "response.reasoning_text.delta"
                | "response.function_call_arguments.delta"
            ):
                assert event.output_index == len(grown) - 1
                grown[-1] += event.delta
    assert grown == [text_of(item) for item in last.response.output]
    return last.response


def text_of(item: Any) -> str:
    return item.arguments if item.type == "function_call" else "".join(part.text for part in item.content)


def test_answer(frontend: Frontend, scheduler: ScriptedScheduler, stream: bool) -> None:
    scheduler.script(answering("Grüße, 世界", num_cached_tokens=2))
    answer = answer_of(frontend, stream, instructions="Be brief.", temperature=0.5, top_p=0.9, max_output_tokens=64)
    Response.model_validate(answer.model_dump(), strict=True)
    request = scheduler.request()
    assert (answer.status, answer.output_text, answer.id[:5]) == ("completed", "Grüße, 世界", "resp_")
    assert answer.usage.input_tokens == len(unpack(request.token_ids))
    assert answer.usage.input_tokens_details.cached_tokens == 2
    assert answer.usage.output_tokens == len(ids_of("Grüße, 世界"))
    params = request.params
    assert (params.max_tokens, params.temperature, params.top_p) == (64, 0.5, 0.9)
    assert prompt_of(request).startswith("<|bos|><|system|>Be brief.")


def test_answer_and_its_input_have_the_declared_fields(frontend: Frontend, scheduler: ScriptedScheduler) -> None:
    scheduler.script(answering("Grüße"))
    answer = frontend.post(PATH, {"input": "Hi", "reasoning": {"effort": "low"}}).json()
    strict(ResponseObject).validate(answer)
    url = f"{frontend.url}{PATH}"
    assert httpx.get(f"{url}/{answer['id']}").json() == answer
    strict(InputItemList).validate(httpx.get(f"{url}/{answer['id']}/input_items").json())
    assert httpx.get(f"{url}/{'x' * 513}").status_code == 400


def test_answer_that_the_length_limit_cut_off_is_incomplete(
    frontend: Frontend, scheduler: ScriptedScheduler, stream: bool
) -> None:
    scheduler.script(answering("one two", reason=FinishReason.LENGTH))
    answer = answer_of(frontend, stream)
    assert (answer.status, answer.output[0].status) == ("incomplete", "incomplete")
    assert answer.incomplete_details.reason == "max_output_tokens"


def test_empty_answer_is_an_empty_message(frontend: Frontend, scheduler: ScriptedScheduler, stream: bool) -> None:
    scheduler.script(answering(""))
    answer = answer_of(frontend, stream)
    assert (len(answer.output), answer.output_text) == (1, "")


@pytest.mark.parametrize("choice", ["required", ADD, {"type": "allowed_tools", "mode": "required", "tools": [ADD]}])
def test_required_tool_is_called(frontend: Frontend, scheduler: ScriptedScheduler, stream: bool, choice: Any) -> None:
    said = '{"a": 1}' if choice == ADD else '[{"name": "add", "parameters": {"a": 1}}]'
    scheduler.script(answering(said))
    tools = [TOOL, {**TOOL, "name": "subtract"}] if "tools" in choice else [TOOL]
    answer = answer_of(frontend, stream, tools=tools, tool_choice=choice)
    assert answer.to_dict()["tool_choice"] == choice
    (call,) = answer.output
    assert call.type == "function_call"
    assert (call.name, call.arguments, call.status) == ("add", '{"a": 1}', "completed")
    structured = scheduler.request().structured
    assert structured.kind is GrammarKind.JSON
    assert "subtract" not in structured.text


def test_reasoning_text_and_calls_are_items() -> None:
    call = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    with scripted(served_model_name=["demo"], **REASONING) as (frontend, scheduler):
        scheduler.script(answering(f"Hm.</think>Sure.{call}{call}"))
        for stream in (False, True):
            answer = answer_of(frontend, stream, tools=[TOOL], reasoning={"effort": "low"})
            assert [item.type for item in answer.output] == ["reasoning", "message", "function_call", "function_call"]
            assert [text_of(item) for item in answer.output] == ["Hm.", "Sure.", '{"a": 1}', '{"a": 1}']
            assert len({item.id for item in answer.output}) == 4
            assert answer.usage.output_tokens_details.reasoning_tokens == len(ids_of("Hm."))


def test_stored_response_is_continued(frontend: Frontend, scheduler: ScriptedScheduler, stream: bool) -> None:
    scheduler.script(answering("Hello"))
    responses = frontend.client().responses
    first = answer_of(frontend, stream, instructions="Only for this turn.")
    second = answer_of(frontend, stream, input="And you?", previous_response_id=first.id)
    assert second.previous_response_id == first.id
    third = answer_of(frontend, stream, input="Why?", previous_response_id=second.id)
    assert prompt_of(scheduler.request(2)) == (
        "<|bos|><|user|>Hi<|eos|><|assistant|>Hello<|eos|><|user|>And you?<|eos|><|assistant|>Hello<|eos|>"
        "<|user|>Why?<|eos|><|assistant|>"
    )
    assert responses.retrieve(third.id).output_text == "Hello"
    (item,) = responses.input_items.list(third.id).data
    assert item.type == "message"
    assert item.content[0].to_dict() == {"type": "input_text", "text": "Why?"}
    responses.delete(third.id)
    with pytest.raises(openai.NotFoundError):
        responses.retrieve(third.id)


def test_input_tokens_are_those_of_the_response(frontend: Frontend, scheduler: ScriptedScheduler) -> None:
    scheduler.script(answering("Hello"))
    fields: Any = {"instructions": "Be brief.", "tools": [TOOL], "tool_choice": "required"}
    first = answer_of(frontend, False, **fields)
    fields |= {"input": "And you?", "previous_response_id": first.id}
    counted = frontend.client().responses.input_tokens.count(model="demo", **fields)
    assert counted.object == "response.input_tokens"
    assert len(scheduler.requests) == 1
    assert counted.input_tokens == answer_of(frontend, False, **fields).usage.input_tokens
    image = [{"role": "user", "content": [{"type": "input_image", "image_url": "data:image/png;base64,AAAA"}]}]
    unknown: Any = {"previous_response_id": "resp_0", "model": "nobody"}
    invalid: Any = {"input": image, "tool_choice": "required", "background": True}
    for param, wrong in (unknown | invalid).items():
        body = {"store": False, param: wrong}
        with pytest.raises(openai.APIStatusError) as refused:
            frontend.client().responses.input_tokens.count(model="demo", input="x", extra_body=body)
        assert (refused.value.param, refused.value.status_code) == (param, 400 if param in invalid else 404)


def test_pages_of_input_items(frontend: Frontend, scheduler: ScriptedScheduler) -> None:
    scheduler.script(answering("Hello"))
    texts = [str(number) for number in range(45)]
    # Ids of the client are not kept: pages are found by ids that differ
    items: Any = [{"type": "message", "role": "user", "content": text, "id": "m"} for text in texts]
    id, input_items = answer_of(frontend, False, input=items).id, frontend.client().responses.input_items
    page: Any = input_items.list(id)
    assert [item.content[0].text for item in page.data] == texts[:-21:-1]
    assert [item.content[0].text for item in page] == texts[::-1]
    oldest: Any = input_items.list(id, order="asc", limit=7)
    assert [item.content[0].text for item in oldest.data] == texts[:7]
    assert [item.content[0].text for item in oldest] == texts
    with pytest.raises(openai.BadRequestError, match="no such item"):
        input_items.list(id, after="m")


def test_response_that_is_not_stored_is_not_found(
    frontend: Frontend, scheduler: ScriptedScheduler, stream: bool
) -> None:
    scheduler.script(answering("Hello"))
    first = answer_of(frontend, stream, store=False)
    with pytest.raises(openai.NotFoundError) as refused:
        answer_of(frontend, False, previous_response_id=first.id)
    assert (refused.value.code, refused.value.param) == ("previous_response_not_found", "previous_response_id")
    assert len(scheduler.requests) == 1


def test_the_store_can_be_off() -> None:
    with scripted(served_model_name=["demo"], response_store=False) as (frontend, scheduler):
        scheduler.script(answering("Hello"))
        answer = answer_of(frontend, False)
        with pytest.raises(openai.NotFoundError, match="no-response-store"):
            frontend.client().responses.retrieve(answer.id)


BAD: list[dict[str, Any]] = [
    {"input": []},
    {"input": [{"type": "item_reference", "id": "x"}]},
    {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "x"}]}]},
    {"input": [{"type": "message", "role": "tool", "content": "x"}]},
    {"structured_outputs": {"regex": "a"}, "text": {"format": {"type": "json_object"}}},
    {"guided_json": {}},
    {"tools": [{"type": "web_search"}]},
    {"tools": [TOOL, {"type": "mcp", "server_label": "x"}]},
    {"tool_choice": "required"},
    {"tool_choice": {"type": "function", "name": "other"}, "tools": [TOOL]},
    {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{**ADD, "name": "other"}]}, "tools": [TOOL]},
    {"background": True, "store": False},
    {"truncation": "auto"},
    {"top_logprobs": 2},
    {"conversation": "c"},
    {"include": ["message.output_text.logprobs"]},
    {"temperature": 3},
    {"max_output_tokens": 0},
    {"text": {"format": {"type": "grammar"}}},
    {"input": "word " * 5000},
    {"max_output_tokens": 5000},
    {"text": {"format": {"type": "json_schema"}}},
    {"text": {"format": {"type": "json_object"}}, "ignore_eos": True},
]


@pytest.mark.parametrize("fields", BAD, ids=[f"{i}-{next(iter(row))}" for i, row in enumerate(BAD)])
def test_bad_field_is_refused(frontend: Frontend, scheduler: ScriptedScheduler, fields: dict[str, Any]) -> None:
    response = frontend.post(PATH, {"model": "demo", "input": "Hi", **fields})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert (error["param"], "response_format" in error["message"]) == (next(iter(fields)), False)
    assert all(".type: " in error["message"] for tool in fields.get("tools", ()) if tool["type"] != "function")
    assert ("file_id" in str(fields)) == ("file_id: this field is not supported here" in error["message"])
    assert scheduler.requests == []


def test_unknown_fields_are_named(frontend: Frontend, scheduler: ScriptedScheduler) -> None:
    scheduler.script(answering("x"))
    item = {"role": "user", "content": [{"type": "input_text", "text": "Hi", "mark": 1}], "colour": 1}
    response = frontend.post(PATH, {"input": [item], "speed": 1})
    assert response.headers["x-ignored-parameters"] == "speed, input.colour, input.content.mark"
