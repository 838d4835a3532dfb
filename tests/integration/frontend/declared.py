"""Declared types of answers as strict checks: every field is declared, and has its type."""

import json
from typing import Any

from jsonschema import Draft202012Validator
from pydantic import TypeAdapter

from services.frontend.openai.schemas.responses import (
    ChatChunk,
    ChatResponse,
    ClassificationResponse,
    CompletionChunk,
    CompletionResponse,
    EmbeddingResponse,
    PoolingResponse,
    RerankResponse,
    ScoreResponse,
)


def strict(kind: Any) -> Draft202012Validator:
    schema = TypeAdapter(kind).json_schema()
    for part in (schema, *schema.get("$defs", {}).values()):
        if "properties" in part:
            part["additionalProperties"] = False
    return Draft202012Validator(schema)


WHOLE = {
    "/v1/completions": strict(CompletionResponse),
    "/v1/chat/completions": strict(ChatResponse),
    "/v1/embeddings": strict(EmbeddingResponse),
    "/score": strict(ScoreResponse),
    "/rerank": strict(RerankResponse),
    "/pooling": strict(PoolingResponse),
    "/classify": strict(ClassificationResponse),
}
CHUNKS = {"/v1/completions": strict(CompletionChunk), "/v1/chat/completions": strict(ChatChunk)}


def check_answer(path: str, stream: bool, text: str) -> None:
    """Check a whole body, or all events of a stream that succeeded."""
    if not stream:
        WHOLE[path].validate(json.loads(text))
        return
    *events, end, nothing = text.split("\n\n")
    assert (end, nothing) == ("data: [DONE]", ""), text[-200:]
    assert events
    for event in events:
        CHUNKS[path].validate(json.loads(event.removeprefix("data: ")))
