"""Recursive schemas: those without a finite match are refused, the others are not."""

from typing import Any

import pytest

from services.scheduler.grammar.errors import GrammarError
from services.scheduler.grammar.translate.json_schema import check_schema
from services.scheduler.grammar.translate.recursion import has_no_finite_match


def requires(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


ROOT: dict[str, Any] = {"$ref": "#"}
INFINITE: dict[str, dict[str, Any]] = {
    "a required property": requires(a=ROOT),
    "one of two required properties": requires(a={"type": "integer"}, b=ROOT),
    "a reference to the root alone": ROOT,
    "a list with at least one item": {"type": "array", "items": ROOT, "minItems": 1},
    "a first item": {"type": "array", "prefixItems": [ROOT], "minItems": 1},
    "through other definitions": {
        "$ref": "#/$defs/a~1b",
        "$defs": {"a/b": requires(x={"$ref": "#/$defs/c"}), "c": requires(y={"$ref": "#/$defs/a~1b"})},
    },
    "every alternative": {"anyOf": [requires(a=ROOT), {"type": "array", "items": ROOT, "minItems": 2}]},
    "a part of allOf": {"allOf": [requires(a=ROOT), {"type": "object"}]},
    "a required name without a schema of its own": {
        "type": "object", "required": ["a"], "additionalProperties": ROOT,
    },
}  # fmt: skip
FINITE: dict[str, dict[str, Any]] = {
    "anything": {},
    "optional": {"type": "object", "properties": {"a": ROOT}},
    "a list that may be empty": requires(children={"type": "array", "items": ROOT}),
    "another alternative": {"anyOf": [requires(a=ROOT), {"type": "null"}]},
    "null instead": {"type": ["object", "null"], "properties": {"a": ROOT}, "required": ["a"]},
    "a constant": {"type": "object", "const": {}, "properties": {"a": ROOT}, "required": ["a"]},
    "a reference without a target": requires(a={"$ref": "#/$defs/none"}),
    "alternatives found late": {
        # `b` and `c` are open at the same time; both become finite through the alternative of `b`
        **requires(b={"$ref": "#/$defs/b"}, c={"$ref": "#/$defs/c"}),
        "$defs": {"b": {"anyOf": [{"$ref": "#/$defs/c"}, {"type": "null"}]}, "c": requires(x={"$ref": "#/$defs/b"})},
    },
}


@pytest.mark.parametrize("name", INFINITE)
def test_schema_without_a_finite_match_is_refused(name: str) -> None:
    with pytest.raises(GrammarError, match="requires a value of infinite size"):
        check_schema(INFINITE[name])


@pytest.mark.parametrize("name", FINITE)
def test_schema_with_a_finite_match_is_served(name: str) -> None:
    assert not has_no_finite_match(FINITE[name])


def test_long_chain_of_definitions_is_checked_in_one_pass() -> None:
    """Each definition requires the next one; the last one is null or refers to the root."""
    last = 20_000
    chain = {str(i): requires(a={"$ref": f"#/$defs/{i + 1}"}) for i in range(last)}
    for end, is_infinite in (({"type": "null"}, False), ({"$ref": "#"}, True)):
        assert has_no_finite_match({"$ref": "#/$defs/0", "$defs": chain | {str(last): end}}) is is_infinite
