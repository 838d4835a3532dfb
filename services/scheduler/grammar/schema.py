"""JSON schemas: read, measured and checked before the library sees them."""

import json
from collections.abc import Iterator
from typing import Any

from llguidance import LLMatcher

from services.scheduler.grammar.endless import is_endless
from services.scheduler.grammar.errors import GrammarError
from services.scheduler.grammar.limits import MAX_ALTERNATIVES, MAX_DEPTH, MAX_LEAST, MAX_SCHEMA_NODES
from services.scheduler.grammar.regex import check_regex

_DATA = frozenset({"const", "default", "enum", "examples"})
"""Keywords whose values are data, not schemas."""
_LEAST = frozenset({"minLength", "minItems", "minProperties"})
_OPTIONS: dict[str, Any] = {
    "item_separator": ",",
    "key_separator": ":",
    "whitespace_flexible": True,
    "whitespace_pattern": r"[ \t\r\n]+",
    "coerce_one_of": False,
    "lenient": False,
}
"""All of them: of a schema's own `x-guidance` only what concerns white space counts. Keywords that the library does not
know are refused by name, not ignored."""
_SEPARATORS = {"item_separator": (",", ", "), "key_separator": (":", ": ")}


def read(text: str, what: str) -> Any:
    """A JSON value from a request. Raises: GrammarError"""
    try:
        return json.loads(text, parse_constant=_no_constant)
    except RecursionError:
        raise GrammarError(f"the {what} is nested more than {MAX_DEPTH} levels deep") from None
    except ValueError as error:
        raise GrammarError(f"the {what} is not valid JSON: {error}") from None


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON value")


def checked(schema: Any) -> dict[str, Any]:
    """A schema that is safe to be compiled. Raises: GrammarError"""
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        raise GrammarError("the JSON schema must be an object")
    num_nodes = num_alternatives = 0
    for key, value, depth, is_data in _walk(schema):
        num_nodes += 1
        if depth > MAX_DEPTH:
            raise GrammarError(f"the JSON schema is nested more than {MAX_DEPTH} levels deep")
        if num_nodes > MAX_SCHEMA_NODES:
            raise GrammarError(f"the JSON schema has more than {MAX_SCHEMA_NODES} parts")
        if is_data:
            continue
        if key == "enum" and isinstance(value, list):
            num_alternatives += len(value)
            if num_alternatives > MAX_ALTERNATIVES:
                raise GrammarError(f"the JSON schema enumerates more than {MAX_ALTERNATIVES} values")
        _check_keyword(key, value)
    if is_endless(schema):
        raise GrammarError("the JSON schema must hold itself for ever; let some property or item be left out")
    rest = {name: value for name, value in schema.items() if name != "x-guidance"}
    spaces = _spaces(schema.get("x-guidance"))
    return rest | ({"x-guidance": spaces} if spaces else {})


def _spaces(given: Any) -> dict[str, Any]:
    """White space between the parts, as the frontend asks for it. Raises: GrammarError"""
    given = given if isinstance(given, dict) else {}
    found = {name: given[name] for name, values in _SEPARATORS.items() if given.get(name) in values}
    if isinstance(given.get("whitespace_flexible"), bool):
        found["whitespace_flexible"] = given["whitespace_flexible"]
    if found.get("whitespace_flexible") is False:
        found["whitespace_pattern"] = None  # or the pattern would count
    elif isinstance(given.get("whitespace_pattern"), str):
        check_regex(given["whitespace_pattern"], "whitespace_pattern")
        found["whitespace_pattern"] = given["whitespace_pattern"]
    return found


def _check_keyword(key: str, value: Any) -> None:
    if key in ("$ref", "$dynamicRef", "$recursiveRef") and isinstance(value, str) and value[:1] != "#":
        raise GrammarError(f'the JSON schema refers to something outside itself; {key} must begin with "#"')
    if key in _LEAST and isinstance(value, int | float) and value > MAX_LEAST:
        raise GrammarError(f"{key} in the JSON schema is {value!s:.20}; at most {MAX_LEAST} can be served")
    if key == "pattern" and isinstance(value, str):
        check_regex(value, "pattern in the JSON schema")
    if key == "patternProperties" and isinstance(value, dict):
        for pattern in value:
            check_regex(pattern, "pattern in the JSON schema")


def _walk(schema: Any) -> Iterator[tuple[str, Any, int, bool]]:
    """Every value with the key it stands under, its depth, and whether it is data. It does not recurse."""
    stack: list[tuple[str, Any, int, bool]] = [("", schema, 0, False)]
    while stack:
        key, value, depth, is_data = stack.pop()
        yield key, value, depth, is_data
        below = is_data or key in _DATA
        if isinstance(value, dict):
            stack.extend((name, item, depth + 1, below) for name, item in value.items())
        elif isinstance(value, list):
            stack.extend(("", item, depth + 1, below) for item in value)


def from_schema(schema: dict[str, Any]) -> str:
    """The library's grammar for a checked schema. Raises: GrammarError"""
    try:
        options = _OPTIONS | schema.get("x-guidance", {})
        return LLMatcher.grammar_from_json_schema(schema, overrides=options)
    except ValueError:
        raise GrammarError("the JSON schema cannot be used") from None
