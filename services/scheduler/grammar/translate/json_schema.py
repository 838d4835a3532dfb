"""Checks of a JSON schema before llguidance reads it, and its translation."""

from collections.abc import Iterator
from typing import Any

from llguidance import LLMatcher

from services.scheduler.grammar.errors import GrammarError
from services.scheduler.grammar.limits import (
    MAX_ALTERNATIVES,
    MAX_DEPTH,
    MAX_MINIMUM_SIZE,
    MAX_OPTIONAL_PROPERTIES,
    MAX_SCHEMA_NODES,
)
from services.scheduler.grammar.translate.recursion import has_no_finite_match
from services.scheduler.grammar.translate.regex import check_regex, ecma_classes

_DATA_KEYWORDS = frozenset({"const", "default", "enum", "examples"})
"""Keywords whose values are data, not schemas."""
_SCHEMAS_BY_NAME = frozenset({"$defs", "definitions", "dependentSchemas", "patternProperties", "properties"})
"""Keywords whose values are objects of schemas; the names in them are no keywords."""
_MINIMUM_SIZES = frozenset({"minLength", "minItems", "minProperties"})
_OPTIONS: dict[str, Any] = {
    "item_separator": ",",
    "key_separator": ":",
    "whitespace_flexible": True,
    "whitespace_pattern": r"[ \t\r\n]+",
    "coerce_one_of": False,
    "lenient": False,
}
"""All options of llguidance, so that a schema's own `x-guidance` can change whitespace only. Keywords unknown to
llguidance are refused (`lenient`)."""
_SEPARATORS = {"item_separator": (",", ", "), "key_separator": (":", ": ")}


def check_schema(schema: Any) -> dict[str, Any]:
    """Return a schema that can be compiled safely. Raises: GrammarError"""
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
        _check_optional(value)
    if has_no_finite_match(schema):
        raise GrammarError("the JSON schema requires a value of infinite size; make a property or item optional")
    rest = {name: value for name, value in schema.items() if name != "x-guidance"}
    options = _whitespace_options(schema.get("x-guidance"))
    translated: dict[str, Any] = _with_ecma_patterns(rest)
    return translated | ({"x-guidance": options} if options else {})


def _with_ecma_patterns(schema: Any) -> Any:
    """Return the schema with translated patterns. Its depth is bounded."""
    if isinstance(schema, list):
        return [_with_ecma_patterns(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {key: _with_ecma_pattern(key, value) for key, value in schema.items()}


def _with_ecma_pattern(key: str, value: Any) -> Any:
    """Return the value of a keyword with translated patterns."""
    if key in _DATA_KEYWORDS:
        return value
    if key == "pattern" and isinstance(value, str):
        return ecma_classes(value)
    if key in _SCHEMAS_BY_NAME and isinstance(value, dict):
        rename = ecma_classes if key == "patternProperties" else str
        return {rename(name): _with_ecma_patterns(item) for name, item in value.items()}
    return _with_ecma_patterns(value)


def _whitespace_options(given: Any) -> dict[str, Any]:
    """Return those options of `x-guidance` that a request may set: whitespace between the parts.

    Raises: GrammarError
    """
    given = given if isinstance(given, dict) else {}
    found = {name: given[name] for name, values in _SEPARATORS.items() if given.get(name) in values}
    if isinstance(given.get("whitespace_flexible"), bool):
        found["whitespace_flexible"] = given["whitespace_flexible"]
    if found.get("whitespace_flexible") is False:
        found["whitespace_pattern"] = None  # the pattern would win
    elif isinstance(given.get("whitespace_pattern"), str):
        check_regex(given["whitespace_pattern"], "whitespace_pattern")
        found["whitespace_pattern"] = given["whitespace_pattern"]
    return found


def _check_keyword(key: str, value: Any) -> None:
    if key in ("$ref", "$dynamicRef", "$recursiveRef") and isinstance(value, str) and value[:1] != "#":
        raise GrammarError(f'the JSON schema refers to another document; {key} must begin with "#"')
    if key in _MINIMUM_SIZES and isinstance(value, int | float) and value > MAX_MINIMUM_SIZE:
        raise GrammarError(f"{key} in the JSON schema is {value!s:.20}; at most {MAX_MINIMUM_SIZE} can be served")
    if key == "pattern" and isinstance(value, str):
        check_regex(value, "pattern in the JSON schema")
    if key == "patternProperties" and isinstance(value, dict):
        for pattern in value:
            check_regex(pattern, "pattern in the JSON schema")


def _check_optional(schema: Any) -> None:
    """Raises: GrammarError, if an object has too many properties that may follow one another in any selection"""
    named = schema.get("properties") if isinstance(schema, dict) else None
    if not isinstance(named, dict) or len(named) <= MAX_OPTIONAL_PROPERTIES:
        return
    required = schema.get("required")
    names = {name for name in required if isinstance(name, str)} if isinstance(required, list) else set()
    if (count := len(named.keys() - names)) > MAX_OPTIONAL_PROPERTIES:
        raise GrammarError(
            f"an object of the JSON schema has {count:,} optional properties, at most {MAX_OPTIONAL_PROPERTIES:,} can "
            "be served; make more of them required"
        )


def _walk(schema: Any) -> Iterator[tuple[str, Any, int, bool]]:
    """Yield every value with its key, its depth, and whether it is data. Not recursive, because depth is unbounded."""
    stack: list[tuple[str, Any, int, bool]] = [("", schema, 0, False)]
    while stack:
        key, value, depth, is_data = stack.pop()
        yield key, value, depth, is_data
        below = is_data or key in _DATA_KEYWORDS
        if isinstance(value, dict):
            stack.extend((name, item, depth + 1, below) for name, item in value.items())
        elif isinstance(value, list):
            stack.extend(("", item, depth + 1, below) for item in value)


def schema_to_grammar(schema: dict[str, Any]) -> str:
    """Return llguidance's grammar for a checked schema. Raises: GrammarError"""
    try:
        options = _OPTIONS | schema.get("x-guidance", {})
        return LLMatcher.grammar_from_json_schema(schema, overrides=options)
    except ValueError:
        raise GrammarError("the JSON schema cannot be used") from None
