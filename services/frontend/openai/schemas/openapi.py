"""/openapi.json: what the routes take and give, made from the models that check it."""

import importlib.metadata
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from services.frontend.openai.schemas import responses as answers
from services.frontend.openai.schemas.requests import (
    NEUTRAL,
    NEUTRAL_IN_MESSAGE,
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    Message,
    Neutral,
)
from services.frontend.openai.tokenize import (
    DetokenizeRequest,
    TokenizeChatRequest,
    TokenizeCompletionRequest,
)

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
"""Errors of routes that need no key and no body."""


@dataclass(frozen=True)
class Route:
    method: str
    path: str
    summary: str
    answer: type[BaseModel] | None
    """None: text."""
    bodies: tuple[type[BaseModel], ...] = ()
    """The body is one of these."""
    chunk: type[BaseModel] | None = None
    """What each event of a stream holds, where the body asks for a stream."""
    is_probe: bool = False
    """Needs no key, and answers 503 with the same body."""


ROUTES = (
    Route("post", "/v1/completions", "Continues one or several texts", answers.CompletionAnswer,
          (CompletionRequest,), answers.CompletionChunk),
    Route("post", "/v1/chat/completions", "Continues a conversation", answers.ChatAnswer,
          (ChatRequest,), answers.ChatChunk),
    Route("post", "/v1/embeddings", "Makes vectors of length 1 from texts", answers.EmbeddingAnswer,
          (EmbeddingRequest,)),
    Route("post", "/tokenize", "Text or a conversation to token ids", answers.TokenizeAnswer,
          (TokenizeCompletionRequest, TokenizeChatRequest)),
    Route("post", "/detokenize", "Token ids to text", answers.DetokenizeAnswer, (DetokenizeRequest,)),
    Route("get", "/v1/models", "What is served", answers.ModelList),
    Route("get", "/version", "Of the server", answers.Version),
    Route("get", "/metrics", "Figures for Prometheus", None),
    Route("get", "/livez", "Whether the process answers", answers.Alive, is_probe=True),
    Route("get", "/readyz", "Whether requests are served", answers.Readiness, is_probe=True),
    Route("get", "/health", "The same as /readyz", answers.Readiness, is_probe=True),
)  # fmt: skip


def document() -> JSON:
    """OpenAPI 3.1."""
    models = [
        model for route in ROUTES for model in (route.answer, route.chunk, *route.bodies) if model is not None
    ]
    pairs = [(model, "validation") for model in dict.fromkeys([answers.ErrorAnswer, *models])]
    _, definitions = models_json_schema(pairs, ref_template=_REF)  # type: ignore[arg-type]
    schemas: JSON = definitions["$defs"]
    for model in {body for route in ROUTES for body in route.bodies}:
        _close(schemas[model.__name__], NEUTRAL)
    _close(schemas[Message.__name__], NEUTRAL_IN_MESSAGE)
    paths: JSON = {}
    for route in ROUTES:
        paths.setdefault(route.path, {})[route.method] = _operation(route)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Runahead",
            "version": importlib.metadata.version("runahead"),
            "summary": "OpenAI's API with vLLM's additional parameters",
            "description": "Bodies are UTF-8 JSON. Numbers are finite, and integers are written without a fraction. "
            "The header x-request-id names a request in logs and comes back with the answer.",
            "license": {"name": "Apache 2.0", "identifier": "Apache-2.0"},
        },
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _close(schema: JSON, neutral: Neutral) -> None:
    """What is not known is refused; what is known but not served is taken with values that change nothing."""
    properties = schema["properties"]
    for name, values in neutral.items():
        properties.setdefault(name, {"enum": [None, *_distinct(values)], "description": "Not served."})
    schema["additionalProperties"] = False


def _distinct(values: tuple[Any, ...]) -> list[Any]:
    """1 and 1.0 are one number in JSON."""
    return [value for i, value in enumerate(values) if value not in values[:i]]


def _operation(route: Route) -> JSON:
    name = route.path.strip("/").replace("/", "_")
    operation: JSON = {"operationId": name, "summary": route.summary, "responses": _responses(route)}
    if route.bodies:
        refs = [_ref(body) for body in route.bodies]
        schema = refs[0] if len(refs) == 1 else {"anyOf": refs}
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    if not route.is_probe:
        operation["security"] = [{}, {"key": []}]  # where no keys are configured, none is needed
    return operation


def _responses(route: Route) -> JSON:
    content: JSON = {"text/plain": {"schema": {"type": "string"}}}
    if route.answer is not None:
        content = {"application/json": {"schema": _ref(route.answer)}}
    responses = {"200": _response("the answer", content)}
    if route.chunk is not None:
        responses["200"]["description"] = (
            "The answer; with `stream` it comes as server-sent events whose data are chunks, or one error as the "
            "last, or [DONE]"
        )
        content["text/event-stream"] = {"schema": _event(route.chunk)}
    errors = _UNGUARDED if route.is_probe else _ERRORS if route.bodies else (401, *_UNGUARDED)
    failed = {"application/json": {"schema": _ref(answers.ErrorAnswer)}}
    responses |= {str(status): _response(_ERRORS[status], failed) for status in errors}
    if route.is_probe and route.answer is answers.Readiness:
        responses["503"] = _response(_ERRORS[503], content)
    for status in responses.keys() & {"429", "503"}:
        responses[status]["headers"]["retry-after"] = {"description": "seconds", "schema": {"type": "string"}}
    return responses


def _event(chunk: type[BaseModel]) -> JSON:
    """Of each event of a stream."""
    told = {
        "type": "string",
        "contentMediaType": "application/json",
        "contentSchema": {"anyOf": [_ref(chunk), _ref(answers.ErrorAnswer)]},
    }
    data = {"anyOf": [{"const": "[DONE]"}, told]}
    return {"type": "object", "properties": {"data": data}, "required": ["data"]}


def _response(description: str, content: Mapping[str, Any]) -> JSON:
    header = {"description": "The request's name", "schema": {"type": "string"}}
    return {"description": description, "headers": {"x-request-id": header}, "content": content}


def _ref(model: type[BaseModel]) -> JSON:
    return {"$ref": _REF.format(model=model.__name__)}
