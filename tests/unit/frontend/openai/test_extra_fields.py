"""Fields of a body that are not served: known ones are refused by name, unknown ones are ignored or refused."""

import logging
from typing import Any

import pytest
from pydantic import ValidationError

from services.frontend.anthropic.schemas import CountTokensRequest, MessagesRequest
from services.frontend.errors import APIError
from services.frontend.openai.parameters.body import MAX_NAMED, BodyParser, UnknownFieldMode
from services.frontend.openai.schemas.open_object import OpenObject
from services.frontend.openai.schemas.requests import ChatRequest, CompletionRequest, EmbeddingRequest, TextsRequest
from services.frontend.openai.scores import RerankRequest, ScoreRequest
from services.frontend.responses_api.schemas import ResponsesRequest

ROUTER = {
    "no_stop_trim": False, "skip_special_tokens": True, "separate_reasoning": True, "stream_reasoning": True,
    "return_hidden_states": False, "ignore_eos": False, "continue_final_message": False, "logprobs": False,
}  # fmt: skip
"""Fields that sglang-router adds to each chat request."""


def completion(**fields: Any) -> CompletionRequest:
    return CompletionRequest.model_validate({"prompt": "x", **fields})


def chat(*messages: dict[str, Any], **fields: Any) -> ChatRequest:
    return ChatRequest.model_validate({"messages": list(messages) or [{"role": "user", "content": "x"}], **fields})


def ignored(body: OpenObject, mode: UnknownFieldMode = "warn") -> list[str]:
    return BodyParser(mode).check(body, "r-1")


def test_fields_of_a_router_are_ignored_and_named(caplog: pytest.LogCaptureFixture) -> None:
    rule = BodyParser("warn")
    with caplog.at_level(logging.WARNING, "runahead.frontend"):
        for _ in range(3):
            names = rule.check(chat(**ROUTER), "r-1")
    assert names == ["no_stop_trim", "separate_reasoning", "stream_reasoning", "return_hidden_states"]
    (line,) = caplog.messages
    assert "request_id=r-1" in line
    assert all(name in line for name in names)


def test_names_of_messages_parts_and_calls_are_listed_once() -> None:
    call = {"function": {"name": "f", "arguments": "{}", "b": 1}, "c": 2}
    message = {
        "role": "assistant", "content": [{"type": "text", "text": "x", "cache_control": {}}], "tool_calls": [call],
        "colour": "red",
    }  # fmt: skip
    assert ignored(chat(message, message)) == [
        "messages.colour", "messages.content.cache_control", "messages.tool_calls.c", "messages.tool_calls.function.b",
    ]  # fmt: skip


def test_names_within_tools_and_options_are_listed() -> None:
    function = {"name": "f", "returns": {}}
    tool = {"type": "function", "function": function, "cache_control": {}}
    body = chat(tools=[tool, tool], stream=True, stream_options={"include_usage": True, "include_cost": True})
    assert ignored(body) == ["stream_options.include_cost", "tools.cache_control", "tools.function.returns"]
    assert body.tools[0].plain() == {"type": "function", "function": {"name": "f"}}


def test_names_within_some_items_of_a_list_are_listed() -> None:
    body = RerankRequest.model_validate({"query": "x", "documents": ["x", {"text": "x", "title": "y"}]})
    assert ignored(body) == ["documents.title"]


def test_unknown_field_of_a_constraint_is_refused() -> None:
    for format in ({"type": "json_object", "schema": {}}, {"type": "json_schema", "json_schema": {"rules": 1}}):
        with pytest.raises(ValidationError, match="Extra inputs are not permitted"):
            chat(response_format=format)


def test_header_lists_few_harmless_names(caplog: pytest.LogCaptureFixture) -> None:
    hostile = {"a\r\nset-cookie: x": 1, "": 1, "x" * 65: 1, "é": 1}
    with caplog.at_level(logging.WARNING, "runahead.frontend"):
        names = ignored(completion(**hostile, **{f"field{i}": i for i in range(40)}))
    assert names == [f"field{i}" for i in range(MAX_NAMED)]
    (line,) = caplog.messages
    assert "28 more" in line
    assert "cookie" not in line


def test_modes(caplog: pytest.LogCaptureFixture) -> None:
    assert ignored(completion(nonsense=1), "ignore") == ignored(completion(nonsense=None), "refuse") == []
    assert caplog.messages == []
    for body, name, param in (
        (completion(nonsense=1), "nonsense", "nonsense"),
        (chat({"role": "user", "content": "x", "colour": "red"}), "messages.0.colour", "messages"),
        (
            chat({"role": "user", "content": [{"type": "text", "text": "x", "a": 1}]}),
            "messages.0.content.0.a",
            "messages",
        ),
    ):
        with pytest.raises(APIError, match=f"{name} is not known") as refused:
            ignored(body, "refuse")
        assert refused.value.param == param


