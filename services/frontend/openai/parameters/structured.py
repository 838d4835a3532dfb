"""`response_format` and `structured_outputs` to what the engine is told: one kind, one text."""

from typing import Any

import msgspec

from protocol.sampling import MAX_GRAMMAR_CHARS, GrammarKind, StructuredOutputParams
from services.frontend.errors import invalid
from services.frontend.openai.schemas.requests import Request, ResponseFormat, StructuredOutputs

_FIELDS = ("json_", "regex", "choice", "grammar", "json_object", "structural_tag")
_OBJECT = {"type": "object"}


def constraint_field(body: Request) -> str | None:
    """The body's field that says what the answer must match; None where none does."""
    if body.structured_outputs is not None:
        return "structured_outputs"
    wanted = body.response_format
    return "response_format" if wanted is not None and wanted.type != "text" else None


def structured_params(body: Request) -> StructuredOutputParams | None:
    """Raises: APIError, for fields that contradict one another. Whether it compiles is found out elsewhere."""
    name = constraint_field(body)
    by_format = _of_format(body.response_format) if body.response_format is not None else None
    if name is None:
        return None
    if body.structured_outputs is not None and by_format is not None:
        raise invalid("response_format and structured_outputs are both given; leave one out", name)
    if body.ignore_eos:
        raise invalid(
            f"ignore_eos cannot be combined with {name}: the answer ends where it is complete", name
        )
    if body.structured_outputs is not None:
        kind, text = _of_outputs(body.structured_outputs)
    else:
        assert by_format is not None
        kind, text = by_format
    if len(text) > MAX_GRAMMAR_CHARS:
        raise invalid(
            f"{name} has {len(text)} characters as text; at most {MAX_GRAMMAR_CHARS} are allowed", name
        )
    return StructuredOutputParams(kind, text)


def _text(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _of_format(wanted: ResponseFormat) -> tuple[GrammarKind, str] | None:
    """None for plain text. Raises: APIError, also for fields that belong to another type"""
    fields = {"json_schema": {"json_schema"}, "structural_tag": {"structures", "triggers", "format"}}
    own = fields.get(wanted.type, set())
    given = {
        field
        for field in ("json_schema", "structures", "triggers", "format")
        if getattr(wanted, field) is not None
    }
    if foreign := sorted(given - own):
        raise invalid(
            f"response_format.{foreign[0]} does not belong to the type {wanted.type}; leave it out",
            "response_format",
        )
    match wanted.type:
        case "text":
            return None
        case "json_object":
            return GrammarKind.JSON_OBJECT, ""
        case "json_schema":
            if wanted.json_schema is None or wanted.json_schema.schema_ is None:
                raise invalid(
                    "response_format.json_schema.schema is missing; it says what the answer must match",
                    "response_format",
                )
            return GrammarKind.JSON, _text(wanted.json_schema.schema_)
    return _of_tag(wanted, given)


def _of_tag(wanted: ResponseFormat, given: set[str]) -> tuple[GrammarKind, str]:
    """Either vLLM's old form, tags that begin after triggers, or the new one, a format."""
    if given not in ({"format"}, {"structures", "triggers"}):
        raise invalid(
            "response_format of type structural_tag needs either format, or structures and triggers",
            "response_format",
        )
    return GrammarKind.STRUCTURAL_TAG, _text(
        {"type": "structural_tag"} | {field: getattr(wanted, field) for field in sorted(given)}
    )


def _of_outputs(wanted: StructuredOutputs) -> tuple[GrammarKind, str]:
    name = "structured_outputs"
    given = [field for field in _FIELDS if getattr(wanted, field) not in (None, False)]
    if len(given) != 1:
        names = [field.rstrip("_") for field in _FIELDS]
        found = f", got {' and '.join(field.rstrip('_') for field in given)}" if given else ""
        raise invalid(f"{name} needs exactly one of {', '.join(names)}{found}", name)
    (field,) = given
    spaces = _spaces(wanted)
    if spaces and field not in ("json_", "json_object"):
        raise invalid(
            f"{name}: disable_any_whitespace and whitespace_pattern only go with json and json_object", name
        )
    value = getattr(wanted, field)
    match field:
        case "json_":
            return GrammarKind.JSON, _schema(value, spaces)
        case "json_object" if spaces:
            return GrammarKind.JSON, _schema(_OBJECT, spaces)
        case "json_object":
            return GrammarKind.JSON_OBJECT, ""
        case "choice":
            return GrammarKind.CHOICE, _text(value)
        case "regex":
            return GrammarKind.REGEX, str(value)
        case "grammar":
            return GrammarKind.GRAMMAR, str(value)
    return GrammarKind.STRUCTURAL_TAG, str(value)


def _spaces(wanted: StructuredOutputs) -> dict[str, Any]:
    """Between the parts of a JSON text: any, unless these say otherwise. Raises: APIError"""
    if wanted.disable_any_whitespace and wanted.whitespace_pattern is not None:
        raise invalid(
            "structured_outputs: disable_any_whitespace leaves nothing for whitespace_pattern to say; "
            "leave one out",
            "structured_outputs",
        )
    if wanted.disable_any_whitespace:
        return {"whitespace_flexible": False}
    return {} if wanted.whitespace_pattern is None else {"whitespace_pattern": wanted.whitespace_pattern}


def _schema(value: str | dict[str, Any], spaces: dict[str, Any]) -> str:
    """The schema's text; what it must say of whitespace stands in it, where the compiler looks for that."""
    if not spaces:
        return value if isinstance(value, str) else _text(value)
    if isinstance(value, str):
        try:
            value = msgspec.json.decode(value, type=dict[str, Any])
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise invalid(
                f"structured_outputs.json is no JSON schema: {error!s:.200}", "structured_outputs"
            ) from None
    return _text({**value, "x-guidance": spaces})
