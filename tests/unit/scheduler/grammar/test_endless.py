"""Schemas that hold themselves: those that never end are told from those that may."""

from typing import Any

import pytest

from services.scheduler.grammar.endless import is_endless
from services.scheduler.grammar.errors import GrammarError
from services.scheduler.grammar.schema import checked


def needs(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


ME: dict[str, Any] = {"$ref": "#"}
ENDLESS: dict[str, dict[str, Any]] = {
    "itself": needs(a=ME),
    "itself beside others": needs(a={"type": "integer"}, b=ME),
    "nothing but itself": ME,
    "a list of at least one": {"type": "array", "items": ME, "minItems": 1},
    "a first item": {"type": "array", "prefixItems": [ME], "minItems": 1},
    "by way of others": {
        "$ref": "#/$defs/a~1b",
        "$defs": {"a/b": needs(x={"$ref": "#/$defs/c"}), "c": needs(y={"$ref": "#/$defs/a~1b"})},
    },
    "every alternative": {"anyOf": [needs(a=ME), {"type": "array", "items": ME, "minItems": 2}]},
    "a part": {"allOf": [needs(a=ME), {"type": "object"}]},
    "a name without a schema of its own": {
        "type": "object", "required": ["a"], "additionalProperties": ME,
    },
}  # fmt: skip
ENDS: dict[str, dict[str, Any]] = {
    "anything": {},
    "optional": {"type": "object", "properties": {"a": ME}},
    "a list that may be empty": needs(children={"type": "array", "items": ME}),
    "another alternative": {"anyOf": [needs(a=ME), {"type": "null"}]},
    "null instead": {"type": ["object", "null"], "properties": {"a": ME}, "required": ["a"]},
    "a constant": {"type": "object", "const": {}, "properties": {"a": ME}, "required": ["a"]},
    "a reference that leads nowhere": needs(a={"$ref": "#/$defs/none"}),
    "alternatives found late": {
        # `b` is looked at while `c` is, and both have an end by way of `d`
        **needs(b={"$ref": "#/$defs/b"}, c={"$ref": "#/$defs/c"}),
        "$defs": {
            "b": {"anyOf": [{"$ref": "#/$defs/c"}, {"type": "null"}]},
            "c": needs(x={"$ref": "#/$defs/b"}),
        },
    },
}


@pytest.mark.parametrize("name", ENDLESS)
def test_what_must_hold_itself_is_refused(name: str) -> None:
    with pytest.raises(GrammarError, match="must hold itself"):
        checked(ENDLESS[name])


@pytest.mark.parametrize("name", ENDS)
def test_what_may_end_is_not(name: str) -> None:
    assert not is_endless(ENDS[name])


def test_long_chains_neither_recurse_nor_repeat() -> None:
    """Each definition needs the next; the last one ends, or leads back to the first."""
    last = 20_000
    chain = {str(i): needs(a={"$ref": f"#/$defs/{i + 1}"}) for i in range(last)}
    for end, endless in (({"type": "null"}, False), ({"$ref": "#"}, True)):
        assert is_endless({"$ref": "#/$defs/0", "$defs": chain | {str(last): end}}) is endless
