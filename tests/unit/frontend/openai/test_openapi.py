"""/openapi.json is valid, complete, and as strict as the checks of the bodies."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from fastapi.routing import APIRoute

from services.config import FrontendConfig
from services.frontend.app import with_routes

FREE = {
    "parameters", "schema", "format", "json", "structures", "chat_template_kwargs", "metadata", "prediction",
    "prompt_cache_options", "input", "input_schema",
}  # fmt: skip
"""Fields that hold any JSON object; the body's size bounds it."""
OPEN = {
    "CompletionRequest", "ChatRequest", "EmbeddingRequest", "TokenizeCompletionRequest", "TokenizeChatRequest",
    "DetokenizeRequest", "MessageParam", "TextPart", "AudioURL", "AudioURLPart", "ImagePart", "ImageURL",
    "InputAudio", "InputAudioPart", "ToolCall", "FunctionCall",
    "MessagesRequest",
    "ScoreRequest", "RerankRequest", "TextsRequest", "PoolingRequest",
    "CountTokensRequest", "AnthropicMessage", "AnthropicTool", "TextBlock", "ImageBlock", "Base64Source", "URLSource",
    "ToolUseBlock", "ToolResultBlock", "InputImage",
    "ThinkingBlock", "RedactedThinkingBlock", "ResponsesRequest", "ResponsesTool", "InputMessage", "FunctionCallItem",
    "FunctionCallOutput", "ReasoningItem", "InputText", "RefusalPart", "ReasoningText",
    "StreamOptions", "Tool", "FunctionDefinition", "NamedTool", "FunctionName", "AnthropicToolChoice", "Thinking",
    "OutputConfig", "RerankDocument", "ResponsesToolName", "TextOptions", "ReasoningOptions", "ResponsesStreamOptions",
    "AllowedTools", "AllowedSet", "ResponsesAllowedTools",
}  # fmt: skip
"""Objects whose unknown fields are ignored."""


@pytest.fixture(scope="module")
def doc() -> dict[str, Any]:
    return with_routes(FrontendConfig()).openapi()


def test_document_is_valid_openapi(doc: dict[str, Any]) -> None:
    schemathesis.openapi.from_dict(doc).validate()


@pytest.mark.parametrize("admin", [False, True])
def test_every_route_is_described(admin: bool) -> None:
    app = with_routes(FrontendConfig(enable_admin_routes=admin))
    served = {
        (route.path_format, method.lower())
        for route in app.routes
        if isinstance(route, APIRoute)
        for method in route.methods - {"HEAD"}
    }
    operations = [
        (path, method, operation)
        for path, methods in app.openapi()["paths"].items()
        for method, operation in methods.items()
    ]
    assert {(path, method) for path, method, _ in operations} == served
    assert len({operation["operationId"] for *_, operation in operations}) == len(operations)
    for path, method, operation in operations:
        assert operation["summary"], path
        assert operation["responses"]["500"]["content"]["application/json"]["schema"], path
        succeeded = operation["responses"].get("200") or operation["responses"]["400"]
        assert all(content["schema"] for content in succeeded["content"].values()), path
        assert "x-request-id" in succeeded["headers"]
        assert "422" not in operation["responses"]
        assert "requestBody" in operation or method != "post" or path in (
            "/ping", "/classify", "/reset_prefix_cache", "/engines/{name}/drain", "/v1/responses/{id}/cancel"
        )  # fmt: skip


def test_every_reference_has_a_definition(doc: dict[str, Any]) -> None:
    names = set(re.findall(r'"#/components/schemas/(\w+)"', json.dumps(doc)))
    assert names == set(doc["components"]["schemas"])


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
            or (kind == "object" and schema.get("additionalProperties", True) is True and name not in FREE | OPEN)
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


def test_bodies_name_what_is_not_served_and_are_closed_if_unknown_fields_are_refused(doc: dict[str, Any]) -> None:
    schemas = doc["components"]["schemas"]
    closed = with_routes(FrontendConfig(unknown_parameters="refuse")).openapi()["components"]["schemas"]
    for name in OPEN:
        assert schemas[name]["additionalProperties"] is True
        assert closed[name]["additionalProperties"] is False
    properties = schemas["CompletionRequest"]["properties"]
    assert properties["best_of"]["enum"] == [None, 1]
    assert properties["max_completion_tokens"]["enum"] == [None]
