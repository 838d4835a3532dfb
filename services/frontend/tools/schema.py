"""The JSON schemas that make a model call a tool, as vLLM has them."""

from collections.abc import Mapping
from typing import Any

JSON = dict[str, Any]
MAX_DEPTH = 64

_OF_SCHEMAS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
"""Keywords whose values are schemas by name."""
_OF_VALUES = frozenset({"const", "enum", "default", "example", "examples"})
"""Keywords whose values are no schemas."""
_FORM = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""As chat templates write JSON; a weak model cannot lose itself in white space."""


class TooDeep(ValueError):
    pass


def of_arguments(parameters: JSON | None) -> JSON:
    """What the arguments alone must match."""
    return {**_object(parameters), "x-guidance": _FORM}


def of_calls(tools: Mapping[str, JSON | None], most: int | None) -> JSON:
    """An array of calls, each with the name and the parameters of one tool. Raises: TooDeep"""
    schemas = {f"tool{i}": _object(parameters) for i, parameters in enumerate(tools.values())}
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, "parameters": {"$ref": f"#/$defs/{key}"}},
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for name, key in zip(tools, schemas, strict=True)
    ]
    return {
        "type": "array",
        "minItems": 1,
        **({} if most is None else {"maxItems": most}),
        "items": calls[0] if len(calls) == 1 else {"anyOf": calls},
        "$defs": {key: _moved(schema, f"#/$defs/{key}", 0) for key, schema in schemas.items()},
        "x-guidance": _FORM,
    }


def _object(parameters: JSON | None) -> JSON:
    """Of arguments, which are always an object; nothing may stand in one of a tool that names no parameters."""
    if not parameters:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    kept = {name: value for name, value in parameters.items() if name != "x-guidance"}
    return {"type": "object", **kept}


def _moved(schema: Any, place: str, depth: int) -> Any:
    """With references into itself that still hold when it stands at `place`."""
    if depth > MAX_DEPTH:
        raise TooDeep(f"more than {MAX_DEPTH} levels")
    if isinstance(schema, list):
        return [_moved(item, place, depth + 1) for item in schema]
    if not isinstance(schema, dict):
        return schema
    moved: dict[str, Any] = {}
    for name, value in schema.items():
        if name == "$ref" and isinstance(value, str) and value.startswith("#"):
            moved[name] = place + value[1:]
        elif name in _OF_VALUES:
            moved[name] = value
        elif name in _OF_SCHEMAS and isinstance(value, dict):
            moved[name] = {key: _moved(inner, place, depth + 1) for key, inner in value.items()}
        else:
            moved[name] = _moved(value, place, depth + 1)
    return moved
