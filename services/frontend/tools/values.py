"""Values that a format writes without their types, as JSON."""

import contextlib
import json
from collections.abc import Mapping
from typing import Any

from services.frontend.parsing.json_reader import check_value
from services.frontend.parsing.python_reader import literal_json
from services.frontend.parsing.text_buffer import ParseError

_KINDS = {"{": "object", "[": "array", '"': "text", "t": "boolean", "f": "boolean", "n": "null"}
"""Types by the first character of JSON, for all but numbers."""


def value_json(text: str, key: str, parameters: Any) -> str:
    """Return the JSON of the argument `key` that is written as `text`.

    Args:
        parameters: JSON schema of the tool's arguments. An argument that may be a text is one, whatever it looks like,
            unless it is a value of another type that it may have; any other is read as JSON, then as a Python literal,
            and is a text if it is neither.
    """
    kinds = _types(_member(parameters, "properties", key), parameters)
    found = None if kinds == {"string"} else _json(text.strip())
    if found is not None and "string" in kinds:
        kind = _KINDS.get(found[0]) or ("number" if set(found) & set(".eE") else "integer")
        if not kinds & {kind, "number" if kind == "integer" else kind}:
            found = None
    return json.dumps(text, ensure_ascii=False) if found is None else found


def _json(value: str) -> str | None:
    """Return a value in JSON or Python as JSON, None for any other text."""
    with contextlib.suppress(ParseError):
        check_value(value)
        return value
    with contextlib.suppress(ParseError):
        return literal_json(value)
    return None


def _member(value: Any, *path: str) -> Any:
    """Return a member of nested objects, None if there is none."""
    for name in path:
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def _types(schema: Any, root: Any) -> set[str]:
    """Return the types that a schema allows, an empty set if it does not say. `root`: where its references point to."""
    found, seen, waiting = set[str](), set[int](), [schema]
    while waiting:
        each = waiting.pop()
        if not isinstance(each, Mapping):
            return set()
        if id(each) in seen:  # a reference can be written in many ways
            continue
        seen.add(id(each))
        kind, values, reference = each.get("type"), each.get("enum"), each.get("$ref")
        branches = each.get("anyOf") or each.get("oneOf") or each.get("allOf")
        if isinstance(kind, str | list):
            found |= {kind} if isinstance(kind, str) else {one for one in kind if isinstance(one, str)}
        elif isinstance(values, list) and all(isinstance(value, str) for value in values):
            found.add("string")
        elif isinstance(reference, str) and reference.startswith("#"):
            waiting.append(_member(root, *filter(None, reference[1:].split("/"))))
        elif isinstance(branches, list):
            waiting += branches
        else:
            return set()
    return found
