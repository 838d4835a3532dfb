"""`response_format` and `structured_outputs` to the engine's `StructuredOutputParams`: one kind and one text."""

from typing import Any

import msgspec

from protocol.sampling import MAX_GRAMMAR_CHARS, GrammarKind, StructuredOutputParams
from services.frontend.errors import invalid
from services.frontend.json_text import json_text, json_value
from services.frontend.openai.schemas.requests import (
    BaseGenerationRequest,
    ChatRequest,
    ResponseFormat,
    StructuredOutputs,
)
from services.frontend.tools.schema import json_format

_FIELDS = ("json_", "regex", "choice", "grammar", "json_object", "structural_tag")
_OBJECT = {"type": "object"}


def constraint_field(body: BaseGenerationRequest) -> str | None:
    """Return the body's field that constrains the output, if there is one."""
    if body.structured_outputs is not None:
        return "structured_outputs"
    format = body.response_format
    return format.origin if format is not None and format.type != "text" else None


def grammar_field(body: BaseGenerationRequest) -> str | None:
    """Return the body's field that the grammar of the output is made of, if there is one."""
    is_call = isinstance(body, ChatRequest) and body.tools and body.tool_choice not in (None, "auto", "none")
    return "tools" if is_call else constraint_field(body)


def structured_params(body: BaseGenerationRequest) -> StructuredOutputParams | None:
    """Raises: APIError, for fields that contradict one another. The scheduler compiles the grammar later."""
    name = constraint_field(body)
    format = body.response_format
    found = _from_format(format) if format is not None else None
    if body.structured_outputs is not None:
        if format is not None and found is not None:
            raise invalid(f"{format.origin} and structured_outputs are both given; leave one out", name)
        found = _from_outputs(body.structured_outputs)
    if found is None:
        return None
    if body.ignore_eos:
        raise invalid(f"ignore_eos cannot be combined with {name}: the answer ends where it is complete", name)
    kind, text = found
    if len(text) > MAX_GRAMMAR_CHARS:
        raise invalid(f"{name} has {len(text)} characters as text; at most {MAX_GRAMMAR_CHARS} are allowed", name)
    return StructuredOutputParams(kind, text)


def as_tag_format(params: StructuredOutputParams) -> dict[str, Any] | None:
    """Return the constraint as a part of a structural tag; None, if it cannot be one. Raises: APIError"""
    match params.kind:
        case GrammarKind.JSON:
            return json_format(_decoded(params.text))
        case GrammarKind.JSON_OBJECT:
            return json_format(_OBJECT)
        case GrammarKind.REGEX:
            return {"type": "regex", "pattern": params.text}
        case GrammarKind.CHOICE:
            choices = msgspec.json.decode(params.text, type=list[str])
            return {"type": "or", "elements": [{"type": "const_string", "value": choice} for choice in choices]}
    return None


def _from_format(format: ResponseFormat) -> tuple[GrammarKind, str] | None:
    """Return None for plain text. Raises: APIError, also for fields that belong to another type"""
    fields = {"json_schema": {"json_schema"}, "structural_tag": {"structures", "triggers", "format"}}
    own = fields.get(format.type, set())
    given = {
        field for field in ("json_schema", "structures", "triggers", "format") if getattr(format, field) is not None
    }
    if foreign := sorted(given - own):
        raise invalid(
            f"response_format.{foreign[0]} does not belong to the type {format.type}; leave it out", "response_format"
        )
    match format.type:
        case "text":
            return None
        case "json_object":
            return GrammarKind.JSON_OBJECT, ""
        case "json_schema":
            if format.json_schema is None or format.json_schema.schema_ is None:
                raise invalid(
                    "response_format.json_schema.schema is missing; it is the schema that the answer must match",
                    "response_format",
                )
            return GrammarKind.JSON, json_text(format.json_schema.schema_)
    return _from_structural_tag(format, given)


def _from_structural_tag(format: ResponseFormat, given: set[str]) -> tuple[GrammarKind, str]:
    """Return vLLM's structural tag, in its old form (structures and triggers) or its new form (format)."""
    if given not in ({"format"}, {"structures", "triggers"}):
        raise invalid(
            "response_format of type structural_tag needs either format, or structures and triggers", "response_format"
        )
    return GrammarKind.STRUCTURAL_TAG, json_text(
        {"type": "structural_tag"} | {field: getattr(format, field) for field in sorted(given)}
    )


def _from_outputs(outputs: StructuredOutputs) -> tuple[GrammarKind, str]:
    name = "structured_outputs"
    given = [field for field in _FIELDS if getattr(outputs, field) not in (None, False)]
    if len(given) != 1:
        names = [field.rstrip("_") for field in _FIELDS]
        found = f", got {' and '.join(field.rstrip('_') for field in given)}" if given else ""
        raise invalid(f"{name} needs exactly one of {', '.join(names)}{found}", name)
    (field,) = given
    spaces = _whitespace(outputs)
    if spaces and field not in ("json_", "json_object"):
        raise invalid(
            f"{name}: disable_any_whitespace and whitespace_pattern are only allowed with json and json_object", name
        )
    value = getattr(outputs, field)
    match field:
        case "json_":
            return GrammarKind.JSON, _schema(value, spaces)
        case "json_object" if spaces:
            return GrammarKind.JSON, _schema(_OBJECT, spaces)
        case "json_object":
            return GrammarKind.JSON_OBJECT, ""
    return GrammarKind[field.upper()], value if isinstance(value, str) else json_text(value)


def _whitespace(outputs: StructuredOutputs) -> dict[str, Any]:
    """Return the grammar compiler's options for the whitespace of JSON; none if any whitespace is allowed.

    Raises: APIError
    """
    if outputs.disable_any_whitespace and outputs.whitespace_pattern is not None:
        raise invalid(
            "structured_outputs: disable_any_whitespace and whitespace_pattern exclude each other; leave one out",
            "structured_outputs",
        )
    if outputs.disable_any_whitespace:
        return {"whitespace_flexible": False}
    return {} if outputs.whitespace_pattern is None else {"whitespace_pattern": outputs.whitespace_pattern}


def _schema(value: str | dict[str, Any], spaces: dict[str, Any]) -> str:
    """Return the schema's text, with the options for whitespace under the key that the compiler reads."""
    if not spaces:
        return value if isinstance(value, str) else json_text(value)
    return json_text({**(_decoded(value) if isinstance(value, str) else value), "x-guidance": spaces})


def _decoded(schema: str) -> dict[str, Any]:
    """Raises: APIError"""
    try:
        decoded: dict[str, Any] = json_value(schema, dict[str, Any])
        return decoded
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        problem = "structured_outputs.json is not a JSON schema"
        raise invalid(f"{problem}: {error!s:.200}", "structured_outputs", logged=problem) from None
