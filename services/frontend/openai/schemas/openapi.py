"""/openapi.json, generated from the models that check the bodies."""

import importlib.metadata
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from services.frontend.anthropic.responses import (
    AnthropicErrorResponse,
    CountTokensResponse,
    MessageEvent,
    MessageResponse,
)
from services.frontend.anthropic.schemas import (
    BLOCKS,
    AnthropicMessage,
    AnthropicTool,
    CountTokensRequest,
    MessagesRequest,
)
from services.frontend.openai.parameters.extra_fields import unserved_of
from services.frontend.openai.schemas import responses
from services.frontend.openai.schemas.requests import (
    NEUTRAL_IN_MESSAGE,
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    FunctionCall,
    MessageParam,
    Neutral,
    TextPart,
    ToolCall,
)
from services.frontend.openai.scores import RerankRequest, ScoreRequest
from services.frontend.openai.tokenize import (
    DetokenizeRequest,
    TokenizeChatRequest,
    TokenizeCompletionRequest,
)
from services.frontend.responses_api.responses import (
    DeletedResponse,
    InputItemList,
    ResponseObject,
    ResponseStreamEvent,
)
from services.frontend.responses_api.schemas import ITEMS, PARTS, ResponsesRequest, ResponsesTool

JSON = dict[str, Any]
_REF = "#/components/schemas/{model}"
_ERRORS = {
    400: "the body is not what this route takes; the message names the field",
    401: "no valid API key",
    404: "no such path or model",
    405: "no such method",
    408: "the body did not arrive in time",
    413: "the body is too large",
    429: "overloaded; try again later",
    431: "too many headers",
    500: "an internal error",
    503: "not ready, or stopping; try again later",
}
_UNGUARDED = (405, 431, 500)
"""Errors of routes without a key and a body."""


@dataclass(frozen=True)
class Route:
    method: str
    path: str
    summary: str
    response: type[BaseModel] | None
    """None: text."""
    bodies: tuple[type[BaseModel], ...] = ()
    """Alternatives for the body."""
    chunk: type[BaseModel] | None = None
    """Data of each event, if the body requests a stream."""
    is_probe: bool = False
    """Needs no key; a response with status 503 has the same body."""
    error: type[BaseModel] = responses.ErrorResponse


ROUTES = (
    Route("post", "/v1/completions", "Continues one or several texts", responses.CompletionResponse,
          (CompletionRequest,), responses.CompletionChunk),
    Route("post", "/v1/chat/completions", "Continues a conversation", responses.ChatResponse,
          (ChatRequest,), responses.ChatChunk),
    Route("post", "/v1/embeddings", "Computes normalised embeddings of texts", responses.EmbeddingResponse,
          (EmbeddingRequest,)),
    *(Route("post", path, "Compares texts by the cosine of their embeddings", responses.ScoreResponse,
            (ScoreRequest,)) for path in ("/score", "/v1/score")),
    *(Route("post", path, "Orders documents by the cosine of their embeddings and that of a query",
            responses.RerankResponse, (RerankRequest,)) for path in ("/rerank", "/v1/rerank", "/v2/rerank")),
    Route("post", "/pooling", "Computes normalised embeddings of texts", responses.PoolingResponse,
          (EmbeddingRequest,)),
    Route("post", "/classify", "Refused: served models have no classes", responses.ErrorResponse),
    Route("post", "/v1/messages", "Continues a conversation, in Anthropic's dialect", MessageResponse,
          (MessagesRequest,), MessageEvent, error=AnthropicErrorResponse),
    Route("post", "/v1/messages/count_tokens", "Counts the tokens of a conversation", CountTokensResponse,
          (CountTokensRequest,), error=AnthropicErrorResponse),
    Route("post", "/v1/responses", "Continues a conversation, in the form of items", ResponseObject,
          (ResponsesRequest,), ResponseStreamEvent),
    Route("get", "/v1/responses/{id}", "A stored response", ResponseObject),
    Route("delete", "/v1/responses/{id}", "Deletes a stored response", DeletedResponse),
    Route("get", "/v1/responses/{id}/input_items", "Items of the request of a stored response", InputItemList),
    Route("post", "/tokenize", "Text or a conversation to token ids", responses.TokenizeResponse,
          (TokenizeCompletionRequest, TokenizeChatRequest)),
    Route("post", "/detokenize", "Token ids to text", responses.DetokenizeResponse, (DetokenizeRequest,)),
    Route("get", "/v1/models", "Models that are served", responses.ModelList),
    Route("get", "/v1/models/{name}", "One of the models", responses.ModelEntry),
    Route("get", "/server_info", "State and sizes of the engine", responses.ServerInfo),
    Route("get", "/get_model_info", "The model, as SGLang's routers read it", responses.ModelInfo),
    Route("get", "/tokenizer_info", "Special tokens and chat template", responses.TokenizerInfo),
    Route("get", "/load", "Number of open requests", responses.LoadResponse),
    Route("get", "/version", "Version of the server", responses.VersionResponse),
    Route("get", "/metrics", "Metrics for Prometheus", None),
    Route("get", "/livez", "Whether the process responds", responses.LivenessResponse, is_probe=True),
    Route("get", "/readyz", "Whether requests are served", responses.ReadinessResponse, is_probe=True),
    Route("get", "/health", "The same as /readyz", responses.ReadinessResponse, is_probe=True),
    Route("get", "/ping", "The same as /readyz", responses.ReadinessResponse, is_probe=True),
    Route("post", "/ping", "The same as /readyz", responses.ReadinessResponse, is_probe=True),
)  # fmt: skip


