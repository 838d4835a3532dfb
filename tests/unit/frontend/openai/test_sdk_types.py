"""Fields, roles and items of OpenAI's SDK: each is served, or known and refused. A new one fails this test."""

import typing
from typing import Any

import pytest
from openai.types import EmbeddingCreateParams
from openai.types import completion_create_params as completion
from openai.types.chat import ChatCompletionContentPartParam, ChatCompletionMessageParam
from openai.types.chat import completion_create_params as chat
from openai.types.chat.chat_completion_assistant_message_param import ContentArrayOfContentPart
from openai.types.responses import ResponseInputContentParam, ResponseInputItemParam
from openai.types.responses import response_create_params as response
from openai.types.responses.response_function_call_output_item_param import ResponseFunctionCallOutputItemParam
from openai.types.responses.response_output_message_param import Content as OutputContent
from openai.types.responses.response_reasoning_item_param import Content as ReasoningContent
from openai.types.responses.response_reasoning_item_param import Summary

from services.frontend.openai.schemas.messages import ContentPart, MessageParam
from services.frontend.openai.schemas.open_object import NEUTRAL_IN_MESSAGE, OpenObject
from services.frontend.openai.schemas.requests import ChatRequest, CompletionRequest, EmbeddingRequest
from services.frontend.responses_api.schemas import ITEMS, Part, ReasoningText, ResponsesRequest

REFUSED_ROLES = {"function"}
"""Deprecated by OpenAI for `tool`."""
REFUSED_ITEMS = {
    "additional_tools", "apply_patch_call", "apply_patch_call_output", "code_interpreter_call", "compaction",
    "compaction_trigger", "computer_call", "computer_call_output", "configuration_update", "custom_tool_call",
    "custom_tool_call_output", "file_search_call", "image_generation_call", "item_reference", "local_shell_call",
    "local_shell_call_output", "mcp_approval_request", "mcp_approval_response", "mcp_call", "mcp_list_tools", "program",
    "program_output", "shell_call", "shell_call_output", "tool_search_call", "tool_search_output", "web_search_call",
}  # fmt: skip
"""Items of tools that OpenAI's servers run, or of features that are refused by name."""

REFUSED_PARTS = {"file"}
REFUSED_INPUTS = {"input_file"}
"""The same for `/v1/responses`."""


def words(annotation: Any) -> set[str]:
    """Return the words of a `Required[Literal[...]]`."""
    if typing.get_origin(annotation) is typing.Literal:
        return set(typing.get_args(annotation))
    return set().union(*map(words, typing.get_args(annotation)))


def literals(kinds: Any, key: str) -> set[str]:
    hints = (typing.get_type_hints(kind, include_extras=True) for kind in typing.get_args(kinds))
    return set().union(*(words(hint[key]) for hint in hints))


@pytest.mark.parametrize(
    ("model", "official"),
    [
        (ChatRequest, (chat.CompletionCreateParamsBase, chat.CompletionCreateParamsStreaming)),
        (CompletionRequest, (completion.CompletionCreateParamsBase, completion.CompletionCreateParamsStreaming)),
        (EmbeddingRequest, (EmbeddingCreateParams,)),
        (ResponsesRequest, (response.ResponseCreateParamsBase, response.ResponseCreateParamsStreaming)),
    ],
)
def test_every_field_of_a_body_is_known(model: type[OpenObject], official: tuple[type, ...]) -> None:
    names = {name for kind in official for name in typing.get_type_hints(kind)}
    assert names - set(model.model_fields) - set(model.unserved()) == set()


def test_every_role_and_field_of_a_message_is_known() -> None:
    roles = words(MessageParam.model_fields["role"].annotation)
    assert literals(ChatCompletionMessageParam, "role") == roles | REFUSED_ROLES
    for kind in typing.get_args(ChatCompletionMessageParam):
        names = set(typing.get_type_hints(kind))
        assert names - set(MessageParam.model_fields) - set(NEUTRAL_IN_MESSAGE) == set(), kind


def test_every_item_of_responses_is_known() -> None:
    served = set().union(*(words(item.model_fields["type"].annotation) for item in ITEMS))
    assert literals(ResponseInputItemParam, "type") == served | REFUSED_ITEMS
    assert served & REFUSED_ITEMS == set()


def served_types(annotation: Any) -> set[str]:
    """Return the values of `type` that the models of an annotation take."""
    if isinstance(annotation, type) and issubclass(annotation, OpenObject):
        return words(annotation.model_fields["type"].annotation)
    return set().union(*map(served_types, typing.get_args(annotation)))


def test_every_part_of_a_message_is_known() -> None:
    official = ChatCompletionContentPartParam | ContentArrayOfContentPart
    known = served_types(ContentPart) - {"audio_url"}  # vLLM's
    assert literals(official, "type") == known | REFUSED_PARTS
    official = ResponseInputContentParam | OutputContent | ResponseFunctionCallOutputItemParam
    known = served_types(Part) - {"text"}  # vLLM's, which clients of a chat send, too
    assert literals(official, "type") == known | REFUSED_INPUTS
    assert literals(Summary | ReasoningContent, "type") == served_types(ReasoningText)
