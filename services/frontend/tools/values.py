"""Values that a format writes without their types, as JSON."""

import json
from collections.abc import Mapping
from typing import Any

from services.frontend.parsing.json_reader import check_value
from services.frontend.parsing.python_reader import literal_json
from services.frontend.parsing.text_buffer import ParseError


def value_json(text: str, key: str, parameters: Any) -> str:
    """Return the JSON of the argument `key` that is written as `text`.

    Args:
        parameters: JSON schema of the tool's arguments. An argument that may only be a text is one, whatever it looks
            like; any other is read as JSON, then as a Python literal, and is a text if it is neither.
    """
    kinds = _kinds(parameters, key)
    if kinds == {"string"} or (kinds == {"string", "null"} and text.strip() != "null"):
        return json.dumps(text, ensure_ascii=False)
    value = text.strip()
    try:
        check_value(value)
        return value
    except ParseError:
        pass
    try:
        return literal_json(value)
    except ParseError:
        return json.dumps(text, ensure_ascii=False)


def _kinds(parameters: Any, key: str) -> set[str]:
    """Return the types of a property, an empty set if the schema does not say."""
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    schema = properties.get(key) if isinstance(properties, Mapping) else None
    return _types(schema) if isinstance(schema, Mapping) else set()


def _types(schema: Mapping[str, Any]) -> set[str]:
    kind = schema.get("type")
    if isinstance(kind, str):
        return {kind}
    if isinstance(kind, list):
        return {each for each in kind if isinstance(each, str)}
    if isinstance(values := schema.get("enum"), list) and all(isinstance(value, str) for value in values):
        return {"string"}
    branches = schema.get("anyOf") or schema.get("oneOf")
    if not isinstance(branches, list):
        return set()
    kinds = [_types(branch) for branch in branches if isinstance(branch, Mapping)]
    return set().union(*kinds) if all(kinds) else set()