ADMIN_ROUTES = (Route("post", "/reset_prefix_cache", "Empties the prefix cache", responses.ResetResponse),)
"""Routes of `--enable-admin-routes`."""


def document(closed: bool, admin: bool = False) -> JSON:
    """OpenAPI 3.1.

    Args:
        closed: unknown properties of bodies are refused.
        admin: `ADMIN_ROUTES` are served, too.
    """
    routes = ROUTES + ADMIN_ROUTES if admin else ROUTES
    models = [
        model
        for route in routes
        for model in (route.response, route.chunk, *route.bodies)
        if model is not None
    ]
    pairs = [(model, "validation") for model in dict.fromkeys([*(route.error for route in routes), *models])]
    _, definitions = models_json_schema(pairs, ref_template=_REF)  # type: ignore[arg-type]
    schemas: JSON = definitions["$defs"]
    for model in {body for route in routes for body in route.bodies}:
        _add_unserved(schemas[model.__name__], unserved_of(model), closed)
    _add_unserved(schemas[MessageParam.__name__], NEUTRAL_IN_MESSAGE, closed)
    for part in (
        TextPart,
        ToolCall,
        FunctionCall,
        AnthropicMessage,
        AnthropicTool,
        *BLOCKS,
        *ITEMS,
        *PARTS,
        ResponsesTool,
    ):
        _add_unserved(schemas[part.__name__], {}, closed)
    paths: JSON = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method] = _operation(route)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Runahead",
            "version": importlib.metadata.version("runahead-engine"),
            "summary": "OpenAI's API with vLLM's additional parameters",
            "description": "Bodies are UTF-8 JSON. Numbers are finite, and integers are written without a fraction. "
            "The header x-request-id names a request in logs and is returned with the response.",
            "license": {"name": "Apache 2.0", "identifier": "Apache-2.0"},
        },
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _add_unserved(schema: JSON, neutral: Neutral, closed: bool) -> None:
    """Add known properties that are not served, with the values that change nothing."""
    properties = schema["properties"]
    for name, values in neutral.items():
        properties.setdefault(name, {"enum": _distinct((None, *values)), "description": "Not supported."})
    schema["additionalProperties"] = not closed


def _distinct(values: tuple[Any, ...]) -> list[Any]:
    """Return each value once; 1 and 1.0 are equal in JSON."""
    return [value for i, value in enumerate(values) if value not in values[:i]]


def _operation(route: Route) -> JSON:
    name = re.sub(r"\W+", "_", route.path).strip("_")
    if route.path in ("/ping", "/v1/responses/{id}"):  # has two methods
        name = f"{route.method}_{name}"
    operation: JSON = {"operationId": name, "summary": route.summary, "responses": _responses(route)}
    if route.bodies:
        refs = [_ref(body) for body in route.bodies]
        schema = refs[0] if len(refs) == 1 else {"anyOf": refs}
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    if not route.is_probe:
        if (parameter := re.search(r"{(\w+)}", route.path)) is not None:
            operation["parameters"] = [
                {
                    "name": parameter.group(1),
                    "in": "path",
                    "required": True,
                    "schema": {"type": "string", "maxLength": 512},
                }
            ]
        operation["security"] = [{}, {"key": []}]  # where no keys are configured, none is needed
    return operation


def _responses(route: Route) -> JSON:
    content: JSON = {"text/plain": {"schema": {"type": "string"}}}
    if route.response is not None:
        content = {"application/json": {"schema": _ref(route.response)}}
    by_status = {"200": _response("the response", content)}
    if route.chunk is not None:
        by_status["200"]["description"] = (
            "The response. With `stream`: server-sent events whose data are chunks; the last one is [DONE] or an error"
        )
        content["text/event-stream"] = {"schema": _event(route.chunk, route.error)}
    more = (404,) if "{" in route.path else ()
    errors = _UNGUARDED if route.is_probe else _ERRORS if route.bodies else (401, *more, *_UNGUARDED)
    failed = {"application/json": {"schema": _ref(route.error)}}
    by_status |= {str(status): _response(_ERRORS[status], failed) for status in errors}
    if route.path == "/classify":
        by_status["400"] = _response(_ERRORS[400], failed)
    if route.is_probe and route.response is responses.ReadinessResponse:
        by_status["503"] = _response(_ERRORS[503], content)
    for status in by_status.keys() & {"429", "503"}:
        by_status[status]["headers"]["retry-after"] = {"description": "seconds", "schema": {"type": "string"}}
    return by_status


def _event(chunk: type[BaseModel], error: type[BaseModel]) -> JSON:
    """Return the schema of one event."""
    content = {
        "type": "string",
        "contentMediaType": "application/json",
        "contentSchema": {"anyOf": [_ref(chunk), _ref(error)]},
    }
    data = {"anyOf": [{"const": "[DONE]"}, content]}
    return {"type": "object", "properties": {"data": data}, "required": ["data"]}


def _response(description: str, content: Mapping[str, Any]) -> JSON:
    header = {"description": "The request's id", "schema": {"type": "string"}}
    return {"description": description, "headers": {"x-request-id": header}, "content": content}


def _ref(model: type[BaseModel]) -> JSON:
    return {"$ref": _REF.format(model=model.__name__)}
