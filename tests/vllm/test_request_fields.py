"""Fields of vLLM's bodies: each is served, or known and refused by name. A new one in vLLM fails this test."""

import typing
from dataclasses import fields

import pytest
from pydantic import BaseModel
from vllm.entrypoints.anthropic import protocol as anthropic
from vllm.entrypoints.openai.chat_completion import protocol as chat
from vllm.entrypoints.openai.completion import protocol as completion
from vllm.entrypoints.openai.responses import protocol as responses
from vllm.entrypoints.pooling.classify import protocol as classify
from vllm.entrypoints.pooling.embed import protocol as embed
from vllm.entrypoints.pooling.pooling import protocol as pooling
from vllm.entrypoints.pooling.scoring import protocol as scoring
from vllm.entrypoints.serve.tokenize import protocol as tokenize
from vllm.sampling_params import StructuredOutputsParams

from services.frontend.anthropic.schemas import AnthropicMessage, Block, CountTokensRequest, MessagesRequest
from services.frontend.openai.schemas.open_object import OpenObject
from services.frontend.openai.schemas.requests import (
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    PoolingRequest,
    StructuredOutputs,
    TextsRequest,
)
from services.frontend.openai.scores import RerankRequest, ScoreRequest
from services.frontend.openai.tokenize import DetokenizeRequest, TokenizeChatRequest, TokenizeCompletionRequest
from services.frontend.responses_api.schemas import ResponsesRequest

REFUSED_BLOCKS = {"tool_reference", "tool_addition", "tool_removal"}
"""Images, and tools that change within a conversation."""


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (ChatRequest, chat.ChatCompletionRequest),
        (CompletionRequest, completion.CompletionRequest),
        (ResponsesRequest, responses.ResponsesRequest),
        (EmbeddingRequest, embed.EmbeddingCompletionRequest),
        (EmbeddingRequest, embed.EmbeddingChatRequest),
        (PoolingRequest, pooling.PoolingCompletionRequest),
        (TextsRequest, classify.ClassificationCompletionRequest),
        (TextsRequest, classify.ClassificationChatRequest),
        (ScoreRequest, scoring.ScoreTextRequest),
        (ScoreRequest, scoring.ScoreDataRequest),
        (ScoreRequest, scoring.ScoreQueriesDocumentsRequest),
        (ScoreRequest, scoring.ScoreQueriesItemsRequest),
        (RerankRequest, scoring.RerankRequest),
        (TokenizeCompletionRequest, tokenize.TokenizeCompletionRequest),
        (TokenizeChatRequest, tokenize.TokenizeChatRequest),
        (DetokenizeRequest, tokenize.DetokenizeRequest),
        (MessagesRequest, anthropic.AnthropicMessagesRequest),
        (CountTokensRequest, anthropic.AnthropicCountTokensRequest),
    ],
)
def test_every_field_of_a_body_is_known_and_one_that_is_not_served_may_have_its_default(
    ours: type[OpenObject], theirs: type[BaseModel]
) -> None:
    unserved = ours.unserved()
    assert set(theirs.model_fields) - set(ours.model_fields) - set(unserved) == set()
    for name, field in theirs.model_fields.items():
        default = field.get_default(call_default_factory=True)
        of_chats = name == "add_generation_prompt"  # a chat that is not generated has another default
        if name in unserved and not (of_chats or field.is_required() or default is None):
            assert default in unserved[name], name


def test_every_field_of_structured_outputs_is_known() -> None:
    ours = {field.alias or name for name, field in StructuredOutputs.model_fields.items()}
    assert {field.name for field in fields(StructuredOutputsParams) if not field.name.startswith("_")} == ours


def test_every_role_and_block_of_a_message_is_known() -> None:
    role = AnthropicMessage.model_fields["role"].annotation
    assert typing.get_args(anthropic.AnthropicMessage.model_fields["role"].annotation) == typing.get_args(role)
    (blocks, _) = typing.get_args(Block)
    served = {
        word for kind in typing.get_args(blocks) for word in typing.get_args(kind.model_fields["type"].annotation)
    }
    theirs = typing.get_args(anthropic.AnthropicContentBlock.model_fields["type"].annotation)
    assert set(theirs) == served | REFUSED_BLOCKS
    assert served & REFUSED_BLOCKS == set()
