"""Bodies of other dialects become chat bodies with the same sampling."""

from typing import Any

import pytest

from services.frontend.anthropic import conversation as anthropic
from services.frontend.anthropic.answers import complete_part
from services.frontend.anthropic.schemas import MessagesRequest
from services.frontend.openai.prompts.conversation import num_chars
from services.frontend.openai.schemas.requests import ChatRequest, SampledRequest
from services.frontend.responses_api import conversation as responses
from services.frontend.responses_api.schemas import ResponsesRequest

FIELDS: dict[str, Any] = {
    "stream": True, "temperature": 0.5, "top_p": 0.5, "top_k": 5, "min_p": 0.1, "seed": 7, "min_tokens": 2,
    "stop_token_ids": [3], "ignore_eos": True, "priority": 4, "cache_salt": "s", "presence_penalty": 0.5,
    "frequency_penalty": -0.5, "repetition_penalty": 1.5, "logit_bias": {"5": 1.0}, "bad_words": ["x"],
    "allowed_token_ids": [5, 6], "include_stop_str_in_output": True, "skip_special_tokens": False,
    "structured_outputs": {"regex": "[0-9]"},
}  # fmt: skip
UNUSED = {
    "verbosity", "prediction", "model", "request_id", "user", "safety_identifier", "prompt_cache_key",
    "prompt_cache_retention", "prompt_cache_options", "session_id", "metadata", "store", "service_tier",
}  # fmt: skip


def test_sampling_is_that_of_a_chat() -> None:
    assert set(SampledRequest.model_fields) == {*FIELDS, *UNUSED}  # a new field belongs into one of them
    message = MessagesRequest.model_validate(
        {"messages": [{"role": "user", "content": "x"}], "max_tokens": 5, **FIELDS}
    )
    item = ResponsesRequest.model_validate({"input": "x", **FIELDS})
    for chat in (anthropic.chat_request(message), responses.chat_request(item, [])):
        given = chat.model_dump(include=set(FIELDS), exclude_unset=True, by_alias=True)
        assert given == FIELDS


def test_messages_of_the_system_stay_where_they_are() -> None:
    turns = [
        {"role": "user", "content": "x"},
        {"role": "system", "content": [{"type": "text", "text": "Be"}, {"type": "text", "text": "brief."}]},
        {"role": "user", "content": "y"},
    ]
    chat = anthropic.chat_request(MessagesRequest.model_validate({"messages": turns, "max_tokens": 5}))
    assert [message.plain() for message in chat.messages] == [
        turns[0], {"role": "system", "content": "Bebrief."}, turns[2],
    ]  # fmt: skip


def test_thoughts_calls_and_their_results_are_those_of_a_chat() -> None:
    said = [
        *[{"type": "thinking", "thinking": thought, "signature": ""} for thought in "AB"],
        {"type": "redacted_thinking", "data": "x"},
        {"type": "text", "text": "Sure."},
        {"type": "tool_use", "id": "1", "name": "f", "input": {"a": 1}},
    ]
    results = [{"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": x} for x in "CD"]}]
    turns = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": said},
        {"role": "user", "content": results},
    ]
    body = {"messages": turns, "system": "S", "max_tokens": 5}
    calls = [{"id": "1", "function": {"name": "f", "arguments": '{"a":1}'}}]
    plain = [
        {"role": "system", "content": "S"},
        turns[0],
        {"role": "assistant", "content": "Sure.", "reasoning_content": "AB", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": x} for x in "CD"]},
    ]
    chats = (
        anthropic.chat_request(MessagesRequest.model_validate(body)),
        ChatRequest.model_validate({"messages": plain}),
    )
    ours, theirs = (chat.model_dump(include={"messages"}, exclude_unset=True) for chat in chats)
    assert ours == theirs


def test_items_are_the_messages_of_a_chat() -> None:
    """Items of one answer are one message, until text follows its calls."""
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": text} for text in ("Hi", "you")]},
        {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "S"}]},
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "T"}]},
        {
            "type": "message", "id": "msg_1", "role": "assistant", "status": "completed",
            "content": [{"type": "output_text", "text": "Wait", "annotations": [], "logprobs": []}],
        },
        *[{"type": "function_call", "call_id": id, "name": "f", "arguments": "{}"} for id in "12"],
        {"type": "function_call_output", "call_id": "1", "output": "2"},
        {"type": "function_call", "call_id": "3", "name": "f", "arguments": "{}"},
        {"role": "assistant", "content": "Done"},
    ]  # fmt: skip
    tool = {"name": "f", "description": "Adds.", "parameters": {"type": "object"}, "strict": False}
    body = {"input": items, "instructions": "I", "tools": [{"type": "function", **tool}], "tool_choice": "none"}
    said = [{"type": "text", "text": "Wait"}]
    first, second, third = ({"id": id, "function": {"name": "f", "arguments": "{}"}} for id in "123")
    plain = [
        {"role": "system", "content": "I"},
        {"role": "user", "content": [{"type": "text", "text": text} for text in ("Hi", "you")]},
        {"role": "assistant", "content": said, "reasoning_content": "ST", "tool_calls": [first, second]},
        {"role": "tool", "tool_call_id": "1", "content": "2"},
        {"role": "assistant", "content": "", "tool_calls": [third]},
        {"role": "assistant", "content": "Done"},
    ]
    given = {"messages": plain, "tools": [{"type": "function", "function": tool}], "tool_choice": "none"}
    chats = responses.chat_request(ResponsesRequest.model_validate(body), []), ChatRequest.model_validate(given)
    ours, theirs = (chat.model_dump(include=given.keys(), exclude_unset=True) for chat in chats)
    assert ours == theirs


