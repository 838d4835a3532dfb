"""JSON schemas that make a model call a tool, vLLM's; and the form of tools' names, which is OpenAI's with dots and
twice the length."""

from collections.abc import Mapping
from typing import Any

from services.frontend.errors import invalid

JSON = dict[str, Any]
MAX_DEPTH = 64
MAX_NAME = 128
"""Characters."""
NAME_CHAR = "[a-zA-Z0-9_.-]"
NAME_PATTERN = f"{NAME_CHAR}{{1,{MAX_NAME}}}"

_NAMED_SCHEMAS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
"""Keywords whose values map names to schemas."""
_VALUES = frozenset({"const", "enum", "default", "example", "examples"})
"""Keywords whose values are not schemas."""
_FORM = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""The form in which chat templates write JSON. Fixed white space keeps a weak model from writing it endlessly."""


def arguments_schema(parameters: JSON | None) -> JSON:
    """Return the schema of one tool's arguments. Raises: APIError"""
    return {**_object(parameters), "x-guidance": _FORM}


def calls_schema(tools: Mapping[str, JSON | None], max_calls: int | None, key: str = "parameters") -> JSON:
    """Return the schema of an array of calls, each with the name and the parameters of one tool.

    Args:
        key: name of the member with the parameters.

    Raises: APIError, if parameters are nested too deeply
    """
    schemas = {f"tool{i}": _object(parameters) for i, parameters in enumerate(tools.values())}
    parameters_of = {name: {"$ref": f"#/$defs/{each}"} for name, each in zip(tools, schemas, strict=True)}
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, key: parameters},
            "required": ["name", key],
            "additionalProperties": False,
        }
        for name, parameters in parameters_of.items()
    ]
    return {
        "type": "array",
        "minItems": 1,
        **({} if max_calls is None else {"maxItems": max_calls}),
        "items": calls[0] if len(calls) == 1 else {"anyOf": calls},
        "$defs": {name: _moved(each, f"#/$defs/{name}", 0) for name, each in schemas.items()},
        "x-guidance": _FORM,
    }


def json_format(schema: JSON) -> JSON:
    """Return the part of a structural tag that is JSON, in the form in which chat templates write it."""
    return {"type": "json_schema", "json_schema": {"x-guidance": _FORM} | schema}


def list_format(mark: str, tools: Mapping[str, JSON | None], max_calls: int | None) -> JSON:
    """Return the format of `mark` and an array of calls with "arguments". Raises: APIError"""
    calls = json_format(calls_schema(tools, max_calls, "arguments"))
    return {"type": "sequence", "elements": [{"type": "const_string", "value": mark}, calls]}


def _object(parameters: JSON | None) -> JSON:
    """Return a schema that allows only objects; without parameters only the empty one. Raises: APIError"""
    kinds = (parameters or {}).get("type", "object")
    if "object" not in (kinds if isinstance(kinds, list) else [kinds]):
        raise invalid("tools: arguments are an object, so the parameters of each tool must have that type", "tools")
    if not parameters:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    kept = {name: value for name, value in parameters.items() if name not in ("type", "x-guidance")}
    return {"type": "object", **kept}


def _moved(schema: Any, path: str, depth: int) -> Any:
    """Return the schema with its references to itself rewritten for its new position `path`. Raises: APIError"""
    if depth > MAX_DEPTH:
        raise invalid(f"tools: parameters are nested too deeply: more than {MAX_DEPTH} levels", "tools")
    if isinstance(schema, list):
        return [_moved(item, path, depth + 1) for item in schema]
    if not isinstance(schema, dict):
        return schema
    moved: dict[str, Any] = {}
    for name, value in schema.items():
        if name == "$ref" and isinstance(value, str) and (value == "#" or value.startswith("#/")):  # no anchor
            moved[name] = path + value[1:]
        elif name in _VALUES:
            moved[name] = value
        elif name in _NAMED_SCHEMAS and isinstance(value, dict):
            moved[name] = {key: _moved(inner, path, depth + 1) for key, inner in value.items()}
        else:
            moved[name] = _moved(value, path, depth + 1)
    return moved