@pytest.mark.parametrize("mode", ["warn", "ignore", "refuse"])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("best_of", 2), ("suffix", "!"), ("length_penalty", 0.5), ("use_beam_search", True), ("guided_json", {}),
        ("guided_regex", "x"), ("guided_choice", ["x"]), ("guided_grammar", "x"), ("functions", [{}]),
        ("function_call", {"name": "f"}), ("logits_processors", ["x"]), ("chat_template", "x"), ("top_logprobs", 1),
        ("spaces_between_special_tokens", False), ("best_of", True), ("watermarking", True),
        ("thinking_token_budget", 5), ("logprob_token_ids", [5]), ("truncation_side", "right"),
        ("repetition_detection", {}), ("moderation", {"model": "x"}), ("tools", [{}]), ("max_completion_tokens", 4),
        ("reasoning_effort", "low"), ("grammar", "x"), ("json_schema", {"type": "object"}),
        ("regex", "x"), ("ebnf", "x"), ("stop_regex", "x"), ("lora_path", "x"),
        ("n_predict", 5), ("max_new_tokens", 5), ("repeat_penalty", 1.1), ("sampling_params", {"top_k": 1}),
        ("max_output_tokens", 5), ("instructions", "x"), ("system", "x"), ("stop_sequences", ["x"]),
    ],
)  # fmt: skip
def test_known_parameter_that_is_not_served_is_refused_by_name(
    name: str, value: object, mode: UnknownFieldMode
) -> None:
    with pytest.raises(APIError, match=name) as refused:
        ignored(completion(**{name: value}), mode)
    assert refused.value.param == name


HELLO = {"messages": [{"role": "user", "content": "x"}]}
MINIMAL: dict[type[OpenObject], dict[str, Any]] = {
    CompletionRequest: {"prompt": "x"},
    EmbeddingRequest: {"input": "x"},
    ResponsesRequest: {"input": "x"},
    MessagesRequest: {**HELLO, "max_tokens": 1},
    CountTokensRequest: HELLO,
    RerankRequest: {"query": "x", "documents": ["y"]},
    ScoreRequest: {"text_1": "x", "text_2": "y"},
    TextsRequest: {"input": "x"},
}


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        (ResponsesRequest, "n", 2), (ResponsesRequest, "best_of", 2), (ResponsesRequest, "guided_json", {}),
        (ResponsesRequest, "logprobs", True), (ResponsesRequest, "include_reasoning", False),
        (ResponsesRequest, "watermarking", True), (ResponsesRequest, "conversation", "c"),
        (ResponsesRequest, "max_tokens", 5), (MessagesRequest, "n", 2), (MessagesRequest, "best_of", 2),
        (MessagesRequest, "guided_regex", "x"), (MessagesRequest, "container", "c"), (MessagesRequest, "stop", "x"),
        (CountTokensRequest, "chat_template", "x"), (CountTokensRequest, "mcp_servers", [{}]),
        (RerankRequest, "max_tokens_per_doc", 5), (ScoreRequest, "max_tokens_per_query", 5),
        (TextsRequest, "dimensions", 5), (TextsRequest, "messages", []),
    ],
)  # fmt: skip
def test_every_route_refuses_known_parameters(kind: type[OpenObject], name: str, value: object) -> None:
    with pytest.raises(APIError, match=name) as refused:
        ignored(kind.model_validate({**MINIMAL[kind], name: value}))
    assert refused.value.param == name


@pytest.mark.parametrize("kind", MINIMAL)
def test_neutral_values_are_accepted_by_every_route(kind: type[OpenObject]) -> None:
    for name, values in kind.unserved().items():
        for value in (*values, None):
            assert ignored(kind.model_validate({**MINIMAL[kind], name: value}), "refuse") == []


@pytest.mark.parametrize(
    ("kind", "name", "value", "hint"),
    [
        (CompletionRequest, "max_completion_tokens", 5, "use max_tokens"),
        (CompletionRequest, "guided_json", {}, r"the value \{\}; use structured_outputs\.json"),
        (ResponsesRequest, "max_tokens", 5, "use max_output_tokens"),
        (ResponsesRequest, "response_format", {"type": "json_object"}, "use text.format"),
        (MessagesRequest, "stop", "x", "use stop_sequences"),
        (MessagesRequest, "max_completion_tokens", 5, "use max_tokens"),
    ],
)
def test_refused_parameter_is_answered_with_its_name_here(
    kind: type[OpenObject], name: str, value: object, hint: str
) -> None:
    with pytest.raises(APIError, match=f"{hint}$"):
        ignored(kind.model_validate({**MINIMAL[kind], name: value}))


def test_counting_tokens_ignores_what_a_message_serves() -> None:
    body = CountTokensRequest.model_validate({**HELLO, "temperature": 0.5, "max_tokens": 5})
    assert ignored(body) == ["temperature", "max_tokens"]


def test_parameters_that_change_no_answer_are_accepted() -> None:
    fields = {
        "metadata": {"a": "b"}, "store": True, "user": "u", "service_tier": "flex", "prompt_cache_key": "k",
        "safety_identifier": "s", "session_id": "s", "prompt_cache_retention": "24h", "verbosity": "low",
        "prediction": {"type": "content"},
    }  # fmt: skip
    for body in (completion(**fields), chat(**fields), EmbeddingRequest.model_validate({"input": "x", **fields})):
        assert ignored(body, "refuse") == []


def test_message_of_the_official_client_is_accepted_in_the_next_request_but_not_with_audio() -> None:
    said = {"role": "assistant", "content": "x", "refusal": None, "tool_calls": None, "annotations": []}
    assert ignored(chat(said), "refuse") == []
    with pytest.raises(APIError, match=r"messages\.0\.audio") as refused:
        ignored(chat({**said, "audio": {"id": "1"}}))
    assert refused.value.param == "messages"