@pytest.mark.parametrize("kind", ["json_schema", "json_object"])
def test_form_and_effort_are_those_of_a_chat(kind: str) -> None:
    schema = {"schema": {"type": "object"}} if kind == "json_schema" else {}
    format, effort = {"type": kind, **schema}, {"effort": "low"}
    item = {"input": "x", "text": {"format": {"name": "s", "strict": True, **format}}, "reasoning": effort}
    chats = [responses.chat_request(ResponsesRequest.model_validate(item), [])]
    for fields in ({"output_config": {"format": format, **effort}}, {"output_format": format, "output_config": effort}):
        message = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 5, "thinking": {"type": "disabled"}}
        if kind == "json_schema":
            chats.append(anthropic.chat_request(MessagesRequest.model_validate(message | fields)))
            assert chats[-1].chat_template_kwargs == {"enable_thinking": False}
    for chat in chats:
        assert chat.response_format is not None
        assert (chat.response_format.type, chat.reasoning_effort) == (kind, "low")
        given = chat.response_format.json_schema
        assert (given.schema_ if given is not None else None) == schema.get("schema")


def test_images_of_the_user_and_of_tools_are_those_of_a_chat() -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA"}}
    linked = {"type": "image", "source": {"type": "url", "url": "https://a/b.png"}}
    result = {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "See"}, linked]}
    turns = [{"role": "user", "content": [result, {"type": "text", "text": "x"}, image]}]
    chat = anthropic.chat_request(MessagesRequest.model_validate({"messages": turns, "max_tokens": 5}))
    tool, user = chat.messages
    assert (tool.plain()["content"], user.plain()["content"]) == ("See", "\nx\n")
    assert [file.url for file in user.files] == ["https://a/b.png", "data:image/png;base64,AA"]


def test_refusal_of_another_model_is_text() -> None:
    said = [{"type": "text", "text": "Sorry:"}, {"type": "refusal", "refusal": "I cannot."}]
    chat = ChatRequest.model_validate({"messages": [{"role": "assistant", "content": said}]})
    assert chat.messages[0].plain() == {"role": "assistant", "content": "Sorry:\nI cannot."}
    assert num_chars(chat) == len("Sorry:I cannot.")
    said = {"role": "assistant", "content": None, "refusal": "I cannot."}
    chat = ChatRequest.model_validate({"messages": [said]})
    assert chat.messages[0].plain() == {"role": "assistant", "content": "I cannot."}
    assert num_chars(chat) == len("I cannot.")


@pytest.mark.parametrize(
    ("arguments", "part"),
    [(b"", b"{}"), (b'{"a": [1, NaN], "b', b'{"a":[1,null]}'), (b'{"a": "\\ud83d", "b": 1', b"{}")],
)
def test_part_of_a_call_that_was_cut_off_is_valid_json(arguments: bytes, part: bytes) -> None:
    assert complete_part(arguments) == part
