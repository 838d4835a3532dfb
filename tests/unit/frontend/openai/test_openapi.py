"""/openapi.json is valid, complete, and as strict as the checks of the bodies."""

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from fastapi.routing import APIRoute

from services.checkpoint import DEMO_MODEL
from services.config import FrontendConfig
from services.frontend.app import build
from services.frontend.engine.client import EngineClient
from services.frontend.metrics import Metrics
from services.frontend.model import ServedModel
from services.frontend.openai.schemas.openapi import document

FREE = {
    "parameters", "schema", "format", "json", "structures", "chat_template_kwargs", "metadata", "prediction",
    "prompt_cache_options", "input", "input_schema",
}  # fmt: skip
"""Fields that hold any JSON object; the body's size bounds it."""
OPEN = {
    "CompletionRequest", "ChatRequest", "EmbeddingRequest", "TokenizeCompletionRequest", "TokenizeChatRequest",
    "DetokenizeRequest", "MessageParam", "TextPart", "ToolCall", "FunctionCall", "MessagesRequest",
    "ScoreRequest", "RerankRequest",
    "CountTokensRequest", "AnthropicMessage", "AnthropicTool", "TextBlock", "ToolUseBlock", "ToolResultBlock",
    "ThinkingBlock", "RedactedThinkingBlock", "ResponsesRequest", "ResponsesTool", "InputMessage", "FunctionCallItem",
    "FunctionCallOutput", "ReasoningItem", "InputText", "RefusalPart", "ReasoningText",
}  # fmt: skip
"""Objects whose unknown fields are ignored."""


@pytest.fixture(scope="module")
def doc() -> dict[str, Any]:
    return document(closed=False)


def test_document_is_valid_openapi(doc: dict[str, Any]) -> None:
    schemathesis.openapi.from_dict(doc).validate()


def test_document_has_exactly_the_served_routes(doc: dict[str, Any]) -> None:
    config = FrontendConfig(model=str(DEMO_MODEL))
    engine = EngineClient("ipc:///nowhere", 1, 10.0, 300.0, 600.0)
    app = build(config, ServedModel.load(config), engine, Metrics(engine, "demo"))
    served = {
        (route.path.replace(":path", ""), method.lower())
        for route in app.routes
        if isinstance(route, APIRoute)
        for method in route.methods - {"HEAD"}
    }
    documented = {(path, method) for path, operations in doc["paths"].items() for method in operations}
    assert documented == served - {("/openapi.json", "get")}


def parts(doc: dict[str, Any], node: Any, name: str, seen: set[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every schema below `node` with the name of its property."""
    if isinstance(node, list):
        for item in node:
            yield from parts(doc, item, name, seen)
        return
    if not isinstance(node, dict):
        return
    if "$ref" in node:
        target = node["$ref"].rpartition("/")[2]
        if target not in seen:
            seen.add(target)
            yield from parts(doc, doc["components"]["schemas"][target], target, seen)
        return
    yield name, node
    for key, value in node.items():
        if key == "properties":
            for field, schema in value.items():
                yield from parts(doc, schema, field, seen)
        elif key in ("anyOf", "oneOf", "items", "additionalProperties"):
            yield from parts(doc, value, name, seen)


def bodies(doc: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    found, seen = [], set()
    for operations in doc["paths"].values():
        for operation in operations.values():
            content = operation.get("requestBody", {}).get("content", {})
            found += parts(doc, [kind["schema"] for kind in content.values()], "", seen)
    return found


def test_every_list_string_and_number_of_a_body_has_a_bound(doc: dict[str, Any]) -> None:
    unbounded, counted = [], 0
    for name, schema in bodies(doc):
        keys, kind = set(schema), schema.get("type")
        counted += kind in ("string", "array", "integer", "number")
        least, most = keys & {"minimum", "exclusiveMinimum"}, keys & {"maximum", "exclusiveMaximum"}
        if (
            (kind == "string" and not keys & {"maxLength", "enum", "const", "pattern"})
            or (kind == "array" and "maxItems" not in keys)
            or (kind in ("integer", "number") and not (least and most))
            or (
                kind == "object"
                and schema.get("additionalProperties", True) is True
                and name not in FREE | OPEN
            )
            or (isinstance(schema.get("additionalProperties"), dict) and "maxProperties" not in keys)
        ):
            unbounded.append((name, schema))
    assert unbounded == []
    assert counted > 100


def test_streams_and_errors_are_described(doc: dict[str, Any]) -> None:
    for path in ("/v1/completions", "/v1/chat/completions"):
        operation = doc["paths"][path]["post"]
        assert {"application/json", "text/event-stream"} == set(operation["responses"]["200"]["content"])
        for status in ("400", "401", "413", "429", "500", "503"):
            schema = operation["responses"][status]["content"]["application/json"]["schema"]
            assert schema == {"$ref": "#/components/schemas/ErrorResponse"}


def test_bodies_name_what_is_not_served_and_are_closed_if_unknown_fields_are_refused(
    doc: dict[str, Any],
) -> None:
    closed, schemas = document(closed=True)["components"]["schemas"], doc["components"]["schemas"]
    for name in OPEN:
        assert schemas[name]["additionalProperties"] is True
        assert closed[name]["additionalProperties"] is False
    properties = schemas["CompletionRequest"]["properties"]
    assert properties["best_of"]["enum"] == [None, 1]
    assert properties["max_completion_tokens"]["enum"] == [None]
